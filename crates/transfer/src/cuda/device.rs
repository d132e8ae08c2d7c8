//! Devices, and copy streams that begin after the work of another stream.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::driver::{
    ATTRIBUTE_DEVICE_ORDINAL, ATTRIBUTE_IS_MANAGED, CAPTURE_MODE_RELAXED, CAPTURE_STATUS_NONE, Driver, EVENT_BLOCKING,
    EVENT_BLOCKING_UNTIMED, HOST_REGISTER_PORTABLE, MEMORY_TYPE_UNIFIED, Memcpy2d, STREAM_NON_BLOCKING,
};
use super::rows::Rows;
use crate::error::{Error, Result};
use crate::provider::Fence;

mod digest;

/// The name of the driver's library on every Linux machine that has one.
const LIBRARY: &str = "libcuda.so.1";

/// This machine's devices, each opened on first use, which also loads the driver.
pub struct Devices {
    library: String,
    driver: OnceLock<Result<Arc<Driver>>>,
    open: Mutex<BTreeMap<u32, Arc<Device>>>,
}

impl Default for Devices {
    fn default() -> Devices {
        Devices::of(LIBRARY)
    }
}

impl Devices {
    /// Returns the devices of the driver in that library.
    pub fn of(library: impl Into<String>) -> Devices {
        Devices { library: library.into(), driver: OnceLock::new(), open: Mutex::default() }
    }

    /// Returns the device `cuda:<ordinal>`, as this process counts them.
    ///
    /// # Errors
    /// `Unsupported` without a driver or a device, naming the missing one; `Invalid` when there is no such device;
    /// `Unavailable` when it cannot be used.
    pub fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let driver = self.driver()?;
        let mut open = lock(&self.open);
        if let Some(device) = open.get(&ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(Device::open(driver, ordinal)?);
        open.insert(ordinal, Arc::clone(&device));
        Ok(device)
    }

    /// Returns the number of devices of this process.
    ///
    /// # Errors
    /// `Unsupported` without a driver or a device, naming the missing one; `Unavailable` when the driver fails.
    pub fn count(&self) -> Result<u32> {
        let driver = self.driver()?;
        driver.expect_usable()?;
        driver.device_count()
    }

    fn driver(&self) -> Result<Arc<Driver>> {
        self.driver.get_or_init(|| Driver::load(&self.library)).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context that all libraries of the process share on one device.
struct Context {
    driver: Arc<Driver>,
    ordinal: u32,
    device: c_int,
    handle: usize,
}

impl Context {
    #[allow(unsafe_code)]
    fn retain(driver: Arc<Driver>, ordinal: u32) -> Result<Context> {
        let (mut device, mut handle) = (0, 0);
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::invalid(format!("cuda:{ordinal}: expected a device of this process, found {count}")));
        }
        // SAFETY: a place for one integer; the ordinal is below the count.
        unsafe { driver.cuDeviceGet(&mut device, ordinal as c_int) }?;
        // SAFETY: a place for one handle, and a device that the driver gave; released once, when this is dropped.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut handle, device) }?;
        Ok(Context { driver, ordinal, device, handle })
    }

    /// Makes calls with the context current on this thread, which afterwards is as it was before.
    fn run<T>(&self, calls: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        let entered = self.driver.expect_usable().and_then(|()| Entered::new(self));
        entered
            .and_then(|_entered| calls(&self.driver))
            .map_err(|error| error.within(format_args!("cuda:{}", self.ordinal)))
    }

    #[allow(unsafe_code)]
    fn event(self: &Arc<Context>, flags: c_uint) -> Result<Event> {
        let mut handle = 0;
        // SAFETY: a place for one handle.
        self.run(|driver| unsafe { driver.cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: Arc::clone(self), handle })
    }

    #[allow(unsafe_code)]
    fn stream(self: &Arc<Context>) -> Result<Stream> {
        let mut handle = 0;
        // SAFETY: a place for one handle.
        self.run(|driver| unsafe { driver.cuStreamCreate(&mut handle, STREAM_NON_BLOCKING) })?;
        Ok(Stream { context: Arc::clone(self), handle, event: self.event(EVENT_BLOCKING_UNTIMED)? })
    }
}

impl Context {
    #[allow(unsafe_code)]
    fn expect_not_capturing(&self, stream: ForeignStream) -> Result<()> {
        let mut capturing = CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives, as `ForeignStream::new`'s caller promises; a place for one integer.
        self.run(|driver| unsafe { driver.cuStreamIsCapturing(stream.handle, &mut capturing) })?;
        if capturing == CAPTURE_STATUS_NONE {
            return Ok(());
        }
        Err(Error::invalid("a CUDA graph is being captured: save and load before or after that"))
            .map_err(|error: Error| error.within(format_args!("cuda:{}", self.ordinal)))
    }
}

