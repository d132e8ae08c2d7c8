//! Records the events of one operation: of fixed size, bounded in number, without locks and without memory for each.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use shardfast_store::Action;
use shardfast_transfer::error::Kind;
use shardfast_transfer::events::{Event, Phase};

use crate::text::Text;

/// Events that a record keeps in full: 256 KiB of them. Sums go on beyond.
const ENTRIES_MAX: usize = 2048;

/// Bytes of an object's name that an event keeps.
const OBJECT_BYTES: usize = 48;

/// Bytes of a failure's text that a record keeps.
pub(crate) const FAILURE_BYTES: usize = 300;

/// Number of bytes from which a read or write counts as a large one.
const LARGE_BYTES: u64 = 1 << 20;

/// Upper bounds of the histograms' classes of durations, in microseconds; the last class has none.
pub(crate) const BOUNDS_US: [u64; 7] = [1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000];

/// Words of failures in which a service asks for fewer requests.
const THROTTLED: [&str; 5] = ["SlowDown", "503 ", "429 ", "hrottl", "ServerBusy"];

/// Kinds of operations at a store that are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    SmallWrites,
    LargeWrites,
    SmallReads,
    LargeReads,
    /// Operations on names: creation, end, list, sync, removal.
    Names,
}

impl Class {
    pub(crate) const ALL: [Class; 5] =
        [Class::SmallWrites, Class::LargeWrites, Class::SmallReads, Class::LargeReads, Class::Names];

    /// Returns the class of an operation.
    fn of(action: Action, bytes: u64) -> Class {
        let is_large = bytes >= LARGE_BYTES;
        match action {
            Action::Write | Action::Put | Action::Publish if is_large => Class::LargeWrites,
            Action::Write | Action::Put | Action::Publish => Class::SmallWrites,
            Action::Read | Action::Open if is_large => Class::LargeReads,
            Action::Read | Action::Open => Class::SmallReads,
            _ => Class::Names,
        }
    }

    /// Returns the words that reports have for it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Class::SmallWrites => "small_writes",
            Class::LargeWrites => "large_writes",
            Class::SmallReads => "small_reads",
            Class::LargeReads => "large_reads",
            Class::Names => "names",
        }
    }
}

/// An event as it is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) what: What,
    /// Time from the request of the operation to the event's begin.
    pub(crate) at: Duration,
    /// Time that it took; zero for a moment.
    pub(crate) took: Duration,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Object at the store, or the failure's word.
    pub(crate) object: Text<OBJECT_BYTES>,
    pub(crate) has_failed: bool,
    /// Whether the failure is that there is no such object, which operations also ask to know.
    pub(crate) is_missing: bool,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Phase(Phase),
    Operation(Action),
    Wrote,
    Compared,
    PageLock,
    Stalled,
    Waited,
    HeldUp,
    /// Sum over the threads of a load.
    Placed,
    /// Sum over the rounds of a load.
    Exchanged,
    Ahead,
    /// An action has failed for that many times, and is tried again after a pause (`took`) or not at all.
    Failed {
        attempt: u16,
        is_final: bool,
    },
    Outcome,
}

impl What {
    /// Returns the word that files and records have for it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            What::Phase(phase) => phase.word(),
            What::Operation(action) => action.word(),
            What::Wrote => "file",
            What::Compared => "replicas",
            What::PageLock => "page_lock",
            What::Stalled => "stall",
            What::Waited => "wait",
            What::HeldUp => "held_up",
            What::Placed => "placed",
            What::Exchanged => "exchanged",
            What::Ahead => "ahead",
            What::Failed { is_final: false, .. } => "retry",
            What::Failed { is_final: true, .. } => "gave_up",
            What::Outcome => "outcome",
        }
    }

    /// Returns the number of the try that failed, from 1 on.
    pub(crate) fn attempt(self) -> Option<u16> {
        match self {
            What::Failed { attempt, .. } => Some(attempt),
            _ => None,
        }
    }
}

/// Sums over the operations of one class.
#[derive(Default)]
pub(crate) struct Sums {
    pub(crate) bytes: AtomicU64,
    pub(crate) busy_ns: AtomicU64,
    pub(crate) longest_ns: AtomicU64,
    pub(crate) by_duration: [AtomicU32; BOUNDS_US.len() + 1],
}

impl Sums {
    /// Returns the number of operations.
    pub(crate) fn count(&self) -> u32 {
        self.by_duration.iter().map(|count| count.load(Relaxed)).fold(0, u32::saturating_add)
    }
}

/// Events of one operation on one rank.
pub(crate) struct Record {
    pub(crate) began: Instant,
    entries: Box<[OnceLock<Entry>]>,
    next: AtomicUsize,
    sums: [Sums; Class::ALL.len()],
    failures: AtomicU32,
    throttled: AtomicU32,
    paused_ns: AtomicU64,
    stalled_ns: AtomicU64,
    waited_ns: AtomicU64,
    awaited_ns: AtomicU64,
    placed_ns: AtomicU64,
    exchanged_ns: AtomicU64,
    /// Longest time in which the process did not run, in microseconds, above 32 bits of its begin.
    held_up: AtomicU64,
    failure: OnceLock<Text<FAILURE_BYTES>>,
}

