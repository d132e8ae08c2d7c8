//! Simulates a file system in memory that loses bytes that were not synced, for tests.
//!
//! [`SimDisk`] promises what POSIX promises and not more:
//!
//! - Written bytes and a file's length reach the medium by `fdatasync` of the file; until then a crash keeps or loses
//!   each 512-byte sector on its own, and a sector that a longer file lost may hold zeros or old rubbish.
//! - A directory's entries reach the medium by `fsync` of that directory; until then a crash leaves each name in any of
//!   the states that it went through. That holds for the two names of a rename one by one, and for a new directory in
//!   its parent.
//! - An `fdatasync` that fails drops the bytes it was for: a later one succeeds without having written them. An `fsync`
//!   of a directory does so with its entries where [`Fault::Forget`] says so.
//! - `O_DIRECT` wants address, offset and length in multiples of 4096, and does not make anything durable.
//! - A file is at most 1 GiB long.
//! - [`SimDisk::client`] is the same disk on another machine, which remembers absent names, attributes and lists until
//!   it asks for them anew, and whose open files can become stale.
//!
//! [`SimDisk::crash`] returns the disk that the next process finds. Every system call is logged and numbered from 0;
//! [`SimDisk::inject`] makes one of them fail, [`SimDisk::refuse`] all of one name. Clones are the same disk.

mod chance;
mod client;
mod contents;
mod ring;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chance::Chance;
use client::Client;
use contents::{Dir, File, Inode, TEMPORARY, is_temporary};
pub use ring::SimRing;

use crate::Mapping;
use crate::disk::{Disk, Errno, FileKind, Room, Stat, Sys};

const SECTOR: usize = 512;
const DIRECT_ALIGNMENT: usize = 4096;
const FILE_BYTES_MAX: u64 = 1 << 30;
const ROOT: usize = 0;
const DEAD: Errno = Errno::ROFS;

/// A simulated disk; clones are handles on the same one.
#[derive(Clone, Default)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    /// Memory of this handle's client; `None` for a local disk.
    client: Option<Arc<Mutex<Client>>>,
}

/// Failure of one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The machine dies before it: this call and every later one fail with `EROFS`, which is never retried.
    Die,
    /// The call fails and has no effect.
    Fail(Errno),
    /// The call fails without effect, as do the next calls of its name on its path, this many in all. Temporary files
    /// of one directory count as one.
    Again(Errno, u32),
    /// A sync of a directory fails, and its entries never reach the medium, unless they change once more. Other calls
    /// are not affected.
    Forget(Errno),
    /// The call has its effect, but the answer is lost and reads as a failure.
    Lost(Errno),
    /// The call reports success without any effect. Not for calls that read.
    Skip,
    /// The call transfers half, if it is a read or a write; other calls are not affected.
    Short,
}

/// A system call that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name in [`Disk`]; `_direct` is appended to the three that `O_DIRECT` concerns, `create_new`, `pwrite` and
    /// `pread`.
    pub name: &'static str,
    /// Path of the call: the first one, or the one with which the file was opened.
    pub path: PathBuf,
}

/// An open file of a [`SimDisk`].
#[derive(Clone)]
pub struct SimFile {
    inode: usize,
    path: PathBuf,
    direct: bool,
    generation: u64,
}

struct State {
    inodes: Vec<Inode>,
    calls: Vec<Call>,
    faults: BTreeMap<usize, Fault>,
    refused: BTreeMap<&'static str, Errno>,
    ailing: Option<Ailing>,
    is_dead: bool,
    clock: SystemTime,
    /// Time of each inode's last change.
    times: BTreeMap<usize, SystemTime>,
}

/// Calls that fail a few times more.
struct Ailing {
    call: Call,
    errno: Errno,
    left: u32,
}

impl Default for State {
    fn default() -> Self {
        Self {
            inodes: vec![Inode::Dir(Dir::default())],
            calls: Vec::new(),
            faults: BTreeMap::new(),
            refused: BTreeMap::new(),
            ailing: None,
            is_dead: false,
            clock: UNIX_EPOCH,
            times: BTreeMap::new(),
        }
    }
}

