//! Digests of runs of a device's memory, computed by a kernel of ours where the runs are.
//!
//! One launch serves many runs. Their addresses and lengths, and then their digests, pass through a slot of page-locked
//! staging memory and a buffer on the device. All of it is asynchronous, on the stream of the copies.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, OnceLock};

use super::super::driver::{ATTRIBUTE_MEMORY_TYPE, EVENT_BLOCKING_UNTIMED, MEMORY_TYPE_HOST};
use super::{Context, CopyStream, Device, Event, Moment, lock};
use crate::digest::{Digester, Digests, RUNS_MAX};
use crate::error::{Error, Kind, Result};
use crate::staging::{SLOT_BYTES, Slot};

/// The kernel's source, which the driver compiles for its device. It ends in NUL, as the driver asks.
const SOURCE: &str = concat!(include_str!("digest.ptx"), "\0");

/// The kernel's name in it.
const NAME: &CStr = c"shardfast_digest";

/// Threads of a block. Enough of them run at once on every device, since the kernel needs few registers.
const THREADS: u32 = 256;

/// Blocks that share a run: a run of 1 MiB is then 128 words for each thread.
const PARTS: u32 = 4;

/// An address and a length.
const RUN_BYTES: usize = 16;
const SUM_BYTES: usize = 8;

/// State that a device keeps for digests.
#[derive(Default)]
pub(super) struct Kept {
    kernel: Mutex<Option<Arc<Kernel>>>,
    /// Idle buffers: as many as digests were ever in flight at once. None is freed before the device is, since the
    /// driver may wait for the device's work then.
    buffers: Mutex<Vec<Arc<Buffer>>>,
}

/// The kernel, compiled for one device.
struct Kernel {
    context: Arc<Context>,
    module: usize,
    function: usize,
}

impl Kernel {
    #[allow(unsafe_code)]
    fn load(context: &Arc<Context>) -> Result<Kernel> {
        let (mut module, mut function) = (0, 0);
        // SAFETY: a place for one handle, and a text that ends in NUL.
        let load = context.run(|driver| unsafe { driver.cuModuleLoadData(&mut module, SOURCE.as_ptr().cast()) });
        load.map_err(|error| error.within("loading the kernel for digests"))?;
        let mut kernel = Kernel { context: Arc::clone(context), module, function };
        let name: *const c_char = NAME.as_ptr();
        // SAFETY: a place for one handle, a module that was loaded, a text that ends in NUL.
        context
            .run(|driver| unsafe { driver.cuModuleGetFunction(&mut function, module, name) })
            .map_err(|error| error.within("loading the kernel for digests"))?;
        kernel.function = function;
        Ok(kernel)
    }
}

impl Drop for Kernel {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; every launch of it was waited for.
        let _ = self.context.run(|driver| unsafe { driver.cuModuleUnload(self.module) });
    }
}

/// Memory on the device for as many runs and digests as a slot holds.
struct Buffer {
    context: Arc<Context>,
    address: usize,
}

impl Buffer {
    #[allow(unsafe_code)]
    fn new(context: &Arc<Context>) -> Result<Buffer> {
        let mut address = 0;
        // SAFETY: a place for one address.
        context
            .run(|driver| unsafe { driver.cuMemAlloc_v2(&mut address, SLOT_BYTES) })
            .map_err(|error| error.within(format_args!("allocating {SLOT_BYTES} bytes for digests")))?;
        Ok(Buffer { context: Arc::clone(context), address })
    }
}

impl Drop for Buffer {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; every use of it was waited for.
        let _ = self.context.run(|driver| unsafe { driver.cuMemFree_v2(self.address) });
    }
}

impl Device {
    /// Loads the kernel for digests and allocates a buffer for it, if that was not done yet. Call it before the first
    /// [`Digester::digests`] where that must not block: while the driver loads a kernel, it may wait for work that
    /// the device has.
    ///
    /// # Errors
    /// `Unsupported` when the driver cannot compile the kernel for this device, `Exhausted` without memory for it,
    /// `Unavailable` when the device is lost. A later call tries again.
    pub fn prepare_digests(&self) -> Result<()> {
        self.kernel()?;
        let buffer = self.buffer()?;
        lock(&self.digests.buffers).push(buffer);
        Ok(())
    }

