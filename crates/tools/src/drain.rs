//! Sends the checkpoints of a run from the [nearer place](shardfast_engine::levels) where they are saved to the run's
//! own.
//!
//! # Protocol
//! 1. What waits are the steps of the nearer place that the run's rules keep and that are newer than all of the run's
//!    own. One whose sending was interrupted is sent first, else the oldest, as a [copy](mod@crate::copy): `COMMIT`
//!    last, and what an interrupted copy left is not sent twice. What it left of a step that waits no more is deleted.
//! 2. Before and after its `COMMIT` is published, the job is to be the newest of the run, as for each save.
//! 3. Then the rules of the run are applied there.
//! 4. The nearer place keeps its newest two checkpoints, the one that is being sent, and those that wait. If it has no
//!    room for two more, it keeps only those of them that the run keeps whatever comes after them, by their step or as
//!    the best: others leave unsent.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shardfast_engine::levels::MEMORY;
use shardfast_engine::retention::{self, Held, Keep, Retained, Retention, Spared};
use shardfast_engine::{Engine, Job, background, checkpoint, contents, files_exist, jobs, runs};
use shardfast_format::{COMMIT, COPYING, Manifest, sha256, step_dir};
use shardfast_store::{Store, keeper, probe};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::interrupt::{Interrupt, within};
use shardfast_transfer::timeout::Timeout;

use crate::copy::{Copying, Limit, copy_while};
use crate::sweep::trim_records;

/// Newest checkpoints that a nearer place on a disk keeps.
const KEPT_NEAR: u64 = 2;

/// Newest checkpoints that a keeper's memory keeps: beside it there is room for the next one.
const KEPT_IN_MEMORY: u64 = 1;

/// Newest records of saves and loads that a keeper's memory keeps, and applications of its rules between two looks.
const RECORDS_IN_MEMORY: usize = 100;

/// Characters of the run's name in that of its nearer place.
const NAME_CHARS: usize = 48;

/// Options of URLs that say which service it is.
const SERVICE: [&str; 2] = ["endpoint=", "account="];

/// Memory for pieces on their way: several of an object store's parts.
const STAGING_BYTES: u64 = 64 << 20;

/// Returns the place of the run at `url` below the directory `local`: no other run has it.
///
/// # Errors
/// `Invalid` unless `local` is a directory, or can become one, on a disk of this machine that publishes names.
pub fn near_place(local: &str, url: &str) -> Result<String> {
    let found = probe::directory(local)?;
    found.takes_direct?;
    if let Some(mount) = found.mount.filter(|mount| mount.remembers().is_some()) {
        return Err(Error::invalid(format!(
            "{local}: expected a directory on a disk of this machine, found {} of {}, which other machines share",
            mount.file_system, mount.source
        )));
    }
    let (name, digest) = named(url);
    Ok(shardfast_store::join(local, &format!("{name}-{}", &digest[..8])))
}

/// Returns the name of the keeper of the run at `url` on this machine, and the place of the run in its memory.
pub fn memory_place(url: &str) -> (String, String) {
    let digest = named(&real(url)).1;
    let place = format!("{MEMORY}{digest}");
    (digest, place)
}

/// Returns a path as it is without links, which have many for one place; a URL as it is.
pub fn real(url: &str) -> String {
    let Some(path) = url.strip_prefix("file://").or((!url.contains("://")).then_some(url)) else {
        return url.to_owned();
    };
    let path = shardfast_store::absolute(path).unwrap_or_else(|_| path.to_owned());
    let of = |above: &Path| {
        let (found, below) = (above.canonicalize().ok()?, Path::new(&path).strip_prefix(above).ok()?);
        // An empty part would add a slash at the end.
        Some(if below.as_os_str().is_empty() { found } else { found.join(below) })
    };
    let found = Path::new(&path).ancestors().find_map(of);
    found.and_then(|found| found.into_os_string().into_string().ok()).unwrap_or(path)
}

