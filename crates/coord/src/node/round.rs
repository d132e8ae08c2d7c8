//! Keeps the state of one round at one node.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use prost::bytes::Bytes;

use super::Contribution;
use super::bundle::{Bundle, Collector};
use super::message::{FAILURES_MAX, Report};
use super::watch::Wanted;
use crate::error::NOT_CONTRIBUTED;
use crate::{Error, PAYLOAD_BYTES_MAX, SAMPLE_BYTES, SHOWN_BYTES};

const TOPIC_BYTES_MAX: usize = 4096;
const REASON_BYTES_MAX: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct Round<W> {
    pub(super) opened: Duration,
    pub(super) expires: Duration,
    pub(super) stage: Stage,
    /// `true` once this rank's call has come, even if it has timed out since.
    pub(super) has_come: bool,
    pub(super) waiting: Option<Waiting<W>>,
    pub(super) own: Option<Result<Bytes, String>>,
    /// `true` once this node has reported to the parent that the round is overdue here.
    pub(super) is_overdue: bool,
    /// Silent rank above, once the round has failed here because of it.
    pub(super) silent_above: Option<u32>,
    /// Reports, by child.
    pub(super) reports: BTreeMap<u32, Report>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waiting for contributions.
    Gathering,
    /// Waiting for the children's reports.
    Closing {
        /// Time after which reports are left out.
        until: Duration,
    },
    /// Waiting for the outcome, with the part sent.
    Reported,
    /// Waiting for the decision; only at rank 0, which has all contributions.
    Deciding,
}

/// A local call that waits.
#[derive(Debug)]
pub(super) struct Waiting<W> {
    pub(super) waiter: W,
    pub(super) deadline: Duration,
    pub(super) gives_up: Duration,
}

impl<W> Round<W> {
    pub(super) fn new(opened: Duration, expires: Duration) -> Round<W> {
        Round {
            opened,
            expires,
            stage: Stage::Gathering,
            has_come: false,
            waiting: None,
            own: None,
            is_overdue: false,
            silent_above: None,
            reports: BTreeMap::new(),
        }
    }

    pub(super) fn due(&self) -> Option<Duration> {
        let stage = match self.stage {
            Stage::Gathering => Some(self.expires),
            Stage::Closing { until } => Some(until),
            Stage::Reported if self.is_overdue_at(Duration::MAX) => Some(self.expires),
            Stage::Reported | Stage::Deciding => None,
        };
        let gives_up = self.waiting.as_ref().map(|waiting| waiting.gives_up);
        stage.into_iter().chain(gives_up).min()
    }

    /// Returns whether this node still has to report to the parent that the round is overdue.
    pub(super) fn is_overdue_at(&self, now: Duration) -> bool {
        self.stage == Stage::Reported && !self.is_overdue && self.silent_above.is_none() && self.expires <= now
    }

