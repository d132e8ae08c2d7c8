//! Defines the closed kinds of errors, grouped by the caller's reaction; and retries.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::interrupt;
use crate::timeout::{self, Silence, Timeout};

/// Kind of an error, by the caller's reaction. Codes are only appended; Python has an exception class for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The bytes are not those that were saved: use another checkpoint.
    Corrupt,
    /// Nothing is stored under that name.
    NotFound,
    /// The name is already taken.
    Conflict,
    /// A disk, a quota or a budget is full.
    Exhausted,
    /// The store or another rank cannot be reached now.
    Unavailable,
    /// A newer version, or a feature that is not available here.
    Unsupported,
    /// The call, the state or a permission is wrong: fix it and call again.
    Invalid,
    /// The operation was cancelled on request.
    Cancelled,
    /// A defect of this program.
    Internal,
}

impl Kind {
    /// Every kind, in the order of their codes.
    pub const ALL: [Kind; 9] = [
        Kind::Corrupt,
        Kind::NotFound,
        Kind::Conflict,
        Kind::Exhausted,
        Kind::Unavailable,
        Kind::Unsupported,
        Kind::Invalid,
        Kind::Cancelled,
        Kind::Internal,
    ];

    /// Returns the name of the kind: that of the Python exception, too.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Corrupt => "Corrupt",
            Kind::NotFound => "NotFound",
            Kind::Conflict => "Conflict",
            Kind::Exhausted => "Exhausted",
            Kind::Unavailable => "Unavailable",
            Kind::Unsupported => "Unsupported",
            Kind::Invalid => "Invalid",
            Kind::Cancelled => "Cancelled",
            Kind::Internal => "Internal",
        }
    }

    fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A failure: its kind, and a message that names the object, what was expected and what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Kind of the failure, by the caller's reaction.
    pub kind: Kind,
    /// Message: what failed, and on which object.
    pub message: String,
    /// `true` if a retry would prove nothing.
    pub is_final: bool,
    /// Time that the storage asks to wait; `None` if the failure lasts only a moment.
    pub wait: Option<Duration>,
}

/// Result of everything that moves bytes, and of the crates above.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes a failure of that kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), is_final: false, wait: None }
    }

    /// Returns a failure of kind `Corrupt`.
    pub fn corrupt(message: impl Into<String>) -> Error {
        Error::new(Kind::Corrupt, message)
    }

    /// Returns a failure of kind `Invalid`.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(Kind::Invalid, message)
    }

    /// Returns a failure of kind `Internal`.
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(Kind::Internal, message)
    }

    /// Returns the same error, with the place in front of its message.
    pub fn within(mut self, place: impl std::fmt::Display) -> Error {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Encodes it as text for another process, kind included.
    pub fn to_wire(&self) -> String {
        format!("{}|{}", self.kind.name(), self.message)
    }

    /// Decodes the text of [`Error::to_wire`].
    pub fn from_wire(line: &str) -> Option<Error> {
        let (kind, message) = line.split_once('|')?;
        Some(Error::new(Kind::from_name(kind)?, message))
    }
}

/// Pauses before retries of failures that pass in a moment or not at all, such as a fault of a disk, in milliseconds: a
/// second in all.
const PAUSES_MS: [u64; 4] = [20, 80, 300, 600];

/// Pauses before retries of failures that may last, such as a service that is overloaded or unreachable, in
/// milliseconds: they grow to the last one, which is repeated.
const LONG_PAUSES_MS: [u64; 6] = [100, 400, 1_500, 5_000, 10_000, 20_000];

/// Number of retries of failures that may last: two minutes of pauses in all.
const LONG_TRIES_MAX: usize = 11;

/// Longest wait that a service may ask for; beyond it the service counts as unreachable.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// Time after which a pause notices that the operation was cancelled.
pub(crate) const GLANCE: Duration = Duration::from_millis(10);

/// Failures of the storage after which a save of this rank tries nothing again: a service that throttles fails a
/// request in twenty, and a rank makes ten thousand of them to save a terabyte.
const FAILURES_MAX: u64 = 1000;

/// Record of the failures of the storage during an operation.
pub trait Failures: Sync {
    /// Records a failure of an operation's try number `tried`, and the pause before the next one.
    fn failed(&self, error: &Error, tried: usize, pause: Option<Duration>);

