//! Numbers the jobs that save into a run, so that only the newest of them commits and deletes.
//!
//! # Protocol
//! 1. A job that begins to save takes the number behind the highest in `<run>/.jobs/`: rank 0 puts an object there
//!    that is named by the number and by the job. Of two jobs with one number the one with the higher name is newer;
//!    the other one is refused if it sees that at once.
//! 2. Rank 0 looks for a newer job right before it publishes a `COMMIT`, and before it takes a checkpoint back or
//!    deletes its files. If there is one, it does neither.
//! 3. Rank 0 looks again right after it has published, since a publish may take long. If a newer job has begun at that
//!    step or before it, that job has not restored this checkpoint: the `COMMIT` is removed again.
//!
//! `shardfast rewind` takes a number, too, if it moves steps: the job that saves there commits no more.
//!
//! So ranks of an older group that were stopped, and run again when a newer group has begun, change nothing. A job
//! that only restores takes no number.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{JOBS, job_name, parse_job_name};
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Patience, Result, retry};

/// Jobs whose objects are kept; the others are deleted.
const KEPT: usize = 16;

/// Line in a job's object that says that it lies in the nearer place of a run.
const NEARER: &str = "place nearer";

/// Longest text of a job's object, in bytes.
const TEXT_BYTES_MAX: u64 = 1024;

/// Job in a run: its number there, and its name, which no other has. The larger one is the newer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Job {
    number: u64,
    name: String,
}

/// Runs into which the job of an engine has begun to save, by their URLs, or why it was refused there.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<HashMap<String, Result<Job>>>);

impl Jobs {
    /// Returns this job in the run at `url`; `None` if it has not begun to save there.
    pub(crate) fn find(&self, url: &str) -> Option<Job> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(url)?.clone().ok()
    }

    /// Makes this job, which has that name, the newest of the run at `url`, whose store that is: its first step there
    /// is `step`.
    ///
    /// # Errors
    /// `Conflict` when another job begins at the same moment, and from then on; the store's errors.
    pub(crate) fn begin<'a>(
        &self,
        store: &dyn Store,
        url: &str,
        (name, step): (&[u8], u64),
        patience: impl Into<Patience<'a>>,
    ) -> Result<Job> {
        let patience = patience.into();
        let refused = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(url).and_then(|job| job.clone().err());
        if let Some(refused) = refused {
            return Err(refused);
        }
        let name = text_of(name);
        let found = list(store, patience)?;
        let newest = found.last().cloned();
        let job = match newest {
            Some(newest) if newest.name == name => newest,
            newest => {
                let job = Job { number: newest.map_or(0, |newest| newest.number) + 1, name };
                retry(patience, || Ok(store.put(&job.place(), text(step).as_bytes())?))?;
                job
            }
        };
        let other = list(store, patience)?.pop().filter(|other| other.number == job.number && *other > job);
        let begun = match other {
            None => Ok(job),
            Some(other) => {
                let _ = store.delete(&job.place());
                let other = said(store, &other, patience);
                let message =
                    format!("{url}: another job begins to save there at this moment, {other}: stop one of them");
                Err(Error::new(Kind::Conflict, message))
            }
        };
        self.insert(url, begun.clone());
        let old: Vec<String> = found.iter().rev().skip(KEPT).map(Job::place).collect();
        if !old.is_empty() {
            let old: Vec<&str> = old.iter().map(String::as_str).collect();
            // Objects that stay do no harm.
            let _ = store.delete_all(&old, &[]);
        }
        begun
    }

    fn insert(&self, url: &str, job: Result<Job>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(url.to_owned(), job);
    }

    /// Makes a job of the run at `url` that of its nearer place at `near` as well; these are their stores. All
    /// checkpoints there are of the run's history from now on.
    ///
    /// # Errors
    /// `Conflict` when a newer job of the run has taken the nearer place; the stores' errors.
    pub(crate) fn adopt(
        &self,
        (run, url): (&dyn Store, &str),
        (store, near): (&dyn Store, &str),
        (job, step): (&Job, u64),
        patience: Patience<'_>,
    ) -> Result<()> {
        let (known, others) = (list(run, patience)?, list(store, patience)?);
        if known.iter().any(|other| other > job) {
            job.expect_newest(run, url, patience)?;
        }
        let said = format!("{}{NEARER}\n", text(step));
        retry(patience, || Ok(store.put(&job.place(), said.as_bytes())?))?;
        // A run that was begun anew has lower numbers than the one before.
        let others: Vec<String> = others.iter().filter(|one| *one != job).map(Job::place).collect();
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        retry(patience, || Ok(store.delete_all(&others, &[])?))?;
        self.insert(near, Ok(job.clone()));
        Ok(())
    }
}

