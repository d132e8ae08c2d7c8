//! Tests jobs that another job overtakes in the middle of a publish.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use shardfast_engine::runs::{list, step_url};
use shardfast_engine::{Engine, Kind, Pending, Result, rewind, save_to};
use shardfast_store::disk::RealDisk;

use crate::crash::{Hooked, store};
use crate::job::{Job, LONG, Truth, alike, destination};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// Saves step 7 into a run, while another job begins there at that step once `COMMIT` is about to be published; `then`
/// is done with the run behind it.
fn save_while_another_begins_at(step: u64, run: &str, then: fn(&str)) -> Result<()> {
    let engine = Engine::solo();
    rewind::begin(&engine, (run, None), 7, false, LONG)?;
    let place = step_url(run, 7);
    let (run, has_begun) = (run.to_owned(), AtomicBool::new(false));
    let hook = move |call: &'static str, path: &Path| {
        let publishes = call == "rename_noreplace" && path.ends_with("COMMIT");
        if publishes && !has_begun.swap(true, Ordering::Relaxed) {
            rewind::begin(&Engine::solo(), (&run, None), step, false, LONG).unwrap();
            then(&run);
        }
        None
    };
    let store = store(Hooked::new(&RealDisk, hook), &place);
    let state = Truth::small(1, 50).state(&Layout::rows(1), 0, &mut Dice(1));
    save_to(&Arc::clone(&engine), store, destination(&place), state, LONG).committed(None)
}

fn steps(run: &str) -> Vec<u64> {
    list(run).unwrap().iter().filter(|step| step.is_committed()).map(|step| step.step).collect()
}

#[test]
fn a_commit_that_the_newer_job_has_not_restored_is_taken_back() {
    for step in [3, 7] {
        let dir = scratch();
        let run = dir.path().to_str().unwrap();
        let refused = save_while_another_begins_at(step, run, |_| ()).unwrap_err();
        assert!(refused.kind == Kind::Conflict && refused.message.contains("only the newest job"), "{refused}");
        assert_eq!(steps(run), [0_u64; 0], "a restart would go on from it");
    }
}

#[test]
fn a_commit_that_the_newer_job_may_have_restored_stays() {
    let dir = scratch();
    let run = dir.path().to_str().unwrap();
    save_while_another_begins_at(8, run, |_| ()).unwrap();
    assert_eq!(steps(run), [7]);
}

#[test]
fn a_commit_stays_if_the_storage_cannot_say_whether_a_newer_job_began() {
    let dir = scratch();
    let run = dir.path().to_str().unwrap();
    let hide_jobs = |run: &str| {
        let jobs = Path::new(run).join(".jobs");
        fs::rename(&jobs, Path::new(run).join("away")).unwrap();
        fs::write(&jobs, "no directory").unwrap();
    };
    save_while_another_begins_at(3, run, hide_jobs).unwrap();
    assert_eq!(steps(run), [7]);
}

#[test]
fn a_save_whose_files_a_newer_job_has_taken_away_is_told_of_that_job() {
    let triggered = (0..60).map(|at| {
        let dir = scratch();
        let run = dir.path().to_str().unwrap().to_owned();
        let engine = Engine::solo();
        rewind::begin(&engine, (&run, None), 7, false, LONG).unwrap();
        let (place, made, has_begun) =
            (step_url(&run, 7), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, begun, gone) = (Arc::clone(&made), Arc::clone(&has_begun), place.clone());
        let hook = move |_: &'static str, _: &Path| {
            // Behind the commit no other job can begin there.
            let is_now = counted.fetch_add(1, Ordering::Relaxed) == at;
            if is_now && rewind::begin(&Engine::solo(), (&run, None), 7, false, LONG).is_ok() {
                begun.store(true, Ordering::Relaxed);
                let _ = fs::remove_dir_all(&gone);
            }
            None
        };
        let store = store(Hooked::new(&RealDisk, hook), &place);
        let state = Truth::small(1, 50).state(&Layout::rows(1), 0, &mut Dice(1));
        let saved = save_to(&Arc::clone(&engine), store, destination(&place), state, LONG).committed(None);
        let has_begun = has_begun.load(Ordering::Relaxed);
        assert!(!has_begun || saved.as_ref().is_err_and(|error| error.kind == Kind::Conflict), "call {at}: {saved:?}");
        usize::from(has_begun)
    });
    assert!(triggered.sum::<usize>() > 5);
}

#[test]
fn each_rank_is_told_of_the_newer_job_that_has_taken_the_files_of_one_of_them() {
    let triggered = (0..40).map(|at| {
        let dir = scratch();
        let run = dir.path().to_str().unwrap().to_owned();
        let job = Job::new(Layout::rows(2));
        let begun = |engine: &Arc<Engine>| rewind::begin(engine, (&run, None), 7, false, LONG).map(drop);
        assert_eq!(
            alike(thread::scope(|ranks| {
                let begins: Vec<_> = job.engines.iter().map(|engine| ranks.spawn(|| begun(engine))).collect();
                begins.into_iter().map(|rank| rank.join().unwrap()).collect()
            })),
            Ok(vec![(), ()])
        );
        let (place, made, has_begun) = (step_url(&run, 7), AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
        let (noted, gone) = (Arc::clone(&has_begun), place.clone());
        let hook = Arc::new(move |_: &'static str, _: &Path| {
            let is_now = made.fetch_add(1, Ordering::Relaxed) == at;
            if is_now && rewind::begin(&Engine::solo(), (&run, None), 7, false, LONG).is_ok() {
                noted.store(true, Ordering::Relaxed);
                let _ = fs::remove_dir_all(&gone);
            }
            None
        });
        // Only the calls of rank 1 are counted, and only its files are known to be gone when it makes the next one.
        let open = |rank: u32| match rank {
            0 => store(RealDisk, &place),
            _ => {
                let hook = Arc::clone(&hook);
                store(Hooked::new(&RealDisk, move |call, path| hook(call, path)), &place)
            }
        };
        let saves: Vec<Pending> = (0..)
            .zip(&job.engines)
            .map(|(rank, engine)| {
                let state = Truth::small(1, 50).state(&job.layout, rank, &mut Dice(1));
                save_to(engine, open(rank), destination(&place), state, LONG)
            })
            .collect();
        let saved: Vec<Result<()>> = saves.iter().map(|save| save.committed(None)).collect();
        let has_begun = has_begun.load(Ordering::Relaxed);
        let is_told = |saved: &Result<()>| saved.as_ref().is_err_and(|error| error.kind == Kind::Conflict);
        assert!(!has_begun || saved.iter().all(is_told), "call {at}: {saved:?}");
        usize::from(has_begun)
    });
    assert!(triggered.sum::<usize>() > 3);
}
