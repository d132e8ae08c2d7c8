//! Tests plans that ranks make alone, and the proof that finds wrong assumptions.

use proptest::prelude::*;
use proptest::sample::Index;
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};
use shardfast_plan::{Claim, Error, Local, RankSet, Replicas, Rows, Write, local, prove, tiles};

use crate::spread::{Job, job, shape};

const LEAVES: usize = 6;

/// Returns the parts that each rank of `job` holds of tensors of these shapes.
fn catalogs(job: &Job, shapes: &[Vec<u64>]) -> Vec<Catalog> {
    let leaf = |i: usize, shape: &Vec<u64>, rank| {
        let body = LeafBody::Tensor {
            dtype: if i.is_multiple_of(2) { DType::F32 } else { DType::U8 },
            shape: shape.as_slice().into(),
            parts: job.parts(i, shape, rank),
        };
        Leaf { name: LeafName::new("model", format!("t{i}")), body, layout: String::new() }
    };
    let leaves = |rank| shapes.iter().enumerate().map(|(i, shape)| leaf(i, shape, rank)).collect();
    (0..job.world()).map(|rank| Catalog { leaves: leaves(rank) }).collect()
}

fn parts(leaf: &Leaf) -> &[Region] {
    match &leaf.body {
        LeafBody::Tensor { parts, .. } => parts,
        _ => &[],
    }
}

/// Returns what all ranks know of each other. Leaves of which ranks share some parts and not others are unknown.
fn replicas(catalogs: &[Catalog], rank: usize) -> Replicas {
    let mut replicas = Replicas::default();
    for (i, leaf) in catalogs[rank].leaves.iter().enumerate() {
        let held: Vec<&[Region]> = catalogs.iter().map(|catalog| parts(&catalog.leaves[i])).collect();
        let same = |other: &usize| held[*other] == parts(leaf);
        let apart = |other: usize| !held[other].iter().any(|part| parts(leaf).contains(part));
        let known = (0..held.len()).all(|other| same(&other) || apart(other)) && !parts(leaf).is_empty();
        let set = known.then(|| RankSet::new((0..held.len()).filter(same).map(|other| other as u32)));
        replicas.leaves.push(set.map(|set| match replicas.groups.iter().position(|group| *group == set) {
            Some(group) => group as u32,
            None => {
                replicas.groups.push(set);
                replicas.groups.len() as u32 - 1
            }
        }));
    }
    replicas
}

/// Returns the plans of all ranks; `None` unless all can make one.
fn plans(catalogs: &[Catalog]) -> Option<Vec<Local>> {
    let world = catalogs.len() as u32;
    let plan = |rank: u32| {
        let replicas = replicas(catalogs, rank as usize);
        local(&catalogs[rank as usize], &replicas, rank, world).unwrap()
    };
    (0..world).map(plan).collect()
}

fn claims(plans: &[Local]) -> Vec<Vec<Claim>> {
    plans.iter().map(|plan| plan.claims.clone()).collect()
}

/// Returns the written regions of each leaf.
fn written(catalogs: &[Catalog], plans: &[Local]) -> Vec<Vec<Region>> {
    let mut regions = vec![Vec::new(); catalogs[0].leaves.len()];
    for (catalog, plan) in catalogs.iter().zip(plans) {
        for write in &plan.writes {
            let part = &parts(&catalog.leaves[write.leaf as usize])[write.part as usize];
            regions[write.leaf as usize].push(write.region(part).unwrap());
        }
    }
    regions
}

fn all_tile(catalogs: &[Catalog], plans: &[Local]) -> bool {
    let covered = |(leaf, regions): (&Leaf, &Vec<Region>)| match &leaf.body {
        LeafBody::Tensor { shape, .. } => tiles(shape, regions).is_ok(),
        _ => false,
    };
    catalogs[0].leaves.iter().zip(&written(catalogs, plans)).all(covered)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Tests that ranks without messages write everything once, and that a rank that confuses its tensors is found.
    #[test]
    fn plans_of_all_ranks_fit_together(
        job in job(LEAVES),
        shapes in prop::collection::vec(shape(), LEAVES),
        liar in any::<Index>(),
        lie in any::<Index>(),
    ) {
        let mut catalogs = catalogs(&job, &shapes);
        let Some(plans) = plans(&catalogs) else { return Ok(()) };
        prop_assert!(all_tile(&catalogs, &plans));
        prove(&claims(&plans)).unwrap();

        let liar = liar.index(catalogs.len());
        let known = replicas(&catalogs, liar);
        let lie = lie.index(LEAVES);
        let Some(group) = known.leaves[lie] else { return Ok(()) };
        if let LeafBody::Tensor { dtype, .. } = &mut catalogs[liar].leaves[lie].body {
            *dtype = DType::I64;
        }
        let mut plans = plans;
        plans[liar] = local(&catalogs[liar], &known, liar as u32, catalogs.len() as u32).unwrap().unwrap();
        let shared = known.groups[group as usize].len() > 1;
        prop_assert_eq!(prove(&claims(&plans)).is_err(), shared);
    }

    /// Tests that a rank that knows too few holders is found, or found to write what is written already.
    #[test]
    fn who_forgets_a_holder_is_found(
        job in job(LEAVES),
        shapes in prop::collection::vec(shape(), LEAVES),
        liar in any::<Index>(),
        forgotten in any::<Index>(),
    ) {
        let catalogs = catalogs(&job, &shapes);
        let Some(mut plans) = plans(&catalogs) else { return Ok(()) };
        let liar = liar.index(catalogs.len());
        let mut known = replicas(&catalogs, liar);
        let Some(group) = known.groups.iter().position(|group| group.len() > 1) else { return Ok(()) };
        let others: Vec<u32> = known.groups[group].iter().filter(|&rank| rank as usize != liar).collect();
        let forgotten = others[forgotten.index(others.len())];
        known.groups[group] = RankSet::new(known.groups[group].iter().filter(|&rank| rank != forgotten));
        plans[liar] = local(&catalogs[liar], &known, liar as u32, catalogs.len() as u32).unwrap().unwrap();
        prop_assert!(prove(&claims(&plans)).is_err());
    }
}

