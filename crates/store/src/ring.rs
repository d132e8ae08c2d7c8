//! Defines the interface of a queue of writes in flight.

use std::ops::Range;

use crate::sys::Sys;
use crate::write::Buffer;

/// A write in flight.
pub struct Flight {
    /// Memory to write from.
    pub buffer: Box<dyn Buffer>,
    /// Range of the memory to write.
    pub range: Range<usize>,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Number of the owner's write that this one is a part of.
    pub write: usize,
}

/// A queue of writes: takes memory, and returns it with the outcome, in any order.
pub trait Ring {
    /// Handle of an open file.
    type File;

    /// Begins a write in flight.
    ///
    /// # Errors
    /// `EBUSY` when as many are in flight as the queue was made for; any other error is the end of the queue.
    fn submit(&mut self, file: &Self::File, flight: Flight) -> Sys<()>;

    /// Waits for a write, at least one of which must be in flight; returns how many bytes it took, or why it took none.
    ///
    /// # Errors
    /// The end of the queue.
    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)>;
}
