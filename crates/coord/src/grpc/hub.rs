//! Combines a process's node, its clock, and the links to its parent and children.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::frames::Outbound;
use crate::hub::{Hub, Waiter};
use crate::node::{Contribution, Downward, Effect, Effects, Node, Reply, Upward};
use crate::{Absent, Error, Topology};

pub(super) type Below = UnboundedReceiver<Outbound<Downward>>;
pub(super) type Above = UnboundedReceiver<Outbound<Upward>>;

pub(super) struct ProcessHub {
    started: Instant,
    linked: Mutex<Linked>,
    /// Notified when the node may be due earlier than before.
    changed: Notify,
    /// `true` once a round was decided here: then all ranks of the world have joined.
    has_met: AtomicBool,
}

struct Linked {
    node: Node<Waiter>,
    /// Link to the parent; `None` once this rank leaves or has lost it.
    up: Option<UnboundedSender<Outbound<Upward>>>,
    /// Link to each child, also before it has joined; without lost children.
    down: BTreeMap<u32, UnboundedSender<Outbound<Downward>>>,
    /// Receiving ends of the links, until a session takes them.
    above: Option<Above>,
    below: BTreeMap<u32, Below>,
}

impl Linked {
    fn leave_parent(&mut self) {
        if let Some(up) = self.up.take() {
            // If sending fails, the session has ended already.
            let _ = up.send(Outbound::Leave);
        }
    }
}

impl ProcessHub {
    pub(super) fn new(topology: &Topology, rank: u32) -> ProcessHub {
        let (up, above) = unbounded_channel();
        let links = topology.children(rank).into_iter().map(|subtree| (subtree.start, unbounded_channel()));
        let (mut down, mut below) = (BTreeMap::new(), BTreeMap::new());
        for (child, (sender, receiver)) in links {
            down.insert(child, sender);
            below.insert(child, receiver);
        }
        let linked = Linked { node: Node::new(topology, rank), up: Some(up), down, above: Some(above), below };
        ProcessHub {
            started: Instant::now(),
            linked: Mutex::new(linked),
            changed: Notify::new(),
            has_met: AtomicBool::new(false),
        }
    }

    /// Takes the queue of messages to the parent; `None` the second time.
    pub(super) fn outbound(&self) -> Option<Above> {
        self.linked().above.take()
    }

    /// Takes the queue of messages to a child; `None` the second time.
    pub(super) fn outbound_to(&self, child: u32) -> Option<Below> {
        self.linked().below.remove(&child)
    }

    /// Passes on a child's message; returns whether the child is still accepted.
    pub(super) fn receive_from_child(&self, child: u32, message: Upward) -> bool {
        self.act(|node, now| {
            let effects = node.receive_from_child(child, message, now);
            (node.counts(child), effects)
        })
    }

    pub(super) fn receive_from_parent(&self, message: Downward) {
        self.act(|node, now| ((), node.receive_from_parent(message, now)));
    }

    pub(super) fn lose(&self, rank: u32, cause: &str) {
        self.act(|node, now| ((), node.lose(rank, cause, now)));
        self.linked().down.remove(&rank);
    }

    /// Reports that a rank of this job was refused. Before the first round was decided, this fails every round.
    pub(super) fn refuse(&self, rank: u32, cause: &str) {
        if !self.has_met.load(Ordering::Relaxed) {
            self.act(|node, now| ((), node.refuse(rank, cause, now)));
        }
    }

    pub(super) fn lose_parent(&self, cause: &str) {
        self.act(|node, now| ((), node.lose_parent(cause, now)));
        self.linked().leave_parent();
    }

    /// Sends a leave message on every link.
    pub(super) fn leave(&self) {
        let mut linked = self.linked();
        linked.leave_parent();
        for down in std::mem::take(&mut linked.down).into_values() {
            let _ = down.send(Outbound::Leave);
        }
        linked.below.clear();
        linked.above = None;
    }

    pub(super) fn hurry(&self, topic: &str) {
        self.act(|node, now| ((), node.hurry(topic, now)));
    }

    pub(super) fn absent(&self, topic: &str) -> Absent {
        self.linked().node.absent(topic)
    }

    pub(super) fn lost(&self) -> Option<u32> {
        self.linked().node.lost()
    }

    fn linked(&self) -> MutexGuard<'_, Linked> {
        // No code of ours panics with the lock held, and the node is whole between any two of its methods.
        self.linked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the node, sends its messages, and then, without the lock, replies to the waiting calls.
    fn act<T>(&self, act: impl FnOnce(&mut Node<Waiter>, Duration) -> (T, Effects<Waiter>)) -> T {
        let mut replies = Vec::new();
        let result = {
            let mut linked = self.linked();
            let (result, effects) = act(&mut linked.node, self.started.elapsed());
            for effect in effects {
                // If sending fails, the link is broken, which its reader is about to report.
                match effect {
                    Effect::Up(message) => {
                        if let Some(up) = &linked.up {
                            let _ = up.send(Outbound::Message(message));
                        }
                    }
                    Effect::Down(child, message) => {
                        if let Some(down) = linked.down.get(&child) {
                            let _ = down.send(Outbound::Message(message));
                        }
                    }
                    Effect::Reply(waiter, reply) => replies.push((waiter, reply)),
                }
            }
            result
        };
        self.changed.notify_one();
        for (waiter, reply) in replies {
            if matches!(reply, Reply::Decide(_) | Reply::Answer(Ok(_))) {
                self.has_met.fetch_or(true, Ordering::Relaxed);
            }
            waiter(reply);
        }
        result
    }
}

impl Hub for ProcessHub {
    fn contribute(&self, topic: &str, contribution: Contribution, waiter: Waiter, deadline: Duration) {
        self.act(|node, now| ((), node.contribute(topic, contribution, waiter, now, deadline)));
    }

    fn decided(&self, topic: &str, decision: Result<Vec<Vec<u8>>, String>) -> Result<Vec<u8>, Error> {
        self.act(|node, _| node.decided(topic, decision))
    }

    fn tick(&self) {
        self.act(|node, now| ((), node.tick(now)));
    }

    fn due_in(&self) -> Option<Duration> {
        let due = self.linked().node.due()?;
        Some(due.saturating_sub(self.started.elapsed()))
    }
}

/// Advances the clock of rounds in which no thread of this process waits.
pub(super) async fn keep_time(hub: Arc<ProcessHub>) {
    loop {
        match hub.due_in() {
            Some(left) => {
                tokio::select! {
                    () = tokio::time::sleep(left) => hub.tick(),
                    () = hub.changed.notified() => {}
                }
            }
            None => hub.changed.notified().await,
        }
    }
}
