//! Reads one file, and decides for each range how: here and nowhere else.
//!
//! ```text
//! announced, and most of it in the page cache     copied from there
//! announced, large file, no other reader          read past the page cache when it is read
//! announced, else                                 fetched ahead by the kernel, then copied
//! else, large file, aligned memory, not cached    read past the page cache
//! else                                            fetched by the kernel as a whole if it is long, then copied
//! ```
//! [`PageCache::prefetch`] takes the announcement and answers how the bytes come ([`Fetch`]), by which the caller
//! chooses its threads; [`ObjectReader::read_at`] brings them into the caller's own memory, which no other program
//! can change between a check of the bytes and their use.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{ALIGNMENT, failed, of_errno, uninterrupted};
use crate::disk::{Disk, Errno, Sys};
use crate::error::too_short;
use crate::observe::{Action, Reports};
use crate::{Fetch, Kind, Mapping, ObjectReader, PageCache, Result, one_by_one};

/// Length, in bytes, from which a read that must wait for the device is announced to the kernel as a whole. The
/// kernel's own read-ahead guesses from the order of requests, and several ranges of one file read at a time mislead
/// it.
const PREFETCH_BYTES_MIN: usize = 128 * 1024;

fn is_most_of(bytes: u64) -> impl Fn(u64) -> bool {
    move |cached| cached >= bytes / 2
}

/// An open file for reading.
pub(crate) struct LocalReader<D: Disk> {
    disk: Arc<D>,
    file: D::File,
    /// Handle of the same file past the page cache, if it is large.
    direct: Option<D::File>,
    /// Offsets of announced ranges that were not in the page cache, and that the kernel was asked to fetch.
    announced: Mutex<BTreeSet<u64>>,
    path: PathBuf,
    bytes: u64,
    name: String,
    pub(crate) reports: Reports,
}

impl<D: Disk> ObjectReader for LocalReader<D> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn host(&self) -> Option<&str> {
        None
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

    fn prefetch(&self, offset: u64, bytes: u64, shared_on_host: bool) -> Fetch {
        // The other query would fetch the first page, so that the next query would find it.
        if self.direct.is_some() && self.disk.cached_bytes(&self.file, offset, bytes).is_ok_and(is_most_of(bytes)) {
            return Fetch::Cached;
        }
        if !shared_on_host && self.direct.is_some() {
            return Fetch::WhenRead;
        }
        if self.direct.is_some() && self.is_cached(offset, bytes) {
            return Fetch::Cached;
        }
        if self.direct.is_some() {
            self.announced().insert(offset);
        }
        // Only a hint: a file system that does not support it is read all the same.
        if self.disk.will_need(&self.file, offset, bytes).is_ok() { Fetch::Begun } else { Fetch::WhenRead }
    }

    fn cached_bytes(&self, offset: u64, bytes: u64) -> Option<u64> {
        self.cached(offset, bytes).ok()
    }
}

impl<D: Disk> LocalReader<D> {
    /// Makes a reader of an open file; `direct` is a second handle, past the page cache.
    pub(crate) fn new(
        disk: Arc<D>,
        file: D::File,
        direct: Option<D::File>,
        (path, name): (PathBuf, &str),
        bytes: u64,
    ) -> Self {
        let (announced, name, reports) = (Mutex::default(), name.to_owned(), Reports::default());
        Self { disk, file, direct, announced, path, bytes, name, reports }
    }

    /// Reads a range as its announcement and the page cache suggest.
    fn read_once(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = buf.len() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(too_short(self.path.to_string_lossy(), self.bytes, offset, buf.len()));
        }
        let is_announced = self.announced().remove(&offset);
        if is_announced || buf.len() < PREFETCH_BYTES_MIN || self.is_cached(offset, bytes) {
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
        // A client of a network file system may remember how the file was while it was written; a list of the names
        // beside it brings what it is now.
        let _ = self.path.parent().map(|dir| self.disk.readdir(dir));
        let _ = self.disk.dont_need(&self.file, offset, buf.len() as u64);
        let is_aligned = offset.is_multiple_of(ALIGNMENT as u64) && buf.as_ptr().addr().is_multiple_of(ALIGNMENT);
        // Opened for this, however small the file is: what is mapped or in use stays in the page cache as it is.
        match uninterrupted(|| self.disk.open_read(&self.path, true)) {
            Ok(direct) if is_aligned => self.fill_past(&direct, offset, buf),
            _ => self.fill(offset, buf),
        }
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

    fn announced(&self) -> MutexGuard<'_, BTreeSet<u64>> {
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
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, false), Fetch::WhenRead);
        // What others will read too goes into the page cache all the same.
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, true), Fetch::Begun);
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
        assert_eq!(object.page_cache().unwrap().prefetch(0, 1 << 20, false), Fetch::WhenRead);
        assert!(read(&*object, 0, 1 << 20, 0) == contents[..1 << 20]);
        assert_eq!((calls(&disk, "reads_at_once"), calls(&disk, "pread_direct")), (1, 1));
    }

    #[test]
    fn what_others_read_too_is_fetched_ahead_and_copied_out_of_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::on(RealDisk, dir.path().into()).unwrap();
        let contents = pattern(2, DIRECT_BYTES_MIN as usize + 777);
        write_object(&store, "d/object", &contents).unwrap();
        let file = std::fs::File::open(dir.path().join("d/object")).unwrap().into();
        let cached = || RealDisk.cached_bytes(&file, 0, contents.len() as u64);
        RealDisk.dont_need(&file, 0, contents.len() as u64).unwrap();
        let object = store.open_head("d/object", 0).unwrap().0;
        if cached() != Ok(0) {
            eprintln!("skipped: this file system lies in memory, or this kernel cannot tell");
            return;
        }
        let announce = |shared_on_host| object.page_cache().unwrap().prefetch(3 << 20, 1 << 20, shared_on_host);
        assert_eq!(announce(false), Fetch::WhenRead);
        assert_eq!(cached(), Ok(0), "to ask brought something there");
        assert_eq!(announce(true), Fetch::Begun);
        assert!(read(&*object, 3 << 20, 1 << 20, 0) == contents[3 << 20..4 << 20]);
        assert!(cached().unwrap() >= 1 << 20, "nothing is kept for the others");
        assert_eq!(announce(false), Fetch::Cached);
        assert!(read(&*object, 3 << 20, 1 << 20, 0) == contents[3 << 20..4 << 20]);
    }
}
