//! Reads one file, and decides for each range how: here and nowhere else.
//!
//! ```text
//! announced, and most of it in the page cache     copied from there; lent in place if it is long
//! announced, large file, no other reader          read past the page cache when it is read
//! announced, to be lent in whole units            fetched by page faults of its reader, and lent
//! announced, else                                 fetched ahead by the kernel, then copied
//! else, large file, aligned memory, not cached    read past the page cache
//! else                                            fetched by the kernel as a whole if it is long, then copied
//! ```
//! [`PageCache::prefetch`] takes the announcement and answers how the bytes come ([`Fetch`]), by which the caller
//! chooses its threads; [`ObjectReader::read_at`] copies, [`PageCache::lend`] lends.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{ALIGNMENT, failed, of_errno, uninterrupted};
use crate::disk::{Disk, Errno, Sys};
use crate::error::too_short;
use crate::map::{Lending, UNIT_BYTES};
use crate::observe::{Action, Reports};
use crate::{Fetch, Kind, Lent, Mapping, ObjectReader, PageCache, Result, Upcoming, one_by_one};

/// Length, in bytes, from which a read that must wait for the device is announced to the kernel as a whole. The
/// kernel's own read-ahead guesses from the order of requests, and several ranges of one file read at a time mislead
/// it.
const PREFETCH_BYTES_MIN: usize = 128 * 1024;

/// Length, in bytes, from which a cached range is lent: mapping and unmapping a shorter one takes as long as copying
/// it.
const LENT_BYTES_MIN: usize = 256 * 1024;

/// Way in which an announced range gets into the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Announced {
    /// The kernel was asked to prefetch it.
    Range,
    /// Page faults of its reader fetch it.
    Units,
    /// Nothing fetches it: it was missing, and another query of the kernel would have begun to fetch it.
    Not,
}

fn is_most_of(bytes: u64) -> impl Fn(u64) -> bool {
    move |cached| cached >= bytes / 2
}

/// An open file for reading.
pub(super) struct LocalReader<D: Disk> {
    disk: Arc<D>,
    file: D::File,
    /// Handle of the same file past the page cache, if it is large.
    direct: Option<D::File>,
    /// Offsets of announced ranges that were not in the page cache, and how they get there.
    announced: Mutex<BTreeMap<u64, Announced>>,
    /// Mapping, made when a range is first to be lent; `None` if that is not possible.
    mapping: OnceLock<Option<Arc<Mapping>>>,
    lending: Arc<Lending>,
    path: PathBuf,
    bytes: u64,
    name: String,
    pub(super) reports: Reports,
}

impl<D: Disk> ObjectReader for LocalReader<D> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        Some(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reports.during(Action::Read, &self.name, (offset, buf.len()), || self.read_once(offset, buf))
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reports.during(Action::Read, &self.name, (offset, buf.len()), || self.read_past(offset, buf))
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }
}

impl<D: Disk> PageCache for LocalReader<D> {
    fn map(&self) -> Result<Mapping> {
        uninterrupted(|| self.disk.map(&self.file, self.bytes)).map_err(|errno| match errno {
            Errno::NODEV => {
                failed(Kind::Unsupported, "map", &self.path, "the file system cannot map files into memory")
            }
            errno => of_errno("map", &self.path, errno),
        })
    }

    fn prefetch(&self, offset: u64, bytes: u64, upcoming: &Upcoming) -> Fetch {
        // The other query would fetch the first page, so that the next query would find it.
        if self.direct.is_some() && self.disk.cached_bytes(&self.file, offset, bytes).is_ok_and(is_most_of(bytes)) {
            return Fetch::Cached;
        }
        if !upcoming.shared_on_host && self.direct.is_some() {
            return Fetch::WhenRead;
        }
        if self.direct.is_some() && self.is_cached(offset, bytes) {
            return Fetch::Cached;
        }
        if self.fetches_units(offset, bytes, &upcoming.lent) {
            // By its reader's page faults: fetched pages are used in place, without a copy out of the page cache.
            self.announced().insert(offset, Announced::Units);
            return Fetch::WhenLent;
        }
        if self.direct.is_some() {
            self.announced().insert(offset, Announced::Range);
        }
        // Only a hint: a file system that does not support it is read all the same.
        if self.disk.will_need(&self.file, offset, bytes).is_ok() { Fetch::Begun } else { Fetch::WhenRead }
    }

    fn cached_bytes(&self, offset: u64, bytes: u64) -> Option<u64> {
        self.cached(offset, bytes).ok()
    }