impl SimDisk {
    /// Makes an empty disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the calls made so far; the next one's number is their count. A dead disk logs none.
    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    /// Injects a fault into the call of number `at`, counted from the disk's first.
    pub fn inject(&self, at: usize, fault: Fault) {
        self.lock().faults.insert(at, fault);
    }

    /// Makes every call of that name (as in [`Call::name`]) fail.
    pub fn refuse(&self, name: &'static str, errno: Errno) {
        self.lock().refused.insert(name, errno);
    }

    /// Returns the disk after a loss of power now, by `seed`: 0 loses all that was not synced, 1 keeps everything (as
    /// when only the process dies), every other one mixes and tears. This disk stays as it is.
    pub fn crash(&self, seed: u64) -> SimDisk {
        let state = self.lock();
        let settle = |(number, inode): (u64, &Inode)| {
            let mut chance = Chance::of(seed, number);
            match inode {
                Inode::File(file) => {
                    let contents = file.after_crash(&mut chance);
                    let cached = contents.clone();
                    Inode::File(File { cached, durable: contents, dirty: BTreeSet::new() })
                }
                Inode::Dir(dir) => {
                    let entries = dir.after_crash(&mut chance);
                    Inode::Dir(Dir { cached: entries.clone(), durable: entries, changes: BTreeMap::new() })
                }
            }
        };
        let inodes = (0..).zip(&state.inodes).map(settle).collect();
        let (clock, times) = (state.clock, state.times.clone());
        SimDisk { state: Arc::new(Mutex::new(State { inodes, clock, times, ..State::default() })), client: None }
    }

    /// Advances the disk's clock.
    pub fn pass(&self, time: Duration) {
        self.lock().clock += time;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a call and performs it, or not. `skipped` is the result if the call has no effect and reports success.
    fn call<T>(
        &self,
        name: &'static str,
        path: &Path,
        skipped: Option<T>,
        body: impl FnOnce(&mut State, bool) -> Sys<T>,
    ) -> Sys<T> {
        let mut state = self.lock();
        if state.is_dead {
            return Err(DEAD);
        }
        let number = state.calls.len();
        state.calls.push(Call { name, path: path.to_owned() });
        if let Some(Fault::Again(errno, left)) = state.faults.get(&number).copied() {
            state.ailing = Some(Ailing { call: of_any_attempt(name, path), errno, left });
        }
        if let Some(ailing) = state.ailing.as_mut().filter(|ailing| ailing.left > 0)
            && ailing.call == of_any_attempt(name, path)
        {
            ailing.left -= 1;
            return Err(ailing.errno);
        }
        if let Some(&errno) = state.refused.get(name) {
            return Err(errno);
        }
        match (state.faults.remove(&number), skipped) {
            (Some(Fault::Die), _) => {
                state.is_dead = true;
                Err(DEAD)
            }
            (Some(Fault::Fail(errno)), _) => Err(errno),
            (Some(Fault::Forget(errno)), _) if name == "fsync_dir" => {
                let dir = state.find(path)?;
                state.dir(dir)?.changes.clear();
                Err(errno)
            }
            (Some(Fault::Lost(errno)), _) => body(&mut state, false).and(Err(errno)),
            (Some(Fault::Skip), Some(skipped)) => Ok(skipped),
            (Some(Fault::Short), _) => body(&mut state, true),
            (Some(Fault::Skip | Fault::Again(..) | Fault::Forget(_)) | None, _) => body(&mut state, false),
        }
    }
}

impl SimDisk {
    /// Opens a file that is there.
    fn opened(&self, name: &'static str, path: &Path, direct: bool) -> Sys<SimFile> {
        let generation = self.generation();
        let open =
            |state: &mut State, _| Ok(SimFile { inode: state.find(path)?, path: path.to_owned(), direct, generation });
        self.by_path(path, || self.call(name, path, None, open))
    }

