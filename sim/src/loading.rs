//! Loads that ranks share, over what a meeting left: real engines, the real plan of who reads what and the real rounds
//! of messages; only the storage and the carrier of messages are simulated; the carrier may fail or forge them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_coord::{Absent, Coord, Decide, Error as Lost, Meeting};
use shardfast_engine::carrier::{Carrier, Message};
use shardfast_engine::staging::STAGING_BYTES_MIN;
use shardfast_engine::{Checkpoint, Engine, Error, Kind, Loaded, PeerReads, Result, ValueRef, checkpoint};
use shardfast_store::Store;
use shardfast_store::testing::sims3::{Ask, Fault};

use crate::journal::Journal;
use crate::objects::DEAD;
use crate::service::{Service, path};
use crate::storage::Storage;
use crate::trap::is_data;
use crate::truth::{Truth, Wanted};
use shardfast_store::testing::dice::Dice;

/// Of exchanges between ranks, in real time: all of them end sooner for another reason.
const DEADLINE: Duration = Duration::from_secs(60);

/// How often a rank is asked for its messages, in real time.
const GLANCE: Duration = Duration::from_micros(50);

/// The first rounds, in which things go wrong; many loads have no more.
const ROUNDS: u64 = 3;

const REFUSED: &str = "the switch is off";

/// What goes wrong in a load.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    Nothing,
    /// A byte of a data file is another one.
    Damage,
    /// A rank dies when it hands over the messages of that round.
    Crash {
        rank: u32,
        round: u64,
    },
    /// A rank's messages of that round cannot be carried.
    Refused {
        rank: u32,
        round: u64,
    },
    /// What a rank sends another one in that round: a byte of it changes, or its end is lost, or all of it.
    Bent {
        from: u32,
        to: u32,
        round: u64,
    },
    Cut {
        from: u32,
        to: u32,
        round: u64,
    },
    Silent {
        from: u32,
        to: u32,
        round: u64,
    },
    /// Another program replaces a data file of a service after a rank has opened it, before a rank reads on in it for
    /// the so-manieth time.
    Replaced {
        left: u64,
    },
    /// A request of a rank to a service fails, after so many others of it.
    Failed {
        rank: u32,
        left: u64,
        fault: Fault,
    },
}

/// What a service that refuses a rank for good says, and the load with it.
const DENIED: Fault = Fault::Answered(403);

const FAULTS: [Fault; 9] = [
    DENIED,
    Fault::Answered(500),
    Fault::Answered(503),
    Fault::Refused,
    Fault::Silent(false),
    Fault::Silent(true),
    Fault::Lost,
    Fault::Cut,
    Fault::ObjectTurned,
];

impl Trouble {
    fn draw(dice: &mut Dice, world: u32, storage: &Storage) -> Trouble {
        if matches!(storage, Storage::Objects(_)) && dice.once_in(3) {
            let failed =
                Trouble::Failed { rank: dice.below_u32(world), left: dice.below(6), fault: *dice.pick(&FAULTS) };
            return if dice.once_in(3) { Trouble::Replaced { left: dice.below(3) } } else { failed };
        }
        let (rank, round) = (dice.below_u32(world), dice.below(ROUNDS));
        let (from, to) = (rank, (rank + 1 + dice.below_u32(world - 1)) % world);
        *dice.pick(&[
            Trouble::Nothing,
            Trouble::Nothing,
            Trouble::Damage,
            Trouble::Crash { rank, round },
            Trouble::Refused { rank, round },
            Trouble::Bent { from, to, round },
            Trouble::Bent { from, to, round },
            Trouble::Cut { from, to, round },
            Trouble::Silent { from, to, round },
        ])
    }
}

/// What happens to the requests of a load.
struct Requests {
    trouble: Trouble,
    /// Files that ranks have opened.
    opened: BTreeSet<(u32, String)>,
    /// Requests so far before which it could have happened.
    passed: u64,
    has_happened: bool,
}

impl Requests {
    fn new(trouble: Trouble) -> Arc<Mutex<Requests>> {
        Arc::new(Mutex::new(Requests { trouble, opened: BTreeSet::new(), passed: 0, has_happened: false }))
    }

