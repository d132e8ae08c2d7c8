//! Storage that takes objects in parts and reads in requests.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use shardfast_engine::{
    Capture, Destination, Engine, Fences, Kind, Prove, Provider, Sink, State, Want, checkpoint, row_major_strides,
    save_to,
};
use shardfast_format::{Catalog, Dims, Leaf, LeafBody, LeafKind, LeafName, Region};
use shardfast_store::testing::appended::AppendStore;
use shardfast_store::testing::around::Around;
use shardfast_store::{
    Error, Needs, ObjectReader, ObjectWriter, PageCache, Parts, Pieces, ReadNeeds, Result, Store, Writes, by_threads,
    one_by_one,
};
use shardfast_tools::verify_in;

use crate::checkpoints::{DEADLINE, Tensor, int, object};

const MIB: u64 = 1 << 20;

#[derive(Default)]
struct Counters {
    parts: AtomicU64,
    requests: AtomicU64,
    bytes_read: AtomicU64,
    /// Parts that are still to fail once.
    to_fail: AtomicUsize,
}

/// Objects in memory that are written in parts of some length.
struct InParts {
    store: Arc<dyn Store>,
    parts: Parts,
    counters: Arc<Counters>,
}

struct Writer {
    object: Box<dyn ObjectWriter>,
    bytes: u64,
    part_bytes: u64,
    /// Bytes that came of each part.
    came: Mutex<BTreeMap<u64, u64>>,
    counters: Arc<Counters>,
}

struct Reader {
    object: Box<dyn ObjectReader>,
    counters: Arc<Counters>,
}

impl ObjectWriter for Writer {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.object.write_at(offset, bytes)?;
        *self.came.lock().unwrap().entry(offset / self.part_bytes).or_default() += bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let came = std::mem::take(&mut *self.came.lock().unwrap());
        let expected = |part: u64| self.part_bytes.min(self.bytes - part * self.part_bytes);
        let parts = self.bytes.div_ceil(self.part_bytes);
        assert_eq!(came.len() as u64, parts, "every part");
        assert!(came.iter().all(|(&part, &bytes)| bytes == expected(part)), "each part once, whole: {came:?}");
        self.counters.parts.fetch_add(parts, Ordering::Relaxed);
        self.object.finish()
    }
}

