//! Tests shared loads: every rank gets what it wants, each block is read once, and ranks agree without a message.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use shardfast_format::{
    BLOCK_BYTES, DType, Extent, FileEntry, LeafKind, LeafName, Manifest, ManifestBuilder, Region, SaveInfo,
};
use shardfast_plan::{CHUNK_BLOCKS_MAX, Chunk, Common, Matching, Piece, Sharing, Wanted, share};

const DATA_START: u64 = 4096;

/// A tensor: its type, its shape, and the rows of each of its saved parts.
type Tensor = (DType, Vec<u64>, Vec<u64>);

/// Makes tensors cut by rows into parts that lie in two files in turn, followed by values of one object.
fn saved(tensors: &[Tensor], values: &[u64]) -> Manifest {
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world: 8,
        created_unix_ms: 0,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::new(),
    };
    let mut ends = [DATA_START; 2];
    let mut place = |turn: usize, bytes: u64| {
        let offset = ends[turn % 2];
        ends[turn % 2] += bytes;
        Extent { file: turn as u32 % 2, offset, bytes }
    };
    let mut leaves = Vec::new();
    for (i, (dtype, shape, rows)) in tensors.iter().enumerate() {
        let mut first = 0;
        let parts = rows.iter().enumerate().map(|(turn, &rows)| {
            let mut region = Region::whole(shape);
            (region.offsets[0], region.lengths[0]) = (first, rows);
            first += rows;
            let extent = place(i + turn, region.numel() * dtype.size_bytes());
            (region, extent)
        });
        leaves.push((LeafName::new("model", format!("w{i:05}")), *dtype, shape, parts.collect::<Vec<_>>()));
    }
    let values: Vec<(Vec<Range<u32>>, Extent)> =
        (0u32..).zip(values).map(|(rank, &bytes)| (vec![rank..rank + 1], place(0, bytes))).collect();
    let mut builder = ManifestBuilder::new(info);
    for (i, bytes) in ends.into_iter().enumerate() {
        let path = format!("model/{i}.safetensors");
        builder.file(FileEntry { path, bytes, data_start: DATA_START, header_crc: 0 });
    }
    for (name, dtype, shape, parts) in &leaves {
        builder.tensor(name, *dtype, shape, "", parts);
    }
    if !values.is_empty() {
        builder.object(&LeafName::new("model", "x"), "", &values);
    }
    builder.finish().unwrap()
}

/// Part of a tensor that a rank wants.
#[derive(Debug, Clone)]
enum Take {
    Nothing,
    Whole,
    /// The `i`-th of `n` parts of a dimension.
    Shard(usize, u64, u64),
    /// A range between two fractions, in 256ths.
    Flat(u64, u64),
}

fn taken(take: &Take, shape: &[u64]) -> Vec<Region> {
    match *take {
        Take::Nothing => Vec::new(),
        Take::Whole => vec![Region::whole(shape)],
        Take::Shard(dim, i, n) => {
            let mut region = Region::whole(shape);
            let dim = dim % shape.len();
            let at = |i: u64| shape[dim] * i / n;
            (region.offsets[dim], region.lengths[dim]) = (at(i % n), at(i % n + 1) - at(i % n));
            vec![region]
        }
        Take::Flat(a, b) => {
            let at = |fraction: u64| shape.iter().product::<u64>() * fraction / 256;
            Region::flat_run(shape, at(a.min(b)), at(a.max(b))).collect()
        }
    }
}

/// Plans a shared load with chunks of at most `chunk_blocks` blocks, in runs of `run` chunks.
fn plan(manifest: &Manifest, wants: &[Vec<Wanted>], (chunk_blocks, run): (u32, u64)) -> (Matching, Vec<Sharing>) {
    let matching = share(manifest, wants, usize::MAX).unwrap().unwrap();
    let sharing = (0u32..).zip(wants.iter().zip(&matching.common)).map(|(rank, (wants, common))| {
        let alone = Common { sets: vec![vec![rank..rank + 1]], own: vec![0; wants.len()], others: Vec::new() };
        let common = if common.sets.is_empty() { &alone } else { common };
        let run_bytes = run * u64::from(chunk_blocks) * BLOCK_BYTES;
        Sharing::new(manifest, rank, wants, common, chunk_blocks, run_bytes).unwrap()
    });
    let sharing = sharing.collect();
    (matching, sharing)
}

