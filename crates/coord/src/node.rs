//! Implements one rank's node of the tree: contributions go up, answers come down.
//!
//! Pure: it knows no threads, sockets or clocks. The caller passes the time (any origin, never backwards). A *waiter*
//! is what the caller needs to answer the local call that waits. Every change returns [`Effect`]s that the caller
//! carries out in their order. Equal inputs give equal effects.
//!
//! # Protocol
//!
//! 1. A node sends one [`Part`] a round upwards as soon as its whole subtree has come: payloads, or failures. Rank 0
//!    then decides, and one [`FromParent::Answer`] goes down each link, with the answers of that subtree.
//! 2. A round that cannot become complete (its time is over, a rank is lost) is *closed*, from the node that detects it
//!    up to rank 0. A node asks the children whose part it lacks ([`FromParent::Close`]), waits for them up to
//!    [`CLOSING`] for each level below it, and reports which ranks failed and which are missing. Rank 0 makes one error
//!    of it, and [`FromParent::Failed`] goes to every node. A rank that comes later finds the error at its own node.
//!    A part carries the time that is left, which is too long if the part was delayed on the way. So a node that has
//!    reported and has no outcome by its own deadline reports that, too ([`FromChild::Overdue`]).
//! 3. A part that crosses the failure of its round on the link belongs to that failed round: [`Upward::seen`] shows it.
//! 4. A node that loses a child reports it to rank 0, and rank 0 sends every node the first lost rank. From then on no
//!    round can become complete, so each is closed at once.
//! 5. A node that loses its parent reaches its own subtree only: rounds that it has reported fail there with
//!    [`Error::Lost`] of the parent, and it closes all later rounds as rank 0 would.
//! 6. Towards the end of a round's time, and after it, a node that still waits for the other end of a link pings it
//!    ([`FromChild::Asks`]), and the other end pings on in the same direction, so that all nodes on the way know by the
//!    end which one is silent. Nodes answer, whatever their rank's program does. A child that does not answer is not
//!    waited for when the round is closed, and is named as silent. If the parent does not answer, the outcome cannot
//!    arrive: once the round's time is over, the whole subtree fails with the parent's name
//!    ([`FromParent::OutcomeUnknown`]). A silent rank stays a member and takes part again once it answers.
//!
//! Complete is final: rank 0 never closes a round that it decides, and a node never withdraws a part. So no round has
//! two outcomes, though an answer may not arrive. A rank below a silent one, and a rank that has waited twice its
//! deadline and [`GRACE`], gets the error that the outcome is unknown, and ignores an outcome that arrives later.

mod bundle;
mod inbox;
mod message;
mod round;
mod watch;

#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

pub use self::bundle::Bundle;
use self::inbox::Inbox;
pub use self::message::{Downward, FAILURES_MAX, Failures, FromChild, FromParent, Part, Report, Upward};
use self::round::{Round, Stage, Waiting, check_topic};
pub use self::watch::SILENCE;
use self::watch::{Look, Wanted, Watch};
use crate::topology::Position;
use crate::{Absent, Error, PAYLOAD_BYTES_MAX, Topology};

/// Time for which a node that closes a round waits for its children, for each level below it.
pub const CLOSING: Duration = Duration::from_millis(500);

/// Time after its deadline during which an answer may still arrive.
pub const GRACE: Duration = Duration::from_secs(5);

/// Number of failed rounds that are remembered for a rank that comes late to them.
const UNDELIVERED_ERRORS_MAX: usize = 4096;

/// Contribution of a rank to a round: its bytes, or why it has none.
pub type Contribution = Result<Vec<u8>, String>;

/// A reply to a local call.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// All contributions, to rank 0 only; call [`Node::decided`] with the decision over these.
    Decide(Vec<Vec<u8>>),
    /// Failure of a round in which ranks are missing, to rank 0 only, with the beginnings of the others' contributions.
    Failed(Error, Vec<(u32, Vec<u8>)>),
    /// Result of the call.
    Answer(Result<Vec<u8>, Error>),
}

