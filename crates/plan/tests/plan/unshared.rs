//! Tests leaves whose copies may differ: the lowest rank that holds a region writes it.

use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};
use shardfast_plan::{RankSet, Replicas, Write, amend_unshared, local, local_unshared, prove, save_unshared};

/// Makes two large tensors, `same` and `theirs`, which these ranks hold by halves or whole.
fn catalog(parts: &[Region]) -> Catalog {
    let leaf = |name: &str| {
        let body = LeafBody::Tensor { dtype: DType::F32, shape: [1000, 600][..].into(), parts: parts.to_vec() };
        Leaf { name: LeafName::new("model", name), body, layout: String::new() }
    };
    Catalog { leaves: vec![leaf("same"), leaf("theirs")] }
}

fn whole() -> Vec<Region> {
    vec![Region::whole(&[1000, 600])]
}

/// Returns for each rank the regions of a leaf that it writes.
fn of(plan: &[Vec<Write>], leaf: u32) -> Vec<Vec<Write>> {
    plan.iter().map(|writes| writes.iter().copied().filter(|write| write.leaf == leaf).collect()).collect()
}

#[test]
fn a_region_is_not_cut_and_is_the_lowest_holders() {
    // One rank's word is enough.
    let plan = save_unshared(&[catalog(&whole()), catalog(&whole()), catalog(&whole())], &[vec![], vec![], vec![1]]);
    let plan = plan.unwrap();
    assert_eq!(of(&plan, 1), [vec![Write::whole(1, 0)], vec![], vec![]]);
    // The others make up for that. To cut the other one would not make the heaviest rank lighter.
    assert_eq!(of(&plan, 0), [vec![], vec![Write::whole(0, 0)], vec![]]);

    let half = |first| catalog(&[Region::new(&[first, 0], &[500, 600])]);
    let halves = [half(500), half(0), half(0), half(500)];
    let plan = save_unshared(&halves, &[vec![1], vec![1], vec![1], vec![1]]).unwrap();
    assert_eq!(of(&plan, 1), [vec![Write::whole(1, 0)], vec![Write::whole(1, 0)], vec![], vec![]]);
}

#[test]
fn ranks_that_plan_alone_plan_the_same_and_claim_it() {
    let replicas = Replicas { groups: vec![RankSet::new([0, 1, 2])], leaves: vec![Some(0), Some(0)] };
    let of_rank = |unshared: &[u32]| {
        let plan = |rank| local_unshared(&catalog(&whole()), unshared, &replicas, rank, 3).unwrap().unwrap();
        (0..3).map(plan).collect::<Vec<_>>()
    };
    let plans = of_rank(&[1]);
    let writes: Vec<Vec<Write>> = plans.iter().map(|plan| plan.writes.clone()).collect();
    assert_eq!(writes, save_unshared(&vec![catalog(&whole()); 3], &[vec![1], vec![], vec![]]).unwrap());
    prove(&plans.iter().map(|plan| plan.claims.clone()).collect::<Vec<_>>()).unwrap();
    let other = local(&catalog(&whole()), &replicas, 2, 3).unwrap().unwrap();
    assert!(prove(&[plans[0].claims.clone(), plans[1].claims.clone(), other.claims]).is_err());
    assert_ne!(of_rank(&[0])[0].claims, of_rank(&[1])[0].claims);
}

#[test]
fn what_nobody_has_begun_is_the_lowest_free_ranks() {
    let catalogs = vec![catalog(&whole()); 3];
    let drafted = [Some(vec![Write::whole(0, 0)]), None, None];
    let unshared = [vec![1], vec![1], vec![1]];
    let mut catalogs_without = catalogs.clone();
    catalogs_without[0].leaves.pop();
    let plan = amend_unshared(&catalogs_without, &unshared, &drafted).unwrap();
    assert_eq!(of(&plan, 1), [vec![], vec![Write::whole(1, 0)], vec![]]);
    // What one has begun stands, though it is not the lowest.
    let drafted = [None, None, Some(vec![Write::whole(0, 0), Write::whole(1, 0)])];
    let plan = amend_unshared(&catalogs, &unshared, &drafted).unwrap();
    assert_eq!(of(&plan, 1), [vec![], vec![], vec![Write::whole(1, 0)]]);
}
