//! Things that belong to one process: a forked child has their memory, but none of their threads and connections.

use pyo3::prelude::*;

use crate::errors::invalid;

/// A value of the process that made it. A forked child gets an error instead, and never drops it: that could wait for
/// threads that the child does not have.
pub(crate) struct Own<T> {
    what: &'static str,
    value: Option<T>,
    process: u32,
}

impl<T> Own<T> {
    /// Wraps a value; `what` names it in the error.
    pub(crate) fn new(what: &'static str, value: T) -> Own<T> {
        Own { what, value: Some(value), process: std::process::id() }
    }

    /// Returns the value, in its own process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        let here = std::process::id();
        match &self.value {
            Some(value) if here == self.process => Ok(value),
            _ => Err(invalid(format!(
                "{} belongs to process {}, and process {here} was forked from it: a forked process has none of its \
                 threads and connections; save and load in the process that began, or start this one with spawn \
                 instead of fork",
                self.what, self.process
            ))),
        }
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.value.take());
        }
    }
}
