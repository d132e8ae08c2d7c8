//! A load's reads from storage: planned by each rank alone, then read, verified and scattered.

use shardfast_format::{DType, Dims, LeafKind, Manifest, object};
use shardfast_plan::{Piece, Read, Reads};
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::reader::{self, LIMITS};
use shardfast_transfer::sink::{Sink, Want};
use smallvec::smallvec;

use crate::checkpoint::Checkpoint;

/// An encoded value of the manifest: the leaf, and which of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueRef {
    /// Index of the leaf in the manifest; an object.
    pub leaf: usize,
    /// Index among [`shardfast_format::Manifest::values`].
    pub value: usize,
}

/// Reads that a load would make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Bytes that the load wants.
    pub bytes_wanted: u64,
    /// Bytes that will be read: those, grown to whole checksummed blocks and across small gaps.
    pub bytes_read: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of files that are opened.
    pub files: u64,
}

/// Bytes that one rank's load moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Traffic {
    /// Bytes read from storage.
    pub bytes_read: u64,
    /// Bytes received from other ranks, through shared memory or a network.
    pub bytes_received: u64,
    /// Bytes sent to other ranks, all together.
    pub bytes_sent: u64,
    /// `true` if ranks read for each other until the end.
    pub is_shared: bool,
}

/// Results of a load beside its tensors.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// The wanted values, encoded, in order.
    pub values: Vec<Vec<u8>>,
    /// Bytes that this rank moved for it.
    pub traffic: Traffic,
}

/// The reads of one rank's load.
pub(crate) struct ReadPlan {
    pub(crate) tensors: Reads,
    pub(crate) values: Vec<Read>,
    pub(crate) values_bytes: Vec<usize>,
}

impl Checkpoint {
    /// Returns the reads of this rank's [`Checkpoint::load`]. It reads nothing, and other ranks need not call it.
    ///
    /// # Errors
    /// `Invalid` when a want does not fit its tensor.
    pub fn forecast(&self, wants: &[Want], values: &[ValueRef]) -> Result<Forecast> {
        let plan = self.plan(wants, values)?;
        let mut forecast =
            Forecast { bytes_wanted: plan.values_bytes.iter().map(|&n| n as u64).sum(), ..Forecast::default() };
        forecast.bytes_wanted += self.bytes_wanted(wants);
        let mut files = std::collections::HashSet::new();
        for read in plan.values.into_iter().chain(plan.tensors) {
            let range = self.files.whole_blocks(read.file, read.offset..read.offset + read.bytes);
            forecast.bytes_read += range.end - range.start;
            forecast.reads += 1;
            files.insert(read.file);
        }
        forecast.files = files.len() as u64;
        Ok(forecast)
    }

    /// Fills every want's sink on this rank alone, without the others.
    pub fn load_alone(&self, wants: &[Want], values: &[ValueRef]) -> Result<Vec<Vec<u8>>> {
        self.read(self.plan(wants, values)?, wants, false).map(|loaded| loaded.values)
    }

