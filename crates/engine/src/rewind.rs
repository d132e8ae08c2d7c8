//! A run that goes on from an earlier step: the later ones move out of its way, and nothing is lost.
//!
//! # Protocol
//! The newest step first, so that the run has no hole wherever this is interrupted:
//! 1. Its files get second names in `<run>/abandoned-from-<first step>/step-…`, as they are, damaged or not. Storage
//!    without second names copies their bytes.
//! 2. Its `COMMIT` is published there: the checkpoint exists twice.
//! 3. Its `COMMIT` in the run is deleted, if it is still that one, and then its files.
//!
//! One that was interrupted is made again, and goes on. Where another one has moved other checkpoints of these steps
//! before, the place is `abandoned-from-<first step>-2`, and so on.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardfast_format::{COMMIT, COPYING, LEAVING, step_dir};
use shardfast_store::{Entry, Kind as Stored, Pieces, Store, is_temporary, join};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::staging::{ALIGNMENT, SLOT_BYTES};
use shardfast_transfer::timeout::Timeout;

use crate::commit::COMMIT_BYTES_MAX;
use crate::contents::{self, Contents};
use crate::engine::Engine;
use crate::jobs::{Jobs, history_end, is_nearer};
use crate::levels;
use crate::retention;
use crate::runs::{self, Step};

/// Begins the name of each directory of abandoned steps.
pub(crate) const ABANDONED: &str = "abandoned-";

/// Steps that moved out of the way of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rewound {
    /// URL of the run.
    pub url: String,
    /// The steps, ascending.
    pub moved: Vec<u64>,
    /// The URL of the run that they are now; `None` if there were none.
    pub into: Option<String>,
}

/// Moves the committed checkpoints of the run at `url` whose step is `from` or higher out of its way, to a run of their
/// own below it. None of it is read, so damaged ones move, too. If there are such, a job that saves there is overtaken,
/// as by another job: its next save is refused, so that it does not put later steps into the run again.
///
/// # Errors
/// `NotFound` when no run is there; `Invalid` where a step is a link, or holds files that are not a checkpoint's, and
/// for the nearer place of a run;
/// `Conflict` where a step is saved again meanwhile; the store's errors. Steps that moved before the error have moved;
/// it can be made again.
pub fn rewind(url: &str, from: u64, timeout: &Timeout) -> Result<Rewound> {
    let store = runs::store(url, timeout)?;
    if is_nearer(&*store, timeout.into())? {
        return Err(Error::invalid(format!(
            "rewind {url}: this is the place of a run on a local disk, and the run's own place decides what of it \
             counts: use Checkpointer(..., local=..., rewind=True) and restore(state, step=...)"
        )));
    }
    if runs::list_in(&*store, url, timeout)?.0.iter().any(|step| step.step >= from && step.is_committed()) {
        Jobs::default().begin(&*store, url, (&shardfast_coord::solo().meeting().0, from), timeout)?;
    }
    rewind_in(&*store, url, from, timeout)
}

/// Rewinds like [`rewind()`] in a store that is open. No job is overtaken.
///
/// # Errors
/// As [`rewind()`].
pub fn rewind_in(store: &dyn Store, url: &str, from: u64, timeout: &Timeout) -> Result<Rewound> {
    let (steps, entries) = runs::list_in(store, url, timeout)?;
    if steps.is_empty() {
        return Err(Error::new(Kind::NotFound, format!("rewind {url}: there is no run with a step")));
    }
    rewound(store, url, from, &steps, &entries, timeout)
}

