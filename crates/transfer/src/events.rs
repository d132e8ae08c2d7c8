//! Defines the events of saves and loads, and who observes them.

use std::time::Duration;

use crate::error::Error;

/// Phases of a save or load, in the order in which they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The caller's objects are read: this rank knows what its state holds.
    Described,
    /// This rank knows what it writes.
    Planned,
    /// All tensors that are captured eagerly are copied.
    Captured,
    /// The state may change.
    Staged,
    /// This rank's tensors are written, not yet durable.
    Written,
    /// Replicas are compared.
    Compared,
    /// This rank's values are written.
    Durable,
    /// The checkpoint is committed.
    Committed,
    /// The checkpoint to load is found, and its manifest is verified.
    Opened,
    /// Ranks agree which leaf fills what.
    Matched,
    /// Ranks have met, and agree on what each of them does: writes which value, reads or receives which bytes.
    Agreed,
    /// This rank has read and verified its bytes.
    Read,
    /// All ranks have theirs.
    Loaded,
}

impl Phase {
    /// Phases of saves and loads, all of them.
    pub const ALL: [Phase; 13] = [
        Phase::Described,
        Phase::Planned,
        Phase::Captured,
        Phase::Staged,
        Phase::Written,
        Phase::Compared,
        Phase::Durable,
        Phase::Committed,
        Phase::Opened,
        Phase::Matched,
        Phase::Agreed,
        Phase::Read,
        Phase::Loaded,
    ];

    /// Returns the word that reports have for it.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Described => "described",
            Phase::Planned => "planned",
            Phase::Captured => "captured",
            Phase::Staged => "staged",
            Phase::Written => "written",
            Phase::Compared => "compared",
            Phase::Durable => "durable",
            Phase::Committed => "committed",
            Phase::Opened => "opened",
            Phase::Matched => "matched",
            Phase::Agreed => "agreed",
            Phase::Read => "read",
            Phase::Loaded => "loaded",
        }
    }
}

/// Event of a save or load. The operations of its store are [events of their own](shardfast_store::Event).
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A phase is over.
    Ended {
        /// Phase that is over.
        phase: Phase,
        /// Time from the request to its end.
        after: Duration,
    },
    /// A phase has failed on this rank, and does not end.
    GaveUp {
        /// Phase that failed.
        phase: Phase,
        /// Time from the request to the failure.
        after: Duration,
    },
    /// This rank is about to move bytes: those of a save's data files, or those that a load wants.
    Expects {
        /// Number of bytes, beside those of earlier events.
        bytes: u64,
    },
    /// Bytes are copied: into staging memory by a save, verified and to their destination by a load.
    Copied {
        /// Number of bytes.
        bytes: u64,
    },
    /// A thread has verified bytes of a load, read or received, and copied them to their destinations.
    Placed {
        /// Time that it was busy.
        took: Duration,
    },
    /// Ranks that read for each other have swapped messages.
    Exchanged {
        /// Time that this rank waited for theirs.
        took: Duration,
    },
    /// A save has bytes that were captured in steps before it.
    Ahead {
        /// Time from the first of these steps to the request.
        before: Duration,
        /// Number of bytes.
        bytes: u64,
    },
    /// The program has waited in the call of a save.
    Stalled {
        /// Time that it waited.
        took: Duration,
    },
    /// The program has waited for a save before it could change the state.
    Waited {
        /// Time that it waited.
        took: Duration,
    },
    /// A copy into staging memory has waited for some of it that writes still used. A save whose program waits for its
    /// end emits none: it copies as fast as the storage takes it.
    AwaitedMemory {
        /// Time that it waited.
        took: Duration,
    },
    /// This process did not run: it was stopped, swapped out, or got no processor.
    HeldUp {
        /// Time from the request to the last moment at which it ran before.
        after: Duration,
        /// Time until it ran again.
        took: Duration,
    },
    /// A data file of this rank is written.
    Wrote {
        /// Length of the file, its header included.
        bytes: u64,
    },
    /// Comparison of replicas decided.
    Compared {
        /// Outcome, as reports say it.
        outcome: &'static str,
    },
    /// Staging memory could not be page-locked for a device.
    PageLock {
        /// Error of the device's driver.
        failure: &'a str,
    },
    /// An action at the storage has failed.
    Failed {
        /// Failure of this try.
        error: &'a Error,
        /// Number of the try, from 1 on.
        attempt: usize,
        /// Pause before the next try; `None` if there is none.
        pause: Option<Duration>,
        /// Time from the request to the failure.
        after: Duration,
    },
    /// The operation has ended on this rank.
    Outcome {
        /// Error, if it has failed.
        failure: Option<&'a Error>,
        /// Number of the operation, the same on all ranks and unique among those of their meeting; `None` if ranks did
        /// not meet in it.
        number: Option<u64>,
        /// Time from the request to the end.
        after: Duration,
    },
}

/// Observer of a save or load and of its store. As a store's observer, it must return at once.
pub trait Observer: shardfast_store::Observer {
    /// Receives an event.
    fn noted(&self, event: &Event<'_>);
}
