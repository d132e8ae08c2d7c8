//! One rank's view of the shared disk: it ends with the rank, and fails where a trap is set.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use shardfast_store::Mapping;
use shardfast_store::disk::{Disk, Errno, FileKind, Flight, Ring, Room, Stat, Sys};
use shardfast_store::testing::simdisk::{SimDisk, SimFile};

use crate::process::{Process, Word};
use crate::storage::Storage;
use crate::trap::{Failure, Fate, is_data};
use shardfast_store::testing::dice::Dice;

/// The error of a dead process's system calls, which is never retried.
const DEAD: Errno = Errno::ROFS;

/// One rank's view of the disk.
#[derive(Clone)]
pub(crate) struct RankDisk {
    pub(crate) disk: SimDisk,
    pub(crate) process: Arc<Process>,
}

impl RankDisk {
    fn call<T>(&self, name: &str, path: &Path, body: impl FnOnce(&SimDisk) -> Sys<T>) -> Sys<T> {
        let RankDisk { disk, process } = self;
        if process.is_dead() {
            return Err(DEAD);
        }
        match process.trapped(name, path) {
            None => body(disk),
            Some(Fate::Die { after }) => {
                // The result reaches no one.
                let _ = after.then(|| body(disk));
                process.die();
                Err(DEAD)
            }
            Some(Fate::Fails(Failure::Call { errno, has_effect: false })) => Err(errno),
            Some(Fate::Fails(Failure::Call { errno, has_effect: true })) => body(disk).and(Err(errno)),
            Some(Fate::Fails(Failure::Request(_))) => body(disk),
            Some(Fate::Slow(time)) => {
                process.linger(time);
                if process.is_dead() { Err(DEAD) } else { body(disk) }
            }
            Some(Fate::Blackout { seed }) => {
                process.say(Word::Blackout(Storage::Disk(disk.crash(seed))));
                body(disk)
            }
            Some(Fate::Sweep) => {
                sweep(&disk.client(), path, (!process.is_deciding()).then_some(process.rank));
                body(disk)
            }
        }
    }
}

/// Removes data files of a checkpoint without a `COMMIT`: `path` if it is one, else all, or those of one rank.
fn sweep(disk: &SimDisk, path: &Path, of: Option<u32>) {
    let is_step = |dir: &&Path| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    let Some(step) = path.ancestors().find(is_step).filter(|step| disk.stat(&step.join("COMMIT")).is_err()) else {
        return;
    };
    if is_data(path) {
        // Other writes of this rank at the same time have no order.
        let _ = disk.unlink(path);
        return;
    }
    let begins = of.map_or_else(String::new, |rank| format!("{rank:05}-"));
    for (key, _) in disk.readdir(step).unwrap_or_default() {
        let key = step.join(key);
        let names = disk.readdir(&key).unwrap_or_default().into_iter().map(|(name, _)| name);
        let of_rank = names.filter(|name| name.to_string_lossy().starts_with(&begins));
        of_rank.map(|name| key.join(name)).filter(|file| is_data(file)).for_each(|file| _ = disk.unlink(&file));
    }
}

/// An open file and its path.
#[derive(Clone)]
pub(crate) struct RankFile(SimFile, std::path::PathBuf);

/// Writes in flight of one rank: each is made when it is waited for, in an order of its own.
pub(crate) struct RankRing {
    disk: RankDisk,
    flights: Vec<(RankFile, Flight)>,
    dice: Dice,
}

impl Ring for RankRing {
    type File = RankFile;

    fn submit(&mut self, file: &RankFile, flight: Flight) -> Sys<()> {
        self.flights.push((file.clone(), flight));
        Ok(())
    }

    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)> {
        let (file, flight) = self.flights.swap_remove(self.dice.below(self.flights.len() as u64) as usize);
        let written = self.disk.pwrite(&file, &flight.buffer.bytes()[flight.range.clone()], flight.offset);
        Ok((flight, written))
    }
}

impl Disk for RankDisk {
    type File = RankFile;
    type Ring = RankRing;

    fn mkdir(&self, path: &Path) -> Sys<()> {
        self.call("mkdir", path, |disk| disk.mkdir(path))
    }

    fn create_new(&self, path: &Path, direct: bool) -> Sys<RankFile> {
        let create = |disk: &SimDisk| Ok(RankFile(disk.create_new(path, direct)?, path.to_owned()));
        self.call("create_new", path, create)
    }

