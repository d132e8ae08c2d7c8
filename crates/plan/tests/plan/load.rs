//! Tests which reads a want becomes.

use std::collections::BTreeMap;

use shardfast_format::{DType, Extent, FileEntry, LeafName, Manifest, ManifestBuilder, Region, SaveInfo};
use shardfast_plan::{Error, Limits, Read, Want, load};

const START: u64 = 4096;

fn r(offsets: &[u64], lengths: &[u64]) -> Region {
    Region::new(offsets, lengths)
}

/// Makes one file with the regions of `model/w` in a row, an object `model/o` and an alias `model/a` of `w`.
fn manifest(dtype: DType, shape: &[u64], regions: &[Region]) -> Manifest {
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world: 1,
        created_unix_ms: 0,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::new(),
    };
    let mut offset = START;
    let extents: Vec<(Region, Extent)> = regions
        .iter()
        .map(|region| {
            let extent = Extent { file: 0, offset, bytes: region.numel() * dtype.size_bytes() };
            offset += extent.bytes;
            (region.clone(), extent)
        })
        .collect();
    let mut builder = ManifestBuilder::new(info);
    let path = "model/0.safetensors".to_owned();
    builder.file(FileEntry { path, bytes: offset + 8, data_start: START, header_crc: 0 });
    builder.tensor(&name("w"), dtype, shape, "", &extents);
    builder.object(&name("o"), "", &[(vec![0..1], Extent { file: 0, offset, bytes: 8 })]);
    builder.alias(&name("a"), &name("w"));
    builder.finish().unwrap()
}

fn name(name: &str) -> LeafName {
    LeafName::new("model", name)
}

/// A read: its offset from the data's start, its bytes, and its pieces' sources and lengths.
type Summary = (u64, u64, Vec<(u64, Vec<u64>)>);

/// Plans the reads of some regions of `model/w`.
fn reads(manifest: &Manifest, wanted: &[Region], gap_max_bytes: u64, read_max_bytes: u64) -> Vec<Summary> {
    let leaf = manifest.find(&name("w")).unwrap();
    let wants: Vec<Want> = wanted.iter().map(|region| Want { leaf, region: region.clone() }).collect();
    let summary = |read: Read| {
        let pieces = read.pieces.iter().map(|piece| (piece.src - START, piece.lengths.to_vec())).collect();
        (read.offset - START, read.bytes, pieces)
    };
    load(manifest, &wants, Limits { gap_max_bytes, read_max_bytes }).unwrap().map(summary).collect()
}

#[test]
fn a_whole_tensor_is_one_read_up_to_the_limit_and_rows_beyond() {
    let manifest = manifest(DType::F32, &[8, 4], &[r(&[0, 0], &[8, 4])]);
    let whole = [Region::whole(&[8, 4])];
    assert_eq!(reads(&manifest, &whole, 0, 128), [(0, 128, vec![(0, vec![8, 4])])]);
    let rows = |n: u64| (n * 16, 48.min(128 - n * 16), vec![(n * 16, vec![3.min(8 - n), 4])]);
    assert_eq!(reads(&manifest, &whole, 0, 63), [rows(0), rows(3), rows(6)]);
    // Shorter than a row: cut within it, by elements.
    let parts = reads(&manifest, &[r(&[2, 0], &[1, 4])], 0, 13);
    assert_eq!(parts, [(32, 12, vec![(32, vec![1, 3])]), (44, 4, vec![(44, vec![1, 1])])]);
    // Shorter than an element: elements.
    assert_eq!(
        reads(&manifest, &[r(&[2, 0], &[1, 2])], 0, 1),
        [(32, 4, vec![(32, vec![1, 1])]), (36, 4, vec![(36, vec![1, 1])])]
    );
}

#[test]
fn adjacent_parts_are_read_together() {
    let manifest = manifest(DType::U8, &[12], &[r(&[8], &[4]), r(&[0], &[4]), r(&[4], &[4])]);
    let pieces = vec![(0, vec![2]), (4, vec![4]), (8, vec![4])];
    // [8:12] lies first in the file; of it, [8:10] is wanted.
    assert_eq!(reads(&manifest, &[r(&[0], &[10])], 2, 12), [(0, 12, pieces.clone())]);
    assert_eq!(
        reads(&manifest, &[r(&[0], &[10])], 1, 12),
        [(0, 2, pieces[..1].to_vec()), (4, 8, pieces[1..].to_vec())]
    );
}

#[test]
fn a_column_is_read_by_rows_or_with_its_gaps() {
    let manifest = manifest(DType::U8, &[4, 10], &[r(&[0, 0], &[4, 10])]);
    let column = [r(&[0, 3], &[4, 2])];
    assert_eq!(reads(&manifest, &column, 8, 100), [(3, 32, vec![(3, vec![4, 2])])]);
    let row = |n: u64| (n * 10 + 3, 2, vec![(n * 10 + 3, vec![1, 2])]);
    assert_eq!(reads(&manifest, &column, 7, 100), [row(0), row(1), row(2), row(3)]);
}

#[test]
fn interleaved_columns_share_their_reads() {
    let manifest = manifest(DType::U8, &[6, 10], &[r(&[0, 0], &[6, 10])]);
    let columns = [r(&[0, 1], &[6, 1]), r(&[0, 8], &[6, 2]), r(&[0, 4], &[6, 1])];
    let rows = |first: u64| {
        let pieces = [(1, 1), (4, 1), (8, 2)].map(|(column, n)| (first * 10 + column, vec![3, n]));
        (first * 10 + 1, 29, pieces.to_vec())
    };
    // 39 bytes hold three rows of 10, and a read of three has room for each column in them.
    assert_eq!(reads(&manifest, &columns, 9, 39), [rows(0), rows(3)]);
}

