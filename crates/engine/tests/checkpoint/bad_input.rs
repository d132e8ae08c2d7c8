//! Tests impossible saves and loads: one clear error, the same on every rank, in bounded time, and nothing
//! half-visible.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use shardfast_engine::{Engine, Error, Fences, Kind, Pending, Provider, Result, State, Want, checkpoint, save};
use shardfast_format::{
    COMMIT, Catalog, Commit, DType, Leaf, LeafBody, LeafName, Owner, Region, crc64, hugging_face_index, step_dir,
};
use shardfast_plan::Replicas;
use shardfast_store::Store;
use shardfast_store::disk::Errno;
use shardfast_store::local::LocalStore;
use shardfast_store::testing::around::Around;
use shardfast_store::testing::simdisk::SimDisk;

use crate::block::Block;
use crate::job::{Content, Job, LONG, Truth, Whole, alike, destination, outcomes};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// Time that counts as at once, on a busy machine.
const PROMPT: Duration = Duration::from_secs(30);

fn truth(seed: u64) -> Truth {
    Truth::small(seed, 50)
}

fn two_ranks() -> Job {
    Job::new(Layout::rows(2))
}

/// Checks that a checkpoint at `url` is exactly that.
fn expect_loads(url: &str, truth: &Truth) {
    let flaw = Job::new(Layout::rows(3)).compare(|engine| checkpoint::open(engine, url, LONG), truth, &mut Dice(1));
    assert_eq!(flaw, Ok(None), "{url}");
}

/// Returns the errors of opening a URL on two ranks.
fn open_error(url: &str) -> Error {
    let open = |engine: &Arc<Engine>| checkpoint::open(engine, url, LONG);
    two_ranks().compare(open, &truth(1), &mut Dice(1)).unwrap_err()
}

/// Every file below a directory and its contents.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.append(&mut contents(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
    found
}

#[test]
fn places_that_hold_no_checkpoint() {
    let dir = scratch();
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(place("empty")).unwrap();
    fs::create_dir_all(format!("{}/{}", place("run"), step_dir(3))).unwrap();
    fs::create_dir_all(format!("{}/model", place("unfinished"))).unwrap();
    fs::write(format!("{}/manifest-0123456789abcdef", place("unfinished")), "x").unwrap();
    fs::write(place("file"), "x").unwrap();
    for (url, kind, word) in [
        (place("missing"), Kind::NotFound, "nothing is there"),
        (place("empty"), Kind::NotFound, "it has no COMMIT"),
        (place("run"), Kind::NotFound, "it is a run"),
        (place("unfinished"), Kind::NotFound, "not finished"),
        (place("file"), Kind::Invalid, "expected a directory"),
        ("memory://nowhere/at/all".to_owned(), Kind::NotFound, "nothing is there"),
        ("ftp://host/path".to_owned(), Kind::Unsupported, "file://"),
        ("file:relative".to_owned(), Kind::Invalid, "//"),
        (String::new(), Kind::Invalid, "expected a path"),
    ] {
        let error = open_error(&url);
        assert_eq!(error.kind, kind, "{url}: {error}");
        assert!(error.message.contains(&url) && error.message.contains(word), "{url}: {error}");
    }
    for (url, kind) in [(place("file"), Kind::Invalid), ("ftp://host/path".to_owned(), Kind::Unsupported)] {
        let error = two_ranks().save(&url, &truth(1), &mut Dice(1)).unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
    }
}

#[test]
fn a_newer_major_version_is_refused_and_a_newer_minor_one_read() {
    let url = "memory://bad_input/versions";
    two_ranks().save(url, &truth(1), &mut Dice(1)).unwrap();
    let store = shardfast_store::open(url).unwrap();
    let mut commit = Commit::decode(&store.read(COMMIT, 4096).unwrap()).unwrap();
    (commit.major, commit.minor) = (2, 0);
    store.put(COMMIT, &commit.encode()).unwrap();
    let error = open_error(url);
    assert_eq!(error.kind, Kind::Unsupported, "{error}");
    assert!(error.message.contains("2.0") && error.message.contains("upgrade shardfast"), "{error}");

    (commit.major, commit.minor) = (1, 7);
    let text = String::from_utf8(commit.encode()).unwrap();
    let (known, _) = text.split_once("crc64 ").unwrap();
    let later = format!("{known}what_a_later_version_adds 1\n");
    let later = format!("{later}crc64 {:016x}\n", crc64(later.as_bytes()));
    store.put(COMMIT, later.as_bytes()).unwrap();
    expect_loads(url, &truth(1));
}

