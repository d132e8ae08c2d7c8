//! Defines writes in flight: buffers are taken, and dropped when their bytes are written.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Error, ObjectWriter, Result};

/// Memory whose bytes are being written to an object. Dropping it returns it to its owner.
///
/// # Safety
/// Until it is dropped, `bytes` is the same range at every call, wherever the buffer itself is moved; the range stays
/// allocated and is not written. Buffers of one number are the same range as long as the process lives.
#[allow(unsafe_code)]
pub unsafe trait Buffer: Send + Sync {
    /// Returns the whole buffer.
    fn bytes(&self) -> &[u8];

    /// Returns the number of the buffer, if its owner reuses a few buffers: a kernel can keep such a buffer mapped
    /// between writes.
    fn number(&self) -> Option<u32>;
}

/// A write that is to be made.
pub struct Write<'a> {
    /// Object to write to.
    pub object: &'a dyn ObjectWriter,
    /// Offset in the object, in bytes; as in [`ObjectWriter::write_at`].
    pub offset: u64,
    /// Memory to write from: one buffer, or several that follow each other in the object.
    pub buffers: Vec<Box<dyn Buffer>>,
    /// Number of bytes in all: each buffer whole, except the last one, from its first byte on; aligned as the object
    /// asks.
    pub bytes: usize,
    /// Number of the write at its source, which identifies a returned write.
    pub number: usize,
    /// CRC-64/NVME of these bytes, if the source knows it: a storage that sends it need not compute it.
    pub crc64: Option<u64>,
}

impl Write<'_> {
    /// Makes the write on this thread.
    pub(crate) fn make(&self) -> Result<()> {
        let (mut at, end) = (self.offset, self.offset.saturating_add(self.bytes as u64));
        for buffer in &self.buffers {
            let bytes = buffer.bytes();
            let bytes = &bytes[..bytes.len().min((end - at) as usize)];
            self.object.write_at(at, bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Returns the number of the part that `bytes` bytes at `offset` are, in an object of `object_bytes` bytes in parts of
/// `part_bytes`.
///
/// # Errors
/// The message, if they are no whole part.
#[cfg(feature = "remote")]
pub(crate) fn part_number(part_bytes: u64, object_bytes: u64, offset: u64, bytes: u64) -> Result<usize, String> {
    let expected = part_bytes.min(object_bytes.saturating_sub(offset));
    if !offset.is_multiple_of(part_bytes) || bytes != expected || offset > 0 && bytes == 0 {
        let expected = format!("expected whole parts of {part_bytes} bytes of {object_bytes}");
        return Err(format!("{expected}, found {bytes} bytes at {offset}"));
    }
    Ok((offset / part_bytes) as usize)
}

/// Answer of a source of writes.
pub enum Next<'a> {
    /// A write to make.
    Write(Write<'a>),
    /// No write yet.
    Later,
    /// No more writes.
    End,
}

/// Source of writes, asked from any number of threads.
pub trait Writes<'a>: Sync {
    /// Returns the next write. With `wait` it waits for one and never returns [`Next::Later`].
    fn next(&self, wait: bool) -> Next<'a>;

    /// Takes back a failed write, of which the object may hold any part. The caller then asks for the next write, even
    /// after [`Next::End`].
    ///
    /// # Errors
    /// The error, if it ends all writes.
    fn failed(&self, write: Write<'a>, error: Error) -> Result<()>;
}

/// Implements [`Store::write_all`](crate::Store::write_all) for a storage whose writes take a thread each: makes them
/// one by one on each of `threads` threads.
///
/// # Errors
/// The first error that `writes` does not accept; no write is taken after it.
pub fn by_threads<'a>(threads: usize, writes: &dyn Writes<'a>) -> Result<()> {
    let (failure, make) =
        (Failure::default(), |write: Write<'a>| write.make().map_err(|error| Box::new((write, error))));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| while failure.make_next(writes, &make) {});
        }
    });
    failure.into_result()
}

/// Function that makes a write, and returns a failed one.
pub(crate) type Making<'a, 'm> = &'m (dyn Fn(Write<'a>) -> Result<(), Box<(Write<'a>, Error)>> + Sync);

/// First error of threads that make writes.
#[derive(Default)]
pub(crate) struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next write; returns whether there may be more.
    pub(crate) fn make_next<'a>(&self, writes: &dyn Writes<'a>, make: Making<'a, '_>) -> bool {
        if self.lock().is_some() {
            return false;
        }
        match writes.next(true) {
            Next::Write(write) => {
                let accepted = make(write).or_else(|failed| {
                    let (write, error) = *failed;
                    writes.failed(write, error)
                });
                if let Err(error) = accepted {
                    self.lock().get_or_insert(error);
                }
                true
            }
            Next::Later => true,
            Next::End => false,
        }
    }

    pub(crate) fn into_result(self) -> Result<()> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
