//! A load in which ranks read for each other: what the root finds out for all, and what one rank plans.

use shardfast_format::{LeafBody, Manifest};
use shardfast_plan::{CHUNK_BLOCKS_MAX, Sharing, Wanted, share};

use crate::layout::Job;
use crate::timed;

/// Of a job that loads what another one saved.
#[derive(Default)]
pub(crate) struct Shared {
    /// The root's part.
    pub(crate) share_ms: f64,
    /// The most wants of others that one rank gets.
    pub(crate) told: usize,
    /// The plan of rank 0, with all its chunks.
    pub(crate) plan_ms: f64,
}

pub(crate) fn measure(job: Job, manifest: &Manifest) -> Shared {
    let wants: Vec<Vec<Wanted>> = (0..job.world()).map(|rank| wanted(job, rank, manifest)).collect();
    let (matching, share_ms) = timed(|| share(manifest, &wants, usize::MAX));
    let common = matching.expect("wants of the checkpoint").expect("no bound on others' wants").common;
    let told = common.iter().map(|common| common.others.len()).max().unwrap_or(0);
    let (chunks, plan_ms) = timed(|| {
        let sharing = Sharing::new(manifest, 0, &wants[0], &common[0], CHUNK_BLOCKS_MAX, 0);
        sharing.map(|sharing| sharing.chunks().count())
    });
    chunks.expect("what is common fits");
    Shared { share_ms, told, plan_ms }
}

fn wanted(job: Job, rank: u32, manifest: &Manifest) -> Vec<Wanted> {
    let (catalog, _) = job.describe(rank);
    let mut wants = Vec::new();
    for leaf in &catalog.leaves {
        let LeafBody::Tensor { parts, .. } = &leaf.body else { continue };
        let leaf = manifest.find(&leaf.name).expect("a leaf that was saved") as u32;
        wants.extend(parts.iter().map(|region| Wanted { leaf, region: region.clone() }));
    }
    wants.sort();
    wants
}
