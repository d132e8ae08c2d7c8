//! A run: the checkpoints `step-…` below one URL. Which of them exist is read from their commits, never remembered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_format::{COMMIT, Commit, parse_step_dir, step_dir};
use shardfast_store::{Entry, Shared, Store};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::observed::Observed;
use shardfast_transfer::timeout::Timeout;

use crate::checkpoint::Checkpoint;
use crate::commit;
use crate::engine::Engine;
use crate::foreign;
use crate::listen::Verb;
use crate::listened::Listened;

/// One step of a run.
#[derive(Debug, Clone)]
pub struct Step {
    /// The training step.
    pub step: u64,
    /// The checkpoint's URL.
    pub url: String,
    /// Commit; `None` if there is none: the save was interrupted or is still running, or the checkpoint leaves.
    pub commit: Result<Option<Commit>>,
}

impl Step {
    /// Returns whether there is a commit, readable or not.
    pub fn is_committed(&self) -> bool {
        !matches!(self.commit, Ok(None))
    }
}

/// Returns the URL of a step's checkpoint.
pub fn step_url(run_url: &str, step: u64) -> String {
    shardfast_store::join(run_url, &step_dir(step))
}

/// Opens the store at a URL, for reading.
pub fn store(url: &str, timeout: &Timeout) -> Result<Arc<dyn Store>> {
    store_on(url, &Arc::default(), timeout)
}

/// Opens a store like [`store`], with the state that it shares with others.
pub fn store_on(url: &str, shared: &Arc<Shared>, timeout: &Timeout) -> Result<Arc<dyn Store>> {
    retry(timeout, || Ok(shardfast_store::open_on(url, shared)?))
}

/// Lists a store's root; empty if that does not exist.
pub fn entries(store: &dyn Store, timeout: &Timeout) -> Result<Vec<Entry>> {
    match retry(timeout, || Ok(store.list("")?)) {
        Err(error) if error.kind == Kind::NotFound => Ok(Vec::new()),
        entries => entries,
    }
}

/// Lists the steps of the run at `url`, ascending. Empty when nothing was ever saved there.
///
/// # Errors
/// `Invalid` when a checkpoint is there instead of a run; the store's errors.
pub fn list(url: &str) -> Result<Vec<Step>> {
    let timeout = Timeout::default();
    Ok(list_in(&*store(url, &timeout)?, url, &timeout)?.0)
}

/// Lists like [`list`] a run whose store is open; returns also the entries of its root.
pub fn list_in(store: &dyn Store, url: &str, timeout: &Timeout) -> Result<(Vec<Step>, Vec<Entry>)> {
    list_from(store, url, 0, timeout)
}

/// Lists like [`list_in`] without the steps below `from`.
pub(crate) fn list_from(store: &dyn Store, url: &str, from: u64, timeout: &Timeout) -> Result<(Vec<Step>, Vec<Entry>)> {
    let step = |step| match commit_of(store, step, timeout) {
        Err(error) if timeout.is_over() => Err(error),
        commit => Ok(Step { step, url: step_url(url, step), commit }),
    };
    let entries = entries(store, timeout)?;
    let steps = steps(url, &entries)?.into_iter().filter(|&step| step >= from);
    Ok((steps.map(step).collect::<Result<_>>()?, entries))
}

/// Reads the commit of a step; returns `None` when it has none.
fn commit_of(store: &dyn Store, step: u64, timeout: &Timeout) -> Result<Option<Commit>> {
    match retry(timeout, || commit::read_commit(store, &step_dir(step))) {
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        commit => commit.map(Some),
    }
}

