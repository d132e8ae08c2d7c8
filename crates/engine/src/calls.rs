//! Matches the calls of the ranks, also after a rank has left one out.
//!
//! # Protocol
//!
//! 1. Each rank numbers its calls as it begins them. The first exchange of a call, `<number> open`, is where the calls
//!    of that number meet. Each rank sends a hash of what it calls.
//! 2. When a rank does not call in time, the number is over: the ranks that waited fail with [`Absences::not_called`].
//!    The missing rank finds that out when it calls at last. If it makes the call that failed on the others, its call
//!    fails, too: when the others retry, they may have another state. Any other call takes the next number, and is
//!    *late*.
//! 3. Ranks that meet with different calls send each other a description of their calls ([`decide`]). A rank is
//!    *behind* if it is late, or if its call failed on another rank because not all ranks made it (*unmatched*). If all
//!    other ranks make the same call, only the ranks behind fail, and the others wait at the next number for their next
//!    call. Otherwise all fail.
//!
//! A call takes another number only while it is the last one that its rank has begun. So after any failure all ranks
//! are at one number, or the next mismatch shows who is behind.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_coord::{Absent, Ranks};
use shardfast_format::sha256;
use shardfast_transfer::error::{Error, Kind};

/// Unmatched calls that are remembered, the latest.
const UNMATCHED_MAX: usize = 64;

/// CallHash of a rank's call, which tells it from any other call.
pub(crate) type CallHash = [u8; 8];

/// The calls of this rank.
#[derive(Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The number of the next call.
    next: u64,
    /// Number of begun saves by call, without attempts that certainly left no files. It makes the names of attempts
    /// different, and is the same on all ranks unless one of them has left a call out.
    attempts: HashMap<CallHash, u32>,
    /// Calls of this rank that were unmatched since all ranks last met.
    unmatched: Vec<CallHash>,
    absences: Absences,
    /// Calls that wait for other ranks, by their first numbers.
    waiting: BTreeMap<u64, Waiting>,
}

struct Waiting {
    call: Arc<CallId>,
    since: Instant,
    is_told: bool,
}

/// A call of this rank that waits for other ranks to make it.
#[derive(Clone, Debug)]
pub struct Waits {
    /// Description of the call; empty for one that failed on this rank.
    pub call: String,
    /// Time that it has waited.
    pub waited: Duration,
    /// Ranks that have certainly not come.
    pub ranks: Vec<u32>,
    /// Runs of other ranks, of which at least one has not come if `ranks` is empty.
    pub among: Vec<Range<u32>>,
}

/// Number of calls that each rank has left out since all ranks last met.
#[derive(Default)]
pub(crate) struct Absences(BTreeMap<u32, u64>);

/// The identity of a call.
pub(crate) struct CallId {
    pub(crate) what: String,
    /// Detail that distinguishes it from calls of the same description, such as the training step.
    detail: String,
    number: AtomicU64,
}

/// One call, from its beginning to its end.
pub(crate) struct Call {
    calls: Arc<Calls>,
    id: Arc<CallId>,
    first_number: u64,
    /// The number of earlier saves like this one.
    attempt: u32,
    is_save: bool,
    hash: CallHash,
    /// `true` if its attempt certainly leaves no files once it has ended.
    is_void: AtomicBool,
    /// `true` once all ranks have met in it.
    has_met: AtomicBool,
}

/// A rank's description of its call, sent when the ranks' calls differ.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct CallReport {
    what: String,
    attempt: u32,
    hash: CallHash,
    is_late: bool,
    unmatched: Vec<CallHash>,
}

/// Decision about a rank's call.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// Waits at the next number.
    Again,
    /// Fails with this error, encoded for messages. `attempts` sets the same number of attempts on all ranks.
    Fails { error: String, attempts: Option<u32> },
}

