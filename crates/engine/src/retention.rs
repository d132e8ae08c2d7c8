//! Keeps some checkpoints of a run, and removes the others in two rounds, so that a reader can finish.
//!
//! # Protocol
//! The first round, after a save:
//! 1. The newest committed checkpoint is checked: its manifest is verified, and all its files exist with their sizes.
//!    If the check fails, nothing leaves: the older checkpoints may be the only good ones.
//! 2. The directory of a checkpoint that no rule keeps is listed. If it holds a foreign file, the whole checkpoint
//!    stays. So does one that is [pinned](crate::pins).
//! 3. Files of other attempts in its directory are deleted: while `COMMIT` is there, none of them can be published.
//! 4. Its record is put beside its `COMMIT`, as `.leaving`, and its `COMMIT` is deleted, durably: the checkpoint stops
//!    existing before any of its data are deleted.
//! 5. If it was pinned meanwhile, its `COMMIT` is published again.
//!
//! The second round, with the next save: the files of that attempt are deleted, `.leaving` last. So a round that was
//! interrupted is repeated, and the files of a new save of the same step are not touched.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use shardfast_format::name::HUGGING_FACE_INDEX;
use shardfast_format::{COMMIT, Commit, LEAVING, Manifest, PINNED, attempt_of, step_dir};
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::timeout::{TIMEOUT, Timeout};

use crate::commit;
use crate::contents;
use crate::files_exist::{self, is_there};
use crate::jobs::Job;
use crate::runs;

/// Prefix of the notes of metrics.
pub const METRIC: &str = "metric.";

/// Rules for the committed checkpoints that a run keeps: their union.
#[derive(Debug, Clone, Default)]
pub struct Keep {
    /// Number of newest ones, by the order in which they were committed: those of this process after the others.
    pub last: Option<u64>,
    /// Divisor of the steps that are kept.
    pub every: Option<u64>,
    /// The best by a metric.
    pub best: Vec<Best>,
}

/// Rule that keeps the best values of a metric. Checkpoints without it, or with a value that is no number, do not
/// count; of equal values the newer one is better.
#[derive(Debug, Clone)]
pub struct Best {
    /// The metric, as the save noted it.
    pub metric: String,
    /// Number of checkpoints.
    pub count: u64,
    /// `true` if larger values are better.
    pub largest: bool,
}

impl Keep {
    fn is_nothing(&self) -> bool {
        self.last.is_none() && self.every.is_none() && self.best.is_empty()
    }
}

/// The checkpoints that no rule keeps, taken back or not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retained {
    /// The steps of those that leave, ascending.
    pub left: Vec<u64>,
    /// The steps of those that are pinned, ascending.
    pub pinned: Vec<u64>,
    /// Checkpoints that stay because a foreign file is in their directory, ascending.
    pub spared: Vec<Spared>,
}

/// Checkpoints that stay, whatever the rules say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Steps of these checkpoints.
    pub steps: BTreeSet<u64>,
    /// Committed steps among which these were chosen; one that was committed since stays. `None`: all are known.
    pub known: Option<BTreeSet<u64>>,
}

impl Held {
    fn has(&self, step: u64) -> bool {
        self.steps.contains(&step) || self.known.as_ref().is_some_and(|known| !known.contains(&step))
    }
}

/// A checkpoint that no rule keeps, and that stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spared {
    /// URL of the checkpoint.
    pub url: String,
    /// Reason why it stays: the file that was found.
    pub reason: String,
}

/// The metrics that were noted in a checkpoint, by name.
type Metrics = BTreeMap<String, f64>;

/// The retention of one run.
pub struct Retention {
    url: String,
    keep: Keep,
    /// Job that deletes; `None` for a command.
    job: Option<Job>,
    /// Time for which a round waits for storage that does not answer.
    within: Duration,
    /// Opened with the first round.
    store: Option<Arc<dyn Store>>,
    /// Metrics that were read, by attempt.
    metrics: HashMap<String, Metrics>,
}

