//! Tests random scenarios: delays, duplicates, reordering, crashes, ranks that come late or never.
//!
//! Every case is a tree and a list of numbers that choose what happens next, until nothing more can happen; then the
//! invariants must hold for all replies.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const TOPICS: [&str; 2] = ["a", "b"];

/// A call: the rank, the topic, and the number of its calls on that topic before.
type Call = (u32, usize, usize);

type Answer = Result<Vec<u8>, Error>;

#[derive(Clone, Debug)]
enum Message {
    Up(Upward),
    Down(Downward),
    /// End of a link: its last message, since the sender crashed.
    Gone,
}

struct World {
    topology: Topology,
    nodes: Vec<Option<Node<Call>>>,
    /// Messages in flight, by sender and receiver.
    links: BTreeMap<(u32, u32), Vec<Message>>,
    now: Duration,
    /// Number of calls of each rank on each topic, and whether one waits.
    calls: BTreeMap<(u32, usize), (usize, bool)>,
    made: BTreeSet<Call>,
    answered: BTreeMap<Call, Answer>,
    deciding: BTreeSet<usize>,
    decisions: BTreeSet<(usize, usize)>,
    crashed: BTreeSet<u32>,
}

impl World {
    fn new(topology: Topology) -> World {
        World {
            topology,
            nodes: (0..topology.world()).map(|rank| Some(Node::new(&topology, rank))).collect(),
            links: BTreeMap::new(),
            now: Duration::ZERO,
            calls: BTreeMap::new(),
            made: BTreeSet::new(),
            answered: BTreeMap::new(),
            deciding: BTreeSet::new(),
            decisions: BTreeSet::new(),
            crashed: BTreeSet::new(),
        }
    }

    fn perform(&mut self, rank: u32, effects: Effects<Call>) {
        for effect in effects {
            match effect {
                Effect::Up(message) => {
                    let parent = self.topology.parent(rank).unwrap();
                    self.links.entry((rank, parent)).or_default().push(Message::Up(message));
                }
                Effect::Down(child, message) => {
                    self.links.entry((rank, child)).or_default().push(Message::Down(message));
                }
                Effect::Reply(call, Reply::Decide(parts)) => {
                    let (_, topic, round) = call;
                    assert_eq!(parts, (0..self.topology.world()).map(|rank| part(rank, round)).collect::<Vec<_>>());
                    assert!(self.decisions.insert((topic, round)), "decided twice");
                    self.deciding.insert(topic);
                }
                Effect::Reply(call, Reply::Failed(error, came)) => {
                    let (caller, _, round) = call;
                    assert_eq!(caller, 0);
                    assert!(came.iter().all(|(rank, bytes)| *bytes == part(*rank, round)), "{came:?}");
                    self.tell(call, Err(error));
                }
                Effect::Reply(call, Reply::Answer(answer)) => self.tell(call, answer),
            }
        }
    }

    fn tell(&mut self, call: Call, answer: Result<Vec<u8>, Error>) {
        let (rank, topic, _) = call;
        assert!(self.answered.insert(call, answer).is_none(), "{call:?} was answered twice");
        self.calls.get_mut(&(rank, topic)).unwrap().1 = false;
    }

    /// Performs one event, which `choice` selects.
    fn step(&mut self, choice: u64) {
        let (what, which) = (choice % 16, (choice / 16) as usize);
        let world = self.topology.world();
        match what {
            0..4 => self.call(which as u32 % world, which / 64 % TOPICS.len(), which / 256 % 40 == 0),
            4..12 => self.deliver(which),
            12 => self.decide(which),
            13 if which % 64 == 0 && self.crashed.len() < 2 => self.crash((which / 64) as u32 % world),
            14 if which % 2 == 0 => self.pass(SECOND * (which / 2 % 4) as u32 / 2),
            15 if which % 32 == 0 => self.hurry(which as u32 / 32 % world, which / 1024 % TOPICS.len()),
            _ => self.tick(which as u32 % world),
        }
    }

    fn call(&mut self, rank: u32, topic: usize, fails: bool) {
        let Some(node) = &mut self.nodes[rank as usize] else { return };
        let (made, waits) = self.calls.entry((rank, topic)).or_default();
        if *waits {
            return;
        }
        let call = (rank, topic, *made);
        let contribution = if fails { Err(format!("rank {rank} fails")) } else { Ok(part(rank, *made)) };
        let effects = node.contribute(TOPICS[topic], contribution, call, self.now, SECOND * (1 + rank % 3));
        // A call whose predecessor timed out without an answer is refused; that is no call of a round.
        if matches!(&effects[..], [Effect::Reply(_, Reply::Answer(Err(Error::Invalid(_))))]) {
            return;
        }
        (*made, *waits) = (*made + 1, true);
        self.made.insert(call);
        self.perform(rank, effects);
    }

    /// Delivers some message, not always the first of its link; it may be delivered again.
    fn deliver(&mut self, which: usize) {
        let links: Vec<(u32, u32)> =
            self.links.iter().filter(|(_, queue)| !queue.is_empty()).map(|(l, _)| *l).collect();
        let Some(&(from, to)) = links.get(which % links.len().max(1)) else { return };
        let queue = self.links.get_mut(&(from, to)).unwrap();
        let ahead = which / 64 % queue.len().min(3);
        // A broken link is noticed only when nothing is left to read.
        let index = if matches!(queue[ahead], Message::Gone) { 0 } else { ahead };
        let message = if which.is_multiple_of(5) && !matches!(queue[index], Message::Gone) {
            queue[index].clone()
        } else {
            queue.remove(index)
        };
        self.arrive(from, to, message);
    }