    /// Returns when to watch the other ends that this round waits for.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted::by(self.opened, self.expires)
    }

    /// Returns whether a call in this subtree waits, or may still come, for an answer of the parent.
    pub(super) fn waits_for_parent(&self) -> bool {
        let is_awaited = self.waiting.is_some() || !self.has_come;
        is_awaited && self.silent_above.is_none() && self.stage != Stage::Deciding
    }

    pub(super) fn waits_for_child(&self, child: u32) -> bool {
        matches!(self.stage, Stage::Gathering | Stage::Closing { .. }) && !self.reports.contains_key(&child)
    }

    /// Returns the time after which a silent parent is not waited for.
    pub(super) fn gives_up_on_parent(&self) -> Option<Duration> {
        (self.stage == Stage::Reported && self.waits_for_parent()).then_some(self.expires)
    }

    /// Returns the error of this rank's call if the round has already failed here because of a silent rank above.
    pub(super) fn join_after_timeout(&mut self, topic: &str) -> Option<Error> {
        let rank = self.silent_above.filter(|_| !self.has_come)?;
        self.has_come = true;
        Some(outcome_unknown(topic, rank))
    }

    /// Returns the contributions of the subtree of `rank`, and forgets the payloads. `children` yields each subtree,
    /// and whether it is silent.
    pub(super) fn report<'a>(&mut self, rank: u32, children: impl Iterator<Item = (&'a Range<u32>, bool)>) -> Report {
        let mut report = Report::default();
        let mut parts = Vec::new();
        match self.own.take() {
            Some(Ok(payload)) => parts.push(Bundle::new([payload])),
            Some(Err(reason)) => report.failures.add(rank, reason),
            None => {
                report.add_missing(rank..rank + 1);
                parts.push(Bundle::empty(1));
            }
        }
        for (subtree, is_silent) in children {
            // The entry stays: it shows that the child has reported.
            let Some(child) = self.reports.get_mut(&subtree.start) else {
                report.add_missing(subtree.clone());
                report.silent.extend(is_silent.then_some(subtree.start));
                parts.push(Bundle::empty(subtree.len() as u32));
                continue;
            };
            let child = std::mem::take(child);
            report.failures.append(child.failures);
            child.missing.into_iter().for_each(|run| report.add_missing(run));
            report.silent.extend(child.silent);
            parts.extend(child.payloads);
        }
        if report.failures.is_empty() {
            let mut payloads = Collector::default();
            for mut part in parts {
                if !report.is_complete() {
                    part.cut(SHOWN_BYTES);
                }
                payloads.append(&part);
            }
            report.payloads = Some(payloads.finish());
        }
        report
    }

    /// Returns, at rank 0, every rank's payload, in their order; `None` if some are missing.
    pub(super) fn payloads<'a>(&mut self, mut children: impl Iterator<Item = &'a Range<u32>>) -> Option<Vec<Vec<u8>>> {
        let own = self.own.as_ref()?.as_ref().ok()?;
        let is_whole = |report: &Report| report.payloads.is_some() && report.is_complete();
        if !children.all(|subtree| self.reports.get(&subtree.start).is_some_and(is_whole)) {
            return None;
        }
        let bundles = self.reports.values().filter_map(|report| report.payloads.as_ref());
        let all = [own].into_iter().chain(bundles.flat_map(|bundle| bundle.payloads()));
        let payloads = all.map(|payload| payload.to_vec()).collect();
        self.own = None;
        self.reports.values_mut().for_each(|report| *report = Report::default());
        Some(payloads)
    }
}

/// Returns the error of a round that ends without a decision. Failures that ranks contributed come first; a lost rank
/// and missing ranks are added to them.
pub(super) fn failed(topic: &str, report: Report, waited: Duration, lost: Option<(u32, &str)>) -> Error {
    let Report { mut failures, missing, silent, payloads } = report;
    match lost {
        Some((rank, cause)) if failures.is_empty() => Error::Lost { rank, cause: cause.to_owned() },
        Some((rank, cause)) => {
            if !failures.spelled.contains_key(&rank) {
                failures.add(rank, format!("it is lost: {cause}"));
            }
            failures.into_error(topic)
        }
        None if failures.is_empty() => {
            let ranks = missing.into_iter().flatten().collect();
            let first = payloads.iter().flat_map(Bundle::payloads).find(|payload| !payload.is_empty());
            let sample = first.map(|payload| payload[..payload.len().min(SAMPLE_BYTES)].to_vec()).unwrap_or_default();
            Error::Missing { topic: topic.to_owned(), ranks, silent, waited, sample }
        }
        None => {
            let mut absent = missing.into_iter().flatten();
            let room = FAILURES_MAX - failures.spelled.len();
            for rank in absent.by_ref().take(room) {
                failures.add(rank, format!("{NOT_CONTRIBUTED} {waited:?}"));
            }
            failures.more = failures.more.saturating_add(absent.count() as u32);
            failures.into_error(topic)
        }
    }
}

impl Report {
    /// Adds a run; runs come in ascending order, and adjacent ones become one.
    fn add_missing(&mut self, run: Range<u32>) {
        match self.missing.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => self.missing.push(run),
        }
    }
}

/// Returns the error of a rank below a silent one.
pub(super) fn outcome_unknown(topic: &str, rank: u32) -> Error {
    Error::Unavailable(format!("rank {rank} does not answer; the outcome of the agreement on {topic:?} is unknown"))
}

pub(super) fn check_topic(topic: &str) -> Result<(), Error> {
    match topic.len() {
        1..=TOPIC_BYTES_MAX => Ok(()),
        bytes => Err(Error::Invalid(format!("a topic is 1 to {TOPIC_BYTES_MAX} bytes long, found {bytes}"))),
    }
}

/// Turns a contribution that is too large into a failure, which every rank gets.
pub(super) fn bounded(contribution: Contribution) -> Contribution {
    match contribution {
        Ok(bytes) if bytes.len() > PAYLOAD_BYTES_MAX => {
            Err(format!("its contribution has {} bytes, the most is {PAYLOAD_BYTES_MAX}", bytes.len()))
        }
        Ok(bytes) => Ok(bytes),
        Err(reason) => Err(cut(reason)),
    }
}

pub(super) fn cut(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}
