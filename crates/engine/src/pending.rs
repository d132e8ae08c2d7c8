//! A save in flight: *requested*, then *staged* (the state may change now), then *committed* (it survives).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardfast_transfer::error::{Error, Kind, Result, panicked};
use shardfast_transfer::events::{Event, Observer, Phase};
use shardfast_transfer::progress::{Progress, Shared, State};
use shardfast_transfer::report::{Moved, Report};

use crate::background::{self, Background};

/// The handle of a save that runs in the background.
#[derive(Clone)]
pub struct Pending {
    shared: Arc<Shared>,
}

impl Pending {
    /// Runs `save` on a thread of its own, of `background` if there is one. `captured` is whether nothing of it is
    /// captured eagerly, `began` the time of the request. It returns the outcome, and what else is to be done when that
    /// is known.
    pub(crate) fn spawn<Rest: FnOnce()>(
        background: Option<&Background>,
        captured: bool,
        began: Instant,
        save: impl FnOnce(&Progress) -> (Result<()>, Rest) + Send + 'static,
    ) -> Pending {
        let shared = Arc::new(Shared::new(captured, began));
        let progress = Progress::new(Arc::clone(&shared));
        let body = move || {
            let (outcome, rest) = match catch_unwind(AssertUnwindSafe(|| save(&progress))) {
                Ok((outcome, rest)) => (outcome, Some(rest)),
                Err(panic) => (Err(panicked(&*panic)), None),
            };
            progress.shared.lock().outcome = Some(outcome);
            progress.shared.changed.notify_all();
            let _ = catch_unwind(AssertUnwindSafe(|| rest.map(|rest| rest())));
            progress.shared.lock().is_over = true;
            progress.shared.changed.notify_all();
        };
        let of = Arc::clone(&shared);
        let unable = move |error| {
            let failure = Error::new(Kind::Exhausted, format!("no thread for the save: {error}"));
            let mut state = of.lock();
            (state.outcome, state.is_over) = (Some(Err(failure)), true);
            of.changed.notify_all();
        };
        match background {
            Some(background) => background.run(body, unable),
            None => background::on_a_thread(body, unable),
        }
        Pending { shared }
    }

    /// Waits until all tensors that are captured [eagerly](crate::Capture::Eager) are copied.
    ///
    /// # Errors
    /// The failure of the save; `Unavailable` when `timeout` passed first.
    pub fn captured(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("captured", timeout, |state| if state.captured { Some(Ok(())) } else { state.outcome.clone() })
    }

    /// Confirms that [lazily](crate::Capture::Lazy) captured tensors were not modified before the save was staged.
    /// Only the first call counts; a failure fails the save on every rank.
    pub fn confirm_unmodified(&self, unmodified: Result<()>) {
        self.shared.lock().confirmed.get_or_insert(unmodified);
        self.shared.changed.notify_all();
    }

    /// Waits until the state may change: all of it is copied or written.
    ///
    /// # Errors
    /// The failure of the save; `Unavailable` when `timeout` passed first.
    pub fn staged(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("staged", timeout, |state| match &state.outcome {
            Some(ended) => Some(ended.clone()),
            None => state.staged.then_some(Ok(())),
        })
    }

    /// Waits until the checkpoint is committed.
    ///
    /// # Errors
    /// The failure of the save; `Unavailable` when `timeout` passed first.
    pub fn committed(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait("committed", timeout, |state| state.outcome.clone())
    }

    /// Waits until nothing is done for the save any more, for at most `timeout`. Its outcome is known before.
    pub fn over(&self, timeout: Duration) {
        self.shared.wait(Some(timeout), |state| state.is_over.then_some(()));
    }

    /// Returns whether the save has ended, with or without success.
    pub fn done(&self) -> bool {
        self.shared.lock().outcome.is_some()
    }

    /// Sets a note that the checkpoint records, in place of one of the same name in [`Destination::user`]. Rank 0's
    /// count; a note that comes after rank 0 has begun to write the manifest does not.
    ///
    /// [`Destination::user`]: crate::Destination::user
    pub fn note(&self, name: String, text: String) {
        self.shared.lock().late_notes.insert(name, text);
    }

    /// Returns Shardfast's own notes (`shardfast.…`) of the checkpoint, after the commit; the same on every rank. Empty
    /// before.
    pub fn committed_notes(&self) -> BTreeMap<String, String> {
        self.shared.lock().committed_notes.clone()
    }

    /// Returns whether this rank's tensors are written, or their writes have failed.
    pub fn has_written(&self) -> bool {
        self.shared.observed.is_over(Phase::Written)
    }

    /// Notes that the program has waited in the save's call.
    pub fn stalled(&self, took: Duration) {
        self.shared.observed.noted(&Event::Stalled { took });
    }

    /// Notes that the program has waited for the save before it could change the state.
    pub fn waited(&self, took: Duration) {
        self.shared.observed.noted(&Event::Waited { took });
    }

    /// Returns the bytes that the save has moved so far.
    pub fn moved(&self) -> Moved {
        self.shared.observed.moved()
    }

    /// Returns the results of the save so far.
    pub fn report(&self) -> Report {
        self.shared.observed.report()
    }

    fn wait(
        &self,
        what: &str,
        timeout: Option<Duration>,
        reached: impl Fn(&State) -> Option<Result<()>>,
    ) -> Result<()> {
        self.shared.wait(timeout, reached).unwrap_or_else(|| {
            Err(Error::new(Kind::Unavailable, format!("the save was not {what} within the timeout")))
        })
    }
}
