//! Finds times in which this process does not run: it is stopped, swapped out, or gets no processor.

use std::mem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two beats of a pulse.
pub(crate) const BEAT: Duration = Duration::from_millis(20);

/// Shortest time between two beats that counts as a gap: a thread of a busy machine waits for tens of milliseconds.
const GAP_MIN: Duration = Duration::from_millis(80);

/// Receiver of gaps: the time of the last beat before each, and the time until the next one.
type Gaps = Box<dyn Fn(Instant, Duration) + Send + Sync>;

/// Pulse of this process, which a coordinator's thread [beats](crate::Coord::beats) every 20 ms.
pub struct Pulse {
    last: Mutex<Instant>,
    gaps: Gaps,
}

impl Pulse {
    /// Makes a pulse that begins now, and tells `gaps` of each time in which the process did not run.
    pub fn new(gaps: impl Fn(Instant, Duration) + Send + Sync + 'static) -> Pulse {
        Pulse { last: Mutex::new(Instant::now()), gaps: Box::new(gaps) }
    }

    /// Beats: tells of a gap if the last beat was long ago.
    pub fn beat(&self) {
        let now = Instant::now();
        let last = mem::replace(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner), now);
        let took = now.saturating_duration_since(last);
        if took >= GAP_MIN {
            (self.gaps)(last, took);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_late_beat_tells_how_late_it_was() {
        let gaps = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&gaps);
        let pulse = Pulse::new(move |last, took| told.lock().unwrap().push((last, took)));
        pulse.beat();
        assert_eq!(*gaps.lock().unwrap(), []);
        let before = Instant::now();
        std::thread::sleep(GAP_MIN);
        pulse.beat();
        let found = gaps.lock().unwrap().clone();
        assert!(matches!(found[..], [(last, took)] if last <= before && took >= GAP_MIN), "{found:?}");
    }
}