#[test]
fn a_column_of_a_vast_matrix_costs_memory_for_one_row() {
    let rows = 1 << 40;
    let manifest = manifest(DType::F32, &[rows, 1 << 16], &[r(&[0, 0], &[rows, 1 << 16])]);
    let leaf = manifest.find(&name("w")).unwrap();
    let want = Want { leaf, region: r(&[0, 5], &[rows, 1]) };
    let mut reads = load(&manifest, &[want], Limits { gap_max_bytes: 0, read_max_bytes: 1 << 20 }).unwrap();
    assert_eq!(reads.nth(1000).unwrap().offset, START + (1000 << 18) + 20);
}

#[test]
fn wants_of_nothing_cost_nothing() {
    let tensor = manifest(DType::F32, &[3, 4], &[r(&[0, 0], &[3, 4])]);
    assert_eq!(reads(&tensor, &[r(&[3, 0], &[0, 4]), r(&[1, 1], &[2, 0])], 0, 9), []);
    assert_eq!(reads(&tensor, &[], 0, 9), []);
    let empty = manifest(DType::F32, &[0, 4], &[]);
    assert_eq!(reads(&empty, &[r(&[0, 0], &[0, 4])], 0, 9), []);
    let scalar = manifest(DType::F64, &[], &[r(&[], &[])]);
    assert_eq!(reads(&scalar, &[r(&[], &[])], 0, 1), [(0, 8, vec![(0, vec![])])]);
}

#[test]
fn pieces_say_where_they_go() {
    let manifest = manifest(DType::U8, &[4, 4], &[r(&[0, 0], &[4, 2]), r(&[0, 2], &[4, 2])]);
    let leaf = manifest.find(&name("w")).unwrap();
    let want = Want { leaf, region: r(&[1, 1], &[2, 3]) };
    let reads = load(&manifest, &[want], Limits { gap_max_bytes: 64, read_max_bytes: 64 }).unwrap();
    let pieces: Vec<_> = reads.flat_map(|read| read.pieces).collect();
    let fields: Vec<_> = pieces
        .iter()
        .map(|p| (p.src - START, p.lengths.to_vec(), p.src_strides.to_vec(), p.dst_offsets.to_vec(), p.span_bytes))
        .collect();
    let left = (3, vec![2, 1], vec![2, 1], vec![0, 0], 3);
    let right = (10, vec![2, 2], vec![2, 1], vec![0, 1], 4);
    assert_eq!(fields, [left, right]);
}

#[test]
fn every_wrong_want_is_named() {
    let manifest = manifest(DType::F32, &[3, 4], &[r(&[0, 0], &[3, 4])]);
    let find = |leaf: &str| manifest.find(&name(leaf)).unwrap();
    let want = |leaf: usize, region: Region| Want { leaf, region };
    let wants = [
        want(find("w"), r(&[0, 0], &[3, 4])),
        want(find("w"), r(&[0, 2], &[3, 3])),
        want(find("w"), r(&[0], &[3])),
        want(find("o"), r(&[], &[])),
        want(find("a"), r(&[0, 0], &[3, 4])),
        want(3, r(&[], &[])),
    ];
    let error = load(&manifest, &wants, Limits { gap_max_bytes: 0, read_max_bytes: 64 }).unwrap_err();
    assert!(matches!(error, Error::Invalid(_)));
    assert_eq!(
        error.problems(),
        [
            "model/w: requested [0:3, 2:5] lies outside the shape [3, 4]",
            "model/w: requested [0:3] lies outside the shape [3, 4]",
            "model/o: [] is requested of a non-tensor",
            "model/a: [0:3, 0:4] is requested of a non-tensor",
            "want 5: there is no leaf 3, the checkpoint has 3",
        ]
    );
    assert!(error.to_string().starts_with("5 problems:\n  model/w: requested [0:3, 2:5]"));
}

#[test]
fn a_tensor_whose_saved_parts_overlap_is_corrupt() {
    // As many elements as the tensor has, but two of them twice and two never.
    let manifest = manifest(DType::U8, &[2, 4], &[r(&[0, 0], &[2, 2]), r(&[0, 1], &[2, 2])]);
    let leaf = manifest.find(&name("w")).unwrap();
    let limits = Limits { gap_max_bytes: 0, read_max_bytes: 64 };
    let error = load(&manifest, &[Want { leaf, region: r(&[0, 0], &[1, 1]) }], limits).unwrap_err();
    assert!(matches!(error, Error::Corrupt(_)));
    assert_eq!(
        error.to_string(),
        "model/w: the saved parts of [2, 4] must hold each element once: [0:2, 0:2] overlaps [0:2, 1:3]"
    );
    assert!(load(&manifest, &[], limits).is_ok());
}

/// Tests 20,000 saved and 20,000 wanted parts: a pairwise search would intersect four hundred million times.
#[test]
fn many_parts_are_found_in_near_linear_time() {
    let n = 20_000;
    let saved: Vec<Region> = (0..n).map(|i| r(&[0, i * 3], &[4, 3])).collect();
    let manifest = manifest(DType::U8, &[4, n * 3], &saved);
    let wanted: Vec<Region> = (0..n - 1).map(|i| r(&[0, i * 3 + 1], &[4, 3])).collect();
    let reads = reads(&manifest, &wanted, 2, u64::MAX);
    assert_eq!(reads.len(), 1);
    assert_eq!(reads[0].2.len() as u64, 2 * (n - 1));
}