    /// Whether it happens now, if it happens to the request of that number.
    fn is_now(&mut self, number: u64) -> bool {
        self.passed += 1;
        let is_now = self.passed == number + 1;
        self.has_happened |= is_now;
        is_now
    }

    /// What goes wrong with a request of `rank`.
    fn fault(&mut self, rank: u32, ask: &Ask<'_>, service: &Service) -> Option<Fault> {
        let name = ask.name();
        let reads_on = || ask.what() == "get" && is_data(path(&name));
        match self.trouble {
            Trouble::Replaced { left } if reads_on() && !self.opened.insert((rank, name.clone())) => {
                if self.is_now(left) {
                    service.damage(path(&name), 0, 0);
                }
                None
            }
            Trouble::Failed { rank: failing, left, fault } if failing == rank && ask.what() != "credentials" => {
                self.is_now(left).then_some(fault)
            }
            _ => None,
        }
    }
}

/// What a rank that loads sees of the storage: at a service it has connections of its own, which end with it.
fn seen_by(mortal: &Arc<Mortal>, storage: &Storage, requests: &Arc<Mutex<Requests>>) -> Storage {
    let Storage::Objects(service) = storage else { return storage.clone() };
    let (mortal, requests, replaced) = (Arc::clone(mortal), Arc::clone(requests), service.clone());
    Storage::Objects(service.behind(move |ask| match mortal.coord() {
        None => Some(DEAD),
        Some(_) => requests.lock().unwrap_or_else(PoisonError::into_inner).fault(mortal.rank, ask, &replaced),
    }))
}

/// What a rank has of the load.
struct Outcome {
    loaded: Result<Loaded>,
    wanted: Vec<Wanted>,
}

/// A rank's place among the others until it dies.
struct Mortal {
    rank: u32,
    world: u32,
    meeting: Meeting,
    coord: Mutex<Option<Arc<dyn Coord>>>,
}

