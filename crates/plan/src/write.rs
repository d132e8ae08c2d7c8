//! Describes the parts of its state that one rank writes.

use serde::{Deserialize, Serialize};
use shardfast_format::Region;

/// A part in one rank's catalog, or some of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Write {
    /// Index of the leaf in that rank's catalog.
    pub leaf: u32,
    /// Index of the part in that leaf.
    pub part: u32,
    /// Rows of the part; `None` for the whole part.
    pub rows: Option<Rows>,
}

/// A run of rows of a region: indices of its first dimension that is longer than one. Rows are adjacent in row-major
/// order, so a run of them is a region again, and contiguous in the part's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rows {
    /// First row, counted from the region's own.
    pub first: u64,
    /// Number of rows.
    pub count: u64,
}

impl Write {
    /// Makes the write of a whole part.
    pub fn whole(leaf: u32, part: u32) -> Write {
        Write { leaf, part, rows: None }
    }

    /// Returns the region written, of the part `part`; `None` when the part has no such rows.
    pub fn region(&self, part: &Region) -> Option<Region> {
        let Some(rows) = self.rows else { return Some(part.clone()) };
        let dim = row_dim(part)?;
        if rows.first.checked_add(rows.count)? > part.lengths[dim] {
            return None;
        }
        let mut region = part.clone();
        region.offsets[dim] += rows.first;
        region.lengths[dim] = rows.count;
        Some(region)
    }

    /// Returns the number of elements of the part `part` before the written ones, in row-major order.
    pub fn skipped(&self, part: &Region) -> u64 {
        match (self.rows, row_dim(part)) {
            (Some(rows), Some(dim)) => rows.first * part.lengths[dim + 1..].iter().product::<u64>(),
            _ => 0,
        }
    }
}

/// Cuts a region into regions of at most `elements_max` elements (at least one), each a run of its elements in
/// row-major order. Returns each with the index of its first element, counted from the region's own. Cuts along further
/// dimensions only within a row that is too long by itself.
pub fn pieces(region: &Region, elements_max: u64) -> Vec<(Region, u64)> {
    let mut out = Vec::new();
    cut(region.clone(), 0, elements_max.max(1), &mut out);
    out
}

fn cut(region: Region, first: u64, elements_max: u64, out: &mut Vec<(Region, u64)>) {
    let numel = region.numel();
    let Some(dim) = row_dim(&region).filter(|_| numel > elements_max) else {
        return out.push((region, first));
    };
    let rows = region.lengths[dim];
    let row_numel = numel / rows;
    let count = (elements_max / row_numel).max(1);
    let mut row = 0;
    while row < rows {
        let mut piece = region.clone();
        piece.offsets[dim] += row;
        piece.lengths[dim] = count.min(rows - row);
        cut(piece, first + row * row_numel, elements_max, out);
        row += count;
    }
}

/// Returns the dimension whose indices are a region's rows; `None` for a region of one element.
pub(crate) fn row_dim(region: &Region) -> Option<usize> {
    region.lengths.iter().position(|&length| length > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_a_region_and_a_run_of_the_part() {
        let part = Region::new(&[7, 4, 0], &[1, 6, 5]);
        let rows = |first, count| Write { leaf: 0, part: 0, rows: Some(Rows { first, count }) };
        assert_eq!(rows(2, 3).region(&part), Some(Region::new(&[7, 6, 0], &[1, 3, 5])));
        assert_eq!((rows(2, 3).skipped(&part), rows(0, 6).skipped(&part)), (10, 0));
        assert_eq!((rows(4, 3).region(&part), rows(u64::MAX, 2).region(&part)), (None, None));
        assert_eq!((Write::whole(0, 0).region(&part), Write::whole(0, 0).skipped(&part)), (Some(part), 0));
        assert_eq!(rows(0, 1).region(&Region::new(&[3], &[1])), None);
    }

    /// Returns the row-major index of an element of the region.
    fn index(region: &Region, coordinate: impl Fn(usize) -> u64) -> u64 {
        (0..region.ndim()).fold(0, |index, d| index * region.lengths[d] + coordinate(d) - region.offsets[d])
    }

    #[test]
    fn pieces_are_runs_of_the_region_and_all_of_it() {
        let regions =
            [Region::new(&[7, 4, 0], &[1, 6, 5]), Region::new(&[2], &[9]), Region::whole(&[]), Region::whole(&[0, 3])];
        for region in regions {
            for elements_max in [0, 1, 2, 4, 5, 6, 9, 10, 29, 30, u64::MAX] {
                let mut end = 0;
                for (piece, first) in pieces(&region, elements_max) {
                    assert_eq!(first, end);
                    assert!(piece.numel() <= elements_max.max(1), "{piece} of {region}, at most {elements_max}");
                    let last = |d: usize| piece.offsets[d] + piece.lengths[d] - 1;
                    if !piece.is_empty() {
                        // Its elements are a run: as many as lie between its corners.
                        assert_eq!(index(&region, |d| piece.offsets[d]), first);
                        assert_eq!(index(&region, last), first + piece.numel() - 1, "{piece} of {region}");
                    }
                    end += piece.numel();
                }
                assert_eq!(end, region.numel());
            }
        }
        let long = pieces(&Region::whole(&[2, 7, 3]), 6);
        let bounds: Vec<(u64, u64, u64)> =
            long.iter().map(|(p, _)| (p.offsets[0], p.offsets[1], p.lengths[1])).collect();
        assert_eq!(bounds, [(0, 0, 2), (0, 2, 2), (0, 4, 2), (0, 6, 1), (1, 0, 2), (1, 2, 2), (1, 4, 2), (1, 6, 1)]);
    }
}
