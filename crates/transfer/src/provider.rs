//! Defines sources of a save's bytes. The data path does not know what the bytes mean.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shardfast_format::{BLOCK_BYTES, Crc64, crc64};
use smallvec::SmallVec;

use crate::capture::Capture;
use crate::copy_crc;
use crate::digest::Digester;
use crate::error::{Error, Result};

/// A stream of bytes of known length, of which any thread can read any range.
pub trait Provider: Send + Sync {
    /// Returns the length of the stream, in bytes.
    fn bytes(&self) -> u64;

    /// Copies the stream's bytes from `at` on into all of `out`; the range lies inside the stream. A device's copies
    /// may arrive later: the bytes are there when `fences` has been waited for, and `out` must not be used before that.
    ///
    /// # Errors
    /// When the source itself fails (a checkpoint being read, a device lost).
    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()>;

    /// Fills like [`fill`](Self::fill) with whole blocks of a file, the last of which may be shorter, and stores the
    /// CRC-64 of each if that costs less during the copy than afterwards.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    fn fill_blocks(&self, at: u64, out: &mut [u8], _crcs: &mut [Option<u64>], fences: &mut Fences) -> Result<()> {
        self.fill(at, out, fences)
    }

    /// Returns the CRC-64 of `bytes` bytes from `at` on; the range lies inside the stream. It may use `slot`, a slot of
    /// staging memory.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> Result<u64> {
        sum_through(self, at, bytes, slot)
    }

    /// Returns when the bytes are copied.
    fn capture(&self) -> Capture {
        Capture::Owned
    }

    /// Returns whether the copied bytes differ from those at the beginning of the save, as far as samples show.
    fn is_torn(&self) -> bool {
        false
    }

    /// Returns whether the save has these bytes already: the program may change them before they are filled.
    fn is_held(&self, _at: u64, _bytes: u64) -> bool {
        false
    }

    /// Returns the same bytes in the program's memory, if the save has some of them already: those are the same, but
    /// may have to be waited for.
    fn live(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// Returns the address at which a device has these bytes in one run, and the digester for it; `None` if there is
    /// none.
    fn on_device(&self, _at: u64, _bytes: u64) -> Option<(Arc<dyn Digester>, usize)> {
        None
    }

    /// Returns the ranges that must be read before the program changes them, to prove the bytes that are held.
    fn evidence(&self) -> Vec<Evidence> {
        Vec::new()
    }
}

/// Bytes that a save holds without having read them now, and where the program has them.
pub struct Evidence {
    /// The tensor and the range, for messages.
    pub name: String,
    /// Provider of the program's own bytes.
    pub live: Arc<dyn Provider>,
    /// Name of the variant by which the held bytes were rolled forward.
    pub how: &'static str,
    /// Comparison of the held bytes with a CRC-64; waits until theirs is known.
    pub agrees: Box<dyn Fn(u64) -> Result<bool> + Send + Sync>,
}

/// Computes [`Provider::sum`] by copying to `through` first, as much at a time as fits there.
fn sum_through(of: &(impl Provider + ?Sized), at: u64, bytes: u64, through: &mut [u8]) -> Result<u64> {
    let (mut crc, mut done) = (Crc64::new(), 0);
    while done < bytes {
        let piece = (bytes - done).min(through.len() as u64);
        let (out, mut fences) = (&mut through[..piece as usize], Fences::default());
        of.fill(at + done, out, &mut fences)?;
        fences.wait()?;
        crc.update(out);
        done += piece;
    }
    Ok(crc.finish())
}

/// Copies in flight on a device.
pub trait Fence: Send + Sync {
    /// Waits until every copy that was begun before this call has arrived.
    ///
    /// # Errors
    /// When the device is lost; the destinations' contents are then arbitrary, and no copy is in flight any more.
    fn wait(&self) -> Result<()>;

    /// Returns a fence for the copies that were begun before this call, and for no later ones.
    ///
    /// # Errors
    /// When the device is lost.
    fn mark(self: Arc<Self>) -> Result<Arc<dyn Fence>>;
}

