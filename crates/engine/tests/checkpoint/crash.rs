//! Saves cut off at every system call, and system calls that fail: the previous checkpoint loads, the new one is
//! complete or invisible.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use shardfast_coord::{Coord, Decide};
use shardfast_engine::{Engine, Error, Kind, Result, checkpoint};
use shardfast_store::disk::{Disk, Errno, FileKind, Flight, Ring, Stat, Sys};
use shardfast_store::local::LocalStore;
use shardfast_store::testing::simdisk::{Fault, SimDisk};
use shardfast_store::{Mapping, Store};

use crate::count;
use crate::job::{Job, LONG, Truth, alike};
use crate::layout::{Dice, Layout};

const OLD: &str = "/runs/gpt/step-00000001";
pub(crate) const NEW: &str = "/runs/gpt/step-00000002";

pub(crate) fn truth(seed: u64) -> Truth {
    Truth::small(seed, 50)
}

pub(crate) fn store<D: Disk>(disk: D, place: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(LocalStore::on(disk, PathBuf::from(place))?))
}

/// Returns the difference between the checkpoint at a place and the truth, as another job finds it.
fn compare(disk: &SimDisk, place: &str, truth: &Truth) -> Result<Option<String>> {
    let open = |engine: &Arc<Engine>| checkpoint::open_from(engine, store(disk.clone(), place), place, LONG);
    Job::new(Layout::rows(1)).compare(open, truth, &mut Dice(3))
}

/// Returns whether the new checkpoint is visible. The old one must load, and the new one too if it is.
///
/// # Errors
/// The difference that was found.
pub(crate) fn survey(disk: &SimDisk) -> std::result::Result<bool, String> {
    match compare(disk, OLD, &truth(1)) {
        Ok(None) => {}
        other => return Err(format!("the previous checkpoint: {other:?}")),
    }
    match compare(disk, NEW, &truth(2)) {
        Ok(None) => Ok(true),
        Err(Error { kind: Kind::NotFound, .. }) => Ok(false),
        other => Err(format!("the new checkpoint is visible and broken: {other:?}")),
    }
}

/// Surveys like [`survey`]; the new checkpoint must be there if its save succeeded.
pub(crate) fn violation(disk: &SimDisk, saved: bool) -> Option<String> {
    match survey(disk) {
        Ok(false) if saved => Some("the new checkpoint is lost, and its save had succeeded".to_owned()),
        Ok(_) => None,
        Err(violation) => Some(violation),
    }
}

/// A job of two ranks, and a disk that holds its first checkpoint, durable.
pub(crate) fn begun() -> (Job, SimDisk) {
    let job = Job::new(Layout::rows(2));
    let disk = SimDisk::new();
    let saved = job.save_to(|_| store(disk.clone(), OLD), &truth(1), LONG);
    assert_eq!(alike(saved), Ok(vec![(), ()]));
    let disk = disk.crash(0);
    assert_eq!(survey(&disk), Ok(false));
    (job, disk)
}

#[test]
fn a_save_that_dies_at_any_system_call_leaves_no_broken_checkpoint() {
    let (job, begun) = begun();
    let mut seen = BTreeSet::new();
    let mut dies = |disk: &SimDisk, saved: bool, at: &str| {
        for seed in 0..8 {
            let after = disk.crash(seed);
            assert_eq!(violation(&after, saved), None, "died at {at}, crashed with seed {seed}");
            seen.insert((saved, survey(&after) == Ok(true)));
        }
    };
    let mut calls = 0;
    for at in 0.. {
        let disk = begun.crash(1);
        disk.inject(at, Fault::Die);
        let saved = alike(job.save_to(|_| store(disk.clone(), NEW), &truth(2), LONG)).is_ok();
        dies(&disk, saved, &format!("call {at}"));
        if disk.calls().len() <= at {
            calls = at;
            assert!(saved);
            break;
        }
    }
    assert!(calls > 60, "only {calls} system calls were cut off");
    // One call stands between a commit that is seen and one that succeeds. Threads change its number from save to save,
    // so the numbers above may all have missed it: this disk dies where the commit is made durable.
    let disk = begun.crash(1);
    let (dead, commit) = (disk.clone(), Path::new(NEW).join("COMMIT"));
    let hook = move |call: &'static str, path: &Path| {
        if call == "fsync_dir" && path == Path::new(NEW) && dead.stat(&commit).is_ok() {
            let next = dead.calls().len();
            (next..next + 9).for_each(|at| dead.inject(at, Fault::Die));
        }
        None
    };
    let saved = alike(job.save_to(|_| store(Hooked::new(&disk, hook.clone()), NEW), &truth(2), LONG)).is_ok();
    dies(&disk, saved, "the sync of its commit");
    // Died and invisible; died after the commit was seen; saved.
    assert_eq!(seen, BTreeSet::from([(false, false), (false, true), (true, true)]));
}

