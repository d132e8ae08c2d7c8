//! Tests distributed optimizers: flat shards of a buffer of many tensors, loaded as flat shards again or as boxes.

use std::collections::BTreeMap;

use shardfast_format::{DType, Extent, FileEntry, LeafName, Manifest, ManifestBuilder, Region, SaveInfo};
use shardfast_plan::{Limits, Read, Want, load, tiles};

const SHAPES: [&[u64]; 4] = [&[300, 77, 5], &[1001, 13], &[4099], &[16, 1, 999]];
const TENSORS: usize = 60;

fn shape(tensor: usize) -> &'static [u64] {
    SHAPES[tensor % SHAPES.len()]
}

fn numel(tensor: usize) -> u64 {
    shape(tensor).iter().product()
}

/// Returns the regions of each tensor that one of `dp` ranks has of a buffer of all of them, cut evenly.
fn shard(dp: u64, rank: u64) -> Vec<(usize, Region)> {
    let total: u64 = (0..TENSORS).map(numel).sum();
    let (start, stop) = (total * rank / dp, total * (rank + 1) / dp);
    let mut at = 0;
    let mut out = Vec::new();
    for tensor in 0..TENSORS {
        let (first, end) = (at, at + numel(tensor));
        let run = start.clamp(first, end) - first..stop.clamp(first, end) - first;
        out.extend(Region::flat_run(shape(tensor), run.start, run.end).map(|region| (tensor, region)));
        at = end;
    }
    out
}

/// Returns the writes of `dp` ranks, a file each, and the number of regions.
fn saved(dp: u64) -> (Manifest, usize) {
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world: dp as u32,
        created_unix_ms: 0,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::new(),
    };
    let mut builder = ManifestBuilder::new(info);
    let mut tensors: Vec<Vec<(Region, Extent)>> = vec![Vec::new(); TENSORS];
    for rank in 0..dp {
        let mut offset = 4096;
        for (tensor, region) in shard(dp, rank) {
            let extent = Extent { file: rank as u32, offset, bytes: region.numel() * 4 };
            offset += extent.bytes;
            tensors[tensor].push((region, extent));
        }
        let path = format!("optimizer/{rank}.safetensors");
        builder.file(FileEntry { path, bytes: offset, data_start: 4096, header_crc: 0 });
    }
    let count = tensors.iter().map(Vec::len).sum();
    for (tensor, regions) in tensors.iter().enumerate() {
        builder.tensor(&LeafName::new("optimizer", format!("t{tensor:03}")), DType::F32, shape(tensor), "", regions);
    }
    (builder.finish().unwrap(), count)
}

/// Returns the pieces for all ranks' wants, and checks that they fill each want exactly once.
fn pieces(manifest: &Manifest, ranks: Vec<Vec<(usize, Region)>>) -> usize {
    let limits = Limits { gap_max_bytes: 0, read_max_bytes: 1 << 30 };
    let mut pieces = 0;
    for wants in ranks {
        let wants: Vec<Want> = wants.into_iter().map(|(leaf, region)| Want { leaf, region }).collect();
        let reads: Vec<Read> = load(manifest, &wants, limits).unwrap().collect();
        let mut filled: Vec<Vec<Region>> = vec![Vec::new(); wants.len()];
        for piece in reads.iter().flat_map(|read| &read.pieces) {
            pieces += 1;
            filled[piece.want as usize].push(Region::new(&piece.dst_offsets, &piece.lengths));
        }
        for (want, filled) in wants.iter().zip(&filled) {
            assert_eq!(tiles(&want.region.lengths, filled), Ok(()));
        }
    }
    pieces
}

/// Tests two flat shardings, which cut one line in two ways: there are no more pieces than regions of both.
#[test]
fn flat_targets_take_time_for_the_regions_of_their_runs() {
    for (saving, loading) in [(4, 3), (3, 4), (70, 64), (1, 16), (16, 1)] {
        let (manifest, regions) = saved(saving);
        let wanted: Vec<_> = (0..loading).map(|rank| shard(loading, rank)).collect();
        let wants: usize = wanted.iter().map(Vec::len).sum();
        let found = pieces(&manifest, wanted);
        assert!(found >= regions.max(wants) && found <= regions + wants, "{found} of {regions} and {wants}");
    }
}

#[test]
fn flat_shards_load_as_boxes() {
    let (manifest, regions) = saved(4);
    for d in 0..2 {
        let column = |rank: u64| -> Vec<(usize, Region)> {
            let whole = (0..TENSORS).map(|tensor| (tensor, Region::whole(shape(tensor))));
            let cut = whole.filter_map(|(tensor, mut part)| {
                let d = d.min(part.ndim() - 1);
                let length = part.lengths[d];
                part.offsets[d] = length * rank / 3;
                part.lengths[d] = length * (rank + 1) / 3 - part.offsets[d];
                (!part.is_empty()).then_some((tensor, part))
            });
            cut.collect()
        };
        let found = pieces(&manifest, (0..3).map(column).collect());
        // Columns of contiguous rows are pieces row by row, so only rows can be counted.
        assert!(d > 0 || found <= regions + 3 * TENSORS, "{found} of {regions}");
    }
}
