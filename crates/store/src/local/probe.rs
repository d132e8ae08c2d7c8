//! Probes what the kernel and a directory offer, for users who ask why a machine is slow.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use super::Claimed;
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
    /// How that object got its name; `None` if it got none.
    pub published_by: Option<Claimed>,
}

/// A mounted file system.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    /// Type as in `/etc/fstab`: `ext4`, `nfs4`.
    pub file_system: String,
    /// Path of the mount point.
    pub point: PathBuf,
    /// Source of the mount, as the file system calls it: a device, `server:/path`, a bucket.
    pub source: String,
    /// Options of the file system, with commas between them.
    pub options: String,
}

impl Mount {
    /// Returns the longest time for which this machine may take names and attributes from its memory instead of asking
    /// the server, as far as options and the kind of the file system tell; `None` where no server is asked.
    pub fn remembers(&self) -> Option<Duration> {
        let given = |name: &str| {
            let value = self.options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
            value.and_then(|value| value.parse::<u64>().ok())
        };
        let seconds = match self.file_system.as_str() {
            "nfs" | "nfs4" if self.options.split(',').any(|option| option == "noac") => 0,
            "nfs" | "nfs4" => given("acregmax").unwrap_or(60).max(given("acdirmax").unwrap_or(60)),
            "cifs" | "smb3" => given("actimeo").unwrap_or(1),
            kind if kind.starts_with("fuse.") => 1,
            _ => return None,
        };
        Some(Duration::from_secs(seconds))
    }

    /// Returns what to use instead, if this is a bucket mounted as a file system; `below` is a path in it.
    fn instead(&self, below: &Path) -> Option<String> {
        let (kind, source) = (self.file_system.as_str(), self.source.as_str());
        let (_, scheme) = BUCKETS.iter().find(|(name, _)| kind == format!("fuse.{name}") || source == *name)?;
        let is_bucket = !source.contains('/') && !BUCKETS.iter().any(|(name, _)| source == *name);
        let bucket = if is_bucket { source } else { "<bucket>" };
        let rest = below.strip_prefix(&self.point).unwrap_or(Path::new("")).display().to_string();
        Some(format!("{scheme}://{bucket}{}{rest}", if rest.is_empty() { "" } else { "/" }))
    }
}

/// Programs that mount a bucket as a file system, with the scheme of its own URLs.
const BUCKETS: [(&str, &str); 8] = [
    ("s3fs", "s3"),
    ("goofys", "s3"),
    ("geesefs", "s3"),
    ("mountpoint-s3", "s3"),
    ("gcsfuse", "gs"),
    ("blobfuse", "az"),
    ("blobfuse2", "az"),
    ("rclone", "s3"),
];

/// Returns which file system is at a path where no name can be claimed, and what to use instead.
pub(super) fn unclaimable(path: &Path) -> String {
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let existing = path.ancestors().find_map(|place| place.canonicalize().ok()).unwrap_or_default();
    let mount = mount_of(&existing, &mounts);
    let found = mount.as_ref().map_or("another", |mount| mount.file_system.as_str());
    let instead = mount.as_ref().and_then(|mount| mount.instead(path.parent().unwrap_or(path)));
    let instead = instead.map_or_else(|| "save to another one".to_owned(), |url| format!("use {url}"));
    format!(
        "expected a file system that creates a name only if it is absent, found {found}, which can neither rename \
         without replacing nor link: {instead}"
    )
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
    let tried = try_out(&path);
    Ok(Directory {
        mount: mount_of(&resolved, &mounts),
        free_bytes: uninterrupted(|| RealDisk.statvfs(&path)).ok().map(|room| room.bytes),
        published_by: tried.as_ref().ok().map(|(_, by)| *by),
        takes_direct: tried.map(|(takes_direct, _)| takes_direct),
        path,
    })
}

/// Publishes an object in `dir`, durably and atomically, then removes it.
fn try_out(dir: &Path) -> Result<(bool, Claimed)> {
    let store = LocalStore::on(RealDisk, dir.to_owned())?;
    let takes_direct = store.takes_direct(dir)?;
    let path = dir.join(name::temporary()?);
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let published = store.published(&name, &path, b"written by a probe; may be deleted");
    let deleted = store.delete(&name);
    let by = published?;
    deleted.map(|()| (takes_direct, by))
}

/// Returns the mount that contains the absolute path `path`, given the contents of `/proc/self/mountinfo` (see
/// proc(5)).
fn mount_of(path: &Path, mounts: &[u8]) -> Option<Mount> {
    let mut found: Option<Mount> = None;
    for line in mounts.split(|&byte| byte == b'\n') {
        let mut words = line.split(|&byte| byte == b' ');
        let (Some(point), Some(_)) = (words.nth(4), words.find(|word| *word == b"-")) else { continue };
        let (point, Some(file_system)) = (unescaped(point), words.next()) else { continue };
        let mut text = || words.next().map(|word| unescaped(word).display().to_string()).unwrap_or_default();
        // The later one of two mounts at one place hides the earlier one.
        let is_nearer = found.as_ref().is_none_or(|found| point.starts_with(&found.point));
        if path.starts_with(&point) && is_nearer {
            let file_system = String::from_utf8_lossy(file_system).into_owned();
            found = Some(Mount { file_system, point, source: text(), options: text() });
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
    fn a_mounted_bucket_has_a_url_of_its_own() {
        let instead = |kind: &str, source: &str, below: &str| {
            let (file_system, source) = (kind.to_owned(), source.to_owned());
            Mount { file_system, point: "/mnt".into(), source, options: String::new() }.instead(Path::new(below))
        };
        assert_eq!(instead("fuse.s3fs", "s3fs", "/mnt/runs/a").as_deref(), Some("s3://<bucket>/runs/a"));
        assert_eq!(instead("fuse.gcsfuse", "mine", "/mnt").as_deref(), Some("gs://mine"));
        assert_eq!(instead("fuse", "mountpoint-s3", "/mnt/x").as_deref(), Some("s3://<bucket>/x"));
        assert_eq!(instead("nfs4", "server:/x", "/mnt/x"), None);
    }

    #[test]
    fn a_client_remembers_as_long_as_its_options_say() {
        let remembers = |kind: &str, options: &str| {
            let (file_system, options) = (kind.to_owned(), options.to_owned());
            let mount = Mount { file_system, point: "/".into(), source: String::new(), options };
            mount.remembers().map(|time| time.as_secs())
        };
        assert_eq!(remembers("nfs4", "rw,vers=4.1,acregmax=7,acdirmax=9"), Some(9));
        assert_eq!((remembers("nfs", "rw"), remembers("nfs", "rw,noac")), (Some(60), Some(0)));
        assert_eq!((remembers("xfs", "rw"), remembers("fuse.glusterfs", "rw")), (None, Some(1)));
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
        let mount = |file_system: &str, point: &str, source: &str| Mount {
            file_system: file_system.into(),
            point: point.into(),
            source: source.into(),
            options: "rw".into(),
        };
        assert_eq!(found("/runs"), mount("ext4", "/", "/dev/sda1"));
        assert_eq!(found("/mnt/a b/run"), mount("nfs4", "/mnt/a b", "server:/x"));
        assert_eq!(found("/data/run"), mount("tmpfs", "/data", "tmpfs"));
        assert_eq!(mount_of(Path::new("/runs"), b""), None);
    }
}
