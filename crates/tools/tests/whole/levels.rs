//! Tests histories of trainings that save on local disks of several machines and send to one run. A seed draws all: on
//! which machine a job begins, how far it trains, what it sends, when it dies, which older job wakes up, which disk is
//! lost, when the run is deleted.
//!
//! After each operation:
//! - What the run has committed is of the history of the job that began last.
//! - What a machine restores, of whichever step, is of that history. What a job begins with is no older than the newest
//!   step of it in the run and on its own disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shardfast_engine::newest::newest_since;
use shardfast_engine::retention::Keep;
use shardfast_engine::runs::{list, step_url};
use shardfast_engine::{Destination, Engine, Kind, Provider, State, rewind, save};
use shardfast_format::{Catalog, DType};
use shardfast_store::open;
use shardfast_store::testing::dice::Dice;
use shardfast_tools::Drain;

use crate::checkpoints::{DEADLINE, Tensor};

/// Seeds of a usual run; a campaign sets more.
const SEEDS: (&str, u64) = ("SHARDFAST_LEVELS_SEEDS", 20);

const OPERATIONS: u64 = 24;

const MACHINES: u64 = 3;

/// Note of a checkpoint that names its history.
const HISTORY: &str = "history";

/// Value of a training's state at each step: it depends on all that was trained before.
type History = BTreeMap<u64, u64>;

/// A training that has begun to save.
struct Job {
    engine: Arc<Engine>,
    drain: Drain,
    near: String,
    history: History,
    step: u64,
    made: Vec<u64>,
}

struct World {
    run: String,
    keep: Keep,
    /// History of the job that began last.
    history: History,
    newest: Option<Job>,
    older: Vec<Job>,
    number: u64,
    log: Vec<String>,
}

impl World {
    fn new(seed: u64, dice: &mut Dice) -> World {
        let rules = [
            Keep::default(),
            Keep { last: Some(1), ..Keep::default() },
            Keep { last: Some(2), every: Some(3), ..Keep::default() },
        ];
        let keep = dice.pick(&rules).clone();
        let run = format!("memory://levels/{seed}/run");
        World { run, keep, history: History::new(), newest: None, older: Vec::new(), number: 0, log: Vec::new() }
    }

    fn near(&self, machine: u64) -> String {
        self.run.replace("/run", &format!("/machine-{machine}/run"))
    }

    fn act(&mut self, dice: &mut Dice) {
        match dice.below(12) {
            0..3 => self.begin(dice),
            3..8 => self.train(dice),
            8..10 => self.send(dice),
            10 => self.newest = None,
            _ if dice.once_in(3) => self.lose(dice),
            _ => self.wake(dice),
        }
        // Whichever step a machine asks for, it gets that of the history.
        let (near, below) = (self.near(dice.below(MACHINES)), 1 + dice.below(20));
        let asked = (Some(below), false);
        let found = newest_since(&Engine::solo(), (&self.run, Some(&near)), asked, Instant::now(), DEADLINE).unwrap();
        if let Some((step, checkpoint)) = found.found {
            let value = checkpoint.manifest().info.user[HISTORY].parse().ok();
            assert_eq!(self.history.get(&step).copied(), value, "{near} has step {step} of another history");
        }
        for (step, value) in self.committed(&self.run) {
            assert_eq!(self.history.get(&step), Some(&value), "the run has step {step} of another history");
        }
    }

    /// Returns the committed steps of a place, with their histories; no step that cannot be read.
    fn committed(&self, url: &str) -> History {
        let steps = list(url).unwrap();
        let value = |step: u64| {
            let bytes =
                shardfast_engine::checkpoint::read(&*open(&step_url(url, step)).unwrap(), url, &DEADLINE.into());
            let manifest = shardfast_format::Manifest::decode(&bytes.ok()?).ok()?;
            Some((step, manifest.info.user[HISTORY].parse().unwrap()))
        };
        steps.iter().filter(|step| step.is_committed()).filter_map(|step| value(step.step)).collect()
    }

    /// Begins a job on some machine: restores, compares, begins to save.
    fn begin(&mut self, dice: &mut Dice) {
        let (near, engine) = (self.near(dice.below(MACHINES)), Engine::solo());
        let found = newest_since(&engine, (&self.run, Some(&near)), (None, false), Instant::now(), DEADLINE).unwrap();
        let restored = found.found.map(|(step, checkpoint)| (step, checkpoint.manifest().info.user[HISTORY].clone()));
        let of_history = |(step, value): &(u64, u64)| self.history.get(step) == Some(value);
        let there = [self.committed(&self.run), self.committed(&near)].into_iter().flatten().filter(of_history);
        let newest = there.map(|(step, _)| step).max();
        self.log.push(format!("{near}: restores {restored:?}, skipped {:?}", found.skipped));
        let step = restored.as_ref().map_or(0, |(step, _)| *step);
        assert_eq!(restored.as_ref().map(|(step, _)| *step), newest, "the newest step of the history");
        if let Some((step, value)) = &restored {
            assert_eq!(self.history.get(step).map(ToString::to_string).as_ref(), Some(value), "another history");
        }
        if dice.once_in(4) {
            self.send_for_another(&near);
            return; // it only restores
        }
        rewind::begin(&engine, (&self.run, Some((&near, true))), step + 1, false, DEADLINE).unwrap();
        self.number += 1;
        self.history.retain(|of, _| *of <= step);
        let drain = Drain::new(&near, &self.run, &self.keep, None, DEADLINE).unwrap();
        drain.begin(&engine);
        let history = self.history.clone();
        let job = Job { engine, drain, near, history, step, made: Vec::new() };
        self.older.extend(self.newest.replace(job));
    }

