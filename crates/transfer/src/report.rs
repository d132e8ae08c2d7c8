//! Computes the report of a save from its events, without a lock.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;
use shardfast_store::Action;

use crate::error::Kind;
use crate::events::{Event, Observer, Phase};

/// Results of a save so far.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Milliseconds from the request until each phase was over.
    pub phases_ms: BTreeMap<&'static str, f64>,
    /// Bytes of data files that this rank wrote, headers included.
    pub bytes_written: u64,
    /// Data files that this rank wrote.
    pub files_written: u64,
    /// Result of comparing replicas; empty before it is known.
    pub replicas: &'static str,
    /// Reason why staging memory could not be page-locked for a device: copies from it are slower then.
    pub page_lock_failure: Option<String>,
    /// Requests that this rank made, by kind; empty where the storage takes none.
    pub requests: BTreeMap<&'static str, u64>,
    /// Failures of the storage, each with the time since the request, the operation, its object and part, the cause,
    /// and when it was tried again; all but the first 64 are only counted. At last why the store went another way, if
    /// it did.
    pub failures: Vec<String>,
    /// Number of failures beyond those listed.
    pub failures_left_out: u64,
}

/// Bytes that a save or load of this rank has moved so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Bytes that it moves in all, as far as it knows: a save learns of its values' bytes after its tensors'.
    pub bytes: u64,
    /// Bytes that are copied: into staging memory by a save, verified and to their destination by a load.
    pub copied: u64,
    /// Bytes of data files that the storage has taken; 0 in a load.
    pub stored: u64,
}

/// Failures that a report lists.
const FAILURES_MAX: usize = 64;

/// Kinds of requests, as reports name them.
const REQUESTS: [&str; 6] = ["puts", "gets", "asked_again", "heads", "lists", "deletes"];

/// Observer that remembers what a report says.
pub struct Recorder {
    /// Nanoseconds until the end of each phase; 0 while it is not over.
    phases_ns: [AtomicU64; Phase::ALL.len()],
    /// Phases that have failed, a bit for each.
    given_up: AtomicU64,
    expected: AtomicU64,
    copied: AtomicU64,
    stored: AtomicU64,
    bytes: AtomicU64,
    files: AtomicU64,
    replicas: OnceLock<&'static str>,
    page_lock: OnceLock<String>,
    requests: [AtomicU64; REQUESTS.len()],
    failed: AtomicU64,
    failures: [OnceLock<String>; FAILURES_MAX],
    evaded: OnceLock<String>,
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder {
            phases_ns: Default::default(),
            given_up: AtomicU64::new(0),
            expected: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
            replicas: OnceLock::new(),
            page_lock: OnceLock::new(),
            requests: Default::default(),
            failed: AtomicU64::new(0),
            failures: [const { OnceLock::new() }; FAILURES_MAX],
            evaded: OnceLock::new(),
        }
    }
}

impl Recorder {
    /// Returns whether a phase is over.
    pub fn has_ended(&self, phase: Phase) -> bool {
        self.phases_ns[phase as usize].load(Relaxed) > 0
    }

    /// Returns whether a phase is over, or has failed.
    pub fn is_over(&self, phase: Phase) -> bool {
        self.has_ended(phase) || self.given_up.load(Relaxed) & 1 << phase as u64 != 0
    }

    /// Returns the number of failures so far, and the last one that is listed.
    pub fn failures(&self) -> (u64, Option<String>) {
        (self.failed.load(Relaxed), self.failures.iter().map_while(OnceLock::get).last().cloned())
    }

    /// Notes that the store has taken another way, and why. Only the first text counts: it is no failure.
    pub(crate) fn evaded(&self, text: String) {
        let _ = self.evaded.set(text);
    }

    /// Returns the bytes that were moved so far. None is counted beyond those that are expected: the storage may have
    /// got some of them twice.
    pub fn moved(&self) -> Moved {
        let (copied, stored) = (self.copied.load(Relaxed), self.stored.load(Relaxed));
        let bytes = self.expected.load(Relaxed);
        let copied = copied.min(bytes);
        Moved { bytes, copied, stored: stored.min(copied) }
    }

    /// Returns the report so far.
    pub fn report(&self) -> Report {
        let phases = Phase::ALL.into_iter().filter(|&phase| self.has_ended(phase));
        let ms = |phase: Phase| self.phases_ns[phase as usize].load(Relaxed) as f64 / 1e6;
        let counts = REQUESTS.into_iter().zip(self.requests.iter().map(|count| count.load(Relaxed)));
        let failures = self.failures.iter().map_while(OnceLock::get).chain(self.evaded.get()).cloned().collect();
        Report {
            phases_ms: phases.map(|phase| (phase.word(), ms(phase))).collect(),
            bytes_written: self.bytes.load(Relaxed),
            files_written: self.files.load(Relaxed),
            replicas: self.replicas.get().copied().unwrap_or_default(),
            page_lock_failure: self.page_lock.get().cloned(),
            requests: counts.filter(|(_, count)| *count > 0).collect(),
            failures_left_out: self.failed.load(Relaxed).saturating_sub(FAILURES_MAX as u64),
            failures,
        }
    }
}

impl shardfast_store::Observer for Recorder {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        let asked = event.requests;
        let counts = [asked.puts, asked.gets, asked.asked_again, asked.heads, asked.lists, asked.deletes];
        for (all, count) in self.requests.iter().zip(counts).filter(|(_, count)| *count > 0) {
            all.fetch_add(count, Relaxed);
        }
        if event.action == Action::Write && event.failure.is_none() {
            self.stored.fetch_add(event.bytes, Relaxed);
        }
    }
}

impl Observer for Recorder {
    fn noted(&self, event: &Event<'_>) {
        match *event {
            // Only the first end counts.
            Event::Ended { phase, after } => {
                let ns = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX).max(1);
                let _ = self.phases_ns[phase as usize].compare_exchange(0, ns, Relaxed, Relaxed);
            }
            Event::GaveUp { phase, .. } => _ = self.given_up.fetch_or(1 << phase as u64, Relaxed),
            Event::Expects { bytes } => _ = self.expected.fetch_add(bytes, Relaxed),
            Event::Copied { bytes } => _ = self.copied.fetch_add(bytes, Relaxed),
            Event::Wrote { bytes } => {
                self.files.fetch_add(1, Relaxed);
                self.bytes.fetch_add(bytes, Relaxed);
            }
            Event::Compared { outcome } => _ = self.replicas.set(outcome),
            Event::Outcome { .. }
            | Event::Stalled { .. }
            | Event::Waited { .. }
            | Event::AwaitedMemory { .. }
            | Event::Placed { .. }
            | Event::Exchanged { .. }
            | Event::Ahead { .. }
            | Event::HeldUp { .. } => {}
            Event::PageLock { failure } => _ = self.page_lock.set(failure.to_owned()),
            // An answer that something is there, or is not, is no failure of the storage.
            Event::Failed { error, .. } if matches!(error.kind, Kind::Conflict | Kind::NotFound) => {}
            Event::Failed { error, attempt, pause, after } => {
                let next = match pause {
                    Some(pause) => format!("again in {} ms", pause.as_millis()),
                    None => "not again".to_owned(),
                };
                let number = self.failed.fetch_add(1, Relaxed);
                if let Some(place) = usize::try_from(number).ok().and_then(|number| self.failures.get(number)) {
                    let ms = after.as_millis();
                    let _ = place.set(format!("{ms} ms: {}; try {attempt}, {next}", error.message));
                }
            }
        }
    }
}
