//! Tracks the progress of a save: its threads set it, its caller waits for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_store::Requests;

use crate::error::{Error, Failures, Kind, Result};
use crate::staging::Staging;

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
    /// and when it was tried again; all but the first 64 are only counted.
    pub failures: Vec<String>,
    /// Number of failures beyond those listed.
    pub failures_left_out: u64,
}

/// Failures that a report lists.
const FAILURES_MAX: usize = 64;

/// State of a save, for its threads and its caller.
pub struct Shared {
    /// Guarded state of the save.
    pub state: Mutex<State>,
    /// Notified at each change of the state.
    pub changed: Condvar,
    /// Time at which the save was requested.
    pub requested: Instant,
}

/// State of a save that its threads and its caller see.
pub struct State {
    /// `true` once all tensors that are captured eagerly are copied.
    pub captured: bool,
    /// `true` once the program may change the state.
    pub staged: bool,
    /// Caller's answer whether lazily captured tensors were modified.
    pub confirmed: Option<Result<()>>,
    /// Error that cancelled the save.
    pub cancelled: Option<Error>,
    /// Outcome, once the save has ended.
    pub outcome: Option<Result<()>>,
    /// Report of the save so far.
    pub report: Report,
    /// Notes that the caller has added since the save began.
    pub late_notes: Notes,
    /// Shardfast's own notes, as rank 0 has committed them.
    pub committed_notes: Notes,
}

/// Notes of a checkpoint: texts by name.
pub type Notes = BTreeMap<String, String>;

/// Progress of a save, as the running save sees and reports it.
pub struct Progress {
    /// State that the save and its caller share.
    pub shared: Arc<Shared>,
    /// Save whose report lists the failures.
    reported_in: Arc<Shared>,
}

impl Shared {
    /// Begins at this moment; `captured` if nothing is captured eagerly.
    pub fn new(captured: bool) -> Shared {
        let report = Report::default();
        let state = State {
            captured,
            staged: false,
            confirmed: None,
            cancelled: None,
            outcome: None,
            report,
            late_notes: Notes::new(),
            committed_notes: Notes::new(),
        };
        Shared { state: Mutex::new(state), changed: Condvar::new(), requested: Instant::now() }
    }