    /// Trains some steps in the newest job, each saved.
    fn train(&mut self, dice: &mut Dice) {
        let Some(job) = &mut self.newest else { return };
        for _ in 0..=dice.below(3) {
            job.step += 1;
            let before = job.history.get(&(job.step - 1)).copied().unwrap_or(0);
            job.history.insert(job.step, Dice(before ^ self.number).next());
            job.save().unwrap();
            job.retain();
            self.log.push(format!("{}: saves {}", job.near, job.step));
        }
        self.history = job.history.clone();
    }

    /// Sends some checkpoints of the newest job; now and then the sending is interrupted for good.
    fn send(&mut self, dice: &mut Dice) {
        let Some(job) = &mut self.newest else { return };
        let is_cut = dice.once_in(3);
        let after = dice.time(Duration::from_millis(2));
        let sent = thread::scope(|scope| {
            if is_cut {
                scope.spawn(|| {
                    thread::sleep(after);
                    job.drain.stop();
                });
            }
            let mut sent = Vec::new();
            for _ in 0..3 {
                match job.drain.next() {
                    Ok(Some(one)) => sent.push(one.step),
                    Ok(None) => break,
                    Err(error) => {
                        assert_eq!(error.kind, Kind::Cancelled, "{error}");
                        break;
                    }
                }
            }
            sent
        });
        self.log.push(format!("{}: sends {sent:?}{}", job.near, if is_cut { ", cut" } else { "" }));
        if is_cut {
            self.newest = None;
        }
    }

    /// Sends on a machine what the job there has not sent, if that is the newest.
    fn send_for_another(&mut self, near: &str) {
        let drain = Drain::new(near, &self.run, &self.keep, None, DEADLINE).unwrap();
        let mut sent = Vec::new();
        if drain.stand_in().unwrap() {
            while let Some(one) = drain.next().unwrap() {
                sent.push(one.step);
            }
        }
        self.log.push(format!("{near}: sends {sent:?} for another job"));
    }

    /// Lets an older job go on, which is refused.
    fn wake(&mut self, dice: &mut Dice) {
        if self.older.is_empty() {
            return;
        }
        let mut job = self.older.swap_remove(dice.below(self.older.len() as u64) as usize);
        let had = self.committed(&self.run);
        let sent = job.drain.next().map(|sent| sent.map(|sent| sent.step));
        assert!(matches!(sent, Ok(None)) || sent.as_ref().is_err_and(|error| error.kind == Kind::Conflict), "{sent:?}");
        assert_eq!(self.committed(&self.run), had);
        // Its own disk accepts the save if no newer job uses that disk; no machine restores that checkpoint.
        job.step += 1;
        job.history.insert(job.step, Dice(self.number ^ 77).next());
        let saved = job.save();
        self.log.push(format!("{}: an older job wakes, saves {}: {saved:?}", job.near, job.step));
    }

    /// Loses a disk, or the run.
    fn lose(&mut self, dice: &mut Dice) {
        let lost = match dice.below(MACHINES + 1) {
            0 => self.run.clone(),
            machine => self.near(machine - 1),
        };
        if lost == self.run {
            self.history.clear();
            (self.newest, self.older) = (None, Vec::new());
        } else {
            self.newest = self.newest.take().filter(|job| job.near != lost);
            self.older.retain(|job| job.near != lost);
        }
        let (parent, name) = lost.rsplit_once('/').unwrap();
        open(parent).unwrap().delete_tree(name).unwrap();
        self.log.push(format!("{lost} is lost"));
    }
}

impl Job {
    fn save(&self) -> shardfast_engine::Result<()> {
        let value = self.history[&self.step];
        let (leaf, parts) = Tensor::random(value, DType::F32, &[40]).whole("model", "w");
        let providers = vec![parts.into_iter().map(|bytes| -> Arc<dyn Provider> { Arc::new(bytes) }).collect()];
        let state = State { catalog: Arc::new(Catalog { leaves: vec![leaf] }), providers, ..State::default() };
        let destination = Destination {
            url: step_url(&self.near, self.step),
            step: Some(self.step),
            user: BTreeMap::from([(HISTORY.to_owned(), value.to_string())]),
            prove: shardfast_engine::Prove::default(),
            blocking: true,
        };
        save(&self.engine, destination, state, DEADLINE).committed(None)
    }

    fn retain(&mut self) {
        self.made.push(self.step);
        self.drain.clear(None).unwrap();
        self.drain.retain(&self.made).unwrap();
    }
}

fn seeds() -> u64 {
    std::env::var(SEEDS.0).map_or(SEEDS.1, |seeds| seeds.parse().unwrap())
}

#[test]
fn every_history_of_machines_that_save_and_send_goes_on_from_its_newest_step() {
    for seed in 0..seeds() {
        let mut dice = Dice(seed);
        let mut world = World::new(seed, &mut dice);
        for _ in 0..OPERATIONS {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.act(&mut dice)));
            assert!(outcome.is_ok(), "seed {seed}:\n{}", world.log.join("\n"));
        }
        assert!(list(&world.run).unwrap().iter().all(|step| step.commit.is_ok()), "seed {seed}");
        open("memory://levels").unwrap().delete_tree(&seed.to_string()).unwrap();
    }
}