    fn kernel(&self) -> Result<Arc<Kernel>> {
        let mut kept = lock(&self.digests.kernel);
        if let Some(kernel) = &*kept {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(Kernel::load(&self.context)?);
        *kept = Some(Arc::clone(&kernel));
        Ok(kernel)
    }

    fn buffer(&self) -> Result<Arc<Buffer>> {
        let idle = lock(&self.digests.buffers).pop();
        idle.map_or_else(|| Buffer::new(&self.context).map(Arc::new), Ok)
    }
}

impl Digester for CopyStream {
    #[allow(unsafe_code)]
    // SAFETY: as the trait asks of its callers; nothing more is needed.
    unsafe fn digests(self: Arc<CopyStream>, runs: &[(usize, usize)], mut scratch: Slot) -> Result<Arc<dyn Digests>> {
        let ordinal = self.device.ordinal();
        if runs.len() > RUNS_MAX {
            return Err(Error::invalid(format!(
                "cuda:{ordinal}: expected at most {RUNS_MAX} runs for one call of digests, found {}: use several calls",
                runs.len()
            )));
        }
        if self.device.pointer_attribute(ATTRIBUTE_MEMORY_TYPE, scratch.as_ptr().addr()) != Some(MEMORY_TYPE_HOST) {
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "cuda:{ordinal}: expected page-locked staging memory for digests, found memory that is not: \
                     raise the limit on locked memory"
                ),
            ));
        }
        for &(address, bytes) in runs.iter().filter(|(_, bytes)| *bytes > 0) {
            let last = address.checked_add(bytes - 1).ok_or_else(|| {
                Error::invalid(format!("cuda:{ordinal}: expected memory, found {bytes} bytes at {address:#x}"))
            })?;
            self.device.expect_own(address)?;
            self.device.expect_own(last)?;
        }
        for (place, (address, bytes)) in scratch.chunks_exact_mut(RUN_BYTES).zip(runs) {
            place[..8].copy_from_slice(&(*address as u64).to_le_bytes());
            place[8..].copy_from_slice(&(*bytes as u64).to_le_bytes());
        }
        let (kernel, event) = (self.device.kernel()?, self.device.context.event(EVENT_BLOCKING_UNTIMED)?);
        let begun = self.device.moment(self.as_foreign())?;
        let buffer = self.device.buffer()?;
        let (runs, found, stream) = (runs.len(), OnceLock::new(), self);
        let mut digests = UnderWay { stream, kernel, runs, scratch, event, buffer, found, begun, ended: None };
        // SAFETY: the caller's promise.
        unsafe { digests.begin() }?;
        digests.ended = digests.stream.device.moment(digests.stream.as_foreign()).ok();
        Ok(Arc::new(digests))
    }
}

/// Digests of runs, on their way.
struct UnderWay {
    stream: Arc<CopyStream>,
    kernel: Arc<Kernel>,
    /// Number of runs.
    runs: usize,
    /// The runs, then their digests. The device uses it until it was waited for.
    scratch: Slot,
    /// Recorded behind the last copy.
    event: Event,
    /// Given back when this is dropped.
    buffer: Arc<Buffer>,
    found: OnceLock<Result<Vec<u64>>>,
    /// The time that it takes, for reports.
    begun: Moment,
    ended: Option<Moment>,
}

impl UnderWay {
    /// Gives the stream all that there is to do.
    ///
    /// # Safety
    /// The runs in `scratch` must stay allocated until this was waited for.
    #[allow(unsafe_code)]
    unsafe fn begin(&mut self) -> Result<()> {
        let (runs_bytes, sums_bytes) = (self.runs * RUN_BYTES, self.runs * SUM_BYTES);
        let (mut runs, mut sums) = (self.buffer.address, self.buffer.address + runs_bytes);
        let host = self.scratch.as_mut_ptr().addr();
        let (stream, function, event) = (self.stream.stream(), self.kernel.function, self.event.handle);
        let begun = self.stream.device.context.run(|driver| {
            if self.runs == 0 {
                // SAFETY: the event and the stream live.
                return unsafe { driver.cuEventRecord(event, stream) };
            }
            let mut arguments: [*mut c_void; 2] = [(&raw mut runs).cast(), (&raw mut sums).cast()];
            let (grid, arguments) = (self.runs as u32, arguments.as_mut_ptr());
            let extra = std::ptr::null_mut();
            // SAFETY: the buffer and the slot have room for all runs and sums, and are not used otherwise until the
            // event was waited for; the kernel takes these two arguments, which the driver copies at once, and reads
            // the runs alone, which the caller keeps allocated; all handles live.
            unsafe {
                driver.cuMemcpyAsync(runs, host, runs_bytes, stream)?;
                driver.cuMemsetD8Async(sums, 0, sums_bytes, stream)?;
                driver.cuLaunchKernel(function, grid, PARTS, 1, THREADS, 1, 1, 0, stream, arguments, extra)?;
                driver.cuMemcpyAsync(host + runs_bytes, sums, sums_bytes, stream)?;
                driver.cuEventRecord(event, stream)
            }
        });
        begun.inspect_err(|error| {
            self.synchronize();
            let _ = self.found.set(Err(error.clone()));
        })
    }

    #[allow(unsafe_code)]
    fn find(&self) -> Result<Vec<u64>> {
        // SAFETY: the event lives.
        let waited = self.stream.device.context.run(|driver| unsafe { driver.cuEventSynchronize(self.event.handle) });
        waited.inspect_err(|_| self.synchronize())?;
        let (sums, _) = self.scratch[self.runs * RUN_BYTES..].as_chunks();
        Ok(sums.iter().take(self.runs).map(|sum| u64::from_le_bytes(*sum)).collect())
    }

    /// Waits for the whole stream, where the event does not say when the slot and the buffer are free. When this fails
    /// too, the device is lost.
    #[allow(unsafe_code)]
    fn synchronize(&self) {
        // SAFETY: the stream is ours and lives.
        let _ = self.stream.device.context.run(|driver| unsafe { driver.cuStreamSynchronize(self.stream.stream()) });
    }
}

impl Digests for UnderWay {
    fn wait(&self) -> Result<&[u64]> {
        self.found.get_or_init(|| self.find()).as_deref().map_err(Clone::clone)
    }

    fn took_ms(&self) -> Option<f64> {
        let ended = self.ended.as_ref()?;
        ended.wait().ok()?;
        ended.ms_since(&self.begun)
    }
}

impl Drop for UnderWay {
    /// Waits: the slot and the buffer are used by others after this.
    fn drop(&mut self) {
        let _ = self.wait();
        lock(&self.stream.device.digests.buffers).push(Arc::clone(&self.buffer));
    }
}
