//! Tests a node in each situation, in a whole tree whose messages arrive at once.

use std::collections::VecDeque;

use super::*;
use crate::wire::Encoded;
use crate::{Failure, SAMPLE_BYTES, SHOWN_BYTES};

const LONG: Duration = Duration::from_secs(60);

/// Replies to calls: rank and reply.
type Replies = Vec<(u32, Reply)>;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Taken {
    messages: u32,
    bytes: usize,
}

/// Encodes and decodes a message, and counts its bytes.
fn carried<M: Encoded>(message: M, taken: &mut Taken) -> M {
    let bytes = message.encode();
    taken.messages += 1;
    taken.bytes += bytes.len();
    M::decode(bytes.into()).unwrap()
}

/// All nodes of a tree. A message arrives before anything else happens, unless its receiver is silent.
struct Tree {
    topology: Topology,
    nodes: Vec<Node<u32>>,
    /// Ranks that neither take nor send messages; these are held.
    silent: Vec<u32>,
    held: Vec<(u32, Effect<u32>)>,
    now: Duration,
    /// Contributions that rank 0 got of the last round with missing ranks.
    shown: Vec<(u32, Vec<u8>)>,
    /// Messages that each rank took from below, and from above.
    taken: Vec<(Taken, Taken)>,
}

impl Tree {
    fn new(world: u32, local_world: u32, fan_out: u32) -> Tree {
        let topology = Topology::new(world, local_world, fan_out).unwrap();
        let nodes = (0..world).map(|rank| Node::new(&topology, rank)).collect();
        Tree {
            topology,
            nodes,
            silent: Vec::new(),
            held: Vec::new(),
            now: Duration::ZERO,
            shown: Vec::new(),
            taken: vec![Default::default(); world as usize],
        }
    }

    fn act(&mut self, rank: u32, act: impl FnOnce(&mut Node<u32>, Duration) -> Effects<u32>) -> Replies {
        let effects = act(&mut self.nodes[rank as usize], self.now);
        self.deliver(effects.into_iter().map(|effect| (rank, effect)).collect())
    }

    /// Wakes the silent ranks, and delivers the held messages.
    fn wake(&mut self) -> Replies {
        self.silent.clear();
        let held = std::mem::take(&mut self.held);
        self.deliver(held.into())
    }

    fn deliver(&mut self, mut due: VecDeque<(u32, Effect<u32>)>) -> Replies {
        let mut replies = Vec::new();
        while let Some((from, effect)) = due.pop_front() {
            let to = match &effect {
                Effect::Reply(..) => from,
                Effect::Up(_) => self.topology.parent(from).unwrap(),
                Effect::Down(child, _) => *child,
            };
            if from != to && (self.silent.contains(&from) || self.silent.contains(&to)) {
                self.held.push((from, effect));
                continue;
            }
            let (node, now) = (&mut self.nodes[to as usize], self.now);
            let effects = match effect {
                Effect::Reply(waiter, Reply::Failed(error, came)) => {
                    assert_eq!(waiter, 0);
                    self.shown = came;
                    replies.push((waiter, Reply::Answer(Err(error))));
                    continue;
                }
                Effect::Reply(waiter, reply) => {
                    replies.push((waiter, reply));
                    continue;
                }
                Effect::Up(message) => {
                    node.receive_from_child(from, carried(message, &mut self.taken[to as usize].0), now)
                }
                Effect::Down(_, message) => {
                    node.receive_from_parent(carried(message, &mut self.taken[to as usize].1), now)
                }
            };
            due.extend(effects.into_iter().map(|effect| (to, effect)));
        }
        replies
    }

    fn come(&mut self, rank: u32, topic: &str) -> Replies {
        self.contribute(rank, topic, Ok(bytes(rank)), LONG)
    }

    fn contribute(&mut self, rank: u32, topic: &str, part: Contribution, deadline: Duration) -> Replies {
        self.act(rank, |node, now| node.contribute(topic, part, rank, now, deadline))
    }

    fn decide(&mut self, topic: &str, decision: Result<Vec<Vec<u8>>, String>) -> (Result<Vec<u8>, Error>, Replies) {
        let mut own = None;
        let replies = self.act(0, |node, _| {
            let (answer, effects) = node.decided(topic, decision);
            own = Some(answer);
            effects
        });
        (own.unwrap(), replies)
    }

    /// Lets `time` pass, with a tick whenever a node is due.
    fn pass(&mut self, time: Duration) -> Replies {
        let (end, mut replies) = (self.now + time, Vec::new());
        loop {
            let due = |node: &Node<u32>| node.due().filter(|due| *due <= end);
            let awake = (0..self.topology.world()).filter(|rank| !self.silent.contains(rank));
            let next = awake.filter_map(|rank| Some((due(&self.nodes[rank as usize])?, rank))).min();
            let Some((due, rank)) = next else { break };
            self.now = self.now.max(due);
            replies.extend(self.act(rank, |node, now| node.tick(now)));
        }
        self.now = end;
        replies
    }

