//! Values: equal ones once, different ones once each.

use shardfast_format::{Catalog, Leaf, LeafBody, LeafName};
use shardfast_plan::{ObjectWrite, SavePlan, objects, save};

/// `extra/0` … `extra/n-1` on each rank, those that it holds; odd ones are declared per rank.
fn plan(held: &[&[u32]]) -> SavePlan {
    let leaf = |i: &u32| Leaf {
        name: LeafName::new("extra", i.to_string()),
        body: LeafBody::Object { per_rank: i % 2 == 1 },
        layout: String::new(),
    };
    let catalogs: Vec<Catalog> = held.iter().map(|held| Catalog { leaves: held.iter().map(leaf).collect() }).collect();
    save(&catalogs).unwrap()
}

fn digest(value: u8) -> [u8; 32] {
    [value; 32]
}

#[test]
fn equal_content_is_written_once_by_the_lowest_rank() {
    let plan = plan(&[&[0, 1], &[0, 1], &[0, 1], &[0, 1]]);
    let given: Vec<_> = [(5, 9), (5, 8), (4, 9), (5, 9)].map(|(a, b)| vec![(1, digest(b)), (0, digest(a))]).into();
    let write = |leaf, writer, ranks: &[std::ops::Range<u32>]| ObjectWrite { leaf, writer, ranks: ranks.to_vec() };
    assert_eq!(
        objects(&plan, &given).unwrap(),
        [write(0, 0, &[0..2, 3..4]), write(0, 2, &[2..3]), write(1, 0, &[0..1, 2..4]), write(1, 1, &[1..2])]
    );
}

#[test]
fn a_value_that_some_ranks_lack_is_stored_for_the_others() {
    let plan = plan(&[&[], &[0], &[0]]);
    let given = [vec![], vec![(0, digest(1))], vec![(0, digest(1))]];
    assert_eq!(objects(&plan, &given).unwrap(), [ObjectWrite { leaf: 0, writer: 1, ranks: vec![1..3] }]);
}

#[test]
fn every_value_needs_its_digest_and_every_digest_its_value() {
    let plan = plan(&[&[0, 1], &[0]]);
    let given = [vec![(0, digest(1)), (0, digest(1))], vec![(0, digest(1)), (1, digest(1)), (7, digest(2))]];
    let error = objects(&plan, &given).unwrap_err();
    assert_eq!(
        error.problems(),
        [
            "extra/1: rank 0 holds this value and gave no digest of it",
            "extra/0: rank 0 gave two digests of one value",
            "extra/1: rank 1 gave a digest of what it holds no value of",
            "leaf 7 of 2: rank 1 gave a digest of what it holds no value of",
        ]
    );
    let error = objects(&plan, &given[..1]).unwrap_err();
    assert!(error.problems().contains(&"digests of 1 ranks for a plan of 2".to_owned()), "{error}");
}