/// An action that the caller of a node must carry out.
#[derive(Debug, PartialEq)]
pub enum Effect<W> {
    /// Sends a message to the parent.
    Up(Upward),
    /// Sends a message to this child.
    Down(u32, Downward),
    /// Answers the local call of this waiter.
    Reply(W, Reply),
}

/// Actions, to be carried out in this order.
pub type Effects<W> = Vec<Effect<W>>;

/// State of one rank in the tree.
#[derive(Debug)]
pub struct Node<W> {
    rank: u32,
    world: u32,
    subtree: Range<u32>,
    height: u32,
    /// Parent; `None` at rank 0, and once it is lost.
    parent: Option<Parent>,
    /// Children of the rank, ascending.
    children: Vec<Child>,
    rounds: BTreeMap<String, Round<W>>,
    /// Failed rounds that this rank has not come to yet, oldest first.
    undelivered_errors: VecDeque<(String, Error)>,
    /// First lost rank and the cause, as rank 0 reports it; without a connection to rank 0, the parent.
    lost: Option<(u32, String)>,
    effects: Effects<W>,
}

#[derive(Debug)]
struct Parent {
    rank: u32,
    sent: u64,
    inbox: Inbox<FromParent>,
    watch: Watch,
}

#[derive(Debug)]
struct Child {
    subtree: Range<u32>,
    is_lost: bool,
    sent: u64,
    inbox: Inbox<(u64, FromChild)>,
    watch: Watch,
    /// Rounds that failed without a part of this child, with the number of the message that reports it.
    failed: BTreeMap<String, u64>,
}

impl<W> Node<W> {
    /// Makes the node of `rank` in that tree; `rank` must be below its world.
    pub fn new(topology: &Topology, rank: u32) -> Node<W> {
        let Position { parent, subtree, children, height } = topology.position(rank);
        let child = |subtree| Child {
            subtree,
            is_lost: false,
            sent: 0,
            inbox: Inbox::new(),
            watch: Watch::default(),
            failed: BTreeMap::new(),
        };
        Node {
            rank,
            world: topology.world(),
            subtree,
            height,
            parent: parent.map(|rank| Parent { rank, sent: 0, inbox: Inbox::new(), watch: Watch::default() }),
            children: children.into_iter().map(child).collect(),
            rounds: BTreeMap::new(),
            undelivered_errors: VecDeque::new(),
            lost: None,
            effects: Vec::new(),
        }
    }

    /// Adds this rank's contribution to the round of `topic` at `now`, where it waits for up to `deadline`.
    pub fn contribute(
        &mut self,
        topic: &str,
        contribution: Contribution,
        waiter: W,
        now: Duration,
        deadline: Duration,
    ) -> Effects<W> {
        let refused = if let Err(error) = check_topic(topic) {
            Some(error)
        } else if let Some(index) = self.undelivered_errors.iter().position(|(failed, _)| failed == topic) {
            self.undelivered_errors.remove(index).map(|(_, error)| error)
        } else if let Some(error) = self.rounds.get_mut(topic).and_then(|round| round.join_after_timeout(topic)) {
            Some(error)
        } else if self.rounds.get(topic).is_some_and(|round| round.has_come) {
            let rank = self.rank;
            Some(Error::Invalid(format!("rank {rank} contributes to {topic:?} twice; its first call still waits")))
        } else {
            None
        };
        if let Some(error) = refused {
            return vec![Effect::Reply(waiter, Reply::Answer(Err(error)))];
        }
        let round = self.open(topic, now, now.saturating_add(deadline));
        round.has_come = true;
        let gives_up = now.saturating_add(deadline.saturating_mul(2)).saturating_add(GRACE);
        round.waiting = Some(Waiting { waiter, deadline, gives_up });
        if matches!(round.stage, Stage::Gathering | Stage::Closing { .. }) {
            round.own = Some(round::bounded(contribution).map(Into::into));
            self.advance(topic, now);
        }
        self.effects()
    }

