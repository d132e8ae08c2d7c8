//! Reads what the saves and loads of a run did, and says what was slow.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use shardfast_engine::listen::Verb;
use shardfast_engine::{Error, Kind, Result, Timeout, runs};
use shardfast_format::{LEAVING, TELEMETRY, parse_record_name, step_dir};
use shardfast_store::Store;
use shardfast_transfer::error::retry;
use shardfast_transfer::events::Phase;

use crate::digest::Digest;
use crate::object::{Collected, OBJECT_BYTES_MAX};
use crate::record::Class;
use crate::storage::{History, StorageNow};
use crate::told::Told;
use crate::verdicts::{Verdict, median, phases, verdicts};

/// Objects that are read at a time.
const READS: usize = 16;

/// Saves and loads, the newest, at whose time the storage's metrics are asked for.
const ASKED_MAX: usize = 50;

/// Number of records before those of a step that is asked for, which tell since when the same was slow.
const BEFORE_MAX: usize = 32;

/// Unreadable objects that are listed.
const PROBLEMS_MAX: usize = 16;

/// Report of the saves and loads of a run.
#[derive(Debug, Default, Serialize)]
pub struct RunReport {
    /// Place of the run.
    pub url: String,
    /// Saves, in the order of time.
    pub saves: Vec<Operation>,
    /// Loads, in the order of time.
    pub loads: Vec<Operation>,
    /// Objects that could not be read, the first of them, each with the reason.
    pub unreadable: Vec<String>,
}

/// Report of one save or load.
#[derive(Debug, Serialize)]
pub struct Operation {
    /// Training step of the checkpoint.
    pub step: u64,
    /// Outcome: `committed` or `loaded`, `failed`, `incomplete`: cut off, or still running, `leaving`: being deleted.
    pub outcome: &'static str,
    /// Time of the request, by rank 0's clock, in milliseconds since 1970; `None` if nothing was recorded.
    pub began_unix_ms: Option<u64>,
    /// Number of ranks; `None` if nothing was recorded.
    pub world: Option<usize>,
    /// Ranks that sent no digest.
    pub not_reporting: Vec<usize>,
    /// Milliseconds by which clocks of ranks were ahead of rank 0's when they agreed; those that differ by a second.
    pub clocks_ms: BTreeMap<u32, i64>,
    /// Machine of each rank; `None` for a rank that sent no digest.
    pub machines: Vec<Option<Arc<str>>>,
    /// Coordinates of all ranks in each dimension of the job's meshes; `None` for a rank that has none in it.
    pub coordinates: BTreeMap<Arc<str>, Vec<Option<u16>>>,
    /// Time until the state could change, of the slowest rank, in milliseconds.
    pub staged_ms: Option<f64>,
    /// Time that the program waited for an asynchronous save, in its call and before it could change the state, on the
    /// rank where that was longest, in milliseconds; `None` for others.
    pub stalled_ms: Option<f64>,
    /// Part of it before the program could change the state, on the rank where that was longest.
    pub waited_ms: Option<f64>,
    /// Time until the outcome, of the slowest rank, in milliseconds.
    pub ended_ms: Option<f64>,
    /// Bytes that all ranks wrote, or read.
    pub bytes: u64,
    /// Data files that all ranks wrote.
    pub files: u64,
    /// Failures of the storage on all ranks.
    pub failures: u64,
    /// Milliseconds of each rank in each phase; `None` for a rank that did not end it.
    pub phases: BTreeMap<&'static str, Vec<Option<f64>>>,
    /// Operations at the storage by kind: number, bytes and time of all ranks.
    pub operations: BTreeMap<&'static str, Operations>,
    /// Ranks whose events are kept in full.
    pub events: Vec<Events>,
    /// Time that such saves waste, of a save whose interval is known, where a mean time between failures was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wasted: Option<Wasted>,
    /// Metrics of the storage at its time, where a server that has them was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageNow>,
    /// Findings about it, the most time first.
    pub verdicts: Vec<Verdict>,
}

/// Time that saves and failures waste together, expected if all saves were as this one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Wasted {
    /// Seconds from the save before to this one.
    pub interval_s: f64,
    /// Seconds wasted for each second of training.
    pub waste: f64,
    /// Interval that wastes least, in seconds, not below what the storage sustains.
    pub best_interval_s: f64,
    /// Seconds wasted with it.
    pub best_waste: f64,
}

