//! Samples of tensors' memory, taken when a save begins: eight bytes each.
//!
//! Lazily captured tensors are copied after the call, and a framework's counters do not count every write. A write to
//! all of a tensor changes these bytes, too, which the save detects when it copies them. In the call each sample waits
//! for memory, many at a time, so there are few: one for a small tensor, one every 4 MiB of a large one, which is
//! written from its front to its end while it may be copied in any order.

use shardfast_engine::{SAMPLE_BYTES, Sample, Strided};

/// Bytes per sample.
const BYTES_EACH: u64 = 4 << 20;

/// Samples per part.
const LOOKS_MAX: u64 = 16;

/// Addresses, each with its offset in the part's bytes.
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

    /// Returns the present bytes.
    #[allow(unsafe_code)]
    pub(crate) fn look(&self) -> Vec<Sample> {
        let look = |&(address, at): &(usize, u64)| {
            // SAFETY: Python's adapters give the address of memory that they found allocated just before the save was
            // begun in the same call; the spot lies inside. A concurrent write is detected as a change.
            let bytes = unsafe { std::ptr::read(address as *const [u8; SAMPLE_BYTES]) };
            Sample { at, bytes }
        };
        self.0.iter().map(look).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the spots of elements of 4 bytes: their addresses, and their places in the part's bytes.
    fn spots(address: usize, lengths: &[u64], strides_bytes: &[i64]) -> Vec<(usize, u64)> {
        let mut spots = Spots::default();
        spots.0.push((0, 0));
        let numbers = spots.add(&Strided::new(address, lengths, strides_bytes, 4));
        assert_eq!(numbers, 1..spots.0.len());
        spots.0.split_off(1)
    }

    #[test]
    fn there_is_one_for_so_many_bytes_up_to_a_limit() {
        let count = |bytes: u64| spots(1 << 40, &[bytes / 4], &[4]).len() as u64;
        assert_eq!([count(8), count(BYTES_EACH), count(2 * BYTES_EACH - 4)], [1, 1, 1]);
        assert_eq!([count(2 * BYTES_EACH), count(5 * BYTES_EACH + 4)], [2, 5]);
        assert_eq!([count(LOOKS_MAX * BYTES_EACH), count(100 * LOOKS_MAX * BYTES_EACH)], [LOOKS_MAX, LOOKS_MAX]);
    }

    #[test]
    fn each_lies_inside_of_the_part() {
        for elements in [2, 3, 5, 1000, (BYTES_EACH - 1) / 4, 3 * BYTES_EACH / 4 + 1, 33 * BYTES_EACH / 4 + 3] {
            for (address, at) in spots(1 << 40, &[elements], &[4]) {
                assert_eq!(address, (1 << 40) + at as usize);
                assert!(at + SAMPLE_BYTES as u64 <= elements * 4, "{at} of {elements} elements");
            }
        }
    }

    #[test]
    fn each_lies_inside_of_a_run() {
        // Rows of 16 bytes, 64 bytes from each other: the middle is the sixth row of ten.
        assert_eq!(spots(1 << 40, &[10, 4], &[64, 4]), [((1 << 40) + 5 * 64, 80)]);
    }

    #[test]
    fn what_is_shorter_than_a_look_has_none() {
        assert_eq!(spots(1 << 40, &[0], &[4]), []);
        assert_eq!(spots(1 << 40, &[1], &[4]), []);
        assert_eq!(spots(1 << 40, &[100], &[8]), [], "each element lies alone");
    }

    #[test]
    fn a_look_reads_what_is_there() {
        let mut memory: Vec<u8> = (0..64).collect();
        let mut spots = Spots::default();
        spots.add(&Strided::new(memory.as_ptr() as usize, &[64], &[1], 1));
        let looks = |spots: &Spots| spots.look().iter().map(|sample| (sample.at, sample.bytes)).collect::<Vec<_>>();
        assert_eq!(looks(&spots), [(32, [32, 33, 34, 35, 36, 37, 38, 39])]);
        memory[33] = 0;
        assert_eq!(looks(&spots), [(32, [32, 0, 34, 35, 36, 37, 38, 39])]);
    }
}