    fn lose(&mut self, rank: u32, cause: &str) -> Replies {
        self.silent.push(rank);
        let mut replies = Vec::new();
        if let Some(parent) = self.topology.parent(rank) {
            replies.extend(self.act(parent, |node, now| node.lose(rank, cause, now)));
        }
        for child in self.topology.children(rank) {
            replies.extend(self.act(child.start, |node, now| node.lose_parent(cause, now)));
        }
        replies
    }

    fn ranks(&self) -> std::ops::Range<u32> {
        0..self.topology.world()
    }

    fn is_quiet(&self) -> bool {
        self.nodes.iter().all(|node| node.rounds.is_empty() && node.undelivered_errors.is_empty())
    }
}

fn bytes(rank: u32) -> Vec<u8> {
    vec![rank as u8; rank as usize % 7]
}

fn error(reply: &Reply) -> &Error {
    match reply {
        Reply::Answer(Err(error)) => error,
        reply => panic!("expected an error, found {reply:?}"),
    }
}

/// Checks that exactly `ranks` have replies in `replies`, all with the same error; returns it.
fn same_error(replies: &Replies, ranks: impl IntoIterator<Item = u32>) -> Error {
    assert_eq!(sorted(replies), ranks.into_iter().collect::<Vec<_>>());
    let first = error(&replies[0].1);
    assert!(replies.iter().all(|(_, reply)| error(reply) == first), "{replies:?}");
    first.clone()
}

/// Returns the replies to those of `ranks`.
fn only(replies: &Replies, ranks: impl IntoIterator<Item = u32>) -> Replies {
    let ranks: Vec<u32> = ranks.into_iter().collect();
    replies.iter().filter(|(rank, _)| ranks.contains(rank)).cloned().collect()
}

fn sorted(replies: &Replies) -> Vec<u32> {
    let mut ranks: Vec<u32> = replies.iter().map(|(rank, _)| *rank).collect();
    ranks.sort_unstable();
    ranks
}

fn outcome_unknown(rank: u32) -> Error {
    round::outcome_unknown("plan", rank)
}

/// Returns a star, chains of two, and nodes of three ranks below each other.
fn trees() -> Vec<Tree> {
    [(5, 1, 32), (8, 1, 2), (13, 3, 4)]
        .map(|(world, local_world, fan_out)| Tree::new(world, local_world, fan_out))
        .into()
}

/// Returns orders in which every rank is first once, and last once.
fn orders(world: u32) -> Vec<Vec<u32>> {
    let rotated = |shift| (0..world).map(move |rank| (rank + shift) % world).collect::<Vec<_>>();
    (0..world).flat_map(|shift| [rotated(shift), rotated(shift).into_iter().rev().collect()]).collect()
}

#[test]
fn every_order_of_arrival_gives_one_decision_and_everyone_its_own_answer() {
    for mut tree in trees() {
        let world = tree.topology.world();
        for order in orders(world) {
            let (last, before) = order.split_last().unwrap();
            for &rank in before {
                assert_eq!(tree.come(rank, "plan"), vec![], "{order:?}");
            }
            let all: Vec<_> = tree.ranks().map(bytes).collect();
            assert_eq!(tree.come(*last, "plan"), vec![(0, Reply::Decide(all))], "{order:?}");
            let (own, mut replies) = tree.decide("plan", Ok(tree.ranks().map(|rank| vec![9, rank as u8]).collect()));
            assert_eq!(own, Ok(vec![9, 0]));
            replies.sort_by_key(|(rank, _)| *rank);
            let expected: Replies = (1..world).map(|rank| (rank, Reply::Answer(Ok(vec![9, rank as u8])))).collect();
            assert_eq!(replies, expected);
            assert!(tree.is_quiet());
        }
    }
}

#[test]
fn every_order_of_arrival_lists_every_failure_once_all_have_come() {
    let failure = |rank| Failure { rank, reason: format!("disk {rank} is full") };
    let expected = Error::Failed { topic: "plan".into(), failures: vec![failure(1), failure(3)], more: 0 };
    for mut tree in trees() {
        for order in orders(tree.topology.world()) {
            let mut replies = Vec::new();
            for &rank in &order {
                assert_eq!(replies, vec![], "{order:?}");
                let part = if [1, 3].contains(&rank) { Err(failure(rank).reason) } else { Ok(Vec::new()) };
                replies = tree.contribute(rank, "plan", part, LONG);
            }
            assert_eq!(same_error(&replies, tree.ranks()), expected);
            assert!(tree.is_quiet());
        }
    }
}

/// Returns the error of a round of "plan"; `first` is the lowest rank that contributed bytes, 0 if none did.
fn missing(ranks: Vec<u32>, silent: Vec<u32>, waited: Duration, first: u32) -> Error {
    let mut sample = bytes(first);
    sample.truncate(SAMPLE_BYTES);
    Error::Missing { topic: "plan".into(), ranks, silent, waited, sample }
}

/// Returns the lowest of those ranks that contribute bytes.
fn lowest(ranks: &[u32]) -> u32 {
    ranks.iter().copied().find(|rank| *rank > 0).unwrap_or(0)
}

