//! Writes a file, by direct writes or through the page cache, and makes it durable at its end.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

use super::{WRITE_BACK_BYTES_MIN, failed, no_room, uninterrupted};
use crate::disk::{Disk, Errno};
use crate::observe::{Action, Reports};
use crate::{Error, Kind, ObjectWriter, Result};

/// A file that is being written; removed when dropped, unless it is finished.
pub(super) struct LocalWriter<D: Disk> {
    pub(super) disk: Arc<D>,
    pub(super) file: D::File,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) alignment: usize,
    pub(super) keep: bool,
    pub(super) name: String,
    pub(super) reports: Reports,
}

impl<D: Disk> LocalWriter<D> {
    pub(super) fn failed(&self, op: &'static str, errno: Errno) -> Error {
        no_room(&*self.disk, op, &self.path, errno, self.bytes)
    }

    pub(super) fn check(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let alignment = self.alignment as u64;
        let unit = |n: u64| n.is_multiple_of(alignment);
        if !(unit(offset) && unit(bytes.len() as u64) && unit(bytes.as_ptr().addr() as u64)) {
            let message = format!(
                "expected address, offset and length in multiples of {alignment}, found {:p}, {offset}, {}",
                bytes.as_ptr(),
                bytes.len()
            );
            return Err(failed(Kind::Invalid, "write", &self.path, message));
        }
        let padded = self.bytes.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > padded) {
            let message = format!("{} bytes at {offset} reach beyond the {} bytes declared", bytes.len(), self.bytes);
            return Err(failed(Kind::Invalid, "write", &self.path, message));
        }
        Ok(())
    }

    fn write_whole(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes)?;
        let (mut done, mut stalled) = (0, false);
        while done < bytes.len() {
            let written = uninterrupted(|| self.disk.pwrite(&self.file, &bytes[done..], offset + done as u64))
                .map_err(|errno| self.failed("write", errno))?;
            // The rest of a direct write must be aligned again: bytes of an incomplete unit are written once more.
            let whole = written - written % self.alignment;
            if whole == 0 && (written == 0 || stalled) {
                let message = format!("expected {} bytes to be written, found {written}", bytes.len() - done);
                return Err(failed(Kind::Unavailable, "write", &self.path, message));
            }
            stalled = whole == 0;
            done += whole;
        }
        if self.alignment == 1 && bytes.len() >= WRITE_BACK_BYTES_MIN {
            // Write-back begins now instead of all at once at the end, and the page cache stays free.
            let _ = self.disk.dont_need(&self.file, offset, bytes.len() as u64);
        }
        Ok(())
    }
}

impl<D: Disk> ObjectWriter for LocalWriter<D> {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Write, &self.name, (offset, bytes.len()), || self.write_whole(offset, bytes))
    }

    fn finish(&mut self) -> Result<()> {
        self.reports.during(Action::Finish, &self.name, (0, 0), || {
            uninterrupted(|| self.disk.ftruncate(&self.file, self.bytes))
                .map_err(|errno| self.failed("ftruncate", errno))?;
            uninterrupted(|| self.disk.fdatasync(&self.file)).map_err(|errno| self.failed("fdatasync", errno).finally())
        })?;
        self.keep = true;
        Ok(())
    }
}

impl<D: Disk> Drop for LocalWriter<D> {
    fn drop(&mut self) {
        if !self.keep {
            // The caller has the error that made it drop the file; a file that cannot be removed is debris, as after a
            // crash.
            let _ = self.disk.unlink(&self.path);
        }
    }
}
