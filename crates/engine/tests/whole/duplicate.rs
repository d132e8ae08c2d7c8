//! Copies of checkpoints: between stores of other kinds, interrupted at every operation, and damaged.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use shardfast_engine::{Engine, Kind, Limit, copy, copy_between, sync, verify};
use shardfast_store::{
    Entry, Error, Location, Needs, ObjectReader, ObjectWriter, Parts, Pieces, Requests, Result, Store, Upload, Writes,
    open,
};

use crate::checkpoints::{save_ranks, two_ranks};

/// A store that ends at some operation that changes something, and fails from then on: as a process that is killed.
struct Dying {
    store: Arc<dyn Store>,
    left: Arc<AtomicUsize>,
    in_parts: bool,
}

struct Writer {
    object: Option<Box<dyn ObjectWriter>>,
    left: Arc<AtomicUsize>,
}

fn alive(left: &AtomicUsize) -> Result<()> {
    let less = |left: usize| left.checked_sub(1);
    let dead = |_| Error::new(shardfast_store::Kind::Invalid, "write", "store", "the process was killed");
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).map(|_| ()).map_err(dead)
}

impl ObjectWriter for Writer {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        self.object.as_ref().map_or(1, |object| object.alignment())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        alive(&self.left)?;
        self.object.as_ref().unwrap().write_at(offset, bytes)
    }

    fn finish(&mut self) -> Result<()> {
        alive(&self.left)?;
        self.object.as_mut().unwrap().finish()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A killed process removes nothing.
        if self.left.load(Ordering::SeqCst) == 0 {
            std::mem::forget(self.object.take());
        }
    }
}

#[rustfmt::skip]
impl Store for Dying {
    fn url(&self) -> &str { self.store.url() }
    fn needs(&self) -> Needs {
        let parts = Parts { bytes_min: 64 << 10, bytes_max: 64 << 10, count_max: 10_000 };
        let pieces = if self.in_parts { Pieces::Parts(parts) } else { Pieces::Any };
        Needs { pieces, ..self.store.needs() }
    }
    fn requests(&self) -> Requests { self.store.requests() }
    fn can_publish(&self) -> Result<()> { self.store.can_publish() }
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        alive(&self.left)?;
        Ok(Box::new(Writer { object: Some(self.store.create(name, bytes)?), left: Arc::clone(&self.left) }))
    }
    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        self.store.open_head(name, head_bytes)
    }
    fn size(&self, name: &str) -> Result<u64> { self.store.size(name) }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> { alive(&self.left)?; self.store.put(name, bytes) }
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> { alive(&self.left)?; self.store.publish(name, bytes) }
    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> { self.store.write_all(writes) }
    fn sync(&self, names: &[&str]) -> Result<()> { alive(&self.left)?; self.store.sync(names) }
    fn list(&self, dir: &str) -> Result<Vec<Entry>> { self.store.list(dir) }
    fn delete(&self, name: &str) -> Result<()> { alive(&self.left)?; self.store.delete(name) }
    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> { self.store.delete_all(objects, dirs) }
    fn delete_tree(&self, dir: &str) -> Result<()> { self.store.delete_tree(dir) }
    fn location(&self) -> Option<Location> { self.store.location() }
    fn copy_within(&self, from: &Location, name: &str, bytes: u64) -> Result<()> {
        self.store.copy_within(from, name, bytes)
    }
    fn kept_crc64(&self, name: &str) -> Result<Option<u64>> { self.store.kept_crc64(name) }
    fn uploads(&self) -> Result<Vec<Upload>> { self.store.uploads() }
    fn abort_upload(&self, upload: &Upload) -> Result<()> { self.store.abort_upload(upload) }
}

/// Every object below a place, by name.
fn objects(url: &str) -> BTreeMap<String, Vec<u8>> {
    let store = open(url).unwrap();
    let (mut found, mut to_do) = (BTreeMap::new(), vec![String::new()]);
    while let Some(dir) = to_do.pop() {
        for entry in store.list(&dir).unwrap_or_default() {
            let path = if dir.is_empty() { entry.name } else { format!("{dir}/{}", entry.name) };
            match entry.is_dir {
                true => to_do.push(path),
                false => _ = found.insert(path.clone(), store.read(&path, u64::MAX).unwrap()),
            }
        }
    }
    found
}

fn silent(_: u64, _: u64) {}

#[test]
fn a_copy_is_not_faster_than_its_limit() {
    let from = save_ranks("memory://duplicate/limited", Some(7), two_ranks());
    let files = objects(&from).into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let bytes: Vec<u64> = files.map(|(_, bytes)| bytes.len() as u64).collect();
    let (total, largest) = (bytes.iter().sum::<u64>(), bytes.iter().max().unwrap());
    let begun = Instant::now();
    let limit = Limit::new(Some(4 * total));
    assert_eq!(copy(&Engine::solo(), &from, "memory://duplicate/slowly", limit, &silent).unwrap().bytes, total);
    // Each file waits until those before it have had their time.
    let least = Duration::from_secs_f64((total - largest) as f64 / (4 * total) as f64);
    assert!(begun.elapsed() >= least && !least.is_zero(), "{least:?}");
}

