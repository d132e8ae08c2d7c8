//! Defines boxes in a tensor's global shape, and decomposes flat runs into them.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// One number per dimension, in elements.
pub type Dims = SmallVec<[u64; 4]>;

/// An n-d box in a tensor's global shape. A zero-dimensional tensor has the one region with no dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Region {
    /// First index per dimension, in elements of the global tensor.
    pub offsets: Dims,
    /// Extent per dimension, in elements.
    pub lengths: Dims,
}

impl Region {
    /// Makes the region at `offsets` of extent `lengths`; both have one entry per dimension.
    pub fn new(offsets: &[u64], lengths: &[u64]) -> Region {
        debug_assert_eq!(offsets.len(), lengths.len());
        Region { offsets: Dims::from_slice(offsets), lengths: Dims::from_slice(lengths) }
    }

    /// Makes the region that is all of a tensor of `shape`.
    pub fn whole(shape: &[u64]) -> Region {
        Region { offsets: SmallVec::from_elem(0, shape.len()), lengths: Dims::from_slice(shape) }
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.lengths.len()
    }

    /// Returns the number of elements (1 for a zero-dimensional region), or `None` beyond `u64`.
    pub fn checked_numel(&self) -> Option<u64> {
        checked_numel(&self.lengths)
    }

    /// Returns the number of elements of a region known to be in bounds of a validated shape.
    pub fn numel(&self) -> u64 {
        // An empty region may be longer than `u64` in its other dimensions.
        if self.is_empty() { 0 } else { self.lengths.iter().product() }
    }

    /// Returns whether the region holds no element.
    pub fn is_empty(&self) -> bool {
        self.lengths.contains(&0)
    }

    /// Returns whether the region is all of a tensor of `shape`.
    pub fn is_whole(&self, shape: &[u64]) -> bool {
        self.lengths.as_slice() == shape && self.offsets.iter().all(|&o| o == 0)
    }

    /// Returns whether the region has the shape's number of dimensions and lies inside it.
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.lengths.len() == shape.len()
            && (0..shape.len()).all(|d| self.offsets[d].checked_add(self.lengths[d]).is_some_and(|end| end <= shape[d]))
    }

    /// Returns the common part of two regions of one tensor; `None` when it is empty.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        let mut offsets = Dims::new();
        let mut lengths = Dims::new();
        for d in 0..self.ndim() {
            let start = self.offsets[d].max(other.offsets[d]);
            let end = (self.offsets[d] + self.lengths[d]).min(other.offsets[d] + other.lengths[d]);
            if start >= end {
                return None;
            }
            offsets.push(start);
            lengths.push(end - start);
        }
        Some(Region { offsets, lengths })
    }

    /// Decomposes the flat run `[start, stop)` of a row-major tensor of `shape` into at most `2 * ndim - 1` boxes, in
    /// the run's own order, so that the run's memory can be cut into them front to back. No data are touched; the
    /// iterator makes one box at a time, in constant memory.
    ///
    /// # Panics
    /// In debug builds when `stop` is beyond the tensor.
    pub fn flat_run(shape: &[u64], start: u64, stop: u64) -> FlatRun<'_> {
        debug_assert!(stop <= checked_numel(shape).unwrap_or(u64::MAX));
        FlatRun { shape, at: start, stop }
    }
}

/// Iterator over the boxes of a flat run, front to back: [`Region::flat_run`].
#[derive(Debug, Clone)]
pub struct FlatRun<'a> {
    shape: &'a [u64],
    /// Flat index of the next element.
    at: u64,
    stop: u64,
}

impl Iterator for FlatRun<'_> {
    type Item = Region;

    /// Returns the largest box that begins at the next element. The box takes whole indices of the outermost dimension
    /// of which the run still covers one, up to the end of that dimension.
    fn next(&mut self) -> Option<Region> {
        if self.at >= self.stop {
            return None;
        }
        let left = self.stop - self.at;
        let mut offsets: Dims = SmallVec::from_elem(0, self.shape.len());
        let mut lengths: Dims = SmallVec::from_elem(1, self.shape.len());
        // Elements under one index of dimension `d`; the box has `elements` of them.
        let (mut row, mut elements, mut outer) = (1, 1, self.at);
        for d in (0..self.shape.len()).rev() {
            let length = self.shape[d];
            (outer, offsets[d]) = (outer / length, outer % length);
            if self.at.is_multiple_of(row) && row <= left {
                lengths[d] = (length - offsets[d]).min(left / row);
                lengths[d + 1..].copy_from_slice(&self.shape[d + 1..]);
                elements = lengths[d] * row;
            }
            row *= length;
        }
        self.at += elements;
        Some(Region { offsets, lengths })
    }
}

