//! Reads that fail for a while, and bits that turn on their way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shardfast_engine::{Engine, Error, Kind, Sink, Want, checkpoint, row_major_strides};
use shardfast_format::LeafKind;
use shardfast_store::testing::around::Around;
use shardfast_store::{Entry, ObjectReader, PageCache, Result, Store, one_by_one};

use crate::checkpoints::{DEADLINE, save_ranks, two_ranks};

/// Failure of reads of a store.
#[derive(Clone, Copy)]
enum Trouble {
    /// Failure of the operation of number `at`, and of the same one `times` times in all.
    Fails { at: usize, times: usize },
    /// Flipped bit in every read of number `at` or later, `times` times in all.
    Turns { at: usize, times: usize },
}

struct State {
    trouble: Trouble,
    operations: AtomicUsize,
    /// Operation that fails, and how many times more.
    failing: Mutex<Option<(String, usize)>>,
    tried: AtomicUsize,
}

struct Troubled {
    store: Arc<dyn Store>,
    state: Arc<State>,
}

struct Reader {
    object: Box<dyn ObjectReader>,
    name: String,
    state: Arc<State>,
}

impl State {
    fn operation(&self, what: String) -> Result<usize> {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        let mut failing = self.failing.lock().unwrap();
        if let Trouble::Fails { at, times } = self.trouble
            && at == number
        {
            *failing = Some((what.clone(), times));
        }
        match &mut *failing {
            Some((name, left)) if *name == what && *left > 0 => {
                *left -= 1;
                self.tried.fetch_add(1, Ordering::Relaxed);
                Err(shardfast_store::Error::new(shardfast_store::Kind::Unavailable, "read", what, "timed out"))
            }
            _ => Ok(number),
        }
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

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let number = self.state.operation(format!("{} at {offset}", self.name))?;
        self.object.read_at(offset, buf)?;
        let is_data = self.name.ends_with(".safetensors");
        if let Trouble::Turns { at, times } = self.state.trouble
            && is_data
            && number >= at
            && self.state.tried.fetch_add(1, Ordering::Relaxed) < times
        {
            buf.iter_mut().for_each(|byte| *byte ^= 4);
        }
        Ok(())
    }
}

impl Around for Troubled {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        self.state.operation(format!("open {name}"))?;
        let (name, state) = (name.to_owned(), Arc::clone(&self.state));
        let object = Reader { object: self.store.open(&name)?, name, state };
        let mut head = vec![0; object.bytes().min(head_bytes) as usize];
        if !head.is_empty() {
            object.read_at(0, &mut head)?;
        }
        Ok((Box::new(object), head))
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.state.operation(format!("list {dir}"))?;
        self.store.list(dir)
    }
}

/// Loads every tensor from a store with that trouble; returns the bytes, and the state of the trouble.
fn load(url: &str, trouble: Trouble) -> (shardfast_engine::Result<Vec<Vec<u8>>>, Arc<State>) {
    let state =
        State { trouble, operations: AtomicUsize::new(0), failing: Mutex::default(), tried: AtomicUsize::new(0) };
    let state = Arc::new(state);
    let store = Troubled { store: shardfast_store::open(url).unwrap(), state: Arc::clone(&state) };
    let engine = Engine::new(shardfast_coord::solo(), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
    let loaded = || {
        let opened = checkpoint::open_from(&engine, Ok(Arc::new(store)), url, DEADLINE)?;
        let manifest = opened.manifest();
        let (mut memory, mut wants) = (Vec::new(), Vec::new());
        for leaf in 0..manifest.len() {
            let LeafKind::Tensor { dtype, .. } = manifest.leaf(leaf).kind else { continue };
            for (region, extent) in manifest.regions(leaf) {
                let item = dtype.size_bytes();
                let strides: Vec<i64> = row_major_strides(&region.lengths, item).iter().map(|&s| s as i64).collect();
                memory.push(vec![0u8; extent.bytes as usize]);
                let address = memory.last_mut().unwrap().as_mut_ptr() as usize;
                // SAFETY: the vector's memory does not move during the load, and nothing else uses it.
                #[allow(unsafe_code)]
                let sink = unsafe { Sink::new(address, &region.lengths, &strides, item) };
                wants.push(Want { leaf, region, sink: sink? });
            }
        }
        opened.load(&wants, &[], DEADLINE)?;
        Ok(memory)
    };
    (loaded(), state)
}

const NONE: Trouble = Trouble::Fails { at: usize::MAX, times: 0 };

/// Loads with every operation in trouble in turn, at the same time.
fn at_every_operation(
    place: &str,
    trouble: impl Fn(usize) -> Trouble + Sync,
    judge: impl Fn(shardfast_engine::Result<Vec<Vec<u8>>>, &State, &[Vec<u8>]) + Sync,
) {
    let url = save_ranks(&format!("memory://reading/{place}"), None, two_ranks());
    let (sound, state) = load(&url, NONE);
    let (sound, operations) = (sound.unwrap(), state.operations.load(Ordering::Relaxed));
    assert!(operations >= 8, "{operations} operations");
    std::thread::scope(|threads| {
        for at in 0..operations {
            let (url, sound, trouble, judge) = (&url, &sound, &trouble, &judge);
            threads.spawn(move || {
                let (loaded, state) = load(url, trouble(at));
                judge(loaded, &state, sound);
            });
        }
    });
}

#[test]
fn reads_that_fail_once_or_twice_are_made_again() {
    for times in [1, 2] {
        let trouble = |at| Trouble::Fails { at, times };
        at_every_operation(&format!("{times}"), trouble, |loaded, state, sound| {
            assert!(loaded.unwrap() == sound);
            assert_eq!(state.tried.load(Ordering::Relaxed), times);
        });
    }
}

#[test]
fn reads_that_fail_for_ever_fail_the_load_by_name() {
    let trouble = |at| Trouble::Fails { at, times: usize::MAX };
    at_every_operation("ever", trouble, |loaded, state, _| {
        let Err(Error { kind, message, .. }) = loaded else { panic!("a load without all of its reads") };
        let (what, _) = state.failing.lock().unwrap().clone().unwrap();
        assert_eq!(kind, Kind::Unavailable, "{message}");
        assert!(message.contains(&what), "{what}: {message}");
        let is_data = what.contains(".safetensors at ") && !what.ends_with(" at 0");
        assert!(!is_data || message.contains(", bytes "), "{what}: {message}");
        assert_eq!(state.tried.load(Ordering::Relaxed), 5, "{message}");
    });
}

#[test]
fn bits_that_turn_on_their_way_are_read_again_once() {
    at_every_operation(
        "once",
        |at| Trouble::Turns { at, times: 1 },
        |loaded, _, sound| {
            assert!(loaded.unwrap() == sound);
        },
    );
    at_every_operation(
        "always",
        |at| Trouble::Turns { at, times: usize::MAX },
        |loaded, state, _| {
            let is_met = state.tried.load(Ordering::Relaxed) > 0;
            assert_eq!(loaded.is_err(), is_met);
            if let Err(error) = loaded {
                assert_eq!(error.kind, Kind::Corrupt, "{error}");
                assert!(error.message.contains("read again") || error.message.contains("header"), "{error}");
            }
        },
    );
}
