//! Stores objects as files of a local file system, or one that is mounted like it.
//!
//! Objects are files below the root directory, with the same names. These steps make them durable and atomic:
//!
//! 1. *Create.* The file is opened at its final name with `O_CREAT | O_EXCL`; missing directories above it are made
//!    first. `fallocate` gives it its length and its blocks, so that a full disk is found before the first byte is
//!    written and parallel writes never extend the file.
//! 2. *Write.* With `O_DIRECT` if a probe file in the store's own directory shows that the file system takes it,
//!    through the page cache otherwise. One thread keeps many direct writes in flight through `io_uring`. If the kernel
//!    does not offer that (seccomp), and for the page cache, several threads use `pwrite`. Short writes and `EINTR` are
//!    continued. If the handle is stale (`ESTALE`) and the name still is this file, direct writes go on with a new one.
//! 3. *Finish.* `ftruncate` cuts off the padding of the last direct write; `fdatasync` makes the contents durable. A
//!    write that failed may be made again: write(2) promises that the sync reports an earlier failed write-back, too. A
//!    failed sync may not be repeated. Then the name must still be this file.
//! 4. *Sync.* A name is durable when every directory from its own up to the root has been `fsync`ed, and so has the
//!    root's own way down from `/`. Every sync covers the whole way: the process that made a directory, on this machine
//!    or another, may have died before it could sync it. Each directory is synced once per call, those above the root
//!    once per store.
//! 5. *Publish.*
//!    1. The bytes go to a new temporary file `.tmp-<16 hex digits>` in the target's directory.
//!    2. `fdatasync` of that file.
//!    3. `fsync` of every directory above the target's, as in 4, so that the way to the target is durable before it is.
//!    4. `renameat2(RENAME_NOREPLACE)` to the target, or `link` where the file system lacks it; where it lacks both,
//!       `Unsupported`. `EEXIST` means that another process was first, unless the target is our own file: on a network
//!       file system a request may be carried out, its answer lost, and the repetition refused.
//!    5. `fsync` of the target's directory. If that fails, the object is visible but perhaps not durable, which cannot
//!       be undone safely: another process may have read it. The error says so.
//! 6. *Put* is 5 with a plain `rename`, which replaces.
//! 7. *Also named*: `fdatasync` of the file, `link` to a temporary name, and 5 from there with a plain `rename`.
//! 8. *Delete* removes the name, then `fsync`s its directory; several names of one directory share the sync.
//!
//! A crash leaves at worst unfinished files, temporary files and directories; nothing refers to them.

mod claims;
mod failure;
mod flights;
pub mod probe;
mod reader;
mod writer;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use claims::{Claimed, Claims};
use failure::{ambiguous, failed, no_room, of_errno};
pub(crate) use reader::LocalReader;
use writer::LocalWriter;

use crate::disk::{Disk, Errno, FileKind, RealDisk, Stat, Sys};
use crate::observe::{Action, Reports};
use crate::place::{self, Url};
use crate::write::{Writes, by_threads};
use crate::{
    Entry, Error, Kind, Needs, ObjectReader, ObjectWriter, Result, Service, Shared, Store, WRITE_THREADS, name,
};

/// Number of times that a directory is made again after other processes removed it as empty.
const EMPTIED_MAX: usize = 4;

/// Alignment of direct I/O, in bytes, here and on every device in use: a page.
const ALIGNMENT: usize = 4096;

/// Length of a write through the page cache, in bytes, from which its write-back begins at once.
const WRITE_BACK_BYTES_MIN: usize = 1 << 20;

/// Length of a file, in bytes, from which it is opened a second time, to be read past the page cache.
const DIRECT_BYTES_MIN: u64 = 64 << 20;

/// Block for the probe write.
#[repr(align(4096))]
struct Page([u8; ALIGNMENT]);

/// Opens the URL `file:///path`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    open_path(&path_of(url)?, shared)
}

