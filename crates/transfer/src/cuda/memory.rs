//! A device's memory as the source of a save and the destination of a load.

use std::sync::{Arc, OnceLock};

use super::device::CopyStream;
use super::rows::{Gather, Run};
use crate::digest::Digester;
use crate::error::Result;
use crate::host::HostSink;
use crate::provider::{Fence, Fences, Provider, Strided};

/// Limits of short runs: more than [`FEW_RUNS`] runs shorter than this are reordered by the host, if the device's
/// memory is dense there. Weights with their channels last are elements at regular distances, and the device would need
/// a copy for every few of them.
const SHORT_BYTES: usize = 256;
const FEW_RUNS: usize = 32;

/// Position of runs on the device.
struct Span {
    start: usize,
    end: usize,
    /// Size of all runs, in bytes.
    bytes: usize,
    runs: usize,
}

impl Span {
    fn of(runs: impl FnOnce(&mut dyn FnMut(usize, usize))) -> Span {
        let mut span = Span { start: usize::MAX, end: 0, bytes: 0, runs: 0 };
        runs(&mut |address, bytes| {
            span.start = span.start.min(address);
            span.end = span.end.max(address + bytes);
            span.bytes += bytes;
            span.runs += 1;
        });
        span
    }

    fn extent(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Returns whether the runs are many, short and close together: at most `spread` times as far apart as they are
    /// long.
    fn is_shuffled(&self, spread: usize) -> bool {
        self.runs > FEW_RUNS && self.bytes < SHORT_BYTES * self.runs && self.extent() <= spread * self.bytes
    }
}

/// Memory of a device, and the stream that copies from or to it.
struct Place {
    copies: Arc<CopyStream>,
    fence: Arc<dyn Fence>,
    address: usize,
    /// Result of asking the driver, once, whether the address is this device's.
    known: OnceLock<Result<()>>,
}

impl Place {
    fn new(copies: &Arc<CopyStream>, address: usize) -> Place {
        let fence: Arc<dyn Fence> = Arc::<CopyStream>::clone(copies);
        Place { copies: Arc::clone(copies), fence, address, known: OnceLock::new() }
    }

    /// Checks the address: the driver would take an unknown one for host memory, and read it there.
    fn expect_known(&self) -> Result<()> {
        self.known.get_or_init(|| self.copies.device().expect_own(self.address)).clone()
    }

    /// Begins to copy the runs that `runs` lists, in few large copies.
    ///
    /// # Safety
    /// As [`CopyStream::begin`].
    #[allow(unsafe_code)]
    unsafe fn begin(&self, fences: &mut Fences, runs: impl FnOnce(&mut dyn FnMut(Run))) -> Result<()> {
        self.expect_known()?;
        fences.add(&self.fence);
        // SAFETY: the caller's promise.
        unsafe {
            self.copies.begin(|copy| {
                let mut gather = Gather::new(copy);
                runs(&mut |run| gather.push(run));
                gather.finish()
            })
        }
    }
}

/// A tensor's memory on a device while it does not change.
pub struct DeviceMemory {
    place: Place,
    block: Strided,
}

impl DeviceMemory {
    /// Makes a provider of the block of the device's memory. It reads the bytes that the device holds when the work
    /// submitted before `copies` was made is done.
    ///
    /// # Safety
    /// Every element of the block must stay allocated, and no work submitted to the device after that moment may write
    /// it, until the save that got this provider is staged or has failed.
    #[allow(unsafe_code)] // the one way in for a device's memory to be read
    pub unsafe fn new(copies: &Arc<CopyStream>, block: Strided) -> DeviceMemory {
        DeviceMemory { place: Place::new(copies, block.address), block }
    }
}

impl Provider for DeviceMemory {
    fn bytes(&self) -> u64 {
        self.block.total_bytes()
    }

    #[allow(unsafe_code)]
    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let (start, bytes) = (out.as_mut_ptr() as usize, out.len() as u64);
        let span = Span::of(|see| self.block.for_each_run(at, bytes, |address, _, bytes| see(address, bytes)));
        if span.is_shuffled(2) {
            return self.sort_out(at, out, &span);
        }
        // SAFETY: the runs lie inside the block, which `new`'s caller keeps readable and unchanged, and inside `out`,
        // which no code uses before the fences were waited for, as `Provider::fill` says.
        unsafe {
            self.place.begin(fences, |push| {
                self.block.for_each_run(at, bytes, |address, position, bytes| {
                    push(Run { dst: start + position, src: address, bytes });
                });
            })
        }
    }

