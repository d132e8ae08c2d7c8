//! Checks that written files still exist, under their names and with their sizes. Metadata only: reads no byte of a
//! file.
//!
//! A save writes into a directory that has no `COMMIT` yet, and some programs remove such directories. Writes to a
//! removed file succeed, and so does its flush. So each rank checks its files before it reports them, and rank 0 checks
//! all of them before it publishes. If lists are current, only rank 0 checks, by lists.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Patience, Result, retry};

use crate::concurrently;

/// Files per thread: 64 checks take 0.4 ms on a local disk. Simulated jobs have fewer files, so that their checks have
/// an order.
const FILES_PER_THREAD: usize = 64;

/// Checks in flight: with a network file system each waits for a server.
const THREADS_MAX: usize = 16;

/// Files that a message names.
const NAMES_MAX: usize = 3;

/// Checks that each of these files exists and has its size, in bytes.
///
/// # Errors
/// `Corrupt`, naming files that are missing or have another size; the store's error if it lasts for `within`.
pub(crate) fn expect<'a>(store: &dyn Store, files: &[(String, u64)], within: impl Into<Patience<'a>>) -> Result<()> {
    let flaws = flaws(store, files, within.into())?;
    if flaws.is_empty() {
        return Ok(());
    }
    let more = match flaws.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let said: Vec<String> = flaws.into_iter().take(NAMES_MAX).map(|flaw| flaw.said).collect();
    Err(Error::new(Kind::Corrupt, format!("{}: {}{more}", store.url(), said.join("; "))))
}

/// Returns the names of those files that are missing or have another size.
///
/// # Errors
/// The store's error if it lasts for `within`.
pub fn flawed<'a>(
    store: &dyn Store,
    files: &[(String, u64)],
    within: impl Into<Patience<'a>>,
) -> Result<BTreeSet<String>> {
    Ok(flaws(store, files, within.into())?.into_iter().map(|flaw| flaw.name).collect())
}

/// Difference between a file and what was written.
struct Flaw {
    name: String,
    /// Description, with the name.
    said: String,
}

fn flaws(store: &dyn Store, files: &[(String, u64)], within: Patience<'_>) -> Result<Vec<Flaw>> {
    match store.needs().lists_are_current {
        true => flaws_in_lists(store, files, within),
        false => flaws_one_by_one(store, files, within),
    }
}

