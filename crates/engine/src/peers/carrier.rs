//! Transports messages between the ranks of a shared load, in rounds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use shardfast_coord::peers::Peers;
use shardfast_transfer::error::{Error, Kind, Result};

use crate::operation::of_ranks;

/// A message, in pieces that follow each other; several ranks may be sent the same ones.
pub type Message = Vec<Arc<Vec<u8>>>;

/// Swaps messages between ranks, one round at a time.
pub(crate) trait Carrier: Send {
    /// Sends each rank its message and returns what each of them sent. A rank without a message takes part in no later
    /// round.
    ///
    /// # Errors
    /// Names the rank that was lost or sent nothing in time.
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>>;
}

impl Carrier for Peers {
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>> {
        Peers::swap(self, messages).map_err(of_ranks)
    }
}

/// The program's end of a [`Handoff`]: rounds that the program carries out, such as with collectives of a process
/// group.
pub struct Rounds {
    is_shared: Arc<AtomicBool>,
    messages: Receiver<BTreeMap<u32, Message>>,
    received: Sender<Result<BTreeMap<u32, Vec<u8>>>>,
}

/// What a load needs from the carrier of its rounds.
pub enum Round {
    /// To swap these messages.
    Swap(BTreeMap<u32, Message>),
    /// Nothing yet.
    Waiting,
    /// This rank needs no more rounds.
    Over,
}

/// The load's end: a carrier that hands its rounds to the program.
pub struct Handoff {
    is_shared: Arc<AtomicBool>,
    messages: Sender<BTreeMap<u32, Message>>,
    received: Receiver<Result<BTreeMap<u32, Vec<u8>>>>,
}

/// The two ends of a handoff: one for a load, one for the carrier of its rounds.
pub fn handoff() -> (Handoff, Rounds) {
    let is_shared = Arc::new(AtomicBool::new(false));
    let (message_sender, message_receiver) = bounded(0);
    let (received_sender, received_receiver) = bounded(1);
    let rounds = Rounds { is_shared: Arc::clone(&is_shared), messages: message_receiver, received: received_sender };
    (Handoff { is_shared, messages: message_sender, received: received_receiver }, rounds)
}

impl Handoff {
    /// Notes that all ranks are going to swap messages.
    pub(crate) fn announce(&self) {
        self.is_shared.store(true, Ordering::Release);
    }
}

impl Carrier for Handoff {
    fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>> {
        let gone = || Error::new(Kind::Unavailable, "the program no longer carries this load's messages between ranks");
        self.messages.send(messages).map_err(|_| gone())?;
        self.received.recv().map_err(|_| gone())?
    }
}

impl Rounds {
    /// The next round, waited for no longer than `timeout`.
    pub fn next(&self, timeout: Duration) -> Round {
        match self.messages.recv_timeout(timeout) {
            Ok(messages) => Round::Swap(messages),
            Err(RecvTimeoutError::Timeout) => Round::Waiting,
            Err(RecvTimeoutError::Disconnected) => Round::Over,
        }
    }

    /// Whether the ranks swap messages in this load: the same on all of them, and final when a round has come or the
    /// rounds are over.
    pub fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    /// Takes what the ranks sent in the round of the last [`Rounds::next`], or why it could not be carried out.
    pub fn received(&self, messages: Result<BTreeMap<u32, Vec<u8>>>) {
        // A load that ended takes no more.
        let _ = self.received.try_send(messages);
    }
}
