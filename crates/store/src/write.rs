//! Many writes in flight: buffers are taken, and dropped when their bytes are written.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Error, ObjectWriter, Result};

/// Memory whose bytes are being written to an object. Dropping it returns it to its owner.
///
/// # Safety
/// Until it is dropped, `bytes` is the same range at every call, wherever the buffer itself is moved; the range stays
/// allocated and is not written. Buffers of one number are the same range as long as the process lives.
#[allow(unsafe_code)]
pub unsafe trait Buffer: Send + Sync {
    /// All of it.
    fn bytes(&self) -> &[u8];

    /// The number of the buffer, if its owner reuses a few buffers: a kernel can keep such a buffer mapped between
    /// writes.
    fn number(&self) -> Option<u32>;
}

/// A write that is to be made.
pub struct Write<'a> {
    /// Into which object.
    pub object: &'a dyn ObjectWriter,
    /// At which offset; as in [`ObjectWriter::write_at`].
    pub offset: u64,
    /// From which memory: one buffer, or several that follow each other in the object.
    pub buffers: Vec<Box<dyn Buffer>>,
    /// How many bytes in all: all of each buffer, but of the last one from the first byte on; aligned as the object
    /// asks.
    pub bytes: usize,
    /// The source's number of the write, by which it knows a returned write.
    pub number: usize,
    /// The CRC-64/NVME of these bytes, if the source knows it: a storage that sends it need not compute it.
    pub crc64: Option<u64>,
}

impl Write<'_> {
    /// Makes it on this thread.
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
    /// The next write. With `wait` it waits for one and never returns [`Next::Later`].
    fn next(&self, wait: bool) -> Next<'a>;

    /// Takes back a failed write, of which the object may hold any part. The caller then asks for the next write, even
    /// after [`Next::End`].
    ///
    /// # Errors
    /// The error, if it ends all writes.
    fn failed(&self, write: Write<'a>, error: Error) -> Result<()>;
}

/// [`Store::write_all`](crate::Store::write_all) for a storage whose writes take a thread each: makes them one by one
/// on each of `threads` threads.
///
/// # Errors
/// The first error that is not accepted; no write is taken after it.
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

/// A way to make a write, which returns a failed one.
pub(crate) type Making<'a, 'm> = &'m (dyn Fn(Write<'a>) -> Result<(), Box<(Write<'a>, Error)>> + Sync);

/// The first error of threads that make writes.
#[derive(Default)]
pub(crate) struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next write; whether there may be more.
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