    /// Takes rank 0's decision on the round of `topic`. Returns rank 0's own answer.
    pub fn decided(
        &mut self,
        topic: &str,
        decision: Result<Vec<Vec<u8>>, String>,
    ) -> (Result<Vec<u8>, Error>, Effects<W>) {
        if !self.rounds.get(topic).is_some_and(|round| matches!(round.stage, Stage::Deciding)) {
            return (Err(Error::Invalid(format!("no round of {topic:?} is being decided"))), Vec::new());
        }
        let world = self.subtree.len();
        let decision = decision.and_then(|answers| match answers.iter().map(Vec::len).max() {
            _ if answers.len() != world => Err(format!("the decision has {} answers for {world} ranks", answers.len())),
            Some(bytes) if bytes > PAYLOAD_BYTES_MAX => {
                Err(format!("the decision has an answer of {bytes} bytes, the most is {PAYLOAD_BYTES_MAX}"))
            }
            _ => Ok(answers),
        });
        let own = match decision {
            Ok(mut answers) => {
                let own = answers.first_mut().map(std::mem::take).unwrap_or_default();
                let answers = Bundle::new(answers.into_iter().map(Into::into));
                self.answer(topic, &answers);
                Ok(own)
            }
            Err(reason) => {
                let mut failures = Failures::default();
                failures.add(0, round::cut(reason));
                let error = failures.into_error(topic);
                self.fail(topic, &error);
                Err(error)
            }
        };
        (own, self.effects())
    }

    /// Takes a message of a child. An invalid one makes the child a lost rank.
    pub fn receive_from_child(&mut self, child: u32, message: Upward, now: Duration) -> Effects<W> {
        if let Some(sender) = self.child(child) {
            sender.watch.answered();
            match message.word {
                FromChild::Asks { interval } => {
                    self.effects.push(Effect::Down(child, Downward::LIVES));
                    self.watch_parent(Wanted::passed_on(interval, now), now);
                }
                FromChild::Lives => {}
                word => sender.inbox.put(message.number, (message.seen, word)),
            }
        }
        while let Some((seen, word)) = self.child(child).and_then(|sender| sender.inbox.take()) {
            match word {
                FromChild::Part(part) => self.take_part(child, seen, part, now),
                FromChild::Overdue { topic } => {
                    // Without the child's part this is an earlier round, whose outcome the child has not received.
                    let round = self.rounds.get_mut(&topic).filter(|round| round.reports.contains_key(&child));
                    round.into_iter().for_each(|round| round.expires = round.expires.min(now));
                }
                FromChild::Lost { rank, cause } => self.report_lost(rank, cause, now),
                FromChild::Asks { .. } | FromChild::Lives => {}
            }
        }
        self.effects()
    }

    /// Takes a message of the parent. An invalid one makes the parent a lost rank.
    pub fn receive_from_parent(&mut self, message: Downward, now: Duration) -> Effects<W> {
        if let Some(parent) = &mut self.parent {
            parent.watch.answered();
            match message.word {
                FromParent::Asks { interval } => {
                    self.effects.push(Effect::Up(Upward::LIVES));
                    self.watch_children(now, |_, _| Some(Wanted::passed_on(interval, now)));
                }
                FromParent::Lives => {}
                word => parent.inbox.put(message.number, word),
            }
        }
        while let Some(word) = self.parent.as_mut().and_then(|parent| parent.inbox.take()) {
            match word {
                FromParent::Close { topic } => {
                    if self.open(&topic, now, now).stage == Stage::Gathering {
                        self.close(&topic, now);
                    }
                }
                FromParent::Answer { topic, answers } => match self.rounds.get(&topic) {
                    Some(round) if round.stage == Stage::Reported && answers.ranks() as usize == self.subtree.len() => {
                        self.answer(&topic, &answers);
                    }
                    _ => {
                        let (answers, ranks) = (answers.ranks(), self.subtree.len());
                        self.detach(&format!("it sent {answers} answers on {topic:?} for {ranks} ranks"), now);
                    }
                },
                FromParent::Failed { topic, error } => self.fail(&topic, &error),
                FromParent::OutcomeUnknown { topic, rank } => self.give_up(&topic, rank),
                FromParent::Lost { rank, cause } => self.set_lost(rank, cause, now),
                FromParent::Asks { .. } | FromParent::Lives => {}
            }
        }
        self.effects()
    }