    /// Performs a call on an open file.
    fn call_on<T>(
        &self,
        file: &SimFile,
        name: &'static str,
        skipped: Option<T>,
        body: impl FnOnce(&mut State, bool) -> Sys<T>,
    ) -> Sys<T> {
        let is_stale = file.generation != self.generation();
        self.call(
            name,
            &file.path,
            skipped,
            |state, short| if is_stale { Err(Errno::STALE) } else { body(state, short) },
        )
    }
}

/// Returns the call without the random part of a temporary file's name.
fn of_any_attempt(name: &'static str, path: &Path) -> Call {
    let is_temporary = path.file_name().is_some_and(is_temporary);
    Call { name, path: if is_temporary { path.with_file_name(TEMPORARY) } else { path.to_owned() } }
}

fn bounded(file_bytes: u64) -> Sys<usize> {
    if file_bytes > FILE_BYTES_MAX { Err(Errno::FBIG) } else { Ok(file_bytes as usize) }
}

impl State {
    fn dir(&mut self, inode: usize) -> Sys<&mut Dir> {
        match &mut self.inodes[inode] {
            Inode::Dir(dir) => Ok(dir),
            Inode::File(_) => Err(Errno::NOTDIR),
        }
    }

    fn file(&mut self, inode: usize) -> Sys<&mut File> {
        match &mut self.inodes[inode] {
            Inode::File(file) => Ok(file),
            Inode::Dir(_) => Err(Errno::ISDIR),
        }
    }

    /// Returns a file that is about to be changed.
    fn changed(&mut self, inode: usize) -> Sys<&mut File> {
        self.times.insert(inode, self.clock);
        self.file(inode)
    }

    fn entry(&mut self, dir: usize, name: &OsStr, inode: Option<usize>) -> Sys<()> {
        self.times.insert(dir, self.clock);
        self.dir(dir)?.set(name, inode);
        Ok(())
    }

    fn find(&mut self, path: &Path) -> Sys<usize> {
        let mut inode = ROOT;
        for component in path.components() {
            if let Component::Normal(name) = component {
                inode = *self.dir(inode)?.cached.get(name).ok_or(Errno::NOENT)?;
            }
        }
        Ok(inode)
    }

    /// Returns the directory of a path, and the last component's name and inode.
    fn locate<'a>(&mut self, path: &'a Path) -> Sys<(usize, &'a OsStr, Option<usize>)> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::EXIST) };
        let dir = self.find(parent)?;
        let inode = self.dir(dir)?.cached.get(name).copied();
        Ok((dir, name, inode))
    }

    fn add(&mut self, path: &Path, inode: Inode) -> Sys<usize> {
        let (dir, name, None) = self.locate(path)? else { return Err(Errno::EXIST) };
        self.inodes.push(inode);
        let number = self.inodes.len() - 1;
        self.times.insert(number, self.clock);
        self.entry(dir, name, Some(number))?;
        Ok(number)
    }

    fn remove(&mut self, path: &Path, is_dir: bool) -> Sys<()> {
        let (dir, name, inode) = self.locate(path)?;
        match (&self.inodes[inode.ok_or(Errno::NOENT)?], is_dir) {
            (Inode::File(_), true) => return Err(Errno::NOTDIR),
            (Inode::Dir(_), false) => return Err(Errno::ISDIR),
            (Inode::Dir(removed), true) if !removed.cached.is_empty() => return Err(Errno::NOTEMPTY),
            _ => {}
        }
        self.entry(dir, name, None)?;
        Ok(())
    }

    fn rename(&mut self, from: &Path, to: &Path, replace: bool) -> Sys<()> {
        let (from_dir, from_name, inode) = self.locate(from)?;
        let inode = inode.ok_or(Errno::NOENT)?;
        let (to_dir, to_name, taken) = self.locate(to)?;
        match taken.map(|taken| &self.inodes[taken]) {
            Some(_) if !replace => return Err(Errno::EXIST),
            Some(Inode::Dir(_)) => return Err(Errno::ISDIR),
            _ => {}
        }
        self.entry(to_dir, to_name, Some(inode))?;
        self.entry(from_dir, from_name, None)?;
        Ok(())
    }

    fn stat(&self, inode: usize) -> Stat {
        let (kind, bytes) = match &self.inodes[inode] {
            Inode::File(file) => (FileKind::File, file.cached.len() as u64),
            Inode::Dir(_) => (FileKind::Dir, 0),
        };
        let modified = self.times.get(&inode).copied().unwrap_or(UNIX_EPOCH);
        Stat { kind, bytes, identity: (0, inode as u64), modified }
    }
}

