//! Draws random choices that a seed repeats.

/// Random choice of what a crash keeps, by seed.
pub(super) struct Chance {
    state: u64,
    /// Share that is kept, of 256.
    keeps_of_256: u64,
}

impl Chance {
    /// Makes the choices for one inode.
    pub(super) fn of(seed: u64, inode: u64) -> Self {
        let state = Chance { state: seed ^ inode.rotate_left(32), keeps_of_256: 0 }.next();
        Self { state, ..Self::new(seed) }
    }

    pub(super) fn new(seed: u64) -> Self {
        let keeps_of_256 = match seed {
            0 => 0,
            1 => 256,
            _ => [128, 32, 224][(seed % 3) as usize],
        };
        Self { state: seed, keeps_of_256 }
    }

    /// Draws by SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn keeps(&mut self) -> bool {
        self.next() % 256 < self.keeps_of_256
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}
