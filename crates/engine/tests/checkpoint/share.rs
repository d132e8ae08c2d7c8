//! Loads in which ranks read for each other: the same bytes as without, each read once; failures, of peers too.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use shardfast_engine::{Engine, Error, Kind, PeerReads, Result, Traffic, checkpoint};
use shardfast_format::{DType, LeafName};
use shardfast_store::disk::{Disk, RealDisk};
use shardfast_store::testing::around::Around;
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::sims3::SimS3;
use shardfast_store::{Fetch, Mapping, ObjectReader, PageCache, Store, one_by_one};
use shardfast_tools::{Copying, Limit, copy_between};

use crate::job::{Content, Job, LONG, Place, Seed, Truth, Whole, wants};
use crate::kill::place;
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// The least with which ranks have memory that others see.
const STAGING_BYTES: u64 = 32 << 20;

/// Staging memory with which all shared bytes travel in messages.
const MESSAGES_BYTES: u64 = 16 << 20;

/// A job whose ranks show each other memory: all of them, every other one, or none.
fn seen(layout: Layout, by: u64) -> Job {
    let engine = |coord: Arc<dyn shardfast_coord::Coord>| {
        let is_seen = by == 0 || by == 1 && coord.rank().is_multiple_of(2);
        Engine::new(coord, if is_seen { STAGING_BYTES } else { MESSAGES_BYTES }).unwrap()
    };
    Job { engines: shardfast_coord::local(layout.world()).into_iter().map(engine).collect(), layout }
}

/// One matrix of `rows` times 4 KiB.
fn matrix(rows: u64) -> Truth {
    let whole = Whole::random(&mut Dice(rows), DType::C64, &[rows, 512]);
    Truth { leaves: BTreeMap::from([(LeafName::new("model", "w"), Content::Tensor(whole))]) }
}

/// Saved by two ranks, by rows; the URL.
fn saved(place: &Path, truth: &Truth) -> String {
    let url = place.join("saved").to_str().unwrap().to_owned();
    Job::new(Layout::rows(2)).save(&url, truth, &mut Dice(1)).unwrap();
    url
}

fn open(url: &str) -> impl Fn(&Arc<Engine>) -> Result<shardfast_engine::Checkpoint> + Sync {
    move |engine| checkpoint::open(engine, url, LONG)
}

fn total(traffic: &[Traffic], of: fn(&Traffic) -> u64) -> u64 {
    traffic.iter().map(of).sum()
}

#[test]
fn random_pairs_of_layouts_share() {
    let place = scratch();
    let mut shared = 0;
    for seed in 0..80 {
        let _seed = Seed(seed);
        let mut dice = Dice(seed);
        let url = place.path().join(format!("{seed}"));
        let url = url.to_str().unwrap();
        let truth = Truth::random(&mut dice);
        let (saving, loading) = (Layout::random(&mut dice), Layout::random(&mut dice));
        Job::new(saving).save(url, &truth, &mut dice).unwrap();
        let (flaw, traffic) =
            seen(loading, seed % 3).compare_by(PeerReads::Always, open(url), &truth, &mut dice).unwrap();
        assert_eq!(flaw, None);
        shared += u32::from(traffic.iter().any(|traffic| traffic.bytes_received > 0));
    }
    assert!(shared > 50, "only {shared} loads shared anything");
}

#[test]
fn each_block_is_read_once_by_turns() {
    let (place, truth) = (scratch(), matrix(2048));
    let url = saved(place.path(), &truth);
    let unique = 2048 * 4096;
    let layouts = [(Layout::columns(2), 2.0), (Layout::replicas(4), 4.0), (Layout::columns_of_replicas(2, 2), 4.0)];
    for (by, (layout, plain)) in (0..3).flat_map(|by| layouts.iter().map(move |layout| (by, layout.clone()))) {
        let load = |way| {
            let job = seen(layout.clone(), by);
            job.compare_by(way, open(&url), &truth, &mut Dice(3)).unwrap()
        };
        if by == 0 {
            let (flaw, traffic) = load(PeerReads::Never);
            let read = total(&traffic, |traffic| traffic.bytes_read);
            assert!(flaw.is_none() && read as f64 >= plain * f64::from(unique), "{layout:?}: {traffic:?}");
            assert_eq!(total(&traffic, |traffic| traffic.bytes_sent + traffic.bytes_received), 0);
        }

        let (flaw, traffic) = load(PeerReads::Always);
        let read = total(&traffic, |traffic| traffic.bytes_read);
        assert!(flaw.is_none() && read as f64 <= 1.02 * f64::from(unique), "{layout:?}: {traffic:?}");
        let (sent, received) =
            (total(&traffic, |traffic| traffic.bytes_sent), total(&traffic, |traffic| traffic.bytes_received));
        assert_eq!(sent, received);
        assert!(traffic.iter().all(|traffic| traffic.is_shared), "{traffic:?}");
        let most = traffic.iter().map(|traffic| traffic.bytes_read).max().unwrap();
        assert!(most <= read / traffic.len() as u64 + (1 << 20), "{layout:?}: {traffic:?}");
    }
}

