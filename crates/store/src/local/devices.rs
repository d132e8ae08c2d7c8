//! The fastest way of reading and writing on a device: measured once per device, where it matters.
//!
//! Writes are measured on a separate file before a large object is written: the wrong way would cost the training time.
//! Reads are measured as they come: some one way, some the other, and then all the faster way.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{ALIGNMENT, uninterrupted};
use crate::disk::{Disk, Errno, Sys};
use crate::{Result, name};

/// From this size on an object repays the tens of milliseconds that a measurement takes.
pub(super) const WORTH_BYTES: u64 = 64 << 20;

/// Written in each trial of each way, and how often at most.
const WRITE_BYTES: u64 = 16 << 20;
const WRITE_TRIALS: usize = 6;
/// Read in each way before it is decided.
const READ_BYTES: u64 = 64 << 20;
/// A longer pause between reads is not due to the device.
const PAUSE: Duration = Duration::from_millis(200);
const REQUEST_BYTES: usize = 1 << 20;
const THREADS: u64 = 4;

/// Measurements of the machine's storage, device by device. Shared by the stores of one process, so that nothing is
/// measured twice.
#[derive(Default)]
pub struct Devices {
    known: Mutex<HashMap<u64, Known>>,
}

#[derive(Default)]
struct Known {
    writes_buffered: Option<bool>,
    /// Whether a name was claimed there.
    publishes: bool,
    reads: Reads,
}

/// Reads of what is not in the page cache, through it and past it.
#[derive(Default)]
struct Reads {
    buffered: Trial,
    direct: Trial,
}

#[derive(Default)]
struct Trial {
    began: Option<Instant>,
    last: Option<Instant>,
    bytes: u64,
    /// How long it took, once enough was read.
    took: Option<Duration>,
}

impl Trial {
    fn begin(&mut self, now: Instant) {
        if self.took.is_none() && self.last.is_none_or(|last| now.duration_since(last) > PAUSE) {
            *self = Trial { began: Some(now), last: Some(now), ..Trial::default() };
        }
    }

    fn end(&mut self, now: Instant, bytes: u64) {
        self.bytes += bytes;
        self.last = Some(now);
        if let Some(began) = self.began.filter(|_| self.took.is_none() && self.bytes >= READ_BYTES) {
            self.took = Some(now.duration_since(began).mul_f64(READ_BYTES as f64 / self.bytes as f64));
        }
    }
}

impl Reads {
    fn of(&mut self, direct: bool) -> &mut Trial {
        if direct { &mut self.direct } else { &mut self.buffered }
    }

    /// Which way the next read goes.
    fn go_direct(&self) -> bool {
        match (self.direct.took, self.buffered.took) {
            (None, _) => true,
            (Some(_), None) => false,
            // Clearly faster: through the page cache bytes are copied once more.
            (Some(direct), Some(buffered)) => buffered * 3 >= direct * 2,
        }
    }
}

impl Devices {
    /// Whether large objects are written faster through the page cache, on a device that takes direct writes too; one
    /// measures at a time. `false` without a conclusive measurement.
    pub(super) fn writes_buffered(&self, device: u64, measure: impl FnOnce() -> Option<bool>) -> bool {
        let mut known = self.lock();
        let answer = &mut known.entry(device).or_default().writes_buffered;
        if answer.is_none() {
            *answer = measure();
        }
        answer.unwrap_or(false)
    }

    /// Tries once whether names can be claimed on a device.
    pub(super) fn publishes(&self, device: u64, attempt: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.lock().entry(device).or_default().publishes {
            attempt()?;
            self.lock().entry(device).or_default().publishes = true;
        }
        Ok(())
    }

    /// Whether the next read of a large object that is not in the page cache goes past it.
    pub(super) fn reads_direct(&self, device: u64) -> bool {
        self.lock().entry(device).or_default().reads.go_direct()
    }

    /// Notes that a read in one of the two ways is announced, or made.
    pub(super) fn begun(&self, device: u64, direct: bool) {
        self.lock().entry(device).or_default().reads.of(direct).begin(Instant::now());
    }

