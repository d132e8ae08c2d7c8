//! Delivers the events of one save or load: to its report, and to whom listens.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use shardfast_store::{Action, Kind};

use crate::error::{Error, Failures};
use crate::events::{Event, Observer, Phase};
use crate::report::{Moved, Recorder, Report};

/// A save or load, as what happens in it is observed.
pub struct Observed {
    /// Time of the request.
    pub began: Instant,
    recorder: Recorder,
    /// Listener, as long as somebody else holds it: whoever keeps the report of an operation keeps no events.
    listener: OnceLock<Weak<dyn Observer>>,
}

impl Default for Observed {
    /// Begins at this moment.
    fn default() -> Observed {
        Observed::since(Instant::now())
    }
}

impl Observed {
    /// Makes the observer of an operation that was requested at that time.
    pub fn since(began: Instant) -> Observed {
        Observed { began, recorder: Recorder::default(), listener: OnceLock::new() }
    }

    /// Delivers all later events to this observer as well, as long as it is there. Only the first call counts.
    pub fn listen(&self, listener: &Arc<dyn Observer>) {
        let _ = self.listener.set(Arc::downgrade(listener));
    }

    fn listener(&self) -> Option<Arc<dyn Observer>> {
        self.listener.get().and_then(Weak::upgrade)
    }

    /// Notes the end of a phase. In the report only the first end of each counts.
    pub fn ended(&self, phase: Phase) {
        self.noted(&Event::Ended { phase, after: self.began.elapsed() });
    }

    /// Returns whether a phase is over.
    pub fn has_ended(&self, phase: Phase) -> bool {
        self.recorder.has_ended(phase)
    }

    /// Notes that a phase has failed.
    pub fn gave_up(&self, phase: Phase) {
        self.noted(&Event::GaveUp { phase, after: self.began.elapsed() });
    }

    /// Returns whether a phase is over, or has failed.
    pub fn is_over(&self, phase: Phase) -> bool {
        self.recorder.is_over(phase)
    }

    /// Returns the number of failures so far, and the last one that is listed.
    pub fn failures(&self) -> (u64, Option<String>) {
        self.recorder.failures()
    }

    /// Returns the bytes that were moved so far.
    pub fn moved(&self) -> Moved {
        self.recorder.moved()
    }

    /// Returns the report so far.
    pub fn report(&self) -> Report {
        self.recorder.report()
    }
}

impl shardfast_store::Observer for Observed {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        self.recorder.stored(event);
        // A store that has another way goes on; reports say why it took that.
        if let Some(error) =
            event.failure.filter(|error| error.kind == Kind::Unsupported && event.action == Action::Finish)
        {
            let ms = event.began.saturating_duration_since(self.began).as_millis();
            self.recorder.evaded(format!("{ms} ms: {error}"));
        }
        if let Some(listener) = self.listener() {
            listener.stored(event);
        }
    }
}

impl Observer for Observed {
    fn noted(&self, event: &Event<'_>) {
        self.recorder.noted(event);
        if let Some(listener) = self.listener() {
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

#[cfg(test)]
mod tests {
    use shardfast_store::{Observer, Requests};

    use super::*;

    #[test]
    fn a_way_that_was_refused_is_listed() {
        let observed = Observed::default();
        let event = |action, kind: Option<Kind>| {
            let error = kind.map(|kind| shardfast_store::Error::new(kind, "finish", "hdfs://x/a", "concat is refused"));
            let (object, began, took) = ("a", Instant::now(), Duration::ZERO);
            let (requests, failure) = (Requests::default(), error.as_ref());
            Observer::stored(
                &observed,
                &shardfast_store::Event { action, object, offset: 0, bytes: 0, began, took, requests, failure },
            );
        };
        event(Action::Finish, None);
        event(Action::Finish, Some(Kind::Unavailable));
        event(Action::Write, Some(Kind::Unsupported));
        assert_eq!(observed.failures(), (0, None));
        event(Action::Finish, Some(Kind::Unsupported));
        let listed = observed.report().failures;
        assert!(listed.len() == 1 && listed[0].ends_with("finish hdfs://x/a: concat is refused"), "{listed:?}");
        event(Action::Finish, Some(Kind::Unsupported));
        assert_eq!((observed.report().failures.len(), observed.failures().0), (1, 0), "it is no failure");
    }
}
