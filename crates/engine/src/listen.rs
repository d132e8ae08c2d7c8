//! Defines the listener of an engine: the events that it gets of saves and loads, and the bytes that each rank sends to
//! rank 0 for it. The engine does not know what a listener does with them.

use std::sync::Arc;
use std::time::Instant;

use shardfast_store::Shared;
use shardfast_transfer::events::Observer;
use shardfast_transfer::observed::Observed;
use shardfast_transfer::report::Report;

/// Largest text that a listener may send, in bytes.
pub const SAID_BYTES_MAX: usize = 512;

/// Largest text that the listener of a chosen rank may send after that, in bytes.
pub const TOLD_BYTES_MAX: usize = 64 << 10;

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A checkpoint is saved.
    Save,
    /// A checkpoint is loaded.
    Load,
}

/// A save or load that a rank refuses before the engine has begun it.
#[derive(Clone, Debug)]
pub struct Refused {
    /// Kind of the operation.
    pub verb: Verb,
    /// Place of the checkpoint; empty if the caller named none.
    pub url: String,
    /// Training step of the checkpoint, if it is known.
    pub step: Option<u64>,
    /// Time of the request.
    pub began: Instant,
}

/// A save or load that begins.
#[derive(Clone, Copy)]
pub struct Begun<'a> {
    /// Kind of the operation.
    pub verb: Verb,
    /// Place of the checkpoint, or of the run that has none; empty for a refusal whose caller named none.
    pub url: &'a str,
    /// Training step of the checkpoint, if it is known.
    pub step: Option<u64>,
    /// Observer of all that happens in it, which also knows what has happened so far.
    pub observed: &'a Arc<Observed>,
    /// Name of the ranks' meeting, which no other has.
    pub meeting: [u8; 16],
    /// Number of this rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// State that the engine's stores share.
    pub storage: &'a Arc<Shared>,
}

/// Listener to all saves and loads of an engine.
pub trait Listener: Send + Sync {
    /// Returns the listener to an operation that begins now.
    fn begins(&self, begun: &Begun<'_>) -> Arc<dyn Listening>;
}

/// Listener to one save or load on one rank.
pub trait Listening: Observer {
    /// Returns what rank 0 learns of this rank, once the outcome is known: at most [`SAID_BYTES_MAX`]. Listeners of all
    /// ranks say something, or those of none.
    fn says(&self, report: &Report) -> Option<Vec<u8>>;

    /// Chooses on rank 0 the ranks that are to tell more, given what all ranks have said, in their order. Ranks send
    /// nothing more if it names none but rank 0.
    fn chooses(&self, said: &[Vec<u8>]) -> Vec<u32>;

    /// Returns what rank 0 learns of this rank in addition if it was chosen: at most [`TOLD_BYTES_MAX`].
    fn tells(&self) -> Vec<u8>;

    /// Receives on rank 0 what all ranks have said, in their order; `None` for ranks from which nothing came, of which
    /// `missing` are known to have said nothing. `told` has what the chosen ranks but rank 0 have told, each with its
    /// number; nothing if one of all ranks did not come.
    fn collected(&self, said: Vec<Option<Vec<u8>>>, missing: Vec<u32>, told: Vec<(u32, Vec<u8>)>, report: &Report);
}
