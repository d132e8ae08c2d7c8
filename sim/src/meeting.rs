//! One meeting of ranks, from its first save to its last word, in virtual time.
//!
//! Every rank is an engine with threads of its own. The simulation lets one save of one rank run at a time, until it
//! waits in `agree` with nothing else to do, or has ended; only then does time pass, to the next event. So what happens
//! is a function of the scenario, whatever the scheduler does.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use shardfast_coord::node::{Downward, Effect, Effects, Node, Reply, Upward};
use shardfast_coord::{Error as Coord, Meeting as Name};
use shardfast_engine::staging::STAGING_BYTES_MIN;
use shardfast_engine::{Destination, Engine, Error, Kind, Pending, Result, save_to};

use crate::journal::{Journal, of_downward, of_upward};
use crate::process::{Call, Process, ProcessCoord, Word};
use crate::scenario::{Scenario, Weather, What};
use crate::storage::Storage;
use crate::truth::{Mischief, TOUCHED};
use crate::view::RankStorage;
use crate::window;
use shardfast_store::testing::dice::Dice;

/// The longest that a message is on its way, unless its link is cut.
pub(crate) const DELAY_MAX: Duration = Duration::from_millis(300);

/// The longest until an end of a broken link knows.
pub(crate) const DETECTION_MAX: Duration = Duration::from_secs(2);

/// How often a rank that works is looked at, in real time.
pub(crate) const GLANCE: Duration = Duration::from_micros(50);

/// The longest that a rank works before it waits for others, in real time.
pub(crate) const HANGS: Duration = Duration::from_secs(60);

/// More events than any meeting has.
const EVENTS_MAX: u64 = 200_000;

/// The result of a meeting.
pub(crate) struct Past {
    pub(crate) calls: Vec<OneCall>,
    /// By save, then by rank: the outcomes of surviving ranks.
    pub(crate) outcomes: Vec<BTreeMap<u32, Result<()>>>,
    /// By save: what a later job would have found when the first rank got its success.
    pub(crate) promised: BTreeMap<usize, Storage>,
    /// By topic: when rank 0 had everything.
    pub(crate) complete: BTreeMap<String, Duration>,
    pub(crate) crashed: BTreeMap<u32, Duration>,
    /// Over all saves and ranks.
    pub(crate) ahead_bytes: u64,
    /// By the rank below.
    pub(crate) broken: BTreeMap<u32, Duration>,
    /// By the rank below: from when to when nothing came through.
    pub(crate) partitions: Vec<(u32, Range<Duration>)>,
    /// The ranks that were stopped, from when to when.
    pub(crate) stops: Vec<(u32, Range<Duration>)>,
    /// What later jobs would have found on the way.
    pub(crate) blackouts: Vec<Blackout>,
    pub(crate) events: u64,
}

impl Past {
    /// Whether anything came later than links and processes take by themselves.
    pub(crate) fn was_held_up(&self) -> bool {
        !self.partitions.is_empty() || !self.stops.is_empty()
    }
}

/// The end of all processes at once.
pub(crate) struct Blackout {
    /// The storage that the next process finds.
    pub(crate) left: Storage,
    /// The saves that any rank had reported as committed.
    pub(crate) promised: Vec<usize>,
}

/// A call of `agree`, as its rank has it.
pub(crate) struct OneCall {
    pub(crate) rank: u32,
    /// The save that makes it: topics have numbers of their own once a rank has left a call out.
    save: usize,
    pub(crate) topic: String,
    pub(crate) deadline: Duration,
    /// When its node had it.
    pub(crate) came: Option<Duration>,
    pub(crate) answered: Option<(Duration, std::result::Result<Vec<u8>, Coord>)>,
    /// Whether it was asked to decide.
    pub(crate) decides: bool,
    reply: Option<Sender<Reply>>,
}

struct Rank {
    process: Arc<Process>,
    storage: RankStorage,
    engine: Arc<Engine>,
    /// None once it has crashed.
    node: Option<Node<usize>>,
    /// By save.
    tasks: BTreeMap<usize, Task>,
}

struct Task {
    pending: Pending,
    has_ended: bool,
}

#[derive(Default)]
struct Link {
    cut_until: Duration,
    is_broken: bool,
    /// The ends that know that it is.
    known_by: BTreeSet<u32>,
}

