//! A store that fails where a test wants it to.

use std::ops::Range;
use std::sync::Arc;

use shardfast_store::testing::around::Around;
use shardfast_store::{Error, Kind, ObjectReader, PageCache, Result, Store, one_by_one};

/// The store beneath, with these faults.
pub(crate) struct Faulty {
    pub(crate) store: Arc<dyn Store>,
    /// An object and bytes of it that cannot be read.
    pub(crate) bad_sector: Option<(String, Range<u64>)>,
    /// An object that cannot be opened.
    pub(crate) closed: Option<String>,
    /// Kind of the error of both.
    pub(crate) kind: Kind,
    /// `true` if `sync` fails because the disk is full.
    pub(crate) sync_fails: bool,
}

impl Faulty {
    /// Returns the store without a fault. The errors of those that are set are of kind `Unavailable`.
    pub(crate) fn over(store: Arc<dyn Store>) -> Faulty {
        Faulty { store, bad_sector: None, closed: None, kind: Kind::Unavailable, sync_fails: false }
    }
}

struct BadReader {
    object: Box<dyn ObjectReader>,
    bytes: Option<Range<u64>>,
    kind: Kind,
}

impl ObjectReader for BadReader {
    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match &self.bytes {
            Some(bad) if offset < bad.end && bad.start < offset + buf.len() as u64 => {
                Err(Error::new(self.kind, "read", "disk", "input/output error"))
            }
            _ => self.object.read_at(offset, buf),
        }
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

impl Around for Faulty {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        if self.closed.as_deref() == Some(name) {
            return Err(Error::new(self.kind, "open", name, "refused"));
        }
        let is_bad = |(path, _): &&(String, Range<u64>)| path == name;
        let bytes = self.bad_sector.as_ref().filter(is_bad).map(|(_, bytes)| bytes.clone());
        let object = BadReader { object: self.store.open(name)?, bytes, kind: self.kind };
        let mut head = vec![0; object.bytes().min(head_bytes) as usize];
        object.read_at(0, &mut head)?;
        Ok((Box::new(object), head))
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        if self.sync_fails {
            return Err(Error::new(Kind::Exhausted, "fsync", "disk", "no space left on device"));
        }
        self.store.sync(names)
    }
}
