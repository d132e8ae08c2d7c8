//! A store whose process dies, meets others, or gets wrong answers.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shardfast_store::testing::around::Around;
use shardfast_store::{Entry, Error, Needs, ObjectReader, ObjectWriter, Parts, Pieces, Result, Store};

/// A store as a process with such a life has it.
pub(crate) struct Dying {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) life: Arc<Life>,
    pub(crate) in_parts: bool,
}

/// The fate of a process that works on a store: at one of its operations it is killed, or something else happens in
/// between, or it gets a wrong answer.
#[derive(Default)]
pub(crate) struct Life {
    /// Lists, and operations that change something.
    done: AtomicUsize,
    dies_at: Option<usize>,
    meanwhile: Mutex<Option<Meanwhile>>,
    commits_read: AtomicUsize,
    /// Index of the read of a `COMMIT` that finds none.
    denied: Option<usize>,
}

/// The number of an operation, and a call that is made before it.
type Meanwhile = (usize, Box<dyn FnOnce() + Send>);

impl Life {
    pub(crate) fn whole() -> Arc<Life> {
        Arc::default()
    }

    pub(crate) fn of(operations: usize) -> Arc<Life> {
        Arc::new(Life { dies_at: Some(operations), ..Life::default() })
    }

    pub(crate) fn with(at: usize, what: impl FnOnce() + Send + 'static) -> Arc<Life> {
        Arc::new(Life { meanwhile: Mutex::new(Some((at, Box::new(what)))), ..Life::default() })
    }

    pub(crate) fn denied(commit: usize) -> Arc<Life> {
        Arc::new(Life { denied: Some(commit), ..Life::default() })
    }

    fn is_over(&self) -> bool {
        self.dies_at.is_some_and(|at| self.done.load(Ordering::SeqCst) >= at)
    }

    fn goes_on(&self) -> Result<()> {
        if self.is_over() {
            return Err(Error::new(shardfast_store::Kind::Invalid, "write", "store", "the process was killed"));
        }
        let done = self.done.fetch_add(1, Ordering::SeqCst);
        let met = self.meanwhile.lock().unwrap().take_if(|(at, _)| *at == done);
        if let Some((_, what)) = met {
            what();
        }
        Ok(())
    }

    /// Simulates a read of the object `name`.
    fn reads(&self, name: &str) -> Result<()> {
        let is_commit = name.rsplit('/').next() == Some("COMMIT");
        match is_commit && Some(self.commits_read.fetch_add(1, Ordering::SeqCst)) == self.denied {
            true => Err(Error::new(shardfast_store::Kind::NotFound, "open", name, "an answer that is wrong")),
            false => Ok(()),
        }
    }
}

struct Writer {
    object: Option<Box<dyn ObjectWriter>>,
    life: Arc<Life>,
}

impl ObjectWriter for Writer {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        self.object.as_ref().map_or(1, |object| object.alignment())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.life.goes_on()?;
        self.object.as_ref().unwrap().write_at(offset, bytes)
    }

    fn finish(&mut self) -> Result<()> {
        self.life.goes_on()?;
        self.object.as_mut().unwrap().finish()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A killed process removes nothing.
        if self.life.is_over() {
            std::mem::forget(self.object.take());
        }
    }
}

impl Around for Dying {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn needs(&self) -> Needs {
        let parts = Parts { bytes_min: 64 << 10, bytes_max: 64 << 10, count_max: 10_000 };
        let pieces = if self.in_parts { Pieces::Parts(parts) } else { Pieces::Any };
        Needs { pieces, ..self.store.needs() }
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.life.goes_on()?;
        Ok(Box::new(Writer { object: Some(self.store.create(name, bytes)?), life: Arc::clone(&self.life) }))
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        self.life.reads(name)?;
        self.store.open_head(name, head_bytes)
    }

    fn size(&self, name: &str) -> Result<u64> {
        self.life.reads(name)?;
        self.store.size(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.life.goes_on()?;
        self.store.put(name, bytes)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.life.goes_on()?;
        self.store.publish(name, bytes)
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        self.life.goes_on()?;
        self.store.sync(names)
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.life.goes_on()?;
        self.store.list(dir)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.life.goes_on()?;
        self.store.delete(name)
    }

    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        self.life.goes_on()?;
        self.store.delete_all(objects, dirs)
    }

    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()> {
        self.life.goes_on()?;
        self.store.also_named(from, name, bytes)
    }
}