/// Returns the runs of bytes of a piece's elements, in its order: offset in the file, and length.
fn runs(piece: &Piece) -> Vec<Range<u64>> {
    let item = piece.item_bytes();
    let mut out: Vec<Range<u64>> = Vec::new();
    for mut number in 0..piece.lengths.iter().product::<u64>() {
        let mut at = piece.src;
        for d in (0..piece.lengths.len()).rev() {
            at += number % piece.lengths[d] * piece.src_strides[d];
            number /= piece.lengths[d];
        }
        match out.last_mut() {
            Some(last) if last.end == at => last.end += item,
            _ => out.push(at..at + item),
        }
    }
    out
}

/// Returns the bytes in the files that make up a want, in order.
fn bytes_of(manifest: &Manifest, wanted: &Wanted) -> Vec<(u32, u64)> {
    let leaf = wanted.leaf as usize;
    let LeafKind::Tensor { dtype, .. } = manifest.leaf(leaf).kind else {
        let (_, extent) = manifest.values(leaf).nth(wanted.region.offsets[0] as usize).unwrap();
        return (extent.offset..extent.offset + extent.bytes).map(|at| (extent.file, at)).collect();
    };
    let mut bytes = Vec::new();
    let regions: Vec<(Region, Extent)> = manifest.regions(leaf).collect();
    let numel = wanted.region.numel();
    for mut number in 0..numel {
        let ndim = wanted.region.ndim();
        let mut index = vec![0; ndim];
        for d in (0..ndim).rev() {
            index[d] = wanted.region.offsets[d] + number % wanted.region.lengths[d];
            number /= wanted.region.lengths[d];
        }
        let inside = |region: &Region| {
            (0..ndim).all(|d| (region.offsets[d]..region.offsets[d] + region.lengths[d]).contains(&index[d]))
        };
        let (region, extent) = regions.iter().find(|(region, _)| inside(region)).unwrap();
        let at = (0..ndim).fold(0, |at, d| at * region.lengths[d] + index[d] - region.offsets[d]);
        let first = extent.offset + at * dtype.size_bytes();
        bytes.extend((first..first + dtype.size_bytes()).map(|at| (extent.file, at)));
    }
    bytes
}

/// Returns the source of each byte of each want that a rank was given: its offset in the files. Checks that none comes
/// twice.
fn given(manifest: &Manifest, wants: &[Wanted], sharing: &Sharing) -> Vec<Vec<Option<(u32, u64)>>> {
    let mut given: Vec<Vec<Option<(u32, u64)>>> =
        wants.iter().map(|wanted| vec![None; bytes_of(manifest, wanted).len()]).collect();
    for chunk in sharing.chunks() {
        for piece in sharing.own_pieces(chunk.file, chunk.range.clone()) {
            let wanted = &wants[piece.want as usize];
            let lengths = match manifest.leaf(wanted.leaf as usize).kind {
                LeafKind::Tensor { .. } => wanted.region.lengths.to_vec(),
                _ => vec![given[piece.want as usize].len() as u64],
            };
            let item = piece.item_bytes();
            let mut from = runs(&piece).into_iter().flatten();
            for mut number in 0..piece.lengths.iter().product::<u64>() {
                let (mut to, mut stride) = (0, item);
                for d in (0..lengths.len()).rev() {
                    to += (piece.dst_offsets[d] + number % piece.lengths[d]) * stride;
                    stride *= lengths[d];
                    number /= piece.lengths[d];
                }
                for to in to..to + item {
                    let place = &mut given[piece.want as usize][to as usize];
                    assert_eq!(*place, None, "byte {to} of {wanted:?} twice");
                    let at = from.next().unwrap();
                    assert!(chunk.range.start <= at && at < chunk.end, "{piece:?} beyond {chunk:?}");
                    *place = Some((chunk.file, at));
                }
            }
        }
    }
    given
}