/// Events of one rank that are kept in full.
#[derive(Debug, Serialize)]
pub struct Events {
    /// Number of the rank.
    pub rank: u32,
    /// Number of its events in the record.
    pub count: usize,
    /// Number of its other events.
    pub left_out: u64,
}

/// Operations of one kind at the storage, of all ranks.
#[derive(Debug, Default, Serialize)]
pub struct Operations {
    /// Number of them.
    pub count: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Time that they took together, in milliseconds.
    pub busy_ms: f64,
    /// Time of the longest one, in milliseconds.
    pub longest_ms: f64,
    /// Number of them that took less than 1, 4, 16, 64, 256, 1000 and 4000 ms, and longer; each counted once.
    pub by_duration: Vec<u64>,
}

/// Receiver of each record of a run, in the order of time, with what the report says of it.
pub(crate) type Each<'a> = &'a mut dyn FnMut(&Collected, &Operation) -> Result<()>;

/// Reads what the saves and loads of the run at `url` did, or those of one step; for the newest also what the storage
/// told at their time, if a server that has it is given. `each` gets each record while it is there: no more than a few
/// are in memory at a time.
///
/// # Errors
/// As [`report`](crate::report()); an error of `each`.
pub(crate) fn read_run(
    url: &str,
    step: Option<u64>,
    history: Option<&History>,
    timeout: &Timeout,
    each: Each<'_>,
) -> Result<RunReport> {
    let store = runs::store(url, timeout)?;
    let (steps, entries) = runs::list_in(&*store, url, timeout)?;
    let has_records = entries.iter().any(|entry| entry.is_dir && entry.name == TELEMETRY);
    if steps.is_empty() && !has_records {
        return Err(no_run(url));
    }
    let all: Vec<u64> = steps.iter().map(|found| found.step).collect();
    let mut names: Vec<String> = match retry(timeout, || Ok(store.list(TELEMETRY)?)) {
        Err(error) if error.kind == Kind::NotFound => Vec::new(),
        found => found?.into_iter().filter(|entry| !entry.is_dir).map(|entry| entry.name).collect(),
    };
    names.retain(|name| parse_record_name(name).is_some());
    names.sort_unstable();
    let is_asked = |name: &String| step.is_none_or(|step| parse_record_name(name) == Some(step));
    // Those before one that is asked for tell whether the same was slow then.
    let (mut left, mut kept) = (0, Vec::new());
    for name in names.into_iter().rev() {
        left = if is_asked(&name) { BEFORE_MAX + 1 } else { left };
        if left > 0 {
            left -= 1;
            kept.push(name);
        }
    }
    let names: Vec<String> = kept.into_iter().rev().collect();

    let mut report = RunReport { url: url.to_owned(), ..RunReport::default() };
    let mut before: [Vec<Verdict>; 2] = Default::default();
    let first_asked = names.get(names.len().saturating_sub(ASKED_MAX)).cloned().unwrap_or_default();
    for names in names.chunks(READS) {
        for (name, collected) in read(&*store, url, names, timeout) {
            let collected = match collected {
                Ok(collected) => collected,
                Err(_) if !is_asked(&name) => continue,
                Err(error) => {
                    if report.unreadable.len() < PROBLEMS_MAX {
                        report.unreadable.push(error.message);
                    }
                    continue;
                }
            };
            let (operations, before) = match collected.verb {
                Verb::Save => (&mut report.saves, &mut before[0]),
                Verb::Load => (&mut report.loads, &mut before[1]),
            };
            let mut operation = operation(&collected);
            count_in_a_row(&mut operation.verdicts, before);
            before.clone_from(&operation.verdicts);
            if !is_asked(&name) {
                continue;
            }
            if let (Some(history), Some(ended_ms), true) = (history, operation.ended_ms, name >= first_asked) {
                operation.storage = Some(history.during(collected.began_unix_ms, ended_ms)?);
            }
            each(&collected, &operation)?;
            operations.push(operation);
        }
    }
    let of = |saves: &[Operation], outcome: Option<&str>| -> std::collections::BTreeSet<u64> {
        let saves = saves.iter().filter(|save| outcome.is_none_or(|outcome| save.outcome == outcome));
        saves.map(|save| save.step).collect()
    };
    let (recorded, committed) = (of(&report.saves, None), of(&report.saves, Some("committed")));
    for unrecorded in steps.into_iter().filter(|found| step.is_none_or(|step| found.step == step)) {
        let is_committed = !matches!(unrecorded.commit, Ok(None));
        let known = if is_committed { &committed } else { &recorded };
        if !known.contains(&unrecorded.step) {
            let outcome = match is_committed {
                true => "committed",
                false if is_leaving(&*store, unrecorded.step, timeout)? => "leaving",
                false => "incomplete",
            };
            report.saves.push(Operation::unrecorded(unrecorded.step, outcome));
        }
    }
    if let Some(step) = step
        && report.saves.is_empty()
        && report.loads.is_empty()
        && report.unreadable.is_empty()
    {
        return Err(no_step(url, step, &all));
    }
    report.saves.sort_by_key(|save| (save.step, save.began_unix_ms.unwrap_or(u64::MAX)));
    Ok(report)
}