impl Job {
    fn place(&self) -> String {
        format!("{JOBS}/{}", job_name(self.number, &self.name))
    }

    /// Checks that this job may commit the checkpoint of `step` in the run at `url`, whose store that is: that no newer
    /// job saves there; once it is committed, that no newer job goes on from an earlier step.
    ///
    /// # Errors
    /// `Conflict` says which job is newer. Before the commit also the store's errors: afterwards it stays if the store
    /// cannot be asked.
    pub fn may_commit(
        &self,
        store: Result<&dyn Store>,
        url: &str,
        (step, is_committed): (Option<u64>, bool),
        patience: Patience<'_>,
    ) -> Result<()> {
        match (store.and_then(|store| self.overtaken(store, url, patience)), is_committed) {
            (Err(error), false) => Err(error),
            (Ok(Some((error, _))), false) => Err(error),
            // A newer job that begins behind this step has restored it.
            (Ok(Some((error, Some(begins)))), true) if step.is_some_and(|own| begins <= own) => Err(error),
            _ => Ok(()),
        }
    }

    /// Checks that this job is the newest one of the run at `url`, whose store that is. An object of it that is gone,
    /// as when the directory was moved, is put there again.
    ///
    /// # Errors
    /// `Conflict` says which job is newer; the store's errors.
    pub(crate) fn expect_newest<'a>(
        &self,
        store: &dyn Store,
        url: &str,
        patience: impl Into<Patience<'a>>,
    ) -> Result<()> {
        self.overtaken(store, url, patience.into())?.map_or(Ok(()), |(error, _)| Err(error))
    }

    /// Returns the error of a newer job if there is one, and the step at which that began, if it says so.
    pub(crate) fn overtaken(
        &self,
        store: &dyn Store,
        url: &str,
        patience: Patience<'_>,
    ) -> Result<Option<(Error, Option<u64>)>> {
        let found = list(store, patience)?;
        // Without its own object here it is not the job that this place knows: only as the first one it goes on.
        let newer = found.last().filter(|newest| *newest > self || !found.contains(self)).filter(|one| *one != self);
        let Some(newest) = newer else {
            if found.is_empty() {
                retry(patience, || Ok(store.put(&self.place(), text(0).as_bytes())?))?;
            }
            return Ok(None);
        };
        let (other, number) = (said(store, newest, patience), self.number);
        let message = format!(
            "{url}: this is job {number} of the run, and job {} has begun to save there, {other}: only the newest job \
             commits and deletes; stop this one, or stop the other and start this one again",
            newest.number
        );
        let step = read(store, newest, patience).ok().and_then(|text| word(&text, "step ")?.parse().ok());
        Ok(Some((Error::new(Kind::Conflict, message), step)))
    }
}

/// Returns the step from which on checkpoints of a nearer place are not of the history of its run, whose stores these
/// are: the first one at which a job newer than that of the nearer place has begun, or 0 if the run does not know that
/// job. `None` if all of them are.
pub(crate) fn history_end(near: &dyn Store, run: &dyn Store, patience: Patience<'_>) -> Result<Option<u64>> {
    let (own, jobs) = (list(near, patience)?.pop(), list(run, patience)?);
    let Some(own) = own.filter(|own| jobs.contains(own)) else { return Ok(Some(0)) };
    let newer = jobs.iter().filter(|job| **job > own);
    let begun: Vec<u64> = newer.map(|job| Ok(step_of(&read(run, job, patience)?))).collect::<Result<_>>()?;
    Ok(begun.into_iter().min())
}

