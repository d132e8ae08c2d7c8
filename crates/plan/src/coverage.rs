//! Decides whether regions cover a tensor exactly once, in time linear in their number.
//!
//! Take the corners of a box, each with the sign of ∏_d (δ(start_d) − δ(end_d)). Summing the signs of all corners at or
//! before a point, in every dimension, gives how many boxes hold that point. So boxes tile the tensor exactly when all
//! their corners together cancel to the corners of the whole. A comparison of volumes would miss a hole and an overlap
//! of equal size. Corners at the end of the tensor count no point inside and are left out, and so are dimensions that
//! no box cuts.
//!
//! If a corner is left over, the first one in row-major order is the first point of a flaw: every other corner at or
//! before it would come earlier in that order, so the count there is its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use shardfast_format::{Dims, Region};
use smallvec::SmallVec;

/// Number of corners that any tensor may have. Beyond it, the limit is [`CORNERS_PER_REGION`] each.
const CORNERS_FREE: u64 = 1 << 22;

/// Mean number of corners per region that keeps time and memory linear in the regions. Sharding cuts two or three
/// dimensions (4 to 8 corners); a flat run of a six-dimensional tensor has fewer than 32.
const CORNERS_PER_REGION: u64 = 64;

/// Reason why regions do not tile a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    /// A region that does not lie inside the shape.
    Outside(Region),
    /// Two regions that share elements. They may be equal.
    Overlap(Region, Region),
    /// A region of which no given region holds any element.
    Missing(Region),
    /// Regions that cut so many dimensions that they cannot be checked in bounded memory.
    Intricate {
        /// Number of corners of the regions inside the tensor.
        corners: u64,
        /// Number of corners up to which this many regions are checked.
        corners_max: u64,
    },
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Outside(region) => write!(f, "{region} lies outside the shape"),
            Flaw::Overlap(a, b) => write!(f, "{a} overlaps {b}"),
            Flaw::Missing(region) => write!(f, "{region} is missing"),
            Flaw::Intricate { corners, corners_max } => {
                write!(
                    f,
                    "the parts have {corners} corners, and at most {corners_max} can be checked for so many parts"
                )
            }
        }
    }
}

/// Checks that `regions` hold each element of a tensor of `shape` exactly once. Regions without elements are ignored,
/// so a zero-size tensor needs none.
///
/// # Errors
/// One [`Flaw`], which depends only on the set of regions, except for the order of the two regions of an overlap.
pub fn tiles(shape: &[u64], regions: &[Region]) -> Result<(), Box<Flaw>> {
    tile(shape, regions.iter())
}