/// Formats as `[2:5, 0:8]`; `[]` for a zero-dimensional region.
impl std::fmt::Display for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (d, (offset, length)) in self.offsets.iter().zip(&self.lengths).enumerate() {
            if d > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{offset}:{}", offset.saturating_add(*length))?;
        }
        f.write_str("]")
    }
}

/// Returns the number of elements of a shape, or `None` beyond `u64`.
pub fn checked_numel(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the flat indices of a region's elements, in row-major order.
    fn indices(region: &Region, shape: &[u64]) -> Vec<u64> {
        let mut all = vec![0];
        for (d, &length) in shape.iter().enumerate() {
            let within = region.offsets[d]..region.offsets[d] + region.lengths[d];
            all = all.into_iter().flat_map(|base| within.clone().map(move |i| base * length + i)).collect();
        }
        all
    }

    #[test]
    fn flat_runs_decompose_into_few_boxes_in_order() {
        for shape in [&[] as &[u64], &[7], &[1], &[3, 4], &[2, 3, 4], &[1, 5, 1, 2], &[0], &[3, 0, 2], &[2, 1, 2, 3]] {
            let numel: u64 = shape.iter().product();
            for start in 0..=numel {
                for stop in start..=numel {
                    let regions: Vec<Region> = Region::flat_run(shape, start, stop).collect();
                    assert!(regions.len() < (2 * shape.len()).max(2), "{shape:?} [{start}, {stop}): {regions:?}");
                    let found: Vec<u64> = regions.iter().flat_map(|region| indices(region, shape)).collect();
                    assert_eq!(found, (start..stop).collect::<Vec<_>>(), "{shape:?} [{start}, {stop})");
                    assert!(regions.iter().all(|region| region.fits(shape) && !region.is_empty()));
                }
            }
        }
    }

    #[test]
    fn intersections_hold_exactly_the_common_elements() {
        let shape = [4, 5];
        let spans = |n: u64| (0..=n).flat_map(move |a| (a..=n).map(move |b| (a, b - a)));
        let regions: Vec<Region> = spans(4)
            .flat_map(|rows| spans(5).map(move |cols| Region::new(&[rows.0, cols.0], &[rows.1, cols.1])))
            .step_by(7)
            .collect();
        for a in &regions {
            for b in &regions {
                let in_b = indices(b, &shape);
                let expected: Vec<u64> = indices(a, &shape).into_iter().filter(|i| in_b.contains(i)).collect();
                let found = a.intersect(b).map_or_else(Vec::new, |both| indices(&both, &shape));
                assert_eq!(found, expected, "{a} and {b}");
            }
        }
        let scalar = Region::whole(&[]);
        assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
    }

    #[test]
    fn bounds_hold_at_the_edge_of_u64() {
        assert!(Region::new(&[1, 2], &[3, 3]).fits(&[4, 5]));
        assert!(!Region::new(&[1, 3], &[3, 3]).fits(&[4, 5]));
        assert!(!Region::new(&[1], &[3]).fits(&[4, 5]));
        assert!(!Region::new(&[u64::MAX], &[2]).fits(&[u64::MAX]));
        assert!(Region::new(&[u64::MAX - 1], &[1]).fits(&[u64::MAX]));
        assert_eq!(checked_numel(&[1 << 32, 1 << 32]), None);
        assert_eq!(checked_numel(&[1 << 32, 1 << 32, 0]), Some(0));
        assert_eq!(checked_numel(&[]), Some(1));
        assert!(Region::whole(&[]).is_whole(&[]) && !Region::whole(&[]).is_empty());
        assert_eq!(Region::new(&[2, 0], &[3, 8]).to_string(), "[2:5, 0:8]");
    }
}
