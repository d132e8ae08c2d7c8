//! Many writes in flight: memory goes in, and comes back when its bytes are written.

use std::sync::{Mutex, PoisonError};

use crate::{ObjectWriter, Result};

/// Memory whose bytes are on their way into an object. Dropping it gives it back to its owner.
///
/// # Safety
/// Until it is dropped, `bytes` is the same range at every call, wherever the buffer itself is moved; the range stays
/// allocated and nobody writes it. Buffers of one number are the same range as long as the process lives.
#[allow(unsafe_code)]
pub unsafe trait Buffer: Send {
    /// All of it.
    fn bytes(&self) -> &[u8];

    /// Which of its owner's buffers it is, if these are few and used again and again: a kernel can keep such a buffer
    /// mapped from one write to the next.
    fn number(&self) -> Option<u32>;
}

/// A write that is to be made.
pub struct Write<'a> {
    /// Into which object.
    pub object: &'a dyn ObjectWriter,
    /// At which offset; as in [`ObjectWriter::write_at`].
    pub offset: u64,
    /// From which memory.
    pub buffer: Box<dyn Buffer>,
    /// How many of the buffer's bytes, from the first one on; aligned as the object asks.
    pub bytes: usize,
}

/// What is to be done next.
pub enum Next<'a> {
    /// This write.
    Write(Write<'a>),
    /// Nothing yet.
    Later,
    /// Nothing any more.
    End,
}

/// Where writes come from, asked from any number of threads.
pub trait Writes<'a>: Sync {
    /// The next write. With `wait` the answer is never [`Next::Later`]: it is waited for.
    fn next(&self, wait: bool) -> Next<'a>;
}

/// Makes the writes one by one on each of `threads` threads.
///
/// # Errors
/// The first failure; no write is taken after it.
pub(crate) fn by_threads<'a>(threads: usize, writes: &dyn Writes<'a>) -> Result<()> {
    let failure = Mutex::new(None);
    let lock = || failure.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while lock().is_none() {
                    match writes.next(true) {
                        Next::Write(write) => {
                            if let Err(error) =
                                write.object.write_at(write.offset, &write.buffer.bytes()[..write.bytes])
                            {
                                lock().get_or_insert(error);
                            }
                        }
                        Next::Later => {}
                        Next::End => return,
                    }
                }
            });
        }
    });
    let first = lock().take();
    first.map_or(Ok(()), Err)
}