/// Returns the newest job of a run if it is the one whose checkpoints the nearer place has; these are their stores.
///
/// # Errors
/// The stores' errors.
pub fn owner(near: &dyn Store, run: &dyn Store, patience: Patience<'_>) -> Result<Option<Job>> {
    let (own, newest) = (list(near, patience)?.pop(), list(run, patience)?.pop());
    Ok(own.filter(|own| newest.as_ref() == Some(own)))
}

/// Returns the job of that name in a run, whose store that is; `None` if none has begun to save there, or long ago.
///
/// # Errors
/// The store's errors.
pub(crate) fn named(store: &dyn Store, name: &[u8], patience: Patience<'_>) -> Result<Option<Job>> {
    let name = text_of(name);
    Ok(list(store, patience)?.into_iter().find(|job| job.name == name))
}

/// Returns the newest job of a run or of its nearer place, whose store that is.
///
/// # Errors
/// The store's errors.
pub fn newest(store: &dyn Store, patience: Patience<'_>) -> Result<Option<Job>> {
    Ok(list(store, patience)?.pop())
}

/// Returns the newest of these jobs that the run with that store knows, or of all if it knows none.
///
/// # Errors
/// The store's errors.
pub fn newest_of(jobs: &[Job], run: &dyn Store, patience: Patience<'_>) -> Result<Option<Job>> {
    let known = list(run, patience)?;
    Ok(jobs.iter().max_by_key(|job| (known.contains(job), *job)).cloned())
}

/// Returns whether jobs have begun to save into the run with that store.
///
/// # Errors
/// The store's errors.
pub fn are_there(run: &dyn Store, patience: Patience<'_>) -> Result<bool> {
    Ok(!list(run, patience)?.is_empty())
}

/// Returns whether that store is the nearer place of a run.
pub(crate) fn is_nearer(store: &dyn Store, patience: Patience<'_>) -> Result<bool> {
    let Some(newest) = list(store, patience)?.pop() else { return Ok(false) };
    Ok(read(store, &newest, patience)?.lines().any(|line| line == NEARER))
}

/// Returns the step at which a job has begun, by the text of its object; 0 if it does not say so.
fn step_of(text: &str) -> u64 {
    word(text, "step ").and_then(|step| step.parse().ok()).unwrap_or(0)
}

