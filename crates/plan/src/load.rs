//! Plans which bytes one rank reads, and their destinations.
//!
//! 1. Each wanted region is cut along the saved regions that it meets ([`Index`]); the common part of the two is a box
//!    with strides in one file.
//! 2. Each box is cut into pieces, outermost dimensions first: where the gap to the next element is too large, and
//!    along the cells of the saved region. Cells are runs of the file no longer than a read, the same for every box of
//!    a region, so that boxes which interleave in the file (columns of a matrix) are cut at the same places and share
//!    reads.
//! 3. The pieces of all boxes are merged in file order into reads, one at a time: a plan takes memory for its boxes,
//!    not for its pieces, of which a column of a large matrix has one per row.
//!
//! A read that takes a piece with gaps has room for all of that piece's cell, and so for other wanted bytes in the
//! gaps: reads for wants that do not overlap never overlap.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

use shardfast_format::manifest::{Extent, LeafKind, Manifest};
use shardfast_format::{DType, Dims, Region};
use smallvec::SmallVec;

use crate::coverage::tiles;
use crate::error::{Error, Problems};
use crate::index::Index;

/// A region that a rank wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Index of a tensor in the manifest.
    pub leaf: usize,
    /// Region in the tensor's global shape.
    pub region: Region,
}

/// Preferences of the store for reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest gap of unwanted bytes that is read rather than begin another read.
    pub gap_max_bytes: u64,
    /// Largest read, in bytes; only a single element may exceed it.
    pub read_max_bytes: u64,
}

/// A box of elements in a file, copied to a box of a wanted region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Index of the want.
    pub want: u32,
    /// Offset in the file of the first element, in bytes.
    pub src: u64,
    /// Extent per dimension, in elements.
    pub lengths: Dims,
    /// Distance in the file from one element to the next, per dimension, in bytes.
    pub src_strides: Dims,
    /// First index in the want's region, per dimension, in elements.
    pub dst_offsets: Dims,
    /// Bytes in the file from the beginning of the first element to the end of the last.
    pub span_bytes: u64,
}

/// A contiguous run of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Index of the file in the manifest.
    pub file: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes; each byte lies in a piece or in a gap no longer than [`Limits::gap_max_bytes`].
    pub bytes: u64,
    /// Pieces to take from it, by ascending offset in the file.
    pub pieces: Vec<Piece>,
}

/// Iterator over the reads of one rank, by ascending file and offset. Together their pieces hold each element of each
/// want exactly once. Computed lazily: memory only holds the boxes that wants and saved regions share.
#[derive(Debug, Clone)]
pub struct Reads {
    limits: Limits,
    boxes: Vec<StridedBox>,
    /// Queue of the next piece of every box: its file, its offset there, and the box.
    queue: BinaryHeap<Reverse<(u32, u64, usize)>>,
}

/// Plans the reads of one rank that fill `wants`. Bytes are read twice only if two wants share them and no single read
/// can hold both; wants without elements need no read.
///
/// # Errors
/// [`Error::Invalid`] naming every want whose leaf is no tensor or whose region is outside its shape;
/// [`Error::Corrupt`] naming every wanted tensor whose saved regions do not hold each element exactly once, with a
/// missing or overlapping region.
pub fn load(manifest: &Manifest, wants: &[Want], limits: Limits) -> Result<Reads, Error> {
    check(manifest, wants)?;
    let mut by_leaf: Vec<(u32, &Want)> = (0u32..).zip(wants).collect();
    by_leaf.sort_by_key(|(_, want)| want.leaf);

    let mut boxes = Vec::new();
    let mut problems = Vec::new();
    for group in by_leaf.chunk_by(|(_, a), (_, b)| a.leaf == b.leaf) {
        let leaf = manifest.leaf(group[0].1.leaf);
        let LeafKind::Tensor { dtype, shape } = leaf.kind else { continue };
        let (regions, extents): (Vec<Region>, Vec<Extent>) = manifest.regions(group[0].1.leaf).unzip();
        if let Err(flaw) = tiles(shape, &regions) {
            let (key, name) = (leaf.key, leaf.name);
            problems.push(format!("{key}/{name}: the saved parts of {shape:?} must hold each element once: {flaw}"));
            continue;
        }
        let index = Index::new(&regions);
        let mut found = Vec::new();
        for &(want, Want { region, .. }) in group {
            index.search(region, &mut found);
            boxes.extend(found.drain(..).map(|(i, common)| {
                StridedBox::new((want, region), (&regions[i], &extents[i]), &common, dtype, limits)
            }));
        }
    }
    if !problems.is_empty() {
        return Err(Error::Corrupt(Problems(problems)));
    }
    let queue = boxes.iter().enumerate().map(|(i, part)| Reverse((part.file, part.src, i))).collect();
    Ok(Reads { limits, boxes, queue })
}

