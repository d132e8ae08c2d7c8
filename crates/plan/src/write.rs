//! What one rank writes of what it holds.

use serde::{Deserialize, Serialize};
use shardfast_format::Region;

/// A part in one rank's catalog, or some of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Write {
    /// Index of the leaf in that rank's catalog.
    pub leaf: u32,
    /// Index of the part in that leaf.
    pub part: u32,
    /// Which rows of the part; `None` for all of it.
    pub rows: Option<Rows>,
}

/// A run of rows of a region: indices of its first dimension that is longer than one. Rows lie one behind the other in
/// row-major order, so a run of them is a region again, and contiguous in the part's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rows {
    /// First row, from the region's own.
    pub first: u64,
    /// Number of rows.
    pub count: u64,
}

impl Write {
    /// All of a part.
    pub fn whole(leaf: u32, part: u32) -> Write {
        Write { leaf, part, rows: None }
    }

    /// The region that is written, of the part `part`; `None` when the part has no such rows.
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

    /// Elements of the part `part` in front of what is written, in row-major order.
    pub fn skipped(&self, part: &Region) -> u64 {
        match (self.rows, row_dim(part)) {
            (Some(rows), Some(dim)) => rows.first * part.lengths[dim + 1..].iter().product::<u64>(),
            _ => 0,
        }
    }
}

/// The dimension whose indices are a region's rows; `None` for a region of one element.
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
}