    /// Makes a read in one of the two ways, and measures it.
    pub(super) fn tried<T>(&self, device: u64, direct: bool, bytes: u64, read: impl FnOnce() -> T) -> T {
        self.begun(device, direct);
        let read = read();
        self.lock().entry(device).or_default().reads.of(direct).end(Instant::now(), bytes);
        read
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether writing through the page cache is clearly faster in `dir`. `None` if neither could be tried.
pub(super) fn writes_faster_buffered(disk: &impl Disk, dir: &Path) -> Option<bool> {
    buffered_is_clearly_faster(|direct| written(disk, dir, direct))
}

/// Whether it is three times as fast: both are flushed, so that it is faster only on storage that is bad at direct
/// writes, and the processor copies each byte once more for it, which costs the training time. `took` returns how long
/// a trial took, direct or not. A device pauses now and then for longer than a trial takes, so one trial of each is not
/// conclusive, and the more expensive way has to win all of them.
fn buffered_is_clearly_faster(mut took: impl FnMut(bool) -> Option<Duration>) -> Option<bool> {
    let (mut direct, mut buffered) = (Duration::MAX, Duration::MAX);
    for trial in 1..=WRITE_TRIALS {
        direct = direct.min(took(true)?);
        buffered = buffered.min(took(false)?);
        if trial > 1 && direct <= buffered * 3 {
            return Some(false);
        }
    }
    Some(true)
}

fn written(disk: &impl Disk, dir: &Path, direct: bool) -> Option<Duration> {
    let path = dir.join(name::temporary().ok()?);
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

/// Makes requests one after the other on each of a few threads, until all `bytes` are done.
fn in_requests(bytes: u64, request: impl Fn(&[u8], u64) -> Sys<usize> + Sync) -> Sys<()> {
    let next = AtomicU64::new(0);
    let lane = || -> Sys<()> {
        // Not zeros, of which a device might make nothing.
        let memory = vec![0xa5; REQUEST_BYTES + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let buffer = &memory[start..start + REQUEST_BYTES];
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
    use std::sync::Arc;

    use super::*;
    use crate::conformance::{pattern, write_object};
    use crate::disk::RealDisk;
    use crate::local::LocalStore;
    use crate::simdisk::SimDisk;
    use crate::{Fetch, ObjectReader, Store, Upcoming};

    /// A store with a known fastest way.
    fn store(disk: &SimDisk, writes_buffered: bool, reads_direct: bool) -> LocalStore<SimDisk> {
        let devices = Arc::new(Devices::default());
        devices.writes_buffered(0, || Some(writes_buffered));
        for (direct, took) in [(false, 2), (true, if reads_direct { 2 } else { 4 })] {
            devices.lock().entry(0).or_default().reads.of(direct).took = Some(Duration::from_secs(took));
        }
        LocalStore { devices, ..LocalStore::on(disk.clone(), "/run".into()).unwrap() }
    }

    fn calls(disk: &SimDisk, name: &str) -> usize {
        disk.calls().iter().filter(|call| call.name == name).count()
    }

    /// Reads a range into memory at an aligned address, or beside one.
    fn read(object: &dyn ObjectReader, offset: u64, bytes: usize, beside: usize) -> Vec<u8> {
        let mut memory = vec![0; bytes + ALIGNMENT + beside];
        let start = memory.as_ptr().align_offset(ALIGNMENT) + beside;
        object.read_at(offset, &mut memory[start..start + bytes]).unwrap();
        memory[start..start + bytes].to_vec()
    }

    #[test]
    fn large_objects_are_written_and_read_in_the_fastest_way() {
        let contents = pattern(1, WORTH_BYTES as usize + 5000);
        for (writes_buffered, reads_direct) in [(false, true), (true, false)] {
            let disk = SimDisk::new();
            let store = store(&disk, writes_buffered, reads_direct);
            write_object(&store, "d/large", &contents).unwrap();
            // Three pieces, through the page cache or past it; one page more is the probe.
            assert_eq!(calls(&disk, "pwrite"), if writes_buffered { 3 } else { 0 });
            assert_eq!(calls(&disk, "pwrite_direct"), if writes_buffered { 1 } else { 4 });
            assert_eq!(calls(&disk, "dont_need"), if writes_buffered { 3 } else { 0 });

            let object = store.open_head("d/large", 0).unwrap().0;
            for (offset, bytes, beside) in [
                (0, 1 << 20, 0),
                (4096, (1 << 20) + 777, 0),
                (4097, 1 << 20, 0),
                (8192, 1 << 20, 64),
                (contents.len() as u64 - 200_000, 200_000, 0),
            ] {
                let range = offset as usize..offset as usize + bytes;
                assert!(read(&*object, offset, bytes, beside) == contents[range], "{offset} {bytes} {beside}");
            }
            // The two that are aligned.
            assert_eq!(calls(&disk, "pread_direct"), if reads_direct { 2 } else { 0 });
            let expected = if reads_direct { Fetch::WhenRead } else { Fetch::Begun };
            assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &Upcoming::default()), expected);
            // What others will read too goes into the page cache all the same.
            let shared = Upcoming { shared_on_host: true, ..Upcoming::default() };
            assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &shared), Fetch::Begun);
            assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
            assert_eq!(calls(&disk, "pread_direct"), if reads_direct { 2 } else { 0 });
        }
    }

    #[test]
    fn a_kernel_that_cannot_tell_what_is_cached_is_asked_once() {
        let disk = SimDisk::new();
        let store = store(&disk, false, true);
        let contents = pattern(1, WORTH_BYTES as usize);
        write_object(&store, "d/large", &contents).unwrap();
        disk.refuse("cached_bytes", Errno::NOSYS);
        let object = store.open_head("d/large", 0).unwrap().0;
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &Upcoming::default()), Fetch::WhenRead);
        assert!(object.page_cache().unwrap().lend(0, 1 << 20).is_none());
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
        assert_eq!((calls(&disk, "reads_at_once"), calls(&disk, "pread_direct")), (1, 1));
    }

    #[test]
    fn small_objects_are_not_worth_a_measurement() {
        let disk = SimDisk::new();
        let store = LocalStore::on(disk.clone(), "/run".into()).unwrap();
        write_object(&store, "d/small", &pattern(1, 100_000)).unwrap();
        store.open_head("d/small", 0).unwrap();
        assert_eq!(calls(&disk, "pwrite_direct"), 4);
        assert_eq!(calls(&disk, "pread_direct") + calls(&disk, "pread"), 0);
    }

    #[test]
    fn a_refusal_that_comes_late_is_no_failure() {
        let disk = SimDisk::new();
        let store = store(&disk, false, true);
        let contents = pattern(1, WORTH_BYTES as usize);
        write_object(&store, "d/large", &contents).unwrap();
        disk.refuse("pread_direct", Errno::INVAL);
        let object = store.open_head("d/large", 0).unwrap().0;
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
    }

    #[test]
    fn a_device_is_measured_once_unless_nothing_was_learned() {
        let devices = Devices::default();
        assert!(!devices.writes_buffered(1, || None));
        assert!(devices.writes_buffered(1, || Some(true)));
        assert!(devices.writes_buffered(1, || panic!("measured twice")));
        assert!(!devices.writes_buffered(2, || Some(false)));
    }

    #[test]
    fn writes_go_through_the_page_cache_only_where_that_is_clearly_faster() {
        // How long each trial takes, the last one again and again; and how many there were.
        let decide = |direct: &[u64], buffered: &[u64]| {
            let mut trials = [0, 0];
            let decided = buffered_is_clearly_faster(|is_direct| {
                let took = if is_direct { direct } else { buffered };
                let trial = &mut trials[usize::from(is_direct)];
                *trial += 1;
                Some(Duration::from_millis(took[took.len().min(*trial) - 1]))
            });
            (decided, trials[1])
        };
        assert_eq!(decide(&[10], &[3]), (Some(true), WRITE_TRIALS));
        assert_eq!(decide(&[10], &[4]), (Some(false), 2));
        assert_eq!(decide(&[7], &[7]), (Some(false), 2));
        // A pause of the device, in one way and in the other.
        assert_eq!(decide(&[50, 9], &[8]), (Some(false), 2));
        assert_eq!(decide(&[50, 50, 50, 9], &[8]), (Some(false), 4));
        assert_eq!(decide(&[10], &[60, 3]), (Some(true), WRITE_TRIALS));
        assert_eq!(buffered_is_clearly_faster(|_| None), None);
    }

    #[test]
    fn reads_are_tried_both_ways_and_then_go_the_faster_one() {
        for direct_is_faster in [false, true] {
            let devices = Devices::default();
            let read = |bytes| {
                let direct = devices.reads_direct(7);
                let pace = if direct == direct_is_faster { 1 } else { 25 };
                devices.tried(7, direct, bytes, || std::thread::sleep(Duration::from_millis(pace)));
                direct
            };
            let ways: Vec<bool> = (0..24).map(|_| read(READ_BYTES / 8)).collect();
            assert_eq!(ways, [[true; 8], [false; 8], [direct_is_faster; 8]].concat());
            // Another device is another matter.
            assert!(devices.reads_direct(8));
            // A pause is not the device's.
            let devices = Devices::default();
            devices.tried(7, true, READ_BYTES / 2, || ());
            std::thread::sleep(PAUSE + Duration::from_millis(20));
            devices.tried(7, true, READ_BYTES / 2, || ());
            assert!(devices.reads_direct(7), "half of the reads were long ago");
            devices.tried(7, true, READ_BYTES / 2, || ());
            assert!(!devices.reads_direct(7));
        }
    }

    #[test]
    fn measurements_end_and_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        writes_faster_buffered(&RealDisk, dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(writes_faster_buffered(&RealDisk, &dir.path().join("absent")), None);
    }
}
