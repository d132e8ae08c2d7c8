//! Finds the leaf at an offset of a file: the manifest, sorted by file and offset.

use std::ops::Range;

use shardfast_format::{DType, Dims, Extent, HeaderEntry, LeafKind, Manifest, Region, part_name, value_name};
use smallvec::smallvec;

/// One region or value as it lies in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) file: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Index of the leaf in the manifest.
    pub(super) leaf: u32,
    /// Index of the region, or of the value, of that leaf.
    pub(super) row: u32,
}

/// All spans, by file and offset.
pub(super) struct Spans {
    sorted: Vec<Span>,
    /// End of each file's spans.
    ends: Vec<usize>,
}

impl Spans {
    pub(super) fn new(manifest: &Manifest) -> Spans {
        let mut sorted = Vec::new();
        for leaf in 0..manifest.len() {
            let regions = manifest.regions(leaf).map(|(_, extent)| extent);
            let values = manifest.values(leaf).map(|(_, extent)| extent);
            // A leaf has only ever one of the two.
            for (row, Extent { file, offset, bytes }) in regions.chain(values).enumerate() {
                let (leaf, row) = (leaf as u32, row as u32);
                sorted.push(Span { file, start: offset, end: offset + bytes, leaf, row });
            }
        }
        sorted.sort_unstable_by_key(|span| (span.file, span.start, span.end));
        let ends = (0..manifest.files().len()).map(|file| sorted.partition_point(|span| span.file as usize <= file));
        let ends = ends.collect();
        Spans { sorted, ends }
    }

    /// Returns the spans of a file.
    pub(super) fn of(&self, file: u32) -> &[Span] {
        let file = file as usize;
        let start = if file == 0 { 0 } else { self.ends[file - 1] };
        &self.sorted[start..self.ends[file]]
    }

    /// Returns the spans that have bytes in the range, each with its bytes there.
    pub(super) fn hit(&self, file: u32, range: &Range<u64>) -> impl Iterator<Item = (&Span, Option<Range<u64>>)> {
        let range = range.clone();
        let first = self.of(file).partition_point(|span| span.end <= range.start);
        let spans = self.of(file)[first..].iter().take_while(move |span| span.start < range.end);
        let range = range.start..range.end;
        spans.filter(|span| span.start < span.end).map(move |span| {
            let (from, to) = (range.start.max(span.start), range.end.min(span.end));
            (span, Some(from - span.start..to - span.start))
        })
    }
}

impl Span {
    pub(super) fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Returns the entry that the span's file must have for it.
    pub(super) fn entry(&self, manifest: &Manifest) -> HeaderEntry {
        let leaf = manifest.leaf(self.leaf as usize);
        let (name, dtype, shape): (String, DType, Dims) = match leaf.kind {
            LeafKind::Tensor { dtype, shape } => {
                let region = self.region(manifest);
                (part_name(leaf.name, &region, shape), dtype, region.lengths)
            }
            LeafKind::Object | LeafKind::Alias { .. } => {
                let name = match self.ranks(manifest).first() {
                    Some(first) if first.start > 0 => value_name(leaf.name, first.start),
                    _ => leaf.name.to_owned(),
                };
                (name, DType::U8, smallvec![self.bytes()])
            }
        };
        HeaderEntry { name, dtype, shape, offset: self.start, bytes: self.bytes() }
    }

    /// Returns the region that the span holds; only for a tensor.
    pub(super) fn region(&self, manifest: &Manifest) -> Region {
        let mut regions = manifest.regions(self.leaf as usize).skip(self.row as usize);
        regions.next().map_or_else(|| Region::whole(&[]), |(region, _)| region)
    }

    /// Returns the ranks that saved the span; only for a value.
    pub(super) fn ranks(&self, manifest: &Manifest) -> Vec<Range<u32>> {
        let mut values = manifest.values(self.leaf as usize).skip(self.row as usize);
        values.next().map_or_else(Vec::new, |(ranks, _)| ranks)
    }

    /// Returns the elements, in the global tensor, that have one of these bytes of the span; all elements if `bytes` is
    /// `None`.
    pub(super) fn regions(&self, manifest: &Manifest, bytes: Option<Range<u64>>) -> Vec<Region> {
        let LeafKind::Tensor { dtype, .. } = manifest.leaf(self.leaf as usize).kind else { return Vec::new() };
        let saved = self.region(manifest);
        let Some(bytes) = bytes else { return vec![saved] };
        let item = dtype.size_bytes();
        let mut boxes: Vec<Region> =
            Region::flat_run(&saved.lengths, bytes.start / item, bytes.end.div_ceil(item)).collect();
        for part in &mut boxes {
            part.offsets.iter_mut().zip(&saved.offsets).for_each(|(offset, origin)| *offset += origin);
        }
        boxes
    }
}
