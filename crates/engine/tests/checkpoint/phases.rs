//! Tests saves of eight real processes in a tree of several levels, one of which is killed by SIGKILL at each phase of
//! the save: the others' errors, the state that a fresh process finds, and that the next job continues from there.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use shardfast_coord::grpc::{Membership, Place};
use shardfast_coord::{Coord, Decide, Ports, Topology};
use shardfast_engine::staging::STAGING_BYTES_MIN;
use shardfast_engine::{Engine, Fences, Provider, Result, State, checkpoint, save_to};
use shardfast_store::disk::RealDisk;

use crate::crash::{Hooked, store};
use crate::job::{Job, LONG, Truth, destination};
use crate::kill::{Process, TOKEN, is_whole, tell};
use crate::layout::{Dice, Layout};

const WORLD: u32 = 8;
/// Deadline of an exchange between ranks, by which every rank must know how it ended.
const DEADLINE: Duration = Duration::from_secs(20);

const ROLE: &str = "SHARDFAST_TEST_RANK_AND_PHASE";
const ADDRESS: &str = "SHARDFAST_TEST_ADDRESS";

/// Phase at which a save stops.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Before the rank says that it is there.
    Opening,
    /// All ranks are there, and have a plan.
    Planned,
    /// The rank is about to copy from its first tensor.
    Staging,
    /// The rank has written a data file, which is not durable.
    Written,
    /// After all files of the rank are durable, names and contents, and before any other rank knows.
    Durable,
    /// Rank 0 knows that all are durable, and is about to publish.
    Publishing,
    /// `COMMIT` is to be seen, and not yet durable.
    Visible,
    /// After rank 0 has published, and before any other rank knows.
    Published,
    /// The rank knows that its save is committed.
    Committed,
}

impl Phase {
    const ALL: [Phase; 9] = [
        Phase::Opening,
        Phase::Planned,
        Phase::Staging,
        Phase::Written,
        Phase::Durable,
        Phase::Publishing,
        Phase::Visible,
        Phase::Published,
        Phase::Committed,
    ];

    /// Returns whether it is a phase of rank 0's decision, during which the others wait.
    fn is_decision(self) -> bool {
        matches!(self, Phase::Publishing | Phase::Visible | Phase::Published)
    }
}

fn topology() -> Topology {
    Topology::new(WORLD, WORLD, 2).unwrap()
}

fn layout() -> Layout {
    Layout::columns(WORLD)
}

fn truth() -> Truth {
    Truth::small(1, 400)
}

/// Gate at which this process stops, once, until the test lets it continue.
struct Gate {
    at: String,
    was_reached: AtomicBool,
}

impl Gate {
    fn pass(&self, phase: Phase) {
        if self.at == format!("{phase:?}") && !self.was_reached.swap(true, Ordering::SeqCst) {
            tell("there");
            io::stdin().lines().next();
        }
    }
}

struct GatedCoord(Arc<dyn Coord>, Arc<Gate>);

impl Coord for GatedCoord {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world(&self) -> u32 {
        self.0.world()
    }

    fn meeting(&self) -> shardfast_coord::Meeting {
        self.0.meeting()
    }

    fn host(&self) -> &str {
        self.0.host()
    }

    fn absent(&self, topic: &str) -> shardfast_coord::Absent {
        self.0.absent(topic)
    }

    fn agree(
        &self,
        topic: &str,
        contribution: std::result::Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> std::result::Result<Vec<u8>, shardfast_coord::Error> {
        let (is_open, is_commit) = (topic.ends_with("open"), topic.ends_with("commit"));
        if is_open || is_commit {
            self.1.pass(if is_open { Phase::Opening } else { Phase::Durable });
        }
        let mut decide = |parts| {
            let decision = decide(parts);
            if is_commit {
                self.1.pass(Phase::Published);
            }
            decision
        };
        let answer = self.0.agree(topic, contribution, &mut decide, deadline);
        if is_open {
            self.1.pass(Phase::Planned);
        }
        answer
    }
}

struct GatedProvider(Arc<dyn Provider>, Arc<Gate>);

impl Provider for GatedProvider {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.1.pass(Phase::Staging);
        self.0.fill(at, out, fences)
    }
}

/// Makes a rank's state for the save; its tensors' bytes come through the gate.
fn state(rank: u32, gate: &Arc<Gate>) -> State {
    let mut state = truth().state(&layout(), rank, &mut Dice(1));
    for (leaf, providers) in state.catalog.leaves.iter().zip(&mut state.providers) {
        if matches!(leaf.body, shardfast_format::LeafBody::Tensor { .. }) {
            for provider in providers {
                *provider = Arc::new(GatedProvider(Arc::clone(provider), Arc::clone(gate)));
            }
        }
    }
    state
}

fn disk(place: &Path, gate: &Arc<Gate>) -> Hooked<RealDisk> {
    let (place, gate) = (place.to_owned(), Arc::clone(gate));
    Hooked::new(&RealDisk, move |call, path| {
        let commit = place.join("COMMIT");
        match call {
            "fdatasync" if path.extension().is_some_and(|extension| extension == "safetensors") => {
                gate.pass(Phase::Written);
            }
            "rename_noreplace" if path == commit => gate.pass(Phase::Publishing),
            "fsync_dir" if path == place && commit.exists() => gate.pass(Phase::Visible),
            _ => {}
        }
        None
    })
}

