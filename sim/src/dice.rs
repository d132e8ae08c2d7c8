//! Repeatable chance.

use std::time::Duration;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Dice of their own, so that what is drawn from them changes nothing else.
    pub(crate) fn fork(&mut self) -> Dice {
        Dice(self.next())
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True once in `n` times.
    pub(crate) fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn rank(&mut self, world: u32) -> u32 {
        self.below(u64::from(world)) as u32
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// At most `most`, to the microsecond.
    pub(crate) fn time(&mut self, most: Duration) -> Duration {
        Duration::from_micros(self.below(most.as_micros() as u64 + 1))
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut out: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        out.truncate(n);
        out
    }
}