impl Disk for SimDisk {
    type File = SimFile;
    type Ring = SimRing;

    fn mkdir(&self, path: &Path) -> Sys<()> {
        let make =
            || self.call("mkdir", path, Some(()), |state, _| state.add(path, Inode::Dir(Dir::default())).map(drop));
        self.changing(path, make)
    }

    fn create_new(&self, path: &Path, direct: bool) -> Sys<SimFile> {
        let name = if direct { "create_new_direct" } else { "create_new" };
        let generation = self.generation();
        let create = |state: &mut State, _| {
            let inode = state.add(path, Inode::File(File::default()))?;
            Ok(SimFile { inode, path: path.to_owned(), direct, generation })
        };
        self.changing(path, || self.call(name, path, None, create))
    }

    fn open_write(&self, path: &Path) -> Sys<SimFile> {
        self.opened("open_write", path, true)
    }

    fn open_read(&self, path: &Path, direct: bool) -> Sys<SimFile> {
        self.opened("open_read", path, direct)
    }

    fn ring(&self, depth: u32) -> Sys<SimRing> {
        self.call("ring", Path::new(""), None, |state, _| {
            let chance = Chance::new(state.calls.len() as u64);
            Ok(SimRing { disk: self.clone(), depth: depth as usize, flights: Vec::new(), chance })
        })
    }

    fn pwrite(&self, file: &SimFile, bytes: &[u8], offset: u64) -> Sys<usize> {
        let name = if file.direct { "pwrite_direct" } else { "pwrite" };
        self.call_on(file, name, Some(bytes.len()), |state, short| {
            let offset = bounded(offset.saturating_add(bytes.len() as u64))? - bytes.len();
            let places = [bytes.as_ptr().addr(), offset, bytes.len()];
            if file.direct && !places.iter().all(|n| n.is_multiple_of(DIRECT_ALIGNMENT)) {
                return Err(Errno::INVAL);
            }
            let taken = if short && bytes.len() > 1 { bytes.len() / 2 } else { bytes.len() };
            state.changed(file.inode)?.write(&bytes[..taken], offset);
            Ok(taken)
        })
    }

    fn pread(&self, file: &SimFile, buf: &mut [u8], offset: u64) -> Sys<usize> {
        let name = if file.direct { "pread_direct" } else { "pread" };
        self.call_on(file, name, None, |state, short| {
            let places = [buf.as_ptr().addr(), offset as usize, buf.len()];
            if file.direct && !places.iter().all(|n| n.is_multiple_of(DIRECT_ALIGNMENT)) {
                return Err(Errno::INVAL);
            }
            let contents = &state.file(file.inode)?.cached;
            let rest = contents.get(usize::try_from(offset).map_err(|_| Errno::INVAL)?..).unwrap_or_default();
            let wanted = if short && buf.len() > 1 { buf.len() / 2 } else { buf.len() };
            let taken = rest.len().min(wanted);
            buf[..taken].copy_from_slice(&rest[..taken]);
            Ok(taken)
        })
    }

    fn fallocate(&self, file: &SimFile, bytes: u64) -> Sys<()> {
        self.call_on(file, "fallocate", Some(()), |state, _| {
            let file = state.file(file.inode)?;
            let bytes = bounded(bytes)?;
            if bytes > file.cached.len() {
                file.resize(bytes);
            }
            Ok(())
        })
    }

    fn ftruncate(&self, file: &SimFile, bytes: u64) -> Sys<()> {
        self.call_on(file, "ftruncate", Some(()), |state, _| {
            state.changed(file.inode)?.resize(bounded(bytes)?);
            Ok(())
        })
    }

    fn fdatasync(&self, file: &SimFile) -> Sys<()> {
        let synced = self.call_on(file, "fdatasync", Some(()), |state, _| {
            state.file(file.inode)?.sync();
            Ok(())
        });
        if synced.is_err_and(|errno| errno != Errno::INTR) {
            let mut state = self.lock();
            if !state.is_dead {
                state.file(file.inode)?.dirty.clear();
            }
        }
        synced
    }