/// Returns the name of a job as it stands in that of its object.
fn text_of(name: &[u8]) -> String {
    name.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lists the run's jobs, the newest last.
fn list(store: &dyn Store, patience: Patience<'_>) -> Result<Vec<Job>> {
    let entries = match retry(patience, || Ok(store.list(JOBS)?)) {
        Err(error) if error.kind == Kind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let job = |name| parse_job_name(name).map(|(number, name)| Job { number, name: name.to_owned() });
    let mut jobs: Vec<Job> = entries.iter().filter_map(|entry| job(&entry.name)).collect();
    jobs.sort_unstable();
    Ok(jobs)
}

/// Returns the text of this job's object: lines of a word and what it is.
fn text(step: u64) -> String {
    let host: String = rustix::system::uname().nodename().to_string_lossy().chars().take(255).collect();
    let (writer, process) = (env!("CARGO_PKG_VERSION"), std::process::id());
    format!("host {host}\nprocess {process}\nstep {step}\nwriter shardfast {writer}\n")
}

fn read(store: &dyn Store, job: &Job, patience: Patience<'_>) -> Result<String> {
    let bytes = retry(patience, || Ok(store.read(&job.place(), TEXT_BYTES_MAX)?))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn word<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

/// Returns where a job's rank 0 is, by the text of its object.
fn said(store: &dyn Store, job: &Job, patience: Patience<'_>) -> String {
    let text = read(store, job, patience).unwrap_or_default();
    let shown = |name| word(&text, name).unwrap_or("unknown").escape_debug().to_string();
    format!("on host {} as process {}", shown("host "), shown("process "))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shardfast_transfer::timeout::Timeout;

    use super::*;

    fn run() -> (tempfile::TempDir, Arc<dyn Store>) {
        let dir = tempfile::tempdir().unwrap();
        let store = shardfast_store::open(dir.path().to_str().unwrap()).unwrap();
        (dir, store)
    }

    #[test]
    fn only_the_newest_job_of_a_run_goes_on() {
        let ((dir, store), timeout) = (run(), &Timeout::default());
        let (old, new) = (Jobs::default(), Jobs::default());
        let first = old.begin(&*store, "run", (b"a", 7), timeout).unwrap();
        assert_eq!(old.begin(&*store, "run/../run", (b"a", 8), timeout).unwrap(), first, "it is the newest");
        first.expect_newest(&*store, "run", timeout).unwrap();
        let second = new.begin(&*store, "run", (b"b", 9), timeout).unwrap();
        let (refused, step) = first.overtaken(&*store, "run", timeout.into()).unwrap().unwrap();
        let process = format!("as process {}", std::process::id());
        assert!(refused.kind == Kind::Conflict && refused.message.contains(&process), "{refused}");
        assert_eq!((step, second.number), (Some(9), 2));
        second.expect_newest(&*store, "run", timeout).unwrap();
        // What begins again is meant.
        assert_eq!(old.begin(&*store, "run", (b"a", 8), timeout).unwrap().number, 3);
        assert!(old.find("run").is_some() && old.find("other").is_none());
        // Its directory is moved, and another job begins there anew.
        std::fs::remove_dir_all(dir.path().join(JOBS)).unwrap();
        let third = old.find("run").unwrap();
        third.expect_newest(&*store, "run", timeout).unwrap();
        assert_eq!(list(&*store, timeout.into()).unwrap(), std::slice::from_ref(&third), "it is put there again");
        std::fs::remove_dir_all(dir.path().join(JOBS)).unwrap();
        assert_eq!(Jobs::default().begin(&*store, "run", (b"c", 1), timeout).unwrap().number, 1);
        assert_eq!(third.expect_newest(&*store, "run", timeout).unwrap_err().kind, Kind::Conflict);
    }

    #[test]
    fn objects_of_old_jobs_leave_and_other_objects_do_not_count() {
        let ((dir, store), timeout) = (run(), &Timeout::default());
        store.put(&format!("{JOBS}/notes"), b"").unwrap();
        for number in 1..=40_u64 {
            let begun = Jobs::default().begin(&*store, "run", (&number.to_le_bytes(), 1), timeout);
            assert_eq!(begun.unwrap().number, number);
        }
        assert_eq!(std::fs::read_dir(dir.path().join(JOBS)).unwrap().count(), KEPT + 2);
    }

    #[test]
    fn of_jobs_that_begin_at_one_moment_all_but_one_are_refused() {
        for _ in 0..20 {
            let ((_dir, store), timeout) = (run(), &Timeout::default());
            let jobs: Vec<Jobs> = (0..8).map(|_| Jobs::default()).collect();
            let begin = |at: usize| jobs[at].begin(&*store, "run", (&[at as u8], 1), timeout);
            let begun: Vec<Result<Job>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|at| scope.spawn(move || begin(at))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let newest = |job: &Job| job.expect_newest(&*store, "run", timeout).is_ok();
            assert_eq!(begun.iter().flatten().filter(|job| newest(job)).count(), 1, "{begun:?}");
            for (at, refused) in begun.iter().enumerate().filter_map(|(at, begun)| Some((at, begun.as_ref().err()?))) {
                assert!(refused.kind == Kind::Conflict && refused.message.contains("at this moment"), "{refused}");
                assert_eq!(begin(at).unwrap_err(), *refused, "it does not take the run with its next step");
            }
        }
    }
}
