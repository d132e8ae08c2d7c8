//! Trainings whose ranks get signals to stop, in seeded virtual time.
//!
//! Ranks train step by step, together or a few steps apart, each with the real [`Stopping`] over the real
//! [nodes](shardfast_coord::node); any ranks get the signal at any moment. [`train`] checks:
//!
//! * Ranks that stop after a signal all stop after the same step, which none had passed.
//! * Without faults every rank stops soon, whichever rank gets the signal and however often.
//! * No rank sends a message before the first signal, or before the first rank ends.
//! * Whatever is lost, held up or ended early, no rank waits for the agreement without end.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use shardfast_coord::node::{Contribution, Downward, Effect, Effects, Node, Reply, Upward};
use shardfast_coord::{Error, Meeting, Stopping, Topology};
use shardfast_store::testing::dice::Dice;

use crate::journal::{Journal, of_downward, of_upward};
use crate::meeting::{DELAY_MAX, DETECTION_MAX, GLANCE, HANGS};
use crate::process::{Call, Process, ProcessCoord, Word};
use crate::{Run, Weather};

/// Time for which ranks wait for each other after the first signal.
const DEADLINE: Duration = Duration::from_secs(5);

/// The longest that a step takes.
const STEP_MAX: Duration = Duration::from_millis(100);

/// The longest from the first word to stop until the last rank has stopped, without faults.
const SOON: Duration = Duration::from_secs(10);

/// When a training ends in which no rank can go on.
const LIMIT: Duration = Duration::from_secs(600);

/// More steps than any training has before its signal.
const ENDLESS: u64 = 1_000_000;

/// A thing that goes wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Crash { rank: u32 },
    Break { child: u32 },
    Partition { child: u32, time: Duration },
    Stop { rank: u32, time: Duration },
}

#[derive(Debug)]
enum Event {
    Begin { rank: u32 },
    Step { rank: u32 },
    Tell { rank: u32 },
    End { rank: u32 },
    Come { call: usize, contribution: Contribution, deadline: Duration },
    Decide { call: usize, parts: Vec<Vec<u8>> },
    Answered { call: usize, answer: Result<Vec<u8>, Error> },
    Hurry { rank: u32, topic: String },
    Up { child: u32, message: Upward },
    Down { child: u32, message: Downward },
    Gone { rank: u32, child: u32 },
    Fault(Fault),
}

/// How a rank's training ended.
#[derive(Clone, Debug, PartialEq)]
enum Ending {
    Stopped(u64),
    Trained,
    /// The ranks could not agree on a step after a signal.
    Failed(String),
    /// The program ended because another rank had crashed.
    GaveUp,
}

struct Rank {
    process: Arc<Process>,
    stopping: Option<Arc<Stopping>>,
    /// None once it has crashed.
    node: Option<Node<usize>>,
    steps: u64,
    /// Whether the end of a step is in the queue.
    is_training: bool,
    /// Whether it has ended a step and waits for the agreed one.
    is_waiting: bool,
    is_told: bool,
    /// Calls of the thread that waits to be told.
    calls: usize,
    /// Whether it has said what its next step is.
    is_asked: bool,
    /// Rounds whose wait it ends again and again.
    hurries: BTreeSet<String>,
    still_until: Duration,
    ending: Option<Ending>,
}

impl Rank {
    /// Whether its thread that waits to be told has ended.
    fn is_over(&self) -> bool {
        self.stopping.as_ref().is_some_and(|stopping| stopping.wait(Duration::ZERO))
    }
}

struct OneCall {
    rank: u32,
    topic: String,
    reply: Option<Sender<Reply>>,
}