impl Mortal {
    fn coord(&self) -> Option<Arc<dyn Coord>> {
        self.coord.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn die(&self) {
        *self.coord.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Coord for Mortal {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn meeting(&self) -> Meeting {
        self.meeting
    }

    fn host(&self) -> &str {
        "simulated"
    }

    fn absent(&self, topic: &str) -> Absent {
        self.coord().map_or_else(Absent::default, |coord| coord.absent(topic))
    }

    fn agree(
        &self,
        topic: &str,
        contribution: std::result::Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> std::result::Result<Vec<u8>, Lost> {
        let lost = || Lost::Lost { rank: self.rank, cause: "its process has crashed".to_owned() };
        self.coord().ok_or_else(lost)?.agree(topic, contribution, decide, deadline)
    }
}

/// Loads what is committed at a place, shared between a few ranks that want random parts of it, while something goes
/// wrong.
///
/// # Errors
/// The first promise that was broken.
pub(crate) fn judge(
    dice: &mut Dice,
    storage: &Storage,
    place: &str,
    truth: &Truth,
    journal: &mut Journal,
) -> std::result::Result<String, String> {
    let world = 2 + dice.below_u32(3);
    let trouble = Trouble::draw(dice, world, storage);
    let storage = storage.left(1);
    let alone = Engine::new(shardfast_coord::solo(), STAGING_BYTES_MIN).map_err(|error| error.to_string())?;
    let opened = open(&alone, storage.open(place), place).map_err(|error| error.to_string())?;
    let values = values(&opened);
    let expected = opened.load(&[], &values, DEADLINE).map_err(|error| error.to_string())?;
    let there: u64 = opened.manifest().files().iter().map(|file| file.bytes - file.data_start).sum();
    if trouble == Trouble::Damage {
        damage(dice, &storage, place, &opened);
    }
    let (outcomes, has_happened) = load(dice, &storage, place, truth, world, trouble);

    let mut ending = "load: Ok".to_owned();
    for (rank, Outcome { loaded, wanted }) in (0..).zip(&outcomes) {
        let unproven = wanted.iter().find(|wanted| !truth.is_proven(wanted));
        hold!(unproven.is_none(), "rank {rank} has bytes that no rank saved, with {trouble:?}");
        let Ok(loaded) = loaded else { continue };
        hold!(wanted.iter().all(|wanted| truth.is_there(wanted)), "rank {rank} lacks bytes, with {trouble:?}");
        hold!(loaded.values == expected, "rank {rank} has other values, with {trouble:?}");
    }
    let living = outcomes
        .iter()
        .zip(0..)
        .filter(|(_, rank)| !matches!(trouble, Trouble::Crash { rank: dead, .. } if has_happened && dead == *rank));
    let living: Vec<(&Result<Loaded>, u32)> = living.map(|(outcome, rank)| (&outcome.loaded, rank)).collect();
    let failures: Vec<&Error> = living.iter().filter_map(|(loaded, _)| loaded.as_ref().err()).collect();
    hold!(
        failures.is_empty() || failures.len() == living.len(),
        "ranks end in two ways, with {trouble:?}: {failures:?}"
    );
    if let Some(first) = failures.first() {
        hold!(has_happened, "nothing went wrong, and the load failed: {first}");
        for error in &failures {
            expected_of(trouble, error)?;
        }
        ending = format!("load: {}", first.kind.name());
    } else {
        // The damage may have hit a byte that no rank wants; and most failures of requests pass.
        let may_pass = match trouble {
            Trouble::Damage => true,
            Trouble::Failed { fault, .. } => fault != DENIED,
            _ => false,
        };
        hold!(!has_happened || may_pass, "{trouble:?} is passed over");
        let traffic: Vec<_> =
            outcomes.iter().flat_map(|outcome| &outcome.loaded).map(|loaded| loaded.traffic).collect();
        if traffic.iter().all(|traffic| traffic.is_shared) {
            let read: u64 = traffic.iter().map(|traffic| traffic.bytes_read).sum();
            hold!(read <= there, "of {there} bytes the ranks read {read}");
            ending = "load: shared".to_owned();
        }
    }
    if has_happened && let Trouble::Replaced { .. } | Trouble::Failed { .. } = trouble {
        let how = if matches!(trouble, Trouble::Replaced { .. }) { "replaced" } else { "failed request" };
        ending = format!("load: {how}, {}", ending.trim_start_matches("load: "));
    }
    journal.headline(format!("{world} ranks load {place}, with {trouble:?}: {ending}"));
    Ok(ending)
}

/// Checks that all ranks report what went wrong.
fn expected_of(trouble: Trouble, error: &Error) -> std::result::Result<(), String> {
    let (kinds, words): (&[Kind], String) = match trouble {
        Trouble::Nothing => (&[], String::new()),
        Trouble::Damage => (&[Kind::Corrupt], "expected CRC-64".to_owned()),
        Trouble::Bent { from, .. } => (&[Kind::Corrupt], format!("rank {from}")),
        // What ends where it may end lacks what should follow.
        Trouble::Cut { .. } => (&[Kind::Corrupt, Kind::Internal], String::new()),
        Trouble::Silent { from, .. } => (&[Kind::Unavailable], format!("rank {from} sent no message")),
        Trouble::Refused { .. } => (&[Kind::Unavailable], REFUSED.to_owned()),
        Trouble::Crash { rank, .. } => (&[Kind::Unavailable], format!("rank {rank}")),
        Trouble::Failed { fault: DENIED, .. } => (&[Kind::Invalid], "AccessDenied".to_owned()),
        Trouble::Failed { .. } => (&[], String::new()),
        Trouble::Replaced { .. } => (&[Kind::Corrupt], "was replaced while it was read".to_owned()),
    };
    hold!(kinds.contains(&error.kind) && error.message.contains(&words), "with {trouble:?} a rank reports: {error:?}");
    Ok(())
}

fn open(engine: &Arc<Engine>, store: Result<Arc<dyn Store>>, place: &str) -> Result<Checkpoint> {
    checkpoint::open_from(engine, store, place, DEADLINE)
}

fn values(checkpoint: &Checkpoint) -> Vec<ValueRef> {
    let manifest = checkpoint.manifest();
    let of = |leaf: usize| (0..manifest.values(leaf).len()).map(move |value| ValueRef { leaf, value });
    (0..manifest.len()).flat_map(of).collect()
}

/// Changes a byte of the data.
fn damage(dice: &mut Dice, storage: &Storage, place: &str, checkpoint: &Checkpoint) {
    let files = checkpoint.manifest().files();
    let file = &files[dice.below(files.len() as u64) as usize];
    if file.bytes == file.data_start {
        return;
    }
    let at = file.data_start + dice.below(file.bytes - file.data_start);
    storage.damage(&Path::new(place).join(&file.path), at, dice.below(8));
}

/// What each rank has in the end, and whether the trouble came.
fn load(
    dice: &mut Dice,
    storage: &Storage,
    place: &str,
    truth: &Truth,
    world: u32,
    trouble: Trouble,
) -> (Vec<Outcome>, bool) {
    let mortal = |(rank, coord): (u32, Arc<dyn Coord>)| {
        let meeting = coord.meeting();
        Arc::new(Mortal { rank, world, meeting, coord: Mutex::new(Some(coord)) })
    };
    let mortals: Vec<Arc<Mortal>> = (0..).zip(shardfast_coord::local(world)).map(mortal).collect();
    let (handoffs, rounds): (Vec<_>, Vec<_>) = (0..world).map(|_| Handoff::new()).unzip();
    let wanted: Vec<Vec<Wanted>> = (0..world).map(|_| truth.wanted(dice)).collect();
    thread::scope(|threads| {
        let requests = Requests::new(trouble);
        let ranks = mortals.iter().zip(handoffs).zip(wanted).map(|((mortal, handoff), mut wanted)| {
            let engine = Engine::new(Arc::clone(mortal) as Arc<dyn Coord>, STAGING_BYTES_MIN);
            let storage = seen_by(mortal, storage, &requests);
            threads.spawn(move || {
                let load = || {
                    let opened = open(&engine?, storage.open(place), place)?;
                    let (wants, values) = (truth.wants(opened.manifest(), &mut wanted)?, values(&opened));
                    opened.load_by(PeerReads::Always, Some(Box::new(handoff)), &wants, &values, DEADLINE)
                };
                let loaded = load();
                Outcome { loaded, wanted }
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let has_happened = Links::new(rounds, trouble, dice).carry(&mortals) || trouble == Trouble::Damage;
        let ended = |rank: thread::ScopedJoinHandle<'_, Outcome>| rank.join().expect("a load does not panic");
        let outcomes = ranks.into_iter().map(ended).collect();
        let at_a_request = requests.lock().unwrap_or_else(PoisonError::into_inner).has_happened;
        (outcomes, has_happened || at_a_request)
    })
}

/// A rank's carrier, which hands its messages over to [`Links`].
struct Handoff {
    messages: SyncSender<BTreeMap<u32, Message>>,
    received: Receiver<Result<BTreeMap<u32, Vec<u8>>>>,
}

/// The other end of a [`Handoff`].
struct Rounds {
    messages: Receiver<BTreeMap<u32, Message>>,
    received: SyncSender<Result<BTreeMap<u32, Vec<u8>>>>,
}

impl Handoff {
    fn new() -> (Handoff, Rounds) {
        let (to_links, messages) = sync_channel(0);
        let (received, from_links) = sync_channel(1);
        (Handoff { messages: to_links, received: from_links }, Rounds { messages, received })
    }
}

impl Carrier for Handoff {
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>> {
        let gone = || Error::new(Kind::Unavailable, "the links are gone");
        self.messages.send(messages).map_err(|_| gone())?;
        self.received.recv().map_err(|_| gone())?
    }
}

impl Rounds {
    fn received(&self, messages: Result<BTreeMap<u32, Vec<u8>>>) {
        // A load that ended takes no more.
        let _ = self.received.try_send(messages);
    }
}

/// Carries the messages between all ranks.
struct Links {
    trouble: Trouble,
    /// Where in a message.
    at: u64,
    /// None once the rank has ended or died.
    rounds: Vec<Option<Rounds>>,
    /// By rank: the rounds that it began.
    begun: Vec<u64>,
    /// By rank: from whom it waits for a message.
    waiting: Vec<Option<Vec<u32>>>,
    /// By sender and receiver: what is on its way; `None` where it was lost.
    on_the_way: BTreeMap<(u32, u32), VecDeque<Option<Vec<u8>>>>,
}

impl Links {
    fn new(rounds: Vec<Rounds>, trouble: Trouble, dice: &mut Dice) -> Links {
        let (world, at) = (rounds.len(), dice.next());
        let rounds = rounds.into_iter().map(Some).collect();
        Links { trouble, at, rounds, begun: vec![0; world], waiting: vec![None; world], on_the_way: BTreeMap::new() }
    }

    /// Carries messages until no rank needs more. Returns whether the trouble happened.
    fn carry(mut self, mortals: &[Arc<Mortal>]) -> bool {
        let (started, mut has_happened) = (Instant::now(), false);
        while self.rounds.iter().any(Option::is_some) {
            assert!(started.elapsed() < DEADLINE, "a load has no end");
            for rank in 0..self.rounds.len() as u32 {
                has_happened |= self.collect(rank, mortals);
                self.deliver(rank);
            }
        }
        has_happened
    }

    /// Takes what a rank sends in its next round, if it is so far.
    fn collect(&mut self, rank: u32, mortals: &[Arc<Mortal>]) -> bool {
        let place = rank as usize;
        let Some(rounds) = self.rounds[place].as_ref().filter(|_| self.waiting[place].is_none()) else { return false };
        let messages = match rounds.messages.recv_timeout(GLANCE) {
            Ok(messages) => messages,
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                self.rounds[place] = None;
                return false;
            }
        };
        let round = self.begun[place];
        self.begun[place] += 1;
        match self.trouble {
            Trouble::Crash { rank: dying, round: then } if (dying, then) == (rank, round) => {
                mortals[place].die();
                self.rounds[place] = None;
                return true;
            }
            Trouble::Refused { rank: refused, round: then } if (refused, then) == (rank, round) => {
                rounds.received(Err(Error::new(Kind::Unavailable, REFUSED)));
                return true;
            }
            _ => {}
        }
        let mut has_happened = false;
        self.waiting[place] = Some(messages.keys().copied().collect());
        for (to, message) in messages {
            let (message, is_other) = self.altered((rank, to, round), message);
            has_happened |= is_other;
            self.on_the_way.entry((rank, to)).or_default().push_back(message);
        }
        has_happened
    }

    /// A message as it arrives, and whether it is another one than was sent.
    fn altered(&self, way: (u32, u32, u64), message: Message) -> (Option<Vec<u8>>, bool) {
        let mut bytes: Vec<u8> = message.iter().flat_map(|piece| piece.iter().copied()).collect();
        let at = (self.at % bytes.len() as u64) as usize;
        match self.trouble {
            Trouble::Bent { from, to, round } if (from, to, round) == way => bytes[at] ^= 1 << (self.at >> 61),
            Trouble::Cut { from, to, round } if (from, to, round) == way => bytes.truncate(at),
            Trouble::Silent { from, to, round } if (from, to, round) == way => return (None, true),
            _ => return (Some(bytes), false),
        }
        (Some(bytes), true)
    }

    /// Gives a rank what it waits for, once all of it is there or a rank will never send it.
    fn deliver(&mut self, rank: u32) {
        let place = rank as usize;
        let (Some(rounds), Some(from)) = (&self.rounds[place], &self.waiting[place]) else { return };
        let is_there = |of: &u32| self.on_the_way.get(&(*of, rank)).is_some_and(|messages| !messages.is_empty());
        let missing: Vec<u32> = from.iter().copied().filter(|of| !is_there(of)).collect();
        if let Some(gone) = missing.iter().find(|of| self.rounds[**of as usize].is_none()) {
            rounds.received(Err(Error::new(Kind::Unavailable, format!("rank {gone} is lost"))));
        } else if missing.is_empty() {
            let mut next = |of: &u32| Some((*of, self.on_the_way.get_mut(&(*of, rank))?.pop_front()??));
            rounds.received(Ok(from.iter().filter_map(&mut next).collect()));
        } else {
            return;
        }
        self.waiting[place] = None;
    }
}
