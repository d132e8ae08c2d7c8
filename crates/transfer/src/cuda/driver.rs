//! The functions of the CUDA driver that copies and digests need, found in the machine's own library when the program
//! runs.
//!
//! Signatures and numbers are those of `cuda.h` since version 12.0. Handles are the driver's pointers as integers: they
//! belong to no thread.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use libloading::Library;

use crate::error::{Error, Kind, Result};

/// `CUresult`. A number, since a driver that is newer than this program returns numbers that it does not know.
pub(crate) type Code = c_uint;

/// `CU_STREAM_NON_BLOCKING`: no order between this stream and the default one.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;

/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: a waiting thread sleeps, and the device records no time.
pub(crate) const EVENT_BLOCKING_UNTIMED: c_uint = 1 | 2;

/// `CU_EVENT_BLOCKING_SYNC`: a waiting thread sleeps, and the device records the time.
pub(crate) const EVENT_BLOCKING: c_uint = 1;

/// Value of `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_MODE_RELAXED: c_uint = 2;

/// Value of `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const CAPTURE_STATUS_NONE: c_uint = 0;

/// `CU_MEMORYTYPE_UNIFIED`: the driver finds out from the address where memory lies.
pub(crate) const MEMORY_TYPE_UNIFIED: c_uint = 4;

/// `CU_MEMHOSTREGISTER_PORTABLE`: page-locked for every device.
pub(crate) const HOST_REGISTER_PORTABLE: c_uint = 1;

/// Value of `CU_MEMORYTYPE_HOST`: the driver's type of page-locked host memory; it does not know other host memory.
pub(crate) const MEMORY_TYPE_HOST: c_uint = 1;

/// Value of `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
pub(crate) const ATTRIBUTE_MEMORY_TYPE: c_uint = 2;

/// Value of `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
pub(crate) const ATTRIBUTE_IS_MANAGED: c_uint = 8;

/// Value of `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub(crate) const ATTRIBUTE_DEVICE_ORDINAL: c_uint = 9;

/// `CUDA_MEMCPY2D_v2`: rows of bytes, each a pitch behind the one before.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Memcpy2d {
    pub(crate) src_x_bytes: usize,
    pub(crate) src_y: usize,
    pub(crate) src_memory_type: c_uint,
    pub(crate) src_host: usize,
    pub(crate) src_device: usize,
    pub(crate) src_array: usize,
    pub(crate) src_pitch_bytes: usize,
    pub(crate) dst_x_bytes: usize,
    pub(crate) dst_y: usize,
    pub(crate) dst_memory_type: c_uint,
    pub(crate) dst_host: usize,
    pub(crate) dst_device: usize,
    pub(crate) dst_array: usize,
    pub(crate) dst_pitch_bytes: usize,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
}

// SAFETY: to be called with a place for one address.
type ErrorText = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;

/// The library and its functions. Each fails with the driver's error; see [`Driver::failure`] for the kinds.
macro_rules! driver {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The CUDA driver of this machine.
        #[allow(non_snake_case)]
        pub(crate) struct Driver {
            _library: ManuallyDrop<Library>,
            /// The process that loaded it: the driver works in no other.
            process: u32,
            error_name: ErrorText,
            error_string: ErrorText,
            // SAFETY: to be called as `cuda.h` asks for, which the methods below hand on.
            $($name: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        #[allow(non_snake_case, unsafe_code, clippy::too_many_arguments)]
        impl Driver {
            /// Finds the functions in a library.
            fn find(library: Library, path: &str) -> Result<Driver> {
                let absent = |error: libloading::Error| absent(path, &error);
                // SAFETY: `cuda.h` declares the symbols with these types, integers for pointers, which are passed
                // alike; the library is never unloaded, so the addresses stay good.
                unsafe {
                    let error_name = *library.get("cuGetErrorName").map_err(absent)?;
                    let error_string = *library.get("cuGetErrorString").map_err(absent)?;
                    $(let $name = *library.get(stringify!($name)).map_err(absent)?;)*
                    // The driver runs threads of its own: its code must never go away.
                    let _library = ManuallyDrop::new(library);
                    Ok(Driver { _library, process: std::process::id(), error_name, error_string, $($name,)* })
                }
            }

            $(
                /// Calls the driver's function of that name.
                ///
                /// # Safety
                /// As `cuda.h` demands: handles that live, memory that may be read or written as the call does.
                pub(crate) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: the caller's promise; the address is that of a function of these types.
                    let code = unsafe { (self.$name)($($argument),*) };
                    if code == 0 { Ok(()) } else { Err(self.failure(stringify!($name), code)) }
                }
            )*
        }
    };
}

