//! The messages between parents and children in the tree.
//!
//! Messages of one link are numbered from 1, so that a node takes each once and in order, whatever the transport does.
//! Pings and their answers have no number: they may overtake all other messages.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use prost::bytes::Bytes;

use super::bundle::Bundle;
use crate::{Error, Failure, SAMPLE_BYTES};

/// Reasons of one round that go to every rank; the rest is counted.
pub const FAILURES_MAX: usize = 64;

/// A numbered message from child to parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upward {
    /// This message's number on its link.
    pub number: u64,
    /// The number of the parent's last message that the child had taken when it sent this.
    pub seen: u64,
    /// The message.
    pub word: FromChild,
}

/// A numbered message from parent to child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downward {
    /// This message's number on its link.
    pub number: u64,
    /// The message.
    pub word: FromParent,
}

impl Upward {
    /// A ping to the parent.
    pub(crate) fn asks(interval: Duration) -> Upward {
        Upward { number: 0, seen: 0, word: FromChild::Asks { interval } }
    }

    /// The answer to a ping.
    pub(crate) const LIVES: Upward = Upward { number: 0, seen: 0, word: FromChild::Lives };
}

impl Downward {
    /// A ping to a child.
    pub(crate) fn asks(interval: Duration) -> Downward {
        Downward { number: 0, word: FromParent::Asks { interval } }
    }

    /// The answer to a ping.
    pub(crate) const LIVES: Downward = Downward { number: 0, word: FromParent::Lives };
}

/// What a child sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromChild {
    /// Its whole subtree's part of a round, once for each round.
    Part(Part),
    /// A rank below it is lost.
    Lost {
        /// The rank.
        rank: u32,
        /// Why.
        cause: String,
    },
    /// A deadline below the child has passed, in a round of which the parent has this child's part.
    Overdue {
        /// The round's topic.
        topic: String,
    },
    /// Pings the parent, which then pings its own parent.
    Asks {
        /// When the next ping follows.
        interval: Duration,
    },
    /// Answers a ping.
    Lives,
}

/// A subtree's part of one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The round's topic.
    pub topic: String,
    /// How long ago its first rank came.
    pub age: Duration,
    /// The time until the first deadline of its ranks.
    pub left: Duration,
    /// What its ranks contributed.
    pub report: Report,
}

/// What the ranks of a subtree contributed to a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Those that failed.
    pub failures: Failures,
    /// Those that have not come, ascending runs.
    pub missing: Vec<Range<u32>>,
    /// Those of them that did not answer a ping, ascending.
    pub silent: Vec<u32>,
    /// How the first payload that is not empty begins, where some ranks have not come.
    pub sample: Bytes,
    /// The payloads of all; none when some failed or have not come, since then nothing is decided.
    pub payloads: Option<Bundle>,
}

/// What a parent sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromParent {
    /// The round can wait no longer: report what there is.
    Close {
        /// The round's topic.
        topic: String,
    },
    /// The round was decided.
    Answer {
        /// The round's topic.
        topic: String,
        /// The answers of all ranks of the child's subtree.
        answers: Bundle,
    },
    /// The round failed, with the same error for every rank.
    Failed {
        /// The round's topic.
        topic: String,
        /// Why.
        error: Error,
    },
    /// The time of a round is over, and its outcome cannot arrive.
    OutcomeUnknown {
        /// The round's topic.
        topic: String,
        /// The rank above that is silent.
        rank: u32,
    },
    /// The first lost rank: rounds that are not complete fail, and all later ones.
    Lost {
        /// The rank.
        rank: u32,
        /// Why.
        cause: String,
    },
    /// Pings the child, which then pings its own children.
    Asks {
        /// When the next ping follows.
        interval: Duration,
    },
    /// Answers a ping.
    Lives,
}

/// The failures of some ranks: those of the lowest ranks with their reasons, the others counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// Reasons by rank, at most [`FAILURES_MAX`].
    pub(crate) spelled: BTreeMap<u32, String>,
    /// How many ranks more failed.
    pub(crate) more: u32,
}

impl Failures {
    pub(crate) fn is_empty(&self) -> bool {
        self.spelled.is_empty() && self.more == 0
    }

    pub(crate) fn add(&mut self, rank: u32, reason: String) {
        self.spelled.insert(rank, reason);
        if self.spelled.len() > FAILURES_MAX {
            self.spelled.pop_last();
            self.more = self.more.saturating_add(1);
        }
    }

    pub(crate) fn append(&mut self, others: Failures) {
        self.more = self.more.saturating_add(others.more);
        for (rank, reason) in others.spelled {
            self.add(rank, reason);
        }
    }

    /// As the error of the round of `topic`.
    pub(crate) fn into_error(self, topic: &str) -> Error {
        let failures = self.spelled.into_iter().map(|(rank, reason)| Failure { rank, reason }).collect();
        Error::Failed { topic: topic.to_owned(), failures, more: self.more }
    }
}

impl Report {
    /// Whether every rank has come.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Checks that it can be the report of `subtree`.
    pub(crate) fn check(&self, subtree: &Range<u32>) -> Result<(), String> {
        let within = |ranks: &Range<u32>| subtree.start <= ranks.start && ranks.end <= subtree.end;
        let mut next = subtree.start;
        for run in &self.missing {
            if run.is_empty() || run.start < next || !within(run) {
                return Err(format!("ranks {run:?} missing below {subtree:?}"));
            }
            next = run.end;
        }
        let is_missing = |rank: &u32| {
            let at = self.missing.partition_point(|run| run.end <= *rank);
            self.missing.get(at).is_some_and(|run| run.contains(rank))
        };
        if self.sample.len() > SAMPLE_BYTES {
            return Err(format!("a sample of {} bytes, the most is {SAMPLE_BYTES}", self.sample.len()));
        }
        if !self.silent.is_sorted_by(|a, b| a < b) || !self.silent.iter().all(is_missing) {
            return Err(format!("ranks {:?} silent of {:?} missing", self.silent, self.missing));
        }
        if let Some(rank) = self.failures.spelled.keys().find(|rank| !subtree.contains(rank)) {
            return Err(format!("a failure of rank {rank} below {subtree:?}"));
        }
        let (ranks, is_whole) = (subtree.len(), self.failures.is_empty() && self.missing.is_empty());
        match &self.payloads {
            Some(payloads) if payloads.ranks() as usize == ranks && is_whole => Ok(()),
            None if !is_whole => Ok(()),
            payloads => {
                let found = payloads.as_ref().map_or(0, Bundle::ranks);
                Err(format!("{found} payloads of {ranks} ranks"))
            }
        }
    }
}
