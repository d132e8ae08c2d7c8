//! Iterates over a whole checkpoint in bounded memory: flat runs of tensors, and values a few at a time.

use std::ops::Range;

use shardfast_format::region::checked_numel;
use shardfast_format::{DType, LeafKind, Region};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::host::row_major_strides;
use shardfast_transfer::sink::{Sink, Want};

use crate::checkpoint::Checkpoint;

/// A run of a tensor's elements in row-major order.
#[derive(Debug, Clone)]
pub struct FlatRun {
    /// Index of the leaf in the manifest; a tensor.
    pub leaf: usize,
    /// Flat indices of elements.
    pub elements: Range<u64>,
}

impl Checkpoint {
    /// Fills `out` with the verified bytes of the runs, one run after the other. On this rank alone.
    ///
    /// # Errors
    /// As [`Checkpoint::load_alone`]; `Internal` when the runs are not of tensors or have another size than `out`.
    #[allow(unsafe_code)]
    pub fn load_runs(&self, runs: &[FlatRun], out: &mut [u8]) -> Result<()> {
        let mut wants = Vec::with_capacity(runs.len());
        let mut rest = &mut *out;
        for FlatRun { leaf, elements } in runs {
            let found = self.manifest.leaf(*leaf);
            let LeafKind::Tensor { dtype, shape } = found.kind else {
                return Err(Error::internal(format!("{}/{} is no tensor", found.key, found.name)));
            };
            for region in Region::flat_run(shape, elements.start, elements.end) {
                let strides = row_major_strides(&region.lengths, dtype.size_bytes());
                let strides: Vec<i64> = strides.iter().map(|&stride| stride as i64).collect();
                let bytes = usize::try_from(region.numel() * dtype.size_bytes()).unwrap_or(usize::MAX);
                let (place, left) = rest
                    .split_at_mut_checked(bytes)
                    .ok_or_else(|| Error::internal("the runs are longer than their memory"))?;
                rest = left;
                let address = place.as_mut_ptr() as usize;
                // SAFETY: `out` is borrowed until the load below has returned, and each sink has a part of it alone.
                let sink = unsafe { Sink::new(address, &region.lengths, &strides, dtype.size_bytes()) }?;
                wants.push(Want { leaf: *leaf, region, sink });
            }
        }
        if !rest.is_empty() {
            return Err(Error::internal(format!("the runs leave {} bytes unfilled", rest.len())));
        }
        self.load_alone(&wants, &[])?;
        Ok(())
    }
}

/// Bytes of a tensor of a checked manifest.
pub fn tensor_bytes(dtype: DType, shape: &[u64]) -> u64 {
    checked_numel(shape).unwrap_or(0) * dtype.size_bytes()
}

/// Divides consecutive items into runs whose sizes sum to at most `bytes_max`; an item that is larger stands alone.
pub fn batches(sizes: impl IntoIterator<Item = u64>, bytes_max: u64) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    let mut total = 0u64;
    for (i, bytes) in sizes.into_iter().enumerate() {
        match out.last_mut() {
            Some(last) if total.saturating_add(bytes) <= bytes_max => {
                last.end = i + 1;
                total += bytes;
            }
            _ => {
                out.push(i..i + 1);
                total = bytes;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_consecutive_and_bounded() {
        assert!(batches([], 10).is_empty());
        assert_eq!(batches([4, 4, 4, 11, 0, 10, 1], 10), [0..2, 2..3, 3..4, 4..6, 6..7]);
        assert_eq!(batches([u64::MAX, u64::MAX], 10), [0..1, 1..2]);
    }
}