/// Checks like [`tiles`], for regions in any collection.
pub(crate) fn tile<'a>(
    shape: &[u64],
    mut regions: impl ExactSizeIterator<Item = &'a Region> + Clone,
) -> Result<(), Box<Flaw>> {
    let count = regions.len() as u64;
    let all = regions.clone();
    if let Some(region) = regions.find(|region| !region.fits(shape)) {
        return Err(Box::new(Flaw::Outside(region.clone())));
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let solid = || all.clone().filter(|region| !region.is_empty());
    let cut: SmallVec<[usize; 4]> =
        (0..shape.len()).filter(|&d| solid().any(|region| region.lengths[d] != shape[d])).collect();
    let corners = corners(shape, &cut, solid());
    let corners_max = CORNERS_FREE.saturating_add(CORNERS_PER_REGION.saturating_mul(count));
    if corners > corners_max {
        return Err(Box::new(Flaw::Intricate { corners, corners_max }));
    }

    let origin: Dims = SmallVec::from_elem(0, cut.len());
    let mut surplus: HashMap<Dims, i64> = HashMap::from([(origin, -1)]);
    for region in solid() {
        let ends: SmallVec<[usize; 4]> = inner_ends(shape, &cut, region).collect();
        let start: Dims = cut.iter().map(|&d| region.offsets[d]).collect();
        for chosen in 0..1u64 << ends.len() {
            let mut corner = start.clone();
            for (bit, &i) in ends.iter().enumerate() {
                if chosen >> bit & 1 == 1 {
                    corner[i] += region.lengths[cut[i]];
                }
            }
            let sign = if chosen.count_ones() % 2 == 0 { 1 } else { -1 };
            match surplus.entry(corner) {
                Entry::Occupied(mut entry) => {
                    *entry.get_mut() += sign;
                    if *entry.get() == 0 {
                        entry.remove();
                    }
                }
                Entry::Vacant(entry) => {
                    entry.insert(sign);
                }
            }
        }
    }
    let Some((corner, count)) = surplus.into_iter().min() else { return Ok(()) };

    let mut at: Dims = SmallVec::from_elem(0, shape.len());
    for (&d, &index) in cut.iter().zip(&corner) {
        at[d] = index;
    }
    let at = Region { offsets: at, lengths: SmallVec::from_elem(1, shape.len()) };
    if count < 0 {
        return Err(Box::new(Flaw::Missing(grown(shape, solid(), at))));
    }
    let mut holders = solid().filter(|region| region.intersect(&at).is_some());
    match (holders.next(), holders.next()) {
        (Some(a), Some(b)) => Err(Box::new(Flaw::Overlap(a.clone(), b.clone()))),
        _ => unreachable!("a positive count at {at} is that of at least two regions"),
    }
}

/// Returns the dimensions of `cut`, as indices into it, in which the region ends inside the tensor.
fn inner_ends(shape: &[u64], cut: &[usize], region: &Region) -> impl Iterator<Item = usize> {
    (0..cut.len()).filter(|&i| region.offsets[cut[i]] + region.lengths[cut[i]] < shape[cut[i]])
}

/// Returns the number of corners of the regions inside the tensor, over which [`tile`] iterates.
fn corners<'a>(shape: &[u64], cut: &[usize], solid: impl Iterator<Item = &'a Region>) -> u64 {
    solid.fold(0u64, |sum, region| {
        let corners = 1u64.checked_shl(inner_ends(shape, cut, region).count() as u32);
        sum.saturating_add(corners.unwrap_or(u64::MAX))
    })
}