/// Returns the path in `file:///path`.
fn path_of(url: Url<'_>) -> Result<String> {
    let invalid = |message| Error::new(Kind::Invalid, "open", format!("file://{}", url.location), message);
    let path = url.location.strip_prefix("localhost").unwrap_or(url.location);
    if !path.starts_with('/') {
        return Err(invalid("expected file:///absolute/path"));
    }
    place::decoded(path).ok_or_else(|| invalid("expected percent-encoded UTF-8"))
}

/// Opens a plain path, absolute or relative to the current directory.
pub(crate) fn open_path(path: &str, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let store = LocalStore::on(RealDisk, absolute(path)?.into())?;
    Ok(Arc::new(LocalStore { claims: Arc::clone(&shared.claims), reports: shared.reports.clone(), ..store }))
}

/// Returns a path as seen from `/`, without a slash at the end.
pub(crate) fn absolute(path: &str) -> Result<String> {
    let invalid = |message: String| Error::new(Kind::Invalid, "open", path, message);
    if path.is_empty() || path.contains('\0') {
        return Err(invalid("expected a path or a URL".into()));
    }
    let absolute = std::path::absolute(path)
        .map_err(|error| invalid(format!("it is relative, and the current directory is not known: {error}")))?;
    let absolute: PathBuf = absolute.components().collect();
    absolute.into_os_string().into_string().map_err(|path| {
        invalid(format!("expected a path in UTF-8, found {} from the current directory", path.to_string_lossy()))
    })
}

/// A directory of a file system as a [`Store`].
pub struct LocalStore<D: Disk = RealDisk> {
    disk: Arc<D>,
    root: PathBuf,
    url: String,
    claims: Arc<Claims>,
    /// Result of trying whether the file system takes `O_DIRECT`, before the first file is created.
    direct: OnceLock<bool>,
    above: Mutex<Above>,
    reports: Reports,
}

/// State of the directories above the root.
#[derive(Default)]
struct Above {
    /// `true` if they have been synced since this store last made one of them or the root.
    synced: bool,
    /// Directories in which this store made one.
    made_in: BTreeSet<PathBuf>,
}

impl<D: Disk> LocalStore<D> {
    /// Opens the store at the absolute path `root` of `disk`. Creates nothing.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if the path is not UTF-8, or is or passes through something that is no directory.
    pub fn on(disk: D, root: PathBuf) -> Result<Self> {
        let Some(path) = root.to_str() else {
            return Err(Error::new(Kind::Invalid, "open", root.to_string_lossy(), "expected a path in UTF-8"));
        };
        let url = format!("file://{}", place::encoded(path));
        // The nearest existing ancestor must be a directory.
        for place in root.ancestors() {
            match uninterrupted(|| disk.stat(place)) {
                Ok(stat) if stat.kind == FileKind::Dir => break,
                Ok(_) => {
                    return Err(failed(Kind::Invalid, "open", place, "expected a directory, found something else"));
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => return Err(of_errno("open", place, errno)),
            }
        }
        Ok(Self {
            disk: Arc::new(disk),
            root,
            url,
            claims: Arc::default(),
            direct: OnceLock::new(),
            above: Mutex::default(),
            reports: Reports::default(),
        })
    }

    fn path(&self, op: &'static str, name: &str) -> Result<PathBuf> {
        name::check(op, &self.url, name)?;
        Ok(self.root.join(name))
    }

    /// Makes a call by a path. If the path is missing, the call is made again after the file system was asked whether
    /// it is: a client of a network file system remembers for a while that a name was absent.
    fn of_now<T>(&self, path: &Path, call: impl Fn(&D) -> Sys<T>) -> Sys<T> {
        match uninterrupted(|| call(&self.disk)) {
            Err(Errno::NOENT) if path.parent().is_some_and(|dir| self.looks(dir)) => {
                self.disk.ask_for(path);
                uninterrupted(|| call(&self.disk))
            }
            done => done,
        }
    }

    /// Asks the file system for a directory as it is now, and for those above it if that is missing; returns whether it
    /// is there.
    fn looks(&self, dir: &Path) -> bool {
        self.disk.ask_for(dir);
        let look = || uninterrupted(|| self.disk.look(dir));
        match look() {
            Err(Errno::NOENT) => dir.parent().is_some_and(|above| self.looks(above)) && look().is_ok(),
            looked => looked.is_ok(),
        }
    }

    fn call<T>(&self, op: &'static str, path: &Path, f: impl Fn(&D) -> Sys<T>) -> Result<T> {
        uninterrupted(|| f(&self.disk)).map_err(|errno| of_errno(op, path, errno))
    }

    /// Makes the directory `dir` and all missing ones above it.
    fn make_dirs(&self, dir: &Path) -> Result<()> {
        let mut made = uninterrupted(|| self.disk.mkdir(dir));
        if let (Err(Errno::NOENT), Some(parent)) = (made, dir.parent()) {
            self.make_dirs(parent)?;
            made = uninterrupted(|| self.disk.mkdir(dir));
        }
        match made {
            Ok(()) if self.root.starts_with(dir) => {
                let mut above = self.above.lock().unwrap_or_else(PoisonError::into_inner);
                above.synced = false;
                above.made_in.extend(dir.parent().map(Path::to_owned));
            }
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::NOTDIR) => return Err(failed(Kind::Invalid, "mkdir", dir, "not below a directory")),
            Err(errno) => return Err(no_room(&*self.disk, "mkdir", dir, errno, 0)),
        }
        Ok(())
    }

