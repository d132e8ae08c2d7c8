//! Probes what the kernel and a directory offer, for users who ask why a machine is slow.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::{LocalStore, path_of, uninterrupted};
use crate::disk::{Disk, RealDisk};
use crate::place::Url;
use crate::{Error, Kind, Result, Store, cachestat, name, uring};

/// Features that the kernel offers this process.
#[derive(Debug)]
pub struct Kernel {
    /// Result of a write through `io_uring`: whether the ring keeps numbered buffers mapped.
    pub io_uring: Result<bool>,
    /// Result of asking how much of a file is in the page cache.
    pub cachestat: Result<()>,
}

/// Features that a directory offers.
#[derive(Debug)]
pub struct Directory {
    /// Path of the directory, or of the nearest existing one above: everything below was tried there.
    pub path: PathBuf,
    /// File system that is mounted there; `None` if `/proc` does not tell.
    pub mount: Option<Mount>,
    /// Bytes that this process may still allocate there.
    pub free_bytes: Option<u64>,
    /// Result of publishing a small object there durably, and removing it: whether files there take direct writes.
    pub takes_direct: Result<bool>,
}

/// A mounted file system.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    /// Type as in `/etc/fstab`: `ext4`, `nfs4`.
    pub file_system: String,
    /// Path of the mount point.
    pub point: PathBuf,
}

/// Tries the kernel's calls on files in memory.
pub fn kernel() -> Kernel {
    let failed = |op| move |errno| Error::of_errno(op, "the kernel", errno);
    Kernel {
        io_uring: uring::try_out().map_err(failed("io_uring")),
        cachestat: cachestat::try_out().map_err(failed("cachestat")),
    }
}

/// Tries the directory at a URL, and leaves it as it was.
///
/// # Errors
/// [`Kind::Invalid`] if the URL is no path of a file system or passes through something that is no directory, and as
/// [`open`](crate::open).
pub fn directory(url: &str) -> Result<Directory> {
    let absolute = crate::absolute(url)?;
    let path = match Url::of(&absolute) {
        None => absolute,
        Some(parts) if parts.scheme.eq_ignore_ascii_case("file") => path_of(parts)?,
        Some(_) => return Err(Error::new(Kind::Invalid, "probe", url, "expected a path or file:///path")),
    };
    let wanted = LocalStore::on(RealDisk, path.into())?;
    let path = wanted.root.ancestors().find(|place| place.is_dir()).unwrap_or(Path::new("/")).to_owned();
    let resolved = path.canonicalize().unwrap_or_else(|_| path.clone());
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    Ok(Directory {
        mount: mount_of(&resolved, &mounts),
        free_bytes: uninterrupted(|| RealDisk.statvfs(&path)).ok().map(|room| room.bytes),
        takes_direct: try_out(&path),
        path,
    })
}

/// Publishes an object in `dir`, durably and atomically, then removes it.
fn try_out(dir: &Path) -> Result<bool> {
    let store = LocalStore::on(RealDisk, dir.to_owned())?;
    let takes_direct = store.takes_direct(dir)?;
    let path = dir.join(name::temporary()?);
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let published = store.publish(&name, b"written by a probe; may be deleted");
    let deleted = store.delete(&name);
    published.and(deleted).map(|()| takes_direct)
}

/// Returns the mount that contains the absolute path `path`, given the contents of `/proc/self/mountinfo` (see
/// proc(5)).
fn mount_of(path: &Path, mounts: &[u8]) -> Option<Mount> {
    let mut found: Option<Mount> = None;
    for line in mounts.split(|&byte| byte == b'\n') {
        let mut words = line.split(|&byte| byte == b' ');
        let (Some(point), Some(_)) = (words.nth(4), words.find(|word| *word == b"-")) else { continue };
        let (point, Some(file_system)) = (unescaped(point), words.next()) else { continue };
        // The later one of two mounts at one place hides the earlier one.
        let is_nearer = found.as_ref().is_none_or(|found| point.starts_with(&found.point));
        if path.starts_with(&point) && is_nearer {
            found = Some(Mount { file_system: String::from_utf8_lossy(file_system).into_owned(), point });
        }
    }
    found
}

/// Decodes a path in which some bytes are written as a backslash and three octal digits.
fn unescaped(mut rest: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(rest.len());
    loop {
        match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            [byte, after @ ..] => {
                bytes.push(*byte);
                rest = after;
            }
            [] => return OsString::from_vec(bytes).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_tried_where_it_exists_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = dir.path().join("not/yet");
        let found = directory(wanted.to_str().unwrap()).unwrap();
        assert_eq!(found.path, dir.path());
        let expected = LocalStore::on(RealDisk, dir.path().to_owned()).unwrap().takes_direct(dir.path());
        assert_eq!(found.takes_direct, expected);
        assert!(found.free_bytes.is_some());
        assert!(dir.path().canonicalize().unwrap().starts_with(found.mount.unwrap().point));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(directory(&format!("file://{}", wanted.display())).unwrap().path, dir.path());
    }

    #[test]
    fn what_cannot_be_written_to_is_found() {
        // No user can write there, not even root.
        let found = directory("/proc/self").unwrap();
        assert_eq!(found.mount.unwrap().file_system, "proc");
        assert!(found.takes_direct.is_err());
        for url in ["memory://x", "file:relative", ""] {
            assert_eq!(directory(url).unwrap_err().kind, Kind::Invalid, "{url}");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "no directory").unwrap();
        assert_eq!(directory(dir.path().join("f/g").to_str().unwrap()).unwrap_err().kind, Kind::Invalid);
    }

    #[test]
    fn the_nearest_mount_counts_and_the_later_one_of_two() {
        let mounts = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            23 22 0:5 / /mnt/a\\040b rw master:1 shared:2 - nfs4 server:/x rw\n\
            24 22 0:6 / /data rw - xfs /dev/sdb rw\n\
            25 22 0:7 / /data rw - tmpfs tmpfs rw\n\
            26 22 0:8 / /dat rw - btrfs /dev/sdc rw\n\
            rubbish\n";
        let found = |path: &str| mount_of(Path::new(path), mounts).unwrap();
        let mount = |file_system: &str, point: &str| Mount { file_system: file_system.into(), point: point.into() };
        assert_eq!(found("/runs"), mount("ext4", "/"));
        assert_eq!(found("/mnt/a b/run"), mount("nfs4", "/mnt/a b"));
        assert_eq!(found("/data/run"), mount("tmpfs", "/data"));
        assert_eq!(mount_of(Path::new("/runs"), b""), None);
    }
}
