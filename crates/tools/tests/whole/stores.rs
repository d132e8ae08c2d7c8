//! A store that fails where a test wants it to.

use std::ops::Range;
use std::sync::Arc;

use shardfast_store::{
    Entry, Error, Kind, Needs, ObjectReader, ObjectWriter, PageCache, Result, Store, Upload, Writes, one_by_one,
};

/// The store beneath, with these faults.
pub(crate) struct Faulty {
    pub(crate) store: Arc<dyn Store>,
    /// An object and bytes of it that cannot be read.
    pub(crate) bad_sector: Option<(String, Range<u64>)>,
    /// `true` if `sync` fails because the disk is full.
    pub(crate) sync_fails: bool,
}

struct BadReader {
    object: Box<dyn ObjectReader>,
    bytes: Option<Range<u64>>,
}

impl ObjectReader for BadReader {
    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match &self.bytes {
            Some(bad) if offset < bad.end && bad.start < offset + buf.len() as u64 => Err(shardfast_store::Error::new(
                shardfast_store::Kind::Unavailable,
                "read",
                "disk",
                "input/output error",
            )),
            _ => self.object.read_at(offset, buf),
        }
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

impl Store for Faulty {
    fn url(&self) -> &str {
        self.store.url()
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.store.create(name, bytes)
    }

    fn needs(&self) -> Needs {
        self.store.needs()
    }

    fn requests(&self) -> shardfast_store::Requests {
        self.store.requests()
    }

    fn can_publish(&self) -> Result<()> {
        self.store.can_publish()
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let is_bad = |(path, _): &&(String, Range<u64>)| path == name;
        let bytes = self.bad_sector.as_ref().filter(is_bad).map(|(_, bytes)| bytes.clone());
        let object = BadReader { object: self.store.open(name)?, bytes };
        let mut head = vec![0; object.bytes().min(head_bytes) as usize];
        object.read_at(0, &mut head)?;
        Ok((Box::new(object), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        self.store.size(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.store.put(name, bytes)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.store.publish(name, bytes)
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        self.store.write_all(writes)
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        if self.sync_fails {
            return Err(Error::new(Kind::Exhausted, "fsync", "disk", "no space left on device"));
        }
        self.store.sync(names)
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.store.list(dir)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.store.delete(name)
    }

    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        self.store.delete_all(objects, dirs)
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.store.delete_tree(dir)
    }

    fn location(&self) -> Option<shardfast_store::Location> {
        self.store.location()
    }

    fn copy_within(
        &self,
        from: &shardfast_store::Location,
        source: &str,
        name: &str,
        bytes: u64,
    ) -> shardfast_store::Result<()> {
        self.store.copy_within(from, source, name, bytes)
    }
    fn also_named(&self, from: &str, name: &str, bytes: u64) -> shardfast_store::Result<()> {
        self.store.also_named(from, name, bytes)
    }

    fn kept_crc64(&self, name: &str) -> Result<Option<u64>> {
        self.store.kept_crc64(name)
    }

    fn uploads(&self) -> Result<Vec<Upload>> {
        self.store.uploads()
    }

    fn abort_upload(&self, upload: &Upload) -> Result<()> {
        self.store.abort_upload(upload)
    }
}