/// Returns the last part of a run's URL, and 16 digits that no other run has.
fn named(url: &str) -> (String, String) {
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    let (_, name) = shardfast_store::split(place).unwrap_or_default();
    // Two services may have a bucket of one name; other options say how the same place is used.
    let mut which: Vec<&str> =
        options.split('&').filter(|one| SERVICE.iter().any(|name| one.starts_with(name))).collect();
    which.sort_unstable();
    let digest = sha256([place, &which.join("&")].concat().as_bytes());
    let digest = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    (name.chars().take(NAME_CHARS).collect(), digest)
}

/// Checkpoints of a run that are sent to its own place, by one rank of the job that saves them.
pub struct Drain {
    near: String,
    run: String,
    engine: Arc<Engine>,
    how: Copying,
    interrupt: Arc<Interrupt>,
    state: Mutex<State>,
    /// Rules by which the run's own place keeps checkpoints; held while they are applied.
    run_rules: Mutex<Retention>,
    /// Rules of the nearer place; held while they are applied.
    near_rules: Mutex<Rules>,
}

/// Rules that are applied to the checkpoints of the nearer place.
struct Rules {
    near: Retention,
    /// Rules of the run, of those alone that are there.
    run: Retention,
    /// Rules by which the run keeps a checkpoint whatever comes after it; `None` without one.
    lasting: Option<Retention>,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Newest step of the run's own place; `None` if it was not asked yet.
    newest: Option<Option<u64>>,
    sending: Option<u64>,
    /// Steps that this object has sent, in that order.
    sent: Vec<u64>,
    /// Steps whose sending was interrupted.
    begun: BTreeSet<u64>,
    /// Steps that cannot be sent.
    refused: BTreeSet<u64>,
    /// Steps that are sent, of a nearer place of which not all are; `None` if all are.
    chosen: Option<Chosen>,
    /// A newer job saves into the run.
    is_overtaken: bool,
    /// Number of times that the rules of the nearer place were applied.
    retained: usize,
    /// Steps that the run's rules took back, whose files are still there; `None` if that is not known.
    leaving: Option<Vec<u64>>,
}

/// Steps that are sent, of those that a nearer place has.
#[derive(Clone)]
struct Chosen {
    /// Divisor of the steps that are due.
    every: Option<u64>,
    steps: BTreeSet<u64>,
}

impl Chosen {
    fn has(&self, step: u64) -> bool {
        self.every.is_some_and(|every| step.is_multiple_of(every)) || self.steps.contains(&step)
    }
}

/// A checkpoint that was sent.
pub struct Sent {
    /// Step of the checkpoint.
    pub step: u64,
    /// Bytes of data files that were sent, without those that an interrupted copy had sent.
    pub bytes: u64,
    /// Checkpoints at the run's own place that no rule keeps, and that stay.
    pub spared: Vec<Spared>,
    /// Error of the run's rules, which does not concern the checkpoint.
    pub failure: Option<Error>,
}

impl Drain {
    /// Makes the drain of the run at `run` with the nearer place `near`, at that many bytes per second at most. Asks
    /// neither place yet.
    ///
    /// # Errors
    /// `Exhausted` without memory.
    pub fn new(near: &str, run: &str, keep: &Keep, rate: Option<u64>, timeout: Duration) -> Result<Drain> {
        let kept = if near.starts_with(MEMORY) { KEPT_IN_MEMORY } else { KEPT_NEAR };
        let last = Keep { last: Some(kept), ..Keep::default() };
        let lasting = Keep { last: None, ..keep.clone() };
        let has_lasting = lasting.every.is_some() || !lasting.best.is_empty();
        let rules = |url: &str, keep: Keep| Retention::new(url, keep).within(timeout);
        Ok(Drain {
            near: near.to_owned(),
            run: run.to_owned(),
            engine: Engine::waiting_with(Timeout::from(timeout), STAGING_BYTES)?,
            how: Copying { limit: Limit::new(rate), verify: false },
            interrupt: Arc::default(),
            state: Mutex::default(),
            run_rules: Mutex::new(rules(run, keep.clone())),
            near_rules: Mutex::new(Rules {
                near: rules(near, last),
                run: rules(near, keep.clone()),
                lasting: has_lasting.then(|| rules(near, lasting)),
            }),
        })
    }

