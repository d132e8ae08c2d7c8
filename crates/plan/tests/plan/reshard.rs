//! Tests any layout to any layout: saves under one, loads under another, compares with whole tensors bit for bit.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use proptest::prelude::*;
use shardfast_format::{
    Catalog, DType, Extent, FileEntry, Leaf, LeafBody, LeafName, Manifest, ManifestBuilder, Region, SaveInfo,
};
use shardfast_plan::{Limits, Piece, Read, Want, Write, load, save, tiles};

use crate::spread::{Job, job, shape};

const DATA_START: u64 = 4096;

/// A tensor in one piece, to compare with.
#[derive(Debug, Clone)]
struct Whole {
    name: LeafName,
    dtype: DType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

impl Whole {
    fn new(leaf: usize, dtype: DType, shape: Vec<u64>) -> Whole {
        let n = shape.iter().product::<u64>() * dtype.size_bytes();
        // Neighbours differ, and so do tensors: any byte from elsewhere shows.
        let byte = |i: u64| ((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(leaf as u32 * 8) >> 32) as u8;
        Whole { name: LeafName::new("model", format!("w{leaf}")), dtype, shape, bytes: (0..n).map(byte).collect() }
    }

    /// Returns the bytes of a region in row-major order.
    fn gather(&self, region: &Region) -> Vec<u8> {
        let item = self.dtype.size_bytes() as usize;
        let mut out = Vec::new();
        each_row(&region.lengths, |index, n| {
            let at = position(&self.shape, &region.offsets, index);
            out.extend_from_slice(&self.bytes[at * item..(at + n as usize) * item]);
        });
        out
    }
}

/// Calls `row` for each row of a box, in row-major order, with the index of its first element and its length. Indices
/// are padded to four dimensions.
fn each_row(lengths: &[u64], mut row: impl FnMut(&[u64; 4], u64)) {
    let (&length, outer) = lengths.split_last().unwrap_or((&1, &[]));
    if lengths.contains(&0) {
        return;
    }
    let mut index = [0; 4];
    loop {
        row(&index, length);
        let Some(d) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else { return };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}

/// Returns the position of the element `index` in a row-major box of `lengths` that begins at `offsets`.
fn position(lengths: &[u64], offsets: &[u64], index: &[u64; 4]) -> usize {
    (0..lengths.len()).fold(0, |at, d| at * lengths[d] + offsets[d] + index[d]) as usize
}

/// Returns the catalogs of a job. A rank without a part of a tensor knows the tensor or not, but rank 0 knows them all.
fn catalogs(job: &Job, wholes: &[Whole]) -> Vec<Catalog> {
    let catalog = |rank: u64| {
        let mut leaves = Vec::new();
        for (i, whole) in wholes.iter().enumerate() {
            let parts = job.parts(i, &whole.shape, rank);
            if parts.is_empty() && rank > 0 && (rank + i as u64) % 2 == 1 {
                continue;
            }
            let body = LeafBody::Tensor { dtype: whole.dtype, shape: whole.shape.as_slice().into(), parts };
            leaves.push(Leaf { name: whole.name.clone(), body, layout: String::new() });
        }
        Catalog { leaves }
    };
    (0..job.world()).map(catalog).collect()
}

fn part_of(catalog: &Catalog, leaf: u32, part: u32) -> (&LeafName, DType, &Region) {
    let Leaf { name, body, .. } = &catalog.leaves[leaf as usize];
    let LeafBody::Tensor { dtype, parts, .. } = body else { panic!("{name} is no tensor") };
    (name, *dtype, &parts[part as usize])
}

/// Writes two files per rank as planned.
fn write(plan: &[Vec<Write>], catalogs: &[Catalog], wholes: &[Whole]) -> (Manifest, Vec<Vec<u8>>) {
    let by_name: HashMap<&LeafName, &Whole> = wholes.iter().map(|whole| (&whole.name, whole)).collect();
    let mut regions: HashMap<LeafName, Vec<(Region, Extent)>> = HashMap::new();
    let mut files: Vec<Vec<u8>> = vec![vec![0; DATA_START as usize]; 2 * catalogs.len()];
    for (rank, parts) in plan.iter().enumerate() {
        assert!(parts.is_sorted());
        for at in parts {
            let (name, dtype, region) = part_of(&catalogs[rank], at.leaf, at.part);
            let file = 2 * rank + (at.leaf % 2) as usize;
            let bytes = region.numel() * dtype.size_bytes();
            let extent = Extent { file: file as u32, offset: files[file].len() as u64, bytes };
            files[file].extend(by_name[name].gather(region));
            assert_eq!(files[file].len() as u64, extent.offset + bytes);
            regions.entry(name.clone()).or_default().push((region.clone(), extent));
        }
    }
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world: catalogs.len() as u32,
        created_unix_ms: 0,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::new(),
    };
    let mut builder = ManifestBuilder::new(info);
    for (i, file) in files.iter().enumerate() {
        let path = format!("model/{i}.safetensors");
        builder.file(FileEntry { path, bytes: file.len() as u64, data_start: DATA_START, header_crc: 0 });
    }
    for Whole { name, dtype, shape, .. } in wholes {
        builder.tensor(name, *dtype, shape, "", regions.get(name).map_or(&[], Vec::as_slice));
    }
    (builder.finish().unwrap(), files)
}

/// Checks that exactly one rank writes each element.
fn check_save(plan: &[Vec<Write>], catalogs: &[Catalog], wholes: &[Whole]) {
    let mut written: HashMap<&LeafName, Vec<Region>> = HashMap::new();
    for (rank, catalog) in catalogs.iter().enumerate() {
        for at in &plan[rank] {
            let (name, _, region) = part_of(catalog, at.leaf, at.part);
            written.entry(name).or_default().push(region.clone());
        }
    }
    for whole in wholes {
        let parts = written.get(&whole.name).map_or(&[][..], Vec::as_slice);
        assert_eq!(tiles(&whole.shape, parts), Ok(()), "{}", whole.name);
        let mut count = vec![0; whole.shape.iter().product::<u64>() as usize];
        for part in parts {
            each_row(&part.lengths, |index, n| {
                let at = position(&whole.shape, &part.offsets, index);
                count[at..at + n as usize].iter_mut().for_each(|count| *count += 1);
            });
        }
        assert!(count.iter().all(|&count| count == 1), "{}: {count:?}", whole.name);
    }
}

/// Returns the offset in the file at which a row of a piece begins. A row of saved elements is one run of bytes.
fn row_start(piece: &Piece, index: &[u64; 4], item: u64, n: u64) -> usize {
    assert!(n == 1 || piece.src_strides.last() == Some(&item), "{piece:?}");
    (piece.src + index.iter().zip(&piece.src_strides).map(|(i, stride)| i * stride).sum::<u64>()) as usize
}

/// Takes the pieces out of the bytes read, and counts how often each byte of each want was filled.
fn scatter(manifest: &Manifest, wants: &[Want], reads: &[Read], files: &[Vec<u8>]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let item = |want: &Want| match manifest.leaf(want.leaf).kind {
        shardfast_format::LeafKind::Tensor { dtype, .. } => dtype.size_bytes(),
        kind => panic!("{kind:?}"),
    };
    let bytes = |want: &Want| (want.region.numel() * item(want)) as usize;
    let mut filled: Vec<_> = wants.iter().map(|want| (vec![0; bytes(want)], vec![0; bytes(want)])).collect();
    for read in reads {
        let data = &files[read.file as usize][read.offset as usize..(read.offset + read.bytes) as usize];
        for piece in &read.pieces {
            let want = &wants[piece.want as usize];
            let item = item(want) as usize;
            let (out, count) = &mut filled[piece.want as usize];
            let mut end = 0;
            each_row(&piece.lengths, |index, n| {
                let src = row_start(piece, index, item as u64, n) - read.offset as usize;
                let dst = position(&want.region.lengths, &piece.dst_offsets, index) * item;
                let bytes = n as usize * item;
                out[dst..dst + bytes].copy_from_slice(&data[src..src + bytes]);
                count[dst..dst + bytes].iter_mut().for_each(|count| *count += 1);
                end = src + bytes;
            });
            assert_eq!(read.offset + end as u64, piece.src + piece.span_bytes, "{piece:?}");
        }
    }
    filled
}

/// Checks the shape of the I/O: reads keep to the limits, begin and end with wanted bytes, have no larger gaps, could
/// not be joined, and read no byte twice.
fn check_reads(reads: &[Read], limits: Limits) {
    for read in reads {
        let mut touched = vec![false; read.bytes as usize];
        for piece in &read.pieces {
            let item = piece.src_strides.last().map_or(piece.span_bytes, |&stride| stride);
            each_row(&piece.lengths, |index, n| {
                let at = row_start(piece, index, item, n) - read.offset as usize;
                touched[at..at + (n * item) as usize].fill(true);
            });
            let single = piece.lengths.iter().all(|&length| length == 1);
            assert!(read.bytes <= limits.read_max_bytes || single && read.pieces.len() == 1, "{read:?} {limits:?}");
        }
        let gaps = touched.chunk_by(|a, b| a == b).filter(|run| !run[0]).map(|run| run.len() as u64);
        assert!(gaps.max().unwrap_or(0) <= limits.gap_max_bytes, "{read:?} {limits:?}");
        assert!(touched.first() == Some(&true) && touched.last() == Some(&true), "{read:?}");
        assert!(read.pieces.is_sorted_by_key(|piece| piece.src));
    }
    for pair in reads.windows(2).filter(|pair| pair[0].file == pair[1].file) {
        let (end, next) = (pair[0].offset + pair[0].bytes, pair[1].offset);
        assert!(end <= next, "{pair:?} overlap");
    }
    assert!(reads.is_sorted_by_key(|read| read.file));
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::U8), Just(DType::BF16), Just(DType::F32), Just(DType::C64)]
}

