//! Tests system calls that fail for a while: temporary failures are retried, those where a retry would prove nothing
//! are not, and a save that has failed elsewhere retries nothing any more.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use shardfast_engine::{Error, Kind, Result, save_to};
use shardfast_store::disk::Errno;
use shardfast_store::testing::simdisk::{Call, Fault, SimDisk};

use crate::crash::{NEW, begun, store, survey, truth, violation};
use crate::job::{Job, LONG, alike, destination};
use crate::layout::{Dice, Layout};

/// Saves that wait for their retries at a time.
const THREADS: usize = 24;

/// Errors of storage that is gone for a moment.
const TRANSIENT: [Errno; 5] = [Errno::IO, Errno::TIMEDOUT, Errno::STALE, Errno::AGAIN, Errno::BUSY];

/// System calls without which there is no save. What else is made is looked at or cleaned up on the way.
const NEEDED: [&str; 10] = [
    "mkdir",
    "create_new",
    "create_new_direct",
    "fallocate",
    "pwrite",
    "pwrite_direct",
    "ftruncate",
    "fdatasync",
    "rename",
    "rename_noreplace",
];

/// Number of passes over all calls to meet each of [`NEEDED`].
const PASSES_MAX: usize = 30;

fn is_data(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// Returns whether the call makes durable what the system forgets when it fails, and no process can write again. A
/// temporary file is written again under another name.
fn is_flush(call: &Call) -> bool {
    call.name == "fsync_dir" || (call.name == "fdatasync" && is_data(&call.path))
}

/// Injects a fault at every system call of a save, each in a save of its own; `judge` gets the call, the ranks'
/// outcomes and the disk.
fn at_every_call(fault: impl Fn(usize) -> Fault + Sync, judge: impl Fn(&Call, &Result<Vec<()>>, &SimDisk) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|threads| {
        for _ in 0..THREADS {
            threads.spawn(|| {
                let (job, begun) = begun();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let disk = begun.crash(1);
                    disk.inject(at, fault(at));
                    let saved = alike(job.save_to(|_| store(disk.clone(), NEW), &truth(2), LONG));
                    let calls = disk.calls();
                    let Some(call) = calls.get(at) else { return };
                    // To open a store is its caller's business here.
                    if call.name == "stat" {
                        continue;
                    }
                    judge(call, &saved, &disk);
                    if saved.is_ok() {
                        assert_eq!(violation(&disk.crash(0), true), None, "{call:?}");
                    }
                }
            });
        }
    });
    assert!(next.into_inner() > 60 + THREADS, "hardly a system call failed");
}

#[test]
fn what_fails_once_or_twice_is_tried_again() {
    for times in [1, 2] {
        let fault = |at: usize| Fault::Again(TRANSIENT[at % TRANSIENT.len()], times);
        at_every_call(fault, |call, saved, disk| match saved {
            Ok(_) => assert!(!is_flush(call), "{call:?} failed {times} times, and the save succeeded"),
            Err(error) => {
                assert_eq!(error.kind, Kind::Unavailable, "{call:?}: {error}");
                assert!(is_flush(call), "{call:?} failed {times} times: {error}");
                assert!(!error.message.contains("tried"), "{call:?}: {error}");
                let in_doubt = error.message.contains("may have been published");
                assert!(survey(disk) == Ok(in_doubt), "{call:?}: {error}");
            }
        });
    }
}

#[test]
fn what_fails_for_ever_fails_the_save_and_says_how_often_it_was_tried() {
    let met = std::sync::Mutex::new(BTreeSet::new());
    let judge = |call: &Call, saved: &Result<Vec<()>>, disk: &SimDisk| {
        if !NEEDED.contains(&call.name) || is_flush(call) {
            return;
        }
        met.lock().unwrap().insert(call.name);
        let Err(error) = saved else { panic!("{call:?} failed for ever, and the save succeeded") };
        assert_eq!(error.kind, Kind::Unavailable, "{call:?}: {error}");
        let dir = call.path.parent().unwrap().display().to_string();
        // The error names a temporary file's target.
        let place = if is_data(&call.path) { call.path.display().to_string() } else { dir };
        assert!(error.message.contains(&place), "{call:?} at {place}: {error}");
        assert!(error.message.contains("; tried 5 times in "), "{call:?}: {error}");
        assert_eq!(survey(disk), Ok(false), "{call:?}: {error}");
    };
    // Threads make calls in another order each time, so that one that is made once may be missed.
    for _ in 0..PASSES_MAX {
        at_every_call(|_| Fault::Again(Errno::IO, u32::MAX), judge);
        if *met.lock().unwrap() == BTreeSet::from(NEEDED) {
            return;
        }
    }
    panic!("of {NEEDED:?} only {met:?} failed");
}

