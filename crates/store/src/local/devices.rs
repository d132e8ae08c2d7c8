//! Which way of reading and writing is the fastest on the storage at hand: measured once per device, where it matters.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{ALIGNMENT, temporary, uninterrupted};
use crate::disk::{Disk, Errno, Sys};

/// From this size on an object repays the tens of milliseconds that a measurement takes.
pub(super) const WORTH_BYTES: u64 = 64 << 20;

const WRITE_BYTES: u64 = 32 << 20;
const READ_BYTES: u64 = 8 << 20;
const REQUEST_BYTES: usize = 1 << 20;
const THREADS: u64 = 4;

/// What is known about the machine's storage, device by device. Shared by the stores of one process, so that nothing is
/// measured twice.
#[derive(Default)]
pub struct Devices {
    known: Mutex<HashMap<u64, Known>>,
}

#[derive(Clone, Copy, Default)]
struct Known {
    writes_buffered: Option<bool>,
    reads_direct: Option<bool>,
}

impl Devices {
    /// Whether large objects are written faster through the page cache, on a device that takes direct writes too.
    pub(super) fn writes_buffered(&self, device: u64, measure: impl FnOnce() -> Option<bool>) -> bool {
        self.known(device, |known| &mut known.writes_buffered, measure)
    }

    /// Whether large objects that are not in the page cache are read faster past it.
    pub(super) fn reads_direct(&self, device: u64, measure: impl FnOnce() -> Option<bool>) -> bool {
        self.known(device, |known| &mut known.reads_direct, measure)
    }

    /// What is known, or measured now; one measures at a time. `false` while a measurement told nothing.
    fn known(
        &self,
        device: u64,
        which: impl Fn(&mut Known) -> &mut Option<bool>,
        measure: impl FnOnce() -> Option<bool>,
    ) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = which(known.entry(device).or_default());
        if answer.is_none() {
            *answer = measure();
        }
        answer.unwrap_or(false)
    }
}

/// Whether writing through the page cache is clearly faster in `dir`: its bytes pass through memory once more, which is
/// taken from the training. `None` if neither could be tried.
pub(super) fn writes_faster_buffered(disk: &impl Disk, dir: &Path) -> Option<bool> {
    let direct = written(disk, dir, true)?;
    let buffered = written(disk, dir, false)?;
    Some(buffered * 3 < direct * 2)
}

fn written(disk: &impl Disk, dir: &Path, direct: bool) -> Option<Duration> {
    let path = temporary(dir).ok()?;
    let timed = || -> Sys<Duration> {
        let file = disk.create_new(&path, direct)?;
        match disk.fallocate(&file, WRITE_BYTES) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(errno) => return Err(errno),
        }
        let began = Instant::now();
        in_requests(WRITE_BYTES, |buffer, offset| {
            let written = uninterrupted(|| disk.pwrite(&file, buffer, offset))?;
            if !direct {
                let _ = disk.dont_need(&file, offset, written as u64);
            }
            Ok(written)
        })?;
        disk.fdatasync(&file)?;
        Ok(began.elapsed())
    };
    let timed = timed();
    let _ = disk.unlink(&path);
    timed.ok()
}

/// Whether reading past the page cache is faster in the file at `path` of `bytes` bytes. `None` if it could not be tried
/// or parts of the file are in the page cache.
pub(super) fn reads_faster_direct(disk: &impl Disk, path: &Path, bytes: u64) -> Option<bool> {
    let buffered_from = (bytes / 4).next_multiple_of(ALIGNMENT as u64);
    let direct_from = (bytes / 2).next_multiple_of(ALIGNMENT as u64);
    let timed = |from: u64, direct: bool| -> Sys<Option<Duration>> {
        let file = uninterrupted(|| disk.open_read(path, direct))?;
        if disk.is_cached(&disk.open_read(path, false)?, from + READ_BYTES / 2)? {
            return Ok(None);
        }
        let began = Instant::now();
        if !direct {
            let _ = disk.will_need(&file, from, READ_BYTES);
        }
        in_requests(READ_BYTES, |buffer, offset| uninterrupted(|| disk.pread(&file, buffer, from + offset)))?;
        Ok(Some(began.elapsed()))
    };
    let buffered = timed(buffered_from, false).ok()??;
    let direct = timed(direct_from, true).ok()??;
    Some(direct < buffered)
}

/// Makes requests one after the other on each of a few threads, until all `bytes` are done.
fn in_requests(bytes: u64, request: impl Fn(&mut [u8], u64) -> Sys<usize> + Sync) -> Sys<()> {
    let next = AtomicU64::new(0);
    let lane = || -> Sys<()> {
        // Not zeros, of which a device might make nothing.
        let mut memory = vec![0xa5; REQUEST_BYTES + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let buffer = &mut memory[start..start + REQUEST_BYTES];
        loop {
            let offset = next.fetch_add(REQUEST_BYTES as u64, Ordering::Relaxed);
            if offset >= bytes {
                return Ok(());
            }
            if request(buffer, offset)? == 0 {
                return Err(Errno::IO);
            }
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..THREADS).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().unwrap_or(Err(Errno::IO)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    #[test]
    fn a_device_is_measured_once_unless_nothing_was_learned() {
        let devices = Devices::default();
        assert!(!devices.writes_buffered(1, || None));
        assert!(devices.writes_buffered(1, || Some(true)));
        assert!(devices.writes_buffered(1, || panic!("measured twice")));
        assert!(!devices.writes_buffered(2, || Some(false)));
        assert!(!devices.reads_direct(1, || Some(false)));
        assert!(!devices.reads_direct(1, || panic!("measured twice")));
    }

    #[test]
    fn measurements_end_and_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        writes_faster_buffered(&RealDisk, dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let path = dir.path().join("cached");
        std::fs::write(&path, vec![1; 32 << 20]).unwrap();
        assert_eq!(reads_faster_direct(&RealDisk, &path, 32 << 20), None, "what is cached tells nothing");
        assert_eq!(writes_faster_buffered(&RealDisk, &dir.path().join("absent")), None);
    }
}
