//! One operation of all ranks: numbered by the order of the calls, every exchange typed, every failure the same on all.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use shardfast_coord::{Error as Coord, Failure, NOT_CONTRIBUTED};
use shardfast_transfer::error::{Error, Kind, Result, expect_uninterrupted};
use shardfast_transfer::interrupt;
use shardfast_transfer::observed::Observed;

use crate::calls::{self, Call, CallReport, Verdict, Waits, overtaken, too_late};
use crate::engine::Engine;
use crate::listen::Refused;
use crate::listened::Listened;

/// Marks an error that rank 0 decided for all ranks, as opposed to a failure of rank 0 itself.
const DECISION: &str = "=";

/// The first exchange of every operation, in which ranks find whether all of them make the same call.
const OPEN: &str = "open";

/// Decision of rank 0 if the calls differ: all ranks then send what they call.
const DIFFERENT: &str = "?";

/// Time for which a rank whose program was interrupted waits for the others.
const INTERRUPTED_WITHIN: Duration = Duration::from_secs(2);

/// A decision over the messages of all ranks.
type DecideOver<'a> = &'a mut dyn FnMut(&mut dyn Iterator<Item = &[u8]>) -> std::result::Result<Vec<Vec<u8>>, String>;

impl Engine {
    /// Begins the next operation. Ranks must begin the same operations in the same order.
    pub(crate) fn begin(self: &Arc<Engine>, what: String, deadline: Duration) -> Operation {
        self.begin_one(what, String::new(), deadline)
    }

    /// Begins like [`Engine::begin`] one of several operations of the same description, distinguished by `detail`: all
    /// ranks must give the same.
    pub(crate) fn begin_one(self: &Arc<Engine>, what: String, detail: String, deadline: Duration) -> Operation {
        Operation { engine: Arc::clone(self), call: self.calls.begin(what, detail), deadline, begun: since_start() }
    }

    /// Returns a sentence for each operation that has waited for longer than `patience`, once, which names the ranks
    /// that have not called it, as far as this rank knows them; and whether any operation waits for ranks.
    pub fn overdue(&self, patience: Duration) -> (Vec<String>, bool) {
        self.calls.overdue(patience, |number| self.coord.absent(&topic(number, OPEN)))
    }

    /// Returns the calls of this rank that wait for other ranks.
    pub fn waits(&self) -> Vec<Waits> {
        self.calls.waiting(|number| self.coord.absent(&topic(number, OPEN)))
    }

    /// Takes part in the next operation with a failure: it fails on every rank with this rank's reason.
    pub fn refuse(self: &Arc<Engine>, error: Error, deadline: Duration) -> Error {
        self.refuse_in(&self.begin(String::new(), deadline), error)
    }

    /// Refuses like [`refuse`](Engine::refuse) a save or load of which the listener of this rank gets to know as the
    /// listeners of the other ranks do.
    pub fn refuse_listened(self: &Arc<Engine>, refused: &Refused, error: Error, deadline: Duration) -> Error {
        let observed = Arc::new(Observed::since(refused.began));
        let listened = Listened::begin(self, observed, refused.verb, (&refused.url, refused.step));
        let listened = Arc::new(listened);
        let operation = self.begin(String::new(), deadline);
        let failed = self.refuse_in(&operation, error.clone());
        listened.note_outcome(&Err(error), operation.number_met());
        listened.collect_later(self);
        failed
    }

    fn refuse_in(&self, operation: &Operation, error: Error) -> Error {
        match operation.agree::<(), ()>(OPEN, Err(error.clone()), |_| Err(error.clone())) {
            Ok(()) => error,
            Err(failed) => failed,
        }
    }
}

/// Returns the topic of an exchange of the operation of that number.
fn topic(number: u64, stage: &str) -> String {
    format!("{number} {stage}")
}

/// One operation that every rank takes part in.
pub(crate) struct Operation {
    pub(crate) engine: Arc<Engine>,
    call: Call,
    deadline: Duration,
    /// Time since the machine was started, suspension counted, when it began.
    begun: Duration,
}

impl Operation {
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Checks that a save will not have lasted so long that a sweep may take its files for debris, once the next step
    /// has taken its time.
    pub(crate) fn expect_young(&self, next: Duration) -> Result<()> {
        let (most, lasted) = (self.engine.save_max, since_start().saturating_sub(self.begun));
        if lasted.saturating_add(next) < most {
            return Ok(());
        }
        let (most, lasted) = (most.as_secs(), lasted.as_secs());
        Err(Error::new(
            Kind::Unavailable,
            format!(
                "{}: expected a save that lasts less than {most} s, found {lasted} s: a sweep may take its files for \
                 what a crashed save left; save again",
                self.call.id().what
            ),
        ))
    }

    /// Returns the operation's number, the same on all ranks once they have met in it.
    pub(crate) fn number(&self) -> u64 {
        self.call.id().number()
    }

