//! Stores around another one, for tests: a double says what differs, and passes everything else on.

use crate::{Entry, Needs, ObjectReader, ObjectWriter, Result, Service, Store, Writes};

/// A [`Store`] around another one. Each method passes the call on unless the double has its own.
pub trait Around: Send + Sync {
    /// Returns the store that it is around.
    fn inner(&self) -> &dyn Store;

    /// Passes [`Store::needs`] on by default.
    fn needs(&self) -> Needs {
        self.inner().needs()
    }

    /// Passes [`Store::can_publish`] on by default.
    fn can_publish(&self) -> Result<()> {
        self.inner().can_publish()
    }

    /// Passes [`Store::create`] on by default.
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.inner().create(name, bytes)
    }

    /// Passes [`Store::open_head`] on by default.
    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        self.inner().open_head(name, head_bytes)
    }

    /// Passes [`Store::size`] on by default.
    fn size(&self, name: &str) -> Result<u64> {
        self.inner().size(name)
    }

    /// Passes [`Store::put`] on by default.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.inner().put(name, bytes)
    }

    /// Passes [`Store::publish`] on by default.
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.inner().publish(name, bytes)
    }

    /// Passes [`Store::also_named`] on by default.
    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()> {
        self.inner().also_named(from, name, bytes)
    }

    /// Passes [`Store::write_all`] on by default.
    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        self.inner().write_all(writes)
    }

    /// Passes [`Store::sync`] on by default.
    fn sync(&self, names: &[&str]) -> Result<()> {
        self.inner().sync(names)
    }

    /// Passes [`Store::list`] on by default.
    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.inner().list(dir)
    }

    /// Passes [`Store::delete`] on by default.
    fn delete(&self, name: &str) -> Result<()> {
        self.inner().delete(name)
    }

    /// Passes [`Store::delete_all`] on by default.
    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        self.inner().delete_all(objects, dirs)
    }

    /// Passes [`Store::delete_tree`] on by default.
    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.inner().delete_tree(dir)
    }

    /// Passes [`Store::service`] on by default.
    fn service(&self) -> Option<&dyn Service> {
        self.inner().service()
    }
}

#[rustfmt::skip]
impl<T: Around> Store for T {
    fn url(&self) -> &str { self.inner().url() }
    fn needs(&self) -> Needs { Around::needs(self) }
    fn can_publish(&self) -> Result<()> { Around::can_publish(self) }
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> { Around::create(self, name, bytes) }
    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        Around::open_head(self, name, head_bytes)
    }
    fn size(&self, name: &str) -> Result<u64> { Around::size(self, name) }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> { Around::put(self, name, bytes) }
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> { Around::publish(self, name, bytes) }
    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()> {
        Around::also_named(self, from, name, bytes)
    }
    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> { Around::write_all(self, writes) }
    fn sync(&self, names: &[&str]) -> Result<()> { Around::sync(self, names) }
    fn list(&self, dir: &str) -> Result<Vec<Entry>> { Around::list(self, dir) }
    fn delete(&self, name: &str) -> Result<()> { Around::delete(self, name) }
    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> { Around::delete_all(self, objects, dirs) }
    fn delete_tree(&self, dir: &str) -> Result<()> { Around::delete_tree(self, dir) }
    fn free_bytes(&self) -> Option<u64> { self.inner().free_bytes() }
    fn service(&self) -> Option<&dyn Service> { Around::service(self) }
}
