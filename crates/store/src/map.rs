//! Maps objects into memory, to read them without a copy: as a whole, or while a range lies in the page cache.

use std::ffi::c_void;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::sys::{Errno, Sys};

/// File systems whose cached pages belong to this machine: no server invalidates them while they are read. By
/// `linux/magic.h`: ext4, XFS, Btrfs, F2FS, tmpfs.
const OWN_FILE_SYSTEMS: [u32; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];

/// Bytes that one fault reads from the device if memory is mapped in huge pages; aligned to itself.
pub(crate) const UNIT_BYTES: u64 = 2 << 20;

/// Bytes of returned ranges that are unmapped together.
const MAPPED_BYTES_MAX: usize = 8 << 20;

/// Bytes of an object as they lie in the page cache; unmapped when dropped.
///
/// The object must not change, which holds once it is finished: reading bytes that were truncated meanwhile, or that
/// the device cannot read, ends the process.
pub struct Mapping {
    address: NonNull<c_void>,
    bytes: usize,
    /// `true` if a fault on a page that is not cached reads exactly its [`UNIT_BYTES`].
    fetches_units: bool,
}

// SAFETY: the mapping is private to this value and its bytes are only looked at.
#[allow(unsafe_code)]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: &OwnedFd, bytes: u64) -> Sys<Mapping> {
        // Writable and private, so that a program that writes there changes its own copy of a page.
        Mapping::with(file, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    /// Maps a file for [`Lending`].
    ///
    /// # Errors
    /// `ENOTSUP` if a server may invalidate the cached pages of a file.
    pub(crate) fn for_lending(file: &OwnedFd, bytes: u64) -> Sys<Mapping> {
        // Unsigned, whatever type the C library gives the field here.
        let file_system = rustix::fs::fstatfs(file)?.f_type as u32;
        if !OWN_FILE_SYSTEMS.contains(&file_system) {
            return Err(Errno::NOTSUP);
        }
        let mut mapping = Mapping::with(file, bytes, ProtFlags::READ, MapFlags::SHARED)?;
        let advise = |advice| mapping.advise(&(0..mapping.bytes), advice).is_ok();
        // Huge pages are one read each and quickly mapped, also by later readers. Without the second advice the kernel
        // reads one more of them, and continues its read-ahead from there.
        mapping.fetches_units = faults_bring_units() && advise(Advice::LinuxHugepage) && advise(Advice::Random);
        Ok(mapping)
    }

    /// Returns whether a fault on a page that is not cached reads exactly its [`UNIT_BYTES`].
    pub(crate) fn fetches_units(&self) -> bool {
        self.fetches_units
    }

    #[allow(unsafe_code)]
    fn with(file: &OwnedFd, bytes: u64, protection: ProtFlags, flags: MapFlags) -> Sys<Mapping> {
        let bytes = usize::try_from(bytes).map_err(|_| Errno::OVERFLOW)?;
        if bytes == 0 {
            return Ok(Mapping { address: NonNull::dangling(), bytes, fetches_units: false });
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) }?;
        Ok(Mapping { address: NonNull::new(address).ok_or(Errno::NOMEM)?, bytes, fetches_units: false })
    }

    /// Advises the kernel about `pages`, which must be whole ones, of the mapping.
    #[allow(unsafe_code)]
    fn advise(&self, pages: &Range<usize>, advice: Advice) -> Sys<()> {
        if pages.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies in this mapping, whose contents neither advice changes: it shows a file.
        unsafe { rustix::mm::madvise(self.address.as_ptr().byte_add(pages.start), pages.len(), advice) }
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

/// Returns whether the kernel reads a whole huge page where one is mapped and a part of it is missing: Linux 5.18 does,
/// whatever pages the file system can have. With larger base pages a huge page is too much to read.
fn faults_bring_units() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(18)) && rustix::param::page_size() == 4096
}

/// Lender of ranges of mapped files, which it checks to be in the page cache.
///
/// Mapped bytes count as this process's memory, so returned ranges are unmapped, many at a time: each unmapping
/// interrupts all cores that run this process.
#[derive(Default)]
pub(crate) struct Lending {
    given_back: Mutex<Option<GivenBack>>,
}

/// Returned ranges of one mapping that are to be unmapped, also those lent again by then, which the kernel maps again.
struct GivenBack {
    mapping: Arc<Mapping>,
    pages: Range<usize>,
    bytes: usize,
}

impl GivenBack {
    fn unmap(self) {
        // Huge pages as a whole: to take a part of one away the kernel first cuts it up. The bytes stay in the page
        // cache.
        let unit = UNIT_BYTES as usize;
        let end = self.pages.end.next_multiple_of(unit).min(self.mapping.bytes);
        let _ = self.mapping.advise(&(self.pages.start / unit * unit..end), Advice::LinuxDontNeed);
    }
}

