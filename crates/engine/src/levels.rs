//! A run with a nearer place, such as a local disk: its checkpoints are saved there, and sent to the run's own place
//! later.
//!
//! # Protocol
//! 1. A job that begins to save takes its number in the run, as [`jobs`] describes, and puts the same
//!    object into the nearer place. So the newest object there says up to which job its checkpoints are of the run's
//!    history.
//! 2. A checkpoint of the nearer place counts only if no newer job of the run has begun at its step or before it: such
//!    a job went on from an earlier step, elsewhere. If the run does not know the job of the nearer place, as a run
//!    that was begun anew does not, no checkpoint there counts.
//! 3. A job that begins moves the checkpoints of the nearer place that it does not go on from out of its way, as a
//!    [rewind](mod@crate::rewind) does.
//! 4. A load takes the newest step that counts. If both places have that very checkpoint, each file comes from the
//!    nearer one, and what does not prove there from the other.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardfast_format::{Commit, Manifest, step_dir};
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::observed::Observed;
use shardfast_transfer::reader::{Level, ONLY_LEVEL};
use shardfast_transfer::timeout::Timeout;

use crate::checkpoint::Checkpoint;
use crate::commit;
use crate::engine::Engine;
use crate::jobs;
use crate::runs::{self, Found, Step};

/// Name of the level of a nearer place on a disk.
pub const LOCAL: &str = "local";

/// Name of the level of a nearer place in memory.
const IN_MEMORY: &str = "memory";

/// Beginning of the URLs of nearer places in memory.
pub const MEMORY: &str = "keeper://";

/// A place of a checkpoint that is opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct At {
    name: String,
    pub(crate) url: String,
    /// Attempt under whose name the files are there.
    attempt: String,
}

/// Steps of the nearer place.
struct Near {
    store: Arc<dyn Store>,
    /// Steps that have a commit and count, ascending.
    steps: Vec<Step>,
    /// Steps that have a commit and do not count, ascending.
    others: Vec<u64>,
}

impl Near {
    /// Looks at the checkpoints at `url`, the nearer place of the run in `run`.
    fn look(near: Arc<dyn Store>, url: &str, run: &dyn Store, timeout: &Timeout) -> Result<Near> {
        let (steps, _) = runs::list_in(&*near, url, timeout)?;
        let steps: Vec<Step> = steps.into_iter().filter(Step::is_committed).collect();
        let end = if steps.is_empty() { None } else { jobs::history_end(&*near, run, timeout.into())? };
        let (steps, others): (Vec<Step>, Vec<Step>) =
            steps.into_iter().partition(|step| end.is_none_or(|end| step.step < end));
        let others = others.iter().map(|step| step.step).collect();
        Ok(Near { store: near, steps, others })
    }

    /// Returns the commit and the manifest of a step there.
    fn read(&self, step: &Step, timeout: &Timeout) -> Result<(Commit, Vec<u8>)> {
        let gone = || Error::new(Kind::NotFound, format!("{}: it has no commit any more", step.url));
        let record = step.commit.clone()?.ok_or_else(gone)?;
        let manifest = retry(timeout, || commit::manifest_of(&*self.store, &step_dir(step.step), &record))?;
        Ok((record, manifest))
    }
}

