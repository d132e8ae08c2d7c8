//! Tests the assembly of ranks' writes, and the errors when elements are missing or written twice.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use shardfast_format::{DType, Extent, FileEntry, LeafKind, LeafName, Manifest, ManifestBuilder, Region, SaveInfo};
use shardfast_plan::{Assembly, Error};

use crate::spread::{job, shape};

const DATA_START: u64 = 4096;

fn builder(world: u32) -> ManifestBuilder {
    let info = SaveInfo {
        attempt: "0123456789abcdef".to_owned(),
        step: None,
        world,
        created_unix_ms: 0,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::new(),
    };
    let mut builder = ManifestBuilder::new(info);
    for rank in 0..world {
        let path = format!("model/{rank}.safetensors");
        builder.file(FileEntry { path, bytes: 1 << 40, data_start: DATA_START, header_crc: 0 });
    }
    builder
}

/// Report of a rank about a tensor.
struct Said<'a> {
    rank: u32,
    name: &'a LeafName,
    dtype: DType,
    shape: &'a [u64],
    regions: Vec<Region>,
}

/// Simulates ranks with one file each, written front to back.
fn assemble(world: u32, said: &[Said]) -> Result<Manifest, Error> {
    let mut builder = builder(world);
    let mut assembly = Assembly::default();
    let mut ends = vec![DATA_START; world as usize];
    let layouts: Vec<String> = (0..world).map(|rank| format!("said by {rank}")).collect();
    for Said { rank, name, dtype, shape, regions } in said {
        let end = &mut ends[*rank as usize];
        let placed = regions.iter().map(|region| {
            let at = *end;
            *end += region.checked_numel().unwrap_or(0) * dtype.size_bytes();
            (region.clone(), *rank, at)
        });
        assembly.tensor(*rank, name, (*dtype, shape), &layouts[*rank as usize], placed.collect::<Vec<_>>());
    }
    assembly.finish(&mut builder)?;
    Ok(builder.finish().unwrap())
}

fn problems(world: u32, said: &[Said]) -> Vec<String> {
    match assemble(world, said).unwrap_err() {
        Error::Invalid(problems) => problems.0,
        error => panic!("{error:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tests every choice of writers and every order of reports: all elements exactly once make a manifest, and
    /// anything less or more does not.
    #[test]
    fn all_of_each_tensor_once_is_a_manifest(
        job in job(3),
        shapes in prop::collection::vec(shape(), 3),
        turn in any::<Index>(),
        victim in any::<Index>(),
    ) {
        let world = job.world() as u32;
        let names: Vec<LeafName> = (0..3).map(|i| LeafName::new("model", format!("w{i}"))).collect();
        let mut said = Vec::new();
        let mut written: Vec<Vec<Region>> = vec![Vec::new(); 3];
        for rank in 0..world {
            let rank = (rank + turn.index(world as usize) as u32) % world;
            for (i, shape) in shapes.iter().enumerate() {
                // The first who has it.
                let mut regions = job.parts(i, shape, u64::from(rank));
                regions.retain(|region| !written[i].contains(region));
                written[i].extend_from_slice(&regions);
                said.push(Said { rank, name: &names[i], dtype: DType::BF16, shape, regions });
            }
        }
        let manifest = assemble(world, &said).unwrap();
        for (i, shape) in shapes.iter().enumerate() {
            let leaf = manifest.find(&names[i]).unwrap();
            prop_assert_eq!(manifest.leaf(leaf).kind, LeafKind::Tensor { dtype: DType::BF16, shape });
            let mut found: Vec<(Region, Extent)> = manifest.regions(leaf).collect();
            prop_assert!(found.iter().all(|(region, extent)| extent.bytes == region.numel() * 2));
            found.retain(|(region, _)| !written[i].contains(region));
            prop_assert_eq!(found, []);
            prop_assert_eq!(manifest.regions(leaf).len(), written[i].len());
        }

        let places: Vec<(usize, usize)> =
            said.iter().enumerate().flat_map(|(i, said)| (0..said.regions.len()).map(move |j| (i, j))).collect();
        if places.is_empty() {
            return Ok(());
        }
        let (i, j) = places[victim.index(places.len())];
        let region = said[i].regions[j].clone();
        said[i].regions.push(region.clone());
        let twice = format!("{}: {region} by rank {} was written twice", said[i].name, said[i].rank);
        prop_assert_eq!(problems(world, &said), [twice]);
        said[i].regions.retain(|other| *other != region);
        let missing = format!("{}: no rank wrote ", said[i].name);
        let found = problems(world, &said);
        prop_assert!(found.len() == 1 && found[0].starts_with(&missing), "{found:?}");
    }
}

#[test]
fn every_flaw_is_named_with_its_ranks() {
    let names = ["a", "b", "c", "d", "e", "f"].map(|name| LeafName::new("model", name));
    let r = |offset: u64, length: u64| Region::new(&[offset], &[length]);
    let say = |rank, name: usize, dtype, shape, regions: &[Region]| Said {
        rank,
        name: &names[name],
        dtype,
        shape,
        regions: regions.to_vec(),
    };
    let u8s = |rank, name, regions: &[Region]| say(rank, name, DType::U8, &[9], regions);
    let said = [
        u8s(0, 0, &[r(0, 5)]),
        u8s(0, 1, &[]),
        u8s(0, 2, &[r(0, 9)]),
        u8s(0, 3, &[r(0, 9)]),
        u8s(0, 4, &[r(0, 9)]),
        u8s(1, 5, &[]),
        u8s(3, 0, &[r(4, 5)]),
        u8s(3, 1, &[r(2, 7)]),
        u8s(3, 2, &[r(5, 5)]),
        say(3, 3, DType::I8, &[9], &[]),
        u8s(3, 4, &[r(0, 9)]),
    ];
    assert_eq!(
        problems(4, &said),
        [
            "model/d: expected the same on all ranks, found a tensor U8 [9] on rank 0, a tensor I8 [9] on rank 3",
            "model/a: [0:5] by rank 0 was written, which overlaps [4:9] by rank 3",
            "model/b: no rank wrote [0:2] of the shape [9]",
            "model/c: [5:10] by rank 3 was written, outside the shape [9]",
            "model/e: [0:9] by ranks 0, 3 was written twice",
            "model/f: no rank wrote [0:9] of the shape [9]",
        ]
    );
    // Nothing can be missing of what has no elements.
    let empty = assemble(4, &[say(2, 0, DType::U8, &[0, 7], &[])]).unwrap();
    assert_eq!((empty.len(), empty.leaf(0).layout), (1, "said by 2"));
}