    fn will_need(&self, file: &SimFile, _offset: u64, _bytes: u64) -> Sys<()> {
        self.call_on(file, "will_need", Some(()), |_, _| Ok(()))
    }

    fn dont_need(&self, file: &SimFile, _offset: u64, _bytes: u64) -> Sys<()> {
        self.call_on(file, "dont_need", Some(()), |_, _| Ok(()))
    }

    fn map(&self, _file: &SimFile, _bytes: u64) -> Sys<Mapping> {
        Err(Errno::NODEV)
    }

    fn cached_bytes(&self, file: &SimFile, _offset: u64, _bytes: u64) -> Sys<u64> {
        self.call_on(file, "cached_bytes", None, |_, _| Ok(0))
    }

    fn reads_at_once(&self, file: &SimFile, _offset: u64) -> Sys<bool> {
        self.call_on(file, "reads_at_once", None, |_, _| Ok(false))
    }

    fn fstat(&self, file: &SimFile) -> Sys<Stat> {
        self.call_on(file, "fstat", None, |state, _| Ok(state.stat(file.inode)))
    }

    fn fsync_dir(&self, path: &Path) -> Sys<()> {
        let sync = |state: &mut State, _| {
            let inode = state.find(path)?;
            state.dir(inode)?.sync();
            Ok(())
        };
        self.by_path(path, || self.call("fsync_dir", path, Some(()), sync))
    }