/// Checks that each rank gets everything once, that wanters of a chunk agree on it and on what its reader sends, that
/// no block is read twice, and that bytes of a run that the same ranks want have one reader.
fn check(manifest: &Manifest, wants: &[Vec<Wanted>], (chunk_blocks, run): (u32, u64)) -> Result<(), TestCaseError> {
    let (_, sharing) = plan(manifest, wants, (chunk_blocks, run));
    let run_bytes = run.max(1) * u64::from(chunk_blocks) * BLOCK_BYTES;
    let mut readers: HashMap<(u32, u64, Arc<[u32]>), u32> = HashMap::new();
    let mut seen: HashMap<(u32, u64), (Chunk, usize)> = HashMap::new();
    let mut read: HashMap<(u32, u64), u32> = HashMap::new();
    let all = &sharing;
    for (rank, sharing) in (0u32..).zip(all) {
        for chunk in sharing.chunks() {
            prop_assert!(chunk.range.end - chunk.range.start <= u64::from(chunk_blocks) * BLOCK_BYTES);
            prop_assert!(chunk.wanters.contains(&rank) && chunk.wanters.contains(&chunk.reader), "{:?}", chunk);
            let known = seen.entry((chunk.file, chunk.range.start)).or_insert_with(|| (chunk.clone(), 0));
            prop_assert_eq!(&known.0, &chunk);
            known.1 += 1;
            let run = (chunk.file, (chunk.range.start - DATA_START) / run_bytes, Arc::clone(&chunk.wanters));
            prop_assert_eq!(*readers.entry(run).or_insert(chunk.reader), chunk.reader, "one run, two readers");
            if chunk.reader == rank {
                for block in
                    (chunk.range.start - DATA_START) / BLOCK_BYTES..(chunk.range.end - DATA_START).div_ceil(BLOCK_BYTES)
                {
                    prop_assert_eq!(read.insert((chunk.file, block), rank), None, "block {} of {:?}", block, chunk);
                }
                let mut told: Vec<u32> = vec![rank];
                for (ranks, pieces) in sharing.pieces_of_others(&chunk) {
                    for &other in &ranks {
                        let mut own = all[other as usize].own_pieces(chunk.file, chunk.range.clone());
                        own.iter_mut().zip(&pieces).for_each(|(own, piece)| own.want = piece.want);
                        prop_assert_eq!(&own, &pieces);
                    }
                    told.extend(ranks);
                }
                told.sort_unstable();
                prop_assert_eq!(&told[..], &chunk.wanters[..]);
            }
        }
        for (wanted, given) in wants[rank as usize].iter().zip(given(manifest, &wants[rank as usize], sharing)) {
            let given: Option<Vec<(u32, u64)>> = given.into_iter().collect();
            prop_assert_eq!(given, Some(bytes_of(manifest, wanted)), "rank {}: {:?}", rank, wanted);
        }
    }
    for (chunk, ranks) in seen.values() {
        prop_assert_eq!(chunk.wanters.len(), *ranks, "{:?}", chunk);
    }
    Ok(())
}

fn take() -> impl Strategy<Value = Take> {
    prop_oneof![
        Just(Take::Nothing),
        Just(Take::Whole),
        (0..3usize, 0..4u64, 1..5u64).prop_map(|(dim, i, n)| Take::Shard(dim, i, n)),
        (0..=256u64, 0..=256u64).prop_map(|(a, b)| Take::Flat(a, b)),
    ]
}