type Hook = dyn Fn(&'static str, &Path) -> Option<Sys<()>> + Send + Sync;

/// A disk on which some system calls wait, or are not made.
#[derive(Clone)]
pub(crate) struct Hooked<D: Disk> {
    disk: D,
    /// Hook that is called before a file is opened, or made durable or published, or a directory: returns the error to
    /// inject, if any.
    hook: Arc<Hook>,
}

impl<D: Disk + Clone> Hooked<D> {
    pub(crate) fn new(
        disk: &D,
        hook: impl Fn(&'static str, &Path) -> Option<Sys<()>> + Send + Sync + 'static,
    ) -> Hooked<D> {
        Hooked { disk: disk.clone(), hook: Arc::new(hook) }
    }
}

pub(crate) struct HookedFile<D: Disk>(D::File, PathBuf);

pub(crate) struct HookedRing<D: Disk>(D::Ring);

impl<D: Disk> Ring for HookedRing<D> {
    type File = HookedFile<D>;

    fn submit(&mut self, file: &HookedFile<D>, flight: Flight) -> Sys<()> {
        self.0.submit(&file.0, flight)
    }

    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)> {
        self.0.wait()
    }
}

#[rustfmt::skip]
impl<D: Disk> Disk for Hooked<D> {
    type File = HookedFile<D>;
    type Ring = HookedRing<D>;

    fn fdatasync(&self, file: &HookedFile<D>) -> Sys<()> {
        (self.hook)("fdatasync", &file.1).unwrap_or_else(|| self.disk.fdatasync(&file.0))
    }
    fn fsync_dir(&self, path: &Path) -> Sys<()> {
        (self.hook)("fsync_dir", path).unwrap_or_else(|| self.disk.fsync_dir(path))
    }
    fn rename_noreplace(&self, from: &Path, to: &Path) -> Sys<()> {
        (self.hook)("rename_noreplace", to).unwrap_or_else(|| self.disk.rename_noreplace(from, to))
    }
    fn create_new(&self, path: &Path, direct: bool) -> Sys<HookedFile<D>> {
        Ok(HookedFile(self.disk.create_new(path, direct)?, path.to_owned()))
    }
    fn open_write(&self, path: &Path) -> Sys<HookedFile<D>> {
        Ok(HookedFile(self.disk.open_write(path)?, path.to_owned()))
    }
    fn open_read(&self, path: &Path, direct: bool) -> Sys<HookedFile<D>> {
        if let Some(Err(errno)) = (self.hook)("open_read", path) {
            return Err(errno);
        }
        Ok(HookedFile(self.disk.open_read(path, direct)?, path.to_owned()))
    }
    fn ring(&self, depth: u32) -> Sys<HookedRing<D>> { self.disk.ring(depth).map(HookedRing) }
    fn dont_need(&self, f: &HookedFile<D>, at: u64, bytes: u64) -> Sys<()> { self.disk.dont_need(&f.0, at, bytes) }
    fn reads_at_once(&self, f: &HookedFile<D>, at: u64) -> Sys<bool> { self.disk.reads_at_once(&f.0, at) }
    fn map(&self, file: &HookedFile<D>, bytes: u64) -> Sys<Mapping> { self.disk.map(&file.0, bytes) }
    fn cached_bytes(&self, f: &HookedFile<D>, at: u64, n: u64) -> Sys<u64> { self.disk.cached_bytes(&f.0, at, n) }
    fn pwrite(&self, file: &HookedFile<D>, bytes: &[u8], at: u64) -> Sys<usize> { self.disk.pwrite(&file.0, bytes, at) }
    fn pread(&self, file: &HookedFile<D>, buf: &mut [u8], at: u64) -> Sys<usize> { self.disk.pread(&file.0, buf, at) }
    fn fallocate(&self, file: &HookedFile<D>, bytes: u64) -> Sys<()> { self.disk.fallocate(&file.0, bytes) }
    fn ftruncate(&self, file: &HookedFile<D>, bytes: u64) -> Sys<()> { self.disk.ftruncate(&file.0, bytes) }
    fn will_need(&self, f: &HookedFile<D>, at: u64, bytes: u64) -> Sys<()> { self.disk.will_need(&f.0, at, bytes) }
    fn fstat(&self, file: &HookedFile<D>) -> Sys<Stat> { self.disk.fstat(&file.0) }
    fn mkdir(&self, path: &Path) -> Sys<()> { self.disk.mkdir(path) }
    fn link(&self, from: &Path, to: &Path) -> Sys<()> { self.disk.link(from, to) }
    fn rename(&self, from: &Path, to: &Path) -> Sys<()> { self.disk.rename(from, to) }
    fn unlink(&self, path: &Path) -> Sys<()> { self.disk.unlink(path) }
    fn rmdir(&self, path: &Path) -> Sys<()> { self.disk.rmdir(path) }
    fn readdir(&self, path: &Path) -> Sys<Vec<(OsString, FileKind)>> { self.disk.readdir(path) }
    fn stat(&self, path: &Path) -> Sys<Stat> { self.disk.stat(path) }
}

/// The test above would find a save that leaves out any one of its syncs.
#[test]
fn every_sync_that_is_left_out_is_found() {
    fn is_data(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension == "safetensors")
    }
    type Skips = fn(&'static str, &Path) -> bool;
    let careless: [(&str, Skips); 8] = [
        ("nothing", |_, _| false),
        ("any file", |call, _| call == "fdatasync"),
        ("data files", |call, path| call == "fdatasync" && is_data(path)),
        ("manifest and commit", |call, path| call == "fdatasync" && !is_data(path)),
        ("any directory", |call, _| call == "fsync_dir"),
        ("directories of data files", |call, path| call == "fsync_dir" && path.ends_with("model")),
        ("the checkpoint's directory", |call, path| call == "fsync_dir" && path == Path::new(NEW)),
        ("the run's directory", |call, path| call == "fsync_dir" && Some(path) == Path::new(NEW).parent()),
    ];
    let (job, begun) = begun();
    for (what, skips) in careless {
        let disk = begun.crash(1);
        let hook = move |call: &'static str, path: &Path| skips(call, path).then_some(Ok(()));
        let saved = job.save_to(|_| store(Hooked::new(&disk, hook), NEW), &truth(2), LONG);
        assert_eq!(alike(saved), Ok(vec![(), ()]));
        let violations = (0..8).filter(|&seed| violation(&disk.crash(seed), true).is_some()).count();
        assert_eq!(violations > 0, what != "nothing", "left out: {what}; {violations} violations");
    }
}

#[test]
fn a_system_call_that_fails_fails_the_save_alike_on_every_rank_or_not_at_all() {
    let faults = [
        (Fault::Fail(Errno::NOSPC), Some(Kind::Exhausted)),
        (Fault::Fail(Errno::ACCESS), Some(Kind::Invalid)),
        (Fault::Fail(Errno::ROFS), Some(Kind::Invalid)),
        (Fault::Fail(Errno::INTR), None),
        (Fault::Short, None),
    ];
    let (job, begun) = begun();
    let one_in = count("SHARDFAST_CALLS_ONE_IN", 3);
    for (i, (fault, expected)) in faults.into_iter().enumerate() {
        let mut failed = 0;
        // The first fault that fails a save meets other calls than the second one.
        for at in (i % one_in..).step_by(one_in) {
            let place = format!("{fault:?} at call {at}");
            let disk = begun.crash(1);
            disk.inject(at, fault);
            let save = || alike(job.save_to(|_| store(disk.clone(), NEW), &truth(2), LONG));
            let saved = save();
            if disk.calls().len() <= at {
                break;
            }
            let in_doubt = match &saved {
                Ok(_) => false,
                Err(Error { kind: Kind::Unavailable, message, .. }) if message.contains("may have been published") => {
                    true
                }
                Err(error) => {
                    assert_eq!(Some(error.kind), expected, "{place}: {error}");
                    // The message names the target of a temporary file.
                    let path = &disk.calls()[at].path;
                    let dir = path.parent().unwrap_or(path).display().to_string();
                    assert!(error.message.contains(&dir), "{place} in {dir}: {error}");
                    false
                }
            };
            failed += usize::from(saved.is_err());
            let visible = survey(&disk).unwrap_or_else(|violation| panic!("{place}: {violation}"));
            assert!(in_doubt || visible == saved.is_ok(), "{place}: {saved:?}, visible: {visible}");
            // The same engines go on.
            match save() {
                Ok(_) => assert!(!visible, "{place}: saved over a checkpoint"),
                Err(error) => assert!(visible && error.kind == Kind::Conflict, "{place}: then {error}"),
            }
            for seed in 0..2 {
                assert_eq!(violation(&disk.crash(seed), !visible || saved.is_ok()), None, "{place}");
            }
        }
        assert_eq!(failed > 40 / one_in, expected.is_some(), "{fault:?} failed {failed} saves");
    }
}

/// Tests retries: a failure without a visible effect is retried, but not a visible object that was not made durable,
/// since a second sync would prove nothing.
#[test]
fn a_publish_is_tried_again_only_while_nothing_came_of_it() {
    let (job, begun) = begun();
    for (call, failures, succeeds) in
        [("rename_noreplace", 2, true), ("rename_noreplace", 99, false), ("fsync_dir", 1, false)]
    {
        let disk = begun.crash(1);
        let (seen, commit, left) = (disk.clone(), Path::new(NEW).join("COMMIT"), Mutex::new(failures));
        let hook = move |called: &'static str, path: &Path| {
            let here = called == call && (path == commit || (path == Path::new(NEW) && seen.stat(&commit).is_ok()));
            let mut left = left.lock().unwrap();
            if !here || *left == 0 {
                return None;
            }
            *left -= 1;
            Some(Err(Errno::IO))
        };
        let hooked = Hooked::new(&disk, hook);
        let place = |rank: u32| if rank == 0 { store(hooked.clone(), NEW) } else { store(disk.clone(), NEW) };
        let saved = alike(job.save_to(place, &truth(2), LONG));
        assert_eq!(saved.is_ok(), succeeds, "{call}, {failures} times: {saved:?}");
        assert_eq!(survey(&disk), Ok(succeeds || call == "fsync_dir"), "{call}, {failures} times");
        if succeeds {
            assert_eq!(violation(&disk.crash(1), true), None);
        }
    }
}

