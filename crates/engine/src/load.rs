//! A load, from what a rank wants to its memory filled with proven bytes.
//!
//! ```text
//! plan (pure, each rank alone) → agree that all have a plan → read, prove, scatter → agree that all arrived
//! ```

use std::time::Duration;

use shardfast_format::{DType, Dims, LeafKind};
use shardfast_plan::{Piece, Read, Reads};
use smallvec::smallvec;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::reader::{self, LIMITS};
use crate::sink::{Sink, Want};

/// An encoded value of the manifest: the leaf, and which of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueRef {
    /// Index of the leaf in the manifest; an object.
    pub leaf: usize,
    /// Index among [`shardfast_format::Manifest::values`].
    pub value: usize,
}

/// What a load would read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Bytes that were asked for.
    pub bytes_wanted: u64,
    /// Bytes that will be read: those, grown to whole checksummed blocks and across small gaps.
    pub bytes_read: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of files that are opened.
    pub files: u64,
}

struct Plan {
    tensors: Reads,
    values: Vec<Read>,
    values_bytes: Vec<usize>,
}

impl Checkpoint {
    /// Fills every want's sink and returns the wanted values, encoded, in order. Every rank of the engine must call it.
    ///
    /// # Errors
    /// The same on every rank. `Invalid` when a want does not fit its tensor, before anything is read. `Corrupt` names
    /// the checkpoint, the leaf, the file and the byte range: no unproven byte reaches a sink, but sinks filled before
    /// the failure keep what they got.
    pub fn load(&self, wants: &[Want], values: &[ValueRef], deadline: Duration) -> Result<Vec<Vec<u8>>> {
        let operation = self.engine.begin(format!("load {}", self.url), deadline);
        let plan = self.plan(wants, values);
        let wanted = plan.as_ref().map(|_| self.bytes_wanted(wants)).map_err(Error::clone);
        let again = operation.agree("open", wanted, |ranks: Vec<u64>| {
            // More than there is: some of it is wanted by several.
            let there: u64 = self.manifest.files().iter().map(|file| file.bytes - file.data_start).sum();
            let wanted = ranks.iter().fold(0u64, |sum, &wanted| sum.saturating_add(wanted));
            Ok(vec![wanted > there; ranks.len()])
        })?;
        let loaded = plan.and_then(|plan| self.run(plan, wants, again));
        operation
            .agree("done", loaded.as_ref().map(|_| ()).map_err(Error::clone), |ranks| Ok(vec![(); ranks.len()]))?;
        loaded
    }

    /// What this rank's [`Checkpoint::load`] would read. Not a byte is read for it, and other ranks need not call it.
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

    /// Fills every want's sink on this rank alone: nothing is agreed with the others.
    pub(crate) fn load_alone(&self, wants: &[Want], values: &[ValueRef]) -> Result<Vec<Vec<u8>>> {
        self.run(self.plan(wants, values)?, wants, false)
    }

    /// Of tensors.
    fn bytes_wanted(&self, wants: &[Want]) -> u64 {
        let bytes = |want: &Want| match self.manifest.leaf(want.leaf).kind {
            LeafKind::Tensor { dtype, .. } => want.region.numel() * dtype.size_bytes(),
            _ => 0,
        };
        wants.iter().map(bytes).sum()
    }

    fn plan(&self, wants: &[Want], values: &[ValueRef]) -> Result<Plan> {
        let planned: Vec<_> =
            wants.iter().map(|want| shardfast_plan::Want { leaf: want.leaf, region: want.region.clone() }).collect();
        let tensors = shardfast_plan::load(&self.manifest, &planned, LIMITS)?;
        let mut plan = Plan { tensors, values: Vec::new(), values_bytes: Vec::new() };
        for (i, value) in values.iter().enumerate() {
            let is_object =
                value.leaf < self.manifest.len() && matches!(self.manifest.leaf(value.leaf).kind, LeafKind::Object);
            let extent = is_object.then(|| self.manifest.values(value.leaf).nth(value.value)).flatten();
            let (_, extent) = extent
                .ok_or_else(|| Error::invalid(format!("{}: there is no value {value:?} in its manifest", self.url)))?;
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

    #[allow(unsafe_code)]
    fn run(&self, plan: Plan, wants: &[Want], again: bool) -> Result<Vec<Vec<u8>>> {
        let mut encoded: Vec<Vec<u8>> = plan.values_bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let value_sinks = encoded.iter_mut().map(|bytes| {
            // SAFETY: `encoded` is neither moved nor looked at until the reads are over, and each vector has one sink.
            unsafe { Sink::new(bytes.as_mut_ptr() as usize, &[bytes.len() as u64], &[1], DType::U8.size_bytes()) }
        });
        let value_sinks = value_sinks.collect::<Result<Vec<_>>>()?;
        let sinks: Vec<&Sink> = wants.iter().map(|want| &want.sink).chain(&value_sinks).collect();
        let reads = plan.values.into_iter().chain(plan.tensors);
        reader::run(&self.files, reads, &sinks, &self.engine.staging, again)?;
        drop(sinks);
        Ok(encoded)
    }
}

/// The same pieces in fewer reads: a state may hold thousands of small values side by side.
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
