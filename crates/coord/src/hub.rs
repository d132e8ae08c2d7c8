//! Rank 0's rounds as the threads of its process see them: a lock, a clock, and the answers handed out.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::round::{Contribution, Replies, Reply, Rounds};
use crate::{Decide, Error};

/// How long after its time an answer may still be on its way.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// What a rank that closes its coordinator leaves behind as the cause.
pub(crate) const LEFT: &str = "it closed its coordinator";

/// Brings a reply to whoever waits for it. Never blocks.
pub(crate) type Seat = Box<dyn FnOnce(Reply) + Send>;

pub(crate) struct Hub {
    world: u32,
    started: Instant,
    rounds: Mutex<Rounds<Seat>>,
}

impl Hub {
    pub(crate) fn new(world: u32) -> Hub {
        Hub { world, started: Instant::now(), rounds: Mutex::new(Rounds::new(world)) }
    }

    pub(crate) fn world(&self) -> u32 {
        self.world
    }

    pub(crate) fn contribute(
        &self,
        rank: u32,
        topic: &str,
        contribution: Contribution,
        seat: Seat,
        deadline: Duration,
    ) {
        let now = self.started.elapsed();
        let replies = self.rounds().contribute(rank, topic, contribution, seat, now, deadline);
        hand_out(replies);
    }

    pub(crate) fn lose(&self, rank: u32, cause: &str) {
        let replies = self.rounds().lose(rank, cause);
        hand_out(replies);
    }

    pub(crate) fn expire(&self) {
        let now = self.started.elapsed();
        let replies = self.rounds().expire(now);
        hand_out(replies);
    }

    /// How long until [`expire`](Hub::expire) has something to do.
    pub(crate) fn expires_in(&self) -> Option<Duration> {
        let expires = self.rounds().expires()?;
        Some(expires.saturating_sub(self.started.elapsed()))
    }

    /// [`Coord::agree`](crate::Coord::agree) for a rank of this process.
    pub(crate) fn agree(
        &self,
        rank: u32,
        topic: &str,
        contribution: Contribution,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let seat = Box::new(move |reply| {
            // Nobody listens any more when the caller gave up; then nobody needs the reply.
            let _ = sender.try_send(reply);
        });
        self.contribute(rank, topic, contribution, seat, deadline);
        let reply = receiver.recv_timeout(deadline).or_else(|_| {
            self.expire();
            receiver.recv_timeout(deadline.saturating_add(GRACE))
        });
        match reply {
            Ok(Reply::Answer(answer)) => answer,
            Ok(Reply::Decide(contributions)) => {
                let decision = panic::catch_unwind(AssertUnwindSafe(|| decide(contributions)));
                let (decision, panicked) = match decision {
                    Ok(decision) => (decision, None),
                    Err(panicked) => (Err("the decision panicked".to_owned()), Some(panicked)),
                };
                let (own, replies) = self.rounds().decided(topic, decision);
                hand_out(replies);
                match panicked {
                    None => own,
                    Some(panicked) => panic::resume_unwind(panicked),
                }
            }
            Err(_) => Err(undecided(topic, deadline)),
        }
    }

    fn rounds(&self) -> MutexGuard<'_, Rounds<Seat>> {
        // No code of ours panics with the lock held, and the state is whole between any two of its methods.
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error of a rank whose contribution was in time and whose answer is not.
pub(crate) fn undecided(topic: &str, deadline: Duration) -> Error {
    Error::Unavailable(format!(
        "rank 0 has not answered on {topic:?} within twice the deadline of {deadline:?}; the outcome is unknown"
    ))
}

fn hand_out(replies: Replies<Seat>) {
    for (seat, reply) in replies {
        seat(reply);
    }
}
