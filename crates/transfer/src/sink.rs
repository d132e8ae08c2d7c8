//! Destinations of a load's bytes.

use shardfast_format::Region;

use crate::cuda::DeviceSink;
use crate::error::Result;
use crate::host::HostSink;
use crate::provider::Fences;

/// A strided n-d block of elements that a load writes.
pub enum Sink {
    /// In this process's memory.
    Host(HostSink),
    /// In the memory of a device.
    Device(DeviceSink),
}

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sink::Host(sink) => sink.fmt(f),
            Sink::Device(_) => f.write_str("Device"),
        }
    }
}

impl Sink {
    /// Makes a sink of the block of this process's memory for a region of extent `lengths`, its first element at
    /// `address`.
    ///
    /// # Errors
    /// `Invalid` when two of its elements share memory (an expanded tensor).
    ///
    /// # Safety
    /// Every element of the block must stay allocated, and no other code may read or write it, until the load that got
    /// this sink has returned.
    #[allow(unsafe_code)] // the one way in for foreign memory to be written
    pub unsafe fn new(address: usize, lengths: &[u64], strides_bytes: &[i64], item_bytes: u64) -> Result<Sink> {
        // SAFETY: the caller's promise.
        unsafe { HostSink::new(address, lengths, strides_bytes, item_bytes) }.map(Sink::Host)
    }

    /// Returns the block, if it lies in this process's memory.
    pub(crate) fn host(&self) -> Option<&HostSink> {
        match self {
            Sink::Host(sink) => Some(sink),
            Sink::Device(_) => None,
        }
    }

    /// Copies a box of extent `lengths` to `offsets` of this block; its elements lie `src_strides` bytes apart in
    /// `src`, which must stay as it is until `fences` was waited for.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn scatter(
        &self,
        offsets: &[u64],
        lengths: &[u64],
        src_strides: &[u64],
        src: &[u8],
        fences: &mut Fences,
    ) -> Result<()> {
        match self {
            Sink::Host(sink) => {
                sink.scatter(offsets, lengths, src_strides, src);
                Ok(())
            }
            Sink::Device(sink) => sink.scatter(offsets, lengths, src_strides, src, fences),
        }
    }
}

/// A tensor's region that a load asks for, and where it goes.
#[derive(Debug)]
pub struct Want {
    /// Index of the leaf in the manifest; a tensor.
    pub leaf: usize,
    /// The part of the tensor.
    pub region: Region,
    /// Destination of the bytes.
    pub sink: Sink,
}