impl Retention {
    /// Makes the retention of the run at `url`. Reads nothing yet.
    pub fn new(url: &str, keep: Keep) -> Retention {
        Retention { url: url.to_owned(), keep, job: None, within: TIMEOUT, store: None, metrics: HashMap::new() }
    }

    /// Makes a retention like [`new`](Self::new) with a store that is already open at the run.
    pub fn on(store: Arc<dyn Store>, url: &str, keep: Keep) -> Retention {
        Retention { store: Some(store), ..Retention::new(url, keep) }
    }

    /// Returns the same retention, each round of which fails once no request has succeeded for `within`.
    pub fn within(self, within: Duration) -> Retention {
        Retention { within, ..self }
    }

    /// Deletes from now on only while that job is the newest of the run; `None`: whichever that is.
    pub fn begin(&mut self, job: Option<Job>) {
        self.job = job;
    }

    /// Checks that no newer job saves into the run.
    fn expect_newest(&self, store: &dyn Store, timeout: &Timeout) -> Result<()> {
        self.job.as_ref().map_or(Ok(()), |job| job.expect_newest(store, &self.url, timeout))
    }

    fn store(&mut self, timeout: &Timeout) -> Result<Arc<dyn Store>> {
        if let Some(store) = &self.store {
            return Ok(Arc::clone(store));
        }
        let store = runs::store(&self.url, timeout)?;
        self.store = Some(Arc::clone(&store));
        Ok(store)
    }

    /// Performs the first round: takes back the committed checkpoints that no rule keeps. The newest one is always
    /// kept, and without a rule everything is. `made` are the steps whose saves this process has begun, in that order;
    /// later commits of other processes stay. Files without a commit stay: they may belong to a save in flight. A
    /// checkpoint with a foreign file in its directory stays, and so does a link to a directory elsewhere.
    ///
    /// # Errors
    /// As [`runs::list`]; the store's errors; `Conflict` when a newer job saves into the run; `Corrupt`, and nothing is
    /// taken back, when the newest one cannot be opened: the older ones may be the only good ones. Checkpoints taken
    /// back before an error stay so.
    pub fn retain(&mut self, made: &[u64]) -> Result<Retained> {
        self.retain_beside(made, &Held::default())
    }

    /// Performs the first round like [`retain`](Self::retain), and keeps what is held as well.
    ///
    /// # Errors
    /// As [`retain`](Self::retain).
    pub fn retain_beside(&mut self, made: &[u64], held: &Held) -> Result<Retained> {
        let mut retained = Retained::default();
        if self.keep.is_nothing() {
            return Ok(retained);
        }
        let timeout = &Timeout::of_call(self.within);
        let store = self.store(timeout)?;
        let (steps, entries) = runs::list_in(&*store, &self.url, timeout)?;
        let committed = steps.into_iter().filter_map(|step| Some((step.step, step.commit.ok()??)));
        let mut committed: Vec<(u64, Commit)> = committed.collect();
        // Those that this process has not made come first.
        committed.sort_by_key(|(step, _)| made.iter().rposition(|made| made == step));
        let mut kept = self.kept(&*store, &committed, timeout)?;
        // Of a save that has begun since, or of another training.
        let later = |step: &u64| made.last().is_some_and(|last| step > last) && !made.contains(step);
        kept.extend(committed.iter().map(|(step, _)| *step).filter(later));
        kept.extend(committed.iter().map(|(step, _)| *step).filter(|step| held.has(*step)));
        let unkept: Vec<&(u64, Commit)> = committed.iter().filter(|(step, _)| !kept.contains(step)).collect();
        let (Some((newest, _)), false) = (committed.last(), unkept.is_empty()) else { return Ok(retained) };
        expect_complete(&*store, &self.url, *newest, timeout)?;
        for (step, record) in unkept {
            self.expect_newest(&*store, timeout)?;
            let dir = step_dir(*step);
            let is_link = entries.iter().any(|entry| entry.name == dir && entry.is_link);
            let stays = match is_link {
                true => Stays::Spared("it is a link".to_owned()),
                false => take_back(&*store, &dir, record, timeout)?,
            };
            match stays {
                Stays::Not => retained.left.push(*step),
                Stays::Pinned => retained.pinned.push(*step),
                Stays::Spared(reason) => {
                    retained.spared.push(Spared { url: runs::step_url(&self.url, *step), reason });
                }
            }
        }
        Ok(retained)
    }