    fn open_write(&self, path: &Path) -> Sys<RankFile> {
        self.call("open_write", path, |disk| Ok(RankFile(disk.open_write(path)?, path.to_owned())))
    }

    fn open_read(&self, path: &Path, direct: bool) -> Sys<RankFile> {
        self.call("open_read", path, |disk| Ok(RankFile(disk.open_read(path, direct)?, path.to_owned())))
    }

    fn ring(&self, depth: u32) -> Sys<RankRing> {
        let (disk, dice) = (self.clone(), Dice(depth.into()));
        self.call("ring", Path::new(""), |_| Ok(RankRing { disk, flights: Vec::new(), dice }))
    }

    fn pwrite(&self, file: &RankFile, bytes: &[u8], offset: u64) -> Sys<usize> {
        self.call("pwrite", &file.1, |disk| disk.pwrite(&file.0, bytes, offset))
    }

    fn pread(&self, file: &RankFile, buf: &mut [u8], offset: u64) -> Sys<usize> {
        self.call("pread", &file.1, |disk| disk.pread(&file.0, buf, offset))
    }

    fn fallocate(&self, file: &RankFile, bytes: u64) -> Sys<()> {
        self.call("fallocate", &file.1, |disk| disk.fallocate(&file.0, bytes))
    }

    fn ftruncate(&self, file: &RankFile, bytes: u64) -> Sys<()> {
        self.call("ftruncate", &file.1, |disk| disk.ftruncate(&file.0, bytes))
    }

    fn fdatasync(&self, file: &RankFile) -> Sys<()> {
        self.call("fdatasync", &file.1, |disk| disk.fdatasync(&file.0))
    }

    fn will_need(&self, file: &RankFile, offset: u64, bytes: u64) -> Sys<()> {
        self.call("will_need", &file.1, |disk| disk.will_need(&file.0, offset, bytes))
    }

    fn dont_need(&self, file: &RankFile, offset: u64, bytes: u64) -> Sys<()> {
        self.call("dont_need", &file.1, |disk| disk.dont_need(&file.0, offset, bytes))
    }

    fn map(&self, file: &RankFile, bytes: u64) -> Sys<Mapping> {
        self.call("map", &file.1, |disk| disk.map(&file.0, bytes))
    }

    fn reads_at_once(&self, file: &RankFile, offset: u64) -> Sys<bool> {
        self.call("reads_at_once", &file.1, |disk| disk.reads_at_once(&file.0, offset))
    }

    fn cached_bytes(&self, file: &RankFile, offset: u64, bytes: u64) -> Sys<u64> {
        self.call("cached_bytes", &file.1, |disk| disk.cached_bytes(&file.0, offset, bytes))
    }

    fn fstat(&self, file: &RankFile) -> Sys<Stat> {
        self.call("fstat", &file.1, |disk| disk.fstat(&file.0))
    }

    fn fsync_dir(&self, path: &Path) -> Sys<()> {
        self.call("fsync_dir", path, |disk| disk.fsync_dir(path))
    }

    fn link(&self, from: &Path, to: &Path) -> Sys<()> {
        self.call("link", to, |disk| disk.link(from, to))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Sys<()> {
        self.call("rename_noreplace", to, |disk| disk.rename_noreplace(from, to))
    }

    fn rename(&self, from: &Path, to: &Path) -> Sys<()> {
        self.call("rename", to, |disk| disk.rename(from, to))
    }

    fn unlink(&self, path: &Path) -> Sys<()> {
        self.call("unlink", path, |disk| disk.unlink(path))
    }

    fn rmdir(&self, path: &Path) -> Sys<()> {
        self.call("rmdir", path, |disk| disk.rmdir(path))
    }

    fn readdir(&self, path: &Path) -> Sys<Vec<(OsString, FileKind)>> {
        self.call("readdir", path, |disk| disk.readdir(path))
    }

    fn stat(&self, path: &Path) -> Sys<Stat> {
        self.call("stat", path, |disk| disk.stat(path))
    }

    fn look(&self, path: &Path) -> Sys<Stat> {
        self.call("look", path, |disk| disk.look(path))
    }

    fn statvfs(&self, path: &Path) -> Sys<Room> {
        self.call("statvfs", path, |disk| disk.statvfs(path))
    }
}
