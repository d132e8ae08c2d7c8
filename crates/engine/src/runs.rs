//! A run: the checkpoints `step-…` below one URL. Which of them exist is read from their commits, never remembered.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardfast_format::{COMMIT, Commit, parse_step_dir, step_dir};
use shardfast_store::{Entry, Shared, Store};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::timeout::Timeout;

use crate::commit;
use crate::foreign;

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

/// Returns the newest committed step of the run at `url`, whose store that is, readable or not; `None` if there is
/// none.
///
/// # Errors
/// As [`list`].
pub fn newest_committed(store: &dyn Store, url: &str, timeout: &Timeout) -> Result<Option<u64>> {
    newest_committed_below(store, url, None, timeout)
}

/// Returns the newest committed step like [`newest_committed`] among those lower than `below`.
pub(crate) fn newest_committed_below(
    store: &dyn Store,
    url: &str,
    below: Option<u64>,
    timeout: &Timeout,
) -> Result<Option<u64>> {
    let steps = steps(url, &entries(store, timeout)?)?;
    for step in steps.into_iter().rev().filter(|&step| below.is_none_or(|below| step < below)) {
        match commit_of(store, step, timeout) {
            Ok(None) => {}
            Err(error) if timeout.is_over() => return Err(error),
            _ => return Ok(Some(step)),
        }
    }
    Ok(None)
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

/// The newest checkpoint of a run that can be opened, of one place.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Found {
    /// The step, and its manifest.
    pub(crate) found: Option<(u64, Vec<u8>)>,
    pub(crate) skipped: Vec<String>,
}

/// Reads commits from the newest down, as far as that is needed.
pub(crate) fn find(store: &dyn Store, url: &str, below: Option<u64>, older: bool, timeout: &Timeout) -> Result<Found> {
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