    /// Bytes of the tensors that are wanted.
    pub(crate) fn bytes_wanted(&self, wants: &[Want]) -> u64 {
        let bytes = |want: &Want| match self.manifest.leaf(want.leaf).kind {
            LeafKind::Tensor { dtype, .. } => want.region.numel() * dtype.size_bytes(),
            _ => 0,
        };
        wants.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Returns the reads for these wants and values; the values follow the wants.
    ///
    /// # Errors
    /// `Invalid` when a want does not fit its tensor; `Unsupported` when a value is too large.
    pub(crate) fn plan(&self, wants: &[Want], values: &[ValueRef]) -> Result<ReadPlan> {
        let planned: Vec<_> =
            wants.iter().map(|want| shardfast_plan::Want { leaf: want.leaf, region: want.region.clone() }).collect();
        let tensors = shardfast_plan::load(&self.manifest, &planned, LIMITS)?;
        let mut plan = ReadPlan { tensors, values: Vec::new(), values_bytes: Vec::new() };
        for (i, value) in values.iter().enumerate() {
            let is_object =
                value.leaf < self.manifest.len() && matches!(self.manifest.leaf(value.leaf).kind, LeafKind::Object);
            let extent = is_object.then(|| self.manifest.values(value.leaf).nth(value.value)).flatten();
            let (_, extent) = extent
                .ok_or_else(|| Error::invalid(format!("{}: there is no value {value:?} in its manifest", self.url)))?;
            self.expect_value_size(value.leaf, extent.bytes)?;
            plan.values_bytes.push(extent.bytes as usize);
            let mut at = 0;
            while at < extent.bytes {
                let bytes = (extent.bytes - at).min(LIMITS.read_max_bytes);
                let piece = Piece {
                    want: (wants.len() + i) as u32,
                    src: extent.offset + at,
                    lengths: smallvec![bytes],
                    src_strides: smallvec![1],
                    dst_offsets: Dims::from_slice(&[at]),
                    span_bytes: bytes,
                };
                plan.values.push(Read { file: extent.file, offset: piece.src, bytes, pieces: vec![piece] });
                at += bytes;
            }
        }
        plan.values = coalesced(plan.values);
        Ok(plan)
    }

    /// Refuses a value beyond the size limit, before it allocates memory for it.
    fn expect_value_size(&self, leaf: usize, bytes: u64) -> Result<()> {
        if bytes <= object::BYTES_MAX {
            return Ok(());
        }
        let (url, leaf, most) = (&self.url, self.manifest.leaf(leaf), object::BYTES_MAX);
        let (key, name) = (leaf.key, leaf.name);
        let what = format!("{url}: {key}/{name} is a value of {bytes} bytes: expected at most {most}");
        Err(Error::new(Kind::Unsupported, what))
    }

    /// Makes the planned reads from storage. `shared_on_host`: other ranks of this machine read the same.
    pub(crate) fn read(&self, plan: ReadPlan, wants: &[Want], shared_on_host: bool) -> Result<Loaded> {
        let mut values: Vec<Vec<u8>> = plan.values_bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let value_sinks = value_sinks(&mut values)?;
        let sinks: Vec<&Sink> = wants.iter().map(|want| &want.sink).chain(&value_sinks).collect();
        let reads = plan.values.into_iter().chain(plan.tensors);
        let bytes_read = reader::run(&self.files, reads, &sinks, &self.engine.staging, shared_on_host)?;
        drop(value_sinks);
        Ok(Loaded { values, traffic: Traffic { bytes_read, ..Traffic::default() } })
    }
}

/// Bytes of all that was saved, as the manifest says; not verified before the files are opened.
pub fn data_bytes(manifest: &Manifest) -> u64 {
    manifest.files().iter().map(|file| file.bytes - file.data_start).fold(0, u64::saturating_add)
}

/// Makes a sink for each value.
#[allow(unsafe_code)]
pub(crate) fn value_sinks(values: &mut [Vec<u8>]) -> Result<Vec<Sink>> {
    let sink = |bytes: &mut Vec<u8>| {
        // SAFETY: the callers neither move nor read the values until the reads are over and the sinks dropped, and
        // each vector has one sink.
        unsafe { Sink::new(bytes.as_mut_ptr() as usize, &[bytes.len() as u64], &[1], DType::U8.size_bytes()) }
    };
    values.iter_mut().map(sink).collect()
}

/// Returns the same pieces in fewer reads: a state may hold thousands of small values side by side.
fn coalesced(mut reads: Vec<Read>) -> Vec<Read> {
    reads.sort_by_key(|read| (read.file, read.offset));
    let mut out: Vec<Read> = Vec::new();
    for read in reads {
        let end = read.offset + read.bytes;
        match out.last_mut() {
            Some(last)
                if last.file == read.file
                    && read.offset <= last.offset + last.bytes + LIMITS.gap_max_bytes
                    && end - last.offset <= LIMITS.read_max_bytes =>
            {
                last.bytes = last.bytes.max(end - last.offset);
                last.pieces.extend(read.pieces);
            }
            _ => out.push(read),
        }
    }
    out
}
