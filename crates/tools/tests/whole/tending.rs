//! Tests saves, copies, sweeps, retention and rewinds of two runs that meet: one begins in the midst of another, down
//! to three deep, some are killed at any of their operations, and for some a `COMMIT` that exists is denied. A seed
//! draws all.
//!
//! Afterwards, whatever has happened:
//! - What is committed anywhere is whole.
//! - What was saved last is committed, in the run or among what was moved out of its way.
//! - What a copy said to be at the target was whole there, unless the target's own retention took it back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use shardfast_engine::retention::{Keep, Retention};
use shardfast_engine::rewind::rewind_in;
use shardfast_engine::runs::{list, step_url};
use shardfast_engine::{Engine, Error, Kind, Result, Timeout};
use shardfast_store::testing::dice::Dice;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Store, join, open};
use shardfast_tools::sweep::{AGE_MIN, sweep_in};
use shardfast_tools::verify::Problem;
use shardfast_tools::{Copying, Limit, copy_between, verify};

use crate::checkpoints::{save_ranks, two_ranks_of};
use crate::dying::{Dying, Life};

/// Depth to which operations meet.
const DEPTH: u64 = 3;

/// Operations that begin by themselves, for each seed.
const OPERATIONS: u64 = 6;

/// An operation makes fewer requests than that.
const REQUESTS_MAX: u64 = 40;

/// Seeds of a usual run, in memory and on disk, and at a service; a campaign sets more.
const SEEDS: (&str, u64) = ("SHARDFAST_TENDING_SEEDS", 60);
const SEEDS_AT_A_SERVICE: (&str, u64) = ("SHARDFAST_TENDING_FAR_SEEDS", 2);

/// Two runs, and the promises about them.
struct World {
    source: String,
    target: String,
    last_step: AtomicU64,
    /// Saves that succeeded, in that order; those of the source.
    saved: Mutex<Vec<u64>>,
    /// Events so far, for a seed that fails.
    log: Mutex<Vec<String>>,
    succeeded: AtomicU64,
}

impl World {
    fn note(&self, what: String) {
        self.log.lock().unwrap().push(what);
    }

    /// Performs one operation, in a process of its own.
    fn act(self: &Arc<World>, dice: &mut Dice, depth: u64) {
        let mut later = Dice(dice.next());
        let at = later.below(REQUESTS_MAX) as usize;
        let life = match dice.below(6) {
            0 => Life::of(at),
            1 => Life::denied(later.below(4) as usize),
            2..5 if depth > 1 => {
                let world = Arc::clone(self);
                Life::with(at, move || world.act(&mut later, depth - 1))
            }
            _ => Life::whole(),
        };
        let store = |url: &str| -> Arc<dyn Store> {
            Arc::new(Dying { store: open(url).unwrap(), life: Arc::clone(&life), in_parts: false })
        };
        let runs = [&self.source, &self.target];
        let run = runs[dice.below(2) as usize];
        let (what, done) = match dice.below(9) {
            0..2 => {
                let step = self.last_step.fetch_add(1, Ordering::SeqCst) + 1;
                save_ranks(&step_url(&self.source, step), Some(step), two_ranks_of(step));
                self.saved.lock().unwrap().push(step);
                (format!("save {step}"), Ok(()))
            }
            2..5 => {
                let steps: Vec<u64> = list(&self.source).unwrap().iter().map(|step| step.step).collect();
                let Some(&step) = steps.get(dice.below(steps.len().max(1) as u64) as usize) else { return };
                (format!("copy {step}"), self.copy(step, store))
            }
            5 => {
                let swept = sweep_in(&*store(run), run, AGE_MIN, false, &Timeout::default(), &|_, _| {});
                (format!("sweep {run}"), swept.map(drop))
            }
            6..8 => {
                let keep = Keep { last: Some(1 + dice.below(2)), every: None, best: Vec::new() };
                let mut retention = Retention::on(store(run), run, keep);
                let cleared = retention.clear(None);
                let made = self.saved.lock().unwrap().clone();
                let retained = retention.retain(if *run == self.source { &made } else { &[] });
                (format!("keep {run}"), cleared.and(retained).map(drop))
            }
            _ => {
                let from = 1 + dice.below(self.last_step.load(Ordering::SeqCst).max(1));
                (
                    format!("rewind from {from}"),
                    rewind_in(&*store(&self.source), &self.source, from, &Timeout::default()).map(drop),
                )
            }
        };
        self.succeeded.fetch_add(u64::from(done.is_ok()), Ordering::SeqCst);
        if let Err(error) = &done {
            // An operation that meets another one may fail, but only with an error that says why.
            let is_lawful = matches!(error.kind, Kind::NotFound | Kind::Conflict | Kind::Corrupt);
            assert!(is_lawful || error.message.contains("was killed"), "{what}: {error}");
        }
        self.note(format!("{}{what}: {done:?}", "  ".repeat((DEPTH - depth) as usize)));
    }