fn limits() -> impl Strategy<Value = Limits> {
    let gap_max_bytes = prop_oneof![Just(0u64), 1..64u64, Just(1 << 20)];
    let read_max_bytes = prop_oneof![1..200u64, Just(1 << 20)];
    (gap_max_bytes, read_max_bytes).prop_map(|(gap_max_bytes, read_max_bytes)| Limits { gap_max_bytes, read_max_bytes })
}

fn case() -> impl Strategy<Value = (Vec<(DType, Vec<u64>)>, Job, Job, Limits)> {
    proptest::collection::vec((dtype(), shape()), 1..3)
        .prop_flat_map(|tensors| (Just(tensors.clone()), job(tensors.len()), job(tensors.len()), limits()))
}

/// Returns the number of cases of a usual run; a campaign sets more.
fn cases() -> u32 {
    std::env::var("SHARDFAST_PLAN_CASES").map_or(3000, |cases| cases.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_saved_under_one_layout_loads_under_any_other((tensors, saving, loading, limits) in case()) {
        let tensors = tensors.into_iter().enumerate();
        let wholes: Vec<Whole> = tensors.map(|(i, (dtype, shape))| Whole::new(i, dtype, shape)).collect();
        let saved = catalogs(&saving, &wholes);
        let plan = save(&saved).unwrap();
        check_save(&plan, &saved, &wholes);
        let (manifest, files) = write(&plan, &saved, &wholes);
        let mut seen = HashSet::new();
        for rank in 0..loading.world() {
            let mut wants = Vec::new();
            for (i, whole) in wholes.iter().enumerate() {
                let leaf = manifest.find(&whole.name).unwrap();
                wants.extend(loading.parts(i, &whole.shape, rank).into_iter().map(|region| Want { leaf, region }));
            }
            // Replicas want the same.
            if !seen.insert(wants.iter().map(|want| (want.leaf, want.region.clone())).collect::<Vec<_>>()) {
                continue;
            }
            let reads = load(&manifest, &wants, limits).unwrap();
            let mut unread: Vec<_> = reads.spans().collect();
            let reads: Vec<Read> = reads.collect();
            // Each span is what is read for it, from its first byte to its last.
            for (file, piece) in reads.iter().flat_map(|read| read.pieces.iter().map(|piece| (read.file, piece))) {
                let (start, end) = (piece.src, piece.src + piece.span_bytes);
                let lies_in = |(of, span): &(u32, Range<u64>)| *of == file && span.start <= start && end <= span.end;
                prop_assert!(unread.iter().any(lies_in), "{file} {start}..{end} of {unread:?}");
            }
            let is_met = |file: u32, at: u64| {
                let mut pieces = reads.iter().filter(|read| read.file == file).flat_map(|read| &read.pieces);
                pieces.any(|piece| piece.src <= at && at < piece.src + piece.span_bytes)
            };
            unread.retain(|(file, span)| !is_met(*file, span.start) || !is_met(*file, span.end - 1));
            prop_assert!(unread.is_empty(), "{unread:?}");
            check_reads(&reads, limits);
            for (want, (found, count)) in wants.iter().zip(scatter(&manifest, &wants, &reads, &files)) {
                let whole = wholes.iter().find(|whole| manifest.find(&whole.name) == Some(want.leaf)).unwrap();
                prop_assert!(count.iter().all(|&count| count == 1), "{} {}: {count:?}", whole.name, want.region);
                prop_assert_eq!(&found, &whole.gather(&want.region), "{} {}", &whole.name, &want.region);
            }
        }
    }
}