impl Record {
    /// Makes the record of an operation that began at `began`.
    pub(crate) fn new(began: Instant) -> Record {
        Record {
            began,
            entries: (0..ENTRIES_MAX).map(|_| OnceLock::new()).collect(),
            next: AtomicUsize::new(0),
            sums: Default::default(),
            failures: AtomicU32::new(0),
            throttled: AtomicU32::new(0),
            paused_ns: AtomicU64::new(0),
            stalled_ns: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            awaited_ns: AtomicU64::new(0),
            placed_ns: AtomicU64::new(0),
            exchanged_ns: AtomicU64::new(0),
            held_up: AtomicU64::new(0),
            failure: OnceLock::new(),
        }
    }

    /// Returns the events that are kept, in the order of their ends, and the number of all others.
    pub(crate) fn entries(&self) -> (impl Iterator<Item = &Entry>, usize) {
        let left_out = self.next.load(Relaxed).saturating_sub(self.entries.len());
        (self.entries.iter().filter_map(OnceLock::get), left_out)
    }

    pub(crate) fn sums(&self, class: Class) -> &Sums {
        &self.sums[class as usize]
    }

    /// Returns the number of failures that were tried again or ended the operation, and the pauses after them.
    pub(crate) fn failures(&self) -> (u32, Duration) {
        (self.failures.load(Relaxed), Duration::from_nanos(self.paused_ns.load(Relaxed)))
    }

    /// Returns the time that the program has waited, in the operation's call and before it could change the state.
    pub(crate) fn stalled(&self) -> Duration {
        Duration::from_nanos(self.stalled_ns.load(Relaxed)) + self.waited()
    }

