//! Reads of one file: through the page cache what is in it, in the faster way what is not.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::devices::Devices;
use super::{ALIGNMENT, failed, of_errno, uninterrupted};
use crate::disk::{Disk, Errno};
use crate::error::too_short;
use crate::{Kind, Mapping, ObjectReader, Result};

/// From this length on a read that has to wait for the device is announced to the kernel as a whole. Its own read-ahead
/// guesses from the order in which it sees requests, and several ranges of one file read at a time make it guess wrong.
const PREFETCH_BYTES_MIN: usize = 128 * 1024;

/// An open file.
pub(super) struct LocalReader<D: Disk> {
    disk: Arc<D>,
    file: D::File,
    /// The same file past the page cache, if it is large: perhaps the faster way for what is not in it.
    direct: Option<D::File>,
    devices: Arc<Devices>,
    device: u64,
    /// Where ranges begin that were not in the page cache when they were announced.
    announced: Mutex<HashSet<u64>>,
    path: PathBuf,
    bytes: u64,
}

impl<D: Disk> ObjectReader for LocalReader<D> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn map(&self) -> Result<Mapping> {
        uninterrupted(|| self.disk.map(&self.file, self.bytes)).map_err(|errno| match errno {
            Errno::NODEV => {
                failed(Kind::Unsupported, "map", &self.path, "the file system cannot map files into memory")
            }
            errno => of_errno("map", &self.path, errno),
        })
    }

    fn prefetch(&self, offset: u64, bytes: u64, again: bool) -> bool {
        // Only a hint: a file system that has no use for it says so and is read all the same.
        if !again && self.way().is_some() {
            return false;
        }
        if self.direct.is_some() {
            if self.is_cached(offset, bytes) {
                return true;
            }
            self.devices.begun(self.device, false);
            self.announced().insert(offset);
        }
        self.disk.will_need(&self.file, offset, bytes).is_ok()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = buf.len() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(too_short(self.path.to_string_lossy(), self.bytes, offset, buf.len()));
        }
        if self.announced().remove(&offset) {
            return self.devices.tried(self.device, false, bytes, || self.fill(offset, buf));
        }
        if buf.len() < PREFETCH_BYTES_MIN || self.is_cached(offset, bytes) {
            return self.fill(offset, buf);
        }
        let is_aligned = offset.is_multiple_of(ALIGNMENT as u64) && buf.as_ptr().addr().is_multiple_of(ALIGNMENT);
        match self.way().filter(|_| is_aligned) {
            Some(direct) => self.devices.tried(self.device, true, bytes, || {
                let units = buf.len() - buf.len() % ALIGNMENT;
                let done = self.fill_units(direct, offset, &mut buf[..units])?;
                self.fill(offset + done as u64, &mut buf[done..])
            }),
            None => self.devices.tried(self.device, false, bytes, || {
                let _ = self.disk.will_need(&self.file, offset, bytes);
                self.fill(offset, buf)
            }),
        }
    }
}

impl<D: Disk> LocalReader<D> {
    /// A file that is open, `direct` a second time past the page cache if that may be worth while, on `device`.
    pub(super) fn new(
        disk: Arc<D>,
        file: D::File,
        direct: Option<D::File>,
        (devices, device): (Arc<Devices>, u64),
        path: PathBuf,
        bytes: u64,
    ) -> Self {
        Self { disk, file, direct, devices, device, announced: Mutex::default(), path, bytes }
    }

    /// Whether most of a range lies in the page cache: what is missing is read through it then.
    fn is_cached(&self, offset: u64, bytes: u64) -> bool {
        self.disk.cached_bytes(&self.file, offset, bytes).map_or(true, |cached| cached >= bytes / 2)
    }

    fn announced(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file to read from past the page cache, if that is how the next read goes.
    fn way(&self) -> Option<&D::File> {
        self.direct.as_ref().filter(|_| self.devices.reads_direct(self.device))
    }

    /// Reads whole units past the page cache as far as that goes; how many bytes.
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
