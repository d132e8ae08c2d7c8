//! Lists a checkpoint's directory, and tells Shardfast's own files from others.
//!
//! Its own are the files that the checkpoint's manifest names, and all files with names that saves give, of any
//! attempt: a crashed save leaves such files, and the next one goes to the same place. Everything else is foreign: it
//! is never deleted, and a save into a directory that holds it is refused.

use std::collections::HashSet;
use std::time::SystemTime;

use shardfast_format::{COMMIT, Manifest, is_own_path, parse_step_dir};
use shardfast_store::{Entry, Kind as Stored, Store, is_temporary};
use shardfast_transfer::error::{Error, Patience, Result, retry};
use shardfast_transfer::timeout::Timeout;

/// Levels below a checkpoint's directory that are listed: more than any checkpoint of ours has.
pub(crate) const LEVELS_MAX: usize = 8;

/// Foreign names that are looked for.
const FOREIGN_MAX: usize = 4;

/// A file of Shardfast's own.
#[derive(Debug)]
pub struct Own {
    /// Path, relative to the directory.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last change, by the store's clock.
    pub modified: Option<SystemTime>,
}

/// Contents of a directory, by paths relative to it.
#[derive(Debug, Default)]
pub struct Contents {
    /// Shardfast's own files.
    pub own: Vec<Own>,
    /// Directories, all of them below the first one.
    pub dirs: Vec<String>,
    /// Time of the last change of any of them, if directories have times.
    pub dirs_modified: Option<SystemTime>,
    /// The first few of all other names.
    pub foreign: Vec<String>,
}

/// Lists the directory `dir` of a store (`""` is its root), down to `levels` levels below it. Stops early if it finds
/// foreign files. `manifest` is that of the checkpoint there, if there is one.
///
/// # Errors
/// The store's errors. A missing directory is none.
pub(crate) fn survey(
    store: &dyn Store,
    dir: &str,
    manifest: Option<&Manifest>,
    levels: usize,
    timeout: &Timeout,
) -> Result<Contents> {
    survey_within(store, dir, manifest, levels, timeout.into(), true)
}

/// Lists all own files in the directory `dir` of a store and below it, beside any others.
///
/// # Errors
/// The store's errors. A missing directory is none.
pub fn own(store: &dyn Store, dir: &str, timeout: &Timeout) -> Result<Contents> {
    survey_within(store, dir, None, LEVELS_MAX, timeout.into(), false)
}

/// Lists like [`survey`]: retries requests for `within` at most, and may continue where it finds foreign files.
fn survey_within(
    store: &dyn Store,
    dir: &str,
    manifest: Option<&Manifest>,
    levels: usize,
    within: Patience<'_>,
    stops: bool,
) -> Result<Contents> {
    let named: HashSet<&str> = manifest.into_iter().flat_map(Manifest::files).map(|file| file.path.as_str()).collect();
    let mut contents = Contents::default();
    let mut to_do = vec![(String::new(), levels)];
    // Breadth first: files beside a `COMMIT` tell more than those deep below it.
    while let Some((below, levels)) = (!to_do.is_empty()).then(|| to_do.remove(0)) {
        for Entry { name, is_dir, is_link, bytes, modified } in list(store, &join(dir, &below), within)? {
            let path = join(&below, &name);
            if is_dir && !is_link {
                if levels > 0 {
                    to_do.push((path.clone(), levels - 1));
                }
                contents.dirs.push(path);
                contents.dirs_modified = contents.dirs_modified.max(modified);
            } else if !is_dir && (named.contains(path.as_str()) || is_own_path(&path) || is_temporary(&name)) {
                contents.own.push(Own { path, bytes, modified });
            } else if !is_silly(&name) {
                contents.foreign.push(path);
            }
            if stops && contents.foreign.len() >= FOREIGN_MAX {
                return Ok(contents);
            }
        }
        if stops && !contents.foreign.is_empty() {
            return Ok(contents);
        }
    }
    Ok(contents)
}

impl Contents {
    /// Returns whether there is a file of this path.
    pub fn has(&self, path: &str) -> bool {
        self.own.iter().any(|own| own.path == path)
    }

    /// Returns the foreign names as text; `None` if there are none.
    pub(crate) fn foreign_names(&self) -> Option<String> {
        let named = self.foreign.iter().take(FOREIGN_MAX - 1).cloned().collect::<Vec<_>>().join(", ");
        match self.foreign.len() {
            0 => None,
            found if found < FOREIGN_MAX => Some(named),
            _ => Some(format!("{named} and more")),
        }
    }
}

/// Refuses a place for a new checkpoint that holds foreign files; retries its requests for `within` at most. With
/// `levels` of 0 it examines only the directory itself.
///
/// # Errors
/// `Invalid`, naming what was found; the store's errors.
pub fn refuse_foreign<'a>(store: &dyn Store, url: &str, levels: usize, within: impl Into<Patience<'a>>) -> Result<()> {
    let contents = survey_within(store, "", None, levels, within.into(), true)?;
    if let Some(step) = contents.dirs.iter().find(|dir| parse_step_dir(dir).is_some())
        && store.size(COMMIT).is_err()
    {
        return Err(Error::invalid(format!(
            "save {url}: expected a new or empty directory, found a run, with {step} in it: name the directory of a \
             step in it, such as {url}/{step}, or another place"
        )));
    }
    match contents.foreign_names() {
        None => Ok(()),
        // Files beside a committed checkpoint do not matter: the check for `COMMIT` refuses the save.
        Some(_) if store.size(COMMIT).is_ok() => Ok(()),
        Some(found) => Err(Error::invalid(format!(
            "save {url}: expected a new or empty directory, or what a save that was cut off left there, found {found}: \
             save to a directory of its own"
        ))),
    }
}

fn list(store: &dyn Store, dir: &str, within: Patience<'_>) -> Result<Vec<Entry>> {
    let list = || match store.list(dir) {
        Err(error) if error.kind == Stored::NotFound => Ok(Vec::new()),
        entries => Ok(entries?),
    };
    retry(within, list)
}

/// Returns the path of `name` in `dir`; either may be empty.
pub fn join(dir: &str, name: &str) -> String {
    match (dir, name) {
        ("", name) => name.to_owned(),
        (dir, "") => dir.to_owned(),
        (dir, name) => format!("{dir}/{name}"),
    }
}

/// Returns whether an NFS client gives this name to a file that was removed while it was open.
fn is_silly(name: &str) -> bool {
    name.starts_with(".nfs")
}