/// Tests that files of a save that failed on one rank are deleted again on all.
#[test]
fn a_failed_save_gives_its_space_back() {
    let (job, begun) = begun();
    for (failing, errno) in [(0, Errno::NOSPC), (1, Errno::NOSPC), (1, Errno::ACCESS)] {
        let disk = begun.crash(1);
        let place = |rank: u32| {
            let fails = move |call: &'static str, path: &Path| {
                (rank == failing && call == "fdatasync" && path.extension().is_some()).then_some(Err(errno))
            };
            store(Hooked::new(&disk, fails), NEW)
        };
        let error = alike(job.save_to(place, &truth(2), LONG)).unwrap_err();
        assert!(error.message.contains(&format!("rank {failing}: ")), "{error}");
        assert_eq!(survey(&disk), Ok(false));
        let left = store(disk.clone(), NEW).unwrap();
        for key in ["model", "optimizer"] {
            assert_eq!(left.list(key).unwrap_or_default(), [], "rank {failing} failed with {errno:?}");
        }
    }
}

/// A rank that is cut off from rank 0 while the commit is decided.
struct Severed {
    coord: Arc<dyn Coord>,
    when: Mutex<Receiver<()>>,
}

impl Coord for Severed {
    fn rank(&self) -> u32 {
        self.coord.rank()
    }