#[test]
fn a_round_of_some_ranks_only_expires_and_late_ranks_get_the_same_error() {
    for (world, local_world, fan_out) in [(5, 1, 32), (6, 1, 2), (7, 3, 4)] {
        for present in 1..(1_u32 << world) - 1 {
            let (here, late): (Vec<u32>, Vec<u32>) = (0..world).partition(|rank| present & (1 << rank) != 0);
            let mut tree = Tree::new(world, local_world, fan_out);
            for &rank in &here {
                assert_eq!(tree.come(rank, "plan"), vec![]);
            }
            assert_eq!(tree.pass(LONG - Duration::from_nanos(1)), vec![]);
            let replies = tree.pass(Duration::from_nanos(1));
            let missing = missing(late.clone(), vec![], LONG, lowest(&here));
            assert_eq!(same_error(&replies, here.clone()), missing);
            let shown = if here.contains(&0) { here.iter().map(|&rank| (rank, bytes(rank))).collect() } else { vec![] };
            assert_eq!(std::mem::take(&mut tree.shown), shown);

            // Who was there may try again before the others have come to the first try at all.
            let again = here[0];
            assert_eq!(tree.come(again, "plan"), vec![]);
            for &rank in &late {
                assert_eq!(error(&tree.come(rank, "plan")[0].1), &missing);
            }
            let others = (0..world).filter(|rank| *rank != again);
            let replies: Vec<Replies> = others.map(|rank| tree.come(rank, "plan")).collect();
            let all: Vec<_> = tree.ranks().map(bytes).collect();
            assert_eq!(replies.last().unwrap(), &vec![(0, Reply::Decide(all))]);
            assert!(tree.decide("plan", Err("no".into())).0.is_err());
            assert!(tree.is_quiet());
        }
    }
}

#[test]
fn a_call_in_a_hurry_ends_the_round_of_all_ranks() {
    for (world, local_world, fan_out) in [(2, 1, 32), (7, 1, 2), (7, 3, 4)] {
        for hasty in 0..world {
            let late = (hasty + 1) % world;
            let mut tree = Tree::new(world, local_world, fan_out);
            let here: Vec<u32> = tree.ranks().filter(|rank| *rank != late).collect();
            for &rank in &here {
                let part = Ok(vec![rank as u8; SHOWN_BYTES + 1]);
                assert_eq!(tree.contribute(rank, "plan", part, LONG), vec![]);
            }
            assert_eq!(tree.act(hasty, |node, now| node.hurry("another", now)), vec![]);
            let mut replies = tree.act(hasty, |node, now| node.hurry("plan", now));
            replies.extend(tree.pass(CLOSING * 8));
            let error = same_error(&replies, here.clone());
            assert!(matches!(&error, Error::Missing { ranks, .. } if *ranks == [late]), "{error:?}");
            let shown = here.iter().map(|&rank| (rank, vec![rank as u8; SHOWN_BYTES]));
            assert!(if late == 0 { tree.shown.is_empty() } else { shown.eq(tree.shown.iter().cloned()) });
            assert_eq!(tree.act(hasty, |node, now| node.hurry("plan", now)), vec![]);
        }
    }
}

#[test]
fn a_call_in_a_hurry_does_not_wait_for_a_silent_rank() {
    let mut tree = Tree::new(3, 1, 2);
    tree.come(1, "plan");
    tree.silent.push(0);
    assert_eq!(tree.act(1, |node, now| node.hurry("plan", now)), vec![]);
    let replies = tree.pass(GRACE);
    assert!(matches!(&replies[..], [(1, Reply::Answer(Err(Error::Unavailable(_))))]), "{replies:?}");
}

#[test]
fn a_rank_that_goes_ends_what_is_not_complete_and_all_that_comes_later() {
    for gone in 0..8 {
        let mut tree = Tree::new(8, 1, 2);
        for rank in tree.ranks() {
            tree.come(rank, "complete");
        }
        let here = tree.ranks().filter(|rank| ![gone, 7, 6].contains(rank));
        for rank in here.clone() {
            assert_eq!(tree.come(rank, "open"), vec![]);
        }
        let lost = Error::Lost { rank: gone, cause: "killed".into() };
        let replies = tree.lose(gone, "killed");
        // The outcome of a complete round cannot reach the ranks below it.
        let below = if gone == 0 { 1..8 } else { gone + 1..tree.topology.subtree(gone).end };
        let mut ended: Vec<u32> = here.chain(below.clone()).collect();
        ended.sort_unstable();
        assert_eq!(same_error(&replies, ended), lost);
        if gone > 0 {
            let (own, replies) = tree.decide("complete", Ok(vec![vec![1]; 8]));
            assert_eq!(own, Ok(vec![1]));
            let mut reached: Vec<u32> = replies.iter().map(|(rank, _)| *rank).collect();
            reached.sort_unstable();
            assert!(reached.into_iter().eq((1..8).filter(|rank| *rank != gone && !below.contains(rank))));
            assert!(replies.iter().all(|(_, reply)| *reply == Reply::Answer(Ok(vec![1]))));
        }
        for rank in tree.ranks().filter(|rank| *rank != gone) {
            for _ in 0..2 {
                let replies = tree.come(rank, "later");
                assert_eq!(same_error(&replies, [rank]), lost, "rank {rank} after {gone}");
            }
        }
    }
}