impl Drop for Context {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.driver.expect_usable().is_ok() {
            // SAFETY: retained once, and everything made in it holds this.
            let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

/// While it lives, the context is current on this thread, and the thread may make any call even while another thread
/// captures a graph: our calls touch no stream that can be captured.
struct Entered<'a> {
    driver: &'a Driver,
    capture_mode: c_uint,
}

impl<'a> Entered<'a> {
    #[allow(unsafe_code)]
    fn new(context: &'a Context) -> Result<Entered<'a>> {
        let driver = &*context.driver;
        // SAFETY: the context is retained.
        unsafe { driver.cuCtxPushCurrent_v2(context.handle) }?;
        let mut entered = Entered { driver, capture_mode: CAPTURE_MODE_RELAXED };
        // SAFETY: a place for one integer, which holds a mode.
        unsafe { driver.cuThreadExchangeStreamCaptureMode(&mut entered.capture_mode) }?;
        Ok(entered)
    }
}

impl Drop for Entered<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let mut context = 0;
        // SAFETY: places for one integer and one handle; the context on top is the one that was pushed.
        unsafe {
            let _ = self.driver.cuThreadExchangeStreamCaptureMode(&mut self.capture_mode);
            let _ = self.driver.cuCtxPopCurrent_v2(&mut context);
        }
    }
}

struct Event {
    context: Arc<Context>,
    handle: usize,
}

impl Drop for Event {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps what streams still wait for.
        let _ = self.context.run(|driver| unsafe { driver.cuEventDestroy_v2(self.handle) });
    }
}

/// A stream of our own, with an event to order it.
struct Stream {
    context: Arc<Context>,
    handle: usize,
    event: Event,
}

impl Drop for Stream {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; every copy into host memory through it was waited for.
        let _ = self.context.run(|driver| unsafe { driver.cuStreamDestroy_v2(self.handle) });
    }
}

/// A stream that is not ours: the training's.
#[derive(Debug, Clone, Copy)]
pub struct ForeignStream {
    handle: usize,
}

impl ForeignStream {
    /// Makes the stream of this `CUstream`, given as a number; 0 is the default one.
    ///
    /// # Safety
    /// It must be 0 or a stream of the device with which the value is used, and live while the value is used.
    #[allow(unsafe_code)] // the one way in for foreign streams
    pub unsafe fn new(stream: u64) -> ForeignStream {
        ForeignStream { handle: stream as usize }
    }
}

/// A moment of a stream's work, whose time the device notes.
pub struct Moment {
    event: Event,
}

impl Moment {
    /// Waits, asleep, until the device is there.
    ///
    /// # Errors
    /// `Unavailable` when the device is lost.
    #[allow(unsafe_code)]
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        self.event.context.run(|driver| unsafe { driver.cuEventSynchronize(self.event.handle) })
    }

    /// Milliseconds from an earlier moment of any stream of the device to this one; `None` before the device is there.
    #[allow(unsafe_code)]
    pub fn ms_since(&self, earlier: &Moment) -> Option<f64> {
        let mut ms = 0.0;
        let context = &self.event.context;
        // SAFETY: a place for one number; both events live and were recorded.
        let known = context
            .run(|driver| unsafe { driver.cuEventElapsedTime(&mut ms, earlier.event.handle, self.event.handle) });
        known.is_ok().then_some(f64::from(ms))
    }
}

/// One device, for copies between its memory and the host's.
pub struct Device {
    context: Arc<Context>,
    /// Idle streams. There are as many as saves and loads were ever in flight at once.
    idle: Mutex<Vec<Stream>>,
    digests: digest::Kept,
}

impl Device {
    fn open(driver: Arc<Driver>, ordinal: u32) -> Result<Device> {
        driver.expect_usable()?;
        let context = Arc::new(Context::retain(driver, ordinal)?);
        Ok(Device { context, idle: Mutex::default(), digests: digest::Kept::default() })
    }

    /// Returns the device's number, as this process counts them.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    /// Returns a stream for the copies of one save or load. They begin after all work that `stream` (a `CUstream` of
    /// this device as a number, 0 for the default one) has until now. Does not block.
    ///
    /// # Errors
    /// `Invalid` while `stream` captures a graph, whose results are not there yet. `Unavailable` when the device is
    /// lost.
    ///
    /// # Safety
    /// `stream` must be 0 or a stream of this device that has not been destroyed.
    #[allow(unsafe_code)] // the one way in for foreign streams
    pub unsafe fn copies_after(self: &Arc<Device>, stream: u64) -> Result<Arc<CopyStream>> {
        // SAFETY: the caller's promise.
        self.copies_behind(unsafe { ForeignStream::new(stream) })
    }