struct Training<'a> {
    dice: Dice,
    topology: Topology,
    weather: Weather,
    /// Steps that a rank may be ahead of the slowest one.
    ahead: u64,
    total: u64,
    journal: &'a mut Journal,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Event>,
    scheduled: u64,
    ranks: Vec<Rank>,
    calls: Vec<OneCall>,
    words: Receiver<Word>,
    decided: Option<Result<Vec<Vec<u8>>, String>>,
    /// By the rank below: until when nothing comes through.
    cut_until: BTreeMap<u32, Duration>,
    /// By the rank below.
    broken: BTreeSet<u32>,
    /// The ends that know of a broken link, by the rank below.
    known: BTreeSet<(u32, u32)>,
    /// When the first rank was told to stop, if one was.
    told: Option<Duration>,
    /// When something happened after which messages may be sent.
    disturbed: Option<Duration>,
    /// When the last rank began.
    begun: Duration,
}

/// The training of that seed.
pub fn train(seed: u64) -> Run {
    let mut journal = Journal::default();
    let mut dice = Dice(seed ^ 0x5709_5709);
    let weather = *dice.pick(&[Weather::Calm, Weather::Still, Weather::Links, Weather::Crash]);
    let mut endings = BTreeMap::new();
    let judged = panic::catch_unwind(AssertUnwindSafe(|| {
        let ended = Training::draw(dice, weather, &mut journal).run()?;
        ended.into_iter().for_each(|ending| *endings.entry(ending).or_default() += 1);
        Ok(())
    }));
    let broken = judged.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default())
    });
    Run { weather, endings, digest: journal.digest(), log: journal.into_lines(), broken: broken.err() }
}

