//! Whether ranks that do not see each other's memory should read for each other: measured, on a small part of the load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// What a rank measured during the trial.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Trial {
    /// Reading and proving what this rank read.
    pub(super) read_s: f64,
    pub(super) read_bytes: u64,
    /// Packing for others and proving what others read. Placing takes the same either way.
    pub(super) pass_on_s: f64,
    /// Rounds of messages, and the bytes of those that this rank sent and received.
    pub(super) swap_s: f64,
    pub(super) swapped_bytes: u64,
    /// Bytes of the blocks that others read for this rank.
    pub(super) passed_on_bytes: u64,
    /// Reading and proving some of them here, too.
    pub(super) again_s: f64,
    pub(super) again_bytes: u64,
}

/// Nanoseconds of all threads, by activity.
#[derive(Default)]
pub(super) struct Spent {
    pub(super) reading: AtomicU64,
    pub(super) passing_on: AtomicU64,
    pub(super) placing: AtomicU64,
}

impl Spent {
    /// Adds the time of some work, which began then, to its counter.
    pub(super) fn split(&self, began: Instant, trial: &mut Trial) {
        let all_s = began.elapsed().as_secs_f64();
        let counters = [&self.reading, &self.passing_on, &self.placing];
        let [reading, passing_on, placing] = counters.map(|ns| ns.swap(0, Ordering::Relaxed) as f64);
        let all = (reading + passing_on + placing).max(1.0);
        trial.read_s += all_s * reading / all;
        trial.pass_on_s += all_s * passing_on / all;
    }
}

/// Adds the time that something takes to a counter of nanoseconds.
pub(super) fn timed<T>(counter: &AtomicU64, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    counter.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    done
}

impl Trial {
    /// Whether sharing is faster than every rank's reading for itself, by what all ranks measured.
    ///
    /// Reading and swapping overlap, so the slower one counts. A swap waits for the slowest rank to have read, so the
    /// best rate that any rank had stands for the network. Without sharing, each rank reads again what others read.
    pub(crate) fn is_worth_it(trials: &[Trial]) -> bool {
        let most = |of: &dyn Fn(&Trial) -> f64| trials.iter().map(of).fold(0.0, f64::max);
        let rate = most(&|trial| trial.swapped_bytes as f64 / trial.swap_s.max(1e-9));
        let swap_s = most(&|trial| trial.swapped_bytes as f64) / rate.max(1.0);
        let work_s = most(&|trial| trial.read_s + trial.pass_on_s);
        let alone_s = most(&|trial| trial.read_s) + most(&Trial::again);
        // What is about as fast either way is simpler without messages.
        work_s.max(swap_s) < 0.95 * alone_s
    }

    /// Seconds that reading again what others read would take. At most the time of a first read: a disturbance of the
    /// one measurement must not count as slow storage.
    fn again(&self) -> f64 {
        let rate = |seconds: f64, bytes: u64| if bytes == 0 { f64::MAX } else { seconds / bytes as f64 };
        let second = rate(self.again_s, self.again_bytes);
        let a_byte_s = second.min(rate(self.read_s, self.read_bytes));
        if self.passed_on_bytes == 0 || self.again_bytes == 0 { 0.0 } else { a_byte_s * self.passed_on_bytes as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that read 1 GB in a second, and as much came from others.
    const EVEN: Trial = Trial {
        read_s: 1.0,
        read_bytes: 1 << 30,
        pass_on_s: 0.2,
        swap_s: 1.0,
        swapped_bytes: 2 << 30,
        passed_on_bytes: 1 << 30,
        again_s: 1.0,
        again_bytes: 1 << 30,
    };

    #[test]
    fn sharing_is_worth_it_where_reading_again_takes_longer_than_passing_on() {
        assert!(Trial::is_worth_it(&[EVEN; 2]));
        // The page cache has it.
        assert!(!Trial::is_worth_it(&[Trial { again_s: 0.1, ..EVEN }; 2]));
        // It was slow once, by chance.
        let cached = Trial { read_s: 0.2, again_s: 50.0, ..EVEN };
        assert!(!Trial::is_worth_it(&[cached; 2]));
        // The network is slower than the storage.
        assert!(!Trial::is_worth_it(&[Trial { swap_s: 2.5, ..EVEN }; 2]));
        // A rank that waited in its rounds for a slow reader says nothing about the network.
        let (fast, slow) = (Trial { read_s: 0.1, swap_s: 2.9, ..EVEN }, Trial { read_s: 3.0, swap_s: 0.1, ..EVEN });
        assert!(Trial::is_worth_it(&[fast, slow]));
        // Processors that are busy with packing and proving.
        assert!(!Trial::is_worth_it(&[Trial { pass_on_s: 1.1, ..EVEN }; 2]));
        // A rank that has nothing in common with others.
        assert!(Trial::is_worth_it(&[EVEN, EVEN, Trial::default()]));
        assert!(!Trial::is_worth_it(&[Trial::default(); 2]));
    }
}
