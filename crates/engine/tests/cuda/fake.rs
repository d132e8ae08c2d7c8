//! The fake driver as tests use it: it is the rest of the program, such as the framework that owns the tensors.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::sync::Arc;

use libloading::Library;
use shardfast_transfer::cuda::{CopyStream, Device, Devices, ForeignStream};

/// A driver of this test's own, with a training thread's context and stream on `cuda:0`.
pub(crate) struct Fake {
    library: Library,
    /// The library, copied: what is loaded from another file is another driver.
    place: tempfile::TempDir,
    pub(crate) stream: u64,
}

/// Calls a function of the driver's by name; all of them take integers and return a code.
macro_rules! raw {
    ($fake:expr, $name:literal, $($argument:expr => $type:ty),*) => {{
        // SAFETY: the fake driver exports the function with these types.
        let function = unsafe { $fake.library.get::<extern "C" fn($($type),*) -> u32>($name) }.unwrap();
        function($($argument),*)
    }};
}

#[allow(unsafe_code)] // plays the part of the program that owns the device's memory
impl Fake {
    /// Loads the fake, with random delays of up to `delay_max_us` before each copy.
    pub(crate) fn new(seed: u64, delay_max_us: u64) -> Fake {
        let built = std::env::current_exe().unwrap().parent().unwrap().join("libshardfast_fake_cuda.so");
        let place = tempfile::tempdir().unwrap();
        let copied = place.path().join("libcuda.so.1");
        std::fs::copy(&built, &copied).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        // SAFETY: our own library; loading it runs nothing.
        let library = unsafe { Library::new(&copied) }.unwrap();
        let mut fake = Fake { library, place, stream: 0 };
        let (mut context, mut stream) = (0usize, 0usize);
        assert_eq!(raw!(fake, "cuInit", 0 => u32), 0);
        assert_eq!(raw!(fake, "cuDevicePrimaryCtxRetain", &raw mut context => *mut usize, 0 => i32), 0);
        assert_eq!(raw!(fake, "cuCtxPushCurrent_v2", context => usize), 0);
        assert_eq!(raw!(fake, "cuStreamCreate", &raw mut stream => *mut usize, 1 => u32), 0);
        assert_eq!(raw!(fake, "fakeSeed", seed => u64, delay_max_us => u64), 0);
        fake.stream = stream as u64;
        fake
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.place.path().join("libcuda.so.1")
    }

    pub(crate) fn devices(&self) -> Devices {
        Devices::of(self.path().to_str().unwrap())
    }

    pub(crate) fn device(&self) -> Arc<Device> {
        self.devices().device(0).unwrap()
    }

    /// Copies behind what the training's stream was given until now.
    pub(crate) fn copies(&self, device: &Arc<Device>) -> Arc<CopyStream> {
        // SAFETY: the stream lives as long as the driver.
        unsafe { device.copies_after(self.stream) }.unwrap()
    }

    /// The address of new memory on the device, which holds these bytes.
    pub(crate) fn alloc(&self, bytes: &[u8]) -> usize {
        self.alloc_skewed(bytes, 0)
    }

    /// The same, so many bytes behind an aligned address. What is before it is not allocated.
    pub(crate) fn alloc_skewed(&self, bytes: &[u8], skew: usize) -> usize {
        let (mut address, count) = (0usize, bytes.len());
        let place = &raw mut address;
        assert_eq!(raw!(self, "fakeAllocSkewed", place => *mut usize, count => usize, skew => usize), 0);
        let from = bytes.as_ptr();
        assert_eq!(raw!(self, "fakeWrite", address => usize, from => *const u8, bytes.len() => usize), 0);
        address
    }

    pub(crate) fn free(&self, address: usize) {
        assert_eq!(raw!(self, "fakeFree", address => usize), 0);
    }

