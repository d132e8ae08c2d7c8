//! Staging memory: slots of one size, aligned for direct I/O, bounded by the budget, reused between saves and loads.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of one slot: large enough that a direct write runs at the disk's rate, small enough that the copy of the
/// next slot overlaps the write of this one.
pub const SLOT_BYTES: usize = 4 << 20;

/// Memory, offsets and lengths of direct I/O are multiples of this.
pub const ALIGNMENT: usize = 4096;

/// A bounded pool of slots. Slots are allocated when first needed and then kept, since touching fresh memory costs
/// as much as copying into it.
#[derive(Debug)]
pub struct Staging {
    state: Mutex<State>,
    returned: Condvar,
    slots_max: usize,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Vec<u8>>,
    made: usize,
}

impl Staging {
    /// A pool of at most `budget_bytes`; at least two slots, or nothing could overlap.
    pub fn new(budget_bytes: u64) -> Arc<Staging> {
        let slots_max = usize::try_from(budget_bytes / SLOT_BYTES as u64).unwrap_or(usize::MAX).max(2);
        Arc::new(Staging { state: Mutex::default(), returned: Condvar::new(), slots_max })
    }

    /// The budget as it is used, in bytes.
    pub fn budget_bytes(&self) -> u64 {
        self.slots_max as u64 * SLOT_BYTES as u64
    }

    /// A free slot; waits for one while all are in use. Contents are arbitrary.
    pub fn acquire(self: &Arc<Staging>) -> Slot {
        let mut state = self.lock();
        loop {
            if let Some(memory) = state.free.pop() {
                return Slot { memory, pool: Arc::clone(self) };
            }
            if state.made < self.slots_max {
                state.made += 1;
                drop(state);
                return Slot { memory: vec![0; SLOT_BYTES + ALIGNMENT], pool: Arc::clone(self) };
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `SLOT_BYTES` of staging memory at an aligned address; goes back to its pool when dropped.
#[derive(Debug)]
pub struct Slot {
    memory: Vec<u8>,
    pool: Arc<Staging>,
}

impl Slot {
    fn start(&self) -> usize {
        self.memory.as_ptr().align_offset(ALIGNMENT)
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.start();
        &self.memory[start..start + SLOT_BYTES]
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut self.memory[start..start + SLOT_BYTES]
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pool.lock().free.push(std::mem::take(&mut self.memory));
        self.pool.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_bounded_and_reused() {
        let pool = Staging::new(2 * SLOT_BYTES as u64);
        let (a, b) = (pool.acquire(), pool.acquire());
        assert!([&a, &b].iter().all(|slot| slot.as_ptr().addr().is_multiple_of(ALIGNMENT)));
        assert_eq!((a.len(), b.len()), (SLOT_BYTES, SLOT_BYTES));
        let waiting = {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || pool.acquire().as_ptr() as usize)
        };
        let address = a.as_ptr() as usize;
        drop(a);
        assert_eq!(waiting.join().unwrap(), address, "a third slot was made beyond the budget");
        drop(b);
        assert_eq!(pool.lock().made, 2);
    }
}