    /// Returns whether files in `dir` can be written with `O_DIRECT`; the first call makes `dir` and tries it there.
    fn takes_direct(&self, dir: &Path) -> Result<bool> {
        if let Some(&direct) = self.direct.get() {
            return Ok(direct);
        }
        let path = dir.join(name::temporary()?);
        // Some file systems take the flag and refuse the write.
        let tried = self
            .created(&path, true)?
            .and_then(|file| uninterrupted(|| self.disk.pwrite(&file, &Page([0; ALIGNMENT]).0, 0)));
        // A kernel that refuses O_DIRECT may have created the file all the same.
        let removed = uninterrupted(|| self.disk.unlink(&path));
        let direct = match tried {
            Ok(written) => written == ALIGNMENT,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => false,
            Err(Errno::NOTDIR) => return Err(failed(Kind::Invalid, "create", &path, "not below a directory")),
            Err(errno) => return Err(no_room(&*self.disk, "create", &path, errno, 0)),
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(*self.direct.get_or_init(|| direct)),
            Err(errno) => Err(of_errno("unlink", &path, errno)),
        }
    }

    /// Opens a file for reading, and returns its attributes.
    fn open_file(&self, path: &Path) -> Result<(D::File, Stat)> {
        let not_a_file = || Err(failed(Kind::Corrupt, "open", path, "expected a file, found something else"));
        self.disk.ask_for(path);
        let file = match self.of_now(path, |disk| disk.open_read(path, false)) {
            Ok(file) => file,
            // A socket; or a server that cannot be reached.
            Err(Errno::NXIO) if self.disk.stat(path).is_ok_and(|stat| stat.kind == FileKind::Other) => {
                return not_a_file();
            }
            Err(errno) => return Err(of_errno("open", path, errno)),
        };
        let stat = self.call("open", path, |disk| disk.fstat(&file))?;
        if stat.kind == FileKind::File { Ok((file, stat)) } else { not_a_file() }
    }