    /// Marks the child `rank` as lost.
    pub fn lose(&mut self, rank: u32, cause: &str, now: Duration) -> Effects<W> {
        if let Some(child) = self.child(rank) {
            child.is_lost = true;
        }
        self.report_lost(rank, cause.to_owned(), now);
        for topic in self.topics(|round| matches!(round.stage, Stage::Closing { .. })) {
            self.advance(&topic, now);
        }
        self.effects()
    }

    /// Fails all rounds because a process was refused as `rank`, so that this world will never be complete: as if that
    /// rank were lost.
    pub fn refuse(&mut self, rank: u32, cause: &str, now: Duration) -> Effects<W> {
        self.report_lost(rank, cause.to_owned(), now);
        self.effects()
    }

    /// Marks the parent as lost, and with it all ranks outside the own subtree.
    pub fn lose_parent(&mut self, cause: &str, now: Duration) -> Effects<W> {
        self.detach(cause, now);
        self.effects()
    }

    /// Ends the wait of this rank's call in a round, as if its deadline had passed, and handles timeouts.
    pub fn hurry(&mut self, topic: &str, now: Duration) -> Effects<W> {
        if let Some(round) = self.rounds.get_mut(topic)
            && let Some(waiting) = &mut round.waiting
        {
            waiting.gives_up = waiting.gives_up.min(now.saturating_add(GRACE));
            round.expires = round.expires.min(now);
        }
        self.tick(now)
    }

    /// Handles timeouts. Must be called at the time that [`due`](Node::due) returns; at any other time it does nothing.
    pub fn tick(&mut self, now: Duration) -> Effects<W> {
        for topic in self.topics(|round| round.stage == Stage::Gathering && round.expires <= now) {
            self.close(&topic, now);
        }
        for topic in self.topics(|round| round.is_overdue_at(now)) {
            if let Some(round) = self.rounds.get_mut(&topic) {
                round.is_overdue = true;
            }
            self.up(FromChild::Overdue { topic });
        }
        if let Some(wanted) = self.wants_parent() {
            self.watch_parent(wanted, now);
        }
        self.watch_children(now, wants);
        for topic in self.topics(|round| matches!(round.stage, Stage::Closing { until } if until <= now)) {
            self.settle(&topic, now);
        }
        if let Some(Parent { rank, watch, .. }) = &self.parent
            && watch.is_silent()
        {
            let rank = *rank;
            for topic in self.topics(|round| round.gives_up_on_parent().is_some_and(|due| due <= now)) {
                self.give_up(&topic, rank);
            }
        }
        for (topic, round) in &mut self.rounds {
            if let Some(Waiting { waiter, deadline, .. }) = round.waiting.take_if(|waiting| waiting.gives_up <= now) {
                self.effects.push(Effect::Reply(waiter, Reply::Answer(Err(undecided(topic, deadline)))));
            }
        }
        self.effects()
    }

    /// Returns the time at which [`tick`](Node::tick) next has work to do.
    pub fn due(&self) -> Option<Duration> {
        let rounds = self.rounds.values().filter_map(Round::due);
        let parent = self.parent.as_ref().and_then(|parent| match parent.watch.is_silent() {
            true => self.rounds.values().filter_map(Round::gives_up_on_parent).min(),
            false => self.wants_parent().and_then(|wanted| parent.watch.due(wanted)),
        });
        let children = self.children.iter().filter_map(|child| child.watch.due(wants(&self.rounds, child)?));
        rounds.chain(parent).chain(children).min()
    }

    /// Returns the first rank that was lost, as far as this node knows.
    pub fn lost(&self) -> Option<u32> {
        self.lost.as_ref().map(|(rank, _)| *rank)
    }