    fn arrive(&mut self, from: u32, to: u32, message: Message) {
        let Some(node) = &mut self.nodes[to as usize] else { return };
        let effects = match message {
            Message::Up(message) => node.receive_from_child(from, message, self.now),
            Message::Down(message) => node.receive_from_parent(message, self.now),
            Message::Gone if self.topology.parent(to) == Some(from) => node.lose_parent("it crashed", self.now),
            Message::Gone => node.lose(from, "it crashed", self.now),
        };
        self.perform(to, effects);
    }

    fn decide(&mut self, which: usize) {
        let Some(&topic) = self.deciding.iter().nth(which % self.deciding.len().max(1)) else { return };
        let Some(root) = &mut self.nodes[0] else { return };
        self.deciding.remove(&topic);
        let round = self.calls[&(0, topic)].0 - 1;
        let answers = (0..self.topology.world()).map(|rank| part(rank, round)).collect();
        let (own, effects) =
            root.decided(TOPICS[topic], if which.is_multiple_of(3) { Err("no".into()) } else { Ok(answers) });
        self.tell((0, topic, round), own);
        self.perform(0, effects);
    }

    fn crash(&mut self, rank: u32) {
        if self.nodes[rank as usize].take().is_none() {
            return;
        }
        self.crashed.insert(rank);
        let children = self.topology.children(rank).into_iter().map(|child| child.start);
        for other in children.chain(self.topology.parent(rank)) {
            self.links.remove(&(other, rank));
            self.links.entry((rank, other)).or_default().push(Message::Gone);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn hurry(&mut self, rank: u32, topic: usize) {
        if let Some(node) = &mut self.nodes[rank as usize] {
            let effects = node.hurry(TOPICS[topic], self.now);
            self.perform(rank, effects);
        }
    }

    fn tick(&mut self, rank: u32) {
        if let Some(node) = &mut self.nodes[rank as usize] {
            let effects = node.tick(self.now);
            self.perform(rank, effects);
        }
    }

    /// Delivers all messages, makes all decisions, and lets all time pass.
    fn finish(&mut self) {
        loop {
            while let Some((&(from, to), _)) = self.links.iter().find(|(_, queue)| !queue.is_empty()) {
                let message = self.links.get_mut(&(from, to)).unwrap().remove(0);
                self.arrive(from, to, message);
            }
            if !self.deciding.is_empty() && self.nodes[0].is_some() {
                self.decide(1);
                continue;
            }
            let due = self.nodes.iter().flatten().filter_map(Node::due).min();
            let Some(due) = due else { break };
            self.now = self.now.max(due);
            (0..self.topology.world()).for_each(|rank| self.tick(rank));
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for call in &self.made {
            prop_assert!(self.answered.contains_key(call) || self.crashed.contains(&call.0), "{call:?} hears nothing");
        }
        // Ranks that are below a crashed one learn less.
        let is_cut = |rank: u32| self.crashed.iter().any(|crashed| self.topology.subtree(*crashed).contains(&rank));
        let mut ends: BTreeMap<(usize, usize), Vec<(u32, &Answer)>> = BTreeMap::new();
        for (&(rank, topic, round), answer) in &self.answered {
            ends.entry((topic, round)).or_default().push((rank, answer));
            match answer {
                Ok(answer) => {
                    prop_assert_eq!(answer, &part(rank, round));
                    prop_assert!(self.decisions.contains(&(topic, round)));
                }
                Err(Error::Lost { rank, .. }) => prop_assert!(self.crashed.contains(rank)),
                Err(Error::Missing { ranks, .. }) => prop_assert!(!ranks.is_empty()),
                Err(_) => {}
            }
        }
        for (round, answered) in ends {
            let known: Vec<_> = answered.iter().filter(|(rank, answer)| is_known(answer, is_cut(*rank))).collect();
            let is_success = known.iter().any(|(_, answer)| answer.is_ok());
            for (rank, answer) in &known {
                prop_assert_eq!(answer.is_ok(), is_success, "round {:?} has two outcomes: {:?}", round, &known);
                if !is_success {
                    prop_assert_eq!(*answer, known[0].1, "rank {} of round {:?}", rank, round);
                }
            }
        }
        Ok(())
    }
}

/// Returns whether an answer tells how the round ended, and not only that this rank cannot know.
fn is_known(answer: &Result<Vec<u8>, Error>, is_cut: bool) -> bool {
    match answer {
        Ok(_) => true,
        Err(Error::Unavailable(_)) => false,
        Err(_) => !is_cut,
    }
}

fn part(rank: u32, round: usize) -> Vec<u8> {
    // Some ranks contribute the same bytes.
    vec![(rank / 2) as u8, round as u8]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_round_has_one_outcome_and_everyone_hears_of_it_or_of_its_end(
        world in 1_u32..8,
        local_world in 1_u32..4,
        fan_out in 2_u32..5,
        choices in prop::collection::vec(any::<u64>(), 0..900),
    ) {
        let mut world = World::new(Topology::new(world, local_world, fan_out).unwrap());
        choices.into_iter().for_each(|choice| world.step(choice));
        world.finish();
        world.check()?;
    }
}