    /// Waits for a state; returns `None` when `timeout` passed first.
    pub fn wait<T>(&self, timeout: Option<Duration>, reached: impl Fn(&State) -> Option<T>) -> Option<T> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.lock();
        loop {
            if let Some(result) = reached(&state) {
                return Some(result);
            }
            let Some(until) = until else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Locks the state, also after a thread has panicked.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    /// Returns the end of the running save.
    pub fn new(shared: Arc<Shared>) -> Progress {
        Progress { reported_in: Arc::clone(&shared), shared }
    }

    /// Makes the progress of work without a caller that waits for `captured` or `staged`.
    pub fn detached() -> Progress {
        Progress::new(Arc::new(Shared::new(true)))
    }

    /// Makes the progress of a part of this save whose caller waits for neither; its failures are this save's.
    pub fn beside(&self) -> Progress {
        Progress { reported_in: Arc::clone(&self.reported_in), ..Progress::detached() }
    }

    /// Sets that all that is captured eagerly is copied.
    pub fn captured(&self) {
        self.mark("captured");
        self.shared.lock().captured = true;
        self.shared.changed.notify_all();
    }

    /// Sets that the state may change from now on.
    pub fn staged(&self) {
        self.mark("staged");
        let mut state = self.shared.lock();
        (state.captured, state.staged) = (true, true);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until the caller confirms that lazily captured tensors were not modified.
    pub fn confirmation(&self, timeout: Duration) -> Result<()> {
        self.shared.wait(Some(timeout), |state| state.confirmed.clone()).unwrap_or_else(|| {
            let message = "timed out waiting for confirmation that tensors were not modified during capture";
            Err(Error::new(Kind::Unavailable, message))
        })
    }

    /// Sets the end of a phase. Only the first call counts.
    pub fn mark(&self, phase: &'static str) {
        let ms = self.shared.requested.elapsed().as_secs_f64() * 1e3;
        self.shared.lock().report.phases_ms.entry(phase).or_insert(ms);
    }

    /// Reports the page-lock error, if any, of the staging memory that was used.
    pub fn staged_in(&self, staging: &Staging) {
        let failure = staging.page_lock_failure();
        self.shared.lock().report.page_lock_failure = failure;
    }

    /// Sets whether replicas are compared.
    pub fn compared(&self, outcome: &'static str) {
        self.shared.lock().report.replicas = outcome;
    }

    /// Sets the requests that were made to the storage.
    pub fn asked(&self, requests: Requests) {
        let Requests { puts, gets, asked_again, heads, lists, deletes } = requests;
        let kinds = [
            ("puts", puts),
            ("gets", gets),
            ("asked_again", asked_again),
            ("heads", heads),
            ("lists", lists),
            ("deletes", deletes),
        ];
        self.shared.lock().report.requests = kinds.into_iter().filter(|(_, count)| *count > 0).collect();
    }

    /// Returns the notes that the caller has added so far.
    pub fn late_notes(&self) -> Notes {
        self.shared.lock().late_notes.clone()
    }

    /// Sets the notes that were committed.
    pub fn noted(&self, notes: Notes) {
        self.shared.lock().committed_notes = notes;
    }

    /// Counts data files that were written, given the bytes of each.
    pub fn wrote(&self, files: impl Iterator<Item = u64>) {
        let mut state = self.shared.lock();
        for bytes in files {
            state.report.files_written += 1;
            state.report.bytes_written += bytes;
        }
    }

    /// Cancels the save, which has failed elsewhere.
    pub fn cancel(&self, error: &Error) {
        self.shared.lock().cancelled.get_or_insert_with(|| error.clone());
    }

    /// Returns the reason why the save was cancelled.
    pub fn cancelled(&self) -> Option<Error> {
        self.shared.lock().cancelled.clone()
    }

    /// Returns this rank's error, with the stage that its part of the save had reached.
    pub fn with_stage(&self, error: Error) -> Error {
        let state = self.shared.lock();
        let reached = |phase: &&&str| state.report.phases_ms.contains_key(**phase);
        let stage = match ["staged", "captured", "planned"].iter().find(reached) {
            Some(&"staged") => "staged, not yet durable",
            Some(&"captured") => "captured, not yet staged",
            _ => "planned, not yet captured",
        };
        Error { message: format!("{} (its part was {stage})", error.message), ..error }
    }
}

impl Failures for Progress {
    fn failed(&self, error: &Error, tried: usize, pause: Option<Duration>) {
        // An answer that something is there, or is not, is no failure of the storage.
        if matches!(error.kind, Kind::Conflict | Kind::NotFound) {
            return;
        }
        let ms = self.reported_in.requested.elapsed().as_millis();
        let next = match pause {
            Some(pause) => format!("again in {} ms", pause.as_millis()),
            None => "not again".to_owned(),
        };
        let mut state = self.reported_in.lock();
        match state.report.failures.len() < FAILURES_MAX {
            true => state.report.failures.push(format!("{ms} ms: {}; try {tried}, {next}", error.message)),
            false => state.report.failures_left_out += 1,
        }
    }

    fn before(&self) -> (u64, Option<String>) {
        let report = &self.reported_in.lock().report;
        let count = report.failures.len() as u64 + report.failures_left_out;
        (count, report.failures.last().cloned())
    }
}

/// Counts `left` down and calls `reached` at zero.
pub(crate) struct Countdown<F: Fn()> {
    left: AtomicUsize,
    reached: F,
}

impl<F: Fn()> Countdown<F> {
    pub(crate) fn new(left: usize, reached: F) -> Self {
        if left == 0 {
            reached();
        }
        Countdown { left: AtomicUsize::new(left), reached }
    }

    pub(crate) fn one(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            (self.reached)();
        }
    }
}