    /// Returns the ranks that a round waits for, as far as this node knows.
    pub fn absent(&self, topic: &str) -> Absent {
        let mut absent = Absent::default();
        let Some(round) = self.rounds.get(topic) else { return absent };
        let outside = [0..self.subtree.start, self.subtree.end..self.world];
        let runs: Vec<Range<u32>> = match round.stage {
            Stage::Gathering | Stage::Closing { .. } => {
                absent.ranks.extend((!round.has_come).then_some(self.rank));
                let subtrees = self.children.iter().map(|child| &child.subtree);
                subtrees.filter(|subtree| !round.reports.contains_key(&subtree.start)).cloned().collect()
            }
            // All ranks of this subtree have come. This node knows nothing of the others.
            Stage::Reported => outside.into_iter().filter(|run| !run.is_empty()).collect(),
            Stage::Deciding => Vec::new(),
        };
        let is_sure = |run: &Range<u32>| run.len() == 1 && (round.stage != Stage::Reported || runs.len() == 1);
        absent.ranks.extend(runs.iter().filter(|run| is_sure(run)).map(|run| run.start));
        absent.among.extend(runs.iter().filter(|run| !is_sure(run)).cloned());
        absent
    }

    /// Returns whether messages of that rank are accepted: it is a child, and not lost.
    pub fn counts(&self, child: u32) -> bool {
        self.children.iter().any(|known| known.subtree.start == child && !known.is_lost)
    }

    fn effects(&mut self) -> Effects<W> {
        std::mem::take(&mut self.effects)
    }

    fn child(&mut self, rank: u32) -> Option<&mut Child> {
        self.children.iter_mut().find(|child| child.subtree.start == rank && !child.is_lost)
    }

    fn topics(&self, choose: impl Fn(&Round<W>) -> bool) -> Vec<String> {
        self.rounds.iter().filter(|(_, round)| choose(round)).map(|(topic, _)| topic.clone()).collect()
    }

    fn open(&mut self, topic: &str, opened: Duration, expires: Duration) -> &mut Round<W> {
        let round = self.rounds.entry(topic.to_owned()).or_insert_with(|| Round::new(opened, expires));
        round.opened = round.opened.min(opened);
        round.expires = round.expires.min(expires);
        round
    }

    fn up(&mut self, word: FromChild) {
        if let Some(parent) = &mut self.parent {
            parent.sent += 1;
            let (number, seen) = (parent.sent, parent.inbox.taken());
            self.effects.push(Effect::Up(Upward { number, seen, word }));
        }
    }

    /// Sends every child that is not lost the message that `word` returns for its subtree.
    fn down(&mut self, word: impl Fn(&Range<u32>) -> Option<FromParent>) {
        for child in self.children.iter_mut().filter(|child| !child.is_lost) {
            if let Some(word) = word(&child.subtree) {
                child.sent += 1;
                let message = Downward { number: child.sent, word };
                self.effects.push(Effect::Down(child.subtree.start, message));
            }
        }
    }

    fn take_part(&mut self, from: u32, seen: u64, part: Part, now: Duration) {
        let Some(child) = self.child(from) else { return };
        child.failed.retain(|_, number| *number > seen);
        if child.failed.contains_key(&part.topic) {
            return;
        }
        if let Err(problem) =
            check_topic(&part.topic).map_err(|error| error.to_string()).and_then(|()| part.report.check(&child.subtree))
        {
            child.is_lost = true;
            self.report_lost(from, format!("its part of {:?} is invalid: {problem}", part.topic), now);
            return;
        }
        let round = self.open(&part.topic, now.saturating_sub(part.age), now.saturating_add(part.left));
        if matches!(round.stage, Stage::Gathering | Stage::Closing { .. }) {
            round.reports.entry(from).or_insert(part.report);
            self.advance(&part.topic, now);
        }
    }

    /// Pings the parent, if it is time.
    fn watch_parent(&mut self, wanted: Wanted, now: Duration) {
        if let Some(parent) = &mut self.parent
            && let Look::Ask(interval) = parent.watch.look(wanted, now)
        {
            self.effects.push(Effect::Up(Upward::asks(interval)));
        }
    }