/// Returns the error of a place where there is no run.
pub(crate) fn no_run(url: &str) -> Error {
    let message = format!("{url}: expected a run, a directory of checkpoints `step-00000000`, found none");
    Error::new(Kind::NotFound, message)
}

/// Returns the error of a run with these steps of which none is the one that was asked for.
fn no_step(url: &str, step: u64, steps: &[u64]) -> Error {
    let found = match (steps.first(), steps.last()) {
        (Some(first), Some(last)) if first != last => format!("{} steps, {first} to {last}", steps.len()),
        (Some(only), _) => format!("step {only} alone"),
        _ => "no step".to_owned(),
    };
    let message = format!("{url}: expected a save or a load of step {step}, or its record, found {found}");
    Error::new(Kind::NotFound, message)
}

/// Returns whether the files of a step without a commit are being deleted.
fn is_leaving(store: &dyn Store, step: u64, timeout: &Timeout) -> Result<bool> {
    match retry(timeout, || Ok(store.list(&step_dir(step))?)) {
        Err(error) if error.kind == Kind::NotFound => Ok(false),
        entries => Ok(entries?.iter().any(|entry| entry.name == LEAVING && !entry.is_dir)),
    }
}

/// Adds to the counts of verdicts those of the operation before that had the same subject and phase.
pub(crate) fn count_in_a_row(verdicts: &mut [Verdict], before: &[Verdict]) {
    for verdict in verdicts {
        let same = |other: &&Verdict| other.subject == verdict.subject && other.phase == verdict.phase;
        verdict.in_a_row += before.iter().find(same).map_or(0, |before| before.in_a_row);
    }
}

/// Reads and decodes objects, several at a time; returns them, or why one cannot be read, in the order of their names.
pub(crate) fn read(
    store: &dyn Store,
    url: &str,
    names: &[String],
    timeout: &Timeout,
) -> Vec<(String, Result<Collected>)> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|threads| {
        for _ in 0..READS.min(names.len()) {
            threads.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let path = format!("{TELEMETRY}/{name}");
                    let bytes = retry(timeout, || Ok(store.read(&path, OBJECT_BYTES_MAX)?));
                    let place = format!("{url}/{path}");
                    let collected = bytes.and_then(|bytes| Collected::decode(&place, &bytes));
                    let collected = collected.and_then(|collected| match collected.name() == *name {
                        true => Ok(collected),
                        false => Err(Error::corrupt(format!(
                            "{place}: expected the record of that name, found that of {}",
                            collected.name()
                        ))),
                    });
                    if let Ok(mut found) = found.lock() {
                        found.insert(name.clone(), collected);
                    }
                }
            });
        }
    });
    found.into_inner().unwrap_or_default().into_iter().collect()
}