#[test]
fn a_copy_is_the_same_checkpoint_byte_for_byte() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/whole", Some(7), two_ranks());
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("a/copy").to_str().unwrap().to_owned();
    let copied = copy(&engine, &from, &place, Limit::new(None), &silent).unwrap();
    assert!(!copied.was_there && copied.files_found == 0 && copied.bytes > 0);
    assert!(objects(&from) == objects(&place));
    assert!(verify(&engine, &place, &silent).unwrap().is_sound());
    assert!(copy(&engine, &from, &place, Limit::new(None), &silent).unwrap().was_there);
    // And back, in parts.
    let (target, left) = (open("memory://duplicate/back").unwrap(), Arc::new(AtomicUsize::new(usize::MAX)));
    let parted = Dying { store: target, left, in_parts: true };
    let source = open(&place).unwrap();
    copy_between(&engine, (source, &place), (Arc::new(parted), "back"), &Limit::new(None), &silent).unwrap();
    assert!(objects(&from) == objects("memory://duplicate/back"));

    let other = save_ranks("memory://duplicate/other", Some(7), two_ranks());
    let error = copy(&engine, &other, &place, Limit::new(None), &silent).unwrap_err();
    assert!(error.kind == Kind::Conflict && error.message.contains("another checkpoint"), "{error}");
    assert!(objects(&from) == objects(&place), "nothing of the other one is there");
}

#[test]
fn a_copy_that_is_killed_at_any_operation_goes_on() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/killed", Some(7), two_ranks());
    let expected = objects(&from);
    for in_parts in [false, true] {
        let mut found = 0;
        for operations in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let place = dir.path().join("copy").to_str().unwrap().to_owned();
            let left = Arc::new(AtomicUsize::new(operations));
            let dying = Dying { store: open(&place).unwrap(), left, in_parts };
            let source = open(&from).unwrap();
            match copy_between(&engine, (source, &from), (Arc::new(dying), &place), &Limit::new(None), &silent) {
                Ok(_) => break,
                Err(error) => assert!(error.message.contains("the process was killed"), "{error}"),
            }
            assert!(!dir.path().join("copy/COMMIT").exists(), "after {operations} operations");
            let again = copy(&engine, &from, &place, Limit::new(None), &silent).unwrap();
            found += again.files_found;
            assert!(objects(&place) == expected, "after {operations} operations");
        }
        assert!(found > 0, "nothing was ever resumed");
    }
}

#[test]
fn damage_on_the_way_fails_the_copy_by_name() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/damaged", Some(7), two_ranks());
    let store = open(&from).unwrap();
    let names: Vec<String> = objects(&from).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
    for (round, name) in names.iter().enumerate() {
        let sound = store.read(name, u64::MAX).unwrap();
        for at in [20, sound.len() - 1] {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            store.put(name, &bytes).unwrap();
            let to = format!("memory://duplicate/to/{round}/{at}");
            let error = copy(&engine, &from, &to, Limit::new(None), &silent).unwrap_err();
            assert!(error.kind == Kind::Corrupt && error.message.contains(name.as_str()), "{error}");
            assert!(!objects(&to).contains_key("COMMIT"));
        }
        store.put(name, &sound).unwrap();
    }
}

#[test]
fn a_run_is_brought_up_to_date() {
    let engine = Engine::solo();
    let (from, to) = ("memory://duplicate/run", "memory://duplicate/run2");
    for step in [1, 2] {
        save_ranks(&format!("{from}/step-{step:08}"), Some(step), two_ranks());
    }
    open(from).unwrap().put("step-00000003/model/00000-0123456789abcdef.safetensors", b"begun").unwrap();
    let synced = sync(&engine, from, to, Limit::new(None), &silent).unwrap();
    assert_eq!((synced.checkpoints.len(), synced.incomplete.as_slice()), (2, [3].as_slice()));
    save_ranks(&format!("{from}/step-00000004"), Some(4), two_ranks());
    let synced = sync(&engine, from, to, Limit::new(None), &silent).unwrap();
    let was_there: Vec<bool> = synced.checkpoints.iter().map(|copied| copied.was_there).collect();
    assert_eq!(was_there, [true, true, false]);
    for step in [1, 2, 4] {
        let of = |run: &str| objects(&format!("{run}/step-{step:08}"));
        assert!(of(from) == of(to));
    }
    assert_eq!(
        sync(&engine, "memory://duplicate/nothing", to, Limit::new(None), &silent).unwrap_err().kind,
        Kind::NotFound
    );
}