/// Extends the one-element box `hole`, which no region holds, towards the end of the tensor until it meets a region.
fn grown<'a>(shape: &[u64], solid: impl Iterator<Item = &'a Region> + Clone, mut hole: Region) -> Region {
    for d in (0..shape.len()).rev() {
        let first = hole.offsets[d];
        hole.lengths[d] = shape[d] - first;
        let end = solid.clone().filter_map(|region| hole.intersect(region)).map(|met| met.offsets[d]).min();
        hole.lengths[d] = end.unwrap_or(shape[d]) - first;
    }
    hole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(offsets: &[u64], lengths: &[u64]) -> Region {
        Region::new(offsets, lengths)
    }

    fn flaw(shape: &[u64], regions: &[Region]) -> Option<Flaw> {
        tiles(shape, regions).err().map(|flaw| *flaw)
    }

    #[test]
    fn a_whole_and_its_halves_tile() {
        assert_eq!(flaw(&[4, 6], &[Region::whole(&[4, 6])]), None);
        assert_eq!(flaw(&[4, 6], &[r(&[0, 3], &[4, 3]), r(&[0, 0], &[4, 3])]), None);
        assert_eq!(flaw(&[], &[r(&[], &[])]), None);
        assert_eq!(flaw(&[7], &[r(&[0], &[3]), r(&[3], &[0]), r(&[3], &[4])]), None);
    }

    #[test]
    fn a_pinwheel_tiles_though_no_line_goes_through() {
        let pinwheel =
            [r(&[0, 0], &[1, 2]), r(&[0, 2], &[2, 1]), r(&[2, 1], &[1, 2]), r(&[1, 0], &[2, 1]), r(&[1, 1], &[1, 1])];
        assert_eq!(flaw(&[3, 3], &pinwheel), None);
        assert_eq!(flaw(&[3, 3], &pinwheel[..4]), Some(Flaw::Missing(r(&[1, 1], &[1, 1]))));
    }

    #[test]
    fn zero_size_tensors_need_nothing_and_scalars_one_part() {
        assert_eq!(flaw(&[0, 5], &[]), None);
        assert_eq!(flaw(&[0, 5], &[r(&[0, 0], &[0, 5])]), None);
        assert_eq!(flaw(&[], &[]), Some(Flaw::Missing(r(&[], &[]))));
        assert_eq!(flaw(&[], &[r(&[], &[]), r(&[], &[])]), Some(Flaw::Overlap(r(&[], &[]), r(&[], &[]))));
        assert_eq!(flaw(&[2, 2], &[]), Some(Flaw::Missing(r(&[0, 0], &[2, 2]))));
    }

    #[test]
    fn a_hole_and_an_overlap_of_equal_size_do_not_hide_each_other() {
        let found = flaw(&[6], &[r(&[0], &[3]), r(&[2], &[3])]);
        assert_eq!(found, Some(Flaw::Overlap(r(&[0], &[3]), r(&[2], &[3]))));
        let found = flaw(&[6], &[r(&[1], &[3]), r(&[3], &[3])]);
        assert_eq!(found, Some(Flaw::Missing(r(&[0], &[1]))));
    }

    #[test]
    fn what_is_not_in_the_shape_is_outside_it() {
        for bad in [r(&[3], &[2]), r(&[u64::MAX], &[2]), r(&[0, 0], &[1, 1]), r(&[5], &[0])] {
            assert_eq!(flaw(&[4], &[r(&[0], &[4]), bad.clone()]), Some(Flaw::Outside(bad)));
        }
    }

    #[test]
    fn extents_near_the_end_of_u64_are_no_problem() {
        let half = u64::MAX / 2;
        let parts = [r(&[0, 0], &[half, u64::MAX]), r(&[half, 0], &[u64::MAX - half, u64::MAX])];
        assert_eq!(flaw(&[u64::MAX, u64::MAX], &parts), None);
        assert_eq!(flaw(&[u64::MAX, u64::MAX], &parts[..1]), Some(Flaw::Missing(parts[1].clone())));
    }

    #[test]
    fn many_dimensions_tile_unless_their_corners_outgrow_the_regions() {
        let shape = [2u64; 12];
        assert_eq!(flaw(&shape, &Region::flat_run(&shape, 0, 1 << 12).collect::<Vec<_>>()), None);
        let runs: Vec<Region> =
            [0, 1000, 2222, 4096].windows(2).flat_map(|w| Region::flat_run(&shape, w[0], w[1])).collect();
        assert_eq!(flaw(&shape, &runs), None);
        let deep = r(&[0; 40], &[1; 40]);
        assert!(matches!(flaw(&[2; 40], &[deep]), Some(Flaw::Intricate { .. })));
        let deeper = r(&[0; 64], &[1; 64]);
        assert!(matches!(flaw(&[2; 64], &[deeper]), Some(Flaw::Intricate { .. })));
    }

    /// Tests a sweep along one dimension, which would compare every pair of shards of another one.
    #[test]
    fn shards_of_any_dimension_are_checked_in_linear_steps() {
        for (along, each) in [
            ([true, false, false], 2),
            ([false, true, false], 2),
            ([false, false, true], 2),
            ([true, true, false], 4),
            ([true, true, true], 8),
        ] {
            let pieces = |d: usize| if along[d] { 16 } else { 1 };
            let mut shards = vec![Region::whole(&[])];
            for d in 0..3 {
                let length = 1024 / pieces(d);
                let cut = |shard: &Region| {
                    let shard = shard.clone();
                    (0..pieces(d)).map(move |i| {
                        let mut shard = shard.clone();
                        shard.offsets.push(i * length);
                        shard.lengths.push(length);
                        shard
                    })
                };
                shards = shards.iter().flat_map(cut).collect();
            }
            let cut: Vec<usize> = (0..3).filter(|&d| along[d]).collect();
            assert_eq!(flaw(&[1024; 3], &shards), None);
            assert!(corners(&[1024; 3], &cut, shards.iter()) <= each * shards.len() as u64);
        }
    }

    /// Tests 22,500 regions: a pairwise check would make 250 million comparisons.
    #[test]
    fn a_large_grid_is_checked_in_linear_time() {
        let n = 150;
        let mut cells: Vec<Region> = (0..n * n).map(|i| r(&[i / n * 3, i % n * 5, 0], &[3, 5, 7])).collect();
        assert_eq!(flaw(&[n * 3, n * 5, 7], &cells), None);
        let lost = cells.swap_remove(12_345);
        assert_eq!(flaw(&[n * 3, n * 5, 7], &cells), Some(Flaw::Missing(lost.clone())));
        cells.push(lost.clone());
        cells.push(lost.clone());
        assert_eq!(flaw(&[n * 3, n * 5, 7], &cells), Some(Flaw::Overlap(lost.clone(), lost)));
    }
}
