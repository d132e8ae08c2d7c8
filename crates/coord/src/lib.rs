//! Lets ranks agree, with deadlines, and carries bytes between pairs of them.
//!
//! There is one primitive, [`Coord::agree`]: every rank contributes opaque bytes under a topic, rank 0 decides once
//! over all of them, and every rank gets its own answer, or every rank gets the same error. Gathering, scattering,
//! broadcasting and a barrier with an outcome are all special cases of it. [`solo`], [`local`] (threads of one process)
//! and [`grpc`] (processes) have one contract.
//!
//! Ranks communicate along a [tree](Topology): each with its parent and its children only, one message a round and
//! direction. [`node`] is one rank's part in it, without threads, sockets or clocks.
//!
//! Bulk transport is separate: [`peers`] carries messages of any size between pairs of ranks, past the tree.
//!
//! # Contract
//!
//! * **Rounds.** A topic names a round. The n-th call of a rank with a topic meets the n-th calls of all other ranks
//!   with that topic, so a topic may be used again as soon as the call has returned. Rounds of different topics are
//!   independent: any number of threads may be in `agree` at once, and ranks may come to the topics in any order.
//! * **Who learns what.** Contributions go to rank 0 only, in the order of the ranks; the decision gives one answer for
//!   each rank, and a rank sees nothing but its own. All answers of a round are given out at one moment.
//! * **Failure.** A rank that cannot do its part contributes `Err(reason)`. The round still waits for the others, so
//!   that every failure is known; then nothing is decided and every rank gets [`Error::Failed`] with all reasons. A
//!   decision that returns `Err` (or panics) is a failure of rank 0.
//! * **Deadlines.** A round expires when the deadline of any rank that waits in it has passed since that rank came.
//!   Every rank that had come gets [`Error::Missing`] with the ranks that had not, and the beginning of the first
//!   contribution that is not empty. A rank that comes later gets that same error at once (for the last 4096 failed
//!   rounds). Once every rank has come, the round cannot expire any more, and the decision has the same time again. A
//!   rank that has no answer even then gets [`Error::Unavailable`] and must treat the outcome as unknown: rank 0 may
//!   still decide.
//! * **Silence.** A rank whose process is stopped, or that cannot be reached although no connection has broken, is
//!   *silent*, which is detected by the time at which the round expires. A rank whose program is merely busy is not
//!   silent. Ranks above a silent rank get [`Error::Missing`] with it and all ranks below it; it is named as silent.
//!   Ranks below it get [`Error::Unavailable`] with its name, at the same time, and must treat the outcome as unknown.
//!   A silent rank stays a member: the next round is tried with it.
//! * **Loss.** A rank whose process ends, whose connection breaks or that drops its coordinator is lost for good.
//!   Rounds that are not complete, and all later ones, fail at once on every rank with [`Error::Lost`], which names the
//!   first rank that was lost. Complete rounds are decided and answered all the same, so a rank may leave after its
//!   last answer.
//! * **Twice.** A second call of one rank with a topic while its first one waits gets [`Error::Invalid`]; the first one
//!   goes on.
//! * **Equal errors.** All ranks of a failed round get equal errors, except where a rank cannot be reached. Ranks
//!   below a lost rank cannot be reached: they get [`Error::Lost`] with that rank, also for a round that was complete,
//!   and must then treat its outcome as unknown.

mod error;
pub mod grpc;
mod hub;
mod local;
pub mod node;
pub mod peers;
mod ports;
mod pulse;
mod stopping;
mod topology;
mod wire;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use error::{Error, Failure, NOT_CONTRIBUTED, Ranks, SAMPLE_BYTES, SHOWN_BYTES};
pub use local::{local, local_tree, solo};
pub use ports::Ports;
pub use pulse::Pulse;
pub use stopping::Stopping;
pub use topology::Topology;
pub use wire::Encoded;

/// Decides a round: takes every rank's contribution in the order of the ranks, and returns every rank's answer in that
/// order, or the reason why there is none.
pub type Decide<'a> = &'a mut dyn FnMut(Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, String>;

/// Receives what some ranks contributed to a round that failed because others did not: the first [`SHOWN_BYTES`] of
/// each contribution, with its rank.
pub type Show<'a> = &'a mut dyn FnMut(Vec<(u32, Vec<u8>)>);

/// Largest contribution and largest answer of one rank: 1 GiB. A larger one fails the round.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 30;

/// Unique name of one meeting of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Meeting(pub [u8; 16]);

impl Meeting {
    /// Draws a new name at random.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the system has no random numbers.
    pub(crate) fn draw() -> Result<Meeting, Error> {
        let mut name = [0; 16];
        getrandom::fill(&mut name)
            .map_err(|error| Error::Unavailable(format!("the system has no random numbers: {error}")))?;
        Ok(Meeting(name))
    }
}

/// Ranks that a round waits for, as far as one rank knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Absent {
    /// Ranks that have certainly not contributed.
    pub ranks: Vec<u32>,
    /// Runs of other ranks, of which at least one has not contributed if `ranks` is empty.
    pub among: Vec<Range<u32>>,
}

/// One rank among those that agree; see the [crate's contract](crate#contract).
pub trait Coord: Send + Sync {
    /// Returns this rank, below [`world`](Coord::world).
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn world(&self) -> u32;

    /// Returns the name of this meeting of these ranks, drawn at random, the same on all of them and on no others.
    fn meeting(&self) -> Meeting;

    /// Returns the name or address, without a port, at which the other ranks can reach this process.
    fn host(&self) -> &str;

    /// Returns the ports at which this process may listen there.
    fn ports(&self) -> Ports {
        Ports::default()
    }

    /// Returns the ranks that a round waits for, as far as this rank knows without a message; none for a round that is
    /// not open here.
    fn absent(&self, topic: &str) -> Absent;

    /// Returns the first rank that was lost, as far as this rank knows.
    fn lost(&self) -> Option<u32> {
        None
    }

    /// Beats this pulse until it is dropped; returns whether it does, which takes threads of its own.
    fn beats(&self, _pulse: &Arc<Pulse>) -> bool {
        false
    }

    /// Contributes to the round of `topic` and blocks until this rank has its answer.
    ///
    /// `topic` is 1 to 4096 bytes long. `decide` is called on rank 0 only, once, on the calling thread, and without any
    /// lock held: it may itself agree on another topic. `deadline` bounds the wait for the other ranks, and once more
    /// the wait for the decision.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`], [`Error::Missing`] and [`Error::Lost`] are the round's, equal on every rank;
    /// [`Error::Unavailable`] when rank 0 or a rank on the way to it does not answer; [`Error::Invalid`] when the call
    /// itself is wrong.
    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error>;

    /// Agrees like [`agree`](Coord::agree). If the round fails because ranks did not contribute or are lost, `show` is
    /// called on rank 0 with what the others contributed, as far as it has come there.
    ///
    /// # Errors
    /// As [`agree`](Coord::agree).
    fn agree_or_show(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        _show: Show<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.agree(topic, contribution, decide, deadline)
    }

    /// Ends the wait of this rank's call in the round of `topic`, as if its deadline had passed now. Any thread may
    /// call it, and again while the call has not returned: each time the round goes on as far as it is due.
    fn hurry(&self, _topic: &str) {}
}
