//! Tests a store around another one that passes everything on: it keeps the contract, and loses none of the other's
//! optimizations.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shardfast_store::disk::Errno;
use shardfast_store::local::LocalStore;
use shardfast_store::testing::around::Around;
use shardfast_store::testing::conformance;
use shardfast_store::testing::simdisk::SimDisk;
use shardfast_store::{ObjectReader, ObjectWriter, PageCache, Result, Store, open};

struct Counting {
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
    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> { self.0.page_cache() }
    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> { self.0.read_ranges(ranges) }
    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> { self.0.read_at(at, buf) }
    fn read_again(&self, at: u64, buf: &mut [u8]) -> Result<()> { self.0.read_again(at, buf) }
}

impl Around for Counting {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(Writer { object: self.store.create(name, bytes)?, written: Arc::clone(&self.written) }))
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let (object, head) = self.store.open_head(name, head_bytes)?;
        Ok((Box::new(Reader(object)), head))
    }
}

fn around(store: Arc<dyn Store>) -> (Arc<dyn Store>, Arc<AtomicUsize>) {
    let written = Arc::new(AtomicUsize::new(0));
    (Arc::new(Counting { store, written: Arc::clone(&written) }), written)
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
