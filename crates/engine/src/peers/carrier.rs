//! Transports messages between the ranks of a shared load, in rounds.

use std::collections::BTreeMap;
use std::sync::Arc;

use shardfast_coord::peers::Peers;
use shardfast_transfer::error::Result;

use crate::operation::of_ranks;

/// A message, in pieces that follow each other; several ranks may be sent the same ones.
pub type Message = Vec<Arc<Vec<u8>>>;

/// Swaps messages between ranks, one round at a time.
pub trait Carrier: Send {
    /// Sends each rank its message and returns theirs. A rank without a message takes part in no later round.
    ///
    /// # Errors
    /// An error that names the rank that was lost or sent nothing in time.
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>>;
}

impl Carrier for Peers {
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>> {
        Peers::swap(self, messages).map_err(of_ranks)
    }
}