    /// Sends and deletes from now on only while the job of that engine is the newest of the run.
    pub fn begin(&self, engine: &Engine) {
        locked(&self.state).job = engine.job(&self.run);
        locked(&self.run_rules).begin(engine.job(&self.run));
        locked(&self.near_rules).near.begin(engine.job(&self.near));
    }

    /// Sends from now on as the job whose checkpoints the nearer place has, if that is the newest of the run, and
    /// deletes nothing; returns whether it is. For a process that saves nothing itself: that job may still run.
    ///
    /// # Errors
    /// The stores' errors.
    pub fn stand_in(&self) -> Result<bool> {
        let (near, run) = (self.store(&self.near)?, self.store(&self.run)?);
        let owner = jobs::owner(&*near, &*run, self.engine.timeout().into())?;
        *locked(&self.run_rules) = Retention::new(&self.run, Keep::default());
        let mut state = locked(&self.state);
        state.job = owner;
        Ok(state.job.is_some())
    }

    /// Sends from now on only the steps that `every` divides, and those that are [chosen](Drain::choose_newest): the
    /// run's rules, which compare steps that are there, hold where they are sent to. What an earlier job has left is
    /// sent, too.
    pub fn send_every(&self, every: Option<u64>) {
        locked(&self.state).chosen = Some(Chosen { every, steps: BTreeSet::new() });
        let mut rules = locked(&self.near_rules);
        (rules.run, rules.lasting) = (Retention::new(&self.near, Keep::default()), None);
    }

    /// Has the newest step sent that the nearer place has, if the run's own place has none that is newer.
    ///
    /// # Errors
    /// The stores' errors.
    pub fn choose_newest(&self) -> Result<()> {
        // The run may have got newer steps otherwise.
        let newest = self.look()?;
        let near = runs::newest_committed(&*self.store(&self.near)?, &self.near, self.engine.timeout())?;
        let near = near.filter(|near| newest.is_none_or(|newest| *near > newest));
        if let Some(chosen) = &mut locked(&self.state).chosen {
            chosen.steps.extend(near);
        }
        Ok(())
    }

    /// Returns the newest step that the run's own place has now.
    ///
    /// # Errors
    /// The store's errors.
    pub fn reached(&self) -> Result<Option<u64>> {
        self.look()
    }

    /// Returns whether the nearer place has a checkpoint.
    ///
    /// # Errors
    /// The store's errors.
    pub fn has_any(&self) -> Result<bool> {
        let store = self.store(&self.near)?;
        Ok(runs::newest_committed(&*store, &self.near, self.engine.timeout())?.is_some())
    }

