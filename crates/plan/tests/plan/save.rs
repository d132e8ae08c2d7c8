//! Tests what ranks must agree on, and how they share the writing.

use std::collections::HashMap;

use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Owner, Region};
use shardfast_plan::{Error, Write, save};

fn tensor(name: &str, dtype: DType, shape: &[u64], parts: &[Region]) -> Leaf {
    let body = LeafBody::Tensor { dtype, shape: shape.into(), parts: parts.to_vec() };
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

fn object(name: &str, per_rank: bool) -> Leaf {
    Leaf {
        name: LeafName::new("model", name),
        body: LeafBody::Object { owner: if per_rank { Owner::Rank } else { Owner::Job } },
        layout: String::new(),
    }
}

fn alias(name: &str, of: &str) -> Leaf {
    let body = LeafBody::Alias { of: LeafName::new("model", of) };
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

fn r(offsets: &[u64], lengths: &[u64]) -> Region {
    Region::new(offsets, lengths)
}

fn plan(ranks: &[Vec<Leaf>]) -> Result<Vec<Vec<Write>>, Error> {
    let catalogs: Vec<Catalog> = ranks.iter().map(|leaves| Catalog { leaves: leaves.clone() }).collect();
    save(&catalogs)
}

fn problems(ranks: &[Vec<Leaf>]) -> Vec<String> {
    match plan(ranks).unwrap_err() {
        Error::Invalid(problems) => problems.0,
        error => panic!("{error:?}"),
    }
}

#[test]
fn leaves_are_merged_by_name_and_regions_by_place_whatever_their_layouts() {
    let halves = [r(&[0, 0], &[2, 3]), r(&[2, 0], &[2, 3])];
    let laid_out = |mut leaf: Leaf, layout: &str| {
        leaf.layout = layout.to_owned();
        leaf
    };
    let w = |part: usize| tensor("w", DType::F32, &[4, 3], &halves[part..=part]);
    let plan = plan(&[
        vec![laid_out(w(1), "first"), alias("z", "w")],
        vec![tensor("b", DType::I64, &[], &[r(&[], &[])]), object("seed", true), laid_out(w(0), "second")],
        vec![w(1)],
    ])
    .unwrap();
    // Rank 1 writes `b` and the first half alone; the second half is on ranks 0 and 2.
    let part = |leaf| Write::whole(leaf, 0);
    assert_eq!(plan, [vec![part(0)], vec![part(0), part(2)], vec![]]);
}

#[test]
fn no_ranks_and_no_leaves_are_a_plan_of_nothing() {
    assert_eq!(plan(&[]).unwrap(), Vec::<Vec<Write>>::new());
    assert_eq!(plan(&[vec![], vec![]]).unwrap(), [vec![], vec![]]);
}

#[test]
fn zero_size_tensors_need_no_part_and_may_have_the_whole() {
    let bare = tensor("e", DType::F32, &[3, 0], &[]);
    let whole = tensor("e", DType::F32, &[3, 0], &[r(&[0, 0], &[3, 0])]);
    assert_eq!(plan(&[vec![bare.clone()], vec![bare.clone()]]).unwrap(), [vec![], vec![]]);
    let given = plan(&[vec![bare], vec![whole.clone()], vec![whole]]).unwrap();
    assert_eq!(given, [vec![], vec![Write::whole(0, 0)], vec![]]);
    // The product of all but the last dimension is beyond 2^64.
    let vast = tensor("v", DType::F32, &[1 << 63, 4, 0], &[r(&[0, 0, 0], &[1 << 63, 4, 0])]);
    assert!(plan(&[vec![vast]]).is_ok());
}

#[test]
fn every_problem_of_every_leaf_is_collected() {
    let whole = |name, dtype, shape: &[u64]| tensor(name, dtype, shape, &[Region::whole(shape)]);
    let found = problems(&[
        vec![
            whole("dtype", DType::F32, &[4]),
            alias("dangling", "nowhere"),
            whole("fine", DType::F32, &[4]),
            object("kind", false),
            alias("not a tensor", "kind"),
            whole("shape", DType::F32, &[4, 2]),
            whole("twice", DType::F32, &[2]),
            whole("twice", DType::F32, &[2]),
        ],
        vec![
            whole("dtype", DType::BF16, &[4]),
            alias("dangling", "nowhere"),
            alias("kind", "fine"),
            object("per rank", true),
            whole("shape", DType::F32, &[2, 4]),
        ],
        vec![
            whole("dtype", DType::F32, &[4]),
            whole("kind", DType::U8, &[]),
            object("per rank", false),
            whole("shape", DType::F32, &[4, 2]),
        ],
    ]);
    assert_eq!(
        found,
        [
            "model/twice: rank 0 holds two leaves of this name",
            "model/dangling: it is an alias of model/nowhere, which no rank holds",
            "model/dtype: expected the same on all ranks, found a tensor F32 [4] on ranks 0, 2, \
             a tensor BF16 [4] on rank 1",
            "model/kind: expected the same on all ranks, found a value on rank 0, an alias of model/fine on rank 1, \
             a tensor U8 [] on rank 2",
            "model/per rank: expected the same on all ranks, found a value per rank on rank 1, a value on rank 2",
            "model/shape: expected the same on all ranks, found a tensor F32 [4, 2] on ranks 0, 2, \
             a tensor F32 [2, 4] on rank 1",
        ]
    );
}

#[test]
fn an_alias_is_of_a_tensor_that_some_rank_holds() {
    let whole = tensor("w", DType::F32, &[2], &[r(&[0], &[2])]);
    assert!(plan(&[vec![alias("tied", "w")], vec![whole.clone()], vec![alias("tied", "w")]]).is_ok());
    assert_eq!(
        problems(&[vec![
            alias("a", "a"),
            alias("b", "tied"),
            alias("c", "o"),
            object("o", true),
            alias("tied", "w"),
            whole
        ]]),
        [
            "model/a: it is an alias of model/a, which must be a tensor and is an alias of model/a",
            "model/b: it is an alias of model/tied, which must be a tensor and is an alias of model/w",
            "model/c: it is an alias of model/o, which must be a tensor and is a value per rank",
        ]
    );
    let other = tensor("x", DType::F32, &[2], &[r(&[0], &[2])]);
    let base = [tensor("w", DType::F32, &[2], &[r(&[0], &[2])]), other];
    let with = |tied: Leaf| base.iter().cloned().chain([tied]).collect::<Vec<_>>();
    assert_eq!(
        problems(&[with(alias("y", "w")), with(alias("y", "x"))]),
        ["model/y: expected the same on all ranks, found an alias of model/w on rank 0, an alias of model/x on rank 1"]
    );
}

#[test]
fn parts_that_do_not_tile_are_named_with_their_ranks() {
    let w = |parts: &[&Region]| {
        let parts: Vec<Region> = parts.iter().copied().cloned().collect();
        vec![tensor("w", DType::F32, &[4, 6], &parts)]
    };
    let (left, right) = (r(&[0, 0], &[4, 3]), r(&[0, 3], &[4, 3]));
    assert_eq!(problems(&[w(&[&left]), w(&[&left])]), ["model/w: no rank holds [0:4, 3:6] of the shape [4, 6]"]);
    assert_eq!(
        problems(&[w(&[&left]), w(&[&r(&[0, 2], &[4, 4])]), w(&[&left])]),
        ["model/w: [0:4, 0:3] on ranks 0, 2 overlaps [0:4, 2:6] on rank 1"]
    );
    assert_eq!(
        problems(&[w(&[&left, &r(&[1, 2], &[1, 4])]), w(&[&right])]),
        ["model/w: [0:4, 0:3] on rank 0 overlaps [1:2, 2:6] on rank 0"]
    );
    assert_eq!(problems(&[w(&[&left, &right, &left]), w(&[&right])]), ["model/w: rank 0 holds [0:4, 0:3] twice"]);
    assert_eq!(
        problems(&[w(&[&left, &r(&[0, 3], &[4, 4])]), w(&[&r(&[4, 3], &[0, 3]), &right, &r(&[0], &[1])])]),
        [
            "model/w: [0:4, 3:7] on rank 0 lies outside the shape [4, 6]",
            "model/w: [4:4, 3:6] on rank 1 holds no element and must be left out",
            "model/w: [0:1] on rank 1 lies outside the shape [4, 6]",
        ]
    );
    assert_eq!(problems(&[vec![tensor("w", DType::U8, &[], &[])]]), ["model/w: no rank holds [] of the shape []"]);
    assert_eq!(
        problems(&[vec![tensor("w", DType::F64, &[1 << 61], &[r(&[0], &[1 << 61])])]]),
        ["model/w: a tensor F64 [2305843009213693952] has 2^64 bytes or more"]
    );
}

#[test]
fn replicas_share_the_writing_and_what_is_written_alone_counts() {
    let whole = |name: &str, n: u64| tensor(name, DType::U8, &[n], &[r(&[0], &[n])]);
    let sizes: Vec<u64> = (0..40).map(|i| 100_000 + i * i % 37 * 10_000).collect();
    let replicated: Vec<Leaf> = sizes.iter().enumerate().map(|(i, &n)| whole(&format!("r{i}"), n)).collect();
    let catalogs: Vec<Vec<Leaf>> = (0..8)
        .map(|rank| match rank {
            0 => replicated.iter().cloned().chain([whole("alone", 900_000)]).collect(),
            _ => replicated.clone(),
        })
        .collect();
    let plan = plan(&catalogs).unwrap();
    let bytes = |leaf: &Leaf| match &leaf.body {
        LeafBody::Tensor { shape, .. } => shape[0],
        _ => 0,
    };
    let written = |rank: usize, write: &Write| match write.rows {
        Some(rows) => rows.count,
        None => bytes(&catalogs[rank][write.leaf as usize]),
    };
    let load = |rank: usize| plan[rank].iter().map(|write| written(rank, write)).sum::<u64>();
    let loads: Vec<u64> = (0..8).map(load).collect();
    let total = sizes.iter().sum::<u64>() + 900_000;
    let largest = *sizes.iter().max().unwrap();
    assert_eq!(loads.iter().sum::<u64>(), total);
    assert!(loads.iter().all(|&load| load <= total / 8 + largest), "{loads:?}");
    assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= largest, "{loads:?}");
}

/// Tests half a million parts. Anything pairwise in ranks, regions or leaves would take minutes here.
#[test]
fn many_ranks_and_tensors_are_planned_in_linear_time() {
    const WORLD: u64 = 256;
    const TENSORS: u64 = 200;
    let shapes = [[WORLD * 2, 64], [64, WORLD * 3], [128, 128]];
    let catalogs: Vec<Catalog> = (0..WORLD)
        .map(|rank| {
            let leaf = |i: u64| {
                let shape = shapes[i as usize % 3];
                let part = match i % 3 {
                    0 => r(&[rank * 2, 0], &[2, 64]),
                    1 => r(&[0, rank * 3], &[64, 3]),
                    _ => Region::whole(&shape),
                };
                tensor(&format!("layers.{i:03}.weight"), DType::BF16, &shape, &[part])
            };
            Catalog { leaves: (0..TENSORS).map(leaf).collect() }
        })
        .collect();
    let plan = save(&catalogs).unwrap();
    assert_eq!(plan, save(&catalogs).unwrap());

    let sharded = TENSORS - TENSORS / 3;
    assert_eq!(plan.iter().map(Vec::len).sum::<usize>() as u64, sharded * WORLD + TENSORS / 3);
    // A sharded part is written where it is; the 66 replicas of equal size go to the 66 least loaded ranks.
    let counts: HashMap<usize, usize> = plan.iter().fold(HashMap::new(), |mut counts, parts| {
        *counts.entry(parts.len()).or_default() += 1;
        counts
    });
    assert_eq!(counts, HashMap::from([(sharded as usize, 190), (sharded as usize + 1, 66)]));
}