#[test]
fn ranks_with_nothing_in_common_send_nothing() {
    let (place, truth) = (scratch(), matrix(1024));
    let url = saved(place.path(), &truth);
    let job = Job::staged(Layout::rows(2), STAGING_BYTES);
    let (flaw, traffic) = job.compare_by(PeerReads::Always, open(&url), &truth, &mut Dice(3)).unwrap();
    assert_eq!(flaw, None);
    assert!(traffic.iter().all(|traffic| !traffic.is_shared && traffic.bytes_sent == 0), "{traffic:?}");
}

#[test]
fn damage_that_one_rank_reads_is_everybodys_failure() {
    let (place, truth) = (scratch(), matrix(1024));
    let url = saved(place.path(), &truth);
    let engine = Engine::solo();
    let files = checkpoint::open(&engine, &url, LONG).unwrap().manifest().files().to_vec();
    for (way, told) in [(PeerReads::Never, 3), (PeerReads::Always, 1), (PeerReads::Auto, 3)] {
        let file = Path::new(&url).join(&files[1].path);
        let mut bytes = std::fs::read(&file).unwrap();
        let at = bytes.len() - 5;
        bytes[at] ^= 4;
        std::fs::write(&file, &bytes).unwrap();
        let job = Job::staged(Layout::replicas(3), STAGING_BYTES);
        let error = job.compare_by(way, open(&url), &truth, &mut Dice(3)).unwrap_err();
        bytes[at] ^= 4;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(error.kind, Kind::Corrupt, "{error}");
        let lines: Vec<&str> = error.message.lines().collect();
        assert_eq!(lines.len(), told, "{way:?}: {error}");
        for line in lines {
            let said = format!("{url}: tensor model/w: file {}, bytes ", files[1].path);
            assert!(line.starts_with("rank ") && line.contains(&said) && line.contains("expected CRC-64"), "{line}");
        }
        // The ranks still understand each other.
        assert_eq!(job.compare_by(way, open(&url), &truth, &mut Dice(3)).unwrap().0, None);
    }
}

/// A store with the contents of another one.
struct Other {
    store: Arc<dyn Store>,
    /// Share of a range that the store reports as cached, in percent.
    cached: Option<u64>,
}

struct OtherReader {
    object: Box<dyn ObjectReader>,
    cached: Option<u64>,
}