    /// Returns the number of failures, and one of the last.
    fn before(&self) -> (u64, Option<String>);
}

/// Time for which a failed call is retried, and the record of failures.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    within: Duration,
    save: Option<&'a dyn Failures>,
    /// Silence of a call whose requests share the time.
    silence: Option<&'a Silence>,
}

impl<'a> Patience<'a> {
    /// Returns the patience of a save.
    pub fn of(save: &'a dyn Failures, within: Duration) -> Patience<'a> {
        Patience { within, save: Some(save), silence: None }
    }

    /// Returns the same patience of an operation that records its failures.
    pub fn noted_by(self, operation: &'a dyn Failures) -> Patience<'a> {
        Patience { save: Some(operation), ..self }
    }

    /// Limits the time to `most`.
    pub fn at_most(self, most: Duration) -> Patience<'a> {
        Patience { within: self.within.min(most), ..self }
    }
}

impl From<Duration> for Patience<'_> {
    fn from(within: Duration) -> Self {
        Patience { within, save: None, silence: None }
    }
}

impl<'a> From<&'a Timeout> for Patience<'a> {
    fn from(timeout: &'a Timeout) -> Self {
        Patience { within: timeout.within(), save: None, silence: timeout.silence() }
    }
}

/// The tries of one operation.
pub(crate) struct Tries {
    began: Instant,
    /// Begin of the newest try.
    newest: Instant,
    failed: usize,
}

impl Tries {
    /// Begins before the first try.
    pub(crate) fn begin() -> Tries {
        let began = Instant::now();
        Tries { began, newest: began, failed: 0 }
    }

    /// Returns when the next try after this error begins. The save records the error.
    ///
    /// # Errors
    /// The error itself if it will not pass, or if no try is left or fits into the patience, since the first try or
    /// since the call's newest answer; then its message says how often it was tried, and what else failed in the save.
    pub(crate) fn again(&mut self, error: Error, patience: Patience<'_>) -> Result<Instant> {
        self.failed += 1;
        let (now, tried) = (Instant::now(), self.began.elapsed());
        let (before, last) = patience.save.map(|save| save.before()).unwrap_or_default();
        let may_pass = error.kind == Kind::Unavailable && !error.is_final;
        let pause = match error.wait {
            _ if !may_pass || before + 1 >= FAILURES_MAX => None,
            None => PAUSES_MS.get(self.failed - 1).map(|&ms| Duration::from_millis(ms)),
            Some(wait) if self.failed > LONG_TRIES_MAX || wait > WAIT_MAX => None,
            Some(wait) => Some(wait.max(jittered(LONG_PAUSES_MS[(self.failed - 1).min(LONG_PAUSES_MS.len() - 1)]))),
        };
        // Faults of a disk pass in a second or not at all: they are no silence.
        let silent = patience.silence.filter(|_| error.kind == Kind::Unavailable && error.wait.is_some());
        let waited = silent.map_or(tried, |silence| silence.unanswered(self.newest));
        let fitting = pause.filter(|&pause| waited.saturating_add(pause) <= patience.within);
        if let Some(save) = patience.save {
            save.failed(&error, self.failed, fitting);
        }
        if let Some(pause) = fitting {
            self.newest = now + pause;
            return Ok(self.newest);
        }
        let mut message = error.message;
        if let Some(silence) = silent.filter(|_| pause.is_some()) {
            silence.expire();
            if error.wait.is_none_or(|wait| wait <= patience.within) {
                message += &format!("; no request succeeded {}", timeout::said(patience.within));
            }
        }
        if let Some(wait) = error.wait.filter(|&wait| may_pass && wait > patience.within.min(WAIT_MAX)) {
            message += &format!("; the service asks to wait {} s", wait.as_secs());
        }
        if may_pass && self.failed > 1 {
            message += &format!("; tried {} times in {tried:.1?}", self.failed);
        }
        if may_pass && before + 1 >= FAILURES_MAX {
            message += &format!("; nothing is tried again after {FAILURES_MAX} failures of the storage in one save");
        }
        if let Some(last) = last.filter(|_| may_pass && before >= self.failed as u64) {
            message += &format!("; the storage failed {before} times before in this save, at last: {last}");
        }
        Err(Error { message, ..error })
    }
}