/// Returns the steps among these entries of a run, ascending, committed or not.
///
/// # Errors
/// `Invalid` when a checkpoint is there instead of a run.
pub fn steps(url: &str, entries: &[Entry]) -> Result<Vec<u64>> {
    if entries.iter().any(|entry| entry.name == COMMIT && !entry.is_dir) {
        return Err(Error::invalid(format!(
            "{url}: expected a run (a directory of checkpoints `{}`), found one checkpoint",
            step_dir(0)
        )));
    }
    let dirs = entries.iter().filter(|entry| entry.is_dir);
    let mut steps: Vec<u64> = dirs.filter_map(|entry| parse_step_dir(&entry.name)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The newest checkpoint of a run that can be opened.
pub struct Newest {
    /// The checkpoint, opened, and its step; `None` if there is none.
    pub found: Option<(u64, Checkpoint)>,
    /// Newer ones, or all, that were passed over, each with the reason.
    pub skipped: Vec<String>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Found {
    /// The step, and its manifest.
    found: Option<(u64, Vec<u8>)>,
    skipped: Vec<String>,
}

/// Opens the newest committed checkpoint of the run at `url`, among those of steps lower than `below` if that is
/// given. Checkpoints without a commit are passed over; a committed one that cannot be
/// opened only if `older` allows to fall back. Every rank of the engine must call it.
///
/// # Errors
/// The same on every rank: the error of the newest committed one unless `older`; as [`list`].
pub fn newest(engine: &Arc<Engine>, url: &str, below: Option<u64>, older: bool, deadline: Duration) -> Result<Newest> {
    newest_since(engine, url, (below, older), Instant::now(), deadline)
}

/// Opens like [`newest`] for a load that was requested at `began`: if none can be opened, the load has failed.
///
/// # Errors
/// As [`newest`].
pub fn newest_since(
    engine: &Arc<Engine>,
    url: &str,
    (below, older): (Option<u64>, bool),
    began: Instant,
    deadline: Duration,
) -> Result<Newest> {
    let operation = engine.begin(format!("restore {url}"), deadline);
    let observed = Arc::new(Observed::since(began));
    let found = operation.agree("open", Ok((below, older)), |ranks| {
        if let Some(rank) = ranks.iter().position(|&asked| asked != (below, older)) {
            return Err(Error::invalid(format!(
                "restore {url}: rank {rank} asks for another checkpoint than rank 0 ({:?} against {:?})",
                ranks[rank],
                (below, older)
            )));
        }
        let timeout = Timeout::of_call(deadline);
        let store = engine.observed_store(url, &timeout, &observed)?;
        Ok(vec![find(&*store, url, below, older, &timeout)?; ranks.len()])
    });
    let Found { found, skipped } = found.inspect_err(|error| {
        let load = Arc::new(Listened::begin(engine, Arc::clone(&observed), Verb::Load, (url, None)));
        load.note_outcome(&Err(error.clone()), operation.number_met());
        load.collect_later(engine);
    })?;
    let Some((step, manifest)) = found else { return Ok(Newest { found: None, skipped }) };
    let url = step_url(url, step);
    let load = Arc::new(Listened::begin(engine, observed, Verb::Load, (&url, Some(step))));
    let store = engine.observed_store(&url, &deadline.into(), &load.observed);
    let checkpoint = store.and_then(|store| Checkpoint::new(engine, &url, store, &manifest));
    let checkpoint =
        checkpoint.map(|checkpoint| checkpoint.within(deadline.into()).opened(Arc::clone(&load), operation.number()));
    // A rank that cannot open it takes part all the same, so that the others do not wait for it.
    let opened = checkpoint.as_ref().map(|_| ()).map_err(Error::clone);
    operation.agree("opened", opened, |ranks: Vec<()>| Ok(ranks)).inspect_err(|error| {
        load.note_outcome(&Err(error.clone()), operation.number_met());
        load.collect_later(engine);
    })?;
    Ok(Newest { found: Some((step, checkpoint?)), skipped })
}

/// Reads commits from the newest down, as far as that is needed.
fn find(store: &dyn Store, url: &str, below: Option<u64>, older: bool, timeout: &Timeout) -> Result<Found> {
    let entries = entries(store, timeout)?;
    let mut skipped = Vec::new();
    let mut unreadable: Option<(u64, Error)> = None;
    let mut passed_over_committed = false;
    for step in steps(url, &entries)?.into_iter().rev().filter(|&step| below.is_none_or(|below| step < below)) {
        let commit = commit_of(store, step, timeout);
        if matches!(commit, Ok(None)) {
            skipped.push(format!("{}: not committed (its save was cut off, or is still running)", step_dir(step)));
            continue;
        }
        if let Some((broken, error)) = unreadable {
            let message = format!(
                "{}\nthe newest committed checkpoint, {}, cannot be opened; {} is committed too: allow an older one \
                 (older=True) to go back to it",
                error.message,
                step_dir(broken),
                step_dir(step)
            );
            return Err(Error::new(error.kind, message));
        }
        let read = |commit: Option<Commit>| match commit {
            Some(commit) => retry(timeout, || commit::manifest_of(store, &step_dir(step), &commit)),
            None => Err(Error::internal("a step without a commit is passed over")),
        };
        match commit.and_then(read) {
            Ok(manifest) => return Ok(Found { found: Some((step, manifest)), skipped }),
            Err(error) if timeout.is_over() => return Err(error),
            Err(error) if older => {
                passed_over_committed = true;
                skipped.push(format!("{}: {error}", step_dir(step)));
            }
            Err(error) => unreadable = Some((step, error)),
        }
    }
    match unreadable {
        Some((_, error)) => Err(error),
        None if passed_over_committed => {
            Err(Error::corrupt(format!("{url}: no committed checkpoint can be opened:\n{}", skipped.join("\n"))))
        }
        None => {
            foreign::refuse_as_run(url, &entries)?;
            Ok(Found { found: None, skipped })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardfast_format::Catalog;

    use super::*;
    use crate::{Destination, Prove, State, save};

    #[test]
    fn what_restores_find_out_about_the_storage_is_kept_for_the_next_one() {
        const DEADLINE: Duration = Duration::from_secs(60);
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().to_str().unwrap().to_owned();
        let state =
            State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
        let destination = Destination {
            url: step_url(&url, 1),
            step: Some(1),
            user: BTreeMap::new(),
            prove: Prove::default(),
            blocking: true,
        };
        save(&Engine::solo(), destination, state, DEADLINE).committed(None).unwrap();

        let engine = Engine::solo();
        let newest = newest(&engine, &url, None, false, DEADLINE).unwrap();
        assert_eq!(newest.found.as_ref().map(|(step, _)| *step), Some(1));
        assert!(engine.storage.users() > 0, "the checkpoint's store shares nothing");
    }
}
