//! Locates wants in the files as parts of saved regions, and cuts them at any byte without looking at the rest.

use shardfast_format::manifest::{Extent, LeafKind, Manifest};
use shardfast_format::{BLOCK_BYTES, Dims, Region};

use super::Wanted;
use crate::error::{Error, Problems};
use crate::index::Index;
use crate::load::Piece;

/// Common part of an item and a saved region (or an encoded value), as it lies in a file.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Index of the item.
    pub(super) item: u32,
    pub(super) file: u32,
    /// First byte of the first element, and the one after the last element.
    pub(super) begin: u64,
    pub(super) end: u64,
    item_bytes: u64,
    /// Offset of the saved region in the file, in bytes.
    base: u64,
    saved_lengths: Dims,
    /// Common box, in the saved region.
    common: Region,
    /// First index of the common box in the item's region.
    dst_offsets: Dims,
}

/// Returns the parts of every item, item by item.
///
/// # Errors
/// [`Error::Invalid`] when an item is no part of the checkpoint.
pub(super) fn parts<'a>(manifest: &Manifest, items: impl Iterator<Item = &'a Wanted>) -> Result<Vec<Part>, Error> {
    let mut by_leaf: Vec<(u32, &Wanted)> = (0u32..).zip(items).collect();
    by_leaf.sort_by_key(|(_, wanted)| wanted.leaf);
    let mut out = Vec::new();
    for group in by_leaf.chunk_by(|a, b| a.1.leaf == b.1.leaf) {
        let leaf = group[0].1.leaf as usize;
        let unknown = |region: &Region| {
            Error::Invalid(Problems(vec![format!("{region} of leaf {leaf} is no part of the checkpoint")]))
        };
        if leaf >= manifest.len() {
            return Err(unknown(&group[0].1.region));
        }
        match manifest.leaf(leaf).kind {
            LeafKind::Tensor { dtype, shape } => {
                let (regions, extents): (Vec<Region>, Vec<Extent>) = manifest.regions(leaf).unzip();
                let index = Index::new(&regions);
                let mut found = Vec::new();
                for &(item, Wanted { region, .. }) in group {
                    if !region.fits(shape) {
                        return Err(unknown(region));
                    }
                    index.search(region, &mut found);
                    out.extend(found.drain(..).map(|(i, common)| {
                        Part::new(item, region, (&regions[i], &extents[i]), &common, dtype.size_bytes())
                    }));
                }
            }
            LeafKind::Object => {
                let extents: Vec<Extent> = manifest.values(leaf).map(|(_, extent)| extent).collect();
                for &(item, wanted) in group {
                    let extent = wanted.value().and_then(|value| extents.get(value));
                    let extent = extent.ok_or_else(|| unknown(&wanted.region))?;
                    let whole = Region::whole(&[extent.bytes]);
                    if !whole.is_empty() {
                        out.push(Part::new(item, &whole, (&whole, extent), &whole, 1));
                    }
                }
            }
            LeafKind::Alias { .. } => return Err(unknown(&group[0].1.region)),
        }
    }
    Ok(out)
}

impl Part {
    fn new(item: u32, wanted: &Region, (saved, extent): (&Region, &Extent), common: &Region, item_bytes: u64) -> Part {
        let start: Dims = (0..common.ndim()).map(|d| common.offsets[d] - saved.offsets[d]).collect();
        let mut part = Part {
            item,
            file: extent.file,
            begin: 0,
            end: 0,
            item_bytes,
            base: extent.offset,
            saved_lengths: saved.lengths.clone(),
            dst_offsets: (0..common.ndim()).map(|d| common.offsets[d] - wanted.offsets[d]).collect(),
            common: Region { offsets: start, lengths: common.lengths.clone() },
        };
        let strides = part.strides();
        part.begin = part.base + dot(&part.common.offsets, &strides);
        let last = (0..strides.len()).map(|d| (part.common.lengths[d] - 1) * strides[d]).sum::<u64>();
        part.end = part.begin + last + item_bytes;
        part
    }

    /// Returns the bytes of its elements.
    pub(super) fn bytes(&self) -> u64 {
        self.common.numel() * self.item_bytes
    }

    /// Returns the distance from one element of the saved region to the next, per dimension, in bytes.
    fn strides(&self) -> Dims {
        let mut strides = Dims::from_elem(self.item_bytes, self.saved_lengths.len());
        for d in (1..strides.len()).rev() {
            strides[d - 1] = strides[d] * self.saved_lengths[d];
        }
        strides
    }

    /// Visits the elements that begin in `start..end` of the file, as at most `2 * ndim - 1` pieces in row-major order.
    pub(super) fn pieces(&self, start: u64, end: u64, mut visit: impl FnMut(Piece)) {
        if self.end <= start || end <= self.begin {
            return;
        }
        let strides = self.strides();
        let mut piece = |common: &Region| {
            let src = self.base + dot(&common.offsets, &strides);
            let last = (0..strides.len()).map(|d| (common.lengths[d] - 1) * strides[d]).sum::<u64>();
            let offset = |d: usize| self.dst_offsets[d] + common.offsets[d] - self.common.offsets[d];
            visit(Piece {
                want: self.item,
                src,
                lengths: common.lengths.clone(),
                src_strides: strides.clone(),
                dst_offsets: (0..strides.len()).map(offset).collect(),
                span_bytes: last + self.item_bytes,
            });
        };
        if start <= self.begin && self.end <= end {
            piece(&self.common);
            return;
        }
        // The elements of the saved region that begin in the range are one run of it.
        let numel = self.saved_lengths.iter().product::<u64>();
        let position = |at: u64| at.saturating_sub(self.base).div_ceil(self.item_bytes).min(numel);
        for run in Region::flat_run(&self.saved_lengths, position(start), position(end)) {
            if let Some(common) = run.intersect(&self.common) {
                piece(&common);
            }
        }
    }

    /// Returns whether an element of the saved region begins before byte `at` of the file and ends after it.
    pub(super) fn is_cut_at(&self, at: u64) -> bool {
        !at.saturating_sub(self.base).is_multiple_of(self.item_bytes)
    }

    /// Calls `visit(first, last)` with runs of bytes at which elements begin between `start` and `end`. Every block
    /// from `first` to `last` has one.
    pub(super) fn runs(&self, start: u64, end: u64, mut visit: impl FnMut(u64, u64)) {
        self.pieces(start, end, |piece| {
            let mut span = 0;
            let mut outer = piece.lengths.len();
            while outer > 0 {
                let (length, stride) = (piece.lengths[outer - 1], piece.src_strides[outer - 1]);
                if length > 1 && stride - span > BLOCK_BYTES {
                    break;
                }
                span += (length - 1) * stride;
                outer -= 1;
            }
            for mut number in 0..piece.lengths[..outer].iter().product::<u64>() {
                let mut at = piece.src;
                for d in (0..outer).rev() {
                    at += number % piece.lengths[d] * piece.src_strides[d];
                    number /= piece.lengths[d];
                }
                visit(at, at + span);
            }
        });
    }
}

/// Returns the distance of an index from the first element, in bytes.
fn dot(index: &[u64], strides: &[u64]) -> u64 {
    index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
}