#[test]
fn answers_that_are_lost_are_no_harm() {
    at_every_call(
        |_| Fault::Lost(Errno::TIMEDOUT),
        |call, saved, _| {
            assert_eq!(saved.is_ok(), !is_flush(call), "{call:?}: {saved:?}");
        },
    );
}

/// A directory's entries whose sync failed and forgot them would be lost by a save that asks once more.
///
/// The n-th call is another one in each save, so that how many of the faults meet a directory's sync differs.
#[test]
fn a_failed_sync_of_a_directory_is_not_believed_the_next_time() {
    let met = AtomicUsize::new(0);
    at_every_call(
        |_| Fault::Forget(Errno::IO),
        |call, saved, _| {
            if call.name == "fsync_dir" {
                met.fetch_add(1, Ordering::Relaxed);
                assert!(saved.is_err(), "{call:?} failed, and the save succeeded");
            }
        },
    );
    assert!(met.into_inner() > 0, "no sync of a directory failed");
}

/// Rank 0 gives the save up while rank 1 tries in vain what it was about to write.
#[test]
fn a_save_that_failed_elsewhere_tries_nothing_any_more() {
    let (job, begun) = begun();
    let (clean, other) = (begun.crash(1), begun.crash(1));
    let place = |rank: u32| store(if rank == 0 { other.clone() } else { clean.clone() }, NEW);
    // All is written, and rank 0 then looks for what rank 1 wrote on a disk that they do not share.
    let error = alike(job.save_to(place, &truth(2), LONG)).unwrap_err();
    assert!(error.kind == Kind::Corrupt && error.message.contains("do not share this storage"), "{error}");
    assert_eq!((survey(&other), survey(&clean)), (Ok(false), Ok(false)));
    for name in ["fallocate", "pwrite_direct"] {
        let first = clean.calls().iter().position(|call| call.name == name && is_data(&call.path)).unwrap();
        let tries = || {
            let disk = begun.crash(1);
            disk.inject(first, Fault::Again(Errno::IO, u32::MAX));
            let state = truth(2).state(&job.layout, 1, &mut Dice(1));
            let pending = save_to(&job.engines[1], store(disk.clone(), NEW), destination("here"), state, LONG);
            while disk.calls().len() <= first {
                thread::yield_now();
            }
            let refused = job.engines[0].refuse(Error::new(Kind::Cancelled, "not now"), LONG);
            assert_eq!(pending.committed(None).unwrap_err().message, refused.message);
            let calls = disk.calls();
            assert_eq!(calls[first].name, name);
            calls.iter().filter(|call| call.name == name && call.path == calls[first].path).count()
        };
        // On a machine that is busy enough rank 0 may be later than the last try.
        assert!((0..5).any(|_| tries() < 5), "{name} is tried to the end");
    }
}

#[test]
fn nothing_is_tried_for_longer_than_the_deadline() {
    let job = Job::new(Layout::rows(1));
    for name in ["mkdir", "fallocate", "pwrite_direct", "ftruncate", "rename", "rename_noreplace"] {
        let disk = SimDisk::new();
        disk.refuse(name, Errno::IO);
        let saved = job.save_to(|_| store(disk.clone(), NEW), &truth(2), Duration::from_millis(200));
        let Err(Error { kind: Kind::Unavailable, message, .. }) = alike(saved) else { panic!("{name} never worked") };
        let goes_on = ["tried 4 times", "tried 5 times"].iter().any(|tries| message.contains(tries));
        assert!(!goes_on, "{name}: {message}");
    }
}