impl ObjectReader for Reader {
    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_ranges(&mut [(offset, buf)])
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        let (first, last) = (ranges.first().map_or(0, |r| r.0), ranges.iter().map(|(at, b)| at + b.len() as u64).max());
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_read.fetch_add(last.unwrap_or(first) - first, Ordering::Relaxed);
        one_by_one(&*self.object, ranges)
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

/// Hands writes on, some of which fail first.
struct Failing<'w, 'a>(&'w dyn Writes<'a>, &'w Counters);

impl<'a> Writes<'a> for Failing<'_, 'a> {
    fn next(&self, wait: bool) -> shardfast_store::Next<'a> {
        let next = self.0.next(wait);
        let less = |left: usize| left.checked_sub(1);
        match next {
            shardfast_store::Next::Write(write)
                if self.1.to_fail.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() =>
            {
                let error = Error::new(shardfast_store::Kind::Unavailable, "put", "part", "slow down");
                self.0.failed(write, error).unwrap();
                shardfast_store::Next::Later
            }
            next => next,
        }
    }

    fn failed(&self, write: shardfast_store::Write<'a>, error: Error) -> Result<()> {
        self.0.failed(write, error)
    }
}

impl Around for InParts {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn needs(&self) -> Needs {
        let reads = ReadNeeds { gap_bytes: MIB / 4, request_bytes: 8 * MIB, in_flight: 16 };
        Needs { pieces: Pieces::Parts(self.parts), reads, refuses_taken_names: true, lists_are_current: true }
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        let (object, part_bytes) = (self.store.create(name, bytes)?, self.parts.of(bytes));
        let counters = Arc::clone(&self.counters);
        Ok(Box::new(Writer { object, bytes, part_bytes, came: Mutex::default(), counters }))
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let (object, head) = self.store.open_head(name, head_bytes)?;
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        Ok((Box::new(Reader { object, counters: Arc::clone(&self.counters) }), head))
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        by_threads(3, &Failing(writes, &self.counters))
    }
}

/// A tensor that is captured in this way.
struct Captured(Vec<u8>, Capture);

impl Provider for Captured {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn capture(&self) -> Capture {
        self.1
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> shardfast_engine::Result<()> {
        out.copy_from_slice(&self.0[at as usize..][..out.len()]);
        Ok(())
    }
}

/// Tensors of two keys in order of their names, each with how it is captured.
static TENSORS: LazyLock<Vec<(&str, &str, Tensor, Capture)>> = LazyLock::new(|| {
    let tensor = |seed: u64, rows: u64| Tensor::random(seed, shardfast_format::DType::F32, &[rows, 1000]);
    vec![
        ("model", "a", tensor(1, 2500), Capture::Owned),
        ("model", "b", tensor(2, 17), Capture::Eager),
        ("model", "c", tensor(3, 700), Capture::Owned),
        ("optimizer", "m", tensor(4, 1300), Capture::Eager),
        ("optimizer", "v", tensor(5, 1), Capture::Owned),
    ]
});

fn saved(store: &Arc<dyn Store>, engine: &Arc<Engine>, url: &str, blocking: bool) -> shardfast_engine::Result<()> {
    saved_of(&TENSORS, store, engine, url, blocking)
}

fn saved_of(
    tensors: &[(&str, &str, Tensor, Capture)],
    store: &Arc<dyn Store>,
    engine: &Arc<Engine>,
    url: &str,
    blocking: bool,
) -> shardfast_engine::Result<()> {
    let (mut leaves, mut providers): (Vec<_>, Vec<Vec<Arc<dyn Provider>>>) = (Vec::new(), Vec::new());
    for &(key, name, ref tensor, capture) in tensors {
        let (shape, parts) = (Dims::from_slice(&tensor.shape), vec![Region::whole(&tensor.shape)]);
        let body = LeafBody::Tensor { dtype: tensor.dtype, shape, parts };
        let leaf = Leaf { name: LeafName::new(key, name), body, layout: String::new() };
        let bytes = vec![tensor.bytes.clone()];
        leaves.push(leaf);
        providers
            .push(bytes.into_iter().map(|bytes| Arc::new(Captured(bytes, capture)) as Arc<dyn Provider>).collect());
    }
    let (leaf, bytes) = object("zz", "step", &int(7));
    leaves.push(leaf);
    providers.push(vec![Arc::new(bytes[0].clone())]);
    let catalog = Arc::new(Catalog { leaves });
    let state = State { catalog, providers, ..State::default() };
    let destination =
        Destination { url: url.to_owned(), step: None, user: BTreeMap::new(), prove: Prove::default(), blocking };
    save_to(engine, Ok(Arc::clone(store)), destination, state, DEADLINE).committed(None)
}

fn expect_loads(store: Arc<dyn Store>, url: &str) {
    let engine = Engine::new(shardfast_coord::solo(), 32 << 20).unwrap();
    let opened = checkpoint::open_from(&engine, Ok(store), url, DEADLINE).unwrap();
    let manifest = opened.manifest();
    let (mut found, mut wants) = (Vec::new(), Vec::new());
    for leaf in 0..manifest.len() {
        let LeafKind::Tensor { dtype, .. } = manifest.leaf(leaf).kind else { continue };
        for (region, extent) in manifest.regions(leaf) {
            let strides: Vec<i64> =
                row_major_strides(&region.lengths, dtype.size_bytes()).iter().map(|&s| s as i64).collect();
            found.push((manifest.leaf(leaf).name.to_owned(), region.clone(), vec![0u8; extent.bytes as usize]));
            let address = found.last_mut().unwrap().2.as_mut_ptr() as usize;
            // SAFETY: the vector's memory stays in place during the load, and no other thread reads or writes it.
            #[allow(unsafe_code)]
            let sink = unsafe { Sink::new(address, &region.lengths, &strides, dtype.size_bytes()) };
            wants.push(Want { leaf, region, sink: sink.unwrap() });
        }
    }
    opened.load(&wants, &[], DEADLINE).unwrap();
    for (name, region, bytes) in &found {
        let of_name = TENSORS.iter().find(|(_, of, ..)| of == name).unwrap();
        assert_eq!(*region, Region::whole(&of_name.2.shape));
        assert!(*bytes == of_name.2.bytes, "{name}");
    }
    assert!(found.len() == TENSORS.len());
}

fn in_parts(name: &str, part_bytes: u64, to_fail: usize) -> (Arc<dyn Store>, Arc<Counters>, String) {
    let url = format!("memory://parts/{name}");
    let counters = Arc::new(Counters { to_fail: AtomicUsize::new(to_fail), ..Counters::default() });
    let parts = Parts { bytes_min: part_bytes, bytes_max: 16 * MIB, count_max: 10_000 };
    let store = shardfast_store::open(&url).unwrap();
    (Arc::new(InParts { store, parts, counters: Arc::clone(&counters) }), counters, url)
}

#[test]
fn every_part_is_written_once_and_whole() {
    for (part_bytes, blocking, to_fail) in
        [(MIB / 16, false, 0), (MIB / 4, true, 3), (MIB, false, 3), (3 * MIB, false, 0), (3 * MIB, true, 2)]
    {
        let (store, counters, url) = in_parts(&format!("{part_bytes}/{blocking}"), part_bytes, to_fail);
        let engine = Engine::new(shardfast_coord::solo(), 12 << 20).unwrap();
        saved(&store, &engine, &url, blocking).unwrap();
        assert_eq!(counters.to_fail.load(Ordering::Relaxed), 0);
        let Pieces::Parts(parts) = store.needs().pieces else { panic!("it takes parts") };
        let files = [12 * MIB, 4 * MIB].map(|bytes| bytes / parts.of(13 * MIB));
        let (found, least) = (counters.parts.load(Ordering::Relaxed), files.iter().sum());
        assert!(found >= least, "{found} parts of {part_bytes}, at least {least}");
        expect_loads(store, &url);
    }
}

/// Tests storage whose parts are files that grow at their end alone, few of them at a time, as that of HDFS.
#[test]
fn parts_are_appended_to_one_after_the_other_where_the_storage_has_few_at_a_time() {
    for (open_max, part_bytes, budget) in [(1, MIB / 4, 4), (1, 3 * MIB, 6), (2, 3 * MIB, 6), (3, MIB, 12)] {
        for blocking in [false, true] {
            let url = format!("memory://parts/appended/{open_max}/{part_bytes}/{blocking}");
            let parts = Parts { bytes_min: part_bytes, bytes_max: 16 * MIB, count_max: 10_000 };
            let store = AppendStore::new(shardfast_store::open(&url).unwrap(), parts, open_max);
            let store: Arc<dyn Store> = Arc::new(store);
            let engine = Engine::new(shardfast_coord::solo(), budget * MIB).unwrap();
            saved(&store, &engine, &url, blocking).unwrap();
            expect_loads(store, &url);
        }
    }
}

/// Tests that a remembered plan does not carry over the start of a file's data, which depends on the storage.
#[test]
fn one_engine_saves_to_both_kinds_of_storage() {
    let engine = Engine::new(shardfast_coord::solo(), 12 << 20).unwrap();
    for round in 0..3 {
        let (store, _, url) = in_parts(&format!("both/{round}"), MIB, 0);
        saved(&store, &engine, &url, false).unwrap();
        expect_loads(store, &url);
        let url = format!("memory://parts/plain/{round}");
        let store = shardfast_store::open(&url).unwrap();
        saved(&store, &engine, &url, false).unwrap();
        expect_loads(store, &url);
    }
}

#[test]
fn saves_at_the_same_time_do_not_wait_for_each_others_slots() {
    // One part beside the one that waits for its header.
    let engine = Engine::new(shardfast_coord::solo(), 6 << 20).unwrap();
    std::thread::scope(|threads| {
        for i in 0..6 {
            let engine = &engine;
            threads.spawn(move || {
                let (store, _, url) = in_parts(&format!("many/{i}"), 3 * MIB, 0);
                saved(&store, engine, &url, false).unwrap();
                expect_loads(store, &url);
            });
        }
    });
}

/// Tests two parts of one file with the slots of one: the part with the header must not take the slots of the other.
#[test]
fn the_slots_of_one_part_suffice_for_many() {
    let engine = Engine::new(shardfast_coord::solo(), 6 << 20).unwrap();
    for round in 0..40 {
        let (store, _, url) = in_parts(&format!("tight/{round}"), 3 * MIB, 0);
        saved(&store, &engine, &url, round % 2 == 0).unwrap();
    }
    // Three parts, and the slots of one.
    let engine = Engine::new(shardfast_coord::solo(), 4 << 20).unwrap();
    for round in 0..60 {
        let (store, _, url) = in_parts(&format!("one/{round}"), 4 * MIB, 0);
        saved_of(&TENSORS[..1], &store, &engine, &url, round % 2 == 0).unwrap();
    }
}

#[test]
fn a_budget_below_a_part_is_refused_before_the_first_byte() {
    let (store, counters, url) = in_parts("small", 3 * MIB, 0);
    let engine = Engine::new(shardfast_coord::solo(), 5 << 20).unwrap();
    let error = saved(&store, &engine, &url, false).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(error.message.contains("staging_bytes=5242880") && error.message.contains("(6 MiB)"), "{error}");
    assert_eq!(counters.parts.load(Ordering::Relaxed), 0);
    assert!(shardfast_store::open(&url).unwrap().list("").is_err(), "nothing was written");
}

#[test]
fn ranges_near_each_other_are_read_in_one_request() {
    let (store, counters, url) = in_parts("requests", 3 * MIB, 0);
    saved(&store, &Engine::new(shardfast_coord::solo(), 12 << 20).unwrap(), &url, false).unwrap();
    let before = (counters.requests.load(Ordering::Relaxed), counters.bytes_read.load(Ordering::Relaxed));
    expect_loads(store, &url);
    let requests = counters.requests.load(Ordering::Relaxed) - before.0;
    let bytes = counters.bytes_read.load(Ordering::Relaxed) - before.1;
    // COMMIT, manifest and value; each of two files one to open it, and 13 and 5 MiB.
    assert!(requests <= 3 + 2 + 2 + 1, "{requests} requests");
    assert!(bytes <= 19 * MIB, "{bytes} bytes");
}

/// Returns the requests and bytes that `work` reads.
fn asked(counters: &Counters, work: impl FnOnce()) -> (u64, u64) {
    let now = || (counters.requests.load(Ordering::Relaxed), counters.bytes_read.load(Ordering::Relaxed));
    let before = now();
    work();
    (now().0 - before.0, now().1 - before.1)
}

#[test]
fn a_verification_reads_long_ranges() {
    let (store, counters, url) = in_parts("verified", 3 * MIB, 0);
    let engine = Engine::new(shardfast_coord::solo(), 32 << 20).unwrap();
    saved(&store, &engine, &url, false).unwrap();
    let (requests, bytes) = asked(&counters, || {
        let report = verify_in(&engine, Arc::clone(&store), &url, &|_, _| ()).unwrap();
        assert!(report.is_sound() && report.bytes >= 17 * MIB, "{report:?}");
    });
    // COMMIT twice, manifest, three indexes; each of three files to open it, 8 + 5, 5 MiB and a value, which is then
    // read to be decoded, too.
    assert!(requests <= 6 + 3 + 2 + 1 + 1 + 2, "{requests} requests");
    assert!(bytes <= 19 * MIB, "{bytes} bytes");
}