fn check(manifest: &Manifest, wants: &[Want]) -> Result<(), Error> {
    let mut problems = Vec::new();
    if u32::try_from(wants.len()).is_err() {
        problems.push(format!("{} wants, and there may be fewer than 2^32", wants.len()));
    }
    for (i, Want { leaf, region }) in wants.iter().enumerate() {
        if *leaf >= manifest.len() {
            problems.push(format!("want {i}: there is no leaf {leaf}, the checkpoint has {}", manifest.len()));
            continue;
        }
        let found = manifest.leaf(*leaf);
        match found.kind {
            LeafKind::Tensor { shape, .. } if region.fits(shape) => {}
            LeafKind::Tensor { shape, .. } => problems
                .push(format!("{}/{}: requested {region} lies outside the shape {shape:?}", found.key, found.name)),
            LeafKind::Object | LeafKind::Alias { .. } => {
                problems.push(format!("{}/{}: {region} is requested of a non-tensor", found.key, found.name));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Invalid(Problems(problems))) }
}

/// Common part of a wanted and a saved region, as it lies in the file, with the rule for cutting it into pieces.
///
/// Nothing overflows here except the ends of cells: a manifest's regions have the bytes of their extents, which lie
/// inside their files, and a box lies inside its region.
#[derive(Debug, Clone)]
struct StridedBox {
    want: u32,
    file: u32,
    itemsize: u64,
    /// Offset in the file of the box's first element, in bytes.
    src: u64,
    /// First index in the saved region.
    start: Dims,
    /// Extent per dimension, in elements.
    lengths: Dims,
    /// Strides per dimension, in bytes.
    strides: Dims,
    /// First index in the want.
    dst_offsets: Dims,
    /// Dimension of a cell: a cell is `cell` indices of this dimension of the saved region, with all inner dimensions.
    cell_dim: usize,
    cell: u64,
    /// Dimension along which pieces are cut: a piece has one index of the dimensions before it, at most one window of
    /// it, and all indices of those after it. So pieces in row-major order do not overlap in the file and are in its
    /// order.
    cut_dim: usize,
    window: u64,
    /// First index of the next piece in the box.
    next: Dims,
}

impl StridedBox {
    /// Makes the box `common` of the region `wanted` and of the region `saved`, which lies at `extent`.
    fn new(
        (want, wanted): (u32, &Region),
        (saved, extent): (&Region, &Extent),
        common: &Region,
        dtype: DType,
        limits: Limits,
    ) -> StridedBox {
        let ndim = common.ndim();
        let itemsize = dtype.size_bytes();
        let mut strides: Dims = SmallVec::from_elem(itemsize, ndim);
        for d in (1..ndim).rev() {
            strides[d - 1] = strides[d] * saved.lengths[d];
        }
        let start: Dims = (0..ndim).map(|d| common.offsets[d] - saved.offsets[d]).collect();

        let cell_dim = (0..ndim).rev().find(|&d| saved.lengths[d] > limits.read_max_bytes / strides[d]).unwrap_or(0);
        let cell = strides.get(cell_dim).map_or(1, |stride| (limits.read_max_bytes / stride).max(1));
        let (mut cut_dim, mut window) = (cell_dim, cell);
        let mut span = itemsize;
        for d in (cell_dim..ndim).rev() {
            if common.lengths[d] > 1 && strides[d] - span > limits.gap_max_bytes {
                (cut_dim, window) = (d, 1);
                break;
            }
            span += (common.lengths[d] - 1) * strides[d];
        }
        StridedBox {
            want,
            file: extent.file,
            itemsize,
            src: extent.offset + dot(&start, &strides),
            start,
            lengths: common.lengths.clone(),
            strides,
            dst_offsets: (0..ndim).map(|d| common.offsets[d] - wanted.offsets[d]).collect(),
            cell_dim,
            cell,
            cut_dim,
            window,
            next: SmallVec::from_elem(0, ndim),
        }
    }

    /// Returns the extent of the next piece in dimension `d`.
    fn extent(&self, d: usize) -> u64 {
        let left = self.lengths[d] - self.next[d];
        match d.cmp(&self.cut_dim) {
            Ordering::Less => 1,
            Ordering::Equal => left.min(self.window - (self.start[d] + self.next[d]) % self.window),
            Ordering::Greater => left,
        }
    }

    /// Returns the next piece, and the offset in the file up to which a read that takes it must have room.
    fn piece(&self) -> (Piece, u64) {
        let ndim = self.lengths.len();
        let lengths: Dims = (0..ndim).map(|d| self.extent(d)).collect();
        let src = self.src + dot(&self.next, &self.strides);
        let span_bytes = (0..ndim).map(|d| (lengths[d] - 1) * self.strides[d]).sum::<u64>() + self.itemsize;
        let end = if lengths.iter().product::<u64>() * self.itemsize == span_bytes {
            src + span_bytes
        } else {
            let at = |d: usize| self.start[d] + self.next[d];
            let inner = (self.cell_dim + 1..ndim).map(|d| at(d) * self.strides[d]).sum::<u64>();
            let left = self.cell - at(self.cell_dim) % self.cell;
            (src - inner).saturating_add(left * self.strides[self.cell_dim])
        };
        let dst_offsets = (0..ndim).map(|d| self.dst_offsets[d] + self.next[d]).collect();
        let piece = Piece { want: self.want, src, lengths, src_strides: self.strides.clone(), dst_offsets, span_bytes };
        (piece, end)
    }

    /// Advances past the next piece, and returns the offset in the file of the one after; `None` if there is none.
    fn advance(&mut self) -> Option<u64> {
        for d in (0..self.lengths.len()).rev() {
            self.next[d] += self.extent(d);
            if self.next[d] < self.lengths[d] {
                return Some(self.src + dot(&self.next, &self.strides));
            }
            self.next[d] = 0;
        }
        None
    }
}

/// Returns the distance of an index from the first element, in bytes.
fn dot(index: &[u64], strides: &[u64]) -> u64 {
    index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
}

impl Reads {
    /// Returns the spans of wanted bytes: for each saved region that is wanted in part, its file and the bytes there
    /// from the first wanted one to the last.
    pub fn spans(&self) -> impl Iterator<Item = (u32, Range<u64>)> {
        self.boxes.iter().map(|part| {
            let steps = part.lengths.iter().zip(&part.strides).map(|(length, stride)| (length - 1) * stride);
            (part.file, part.src..part.src + steps.sum::<u64>() + part.itemsize)
        })
    }
}

impl Iterator for Reads {
    type Item = Read;

    fn next(&mut self) -> Option<Read> {
        let mut read: Option<Read> = None;
        while let Some(mut first) = self.queue.peek_mut() {
            let Reverse((file, src, index)) = *first;
            let (piece, claimed) = self.boxes[index].piece();
            match &mut read {
                None => read = Some(Read { file, offset: src, bytes: piece.span_bytes, pieces: vec![piece] }),
                Some(read) => {
                    let end = read.offset + read.bytes;
                    let far = read.file != file || src.saturating_sub(end) > self.limits.gap_max_bytes;
                    if far || claimed - read.offset > self.limits.read_max_bytes {
                        break;
                    }
                    read.bytes = end.max(src + piece.span_bytes) - read.offset;
                    read.pieces.push(piece);
                }
            }
            match self.boxes[index].advance() {
                Some(src) => first.0.1 = src,
                None => {
                    PeekMut::pop(first);
                }
            }
        }
        read
    }
}
