//! Says what a refused system call means for an object.

use std::path::Path;

use super::uninterrupted;
use crate::disk::{Disk, Errno, Room};
use crate::{Error, Kind};

pub(super) fn failed(kind: Kind, op: &'static str, path: &Path, message: impl Into<String>) -> Error {
    Error::new(kind, op, path.to_string_lossy(), message)
}

pub(super) fn of_errno(op: &'static str, path: &Path, errno: Errno) -> Error {
    Error::of_errno(op, path.to_string_lossy(), errno)
}

/// Returns the error of a call that makes or fills a file of `bytes` bytes, with what is needed. Without space it names
/// the space that this file needs, and the free space.
pub(super) fn no_room<D: Disk>(disk: &D, op: &'static str, path: &Path, errno: Errno, bytes: u64) -> Error {
    let mut error = of_errno(op, path, errno);
    error.message += match errno {
        Errno::STALE | Errno::BADF => ": expected the file that was opened, found it lost: write it anew",
        Errno::ROFS => ": expected one that is mounted and exported for writing: mount it so, or save to another one",
        Errno::ACCESS | Errno::PERM => {
            ": expected one that this user may write to (NFS may take root for nobody): change its owner or mode"
        }
        _ => "",
    };
    if matches!(errno, Errno::NOSPC | Errno::DQUOT) {
        // The file may be removed by now, and directories above it may not exist yet.
        let room = path.ancestors().find_map(|place| uninterrupted(|| disk.statvfs(place)).ok());
        if bytes > 0 {
            error.message += &format!(": expected room for {bytes} bytes");
        }
        match room {
            Some(Room { files: Some(0), .. }) => error.message += ", found none for another file (inodes)",
            Some(Room { bytes: free, .. }) if errno == Errno::NOSPC => {
                error.message += &format!(", found {free} bytes free");
            }
            Some(Room { bytes: free, .. }) => {
                error.message += &format!(" in the quota; the disk has {free} bytes free")
            }
            None => {}
        }
    }
    error
}

pub(super) fn ambiguous(target: &Path, errno: Errno) -> Error {
    let message = format!("{errno}; the object may have been published: check for it before retrying");
    failed(Kind::Unavailable, "publish", target, message)
}
