//! Writes a file, by direct writes or through the page cache, and makes it durable at its end.

use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::{WRITE_BACK_BYTES_MIN, failed, no_room, uninterrupted};
use crate::disk::{Disk, Errno};
use crate::observe::{Action, Reports};
use crate::{Error, Kind, ObjectWriter, Result};

/// A file that is being written; removed when dropped, unless it is finished.
pub(super) struct LocalWriter<D: Disk> {
    pub(super) disk: Arc<D>,
    file: D::File,
    /// The same file, opened a second time since the first handle was stale.
    anew: OnceLock<D::File>,
    pub(super) identity: (u64, u64),
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) alignment: usize,
    pub(super) keep: bool,
    pub(super) name: String,
    pub(super) reports: Reports,
}

impl<D: Disk> LocalWriter<D> {
    /// Makes the writer of a new file. It is removed if the file cannot tell its identity.
    pub(super) fn new(disk: &Arc<D>, file: D::File, path: PathBuf, bytes: u64, alignment: usize) -> Result<Self> {
        let (disk, anew, reports) = (Arc::clone(disk), OnceLock::new(), Reports::default());
        let (keep, name, identity) = (false, String::new(), Default::default());
        let mut object = LocalWriter { disk, file, anew, identity, path, bytes, alignment, keep, name, reports };
        let stat = uninterrupted(|| object.disk.fstat(&object.file)).map_err(|errno| object.failed("create", errno))?;
        object.identity = stat.identity;
        Ok(object)
    }

    pub(super) fn file(&self) -> &D::File {
        self.anew.get().unwrap_or(&self.file)
    }

    /// Returns the error of a call on the file. If its handle is stale, the next try has another one, or none helps.
    pub(super) fn failed(&self, op: &'static str, errno: Errno) -> Error {
        // A small object is written again whole, to another file.
        let is_lost = errno == Errno::STALE && !self.name.is_empty() && !self.is_opened_anew();
        let error = no_room(&*self.disk, op, &self.path, errno, self.bytes);
        if is_lost { error.finally() } else { error }
    }

    /// Opens the file a second time, if its name still is this file and the server has what was written: direct writes
    /// are answered by the server, while what went through the page cache may be lost with the handle.
    fn is_opened_anew(&self) -> bool {
        if self.alignment == 1 || self.anew.get().is_some() {
            return self.alignment > 1;
        }
        let Ok(file) = uninterrupted(|| self.disk.open_write(&self.path)) else { return false };
        let is_same = uninterrupted(|| self.disk.fstat(&file)).is_ok_and(|stat| stat.identity == self.identity);
        if is_same {
            // Another thread may have been first: its handle is as good.
            let _ = self.anew.set(file);
        }
        is_same
    }

    /// Checks that the name still is this file: another process may have put a copy of its directory in its place,
    /// which has but a part of the bytes.
    fn check_name(&self) -> Result<()> {
        self.disk.ask_for(&self.path);
        match uninterrupted(|| self.disk.look(&self.path)) {
            Ok(stat) if stat.identity == self.identity => Ok(()),
            Ok(_) | Err(Errno::NOENT) => {
                let message = "expected the file that was created, found that another program has removed or changed \
                               it, or a directory above it, while it was written";
                Err(failed(Kind::Corrupt, "finish", &self.path, message).finally())
            }
            Err(errno) => Err(self.failed("finish", errno)),
        }
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
            let written = uninterrupted(|| self.disk.pwrite(self.file(), &bytes[done..], offset + done as u64))
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
            let _ = self.disk.dont_need(self.file(), offset, bytes.len() as u64);
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
            uninterrupted(|| self.disk.ftruncate(self.file(), self.bytes))
                .map_err(|errno| self.failed("ftruncate", errno))?;
            // Whatever its error says: what was not synced may be forgotten. A stale handle has shown before.
            uninterrupted(|| self.disk.fdatasync(self.file()))
                .map_err(|errno| self.failed("fdatasync", errno).finally())?;
            self.check_name()
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
