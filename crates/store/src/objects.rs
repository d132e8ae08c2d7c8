//! Names of objects in memory, in their order, with what each one holds.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::{Entry, Kind};

/// Objects by their whole names. A name is taken when its writer begins, and read once it has finished.
pub struct Objects<T>(Mutex<BTreeMap<String, Slot<T>>>);

struct Slot<T> {
    contents: T,
    is_finished: bool,
    /// Time of its begin, or of its end.
    modified: SystemTime,
}

/// Refusal of a call, with its reason.
pub type Refused = (Kind, &'static str);

const TAKEN: Refused = (Kind::Conflict, "the name is taken");
const REPLACED: Refused = (Kind::Conflict, "deleted or replaced while written");

impl<T> Default for Objects<T> {
    fn default() -> Self {
        Objects(Mutex::default())
    }
}

impl<T: Clone> Objects<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot<T>>> {
        // Nothing panics between two changes of the map, so that it is consistent even if the lock is poisoned.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a free name for a writer.
    ///
    /// # Errors
    /// `Conflict` if it is taken.
    pub fn begin(&self, name: String, contents: T) -> Result<(), Refused> {
        self.add(name, contents, false)
    }

    /// Stores an object under a free name.
    ///
    /// # Errors
    /// `Conflict` if it is taken.
    pub fn publish(&self, name: String, contents: T) -> Result<(), Refused> {
        self.add(name, contents, true)
    }

    fn add(&self, name: String, contents: T, is_finished: bool) -> Result<(), Refused> {
        let mut slots = self.lock();
        if slots.contains_key(&name) {
            return Err(TAKEN);
        }
        slots.insert(name, Slot { contents, is_finished, modified: SystemTime::now() });
        Ok(())
    }

    /// Stores an object, in place of one that has the name.
    pub fn put(&self, name: String, contents: T) {
        self.lock().insert(name, Slot { contents, is_finished: true, modified: SystemTime::now() });
    }

    /// Makes an object that is being written, and that `is_ours`, readable with these contents.
    ///
    /// # Errors
    /// `Conflict` if the name is not its any more.
    pub fn finish(&self, name: &str, is_ours: impl Fn(&T) -> bool, contents: T) -> Result<(), Refused> {
        match self.lock().get_mut(name) {
            Some(slot) if !slot.is_finished && is_ours(&slot.contents) => {
                *slot = Slot { contents, is_finished: true, modified: SystemTime::now() };
                Ok(())
            }
            _ => Err(REPLACED),
        }
    }

    /// Frees the name of an object that `is_ours` and was not finished.
    pub fn give_up(&self, name: &str, is_ours: impl Fn(&T) -> bool) {
        let mut slots = self.lock();
        if slots.get(name).is_some_and(|slot| !slot.is_finished && is_ours(&slot.contents)) {
            slots.remove(name);
        }
    }

    /// Removes the name of an object that `is_ours`.
    pub fn remove(&self, name: &str, is_ours: impl Fn(&T) -> bool) {
        let mut slots = self.lock();
        if slots.get(name).is_some_and(|slot| is_ours(&slot.contents)) {
            slots.remove(name);
        }
    }

    /// Returns the contents of a finished object.
    ///
    /// # Errors
    /// `NotFound` without one.
    pub fn get(&self, name: &str) -> Result<T, Refused> {
        match self.lock().get(name) {
            Some(slot) if slot.is_finished => Ok(slot.contents.clone()),
            Some(_) => Err((Kind::NotFound, "the object is not finished")),
            None => Err((Kind::NotFound, "no such object")),
        }
    }

    /// Returns whether the name is taken, also by a writer.
    pub fn holds(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Gives a finished object a second name, in place of one that has it.
    ///
    /// # Errors
    /// `NotFound` without such an object.
    pub fn also_named(&self, from: &str, name: String) -> Result<(), Refused> {
        let contents = self.get(from)?;
        self.put(name, contents);
        Ok(())
    }

    /// Lists the directory whose names begin with `below`: empty, or ending in `/`. `bytes` returns an object's length.
    ///
    /// # Errors
    /// `NotFound` if nothing is in it.
    pub fn list(&self, below: &str, bytes: impl Fn(&T) -> u64) -> Result<Vec<Entry>, Refused> {
        let mut entries: Vec<Entry> = Vec::new();
        for (key, slot) in self.lock().range::<str, _>((Bound::Included(below), Bound::Unbounded)) {
            let Some(rest) = key.strip_prefix(below) else { break };
            let (name, is_dir) = rest.split_once('/').map_or((rest, false), |(name, _)| (name, true));
            if entries.last().is_some_and(|last| last.name == name) {
                continue;
            }
            let bytes = if is_dir || !slot.is_finished { 0 } else { bytes(&slot.contents) };
            let modified = (!is_dir).then_some(slot.modified);
            entries.push(Entry { name: name.to_owned(), is_dir, is_link: false, bytes, modified });
        }
        if entries.is_empty() {
            return Err((Kind::NotFound, "no such directory"));
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Removes a name; one that is absent is fine.
    pub fn delete(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Removes all names that begin with `below`.
    pub fn delete_tree(&self, below: &str) {
        self.lock().retain(|key, _| !key.starts_with(below));
    }

    /// Calls `see` with each name, its contents and whether it is finished.
    pub fn each(&self, mut see: impl FnMut(&str, &T, bool)) {
        self.lock().iter().for_each(|(name, slot)| see(name, &slot.contents, slot.is_finished));
    }
}