enum Event {
    Begin { rank: u32, save: usize },
    Come { call: usize, contribution: std::result::Result<Vec<u8>, String> },
    Up { child: u32, message: Upward },
    Down { child: u32, message: Downward },
    Gone { rank: u32, child: u32, cause: &'static str },
    Decide { call: usize, parts: Vec<Vec<u8>> },
    Decided { call: usize, decision: std::result::Result<Vec<Vec<u8>>, String> },
    Resume { call: usize },
    Answered { call: usize, answer: std::result::Result<Vec<u8>, Coord> },
}

/// What a rank waits for.
enum Quiet {
    Waits,
    Decided(std::result::Result<Vec<Vec<u8>>, String>),
    Slow(Duration, Sender<()>),
}

pub(crate) struct Meeting<'a> {
    scenario: Scenario,
    storage: &'a Storage,
    journal: &'a mut Journal,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Event>,
    scheduled: u64,
    ranks: Vec<Rank>,
    /// By the rank below.
    links: BTreeMap<u32, Link>,
    words: Receiver<Word>,
    /// What holds rank 0 up in a slow operation, by the call that it decides.
    slow: BTreeMap<usize, Sender<()>>,
    past: Past,
}

impl<'a> Meeting<'a> {
    pub(crate) fn new(scenario: Scenario, storage: &'a Storage, journal: &'a mut Journal) -> Meeting<'a> {
        let (sender, words) = channel();
        let topology = scenario.topology;
        let rank = |rank| {
            let traps = scenario.traps.iter().filter(|(of, _)| *of == rank).map(|(_, trap)| trap.clone()).collect();
            let process = Process::new(rank, sender.clone(), traps);
            let (world, meeting) = (topology.world(), Name(scenario.meeting));
            let coord = ProcessCoord { process: Arc::clone(&process), world, meeting };
            let staging_bytes = if scenario.windows.is_some() { window::STAGING_BYTES } else { STAGING_BYTES_MIN };
            let engine = Engine::new(Arc::new(coord), staging_bytes).expect("no less than is allowed");
            Rank {
                storage: RankStorage::of(storage, &process),
                process,
                engine,
                node: Some(Node::new(&topology, rank)),
                tasks: BTreeMap::new(),
            }
        };
        let past = Past {
            calls: Vec::new(),
            outcomes: vec![BTreeMap::new(); scenario.saves.len()],
            promised: BTreeMap::new(),
            complete: BTreeMap::new(),
            crashed: BTreeMap::new(),
            ahead_bytes: 0,
            broken: BTreeMap::new(),
            partitions: Vec::new(),
            stops: Vec::new(),
            blackouts: Vec::new(),
            events: 0,
        };
        Meeting {
            ranks: (0..topology.world()).map(rank).collect(),
            links: (1..topology.world()).map(|child| (child, Link::default())).collect(),
            scenario,
            storage,
            journal,
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            scheduled: 0,
            words,
            slow: BTreeMap::new(),
            past,
        }
    }

    /// Until nothing more can happen.
    ///
    /// # Panics
    /// When a rank waits for nothing, or works without end.
    pub(crate) fn run(mut self) -> (Scenario, Past) {
        for rank in 0..self.scenario.topology.world() {
            self.begin_soon(rank, 0);
        }
        loop {
            self.past.events += 1;
            assert!(self.past.events < EVENTS_MAX, "the meeting has no end");
            let event = self.past.events;
            let due: Vec<What> =
                self.scenario.faults.extract_if(.., |fault| fault.event < event).map(|f| f.what).collect();
            due.into_iter().for_each(|what| self.apply(what));
            let Some(next) = self.next() else { break };
            match next {
                Next::Tick { rank, at } => {
                    self.now = self.now.max(at);
                    let now = self.now;
                    self.act(rank, |node| node.tick(now));
                }
                Next::Event(key) => {
                    // A fault may have taken it away.
                    if let Some(event) = self.queue.remove(&key) {
                        self.now = self.now.max(key.0);
                        self.happen(event);
                    }
                }
            }
        }
        for (rank, save, task) in self.tasks() {
            assert!(task.has_ended, "rank {rank} never gets the outcome of save {save}");
        }
        (self.scenario, self.past)
    }

    fn next(&self) -> Option<Next> {
        let event = self.queue.keys().next().copied();
        let due = |rank: &Rank| {
            let due = rank.node.as_ref()?.due()?;
            Some((due.max(self.still_until(rank.process.rank)), rank.process.rank))
        };
        let tick = self.ranks.iter().filter_map(due).min();
        match (event, tick) {
            (Some(key), Some((at, rank))) if at < key.0 => Some(Next::Tick { rank, at }),
            (Some(key), _) => Some(Next::Event(key)),
            (None, tick) => tick.map(|(at, rank)| Next::Tick { rank, at }),
        }
    }

    fn tasks(&self) -> impl Iterator<Item = (u32, usize, &Task)> {
        let of = |rank: &'_ Rank| rank.process.rank;
        let living = self.ranks.iter().filter(|rank| rank.node.is_some());
        living.flat_map(move |rank| rank.tasks.iter().map(move |(save, task)| (of(rank), *save, task)))
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.scheduled += 1;
        self.queue.insert((self.now + after, self.scheduled), event);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        self.journal.note(self.now, text);
    }

    fn is_dead(&self, rank: u32) -> bool {
        self.ranks[rank as usize].node.is_none()
    }

    fn is_slow(&self) -> bool {
        matches!(self.scenario.weather, Weather::Slow | Weather::Storm)
    }

    /// How long a rank works before it comes to an agreement, or over one.
    fn work(&mut self, once_in: u64) -> Duration {
        let is_slow = self.is_slow() && self.scenario.dice.once_in(once_in);
        self.scenario.dice.time(if is_slow { Duration::from_secs(50) } else { Duration::from_millis(60) })
    }

    fn begin_soon(&mut self, rank: u32, save: usize) {
        if save < self.scenario.saves.len() {
            let after = self.work(40);
            self.schedule(after, Event::Begin { rank, save });
        }
    }

    /// When the last stop of that rank ends; zero without one.
    fn still_until(&self, rank: u32) -> Duration {
        let stops = self.past.stops.iter().filter(|(stopped, _)| *stopped == rank);
        stops.map(|(_, stop)| stop.end).max().unwrap_or_default()
    }

    /// In which process it happens.
    fn place(&self, event: &Event) -> u32 {
        let caller = |call: usize| self.past.calls[call].rank;
        match event {
            Event::Begin { rank, .. } | Event::Gone { rank, .. } => *rank,
            Event::Come { call, .. } | Event::Answered { call, .. } => caller(*call),
            Event::Up { child, .. } => self.scenario.topology.parent(*child).unwrap_or_default(),
            Event::Down { child, .. } => *child,
            Event::Decide { .. } | Event::Decided { .. } | Event::Resume { .. } => 0,
        }
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        let place = self.place(&event);
        let still_until = self.still_until(place);
        if still_until > now && !self.is_dead(place) {
            // Its clock runs on: when it goes on, it finds what is overdue before what has arrived.
            return self.schedule(still_until - now + Duration::from_nanos(1), event);
        }
        match event {
            Event::Begin { rank, save } => self.begin(rank, save),
            Event::Answered { call, answer } => self.answered(call, answer),
            Event::Come { call, contribution } => {
                let OneCall { rank, topic, deadline, .. } = &self.past.calls[call];
                let (rank, topic, deadline) = (*rank, topic.clone(), *deadline);
                if self.is_dead(rank) {
                    return;
                }
                self.past.calls[call].came = Some(now);
                self.note(|| {
                    format!("rank {rank} comes to {topic:?}{}", if contribution.is_ok() { "" } else { ", failed" })
                });
                self.act(rank, |node| node.contribute(&topic, contribution, call, now, deadline));
            }
            Event::Up { child, message } => {
                let Some(parent) = self.scenario.topology.parent(child) else { return };
                if self.arrives(child, parent) {
                    if self.links[&child].cut_until > now {
                        return self.wait_for_link(child, Event::Up { child, message });
                    }
                    self.note(|| format!("rank {child} -> {parent}: {}", of_upward(&message)));
                    self.act(parent, |node| node.receive_from_child(child, message, now));
                }
            }
            Event::Down { child, message } => {
                let Some(parent) = self.scenario.topology.parent(child) else { return };
                if self.arrives(child, child) {
                    if self.links[&child].cut_until > now {
                        return self.wait_for_link(child, Event::Down { child, message });
                    }
                    self.note(|| format!("rank {parent} -> {child}: {}", of_downward(&message)));
                    self.act(child, |node| node.receive_from_parent(message, now));
                }
            }
            Event::Gone { rank, child, cause } => {
                self.links.entry(child).or_default().known_by.insert(rank);
                self.note(|| format!("rank {rank} finds its link broken (rank {child} and its parent)"));
                match rank == child {
                    true => self.act(rank, |node| node.lose_parent(cause, now)),
                    false => self.act(rank, |node| node.lose(child, cause, now)),
                }
            }
            Event::Decide { call, parts } => {
                let OneCall { topic, reply, .. } = &self.past.calls[call];
                // It may have timed out meanwhile, or crashed.
                let Some(reply) = reply else { return };
                let _ = reply.send(Reply::Decide(parts));
                let topic = topic.clone();
                self.note(|| format!("rank 0 decides {topic:?}"));
                self.decide(call);
            }
            Event::Resume { call } => {
                self.slow.remove(&call);
                if !self.is_dead(0) {
                    self.decide(call);
                }
            }
            Event::Decided { call, decision } => {
                if self.is_dead(0) {
                    return;
                }
                let topic = self.past.calls[call].topic.clone();
                let verdict = if decision.is_ok() { "yes" } else { "no" };
                self.note(|| format!("rank 0 has decided {topic:?}: {verdict}"));
                let mut own = None;
                self.act(0, |node| {
                    let (answer, effects) = node.decided(&topic, decision);
                    own = Some(answer);
                    effects
                });
                if let Some(own) = own {
                    self.answer(call, own);
                }
            }
        }
    }

    /// Whether what is on the link of `child` still arrives at its end `to`.
    fn arrives(&self, child: u32, to: u32) -> bool {
        !self.is_dead(to) && !self.links[&child].known_by.contains(&to)
    }

    fn wait_for_link(&mut self, child: u32, event: Event) {
        let open = self.links[&child].cut_until;
        let after = open - self.now + self.scenario.dice.time(DELAY_MAX / 10);
        self.schedule(after, event);
    }

    /// A node changes, and what follows from it.
    fn act(&mut self, rank: u32, act: impl FnOnce(&mut Node<usize>) -> Effects<usize>) {
        let Some(node) = &mut self.ranks[rank as usize].node else { return };
        for effect in act(node) {
            match effect {
                Effect::Up(message) => self.send(rank, |message| Event::Up { child: rank, message }, message),
                Effect::Down(child, message) => self.send(child, |message| Event::Down { child, message }, message),
                Effect::Reply(call, Reply::Answer(answer)) => self.answer(call, answer),
                Effect::Reply(call, Reply::Failed(error, _)) => self.answer(call, Err(error)),
                Effect::Reply(call, Reply::Decide(parts)) => {
                    let topic = self.past.calls[call].topic.clone();
                    self.past.complete.insert(topic, self.now);
                    self.past.calls[call].decides = true;
                    let after = self.work(6);
                    self.schedule(after, Event::Decide { call, parts });
                }
            }
        }
    }

    /// Over the link of `child`, perhaps twice.
    fn send<M: Clone>(&mut self, child: u32, event: impl Fn(M) -> Event, message: M) {
        if self.links[&child].is_broken {
            return;
        }
        let copies = if self.scenario.dice.once_in(10) { 2 } else { 1 };
        for _ in 0..copies {
            let is_late = self.scenario.dice.once_in(20);
            let delay = self.scenario.dice.time(if is_late { DELAY_MAX } else { DELAY_MAX / 15 });
            self.schedule(delay, event(message.clone()));
        }
    }

    fn answer(&mut self, call: usize, answer: std::result::Result<Vec<u8>, Coord>) {
        let OneCall { rank, topic, answered, .. } = &mut self.past.calls[call];
        assert!(answered.is_none(), "rank {rank} is answered twice on {topic:?}");
        *answered = Some((self.now, answer.clone()));
        // Until the thread that waits is woken.
        let after = self.work(50);
        self.schedule(after, Event::Answered { call, answer });
    }

    fn answered(&mut self, call: usize, answer: std::result::Result<Vec<u8>, Coord>) {
        let OneCall { rank, save, topic, reply, .. } = &mut self.past.calls[call];
        // It may have crashed meanwhile.
        let Some(reply) = reply.take() else { return };
        let (rank, save, topic) = (*rank, *save, topic.clone());
        self.note(|| match &answer {
            Ok(_) => format!("rank {rank} has its answer on {topic:?}"),
            Err(error) => format!("rank {rank} gets on {topic:?}: {error}"),
        });
        let _ = reply.send(Reply::Answer(answer));
        drop(reply);
        self.proceed(rank, save);
    }

    fn begin(&mut self, rank: u32, save: usize) {
        if self.is_dead(rank) {
            return;
        }
        if let Some((_, elsewhere)) = self.scenario.saves[save].left_out.filter(|(absent, _)| *absent == rank) {
            self.note(|| format!("rank {rank} leaves save {save} out"));
            return self.schedule(elsewhere, Event::Begin { rank, save: save + 1 });
        }
        self.note(|| format!("rank {rank} begins save {save}"));
        let spec = &self.scenario.saves[save];
        let mischief = spec.mischief.filter(|(culprit, _)| *culprit == rank).map(|(_, mischief)| mischief);
        let elsewhere = mischief == Some(Mischief::OtherUrl);
        let destination = Destination {
            url: if elsewhere { format!("{}-elsewhere", spec.place) } else { spec.place.clone() },
            step: Some(save as u64),
            user: BTreeMap::from([("save".to_owned(), save.to_string())]),
            prove: spec.prove,
            blocking: true,
        };
        let rank_of = &self.ranks[rank as usize];
        let store = rank_of.storage.open(&destination.url);
        let (state, deadline) = (spec.truth.state(rank, mischief, spec.is_lazy), spec.deadline);
        let ahead = self.scenario.windows.as_ref().and_then(|windows| {
            let mut dice = Dice(windows.0 ^ (u64::from(rank) << 32 | save as u64));
            window::captured(&rank_of.engine, &state, &mut dice)
        });
        let (state, held) = match ahead {
            Some((captured, held)) => (captured.over(state), held),
            None => (state, 0),
        };
        self.past.ahead_bytes += held;
        let pending = save_to(&rank_of.engine, store, destination, state, deadline);
        let was_touched = mischief == Some(Mischief::Touched);
        pending.confirm_unmodified(if was_touched { Err(Error::new(Kind::Invalid, TOUCHED)) } else { Ok(()) });
        if held > 0 {
            self.note(|| format!("rank {rank} has captured {held} bytes of save {save} ahead of it"));
        }
        let task = Task { pending, has_ended: false };
        self.ranks[rank as usize].tasks.insert(save, task);
        if self.scenario.saves.get(save + 1).is_some_and(|next| next.overlaps) {
            self.begin_soon(rank, save + 1);
        }
        self.proceed(rank, save);
    }

    /// A save of a rank goes on until it waits for others again, or has ended.
    fn proceed(&mut self, rank: u32, save: usize) {
        let quiet = self.work_off(rank, save);
        assert!(matches!(quiet, None | Some(Quiet::Waits)), "rank {rank} decides what it was not asked to decide");
        if quiet.is_none() {
            return;
        }
        let Some(task) = self.ranks[rank as usize].tasks.get_mut(&save) else { return };
        if !task.pending.done() {
            return;
        }
        task.has_ended = true;
        let outcome = task.pending.committed(None);
        self.note(|| match &outcome {
            Ok(()) => format!("rank {rank} has committed save {save}"),
            Err(error) => format!("rank {rank} has lost save {save}: {:?}: {error}", error.kind),
        });
        if outcome.is_ok() {
            let storage = self.storage;
            self.past.promised.entry(save).or_insert_with(|| storage.left(0));
        }
        self.past.outcomes[save].insert(rank, outcome);
        if self.scenario.saves.get(save + 1).is_some_and(|next| !next.overlaps) {
            self.begin_soon(rank, save + 1);
        }
    }

    /// Rank 0 goes on deciding.
    fn decide(&mut self, call: usize) {
        let save = self.past.calls[call].save;
        match self.work_off(0, save) {
            None => {}
            Some(Quiet::Waits) => panic!("rank 0 does not decide save {save}"),
            Some(Quiet::Slow(time, resume)) => {
                self.slow.insert(call, resume);
                self.note(|| format!("rank 0's storage takes {time:?}"));
                self.schedule(time, Event::Resume { call });
            }
            Some(Quiet::Decided(decision)) => {
                let after = self.work(6);
                self.schedule(after, Event::Decided { call, decision });
            }
        }
    }

    /// Lets one save of one rank run in real time, until it waits; `None` when the rank has died of it.
    fn work_off(&mut self, rank: u32, save: usize) -> Option<Quiet> {
        let started = Instant::now();
        let mut called: Option<Call> = None;
        loop {
            let mut quiet = None;
            match self.words.recv_timeout(GLANCE) {
                Ok(Word::Called(call)) => called = Some(call),
                Ok(Word::Decided(decision)) => quiet = Some(Quiet::Decided(decision)),
                Ok(Word::Slow { time, resume }) => quiet = Some(Quiet::Slow(time, resume)),
                Ok(Word::Blackout(left)) => self.black_out(left),
                Ok(Word::Hurries { .. }) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            let task = self.ranks[rank as usize].tasks.get(&save)?;
            let waits = called.as_ref().is_some_and(|call| has_written(&task.pending, &call.topic));
            if waits || task.pending.done() {
                quiet = Some(Quiet::Waits);
            }
            // Only now: what is quiet cannot die any more.
            if self.ranks[rank as usize].process.is_dead() {
                drop((called, quiet));
                self.crash(rank);
                return None;
            }
            if quiet.is_some() {
                called.into_iter().for_each(|call| self.called(call, save));
                return quiet;
            }
            assert!(started.elapsed() < HANGS, "rank {rank} works on save {save} without end");
        }
    }

    fn black_out(&mut self, left: Storage) {
        let is_promised = |outcomes: &BTreeMap<u32, Result<()>>| outcomes.values().any(Result::is_ok);
        let promised = (0..).zip(&self.past.outcomes).filter(|(_, ranks)| is_promised(ranks)).map(|(save, _)| save);
        let promised = promised.collect();
        self.past.blackouts.push(Blackout { left, promised });
    }

    fn called(&mut self, call: Call, save: usize) {
        let Call { rank, topic, contribution, deadline, reply } = call;
        let (id, reply) = (self.past.calls.len(), Some(reply));
        self.past.calls.push(OneCall {
            rank,
            save,
            topic,
            deadline,
            came: None,
            answered: None,
            decides: false,
            reply,
        });
        let after = self.work(25);
        self.schedule(after, Event::Come { call: id, contribution });
    }

    fn apply(&mut self, what: What) {
        match what {
            What::Crash { rank } if !self.is_dead(rank) => self.crash(rank),
            What::Crash { .. } => {}
            What::Break { child } => {
                self.note(|| format!("the link of rank {child} to its parent breaks"));
                self.past.broken.entry(child).or_insert(self.now);
                self.break_link(child, "the connection broke");
            }
            What::Partition { child, time } => {
                self.note(|| format!("nothing comes through from rank {child} to its parent for {time:?}"));
                let until = self.now + time;
                self.past.partitions.push((child, self.now..until));
                let link = self.links.entry(child).or_default();
                link.cut_until = link.cut_until.max(until);
            }
            What::Stop { rank, time } => {
                self.note(|| format!("rank {rank} stands still for {time:?}"));
                self.past.stops.push((rank, self.now..self.now + time));
            }
        }
    }

    fn crash(&mut self, rank: u32) {
        self.note(|| format!("rank {rank} crashes"));
        self.ranks[rank as usize].process.die();
        self.bury(rank);
        self.ranks[rank as usize].node = None;
        self.past.crashed.insert(rank, self.now);
        let children = self.scenario.topology.children(rank).into_iter().map(|subtree| subtree.start);
        for child in children.chain((rank > 0).then_some(rank)) {
            self.break_link(child, "its process has crashed");
        }
    }

    /// Both ends find out, each in its time.
    fn break_link(&mut self, child: u32, cause: &'static str) {
        let Some(parent) = self.scenario.topology.parent(child) else { return };
        let link = self.links.entry(child).or_default();
        if std::mem::replace(&mut link.is_broken, true) {
            return;
        }
        for rank in [parent, child] {
            let after = self.scenario.dice.time(DETECTION_MAX);
            self.schedule(after, Event::Gone { rank, child, cause });
        }
    }

    /// Waits, in real time, until no thread of a dead process does anything any more.
    fn bury(&mut self, rank: u32) {
        if rank == 0 {
            self.slow.clear();
        }
        for call in self.past.calls.iter_mut().filter(|call| call.rank == rank) {
            call.reply = None;
        }
        let started = Instant::now();
        while !self.ranks[rank as usize].tasks.values().all(|task| task.pending.done()) {
            // No other rank runs: these are its last messages.
            drop(self.words.recv_timeout(GLANCE));
            assert!(started.elapsed() < HANGS, "rank {rank} is dead and works on");
        }
        while self.words.try_recv().is_ok() {}
    }
}

enum Next {
    Tick { rank: u32, at: Duration },
    Event((Duration, u64)),
}

/// Whether nothing of a save that waits on `topic` is at work beside the wait. A rank writes while it waits on the
/// plan, if it has drafted one; and while it waits on the values, always.
fn has_written(pending: &Pending, topic: &str) -> bool {
    let phases = pending.report().phases_ms;
    let may_wait_for_orders = ["open", "plan", "compare"].iter().any(|stage| topic.ends_with(stage));
    pending.has_written() || (may_wait_for_orders && !phases.contains_key("planned"))
}