#[test]
fn a_second_save_onto_a_checkpoint_leaves_the_first_untouched() {
    let dir = scratch();
    let url = dir.path().join("here").to_str().unwrap().to_owned();
    let job = two_ranks();
    job.save(&url, &truth(1), &mut Dice(1)).unwrap();
    let before = contents(dir.path());
    for job in [job, two_ranks()] {
        let error = job.save(&url, &truth(2), &mut Dice(1)).unwrap_err();
        assert_eq!(error.kind, Kind::Conflict, "{error}");
        assert!(error.message.contains(&url) && error.message.contains("never overwritten"), "{error}");
    }
    assert_eq!(contents(dir.path()), before);
    expect_loads(&url, &truth(1));
}

/// Weights that an index makes loadable by others.
fn weights(seed: u64) -> Truth {
    let whole = Whole::random(&mut Dice(seed), DType::F32, &[4, 8]);
    Truth { leaves: BTreeMap::from([(LeafName::new("model", "w"), Content::Tensor(whole))]) }
}

fn expect_index(url: &str) {
    let engine = Engine::solo();
    let opened = checkpoint::open(&engine, url, LONG).unwrap();
    let store = shardfast_store::open(url).unwrap();
    let found = store.read("model/model.safetensors.index.json", 1 << 20).ok();
    assert_eq!(found, hugging_face_index(opened.manifest(), "model"), "{url}");
}

