//! The thread that swaps the rounds' messages while others read.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shardfast_transfer::error::{Error, Result};

use crate::peers::carrier::{Carrier, Message};

/// The messages that came in a round, by sender.
type Swapped = Result<BTreeMap<u32, Vec<u8>>>;

/// The handle of the thread that swaps.
pub(super) struct Swap {
    to_carrier: crossbeam_channel::Sender<BTreeMap<u32, Message>>,
    from_carrier: crossbeam_channel::Receiver<Swapped>,
}

impl Swap {
    /// Starts the thread, which ends with this, and calls `swapped` with the time that each swap took.
    pub(super) fn start<'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        mut carrier: Box<dyn Carrier + 'scope>,
        swapped: impl Fn(Duration) + Send + 'scope,
    ) -> Swap {
        let (to_carrier, messages) = crossbeam_channel::bounded::<BTreeMap<u32, Message>>(0);
        let (answers, from_carrier) = crossbeam_channel::bounded(0);
        scope.spawn(move || {
            for messages in messages {
                let began = Instant::now();
                let answer = carrier.swap(messages);
                swapped(began.elapsed());
                if answers.send(answer).is_err() {
                    return;
                }
            }
        });
        Swap { to_carrier, from_carrier }
    }

    pub(super) fn begin(&self, messages: BTreeMap<u32, Message>) -> Result<()> {
        self.to_carrier.send(messages).map_err(|_| Error::internal("the thread that swaps messages has ended"))
    }

    /// Waits for the messages of the round that was begun.
    pub(super) fn end(&self) -> Swapped {
        let ended = || Err(Error::internal("the thread that swaps messages has ended"));
        self.from_carrier.recv().unwrap_or_else(|_| ended())
    }
}