    /// Returns the committed steps.
    ///
    /// # Errors
    /// As [`runs::list`]; the store's errors.
    pub fn committed(&mut self) -> Result<BTreeSet<u64>> {
        let timeout = &Timeout::of_call(self.within);
        let (steps, _) = runs::list_in(&*self.store(timeout)?, &self.url, timeout)?;
        Ok(steps.into_iter().filter(runs::Step::is_committed).map(|step| step.step).collect())
    }

    /// Returns the committed steps that a rule keeps, the newest among them; all if there is no rule.
    ///
    /// # Errors
    /// As [`runs::list`]; the store's errors.
    pub fn wanted(&mut self) -> Result<BTreeSet<u64>> {
        let timeout = &Timeout::of_call(self.within);
        let store = self.store(timeout)?;
        let (steps, _) = runs::list_in(&*store, &self.url, timeout)?;
        let committed = steps.into_iter().filter_map(|step| Some((step.step, step.commit.ok()??)));
        let committed: Vec<(u64, Commit)> = committed.collect();
        if self.keep.is_nothing() {
            return Ok(committed.into_iter().map(|(step, _)| step).collect());
        }
        self.kept(&*store, &committed, timeout)
    }

    /// Performs the second round, for these steps, or for all that are marked as leaving: deletes the files of
    /// checkpoints that were taken back. Returns the steps of which it deleted any.
    ///
    /// # Errors
    /// The store's errors; the round can be repeated. `Conflict` when a newer job saves into the run.
    pub fn clear(&mut self, steps: Option<&[u64]>) -> Result<Vec<u64>> {
        let timeout = &Timeout::of_call(self.within);
        let store = self.store(timeout)?;
        let leaving = match steps {
            Some(steps) => steps.to_vec(),
            None => leaving(&*store, &self.url, timeout)?,
        };
        let mut cleared = Vec::new();
        for step in leaving {
            self.expect_newest(&*store, timeout)?;
            if clear(&*store, &step_dir(step), timeout)? {
                cleared.push(step);
            }
        }
        Ok(cleared)
    }

    /// Returns the steps that a rule keeps, the newest among them.
    fn kept(&mut self, store: &dyn Store, committed: &[(u64, Commit)], timeout: &Timeout) -> Result<BTreeSet<u64>> {
        let last = self.keep.last.unwrap_or(0).max(1);
        let newest = committed.iter().rev().take(usize::try_from(last).unwrap_or(usize::MAX));
        let mut kept: BTreeSet<u64> = newest.map(|(step, _)| *step).collect();
        if let Some(every) = self.keep.every.filter(|&every| every > 0) {
            kept.extend(committed.iter().map(|(step, _)| *step).filter(|step| step.is_multiple_of(every)));
        }
        if !self.keep.best.is_empty() {
            self.metrics.retain(|attempt, _| committed.iter().any(|(_, record)| record.attempt == *attempt));
            for (step, record) in committed {
                if !self.metrics.contains_key(&record.attempt) {
                    self.metrics.insert(record.attempt.clone(), metrics(store, &step_dir(*step), record, timeout)?);
                }
            }
        }
        for Best { metric, count, largest } in &self.keep.best {
            let value = |(step, record): &(u64, Commit)| {
                let value = self.metrics.get(&record.attempt)?.get(metric).copied()?;
                Some((if *largest { -value } else { value }, *step))
            };
            let mut values: Vec<(f64, u64)> = committed.iter().rev().filter_map(value).collect();
            values.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            kept.extend(values.into_iter().take(usize::try_from(*count).unwrap_or(usize::MAX)).map(|(_, step)| step));
        }
        Ok(kept)
    }
}