fn tensor() -> impl Strategy<Value = Tensor> {
    let dtype = prop_oneof![Just(DType::U8), Just(DType::BF16), Just(DType::F32), Just(DType::C64)];
    let shape = prop_oneof![
        (1..50_000u64).prop_map(|n| vec![n]),
        (1..40u64, 1..2_500u64).prop_map(|(a, b)| vec![a, b]),
        (1..8u64, 1..20u64, 1..300u64).prop_map(|(a, b, c)| vec![a, b, c]),
        // Rows longer than a block.
        (1..4u64, 20_000..30_000u64).prop_map(|(a, b)| vec![a, b]),
    ];
    (dtype, shape, vec(0..=256u64, 0..3)).prop_map(|(dtype, shape, mut cuts)| {
        cuts.push(256);
        cuts.sort_unstable();
        let mut first = 0;
        let rows = cuts.into_iter().map(|cut| {
            let end = shape[0] * cut / 256;
            std::mem::replace(&mut first, end).abs_diff(end)
        });
        let rows = rows.filter(|&rows| rows > 0).collect();
        (dtype, shape, rows)
    })
}

type Case = (Vec<Tensor>, Vec<u64>, Vec<Vec<Take>>, Vec<Vec<bool>>, (u32, u64));

fn case() -> impl Strategy<Value = Case> {
    (vec(tensor(), 1..5), vec(0..70_000u64, 0..3), 1..6usize).prop_flat_map(|(tensors, values, world)| {
        let takes = vec(vec(take(), tensors.len()), world);
        let valued = vec(vec(any::<bool>(), values.len()), world);
        (Just(tensors), Just(values), takes, valued, (1..=CHUNK_BLOCKS_MAX, 0..5u64))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everybody_gets_everything_and_no_block_is_read_twice((tensors, values, takes, valued, cut) in case()) {
        let manifest = saved(&tensors, &values);
        let wants = takes.iter().zip(&valued).map(|(takes, valued)| {
            let mut wants = Vec::new();
            for ((leaf, (_, shape, _)), take) in (0..).zip(&tensors).zip(takes) {
                wants.extend(taken(take, shape).into_iter().map(|region| Wanted { leaf, region }));
            }
            let object = tensors.len() as u32;
            wants.extend((0..).zip(valued).filter(|(_, is)| **is).map(|(value, _)| Wanted::of_value(object, value)));
            wants.sort();
            wants.dedup();
            wants
        });
        check(&manifest, &wants.collect::<Vec<_>>(), cut)?;
    }
}

/// Returns the bytes that each rank reads.
fn shares(sharing: &[Sharing]) -> Vec<u64> {
    let own = |(rank, sharing): (u32, &Sharing)| {
        let mine = sharing.chunks().filter(|chunk| chunk.reader == rank);
        mine.map(|chunk| chunk.range.end - chunk.range.start).sum()
    };
    (0u32..).zip(sharing).map(own).collect()
}

#[test]
fn columns_of_rows_and_replicas_are_read_once_by_turns() {
    let (rows, columns) = (4096, 4096);
    let manifest = saved(&[(DType::F32, vec![rows, columns], vec![rows / 2; 2])], &[]);
    let half = |i: u64| Region::new(&[0, i * columns / 2], &[rows, columns / 2]);
    let wanted = |region: Region| vec![Wanted { leaf: 0, region }];
    let by_columns = [wanted(half(0)), wanted(half(1))];
    let replicas = vec![wanted(Region::whole(&[rows, columns])); 5];
    let both = [wanted(half(0)), wanted(half(1)), wanted(half(0)), wanted(half(1))];
    for (wants, run) in [&by_columns[..], &replicas, &both].into_iter().flat_map(|wants| [(wants, 1), (wants, 9)]) {
        let (matching, sharing) = plan(&manifest, wants, (CHUNK_BLOCKS_MAX, run));
        let (shares, bytes) = (shares(&sharing), rows * columns * 4);
        assert_eq!(shares.iter().sum::<u64>(), bytes);
        assert_eq!((matching.bytes_for_each, matching.bytes_for_all), (bytes * wants.len() as u64, bytes));
        assert_eq!(matching.peers_max as usize, wants.len() - 1);
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(most - least <= 2 * run * u64::from(CHUNK_BLOCKS_MAX) * BLOCK_BYTES, "{shares:?}");
    }
}

#[test]
fn ranks_that_want_different_blocks_hear_nothing() {
    let (rows, columns) = (64, 16_384);
    let manifest = saved(&[(DType::F32, vec![rows, columns], vec![rows / 2; 2])], &[]);
    let half = |i: u64| vec![Wanted { leaf: 0, region: Region::new(&[i * 32, 0], &[32, columns]) }];
    let matching = share(&manifest, &[half(0), half(1)], usize::MAX).unwrap().unwrap();
    assert_eq!(matching.common, [Common::default(), Common::default()]);
    assert_eq!((matching.peers_max, matching.bytes_for_each), (0, matching.bytes_for_all));
}

#[test]
fn what_cannot_be_told_or_is_unknown() {
    let manifest = saved(&[(DType::F32, vec![64, 64], vec![64])], &[5]);
    let columns: Vec<Vec<Wanted>> =
        (0..64).map(|i| vec![Wanted { leaf: 0, region: Region::new(&[0, i], &[64, 1]) }]).collect();
    // Each of them would have to get the wants of all others.
    assert!(share(&manifest, &columns, 64 * 63).unwrap().is_some());
    assert_eq!(share(&manifest, &columns, 64 * 63 - 1).unwrap(), None);
    for wanted in [
        Wanted { leaf: 2, region: Region::new(&[0], &[1]) },
        Wanted { leaf: 0, region: Region::new(&[60, 0], &[5, 1]) },
        Wanted { leaf: 1, region: Region::new(&[1], &[1]) },
    ] {
        let problem = share(&manifest, &[vec![wanted]], usize::MAX).unwrap_err().to_string();
        assert!(problem.contains("no part of the checkpoint"), "{problem}");
    }
}

/// Ranks of a mesh (data, pipeline, tensor): parameters by columns over the last one, the same on all of the first one,
/// the optimizer's state in a flat run for each rank.
fn large_job(data: u64) -> (Manifest, Vec<Vec<Wanted>>) {
    let (pipeline, tensor, layers, hidden) = (16, 8, 126, 16_384);
    let shapes = [(hidden, 18_432), (hidden, hidden), (106_496, hidden), (hidden, 53_248)];
    let mut tensors = Vec::new();
    for _ in 0..layers {
        tensors.extend(shapes.map(|(a, b)| (DType::BF16, vec![a, b], vec![a / 8; 8])));
    }
    let parameters = tensors.len() as u64;
    for _ in 0..2 * layers {
        tensors.extend(shapes.map(|(a, b)| (DType::F32, vec![a, b], vec![a / 64; 64])));
    }
    let mut wants = Vec::new();
    for rank in 0..data * pipeline * tensor {
        let (replica, stage, column) = (rank / tensor / pipeline, rank / tensor % pipeline, rank % tensor);
        let mut own = Vec::new();
        for (leaf, (_, shape, _)) in (0u64..).zip(&tensors) {
            if leaf % parameters / 4 * pipeline / layers != stage {
                continue;
            }
            if leaf < parameters {
                let width = shape[1] / tensor;
                let region = Region::new(&[0, column * width], &[shape[0], width]);
                own.push(Wanted { leaf: leaf as u32, region });
            } else if leaf % data == replica {
                // A run of its rank's rows that no other rank has.
                let run = shape[0] * shape[1] / tensor;
                let runs = Region::flat_run(shape, column * run + 7, (column + 1) * run);
                own.extend(runs.into_iter().map(|region| Wanted { leaf: leaf as u32, region }));
            }
        }
        own.sort();
        wants.push(own);
    }
    (saved(&tensors, &[]), wants)
}

/// Tests that a rank's messages do not grow with the number of its replicas.
#[test]
fn answers_are_small() {
    let told = |data: u64| {
        let (manifest, wants) = large_job(data);
        let matching = share(&manifest, &wants, usize::MAX).unwrap().unwrap();
        let told = matching.common.iter().map(|common| common.others.len() + common.sets.len()).max().unwrap();
        (told, matching.peers_max)
    };
    let ((few, few_peers), (many, many_peers)) = (told(2), told(6));
    assert!(many <= few + few / 4, "{few} for 2 replicas, {many} for 6");
    assert!(few_peers >= 15 && many_peers <= 3 * (few_peers + 16), "{few_peers} {many_peers}");
}