#[test]
fn the_first_rank_that_went_is_named() {
    let mut tree = Tree::new(8, 1, 2);
    tree.lose(7, "killed");
    tree.lose(3, "killed too");
    let lost = Error::Lost { rank: 7, cause: "killed".into() };
    for rank in [0, 1, 2, 4, 5, 6] {
        assert_eq!(same_error(&tree.come(rank, "later"), [rank]), lost);
    }
    tree.lose(1, "killed as well");
    for rank in [0, 2, 4] {
        assert_eq!(same_error(&tree.come(rank, "at last"), [rank]), lost);
    }
}

#[test]
fn a_part_that_crosses_the_failure_of_its_round_does_not_count_for_the_next() {
    let mut tree = Tree::new(8, 1, 2);
    tree.come(0, "plan");
    tree.silent.push(1);
    for rank in [2, 3, 4, 5, 6, 7] {
        tree.come(rank, "plan");
    }
    let replies = tree.pass(LONG);
    let missing = missing(vec![1, 2, 3], vec![1], LONG, 4);
    assert_eq!(same_error(&only(&replies, 2..4), 2..4), outcome_unknown(1));
    assert_eq!(same_error(&only(&replies, [0, 4, 5, 6, 7]), [0, 4, 5, 6, 7]), missing);
    // Rank 1 contributes in time by its own clock, and receives the other messages afterwards.
    for rank in [0, 4, 5, 6, 7] {
        assert_eq!(tree.come(rank, "plan"), vec![]);
    }
    assert_eq!(tree.come(1, "plan"), vec![]);
    assert_eq!(same_error(&tree.wake(), [1]), missing);
    for rank in [1, 2] {
        assert_eq!(tree.come(rank, "plan"), vec![]);
    }
    let all: Vec<_> = tree.ranks().map(bytes).collect();
    assert_eq!(tree.come(3, "plan"), vec![(0, Reply::Decide(all))]);
    assert!(tree.nodes[0].children.iter().all(|child| child.failed.is_empty()));
}

#[test]
fn failures_that_were_told_are_not_lost_when_a_round_ends_early() {
    let failed = |other: &str| {
        let failures = vec![Failure { rank: 3, reason: "disk full".into() }, Failure { rank: 5, reason: other.into() }];
        Error::Failed { topic: "plan".into(), failures, more: 0 }
    };
    let failing = || {
        let mut tree = Tree::new(8, 1, 2);
        for rank in [0, 1, 2, 4, 6, 7] {
            tree.come(rank, "plan");
        }
        tree.contribute(3, "plan", Err("disk full".into()), LONG);
        tree
    };
    let replies = failing().pass(LONG);
    assert_eq!(same_error(&replies, [0, 1, 2, 3, 4, 6, 7]), failed("it did not contribute within 60s"));
    let replies = failing().lose(5, "killed");
    assert_eq!(same_error(&replies, [0, 1, 2, 3, 4, 6, 7]), failed("it is lost: killed"));
}

#[test]
fn a_silent_rank_is_named_to_every_other_rank_by_the_deadline() {
    for deadline in [Duration::from_millis(1200), LONG] {
        for silent in 0..8 {
            let mut tree = Tree::new(8, 1, 2);
            tree.silent.push(silent);
            for rank in tree.ranks().filter(|rank| *rank != silent) {
                assert_eq!(tree.contribute(rank, "plan", Ok(bytes(rank)), deadline), vec![]);
            }
            assert_eq!(tree.pass(deadline - Duration::from_nanos(1)), vec![]);
            let replies = tree.pass(Duration::from_nanos(1));
            // The state of the ranks below it is unknown above.
            let below = tree.topology.subtree(silent);
            let (under, others): (Vec<u32>, Vec<u32>) =
                tree.ranks().filter(|rank| *rank != silent).partition(|rank| below.contains(rank));
            assert_eq!(replies.len(), 7);
            if !others.is_empty() {
                let ranks = below.collect();
                let missing = missing(ranks, vec![silent], deadline, lowest(&others));
                assert_eq!(same_error(&only(&replies, others.clone()), others), missing);
            }
            if !under.is_empty() {
                assert_eq!(same_error(&only(&replies, under.clone()), under), outcome_unknown(silent));
            }
        }
    }
}

