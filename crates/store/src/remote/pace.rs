//! Measures how long reads take, so that a read much slower than its peers is requested a second time.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Number of reads whose times are compared: at most, and at least.
const PEERS_MAX: usize = 64;
const PEERS_MIN: usize = 8;

/// Factor of the peers' median after which a read is late: its answer has not begun, or is not complete.
const TIMES: u32 = 4;

/// Earliest time at which a read is late; below, the median depends on this machine more than on the service.
pub(super) const SOONEST: Duration = Duration::from_millis(250);

/// Share of reads that are requested a second time: at most one in 20. More late ones are no exceptions, and a service
/// that is slow as a whole becomes no faster by more requests.
const ONE_IN: u64 = 20;

/// Times of the reads of a store.
#[derive(Default)]
pub(super) struct Pace(Mutex<Times>);

#[derive(Default)]
struct Times {
    /// Times until the answer began.
    beginnings: VecDeque<Duration>,
    /// Total times, by the length of the read, in steps of a factor of four.
    of: HashMap<u32, VecDeque<Duration>>,
    asked: u64,
    asked_again: u64,
}

fn note(times: &mut VecDeque<Duration>, time: Duration) {
    times.truncate(PEERS_MAX - 1);
    times.push_front(time);
}

fn median(times: &VecDeque<Duration>) -> Option<Duration> {
    let mut times: Vec<Duration> = times.iter().copied().collect();
    let middle = times.len() / 2;
    (times.len() >= PEERS_MIN).then(|| *times.select_nth_unstable(middle).1)
}

fn length(bytes: u64) -> u32 {
    bytes.max(1).ilog2() / 2
}

impl Pace {
    fn lock(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a read that begins.
    pub(super) fn begins(&self) {
        self.lock().asked += 1;
    }

    /// Records the time until the answer to a read began.
    pub(super) fn answered(&self, time: Duration) {
        note(&mut self.lock().beginnings, time);
    }

    /// Records the time that a read took.
    pub(super) fn took(&self, bytes: u64, time: Duration) {
        note(self.lock().of.entry(length(bytes)).or_default(), time);
    }

    /// Returns the time after which a read of that length is late, by whether its answer has begun; `None` as long as
    /// too few peers are known.
    pub(super) fn late_after(&self, bytes: u64, has_begun: bool) -> Option<Duration> {
        let times = self.lock();
        let peers = if has_begun { times.of.get(&length(bytes))? } else { &times.beginnings };
        Some((median(peers)? * TIMES).max(SOONEST))
    }

    /// Returns whether one more read may be requested a second time, and counts it.
    pub(super) fn asks_again(&self) -> bool {
        let mut times = self.lock();
        let may = (times.asked_again + 1) * ONE_IN <= times.asked;
        times.asked_again += u64::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_late_by_its_peers_of_like_length() {
        let (pace, ms) = (Pace::default(), Duration::from_millis);
        for i in 0..7 {
            pace.took(8 << 20, ms(100 + i));
        }
        assert_eq!(pace.late_after(8 << 20, true), None, "too few");
        pace.took(7 << 20, ms(60_000));
        let late = pace.late_after(8 << 20, true).unwrap();
        assert!((ms(412)..=ms(424)).contains(&late), "by the median: {late:?}");
        assert_eq!(pace.late_after(64 << 10, true), None, "other lengths");
        (0..64).for_each(|_| pace.took(8 << 20, ms(10)));
        assert_eq!(pace.late_after(8 << 20, true), Some(SOONEST), "the last ones count");
        assert_eq!(pace.late_after(8 << 20, false), None, "no answer is known to have begun");
        (0..8).for_each(|_| pace.answered(ms(100)));
        assert_eq!(pace.late_after(8 << 20, false), Some(ms(400)));
    }

    #[test]
    fn one_read_in_twenty_is_asked_for_again() {
        let pace = Pace::default();
        let again: Vec<u64> = (1..=100)
            .filter(|_| {
                pace.begins();
                pace.asks_again()
            })
            .collect();
        assert_eq!(again, [20, 40, 60, 80, 100]);
    }
}