    /// Opens an object for reading; returns its reader, which reports nothing yet, and its first bytes.
    fn open_reader(&self, name: &str, head_bytes: u64) -> Result<(LocalReader<D>, Vec<u8>)> {
        let path = self.path("open", name)?;
        let (file, stat) = self.open_file(&path)?;
        let bytes = stat.bytes;
        let is_large = bytes >= DIRECT_BYTES_MIN;
        // Optional: without it the file is read through the page cache.
        let direct = if is_large { uninterrupted(|| self.disk.open_read(&path, true)).ok() } else { None };
        let object = LocalReader::new(self.disk.clone(), file, direct, (path, name), bytes);
        let mut head = vec![0; bytes.min(head_bytes) as usize];
        if !head.is_empty() {
            object.read_at(0, &mut head)?;
        }
        Ok((object, head))
    }

    /// Creates a file, and missing directories above it, again if others remove them as empty.
    fn created(&self, path: &Path, direct: bool) -> Result<Sys<D::File>> {
        let mut created = uninterrupted(|| self.disk.create_new(path, direct));
        for _ in 0..EMPTIED_MAX {
            let (Err(Errno::NOENT), Some(dir)) = (&created, path.parent()) else { break };
            self.make_dirs(dir)?;
            created = uninterrupted(|| self.disk.create_new(path, direct));
        }
        Ok(created)
    }

    /// Creates the file `path`, and missing directories above it.
    fn create_file(&self, path: PathBuf, bytes: u64, direct: bool) -> Result<LocalWriter<D>> {
        let created = self.created(&path, direct)?;
        match created {
            Ok(file) => {
                let alignment = if direct { ALIGNMENT } else { 1 };
                LocalWriter::new(&self.disk, file, path, bytes, alignment)
            }
            Err(Errno::EXIST) => Err(failed(Kind::Conflict, "create", &path, "the name is taken")),
            Err(Errno::NOTDIR) => Err(failed(Kind::Invalid, "create", &path, "not below a directory")),
            Err(errno) => Err(no_room(&*self.disk, "create", &path, errno, bytes)),
        }
    }

    /// Performs steps 5.1 to 5.3: writes the bytes to a durable temporary file beside `target`, the way to which is
    /// durable too.
    fn prepare(&self, name: &str, target: &Path, bytes: &[u8]) -> Result<LocalWriter<D>> {
        let dir = target.parent().unwrap_or(&self.root);
        let file = self.create_file(dir.join(name::temporary()?), bytes.len() as u64, false)?;
        file.write_at(0, bytes)?;
        uninterrupted(|| self.disk.fdatasync(file.file())).map_err(|errno| file.failed("fdatasync", errno))?;
        self.sync_dirs(name::parent(name).into_iter().flat_map(above))?;
        Ok(file)
    }