#[test]
fn of_rival_saves_exactly_one_wins() {
    let dir = scratch();
    for round in 0..20 {
        let url = dir.path().join(format!("{round}")).to_str().unwrap().to_owned();
        let jobs = [Job::new(Layout::replicas(1)), Job::new(Layout::replicas(2)), Job::new(Layout::replicas(1))];
        let saved: Vec<Result<()>> = thread::scope(|threads| {
            let url = &url;
            let running: Vec<_> = (1..)
                .zip(&jobs)
                .map(|(seed, job)| threads.spawn(move || job.save(url, &weights(seed), &mut Dice(seed))))
                .collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let winners: Vec<usize> = (0..3).filter(|&i| saved[i].is_ok()).collect();
        assert_eq!(winners.len(), 1, "{saved:?}");
        for error in saved.iter().filter_map(|saved| saved.as_ref().err()) {
            assert_eq!(error.kind, Kind::Conflict, "{error}");
        }
        expect_loads(&url, &weights(1 + winners[0] as u64));
        expect_index(&url);
        // The losers' files are gone.
        assert_eq!(contents(Path::new(&url)).len(), 4, "{:?}", contents(Path::new(&url)).keys());
    }
}

/// A store that stops before it publishes, until the test lets it continue.
struct Hesitant {
    store: Arc<dyn Store>,
    arrived: std::sync::mpsc::SyncSender<()>,
    go: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl Around for Hesitant {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> shardfast_store::Result<()> {
        self.arrived.send(()).unwrap();
        self.go.lock().unwrap().recv().unwrap();
        self.store.publish(name, bytes)
    }
}

/// The one file whose name is the same in all attempts is the winner's, whichever attempt wrote it last.
#[test]
fn a_rival_that_loses_leaves_the_winners_index() {
    let url = "memory://bad_input/rivals";
    let store = shardfast_store::open(url).unwrap();
    let begin = |seed: u64| {
        let (arrived, at_publish) = std::sync::mpsc::sync_channel(1);
        let (go, wait) = std::sync::mpsc::channel();
        let hesitant = Arc::new(Hesitant { store: Arc::clone(&store), arrived, go: wait.into() });
        let job = Job::new(Layout::replicas(1));
        let pending = job.begin_save(|_| Ok(Arc::clone(&hesitant) as Arc<dyn Store>), &weights(seed), LONG);
        // It has written its index by then.
        at_publish.recv().unwrap();
        (pending, go)
    };
    let (first, second) = (begin(1), begin(2));
    first.1.send(()).unwrap();
    assert_eq!(outcomes(first.0), [Ok(())]);
    second.1.send(()).unwrap();
    assert_eq!(outcomes(second.0).remove(0).unwrap_err().kind, Kind::Conflict);
    expect_loads(url, &weights(1));
    expect_index(url);
}

/// An attempt that died may have left an index of its own.
#[test]
fn an_index_that_another_attempt_left_does_not_stay() {
    let url = "memory://bad_input/stale";
    let store = shardfast_store::open(url).unwrap();
    store.put("model/model.safetensors.index.json", b"{\"weight_map\": {}}").unwrap();
    two_ranks().save(url, &weights(1), &mut Dice(1)).unwrap();
    expect_index(url);
}

#[test]
fn two_saves_in_flight_share_one_engine() {
    let job = two_ranks();
    let urls = ["memory://bad_input/flight/1", "memory://bad_input/flight/2"];
    let begin = |(seed, url): (u64, &str)| {
        let store = shardfast_store::open(url).unwrap();
        job.begin_save(|_| Ok(Arc::clone(&store)), &Truth::small(seed, 300_000), LONG)
    };
    let pending: Vec<Vec<Pending>> = (1..).zip(urls).map(begin).collect();
    for pending in pending {
        assert_eq!(outcomes(pending), [Ok(()), Ok(())]);
    }
    expect_loads(urls[0], &Truth::small(1, 300_000));
    expect_loads(urls[1], &Truth::small(2, 300_000));
}

fn tensor(name: &str, dtype: DType, shape: &[u64], parts: &[Region]) -> Leaf {
    let body = LeafBody::Tensor { dtype, shape: shape.into(), parts: parts.to_vec() };
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

fn object(name: &str) -> Leaf {
    Leaf { name: LeafName::new("model", name), body: LeafBody::Object { owner: Owner::Job }, layout: String::new() }
}

/// Makes a state of the right number of bytes for its leaves.
fn state(leaves: Vec<Leaf>) -> State {
    let bytes = |leaf: &Leaf| -> Vec<Arc<dyn Provider>> {
        match &leaf.body {
            LeafBody::Tensor { dtype, parts, .. } => parts
                .iter()
                .map(|part| Arc::new(vec![7u8; (part.numel() * dtype.size_bytes()) as usize]) as Arc<dyn Provider>)
                .collect(),
            LeafBody::Object { .. } => vec![Arc::new(vec![7u8; 5])],
            LeafBody::Alias { .. } => Vec::new(),
        }
    };
    let providers = leaves.iter().map(bytes).collect();
    State { catalog: Arc::new(Catalog { leaves }), providers, ..State::default() }
}

/// Saves a state per rank and returns the error of every rank; checks that nothing is visible then.
fn save_error(states: Vec<State>) -> Error {
    let dir = scratch();
    let url = dir.path().to_str().unwrap();
    let job = Job::new(Layout::rows(states.len() as u32));
    let pending = job.engines.iter().zip(states).map(|(engine, state)| save(engine, destination(url), state, LONG));
    let error = alike(outcomes(pending.collect())).unwrap_err();
    assert_eq!(open_error(url).kind, Kind::NotFound);
    assert_eq!(contents(dir.path()).len(), 0, "files were left");
    error
}

#[test]
fn states_that_are_not_one_state() {
    let whole = |shape: &[u64]| [Region::whole(shape)];
    let w = |dtype, shape: &[u64], parts: &[Region]| vec![tensor("w", dtype, shape, parts)];
    let row = |from, count| Region::new(&[from, 0], &[count, 3]);
    let alias = |of: &str| {
        let body = LeafBody::Alias { of: LeafName::new("model", of) };
        Leaf { name: LeafName::new("model", "v"), body, layout: String::new() }
    };
    let good = || w(DType::F32, &[4, 3], &[row(0, 4)]);
    let mut bad_key = good();
    bad_key[0].name.key = "../escape".to_owned();
    let twice = || [good(), good()].concat();
    // What is wrong, the ranks' leaves, and words of the error.
    type Case = (&'static str, Vec<Vec<Leaf>>, &'static [&'static str]);
    let cases: Vec<Case> = vec![
        ("two leaves of one name", vec![good(), twice()], &["rank 1", "model/w", "two leaves have this name"]),
        ("dtypes", vec![good(), w(DType::BF16, &[4, 3], &[])], &["model/w", "F32", "BF16", "rank 0", "rank 1"]),
        ("shapes", vec![good(), w(DType::F32, &[4, 4], &[])], &["model/w", "[4, 3]", "[4, 4]"]),
        ("kinds", vec![good(), vec![object("w")]], &["model/w", "a tensor", "a value"]),
        (
            "uncovered",
            vec![w(DType::F32, &[4, 3], &[row(0, 1)]), w(DType::F32, &[4, 3], &[row(2, 2)])],
            &["model/w", "[1:2, 0:3]"],
        ),
        (
            "overlap",
            vec![w(DType::F32, &[4, 3], &[row(0, 3)]), w(DType::F32, &[4, 3], &[row(2, 2)])],
            &["model/w", "overlaps", "rank 0", "rank 1"],
        ),
        ("nobody has it", vec![w(DType::F32, &[4, 3], &[]), Vec::new()], &["model/w", "no rank holds"]),
        ("outside", vec![good(), w(DType::F32, &[4, 3], &[row(3, 2)])], &["rank 1", "model/w", "[3:5, 0:3]"]),
        ("an alias of nothing", vec![good(), vec![alias("x")]], &["rank 1", "model/v", "model/x"]),
        ("a path for a key", vec![good(), bad_key], &["rank 1", "../escape"]),
        ("beyond any memory", vec![w(DType::F64, &[1 << 62], &[]), good()], &["model/w", "2^64"]),
        (
            "a name of the container",
            vec![vec![tensor("__metadata__", DType::U8, &[1], &whole(&[1]))]],
            &["__metadata__"],
        ),
    ];
    for (case, leaves, words) in cases {
        let error = save_error(leaves.into_iter().map(state).collect());
        assert_eq!(error.kind, Kind::Invalid, "{case}: {error}");
        for word in words {
            assert!(error.message.contains(word), "{case}: no {word:?} in {error}");
        }
    }
    // Ranks that know who holds what meet in another way.
    let piece = |count| {
        let body = LeafBody::Object { owner: Owner::Piece { index: 0, count } };
        let leaf = Leaf { name: LeafName::new("model", "v.piece.0"), body, layout: String::new() };
        let replicas = Replicas { groups: Vec::new(), leaves: vec![None] };
        State { replicas: Some(Arc::new(replicas)), ..state(vec![leaf]) }
    };
    let error = save_error(vec![piece(1), piece(2)]);
    assert!(error.message.contains("found piece 0 of 1 on rank 0, piece 0 of 2 on rank 1"), "{error}");
    let mut short = state(good());
    short.providers[0] = vec![Arc::new(vec![0u8; 47])];
    let error = save_error(vec![state(good()), short]);
    assert!(error.kind == Kind::Invalid && error.message.contains("rank 1") && error.message.contains("47"), "{error}");
}

#[test]
fn an_empty_state_is_a_checkpoint_too() {
    let url = "memory://bad_input/empty";
    let nothing = Truth { leaves: BTreeMap::new() };
    two_ranks().save(url, &nothing, &mut Dice(1)).unwrap();
    expect_loads(url, &nothing);
}

#[test]
fn ranks_that_call_different_operations() {
    let at = |name: &str| format!("memory://bad_input/order/{name}");
    let job = two_ranks();
    job.save(&at("there"), &truth(1), &mut Dice(1)).unwrap();
    let save_at = |engine: &Arc<Engine>, name: &str| {
        let state = truth(1).state(&job.layout, engine.rank(), &mut Dice(1));
        save(engine, destination(&at(name)), state, LONG).committed(None)
    };
    let open_at = |engine: &Arc<Engine>, name: &str| checkpoint::open(engine, &at(name), LONG).map(drop);
    type Act<'a> = &'a (dyn Fn(&Arc<Engine>) -> Result<()> + Sync);
    // Each call once: a rank that repeats what the other has called before is behind, which is another failure.
    let cases: [(Act, Act); 5] = [
        (&|engine| save_at(engine, "a"), &|engine| open_at(engine, "there")),
        (&|engine| open_at(engine, "b"), &|engine| save_at(engine, "b")),
        (&|engine| save_at(engine, "c"), &|engine| save_at(engine, "d")),
        (&|engine| open_at(engine, "e"), &|engine| open_at(engine, "f")),
        (&|engine| save_at(engine, "g"), &|engine| {
            shardfast_engine::newest::newest(engine, &at("g"), None, false, LONG).map(drop)
        }),
    ];
    for (i, (first, second)) in cases.into_iter().enumerate() {
        let results = thread::scope(|threads| {
            let second = threads.spawn(|| second(&job.engines[1]));
            vec![first(&job.engines[0]), second.join().unwrap()]
        });
        let error = alike(results).unwrap_err();
        assert_eq!(error.kind, Kind::Invalid, "case {i}: {error}");
        assert!(error.message.contains("same operations in the same order"), "case {i}: {error}");
        assert!(
            error.message.contains("rank 0 calls `") && error.message.contains("rank 1 calls `"),
            "case {i}: {error}"
        );
    }
    // The next operation finds the ranks in step.
    job.save(&at("a"), &truth(2), &mut Dice(1)).unwrap();
    expect_loads(&at("a"), &truth(2));
}

#[test]
fn a_rank_that_refuses_fails_the_operation_for_all() {
    let url = "memory://bad_input/refused";
    let job = two_ranks();
    let reason = || Error::new(Kind::Exhausted, "optimizer/state: cannot be encoded here");
    let refuse = |rank: usize| {
        let engine = &job.engines[rank];
        move || Err(engine.refuse(reason(), LONG))
    };
    for refusing in [0, 1] {
        for act in ["save", "open"] {
            let results = thread::scope(|threads| {
                let refusal = threads.spawn(refuse(refusing));
                let engine = &job.engines[1 - refusing];
                let other = match act {
                    "save" => {
                        let state = truth(1).state(&job.layout, engine.rank(), &mut Dice(1));
                        save(engine, destination(url), state, LONG).committed(None)
                    }
                    _ => checkpoint::open(engine, url, LONG).map(drop),
                };
                vec![refusal.join().unwrap(), other]
            });
            let error = alike::<()>(results).unwrap_err();
            assert_eq!(error.kind, Kind::Exhausted, "{error}");
            assert_eq!(error.message, format!("rank {refusing}: {}", reason().message));
        }
    }
    job.save(url, &truth(1), &mut Dice(1)).unwrap();
    expect_loads(url, &truth(1));
}

#[test]
fn a_rank_that_never_comes_is_named_in_time() {
    let url = "memory://bad_input/absent";
    let job = two_ranks();
    let begin = |rank: usize| {
        let state = truth(1).state(&job.layout, rank as u32, &mut Dice(1));
        save(&job.engines[rank], destination(url), state, Duration::from_millis(200))
    };
    let started = Instant::now();
    let error = begin(0).committed(None).unwrap_err();
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(error.message.contains("rank 1") && error.message.contains(url), "{error}");
    assert!(error.message.contains("has not called save (1 call behind) within 200ms"), "{error}");
    // A rank that calls too late gets the error at once, and then has the same number as the others.
    let late = begin(1).committed(None).unwrap_err();
    assert_eq!(late.kind, Kind::Unavailable, "{late}");
    assert!(late.message.contains("rank 1 called save too late") && late.message.contains(url), "{late}");
    job.save(url, &truth(2), &mut Dice(1)).unwrap();
    expect_loads(url, &truth(2));
}

/// Tests that the error names the remedy of a rank that fails while another is absent.
#[test]
fn the_kind_is_that_of_the_rank_that_spoke() {
    let job = Job::new(Layout::rows(3));
    let deadline = Duration::from_secs(2);
    let [first, _, third] = &job.engines[..] else { panic!("three ranks") };
    let (opened, refused) = thread::scope(|threads| {
        let refused = threads.spawn(|| third.refuse(Error::new(Kind::Exhausted, "no memory"), deadline));
        (checkpoint::open(first, "memory://bad_input/none", deadline).map(drop), refused.join().unwrap())
    });
    assert_eq!(opened, Err(refused.clone()));
    assert_eq!(refused.kind, Kind::Exhausted, "{refused}");
    assert!(refused.message.contains("rank 1: ") && refused.message.contains("rank 2: no memory"), "{refused}");
}

/// A source that fails after its first bytes.
struct Failing;

impl Provider for Failing {
    fn bytes(&self) -> u64 {
        48
    }

    fn fill(&self, _at: u64, _out: &mut [u8], _: &mut Fences) -> Result<()> {
        Err(Error::new(Kind::Unavailable, "the device is lost"))
    }
}

#[test]
fn a_source_that_fails_fails_the_save_on_every_rank() {
    let leaf = || vec![tensor("w", DType::F32, &[8, 3], &[Region::new(&[0, 0], &[4, 3])])];
    let other = vec![tensor("w", DType::F32, &[8, 3], &[Region::new(&[4, 0], &[4, 3])])];
    let mut failing = state(leaf());
    failing.providers[0] = vec![Arc::new(Failing)];
    let dir = scratch();
    let job = two_ranks();
    let states = [failing, state(other)];
    let begin = |(engine, state)| save(engine, destination(dir.path().to_str().unwrap()), state, LONG);
    let error = alike(outcomes(job.engines.iter().zip(states).map(begin).collect())).unwrap_err();
    assert_eq!(
        error,
        Error::new(Kind::Unavailable, "rank 0: model/w: the device is lost (its part was captured, not yet staged)")
    );
}

/// Tests that a want that does not fit on one rank fails on all before a byte is read anywhere.
#[test]
fn a_checkpoint_of_another_model_fills_nothing() {
    let url = "memory://bad_input/model";
    let job = two_ranks();
    job.save(url, &weights(1), &mut Dice(1)).unwrap();
    let load = |engine: &Arc<Engine>| {
        let opened = checkpoint::open(engine, url, LONG).unwrap();
        let region = Region::new(&[engine.rank() as u64, 0], &[4, 8]);
        let mut block = Block::dense(&region.lengths, 4);
        let before = block.elements();
        let want = Want { leaf: 0, region, sink: block.sink().unwrap() };
        let loaded = opened.load(&[want], &[], LONG).map(drop);
        assert_eq!(block.elements(), before);
        loaded
    };
    let results = thread::scope(|threads| {
        let second = threads.spawn(|| load(&job.engines[1]));
        vec![load(&job.engines[0]), second.join().unwrap()]
    });
    let error = alike(results).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    assert!(error.message.contains("rank 1: ") && error.message.contains("model/w"), "{error}");
    assert!(error.message.contains("[1:5, 0:8]") && error.message.contains("[4, 8]"), "{error}");
}

/// Tests that a load that failed because the store could not be reached can be retried with the same open checkpoint.
#[test]
fn a_load_that_failed_for_the_moment_can_be_repeated() {
    let disk = SimDisk::new();
    let store = || Ok(Arc::new(LocalStore::on(disk.clone(), "/run".into())?) as Arc<dyn Store>);
    assert_eq!(two_ranks().save_to(|_| store(), &weights(1), LONG), [Ok(()), Ok(())]);
    let opened = checkpoint::open_from(&Engine::solo(), store(), "here", LONG).unwrap();
    let load = || {
        let mut block = Block::dense(&[4, 8], 4);
        let want = Want { leaf: 0, region: Region::whole(&[4, 8]), sink: block.sink().unwrap() };
        opened.load(&[want], &[], LONG).map(|_| block.elements())
    };
    for _ in 0..2 {
        // As often as it is tried.
        for at in 0..5 {
            disk.inject(disk.calls().len() + at, shardfast_store::testing::simdisk::Fault::Fail(Errno::IO));
        }
        let error = load().unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable, "{error}");
        assert!(error.message.contains("model/w"), "{error}");
    }
    assert_eq!(load(), Ok(weights(1).whole(&LeafName::new("model", "w")).bytes.clone()));
}

/// Checks that two ranks' saves to `place` fail with a kind, and that the earlier checkpoint is still there.
fn expect_save_fails(place: &Path, kind: Kind, word: &str) {
    let url = |step| place.join(step_dir(step)).to_str().unwrap().to_owned();
    let job = two_ranks();
    let error = job.save(&url(2), &Truth::small(2, 20_000), &mut Dice(1)).unwrap_err();
    assert_eq!(error.kind, kind, "{error}");
    assert!(error.message.contains(&url(2)) && error.message.contains(word), "{error}");
    assert_eq!(open_error(&url(2)).kind, Kind::NotFound);
    expect_loads(&url(1), &truth(1));
}

/// A small file system in memory, if this process may mount one; unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(options: &str) -> Option<Mount> {
        let mount = Mount(tempfile::tempdir().unwrap());
        mount.mount(&["-t", "tmpfs", "-o", options, "none"]).then_some(mount)
    }

    fn mount(&self, arguments: &[&str]) -> bool {
        let output = Command::new("mount").args(arguments).arg(self.0.path()).output();
        output.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_disk() {
    let Some(mount) = Mount::new("size=400k") else {
        println!("skipped: this process may not mount file systems");
        return;
    };
    let place = mount.0.path();
    two_ranks().save(place.join(step_dir(1)).to_str().unwrap(), &truth(1), &mut Dice(1)).unwrap();
    expect_save_fails(place, Kind::Exhausted, "No space left");
    // What the failed save wrote was given back: a smaller one fits.
    let url = place.join(step_dir(2)).to_str().unwrap().to_owned();
    two_ranks().save(&url, &Truth::small(3, 6000), &mut Dice(1)).unwrap();
    expect_loads(&url, &Truth::small(3, 6000));
}

#[test]
fn a_read_only_store() {
    let Some(mount) = Mount::new("size=4m") else {
        println!("skipped: this process may not mount file systems");
        return;
    };
    let place = mount.0.path();
    two_ranks().save(place.join(step_dir(1)).to_str().unwrap(), &truth(1), &mut Dice(1)).unwrap();
    assert!(mount.mount(&["-o", "remount,ro"]));
    expect_save_fails(place, Kind::Invalid, "Read-only");
}

/// Tests the same without the right to mount.
#[test]
fn disks_that_refuse() {
    for (call, errno, kind) in [
        ("mkdir", Errno::ROFS, Kind::Invalid),
        ("mkdir", Errno::ACCESS, Kind::Invalid),
        ("create_new", Errno::ACCESS, Kind::Invalid),
        ("fallocate", Errno::NOSPC, Kind::Exhausted),
        ("fallocate", Errno::DQUOT, Kind::Exhausted),
        ("pwrite", Errno::NOSPC, Kind::Exhausted),
        ("fdatasync", Errno::IO, Kind::Unavailable),
        ("rename", Errno::NOSPC, Kind::Exhausted),
        ("rename_noreplace", Errno::ROFS, Kind::Invalid),
    ] {
        let disk = SimDisk::new();
        let store = |place: &'static str| Ok(Arc::new(LocalStore::on(disk.clone(), place.into())?) as Arc<dyn Store>);
        let job = two_ranks();
        assert_eq!(job.save_to(|_| store("/run/1"), &truth(1), LONG), [Ok(()), Ok(())]);
        disk.refuse(call, errno);
        let error = alike(job.save_to(|_| store("/run/2"), &truth(2), LONG)).unwrap_err();
        assert_eq!(error.kind, kind, "{call}: {error}");
        let compare = |place: &'static str| {
            let open = |engine: &Arc<Engine>| checkpoint::open_from(engine, store(place), place, LONG);
            two_ranks().compare(open, &truth(1), &mut Dice(1))
        };
        assert_eq!(compare("/run/1"), Ok(None), "{call}");
        assert_eq!(compare("/run/2").unwrap_err().kind, Kind::NotFound, "{call}");
    }
}

/// Variable with the tests' place for a process without rights.
const PLACE: &str = "SHARDFAST_TEST_PLACE";

#[test]
fn no_permission() {
    let dir = scratch();
    let run = dir.path().join("run");
    two_ranks().save(run.join(step_dir(1)).to_str().unwrap(), &truth(1), &mut Dice(1)).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&run, fs::Permissions::from_mode(0o555)).unwrap();
    if !rustix::process::geteuid().is_root() {
        return expect_save_fails(&run, Kind::Invalid, "Permission denied");
    }
    // Root may do anything: another user has to try.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "bad_input::no_permission_of_another_user"]).env(PLACE, &run).current_dir("/");
    match command.uid(65534).gid(65534).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout)),
        Err(error) => println!("skipped: another user may not run the tests: {error}"),
    }
}

