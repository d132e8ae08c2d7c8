//! Tensors larger than staging memory and than 32-bit offsets.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use shardfast_engine::{
    Destination, Engine, Fences, Provider, RankSet, Replicas, Result, State, Want, checkpoint, save_to, staging,
};
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};
use shardfast_store::{
    Entry, Error, Kind, Needs, ObjectReader, ObjectWriter, PageCache, Service, Store, Writes, by_threads, one_by_one,
};

use crate::block::Block;
use crate::job::{Content, Job, LONG, Truth, Whole, destination};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

#[test]
fn a_tensor_larger_than_staging_memory() {
    let place = scratch();
    let url = place.path().to_str().unwrap();
    let mut dice = Dice(1);
    let name = LeafName::new("model", "w");
    let whole = Whole::random(&mut dice, DType::C64, &[16, 50, 2500]);
    let (saving, loading) = (Job::new(Layout::rows(1)), Job::new(Layout::replicas(2)));
    assert!(whole.bytes.len() as u64 > saving.engines[0].staging_bytes());
    let truth = Truth { leaves: BTreeMap::from([(name, Content::Tensor(whole))]) };
    saving.save(url, &truth, &mut dice).unwrap();
    assert_eq!(loading.compare(|engine| checkpoint::open(engine, url, LONG), &truth, &mut dice), Ok(None));
}

const GRAIN: usize = 4096;
const SPARSE_ROWS: u64 = 1032;
const SPARSE_ROW_BYTES: u64 = 4 << 20;

/// Zeros, but for its own offset in one grain of every 97.
fn sparse(at: u64, out: &mut [u8]) {
    out.fill(0);
    let end = at + out.len() as u64;
    let step = 97 * GRAIN as u64;
    for mark in (at.next_multiple_of(step)..end.saturating_sub(7)).step_by(step as usize) {
        out[(mark - at) as usize..][..8].copy_from_slice(&(mark + 1).to_le_bytes());
    }
}

struct Sparse;

impl Provider for Sparse {
    fn bytes(&self) -> u64 {
        SPARSE_ROWS * SPARSE_ROW_BYTES
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        sparse(at, out);
        Ok(())
    }
}

/// A store that keeps no zeros.
#[derive(Default)]
struct Zeroless {
    objects: Mutex<BTreeMap<String, Arc<Contents>>>,
    trouble: Arc<Trouble>,
}

/// Obstacle that keeps a store from taking data.
#[derive(Default)]
struct Trouble {
    stalled: (Mutex<bool>, Condvar),
    /// The store panics.
    has_defect: AtomicBool,
    /// Number of writes that still fail.
    failures_left: AtomicU64,
}

struct Contents {
    name: String,
    bytes: u64,
    grains: Mutex<BTreeMap<u64, Vec<u8>>>,
    trouble: Arc<Trouble>,
}

impl Zeroless {
    fn stall(&self, stalled: bool) {
        *self.trouble.stalled.0.lock().unwrap() = stalled;
        self.trouble.stalled.1.notify_all();
    }
}

impl Contents {
    fn write(&self, offset: u64, bytes: &[u8]) -> shardfast_store::Result<()> {
        let Trouble { stalled, has_defect, failures_left } = &*self.trouble;
        drop(stalled.1.wait_while(stalled.0.lock().unwrap(), |stalled| *stalled).unwrap());
        assert!(offset.is_multiple_of(GRAIN as u64));
        assert!(!has_defect.load(Ordering::SeqCst), "a defect of the store");
        let less = |left: u64| left.checked_sub(1);
        if failures_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            return Err(Error::new(Kind::Unavailable, "write", &self.name, "the network is down"));
        }
        let mut grains = self.grains.lock().unwrap();
        for (offset, grain) in (offset..).step_by(GRAIN).zip(bytes.chunks(GRAIN)) {
            if grain != &[0; GRAIN][..grain.len()] {
                grains.insert(offset, grain.to_vec());
            }
        }
        Ok(())
    }
}

struct Handle(Arc<Contents>);

impl ObjectWriter for Handle {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> shardfast_store::Result<()> {
        self.0.write(offset, bytes)
    }

