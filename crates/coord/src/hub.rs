//! Wraps a rank's node in blocking calls, each of which waits for its reply.

use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::node::{Contribution, Reply};
use crate::{Decide, Error, Show};

/// Cause of the loss of a rank that closes its coordinator.
pub(crate) const LEFT: &str = "it closed its coordinator";

/// Callback that delivers the reply to the waiting call. Never blocks.
pub(crate) type Waiter = Box<dyn FnOnce(Reply) + Send>;

/// A node with a lock, a clock and links. Its methods do not wait for other ranks.
pub(crate) trait Hub {
    fn contribute(&self, topic: &str, contribution: Contribution, waiter: Waiter, deadline: Duration);

    fn decided(&self, topic: &str, decision: Result<Vec<Vec<u8>>, String>) -> Result<Vec<u8>, Error>;

    fn tick(&self);

    /// Returns the time until [`tick`](Hub::tick) has work to do.
    fn due_in(&self) -> Option<Duration>;
}

/// Implements [`Coord::agree_or_show`](crate::Coord::agree_or_show) through a rank's own node.
pub(crate) fn agree(
    hub: &impl Hub,
    topic: &str,
    contribution: Contribution,
    decide: Decide<'_>,
    show: Show<'_>,
    deadline: Duration,
) -> Result<Vec<u8>, Error> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let waiter = Box::new(move |reply| {
        // A node replies once, and the receiver waits below.
        let _ = sender.try_send(reply);
    });
    hub.contribute(topic, contribution, waiter, deadline);
    let reply = loop {
        match receiver.recv_timeout(hub.due_in().unwrap_or(Duration::MAX)) {
            Ok(reply) => break reply,
            Err(RecvTimeoutError::Timeout) => hub.tick(),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Unavailable(format!("the coordinator ended during the agreement on {topic:?}")));
            }
        }
    };
    match reply {
        Reply::Answer(answer) => answer,
        Reply::Failed(error, came) => {
            show(came);
            Err(error)
        }
        Reply::Decide(contributions) => {
            let decision = panic::catch_unwind(AssertUnwindSafe(|| decide(contributions)));
            let (decision, panicked) = match decision {
                Ok(decision) => (decision, None),
                Err(panicked) => (Err("the decision panicked".to_owned()), Some(panicked)),
            };
            let own = hub.decided(topic, decision);
            match panicked {
                None => own,
                Some(panicked) => panic::resume_unwind(panicked),
            }
        }
    }
}