    /// Returns the operation's number once ranks have met in it.
    pub(crate) fn number_met(&self) -> Option<u64> {
        self.call.has_met().then(|| self.number())
    }

    /// Identifies this attempt among all of its meeting; known before ranks have met.
    pub(crate) fn attempt_seed(&self) -> Vec<u8> {
        self.call.attempt_seed()
    }

    /// Returns the operation's description and number, unique among the operations of these ranks.
    pub(crate) fn name(&self) -> String {
        topic(self.number(), &self.call.id().what)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.engine.rank() == 0
    }

    /// Gathers every rank's message at rank 0, which decides once. Each rank gets its own answer, or all get the same
    /// error: that of the decision, or the errors that ranks contributed.
    pub(crate) fn agree<M, A>(
        &self,
        stage: &str,
        contribution: Result<M>,
        decide: impl FnMut(Vec<M>) -> Result<Vec<A>>,
    ) -> Result<A>
    where
        M: Serialize + DeserializeOwned,
        A: Serialize + DeserializeOwned,
    {
        self.try_agree(stage, contribution, decide).map_err(|failed| failed.error)
    }

    /// Agrees like [`Operation::agree`], and distinguishes a decision to fail from an unknown decision.
    pub(crate) fn try_agree<M, A>(
        &self,
        stage: &str,
        contribution: Result<M>,
        mut decide: impl FnMut(Vec<M>) -> Result<Vec<A>>,
    ) -> std::result::Result<A, Failed>
    where
        M: Serialize + DeserializeOwned,
        A: Serialize + DeserializeOwned,
    {
        let contribution = contribution.and_then(|message| encode(&message));
        let mut decide = |messages: &mut dyn Iterator<Item = &[u8]>| {
            decided(messages, &mut decide).map_err(|error| format!("{DECISION}{}", error.to_wire()))
        };
        let bytes = if stage == OPEN {
            self.open(contribution, &mut decide)?
        } else {
            let contribution = contribution.map_err(|error| error.to_wire());
            let answer = self.exchange(stage, contribution, self.deadline, &mut |messages| {
                decide(&mut messages.iter().map(Vec::as_slice))
            });
            answer.map_err(|error| self.failed(error))?
        };
        match decode(&bytes) {
            Ok((answer, _)) => Ok(answer),
            Err(error) => Err(Failed { error, decided: true }),
        }
    }

    /// Makes the first exchange: meets the calls of the other ranks, as [`calls`](crate::calls) describes.
    fn open(&self, contribution: Result<Vec<u8>>, decide: DecideOver<'_>) -> std::result::Result<Vec<u8>, Failed> {
        let (own, hash) = (self.engine.rank(), self.call.hash());
        let contribution =
            contribution.map(|message| [&hash, message.as_slice()].concat()).map_err(|error| error.to_wire());
        let _waits = self.call.wait();
        let mut is_late = false;
        loop {
            let answer = self.exchange(OPEN, contribution.clone(), self.deadline, &mut |messages| {
                if messages.iter().any(|message| !message.starts_with(&hash)) {
                    return Err(DIFFERENT.to_owned());
                }
                decide(&mut messages.iter().map(|message| &message[hash.len()..]))
            });
            let error = match answer {
                Ok(bytes) => {
                    self.call.met(false);
                    return Ok(bytes);
                }
                Err(error) => error,
            };
            match error {
                Coord::Failed { failures, .. } if failures.iter().any(|failure| failure.reason == DIFFERENT) => {
                    match self.compare(is_late)? {
                        () if self.call.take_next() => {}
                        () => return Err(self.fail_unmatched(overtaken(&self.call.id().what, own))),
                    }
                }
                Coord::Missing { ranks, sample, waited, .. } if ranks.contains(&own) => {
                    self.call.left_out(own, &ranks);
                    if sample.starts_with(&hash) || !self.call.take_next() {
                        return Err(self.fail_unmatched(too_late(&self.call.id().what, own, waited, self.deadline)));
                    }
                    is_late = true;
                }
                Coord::Missing { ranks, silent, waited, .. } => {
                    let mut not_called = self.call.not_called(&ranks, &silent, waited);
                    if !silent.is_empty() {
                        not_called.message += &format!("; rank {own} is at {}", self.engine.host());
                    }
                    return Err(Failed { decided: false, ..self.fail_unmatched(not_called) });
                }
                Coord::Failed { failures, more, .. }
                    if failures.iter().any(|failure| failure.reason.starts_with(NOT_CONTRIBUTED)) =>
                {
                    return Err(self.fail_unmatched(self.merged(&failures, more)));
                }
                error => {
                    let failed = self.failed(error);
                    if failed.decided {
                        self.call.met(true);
                    }
                    return Err(failed);
                }
            }
        }
    }