#[test]
fn a_rank_that_falls_silent_after_its_part_is_named_to_those_below_it_only() {
    for silent in [0, 1, 4, 6] {
        let mut tree = Tree::new(8, 1, 2);
        for rank in tree.ranks() {
            tree.come(rank, "plan");
        }
        tree.silent.push(silent);
        let under = tree.topology.subtree(silent).skip(1);
        let replies = tree.pass(LONG);
        assert_eq!(same_error(&replies, under.clone()), outcome_unknown(silent));
        if silent > 0 {
            let others = tree.ranks().filter(|rank| *rank > 0 && *rank != silent && !under.clone().any(|u| u == *rank));
            let (_, replies) = tree.decide("plan", Ok(vec![vec![1]; 8]));
            assert!(
                others.eq(sorted(&replies)) && replies.iter().all(|(_, reply)| *reply == Reply::Answer(Ok(vec![1])))
            );
            // It continues: it has its answer, and no rank gets a second one.
            assert_eq!(tree.wake(), vec![(silent, Reply::Answer(Ok(vec![1])))]);
            assert!(tree.is_quiet());
            // It was silent for a while; all ranks are still members.
            for rank in (1..8).rev() {
                assert_eq!(tree.come(rank, "plan"), vec![]);
            }
            assert!(matches!(tree.come(0, "plan")[..], [(0, Reply::Decide(_))]));
        }
    }
}

#[test]
fn a_rank_that_falls_silent_while_others_wait_for_the_decision_is_named_soon() {
    let mut tree = Tree::new(8, 1, 2);
    for rank in tree.ranks() {
        tree.come(rank, "plan");
    }
    assert_eq!(tree.pass(LONG * 3 / 2), vec![]);
    tree.silent.push(4);
    assert_eq!(same_error(&tree.pass(SILENCE), 5..8), outcome_unknown(4));
    assert_eq!(tree.pass(LONG / 2), vec![]);
    assert_eq!(same_error(&tree.pass(GRACE), [1, 2, 3]), undecided("plan", LONG));
}

#[test]
fn whoever_comes_after_the_others_below_a_silent_rank_were_told_is_told_the_same_at_once() {
    let mut tree = Tree::new(8, 1, 2);
    tree.silent.push(4);
    tree.come(6, "plan");
    assert_eq!(same_error(&tree.pass(LONG), [6]), outcome_unknown(4));
    assert_eq!(same_error(&tree.come(7, "plan"), [7]), outcome_unknown(4));
    let message = r#"rank 6 contributes to "plan" twice; its first call still waits"#;
    assert_eq!(same_error(&tree.come(6, "plan"), [6]), Error::Invalid(message.into()));
    // The others learn of the round only when rank 4 continues.
    for rank in [0, 1, 2, 3, 5] {
        tree.come(rank, "plan");
    }
    let missing = missing(vec![4, 7], vec![], LONG, 1);
    assert_eq!(same_error(&tree.wake(), [0, 1, 2, 3, 5]), missing);
    assert_eq!(same_error(&tree.come(4, "plan"), [4]), missing);
}

#[test]
fn a_rank_that_waits_far_from_a_silent_one_hears_of_it_by_the_deadline_as_well() {
    let deadline = Duration::from_secs(2);
    let chain = || Tree::new(40, 1, 2);
    let topology = chain().topology;
    let above = |rank| std::iter::successors(topology.parent(rank), |rank| topology.parent(*rank));
    let waiting = topology.parent(39).unwrap();
    // It waits for the rank below it, so that no rank above knows of the round before it expires.
    for silent in above(waiting).skip(2) {
        let mut tree = chain();
        tree.silent.push(silent);
        tree.contribute(waiting, "plan", Ok(vec![]), deadline);
        assert_eq!(same_error(&tree.pass(deadline), [waiting]), outcome_unknown(silent));
    }
    // Seen from above likewise.
    for silent in above(39).take_while(|rank| *rank > 0) {
        let mut tree = chain();
        tree.silent.push(silent);
        tree.contribute(0, "plan", Ok(vec![]), deadline);
        let replies = tree.pass(deadline);
        assert!(matches!(same_error(&replies, [0]), Error::Missing { silent: named, .. } if named == [silent]));
    }
}

#[test]
fn a_part_that_was_held_up_on_the_way_does_not_lengthen_the_time_of_its_round() {
    let mut tree = Tree::new(8, 1, 2);
    tree.silent.push(6);
    // Rank 6 gets nothing from rank 7 for half its time, and rank 4 is silent throughout.
    for rank in tree.ranks().filter(|rank| ![4, 6].contains(rank)) {
        tree.come(rank, "plan");
    }
    assert_eq!(tree.pass(LONG / 2), vec![]);
    assert_eq!(tree.wake(), vec![]);
    tree.come(6, "plan");
    tree.silent.push(4);
    let replies = tree.pass(LONG / 2);
    let missing = missing(vec![4, 5, 6, 7], vec![4], LONG, 1);
    assert_eq!(same_error(&only(&replies, 0..4), 0..4), missing);
    assert_eq!(same_error(&only(&replies, 5..8), [5, 6, 7]), outcome_unknown(4));

    // With no silent rank, missing ranks are named in time as well.
    let mut tree = Tree::new(8, 1, 2);
    tree.silent.push(6);
    tree.come(7, "plan");
    tree.pass(LONG / 2);
    tree.wake();
    tree.come(6, "plan");
    assert_eq!(sorted(&tree.pass(LONG / 2)), [6, 7]);
}

