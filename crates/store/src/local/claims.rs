//! Remembers where names can be claimed: given to a file unless they are taken.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crate::Result;

/// Devices on which a name was claimed, shared by the stores of a process: each device is tried once.
#[derive(Default)]
pub struct Claims(Mutex<HashSet<u64>>);

impl Claims {
    /// Makes the attempt unless one has succeeded on that device.
    pub(super) fn expect(&self, device: u64, attempt: impl FnOnce() -> Result<()>) -> Result<()> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !known().contains(&device) {
            attempt()?;
            known().insert(device);
        }
        Ok(())
    }
}

/// System call that gives a new file its final name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// A rename that replaces nothing.
    Rename,
    /// A link: a second name of the file, whose first name is removed then.
    Link,
}
