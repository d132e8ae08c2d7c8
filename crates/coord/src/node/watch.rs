//! Watches whether the other end of a link still answers; pings it only while a round waits for it.

use std::time::Duration;

/// Number of pings without an answer after which the other end counts as silent.
const ASKS: u32 = 3;

/// Shortest interval of pings. The other end's transport answers, not its program, so this is the time that a machine
/// needs to run a thread that has work: some tens of milliseconds at a load of 8 per core.
const INTERVAL_MIN: Duration = Duration::from_millis(150);

/// Longest interval of pings: a process that is stopped for less than [`ASKS`] of them counts as slow.
const INTERVAL_MAX: Duration = Duration::from_millis(500);

/// Longest time from a rank's falling silent until it counts as silent, beside the round trip of a ping: the ping
/// before may just have been answered.
pub const SILENCE: Duration = INTERVAL_MAX.saturating_mul(ASKS + 1);

/// Time and interval at which to watch the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Start of the pings.
    from: Duration,
    interval: Duration,
}

impl Wanted {
    /// Watches around the end of a round that was opened at `opened` and expires at `expires`.
    pub(super) fn by(opened: Duration, expires: Duration) -> Wanted {
        let interval = (expires.saturating_sub(opened) / 8).clamp(INTERVAL_MIN, INTERVAL_MAX);
        Wanted { from: expires.saturating_sub(interval * (ASKS + 1)).max(opened), interval }
    }

    /// Watches for a ping that is passed on: the interval is the sender's, within this node's bounds.
    pub(super) fn passed_on(interval: Duration, now: Duration) -> Wanted {
        Wanted { from: now, interval: interval.clamp(INTERVAL_MIN, INTERVAL_MAX) }
    }

    /// Combines the watching of two rounds.
    pub(super) fn and(self, other: Wanted) -> Wanted {
        Wanted { from: self.from.min(other.from), interval: self.interval.min(other.interval) }
    }
}

/// State of the other end, as one end sees it.
///
/// Counts unanswered pings, not time: a process that was stopped itself, and finds the answers unread when it
/// continues, has sent no more pings meanwhile. A silent end is not pinged again; it answers the pings when it
/// continues.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Number of pings since the last message of the other end.
    unanswered: u32,
    is_silent: bool,
    /// Time of the next ping, or of the decision that the other end is silent.
    next: Duration,
}

/// Result of a look at the other end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Ping it now, and again after this time.
    Ask(Duration),
    /// Found silent just now.
    Silent,
    Nothing,
}

impl Watch {
    /// Resets the count, after any message of the other end.
    pub(super) fn answered(&mut self) {
        (self.unanswered, self.is_silent) = (0, false);
    }

    pub(super) fn is_silent(&self) -> bool {
        self.is_silent
    }

    pub(super) fn look(&mut self, wanted: Wanted, now: Duration) -> Look {
        if self.due(wanted).is_none_or(|due| due > now) {
            return Look::Nothing;
        }
        if self.unanswered == ASKS {
            self.is_silent = true;
            return Look::Silent;
        }
        self.unanswered += 1;
        self.next = now.saturating_add(wanted.interval);
        Look::Ask(wanted.interval)
    }

    /// Returns when [`look`](Watch::look) has work to do.
    pub(super) fn due(&self, wanted: Wanted) -> Option<Duration> {
        (!self.is_silent).then(|| self.next.max(wanted.from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks whenever it is due, until `end`; returns the times of pings, and the time at which it found silence.
    fn watched(watch: &mut Watch, wanted: Wanted, end: Duration) -> (Vec<Duration>, Option<Duration>) {
        let mut asked = Vec::new();
        while let Some(due) = watch.due(wanted).filter(|due| *due <= end) {
            match watch.look(wanted, due) {
                Look::Ask(_) => asked.push(due),
                Look::Silent => return (asked, Some(due)),
                Look::Nothing => panic!("was due at {due:?}"),
            }
        }
        (asked, None)
    }

    #[test]
    fn silence_is_known_when_a_round_expires_and_nobody_asks_long_before() {
        for millis in [1200, 2000, 3000, 10_000, 1_800_000] {
            let (opened, expires) = (SECOND * 7, SECOND * 7 + Duration::from_millis(millis));
            let wanted = Wanted::by(opened, expires);
            let (asked, silent) = watched(&mut Watch::default(), wanted, expires);
            assert!(asked.len() == 3 && asked[0] >= expires - SECOND * 2 && asked[0] > opened, "{asked:?}");
            assert!(silent.unwrap() < expires && silent.unwrap() + SILENCE >= expires, "{silent:?}");
        }
        // A shorter deadline than that is too short to be sure.
        let (_, silent) = watched(&mut Watch::default(), Wanted::by(SECOND, SECOND), SECOND * 3);
        assert_eq!(silent, Some(SECOND + INTERVAL_MIN * 3));
    }

    #[test]
    fn whoever_answers_is_not_silent_and_is_asked_on_while_somebody_waits() {
        let (mut watch, wanted) = (Watch::default(), Wanted::by(Duration::ZERO, SECOND * 8));
        let mut asked = 0;
        while let Some(due) = watch.due(wanted).filter(|due| *due <= SECOND * 20) {
            assert_eq!(watch.look(wanted, due), Look::Ask(INTERVAL_MAX));
            asked += 1;
            if asked % 3 == 0 {
                watch.answered();
            }
        }
        // From two seconds before the end on, twice a second.
        assert_eq!(asked, 2 * (20 - 6) + 1);
    }

    #[test]
    fn whoever_stood_still_itself_takes_nobody_for_silent() {
        let (mut watch, wanted) = (Watch::default(), Wanted::by(Duration::ZERO, SECOND * 8));
        assert_eq!(watch.look(wanted, SECOND * 7), Look::Ask(INTERVAL_MAX));
        // Between this ping and the next it was stopped for a minute; the answer is there unread.
        assert_eq!(watch.look(wanted, SECOND * 67), Look::Ask(INTERVAL_MAX));
        watch.answered();
        assert_eq!(watch.look(wanted, SECOND * 67), Look::Nothing);
        assert!(!watch.is_silent());
    }

    #[test]
    fn whoever_is_silent_is_not_asked_again_until_it_is_heard() {
        let (mut watch, wanted) = (Watch::default(), Wanted::by(Duration::ZERO, SECOND * 8));
        assert!(watched(&mut watch, wanted, SECOND * 8).1.is_some());
        assert_eq!((watch.due(wanted), watch.look(wanted, SECOND * 60)), (None, Look::Nothing));
        watch.answered();
        assert!(!watch.is_silent());
        assert_eq!(watch.look(wanted, SECOND * 60), Look::Ask(INTERVAL_MAX));
    }
}