#[test]
fn what_is_overdue_is_told_once_and_never_of_an_earlier_round() {
    let mut tree = Tree::new(2, 1, 2);
    tree.come(1, "plan");
    tree.come(0, "plan");
    tree.pass(LONG);
    assert_eq!(tree.nodes[1].parent.as_ref().map(|parent| parent.sent), Some(2));
    tree.pass(LONG / 2);
    assert_eq!(tree.nodes[1].parent.as_ref().map(|parent| parent.sent), Some(2));

    // Rank 0 has failed the round when rank 1 finds it overdue.
    let mut tree = Tree::new(2, 1, 2);
    tree.come(1, "plan");
    tree.silent.push(1);
    tree.contribute(0, "plan", Err("disk full".into()), LONG);
    tree.come(0, "plan");
    let overdue = Upward { number: 2, seen: 0, word: FromChild::Overdue { topic: "plan".into() } };
    tree.act(0, |node, now| node.receive_from_child(1, overdue, now));
    assert_eq!(tree.pass(LONG - Duration::from_nanos(1)), vec![]);
}

#[test]
fn nobody_is_asked_whether_it_lives_while_nobody_waits_for_it_or_long_before_it_matters() {
    let mut tree = Tree::new(8, 1, 2);
    let messages = |tree: &Tree| tree.taken.iter().map(|(below, above)| below.messages + above.messages).sum::<u32>();
    tree.come(1, "plan");
    tree.pass(LONG - SILENCE - Duration::from_nanos(1));
    assert_eq!(messages(&tree), 0);
    tree.pass(SILENCE);
    // Both ways over the link of 1, and over those of its children and of 0's other one, four times at most.
    assert!((8..=4 * 2 * 4).contains(&messages(&tree)), "{}", messages(&tree));
    tree.pass(LONG);
    let before = messages(&tree);
    tree.pass(LONG * 10);
    assert_eq!(messages(&tree), before);
}

#[test]
fn the_deadline_of_whoever_waits_shortest_counts() {
    let mut tree = Tree::new(8, 1, 2);
    let second = Duration::from_secs(1);
    tree.contribute(1, "plan", Ok(vec![]), LONG);
    tree.contribute(3, "other", Ok(vec![]), Duration::MAX);
    assert_eq!(tree.pass(second * 3), vec![]);
    tree.contribute(6, "plan", Ok(vec![]), second * 2);
    assert_eq!(tree.pass(second * 2 - Duration::from_nanos(1)), vec![]);
    let replies = tree.pass(Duration::from_nanos(1));
    let missing = missing(vec![0, 2, 3, 4, 5, 7], vec![], second * 5, 0);
    assert_eq!(same_error(&replies, [1, 6]), missing);
}

#[test]
fn an_answer_that_does_not_come_leaves_the_outcome_unknown_and_may_still_come_about() {
    let mut tree = Tree::new(8, 1, 2);
    for rank in tree.ranks() {
        tree.come(rank, "plan");
    }
    assert_eq!(tree.pass(LONG * 2 + GRACE - Duration::from_nanos(1)), vec![]);
    let replies = tree.pass(Duration::from_nanos(1));
    assert!(matches!(same_error(&replies, 1..8), Error::Unavailable(_)));
    let twice = tree.come(3, "plan");
    assert!(matches!(same_error(&twice, [3]), Error::Invalid(_)));
    // Rank 0 decides after all; no rank gets a second answer.
    assert_eq!(tree.decide("plan", Ok(vec![vec![1]; 8])), (Ok(vec![1]), vec![]));
    assert!(tree.is_quiet());
}

