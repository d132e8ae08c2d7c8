//! Staging memory: one arena per engine, bounded by the budget, cut into slots that saves and loads share.
//!
//! The arena grows slab by slab until the budget is reached and never shrinks: touching fresh memory costs as much as
//! copying into it. Slabs use huge pages if the system has them, which makes direct I/O a quarter faster. Forked
//! children do not inherit slabs: they must neither copy nor keep memory that a device may be writing. A slot returns
//! when its bytes are durable or have arrived, and the one used last is taken first. A thread that finds no free slot
//! waits: so a slow store slows the copy instead of growing memory, and two saves in flight share the arena.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use shardfast_store::Buffer;

use crate::error::{Error, Kind, Result};

pub mod shared;

/// Bytes of one slot: a request of this size runs at a disk's rate with few of them in flight, and its bytes are still
/// in the cache of the core that copied them when their checksums are computed.
pub const SLOT_BYTES: usize = 1 << 20;

/// Memory, offsets and lengths of direct I/O are multiples of this.
pub const ALIGNMENT: usize = 4096;

/// Slots of the longest part of an object.
const PART_SLOTS_MAX: usize = 64;

/// The smallest budget: below it a copy could not overlap a write.
pub const STAGING_BYTES_MIN: u64 = 4 * SLOT_BYTES as u64;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Large enough that pinning and mapping are rare, small enough that a small state takes little.
const SLAB_BYTES: usize = 64 << 20;

/// Function that page-locks memory for a device. Dropping its result unlocks the memory.
pub type PageLock = dyn Fn(NonNull<[u8]>) -> Result<Box<dyn Send>> + Send + Sync;

/// Arena of staging memory.
pub struct Staging {
    state: Mutex<State>,
    returned: Condvar,
    slots_max: usize,
    turns: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Declared before the slabs that they lock, and so dropped before them.
    locks: Vec<Box<dyn Send>>,
    page_lock: Option<Arc<PageLock>>,
    /// The first failure of it.
    page_lock_failure: Option<String>,
    slabs: Vec<Slab>,
    /// Free slots by number; the last one was used last.
    free: Vec<u32>,
    /// Slots that are kept between saves.
    kept: usize,
    /// The most slots that a save needed at once.
    needed: usize,
    /// Calls that wait for several slots at once.
    waiting_for_many: usize,
}

impl Staging {
    /// Makes an arena of at most `budget_bytes`. Allocates no memory yet.
    ///
    /// # Errors
    /// `Invalid` for a budget below [`STAGING_BYTES_MIN`].
    pub fn new(budget_bytes: u64) -> Result<Arc<Staging>> {
        if budget_bytes < STAGING_BYTES_MIN {
            return Err(Error::invalid(format!(
                "staging_bytes={budget_bytes}: expected at least {STAGING_BYTES_MIN} ({} MiB)",
                STAGING_BYTES_MIN >> 20
            )));
        }
        Ok(Staging::at_least(budget_bytes))
    }

    /// Makes an arena of `budget_bytes`, or of the smallest budget if that is more.
    pub fn at_least(budget_bytes: u64) -> Arc<Staging> {
        let budget_bytes = budget_bytes.max(STAGING_BYTES_MIN);
        let slots_max = usize::try_from(budget_bytes / SLOT_BYTES as u64).unwrap_or(usize::MAX);
        Arc::new(Staging { state: Mutex::default(), returned: Condvar::new(), slots_max, turns: Mutex::default() })
    }

    /// Returns the budget as it is used, in bytes.
    pub fn budget_bytes(&self) -> u64 {
        self.slots_max as u64 * SLOT_BYTES as u64
    }

    /// Page-locks the arena and its future slabs. A slab that cannot be locked is used unlocked, with slower copies
    /// from a device.
    pub fn page_lock(&self, page_lock: Arc<PageLock>) {
        let mut state = self.lock();
        if state.page_lock.is_none() {
            state.page_lock = Some(page_lock);
            for slab in 0..state.slabs.len() {
                state.lock_pages(slab);
            }
        }
    }

