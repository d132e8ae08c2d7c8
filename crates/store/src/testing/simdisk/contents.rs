//! Keeps what a file or directory holds, what of it is on the medium, and what a crash leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

use super::SECTOR;
use super::chance::Chance;

pub(super) enum Inode {
    File(File),
    Dir(Dir),
}

#[derive(Default)]
pub(super) struct File {
    /// Contents that a reader sees.
    pub(super) cached: Vec<u8>,
    /// Contents that are on the medium for certain.
    pub(super) durable: Vec<u8>,
    /// Sectors of `cached` that are on their way to the medium.
    pub(super) dirty: BTreeSet<usize>,
}

#[derive(Default)]
pub(super) struct Dir {
    pub(super) cached: BTreeMap<OsString, usize>,
    pub(super) durable: BTreeMap<OsString, usize>,
    /// States since the last sync of each name that changed.
    pub(super) changes: BTreeMap<OsString, Vec<Option<usize>>>,
}

pub(super) const TEMPORARY: &str = ".tmp-";

pub(super) fn is_temporary(name: &OsStr) -> bool {
    name.to_string_lossy().starts_with(TEMPORARY)
}

impl File {
    pub(super) fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if end > self.cached.len() {
            self.resize(end);
        }
        self.cached[offset..end].copy_from_slice(bytes);
        self.dirty.extend(offset / SECTOR..end.div_ceil(SECTOR));
    }

    pub(super) fn resize(&mut self, bytes: usize) {
        let sectors = self.cached.len().min(bytes) / SECTOR..self.cached.len().max(bytes).div_ceil(SECTOR);
        self.cached.resize(bytes, 0);
        self.dirty.extend(sectors);
    }

    pub(super) fn sync(&mut self) {
        self.durable.resize(self.cached.len(), 0);
        for sector in std::mem::take(&mut self.dirty) {
            let range = sector_of(sector, self.cached.len());
            self.durable[range.clone()].copy_from_slice(&self.cached[range]);
        }
    }

    pub(super) fn after_crash(&self, chance: &mut Chance) -> Vec<u8> {
        let (old, new) = (self.durable.len(), self.cached.len());
        let length = match (chance.keeps(), chance.keeps()) {
            (false, false) => old,
            (true, true) => new,
            _ => {
                let sectors = (old.max(new) - old.min(new)) / SECTOR;
                old.min(new) + SECTOR * chance.below(sectors + 1)
            }
        };
        let mut contents = self.durable.clone();
        contents.resize(length, 0);
        for sector in 0..length.div_ceil(SECTOR) {
            let range = sector_of(sector, length);
            if self.dirty.contains(&sector) && chance.keeps() {
                let kept = range.start.min(new)..range.end.min(new);
                contents[kept.clone()].copy_from_slice(&self.cached[kept]);
            } else if range.start >= old && chance.keeps() {
                contents[range].fill(0xdb);
            }
        }
        contents
    }
}

fn sector_of(sector: usize, length: usize) -> std::ops::Range<usize> {
    let start = (sector * SECTOR).min(length);
    start..(start + SECTOR).min(length)
}

impl Dir {
    pub(super) fn set(&mut self, name: &OsStr, inode: Option<usize>) {
        match inode {
            Some(inode) => self.cached.insert(name.to_owned(), inode),
            None => self.cached.remove(name),
        };
        self.changes.entry(name.to_owned()).or_default().push(inode);
    }

    pub(super) fn sync(&mut self) {
        for name in std::mem::take(&mut self.changes).into_keys() {
            match self.cached.get(&name) {
                Some(inode) => self.durable.insert(name, *inode),
                None => self.durable.remove(&name),
            };
        }
    }

    pub(super) fn after_crash(&self, chance: &mut Chance) -> BTreeMap<OsString, usize> {
        let mut entries = self.durable.clone();
        // Names drawn by chance come last: so the same seed has the same effect on all others.
        let (temporary, named): (Vec<_>, Vec<_>) = self.changes.iter().partition(|(name, _)| is_temporary(name));
        for (name, states) in named.into_iter().chain(temporary) {
            if chance.keeps() {
                let state = if chance.keeps() { states.len() - 1 } else { chance.below(states.len()) };
                match states[state] {
                    Some(inode) => entries.insert(name.clone(), inode),
                    None => entries.remove(name),
                };
            }
        }
        entries
    }
}
