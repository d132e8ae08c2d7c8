//! Wraps the system calls that the local backend makes: the seam at which faults and crashes are simulated.
//!
//! [`RealDisk`] makes one system call per method. `local.rs` decides what an error means.

use std::ffi::OsString;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, RenameFlags, StatxFlags};
use rustix::io::ReadWriteFlags;

use crate::cachestat;
use crate::map::Mapping;
pub use crate::ring::{Flight, Ring};
pub use crate::sys::{Errno, Sys};
use crate::uring::Uring;

/// Attributes of a path or an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Type of the file.
    pub kind: FileKind,
    /// Length in bytes.
    pub bytes: u64,
    /// Device and inode number: equal for two names of one file.
    pub identity: (u64, u64),
    /// Time of the last change of its contents, by the file system's clock.
    pub modified: SystemTime,
}

/// Free space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that this process may still allocate.
    pub bytes: u64,
    /// Files that may still be made; `None` if their number has no limit.
    pub files: Option<u64>,
}

/// Type of a file, as far as a store distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file with contents.
    File,
    /// An entry that holds others.
    Dir,
    /// A symbolic link (only from [`Disk::readdir`]), a pipe, a device.
    Other,
}

/// Interface of a file system. Paths are absolute; every method is the system call of its name.
pub trait Disk: Send + Sync + 'static {
    /// Handle of an open file.
    type File: Send + Sync;
    /// Queue of writes in flight.
    type Ring: Ring<File = Self::File>;

    /// Makes one directory.
    fn mkdir(&self, path: &Path) -> Sys<()>;
    /// Creates a file that must not exist (`O_CREAT | O_EXCL`) for writing, with `O_DIRECT` if `direct`.
    fn create_new(&self, path: &Path, direct: bool) -> Sys<Self::File>;
    /// Opens a file that is there for writing with `O_DIRECT`.
    fn open_write(&self, path: &Path) -> Sys<Self::File>;
    /// Opens a file for reading, with `O_DIRECT` if `direct`. Does not wait for a pipe's other end.
    fn open_read(&self, path: &Path, direct: bool) -> Sys<Self::File>;
    /// Makes a queue for `depth` writes in flight, to be used by the calling thread.
    fn ring(&self, depth: u32) -> Sys<Self::Ring>;
    /// Writes at an offset, possibly less than all; returns the bytes written.
    fn pwrite(&self, file: &Self::File, bytes: &[u8], offset: u64) -> Sys<usize>;
    /// Reads at an offset, possibly less than all; returns the bytes read, 0 at the end.
    fn pread(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Sys<usize>;
    /// Allocates the first `bytes` bytes and makes the file that long, filled with zeros.
    fn fallocate(&self, file: &Self::File, bytes: u64) -> Sys<()>;
    /// Sets the length of the file.
    fn ftruncate(&self, file: &Self::File, bytes: u64) -> Sys<()>;
    /// Makes the contents durable, with the metadata needed to read them.
    fn fdatasync(&self, file: &Self::File) -> Sys<()>;
    /// Tells the kernel that a range will be read soon.
    fn will_need(&self, file: &Self::File, offset: u64, bytes: u64) -> Sys<()>;
    /// Tells the kernel that a range will not be used soon: write-back of its dirty pages begins.
    fn dont_need(&self, file: &Self::File, offset: u64, bytes: u64) -> Sys<()>;
    /// Maps the first `bytes` bytes.
    fn map(&self, file: &Self::File, bytes: u64) -> Sys<Mapping>;
    /// Returns about how many bytes of a range lie in the page cache. Not every kernel can tell.
    fn cached_bytes(&self, file: &Self::File, offset: u64, bytes: u64) -> Sys<u64>;
    /// Returns whether a byte lies in the page cache. If not, the kernel begins to read its page, so that a later call
    /// finds it.
    fn reads_at_once(&self, file: &Self::File, offset: u64) -> Sys<bool>;
    /// Returns the attributes of an open file.
    fn fstat(&self, file: &Self::File) -> Sys<Stat>;
    /// Makes a directory's entries durable.
    fn fsync_dir(&self, path: &Path) -> Sys<()>;
    /// Gives a file a second name, which must not exist.
    fn link(&self, from: &Path, to: &Path) -> Sys<()>;
    /// Renames to a name that must not exist.
    fn rename_noreplace(&self, from: &Path, to: &Path) -> Sys<()>;
    /// Renames a file and replaces the target.
    fn rename(&self, from: &Path, to: &Path) -> Sys<()>;
    /// Removes a name of a file.
    fn unlink(&self, path: &Path) -> Sys<()>;
    /// Removes an empty directory.
    fn rmdir(&self, path: &Path) -> Sys<()>;
    /// Lists a directory without `.` and `..`, in any order; links are not followed.
    fn readdir(&self, path: &Path) -> Sys<Vec<(OsString, FileKind)>>;
    /// Returns the attributes of a path's target; links are followed. A client of a network file system may answer
    /// from its cache.
    fn stat(&self, path: &Path) -> Sys<Stat>;
    /// Returns the attributes like [`stat`](Disk::stat), as the file system's server has them now. A client that finds
    /// a directory changed then forgets what it remembers of the names in it; on the way to the path it believes them.
    fn look(&self, path: &Path) -> Sys<Stat> {
        self.stat(path)
    }
    /// Has a client of a network file system ask its server for the last name of a path, whatever it remembers of it:
    /// that it was absent, or which file it named before that was replaced.
    fn ask_for(&self, _path: &Path) {}
    /// Returns the free space of a path's file system; fails for one that counts no space.
    fn statvfs(&self, _path: &Path) -> Sys<Room> {
        Err(Errno::NOSYS)
    }
}

