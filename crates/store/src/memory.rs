//! Implements the `memory://bucket/path` backend: objects in this process's memory, for tests, demonstrations and
//! notebooks.
//!
//! Two handles on one bucket share its objects, and `memory://b/run` holds as `step/x` what `memory://b` holds as
//! `run/step/x`, just as two paths of a file system would.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use crate::objects::{Objects, Refused};
use crate::observe::{Action, Reports};
use crate::place::{self, Url, join};
use crate::write::{Writes, by_threads};
use crate::{
    Entry, Error, Fetch, Kind, Mapping, Needs, ObjectReader, ObjectWriter, PageCache, Result, Service, Shared, Store,
    WRITE_THREADS, name, one_by_one,
};

/// Buckets of this process. A URL is valid in the whole process, so its bucket must be found from anywhere in it: this
/// is the crate's only global. A bucket lives until the process ends.
static BUCKETS: LazyLock<Mutex<BTreeMap<String, Arc<Bucket>>>> = LazyLock::new(Mutex::default);

type Bucket = Objects<Arc<Vec<u8>>>;

struct MemoryStore {
    url: String,
    bucket: Arc<Bucket>,
    /// Prefix of the URL in the bucket: empty, or ending in `/`.
    prefix: String,
    reports: Reports,
}

/// Opens the URL `memory://bucket/path`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let shown = format!("memory://{}", url.location);
    let location = place::decoded(url.location.trim_end_matches('/'))
        .ok_or_else(|| Error::new(Kind::Invalid, "open", &shown, "expected percent-encoded UTF-8"))?;
    name::check("open", &shown, &location)?;
    let (bucket, prefix) = location.split_once('/').unwrap_or((&location, ""));
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    let bucket = BUCKETS.lock().unwrap_or_else(PoisonError::into_inner).entry(bucket.to_owned()).or_default().clone();
    let (url, reports) = (format!("memory://{}", place::encoded(&location)), shared.reports.clone());
    Ok(Arc::new(MemoryStore { url, bucket, prefix, reports }))
}

impl MemoryStore {
    fn key(&self, op: &'static str, name: &str) -> Result<String> {
        name::check(op, &self.url, name)?;
        Ok(format!("{}{name}", self.prefix))
    }

    /// Returns the contents of a finished object.
    fn contents(&self, name: &str) -> Result<Arc<Vec<u8>>> {
        self.done("open", name, self.bucket.get(&self.key("open", name)?))
    }

    fn done<T>(&self, op: &'static str, name: &str, done: Result<T, Refused>) -> Result<T> {
        done.or_else(|(kind, why)| self.fail(kind, op, name, why))
    }

    fn fail<T>(&self, kind: Kind, op: &'static str, name: &str, message: &str) -> Result<T> {
        Err(Error::new(kind, op, join(&self.url, name), message))
    }
}

