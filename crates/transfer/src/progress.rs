//! Tracks the progress of a save: its threads set it, its caller waits for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Failures, Kind, Result};
use crate::events::{Event, Observer, Phase};
use crate::observed::Observed;
use crate::staging::Staging;

/// State of a save, for its threads and its caller.
pub struct Shared {
    /// Guarded state of the save.
    pub state: Mutex<State>,
    /// Notified at each change of the state.
    pub changed: Condvar,
    /// Observer of all that happens in the save.
    pub observed: Arc<Observed>,
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
    /// `true` once nothing is done for the save any more.
    pub is_over: bool,
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
    /// Save whose report lists the failures, and which moves the bytes.
    reported_in: Arc<Observed>,
}

impl Shared {
    /// Makes the state of a save that was requested at `began`; `captured` if nothing is captured eagerly.
    pub fn new(captured: bool, began: Instant) -> Shared {
        let state = State {
            captured,
            staged: false,
            confirmed: None,
            cancelled: None,
            outcome: None,
            is_over: false,
            late_notes: Notes::new(),
            committed_notes: Notes::new(),
        };
        Shared { state: Mutex::new(state), changed: Condvar::new(), observed: Arc::new(Observed::since(began)) }
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
        Progress { reported_in: Arc::clone(&shared.observed), shared }
    }

    /// Makes the progress of work without a caller that waits for `captured` or `staged`.
    pub fn detached() -> Progress {
        Progress::new(Arc::new(Shared::new(true, Instant::now())))
    }

    /// Makes the progress of a part of this save whose caller waits for neither; its failures are this save's.
    pub fn beside(&self) -> Progress {
        Progress { reported_in: Arc::clone(&self.reported_in), ..Progress::detached() }
    }

    /// Sets that all that is captured eagerly is copied.
    pub fn captured(&self) {
        self.ended(Phase::Captured);
        self.shared.lock().captured = true;
        self.shared.changed.notify_all();
    }

    /// Sets that the state may change from now on.
    pub fn staged(&self) {
        self.ended(Phase::Staged);
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

    /// Notes the end of a phase. Only the first call counts.
    pub fn ended(&self, phase: Phase) {
        self.shared.observed.ended(phase);
    }

    /// Notes an event.
    pub fn note(&self, event: &Event<'_>) {
        self.shared.observed.noted(event);
    }

    /// Notes in the save itself that bytes are expected or copied, also for a part [beside](Progress::beside) it.
    pub(crate) fn moves(&self, event: &Event<'_>) {
        self.reported_in.noted(event);
    }

    /// Returns the observer of the save's store.
    pub fn observer(&self) -> Arc<dyn shardfast_store::Observer> {
        Arc::clone(&self.shared.observed) as Arc<dyn shardfast_store::Observer>
    }

    /// Notes the page-lock error, if any, of the staging memory that was used.
    pub fn staged_in(&self, staging: &Staging) {
        if let Some(failure) = staging.page_lock_failure() {
            self.note(&Event::PageLock { failure: &failure });
        }
    }

    /// Returns the notes that the caller has added so far.
    pub fn late_notes(&self) -> Notes {
        self.shared.lock().late_notes.clone()
    }

    /// Sets the notes that were committed.
    pub fn noted(&self, notes: Notes) {
        self.shared.lock().committed_notes = notes;
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
        let has_ended = |phase| self.shared.observed.has_ended(phase);
        let stage = match () {
            () if has_ended(Phase::Staged) => "staged, not yet durable",
            () if has_ended(Phase::Captured) => "captured, not yet staged",
            () => "planned, not yet captured",
        };
        Error { message: format!("{} (its part was {stage})", error.message), ..error }
    }
}

impl Failures for Progress {
    fn failed(&self, error: &Error, attempt: usize, pause: Option<Duration>) {
        self.reported_in.failed(error, attempt, pause);
    }

    fn before(&self) -> (u64, Option<String>) {
        self.reported_in.failures()
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
