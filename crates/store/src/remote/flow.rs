//! Controls how many parts are sent and how many ranges are read at a time: more as long as that is faster, half as
//! many when the service throttles.
//!
//! A round is as many parts as may be in flight; a new round begins after a time without any. At first each round
//! doubles the number, until one is not faster than the one before: then the earlier number was enough, and is kept.
//! When the service throttles, the number is halved; after that each round adds one, as in the congestion control of
//! TCP.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::Instant;

use http::StatusCode;

use crate::Result;
use crate::write::{Failure, Making, Write, Writes};

/// Parts in flight at the beginning: 32 connections of 20 MB/s give 0.6 GB/s from the start.
const FIRST: usize = 32;

/// Minimum of parts in flight: a single one would wait for each answer.
const LEAST: usize = 2;

/// Maximum of parts in flight: each takes a thread and a connection.
pub(super) const MOST: usize = 64;

/// Ratio of rates from which a round counts as faster.
const FASTER: f64 = 1.1;

/// Control of the parts in flight of a store, in one direction.
pub(crate) struct Flow {
    state: Mutex<State>,
    freed: Condvar,
}

struct State {
    allowed: usize,
    /// Upper limit: [`MOST`]; fewer in simulations.
    most: usize,
    in_flight: usize,
    /// Largest number that was found to be of use; `None` while it still doubles.
    enough: Option<usize>,
    round: Round,
    /// Rate of the round before, in bytes per second, and the number allowed then.
    before: Option<(f64, usize)>,
    /// Time at which the number was halved.
    halved: Option<Instant>,
}

/// Parts and bytes moved since the round began.
struct Round {
    began: Instant,
    parts: usize,
    bytes: u64,
}

impl Round {
    fn begin(began: Instant) -> Round {
        Round { began, parts: 0, bytes: 0 }
    }
}

impl Default for Flow {
    fn default() -> Flow {
        Flow::up_to(MOST)
    }
}

impl Flow {
    /// Makes a control that never grows beyond `most`.
    pub(crate) fn up_to(most: usize) -> Flow {
        let (allowed, round) = (FIRST.min(most), Round::begin(Instant::now()));
        let state = State { allowed, most, in_flight: 0, enough: None, round, before: None, halved: None };
        Flow { state: Mutex::new(state), freed: Condvar::new() }
    }
}

impl State {
    /// Counts a part that begins.
    fn begins(&mut self, now: Instant) {
        if self.in_flight == 0 {
            self.round = Round::begin(now);
        }
        self.in_flight += 1;
    }

    /// Counts a part that was moved, and ends the round if it is the last one.
    fn moved(&mut self, bytes: u64, now: Instant) {
        self.round.parts += 1;
        self.round.bytes += bytes;
        if self.round.parts < self.allowed {
            return;
        }
        let rate = self.round.bytes as f64 / now.duration_since(self.round.began).as_secs_f64().max(1e-9);
        let allowed = self.allowed;
        match (self.enough, self.before) {
            (Some(enough), _) => self.allowed = (allowed + 1).min(enough),
            (None, Some((before, fewer))) if rate < before * FASTER => {
                (self.allowed, self.enough) = (fewer, Some(fewer));
            }
            (None, _) => self.allowed = (allowed * 2).min(self.most),
        }
        self.before = Some((rate, allowed));
        self.round = Round::begin(now);
    }

    /// Halves the number, because the service throttled a request that began at `began`. Requests that were in flight
    /// when the number was halved say nothing new.
    fn throttled(&mut self, began: Instant, now: Instant) {
        if self.halved.is_some_and(|halved| began < halved) {
            return;
        }
        self.enough = Some(self.enough.unwrap_or(self.allowed));
        self.allowed = (self.allowed / 2).max(LEAST);
        self.halved = Some(now);
        self.round = Round::begin(now);
    }
}

impl Flow {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a part that was moved, and wakes waiting threads.
    pub(crate) fn moved(&self, bytes: u64) {
        self.lock().moved(bytes, Instant::now());
        self.freed.notify_all();
    }

    /// Handles an answer to a request that began at `began`: halves the number if the service throttles.
    pub(crate) fn refused(&self, status: Option<StatusCode>, began: Instant) {
        if matches!(status, Some(StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)) {
            self.lock().throttled(began, Instant::now());
        }
    }