impl Store for MemoryStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn needs(&self) -> Needs {
        Needs::LOCAL
    }

    fn can_publish(&self) -> Result<()> {
        Ok(())
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.reports.during(Action::Create, name, (0, 0), || {
            let key = self.key("create", name)?;
            let mut contents = Vec::new();
            let reserved = usize::try_from(bytes).ok().filter(|&length| contents.try_reserve_exact(length).is_ok());
            let Some(length) = reserved else {
                return self.fail(Kind::Exhausted, "create", name, &format!("no memory for {bytes} bytes"));
            };
            contents.resize(length, 0);
            let taken = Arc::default();
            self.done("create", name, self.bucket.begin(key.clone(), Arc::clone(&taken)))?;
            let (url, bucket, contents) = (join(&self.url, name), self.bucket.clone(), RwLock::new(contents));
            let (name, reports) = (name.to_owned(), self.reports.clone());
            Ok(Box::new(MemoryWriter { url, bucket, key, taken, contents, name, reports }) as Box<dyn ObjectWriter>)
        })
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let began = self.reports.begin();
        let found = self.contents(name);
        let head =
            found.as_ref().map_or(0, |contents| contents.len().min(usize::try_from(head_bytes).unwrap_or(usize::MAX)));
        self.reports.end(began, Action::Open, name, 0..head as u64, found.as_ref().err());
        let (contents, url) = (found?, join(&self.url, name));
        let head = contents[..head].to_vec();
        Ok((Box::new(MemoryReader { url, contents, name: name.to_owned(), reports: self.reports.clone() }), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        Ok(self.open_head(name, 0)?.0.bytes())
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Put, name, (0, bytes.len()), || {
            let key = self.key("put", name)?;
            self.bucket.put(key, Arc::new(bytes.to_vec()));
            Ok(())
        })
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Publish, name, (0, bytes.len()), || {
            let key = self.key("publish", name)?;
            self.done("publish", name, self.bucket.publish(key, Arc::new(bytes.to_vec())))
        })
    }

    fn also_named(&self, from: &str, name: &str, _: u64) -> Result<()> {
        self.reports.during(Action::Copy, name, (0, 0), || {
            let (source, key) = (self.key("link", from)?, self.key("link", name)?);
            self.done("link", from, self.bucket.also_named(&source, key))
        })
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        by_threads(WRITE_THREADS, writes)
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        self.reports.during(Action::Sync, names.first().unwrap_or(&""), (0, 0), || {
            names.iter().try_for_each(|name| name::check("sync", &self.url, name))
        })
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.reports.during(Action::List, dir, (0, 0), || {
            name::check_dir("list", &self.url, dir)?;
            let below = if dir.is_empty() { self.prefix.clone() } else { format!("{}{dir}/", self.prefix) };
            self.done("list", dir, self.bucket.list(&below, |contents| contents.len() as u64))
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.reports.during(Action::Delete, name, (0, 0), || {
            let key = self.key("delete", name)?;
            self.bucket.delete(&key);
            Ok(())
        })
    }

    fn delete_all(&self, objects: &[&str], _: &[&str]) -> Result<()> {
        // Directories come and go with their objects.
        objects.iter().try_for_each(|name| self.delete(name))
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.reports.during(Action::DeleteTree, dir, (0, 0), || {
            let below = format!("{}/", self.key("delete_tree", dir)?);
            self.bucket.delete_tree(&below);
            Ok(())
        })
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn service(&self) -> Option<&dyn Service> {
        None
    }
}

struct MemoryWriter {
    url: String,
    bucket: Arc<Bucket>,
    key: String,
    /// Stands under the name until the object is finished.
    taken: Arc<Vec<u8>>,
    contents: RwLock<Vec<u8>>,
    name: String,
    reports: Reports,
}

impl ObjectWriter for MemoryWriter {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Write, &self.name, (offset, bytes.len()), || self.fill(offset, bytes))
    }

    fn finish(&mut self) -> Result<()> {
        self.reports.during(Action::Finish, &self.name, (0, 0), || {
            let contents = std::mem::take(&mut *self.contents.write().unwrap_or_else(PoisonError::into_inner));
            let is_ours = |taken: &Arc<Vec<u8>>| Arc::ptr_eq(taken, &self.taken);
            let done = self.bucket.finish(&self.key, is_ours, Arc::new(contents));
            done.map_err(|(kind, why)| Error::new(kind, "finish", &self.url, why))
        })
    }
}

impl MemoryWriter {
    fn fill(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut contents = self.contents.write().unwrap_or_else(PoisonError::into_inner);
        let length = contents.len();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match contents.get_mut(start..start.saturating_add(bytes.len())) {
            Some(range) => range.copy_from_slice(bytes),
            None => {
                let message = format!("{} bytes at {offset} reach beyond the {length} bytes declared", bytes.len());
                return Err(Error::new(Kind::Invalid, "write", &self.url, message));
            }
        }
        Ok(())
    }
}

impl Drop for MemoryWriter {
    fn drop(&mut self) {
        self.bucket.give_up(&self.key, |taken| Arc::ptr_eq(taken, &self.taken));
    }
}

struct MemoryReader {
    url: String,
    contents: Arc<Vec<u8>>,
    name: String,
    reports: Reports,
}

impl ObjectReader for MemoryReader {
    fn bytes(&self) -> u64 {
        self.contents.len() as u64
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        Some(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reports.during(Action::Read, &self.name, (offset, buf.len()), || self.copy(offset, buf))
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

impl MemoryReader {
    fn copy(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match self.contents.get(start..start.saturating_add(buf.len())) {
            Some(range) => buf.copy_from_slice(range),
            None => return Err(crate::error::too_short(&self.url, self.bytes(), offset, buf.len())),
        }
        Ok(())
    }
}

impl PageCache for MemoryReader {
    fn map(&self) -> Result<Mapping> {
        let message = "this storage cannot be mapped into memory: load from it";
        Err(Error::new(Kind::Unsupported, "map", &self.url, message))
    }

    fn prefetch(&self, _: u64, _: u64, _: bool) -> Fetch {
        Fetch::Cached
    }

    fn cached_bytes(&self, _: u64, _: u64) -> Option<u64> {
        None
    }
}
