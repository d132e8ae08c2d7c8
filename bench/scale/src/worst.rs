//! What is hardest on planners: a thousand tensors on a thousand ranks, sharded along any dimension, or on all of them.

use std::collections::BTreeMap;

use shardfast_format::{
    Catalog, DType, Dims, Extent, FileEntry, Leaf, LeafBody, LeafName, Manifest, ManifestBuilder, Region, SaveInfo,
};
use shardfast_plan::{Limits, SavePlan, Want, load, save, tiles};

use crate::layout::Job;
use crate::timed;

const TENSORS: u64 = 1024;
const RANKS: u64 = 1024;
const SHAPE: [u64; 3] = [RANKS, RANKS, RANKS];
const LIMITS: Limits = Limits { gap_max_bytes: 64 << 10, read_max_bytes: 8 << 20 };

/// What `rank` has of a tensor that is sharded along `d`, or of one that is not.
fn shard(d: Option<usize>, rank: u64) -> Region {
    let mut region = Region::whole(&SHAPE);
    if let Some(d) = d {
        region.offsets[d] = rank;
        region.lengths[d] = 1;
    }
    region
}

fn catalog(rank: u64, along: impl Fn(u64) -> Option<usize>) -> Catalog {
    let leaf = |tensor: u64| {
        let parts = vec![shard(along(tensor), rank)];
        let body = LeafBody::Tensor { dtype: DType::U8, shape: Dims::from_slice(&SHAPE), parts };
        Leaf { name: LeafName::new("model", format!("layers.{tensor:04}.weight")), body, layout: String::new() }
    };
    Catalog { leaves: (0..TENSORS).map(leaf).collect() }
}

fn any_dimension(tensor: u64) -> Option<usize> {
    Some(tensor as usize % SHAPE.len())
}

/// The manifest of a save by the plan, a file a rank.
fn manifest(plan: &SavePlan) -> Manifest {
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world: RANKS as u32,
        created_unix_ms: 0,
        writer: "shardfast".to_owned(),
        user: BTreeMap::new(),
    };
    let mut builder = ManifestBuilder::new(info);
    let bytes = RANKS * RANKS;
    for rank in 0..RANKS {
        let path = format!("model/{rank:05}-000-0123456789abcdef.safetensors");
        builder.file(FileEntry { path, bytes: 4096 + TENSORS * bytes, data_start: 4096, header_crc: 0 });
    }
    for (index, leaf) in (0u64..).zip(&plan.leaves) {
        let LeafBody::Tensor { dtype, shape, parts } = &leaf.body else { continue };
        let extent = |rank: u32| Extent { file: rank, offset: 4096 + index * bytes, bytes };
        let regions: Vec<(Region, Extent)> = parts.iter().cloned().zip((0u32..).map(extent)).collect();
        builder.tensor(&leaf.name, *dtype, shape, "", &regions);
    }
    builder.finish().expect("a sound manifest")
}

pub(crate) fn measure() {
    println!("\nplans of all ranks' catalogs, ms");
    let (catalogs, world) = (|job: Job| (0..job.world()).map(|rank| job.describe(rank).0).collect::<Vec<_>>(), 70);
    let job = catalogs(Job { dp: world });
    let (plan, ms) = timed(|| save(&job));
    plan.expect("catalogs that agree");
    println!("  the job of {} ranks{:>24}{ms:10.0}", job.len(), "");
    drop(job);

    let replicated: Vec<Catalog> = (0..RANKS).map(|rank| catalog(rank, |_| None)).collect();
    let (plan, ms) = timed(|| save(&replicated));
    plan.expect("catalogs that agree");
    println!("  {TENSORS} tensors on each of {RANKS} ranks{ms:21.0}");
    drop(replicated);

    let sharded: Vec<Catalog> = (0..RANKS).map(|rank| catalog(rank, any_dimension)).collect();
    let (plan, ms) = timed(|| save(&sharded));
    let plan = plan.expect("catalogs that agree");
    println!("  {TENSORS} tensors sharded over {RANKS} ranks{ms:19.0}");
    drop(sharded);

    let parts = |leaf: &Leaf| match &leaf.body {
        LeafBody::Tensor { parts, .. } => parts.clone(),
        _ => Vec::new(),
    };
    let all: Vec<Vec<Region>> = plan.leaves.iter().map(parts).collect();
    let (sound, ms) = timed(|| all.iter().all(|parts| tiles(&SHAPE, parts).is_ok()));
    assert!(sound, "every tensor is held once");
    println!("of these, {} regions:\n  coverage{ms:45.0}", TENSORS * RANKS);

    let manifest = manifest(&plan);
    for (what, turn) in [("the same shards", 0), ("shards of another dimension", 1)] {
        let want = |leaf: u64| Want { leaf: leaf as usize, region: shard(Some((leaf as usize + turn) % 3), 7) };
        let wants: Vec<Want> = (0..TENSORS).map(want).collect();
        let (reads, ms) = timed(|| load(&manifest, &wants, LIMITS).map(Iterator::count));
        let reads = reads.expect("wants that fit");
        println!("  one rank's load of {what:<28}{ms:6.0}  ({reads} reads)");
    }
}