    /// Returns the time that the program has waited before it could change the state.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Relaxed))
    }

    /// Returns the number of failures in which the service asked for fewer requests.
    pub(crate) fn throttled(&self) -> u32 {
        self.throttled.load(Relaxed)
    }

    /// Returns the time that the copy has waited for staging memory.
    pub(crate) fn awaited(&self) -> Duration {
        Duration::from_nanos(self.awaited_ns.load(Relaxed))
    }

    /// Returns the time that threads were busy verifying and copying what a load got, all of them together.
    pub(crate) fn placed(&self) -> Duration {
        Duration::from_nanos(self.placed_ns.load(Relaxed))
    }

    /// Returns the time that this rank has waited for messages of ranks that read for it.
    pub(crate) fn exchanged(&self) -> Duration {
        Duration::from_nanos(self.exchanged_ns.load(Relaxed))
    }

    /// Returns begin and duration of the longest time in which the process did not run, in microseconds.
    pub(crate) fn held_up(&self) -> (u32, u32) {
        let both = self.held_up.load(Relaxed);
        (both as u32, (both >> 32) as u32)
    }

    /// Returns why the operation failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(Text::as_str)
    }

    pub(crate) fn stored(&self, event: &shardfast_store::Event<'_>) {
        let sums = self.sums(Class::of(event.action, event.bytes));
        let took_ns = u64::try_from(event.took.as_nanos()).unwrap_or(u64::MAX);
        sums.bytes.fetch_add(if event.failure.is_none() { event.bytes } else { 0 }, Relaxed);
        sums.busy_ns.fetch_add(took_ns, Relaxed);
        // Few are longer than all before: a look is cheaper than a change.
        if took_ns > sums.longest_ns.load(Relaxed) {
            sums.longest_ns.fetch_max(took_ns, Relaxed);
        }
        sums.by_duration[BOUNDS_US.partition_point(|&bound| bound <= took_ns / 1000)].fetch_add(1, Relaxed);
        self.add(Entry {
            what: What::Operation(event.action),
            at: event.began.saturating_duration_since(self.began),
            took: event.took,
            offset: event.offset,
            bytes: event.bytes,
            object: Text::name(event.object),
            has_failed: event.failure.is_some(),
            is_missing: event.failure.is_some_and(|error| error.kind == shardfast_store::Kind::NotFound),
        });
    }

    pub(crate) fn noted(&self, event: &Event<'_>) {
        let moment = |what, at| Entry {
            what,
            at,
            took: Duration::ZERO,
            offset: 0,
            bytes: 0,
            object: Text::head(""),
            has_failed: false,
            is_missing: false,
        };
        let now = || self.began.elapsed();
        let more = |sum: &AtomicU64, took: Duration| {
            sum.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        };
        self.add(match *event {
            Event::Expects { .. } | Event::Copied { .. } => return,
            // Summed alone: there are thousands of these for a large state.
            Event::AwaitedMemory { took } => return more(&self.awaited_ns, took),
            Event::Placed { took } => return more(&self.placed_ns, took),
            Event::Exchanged { took } => return more(&self.exchanged_ns, took),
            Event::Ahead { before, bytes } => Entry { took: before, bytes, ..moment(What::Ahead, Duration::ZERO) },
            Event::HeldUp { after, took } => {
                let us = |time: Duration| u64::from(u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
                self.held_up.fetch_max(us(took) << 32 | us(after), Relaxed);
                Entry { took, ..moment(What::HeldUp, after) }
            }
            Event::Ended { phase, after } => moment(What::Phase(phase), after),
            Event::GaveUp { phase, after } => Entry { has_failed: true, ..moment(What::Phase(phase), after) },
            Event::Stalled { took } => {
                more(&self.stalled_ns, took);
                Entry { took, ..moment(What::Stalled, now().saturating_sub(took)) }
            }
            Event::Waited { took } => {
                more(&self.waited_ns, took);
                Entry { took, ..moment(What::Waited, now().saturating_sub(took)) }
            }
            Event::Wrote { bytes } => Entry { bytes, ..moment(What::Wrote, now()) },
            Event::Compared { outcome } => Entry { object: Text::head(outcome), ..moment(What::Compared, now()) },
            Event::PageLock { failure } => {
                Entry { object: Text::shortened(failure), has_failed: true, ..moment(What::PageLock, now()) }
            }
            Event::Failed { error, attempt, pause, after } => {
                // An answer that something is there, or is not, is no failure of the storage.
                if !matches!(error.kind, Kind::Conflict | Kind::NotFound) {
                    self.failures.fetch_add(1, Relaxed);
                }
                if THROTTLED.iter().any(|word| error.message.contains(word)) {
                    self.throttled.fetch_add(1, Relaxed);
                }
                let took = pause.unwrap_or_default();
                more(&self.paused_ns, took);
                let attempt = u16::try_from(attempt).unwrap_or(u16::MAX);
                let what = What::Failed { attempt, is_final: pause.is_none() };
                Entry { took, object: Text::shortened(&error.message), has_failed: true, ..moment(what, after) }
            }
            Event::Outcome { failure, after, .. } => {
                for (what, took) in [(What::Placed, self.placed()), (What::Exchanged, self.exchanged())] {
                    if !took.is_zero() {
                        self.add(Entry { took, ..moment(what, Duration::ZERO) });
                    }
                }
                if let Some(error) = failure {
                    let _ = self.failure.set(Text::shortened(&error.message));
                }
                Entry { has_failed: failure.is_some(), ..moment(What::Outcome, after) }
            }
        });
    }

    fn add(&self, entry: Entry) {
        if let Some(place) = self.entries.get(self.next.fetch_add(1, Relaxed)) {
            let _ = place.set(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use shardfast_store::Requests;

    use super::*;

    fn write(bytes: u64, took_ms: u64) -> shardfast_store::Event<'static> {
        shardfast_store::Event {
            action: Action::Write,
            object: "model/00003-000-0123456789abcdef0123456789abcdef.safetensors",
            offset: 64,
            bytes,
            began: Instant::now(),
            took: Duration::from_millis(took_ms),
            requests: Requests::default(),
            failure: None,
        }
    }

    #[test]
    fn an_event_takes_no_memory_and_a_surplus_is_counted() {
        let record = Record::new(Instant::now());
        let event = write(8, 5);
        let counted = allocation_counter::measure(|| {
            for _ in 0..ENTRIES_MAX + 10 {
                record.stored(&event);
            }
            record.noted(&Event::Ended { phase: Phase::Written, after: Duration::from_millis(9) });
        });
        assert_eq!(counted.count_total, 0, "{counted:?}");
        let (entries, left_out) = record.entries();
        assert_eq!((entries.count(), left_out), (ENTRIES_MAX, 11));
        assert_eq!(record.sums(Class::SmallWrites).count() as usize, ENTRIES_MAX + 10);
    }

    #[test]
    fn a_record_takes_the_memory_that_is_said() {
        assert!(size_of::<OnceLock<Entry>>() * ENTRIES_MAX <= 256 << 10, "{}", size_of::<OnceLock<Entry>>());
    }

    #[test]
    fn operations_are_summed_by_size_and_duration() {
        let record = Record::new(Instant::now());
        [write(LARGE_BYTES, 5), write(LARGE_BYTES - 1, 1), write(2 * LARGE_BYTES, 5_000)]
            .iter()
            .for_each(|event| record.stored(event));
        let large = record.sums(Class::LargeWrites);
        assert_eq!((large.count(), large.bytes.load(Relaxed)), (2, 3 * LARGE_BYTES));
        assert_eq!(large.longest_ns.load(Relaxed), 5_000_000_000);
        let by_duration: Vec<u32> = large.by_duration.iter().map(|count| count.load(Relaxed)).collect();
        assert_eq!(by_duration, [0, 0, 1, 0, 0, 0, 0, 1]);
        assert_eq!(record.sums(Class::SmallWrites).by_duration[1].load(Relaxed), 1);
    }
}
