//! A save in flight: *requested*, then *staged* (the state may change now), then *committed* (it survives).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ablation;
use crate::background::{self, Background};
use crate::commit::FileShape;
use crate::error::{Error, Kind, Result};
use crate::staging::Staging;

/// The handle of a save that runs in the background.
#[derive(Clone)]
pub struct Pending {
    shared: Arc<Shared>,
}

/// What a save did so far.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Milliseconds from the request until each phase was over.
    pub phases_ms: BTreeMap<&'static str, f64>,
    /// Bytes of data files that this rank wrote, headers included.
    pub bytes_written: u64,
    /// Data files that this rank wrote.
    pub files_written: u64,
    /// Whether what several ranks hold was compared; empty before that is known.
    pub replicas: &'static str,
    /// Why staging memory that was to be page-locked for a device is not: copies from it are slower then.
    pub page_lock_failure: Option<String>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    requested: Instant,
}

struct State {
    captured: bool,
    staged: bool,
    vouched: Option<Result<()>>,
    cancelled: Option<Error>,
    outcome: Option<Result<()>>,
    report: Report,
}

/// How the running save tells what it has reached.
pub(crate) struct Progress {
    shared: Arc<Shared>,
}

impl Pending {
    /// Runs `save` on a thread of its own, of `background` if there is one. `captured` tells whether nothing of it is
    /// urgent.
    pub(crate) fn spawn(
        background: Option<&Background>,
        captured: bool,
        save: impl FnOnce(&Progress) -> Result<()> + Send + 'static,
    ) -> Pending {
        let shared = Arc::new(Shared::new(captured && !ablation::is_off("lazy-capture")));
        let progress = Progress { shared: Arc::clone(&shared) };
        let body = move || {
            let outcome =
                catch_unwind(AssertUnwindSafe(|| save(&progress))).unwrap_or_else(|panic| Err(panicked(&*panic)));
            let mut state = progress.shared.lock();
            state.outcome = Some(outcome);
            progress.shared.changed.notify_all();
        };
        let of = Arc::clone(&shared);
        let unable = move |error| {
            let failure = Error::new(Kind::Exhausted, format!("no thread for the save: {error}"));
            of.lock().outcome = Some(Err(failure));
            of.changed.notify_all();
        };
        match background {
            Some(background) => background.run(body, unable),
            None => background::on_a_thread(body, unable),
        }
        Pending { shared }
    }

    /// Waits until what may change at any time is copied: the bytes of [urgent](crate::Provider::is_urgent) providers.
    ///
    /// # Errors
    /// What made the save fail; `Unavailable` when `timeout` passed first.
    pub fn captured(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("captured", timeout, |state| if state.captured { Some(Ok(())) } else { state.outcome.clone() })
    }

    /// Says whether the memory that the save copied was left alone until the save was staged. Only the first word
    /// counts; a failure fails the save on every rank.
    pub fn vouch(&self, kept: Result<()>) {
        self.shared.lock().vouched.get_or_insert(kept);
        self.shared.changed.notify_all();
    }

    /// Waits until the state may change: all of it is copied or written.
    ///
    /// # Errors
    /// What made the save fail; `Unavailable` when `timeout` passed first.
    pub fn staged(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("staged", timeout, |state| match &state.outcome {
            Some(ended) => Some(ended.clone()),
            None => state.staged.then_some(Ok(())),
        })
    }

    /// Waits until the checkpoint survives whatever happens.
    ///
    /// # Errors
    /// What made the save fail; `Unavailable` when `timeout` passed first.
    pub fn committed(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("committed", timeout, |state| state.outcome.clone())
    }

    /// Whether the save has ended, well or badly.
    pub fn done(&self) -> bool {
        self.shared.lock().outcome.is_some()
    }

    /// What the save did so far.
    pub fn report(&self) -> Report {
        self.shared.lock().report.clone()
    }

    fn wait(
        &self,
        what: &str,
        timeout: Option<Duration>,
        reached: impl Fn(&State) -> Option<Result<()>>,
    ) -> Result<()> {
        self.shared.wait(timeout, reached).unwrap_or_else(|| {
            Err(Error::new(Kind::Unavailable, format!("the save is not yet {what} after the given time")))
        })
    }
}

impl Shared {
    fn new(captured: bool) -> Shared {
        let report = Report::default();
        let state = State { captured, staged: false, vouched: None, cancelled: None, outcome: None, report };
        Shared { state: Mutex::new(state), changed: Condvar::new(), requested: Instant::now() }
    }

    /// `None` when `timeout` passed first.
    fn wait<T>(&self, timeout: Option<Duration>, reached: impl Fn(&State) -> Option<T>) -> Option<T> {
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    /// For a task that nobody waits for in parts.
    pub(crate) fn unheard() -> Progress {
        Progress { shared: Arc::new(Shared::new(true)) }
    }

    /// What may change at any time is copied.
    pub(crate) fn captured(&self) {
        if ablation::is_off("lazy-capture") {
            return;
        }
        self.mark("captured");
        self.shared.lock().captured = true;
        self.shared.changed.notify_all();
    }

    /// The state may change from now on.
    pub(crate) fn staged(&self) {
        self.mark("staged");
        let mut state = self.shared.lock();
        (state.captured, state.staged) = (true, true);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// What the caller says about the memory that was copied.
    pub(crate) fn vouched(&self, timeout: Duration) -> Result<()> {
        self.shared.wait(Some(timeout), |state| state.vouched.clone()).unwrap_or_else(|| {
            let message = "nobody said in time that the state was left alone while it was copied";
            Err(Error::new(Kind::Unavailable, message))
        })
    }

    /// The phase is over. Only the first word counts.
    pub(crate) fn mark(&self, phase: &'static str) {
        let ms = self.shared.requested.elapsed().as_secs_f64() * 1e3;
        self.shared.lock().report.phases_ms.entry(phase).or_insert(ms);
    }

    /// Bytes were copied into this staging memory.
    pub(crate) fn staged_in(&self, staging: &Staging) {
        let failure = staging.page_lock_failure();
        self.shared.lock().report.page_lock_failure = failure;
    }

    /// Whether what several ranks hold is compared.
    pub(crate) fn compared(&self, outcome: &'static str) {
        self.shared.lock().report.replicas = outcome;
    }

    /// This rank wrote these data files.
    pub(crate) fn wrote(&self, files: &[FileShape]) {
        let mut state = self.shared.lock();
        state.report.files_written += files.len() as u64;
        state.report.bytes_written += files.iter().map(|file| file.bytes).sum::<u64>();
    }

    /// The save has failed elsewhere: nothing more needs to be written.
    pub(crate) fn cancel(&self, error: &Error) {
        self.shared.lock().cancelled.get_or_insert_with(|| error.clone());
    }

    /// Why the save has failed elsewhere.
    pub(crate) fn cancelled(&self) -> Option<Error> {
        self.shared.lock().cancelled.clone()
    }

    /// This rank's failure, told with how far its part of the save had come.
    pub(crate) fn told(&self, error: Error) -> Error {
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

/// A defect that ended in a panic, as a failure.
pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let message = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    Error::internal(format!("the save panicked: {message}"))
}