    fn finish(&mut self) -> shardfast_store::Result<()> {
        Ok(())
    }
}

impl ObjectReader for Handle {
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> shardfast_store::Result<()> {
        one_by_one(self, ranges)
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> shardfast_store::Result<()> {
        self.read_at(offset, buf)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> shardfast_store::Result<()> {
        buf.fill(0);
        let end = offset + buf.len() as u64;
        for (&at, grain) in self.0.grains.lock().unwrap().range(offset / GRAIN as u64 * GRAIN as u64..end) {
            let (from, to) = (at.max(offset), (at + grain.len() as u64).min(end));
            if from < to {
                let part = &grain[(from - at) as usize..(to - at) as usize];
                buf[(from - offset) as usize..][..part.len()].copy_from_slice(part);
            }
        }
        Ok(())
    }
}

impl Store for Zeroless {
    fn url(&self) -> &str {
        "sparse"
    }

    fn create(&self, name: &str, bytes: u64) -> shardfast_store::Result<Box<dyn ObjectWriter>> {
        let (name, trouble) = (name.to_owned(), Arc::clone(&self.trouble));
        let contents = Arc::new(Contents { name: name.clone(), bytes, grains: Mutex::default(), trouble });
        self.objects.lock().unwrap().insert(name, Arc::clone(&contents));
        Ok(Box::new(Handle(contents)))
    }

    fn needs(&self) -> Needs {
        Needs::LOCAL
    }

    fn can_publish(&self) -> shardfast_store::Result<()> {
        Ok(())
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> shardfast_store::Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        match self.objects.lock().unwrap().get(name) {
            Some(contents) => {
                let object = Handle(Arc::clone(contents));
                let mut head = vec![0; object.bytes().min(head_bytes) as usize];
                object.read_at(0, &mut head)?;
                Ok((Box::new(object), head))
            }
            None => Err(Error::new(Kind::NotFound, "open", name, "no such object")),
        }
    }

    fn size(&self, name: &str) -> shardfast_store::Result<u64> {
        Ok(self.open_head(name, 0)?.0.bytes())
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> shardfast_store::Result<()> {
        by_threads(4, writes)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> shardfast_store::Result<()> {
        self.create(name, bytes.len() as u64)?.write_at(0, bytes)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> shardfast_store::Result<()> {
        self.put(name, bytes)
    }

    fn sync(&self, _names: &[&str]) -> shardfast_store::Result<()> {
        Ok(())
    }

    fn list(&self, _dir: &str) -> shardfast_store::Result<Vec<Entry>> {
        Ok(Vec::new())
    }

    fn delete(&self, name: &str) -> shardfast_store::Result<()> {
        self.objects.lock().unwrap().remove(name);
        Ok(())
    }

    fn delete_all(&self, objects: &[&str], _: &[&str]) -> shardfast_store::Result<()> {
        objects.iter().try_for_each(|name| self.delete(name))
    }

    fn delete_tree(&self, _dir: &str) -> shardfast_store::Result<()> {
        Ok(())
    }

    fn also_named(&self, _: &str, _: &str, _: u64) -> shardfast_store::Result<()> {
        Ok(())
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn service(&self) -> Option<&dyn Service> {
        None
    }
}

fn state(name: &str, dtype: DType, shape: &[u64], provider: Arc<dyn Provider>) -> State {
    let body = LeafBody::Tensor { dtype, shape: shape.into(), parts: vec![Region::whole(shape)] };
    let leaf = Leaf { name: LeafName::new("model", name), body, layout: String::new() };
    State { catalog: Arc::new(Catalog { leaves: vec![leaf] }), providers: vec![vec![provider]], ..State::default() }
}

/// 4.6 GB in one file, none of it in memory.
#[test]
fn offsets_beyond_32_bits() {
    let shape = [SPARSE_ROWS, SPARSE_ROW_BYTES / 4];
    assert!(Sparse.bytes() > u64::from(u32::MAX) + (16 << 20));
    let store: Arc<dyn Store> = Arc::new(Zeroless::default());
    let engine = Engine::new(shardfast_coord::solo(), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
    let state = state("w", DType::F32, &shape, Arc::new(Sparse));
    save_to(&engine, Ok(Arc::clone(&store)), destination("sparse"), state, LONG).committed(None).unwrap();

    let opened = checkpoint::open_from(&engine, Ok(store), "sparse", LONG).unwrap();
    assert!(opened.manifest().files()[0].bytes > Sparse.bytes());
    // The end, what lies on either side of 4 GiB, and a column through everything.
    let wide = 200_000;
    for (offsets, lengths) in [
        ([SPARSE_ROWS - 1, (1 << 20) - wide], [1, wide]),
        ([1023, (1 << 20) - wide], [1, wide]),
        ([1024, 0], [1, wide]),
        ([0, 1 << 19], [SPARSE_ROWS, 3]),
    ] {
        let mut block = Block::dense(&lengths, 4);
        let want = Want { leaf: 0, region: Region::new(&offsets, &lengths), sink: block.sink().unwrap() };
        opened.load(&[want], &[], LONG).unwrap();
        let mut row = vec![0; (lengths[1] * 4) as usize];
        let elements = block.elements();
        let mut marks = 0;
        for (i, found) in elements.chunks(row.len()).enumerate() {
            sparse((offsets[0] + i as u64) * SPARSE_ROW_BYTES + offsets[1] * 4, &mut row);
            assert!(found == row, "row {i} of {offsets:?}");
            marks += u32::from(row != vec![0; row.len()]);
        }
        assert!(marks > 0, "{offsets:?} says nothing");
    }
}

/// Counts how often it is asked.
#[derive(Default)]
struct Counted(AtomicU64);

impl Provider for Counted {
    fn bytes(&self) -> u64 {
        40 << 20
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        out.fill(1);
        Ok(())
    }
}

/// A store that does not keep up slows the copy out of the state; staging memory does not grow.
#[test]
fn a_slow_store_holds_the_copy_back() {
    let slots = staging::STAGING_BYTES_MIN / staging::SLOT_BYTES as u64;
    assert_eq!(asked_while_stalled(staging::STAGING_BYTES_MIN, false, slots), slots);
}

/// Tests that, with room for all of it, a save copies the whole state at once, and a save that is waited for goes
/// at the store's pace, however much room there is.
#[test]
fn a_blocking_save_copies_no_further_ahead_than_the_store_needs() {
    let (slots, room) = (Counted::default().bytes() / staging::SLOT_BYTES as u64, 10 * Counted::default().bytes());
    assert_eq!(asked_while_stalled(room, false, slots), slots);
    let asked = asked_while_stalled(room, true, 1);
    assert!(asked <= slots / 2, "{asked} of {slots}");
}

fn sparse_place(blocking: bool) -> Destination {
    Destination { blocking, ..destination("sparse") }
}

/// Counts the requests to a state whose store writes nothing: at least `expected`, and those that come
/// in a while after them.
fn asked_while_stalled(staging_bytes: u64, blocking: bool, expected: u64) -> u64 {
    let store = Arc::new(Zeroless::default());
    let engine = Engine::new(shardfast_coord::solo(), staging_bytes).unwrap();
    let counted = Arc::new(Counted::default());
    let state = state("w", DType::U8, &[counted.bytes()], Arc::clone(&counted) as Arc<dyn Provider>);
    store.stall(true);
    let pending = save_to(&engine, Ok(Arc::clone(&store) as Arc<dyn Store>), sparse_place(blocking), state, LONG);
    let asked = || counted.0.load(Ordering::SeqCst);
    while asked() < expected {
        assert!(!pending.done());
        thread::yield_now();
    }
    // Long enough for more, if more were to come.
    thread::sleep(Duration::from_millis(300));
    let stalled = asked();
    let is_staged = pending.staged(Some(Duration::ZERO)).is_ok();
    store.stall(false);
    pending.committed(None).unwrap();
    assert_eq!(asked(), 40);
    assert_eq!(is_staged, stalled == 40);
    stalled
}

/// Tests that after a panic of the store no thread waits to hand over its copies.
#[test]
fn a_store_that_panics_fails_the_save() {
    for blocking in [false, true] {
        let store = Arc::new(Zeroless::default());
        store.trouble.has_defect.store(true, Ordering::SeqCst);
        let engine = Engine::new(shardfast_coord::solo(), staging::STAGING_BYTES_MIN).unwrap();
        let state = state("w", DType::U8, &[40 << 20], Arc::new(Counted::default()));
        let pending = save_to(&engine, Ok(store as Arc<dyn Store>), sparse_place(blocking), state, LONG);
        let error = pending.committed(Some(Duration::from_secs(20))).unwrap_err();
        assert_eq!(error.kind, shardfast_engine::Kind::Internal, "{error}");
    }
}

/// Tests more state than staging memory, where every slot holds bytes that could not be written yet: they are written
/// from the slots, for the state may have changed. Bytes that can never be written leave no thread waiting for a slot.
#[test]
fn what_could_not_be_written_is_written_again_as_it_was_copied() {
    for (blocking, failures) in [(false, 8), (true, 8), (false, u64::MAX), (true, u64::MAX)] {
        let store = Arc::new(Zeroless::default());
        store.trouble.failures_left.store(failures, Ordering::SeqCst);
        let engine = Engine::new(shardfast_coord::solo(), staging::STAGING_BYTES_MIN).unwrap();
        let counted = Arc::new(Counted::default());
        let shape = [counted.bytes()];
        let state = state("w", DType::U8, &shape, Arc::clone(&counted) as Arc<dyn Provider>);
        let pending = save_to(&engine, Ok(Arc::clone(&store) as Arc<dyn Store>), sparse_place(blocking), state, LONG);
        let saved = pending.committed(Some(Duration::from_secs(20)));
        if failures == u64::MAX {
            let error = saved.unwrap_err();
            assert_eq!(error.kind, shardfast_engine::Kind::Unavailable);
            assert!(error.message.starts_with("write model/0"), "{error}");
            assert!(error.message.contains(": the network is down; tried 5 times in "), "{error}");
            continue;
        }
        saved.unwrap();
        assert_eq!(counted.0.load(Ordering::SeqCst), 40, "the state was asked again");
        let opened = checkpoint::open_from(&engine, Ok(store as Arc<dyn Store>), "sparse", LONG).unwrap();
        let mut block = Block::dense(&shape, 1);
        let want = Want { leaf: 0, region: Region::whole(&shape), sink: block.sink().unwrap() };
        opened.load(&[want], &[], LONG).unwrap();
        assert!(block.elements().iter().all(|&byte| byte == 1));
    }
}

/// All slots wait for their next try when another rank fails the save.
#[test]
fn a_save_that_failed_elsewhere_leaves_nobody_waiting_for_a_slot() {
    let engine = |coord| Engine::new(coord, staging::STAGING_BYTES_MIN).unwrap();
    let engines: Vec<Arc<Engine>> = shardfast_coord::local(2).into_iter().map(engine).collect();
    let store = Arc::new(Zeroless::default());
    store.trouble.failures_left.store(u64::MAX, Ordering::SeqCst);
    let counted = Arc::new(Counted::default());
    let state = state("w", DType::U8, &[counted.bytes()], counted);
    let replicas = Replicas { groups: vec![RankSet::new([0, 1])], leaves: vec![Some(0)] };
    let state = State { replicas: Some(Arc::new(replicas)), ..state };
    let opened = Ok(Arc::clone(&store) as Arc<dyn Store>);
    let pending = save_to(&engines[1], opened, destination("sparse"), state, LONG);
    while store.trouble.failures_left.load(Ordering::SeqCst) > u64::MAX - 8 {
        thread::yield_now();
    }
    let refusal = shardfast_engine::Error::new(shardfast_engine::Kind::Invalid, "not now");
    let refused = engines[0].refuse(refusal, LONG);
    let ended = pending.committed(Some(Duration::from_secs(20)));
    assert_eq!(ended.unwrap_err().message, "rank 0: not now");
    assert_eq!(refused.message, "rank 0: not now");
}
