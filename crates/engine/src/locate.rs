//! Resolves a URL to a checkpoint: itself, or the newest committed one of a run.

use shardfast_format::COMMIT;
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::timeout::Timeout;

use crate::checkpoint;
use crate::foreign;
use crate::rewind::ABANDONED;
use crate::runs::{self, Step};

/// The checkpoint that a URL resolves to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The checkpoint's URL.
    pub url: String,
    /// The run's URL, where that was given: the checkpoint is its newest committed one.
    pub run: Option<String>,
    /// Newer steps of the run that are not committed.
    pub passed_over: Vec<u64>,
}

/// Returns the URL or path in a form that does not depend on the current directory.
///
/// # Errors
/// `Unsupported` for an unknown scheme; `Invalid` for a malformed URL, and where there is no current directory.
pub fn absolute_url(url: &str) -> Result<String> {
    Ok(shardfast_store::absolute(url)?)
}

/// Content found at a URL.
pub enum Place {
    /// A committed checkpoint.
    Checkpoint,
    /// A run: its steps, ascending, and the directories of abandoned ones; not both are empty.
    Run(Vec<Step>, Vec<String>),
}

/// Finds whether a checkpoint or a run is at `url`.
///
/// # Errors
/// `NotFound` when neither is there; the message describes what is there instead.
pub fn look(url: &str, timeout: &Timeout) -> Result<Place> {
    let store = runs::store(url, timeout).map_err(|error| foreign::explained(url, error))?;
    let entries = runs::entries(&*store, timeout)?;
    if entries.iter().any(|entry| entry.name == COMMIT && !entry.is_dir) {
        return Ok(Place::Checkpoint);
    }
    let (steps, entries) = runs::list_in(&*store, url, timeout)?;
    let abandoned = entries.into_iter().filter(|entry| entry.is_dir && entry.name.starts_with(ABANDONED));
    let abandoned: Vec<String> = abandoned.map(|entry| entry.name).collect();
    if steps.is_empty() && abandoned.is_empty() {
        // A commit that was published just now is as good as one that was there before.
        return checkpoint::read(&*store, url, timeout).map(|_| Place::Checkpoint);
    }
    Ok(Place::Run(steps, abandoned))
}

/// Finds the checkpoint at `url`, or the newest committed one of the run there. It may be damaged: a damaged checkpoint
/// is not passed over for an older one.
///
/// # Errors
/// `NotFound` when neither a checkpoint nor a run with a committed one is there; the store's errors.
pub fn locate(url: &str, timeout: &Timeout) -> Result<Located> {
    let steps = match look(url, timeout)? {
        Place::Checkpoint => return Ok(Located { url: url.to_owned(), run: None, passed_over: Vec::new() }),
        Place::Run(steps, _) => steps,
    };
    let newest = steps.iter().rposition(Step::is_committed).ok_or_else(|| none_committed(url, steps.len()))?;
    Ok(Located {
        url: steps[newest].url.clone(),
        run: Some(url.to_owned()),
        passed_over: steps[newest + 1..].iter().map(|step| step.step).collect(),
    })
}

/// Finds the checkpoint at `url`, or every committed one of the run there, oldest first.
///
/// # Errors
/// As [`locate`].
pub fn locate_all(url: &str, timeout: &Timeout) -> Result<Vec<String>> {
    let steps = match look(url, timeout)? {
        Place::Checkpoint => return Ok(vec![url.to_owned()]),
        Place::Run(steps, _) => steps,
    };
    let committed: Vec<String> = steps.iter().filter(|step| step.is_committed()).map(|step| step.url.clone()).collect();
    if committed.is_empty() { Err(none_committed(url, steps.len())) } else { Ok(committed) }
}

fn none_committed(url: &str, steps: usize) -> Error {
    Error::new(Kind::NotFound, format!("{url}: expected a committed checkpoint among its {steps} steps, found none"))
}
