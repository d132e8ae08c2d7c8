//! Memory that a rank shares with others of its machine: it packs their bytes there, and they copy them out.
//!
//! It is anonymous memory with a descriptor (`memfd_create`), sealed so that it cannot be truncated under its readers,
//! and only its owner can write it. It lasts for one load, and is cut into slots as the arena is. Messages name the
//! slots that a rank may read; the owner does not touch such a slot until all its readers have said that they are done.
//!
//! Storage is not read into it: most systems give shared memory no huge pages, and direct reads into it run at half the
//! rate.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::SLOT_BYTES;

/// Enough that ranks need not wait for each other between rounds where each read fills one slot.
const SLOTS_ENOUGH: u64 = 48;

/// Least number of slots: one for each round under way.
const SLOTS_MIN: u64 = 4;

/// The part of the staging budget that shared memory takes at most, beside the arena.
pub(crate) const BUDGET_PART: u64 = 8;

/// Seals against changes of the size, and against writes by other processes.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// This rank's shared memory.
pub struct SharedMemory {
    descriptor: Arc<OwnedFd>,
    mapping: Mapping,
    free: Mutex<Vec<u32>>,
}

/// Another rank's shared memory; read only.
pub struct View(Mapping);

impl SharedMemory {
    /// Makes shared memory of a rank that stages in `budget_bytes`, of `slots_wanted` slots if they are in the budget.
    /// Returns `None` if that is too little, or the system refuses.
    pub fn new(budget_bytes: u64, slots_wanted: u64) -> Option<Arc<SharedMemory>> {
        let slots = (budget_bytes / BUDGET_PART / SLOT_BYTES as u64).min(slots_wanted.max(SLOTS_ENOUGH));
        if slots < SLOTS_MIN {
            return None;
        }
        let bytes = slots as usize * SLOT_BYTES;
        let made = || -> rustix::io::Result<SharedMemory> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let descriptor = rustix::fs::memfd_create("shardfast", flags)?;
            rustix::fs::ftruncate(&descriptor, bytes as u64)?;
            let mapping = Mapping::new(descriptor.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
            rustix::fs::fcntl_add_seals(&descriptor, SEALS | SealFlags::SEAL)?;
            let free = Mutex::new((0..slots as u32).rev().collect());
            Ok(SharedMemory { descriptor: Arc::new(descriptor), mapping, free })
        };
        made().ok().map(Arc::new)
    }

    /// Returns the descriptor with which other ranks map it.
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.descriptor)
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.mapping.bytes / SLOT_BYTES
    }

    /// Returns the number of free slots.
    pub fn free_slots(&self) -> usize {
        self.lock().len()
    }

    /// Takes a free slot, the one used last; `None` while all are in use. Contents are arbitrary.
    pub fn take(self: &Arc<SharedMemory>) -> Option<SharedSlot> {
        let number = self.lock().pop()?;
        Some(SharedSlot { number, memory: Arc::clone(self) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `SLOT_BYTES` of shared memory; goes back to it when dropped.
pub struct SharedSlot {
    number: u32,
    memory: Arc<SharedMemory>,
}

impl SharedSlot {
    /// Returns the number of the slot in its shared memory.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the memory of the slot.
    #[allow(unsafe_code)]
    pub fn bytes(&mut self) -> &mut [u8] {
        let at = self.number as usize * SLOT_BYTES;
        // SAFETY: inside the mapping, which the slot holds. A slot is the only one of its number at a time; another
        // process reads it only after this borrow has ended, and is done before the slot is free.
        unsafe { std::slice::from_raw_parts_mut(self.memory.mapping.start.cast::<u8>().add(at).as_ptr(), SLOT_BYTES) }
    }
}

impl Drop for SharedSlot {
    fn drop(&mut self) {
        self.memory.lock().push(self.number);
    }
}

impl View {
    /// Maps another rank's shared memory; returns `None` for a descriptor of something else, or with missing seals.
    pub fn of(descriptor: &OwnedFd) -> Option<View> {
        let seals = rustix::fs::fcntl_get_seals(descriptor).ok()?;
        let bytes = rustix::fs::fstat(descriptor).ok()?.st_size;
        let bytes = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0 && seals.contains(SEALS))?;
        Mapping::new(descriptor.as_fd(), bytes, ProtFlags::READ).ok().map(View)
    }

    /// Returns the bytes that the owner names; `None` if they lie outside.
    #[allow(unsafe_code)]
    pub fn bytes(&self, at: u64, bytes: u64) -> Option<&[u8]> {
        let end = at.checked_add(bytes).filter(|&end| end <= self.0.bytes as u64)?;
        // SAFETY: inside the mapping, whose size is sealed; the owner does not change the slot until this rank says
        // that it is done with it.
        Some(unsafe {
            std::slice::from_raw_parts(self.0.start.cast::<u8>().add(at as usize).as_ptr(), (end - at) as usize)
        })
    }
}

/// Shared memory, mapped.
struct Mapping {
    start: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: an address range; slots and messages govern the access to its parts.
#[allow(unsafe_code)]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Mapping {}

impl Mapping {
    #[allow(unsafe_code)]
    fn new(descriptor: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> rustix::io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, descriptor, 0) }?;
        let mapping = Mapping { start: NonNull::new(start).ok_or(Errno::NOMEM)?, bytes };
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: neither advice changes what the range holds. Where it is unknown pages are small, or inherited.
            let _ = unsafe { rustix::mm::madvise(start, bytes, advice) };
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: nothing borrows from a value that is dropped; slots hold their shared memory.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_seen_through_the_descriptor() {
        let memory = SharedMemory::new(64 << 20, 0).unwrap();
        assert_eq!(memory.slots(), 8);
        let view = View::of(&memory.descriptor()).unwrap();
        let mut slots: Vec<SharedSlot> = std::iter::from_fn(|| memory.take()).collect();
        assert_eq!((slots.len(), memory.free_slots()), (8, 0));
        for slot in &mut slots {
            let number = slot.number() as u8;
            slot.bytes().fill(number + 1);
        }
        for slot in &slots {
            let seen = view.bytes(u64::from(slot.number()) << 20, 1 << 20).unwrap();
            assert!(seen.iter().all(|&byte| byte == slot.number() as u8 + 1));
        }
        assert!(view.bytes(8 << 20, 1).is_none() && view.bytes(u64::MAX, 2).is_none());
        let last = slots.pop().unwrap().number();
        assert_eq!(memory.take().unwrap().number(), last);
    }

    #[test]
    fn nobody_can_cut_a_window_short_or_write_into_it() {
        let memory = SharedMemory::new(1 << 30, 0).unwrap();
        let descriptor = memory.descriptor();
        assert_eq!(rustix::fs::ftruncate(&*descriptor, 0), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&*descriptor, b"x", 0), Err(Errno::PERM));
        let writable = Mapping::new(descriptor.as_fd(), SLOT_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        assert_eq!(writable.err(), Some(Errno::PERM));
        // Unsealed memory, and a descriptor of no memory, are refused.
        let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 1 << 20).unwrap();
        assert!(View::of(&open).is_none());
        assert!(View::of(&OwnedFd::from(std::fs::File::open("/dev/null").unwrap())).is_none());
    }

    #[test]
    fn a_budget_with_no_room_for_a_window_has_none() {
        assert!(SharedMemory::new(31 << 20, 0).is_none());
        for (budget, wanted, slots) in [(u64::MAX, 0, 48), (u64::MAX, 576, 576), (1 << 30, 576, 128)] {
            assert_eq!(SharedMemory::new(budget, wanted).unwrap().slots(), slots);
        }
    }
}
