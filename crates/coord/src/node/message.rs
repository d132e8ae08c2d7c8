//! Defines the messages between parents and children in the tree.
//!
//! Messages of one link are numbered from 1, so that a node takes each once and in order, whatever the transport does.
//! Pings and their answers have no number: they may overtake all other messages.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use prost::bytes::Bytes;

use super::bundle::Bundle;
use crate::{Error, Failure, SHOWN_BYTES};

/// Number of reasons of one round that go to every rank; the others are counted.
pub const FAILURES_MAX: usize = 64;

/// A numbered message from child to parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upward {
    /// Number of this message on its link.
    pub number: u64,
    /// Number of the parent's last message that the child had taken when it sent this.
    pub seen: u64,
    /// Contents of the message.
    pub word: FromChild,
}

/// A numbered message from parent to child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downward {
    /// Number of this message on its link.
    pub number: u64,
    /// Contents of the message.
    pub word: FromParent,
}

impl Upward {
    /// Makes a ping to the parent.
    pub(crate) fn asks(interval: Duration) -> Upward {
        Upward { number: 0, seen: 0, word: FromChild::Asks { interval } }
    }

    /// Answer to a ping.
    pub(crate) const LIVES: Upward = Upward { number: 0, seen: 0, word: FromChild::Lives };
}

impl Downward {
    /// Makes a ping to a child.
    pub(crate) fn asks(interval: Duration) -> Downward {
        Downward { number: 0, word: FromParent::Asks { interval } }
    }

    /// Answer to a ping.
    pub(crate) const LIVES: Downward = Downward { number: 0, word: FromParent::Lives };
}

/// Contents of a child's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromChild {
    /// Part of its whole subtree in a round, once for each round.
    Part(Part),
    /// Loss of a rank below the child.
    Lost {
        /// Rank that is lost.
        rank: u32,
        /// Cause of the loss.
        cause: String,
    },
    /// Expiry of a deadline below the child, in a round of which the parent has this child's part.
    Overdue {
        /// Topic of the round.
        topic: String,
    },
    /// Ping to the parent, which then pings its own parent.
    Asks {
        /// Time until the next ping.
        interval: Duration,
    },
    /// Answer to a ping.
    Lives,
}

/// Part of a subtree in one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Topic of the round.
    pub topic: String,
    /// Time since the first rank contributed.
    pub age: Duration,
    /// Time until the first deadline of the subtree's ranks.
    pub left: Duration,
    /// Contributions of the ranks.
    pub report: Report,
}

/// Contributions of a subtree's ranks to a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Failures of ranks.
    pub failures: Failures,
    /// Ranks that have not contributed, in ascending runs.
    pub missing: Vec<Range<u32>>,
    /// Missing ranks that did not answer a ping, ascending.
    pub silent: Vec<u32>,
    /// Payloads of all ranks; if some are missing, the first [`SHOWN_BYTES`] of each of the others, since then nothing
    /// is decided; `None` if some failed.
    pub payloads: Option<Bundle>,
}

/// Contents of a parent's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromParent {
    /// End of waiting for a round: the child must report what it has.
    Close {
        /// Topic of the round.
        topic: String,
    },
    /// Outcome of a decided round.
    Answer {
        /// Topic of the round.
        topic: String,
        /// Answers of all ranks of the child's subtree.
        answers: Bundle,
    },
    /// Failure of a round, with the same error for every rank.
    Failed {
        /// Topic of the round.
        topic: String,
        /// Error of the round.
        error: Error,
    },
    /// Expiry of a round whose outcome cannot arrive.
    OutcomeUnknown {
        /// Topic of the round.
        topic: String,
        /// Silent rank above.
        rank: u32,
    },
    /// First lost rank: rounds that are not complete fail, and all later ones.
    Lost {
        /// Rank that is lost.
        rank: u32,
        /// Cause of the loss.
        cause: String,
    },
    /// Ping to the child, which then pings its own children.
    Asks {
        /// Time until the next ping.
        interval: Duration,
    },
    /// Answer to a ping.
    Lives,
}

/// Failures of some ranks: those of the lowest ranks with their reasons, the others counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// Reasons by rank, at most [`FAILURES_MAX`].
    pub(crate) spelled: BTreeMap<u32, String>,
    /// Number of further ranks that failed.
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

    /// Converts to the error of the round of `topic`.
    pub(crate) fn into_error(self, topic: &str) -> Error {
        let failures = self.spelled.into_iter().map(|(rank, reason)| Failure { rank, reason }).collect();
        Error::Failed { topic: topic.to_owned(), failures, more: self.more }
    }
}

impl Report {
    /// Returns whether every rank has contributed.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Returns the ranks that contributed to a round in which others are missing, with the beginnings of what they
    /// sent; `first` is the first rank of the subtree. Returns none if some failed.
    pub(crate) fn came(&self, first: u32) -> Vec<(u32, Vec<u8>)> {
        let payloads = self.payloads.iter().flat_map(Bundle::payloads);
        let all = (first..).zip(payloads).filter(|(rank, _)| !self.missing.iter().any(|run| run.contains(rank)));
        all.map(|(rank, payload)| (rank, payload.to_vec())).collect()
    }

    /// Checks that this can be the report of `subtree`.
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
        if !self.silent.is_sorted_by(|a, b| a < b) || !self.silent.iter().all(is_missing) {
            return Err(format!("ranks {:?} silent of {:?} missing", self.silent, self.missing));
        }
        if let Some(rank) = self.failures.spelled.keys().find(|rank| !subtree.contains(rank)) {
            return Err(format!("a failure of rank {rank} below {subtree:?}"));
        }
        let (ranks, has_failed) = (subtree.len(), !self.failures.is_empty());
        match &self.payloads {
            Some(payloads) if payloads.ranks() as usize == ranks && !has_failed => {
                let longest = payloads.distinct.iter().map(Bytes::len).max().unwrap_or(0);
                match self.is_complete() || longest <= SHOWN_BYTES {
                    true => Ok(()),
                    false => Err(format!("a beginning of {longest} bytes, the most is {SHOWN_BYTES}")),
                }
            }
            None if has_failed => Ok(()),
            payloads => {
                let found = payloads.as_ref().map_or(0, Bundle::ranks);
                Err(format!("{found} payloads of {ranks} ranks"))
            }
        }
    }
}
