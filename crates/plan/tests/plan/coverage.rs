//! Tests that the linear proof of coverage agrees with counting, and that it names a real flaw.

use proptest::collection::vec;
use proptest::prelude::*;
use shardfast_format::Region;
use shardfast_plan::{Flaw, tiles};

use crate::spread::{boxes, shape};

/// Damage to one region: moved or stretched in a dimension, doubled or dropped.
#[derive(Debug, Clone)]
enum Mishap {
    Move(usize, usize, u64),
    Stretch(usize, usize, u64),
    Double(usize),
    Drop(usize),
}

fn mishap() -> impl Strategy<Value = Mishap> {
    let (which, d, n) = (0..16usize, 0..4usize, 0..8u64);
    prop_oneof![
        (which.clone(), d.clone(), n.clone()).prop_map(|(which, d, n)| Mishap::Move(which, d, n)),
        (which.clone(), d, n).prop_map(|(which, d, n)| Mishap::Stretch(which, d, n)),
        which.clone().prop_map(Mishap::Double),
        which.prop_map(Mishap::Drop),
    ]
}

impl Mishap {
    fn befall(&self, shape: &[u64], regions: &mut Vec<Region>) {
        let (Mishap::Move(which, ..) | Mishap::Stretch(which, ..) | Mishap::Double(which) | Mishap::Drop(which)) = self;
        let Some(which) = which.checked_rem(regions.len()) else { return };
        match *self {
            Mishap::Move(_, d, to) if d < shape.len() => {
                regions[which].offsets[d] = to.min(shape[d] - regions[which].lengths[d]);
            }
            Mishap::Stretch(_, d, to) if d < shape.len() => {
                regions[which].lengths[d] = to.min(shape[d] - regions[which].offsets[d]);
            }
            Mishap::Double(_) => regions.push(regions[which].clone()),
            Mishap::Drop(_) => drop(regions.remove(which)),
            Mishap::Move(..) | Mishap::Stretch(..) => {}
        }
    }
}

fn holds(region: &Region, shape: &[u64], mut flat: u64) -> bool {
    (0..shape.len()).rev().all(|d| {
        let index = flat % shape[d];
        flat /= shape[d];
        (region.offsets[d]..region.offsets[d] + region.lengths[d]).contains(&index)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tiling_is_what_counting_says(
        shape in shape(),
        cuts in vec((0..4usize, any::<u16>(), 0..16usize), 0..10),
        mishaps in vec(mishap(), 0..4),
    ) {
        let mut regions = boxes(&shape, &cuts);
        mishaps.iter().for_each(|mishap| mishap.befall(&shape, &mut regions));
        let numel = shape.iter().product::<u64>();
        let count = |flat: u64| regions.iter().filter(|region| holds(region, &shape, flat)).count();
        match tiles(&shape, &regions).map_err(|flaw| *flaw) {
            Ok(()) => prop_assert!((0..numel).all(|flat| count(flat) == 1), "{shape:?} {regions:?}"),
            Err(Flaw::Overlap(a, b)) => {
                prop_assert!(a.intersect(&b).is_some(), "{a} {b}");
                let named = regions.iter().filter(|region| **region == a || **region == b).count();
                prop_assert!(named >= 2, "{a} {b} {regions:?}");
            }
            Err(Flaw::Missing(hole)) => {
                prop_assert!(!hole.is_empty() && hole.fits(&shape), "{hole}");
                prop_assert!(regions.iter().all(|region| region.intersect(&hole).is_none()), "{hole} {regions:?}");
            }
            Err(flaw) => prop_assert!(false, "{flaw}"),
        }
    }
}