    /// Pings the children that `wanted` selects, if it is time.
    fn watch_children(
        &mut self,
        now: Duration,
        wanted: impl Fn(&BTreeMap<String, Round<W>>, &Child) -> Option<Wanted>,
    ) {
        let mut is_found_silent = false;
        for child in self.children.iter_mut().filter(|child| !child.is_lost) {
            match wanted(&self.rounds, child).map(|wanted| child.watch.look(wanted, now)) {
                Some(Look::Ask(interval)) => {
                    self.effects.push(Effect::Down(child.subtree.start, Downward::asks(interval)));
                }
                Some(Look::Silent) => is_found_silent = true,
                Some(Look::Nothing) | None => {}
            }
        }
        if is_found_silent {
            for topic in self.topics(|round| matches!(round.stage, Stage::Closing { .. })) {
                self.advance(&topic, now);
            }
        }
    }

    /// Returns when to watch the parent; `None` if no round waits for it.
    fn wants_parent(&self) -> Option<Wanted> {
        self.rounds.values().filter(|round| round.waits_for_parent()).map(Round::wanted).reduce(Wanted::and)
    }

    /// Fails a round in this subtree, whose outcome cannot arrive since `rank` is silent.
    fn give_up(&mut self, topic: &str, rank: u32) {
        let Some(round) = self.rounds.get_mut(topic).filter(|round| round.silent_above.is_none()) else { return };
        round.silent_above = Some(rank);
        if let Some(Waiting { waiter, .. }) = round.waiting.take() {
            self.effects.push(Effect::Reply(waiter, Reply::Answer(Err(round::outcome_unknown(topic, rank)))));
        }
        self.down(|_| Some(FromParent::OutcomeUnknown { topic: topic.to_owned(), rank }));
    }

    /// Takes the next step of a round after a contribution, a part or the loss of a child.
    fn advance(&mut self, topic: &str, now: Duration) {
        let Some(round) = self.rounds.get(topic) else { return };
        let hopeless = self.lost.is_some() || round.reports.values().any(|report| !report.is_complete());
        let is_missing = |child: &&Child| !round.reports.contains_key(&child.subtree.start);
        let mut missing = self.children.iter().filter(is_missing);
        match round.stage {
            Stage::Gathering if round.own.is_some() && missing.next().is_none() => self.settle(topic, now),
            Stage::Gathering if hopeless => self.close(topic, now),
            Stage::Closing { .. } if missing.all(|child| child.is_lost || child.watch.is_silent()) => {
                self.settle(topic, now);
            }
            _ => {}
        }
    }

    /// Stops waiting for contributions; waits only for the children's reports.
    fn close(&mut self, topic: &str, now: Duration) {
        let Some(round) = self.rounds.get_mut(topic) else { return };
        round.stage = Stage::Closing { until: now.saturating_add(CLOSING * self.height) };
        let reported: Vec<u32> = round.reports.keys().copied().collect();
        self.down(|subtree| {
            (!reported.contains(&subtree.start)).then(|| FromParent::Close { topic: topic.to_owned() })
        });
        self.advance(topic, now);
    }

    /// Reports a round to the parent, or ends it at a node without a parent.
    fn settle(&mut self, topic: &str, now: Duration) {
        let Some(round) = self.rounds.get_mut(topic) else { return };
        if self.parent.is_some() {
            round.stage = Stage::Reported;
            let (age, left) = (now.saturating_sub(round.opened), round.expires.saturating_sub(now));
            let report = round.report(self.rank, self.children.iter().map(Child::known));
            return self.up(FromChild::Part(Part { topic: topic.to_owned(), age, left, report }));
        }
        let lost = self.lost.as_ref().map(|(rank, cause)| (*rank, cause.as_str()));
        match round.payloads(self.children.iter().map(|child| &child.subtree)) {
            // A node other than rank 0 without a parent has only a part of the world.
            Some(payloads) if self.rank == 0 => {
                round.stage = Stage::Deciding;
                if let Some(Waiting { waiter, .. }) = round.waiting.take() {
                    self.effects.push(Effect::Reply(waiter, Reply::Decide(payloads)));
                }
            }
            Some(_) => {
                let error = round::failed(topic, Report::default(), Duration::ZERO, lost);
                self.fail(topic, &error);
            }
            None => {
                let report = round.report(self.rank, self.children.iter().map(Child::known));
                let lost = lost.filter(|_| !report.is_complete() || self.rank != 0);
                let waited = round.expires.saturating_sub(round.opened);
                let (came, waiting) = (report.came(self.rank), round.waiting.take_if(|_| self.rank == 0));
                let error = round::failed(topic, report, waited, lost);
                if let Some(Waiting { waiter, .. }) = waiting {
                    self.effects.push(Effect::Reply(waiter, Reply::Failed(error.clone(), came)));
                }
                self.fail(topic, &error);
            }
        }
    }