#[test]
fn a_second_call_is_refused_and_the_first_goes_on() {
    let mut tree = Tree::new(8, 1, 2);
    for rank in tree.ranks() {
        tree.come(rank, "plan");
        let message = format!(r#"rank {rank} contributes to "plan" twice; its first call still waits"#);
        assert_eq!(tree.come(rank, "plan"), vec![(rank, Reply::Answer(Err(Error::Invalid(message))))]);
    }
    let (_, replies) = tree.decide("plan", Ok(vec![vec![]; 8]));
    assert_eq!(replies.len(), 7);
}

#[test]
fn topics_do_not_meet() {
    let mut tree = Tree::new(5, 1, 2);
    let all: Vec<_> = tree.ranks().map(bytes).collect();
    for rank in 0..4 {
        tree.come(rank, "a");
        tree.come(4 - rank, "b");
    }
    assert_eq!(tree.come(0, "b"), vec![(0, Reply::Decide(all.clone()))]);
    let (own, replies) = tree.decide("b", Err("no".into()));
    let failures = vec![Failure { rank: 0, reason: "no".into() }];
    let failed = Error::Failed { topic: "b".into(), failures, more: 0 };
    assert_eq!((own, same_error(&replies, 1..5)), (Err(failed.clone()), failed));
    assert_eq!(tree.come(4, "a"), vec![(0, Reply::Decide(all))]);
}

#[test]
fn wrong_calls_and_wrong_decisions_are_named() {
    let mut tree = Tree::new(5, 1, 2);
    let refused = |replies: Replies| error(&replies[0].1).to_string();
    assert_eq!(refused(tree.come(0, "")), "a topic is 1 to 4096 bytes long, found 0");
    assert_eq!(refused(tree.come(0, &"x".repeat(5000))), "a topic is 1 to 4096 bytes long, found 5000");
    assert!(tree.is_quiet());
    tree.come(0, "plan");
    assert_eq!(tree.decide("plan", Ok(vec![])).0.unwrap_err().to_string(), r#"no round of "plan" is being decided"#);

    let mut oversized = vec![Vec::new(); 5];
    oversized[4] = vec![0; PAYLOAD_BYTES_MAX + 1];
    for (answers, reason) in [
        (vec![Vec::new(); 3], "the decision has 3 answers for 5 ranks"),
        (oversized, "the decision has an answer of 1073741825 bytes, the most is 1073741824"),
    ] {
        let mut tree = Tree::new(5, 1, 2);
        for rank in tree.ranks() {
            tree.come(rank, "plan");
        }
        let (own, replies) = tree.decide("plan", Ok(answers));
        let failures = vec![Failure { rank: 0, reason: reason.into() }];
        assert_eq!(own, Err(Error::Failed { topic: "plan".into(), failures, more: 0 }));
        assert_eq!(same_error(&replies, 1..5), own.unwrap_err());
    }
}

#[test]
fn what_is_kept_and_passed_on_is_bounded() {
    let mut tree = Tree::new(2, 1, 2);
    for round in 0..UNDELIVERED_ERRORS_MAX * 2 {
        tree.come(0, &round.to_string());
        tree.pass(LONG);
    }
    assert_eq!(tree.nodes[1].undelivered_errors.len(), UNDELIVERED_ERRORS_MAX);
    assert!(matches!(tree.come(1, &(UNDELIVERED_ERRORS_MAX * 2 - 1).to_string())[..], [(1, Reply::Answer(Err(_)))]));
    assert_eq!(tree.come(1, "0"), vec![]);
    assert!(tree.nodes[0].children[0].failed.is_empty());

    let reason = round::bounded(Err("é".repeat(20 << 10))).unwrap_err();
    assert_eq!(reason.len(), 16 << 10);
    let reason = round::bounded(Ok(vec![0; PAYLOAD_BYTES_MAX + 1])).unwrap_err();
    assert_eq!(reason, "its contribution has 1073741825 bytes, the most is 1073741824");
}

#[test]
fn of_many_failures_the_lowest_ranks_are_told_and_the_others_counted() {
    let replies = |mut tree: Tree, come: &dyn Fn(u32) -> bool| {
        let mut replies = Vec::new();
        for rank in tree.ranks().filter(|rank| come(*rank)) {
            replies = tree.contribute(rank, "plan", Err(format!("disk {rank} is full")), LONG);
        }
        replies.extend(tree.pass(LONG));
        same_error(&replies, tree.ranks().filter(|rank| come(*rank)))
    };
    let spelled = |error: Error| match error {
        Error::Failed { failures, more, .. } => (failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), more),
        error => panic!("{error}"),
    };
    assert_eq!(spelled(replies(Tree::new(500, 8, 12), &|_| true)), ((0..64).collect(), 436));
    // What ranks say of themselves comes before who said nothing.
    let some = spelled(replies(Tree::new(500, 8, 12), &|rank| rank >= 450));
    assert_eq!(some, ((0..14).chain(450..500).collect(), 436));
}

#[test]
fn no_node_takes_more_messages_than_it_has_children_and_a_parent() {
    for (world, local_world, fan_out) in [(3000, 8, 16), (1000, 1, 2), (1000, 8, 32)] {
        let mut tree = Tree::new(world, local_world, fan_out);
        for rank in tree.ranks() {
            tree.come(rank, "plan");
        }
        assert_eq!(tree.decide("plan", Ok(vec![vec![7]; world as usize])).0, Ok(vec![7]));
        for rank in tree.ranks() {
            let children = tree.topology.children(rank).len() as u32;
            assert!(children <= fan_out);
            let (below, above) = tree.taken[rank as usize];
            assert_eq!((below.messages, above.messages), (children, u32::from(rank > 0)), "rank {rank}");
        }
        assert!(tree.is_quiet());
    }
}

#[test]
fn at_100_000_ranks_a_payload_costs_rank_0_its_own_bytes_and_no_more() {
    let world = 100_000;
    let mut tree = Tree::new(world, 8, Topology::FAN_OUT_DEFAULT);
    for rank in tree.ranks() {
        tree.contribute(rank, "7 commit", Ok([u128::from(rank).to_le_bytes()].concat()), LONG);
    }
    let (below, _) = tree.taken[0];
    let children = tree.topology.children(0).len();
    assert!(below.messages as usize == children && children <= 32, "{below:?}");
    assert!(below.bytes <= world as usize * 16 + children * 64, "{below:?}");
    // A word to each, and one word to all.
    let own = tree.ranks().map(|rank| rank.to_le_bytes().to_vec()).collect();
    assert_eq!(tree.decide("7 commit", Ok(own)).1.len(), world as usize - 1);
    let sent = |tree: &Tree| {
        tree.topology.children(0).iter().map(|child| tree.taken[child.start as usize].1.bytes).sum::<usize>()
    };
    assert!(sent(&tree) <= world as usize * 4 + children * 64, "{}", sent(&tree));
}

#[test]
fn what_all_ranks_are_told_alike_crosses_each_link_once() {
    let (world, manifest) = (64, vec![7; 1 << 20]);
    let mut tree = Tree::new(world, 8, 8);
    for rank in tree.ranks() {
        tree.contribute(rank, "open", Ok(b"the same for all".to_vec()), LONG);
    }
    for rank in tree.ranks() {
        let (below, _) = tree.taken[rank as usize];
        assert!(below.bytes <= below.messages as usize * 64, "{below:?}");
    }
    let replies = tree.decide("open", Ok(vec![manifest.clone(); world as usize])).1;
    assert!(replies.len() == 63 && replies.iter().all(|(_, reply)| *reply == Reply::Answer(Ok(manifest.clone()))));
    for rank in 1..world {
        let (_, above) = tree.taken[rank as usize];
        assert!(above.messages == 1 && above.bytes <= manifest.len() + 64, "{above:?}");
    }
}

#[test]
fn messages_that_cannot_be_meant_cost_the_sender_its_place() {
    let part = |report| Upward {
        number: 1,
        seen: 0,
        word: FromChild::Part(Part { topic: "plan".into(), age: Duration::ZERO, left: LONG, report }),
    };
    let payloads = |ranks: usize| Some(Bundle::new(vec![b"a"[..].into(); ranks]));
    let whole = Report { payloads: payloads(3), ..Report::default() };
    let runs = |runs: &[(u32, u32)]| runs.iter().map(|&(start, end)| start..end).collect();
    let mut stranger = Failures::default();
    stranger.add(5, "of another".into());
    for (report, problem) in [
        (Report { payloads: payloads(2), ..whole.clone() }, "2 payloads of 3 ranks"),
        (Report { payloads: None, ..whole.clone() }, "0 payloads of 3 ranks"),
        (Report { failures: stranger, ..Report::default() }, "a failure of rank 5 below 1..4"),
        (
            Report {
                missing: runs(&[(1, 2)]),
                payloads: Some(Bundle::new(vec![vec![0; 513].into(); 3])),
                ..whole.clone()
            },
            "a beginning of 513 bytes, the most is 512",
        ),
        (Report { missing: runs(&[(3, 5)]), ..Report::default() }, "ranks 3..5 missing below 1..4"),
        (Report { missing: runs(&[(1, 3), (2, 4)]), ..Report::default() }, "ranks 2..4 missing below 1..4"),
        (Report { missing: runs(&[(3, 3)]), ..Report::default() }, "ranks 3..3 missing below 1..4"),
    ] {
        let mut tree = Tree::new(8, 1, 2);
        tree.come(0, "plan");
        let replies = tree.act(0, |node, now| node.receive_from_child(1, part(report), now));
        let cause = format!(r#"its part of "plan" is invalid: {problem}"#);
        assert_eq!(same_error(&replies, [0]), Error::Lost { rank: 1, cause });
    }
    let mut tree = Tree::new(8, 1, 2);
    tree.act(0, |node, now| node.receive_from_child(3, part(whole.clone()), now));
    assert!(tree.is_quiet(), "rank 3 is no child of rank 0");

    let mut tree = Tree::new(8, 1, 2);
    tree.come(7, "plan");
    let answers = Bundle::new(vec![b"a"[..].into(); 2]);
    let word = FromParent::Answer { topic: "plan".into(), answers };
    let replies = tree.act(7, |node, now| node.receive_from_parent(Downward { number: 1, word }, now));
    let cause = r#"it sent 2 answers on "plan" for 1 ranks"#.to_owned();
    assert_eq!(same_error(&replies, [7]), Error::Lost { rank: tree.topology.parent(7).unwrap(), cause });
}

#[test]
fn a_node_knows_whom_a_round_waits_for_as_far_as_it_can_see() {
    let absent =
        |ranks: &[u32], among: &[std::ops::Range<u32>]| Absent { ranks: ranks.to_vec(), among: among.to_vec() };
    let mut star = Tree::new(4, 1, 32);
    let knows = |tree: &Tree, rank: u32| tree.nodes[rank as usize].absent("plan");
    assert_eq!(knows(&star, 0), absent(&[], &[]));
    star.come(2, "plan");
    assert_eq!(knows(&star, 0), absent(&[0, 1, 3], &[]));
    assert_eq!(knows(&star, 2), absent(&[], &[0..2, 3..4]));
    star.come(0, "plan");
    star.come(1, "plan");
    assert_eq!(knows(&star, 0), absent(&[3], &[]));
    // Two ranks: who is not this one is the other one.
    let mut pair = Tree::new(2, 1, 32);
    pair.come(1, "plan");
    assert_eq!((knows(&pair, 0), knows(&pair, 1)), (absent(&[0], &[]), absent(&[0], &[])));
    // Ranks below others are known as a whole.
    let mut deep = Tree::new(7, 1, 2);
    deep.come(0, "plan");
    assert_eq!(knows(&deep, 0), absent(&[], &[1..4, 4..7]));
}
