//! Simulates a storage that only appends, as HDFS does: each part of an object is a file of its own, written once from
//! its beginning to its end, and `finish` joins these files by one operation on their metadata.
//!
//! It shows that [`Pieces::Parts`] fits such a storage: each part is written only at its end, parts come in any order,
//! and no more of them are open at a time than [`write_all`](Store::write_all) has threads. The storage chooses that
//! number itself, so [`Needs`] does not mention it: callers pass whole parts. A store in memory keeps the joined
//! objects.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::place::join;
use crate::testing::around::Around;
use crate::{Error, Kind, Needs, ObjectWriter, Parts, Pieces, Result, Store, Writes, by_threads};

/// A store of objects whose parts are only appended to.
pub struct AppendStore {
    joined: Arc<dyn Store>,
    parts: Parts,
    open_max: usize,
    open: Arc<AtomicUsize>,
}

impl AppendStore {
    /// Makes a storage that takes objects in these parts, of which `open_max` may be open at a time. It keeps joined
    /// objects in a store in memory.
    pub fn new(joined: Arc<dyn Store>, parts: Parts, open_max: usize) -> AppendStore {
        AppendStore { joined, parts, open_max, open: Arc::default() }
    }
}

/// An object that is being written.
struct Appended {
    joined: Arc<dyn Store>,
    name: String,
    bytes: u64,
    part_bytes: u64,
    /// Bytes appended to each part, by its number.
    parts: Mutex<BTreeMap<u64, Vec<u8>>>,
    open_max: usize,
    open: Arc<AtomicUsize>,
}

impl Appended {
    fn parts(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part_bytes(&self, part: u64) -> u64 {
        self.part_bytes.min(self.bytes.saturating_sub(part * self.part_bytes))
    }

    fn is_open(&self, part: u64, written: &[u8]) -> bool {
        (written.len() as u64) < self.part_bytes(part)
    }

    fn fail(&self, op: &'static str, message: String) -> Error {
        Error::new(Kind::Invalid, op, join(self.joined.url(), &self.name), message)
    }

    /// Opens a part, or opens it anew if a write of it failed.
    fn open(&self, part: u64, was_open: bool) -> Result<()> {
        let most = if was_open { usize::MAX } else { self.open_max };
        let another = |open| (open < most).then_some(open + usize::from(!was_open));
        let opened = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, another);
        opened.map(drop).map_err(|open| {
            self.fail("write", format!("part {part}: expected at most {most} open parts, found {open} beside it"))
        })
    }
}

impl ObjectWriter for Appended {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (part, at) = (offset / self.part_bytes, offset % self.part_bytes);
        if bytes.is_empty() || at + bytes.len() as u64 > self.part_bytes(part) {
            return Err(self.fail("write", format!("part {part}: found {} bytes at {at} of it", bytes.len())));
        }
        let mut parts = self.parts();
        let was_open = parts.get(&part).is_some_and(|written| self.is_open(part, written));
        let end = parts.get(&part).map_or(0, |written| written.len() as u64);
        if at == 0 {
            self.open(part, was_open)?;
            parts.insert(part, Vec::new());
        } else if at != end {
            let what = "it is only appended to, or written anew";
            return Err(self.fail("write", format!("part {part}: {what}: expected a write at {end}, found {at}")));
        }
        let written = parts.entry(part).or_default();
        written.extend_from_slice(bytes);
        if !self.is_open(part, written) {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let parts = self.parts();
        let whole: u64 = parts.values().map(|part| part.len() as u64).sum();
        if whole != self.bytes {
            return Err(self.fail("finish", format!("expected {} bytes of its parts, found {whole}", self.bytes)));
        }
        let mut object = self.joined.create(&self.name, self.bytes)?;
        object.write_at(0, &parts.values().flatten().copied().collect::<Vec<u8>>())?;
        object.finish()
    }
}

impl Drop for Appended {
    fn drop(&mut self) {
        let open = self.parts().iter().filter(|(part, written)| self.is_open(**part, written)).count();
        self.open.fetch_sub(open, Ordering::Relaxed);
    }
}

impl Around for AppendStore {
    fn inner(&self) -> &dyn Store {
        &*self.joined
    }

    fn needs(&self) -> Needs {
        Needs { pieces: Pieces::Parts(self.parts), ..self.joined.needs() }
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        let url = self.joined.url();
        crate::name::check("create", url, name)?;
        let most = self.parts.object_bytes_max();
        if bytes > most {
            let message = format!("expected an object of at most {most} bytes, found {bytes}");
            return Err(Error::new(Kind::Exhausted, "create", join(url, name), message));
        }
        let (joined, name, parts) = (Arc::clone(&self.joined), name.to_owned(), Mutex::default());
        let (part_bytes, open_max, open) = (self.parts.of(bytes), self.open_max, Arc::clone(&self.open));
        Ok(Box::new(Appended { joined, name, bytes, part_bytes, parts, open_max, open }))
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        by_threads(self.open_max, writes)
    }
}