/// Returns the metrics in a checkpoint's notes; none if its manifest is damaged.
fn metrics(store: &dyn Store, dir: &str, record: &Commit, timeout: &Timeout) -> Result<Metrics> {
    let manifest = match retry(timeout, || commit::manifest_of(store, dir, record)) {
        Err(error) if matches!(error.kind, Kind::Corrupt | Kind::Unsupported) => return Ok(Metrics::new()),
        manifest => Manifest::decode(&manifest?)?,
    };
    let noted = |(name, value): (&String, &String)| {
        let value: f64 = value.parse().ok()?;
        (!value.is_nan()).then_some((name.strip_prefix(METRIC)?.to_owned(), value))
    };
    Ok(manifest.info.user.iter().filter_map(noted).collect())
}

/// Checks that the checkpoint of a step is complete: step 1 of the protocol.
///
/// # Errors
/// `Corrupt` or `Unsupported` if it is not, and the store's errors.
pub fn expect_complete(store: &dyn Store, url: &str, step: u64, timeout: &Timeout) -> Result<()> {
    let (dir, url) = (step_dir(step), runs::step_url(url, step));
    let complete =
        retry(timeout, || commit::read_manifest(store, &dir)).and_then(|bytes| are_there(store, &dir, &bytes, timeout));
    complete.map_err(|error| match error.kind {
        Kind::Corrupt | Kind::Unsupported => Error::new(
            error.kind,
            format!(
                "{}; {url} is the newest checkpoint and cannot be opened, so no older one was deleted",
                error.message
            ),
        ),
        _ => error,
    })
}

/// Checks that all data files of this manifest exist.
fn are_there(store: &dyn Store, dir: &str, manifest: &[u8], timeout: &Timeout) -> Result<()> {
    let manifest = Manifest::decode(manifest)?;
    let files = commit::files(&manifest).map(|(path, bytes)| (format!("{dir}/{path}"), bytes));
    files_exist::expect(store, &files.collect::<Vec<_>>(), timeout)
}

/// Decision about a checkpoint.
enum Stays {
    Not,
    Pinned,
    Spared(String),
}

/// Performs steps 2 to 5.
fn take_back(store: &dyn Store, dir: &str, record: &Commit, timeout: &Timeout) -> Result<Stays> {
    // Without it names alone tell which files are ours.
    let manifest =
        retry(timeout, || commit::manifest_of(store, dir, record)).and_then(|bytes| Ok(Manifest::decode(&bytes)?));
    let contents = match contents::survey(store, dir, manifest.ok().as_ref(), contents::LEVELS_MAX, timeout) {
        // Probably a foreign directory: this process may not list it.
        Err(error) if error.kind == Kind::Invalid => return Ok(Stays::Spared(error.message)),
        contents => contents?,
    };
    if let Some(found) = contents.foreign_names() {
        return Ok(Stays::Spared(format!("it holds files that are not a checkpoint's: {found}")));
    }
    if contents.has(PINNED) {
        return Ok(Stays::Pinned);
    }
    let is_stale = |path: &&str| attempt_of(path).is_some_and(|it| it != record.attempt) || is_temporary(path);
    let stale = contents.own.iter().map(|own| own.path.as_str()).filter(is_stale);
    let stale: Vec<String> = stale.map(|path| format!("{dir}/{path}")).collect();
    delete(store, &stale, &[], timeout)?;
    retry(timeout, || Ok(store.put(&format!("{dir}/{LEAVING}"), &record.encode())?))?;
    retry(timeout, || Ok(store.delete(&format!("{dir}/{COMMIT}"))?))?;
    match is_there(store, &format!("{dir}/{PINNED}"), timeout)? {
        true => bring_back(store, dir, record, timeout).map(|()| Stays::Pinned),
        false => Ok(Stays::Not),
    }
}