    fn lend(&self, offset: u64, bytes: usize) -> Option<Lent<'_>> {
        let began = self.reports.begin();
        let lent = self.lent(offset, bytes)?;
        self.reports.end(began, Action::Read, &self.name, offset..offset + bytes as u64, None);
        Some(lent)
    }
}

impl<D: Disk> LocalReader<D> {
    /// Makes a reader of an open file; `direct` is a second handle, past the page cache.
    pub(super) fn new(
        disk: Arc<D>,
        file: D::File,
        direct: Option<D::File>,
        lending: Arc<Lending>,
        (path, name): (PathBuf, &str),
        bytes: u64,
    ) -> Self {
        let (announced, mapping, name, reports) =
            (Mutex::default(), OnceLock::new(), name.to_owned(), Reports::default());
        Self { disk, file, direct, announced, mapping, lending, path, bytes, name, reports }
    }

    /// Reads a range as its announcement and the page cache suggest.
    fn read_once(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = buf.len() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(too_short(self.path.to_string_lossy(), self.bytes, offset, buf.len()));
        }
        let announced = self.announced().remove(&offset);
        if matches!(announced, Some(Announced::Range | Announced::Units)) {
            return self.fill(offset, buf);
        }
        let is_missing = announced == Some(Announced::Not);
        if buf.len() < PREFETCH_BYTES_MIN || !is_missing && self.is_cached(offset, bytes) {
            return self.fill(offset, buf);
        }
        let is_aligned = offset.is_multiple_of(ALIGNMENT as u64) && buf.as_ptr().addr().is_multiple_of(ALIGNMENT);
        match self.direct.as_ref().filter(|_| is_aligned) {
            Some(direct) => self.fill_past(direct, offset, buf),
            None => {
                let _ = self.disk.will_need(&self.file, offset, bytes);
                self.fill(offset, buf)
            }
        }
    }

    /// Reads a range from the device, as far as the page cache gives it up.
    fn read_past(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let _ = self.disk.dont_need(&self.file, offset, buf.len() as u64);
        let is_aligned = offset.is_multiple_of(ALIGNMENT as u64) && buf.as_ptr().addr().is_multiple_of(ALIGNMENT);
        // Opened for this, however small the file is: what is mapped or in use stays in the page cache as it is.
        match uninterrupted(|| self.disk.open_read(&self.path, true)) {
            Ok(direct) if is_aligned => self.fill_past(&direct, offset, buf),
            _ => self.fill(offset, buf),
        }
    }

    /// Lends a range that lies in the page cache, or that page faults fetch best.
    fn lent(&self, offset: u64, bytes: usize) -> Option<Lent<'_>> {
        let end = offset.checked_add(bytes as u64).filter(|&end| end <= self.bytes)?;
        let range = usize::try_from(offset).ok()?..usize::try_from(end).ok()?;
        let announced = self.announced().get(&offset).copied();
        if bytes < LENT_BYTES_MIN || announced == Some(Announced::Range) {
            return None;
        }
        if announced == Some(Announced::Units) {
            let mapping = self.mapping()?;
            let lent = self.lending.lend(mapping, range).ok()?;
            self.announced().retain(|at, _| !(offset..end).contains(at));
            return Some(lent);
        }
        // All of it: reading a missing page is faster than a page fault.
        let cached = self.cached(offset, bytes as u64).ok()?;
        if cached < bytes as u64 {
            if !is_most_of(bytes as u64)(cached) {
                self.announced().entry(offset).or_insert(Announced::Not);
            }
            return None;
        }
        self.lending.lend(self.mapping()?, range).ok()
    }

    /// Returns the mapping of the whole file, from which ranges are lent.
    fn mapping(&self) -> Option<&Arc<Mapping>> {
        let map = || self.disk.map_for_lending(&self.file, self.bytes).ok().map(Arc::new);
        self.mapping.get_or_init(map).as_ref()
    }

    /// Returns whether page faults of a range's reader fetch it best, and nothing outside of `lent`.
    fn fetches_units(&self, offset: u64, bytes: u64, lent: &Range<u64>) -> bool {
        let first = offset / UNIT_BYTES * UNIT_BYTES;
        let end = offset.saturating_add(bytes).next_multiple_of(UNIT_BYTES).min(self.bytes);
        let is_wanted = lent.start <= first && end <= lent.end && bytes >= LENT_BYTES_MIN as u64;
        is_wanted && self.direct.is_some() && self.mapping().is_some_and(|mapping| mapping.fetches_units())
    }

    /// Returns whether most of a range lies in the page cache: missing pages are then read through it.
    fn is_cached(&self, offset: u64, bytes: u64) -> bool {
        self.cached(offset, bytes).map_or(true, is_most_of(bytes))
    }

    /// Returns how many bytes of a range lie in the page cache; if the kernel cannot tell, all of it if its first page
    /// does.
    fn cached(&self, offset: u64, bytes: u64) -> Sys<u64> {
        self.disk.cached_bytes(&self.file, offset, bytes).or_else(|_| {
            let is_there = self.disk.reads_at_once(&self.file, offset)?;
            Ok(if is_there { bytes } else { 0 })
        })
    }

    fn announced(&self) -> MutexGuard<'_, BTreeMap<u64, Announced>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads past the page cache as far as possible, and the rest through it. Address and offset must be aligned.
    fn fill_past(&self, direct: &D::File, offset: u64, buf: &mut [u8]) -> Result<()> {
        let units = buf.len() - buf.len() % ALIGNMENT;
        let done = self.fill_units(direct, offset, &mut buf[..units])?;
        self.fill(offset + done as u64, &mut buf[done..])
    }

    /// Reads whole units past the page cache as far as possible; returns the number of bytes.
    fn fill_units(&self, direct: &D::File, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match uninterrupted(|| self.disk.pread(direct, &mut buf[done..], at)) {
                Ok(read) if read < ALIGNMENT => break,
                Ok(read) => done += read - read % ALIGNMENT,
                // Some file systems take the flag and refuse the read.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => break,
                Err(errno) => return Err(of_errno("read", &self.path, errno)),
            }
        }
        Ok(done)
    }

    fn fill(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match uninterrupted(|| self.disk.pread(&self.file, &mut buf[done..], at)) {
                Ok(0) => return Err(too_short(self.path.to_string_lossy(), at, offset, buf.len())),
                Ok(read) => done += read,
                Err(errno) => return Err(of_errno("read", &self.path, errno)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Store;
    use crate::disk::{Disk, RealDisk};
    use crate::local::{DIRECT_BYTES_MIN, LocalStore};
    use crate::testing::conformance::{pattern, write_object};
    use crate::testing::simdisk::SimDisk;

    use super::*;

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
    fn large_objects_are_written_and_read_past_the_page_cache() {
        let contents = pattern(1, DIRECT_BYTES_MIN as usize + 5000);
        let disk = SimDisk::new();
        let store = LocalStore::on(disk.clone(), "/run".into()).unwrap();
        write_object(&store, "d/large", &contents).unwrap();
        // Three pieces; one page more is the probe.
        assert_eq!((calls(&disk, "pwrite"), calls(&disk, "pwrite_direct")), (0, 4));

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
        assert_eq!(calls(&disk, "pread_direct"), 2);
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &Upcoming::default()), Fetch::WhenRead);
        // What others will read too goes into the page cache all the same.
        let shared = Upcoming { shared_on_host: true, ..Upcoming::default() };
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &shared), Fetch::Begun);
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
        assert_eq!(calls(&disk, "pread_direct"), 2);
    }

    #[test]
    fn a_file_system_that_takes_nothing_past_the_page_cache_is_written_and_read_through_it() {
        let contents = pattern(1, DIRECT_BYTES_MIN as usize);
        let disk = SimDisk::new();
        disk.refuse("pwrite_direct", Errno::INVAL);
        disk.refuse("pread_direct", Errno::INVAL);
        let store = LocalStore::on(disk.clone(), "/run".into()).unwrap();
        write_object(&store, "d/large", &contents).unwrap();
        assert!(calls(&disk, "pwrite") > 0);
        let object = store.open_head("d/large", 0).unwrap().0;
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
    }

    #[test]
    fn a_kernel_that_cannot_tell_what_is_cached_is_asked_once() {
        let disk = SimDisk::new();
        let store = LocalStore::on(disk.clone(), "/run".into()).unwrap();
        let contents = pattern(1, DIRECT_BYTES_MIN as usize);
        write_object(&store, "d/large", &contents).unwrap();
        disk.refuse("cached_bytes", Errno::NOSYS);
        let object = store.open_head("d/large", 0).unwrap().0;
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, &Upcoming::default()), Fetch::WhenRead);
        assert!(object.page_cache().unwrap().lend(0, 1 << 20).is_none());
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
        assert_eq!((calls(&disk, "reads_at_once"), calls(&disk, "pread_direct")), (1, 1));
    }

    fn lend(object: &dyn ObjectReader, offset: u64, bytes: usize) -> Option<Lent<'_>> {
        object.page_cache()?.lend(offset, bytes)
    }

    #[test]
    fn what_lies_in_the_page_cache_is_lent_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::on(RealDisk, dir.path().into()).unwrap();
        let contents = pattern(1, 3 * LENT_BYTES_MIN + 77);
        write_object(&store, "d/object", &contents).unwrap();
        let file = std::fs::File::open(dir.path().join("d/object")).unwrap().into();
        let cached = |file| RealDisk.cached_bytes(file, 0, contents.len() as u64).unwrap();
        let object = store.open_head("d/object", 0).unwrap().0;
        let mut read = vec![0; contents.len()];
        // Twice: what was announced is read before it is lent.
        for _ in 0..2 {
            object.read_at(0, &mut read).unwrap();
        }
        let Some(lent) = lend(&*object, 4097, 2 * LENT_BYTES_MIN) else {
            eprintln!("skipped: this file system is not lent from");
            return;
        };
        assert!(lent[..] == contents[4097..4097 + 2 * LENT_BYTES_MIN]);
        drop(lent);
        assert!(lend(&*object, 0, LENT_BYTES_MIN - 1).is_none(), "too little to be mapped");
        assert!(lend(&*object, 77, contents.len()).is_none(), "beyond the end");
        assert!(lend(&*object, u64::MAX, LENT_BYTES_MIN).is_none(), "beyond all ends");

        RealDisk.dont_need(&file, 0, contents.len() as u64).unwrap();
        if cached(&file) > 0 {
            eprintln!("skipped: this file system lies in memory");
            return;
        }
        assert!(lend(&*object, 0, LENT_BYTES_MIN).is_none(), "not in the page cache");
        assert_eq!(cached(&file), 0, "to ask brought something there");
    }

    #[test]
    fn what_will_be_lent_comes_in_units_and_nothing_beside_it() {
        const UNIT: usize = UNIT_BYTES as usize;
        let dir = tempfile::tempdir().unwrap();
        let store = || LocalStore::on(RealDisk, dir.path().into()).unwrap();
        let contents = pattern(2, DIRECT_BYTES_MIN as usize + 777);
        write_object(&store(), "d/object", &contents).unwrap();
        let file = std::fs::File::open(dir.path().join("d/object")).unwrap().into();
        let cached = || RealDisk.cached_bytes(&file, 0, contents.len() as u64).unwrap();
        // What a store has mapped stays in the page cache.
        let open = || {
            RealDisk.dont_need(&file, 0, contents.len() as u64).unwrap();
            store().open_head("d/object", 0).unwrap().0
        };
        let object = open();
        let announce = |object: &dyn ObjectReader, at: usize, bytes: usize, lent: Range<usize>| {
            let upcoming = Upcoming { shared_on_host: true, lent: lent.start as u64..lent.end as u64 };
            object.page_cache().unwrap().prefetch(at as u64, bytes as u64, &upcoming)
        };
        if cached() > 0 || announce(&*object, 3 * UNIT, UNIT / 2, 3 * UNIT..4 * UNIT) != Fetch::WhenLent {
            eprintln!("skipped: this file system lies in memory, or this kernel does not fetch so");
            return;
        }
        assert_eq!(cached(), 0, "to announce fetched something");
        let lent = lend(&*object, 3 * UNIT as u64, UNIT / 2).unwrap();
        assert!(lent[..] == contents[3 * UNIT..3 * UNIT + UNIT / 2]);
        assert_eq!(cached(), UNIT_BYTES, "one unit, and no other");
        drop(lent);
        drop(object);

        // The last unit is as long as the file.
        let (object, last) = (open(), contents.len() - UNIT / 4);
        assert_eq!(announce(&*object, last, UNIT / 4, 30 * UNIT..contents.len()), Fetch::WhenLent);
        assert!(lend(&*object, last as u64, UNIT / 4).unwrap()[..] == contents[last..]);
        drop(object);

        // A fetch must not bring unwanted bytes: then the range is read ahead and copied.
        for lent in [3 * UNIT + 4096..4 * UNIT, 3 * UNIT..4 * UNIT - 4096, 0..0] {
            let object = open();
            assert_eq!(cached(), 0);
            assert_eq!(announce(&*object, 3 * UNIT + 4096, UNIT / 2, lent.clone()), Fetch::Begun, "{lent:?}");
            assert!(lend(&*object, 3 * UNIT as u64 + 4096, UNIT / 2).is_none(), "{lent:?}");
            let mut read = vec![0; UNIT / 2];
            object.read_at(3 * UNIT as u64 + 4096, &mut read).unwrap();
            assert!(read == contents[3 * UNIT + 4096..][..UNIT / 2]);
        }
    }
}
