//! A CUDA driver without a device, for tests: exactly the functions that the engine uses, with the behaviour that makes
//! mistakes visible.
//!
//! - A stream is a queue that a thread of its own works off, with random delays; copies to and from page-locked memory
//!   are asynchronous, all others return when they are done.
//! - Device memory lies at addresses that no program can touch. Copies outside of an allocation, from freed memory or
//!   into memory that is not locked any more are errors, as on a device.
//! - What a copy will write is rubbish from the moment at which it was asked for, and so is new memory.
//! - Kernels are PTX texts, and run as such.
//! - `fake…` functions are the rest of the world: they allocate, run "kernels", and let calls fail.
//!
//! Each copy of the library file that a process loads is a driver of its own.

mod answer;
mod kernel;
mod memory;
mod ptx;
mod queue;
mod state;
mod stream;

use std::ffi::{CStr, c_char};

use answer::Code;
use state::{State, call, current, state};

/// Devices that there are.
const DEVICES: i32 = 2;

macro_rules! exports {
    ($($name:ident($($argument:ident: $type:ty),*) = $body:expr;)*) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`; addresses are integers.")]
        #[allow(unsafe_code, non_snake_case, clippy::too_many_arguments)]
        // SAFETY: the symbol is the driver's, and nothing links this library beside it.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> u32 {
            call(stringify!($name), || $body)
        }
    )*};
}

exports! {
    cuInit(flags: u32) = state().init(flags);
    cuGetErrorName(code: Code, name: usize) = answer::error_name(code, name);
    cuGetErrorString(code: Code, text: usize) = answer::error_text(code, text);
    cuDeviceGetCount(count: usize) = answer::put(count, DEVICES);
    cuDeviceGet(device: usize, ordinal: i32) = answer::put(device, ordinal);
    cuDevicePrimaryCtxRetain(context: usize, device: i32) = state().retain(context, device);
    cuDevicePrimaryCtxRelease_v2(device: i32) = state().release(device);
    cuCtxPushCurrent_v2(context: usize) = state::push_context(context);
    cuCtxPopCurrent_v2(context: usize) = state::pop_context(context);
    cuThreadExchangeStreamCaptureMode(mode: usize) = state::exchange_capture_mode(mode);
    cuStreamCreate(handle: usize, _flags: u32) = stream::create(handle);
    cuStreamDestroy_v2(stream: usize) = stream::destroy(stream);
    cuStreamSynchronize(stream: usize) = stream::synchronize(stream);
    cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) = stream::wait_event(stream, event);
    cuStreamIsCapturing(stream: usize, status: usize) = answer::put(status, u32::from(state().is_capturing(stream)));
    cuEventCreate(handle: usize, _flags: u32) = stream::create_event(handle);
    cuEventDestroy_v2(event: usize) = stream::destroy_event(event);
    cuEventRecord(event: usize, stream: usize) = stream::record(event, stream);
    cuEventSynchronize(event: usize) = stream::synchronize_event(event);
    cuEventElapsedTime(ms: usize, from: usize, to: usize) = stream::elapsed(ms, from, to);
    cuMemcpyAsync(dst: usize, src: usize, bytes: usize, stream: usize) =
        stream::copy(memory::Copy::flat(dst, src, bytes), stream);
    cuMemcpy2DAsync_v2(rows: usize, stream: usize) = stream::copy(memory::Copy::pitched(rows)?, stream);
    cuMemHostRegister_v2(address: usize, bytes: usize, _flags: u32) = state().memory.register(address, bytes);
    cuMemHostUnregister(address: usize) = State::unregister(address);
    cuPointerGetAttribute(value: usize, attribute: u32, address: usize) =
        state().memory.attribute(value, attribute, address);
    cuModuleLoadData(module: usize, image: usize) = kernel::load(module, &text(image));
    cuModuleUnload(module: usize) = kernel::unload(module);
    cuModuleGetFunction(function: usize, module: usize, name: usize) = kernel::function(function, module, &text(name));
    cuMemAlloc_v2(address: usize, bytes: usize) = answer::put(address, state().memory.give(bytes, current()?));
    cuMemFree_v2(address: usize) = state().memory.take_back(address);
    cuMemsetD8Async(address: usize, value: u8, bytes: usize, stream: usize) =
        stream::set(address, value, bytes, stream);
    cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared_bytes: u32, stream: usize, arguments: usize, extra: usize) = {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        kernel::launch(function, &kernel::Launch { grid, block, shared_bytes, arguments, extra }, stream)
    };

    fakeAlloc(address: usize, bytes: usize) = answer::put(address, state().memory.allocate(bytes, 0, current()?));
    fakeAllocSkewed(address: usize, bytes: usize, skew: usize) =
        answer::put(address, state().memory.allocate(bytes, skew, current()?));
    fakeFree(address: usize) = state().memory.free(address);
    fakeFreeBehind(stream: usize, address: usize) = stream::free(stream, address);
    fakeWrite(address: usize, from: usize, bytes: usize) = state().memory.write(address, from, bytes);
    fakeRead(address: usize, to: usize, bytes: usize) = state().memory.read(address, to, bytes);
    fakeKernel(stream: usize, address: usize, bytes: usize, value: u8, takes_us: u64) =
        stream::kernel(stream, address, bytes, value, takes_us);
    fakeUpdate(stream: usize, address: usize, from: usize, bytes: usize, takes_us: u64) =
        stream::update(stream, address, memory::copied(from, bytes), takes_us);
    fakeHold(stream: usize) = stream::hold(stream);
    fakeRelease() = state().release_streams();
    fakeSeed(seed: u64, delay_max_us: u64) = state().seed(seed, delay_max_us);
    fakeFail(name: usize, nth: u64, code: Code, loses_device: bool) =
        state().fail(text(name), nth, code, loses_device);
    fakeForgetWaits(forgets: bool) = state().forget_waits(forgets);
    fakeLockAll(locks: bool) = state().memory.lock_all(locks);
    fakeCapture(stream: usize, captures: bool) = state().capture(stream, captures);
    fakeCalls(name: usize, count: usize) = answer::put(count, state().calls(&text(name)));
    fakeLive(handles: usize) = answer::put(handles, state().live());
}

#[allow(unsafe_code)]
fn text(address: usize) -> String {
    // SAFETY: tests give the address of a text that ends in NUL.
    unsafe { CStr::from_ptr(address as *const c_char) }.to_string_lossy().into_owned()
}