/// Publishes the `COMMIT` of a checkpoint that was taken back.
fn bring_back(store: &dyn Store, dir: &str, record: &Commit, timeout: &Timeout) -> Result<()> {
    let bytes = retry(timeout, || commit::manifest_of(store, dir, record))?;
    are_there(store, dir, &bytes, timeout)?;
    match retry(timeout, || Ok(store.publish(&format!("{dir}/{COMMIT}"), &record.encode())?)) {
        Err(error) if error.kind != Kind::Conflict => Err(error),
        _ => retry(timeout, || Ok(store.delete(&format!("{dir}/{LEAVING}"))?)),
    }
}

/// Returns the steps of a run that are marked as leaving, ascending.
fn leaving(store: &dyn Store, url: &str, timeout: &Timeout) -> Result<Vec<u64>> {
    let mut leaving = Vec::new();
    for step in runs::list_in(store, url, timeout)?.0 {
        let has_none = matches!(step.commit, Ok(None));
        if has_none && is_there(store, &format!("{}/{LEAVING}", step_dir(step.step)), timeout)? {
            leaving.push(step.step);
        }
    }
    Ok(leaving)
}

/// Performs the second round for one checkpoint. Returns whether it deleted anything: not if the checkpoint does not
/// leave, or a foreign file is beside its files.
fn clear(store: &dyn Store, dir: &str, timeout: &Timeout) -> Result<bool> {
    let below = |path: &str| format!("{dir}/{path}");
    let record = match retry(timeout, || commit::read_record(store, &below(LEAVING))) {
        Err(error) if error.kind == Kind::NotFound => return Ok(false),
        record => record?,
    };
    // Saved again, or brought back: a list that shows it counts as much as an answer that denies it.
    if is_there(store, &below(COMMIT), timeout)? {
        return Ok(false);
    }
    let contents = contents::own(store, dir, timeout)?;
    if contents.has(COMMIT) {
        return Ok(false);
    }
    if contents.has(PINNED) {
        // A round was interrupted between its steps 4 and 5.
        return bring_back(store, dir, &record, timeout).map(|()| false);
    }
    if contents.foreign_names().is_some() {
        return Ok(false);
    }
    let is_of = |path: &str| attempt_of(path).is_some_and(|attempt| attempt == record.attempt);
    let has_others = contents.own.iter().any(|own| attempt_of(&own.path).is_some_and(|it| it != record.attempt));
    let is_index = |path: &str| path.ends_with(HUGGING_FACE_INDEX);
    let goes = |path: &str| is_of(path) || (!has_others && (is_index(path) || is_temporary(path)));
    let paths = contents.own.iter().map(|own| own.path.as_str());
    let own: Vec<String> = paths.filter(|path| goes(path)).map(below).collect();
    let dirs: Vec<String> = contents.dirs.iter().map(|path| below(path)).collect();
    delete(store, &own, &dirs, timeout)?;
    delete(store, &[below(LEAVING)], &[dir.to_owned()], timeout)?;
    Ok(true)
}

fn is_temporary(path: &str) -> bool {
    shardfast_store::is_temporary(path.rsplit('/').next().unwrap_or(path))
}

/// Deletes these objects, then those of these directories that are empty by then.
pub fn delete(store: &dyn Store, objects: &[String], dirs: &[String], timeout: &Timeout) -> Result<()> {
    fn texts(paths: &[String]) -> Vec<&str> {
        paths.iter().map(String::as_str).collect()
    }
    retry(timeout, || Ok(store.delete_all(&texts(objects), &texts(dirs))?))
}