    /// Checks that the run is still at its own place, if the nearer place has checkpoints of it.
    ///
    /// # Errors
    /// `Unavailable` if nothing of the run is there any more; the stores' errors.
    pub fn expect_run(&self) -> Result<()> {
        let (near, run) = (self.store(&self.near)?, self.store(&self.run)?);
        let newest = runs::newest_committed(&*near, &self.near, self.engine.timeout())?;
        match newest {
            Some(step) if !jobs::are_there(&*run, self.engine.timeout().into())? => Err(Error::new(
                Kind::Unavailable,
                format!(
                    "{}: nothing of the run is there any more (was it moved or unmounted?), and step {step} is only at \
                     {}: bring it back, or copy that with `shardfast copy`",
                    self.run, self.near
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Ends the sending that is under way, and each one that begins later.
    pub fn stop(&self) {
        self.interrupt.ask();
    }

    /// Returns whether a newer job saves into the run, so that nothing is sent any more.
    pub fn is_overtaken(&self) -> bool {
        locked(&self.state).is_overtaken
    }

    /// Returns the newest step of the run's own place; `None` if it has none, or was not asked yet.
    pub fn newest(&self) -> Option<u64> {
        locked(&self.state).newest.flatten()
    }

    /// Sends the checkpoint that waits longest; returns `None` if none waits. The thread that calls it has the least
    /// share of the cores from then on.
    ///
    /// # Errors
    /// `Conflict` when a newer job saves into the run, or has another checkpoint of that step; `Corrupt` when the
    /// checkpoint is damaged; `NotFound` when it was removed. That one is not sent any more. The stores' errors, after
    /// which it can be tried again.
    pub fn next(&self) -> Result<Option<Sent>> {
        background::take_least();
        within(Some(Arc::clone(&self.interrupt)), || {
            let Some(step) = self.first()? else { return Ok(None) };
            let sent = self.send(step);
            locked(&self.state).sending = None;
            match sent {
                Ok(sent) => Ok(Some(sent)),
                Err(mut error) => {
                    // Unless another program has removed it meanwhile, it can be found again.
                    let is_gone = error.kind == Kind::NotFound && !self.is_near(step)?;
                    if is_gone {
                        locked(&self.state).refused.insert(step);
                        self.clear_begun(step)?;
                    } else if error.kind == Kind::NotFound {
                        error.kind = Kind::Unavailable;
                    }
                    if matches!(error.kind, Kind::Conflict | Kind::Corrupt | Kind::Unsupported) {
                        locked(&self.state).refused.insert(step);
                    }
                    Err(error.within(format_args!("{}: step {step} was not sent", self.run)))
                }
            }
        })
    }

    /// Applies the rules of the nearer place, where this process has begun to save the steps `made`. Returns also the
    /// steps that left though they waited.
    ///
    /// # Errors
    /// As [`Retention::retain`].
    pub fn retain(&self, made: &[u64]) -> Result<(Retained, Vec<u64>)> {
        let mut rules = locked(&self.near_rules);
        // What is committed from here on is not judged: it may have to be sent.
        let known = rules.near.committed()?;
        let newest = self.newest();
        let chosen = locked(&self.state).chosen.clone();
        let is_chosen = |step: &u64| chosen.as_ref().is_none_or(|chosen| chosen.has(*step));
        let is_unsent = |step: &u64| newest.is_none_or(|newest| *step > newest) && is_chosen(step);
        let waiting: BTreeSet<u64> = rules.run.wanted()?.into_iter().filter(is_unsent).collect();
        let lasting = rules.lasting.as_mut().map(Retention::wanted).transpose()?.unwrap_or_default();
        let mut steps = if self.has_room()? { waiting.clone() } else { &lasting & &waiting };
        steps.extend(locked(&self.state).sending);
        steps.extend(self.copied()?);
        let retained = rules.near.retain_beside(made, &Held { steps, known: Some(known) })?;
        let skipped = retained.left.iter().copied().filter(|step| waiting.contains(step)).collect();
        let count = {
            let mut state = locked(&self.state);
            state.retained += 1;
            state.retained
        };
        if self.near.starts_with(MEMORY) && count.is_multiple_of(RECORDS_IN_MEMORY) {
            trim_records(&*self.store(&self.near)?, RECORDS_IN_MEMORY, self.engine.timeout())?;
        }
        Ok((retained, skipped))
    }

    /// Deletes the files of checkpoints of the nearer place that were taken back.
    ///
    /// # Errors
    /// As [`Retention::clear`].
    pub fn clear(&self, steps: Option<&[u64]>) -> Result<Vec<u64>> {
        locked(&self.near_rules).near.clear(steps)
    }

    /// Returns the newest step in memory of which other machines have all copies that they are to have, and the oldest
    /// one behind it, whose copies are being made: without them the loss of a machine would cost more than the steps
    /// that have no copies yet.
    fn copied(&self) -> Result<Vec<u64>> {
        let Some(keeper) = self.near.strip_prefix(MEMORY) else { return Ok(Vec::new()) };
        let (store, mut held) = (self.store(&self.near)?, Vec::new());
        let (steps, _) = runs::list_in(&*store, &self.near, self.engine.timeout())?;
        let mut steps: Vec<u64> = steps.iter().filter(|step| step.is_committed()).map(|step| step.step).collect();
        steps.sort_unstable();
        while let Some(step) = steps.pop() {
            if keeper::uncopied(keeper, &format!("{}/", step_dir(step)))? == 0 {
                held.push(step);
                return Ok(held);
            }
            held = vec![step];
        }
        Ok(held)
    }

    /// Returns whether the nearer place has room for two more checkpoints like its newest one.
    fn has_room(&self) -> Result<bool> {
        let store = self.store(&self.near)?;
        let Some(free) = store.free_bytes() else { return Ok(true) };
        let Some(step) = runs::newest_committed(&*store, &self.near, self.engine.timeout())? else { return Ok(true) };
        let place = runs::step_url(&self.near, step);
        let manifest = match checkpoint::read(&*self.store(&place)?, &place, self.engine.timeout()) {
            Ok(bytes) => Manifest::decode(&bytes)?,
            // It leaves, or is damaged: the next one tells.
            Err(_) => return Ok(true),
        };
        let bytes = manifest.files().iter().map(|file| file.bytes).fold(0, u64::saturating_add);
        Ok(free / 2 >= bytes)
    }

    /// Returns the step to send now, which the nearer place keeps from then on: one whose sending was interrupted, or
    /// the oldest.
    fn first(&self) -> Result<Option<u64>> {
        let known = locked(&self.state).newest;
        let newest = match known {
            Some(newest) => newest,
            None => self.look()?,
        };
        // No rule is applied between the choice and the note of it.
        let mut rules = locked(&self.near_rules);
        let wanted = rules.run.wanted()?;
        let mut state = locked(&self.state);
        let is_chosen = |step: &u64| state.chosen.as_ref().is_none_or(|chosen| chosen.has(*step));
        let waits = |step: &u64| newest.is_none_or(|newest| *step > newest) && !state.refused.contains(step);
        let waiting: BTreeSet<u64> = wanted.into_iter().filter(|step| waits(step) && is_chosen(step)).collect();
        let over: Vec<u64> = state.begun.difference(&waiting).copied().collect();
        state.begun.retain(|step| waiting.contains(step));
        let first = state.begun.first().or(waiting.first()).copied();
        state.sending = first;
        drop(state);
        drop(rules);
        over.into_iter().try_for_each(|step| self.clear_begun(step))?;
        Ok(first)
    }

    /// Returns whether the nearer place has that step.
    fn is_near(&self, step: u64) -> Result<bool> {
        let commit = format!("{}/{COMMIT}", step_dir(step));
        files_exist::is_there(&*self.store(&self.near)?, &commit, self.engine.timeout())
    }

    /// Looks at the run's own place for the first time; returns its newest step.
    fn look(&self) -> Result<Option<u64>> {
        let (store, timeout) = (self.store(&self.run)?, self.engine.timeout());
        let (steps, _) = runs::list_in(&*store, &self.run, timeout)?;
        let mut begun = BTreeSet::new();
        for step in steps.iter().filter(|step| !step.is_committed()) {
            let mark = format!("{}/{COPYING}", step_dir(step.step));
            if files_exist::is_there(&*store, &mark, timeout)? {
                begun.insert(step.step);
            }
        }
        let newest = steps.iter().filter(|step| step.is_committed()).map(|step| step.step).max();
        let mut state = locked(&self.state);
        (state.newest, state.begun) = (Some(newest), begun);
        Ok(newest)
    }

    /// Deletes what an interrupted copy left of a step that waits no more, unless other files are there.
    fn clear_begun(&self, step: u64) -> Result<()> {
        self.may_commit(step, false)?;
        let (store, timeout, dir) = (self.store(&self.run)?, self.engine.timeout(), step_dir(step));
        let found = contents::own(&*store, &dir, timeout)?;
        if found.has(COMMIT) || !found.foreign.is_empty() {
            return Ok(());
        }
        let below = |path: &String| format!("{dir}/{path}");
        let paths: Vec<String> = found.own.iter().map(|own| below(&own.path)).collect();
        let dirs: Vec<String> = found.dirs.iter().map(below).chain([dir.clone()]).collect();
        retention::delete(&*store, &paths, &dirs, timeout)
    }

    fn store(&self, url: &str) -> Result<Arc<dyn Store>> {
        self.engine.store(url, self.engine.timeout())
    }

    /// Checks that the job may commit a step at the run's own place.
    fn may_commit(&self, step: u64, is_committed: bool) -> Result<()> {
        let Some(job) = locked(&self.state).job.clone() else { return Ok(()) };
        let store = self.store(&self.run);
        let store = store.as_deref().map_err(Error::clone);
        let asked = job.may_commit(store, &self.run, (Some(step), is_committed), self.engine.timeout().into());
        if asked.as_ref().is_err_and(|error| error.kind == Kind::Conflict) {
            locked(&self.state).is_overtaken = true;
        }
        asked
    }

    /// Performs steps 1 to 3 for one checkpoint.
    fn send(&self, step: u64) -> Result<Sent> {
        let (from, to) = (runs::step_url(&self.near, step), runs::step_url(&self.run, step));
        let (source, target) = (self.store(&from)?, self.store(&to)?);
        self.may_commit(step, false)?;
        let leaving = locked(&self.state).leaving.replace(Vec::new());
        let cleared = locked(&self.run_rules).clear(leaving.as_deref());
        let mut failure = cleared.err();
        if failure.is_some() {
            locked(&self.state).leaving = None;
        }
        let may_commit = || self.may_commit(step, false);
        let places = ((source, from.as_str()), (Arc::clone(&target), to.as_str()));
        let copied = copy_while(&self.engine, places, &self.how, &may_commit, &|_, _| ())?;
        if let Err(error) = self.may_commit(step, true) {
            retry(self.engine.timeout(), || Ok(target.delete(COMMIT)?))?;
            return Err(error);
        }
        let sent = {
            let mut state = locked(&self.state);
            state.newest = Some(Some(step));
            state.begun.remove(&step);
            state.sent.push(step);
            state.sent.clone()
        };
        let mut spared = Vec::new();
        match locked(&self.run_rules).retain(&sent) {
            Ok(retained) => {
                spared = retained.spared;
                if let Some(leaving) = &mut locked(&self.state).leaving {
                    leaving.extend(retained.left);
                }
            }
            Err(error) => failure = Some(error),
        }
        Ok(Sent { step, bytes: copied.bytes, spared, failure })
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_one_keeper_before_and_after_it_is_there_and_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let (run, link) = (dir.path().join("run"), dir.path().join("link"));
        let place = |path: &Path| memory_place(path.to_str().unwrap());
        let before = place(&run);
        std::fs::create_dir(&run).unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        assert_eq!(place(&run), before);
        assert_eq!(place(&link), before);
        assert_eq!(memory_place(&format!("file://{}", run.display())), before);
        assert_ne!(place(&dir.path().join("run2")), before);
        assert_ne!(memory_place("s3://b/run?endpoint=http://a"), memory_place("s3://b/run?endpoint=http://c"));
        assert_eq!(memory_place("s3://b/run?region=x"), memory_place("s3://b/run"));
    }
}
