//! One save, from what a rank holds to the manifest at the root.

use std::collections::BTreeMap;

use serde::Serialize;
use shardfast_format::{
    Catalog, DType, Dims, FileEntry, LeafBody, LeafName, Manifest, ManifestBuilder, Region, SaveInfo, crc64, data_file,
};
use shardfast_plan::{Assembly, Claim, Limits, Local, Want, load, local, prove};

use crate::layout::Job;
use crate::{sharing, timed};

const ATTEMPT: &str = "0123456789abcdef";
const DATA_START: u64 = 4096;
/// The engine's, about.
pub(crate) const LIMITS: Limits = Limits { gap_max_bytes: 64 << 10, read_max_bytes: 8 << 20 };

/// What a rank reports to the root of its files; its parts are those of the engine's.
#[derive(Serialize)]
struct Receipt {
    header_crcs: Vec<[u8; 8]>,
    files: Vec<(String, u32, u64, u64)>,
    leaves: Vec<Written>,
}

#[derive(Serialize)]
struct Written {
    name: LeafName,
    dtype: DType,
    shape: Dims,
    layout: String,
    regions: Vec<(Region, u32, u64)>,
}

impl Receipt {
    /// One file for each key, everything behind each other.
    fn new(rank: u32, catalog: &Catalog, local: &Local) -> Receipt {
        let mut receipt = Receipt { header_crcs: Vec::new(), files: Vec::new(), leaves: Vec::new() };
        for writes in local.writes.chunk_by(|a, b| a.leaf == b.leaf) {
            let leaf = &catalog.leaves[writes[0].leaf as usize];
            let LeafBody::Tensor { dtype, shape, parts } = &leaf.body else { continue };
            if receipt.files.last().is_none_or(|file| file.0 != leaf.name.key) {
                receipt.files.push((leaf.name.key.clone(), 0, DATA_START, DATA_START));
                receipt.header_crcs.push(crc64(format!("{rank} {}", leaf.name.key).as_bytes()).to_le_bytes());
            }
            let file = receipt.files.len() - 1;
            let mut regions = Vec::with_capacity(writes.len());
            for write in writes {
                let region = write.region(&parts[write.part as usize]).expect("rows that the part has");
                let bytes = region.numel() * dtype.size_bytes();
                regions.push((region, file as u32, receipt.files[file].2));
                receipt.files[file].2 += bytes;
            }
            let (name, layout) = (leaf.name.clone(), leaf.layout.clone());
            receipt.leaves.push(Written { name, dtype: *dtype, shape: shape.clone(), layout, regions });
        }
        receipt
    }
}

fn encoded(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).expect("plain data")
}

/// Everything there is to say of one size of job.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    ranks: u32,
    regions: usize,
    files: usize,
    /// The slowest rank's.
    plan_ms: f64,
    /// Of what ranks write, the heaviest one's over the mean.
    imbalance: f64,
    claim_bytes: usize,
    prove_ms: f64,
    receipt_bytes: usize,
    assemble_ms: f64,
    encode_ms: f64,
    manifest_bytes: usize,
    open_ms: f64,
    /// Of the slowest of a few ranks.
    load_plan_ms: f64,
    /// The same load, in which ranks read for each other.
    share_ms: f64,
    told: usize,
    share_plan_ms: f64,
}

/// Runs all ranks' parts of a save one after the other, and the root's.
pub(crate) fn measure(job: Job) -> Row {
    let world = job.world();
    let mut row = Row { ranks: world, ..Row::default() };
    let mut receipts = Vec::with_capacity(world as usize);
    let mut claims: Vec<Vec<Claim>> = Vec::with_capacity(world as usize);
    let mut loads = Vec::with_capacity(world as usize);
    for rank in 0..world {
        let (catalog, replicas) = job.describe(rank);
        let (plan, ms) = timed(|| local(&catalog, &replicas, rank, world));
        let plan = plan.expect("a sound description").expect("all holders are known");
        if ms > row.plan_ms {
            // Of so many, some are interrupted.
            let again = (0..4).map(|_| timed(|| local(&catalog, &replicas, rank, world)).1);
            row.plan_ms = row.plan_ms.max(again.fold(ms, f64::min));
        }
        let receipt = Receipt::new(rank, &catalog, &plan);
        loads.push(receipt.files.iter().map(|file| file.2 - DATA_START).sum::<u64>());
        row.receipt_bytes += encoded(&receipt).len();
        row.claim_bytes += encoded(&plan.claims).len();
        claims.push(plan.claims);
        receipts.push(receipt);
    }
    let mean = loads.iter().sum::<u64>() as f64 / f64::from(world);
    row.imbalance = loads.into_iter().max().unwrap_or(0) as f64 / mean;
    let (proof, ms) = timed(|| prove(&claims));
    proof.expect("claims that agree");
    row.prove_ms = ms;
    let (manifest, ms) = timed(|| assemble(world, &receipts));
    row.assemble_ms = ms;
    let (encoded, ms) = timed(|| manifest.encode());
    (row.encode_ms, row.manifest_bytes) = (ms, encoded.len());
    let (opened, ms) = timed(|| Manifest::decode(&encoded));
    row.open_ms = ms;
    let opened = opened.expect("a sound manifest");
    row.files = opened.files().len();
    let other = Job { dp: job.dp / 2 };
    row.load_plan_ms = load_plan_ms(other, &opened);
    let shared = sharing::measure(other, &opened);
    (row.share_ms, row.told, row.share_plan_ms) = (shared.share_ms, shared.told, shared.plan_ms);
    row.regions = (0..opened.len()).map(|leaf| opened.regions(leaf).len()).sum();
    row
}