    /// Fails an operation that not all ranks have begun; no files of it remain on any rank.
    fn fail_unmatched(&self, error: Error) -> Failed {
        self.call.set_unmatched();
        Failed { error, decided: true }
    }

    fn exchange(
        &self,
        stage: &str,
        contribution: std::result::Result<Vec<u8>, String>,
        deadline: Duration,
        decide: shardfast_coord::Decide<'_>,
    ) -> std::result::Result<Vec<u8>, Coord> {
        let topic = topic(self.number(), stage);
        let (coord, name) = (Arc::clone(&self.engine.coord), topic.clone());
        interrupt::waiting(
            move || coord.hurry(&name),
            || match expect_uninterrupted() {
                Ok(()) => self.engine.coord.agree(&topic, contribution, decide, deadline),
                Err(error) => {
                    let contribution = contribution.and_then(|_| Err(error.to_wire()));
                    self.engine.coord.agree(&topic, contribution, decide, deadline.min(INTERRUPTED_WITHIN))
                }
            },
        )
    }

    /// Sends this rank's call, after ranks have made different calls. Returns an error if its call fails; else it waits
    /// for the others at the next number.
    fn compare(&self, is_late: bool) -> std::result::Result<(), Failed> {
        let report = encode(&self.call.report(is_late)).map_err(|error| error.to_wire());
        let answer = self.exchange("compare", report, self.deadline, &mut |reports| {
            let verdicts = |reports: Vec<CallReport>| Ok(calls::decide(&reports));
            decided(reports.iter().map(Vec::as_slice), &mut { verdicts })
                .map_err(|error| format!("{DECISION}{}", error.to_wire()))
        });
        let bytes = answer.map_err(|error| self.failed(error))?;
        match decode(&bytes) {
            Ok((Verdict::Again, _)) => Ok(()),
            Ok((Verdict::Fails { error, attempts }, _)) => {
                let error = Error::from_wire(&error).unwrap_or_else(|| Error::internal(error));
                let failed = self.fail_unmatched(error);
                attempts.into_iter().for_each(|attempts| self.call.set_attempts(attempts));
                Err(failed)
            }
            Err(error) => Err(Failed { error, decided: true }),
        }
    }

    fn failed(&self, error: shardfast_coord::Error) -> Failed {
        match error {
            Coord::Failed { failures, more, .. } => Failed { error: self.merged(&failures, more), decided: true },
            other => {
                let error = Error::new(Kind::Unavailable, format!("{}: {other}", self.call.id().what));
                Failed { error, decided: false }
            }
        }
    }

    /// Merges the failures of several ranks into one error, each with its rank if there are several, and the number of
    /// `more`.
    fn merged(&self, failures: &[Failure], more: u32) -> Error {
        let mut kind = None;
        let mut lines = Vec::with_capacity(failures.len());
        for Failure { rank, reason } in failures {
            let decision = reason.strip_prefix(DECISION);
            // The coordinator's own reasons have no kind.
            let message = match Error::from_wire(decision.unwrap_or(reason)) {
                Some(error) => {
                    kind.get_or_insert(error.kind);
                    error.message
                }
                None => reason.clone(),
            };
            let unranked = decision.is_some() || self.engine.world() == 1;
            lines.push(if unranked { message } else { format!("rank {rank}: {message}") });
        }
        if more > 0 {
            lines.push(format!("and {more} more ranks failed"));
        }
        Error::new(kind.unwrap_or(Kind::Internal), lines.join("\n"))
    }
}

/// Converts an error between ranks: wrong calls are `Invalid`, everything else `Unavailable`.
pub fn of_ranks(error: Coord) -> Error {
    let kind = match &error {
        Coord::Invalid(_) => Kind::Invalid,
        _ => Kind::Unavailable,
    };
    Error::new(kind, error.to_string())
}

/// Returns the time since the machine was started. Unlike that of [`std::time::Instant`] it advances while the machine
/// is suspended.
fn since_start() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Failure of an agreement.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// `true` if every rank knows that it failed; otherwise this rank does not know the others' outcome.
    pub(crate) decided: bool,
}

/// Returns the answers to these messages, by rank.
fn decided<'a, M: DeserializeOwned, A: Serialize>(
    messages: impl Iterator<Item = &'a [u8]>,
    decide: &mut impl FnMut(Vec<M>) -> Result<Vec<A>>,
) -> Result<Vec<Vec<u8>>> {
    let message = |(rank, bytes)| match decode(bytes) {
        Ok((message, _)) => Ok(message),
        Err(error) => Err(error.within(format!("rank {rank}"))),
    };
    let messages = messages.enumerate().map(message).collect::<Result<Vec<M>>>()?;
    decide(messages)?.iter().map(encode).collect()
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(|error| Error::internal(format!("a message cannot be encoded: {error}")))
}

/// Decodes a message; returns it with the bytes after it.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|error| Error::internal(format!("a message cannot be decoded: {error}")))
}
