//! Which checkpoints of a run are kept, and how the others are deleted.
//!
//! # Protocol
//! 1. The newest committed checkpoint is checked: its manifest is verified, and all its files exist with their sizes.
//!    If the check fails, nothing is deleted: the older checkpoints may be the only good ones.
//! 2. The directory of a checkpoint that no rule keeps is listed. If it holds a foreign file, the whole checkpoint
//!    stays.
//! 3. Its `COMMIT` is deleted, durably: the checkpoint stops existing before any of its data are deleted.
//! 4. Its own files are deleted, and the directories that are empty then.

use shardfast_format::{COMMIT, Manifest, step_dir};
use shardfast_store::Store;

use crate::commit;
use crate::contents;
use crate::error::{Error, Kind, Result, retry};
use crate::presence;
use crate::runs;

/// Levels below a checkpoint's directory that are listed: more than any checkpoint of ours has.
const LEVELS_MAX: usize = 8;

/// Which committed checkpoints of a run are kept: the union of the rules.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keep {
    /// The newest so many.
    pub last: Option<u64>,
    /// Those whose step is a multiple of this.
    pub every: Option<u64>,
}

/// The checkpoints that no rule keeps, deleted or not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retained {
    /// The steps of those that were deleted, ascending.
    pub deleted: Vec<u64>,
    /// Those that stay because something that is not Shardfast's is in their directory, ascending.
    pub spared: Vec<Spared>,
}

/// A checkpoint that no rule keeps, and that stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spared {
    /// Its URL.
    pub url: String,
    /// Why it stays: what was found.
    pub reason: String,
}

/// Deletes the committed checkpoints of a run that no rule keeps. The newest one is always kept, and without a rule
/// everything is. Files without a commit stay: they may belong to a save in flight. A checkpoint with a foreign file in
/// its directory stays as it is, and so does a link to a directory elsewhere.
///
/// # Errors
/// As [`runs::list`]; the store's errors; `Corrupt`, and nothing is deleted, when the newest one cannot be opened: the
/// older ones may be the only good ones. What was deleted before an error stays deleted.
pub fn retain(url: &str, keep: Keep) -> Result<Retained> {
    let mut retained = Retained::default();
    if keep.last.is_none() && keep.every.is_none() {
        return Ok(retained);
    }
    let store = runs::store(url)?;
    let committed: Vec<u64> = runs::list_in(&*store, url)?
        .into_iter()
        .filter(|step| matches!(step.commit, Ok(Some(_))))
        .map(|step| step.step)
        .collect();
    let last = keep.last.unwrap_or(0).max(1);
    let is_kept = |newer: usize, step: u64| {
        (newer as u64) < last || keep.every.is_some_and(|every| every > 0 && step.is_multiple_of(every))
    };
    let unkept = committed.iter().rev().enumerate().filter(|(newer, step)| !is_kept(*newer, **step));
    let mut unkept: Vec<u64> = unkept.map(|(_, step)| *step).collect();
    unkept.reverse();
    let (Some(&newest), false) = (committed.last(), unkept.is_empty()) else { return Ok(retained) };
    prove(&*store, url, newest)?;
    let entries = runs::entries(&*store)?;
    for step in unkept {
        let dir = step_dir(step);
        let is_link = entries.iter().any(|entry| entry.name == dir && entry.is_link);
        let reason = if is_link { Some("it is a link".to_owned()) } else { delete(&*store, step)? };
        match reason {
            Some(reason) => retained.spared.push(Spared { url: runs::step_url(url, step), reason }),
            None => retained.deleted.push(step),
        }
    }
    Ok(retained)
}

/// Step 1.
fn prove(store: &dyn Store, url: &str, step: u64) -> Result<()> {
    let (dir, url) = (step_dir(step), runs::step_url(url, step));
    let proven = retry(|| commit::read_manifest(store, &dir)).and_then(|bytes| {
        let manifest = Manifest::decode(&bytes)?;
        let files = commit::files(&manifest).map(|(path, bytes)| (format!("{dir}/{path}"), bytes));
        presence::expect(store, &files.collect::<Vec<_>>(), std::time::Duration::MAX)
    });
    proven.map_err(|error| match error.kind {
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

/// Steps 2 to 4. Returns why it stays, if it does.
fn delete(store: &dyn Store, step: u64) -> Result<Option<String>> {
    let dir = step_dir(step);
    // Without it names alone tell which files are ours.
    let manifest = retry(|| commit::read_manifest(store, &dir)).and_then(|bytes| Ok(Manifest::decode(&bytes)?));
    let contents = match contents::survey(store, &dir, manifest.ok().as_ref(), LEVELS_MAX) {
        // Probably a foreign directory: this process may not list it.
        Err(error) if error.kind == Kind::Invalid => return Ok(Some(error.message)),
        contents => contents?,
    };
    if let Some(found) = contents.foreign_names() {
        return Ok(Some(format!("it holds files that are not a checkpoint's: {found}")));
    }
    let below = |paths: &[String]| paths.iter().map(|path| format!("{dir}/{path}")).collect::<Vec<_>>();
    let (own, mut dirs) = (below(&contents.own), below(&contents.dirs));
    dirs.push(dir.clone());
    store.delete(&format!("{dir}/{COMMIT}"))?;
    store.delete_all(&texts(&own), &texts(&dirs))?;
    Ok(None)
}

fn texts(paths: &[String]) -> Vec<&str> {
    paths.iter().map(String::as_str).collect()
}