/// Ensures that a training whose next step is `step` may save into the run at `url`: that this holds no committed
/// checkpoint of that step or a later one, which the training would not have made. With `rewind` those move out of the
/// way. Makes the engine's job the newest of the run, as [`jobs`](crate::jobs) describes. If the run has the nearer
/// place `near`, all of that holds there too, with its own flag in place of `rewind`; what [does not
/// count](crate::levels) there moves out of the way anyhow. Returns what moved in each place. Every rank of the engine
/// must call it.
///
/// # Errors
/// The same on every rank: `Conflict`, with what to do, if there are such checkpoints, or another job begins at the
/// same moment; as [`rewind()`].
pub fn begin(
    engine: &Arc<Engine>,
    (url, near): (&str, Option<(&str, bool)>),
    step: u64,
    rewind: bool,
    deadline: Duration,
) -> Result<Vec<Rewound>> {
    let operation = engine.begin(format!("begin {url} at step {step}"), deadline);
    operation.agree("open", Ok((step, rewind)), |ranks| {
        if let Some(rank) = ranks.iter().position(|&asked| asked != (step, rewind)) {
            let found = ranks[rank];
            return Err(Error::invalid(format!(
                "{url}: rank {rank} begins otherwise than rank 0 (step and rewind: {found:?} against {:?})",
                (step, rewind)
            )));
        }
        let timeout = Timeout::of_call(deadline);
        let run = Place::look(engine, url, step, &timeout)?;
        // A job that is refused does not stop the one that saves there.
        if !rewind {
            run.expect_none(step, &run.committed())?;
        }
        let near = near.map(|near| Place::look_near(engine, near, &run, step, &timeout)).transpose()?;
        let job = engine.jobs.begin(&*run.store, url, (&engine.meeting(), step), &timeout)?;
        let mut rewound: Vec<Rewound> = run.moved(&timeout)?.into_iter().collect();
        if let Some(near) = near {
            let places = ((&*run.store, url), (&*near.store, near.url));
            engine.jobs.adopt(places.0, places.1, (&job, step), (&timeout).into())?;
            // Another job may have committed there until now, and commits no more.
            let near = Place::look(engine, near.url, near.from, &timeout)?;
            rewound.extend(near.moved(&timeout)?.map(|moved| near.dropped(moved, &timeout)).transpose()?);
        }
        Ok(vec![rewound; ranks.len()])
    })
}

/// Makes the job of the engine, which saves into the run at `url`, that of the nearer place `near` as well: one that
/// was lost, and is begun anew with `step`. One rank calls it.
///
/// # Errors
/// `Invalid` unless the job saves into the run; `Conflict` when a newer one does; the stores' errors.
pub fn adopt(engine: &Engine, url: &str, near: &str, step: u64) -> Result<()> {
    let timeout = Timeout::default();
    let job = engine.job(url).ok_or_else(|| Error::invalid(format!("{url}: this job has not begun to save there")))?;
    let (run, store) = (engine.store(url, &timeout)?, engine.store(near, &timeout)?);
    engine.jobs.adopt((&*run, url), (&*store, near), (&job, step), (&timeout).into())
}

/// A place into which a training is to save, and what it holds from a step on.
struct Place<'a> {
    url: &'a str,
    store: Arc<dyn Store>,
    from: u64,
    steps: Vec<Step>,
    entries: Vec<Entry>,
}

