//! Simulates the cache of a network file system's client. Nothing in it expires; the client drops an answer when it
//! asks the server anew.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};

use super::SimDisk;
use crate::disk::{Errno, FileKind, Stat, Sys};

/// Memory of one client.
#[derive(Default)]
pub(super) struct Client {
    /// Paths that were absent: they are not asked for again, nor is anything below them.
    absent: BTreeSet<PathBuf>,
    stats: BTreeMap<PathBuf, Stat>,
    lists: BTreeMap<PathBuf, Vec<(OsString, FileKind)>>,
    /// Number of times that open files have become stale.
    generation: u64,
}

impl SimDisk {
    /// Returns the same disk as a client on another machine sees it, which has asked for nothing yet. Its clones are
    /// the same client.
    pub fn client(&self) -> SimDisk {
        SimDisk { client: Some(Arc::default()), ..self.clone() }
    }

    /// Makes all files that this client has open stale: calls on them fail with `ESTALE`.
    pub fn expire(&self) {
        if let Some(mut known) = self.known() {
            known.generation += 1;
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.known().map_or(0, |known| known.generation)
    }

    fn known(&self) -> Option<MutexGuard<'_, Client>> {
        Some(self.client.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes a call by a path that must be there.
    pub(super) fn by_path<T>(&self, path: &Path, call: impl FnOnce() -> Sys<T>) -> Sys<T> {
        if self.known().is_some_and(|known| path.ancestors().any(|place| known.absent.contains(place))) {
            return Err(Errno::NOENT);
        }
        let done = call();
        if let (Err(Errno::NOENT), Some(mut known)) = (&done, self.known()) {
            let ancestors: Vec<&Path> = path.ancestors().collect();
            let state = &mut self.lock();
            if let Some(missing) = ancestors.into_iter().rev().find(|place| state.find(place).is_err()) {
                known.absent.insert(missing.to_owned());
            }
        }
        done
    }

    /// Makes a call that makes a name, or removes one.
    pub(super) fn changing<T>(&self, path: &Path, call: impl FnOnce() -> Sys<T>) -> Sys<T> {
        let done = match path.parent() {
            Some(dir) => self.by_path(dir, call),
            None => call(),
        };
        if let Some(mut known) = self.known() {
            known.absent.remove(path);
            known.stats.remove(path);
            if let Some(dir) = path.parent() {
                known.lists.remove(dir);
                known.stats.remove(dir);
            }
        }
        done
    }

    /// Returns the remembered attributes of a path, or those that the call finds.
    pub(super) fn stat_by(&self, path: &Path, call: impl FnOnce() -> Sys<Stat>) -> Sys<Stat> {
        if let Some(stat) = self.known().and_then(|known| known.stats.get(path).copied()) {
            return Ok(stat);
        }
        self.by_path(path, call).inspect(|stat| {
            if let Some(mut known) = self.known() {
                known.stats.insert(path.to_owned(), *stat);
            }
        })
    }

    /// Returns the attributes of a path that the call finds, and forgets which names were absent in it.
    pub(super) fn look_by(&self, path: &Path, call: impl FnOnce() -> Sys<Stat>) -> Sys<Stat> {
        self.by_path(path, call).inspect(|stat| {
            if let Some(mut known) = self.known() {
                known.stats.insert(path.to_owned(), *stat);
                known.absent.retain(|absent| absent.parent() != Some(path));
                known.lists.remove(path);
            }
        })
    }

    /// Returns the remembered entries of a directory, or those that the call finds.
    pub(super) fn list_by(
        &self,
        path: &Path,
        call: impl FnOnce() -> Sys<Vec<(OsString, FileKind)>>,
    ) -> Sys<Vec<(OsString, FileKind)>> {
        if let Some(list) = self.known().and_then(|known| known.lists.get(path).cloned()) {
            return Ok(list);
        }
        self.by_path(path, call).inspect(|list| {
            if let Some(mut known) = self.known() {
                known.lists.insert(path.to_owned(), list.clone());
            }
        })
    }
}