fn tensor(name: &str, parts: &[Region]) -> Leaf {
    let body = LeafBody::Tensor { dtype: DType::U8, shape: [8].as_slice().into(), parts: parts.to_vec() };
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

/// Tests that a class is cut as a plan of all ranks cuts, and not as if its members were the whole job.
#[test]
fn a_large_tensor_is_cut_among_its_holders() {
    let shape = [300, 1024, 1024];
    let body =
        LeafBody::Tensor { dtype: DType::BF16, shape: shape.as_slice().into(), parts: vec![Region::whole(&shape)] };
    let leaf = Leaf { name: LeafName::new("model", "embedding"), body, layout: String::new() };
    let catalog = Catalog { leaves: vec![leaf] };
    let known = Replicas { groups: vec![RankSet::new([5, 1, 3])], leaves: vec![Some(0)] };
    let plan = |rank| local(&catalog, &known, rank, 6).unwrap().unwrap();
    let write = |first| Write { leaf: 0, part: 0, rows: Some(Rows { first, count: 100 }) };
    let plans = [plan(1), plan(3), plan(5)];
    assert_eq!(plans.each_ref().map(|plan| plan.writes.as_slice()), [[write(0)], [write(100)], [write(200)]]);
    assert!(all_tile(&vec![catalog.clone(); 3], &plans));
}

fn problems<T: std::fmt::Debug>(found: Result<T, Error>) -> Vec<String> {
    match found.unwrap_err() {
        Error::Invalid(problems) => problems.0,
        error => panic!("{error:?}"),
    }
}

#[test]
fn what_cannot_be_is_named() {
    let whole = [Region::whole(&[8])];
    let catalog = Catalog { leaves: vec![tensor("a", &whole), tensor("b", &[]), tensor("c", &whole)] };
    let groups = vec![RankSet::new([0, 1]), RankSet::new([0, 2]), RankSet::new([0])];
    let known = |leaves: &[Option<u32>]| Replicas { groups: groups.clone(), leaves: leaves.to_vec() };
    assert_eq!(
        problems(local(&catalog, &known(&[Some(0), None]), 0, 2)),
        ["rank 0: expected the holders of 3 leaves, found those of 2"]
    );
    assert_eq!(
        problems(local(&catalog, &known(&[Some(1), Some(7), Some(3)]), 0, 2)),
        [
            "model/a: expected holders in a world of 2, found ranks 0, 2",
            "model/c: found holder set 3, expected one below 3",
        ]
    );
    assert_eq!(
        problems(local(&catalog, &known(&[Some(2), None, Some(0)]), 1, 2)),
        ["model/a: expected rank 1 among the holders, found rank 0"]
    );
    assert_eq!(local(&catalog, &known(&[Some(0), None, None]), 0, 3), Ok(None));
    // Of `b` this rank holds nothing.
    let plan = local(&catalog, &known(&[Some(2), None, Some(2)]), 0, 2).unwrap().unwrap();
    assert_eq!((plan.writes, plan.claims), (vec![Write::whole(0, 0), Write::whole(2, 0)], vec![]));
}

#[test]
fn who_differs_is_named() {
    let claim = |ranks: &[u32], digest: u8| Claim { ranks: RankSet::new(ranks.iter().copied()), digest: [digest; 16] };
    let all = |digest| claim(&[0, 1, 2], digest);
    prove(&[vec![all(1)], vec![all(1), claim(&[1, 3], 5)], vec![all(1)], vec![claim(&[1, 3], 5)]]).unwrap();
    assert_eq!(
        problems(prove(&[vec![all(1)], vec![all(2)], vec![all(1)]])),
        ["ranks 0-2: they planned as holders of the same parts, and names, dtypes, shapes or parts differ between \
          ranks 0, 2 and rank 1"]
    );
    assert_eq!(
        problems(prove(&[vec![all(1)], vec![], vec![all(1), claim(&[2, 9], 1)]])),
        [
            "ranks 0, 2 planned with ranks 0-2 as the holders of the same parts, and rank 1 did not",
            "rank 2 planned with ranks 2, 9 as the holders of the same parts, in a world of 3",
        ]
    );
    assert_eq!(
        problems(prove(&[vec![all(1)], vec![all(1)], vec![all(1)], vec![all(1)]])),
        ["ranks 0-3 planned with ranks 0-2 as the holders of the same parts, and rank 3 is not of them"]
    );
    assert_eq!(
        problems(prove(&[vec![all(1)], vec![all(1), all(1)], vec![all(1)]])),
        ["ranks 0-2 planned with ranks 0-2 as the holders of the same parts, and some of them twice"]
    );
}
