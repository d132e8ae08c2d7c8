//! Checkpoints that stay, whatever the rules of retention say.
//!
//! A pin is an object beside the `COMMIT`. The one who pins looks for `COMMIT` behind the pin; the one who takes a
//! checkpoint back looks for the pin behind the deletion of `COMMIT`. So one of both sees the other.

use shardfast_format::{COMMIT, PINNED};
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::timeout::Timeout;

use crate::files_exist::is_there;
use crate::runs;

/// Longest note, in bytes.
const NOTE_BYTES_MAX: u64 = 4096;

/// Pins the committed checkpoint at `url`, with a note for people; replaces an earlier note.
///
/// # Errors
/// `NotFound` when no checkpoint is committed there, or it was taken back meanwhile; `Invalid` for a note of more than
/// 4096 bytes; the store's errors.
pub fn pin(url: &str, note: &str, timeout: &Timeout) -> Result<()> {
    let found = note.len() as u64;
    if found > NOTE_BYTES_MAX {
        return Err(Error::invalid(format!(
            "pin {url}: expected a note of at most {NOTE_BYTES_MAX} bytes, found {found}"
        )));
    }
    let store = runs::store(url, timeout)?;
    expect_committed(&*store, url, timeout)?;
    retry(timeout, || Ok(store.put(PINNED, note.as_bytes())?))?;
    expect_committed(&*store, url, timeout).inspect_err(|_| _ = store.delete(PINNED))
}

fn expect_committed(store: &dyn Store, url: &str, timeout: &Timeout) -> Result<()> {
    match is_there(store, COMMIT, timeout)? {
        true => Ok(()),
        false => Err(Error::new(
            Kind::NotFound,
            format!("pin {url}: no checkpoint is committed there: its save was cut off, or it was taken back"),
        )),
    }
}

/// Removes the pin of the checkpoint at `url`. Returns whether there was one.
///
/// # Errors
/// The store's errors.
pub fn unpin(url: &str, timeout: &Timeout) -> Result<bool> {
    let store = runs::store(url, timeout)?;
    let was_pinned = is_there(&*store, PINNED, timeout)?;
    if was_pinned {
        retry(timeout, || Ok(store.delete(PINNED)?))?;
    }
    Ok(was_pinned)
}

/// Returns the note of the pin of the checkpoint at this place; `None` if it has none.
pub fn note(store: &dyn Store, timeout: &Timeout) -> Result<Option<String>> {
    match retry(timeout, || Ok(store.read(PINNED, NOTE_BYTES_MAX)?)) {
        Ok(note) => Ok(Some(String::from_utf8_lossy(&note).into_owned())),
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