/// Finds the newest checkpoint of the run at `url`, whose nearer place is `near`, as [`newest`](mod@crate::newest)
/// does, and its places, the nearest first. One of the nearer place alone that cannot be opened is passed over.
pub(crate) fn find(
    engine: &Engine,
    (near_url, url): (&str, &str),
    (below, older): (Option<u64>, bool),
    timeout: &Timeout,
    observed: &Arc<Observed>,
) -> Result<(Found, Vec<At>)> {
    let run = engine.observed_store(url, timeout, observed)?;
    let near = Near::look(engine.observed_store(near_url, timeout, observed)?, near_url, &*run, timeout)?;
    let far = runs::find(&*run, url, below, older, timeout);
    let is_wanted = |step: &u64| below.is_none_or(|below| *step < below);
    let newest_far = match &far {
        Ok(far) => far.found.as_ref().map(|(step, _)| *step),
        Err(_) => runs::newest_committed_below(&*run, url, below, timeout)?,
    };
    // Below the newest step of the run itself the nearer place has nothing to give.
    let is_newer = |step: &u64| is_wanted(step) && newest_far.is_none_or(|far| *step >= far);
    let (mut skipped, mut found) = (Vec::new(), None);
    let name = if near_url.starts_with(MEMORY) { IN_MEMORY } else { LOCAL };
    for step in near.steps.iter().rev().filter(|step| is_newer(&step.step)) {
        let (record, manifest) = match near.read(step, timeout) {
            Ok(read) => read,
            Err(error) if timeout.is_over() => return Err(error),
            Err(error) => {
                skipped.push(format!("{}: {error}", step.url));
                continue;
            }
        };
        let mut at = vec![At { name: name.to_owned(), url: step.url.clone(), attempt: record.attempt }];
        if newest_far == Some(step.step) {
            match also_far(&*run, url, step.step, &manifest, timeout) {
                Ok(Some(there)) => at.push(there),
                Ok(None) => {
                    skipped.push(format!("{}: {url} has another checkpoint of that step", step.url));
                    continue;
                }
                Err(error) if error.kind == Kind::Corrupt => skipped.push(error.to_string()),
                Err(error) => return Err(error),
            }
        }
        found = Some((step.step, manifest, at));
        break;
    }
    let (mut found, at) = match found {
        Some((step, manifest, at)) => (Found { found: Some((step, manifest)), skipped }, at),
        None => {
            let mut far = far?;
            far.skipped.splice(0..0, skipped);
            (far, Vec::new())
        }
    };
    let newest = found.found.as_ref().map(|(step, _)| *step);
    for step in near.others.iter().filter(|step| is_wanted(step) && newest.is_none_or(|newest| **step > newest)) {
        let place = runs::step_url(near_url, *step);
        let why = format!("{place}: a newer job of {url} went on from an earlier step, or began the run anew");
        found.skipped.insert(0, why);
    }
    Ok((found, at))
}

/// Returns the place of the step at the run itself, if the checkpoint there is the one with this manifest.
fn also_far(run: &dyn Store, url: &str, step: u64, manifest: &[u8], timeout: &Timeout) -> Result<Option<At>> {
    let record = retry(timeout, || commit::read_commit(run, &step_dir(step)))?;
    let is_same = record.verify(&Manifest::under_attempt(manifest, &record.attempt)?).is_ok();
    let at = At { name: ONLY_LEVEL.to_owned(), url: runs::step_url(url, step), attempt: record.attempt };
    Ok(is_same.then_some(at))
}

/// Opens a checkpoint with this manifest whose files lie at these places, the nearest first.
pub(crate) fn open(
    engine: &Arc<Engine>,
    at: &[At],
    manifest: &[u8],
    timeout: &Timeout,
    observed: &Arc<Observed>,
) -> Result<Checkpoint> {
    let level = |at: &At| -> Result<Level> {
        let store = engine.observed_store(&at.url, timeout, observed)?;
        let manifest = Manifest::decode(&Manifest::under_attempt(manifest, &at.attempt)?)?;
        Ok(Level::new(at.name.clone(), store, Arc::new(manifest)))
    };
    let levels: Vec<Level> = at.iter().map(level).collect::<Result<_>>()?;
    let Some(first) = levels.first() else { return Err(Error::internal("a checkpoint lies nowhere")) };
    let (url, store) = (&at[0].url, Arc::clone(&first.store));
    let mut checkpoint = Checkpoint::new(engine, url, store, manifest)?;
    checkpoint.files.lie_on(levels);
    Ok(checkpoint)
}
