//! Writes in flight: the interface of a queue of them.

use std::ops::Range;

use crate::sys::Sys;
use crate::write::Buffer;

/// A write in flight.
pub struct Flight {
    /// The memory.
    pub buffer: Box<dyn Buffer>,
    /// The part of it that is to be written.
    pub range: Range<usize>,
    /// To which offset of the file.
    pub offset: u64,
    /// Which of its owner's writes it belongs to.
    pub write: usize,
}

/// A queue of writes: memory goes in, and comes back with the outcome, in any order.
pub trait Ring {
    /// An open file.
    type File;

    /// Begins a write.
    ///
    /// # Errors
    /// `EBUSY` when as many are in flight as the queue was made for; anything else is the end of the queue.
    fn submit(&mut self, file: &Self::File, flight: Flight) -> Sys<()>;

    /// Waits for a write, at least one of which must be in flight: how many bytes it took, or why it took none.
    ///
    /// # Errors
    /// The end of the queue.
    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)>;
}
