//! Makes the manifest of a small checkpoint with every kind of leaf.

use std::collections::BTreeMap;

use shardfast_format::{
    Commit, DType, Extent, FORMAT_MAJOR, FORMAT_MINOR, FileEntry, LeafName, Manifest, ManifestBuilder, Region,
    SaveInfo, manifest_name, sha256,
};

pub(crate) const ATTEMPT: &str = "0123456789abcdef";

pub(crate) fn info() -> SaveInfo {
    SaveInfo {
        attempt: ATTEMPT.to_owned(),
        step: Some(1000),
        world: 4,
        created_unix_ms: 1_763_596_800_123,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::from([("note".to_owned(), "before \"the\" merge".to_owned())]),
    }
}

pub(crate) fn file(path: &str, bytes: u64) -> FileEntry {
    FileEntry { path: path.to_owned(), bytes, data_start: 4096, header_crc: 0x1122_3344_5566_7788 }
}

pub(crate) fn extent(file: u32, offset: u64, bytes: u64) -> Extent {
    Extent { file, offset, bytes }
}

pub(crate) fn builder() -> ManifestBuilder {
    let mut builder = ManifestBuilder::new(info());
    let weights = builder.file(file("model/00000-000-0123456789abcdef.safetensors", 4096 + 200));
    let extra = builder.file(file("extra/00001-000-0123456789abcdef.safetensors", 4096 + 12));
    let halves = [
        (Region::new(&[2, 0], &[2, 6]), extent(weights, 4096 + 48, 48)),
        (Region::new(&[0, 0], &[2, 6]), extent(weights, 4096, 48)),
    ];
    builder.tensor(&LeafName::new("model", "w"), DType::F32, &[4, 6], "mesh(dp=2) [Shard(0)]", &halves);
    let scalar = [(Region::whole(&[]), extent(weights, 4096 + 96, 8))];
    builder.tensor(&LeafName::new("model", "step"), DType::I64, &[], "", &scalar);
    builder.tensor(&LeafName::new("model", "none"), DType::BF16, &[0, 3], "", &[]);
    builder.alias(&LeafName::new("model", "tied"), &LeafName::new("model", "w"));
    let values = [(vec![1..2], extent(extra, 4096 + 9, 3)), (vec![0..1, 2..4], extent(extra, 4096, 9))];
    builder.object(&LeafName::new("extra", "rng"), "", &values);
    builder
}

pub(crate) fn manifest() -> Manifest {
    builder().finish().unwrap()
}

pub(crate) fn commit(manifest: &[u8]) -> Commit {
    Commit {
        major: FORMAT_MAJOR,
        minor: FORMAT_MINOR,
        attempt: ATTEMPT.to_owned(),
        manifest: manifest_name(ATTEMPT),
        manifest_bytes: manifest.len() as u64,
        manifest_sha256: sha256(manifest),
    }
}
