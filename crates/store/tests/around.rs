//! Tests a store around another one that passes everything on: it keeps the contract, and loses none of the other's
//! optimizations.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shardfast_store::disk::Errno;
use shardfast_store::local::LocalStore;
use shardfast_store::simdisk::SimDisk;
use shardfast_store::{
    Entry, Location, Needs, ObjectReader, ObjectWriter, PageCache, Requests, Result, Store, Upload, Writes,
    conformance, open,
};

struct Around {
    store: Arc<dyn Store>,
    /// Number of writes that bypassed the storage's own `write_all`.
    written: Arc<AtomicUsize>,
}

struct Writer {
    object: Box<dyn ObjectWriter>,
    written: Arc<AtomicUsize>,
}

struct Reader(Box<dyn ObjectReader>);

#[rustfmt::skip]
impl ObjectWriter for Writer {
    fn storage(&self) -> &dyn Any { self.object.storage() }
    fn alignment(&self) -> usize { self.object.alignment() }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.written.fetch_add(1, Ordering::Relaxed);
        self.object.write_at(offset, bytes)
    }
    fn finish(&mut self) -> Result<()> { self.object.finish() }
}

#[rustfmt::skip]
impl ObjectReader for Reader {
    fn bytes(&self) -> u64 { self.0.bytes() }
    fn page_cache(&self) -> Option<&dyn PageCache> { self.0.page_cache() }
    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> { self.0.read_ranges(ranges) }
    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> { self.0.read_at(at, buf) }
    fn read_again(&self, at: u64, buf: &mut [u8]) -> Result<()> { self.0.read_again(at, buf) }
}

#[rustfmt::skip]
impl Store for Around {
    fn url(&self) -> &str { self.store.url() }
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(Writer { object: self.store.create(name, bytes)?, written: Arc::clone(&self.written) }))
    }
    fn needs(&self) -> Needs { self.store.needs() }
    fn requests(&self) -> Requests { self.store.requests() }
    fn can_publish(&self) -> Result<()> { self.store.can_publish() }
    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let (object, head) = self.store.open_head(name, head_bytes)?;
        Ok((Box::new(Reader(object)), head))
    }
    fn size(&self, name: &str) -> Result<u64> { self.store.size(name) }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> { self.store.put(name, bytes) }
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> { self.store.publish(name, bytes) }
    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> { self.store.write_all(writes) }
    fn sync(&self, names: &[&str]) -> Result<()> { self.store.sync(names) }
    fn list(&self, dir: &str) -> Result<Vec<Entry>> { self.store.list(dir) }
    fn delete(&self, name: &str) -> Result<()> { self.store.delete(name) }
    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> { self.store.delete_all(objects, dirs) }
    fn delete_tree(&self, dir: &str) -> Result<()> { self.store.delete_tree(dir) }
    fn location(&self) -> Option<Location> { self.store.location() }
    fn copy_within(&self, from: &Location, source: &str, name: &str, bytes: u64) -> Result<()> {
        self.store.copy_within(from, source, name, bytes)
    }
    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()> {
        self.store.also_named(from, name, bytes)
    }
    fn kept_crc64(&self, name: &str) -> Result<Option<u64>> { self.store.kept_crc64(name) }
    fn uploads(&self) -> Result<Vec<Upload>> { self.store.uploads() }
    fn abort_upload(&self, upload: &Upload) -> Result<()> { self.store.abort_upload(upload) }
}

fn around(store: Arc<dyn Store>) -> (Arc<dyn Store>, Arc<AtomicUsize>) {
    let written = Arc::new(AtomicUsize::new(0));
    (Arc::new(Around { store, written: Arc::clone(&written) }), written)
}

#[test]
fn the_contract_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    conformance::check(|name| around(open(&format!("{}/{name}", dir.path().display())).unwrap()).0);
    conformance::check(|name| around(open(&format!("memory://around/{name}")).unwrap()).0);
}

#[test]
fn writes_go_through_the_ring_of_the_store_within() {
    for has_ring in [true, false] {
        let disk = SimDisk::new();
        if !has_ring {
            disk.refuse("ring", Errno::NOSYS);
        }
        let (store, written) = around(Arc::new(LocalStore::on(disk, Path::new("/mnt").into()).unwrap()));
        let contents = conformance::pattern(1, 5 << 20);
        conformance::write_object(&*store, "step/data", &contents).unwrap();
        assert_eq!(store.read("step/data", 5 << 20).unwrap(), contents);
        assert_eq!(written.load(Ordering::Relaxed) == 0, has_ring);
    }
}