    fn on_device(&self, at: u64, bytes: u64) -> Option<(Arc<dyn Digester>, usize)> {
        let (address, run) = self.block.run_at(at)?;
        (run as u64 >= bytes).then(|| (Arc::clone(&self.place.copies) as _, address))
    }
}

impl DeviceMemory {
    /// Fills `out` from a copy of all that lies between the first and the last byte of the range.
    #[allow(unsafe_code)]
    fn sort_out(&self, at: u64, out: &mut [u8], span: &Span) -> Result<()> {
        let mut copied = vec![0; span.extent()];
        let run = Run { dst: copied.as_mut_ptr() as usize, src: span.start, bytes: copied.len() };
        let mut fences = Fences::default();
        // SAFETY: what lies between elements of a tensor is allocated with them, and what of it may change is not used;
        // `copied` is looked at, or freed, after the fences were waited for.
        unsafe { self.place.begin(&mut fences, |push| push(run)) }?;
        fences.wait()?;
        self.block.for_each_run(at, out.len() as u64, |address, position, bytes| {
            out[position..position + bytes].copy_from_slice(&copied[address - span.start..][..bytes]);
        });
        Ok(())
    }
}

/// A strided n-d block of elements in a device's memory that a load writes.
pub struct DeviceSink {
    place: Place,
    sink: HostSink,
}

impl DeviceSink {
    /// Makes a sink of the block for a region of extent `lengths`, its first element at `address`. The block is written
    /// after the moment at which `copies` was made.
    ///
    /// # Errors
    /// `Invalid` when two of its elements share memory (an expanded tensor).
    ///
    /// # Safety
    /// Every element of the block must stay allocated, and no work given to the device after that moment may read or
    /// write it, until the load that was given this sink has returned.
    #[allow(unsafe_code)] // the one way in for a device's memory to be written
    pub unsafe fn new(
        copies: &Arc<CopyStream>,
        address: usize,
        lengths: &[u64],
        strides_bytes: &[i64],
        item_bytes: u64,
    ) -> Result<DeviceSink> {
        // SAFETY: only its geometry is used; nothing is written through it.
        let sink = unsafe { HostSink::new(address, lengths, strides_bytes, item_bytes) }?;
        Ok(DeviceSink { place: Place::new(copies, address), sink })
    }

    /// Begins to copy a box of extent `lengths` to `offsets` of this block; its elements lie `src_strides` bytes apart
    /// in `src`, which must stay as it is until `fences` was waited for. After that the bytes are on the device, for
    /// all work submitted to any of its streams.
    ///
    /// # Errors
    /// `Invalid` when the address is not the device's; `Unavailable` when the device is lost.
    #[allow(unsafe_code)]
    pub fn scatter(
        &self,
        offsets: &[u64],
        lengths: &[u64],
        src_strides: &[u64],
        src: &[u8],
        fences: &mut Fences,
    ) -> Result<()> {
        if lengths.contains(&0) {
            return Ok(());
        }
        let runs = |visit: &mut dyn FnMut(usize, usize, usize)| {
            self.sink.for_each_run(offsets, lengths, src_strides, visit);
        };
        let span = Span::of(|see| runs(&mut |address, _, bytes| see(address, bytes)));
        // Only where no byte lies between the elements: it would be overwritten.
        if span.is_shuffled(1) {
            let mut sorted = vec![0; span.extent()];
            runs(&mut |address, from, bytes| {
                sorted[address - span.start..][..bytes].copy_from_slice(&src[from..from + bytes]);
            });
            let run = Run { dst: span.start, src: sorted.as_ptr() as usize, bytes: sorted.len() };
            let mut own = Fences::default();
            // SAFETY: all of the run's bytes are elements of the box; for the rest as below, `sorted` for `src`.
            unsafe { self.place.begin(&mut own, |push| push(run)) }?;
            return own.wait();
        }
        // SAFETY: the box lies inside the region that `new`'s caller keeps writable and unshared, since the plan cuts
        // pieces inside the wanted region; each run is a bounds-checked part of `src`, which stays as it is until the
        // fences were waited for.
        unsafe {
            self.place.begin(fences, |push| {
                runs(&mut |address, from, bytes| {
                    push(Run { dst: address, src: src[from..from + bytes].as_ptr() as usize, bytes });
                });
            })
        }
    }
}
