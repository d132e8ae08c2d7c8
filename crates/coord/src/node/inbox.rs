//! Delivers the messages of one link, each once and in order.

use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Inbox<M> {
    taken: u64,
    /// Messages that arrived before earlier ones.
    early: BTreeMap<u64, M>,
}

impl<M> Inbox<M> {
    pub(super) fn new() -> Inbox<M> {
        Inbox { taken: 0, early: BTreeMap::new() }
    }

    /// Returns the number of the last message that was taken; they begin with 1.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Adds a message, unless it has arrived before.
    pub(super) fn put(&mut self, number: u64, message: M) {
        if number > self.taken {
            self.early.entry(number).or_insert(message);
        }
    }

    /// Takes the next message, if it has arrived.
    pub(super) fn take(&mut self) -> Option<M> {
        let message = self.early.remove(&(self.taken + 1))?;
        self.taken += 1;
        Some(message)
    }
}