/// Returns a random pause between `ms / 2` and `ms` milliseconds, so that ranks that failed together do not retry
/// together.
fn jittered(ms: u64) -> Duration {
    Duration::from_millis(ms / 2) + random_below(ms / 2 + 1)
}

/// Returns a random time of less than `ms` milliseconds.
pub fn random_below(ms: u64) -> Duration {
    let random = RandomState::new().build_hasher().finish();
    Duration::from_millis(random % ms.max(1))
}

/// Retries `act` a few times, with growing pauses, while it fails for a reason that may pass and `patience` lasts.
///
/// # Errors
/// The last failure, and how many there were; `Unavailable` at once if the time of the call is over.
pub fn retry<'a, T>(patience: impl Into<Patience<'a>>, act: impl FnMut() -> Result<T>) -> Result<T> {
    retry_until(patience, || None, act)
}

/// Retries like [`retry`], until cancelled.
///
/// # Errors
/// As [`retry`]; or the reason of the cancellation.
pub(crate) fn retry_until<'a, T>(
    patience: impl Into<Patience<'a>>,
    given_up: impl Fn() -> Option<Error>,
    mut act: impl FnMut() -> Result<T>,
) -> Result<T> {
    let (patience, mut tries) = (patience.into(), Tries::begin());
    let given_up = || expect_uninterrupted().err().or_else(&given_up);
    loop {
        expect_uninterrupted()?;
        if patience.silence.is_some_and(Silence::is_over) {
            let message = format!("no request to the storage succeeded {}", timeout::said(patience.within));
            return Err(Error { is_final: true, ..Error::new(Kind::Unavailable, message) });
        }
        let done = act();
        if let Some(silence) = patience.silence.filter(|_| !is_unavailable(&done)) {
            silence.answered();
        }
        let due = match done {
            Ok(done) => return Ok(done),
            Err(error) => tries.again(error, patience)?,
        };
        while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            given_up().map_or(Ok(()), Err)?;
            std::thread::sleep(left.min(GLANCE));
        }
    }
}

/// Makes sure that the call of this thread is to go on.
///
/// # Errors
/// `Cancelled` if its program was interrupted.
pub fn expect_uninterrupted() -> Result<()> {
    match interrupt::is_asked() {
        false => Ok(()),
        true => Err(Error::new(Kind::Cancelled, "the program was interrupted")),
    }
}

fn is_unavailable<T>(done: &Result<T>) -> bool {
    matches!(done, Err(Error { kind: Kind::Unavailable, .. }))
}

/// The first failure of a group of threads.
#[derive(Default)]
pub struct FirstFailure {
    set: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl FirstFailure {
    /// Returns whether a thread has failed.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Keeps `error` unless there is one already.
    pub fn set(&self, error: Error) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.set.store(true, Ordering::Release);
    }