/// Planning what a rank of `job` reads of what another job saved: the slowest of its first, a middle and its
/// last rank.
fn load_plan_ms(job: Job, manifest: &Manifest) -> f64 {
    let plan = |rank: u32| {
        let (catalog, _) = job.describe(rank);
        let (reads, ms) = timed(|| {
            let mut wants = Vec::new();
            for leaf in &catalog.leaves {
                let LeafBody::Tensor { parts, .. } = &leaf.body else { continue };
                let index = manifest.find(&leaf.name).expect("a leaf that was saved");
                wants.extend(parts.iter().map(|region| Want { leaf: index, region: region.clone() }));
            }
            load(manifest, &wants, LIMITS).map(Iterator::count)
        });
        reads.expect("wants that fit");
        ms
    };
    [0, job.world() / 2, job.world() - 1].into_iter().map(plan).fold(0.0, f64::max)
}

/// One line a figure: each size of job, and how many times the smallest one's figure the largest one's is.
pub(crate) fn print(rows: &[Row]) {
    let line = |what: &str, digits: usize, figure: &dyn Fn(&Row) -> f64| {
        let figures: Vec<f64> = rows.iter().map(figure).collect();
        let cells: String = figures.iter().map(|figure| format!("{figure:>11.digits$}")).collect();
        let growth = figures.last().zip(figures.first()).map_or(1.0, |(last, first)| last / first);
        println!("{what:<42}{cells}{growth:>8.1}x");
    };
    let a_rank = |bytes: usize, row: &Row| bytes as f64 / f64::from(row.ranks);
    line("ranks", 0, &|row| f64::from(row.ranks));
    line("regions", 0, &|row| row.regions as f64);
    line("files", 0, &|row| row.files as f64);
    line("heaviest rank / mean, bytes written", 4, &|row| row.imbalance);
    line("plan of one rank, the slowest, ms", 3, &|row| row.plan_ms);
    line("claims, bytes a rank", 0, &|row| a_rank(row.claim_bytes, row));
    line("receipts, bytes a rank", 0, &|row| a_rank(row.receipt_bytes, row));
    line("root: proof of claims, ms", 1, &|row| row.prove_ms);
    line("root: coverage and manifest, ms", 0, &|row| row.assemble_ms);
    line("root: encoding of the manifest, ms", 0, &|row| row.encode_ms);
    line("manifest, MB", 2, &|row| row.manifest_bytes as f64 / 1e6);
    line("opening the manifest, checked, ms", 1, &|row| row.open_ms);
    line("plan of one rank's load, half as many, ms", 1, &|row| row.load_plan_ms);
    line("shared: what all have in common, at the root, ms", 0, &|row| row.share_ms);
    line("shared: wants of others that one rank gets", 0, &|row| row.told as f64);
    line("shared: one rank's chunks, ms", 0, &|row| row.share_plan_ms);
}

/// The root's work: the proof that everything was written once, and the manifest.
fn assemble(world: u32, receipts: &[Receipt]) -> Manifest {
    let info = SaveInfo {
        attempt: ATTEMPT.to_owned(),
        step: Some(1000),
        world,
        created_unix_ms: 1_700_000_000_000,
        writer: "shardfast".to_owned(),
        user: BTreeMap::new(),
    };
    let mut builder = ManifestBuilder::new(info);
    let mut assembly = Assembly::default();
    for (rank, receipt) in (0u32..).zip(receipts) {
        let entry = |((key, index, bytes, data_start), crc): (&(String, u32, u64, u64), &[u8; 8])| {
            let path = data_file(key, ATTEMPT, rank, *index).expect("a sound key");
            builder.file(FileEntry {
                path,
                bytes: *bytes,
                data_start: *data_start,
                header_crc: u64::from_le_bytes(*crc),
            })
        };
        let files: Vec<u32> = receipt.files.iter().zip(&receipt.header_crcs).map(entry).collect();
        for leaf in &receipt.leaves {
            let regions = leaf.regions.iter().map(|(region, file, at)| (region.clone(), files[*file as usize], *at));
            assembly.tensor(rank, &leaf.name, (leaf.dtype, &leaf.shape), &leaf.layout, regions);
        }
    }
    assembly.finish(&mut builder).expect("everything is written once");
    builder.finish().expect("a sound manifest")
}