    /// Returns a stream like [`Device::copies_after`], for a `stream` that lives.
    pub(crate) fn copies_behind(self: &Arc<Device>, stream: ForeignStream) -> Result<Arc<CopyStream>> {
        let idle = lock(&self.idle).pop();
        let own = idle.map_or_else(|| self.context.stream(), Ok)?;
        let copies = CopyStream { device: Arc::clone(self), own: Some(own), events: Mutex::default() };
        copies.follow(stream)?;
        Ok(Arc::new(copies))
    }

    /// Returns a moment of the work of `stream`, whose time the device records when it gets there.
    ///
    /// # Errors
    /// As [`CopyStream::follow`].
    #[allow(unsafe_code)]
    pub fn moment(&self, stream: ForeignStream) -> Result<Moment> {
        let event = self.context.event(EVENT_BLOCKING)?;
        self.context.expect_not_capturing(stream)?;
        // SAFETY: both live, as `ForeignStream::new`'s caller promises of the stream.
        self.context.run(|driver| unsafe { driver.cuEventRecord(event.handle, stream.handle) })?;
        Ok(Moment { event })
    }

    /// Locks memory into place, so that devices copy from and to it at full rate and without waiting.
    ///
    /// # Errors
    /// The system's refusal. A save continues without page-locked memory, with slower copies.
    ///
    /// # Safety
    /// The memory must stay mapped until the lock is dropped.
    #[allow(unsafe_code)]
    pub unsafe fn page_lock(&self, memory: NonNull<[u8]>) -> Result<PageLock> {
        let address = memory.as_ptr().addr();
        // SAFETY: the caller keeps the memory mapped until it is unregistered.
        self.context
            .run(|driver| unsafe { driver.cuMemHostRegister_v2(address, memory.len(), HOST_REGISTER_PORTABLE) })
            .map_err(|error| error.within(format_args!("page-locking {} bytes", memory.len())))?;
        Ok(PageLock { context: Arc::clone(&self.context), address })
    }

    /// Returns an attribute of an address; `None` if the driver does not know the address.
    #[allow(unsafe_code)]
    pub(crate) fn pointer_attribute(&self, attribute: c_uint, address: usize) -> Option<c_uint> {
        let mut value = 0;
        // SAFETY: a place for one integer, which is what the attributes asked for are; any address may be asked about.
        let known = self.context.run(|driver| unsafe { driver.cuPointerGetAttribute(&mut value, attribute, address) });
        known.is_ok().then_some(value)
    }

    /// Checks that an address is in this device's memory, and not in any other.
    ///
    /// # Errors
    /// `Invalid` if it is another device's, or one that the driver does not know.
    pub(crate) fn expect_own(&self, address: usize) -> Result<()> {
        let own = self.ordinal();
        match self.pointer_attribute(ATTRIBUTE_DEVICE_ORDINAL, address) {
            Some(ordinal) if ordinal == own => Ok(()),
            // Managed memory belongs to every device, and the driver copies it in the stream's order as well.
            Some(_) if self.pointer_attribute(ATTRIBUTE_IS_MANAGED, address) == Some(1) => Ok(()),
            Some(other) => Err(Error::invalid(format!(
                "cuda:{own}: expected memory of this device at {address:#x}, found memory of cuda:{other}"
            ))),
            None => Err(Error::invalid(format!(
                "cuda:{own}: expected memory of this device at {address:#x}, found an address that the driver does \
                 not know: it was freed, or is the host's"
            ))),
        }
    }
}

/// Memory that is page-locked until this is dropped.
pub struct PageLock {
    context: Arc<Context>,
    address: usize,
}

impl Drop for PageLock {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: registered once, unregistered once.
        let _ = self.context.run(|driver| unsafe { driver.cuMemHostUnregister(self.address) });
    }
}

/// The copies of one save or load on one device, ordered after the moment at which it was made. As a [`Fence`] it waits
/// for the copies begun so far.
pub struct CopyStream {
    device: Arc<Device>,
    /// Returned when this is dropped.
    own: Option<Stream>,
    /// Events for fences, as many as threads ever waited at once.
    events: Mutex<Vec<Event>>,
}

