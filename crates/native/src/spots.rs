//! Where the memory of tensors is looked at when a save begins: eight bytes here and there.
//!
//! What is captured lazily is copied after the call, and a framework's counters do not count every write. A write to
//! all of a tensor changes these bytes, too: when they are copied, the save finds that they are no longer what they
//! were. In the call each look waits for memory, many at a time, so there are few: one for a small tensor, one every 4
//! MiB of a large one, which is written from its front to its end while it may be copied in any order.

use shardfast_engine::{SAMPLE_BYTES, Sample, Strided};

/// One look for so many bytes.
const BYTES_EACH: u64 = 4 << 20;

/// Looks at one part.
const LOOKS_MAX: u64 = 16;

/// Addresses, and where in its part's bytes each lies.
#[derive(Default)]
pub(crate) struct Spots(Vec<(usize, u64)>);

impl Spots {
    /// Adds the spots of a part, which is host memory; their numbers.
    pub(crate) fn add(&mut self, block: &Strided) -> std::ops::Range<usize> {
        let (first, total) = (self.0.len(), block.total_bytes());
        let looks = (total / BYTES_EACH).clamp(1, LOOKS_MAX);
        for look in 0..looks {
            // In the middle of each stretch of equal length.
            let at = (2 * look + 1) * (total / (2 * looks)) / SAMPLE_BYTES as u64 * SAMPLE_BYTES as u64;
            if let Some((address, _)) = block.run_at(at).filter(|(_, bytes)| *bytes >= SAMPLE_BYTES) {
                self.0.push((address, at));
            }
        }
        first..self.0.len()
    }

    /// What is there now.
    #[allow(unsafe_code)]
    pub(crate) fn look(&self) -> Vec<Sample> {
        let look = |&(address, at): &(usize, u64)| {
            // SAFETY: Python's adapters give the address of memory that they found allocated just before the save was
            // begun in the same call; the spot lies inside. What a thread writes meanwhile is found to be written.
            let bytes = unsafe { std::ptr::read(address as *const [u8; SAMPLE_BYTES]) };
            Sample { at, bytes }
        };
        self.0.iter().map(look).collect()
    }
}
