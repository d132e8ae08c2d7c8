//! Makes strided memory with rubbish around its elements, as tensors look to a save, and destinations to a load.

use shardfast_engine::{Fences, Memory, Provider, Result, Sink, Strided};

use crate::layout::Dice;

/// Byte in memory that nothing was written to.
pub(crate) const RUBBISH: u8 = 0x5a;

/// An n-d block of elements.
pub(crate) struct Block {
    memory: Vec<u8>,
    /// Offset of the first element, in bytes.
    first: usize,
    lengths: Vec<u64>,
    strides_bytes: Vec<i64>,
    item_bytes: u64,
}

impl Block {
    /// A row-major block, holding rubbish.
    pub(crate) fn dense(lengths: &[u64], item_bytes: u64) -> Block {
        let strides_bytes =
            shardfast_engine::row_major_strides(lengths, item_bytes).iter().map(|&s| s as i64).collect();
        let bytes = lengths.iter().product::<u64>() * item_bytes;
        Block { memory: vec![RUBBISH; bytes as usize], first: 0, lengths: lengths.to_vec(), strides_bytes, item_bytes }
    }

    /// A block of any order of dimensions, with gaps, some dimensions backwards; holding rubbish.
    pub(crate) fn random(dice: &mut Dice, lengths: &[u64], item_bytes: u64) -> Block {
        if dice.once_in(3) {
            return Block::dense(lengths, item_bytes);
        }
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, dice.below(i as u64 + 1) as usize);
        }
        let mut strides_bytes = vec![0; lengths.len()];
        let mut first = dice.below(3) * item_bytes;
        let mut extent = item_bytes;
        for d in order {
            let stride = extent + if dice.once_in(2) { dice.below(3) * item_bytes } else { 0 };
            let span = stride * lengths[d].saturating_sub(1);
            strides_bytes[d] = stride as i64;
            if dice.once_in(4) {
                strides_bytes[d] = -strides_bytes[d];
                first += span;
            }
            extent += span;
        }
        let bytes = if lengths.contains(&0) { 0 } else { extent + first };
        Block {
            memory: vec![RUBBISH; bytes as usize],
            first: first as usize,
            lengths: lengths.to_vec(),
            strides_bytes,
            item_bytes,
        }
    }

    /// Puts the elements, given in row-major order.
    pub(crate) fn put(mut self, elements: &[u8]) -> Block {
        let places: Vec<usize> = self.places().collect();
        assert_eq!(elements.len() as u64, places.len() as u64 * self.item_bytes);
        for (place, element) in places.into_iter().zip(elements.chunks(self.item_bytes as usize)) {
            self.memory[place..place + element.len()].copy_from_slice(element);
        }
        self
    }

    /// The elements in row-major order.
    pub(crate) fn elements(&self) -> Vec<u8> {
        let mut elements = Vec::new();
        for place in self.places() {
            elements.extend_from_slice(&self.memory[place..place + self.item_bytes as usize]);
        }
        elements
    }

    /// The memory as it is: the elements of a dense block.
    pub(crate) fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// Returns whether nothing was written beside the elements.
    pub(crate) fn surroundings_are_intact(&self) -> bool {
        let mut memory = self.memory.clone();
        for place in self.places() {
            memory[place..place + self.item_bytes as usize].fill(RUBBISH);
        }
        memory.iter().all(|&byte| byte == RUBBISH)
    }

    /// Returns the offset of each element in memory, in row-major order.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        let count = self.lengths.iter().product::<u64>();
        (0..count).map(|mut number| {
            let mut place = self.first as i64;
            for (&length, &stride) in self.lengths.iter().zip(&self.strides_bytes).rev() {
                place += (number % length) as i64 * stride;
                number /= length;
            }
            place as usize
        })
    }

    fn strided(&self) -> Strided {
        Strided::new(self.memory.as_ptr() as usize + self.first, &self.lengths, &self.strides_bytes, self.item_bytes)
    }

    /// The block as a destination.
    ///
    /// # Errors
    /// As [`Sink::new`].
    #[allow(unsafe_code)] // as every caller of the engine hands its memory over
    pub(crate) fn sink(&mut self) -> Result<Sink> {
        let address = self.memory.as_mut_ptr() as usize + self.first;
        // SAFETY: the elements lie inside `memory`, which is neither resized nor looked at while a load runs: every
        // test keeps its blocks until the load has returned.
        unsafe { Sink::new(address, &self.lengths, &self.strides_bytes, self.item_bytes) }
    }
}

/// A block that is saved, together with its memory.
pub(crate) struct Held {
    memory: Memory,
    _block: Block,
}

impl Held {
    #[allow(unsafe_code)] // as every caller of the engine hands its memory over
    pub(crate) fn new(block: Block) -> Held {
        // SAFETY: the memory belongs to the block, which lives as long as the provider and is never written again;
        // moving the block does not move it.
        let memory = unsafe { Memory::new(block.strided()) };
        Held { memory, _block: block }
    }
}

impl Provider for Held {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.memory.fill(at, out, fences)
    }
}