    fn copy(&self, step: u64, store: impl Fn(&str) -> Arc<dyn Store>) -> Result<()> {
        let (from, to) = (step_url(&self.source, step), step_url(&self.target, step));
        let how = Copying { limit: Limit::new(None), verify: false };
        copy_between(&Engine::solo(), (open(&from).unwrap(), &from), (store(&to), &to), &how, &|_, _| {})?;
        expect_whole_or_gone(&to);
        Ok(())
    }
}

/// Checks that a checkpoint is whole if it is committed; whether it is.
fn expect_whole_or_gone(url: &str) -> bool {
    match verify(&Engine::solo(), url, &|_, _| {}) {
        Ok(report) => {
            // Attempts share the names of indexes, and one that dies leaves its own: no reader uses them.
            let findings = report.findings.iter().filter(|finding| finding.problem != Problem::Index);
            assert_eq!(findings.count(), 0, "{url}: {report:?}");
            true
        }
        Err(Error { kind: Kind::NotFound, .. }) => false,
        Err(error) => panic!("{url}: {error}"),
    }
}

/// Returns the committed steps of a run, each of which is whole, and of those that were moved out of its way.
fn committed(run: &str) -> Vec<u64> {
    let abandoned = |name: &String| name.starts_with("abandoned-");
    let names = open(run).unwrap().list("").unwrap_or_default().into_iter().map(|entry| entry.name);
    let runs = names.filter(abandoned).map(|name| join(run, &name)).chain([run.to_owned()]);
    let steps = runs.flat_map(|run| list(&run).unwrap());
    steps.filter(|step| expect_whole_or_gone(&step.url)).map(|step| step.step).collect()
}

fn lives_through(seed: u64, place: &str) -> u64 {
    let world = Arc::new(World {
        source: join(place, "source"),
        target: join(place, "target"),
        last_step: AtomicU64::new(0),
        saved: Mutex::default(),
        log: Mutex::default(),
        succeeded: AtomicU64::new(0),
    });
    let mut dice = Dice(seed);
    let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for _ in 0..OPERATIONS {
            world.act(&mut dice, DEPTH);
            let here = committed(&world.source);
            committed(&world.target);
            let last = world.saved.lock().unwrap().last().copied();
            assert!(last.is_none_or(|last| here.contains(&last)), "step {last:?} is lost: {here:?}");
        }
    }));
    if let Err(panic) = lived {
        let log = world.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner).join("\n");
        eprintln!("seed {seed}: what had ended before:\n{log}");
        std::panic::resume_unwind(panic);
    }
    world.succeeded.load(Ordering::SeqCst)
}

fn seeds((variable, usual): (&str, u64)) -> u64 {
    std::env::var(variable).map_or(usual, |seeds| seeds.parse().unwrap())
}

#[test]
fn whatever_meets_leaves_what_is_committed_whole_and_what_was_saved_last() {
    let seeds = seeds(SEEDS);
    let dir = tempfile::tempdir().unwrap();
    let mut succeeded = 0;
    for seed in 0..seeds {
        let place = match seed % 2 {
            0 => format!("memory://tending/{seed}"),
            _ => dir.path().join(seed.to_string()).to_str().unwrap().to_owned(),
        };
        succeeded += lives_through(seed, &place);
    }
    assert!(succeeded > 3 * seeds, "only {succeeded} operations of {seeds} seeds succeeded");
}

#[test]
fn whatever_meets_at_a_service_leaves_what_is_committed_whole_and_what_was_saved_last() {
    let test = "tending::whatever_meets_at_a_service_leaves_what_is_committed_whole_and_what_was_saved_last";
    Server::any(test, |server| {
        let seeds = seeds(SEEDS_AT_A_SERVICE);
        let succeeded: u64 = (0..seeds).map(|seed| lives_through(seed, &server.s3(&format!("tending/{seed}")))).sum();
        assert!(succeeded > 3 * seeds, "only {succeeded} operations of {seeds} seeds succeeded");
    });
}