    fn answer(&mut self, topic: &str, answers: &Bundle) {
        let first = self.subtree.start;
        self.down(|subtree| {
            let answers = answers.slice(subtree.start - first..subtree.end - first);
            Some(FromParent::Answer { topic: topic.to_owned(), answers })
        });
        let waiting = self.rounds.remove(topic).and_then(|round| round.waiting);
        if let (Some(Waiting { waiter, .. }), Some(own)) = (waiting, answers.get(0)) {
            self.effects.push(Effect::Reply(waiter, Reply::Answer(Ok(own.to_vec()))));
        }
    }

    fn fail(&mut self, topic: &str, error: &Error) {
        self.down(|_| Some(FromParent::Failed { topic: topic.to_owned(), error: error.clone() }));
        let round = self.rounds.remove(topic);
        let reported = |child: &Child| round.as_ref().is_some_and(|r| r.reports.contains_key(&child.subtree.start));
        for child in self.children.iter_mut().filter(|child| !child.is_lost && !reported(child)) {
            child.failed.insert(topic.to_owned(), child.sent);
        }
        match round {
            Some(round) if round.has_come => {
                if let Some(Waiting { waiter, .. }) = round.waiting {
                    self.effects.push(Effect::Reply(waiter, Reply::Answer(Err(error.clone()))));
                }
            }
            _ => {
                if self.undelivered_errors.len() == UNDELIVERED_ERRORS_MAX {
                    self.undelivered_errors.pop_front();
                }
                self.undelivered_errors.push_back((topic.to_owned(), error.clone()));
            }
        }
    }

    /// Sets the first lost rank at rank 0; other nodes report the loss to their parent.
    fn report_lost(&mut self, rank: u32, cause: String, now: Duration) {
        if self.parent.is_none() {
            self.set_lost(rank, cause, now);
        } else if self.lost.is_none() {
            self.up(FromChild::Lost { rank, cause });
        }
    }

    fn set_lost(&mut self, rank: u32, cause: String, now: Duration) {
        if self.lost.is_some() {
            return;
        }
        self.down(|_| Some(FromParent::Lost { rank, cause: cause.clone() }));
        self.lost = Some((rank, cause));
        for topic in self.topics(|round| round.stage == Stage::Gathering) {
            self.close(&topic, now);
        }
    }

    fn detach(&mut self, cause: &str, now: Duration) {
        let Some(Parent { rank, .. }) = self.parent.take() else { return };
        self.set_lost(rank, cause.to_owned(), now);
        // Rank 0 may have decided what this subtree reported, but the outcome cannot arrive here.
        for topic in self.topics(|round| round.stage == Stage::Reported) {
            self.fail(&topic, &Error::Lost { rank, cause: cause.to_owned() });
        }
    }
}

impl Child {
    /// Returns the child's subtree, and whether the child is silent.
    fn known(&self) -> (&Range<u32>, bool) {
        (&self.subtree, self.watch.is_silent() && !self.is_lost)
    }
}

/// Returns when to watch that child; `None` if no round waits for it.
fn wants<W>(rounds: &BTreeMap<String, Round<W>>, child: &Child) -> Option<Wanted> {
    let waiting = rounds.values().filter(|round| !child.is_lost && round.waits_for_child(child.subtree.start));
    waiting.map(Round::wanted).reduce(Wanted::and)
}

/// Returns the error of a rank that contributed in time and got no answer in time.
fn undecided(topic: &str, deadline: Duration) -> Error {
    Error::Unavailable(format!(
        "rank 0 has not answered on {topic:?} within twice the deadline of {deadline:?}; the outcome is unknown"
    ))
}
