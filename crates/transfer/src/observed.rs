//! Delivers the events of one save or load: to its report, and to whom listens.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Failures};
use crate::events::{Event, Observer, Phase};
use crate::report::{Recorder, Report};

/// A save or load, as what happens in it is observed.
pub struct Observed {
    /// Time of the request.
    pub began: Instant,
    recorder: Recorder,
    listener: OnceLock<Arc<dyn Observer>>,
}

impl Default for Observed {
    /// Begins at this moment.
    fn default() -> Observed {
        Observed { began: Instant::now(), recorder: Recorder::default(), listener: OnceLock::new() }
    }
}

impl Observed {
    /// Delivers all later events to this observer as well. Only the first call counts.
    pub fn listen(&self, listener: Arc<dyn Observer>) {
        let _ = self.listener.set(listener);
    }

    /// Notes the end of a phase. In the report only the first end of each counts.
    pub fn ended(&self, phase: Phase) {
        self.noted(&Event::Ended { phase, after: self.began.elapsed() });
    }

    /// Returns whether a phase is over.
    pub fn has_ended(&self, phase: Phase) -> bool {
        self.recorder.has_ended(phase)
    }

    /// Returns the number of failures so far, and the last one that is listed.
    pub fn failures(&self) -> (u64, Option<String>) {
        self.recorder.failures()
    }

    /// Returns the report so far.
    pub fn report(&self) -> Report {
        self.recorder.report()
    }
}

impl shardfast_store::Observer for Observed {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        self.recorder.stored(event);
        if let Some(listener) = self.listener.get() {
            listener.stored(event);
        }
    }
}

impl Observer for Observed {
    fn noted(&self, event: &Event<'_>) {
        self.recorder.noted(event);
        if let Some(listener) = self.listener.get() {
            listener.noted(event);
        }
    }
}

/// Record of a load, whose failures are not limited in number.
impl Failures for Observed {
    fn failed(&self, error: &Error, attempt: usize, pause: Option<Duration>) {
        self.noted(&Event::Failed { error, attempt, pause, after: self.began.elapsed() });
    }

    fn before(&self) -> (u64, Option<String>) {
        (0, None)
    }
}