/// The fences to wait for before the bytes of one slot may be read.
#[derive(Default, Clone)]
pub struct Fences {
    waiting: SmallVec<[Arc<dyn Fence>; 2]>,
}

impl Fences {
    /// Adds a fence, once.
    pub fn add(&mut self, fence: &Arc<dyn Fence>) {
        if !self.waiting.iter().any(|known| Arc::ptr_eq(known, fence)) {
            self.waiting.push(Arc::clone(fence));
        }
    }

    /// Replaces the fences: waits later for no more than the copies begun before this call.
    ///
    /// # Errors
    /// As [`Fence::mark`]; the fences stay then.
    pub fn mark(&mut self) -> Result<()> {
        for fence in &mut self.waiting {
            *fence = Arc::clone(fence).mark()?;
        }
        Ok(())
    }

    /// Returns whether no copy is in flight on any device.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Waits for all of them, even when one fails.
    ///
    /// # Errors
    /// The first failure.
    pub fn wait(&mut self) -> Result<()> {
        let mut all = Ok(());
        for fence in self.waiting.drain(..) {
            all = all.and(fence.wait());
        }
        all
    }
}

impl Drop for Fences {
    /// Waits also after an error: the destination memory is returned after this.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// A run of another provider's bytes.
pub struct Run {
    of: Arc<dyn Provider>,
    at: u64,
    bytes: u64,
}

impl Run {
    /// Makes the run of `bytes` bytes of the stream from `at` on; they must lie inside it.
    pub fn new(of: Arc<dyn Provider>, at: u64, bytes: u64) -> Run {
        Run { of, at, bytes }
    }
}

impl Provider for Run {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.of.fill(self.at + at, out, fences)
    }

    fn fill_blocks(&self, at: u64, out: &mut [u8], crcs: &mut [Option<u64>], fences: &mut Fences) -> Result<()> {
        self.of.fill_blocks(self.at + at, out, crcs, fences)
    }

    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> Result<u64> {
        self.of.sum(self.at + at, bytes, slot)
    }

    fn capture(&self) -> Capture {
        self.of.capture()
    }

    fn is_torn(&self) -> bool {
        self.of.is_torn()
    }

    fn is_held(&self, at: u64, bytes: u64) -> bool {
        self.of.is_held(self.at + at, bytes)
    }

    fn live(&self) -> Option<Arc<dyn Provider>> {
        self.of.live().map(|of| Arc::new(Run::new(of, self.at, self.bytes)) as _)
    }
}

/// Bytes held by the save itself: an encoded value.
impl Provider for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        let at = at as usize;
        out.copy_from_slice(&self[at..at + out.len()]);
        Ok(())
    }
}

/// A strided n-d block of elements in this process's memory, as its row-major bytes.
#[derive(Debug, Clone)]
pub struct Strided {
    pub(crate) address: usize,
    /// `(length in elements, stride in bytes)` per dimension; neighbours that lie as one are merged, so that the last
    /// dimension is the longest possible run.
    pub(crate) dims: SmallVec<[(u64, i64); 4]>,
    pub(crate) item_bytes: u64,
}

impl Strided {
    /// Makes the block whose first element is at `address`, with `lengths` in elements and `strides_bytes` per
    /// dimension.
    pub fn new(address: usize, lengths: &[u64], strides_bytes: &[i64], item_bytes: u64) -> Strided {
        let mut dims: SmallVec<[(u64, i64); 4]> = SmallVec::new();
        for (&length, &stride) in lengths.iter().zip(strides_bytes) {
            if length == 1 {
                continue;
            }
            match dims.last_mut() {
                Some(last) if last.1 == stride.wrapping_mul(length as i64) => *last = (last.0 * length, stride),
                _ => dims.push((length, stride)),
            }
        }
        Strided { address, dims, item_bytes }
    }

