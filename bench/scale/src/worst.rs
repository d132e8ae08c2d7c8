//! What is hardest on planners: a thousand tensors on a thousand ranks, sharded along any dimension, or on all of them.

use std::collections::BTreeMap;

use shardfast_format::{
    Catalog, DType, Dims, Extent, FileEntry, Leaf, LeafBody, LeafName, Manifest, ManifestBuilder, Region, SaveInfo,
};
use shardfast_plan::{Want, load, save, tiles};

use crate::commit::LIMITS;
use crate::layout::Job;
use crate::timed;

const TENSORS: u64 = 1024;
const RANKS: u64 = 1024;
const SHAPE: [u64; 3] = [RANKS, RANKS, RANKS];

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
        Leaf { name: name(tensor), body, layout: String::new() }
    };
    Catalog { leaves: (0..TENSORS).map(leaf).collect() }
}

fn name(tensor: u64) -> LeafName {
    LeafName::new("model", format!("layers.{tensor:04}.weight"))
}

fn any_dimension(tensor: u64) -> Option<usize> {
    Some(tensor as usize % SHAPE.len())
}

/// The regions of the `tensor`-th tensor, sharded along any dimension, by rank.
fn shards(tensor: u64) -> Vec<Region> {
    (0..RANKS).map(|rank| shard(any_dimension(tensor), rank)).collect()
}

/// The manifest of a save of tensors that are sharded so, a file a rank.
fn manifest() -> Manifest {
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
    for tensor in 0..TENSORS {
        let extent = |rank: u32| Extent { file: rank, offset: 4096 + tensor * bytes, bytes };
        let regions: Vec<(Region, Extent)> = shards(tensor).into_iter().zip((0u32..).map(extent)).collect();
        builder.tensor(&name(tensor), DType::U8, &SHAPE, "", &regions);
    }
    builder.finish().expect("a sound manifest")
}

/// What is to be done, and the milliseconds that it took.
pub(crate) type Figures = Vec<(String, f64)>;

pub(crate) fn measure() -> Figures {
    let mut figures = Figures::new();
    let job = Job { dp: 70 };
    let catalogs: Vec<Catalog> = (0..job.world()).map(|rank| job.describe(rank).0).collect();
    let (plan, ms) = timed(|| save(&catalogs));
    plan.expect("catalogs that agree");
    figures.push((format!("plan from the catalogs of {} ranks", catalogs.len()), ms));
    drop(catalogs);

    let replicated: Vec<Catalog> = (0..RANKS).map(|rank| catalog(rank, |_| None)).collect();
    let (plan, ms) = timed(|| save(&replicated));
    plan.expect("catalogs that agree");
    figures.push((format!("plan of {TENSORS} tensors, all on each of {RANKS} ranks"), ms));
    drop(replicated);

    let sharded: Vec<Catalog> = (0..RANKS).map(|rank| catalog(rank, any_dimension)).collect();
    let (plan, ms) = timed(|| save(&sharded));
    plan.expect("catalogs that agree");
    figures.push((format!("plan of {TENSORS} tensors, sharded over {RANKS} ranks"), ms));
    drop(sharded);

    let all: Vec<Vec<Region>> = (0..TENSORS).map(shards).collect();
    let (sound, ms) = timed(|| all.iter().all(|parts| tiles(&SHAPE, parts).is_ok()));
    assert!(sound, "every tensor is held once");
    figures.push((format!("coverage of their {} regions", TENSORS * RANKS), ms));

    let manifest = manifest();
    for (what, turn) in [("the same shards", 0), ("shards of another dimension", 1)] {
        let want = |leaf: u64| Want { leaf: leaf as usize, region: shard(Some((leaf as usize + turn) % 3), 7) };
        let wants: Vec<Want> = (0..TENSORS).map(want).collect();
        let (reads, ms) = timed(|| load(&manifest, &wants, LIMITS).map(Iterator::count));
        let reads = reads.expect("wants that fit");
        figures.push((format!("one rank's load of {what}, {reads} reads"), ms));
    }
    figures
}

/// Nanoseconds for each region of flat runs, by the number of dimensions.
pub(crate) fn measure_flat_runs() -> Figures {
    let shapes: [&[u64]; 3] = [&[53_248, 16_384], &[4096, 512, 512], &[256, 256, 128, 128]];
    let of = |shape: &[u64]| {
        let numel: u64 = shape.iter().product();
        let run = |i: u64| (numel / 7 * (i % 7) + i, numel / 7 * (i % 7 + 1) - i);
        let count = |i: u64| {
            let (start, stop) = run(i);
            Region::flat_run(shape, start, stop).map(|region| region.lengths[0].min(1)).sum::<u64>()
        };
        let (regions, ms) = timed(|| (1..200_000).map(count).sum::<u64>());
        (format!("{} dimensions", shape.len()), ms * 1e6 / regions as f64)
    };
    shapes.into_iter().map(of).collect()
}