pub(crate) fn operation(collected: &Collected) -> Operation {
    let largest = |ms: &mut dyn Iterator<Item = f64>| ms.reduce(f64::max);
    let has_failed = collected.said().any(|said| !said.failure.is_empty());
    let outcome = match (has_failed, collected.verb) {
        (true, _) => "failed",
        (false, Verb::Save) => "committed",
        (false, Verb::Load) => "loaded",
    };
    let mut operations = BTreeMap::new();
    for class in Class::ALL {
        let mut all = Operations::default();
        for sum in collected.said().map(|said| said.sums[class as usize]) {
            all.count += u64::from(sum.count);
            all.bytes = all.bytes.saturating_add(sum.bytes);
            all.busy_ms += sum.busy_us as f64 / 1e3;
            all.longest_ms = all.longest_ms.max(f64::from(sum.longest_us) / 1e3);
            all.by_duration.resize(sum.by_duration.len(), 0);
            all.by_duration.iter_mut().zip(sum.by_duration).for_each(|(all, count)| *all += u64::from(count));
        }
        if all.count > 0 {
            operations.insert(class.words(), all);
        }
    }
    let moved =
        |classes: [Class; 2]| classes.iter().filter_map(|class| operations.get(class.words())).map(|of| of.bytes).sum();
    let phases = phases(collected);
    let staged_us = |said: &Digest| said.phases_us[Phase::Staged as usize];
    let stalled_ms = largest(&mut collected.said().map(|said| f64::from(said.stalled_us) / 1e3)).filter(|&ms| ms > 0.0);
    Operation {
        step: collected.step,
        outcome,
        began_unix_ms: Some(collected.began_unix_ms),
        world: Some(collected.ranks.len()),
        not_reporting: (0..collected.ranks.len()).filter(|&rank| collected.ranks[rank].is_none()).collect(),
        clocks_ms: collected.clocks_ms.clone(),
        machines: machines(collected),
        coordinates: coordinates(collected),
        stalled_ms,
        waited_ms: stalled_ms.map(|_| f64::from(collected.waited_us) / 1e3),
        staged_ms: largest(&mut collected.said().map(staged_us).filter(|&us| us > 0).map(|us| f64::from(us) / 1e3)),
        ended_ms: largest(&mut collected.said().map(|said| said.ended_us as f64 / 1e3)),
        bytes: match collected.verb {
            Verb::Save => moved([Class::SmallWrites, Class::LargeWrites]),
            Verb::Load => moved([Class::SmallReads, Class::LargeReads]),
        },
        files: collected.said().map(|said| u64::from(said.files)).sum(),
        failures: collected.said().map(|said| u64::from(said.failures)).sum(),
        phases: phases.into_iter().filter(|(_, ms)| ms.iter().any(Option::is_some)).collect(),
        operations,
        events: events(&collected.told),
        wasted: None,
        storage: None,
        verdicts: verdicts(collected),
    }
}

/// Returns the machine of each rank, each name once in memory.
fn machines(collected: &Collected) -> Vec<Option<Arc<str>>> {
    let mut names: BTreeMap<&str, Arc<str>> = BTreeMap::new();
    let of = collected.ranks.iter().map(|said| said.as_ref().map(|said| &*said.place.machine));
    of.map(|name| name.map(|name| Arc::clone(names.entry(name).or_insert_with(|| name.into())))).collect()
}

fn coordinates(collected: &Collected) -> BTreeMap<Arc<str>, Vec<Option<u16>>> {
    let at = |dimension: &str| collected.ranks.iter().map(|said| said.as_ref()?.place.at(dimension)).collect();
    collected.mesh().into_iter().map(|dimension| (Arc::clone(&dimension), at(&dimension))).collect()
}

fn events(told: &Told) -> Vec<Events> {
    let of = |(&rank, &left_out)| Events { rank, count: told.rank(rank).map_or(0, <[_]>::len), left_out };
    told.left_out.iter().map(of).collect()
}

impl Operation {
    /// Returns a report of one of which nothing was recorded.
    pub fn unrecorded(step: u64, outcome: &'static str) -> Operation {
        Operation {
            step,
            outcome,
            began_unix_ms: None,
            world: None,
            not_reporting: Vec::new(),
            clocks_ms: BTreeMap::new(),
            machines: Vec::new(),
            coordinates: BTreeMap::new(),
            staged_ms: None,
            stalled_ms: None,
            waited_ms: None,
            ended_ms: None,
            bytes: 0,
            files: 0,
            failures: 0,
            phases: BTreeMap::new(),
            operations: BTreeMap::new(),
            events: Vec::new(),
            wasted: None,
            storage: None,
            verdicts: Vec::new(),
        }
    }
}

impl Operation {
    /// Says which rank's clock is furthest from rank 0's, if that can mislead a reader of logs.
    pub fn clocks(&self) -> Option<String> {
        let (rank, ms) = self.clocks_ms.iter().max_by_key(|(_, ms)| ms.unsigned_abs())?;
        let (way, s) = (if *ms > 0 { "ahead of" } else { "behind" }, ms.unsigned_abs() as f64 / 1e3);
        Some(format!("clocks differ: that of rank {rank} is {s:.1} s {way} rank 0's"))
    }
}

impl RunReport {
    /// Returns the median time until saves that were committed were durable, in milliseconds; `None` without one.
    pub fn median_ms(&self) -> Option<f64> {
        let committed =
            || self.saves.iter().filter(|save| save.outcome == "committed").filter_map(|save| save.ended_ms);
        committed().next().map(|_| median(committed()))
    }
}
