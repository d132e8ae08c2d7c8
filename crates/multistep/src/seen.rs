//! Watches in a rehearsal on a device whether gradients stay as they are until the next step.

use std::collections::HashSet;

use shardfast_transfer::error::Result;

use super::{Applied, Shared};

/// Gradients, from a step to the next one.
#[derive(Default)]
pub(super) struct Seen {
    /// Gradients of the last step; kept, so that no other tensor takes their memory.
    last: Vec<Applied>,
    /// Addresses of the gradients of the step before.
    before: HashSet<usize>,
    /// `true` if the last step is over.
    is_next: bool,
    are_overwritten: bool,
}

impl Seen {
    /// Marks the step as over.
    pub(super) fn go_on(&mut self) {
        self.is_next = true;
    }

    /// Compares the gradients of the last step with their copies, before the optimizer steps again.
    pub(super) fn look(&mut self, shared: &Shared) -> Result<()> {
        if !std::mem::take(&mut self.is_next) {
            return Ok(());
        }
        let last = std::mem::take(&mut self.last);
        for tile in &shared.tiles {
            self.are_overwritten |= !tile.has_gradients(&last)?;
        }
        self.before = last.iter().filter_map(address).collect();
        Ok(())
    }

    /// Adds gradients that an optimizer has used: at the same address as in the step before, they were written over
    /// those.
    pub(super) fn add(&mut self, applied: Vec<Applied>) {
        self.are_overwritten |= applied.iter().filter_map(address).any(|address| self.before.contains(&address));
        self.last.extend(applied);
    }

    pub(super) fn are_overwritten(&self) -> bool {
        self.are_overwritten
    }
}

fn address(of: &Applied) -> Option<usize> {
    of.gradient.on_device(0, of.gradient.bytes()).map(|(_, address)| address)
}