/// Runs as the process of another user; not a test by itself.
#[test]
fn no_permission_of_another_user() {
    if let Some(place) = std::env::var_os(PLACE) {
        expect_save_fails(Path::new(&place), Kind::Invalid, "Permission denied");
    }
}

/// A provider with a defect.
struct Broken;

impl Provider for Broken {
    fn bytes(&self) -> u64 {
        4
    }

    fn fill(&self, _: u64, _: &mut [u8], _: &mut Fences) -> Result<()> {
        panic!("a defect");
    }
}

#[test]
fn a_panic_on_one_rank_fails_the_save_on_all_at_once() {
    let engines: Vec<_> =
        shardfast_coord::local(2).into_iter().map(|coord| Engine::new(coord, 1 << 24).unwrap()).collect();
    let begun = Instant::now();
    let outcomes: Vec<_> = thread::scope(|threads| {
        let saves = engines.iter().enumerate().map(|(rank, engine)| {
            threads.spawn(move || {
                let provider: Arc<dyn Provider> = if rank == 1 { Arc::new(Broken) } else { Arc::new(vec![1, 2, 3, 4]) };
                let body = LeafBody::Tensor {
                    dtype: DType::U8,
                    shape: [8].as_slice().into(),
                    parts: vec![Region::new(&[4 * rank as u64], &[4])],
                };
                let leaf = Leaf { name: LeafName::new("model", "w"), body, layout: String::new() };
                let state = State {
                    catalog: Arc::new(Catalog { leaves: vec![leaf] }),
                    providers: vec![vec![provider]],
                    ..State::default()
                };
                save(engine, destination("memory://bad_input/panic"), state, LONG).committed(None)
            })
        });
        saves.collect::<Vec<_>>().into_iter().map(|save| save.join().unwrap()).collect()
    });
    assert!(begun.elapsed() < PROMPT);
    for outcome in &outcomes {
        let error = outcome.as_ref().unwrap_err();
        assert_eq!(error.kind, Kind::Internal, "{error}");
        assert!(error.message.contains("rank 1") && error.message.contains("panicked"), "{error}");
    }
    assert_eq!(open_error("memory://bad_input/panic").kind, Kind::NotFound);
}

#[test]
fn leaves_called_like_parts_and_values_of_others_are_saved_beside_them() {
    let (url, mut dice) = ("memory://bad_input/namesakes", Dice(7));
    let mut leaves = BTreeMap::new();
    for (name, shape) in [("w", &[4, 8][..]), ("w[0:2, 0:8]", &[3, 5]), ("v@rank1", &[6])] {
        let whole = Whole::random(&mut dice, DType::F32, shape);
        leaves.insert(LeafName::new("model", name), Content::Tensor(whole));
    }
    let values = vec![vec![1], vec![2]];
    leaves.insert(LeafName::new("model", "v"), Content::Object { per_rank: true, values });
    let truth = Truth { leaves };
    let job = two_ranks();
    job.save(url, &truth, &mut dice).unwrap();
    let flaw = job.compare(|engine| checkpoint::open(engine, url, LONG), &truth, &mut dice);
    assert_eq!(flaw, Ok(None));
}