    /// Returns the number of bytes of all elements.
    pub fn total_bytes(&self) -> u64 {
        self.dims.iter().map(|d| d.0).product::<u64>() * self.item_bytes
    }

    /// Bytes that lie in one run in memory.
    pub fn run_bytes(&self) -> u64 {
        self.runs().0
    }

    /// Returns [`Strided::run_bytes`], and the dimensions outside of a run.
    fn runs(&self) -> (u64, &[(u64, i64)]) {
        match self.dims.split_last() {
            Some((&(length, stride), outer)) if stride == self.item_bytes as i64 => (length * self.item_bytes, outer),
            _ => (self.item_bytes, &self.dims),
        }
    }

    /// Returns the address of the byte `at` of the row-major bytes, and how many bytes follow it there in one run.
    pub fn run_at(&self, at: u64) -> Option<(usize, usize)> {
        let mut found = None;
        let left = self.total_bytes().checked_sub(at)?;
        self.for_each_run(at, self.runs().0.min(left), |address, _, bytes| _ = found.get_or_insert((address, bytes)));
        found
    }

    /// Calls `visit(address, position, bytes)` for every contiguous run of the row-major range `[at, at + bytes)`, in
    /// order; `position` counts from `at`.
    pub(crate) fn for_each_run(&self, at: u64, bytes: u64, mut visit: impl FnMut(usize, usize, usize)) {
        let (run_bytes, outer) = self.runs();
        if bytes == 0 || run_bytes == 0 {
            return;
        }
        let mut run = at / run_bytes;
        let mut within = at % run_bytes;
        let mut index: SmallVec<[u64; 4]> = SmallVec::from_elem(0, outer.len());
        let mut address = self.address as i64;
        for (d, &(length, stride)) in outer.iter().enumerate().rev() {
            index[d] = run % length;
            run /= length;
            address += index[d] as i64 * stride;
        }
        let mut done = 0;
        loop {
            let take = (run_bytes - within).min(bytes - done);
            visit(address as usize + within as usize, done as usize, take as usize);
            done += take;
            if done == bytes {
                return;
            }
            within = 0;
            for (d, &(length, stride)) in outer.iter().enumerate().rev() {
                index[d] += 1;
                address += stride;
                if index[d] < length {
                    break;
                }
                index[d] = 0;
                address -= stride * length as i64;
            }
        }
    }
}

/// Bytes per request to the kernel: large enough that requests cost little (0.08 s per GB; 0.09 with 64 KiB), and small
/// enough that the bytes are still in the cache when they are summed.
const NEAR_BYTES: usize = 256 << 10;

/// Runs that one request to the kernel reads: below `IOV_MAX`.
const RUNS_MAX: usize = 512;

/// A tensor's memory while it does not change.
#[derive(Debug)]
pub struct Memory {
    block: Strided,
    is_guarded: bool,
    samples: Vec<Sample>,
    is_torn: AtomicBool,
}

/// Eight bytes of a block as they were when a save was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Offset in the block's row-major bytes.
    pub at: u64,
    /// Bytes of the sample.
    pub bytes: [u8; SAMPLE_BYTES],
}

/// Bytes of a [`Sample`].
pub const SAMPLE_BYTES: usize = 8;

impl Memory {
    /// Makes a provider of the block.
    ///
    /// # Safety
    /// Every element of the block must stay allocated and initialised, and must not be written, until the save that
    /// was given this provider is staged or has failed.
    #[allow(unsafe_code)] // the one way in for foreign memory to be read
    pub unsafe fn new(block: Strided) -> Memory {
        Memory { block, is_guarded: false, samples: Vec::new(), is_torn: AtomicBool::new(false) }
    }

    /// Makes a provider of the block that the save reads while the program continues. The kernel reads it, which costs
    /// a third more, and turns unmapped memory into an error instead of a crash.
    ///
    /// # Safety
    /// Every element of the block must be initialised and must not be written until the save that was given this
    /// provider is staged or has failed; or the caller detects the write and fails the save (see [`Capture::Lazy`]), so
    /// that the bytes read are never used.
    #[allow(unsafe_code)]
    pub unsafe fn guarded(block: Strided) -> Memory {
        Memory { block, is_guarded: true, samples: Vec::new(), is_torn: AtomicBool::new(false) }
    }