/// File systems of this machine.
#[derive(Clone, Copy, Debug)]
pub struct RealDisk;

impl Disk for RealDisk {
    type File = OwnedFd;
    type Ring = Uring;

    fn mkdir(&self, path: &Path) -> Sys<()> {
        fs::mkdir(path, Mode::from_raw_mode(0o777))
    }

    fn create_new(&self, path: &Path, direct: bool) -> Sys<OwnedFd> {
        let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | direct;
        fs::open(path, flags, Mode::from_raw_mode(0o666))
    }

    fn open_write(&self, path: &Path) -> Sys<OwnedFd> {
        fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC | OFlags::DIRECT, Mode::empty())
    }

    fn open_read(&self, path: &Path, direct: bool) -> Sys<OwnedFd> {
        let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
        fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | direct, Mode::empty())
    }

    fn ring(&self, depth: u32) -> Sys<Uring> {
        Uring::new(depth)
    }

    fn pwrite(&self, file: &OwnedFd, bytes: &[u8], offset: u64) -> Sys<usize> {
        rustix::io::pwrite(file, bytes, offset)
    }

    fn pread(&self, file: &OwnedFd, buf: &mut [u8], offset: u64) -> Sys<usize> {
        rustix::io::pread(file, buf, offset)
    }

    fn fallocate(&self, file: &OwnedFd, bytes: u64) -> Sys<()> {
        fs::fallocate(file, FallocateFlags::empty(), 0, bytes)
    }

    fn ftruncate(&self, file: &OwnedFd, bytes: u64) -> Sys<()> {
        fs::ftruncate(file, bytes)
    }

    fn fdatasync(&self, file: &OwnedFd) -> Sys<()> {
        fs::fdatasync(file)
    }

    fn will_need(&self, file: &OwnedFd, offset: u64, bytes: u64) -> Sys<()> {
        fs::fadvise(file, offset, std::num::NonZeroU64::new(bytes), fs::Advice::WillNeed)
    }

    fn dont_need(&self, file: &OwnedFd, offset: u64, bytes: u64) -> Sys<()> {
        fs::fadvise(file, offset, std::num::NonZeroU64::new(bytes), fs::Advice::DontNeed)
    }

    fn map(&self, file: &OwnedFd, bytes: u64) -> Sys<Mapping> {
        Mapping::new(file, bytes)
    }

    fn cached_bytes(&self, file: &OwnedFd, offset: u64, bytes: u64) -> Sys<u64> {
        cachestat::cached_bytes(file, offset, bytes)
    }

    fn reads_at_once(&self, file: &OwnedFd, offset: u64) -> Sys<bool> {
        let mut byte = [0];
        match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn fstat(&self, file: &OwnedFd) -> Sys<Stat> {
        fs::fstat(file).map(of_stat)
    }

    fn fsync_dir(&self, path: &Path) -> Sys<()> {
        let dir = fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        fs::fsync(dir)
    }

    fn link(&self, from: &Path, to: &Path) -> Sys<()> {
        fs::link(from, to)
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Sys<()> {
        fs::renameat_with(fs::CWD, from, fs::CWD, to, RenameFlags::NOREPLACE)
    }

    fn rename(&self, from: &Path, to: &Path) -> Sys<()> {
        fs::rename(from, to)
    }

    fn unlink(&self, path: &Path) -> Sys<()> {
        fs::unlink(path)
    }

    fn rmdir(&self, path: &Path) -> Sys<()> {
        fs::rmdir(path)
    }

    fn readdir(&self, path: &Path) -> Sys<Vec<(OsString, FileKind)>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = fs::open(path, flags, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in fs::Dir::read_from(&dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let kind = match entry.file_type() {
                // Some file systems leave the type out of the directory.
                FileType::Unknown => match fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => of_stat(stat).kind,
                    Err(Errno::NOENT) => continue,
                    Err(e) => return Err(e),
                },
                known => kind_of(known),
            };
            entries.push((OsString::from_vec(name.to_bytes().to_vec()), kind));
        }
        Ok(entries)
    }

    fn stat(&self, path: &Path) -> Sys<Stat> {
        fs::stat(path).map(of_stat)
    }

    fn look(&self, path: &Path) -> Sys<Stat> {
        match fs::statx(fs::CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS) {
            Ok(found) => Ok(of_statx(&found)),
            // An old kernel, or a sandbox that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => self.stat(path),
            Err(errno) => Err(errno),
        }
    }

    fn ask_for(&self, path: &Path) {
        // Linux refuses to link directories on every file system, after it has looked at the name. One that is to be
        // made is asked for anew by FUSE, other than one that is to be opened.
        _ = fs::link("/", path);
        // A process that serves FUSE may have a memory of its own, which this passes: it asks the server about the
        // file, and if that is gone, the kernel asks for the name again.
        _ = fs::getxattr(path, "user.shardfast", &mut [0u8; 0]);
    }

    fn statvfs(&self, path: &Path) -> Sys<Room> {
        let found = fs::statvfs(path)?;
        if found.f_blocks == 0 {
            return Err(Errno::NOSYS);
        }
        let bytes = found.f_bavail.saturating_mul(found.f_frsize);
        Ok(Room { bytes, files: (found.f_files > 0).then_some(found.f_favail) })
    }
}

fn kind_of(file_type: FileType) -> FileKind {
    match file_type {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Dir,
        _ => FileKind::Other,
    }
}

fn of_statx(found: &fs::Statx) -> Stat {
    let since = Duration::new(u64::try_from(found.stx_mtime.tv_sec).unwrap_or(0), found.stx_mtime.tv_nsec);
    Stat {
        kind: kind_of(FileType::from_raw_mode(found.stx_mode.into())),
        bytes: found.stx_size,
        identity: (fs::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
        modified: UNIX_EPOCH + since,
    }
}

fn of_stat(stat: fs::Stat) -> Stat {
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    let kind = kind_of(FileType::from_raw_mode(stat.st_mode));
    // Before 1970 only where a clock was wrong.
    let since =
        Duration::new(u64::try_from(stat.st_mtime).unwrap_or(0), u32::try_from(stat.st_mtime_nsec).unwrap_or(0));
    Stat { kind, bytes, identity: (stat.st_dev, stat.st_ino), modified: UNIX_EPOCH + since }
}
