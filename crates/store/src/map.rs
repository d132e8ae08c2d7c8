//! Maps objects into memory, to look at them without a copy. Loads never do: they read into memory of their own.

use std::ffi::c_void;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::sys::{Errno, Sys};

/// Bytes of an object as they lie in the page cache; unmapped when dropped.
///
/// The object must not change, which holds once it is finished: reading bytes that were truncated meanwhile, or that
/// the device cannot read, ends the process.
pub struct Mapping {
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the mapping is private to this value and its bytes are only looked at.
#[allow(unsafe_code)]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Mapping {}

impl Mapping {
    #[allow(unsafe_code)]
    pub(crate) fn new(file: &OwnedFd, bytes: u64) -> Sys<Mapping> {
        let bytes = usize::try_from(bytes).map_err(|_| Errno::OVERFLOW)?;
        if bytes == 0 {
            return Ok(Mapping { address: NonNull::dangling(), bytes });
        }
        // Writable and private, so that a program that writes there changes its own copy of a page.
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) }?;
        Ok(Mapping { address: NonNull::new(address).ok_or(Errno::NOMEM)?, bytes })
    }
}

impl Deref for Mapping {
    type Target = [u8];

    #[allow(unsafe_code)]
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives; the object's contract is that its bytes stay as they are.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: nothing borrows from a value that is dropped.
            let _ = unsafe { rustix::mm::munmap(self.address.as_ptr(), self.bytes) };
        }
    }
}