impl ObjectReader for OtherReader {
    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        Some(self)
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> shardfast_store::Result<()> {
        one_by_one(self, ranges)
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> shardfast_store::Result<()> {
        self.read_at(offset, buf)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> shardfast_store::Result<()> {
        self.object.read_at(offset, buf)
    }
}

impl PageCache for OtherReader {
    fn map(&self) -> shardfast_store::Result<Mapping> {
        Err(shardfast_store::Error::new(shardfast_store::Kind::Unsupported, "map", "other", "not mapped"))
    }

    fn prefetch(&self, _: u64, _: u64, _: bool) -> Fetch {
        Fetch::WhenRead
    }

    fn cached_bytes(&self, _: u64, bytes: u64) -> Option<u64> {
        self.cached.map(|percent| bytes * percent / 100)
    }
}

impl Around for Other {
    fn inner(&self) -> &dyn Store {
        &*self.store
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> shardfast_store::Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let Other { store, cached } = self;
        let (object, head) = store.open_head(name, head_bytes)?;
        Ok((Box::new(OtherReader { object, cached: *cached }), head))
    }
}

/// Share of a range that a rank's store reports as cached, in percent, by rank.
type Cached = fn(u32) -> Option<u64>;

/// Tests two ranks with enough bytes for each to be worth connections.
#[test]
fn only_what_no_page_cache_holds_for_all_is_read_for_others() {
    let (place, truth) = (scratch(), matrix(17 << 10));
    let url = saved(place.path(), &truth);
    let unique = (17 << 10) * 4096;
    let url = &url;
    let on = |cached: Cached| {
        move |engine: &Arc<Engine>| {
            let store: Arc<dyn Store> =
                Arc::new(Other { store: shardfast_store::open(url)?, cached: cached(engine.rank()) });
            checkpoint::open_from(engine, Ok(store), url, LONG)
        }
    };
    let expect = |job: &Job, way, cached, is_shared: bool| {
        let (flaw, traffic) = job.compare_by(way, on(cached), &truth, &mut Dice(3)).unwrap();
        assert!(flaw.is_none() && traffic.iter().all(|traffic| traffic.is_shared == is_shared), "{traffic:?}");
        let read = total(&traffic, |traffic| traffic.bytes_read);
        assert!(!is_shared || (unique..unique + unique / 50).contains(&read), "{traffic:?}");
    };
    // One page cache reads for all, whatever it has of it, unless something else was asked for.
    let job = Job::staged(Layout::columns(2), STAGING_BYTES);
    expect(&job, PeerReads::Auto, |_| None, false);
    expect(&job, PeerReads::Auto, |rank| Some(u64::from(rank) * 100), false);
    expect(&job, PeerReads::Always, |_| Some(51), true);
    // Ranks without memory in common: each reads for itself only if all have most of it in their page caches.
    let job = Job::staged(Layout::replicas(2), MESSAGES_BYTES);
    expect(&job, PeerReads::Auto, |_| Some(51), false);
    expect(&job, PeerReads::Auto, |_| Some(49), true);
    expect(&job, PeerReads::Auto, |rank| Some(u64::from(rank) * 100), true);
}

/// Storage that takes requests: what several ranks want is read once, in requests of about 8 MiB.
#[test]
fn requests_are_few() {
    let (place, truth) = (scratch(), matrix(24 << 10));
    let url = saved(place.path(), &truth);
    let unique = (24 << 10) * 4096;
    let service = SimS3::default();
    let far = || {
        let shared = shardfast_store::Shared::simulated(service.clone());
        Noted::open_on("s3://simulated/run?endpoint=http://simulated", &shared).unwrap()
    };
    let from = shardfast_store::open(&url).unwrap();
    copy_between(
        &Engine::solo(),
        (from, &url),
        (far().0, "s3"),
        &Copying { limit: Limit::new(None), verify: false },
        &|_, _| (),
    )
    .unwrap();
    for (way, layout, staging, by_request) in [
        // No page cache reads for all.
        (PeerReads::Auto, Layout::columns(2), 1 << 30, 8 << 20),
        (PeerReads::Always, Layout::columns(2), 1 << 30, 8 << 20),
        (PeerReads::Always, Layout::replicas(4), 1 << 30, 8 << 20),
        // Messages carry it, of 4 MiB to each other rank.
        (PeerReads::Always, Layout::replicas(2), MESSAGES_BYTES, 15 << 16),
    ] {
        let job = Job::staged(layout.clone(), staging);
        let (stores, noted): (Vec<Arc<dyn Store>>, Vec<_>) = (0..layout.world()).map(|_| far()).unzip();
        // The first request asks for keys before.
        stores.iter().for_each(|store| _ = store.list("").unwrap());
        noted.iter().for_each(|noted| _ = noted.take());
        let open = |engine: &Arc<Engine>| {
            let store = Arc::clone(&stores[engine.rank() as usize]);
            checkpoint::open_from(engine, Ok(store), &url, LONG)
        };
        let (flaw, traffic) = job.compare_by(way, open, &truth, &mut Dice(3)).unwrap();
        assert!(flaw.is_none() && traffic.iter().all(|traffic| traffic.is_shared), "{traffic:?}");
        let read = total(&traffic, |traffic| traffic.bytes_read);
        assert!((unique..unique + unique / 50).contains(&read), "{traffic:?}");
        let gets = noted.iter().map(|noted| noted.requests().gets).sum::<u64>();
        // Each rank opens two files, and rank 0 reads commit and manifest.
        let most = 2 * (unique / 2).div_ceil(by_request) + 2 * layout.world() as u64 + 2;
        assert!(gets <= most, "{layout:?}: {gets} requests, expected at most {most}");
    }
}

/// A file on a disk, large enough for direct reads, of which every rank wants all.
#[test]
fn what_each_reads_for_itself_through_the_page_cache_is_whole_and_proven() {
    let (place, truth) = (tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), matrix(20 << 10));
    let url = place.path().join("saved").to_str().unwrap().to_owned();
    Job::new(Layout::rows(1)).save(&url, &truth, &mut Dice(1)).unwrap();
    let files = std::fs::read_dir(Path::new(&url).join("model")).unwrap().map(|entry| entry.unwrap().path());
    let path = files.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let load = || {
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        file.sync_all().unwrap();
        RealDisk.dont_need(&file.into(), 0, u64::MAX / 2).unwrap();
        let job = Job::staged(Layout::replicas(2), MESSAGES_BYTES);
        job.compare_by(PeerReads::Never, open(&url), &truth, &mut Dice(3))
    };
    for _ in 0..2 {
        let (flaw, traffic) = load().unwrap();
        assert!(flaw.is_none() && traffic.iter().all(|traffic| !traffic.is_shared), "{flaw:?} {traffic:?}");
    }
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 8;
    std::fs::write(&path, &bytes).unwrap();
    let error = load().map(|(flaw, _)| flaw).unwrap_err();
    assert!(error.kind == Kind::Corrupt && error.message.contains("tensor model/w"), "{error}");
}

const ROLE: &str = "SHARDFAST_TEST_ROLE";
const MARK: &str = "told: ";
/// Time in which a rank must learn that the other one is gone, on a busy machine.
const BOUNDED: Duration = Duration::from_secs(30);

/// Runs as rank 1 of two, which loads as often as it is asked to, until it is killed; not a test by itself.
#[test]
fn peer() {
    let Some((address, url)) = env::var(ROLE).ok().and_then(|role| {
        role.strip_prefix("share ").and_then(|role| role.split_once(' ')).map(|(a, b)| (a.to_owned(), b.to_owned()))
    }) else {
        return;
    };
    let coord = place(1).join(Some(&address), LONG).unwrap();
    let engine = Engine::new(coord, STAGING_BYTES).unwrap();
    println!("{MARK}joined");
    loop {
        load_whole(&engine, &url, LONG).unwrap();
    }
}

/// Loads all of a matrix on this rank of two, sharing.
fn load_whole(engine: &Arc<Engine>, url: &str, deadline: Duration) -> Result<Traffic> {
    let opened = checkpoint::open(engine, url, deadline)?;
    let truth = matrix(8);
    let rows = opened.manifest().files().iter().map(|file| file.bytes - file.data_start).sum::<u64>() / 4096;
    let shape = [rows, 512];
    let name = truth.leaves.keys().next().unwrap().clone();
    let block = crate::block::Block::dense(&shape, 8);
    let mut places = [Place { name, region: shardfast_format::Region::whole(&shape), block }];
    let (wants, values) = wants(opened.manifest(), &mut places);
    opened.load_by(PeerReads::Always, None, &wants, &values, deadline).map(|loaded| loaded.traffic)
}

struct Peer(Child, BufReader<ChildStdout>);

impl Peer {
    fn start(address: &str, url: &str) -> Peer {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "share::peer", "--nocapture"]).env(ROLE, format!("share {address} {url}"));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Peer(child, output)
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Loads with a peer that gets a signal after a while; returns how long after that this rank had its error, and the
/// error.
fn lost(url: &str, after: Duration, signal: &str, deadline: Duration) -> (Duration, Error) {
    let place = place(0);
    // Its peer is let in when this rank has joined, too.
    let mut peer = Peer::start(place.address().unwrap(), url);
    let coord = place.join(None, LONG).unwrap();
    let mut line = String::new();
    while !line.contains(MARK) {
        line.clear();
        assert!(peer.1.read_line(&mut line).unwrap() > 0, "the peer ended");
    }
    let engine = Engine::new(coord, STAGING_BYTES).unwrap();
    load_whole(&engine, url, LONG).unwrap();
    thread::scope(|threads| {
        let killer = threads.spawn(|| {
            thread::sleep(after);
            peer.signal(signal);
            Instant::now()
        });
        let error = loop {
            if let Err(error) = load_whole(&engine, url, deadline) {
                break error;
            }
        };
        let heard = Instant::now();
        std::io::stdout().flush().unwrap();
        (heard.duration_since(killer.join().unwrap()), error)
    })
}

#[test]
fn a_killed_peer_is_named_at_once() {
    let (place, truth) = (scratch(), matrix(4096));
    let url = saved(place.path(), &truth);
    for kill in 0..8 {
        let after = Duration::from_millis(7 * kill);
        let (waited, error) = lost(&url, after, "-KILL", LONG);
        assert!(waited < BOUNDED, "killed after {after:?}, heard {waited:?} later: {error}");
        assert!(error.kind == Kind::Unavailable && error.message.contains("rank 1"), "{error}");
    }
}

#[test]
fn a_stopped_peer_is_named_within_the_deadline() {
    let (place, truth) = (scratch(), matrix(4096));
    let url = saved(place.path(), &truth);
    let deadline = Duration::from_secs(2);
    let (waited, error) = lost(&url, Duration::from_millis(20), "-STOP", deadline);
    assert!(waited < 5 * deadline, "stopped, heard {waited:?} later: {error}");
    assert!(error.kind == Kind::Unavailable && error.message.contains("rank 1"), "{error}");
}