    fn link(&self, from: &Path, to: &Path) -> Sys<()> {
        let link = |state: &mut State, _| {
            let inode = state.find(from)?;
            let (dir, name, None) = state.locate(to)? else { return Err(Errno::EXIST) };
            state.entry(dir, name, Some(inode))
        };
        self.by_path(from, || self.changing(to, || self.call("link", from, Some(()), link)))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Sys<()> {
        let rename = || self.call("rename_noreplace", from, Some(()), |state, _| state.rename(from, to, false));
        self.by_path(from, || self.changing(to, || self.changing(from, rename)))
    }

    fn rename(&self, from: &Path, to: &Path) -> Sys<()> {
        let rename = || self.call("rename", from, Some(()), |state, _| state.rename(from, to, true));
        self.by_path(from, || self.changing(to, || self.changing(from, rename)))
    }

    fn unlink(&self, path: &Path) -> Sys<()> {
        let remove = || self.call("unlink", path, Some(()), |state, _| state.remove(path, false));
        self.by_path(path, || self.changing(path, remove))
    }

    fn rmdir(&self, path: &Path) -> Sys<()> {
        let remove = || self.call("rmdir", path, Some(()), |state, _| state.remove(path, true));
        self.by_path(path, || self.changing(path, remove))
    }

    fn readdir(&self, path: &Path) -> Sys<Vec<(OsString, FileKind)>> {
        let list = |state: &mut State, _| {
            let inode = state.find(path)?;
            let entries = state.dir(inode)?.cached.clone();
            Ok(entries.into_iter().map(|(name, inode)| (name, state.stat(inode).kind)).collect())
        };
        self.list_by(path, || self.call("readdir", path, None, list))
    }

    fn stat(&self, path: &Path) -> Sys<Stat> {
        let stat = |state: &mut State, _| state.find(path).map(|inode| state.stat(inode));
        self.stat_by(path, || self.call("stat", path, None, stat))
    }

    fn look(&self, path: &Path) -> Sys<Stat> {
        let stat = |state: &mut State, _| state.find(path).map(|inode| state.stat(inode));
        self.look_by(path, || self.call("look", path, None, stat))
    }

    /// Returns the space of one more file of any size: only [`SimDisk::refuse`] and [`SimDisk::inject`] fill this disk.
    fn statvfs(&self, path: &Path) -> Sys<Room> {
        self.call("statvfs", path, None, |_, _| Ok(Room { bytes: FILE_BYTES_MAX, files: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str) -> &Path {
        Path::new(path)
    }

    fn contents(disk: &SimDisk, name: &str) -> Sys<Vec<u8>> {
        let file = disk.open_read(path(name), false)?;
        let mut buf = vec![0; disk.fstat(&file)?.bytes as usize];
        assert_eq!(disk.pread(&file, &mut buf, 0)?, buf.len());
        Ok(buf)
    }

    #[test]
    fn a_crash_loses_what_was_not_synced_and_nothing_else() {
        let disk = SimDisk::new();
        let file = disk.create_new(path("/f"), false).unwrap();
        disk.pwrite(&file, &[1; 2000], 0).unwrap();
        assert_eq!(contents(&disk.crash(0), "/f"), Err(Errno::NOENT));
        assert_eq!(contents(&disk.crash(1), "/f"), Ok(vec![1; 2000]));

        disk.fsync_dir(path("/")).unwrap();
        assert_eq!(contents(&disk.crash(0), "/f"), Ok(vec![]), "the name without the bytes");
        disk.fdatasync(&file).unwrap();
        for seed in 0..50 {
            assert_eq!(contents(&disk.crash(seed), "/f"), Ok(vec![1; 2000]));
        }

        disk.pwrite(&file, &[2; 1024], 0).unwrap();
        let torn: BTreeSet<Vec<u8>> = (0..50).map(|seed| contents(&disk.crash(seed), "/f").unwrap()).collect();
        assert_eq!(torn.len(), 4, "two sectors, each of them old or new");
    }

    #[test]
    fn a_rename_is_two_names_until_its_directory_is_synced() {
        let disk = SimDisk::new();
        let file = disk.create_new(path("/from"), false).unwrap();
        disk.fdatasync(&file).unwrap();
        disk.fsync_dir(path("/")).unwrap();
        disk.rename(path("/from"), path("/to")).unwrap();
        let seen = |disk: &SimDisk| ["/from", "/to"].map(|name| disk.stat(path(name)).is_ok());
        let states: BTreeSet<_> = (0..50).map(|seed| seen(&disk.crash(seed))).collect();
        assert_eq!(states.len(), 4);
        disk.fsync_dir(path("/")).unwrap();
        assert!((0..50).all(|seed| seen(&disk.crash(seed)) == [false, true]));
    }

    #[test]
    fn a_failed_sync_forgets_its_bytes() {
        let disk = SimDisk::new();
        let file = disk.create_new(path("/f"), false).unwrap();
        disk.fsync_dir(path("/")).unwrap();
        disk.pwrite(&file, &[1; 512], 0).unwrap();
        disk.inject(disk.calls().len(), Fault::Fail(Errno::IO));
        assert_eq!(disk.fdatasync(&file), Err(Errno::IO));
        assert_eq!(disk.fdatasync(&file), Ok(()));
        assert_eq!(contents(&disk, "/f"), Ok(vec![1; 512]));
        assert_eq!(contents(&disk.crash(0), "/f"), Ok(vec![0; 512]));
    }

    #[test]
    fn direct_writes_must_be_aligned() {
        let disk = SimDisk::new();
        let file = disk.create_new(path("/f"), true).unwrap();
        let storage = vec![7; 3 * DIRECT_ALIGNMENT];
        let start = storage.as_ptr().align_offset(DIRECT_ALIGNMENT);
        let page = &storage[start..start + DIRECT_ALIGNMENT];
        assert_eq!(disk.pwrite(&file, page, 4096), Ok(4096));
        assert_eq!(disk.pwrite(&file, page, 512), Err(Errno::INVAL));
        assert_eq!(disk.pwrite(&file, &page[..512], 0), Err(Errno::INVAL));
        assert_eq!(disk.pwrite(&file, &storage[start + 8..][..4096], 0), Err(Errno::INVAL));
    }

    #[test]
    fn a_dead_disk_answers_nothing_more() {
        let disk = SimDisk::new();
        disk.inject(1, Fault::Die);
        disk.mkdir(path("/a")).unwrap();
        assert_eq!(disk.mkdir(path("/b")), Err(DEAD));
        assert_eq!(disk.stat(path("/a")), Err(DEAD));
        assert!(disk.crash(1).stat(path("/a")).is_ok());
        assert_eq!(disk.crash(1).stat(path("/b")), Err(Errno::NOENT));
    }
}