impl<'a> Training<'a> {
    fn draw(mut dice: Dice, weather: Weather, journal: &'a mut Journal) -> Training<'a> {
        let world = 2 + dice.below_u32(7);
        let topology = Topology::new(world, 1 + dice.below_u32(4), 2 + dice.below_u32(3)).expect("a world of ranks");
        let (sender, words) = channel();
        let rank = |rank| Rank {
            process: Process::new(rank, sender.clone(), Vec::new()),
            stopping: None,
            node: Some(Node::new(&topology, rank)),
            steps: 0,
            is_training: false,
            is_waiting: false,
            is_told: false,
            calls: 0,
            is_asked: false,
            hurries: BTreeSet::new(),
            still_until: Duration::ZERO,
            ending: None,
        };
        let is_told = !dice.once_in(6);
        // Of those that are told, some end by themselves at about that time.
        let total = if is_told && !dice.once_in(4) { ENDLESS } else { 20 + dice.below(60) };
        let mut training = Training {
            ahead: *dice.pick(&[0, 0, 1, 3]),
            total,
            ranks: (0..world).map(rank).collect(),
            topology,
            weather,
            journal,
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            scheduled: 0,
            calls: Vec::new(),
            words,
            decided: None,
            cut_until: BTreeMap::new(),
            broken: BTreeSet::new(),
            known: BTreeSet::new(),
            told: None,
            disturbed: None,
            begun: Duration::ZERO,
            dice: dice.fork(),
        };
        training.journal.headline(format!("{weather:?}, {topology:?}, {total} steps, {} ahead", training.ahead));
        for rank in 0..world {
            let after = dice.time(Duration::from_millis(500));
            training.schedule(after, Event::Begin { rank });
        }
        if is_told {
            let (first, all) = (dice.time(Duration::from_secs(6)), dice.once_in(3));
            let apart = *dice.pick(&[Duration::ZERO, DELAY_MAX, Duration::from_secs(2)]);
            for rank in 0..world {
                let is_one = all || dice.once_in(u64::from(world)) || (rank + 1 == world && !training.is_told_soon());
                for _ in 0..if is_one { 1 + dice.below(2) } else { 0 } {
                    training.schedule(first + dice.time(apart), Event::Tell { rank });
                }
            }
        }
        let faults = if weather == Weather::Calm { 0 } else { 1 + dice.below(2) };
        for _ in 0..faults {
            let (rank, child) = (dice.below_u32(world), 1 + dice.below_u32(world - 1));
            let fault = match weather {
                Weather::Crash => Fault::Crash { rank },
                Weather::Links if dice.once_in(3) => Fault::Break { child },
                Weather::Links => Fault::Partition { child, time: dice.time(Duration::from_secs(20)) },
                _ => Fault::Stop { rank, time: dice.time(Duration::from_secs(20)) },
            };
            training.schedule(dice.time(Duration::from_secs(8)), Event::Fault(fault));
        }
        training
    }

    /// Whether any rank is to be told to stop.
    fn is_told_soon(&self) -> bool {
        self.queue.values().any(|event| matches!(event, Event::Tell { .. }))
    }

    /// Until nothing more can happen; how the ranks ended.
    fn run(mut self) -> Result<Vec<String>, String> {
        loop {
            let event = self.queue.keys().next().copied();
            let due = |rank: &Rank| Some((rank.node.as_ref()?.due()?.max(rank.still_until), rank.process.rank));
            let tick = self.ranks.iter().filter_map(due).min();
            let at = event.map(|(at, _)| at).into_iter().chain(tick.map(|(at, _)| at)).min();
            let Some(at) = at.filter(|at| *at < LIMIT) else { break };
            self.now = self.now.max(at);
            let now = self.now;
            match (event, tick) {
                (key, Some((at, rank))) if key.is_none_or(|key| at < key.0) => self.act(rank, |node| node.tick(now)),
                (Some(key), _) => {
                    let event = self.queue.remove(&key).expect("it is there");
                    self.happen(event);
                }
                (None, _) => break,
            }
        }
        self.judge()
    }

    fn judge(&self) -> Result<Vec<String>, String> {
        let living = || self.ranks.iter().filter(|rank| rank.node.is_some());
        for rank in living() {
            let number = rank.process.rank;
            if !rank.is_over() {
                return Err(format!("rank {number} waits for the agreement without end"));
            }
            let Some(ending) = &rank.ending else { return Err(format!("rank {number} trains without end")) };
            if let Ending::Failed(why) = ending
                && self.weather == Weather::Calm
                && self.total == ENDLESS
            {
                return Err(format!("rank {number} could not agree, and nothing was wrong: {why}"));
            }
        }
        let stopped: BTreeMap<u32, u64> = living()
            .filter_map(|rank| match rank.ending {
                Some(Ending::Stopped(step)) => Some((rank.process.rank, step)),
                _ => None,
            })
            .collect();
        if stopped.values().collect::<BTreeSet<_>>().len() > 1 {
            return Err(format!("the ranks stopped after different steps: {stopped:?}"));
        }
        if self.told.is_none() && !stopped.is_empty() {
            return Err(format!("no rank got a signal, and ranks stopped: {stopped:?}"));
        }
        let name = |ending: &Ending| match ending {
            Ending::Stopped(_) => "stopped",
            Ending::Trained => "trained to the end",
            Ending::Failed(_) => "could not agree",
            Ending::GaveUp => "gave up",
        };
        let of = |rank: &Rank| rank.ending.as_ref().map_or("crashed", name).to_owned();
        Ok(self.ranks.iter().map(of).collect())
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

    /// In which process it happens; `None` for faults.
    fn place(&self, event: &Event) -> Option<u32> {
        match event {
            Event::Begin { rank }
            | Event::Step { rank }
            | Event::Tell { rank }
            | Event::End { rank }
            | Event::Hurry { rank, .. }
            | Event::Gone { rank, .. } => Some(*rank),
            Event::Come { call, .. } | Event::Answered { call, .. } => Some(self.calls[*call].rank),
            Event::Decide { .. } => Some(0),
            Event::Up { child, .. } => self.topology.parent(*child),
            Event::Down { child, .. } => Some(*child),
            Event::Fault(_) => None,
        }
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        if let Some(place) = self.place(&event) {
            if self.is_dead(place) {
                return;
            }
            let still_until = self.ranks[place as usize].still_until;
            if still_until > now {
                return self.schedule(still_until - now + Duration::from_nanos(1), event);
            }
        }
        match event {
            Event::Begin { rank } => self.begin(rank),
            Event::Step { rank } => self.step(rank),
            Event::Tell { rank } => self.tell(rank),
            Event::End { rank } => self.end(rank, Ending::GaveUp),
            Event::Come { call, contribution, deadline } => {
                let (rank, topic) = (self.calls[call].rank, self.calls[call].topic.clone());
                self.note(|| format!("rank {rank} comes to {topic:?}"));
                self.act(rank, |node| node.contribute(&topic, contribution, call, now, deadline));
            }
            Event::Decide { call, parts } => {
                let OneCall { topic, reply, .. } = &self.calls[call];
                let (topic, Some(reply)) = (topic.clone(), reply) else { return };
                let _ = reply.send(Reply::Decide(parts));
                self.listen(|training| training.decided.is_some());
                let decision = self.decided.take().expect("rank 0 has decided");
                let mut own = None;
                self.act(0, |node| {
                    let (answer, effects) = node.decided(&topic, decision);
                    own = Some(answer);
                    effects
                });
                let answer = own.expect("rank 0 lives");
                self.schedule(Duration::ZERO, Event::Answered { call, answer });
            }
            Event::Answered { call, answer } => self.answered(call, answer),
            Event::Hurry { rank, topic } => {
                let of = &self.ranks[rank as usize];
                if !of.is_over() && !of.is_asked {
                    self.act(rank, |node| node.hurry(&topic, now));
                    self.schedule(Duration::from_millis(10), Event::Hurry { rank, topic });
                }
            }
            Event::Up { child, message } => {
                let parent = self.topology.parent(child).expect("a rank below");
                if !self.known.contains(&(child, parent)) {
                    self.note(|| format!("rank {child} -> {parent}: {}", of_upward(&message)));
                    self.act(parent, |node| node.receive_from_child(child, message, now));
                }
            }
            Event::Down { child, message } => {
                if !self.known.contains(&(child, child)) {
                    self.note(|| format!("rank {child} hears: {}", of_downward(&message)));
                    self.act(child, |node| node.receive_from_parent(message, now));
                }
            }
            Event::Gone { rank, child } => {
                self.known.insert((child, rank));
                self.note(|| format!("rank {rank} finds its link broken (rank {child} and its parent)"));
                match rank == child {
                    true => self.act(rank, |node| node.lose_parent("the connection broke", now)),
                    false => self.act(rank, |node| node.lose(child, "the connection broke", now)),
                }
            }
            Event::Fault(fault) => self.fail(fault),
        }
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
                    let after = self.dice.time(DELAY_MAX / 15);
                    self.schedule(after, Event::Decide { call, parts });
                }
            }
        }
    }

    /// Over the link of `child`, perhaps twice.
    fn send<M: Clone>(&mut self, child: u32, event: impl Fn(M) -> Event, message: M) {
        let is_quiet = self.disturbed.is_none() && self.now > self.begun + 4 * DELAY_MAX && self.has_begun();
        assert!(!is_quiet, "a message is sent while no rank was told to stop, over the link of rank {child}");
        if self.broken.contains(&child) {
            return;
        }
        let held = self.cut_until.get(&child).map_or(Duration::ZERO, |until| until.saturating_sub(self.now));
        for _ in 0..if self.dice.once_in(10) { 2 } else { 1 } {
            let most = if self.dice.once_in(5) { DELAY_MAX } else { DELAY_MAX / 15 };
            let delay = held + self.dice.time(most);
            self.schedule(delay, event(message.clone()));
        }
    }

    fn has_begun(&self) -> bool {
        self.ranks.iter().all(|rank| rank.stopping.is_some())
    }

    fn answer(&mut self, call: usize, answer: Result<Vec<u8>, Error>) {
        let after = self.dice.time(DELAY_MAX / 15);
        self.schedule(after, Event::Answered { call, answer });
    }

    /// A thread of a rank has its answer, and works until it waits again or has ended.
    fn answered(&mut self, call: usize, answer: Result<Vec<u8>, Error>) {
        let OneCall { rank, topic, reply } = &mut self.calls[call];
        let Some(reply) = reply.take() else { return };
        let (rank, topic) = (*rank, topic.clone());
        self.note(|| match &answer {
            Ok(_) => format!("rank {rank} has its answer on {topic:?}"),
            Err(error) => format!("rank {rank} gets on {topic:?}: {error}"),
        });
        let _ = reply.send(Reply::Answer(answer));
        drop(reply);
        if is_word(rank, &topic) {
            return;
        }
        let calls = self.ranks[rank as usize].calls;
        self.listen(|training| {
            let rank = &training.ranks[rank as usize];
            rank.calls > calls || rank.is_over()
        });
        let of = &mut self.ranks[rank as usize];
        if of.is_waiting && of.is_over() {
            of.is_waiting = false;
            self.schedule(Duration::ZERO, Event::Step { rank });
        }
    }

    /// Takes what the threads of ranks say, in real time, until that is so.
    fn listen(&mut self, is_so: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !is_so(self) {
            match self.words.recv_timeout(GLANCE) {
                Ok(Word::Called(Call { rank, topic, contribution, deadline, reply })) => {
                    let of = &mut self.ranks[rank as usize];
                    of.calls += usize::from(!is_word(rank, &topic));
                    of.is_asked |= topic.ends_with(" at");
                    self.calls.push(OneCall { rank, topic, reply: Some(reply) });
                    let after = self.dice.time(DELAY_MAX / 15);
                    self.schedule(after, Event::Come { call: self.calls.len() - 1, contribution, deadline });
                }
                Ok(Word::Hurries { rank, topic }) => {
                    if self.ranks[rank as usize].hurries.insert(topic.clone()) {
                        self.schedule(Duration::ZERO, Event::Hurry { rank, topic });
                    }
                }
                Ok(Word::Decided(decision)) => self.decided = Some(decision),
                Ok(Word::Slow { .. } | Word::Blackout(_)) => panic!("nothing is stored"),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            assert!(started.elapsed() < HANGS, "a rank works without end");
        }
    }

    fn begin(&mut self, rank: u32) {
        self.note(|| format!("rank {rank} begins"));
        let (process, world) = (Arc::clone(&self.ranks[rank as usize].process), self.topology.world());
        let coord = ProcessCoord { process, world, meeting: Meeting([1; 16]) };
        let stopping = Stopping::begin(Arc::new(coord), "run", DEADLINE).expect("a thread");
        self.ranks[rank as usize].stopping = Some(stopping);
        self.listen(|training| training.ranks[rank as usize].calls == 1);
        self.begun = self.now;
        self.go_on();
    }

    /// Lets each rank train that need not wait for the steps of others.
    fn go_on(&mut self) {
        let slowest = self.ranks.iter().filter(|rank| rank.ending.is_none()).map(|rank| rank.steps).min();
        let slowest = if self.has_begun() { slowest.unwrap_or_default() } else { 0 };
        for rank in 0..self.topology.world() {
            let of = &mut self.ranks[rank as usize];
            let is_free = of.stopping.is_some() && of.ending.is_none() && !of.is_training && !of.is_waiting;
            if is_free && of.node.is_some() && of.steps <= slowest + self.ahead {
                of.is_training = true;
                let after = self.dice.time(STEP_MAX);
                self.schedule(after, Event::Step { rank });
            }
        }
    }

    /// A step of a rank ends.
    fn step(&mut self, rank: u32) {
        let of = &mut self.ranks[rank as usize];
        let Some(stopping) = of.stopping.clone().filter(|_| of.ending.is_none()) else { return };
        let Some(is_last) = stopping.passed() else {
            of.is_waiting = true;
            return;
        };
        of.is_training = false;
        of.steps += 1;
        let steps = of.steps;
        if is_last {
            self.end(rank, Ending::Stopped(steps));
        } else if let Some(failure) = stopping.failure() {
            self.end(rank, Ending::Failed(failure.to_string()));
            self.leave_without(rank);
        } else if steps == self.total {
            self.end(rank, Ending::Trained);
        }
        self.go_on();
    }

    fn tell(&mut self, rank: u32) {
        let of = &self.ranks[rank as usize];
        let Some(stopping) = &of.stopping else {
            return self.schedule(STEP_MAX, Event::Tell { rank });
        };
        let stopping = Arc::clone(stopping);
        if of.ending.is_some() {
            return;
        }
        self.note(|| format!("rank {rank} is told to stop"));
        self.told.get_or_insert(self.now);
        self.disturbed.get_or_insert(self.now);
        if std::mem::replace(&mut self.ranks[rank as usize].is_told, true) {
            return stopping.tell().expect("no thread");
        }
        let calls = self.calls.len();
        stopping.tell().expect("a thread");
        self.listen(|training| {
            let of = &training.ranks[rank as usize];
            let is_root_told = of.hurries.contains("run told") || of.is_asked || of.is_over();
            if rank == 0 { is_root_told } else { training.calls.len() > calls }
        });
    }

    /// A rank's program ends.
    fn end(&mut self, rank: u32, ending: Ending) {
        let of = &mut self.ranks[rank as usize];
        let Some(stopping) = of.stopping.clone().filter(|_| of.ending.is_none()) else { return };
        of.ending = Some(ending.clone());
        let round = if rank == 0 { "run told" } else { "run stop" };
        self.note(|| format!("rank {rank} ends: {ending:?}"));
        self.disturbed.get_or_insert(self.now);
        if let (Some(told), Ending::Stopped(_), Weather::Calm) = (self.told, &ending, self.weather) {
            let after = self.now - told;
            assert!(after < SOON, "rank {rank} stops {after:?} after the first one was told to");
        }
        stopping.end();
        self.listen(|training| {
            let of = &training.ranks[rank as usize];
            of.hurries.contains(round) || of.is_asked || of.is_over()
        });
    }

    fn fail(&mut self, fault: Fault) {
        self.note(|| format!("{fault:?}"));
        self.disturbed.get_or_insert(self.now);
        match fault {
            Fault::Crash { rank } if !self.is_dead(rank) => self.crash(rank),
            Fault::Crash { .. } => {}
            Fault::Break { child } => self.break_link(child),
            Fault::Partition { child, time } => _ = self.cut_until.insert(child, self.now + time),
            Fault::Stop { rank, time } => self.ranks[rank as usize].still_until = self.now + time,
        }
    }

    fn crash(&mut self, rank: u32) {
        let of = &mut self.ranks[rank as usize];
        of.process.die();
        of.node = None;
        self.calls.iter_mut().filter(|call| call.rank == rank).for_each(|call| call.reply = None);
        let children = self.topology.children(rank).into_iter().map(|subtree| subtree.start);
        for child in children.chain((rank > 0).then_some(rank)) {
            self.break_link(child);
        }
        self.leave_without(rank);
    }

    /// The programs of all other ranks wait for this one, until somebody ends them.
    fn leave_without(&mut self, rank: u32) {
        for other in (0..self.topology.world()).filter(|other| *other != rank) {
            let after = Duration::from_secs(1) + self.dice.time(Duration::from_secs(60));
            self.schedule(after, Event::End { rank: other });
        }
    }

    /// Both ends find out, each in its time.
    fn break_link(&mut self, child: u32) {
        let Some(parent) = self.topology.parent(child) else { return };
        if self.broken.insert(child) {
            for rank in [parent, child] {
                let after = self.dice.time(DETECTION_MAX);
                self.schedule(after, Event::Gone { rank, child });
            }
        }
    }
}

/// Whether that call tells rank 0 that the rank was told to stop.
fn is_word(rank: u32, topic: &str) -> bool {
    rank != 0 && topic.ends_with(" told")
}