impl Lending {
    /// Lends a range with all of its pages in memory: the kernel has checked each of them. An object that was truncated
    /// or a page that cannot be read is an error here instead of a signal on access.
    ///
    /// # Errors
    /// `EFAULT` when the object ends before, or cannot be read; `EINVAL` before Linux 5.14, and for a range outside the
    /// mapping.
    pub(crate) fn lend<'a>(&'a self, mapping: &Arc<Mapping>, range: Range<usize>) -> Sys<Lent<'a>> {
        if range.start > range.end || range.end > mapping.bytes {
            return Err(Errno::INVAL);
        }
        let page = rustix::param::page_size();
        let pages = range.start / page * page..range.end.next_multiple_of(page);
        mapping.advise(&pages, Advice::LinuxPopulateRead)?;
        Ok(Lent(Place::Mapped { lending: self, mapping: Arc::clone(mapping), range, pages }))
    }

    fn give_back(&self, mapping: &Arc<Mapping>, pages: &Range<usize>) {
        let mut given_back = self.given_back.lock().unwrap_or_else(PoisonError::into_inner);
        let mut other = None;
        if given_back.as_ref().is_some_and(|before| !Arc::ptr_eq(&before.mapping, mapping)) {
            other = given_back.take();
        }
        let all = given_back.get_or_insert_with(|| GivenBack {
            mapping: Arc::clone(mapping),
            pages: pages.clone(),
            bytes: 0,
        });
        all.pages = all.pages.start.min(pages.start)..all.pages.end.max(pages.end);
        all.bytes += pages.len();
        let many = if all.bytes >= MAPPED_BYTES_MAX { given_back.take() } else { None };
        drop(given_back);
        other.into_iter().chain(many).for_each(GivenBack::unmap);
    }
}

/// A range of an object in this machine's memory.
///
/// Its pages were in memory when it was lent. While it lives, reading it raises a signal that ends the process only if
/// another process truncates the finished object, or if the kernel evicts a page that was just used, and then cannot
/// read it again.
pub struct Lent<'a>(Place<'a>);

enum Place<'a> {
    Memory(&'a [u8]),
    Mapped { lending: &'a Lending, mapping: Arc<Mapping>, range: Range<usize>, pages: Range<usize> },
}

impl<'a> Lent<'a> {
    pub(crate) fn memory(bytes: &'a [u8]) -> Lent<'a> {
        Lent(Place::Memory(bytes))
    }
}

impl Deref for Lent<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Place::Memory(bytes) => bytes,
            Place::Mapped { mapping, range, .. } => &mapping[range.clone()],
        }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Place::Mapped { lending, mapping, pages, .. } = &self.0 {
            lending.give_back(mapping, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const PAGE: usize = 4096;

    /// Makes a file of `bytes` bytes, the first of them `contents`; `None` if it cannot be lent.
    fn file(contents: &[u8], bytes: usize) -> Option<(tempfile::TempDir, File, Arc<Mapping>)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, contents).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.set_len(bytes as u64).unwrap();
        match Mapping::for_lending(&file.try_clone().unwrap().into(), bytes as u64) {
            Ok(mapping) => Some((dir, file, Arc::new(mapping))),
            Err(errno) => {
                eprintln!("skipped: this file system is not lent from: {errno}");
                None
            }
        }
    }

    #[test]
    fn ranges_are_lent_as_they_are() {
        let contents: Vec<u8> = (0..5 * PAGE + 77).map(|i| (i * 31 % 251) as u8).collect();
        let Some((_dir, _file, mapping)) = file(&contents, contents.len()) else { return };
        let lending = Lending::default();
        for range in [0..contents.len(), 1..2, PAGE - 1..PAGE + 1, 5 * PAGE..contents.len(), 7..7] {
            let lent = lending.lend(&mapping, range.clone()).unwrap();
            assert_eq!(lent[..], contents[range]);
        }
        for outside in [0..contents.len() + 1, contents.len() + 1..contents.len() + 2] {
            assert_eq!(lending.lend(&mapping, outside).err(), Some(Errno::INVAL));
        }
    }

    #[test]
    fn what_was_cut_short_is_an_error_and_no_signal() {
        let Some((_dir, file, mapping)) = file(&[], 8 * PAGE) else { return };
        file.set_len(3 * PAGE as u64).unwrap();
        let lending = Lending::default();
        assert!(lending.lend(&mapping, 0..3 * PAGE).is_ok());
        assert_eq!(lending.lend(&mapping, 0..8 * PAGE).err(), Some(Errno::FAULT));
        assert_eq!(lending.lend(&mapping, 6 * PAGE..7 * PAGE).err(), Some(Errno::FAULT));
    }

    /// Returns the resident bytes of the mapping at `address`, by `/proc`.
    fn resident(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_mapping = maps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        let line = of_mapping.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn little_of_a_file_stays_mapped_behind() {
        const STEP: usize = 1 << 20;
        // The kernel may map some more around what was asked for.
        const AROUND: usize = 4 << 20;
        let bytes = 3 * MAPPED_BYTES_MAX;
        let (Some(one), Some(other)) = (file(&[], bytes), file(&[], bytes)) else { return };
        let lending = Lending::default();
        for mapping in [&one.2, &other.2] {
            for start in (0..bytes).step_by(STEP) {
                drop(lending.lend(mapping, start..start + STEP).unwrap());
            }
            let resident = resident(mapping.address.as_ptr().addr());
            assert!(resident < MAPPED_BYTES_MAX + AROUND, "{resident} bytes stay mapped");
        }
        drop(lending.lend(&other.2, 0..STEP).unwrap());
        assert_eq!(resident(one.2.address.as_ptr().addr()), 0, "of a file that is done with");
    }
}