    /// Performs step 5.4: gives the file its final name, unless it is taken.
    fn claim(&self, file: &LocalWriter<D>, target: &Path) -> Result<Claimed> {
        let claim = || match uninterrupted(|| self.disk.rename_noreplace(&file.path, target)) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                (Claimed::Link, uninterrupted(|| self.disk.link(&file.path, target)))
            }
            claimed => (Claimed::Rename, claimed),
        };
        let mut claimed = claim();
        if claimed.1 == Err(Errno::EXIST) {
            // The client may remember a name that another machine has deleted.
            self.disk.ask_for(target);
            claimed = claim();
        }
        let (by, claimed) = claimed;
        let Err(errno) = claimed else { return Ok(by) };
        match uninterrupted(|| self.disk.stat(target)) {
            Ok(found) if found.identity == file.identity => Ok(by),
            Ok(_) if errno == Errno::EXIST => Err(failed(Kind::Conflict, "publish", target, "the name is taken")),
            Ok(_) | Err(Errno::NOENT) => match errno {
                Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::MLINK => Err(failed(
                    Kind::Unsupported,
                    "publish",
                    target,
                    format!("{}: {errno}", probe::unclaimable(target)),
                )),
                _ => Err(of_errno("publish", target, errno)),
            },
            Err(_) => Err(ambiguous(target, errno)),
        }
    }

    /// Performs step 5: publishes the bytes under a name that must not be taken.
    fn published(&self, name: &str, target: &Path, bytes: &[u8]) -> Result<Claimed> {
        let file = self.prepare(name, target, bytes)?;
        let by = self.claim(&file, target)?;
        let dir = target.parent().unwrap_or(&self.root);
        uninterrupted(|| self.disk.fsync_dir(dir)).map_err(|errno| ambiguous(target, errno))?;
        Ok(by)
    }

    /// Performs step 4: syncs directories up to the root, and those above it.
    fn sync_dirs<'a>(&self, dirs: impl Iterator<Item = &'a str>) -> Result<()> {
        let dirs: BTreeSet<&str> = dirs.collect();
        for dir in dirs.into_iter().rev() {
            self.fsync_dir(dir)?;
        }
        let mut above = self.above.lock().unwrap_or_else(PoisonError::into_inner);
        if above.synced {
            return Ok(());
        }
        for dir in self.root.ancestors().skip(1) {
            match self.call("fsync", dir, |disk| disk.fsync_dir(dir)) {
                // A directory of another user that this process may not open: its owner syncs it.
                Err(error) if error.kind != Kind::Unavailable && !above.made_in.contains(dir) => {}
                synced => synced.map_err(Error::finally)?,
            }
        }
        above.synced = true;
        Ok(())
    }

    /// Removes a name; one that is absent is fine.
    fn unlink(&self, path: &Path) -> Result<()> {
        match self.of_now(path, |disk| disk.unlink(path)) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(of_errno("delete", path, errno)),
        }
    }

    /// Lists a directory as it is now.
    fn readdir(&self, dir: &Path) -> Result<Vec<(OsString, FileKind)>> {
        self.looks(dir);
        self.call("list", dir, |disk| disk.readdir(dir))
    }

    fn fsync_dir(&self, dir: &str) -> Result<()> {
        let path = if dir.is_empty() { self.root.clone() } else { self.root.join(dir) };
        uninterrupted(|| self.disk.fsync_dir(&path)).map_err(|errno| match errno {
            Errno::INVAL => failed(Kind::Unsupported, "fsync", &path, "the file system cannot sync a directory"),
            errno => of_errno("fsync", &path, errno).finally(),
        })
    }

    /// Makes the removal of `name` durable.
    fn sync_removal(&self, name: &str) -> Result<()> {
        match self.fsync_dir(name::parent(name).unwrap_or_default()) {
            Err(error) if error.kind == Kind::NotFound => Ok(()),
            synced => synced,
        }
    }

    fn remove_tree(&self, top: PathBuf) -> Result<()> {
        let mut to_do = vec![(top, false)];
        while let Some((dir, is_empty)) = to_do.pop() {
            if is_empty {
                absent_is_fine(self.call("rmdir", &dir, |disk| disk.rmdir(&dir)))?;
                continue;
            }
            let Some(entries) = absent_is_fine(self.readdir(&dir))? else { continue };
            to_do.push((dir.clone(), true));
            for (name, kind) in entries {
                let path = dir.join(name);
                match kind {
                    FileKind::Dir => to_do.push((path, false)),
                    _ => {
                        absent_is_fine(self.call("unlink", &path, |disk| disk.unlink(&path)))?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl<D: Disk> Store for LocalStore<D> {
    fn url(&self) -> &str {
        &self.url
    }

    fn needs(&self) -> Needs {
        Needs::LOCAL
    }

    fn can_publish(&self) -> Result<()> {
        let stat =
            || self.make_dirs(&self.root).and_then(|()| self.call("publish", &self.root, |d| d.stat(&self.root)));
        let mut root = stat();
        for _ in 0..EMPTIED_MAX {
            root = root.or_else(|error| if error.kind == Kind::NotFound { stat() } else { Err(error) });
        }
        self.claims.expect(root?.identity.0, || {
            let (from, to) = (self.root.join(name::temporary()?), self.root.join(name::temporary()?));
            let file = self.create_file(from, 0, false)?;
            self.claim(&file, &to)?;
            self.call("unlink", &to, |disk| disk.unlink(&to))
        })
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.reports.during(Action::Create, name, (0, 0), || {
            let path = self.path("create", name)?;
            if i64::try_from(bytes).is_err() {
                return Err(failed(Kind::Exhausted, "create", &path, format!("no file can hold {bytes} bytes")));
            }
            let direct = self.takes_direct(path.parent().unwrap_or(&self.root))?;
            let mut object = self.create_file(path, bytes, direct)?;
            (object.name, object.reports) = (name.to_owned(), self.reports.clone());
            if bytes > 0 {
                match uninterrupted(|| self.disk.fallocate(object.file(), bytes)) {
                    Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                    Err(errno) => {
                        let path = object.path.clone();
                        // Frees what it has allocated before the error reports the free room.
                        drop(object);
                        return Err(no_room(&*self.disk, "fallocate", &path, errno, bytes));
                    }
                }
            }
            Ok(Box::new(object) as Box<dyn ObjectWriter>)
        })
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let began = self.reports.begin();
        let opened = self.open_reader(name, head_bytes);
        let bytes = opened.as_ref().map_or(0, |(_, head)| head.len() as u64);
        self.reports.end(began, Action::Open, name, 0..bytes, opened.as_ref().err());
        let (mut reader, head) = opened?;
        reader.reports = self.reports.clone();
        Ok((Box::new(reader), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        self.reports.during(Action::Open, name, (0, 0), || {
            // Opened, since a client of a network file system answers a mere `stat` from its cache.
            Ok(self.open_file(&self.path("open", name)?)?.1.bytes)
        })
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Put, name, (0, bytes.len()), || {
            let target = self.path("put", name)?;
            let mut file = self.prepare(name, &target, bytes)?;
            if let Err(errno) = uninterrupted(|| self.disk.rename(&file.path, &target)) {
                // As in 5.4: perhaps only the answer was lost.
                let found = uninterrupted(|| self.disk.stat(&target));
                found
                    .ok()
                    .filter(|found| found.identity == file.identity)
                    .ok_or_else(|| of_errno("rename", &target, errno))?;
            }
            file.keep = true;
            self.fsync_dir(name::parent(name).unwrap_or_default())
        })
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Publish, name, (0, bytes.len()), || {
            let target = self.path("publish", name)?;
            self.published(name, &target, bytes).map(drop)
        })
    }

    fn also_named(&self, from: &str, name: &str, _: u64) -> Result<()> {
        self.reports.during(Action::Copy, name, (0, 0), || {
            let (from, target) = (self.path("link", from)?, self.path("link", name)?);
            let file = self.open_file(&from)?.0;
            self.call("fdatasync", &from, |disk| disk.fdatasync(&file))?;
            let dir = target.parent().unwrap_or(&self.root);
            self.make_dirs(dir)?;
            let linked = dir.join(name::temporary()?);
            match self.of_now(&from, |disk| disk.link(&from, &linked)) {
                Err(errno @ (Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::MLINK)) => {
                    let message = format!("{}: {errno}", crate::NO_SECOND_NAME);
                    return Err(failed(Kind::Unsupported, "link", &target, message));
                }
                // As in 5.4: perhaps only the answer was lost. The name is ours alone.
                Err(Errno::EXIST) | Ok(()) => {}
                Err(errno) => return Err(of_errno("link", &from, errno)),
            }
            let renamed = self.call("rename", &target, |disk| disk.rename(&linked, &target));
            // Of two names of one file a rename removes none.
            let removed = absent_is_fine(self.call("unlink", &linked, |disk| disk.unlink(&linked)));
            renamed.and(removed)?;
            self.sync_dirs(above(name))
        })
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        // Through the page cache a ring is slower than threads: its workers wait for each other at the file's lock.
        match self.direct.get() {
            Some(true) => match self.disk.ring(flights::DEPTH) {
                Ok(ring) => flights::write_all::<D>(ring, writes),
                Err(_) => by_threads(WRITE_THREADS, writes),
            },
            _ => by_threads(WRITE_THREADS, writes),
        }
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        self.reports.during(Action::Sync, names.first().unwrap_or(&""), (0, 0), || {
            names.iter().try_for_each(|name| name::check("sync", &self.url, name))?;
            self.sync_dirs(names.iter().flat_map(|name| above(name)))
        })
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.reports.during(Action::List, dir, (0, 0), || {
            name::check_dir("list", &self.url, dir)?;
            let path = if dir.is_empty() { self.root.clone() } else { self.root.join(dir) };
            let mut entries = Vec::new();
            for (name, kind) in self.readdir(&path)? {
                let Some(name) = name.to_str().filter(|name| name::flaw(name).is_none()).map(str::to_owned) else {
                    continue;
                };
                let entry = path.join(&name);
                // Removed since, or a link to nothing or to itself: it cannot be opened either.
                let stat = self.call("list", &entry, |disk| match disk.look(&entry) {
                    Err(Errno::LOOP) => Err(Errno::NOENT),
                    found => found,
                });
                let Some(stat) = absent_is_fine(stat)? else { continue };
                let is_dir = stat.kind == FileKind::Dir;
                let (bytes, modified) = (if is_dir { 0 } else { stat.bytes }, Some(stat.modified));
                // An entry of another type than its target is a link.
                let is_link = stat.kind != kind;
                entries.push(Entry { name, is_dir, is_link, bytes, modified });
            }
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(entries)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.reports.during(Action::Delete, name, (0, 0), || {
            let path = self.path("delete", name)?;
            self.unlink(&path)?;
            self.sync_removal(name)
        })
    }

    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        self.reports.during(Action::Delete, objects.first().unwrap_or(&""), (0, 0), || {
            let mut changed: BTreeSet<&str> = BTreeSet::new();
            for name in objects {
                let path = self.path("delete", name)?;
                self.unlink(&path)?;
                changed.extend(name::parent(name));
            }
            // What is below another one comes first.
            for dir in dirs.iter().collect::<BTreeSet<_>>().into_iter().rev() {
                let path = self.path("delete", dir)?;
                match self.of_now(&path, |disk| disk.rmdir(&path)) {
                    Ok(()) | Err(Errno::NOENT) => {
                        changed.remove(dir);
                        changed.extend(name::parent(dir));
                    }
                    // Not empty; or a link, or a place where something is mounted.
                    Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR | Errno::BUSY) => {}
                    Err(errno) => return Err(of_errno("delete", &path, errno)),
                }
            }
            changed.into_iter().rev().try_for_each(|dir| match self.fsync_dir(dir) {
                Err(error) if error.kind == Kind::NotFound => Ok(()),
                synced => synced,
            })
        })
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.reports.during(Action::DeleteTree, dir, (0, 0), || {
            let path = self.path("delete_tree", dir)?;
            // A link to a directory is removed, not followed.
            match self.of_now(&path, |disk| disk.unlink(&path)) {
                Err(Errno::ISDIR | Errno::PERM) => self.remove_tree(path)?,
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => return Err(of_errno("delete_tree", &path, errno)),
            }
            self.sync_removal(dir)
        })
    }

    fn free_bytes(&self) -> Option<u64> {
        // The root may not be made yet.
        let mut rooms = self.root.ancestors().map(|place| uninterrupted(|| self.disk.statvfs(place)));
        rooms.find(|room| !matches!(room, Err(Errno::NOENT)))?.ok().map(|room| room.bytes)
    }

    fn service(&self) -> Option<&dyn Service> {
        None
    }
}

/// Returns the directories from that of `name` up to the root.
fn above(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(name::parent(name), |dir| name::parent(dir))
}

/// Repeats a system call that a signal interrupted.
fn uninterrupted<T>(mut call: impl FnMut() -> Sys<T>) -> Sys<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

fn absent_is_fine<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