    /// Frees memory behind what the training's stream has to do, as frameworks use freed memory again.
    pub(crate) fn free_behind(&self, address: usize) {
        assert_eq!(raw!(self, "fakeFreeBehind", self.stream => u64, address => usize), 0);
    }

    /// Returns the bytes in the device's memory now.
    pub(crate) fn peek(&self, address: usize, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        let to = out.as_mut_ptr();
        assert_eq!(raw!(self, "fakeRead", address => usize, to => *mut u8, bytes => usize), 0);
        out
    }

    /// Gives the training's stream work that takes its time and then writes memory.
    pub(crate) fn kernel(&self, address: usize, bytes: usize, value: u8, takes_us: u64) {
        let stream = self.stream;
        let code = raw!(self, "fakeKernel", stream => u64, address => usize, bytes => usize, value => u8,
            takes_us => u64);
        assert_eq!(code, 0);
    }

    /// Gives the training's stream work that takes its time and then writes these bytes.
    pub(crate) fn update(&self, address: usize, bytes: &[u8], takes_us: u64) {
        let code = raw!(self, "fakeUpdate", self.stream => u64, address => usize, bytes.as_ptr() => *const u8,
            bytes.len() => usize, takes_us => u64);
        assert_eq!(code, 0);
    }

    /// The training's stream.
    pub(crate) fn foreign(&self) -> ForeignStream {
        // SAFETY: the stream lives as long as the driver.
        unsafe { ForeignStream::new(self.stream) }
    }

    /// Keeps the training's stream from going on.
    pub(crate) fn hold(&self) {
        assert_eq!(raw!(self, "fakeHold", self.stream => u64), 0);
    }

    /// Lets it go on.
    pub(crate) fn release(&self) {
        raw!(self, "fakeRelease",);
    }

    /// Waits until the training's stream has nothing left to do.
    pub(crate) fn synchronize(&self) {
        assert_eq!(raw!(self, "cuStreamSynchronize", self.stream => u64), 0);
    }

    /// Lets the `nth` call of a function from now on fail, and every call after it when that loses the device.
    pub(crate) fn fail(&self, name: &str, nth: u64, code: u32, loses_device: bool) {
        let name = CString::new(name).unwrap();
        raw!(self, "fakeFail", name.as_ptr() => *const c_char, nth => u64, code => u32, loses_device => bool);
    }

    /// Makes streams not wait for events from now on.
    pub(crate) fn forget_waits(&self) {
        raw!(self, "fakeForgetWaits", true => bool);
    }

    /// Makes copies to and from any host memory asynchronous from now on.
    pub(crate) fn lock_all(&self) {
        raw!(self, "fakeLockAll", true => bool);
    }

    pub(crate) fn capture(&self, stream: u64, captures: bool) {
        raw!(self, "fakeCapture", stream => u64, captures => bool);
    }

    /// Returns the number of calls of a function.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let (name, mut count) = (CString::new(name).unwrap(), 0u64);
        raw!(self, "fakeCalls", name.as_ptr() => *const c_char, &raw mut count => *mut u64);
        count
    }

    /// Loads a module's text, or says why it cannot.
    pub(crate) fn load(&self, text: &str) -> Result<(), String> {
        let (text, mut module, mut why) = (CString::new(text).unwrap(), 0usize, std::ptr::null());
        let code = raw!(self, "cuModuleLoadData", &raw mut module => *mut usize, text.as_ptr() => *const c_char);
        if code == 0 {
            return Ok(());
        }
        assert_eq!(raw!(self, "cuGetErrorString", code => u32, &raw mut why => *mut *const c_char), 0);
        // SAFETY: the driver gives a text that ends in NUL and is never freed.
        Err(unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
    }

    /// Streams, events, modules, memory, locked ranges and contexts that were not given back.
    pub(crate) fn live(&self) -> u64 {
        let mut count = 0u64;
        raw!(self, "fakeLive", &raw mut count => *mut u64);
        count
    }
}
