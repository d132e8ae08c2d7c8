//! Limits how long one call waits for storage that does not answer, over all of its requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Waiting time of a call that is given none.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Longest timeout in seconds: 31 years. Sums of times stay far below what the system's clock holds.
const SECONDS_MAX: f64 = 1e9;

/// Time that a call waits for storage that does not answer.
#[derive(Debug, Clone)]
pub struct Timeout {
    within: Duration,
    /// Shared by all requests of the call; `None` if each request has the whole time.
    silence: Option<Arc<Silence>>,
}

impl Timeout {
    /// Makes the timeout of one call: it fails once no request has succeeded for that long. Requests that succeed
    /// restart the time, so the call itself may last longer.
    pub fn of_call(within: Duration) -> Timeout {
        Timeout { within, silence: Some(Arc::default()) }
    }

    /// Returns the time of a timeout in seconds.
    ///
    /// # Errors
    /// A message for a number that is not above zero, or more than 1e9.
    pub fn seconds(seconds: f64) -> Result<Duration, String> {
        match seconds > 0.0 && seconds <= SECONDS_MAX {
            true => Ok(Duration::from_secs_f64(seconds)),
            false => {
                Err(format!("expected a number of seconds, more than 0 and at most {SECONDS_MAX}, found {seconds:?}"))
            }
        }
    }

    /// Returns a timeout of the same length for all requests of one call together.
    pub fn shared(&self) -> Timeout {
        if self.silence.is_some() { self.clone() } else { Timeout::of_call(self.within) }
    }

    /// Returns the longest time without an answer.
    pub fn within(&self) -> Duration {
        self.within
    }

    pub(crate) fn silence(&self) -> Option<&Silence> {
        self.silence.as_deref()
    }

    /// Returns whether the time is over: then the call fails, and makes no more requests.
    pub fn is_over(&self) -> bool {
        self.silence().is_some_and(Silence::is_over)
    }
}

impl Default for Timeout {
    /// Allows [`TIMEOUT`] for each request.
    fn default() -> Timeout {
        TIMEOUT.into()
    }
}

impl From<Duration> for Timeout {
    /// Allows that time for each request.
    fn from(within: Duration) -> Timeout {
        Timeout { within, silence: None }
    }
}

/// Time in which no request of a call has succeeded.
#[derive(Debug, Default)]
pub(crate) struct Silence(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Time of the newest answer.
    answered: Option<Instant>,
    /// Begin of the first request since then that got no answer.
    since: Option<Instant>,
    is_over: bool,
}

impl Silence {
    /// Notes an answer, be it a refusal.
    pub(crate) fn answered(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.answered, state.since) = (Some(Instant::now()), None);
    }

    /// Notes a request without an answer, which began at `began`. Returns how long the silence lasts.
    pub(crate) fn unanswered(&self, began: Instant) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let began = state.answered.map_or(began, |answered| answered.max(began));
        state.since.get_or_insert(began).elapsed()
    }

    /// Ends the call: no pause fits into its time any more.
    pub(crate) fn expire(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
    }

    /// Returns whether the call has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_over
    }
}

/// Returns the time as text for a message.
pub(crate) fn said(within: Duration) -> String {
    format!("within the timeout of {} s", within.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind, Result, retry};

    const WITHIN: Duration = Duration::from_millis(300);

    fn away() -> Error {
        Error { wait: Some(Duration::ZERO), ..Error::new(Kind::Unavailable, "list s3://b: away") }
    }

    /// Returns the failure of an operation that never succeeds, and its tries.
    fn failure(timeout: &Timeout, error: &Error) -> (String, usize) {
        let mut tries = 0;
        let act = || {
            tries += 1;
            Err::<(), _>(error.clone())
        };
        (retry(timeout, act).unwrap_err().message, tries)
    }

    #[test]
    fn operations_of_one_call_share_its_time() {
        let timeout = Timeout::of_call(WITHIN);
        let (first, tries) = failure(&timeout, &away());
        assert!(tries > 1 && first.contains("away; no request succeeded within the timeout of 0.3 s"), "{first}");
        assert!(timeout.is_over());
        let (second, tries) = failure(&timeout, &away());
        assert_eq!((second.as_str(), tries), ("no request to the storage succeeded within the timeout of 0.3 s", 0));
        let each = Timeout::from(WITHIN);
        assert!((0..2).all(|_| failure(&each, &away()).1 > 1) && !each.is_over());
    }

    #[test]
    fn an_answer_begins_the_time_anew() {
        let timeout = Timeout::of_call(WITHIN);
        let began = Instant::now();
        while began.elapsed() < 3 * WITHIN {
            let mut is_first = true;
            let act = || -> Result<()> { if std::mem::take(&mut is_first) { Err(away()) } else { Ok(()) } };
            retry(&timeout, act).unwrap();
            let refused = Error::new(Kind::NotFound, "nothing is there");
            assert_eq!(failure(&timeout, &refused), ("nothing is there".to_owned(), 1));
        }
        // The request began before the newest answer.
        timeout.silence().unwrap().answered();
        assert!(timeout.silence().unwrap().unanswered(began) < WITHIN);
    }

    #[test]
    fn faults_of_a_disk_end_no_call() {
        let timeout = Timeout::of_call(Duration::ZERO);
        let (_, tries) = failure(&timeout, &Error::new(Kind::Unavailable, "read: input/output error"));
        assert!(tries == 1 && !timeout.is_over());
    }

    #[test]
    fn what_is_no_time_is_refused() {
        assert_eq!(Timeout::seconds(0.5), Ok(Duration::from_millis(500)));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            let error = Timeout::seconds(bad).unwrap_err();
            assert!(error.ends_with(&format!("at most 1000000000, found {bad:?}")), "{error}");
        }
    }
}