    /// Makes slabs until there are `bytes` bytes, or as many as the budget allows or the system provides.
    pub(crate) fn reserve(&self, bytes: u64) {
        loop {
            let mut state = self.lock();
            let left = self.slots_max - state.slots();
            if state.slots() as u64 * SLOT_BYTES as u64 >= bytes || left == 0 || state.grow(left).is_err() {
                return;
            }
        }
    }

    /// Returns the reason why memory could not be page-locked.
    pub(crate) fn page_lock_failure(&self) -> Option<String> {
        self.lock().page_lock_failure.clone()
    }

    /// Acquires a free slot; waits for one while all are in use. Contents are arbitrary.
    ///
    /// # Errors
    /// `Exhausted` when the system has no memory for a slab, and no slot is in use to wait for.
    pub fn acquire(self: &Arc<Staging>) -> Result<Slot> {
        let mut state = self.lock();
        loop {
            if let Some(number) = state.free.pop() {
                return Ok(self.slot(&state, number, false));
            }
            let slots = state.slots();
            if slots < self.slots_max {
                match state.grow(self.slots_max - slots) {
                    Ok(()) => continue,
                    Err(error) if slots == 0 => return Err(error),
                    // The existing slots have to do.
                    Err(_) => {}
                }
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Acquires `count` slots atomically; one by one, two callers could deadlock.
    ///
    /// # Errors
    /// `Exhausted` when the budget is smaller, or the system has no memory for them.
    pub fn acquire_many(self: &Arc<Staging>, count: usize) -> Result<Vec<Slot>> {
        self.acquire_timed(count).map(|(slots, _)| slots)
    }

    /// Acquires like [`acquire_many`](Staging::acquire_many); returns also how long it waited for slots in use.
    ///
    /// # Errors
    /// As [`acquire_many`](Staging::acquire_many).
    pub(crate) fn acquire_timed(self: &Arc<Staging>, count: usize) -> Result<(Vec<Slot>, Duration)> {
        let (mut state, mut waited) = (self.lock(), Duration::ZERO);
        let many = usize::from(count > 1);
        loop {
            while state.free.len() < count && state.slots() < self.slots_max {
                let left = self.slots_max - state.slots();
                if let Err(error) = state.grow(left) {
                    if state.slots() < count {
                        return Err(error);
                    }
                    break;
                }
            }
            if state.slots() < count {
                let (expected, budget) = (count * SLOT_BYTES, self.budget_bytes());
                return Err(Error::new(
                    Kind::Exhausted,
                    format!("staging_bytes={budget}: expected at least {expected} for this storage"),
                ));
            }
            if let Some(rest) = state.free.len().checked_sub(count) {
                let numbers = state.free.split_off(rest);
                return Ok((numbers.into_iter().map(|number| self.slot(&state, number, false)).collect(), waited));
            }
            let began = Instant::now();
            state.waiting_for_many += many;
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting_for_many -= many;
            waited += began.elapsed();
        }
    }

    /// Takes `count` free slots, to be kept between saves, if the budget allows these and `more` besides; never waits.
    /// Kept slots are at most half of the budget, and leave as many as a save needed at once so far, or two of the
    /// longest parts of objects.
    pub fn try_keep(self: &Arc<Staging>, count: usize, more: usize) -> Option<Vec<Slot>> {
        let mut state = self.lock();
        let kept = state.kept + count + more;
        if kept > self.slots_max / 2 || self.slots_max - kept < state.needed.max(2 * PART_SLOTS_MAX) {
            return None;
        }
        while state.free.len() < count && state.slots() < self.slots_max {
            let left = self.slots_max - state.slots();
            state.grow(left).ok()?;
        }
        let rest = state.free.len().checked_sub(count)?;
        state.kept += count;
        let numbers = state.free.split_off(rest);
        Some(numbers.into_iter().map(|number| self.slot(&state, number, true)).collect())
    }

    /// Records that a save needs `count` slots at once; returns how many it can have beside the kept ones.
    pub(crate) fn needs(&self, count: usize) -> usize {
        let mut state = self.lock();
        state.needed = state.needed.max(count);
        self.slots_max - state.kept
    }

    /// Returns the turn of a save that holds slots while it waits for more: only one does at a time.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Slots that are kept between saves.
    pub fn kept(&self) -> usize {
        self.lock().kept
    }

    /// Returns the number of slots in the budget.
    pub fn slots(&self) -> usize {
        self.slots_max
    }

    fn slot(self: &Arc<Staging>, state: &State, number: u32, is_kept: bool) -> Slot {
        let per_slab = SLAB_BYTES / SLOT_BYTES;
        let (slab, within) = (number as usize / per_slab, number as usize % per_slab);
        let address = state.slabs[slab].slot(within);
        Slot { address, number, is_kept, pool: Arc::clone(self) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn slots(&self) -> usize {
        self.slabs.iter().map(Slab::slots).sum()
    }

    /// Makes a slab of at most `slots_max` slots.
    fn grow(&mut self, slots_max: usize) -> Result<()> {
        let slots = slots_max.min(SLAB_BYTES / SLOT_BYTES);
        let slab = Slab::new(slots * SLOT_BYTES)?;
        let first = self.slabs.len() * (SLAB_BYTES / SLOT_BYTES);
        self.free.extend((first..first + slots).rev().map(|number| number as u32));
        self.slabs.push(slab);
        self.lock_pages(self.slabs.len() - 1);
        Ok(())
    }

    fn lock_pages(&mut self, slab: usize) {
        let Some(page_lock) = &self.page_lock else { return };
        match page_lock(self.slabs[slab].memory()) {
            Ok(lock) => self.locks.push(lock),
            Err(error) => _ = self.page_lock_failure.get_or_insert(error.message),
        }
    }
}

/// One mapping, aligned to huge pages.
struct Slab {
    mapping: NonNull<c_void>,
    mapping_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a slab is an address range; slots govern the access to its parts.
#[allow(unsafe_code)]
unsafe impl Send for Slab {}

impl Slab {
    #[allow(unsafe_code)]
    fn new(bytes: usize) -> Result<Slab> {
        let mapping_bytes = bytes + HUGE_PAGE_BYTES;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let mapping = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapping_bytes, protection, flags) }
            .map_err(|errno| {
                Error::new(Kind::Exhausted, format!("no memory for {bytes} bytes of staging memory: {errno}"))
            })?;
        let mapping = NonNull::new(mapping).ok_or_else(|| Error::internal("a mapping at address 0"))?;
        let ahead = mapping.cast::<u8>().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `ahead` is below a huge page, which the mapping is longer than `bytes`.
        let start = unsafe { mapping.cast::<u8>().add(ahead) };
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: neither advice changes what the new range holds. Where it is unknown pages are small, or copied.
            let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) };
        }
        Ok(Slab { mapping, mapping_bytes, start, bytes })
    }

    fn slots(&self) -> usize {
        self.bytes / SLOT_BYTES
    }

    #[allow(unsafe_code)]
    fn slot(&self, index: usize) -> NonNull<u8> {
        debug_assert!(index < self.slots());
        // SAFETY: the slot lies inside the slab.
        unsafe { self.start.add(index * SLOT_BYTES) }
    }

    fn memory(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.start, self.bytes)
    }
}