    /// Returns the same provider with samples that show whether the bytes read are [torn](Provider::is_torn).
    #[must_use]
    pub fn sampled(self, samples: Vec<Sample>) -> Memory {
        Memory { samples, ..self }
    }

    /// Compares `out`, the bytes from `at` on, with the samples that lie in it.
    fn compare(&self, at: u64, out: &[u8]) {
        for sample in &self.samples {
            let from = sample.at.checked_sub(at).map(|from| from as usize);
            let found = from.and_then(|from| out.get(from..from.checked_add(SAMPLE_BYTES)?));
            if found.is_some_and(|found| *found != sample.bytes) {
                self.is_torn.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Fills through `process_vm_writev(2)` of this process to itself; whether the kernel offers that. It pins the
    /// pages of the side that is called remote, which costs more than the copy: here those are of `out`, which the
    /// cache holds, and not of the tensor (0.08 s per GB instead of 0.13 with `process_vm_readv`).
    #[allow(unsafe_code)]
    fn fill_guarded(&self, at: u64, out: &mut [u8]) -> Result<bool> {
        let mut runs: Vec<libc::iovec> = Vec::new();
        let mut done = 0;
        let mut failed = None;
        let mut flush = |runs: &mut Vec<libc::iovec>, out: &mut [u8]| {
            let bytes: usize = runs.iter().map(|run| run.iov_len).sum();
            let to = libc::iovec { iov_base: out[done..done + bytes].as_mut_ptr().cast(), iov_len: bytes };
            done += bytes;
            // SAFETY: the kernel writes `to`, which is ours alone, and checks every address that it reads.
            let read = unsafe { libc::process_vm_writev(libc::getpid(), runs.as_ptr(), runs.len() as u64, &to, 1, 0) };
            if read != bytes as isize {
                let reason = if read < 0 {
                    std::io::Error::last_os_error()
                } else {
                    std::io::Error::from_raw_os_error(libc::EFAULT)
                };
                failed.get_or_insert(reason);
            }
            runs.clear();
        };
        self.block.for_each_run(at, out.len() as u64, |address, _, bytes| {
            runs.push(libc::iovec { iov_base: address as *mut _, iov_len: bytes });
            if runs.len() == RUNS_MAX {
                flush(&mut runs, out);
            }
        });
        flush(&mut runs, out);
        match failed {
            None => Ok(true),
            Some(reason) if matches!(reason.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => Ok(false),
            Some(reason) => {
                let message = format!("its memory was freed or resized while the save was copying it ({reason})");
                Err(Error::invalid(message))
            }
        }
    }
}

impl Provider for Memory {
    fn bytes(&self) -> u64 {
        self.block.total_bytes()
    }

    #[allow(unsafe_code)]
    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        if self.is_guarded && self.fill_guarded(at, out)? {
            self.compare(at, out);
            return Ok(());
        }
        self.block.for_each_run(at, out.len() as u64, |address, position, bytes| {
            // SAFETY: the run lies inside the block, which `Memory::new`'s caller keeps readable and unchanged;
            // `position + bytes` never exceeds `out.len()`, and `out` is ours alone.
            unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, out[position..position + bytes].as_mut_ptr(), bytes)
            }
        });
        self.compare(at, out);
        Ok(())
    }

    #[allow(unsafe_code)]
    fn fill_blocks(&self, mut at: u64, out: &mut [u8], crcs: &mut [Option<u64>], fences: &mut Fences) -> Result<()> {
        if !copy_crc::sums_in_passing() {
            return self.fill(at, out, fences);
        }
        // Guarded or scattered bytes pass through a buffer that stays in the cache.
        let mut near = Vec::new();
        for (block, crc) in out.chunks_mut(BLOCK_BYTES as usize).zip(crcs) {
            let (to, bytes) = (block.as_mut_ptr(), block.len());
            let from = match self.block.run_at(at).filter(|run| !self.is_guarded && run.1 >= bytes) {
                Some((address, _)) => address as *const u8,
                None => {
                    near.resize(bytes, 0);
                    self.fill(at, &mut near, fences)?;
                    near.as_ptr()
                }
            };
            // SAFETY: `from` is ours, or lies inside the block of memory that `Memory::new`'s caller keeps readable and
            // unchanged; what is written is ours alone.
            *crc = Some(unsafe { copy_crc::copy_and_sum(from, to, bytes) });
            at += bytes as u64;
        }
        copy_crc::settle();
        Ok(())
    }

    fn is_torn(&self) -> bool {
        self.is_torn.load(Ordering::Relaxed)
    }

    /// Sums memory that the kernel reads, or scattered memory, through a buffer that stays in the cache.
    #[allow(unsafe_code)]
    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> Result<u64> {
        match self.block.run_at(at).filter(|run| !self.is_guarded && run.1 as u64 >= bytes) {
            // SAFETY: the run lies inside the block, which `Memory::new`'s caller keeps readable and unchanged.
            Some((address, _)) => {
                Ok(crc64(unsafe { std::slice::from_raw_parts(address as *const u8, bytes as usize) }))
            }
            None => {
                let near = slot.len().min(NEAR_BYTES);
                sum_through(self, at, bytes, &mut slot[..near])
            }
        }
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    fn stream(provider: &dyn Provider) -> Vec<u8> {
        let mut out = vec![0; provider.bytes() as usize];
        provider.fill(0, &mut out, &mut Fences::default()).unwrap();
        out
    }

    #[test]
    fn transposed_sliced_and_reversed_views_stream_row_major() {
        let data: Vec<u16> = (0..60).collect();
        let base = data.as_ptr() as usize;
        // data[3][4][5] viewed as [5][3][2]: permuted, every second of the middle dimension, from index 1.
        let view = Strided::new(base + 5 * 2, &[5, 3, 2], &[2, 40, 20], 2);
        let mut expected = Vec::new();
        for i in 0..5u16 {
            for j in 0..3u16 {
                for k in 0..2u16 {
                    expected.extend((j * 20 + (1 + 2 * k) * 5 + i).to_le_bytes());
                }
            }
        }
        // SAFETY: `data` outlives the providers and is not written.
        for memory in unsafe { [Memory::new(view.clone()), Memory::guarded(view)] } {
            assert_eq!(stream(&memory), expected);
            for at in 0..expected.len() {
                for end in at..=expected.len() {
                    let mut out = vec![0; end - at];
                    memory.fill(at as u64, &mut out, &mut Fences::default()).unwrap();
                    assert_eq!(out, expected[at..end], "range {at}..{end}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_filled_as_ranges_are_and_summed() {
        const BLOCK: usize = BLOCK_BYTES as usize;
        let data: Vec<u32> = (0..200_000u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        let base = data.as_ptr() as usize;
        let run = Strided::new(base, &[200_000], &[4], 4);
        let rows = Strided::new(base + 4, &[400, 300], &[2000, 4], 4);
        let long_rows = Strided::new(base, &[3, 40_000], &[240_000, 4], 4);
        for view in [run, rows, long_rows] {
            // SAFETY: `data` outlives the providers and is not written.
            for memory in unsafe { [Memory::new(view.clone()), Memory::guarded(view.clone())] } {
                let expected = stream(&memory);
                for (at, bytes) in [(0, 3 * BLOCK), (77, 2 * BLOCK + 5), (expected.len() - BLOCK - 1, BLOCK + 1)] {
                    // As aligned as slots are, and not.
                    for shift in [0, 3] {
                        let mut out = vec![0; bytes + 128];
                        let start = out.as_ptr().align_offset(64) + shift;
                        let out = &mut out[start..start + bytes];
                        let mut crcs = vec![None; bytes.div_ceil(BLOCK)];
                        memory.fill_blocks(at as u64, out, &mut crcs, &mut Fences::default()).unwrap();
                        assert!(out == &expected[at..at + bytes], "{view:?} at {at}");
                        for (block, crc) in out.chunks(BLOCK).zip(crcs) {
                            let summed = copy_crc::sums_in_passing().then(|| shardfast_format::crc64(block));
                            assert_eq!(crc, summed, "{view:?} at {at}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn samples_tell_whether_memory_was_written_since() {
        let mut data: Vec<u32> = (0..100_000).collect();
        let view = Strided::new(data.as_ptr() as usize, &[100_000], &[4], 4);
        let sample =
            |at: u64| Sample { at, bytes: std::array::from_fn(|i| data[(at as usize + i) / 4].to_le_bytes()[i % 4]) };
        let samples = vec![sample(8), sample(200_000)];
        // SAFETY: `data` outlives the provider; it is written while nothing reads.
        let memory = |samples| unsafe { Memory::guarded(view.clone()) }.sampled(samples);
        let unchanged = memory(samples.clone());
        assert_eq!(stream(&unchanged).len(), 400_000);
        unchanged.sum(3, 399_990, &mut vec![0; 1 << 20]).unwrap();
        assert!(!unchanged.is_torn());
        data[50_001] += 1;
        let [blocks, sums, elsewhere] = std::array::from_fn(|_| memory(samples.clone()));
        blocks.fill_blocks(0, &mut vec![0; 400_000], &mut [None; 7], &mut Fences::default()).unwrap();
        sums.sum(131_072, 131_072, &mut vec![0; 1 << 20]).unwrap();
        elsewhere.fill(0, &mut vec![0; 200_004], &mut Fences::default()).unwrap();
        assert_eq!([blocks.is_torn(), sums.is_torn(), elsewhere.is_torn()], [true, true, false]);
    }

    #[test]
    fn many_runs_are_read_in_several_requests() {
        let data: Vec<u16> = (0..4 * RUNS_MAX as u16).collect();
        // Every second element.
        let view = Strided::new(data.as_ptr() as usize, &[2 * RUNS_MAX as u64], &[4], 2);
        assert_eq!(view.run_bytes(), 2);
        // SAFETY: `data` outlives the provider and is not written.
        let memory = unsafe { Memory::guarded(view) };
        let expected: Vec<u8> = data.iter().step_by(2).flat_map(|element| element.to_le_bytes()).collect();
        assert_eq!(stream(&memory), expected);
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let bytes = 1 << 20;
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        // SAFETY: a new mapping that nothing else knows of; nothing reads the part that is closed.
        let memory = unsafe {
            let address = rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags).unwrap();
            // For the kernel's copy as good as gone, but no other thread can map something there meanwhile.
            rustix::mm::mprotect(address.byte_add(bytes / 2), bytes / 2, rustix::mm::MprotectFlags::empty()).unwrap();
            Memory::guarded(Strided::new(address as usize, &[bytes as u64], &[1], 1))
        };
        let mut out = vec![1; bytes];
        memory.fill(0, &mut out[..bytes / 2], &mut Fences::default()).unwrap();
        let error = memory.fill(0, &mut out, &mut Fences::default()).unwrap_err();
        assert!(error.message.contains("freed or resized while"), "{error}");
        let error = memory.fill(bytes as u64 - 10, &mut out[..10], &mut Fences::default()).unwrap_err();
        assert!(error.message.contains("Bad address"), "{error}");
    }

    #[test]
    fn neighbouring_dimensions_merge_into_one_run() {
        let block = Strided::new(0, &[2, 1, 3, 4], &[48, 7, 16, 4], 4);
        assert_eq!(block.dims.as_slice(), [(24, 4)]);
        assert_eq!(Strided::new(0, &[], &[], 8).total_bytes(), 8);
        assert_eq!(Strided::new(0, &[3, 0], &[0, 4], 4).total_bytes(), 0);
    }
}