    fn world(&self) -> u32 {
        self.coord.world()
    }

    fn meeting(&self) -> shardfast_coord::Meeting {
        self.coord.meeting()
    }

    fn host(&self) -> &str {
        self.coord.host()
    }

    fn absent(&self, topic: &str) -> shardfast_coord::Absent {
        self.coord.absent(topic)
    }

    fn agree(
        &self,
        topic: &str,
        contribution: std::result::Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> std::result::Result<Vec<u8>, shardfast_coord::Error> {
        if !topic.ends_with("commit") {
            return self.coord.agree(topic, contribution, decide, deadline);
        }
        let (coord, topic) = (Arc::clone(&self.coord), topic.to_owned());
        thread::spawn(move || coord.agree(&topic, contribution, &mut |_| Err("not rank 0".to_owned()), deadline));
        self.when.lock().unwrap().recv().unwrap();
        Err(shardfast_coord::Error::Lost { rank: 0, cause: "the connection broke".to_owned() })
    }
}

/// Tests that rank 1 loses rank 0 just before or just after `COMMIT` becomes visible; then the power fails. A
/// checkpoint that rank 1 reported as saved must be there.
#[test]
fn a_rank_that_loses_rank_0_in_the_commit_promises_only_what_is_durable() {
    let (_, begun) = begun();
    for published in [false, true] {
        let disk = begun.crash(1);
        let (sever, severed) = channel();
        let (release, released) = channel::<()>();
        let mut coords = shardfast_coord::local(2);
        let cut = Severed { coord: coords.remove(1), when: Mutex::new(severed) };
        let engines = vec![
            Engine::new(coords.remove(0), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap(),
            Engine::new(Arc::new(cut), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap(),
        ];
        let job = Job { engines, layout: Layout::rows(2) };

        let gate = Mutex::new((sever, released));
        let (seen, commit) = (disk.clone(), Path::new(NEW).join("COMMIT"));
        let hook = move |call: &'static str, path: &Path| {
            let here = match published {
                false => call == "rename_noreplace" && path == commit,
                true => call == "fsync_dir" && path == Path::new(NEW) && seen.stat(&commit).is_ok(),
            };
            if here {
                let (sever, released) = &*gate.lock().unwrap();
                sever.send(()).unwrap();
                // Until the other end is dropped.
                let _ = released.recv();
            }
            None
        };
        let hooked = Hooked::new(&disk, hook);
        let saving = thread::spawn(move || {
            let shared = hooked.disk.clone();
            let place = |rank| if rank == 0 { store(hooked.clone(), NEW) } else { store(shared.clone(), NEW) };
            let pending = job.begin_save(place, &truth(2), LONG);
            let heard = pending[1].committed(None);
            // The power fails while rank 0 still waits.
            let after = shared.crash(0);
            drop(release);
            (heard, after, pending[0].committed(None))
        });
        let (heard, after, decided) = saving.join().unwrap();
        assert_eq!(decided, Ok(()));
        match published {
            true => assert_eq!(heard, Ok(())),
            false => assert_eq!(heard.as_ref().map_err(|error| error.kind), Err(Kind::Unavailable)),
        }
        assert_eq!(violation(&after, heard.is_ok()), None);
        assert_eq!(survey(&after), Ok(published));
        assert_eq!(survey(&disk), Ok(true));
    }
}
