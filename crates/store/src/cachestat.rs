//! Measures how much of a file lies in the page cache, without reading the file.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::sys::{Errno, Sys};

/// Number of the system call, the same on all architectures; older headers of the C library lack it.
const SYS_CACHESTAT: libc::c_long = 451;

/// Layout of `struct cachestat_range` in `linux/mman.h`.
#[repr(C)]
struct Range {
    offset: u64,
    bytes: u64,
}

/// Layout of `struct cachestat` in `linux/mman.h`, in pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns the bytes of the cached pages that the range touches.
///
/// # Errors
/// `ENOSYS` before Linux 6.5 or under a seccomp filter, `EPERM` for a file that this user neither owns nor may write.
#[allow(unsafe_code)]
pub(crate) fn cached_bytes(file: &OwnedFd, offset: u64, bytes: u64) -> Sys<u64> {
    let (range, mut counts) = (Range { offset, bytes }, Counts::default());
    let (from, to): (*const Range, *mut Counts) = (&range, &mut counts);
    // SAFETY: the kernel reads the one and writes the other, which have the layouts that it expects and outlive the
    // call.
    let (answer, page) =
        unsafe { (libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), from, to, 0), libc::sysconf(libc::_SC_PAGESIZE)) };
    if answer != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS));
    }
    Ok(counts.cached * u64::try_from(page).unwrap_or(0))
}

/// Tries the call on a file in memory.
///
/// # Errors
/// As [`cached_bytes`]; the kernel's error if no such file can be made.
pub(crate) fn try_out() -> Sys<()> {
    let file = rustix::fs::memfd_create("shardfast-probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    cached_bytes(&file, 0, 1).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, RealDisk};

    #[test]
    fn looking_at_the_page_cache_brings_nothing_there() {
        const BYTES: usize = 3 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![1; BYTES]).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        let file: OwnedFd = std::fs::File::open(&path).unwrap().into();
        if let Err(errno) = cached_bytes(&file, 0, BYTES as u64) {
            eprintln!("skipped: no cachestat here: {errno}");
            return;
        }
        let cached = |offset, bytes| RealDisk.cached_bytes(&file, offset, bytes).unwrap();
        assert_eq!(cached(0, BYTES as u64), BYTES as u64);
        assert_eq!(cached(1 << 20, 4096), 4096);
        RealDisk.dont_need(&file, 0, BYTES as u64).unwrap();
        if cached(0, BYTES as u64) == BYTES as u64 {
            eprintln!("skipped: this file system lies in memory");
            return;
        }
        for at in 0..3 {
            assert_eq!(cached(at << 20, 1 << 20), 0);
        }
        assert_eq!(cached_bytes(&file, 0, BYTES as u64), Ok(0), "a look brought something");
    }
}