    /// Waits until one more part may be in flight.
    pub(super) fn enter(&self) -> Permit<'_> {
        let state = self.freed.wait_while(self.lock(), |state| state.in_flight >= state.allowed);
        state.unwrap_or_else(PoisonError::into_inner).begins(Instant::now());
        Permit(self)
    }

    /// Makes the writes, each on a thread, as many at a time as are allowed.
    ///
    /// # Errors
    /// The first error that `writes` does not accept; no write is taken after it.
    pub(crate) fn write_all<'a>(&self, writes: &dyn Writes<'a>, make: Making<'a, '_>) -> Result<()> {
        let (failure, threads) = (Failure::default(), AtomicUsize::new(0));
        // A thread that waits for a write holds no permit: the thread that returned a failed write must be able to make
        // it.
        let make = |write: Write<'a>| {
            let _permit = self.enter();
            make(write)
        };
        let work = Work { flow: self, writes, make: &make, failure: &failure, threads: &threads };
        thread::scope(|scope| work.more(scope));
        failure.into_result()
    }
}

/// Permission for one part in flight, returned on drop.
pub(super) struct Permit<'a>(&'a Flow);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
        self.0.freed.notify_all();
    }
}

/// State that the threads of one call share.
struct Work<'env, 'a> {
    flow: &'env Flow,
    writes: &'env dyn Writes<'a>,
    make: Making<'a, 'env>,
    failure: &'env Failure,
    threads: &'env AtomicUsize,
}

impl<'env, 'a> Work<'env, 'a> {
    /// Starts as many threads as writes are allowed.
    fn more<'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) {
        let allowed = self.flow.lock().allowed;
        let another = |threads| (threads < allowed).then_some(threads + 1);
        while self.threads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, another).is_ok() {
            scope.spawn(move || self.run(scope));
        }
    }

    fn run<'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) {
        while self.failure.make_next(self.writes, self.make) {
            self.more(scope);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Runs rounds of parts, at `rate` parts per second for the number in flight; returns the numbers.
    fn rounds(count: usize, state: &mut State, now: &mut Instant, rate: impl Fn(usize) -> f64) -> Vec<usize> {
        let round = |_| {
            let (allowed, began) = (state.allowed, *now);
            *now = began + Duration::from_secs_f64(allowed as f64 / rate(allowed));
            (0..allowed).for_each(|_| state.moved(8 << 20, *now));
            state.allowed
        };
        (0..count).map(round).collect()
    }

    fn state() -> (State, Instant) {
        let (state, now) = (Flow::default().state.into_inner().unwrap(), Instant::now());
        (State { allowed: 16, round: Round::begin(now), ..state }, now)
    }

    #[test]
    fn the_number_grows_while_it_makes_sending_faster() {
        let (mut fast, mut now) = state();
        assert_eq!(rounds(4, &mut fast, &mut now, |allowed| allowed as f64), [32, 64, 64, 64]);
        let (mut full, mut now) = state();
        assert_eq!(rounds(4, &mut full, &mut now, |_| 10.0), [32, 16, 16, 16]);
        let (mut between, mut now) = state();
        assert_eq!(rounds(4, &mut between, &mut now, |allowed| allowed.min(30) as f64), [32, 64, 32, 32]);
    }

    #[test]
    fn a_time_without_parts_is_no_slow_round() {
        let (mut state, mut now) = state();
        assert_eq!(rounds(1, &mut state, &mut now, |allowed| allowed as f64), [32]);
        now += Duration::from_secs(3600);
        state.begins(now);
        assert_eq!(rounds(1, &mut state, &mut now, |allowed| allowed as f64), [64]);
    }

    #[test]
    fn it_is_halved_when_the_service_throttles_and_grows_by_one() {
        let (mut state, mut now) = state();
        let (began, second) = (now, Duration::from_secs(1));
        now += second;
        (0..16).for_each(|_| state.throttled(began, now));
        assert_eq!(state.allowed, 8, "once for all that were in flight");
        assert_eq!(rounds(3, &mut state, &mut now, |allowed| allowed as f64), [9, 10, 11]);
        for allowed in [5, 2, 2] {
            now += second;
            state.throttled(now, now);
            assert_eq!(state.allowed, allowed);
        }
        assert_eq!(rounds(20, &mut state, &mut now, |allowed| allowed as f64).last(), Some(&16), "as many as before");
    }
}