driver! {
    cuInit(flags: c_uint);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxPushCurrent_v2(context: usize);
    cuCtxPopCurrent_v2(context: *mut usize);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cuStreamCreate(stream: *mut usize, flags: c_uint);
    cuStreamDestroy_v2(stream: usize);
    cuStreamSynchronize(stream: usize);
    cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint);
    cuStreamIsCapturing(stream: usize, status: *mut c_uint);
    cuEventCreate(event: *mut usize, flags: c_uint);
    cuEventDestroy_v2(event: usize);
    cuEventRecord(event: usize, stream: usize);
    cuEventSynchronize(event: usize);
    cuEventElapsedTime(ms: *mut f32, from: usize, to: usize);
    cuMemcpyAsync(dst: usize, src: usize, bytes: usize, stream: usize);
    cuMemcpy2DAsync_v2(rows: *const Memcpy2d, stream: usize);
    cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: usize);
    cuPointerGetAttribute(value: *mut c_uint, attribute: c_uint, address: usize);
    cuModuleLoadData(module: *mut usize, image: *const c_char);
    cuModuleUnload(module: usize);
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    cuMemAlloc_v2(address: *mut usize, bytes: usize);
    cuMemFree_v2(address: usize);
    cuMemsetD8Async(address: usize, value: c_uchar, bytes: usize, stream: usize);
    cuLaunchKernel(function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: usize, arguments: *mut *mut c_void, extra: *mut *mut c_void);
}

fn absent(path: &str, error: &libloading::Error) -> Error {
    let why = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    let message = format!("CUDA tensors need the driver of NVIDIA's devices, version 12.0 or later: {path}: {why}");
    Error::new(Kind::Unsupported, message)
}

impl Driver {
    /// Loads the driver from the library at `path` (or of that name) and starts it.
    ///
    /// # Errors
    /// `Unsupported` when it is not there, lacks a function, or finds no device.
    #[allow(unsafe_code)]
    pub(crate) fn load(path: &str) -> Result<Arc<Driver>> {
        // SAFETY: the caller chose the library and trusts its initialisers; the system's own driver has harmless ones.
        let library = unsafe { Library::new(path) }.map_err(|error| absent(path, &error))?;
        let driver = Driver::find(library, path)?;
        // SAFETY: flags must be 0; it may be called any number of times.
        unsafe { driver.cuInit(0) }.map_err(|error| error.within(path))?;
        Ok(Arc::new(driver))
    }

    /// Returns the number of devices of this process.
    #[allow(unsafe_code)]
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a place for one integer.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Refuses a fork of the process that loaded the driver.
    pub(crate) fn expect_usable(&self) -> Result<()> {
        let process = std::process::id();
        if process == self.process {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "CUDA was started in process {} and cannot be used in its fork {process}: start workers by spawn",
            self.process
        )))
    }

    /// Returns the error of a failed call, by the caller's reaction: `Exhausted` for a lack of memory, `Unsupported`
    /// for a call that the machine does not permit or offer, `Invalid` for a wrong argument or a graph being captured;
    /// else `Unavailable`: the device cannot be used now, and mostly never again by this process.
    fn failure(&self, call: &str, code: Code) -> Error {
        let kind = match code {
            1 | 101 | 900..=908 => Kind::Invalid,
            2 => Kind::Exhausted,
            // 209, 218, 221..=223: it cannot compile our kernel for its device.
            34 | 36 | 100 | 209 | 218 | 221..=223 | 800 | 801 | 803 | 804 => Kind::Unsupported,
            712 => Kind::Conflict,
            _ => Kind::Unavailable,
        };
        let (name, text) = (word(self.error_name, code), word(self.error_string, code));
        let name = name.unwrap_or_else(|| "an error that this driver does not name".to_owned());
        let text = text.map_or_else(String::new, |text| format!(": {text}"));
        Error::new(kind, format!("{call} failed with {name} ({code}){text}"))
    }
}

#[allow(unsafe_code)]
fn word(of: ErrorText, code: Code) -> Option<String> {
    let mut word = std::ptr::null();
    // SAFETY: a place for one address.
    let found = unsafe { of(code, &mut word) } == 0 && !word.is_null();
    // SAFETY: the driver gives a text that ends in NUL and is never freed.
    found.then(|| unsafe { CStr::from_ptr(word) }.to_string_lossy().into_owned())
}