impl Calls {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next call of this rank.
    pub(crate) fn begin(self: &Arc<Calls>, what: String, detail: String) -> Call {
        let identity = format!("{what}{detail}");
        let is_save = what.starts_with("save ");
        let mut state = self.state();
        let mut attempt = 0;
        if is_save {
            let attempts = state.attempts.entry(hash(&identity, 0)).or_default();
            attempt = *attempts;
            *attempts += 1;
        }
        let first_number = state.next;
        state.next += 1;
        drop(state);
        let hash = hash(&identity, attempt);
        let id = Arc::new(CallId { what, detail, number: AtomicU64::new(first_number) });
        let calls = Arc::clone(self);
        Call {
            calls,
            id,
            first_number,
            attempt,
            is_save,
            hash,
            is_void: AtomicBool::new(false),
            has_met: AtomicBool::new(false),
        }
    }

    /// Returns a sentence for each call that has waited for `patience` and was not reported before, and whether any
    /// call waits.
    pub(crate) fn overdue(&self, patience: Duration, absent: impl Fn(u64) -> Absent) -> (Vec<String>, bool) {
        let mut state = self.state();
        let is_overdue = |waiting: &&mut Waiting| !waiting.is_told && waiting.since.elapsed() >= patience;
        let mut overdue = Vec::new();
        for waiting in state.waiting.values_mut().filter(is_overdue) {
            waiting.is_told = true;
            overdue.push((Arc::clone(&waiting.call), waiting.since.elapsed()));
        }
        let waits = !state.waiting.is_empty();
        drop(state);
        let text = |(call, waited): (Arc<CallId>, Duration)| {
            let who = not_come(&absent(call.number()), verb(&call.what))?;
            // A refusal has no description: it takes the place of any call.
            let what = if call.what.is_empty() { "a call that failed on this rank" } else { &call.what };
            Some(format!("{what}: {who} after {:.0} s", waited.as_secs_f64()))
        };
        (overdue.into_iter().filter_map(text).collect(), waits)
    }
}

impl Calls {
    /// Returns the calls that wait for other ranks.
    pub(crate) fn waiting(&self, absent: impl Fn(u64) -> Absent) -> Vec<Waits> {
        let state = self.state();
        let calls: Vec<_> = state.waiting.values().map(|one| (Arc::clone(&one.call), one.since.elapsed())).collect();
        drop(state);
        let waits = |(call, waited): (Arc<CallId>, Duration)| {
            let Absent { ranks, among } = absent(call.number());
            Waits { call: call.what.clone(), waited, ranks, among }
        };
        calls.into_iter().map(waits).collect()
    }
}