impl Drop for Slab {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: every slot holds the arena, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr(), self.mapping_bytes) };
    }
}

/// `SLOT_BYTES` of staging memory at an aligned address; goes back to its arena when dropped.
pub struct Slot {
    address: NonNull<u8>,
    number: u32,
    /// `true` if the slot is kept between saves.
    is_kept: bool,
    pool: Arc<Staging>,
}

// SAFETY: a slot is the only one of its number at a time, so it owns its memory as a `Box<[u8]>` does.
#[allow(unsafe_code)]
unsafe impl Send for Slot {}

// SAFETY: a shared slot is only read.
#[allow(unsafe_code)]
unsafe impl Sync for Slot {}

impl Deref for Slot {
    type Target = [u8];

    #[allow(unsafe_code)]
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped as long as the arena lives, which the slot holds, initialised by the kernel, and this slot's
        // alone.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), SLOT_BYTES) }
    }
}

impl DerefMut for Slot {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), SLOT_BYTES) }
    }
}

// SAFETY: the memory is where it is and as it is until the slot is dropped.
#[allow(unsafe_code)]
unsafe impl Buffer for Slot {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.free.push(self.number);
        state.kept -= usize::from(self.is_kept);
        // One that waits for many may not be able to go on yet, while one that waits for one is.
        match state.waiting_for_many {
            0 => self.pool.returned.notify_one(),
            _ => self.pool.returned.notify_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_bounded_and_reused() {
        let pool = Staging::new(STAGING_BYTES_MIN).unwrap();
        let mut slots: Vec<Slot> = (0..4).map(|_| pool.acquire().unwrap()).collect();
        assert!(slots.iter().all(|slot| slot.as_ptr().addr().is_multiple_of(ALIGNMENT)));
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.fill(i as u8);
        }
        assert!(slots.iter().enumerate().all(|(i, slot)| slot.iter().all(|&byte| byte == i as u8)), "slots overlap");
        let waiting = {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || pool.acquire().unwrap().as_ptr() as usize)
        };
        let address = slots[2].as_ptr() as usize;
        drop(slots.remove(2));
        assert_eq!(waiting.join().unwrap(), address, "a fifth slot was made beyond the budget");
        assert_eq!(pool.lock().slabs.len(), 1);
    }

    #[test]
    fn the_slot_used_last_is_handed_out_first_and_little_memory_is_touched() {
        let pool = Staging::new(1 << 40).unwrap();
        let first = pool.acquire().unwrap().as_ptr() as usize;
        for _ in 0..100 {
            assert_eq!(pool.acquire().unwrap().as_ptr() as usize, first);
        }
        let many: Vec<Slot> = (0..65).map(|_| pool.acquire().unwrap()).collect();
        assert_eq!(pool.lock().slabs.len(), 2);
        let mut addresses: Vec<usize> = many.iter().map(|slot| slot.as_ptr() as usize).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= SLOT_BYTES));
    }

    #[test]
    fn a_budget_that_cannot_hold_a_pipeline_is_refused() {
        let Err(error) = Staging::new(STAGING_BYTES_MIN - 1) else { panic!("accepted") };
        assert_eq!(error.kind, Kind::Invalid);
        assert!(error.message.contains("staging_bytes=4194303: expected at least 4194304"), "{error}");
    }

    #[test]
    fn what_there_is_and_what_comes_is_page_locked() {
        struct Locked(Arc<Mutex<i64>>, usize);
        impl Drop for Locked {
            fn drop(&mut self) {
                *self.0.lock().unwrap() -= self.1 as i64;
            }
        }
        let pool = Staging::new(70 << 20).unwrap();
        let first = pool.acquire().unwrap();
        let total = Arc::new(Mutex::new(0));
        let counter = Arc::clone(&total);
        pool.page_lock(Arc::new(move |memory: NonNull<[u8]>| {
            *counter.lock().unwrap() += memory.len() as i64;
            Ok(Box::new(Locked(Arc::clone(&counter), memory.len())) as Box<dyn Send>)
        }));
        assert_eq!(*total.lock().unwrap(), 64 << 20);
        let rest: Vec<Slot> = (0..69).map(|_| pool.acquire().unwrap()).collect();
        assert_eq!(*total.lock().unwrap(), 70 << 20);
        drop((first, rest, pool));
        assert_eq!(*total.lock().unwrap(), 0);
    }

    #[test]
    fn what_is_reserved_is_there_and_no_more_than_the_budget() {
        let pool = Staging::new(150 << 20).unwrap();
        for (wanted, slots) in [(1, 64), (64 << 20, 64), ((64 << 20) + 1, 128), (1 << 40, 150), (0, 150)] {
            pool.reserve(wanted);
            assert_eq!(pool.lock().slots(), slots, "{wanted} bytes");
        }
        let all: Vec<Slot> = (0..150).map(|_| pool.acquire().unwrap()).collect();
        assert_eq!((all.len(), pool.lock().slots()), (150, 150));
    }

    #[test]
    fn what_cannot_be_page_locked_is_used_and_said() {
        let pool = Staging::new(STAGING_BYTES_MIN).unwrap();
        pool.page_lock(Arc::new(|memory: NonNull<[u8]>| Err(Error::internal(format!("{} bytes", memory.len())))));
        assert_eq!(pool.page_lock_failure(), None, "there is no memory yet");
        pool.acquire().unwrap();
        assert_eq!(pool.page_lock_failure().as_deref(), Some("4194304 bytes"));
    }
}