/// Runs one of the processes; not a test by itself. Its role is its rank, the phase at which it stops, and the place of
/// the checkpoint.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let [rank, at, place] = role.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let (rank, url, at) = (rank.parse().unwrap(), place, at.to_owned());
    let gate = Arc::new(Gate { at, was_reached: AtomicBool::new(false) });
    let membership = Membership {
        host: "127.0.0.1".into(),
        ports: Ports::default(),
        rank,
        topology: topology(),
        token: TOKEN.into(),
        tls: None,
    };
    let place = Place::open(membership, 0).unwrap();
    let parent = match env::var(ADDRESS) {
        Ok(root) => Some(place.find_parent(&root, LONG).unwrap()),
        Err(_) => {
            tell(place.address().unwrap());
            None
        }
    };
    let coord = Arc::new(GatedCoord(place.join(parent.as_deref(), LONG).unwrap(), Arc::clone(&gate)));
    tell("joined");
    let engine = Engine::new(coord, STAGING_BYTES_MIN).unwrap();
    let store = store(disk(Path::new(url), &gate), url);
    let saved = save_to(&engine, store, destination(url), state(rank, &gate), DEADLINE).committed(None);
    if saved.is_ok() {
        gate.pass(Phase::Committed);
    }
    match saved {
        Ok(()) => tell("saved"),
        Err(error) => tell(&format!("failed: {:?}: {}", error.kind, error.message.replace('\n', " "))),
    }
    // A rank that leaves takes its part of the tree with it.
    io::stdin().lines().next();
}

/// The ranks of a job that has met and saves to a place, of which one stands still at a phase.
fn start(place: &Path, (holder, phase): (u32, Phase)) -> Vec<Process> {
    let process = |rank: u32, address: Option<&str>| {
        let at = if rank == holder { format!("{phase:?}") } else { "-".to_owned() };
        let role = format!("{rank} {at} {}", place.display());
        let variables = [(ROLE, role.as_str())].into_iter().chain(address.map(|address| (ADDRESS, address)));
        Process::start("phases::rank", variables)
    };
    let root = process(0, None);
    let address = root.hear();
    let ranks: Vec<Process> = [root].into_iter().chain((1..WORLD).map(|rank| process(rank, Some(&address)))).collect();
    ranks.iter().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    ranks
}

/// One save of eight processes, of which `victim` is killed at `phase`.
fn dies(victim: u32, phase: Phase) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("step-00000001");
    let what = format!("rank {victim} killed at {phase:?}");
    let holder = if phase.is_decision() { 0 } else { victim };
    let mut ranks = start(&place, (holder, phase));
    assert_eq!(ranks[holder as usize].hear(), "there", "{what}");
    ranks[victim as usize].kill();

    // Those below it are the first to know; rank 0 may still be deciding.
    let below = topology().subtree(victim);
    let mut heard: Vec<(u32, String)> = Vec::new();
    let mut hear = |ranks: &[Process], of: &dyn Fn(u32) -> bool| {
        heard.extend(
            (0..WORLD).filter(|&rank| rank != victim && of(rank)).map(|rank| (rank, ranks[rank as usize].hear())),
        );
    };
    hear(&ranks, &|rank| below.contains(&rank));
    if holder != victim {
        ranks[holder as usize].say("");
    }
    hear(&ranks, &|rank| !below.contains(&rank));

    let is_there = is_whole(&place, &truth());
    let expected = match phase {
        Phase::Visible | Phase::Published | Phase::Committed => true,
        // Its death does not keep rank 0 from publishing.
        Phase::Publishing => victim > 0,
        _ => false,
    };
    assert_eq!(is_there, expected, "{what}: {heard:?}");
    for (rank, told) in &heard {
        let knows_of_commit = is_there && !(phase == Phase::Publishing && below.contains(rank));
        let is_named = told.starts_with("failed: Unavailable: ") && told.contains(&format!("rank {victim} is lost"));
        assert!(if knows_of_commit { told == "saved" } else { is_named }, "{what}: rank {rank} says: {told}");
    }
    drop(ranks);
    goes_on(&place, is_there);
}

/// A job of the survivors' number saves and loads, over what is left.
fn goes_on(place: &Path, is_there: bool) {
    let place = if is_there { place.with_file_name("step-00000002") } else { PathBuf::from(place) };
    let (url, mut dice) = (place.to_str().unwrap(), Dice(2));
    let job = Job::new(Layout::columns(WORLD - 1));
    job.save(url, &truth(), &mut dice).unwrap();
    let found = job.compare(|engine| checkpoint::open(engine, url, LONG), &truth(), &mut dice);
    assert_eq!(found, Ok(None));
}

/// A leaf, a rank with others above and below it, and rank 0.
#[test]
fn a_rank_that_is_killed_at_any_phase_is_named_and_leaves_a_whole_checkpoint_or_none() {
    let topology = topology();
    let is_inner = |rank: &u32| *rank > 0 && topology.parent(*rank).is_some() && topology.height(*rank) > 0;
    let inner = (1..WORLD).find(is_inner).unwrap();
    let leaf = (1..WORLD).rev().find(|&rank| topology.height(rank) == 0).unwrap();
    assert!(topology.height(0) > 2, "a tree of several levels");
    thread::scope(|threads| {
        for victim in [0, inner, leaf] {
            threads.spawn(move || Phase::ALL.into_iter().for_each(|phase| dies(victim, phase)));
        }
    });
}