impl CallId {
    fn identity(&self) -> String {
        format!("{}{}", self.what, self.detail)
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

impl Call {
    pub(crate) fn id(&self) -> &CallId {
        &self.id
    }

    pub(crate) fn hash(&self) -> CallHash {
        self.hash
    }

    /// Identifies this attempt among all of its meeting; the same on all ranks.
    pub(crate) fn attempt_seed(&self) -> Vec<u8> {
        [&self.attempt.to_le_bytes(), self.id.identity().as_bytes()].concat()
    }

    /// Registers this call with [`Calls::overdue`] until the result is dropped.
    pub(crate) fn wait(&self) -> impl Drop + use<> {
        struct Waits(Arc<Calls>, u64);
        impl Drop for Waits {
            fn drop(&mut self) {
                self.0.state().waiting.remove(&self.1);
            }
        }
        let waiting = Waiting { call: Arc::clone(&self.id), since: Instant::now(), is_told: false };
        self.calls.state().waiting.insert(self.first_number, waiting);
        Waits(Arc::clone(&self.calls), self.first_number)
    }

    /// Takes the next number; returns `false` if another call was begun since.
    pub(crate) fn take_next(&self) -> bool {
        let mut state = self.calls.state();
        let is_last = state.next == self.id.number() + 1;
        if is_last {
            self.id.number.store(state.next, Ordering::Relaxed);
            state.next += 1;
        }
        is_last
    }

    /// Records that all ranks have met in this call.
    pub(crate) fn met(&self, has_failed: bool) {
        self.is_void.store(has_failed, Ordering::Relaxed);
        self.has_met.store(true, Ordering::Relaxed);
        let mut state = self.calls.state();
        state.unmatched.clear();
        state.absences.0.clear();
    }

    /// Returns whether all ranks have met in this call.
    pub(crate) fn has_met(&self) -> bool {
        self.has_met.load(Ordering::Relaxed)
    }

    /// Records that the call fails on all ranks that made it, since not all did. No files of it remain.
    pub(crate) fn set_unmatched(&self) {
        self.is_void.store(true, Ordering::Relaxed);
        let mut state = self.calls.state();
        state.unmatched.push(self.hash);
        let surplus = state.unmatched.len().saturating_sub(UNMATCHED_MAX);
        state.unmatched.drain(..surplus);
    }

    /// Records that `ranks` did not make the call. Returns the error for the ranks that made it.
    pub(crate) fn not_called(&self, ranks: &[u32], silent: &[u32], within: Duration) -> Error {
        let mut state = self.calls.state();
        let absences = &mut state.absences;
        absences.0.retain(|rank, _| ranks.contains(rank));
        ranks.iter().for_each(|rank| *absences.0.entry(*rank).or_default() += 1);
        absences.not_called(&self.id.what, silent, within)
    }

    /// Notes that these ranks, this one among them, have left out a call that others made.
    pub(crate) fn left_out(&self, own: u32, ranks: &[u32]) {
        let absences = &mut self.calls.state().absences.0;
        ranks.iter().filter(|rank| **rank != own).for_each(|rank| *absences.entry(*rank).or_default() += 1);
    }

    pub(crate) fn report(&self, is_late: bool) -> CallReport {
        let unmatched = self.calls.state().unmatched.clone();
        CallReport { what: self.id.identity(), attempt: self.attempt, hash: self.hash, is_late, unmatched }
    }

    /// Sets how often a save like this one was begun.
    pub(crate) fn set_attempts(&self, attempts: u32) {
        self.is_void.store(false, Ordering::Relaxed);
        self.calls.state().attempts.insert(hash(&self.id.identity(), 0), attempts);
    }
}

impl Drop for Call {
    /// Counts the attempt only now, since until its end the call deletes files under the attempt's name.
    fn drop(&mut self) {
        if self.is_save && self.is_void.load(Ordering::Relaxed) {
            let mut state = self.calls.state();
            if let Some(attempts) = state.attempts.get_mut(&hash(&self.id.identity(), 0)) {
                // Unless the same save was begun again meanwhile.
                *attempts -= u32::from(*attempts == self.attempt + 1);
            }
        }
    }
}

impl Absences {
    /// Returns the error of a call that some ranks have left out.
    fn not_called(&self, what: &str, silent: &[u32], within: Duration) -> Error {
        let verb = verb(what);
        let mut by_calls: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        self.0.iter().for_each(|(rank, calls)| by_calls.entry(*calls).or_default().push(*rank));
        let who = by_calls.iter().map(|(calls, ranks)| {
            let (have, s) = (if ranks.len() == 1 { "has" } else { "have" }, if *calls == 1 { "" } else { "s" });
            format!("{} {have} not called {verb} ({calls} call{s} behind)", Ranks(ranks))
        });
        let who = who.collect::<Vec<_>>().join(", ");
        let silent = match silent {
            [] => String::new(),
            _ => format!("; no answer from {}: not connected yet, stopped, or out of reach", Ranks(silent)),
        };
        let message = format!(
            "{what}: {who} within {within:?}{silent}; every rank of the job must call it, or those that do pass \
             process_group="
        );
        Error::new(Kind::Unavailable, message)
    }
}

/// Returns the ranks that have not called, as far as this rank knows; `None` if it knows of none.
fn not_come(absent: &Absent, verb: &str) -> Option<String> {
    let Absent { ranks, among } = absent;
    if !ranks.is_empty() {
        let have = if ranks.len() == 1 { "has" } else { "have" };
        return Some(format!("{} {have} not called {verb}", Ranks(ranks)));
    }
    let among: Vec<u32> = among.iter().cloned().flatten().collect();
    (!among.is_empty()).then(|| format!("some of {} have not called {verb}", Ranks(&among)))
}

/// Returns the verb that a user called.
fn verb(what: &str) -> &str {
    match what.split_once(' ').map_or(what, |(verb, _)| verb) {
        "open" | "match" | "install" => "load",
        "" => "it",
        verb => verb,
    }
}

fn hash(what: &str, attempt: u32) -> CallHash {
    let mut hash = [0; 8];
    hash.copy_from_slice(&sha256(&[&attempt.to_le_bytes(), what.as_bytes()].concat())[..8]);
    hash
}

/// Returns the error of a call that had failed on the other ranks before this rank made it, for which they would have
/// waited until the deadline.
pub(crate) fn too_late(what: &str, rank: u32, waited: Duration, deadline: Duration) -> Error {
    let verb = verb(what);
    let why = match waited < deadline {
        true => ", until one of them was interrupted or its own timeout was over",
        false => "",
    };
    let message = format!("{what}: rank {rank} called {verb} too late: the other ranks waited {waited:?} for it{why}");
    Error::new(Kind::Unavailable, message)
}

/// Returns the error of a call that would have to wait for ranks that are behind, and cannot.
pub(crate) fn overtaken(what: &str, rank: u32) -> Error {
    let message = format!("{what}: the ranks are at different calls, and rank {rank} has already begun its next one");
    Error::new(Kind::Unavailable, message)
}

/// Decides over calls that differ. Returns a verdict for each rank.
pub(crate) fn decide(reports: &[CallReport]) -> Vec<Verdict> {
    let is_tried_before = |rank: usize| {
        reports.iter().enumerate().any(|(q, other)| q != rank && other.unmatched.contains(&reports[rank].hash))
    };
    let is_behind: Vec<bool> = (0..reports.len()).map(|rank| reports[rank].is_late || is_tried_before(rank)).collect();
    let first = &reports[0];
    let attempts = reports.iter().map(|report| report.attempt).max().unwrap_or(0) + 1;
    if reports.iter().all(|report| report.what == first.what) {
        let other = reports.iter().position(|report| report.attempt != first.attempt).unwrap_or(0);
        let error = Error::new(
            Kind::Unavailable,
            format!(
                "{}: rank 0 is at attempt {}, rank {other} at attempt {}; call it again",
                first.what,
                first.attempt + 1,
                reports[other].attempt + 1
            ),
        );
        return vec![Verdict::Fails { error: error.to_wire(), attempts: Some(attempts) }; reports.len()];
    }
    let mut ahead = reports.iter().zip(&is_behind).filter(|(_, is_behind)| !**is_behind).map(|(report, _)| report);
    if let Some(common) = ahead.next()
        && ahead.all(|report| report.hash == common.hash)
    {
        let verdict = |(rank, own): (usize, &CallReport)| match own.hash == common.hash {
            true => Verdict::Again,
            false => {
                let error = Error::new(
                    Kind::Unavailable,
                    format!(
                        "rank {rank} is behind the other ranks: it calls `{}`; they call `{}` and wait for its next \
                         call",
                        own.what, common.what
                    ),
                );
                Verdict::Fails { error: error.to_wire(), attempts: None }
            }
        };
        return reports.iter().enumerate().map(verdict).collect();
    }
    let other = reports.iter().position(|report| report.what != first.what).unwrap_or(0);
    let error = Error::invalid(format!(
        "ranks must call the same operations in the same order: rank 0 calls `{}`, rank {other} calls `{}`",
        first.what, reports[other].what
    ));
    vec![Verdict::Fails { error: error.to_wire(), attempts: None }; reports.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a rank's report: whether it is late, what it calls, its unmatched calls.
    fn report(is_late: bool, what: &str, unmatched: &[&str]) -> CallReport {
        let unmatched = unmatched.iter().map(|what| hash(what, 0)).collect();
        CallReport { what: what.to_owned(), attempt: 0, hash: hash(what, 0), is_late, unmatched }
    }

    #[test]
    fn a_wait_names_the_call_also_one_that_failed_here() {
        let calls = Arc::<Calls>::default();
        let absent = |_| Absent { ranks: vec![1, 2], among: Vec::new() };
        for (what, said) in [
            ("install runs/a", "install runs/a: ranks 1-2 have not called load after 0 s"),
            ("", "a call that failed on this rank: ranks 1-2 have not called it after 0 s"),
        ] {
            let call = calls.begin(what.to_owned(), String::new());
            let _waits = call.wait();
            assert_eq!(calls.overdue(Duration::ZERO, absent).0, [said]);
        }
    }

    /// Returns for each rank the end of its message; empty if it waits.
    fn verdicts(reports: &[CallReport]) -> Vec<String> {
        let text = |verdict: &Verdict| match verdict {
            Verdict::Again => String::new(),
            Verdict::Fails { error, .. } => error.clone(),
        };
        decide(reports).iter().map(text).collect()
    }

    #[test]
    fn ranks_that_call_different_things_fail_and_those_behind_fail_alone() {
        let all = "ranks must call the same operations in the same order: rank 0 calls `save a`, rank 1 calls `save b`";
        let found = verdicts(&[report(false, "save a", &[]), report(false, "save b", &[])]);
        assert_eq!(found, vec![format!("Invalid|{all}"); 2]);
        // The second time rank 0 calls what rank 1 has called before.
        let found = verdicts(&[report(false, "save b", &["save a"]), report(false, "save c", &["save b"])]);
        assert!(found[0].starts_with("Unavailable|rank 0 is behind the other ranks: it calls `save b`"), "{found:?}");
        assert_eq!(found[1], "");
        // A rank that is late is behind; not if it calls what the others call.
        let found = verdicts(&[report(false, "save b", &[]), report(true, "save a", &[]), report(true, "save b", &[])]);
        assert!(found[0].is_empty() && found[1].contains("rank 1 is behind") && found[2].is_empty(), "{found:?}");
        // Unless all ranks ahead make the same call, no rank waits.
        for found in [
            verdicts(&[report(true, "save a", &[]), report(true, "save b", &[])]),
            verdicts(&[report(false, "save a", &[]), report(false, "save b", &[]), report(true, "save c", &[])]),
        ] {
            assert!(found.iter().all(|found| found.starts_with("Invalid|")), "{found:?}");
        }
    }

    #[test]
    fn attempts_have_names_of_their_own_unless_nothing_is_left_of_one() {
        let calls = Arc::new(Calls::default());
        let first = calls.begin("save a".to_owned(), String::new());
        let second = calls.begin("save a".to_owned(), String::new());
        assert_ne!(first.attempt_seed(), second.attempt_seed());
        assert_eq!((first.id().number(), second.id().number()), (0, 1));
        // Unmatched, but its files may exist beside those of the second one.
        first.set_unmatched();
        drop(first);
        second.set_unmatched();
        let seed = second.attempt_seed();
        drop(second);
        let third = calls.begin("save a".to_owned(), String::new());
        assert_eq!(third.attempt_seed(), seed);
        third.met(false);
        drop(third);
        assert_ne!(calls.begin("save a".to_owned(), String::new()).attempt_seed(), seed);
    }

    #[test]
    fn a_call_takes_the_next_number_only_while_it_is_the_last() {
        let calls = Arc::new(Calls::default());
        let first = calls.begin("save a".to_owned(), String::new());
        assert!(first.take_next());
        assert_eq!(first.id().number(), 1);
        let second = calls.begin("save b".to_owned(), String::new());
        assert_eq!((second.id().number(), first.take_next(), first.id().number()), (2, false, 1));
    }

    #[test]
    fn ranks_that_have_not_called_are_named_with_how_far_they_are_behind() {
        let calls = Arc::new(Calls::default());
        let second = Duration::from_secs(1);
        let call = calls.begin("save a".to_owned(), String::new());
        call.not_called(&[3], &[], second);
        let error = call.not_called(&[1, 2, 3], &[2], second);
        let begins = "save a: ranks 1-2 have not called save (1 call behind), rank 3 has not called save (2 calls \
                      behind) within 1s; no answer from rank 2: ";
        assert!(error.message.starts_with(begins), "{error}");
        call.met(false);
        let error = calls.begin("open a".to_owned(), String::new()).not_called(&[3], &[], second);
        assert!(
            error.message.starts_with("open a: rank 3 has not called load (1 call behind) within 1s; every"),
            "{error}"
        );
    }
}
