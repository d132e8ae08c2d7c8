//! Connects ranks that are threads of one process; one rank is the smallest such world.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::hub::{self, Hub, LEFT, Waiter};
use crate::node::{Contribution, Effect, Effects, Node, Reply};
use crate::{Absent, Coord, Decide, Error, Meeting, Show, Topology};

/// Nodes of all ranks. A message between two of them is a call.
struct Nodes {
    topology: Topology,
    meeting: Meeting,
    started: Instant,
    nodes: Mutex<Vec<Option<Node<Waiter>>>>,
}

struct Local {
    rank: u32,
    nodes: Arc<Nodes>,
}

/// Returns the one rank of a world of one. It never waits.
///
/// # Panics
/// When the system has no random numbers.
pub fn solo() -> Arc<dyn Coord> {
    local(1).remove(0)
}

/// Returns the ranks of a world within this process, in their order; each is meant for threads of its own.
///
/// # Panics
/// When `world` is 0, and when the system has no random numbers.
pub fn local(world: u32) -> Vec<Arc<dyn Coord>> {
    local_tree(Topology::new(world, 1, Topology::FAN_OUT_DEFAULT).expect("a world of ranks"))
}

/// Returns ranks like [`local`], which agree through this tree.
///
/// # Panics
/// When the system has no random numbers.
pub fn local_tree(topology: Topology) -> Vec<Arc<dyn Coord>> {
    let nodes = Arc::new(Nodes {
        topology,
        meeting: Meeting::draw().expect("random numbers"),
        started: Instant::now(),
        nodes: Mutex::new((0..topology.world()).map(|rank| Some(Node::new(&topology, rank))).collect()),
    });
    (0..topology.world()).map(|rank| Arc::new(Local { rank, nodes: Arc::clone(&nodes) }) as Arc<dyn Coord>).collect()
}

impl Nodes {
    fn nodes(&self) -> MutexGuard<'_, Vec<Option<Node<Waiter>>>> {
        // No code of ours panics with the lock held, and nodes are whole between any two of their methods.
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a node and delivers its messages; then, without the lock, replies to the waiting calls.
    fn act<T>(&self, rank: u32, act: impl FnOnce(&mut Node<Waiter>, Duration) -> (T, Effects<Waiter>)) -> Option<T> {
        let mut replies = Vec::new();
        let result = {
            let mut nodes = self.nodes();
            let now = self.started.elapsed();
            let (result, effects) = act(nodes[rank as usize].as_mut()?, now);
            self.deliver(&mut nodes, rank, effects, now, &mut replies);
            result
        };
        hand_out(replies);
        Some(result)
    }

    fn deliver(
        &self,
        nodes: &mut [Option<Node<Waiter>>],
        rank: u32,
        effects: Effects<Waiter>,
        now: Duration,
        replies: &mut Vec<(Waiter, Reply)>,
    ) {
        let mut due: VecDeque<_> = effects.into_iter().map(|effect| (rank, effect)).collect();
        while let Some((from, effect)) = due.pop_front() {
            let (to, effects) = match effect {
                Effect::Reply(waiter, reply) => {
                    replies.push((waiter, reply));
                    continue;
                }
                Effect::Up(message) => {
                    let Some(parent) = self.topology.parent(from) else { continue };
                    let Some(node) = &mut nodes[parent as usize] else { continue };
                    (parent, node.receive_from_child(from, message, now))
                }
                Effect::Down(child, message) => {
                    let Some(node) = &mut nodes[child as usize] else { continue };
                    (child, node.receive_from_parent(message, now))
                }
            };
            due.extend(effects.into_iter().map(|effect| (to, effect)));
        }
    }

    fn leave(&self, rank: u32) {
        let parent = self.topology.parent(rank);
        let children = self.topology.children(rank).into_iter().map(|subtree| subtree.start);
        self.nodes()[rank as usize] = None;
        if let Some(parent) = parent {
            self.act(parent, |node, now| ((), node.lose(rank, LEFT, now)));
        }
        for child in children {
            self.act(child, |node, now| ((), node.lose_parent(LEFT, now)));
        }
    }
}

fn hand_out(replies: Vec<(Waiter, Reply)>) {
    for (waiter, reply) in replies {
        waiter(reply);
    }
}

impl Hub for Local {
    fn contribute(&self, topic: &str, contribution: Contribution, waiter: Waiter, deadline: Duration) {
        self.nodes.act(self.rank, |node, now| ((), node.contribute(topic, contribution, waiter, now, deadline)));
    }

    fn decided(&self, topic: &str, decision: Result<Vec<Vec<u8>>, String>) -> Result<Vec<u8>, Error> {
        let own = self.nodes.act(self.rank, |node, _| node.decided(topic, decision));
        own.unwrap_or_else(|| Err(Error::Invalid("this rank closed its coordinator".to_owned())))
    }

    fn tick(&self) {
        for rank in 0..self.nodes.topology.world() {
            self.nodes.act(rank, |node, now| ((), node.tick(now)));
        }
    }

    fn due_in(&self) -> Option<Duration> {
        let due = self.nodes.nodes().iter().flatten().filter_map(Node::due).min()?;
        Some(due.saturating_sub(self.nodes.started.elapsed()))
    }
}

impl Coord for Local {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.nodes.topology.world()
    }

    fn meeting(&self) -> Meeting {
        self.nodes.meeting
    }

    fn host(&self) -> &str {
        "127.0.0.1"
    }

    fn absent(&self, topic: &str) -> Absent {
        let nodes = self.nodes.nodes();
        nodes[self.rank as usize].as_ref().map_or_else(Absent::default, |node| node.absent(topic))
    }

    fn lost(&self) -> Option<u32> {
        self.nodes.nodes()[self.rank as usize].as_ref().and_then(|node| node.lost())
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.agree_or_show(topic, contribution, decide, &mut |_| (), deadline)
    }

    fn agree_or_show(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        show: Show<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        hub::agree(self, topic, contribution, decide, show, deadline)
    }

    fn hurry(&self, topic: &str) {
        self.nodes.act(self.rank, |node, now| ((), node.hurry(topic, now)));
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.nodes.leave(self.rank);
    }
}