    /// Returns the first failure, if there was one.
    pub fn into_result(self) -> Result<()> {
        match self.first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Turns a panic into an `Internal` error.
pub fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let message = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    Error::internal(format!("the save panicked: {message}"))
}

impl From<shardfast_format::Error> for Error {
    fn from(error: shardfast_format::Error) -> Error {
        let kind = match &error {
            shardfast_format::Error::Corrupt(_) => Kind::Corrupt,
            shardfast_format::Error::Unsupported(_) => Kind::Unsupported,
            shardfast_format::Error::Invalid(_) => Kind::Invalid,
        };
        Error::new(kind, error.to_string())
    }
}

impl From<shardfast_plan::Error> for Error {
    fn from(error: shardfast_plan::Error) -> Error {
        let kind = match &error {
            shardfast_plan::Error::Invalid(_) => Kind::Invalid,
            shardfast_plan::Error::Corrupt(_) => Kind::Corrupt,
        };
        Error::new(kind, error.to_string())
    }
}

impl From<shardfast_store::Error> for Error {
    fn from(error: shardfast_store::Error) -> Error {
        use shardfast_store::Kind as Store;
        let kind = match error.kind {
            Store::NotFound => Kind::NotFound,
            Store::Corrupt => Kind::Corrupt,
            Store::Conflict => Kind::Conflict,
            Store::Exhausted => Kind::Exhausted,
            Store::Unavailable => Kind::Unavailable,
            Store::Unsupported => Kind::Unsupported,
            Store::Invalid => Kind::Invalid,
            Store::Internal => Kind::Internal,
        };
        Error { is_final: error.is_final, wait: error.wait, ..Error::new(kind, error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;
    use crate::interrupt::Interrupt;
    use crate::progress::Progress;

    fn pauses(wait: Option<Duration>, within: Duration) -> (Vec<Duration>, Error) {
        let (mut tries, mut pauses) = (Tries::begin(), Vec::new());
        loop {
            let now = Instant::now();
            match tries.again(Error { wait, ..Error::new(Kind::Unavailable, "away") }, within.into()) {
                Ok(due) => pauses.push(due - now),
                Err(error) => return (pauses, error),
            }
        }
    }

    #[test]
    fn pauses_between_tries_end_when_the_program_asks() {
        let interrupt = Arc::new(Interrupt::default());
        let (tried, tries) = mpsc::channel();
        let of_call = Some(Arc::clone(&interrupt));
        let call = || {
            retry(Duration::from_secs(600), || {
                tried.send(()).unwrap();
                let wait = Some(Duration::from_secs(300));
                Err::<(), _>(Error { wait, ..Error::new(Kind::Unavailable, "away") })
            })
        };
        thread::scope(|scope| {
            let call = scope.spawn(|| interrupt::within(of_call, call));
            tries.recv().unwrap();
            interrupt.ask();
            assert_eq!(call.join().unwrap().unwrap_err().kind, Kind::Cancelled);
        });
        assert_eq!(tries.try_iter().count(), 0);
    }

    #[test]
    fn what_may_last_is_waited_for_and_what_does_not_is_not() {
        let (moment, _) = pauses(None, Duration::MAX);
        assert_eq!(moment.len(), 4);
        assert!(moment.iter().sum::<Duration>() <= Duration::from_millis(1100), "{moment:?}");
        let (long, error) = pauses(Some(Duration::ZERO), Duration::MAX);
        let seconds = long.iter().sum::<Duration>().as_secs();
        assert!((50..=140).contains(&seconds) && long.iter().all(|pause| pause.as_millis() <= 20_100), "{long:?}");
        assert!(error.message.contains("tried 12 times"), "{error}");
        let (asked, _) = pauses(Some(Duration::from_secs(7)), Duration::MAX);
        assert!(asked.iter().all(|pause| pause.as_millis() >= 6_900), "{asked:?}");
        assert_ne!(long, pauses(Some(Duration::ZERO), Duration::MAX).0, "with jitter");
    }

    #[test]
    fn a_save_takes_note_of_each_failure_and_ends_after_a_thousand() {
        let save = Progress::detached();
        let patience = Patience::of(&save, Duration::MAX);
        let away = |what: &str| Error { wait: Some(Duration::ZERO), ..Error::new(Kind::Unavailable, what) };
        Tries::begin().again(away("write a: part 3: away"), patience).unwrap();
        let report = save.shared.observed.report();
        assert!(report.failures[0].contains(" ms: write a: part 3: away; try 1, again in "), "{report:?}");
        let refused = Tries::begin().again(Error::new(Kind::Invalid, "write b: denied"), patience).unwrap_err();
        assert_eq!(refused.message, "write b: denied");
        let ended = (2..FAILURES_MAX).find_map(|_| Tries::begin().again(away("write c: away"), patience).err());
        let (ended, count) = (ended.unwrap().message, save.before().0);
        assert!(ended.starts_with("write c: away; nothing is tried again after 1000 failures"), "{ended}");
        assert!(ended.contains("failed 999 times before in this save, at last: "), "{ended}");
        assert_eq!(count, FAILURES_MAX);
    }

    #[test]
    fn no_pause_reaches_beyond_the_deadline() {
        let (pauses, error) = pauses(Some(Duration::from_secs(7)), Duration::from_secs(5));
        assert_eq!((pauses.len(), error.message.as_str()), (0, "away; the service asks to wait 7 s"));
    }

    #[test]
    fn a_wait_of_any_length_is_no_panic_and_one_that_is_too_long_an_error_at_once() {
        for seconds in [601, 1 << 40, u64::MAX] {
            let (pauses, error) = pauses(Some(Duration::from_secs(seconds)), Duration::MAX);
            assert_eq!((pauses.len(), error.message), (0, format!("away; the service asks to wait {seconds} s")));
        }
    }
}