/// Returns whether there is an object of this name.
///
/// # Errors
/// The store's errors.
pub fn is_there<'a>(store: &dyn Store, name: &str, within: impl Into<Patience<'a>>) -> Result<bool> {
    match retry(within, || Ok(store.size(name)?)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind == Kind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Finds differences between files and what was written, by a list of each directory that has some. A file that a list
/// denies is asked for by its name: a bit of the list may have flipped on the way.
fn flaws_in_lists(store: &dyn Store, files: &[(String, u64)], within: Patience<'_>) -> Result<Vec<Flaw>> {
    fn parts(name: &str) -> (&str, &str) {
        name.rsplit_once('/').unwrap_or(("", name))
    }
    let dirs: Vec<&str> = files.iter().map(|(name, _)| parts(name).0).collect::<BTreeSet<_>>().into_iter().collect();
    let listed = concurrently::each(store, &dirs, |dir| -> Result<HashMap<String, u64>> {
        let list = || match store.list(dir) {
            Err(error) if error.kind == shardfast_store::Kind::NotFound => Ok(Vec::new()),
            entries => Ok(entries?),
        };
        let objects = retry(within, list)?.into_iter().filter(|entry| !entry.is_dir);
        Ok(objects.map(|entry| (entry.name, entry.bytes)).collect())
    });
    let lists: HashMap<&str, _> = dirs.into_iter().zip(listed.into_iter().collect::<Result<Vec<_>>>()?).collect();
    let is_denied = |(name, bytes): &&(String, u64)| {
        let (dir, file) = parts(name);
        lists.get(dir).and_then(|list| list.get(file)) != Some(bytes)
    };
    let denied: Vec<(String, u64)> = files.iter().filter(is_denied).cloned().collect();
    let mut flaws = Vec::new();
    for some in denied.chunks(FILES_PER_THREAD) {
        match flaws.is_empty() {
            true => flaws.extend(flaws_one_by_one(store, some, within)?),
            // Many requests would only lengthen the message.
            false => {
                flaws.extend(some.iter().map(|(name, bytes)| Flaw::of(name, format_args!("expected {bytes} bytes"))))
            }
        }
    }
    Ok(flaws)
}

/// Finds differences between files and what was written, each asked for by its name.
fn flaws_one_by_one(store: &dyn Store, files: &[(String, u64)], within: Patience<'_>) -> Result<Vec<Flaw>> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let look = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, bytes)) = files.get(at) else { return };
            let flaw = retry(within, || flaw(store, name, *bytes));
            if let Some(flaw) = flaw.transpose() {
                found.lock().unwrap_or_else(PoisonError::into_inner).push((at, flaw));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..files.len().div_ceil(FILES_PER_THREAD).min(THREADS_MAX) {
            scope.spawn(look);
        }
        look();
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, flaw)| flaw).collect()
}

impl Flaw {
    fn of(name: &str, said: impl std::fmt::Display) -> Flaw {
        Flaw { name: name.to_owned(), said: format!("{name}: {said}") }
    }
}

/// Returns the difference between a file and what was written; `None` if there is none.
fn flaw(store: &dyn Store, name: &str, bytes: u64) -> Result<Option<Flaw>> {
    let flaw = |said: &dyn std::fmt::Display| Ok(Some(Flaw::of(name, said)));
    let mut size = store.size(name);
    if size.as_ref().is_ok_and(|&found| found != bytes) {
        store.look_anew(name);
        size = store.size(name);
    }
    match size {
        Ok(found) if found == bytes => Ok(None),
        Ok(found) => flaw(&format_args!("expected {bytes} bytes, found {found}")),
        Err(error) if error.kind == shardfast_store::Kind::NotFound => {
            flaw(&format_args!("expected {bytes} bytes, found no such file"))
        }
        Err(error) if error.kind == shardfast_store::Kind::Corrupt => flaw(&error.message),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_cut_and_replaced_file_is_found_among_many() {
        let dir = tempfile::tempdir().unwrap();
        let store = shardfast_store::open(dir.path().to_str().unwrap()).unwrap();
        let files: Vec<(String, u64)> = (0..150).map(|i| (format!("d/{i:03}"), i)).collect();
        for (name, bytes) in &files {
            store.put(name, &vec![1; *bytes as usize]).unwrap();
        }
        let check = || expect(&*store, &files, std::time::Duration::ZERO);
        assert_eq!(check(), Ok(()));
        for (name, bytes) in files.iter().step_by(10) {
            let path = dir.path().join(name);
            let said = |expected: &str| {
                let error = check().unwrap_err();
                assert_eq!(error.kind, Kind::Corrupt);
                assert!(error.message.contains(&format!("{name}: expected {expected}")), "{error}");
            };
            std::fs::remove_file(&path).unwrap();
            said(&format!("{bytes} bytes, found no such file"));
            std::fs::create_dir(&path).unwrap();
            said("a file, found something else");
            std::fs::remove_dir(&path).unwrap();
            store.put(name, &vec![1; *bytes as usize + 1]).unwrap();
            said(&format!("{bytes} bytes, found {}", bytes + 1));
            store.put(name, &vec![1; *bytes as usize]).unwrap();
        }
        std::fs::remove_dir_all(dir.path().join("d")).unwrap();
        let error = check().unwrap_err();
        assert!(error.message.contains("d/000") && error.message.ends_with("; and 147 more"), "{error}");
    }
}