impl<'a> Place<'a> {
    fn look(engine: &Engine, url: &'a str, from: u64, timeout: &Timeout) -> Result<Place<'a>> {
        let store = engine.store(url, timeout)?;
        let (steps, entries) = runs::list_from(&*store, url, from, timeout)?;
        Ok(Place { url, store, from, steps, entries })
    }

    /// Looks at the nearer place at `url` of a run: at the steps from `step` on, and those that do not count. Refuses
    /// the training if some are later and count, unless they move.
    fn look_near(
        engine: &Engine,
        (url, moves): (&'a str, bool),
        run: &Place<'_>,
        step: u64,
        timeout: &Timeout,
    ) -> Result<Place<'a>> {
        let end = history_end(&*engine.store(url, timeout)?, &*run.store, timeout.into())?;
        let near = Place::look(engine, url, end.map_or(step, |end| end.min(step)), timeout)?;
        let counts = |one: &u64| *one >= step && end.is_none_or(|end| *one < end);
        let later: Vec<u64> = near.committed().into_iter().filter(counts).collect();
        if let (Some(newest), false) = (later.last(), moves) {
            return Err(Error::new(
                Kind::Conflict,
                format!(
                    "{url}: a training at step {step} cannot save there: it has {} later steps of the \
                     run, up to step {newest}, and a restart would restore them instead of what the training saves: \
                     restore the newest one first, and go on from there; or move them out of the way: \
                     Checkpointer(..., rewind=True)",
                    later.len()
                ),
            ));
        }
        Ok(near)
    }

    fn committed(&self) -> Vec<u64> {
        self.steps.iter().filter(|step| step.is_committed()).map(|step| step.step).collect()
    }

    /// Refuses a training at `step` if these committed steps are in its way.
    fn expect_none(&self, step: u64, later: &[u64]) -> Result<()> {
        later.last().map_or(Ok(()), |newest| Err(refusal(self.url, step, later.len(), *newest)))
    }

    /// Deletes what was moved, if the place is in memory: there is no room for what does not count.
    fn dropped(&self, moved: Rewound, timeout: &Timeout) -> Result<Rewound> {
        let Some(into) = moved.into.as_deref().filter(|_| self.url.starts_with(levels::MEMORY)) else {
            return Ok(moved);
        };
        let dir = into.rsplit('/').next().unwrap_or_default();
        retry(timeout, || Ok(self.store.delete_tree(dir)?))?;
        Ok(Rewound { into: None, ..moved })
    }

    /// Moves the committed steps out of the way.
    fn moved(&self, timeout: &Timeout) -> Result<Option<Rewound>> {
        if self.committed().is_empty() {
            return Ok(None);
        }
        rewound(&*self.store, self.url, self.from, &self.steps, &self.entries, timeout).map(Some)
    }
}

fn refusal(url: &str, step: u64, later: usize, newest: u64) -> Error {
    let (are, them) = if later == 1 { ("checkpoint", "it") } else { ("checkpoints", "them") };
    Error::new(
        Kind::Conflict,
        format!(
            "{url}: a training at step {step} cannot save there: the run holds {later} committed {are} of this step or \
             a later one, up to step {newest}, and a restart would restore {them} instead of what the training saves. \
             Save to another directory; or restore the newest one first, and go on from there; or move {them} out of \
             the way: `shardfast rewind {url} --to {}`, or Checkpointer(..., rewind=True)",
            step.saturating_sub(1)
        ),
    )
}

/// Rewinds like [`rewind()`] a run whose root has these entries and steps.
fn rewound(
    store: &dyn Store,
    url: &str,
    from: u64,
    steps: &[Step],
    entries: &[Entry],
    timeout: &Timeout,
) -> Result<Rewound> {
    let mut moving: Vec<Moving> = Vec::new();
    for step in steps.iter().filter(|step| step.step >= from && step.is_committed()) {
        moving.push(Moving::look(store, url, step.step, entries, timeout)?);
    }
    let mut rewound = Rewound { url: url.to_owned(), moved: Vec::new(), into: None };
    if moving.is_empty() {
        return Ok(rewound);
    }
    let place = place(store, from, &moving, timeout)?;
    rewound.into = Some(join(url, &place));
    for step in moving.iter().rev() {
        step.go(store, &place, timeout)?;
        rewound.moved.insert(0, step.step);
    }
    Ok(rewound)
}

/// Returns the first place for these steps where none of them has another checkpoint.
fn place(store: &dyn Store, from: u64, moving: &[Moving], timeout: &Timeout) -> Result<String> {
    let first = format!("{ABANDONED}from-{from:08}");
    let is_free = |place: &str| -> Result<bool> {
        for step in moving {
            if commit_at(store, &step.at(place), timeout)?.is_some_and(|there| there != step.commit) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let mut place = first.clone();
    for number in 2_u64.. {
        if is_free(&place)? {
            break;
        }
        place = format!("{first}-{number}");
    }
    Ok(place)
}

/// Reads the bytes of the `COMMIT` in a directory, valid or not.
fn commit_at(store: &dyn Store, dir: &str, timeout: &Timeout) -> Result<Option<Vec<u8>>> {
    match retry(timeout, || Ok(store.read(&contents::join(dir, COMMIT), COMMIT_BYTES_MAX)?)) {
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        bytes => bytes.map(Some),
    }
}

/// A committed step that moves.
struct Moving {
    step: u64,
    dir: String,
    commit: Vec<u8>,
    contents: Contents,
}

impl Moving {
    /// Examines the step's directory, and checks that it can be moved.
    fn look(store: &dyn Store, url: &str, step: u64, entries: &[Entry], timeout: &Timeout) -> Result<Moving> {
        let dir = step_dir(step);
        let refuse = |what: &str| {
            Error::invalid(format!("rewind {url}: {dir} cannot be moved: {what}: move it by hand, or save elsewhere"))
        };
        if entries.iter().any(|entry| entry.name == dir && entry.is_link) {
            return Err(refuse("it is a link"));
        }
        let contents = contents::survey(store, &dir, None, contents::LEVELS_MAX, timeout)?;
        if let Some(found) = contents.foreign_names() {
            return Err(refuse(&format!("it holds files that are not a checkpoint's ({found})")));
        }
        let commit = commit_at(store, &dir, timeout)?.ok_or_else(|| {
            let message = format!("rewind {url}: the {COMMIT} of {dir} is not there any more: look, and rewind again");
            Error::new(Kind::Conflict, message)
        })?;
        Ok(Moving { step, dir, commit, contents })
    }

    fn at(&self, place: &str) -> String {
        format!("{place}/{}", self.dir)
    }

    /// Returns the paths to move, with their lengths; all but `COMMIT`, which comes last.
    fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        let stays = |path: &str| {
            [COMMIT, LEAVING, COPYING].contains(&path) || is_temporary(path.rsplit('/').next().unwrap_or(path))
        };
        self.contents.own.iter().map(|own| (own.path.as_str(), own.bytes)).filter(move |(path, _)| !stays(path))
    }

    /// Performs steps 1 to 3.
    fn go(&self, store: &dyn Store, place: &str, timeout: &Timeout) -> Result<()> {
        let (from, to) =
            (|path: &str| format!("{}/{path}", self.dir), |path: &str| format!("{}/{path}", self.at(place)));
        if commit_at(store, &self.at(place), timeout)?.is_none() {
            for (path, bytes) in self.files() {
                move_file(store, &from(path), &to(path), bytes, timeout)?;
            }
            let names: Vec<String> = self.files().map(|(path, _)| to(path)).collect();
            retry(timeout, || Ok(store.sync(&names.iter().map(String::as_str).collect::<Vec<_>>())?))?;
            match retry(timeout, || Ok(store.publish(&to(COMMIT), &self.commit)?)) {
                // Another rewind was first, or an answer was lost: compared below.
                Err(error) if error.kind == Kind::Conflict => {}
                published => published?,
            }
        }
        let (here, there) = (commit_at(store, &self.dir, timeout)?, commit_at(store, &self.at(place), timeout)?);
        if [here, there].iter().any(|found| found.as_ref().is_some_and(|found| *found != self.commit)) {
            return Err(Error::new(
                Kind::Conflict,
                format!("{}: it was saved or moved by another program meanwhile: look, and rewind again", from("")),
            ));
        }
        retry(timeout, || Ok(store.delete(&from(COMMIT))?))?;
        let gone: Vec<String> = self.contents.own.iter().map(|own| from(&own.path)).collect();
        let dirs = self.contents.dirs.iter().map(|path| from(path)).chain([self.dir.clone()]);
        retention::delete(store, &gone, &dirs.collect::<Vec<_>>(), timeout)
    }
}

/// Performs step 1 for one file.
fn move_file(store: &dyn Store, from: &str, to: &str, bytes: u64, timeout: &Timeout) -> Result<()> {
    match retry(timeout, || Ok(store.also_named(from, to, bytes)?)) {
        Err(error) if error.kind == Kind::Unsupported => copy_file(store, from, to, timeout),
        named => named,
    }
}

/// Copies a file inside a store, as it is.
fn copy_file(store: &dyn Store, from: &str, to: &str, timeout: &Timeout) -> Result<()> {
    let source = retry(timeout, || Ok(store.open(from)?))?;
    let bytes = source.bytes();
    let piece_bytes = match store.needs().pieces {
        Pieces::Any => SLOT_BYTES as u64,
        Pieces::Parts(parts) => parts.of(bytes),
    };
    let mut object = retry(timeout, || match store.create(to, bytes) {
        // Left by a rewind that was interrupted.
        Err(error) if error.kind == Stored::Conflict => {
            store.delete(to)?;
            Ok(store.create(to, bytes)?)
        }
        created => Ok(created?),
    })?;
    let mut memory = vec![0; piece_bytes as usize + 2 * ALIGNMENT];
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    for offset in (0..bytes).step_by(piece_bytes as usize) {
        let length = piece_bytes.min(bytes - offset) as usize;
        let padded = length.next_multiple_of(object.alignment());
        let piece = &mut memory[start..start + padded];
        piece[length..].fill(0);
        retry(timeout, || Ok(source.read_at(offset, &mut piece[..length])?))?;
        retry(timeout, || Ok(object.write_at(offset, piece)?))?;
    }
    retry(timeout, || Ok(object.finish()?))
}