impl CopyStream {
    /// Returns the device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn stream(&self) -> usize {
        self.own.as_ref().map_or(0, |own| own.handle)
    }

    /// Has later copies begin after all work that `stream` has until now. Does not block.
    ///
    /// # Errors
    /// As [`Device::copies_after`].
    pub fn follow(&self, stream: ForeignStream) -> Result<()> {
        self.order(stream, stream.handle, self.stream())
    }

    /// Has the work that `stream` is given from now on begin after the copies begun so far. Does not block.
    ///
    /// # Errors
    /// As [`Device::copies_after`].
    pub fn precede(&self, stream: ForeignStream) -> Result<()> {
        self.order(stream, self.stream(), stream.handle)
    }

    /// Orders two streams: work submitted to `then` from now on begins after all work submitted to `first`. One of them
    /// is `foreign`, the other one ours.
    #[allow(unsafe_code)]
    fn order(&self, foreign: ForeignStream, first: usize, then: usize) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        self.device.context.expect_not_capturing(foreign)?;
        // SAFETY: the other stream lives, as `ForeignStream::new`'s caller promises, and ours does too.
        self.device.context.run(|driver| unsafe {
            driver.cuEventRecord(own.event.handle, first)?;
            driver.cuStreamWaitEvent(then, own.event.handle, 0)
        })
    }

    /// Returns this stream, by which others can be ordered while this lives.
    pub fn as_foreign(&self) -> ForeignStream {
        ForeignStream { handle: self.stream() }
    }

    /// Begins copies: `copies` gets a function that begins one.
    ///
    /// # Safety
    /// Until this stream, as a fence, has been waited for: the sources must not change, no other code may use the
    /// destinations, and both must stay allocated.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn begin(
        &self,
        copies: impl FnOnce(&mut dyn FnMut(Rows) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let stream = self.stream();
        self.device.context.run(|driver| {
            copies(&mut |rows| {
                if rows.height == 1 {
                    // SAFETY: the caller's promise; the stream is ours and lives.
                    return unsafe { driver.cuMemcpyAsync(rows.dst, rows.src, rows.width_bytes, stream) };
                }
                let pitched = Memcpy2d {
                    src_memory_type: MEMORY_TYPE_UNIFIED,
                    src_device: rows.src,
                    src_pitch_bytes: rows.src_pitch_bytes,
                    dst_memory_type: MEMORY_TYPE_UNIFIED,
                    dst_device: rows.dst,
                    dst_pitch_bytes: rows.dst_pitch_bytes,
                    width_bytes: rows.width_bytes,
                    height: rows.height,
                    ..Memcpy2d::default()
                };
                // SAFETY: the caller's promise; the stream is ours and lives; the driver reads `pitched` at once.
                unsafe { driver.cuMemcpy2DAsync_v2(&pitched, stream) }
            })
        })
    }

    #[allow(unsafe_code)]
    fn wait_behind_an_event(&self) -> Result<()> {
        let idle = lock(&self.events).pop();
        let event = idle.map_or_else(|| self.device.context.event(EVENT_BLOCKING_UNTIMED), Ok)?;
        // SAFETY: both live.
        self.device.context.run(|driver| unsafe {
            driver.cuEventRecord(event.handle, self.stream())?;
            driver.cuEventSynchronize(event.handle)
        })?;
        lock(&self.events).push(event);
        Ok(())
    }
}

impl Fence for CopyStream {
    #[allow(unsafe_code)]
    fn wait(&self) -> Result<()> {
        self.wait_behind_an_event().inspect_err(|_| {
            // Copies may be under way although their event failed. When this fails too, the device is lost.
            // SAFETY: the stream is ours and lives.
            let _ = self.device.context.run(|driver| unsafe { driver.cuStreamSynchronize(self.stream()) });
        })
    }

    #[allow(unsafe_code)]
    fn mark(self: Arc<Self>) -> Result<Arc<dyn Fence>> {
        let idle = lock(&self.events).pop();
        let event = idle.map_or_else(|| self.device.context.event(EVENT_BLOCKING_UNTIMED), Ok)?;
        // SAFETY: both live.
        self.device.context.run(|driver| unsafe { driver.cuEventRecord(event.handle, self.stream()) })?;
        Ok(Arc::new(Mark { of: self, event: Some(event) }))
    }
}

/// The copies that a [`CopyStream`] had begun at a moment.
struct Mark {
    of: Arc<CopyStream>,
    /// Returned when this is dropped.
    event: Option<Event>,
}

impl Fence for Mark {
    #[allow(unsafe_code)]
    fn wait(&self) -> Result<()> {
        let Some(event) = &self.event else { return Ok(()) };
        let context = &self.of.device.context;
        // SAFETY: the event lives.
        context.run(|driver| unsafe { driver.cuEventSynchronize(event.handle) }).inspect_err(|_| {
            // As in `CopyStream::wait`.
            // SAFETY: the stream is ours and lives.
            let _ = context.run(|driver| unsafe { driver.cuStreamSynchronize(self.of.stream()) });
        })
    }

    fn mark(self: Arc<Self>) -> Result<Arc<dyn Fence>> {
        Ok(self)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.of.events).extend(self.event.take());
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        lock(&self.device.idle).extend(self.own.take());
    }
}
