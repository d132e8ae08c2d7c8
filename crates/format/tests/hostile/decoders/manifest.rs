//! Checks decoded manifests.

use shardfast_format::{DType, Error, Extent, LeafKind, LeafName, Manifest};

#[allow(dead_code)] // the tests of well-formed manifests only need the promises
pub(crate) fn decode(bytes: &[u8]) -> Result<Manifest, Error> {
    Manifest::decode(bytes)
}

/// Checks the promises of a manifest to its readers.
pub(crate) fn hold(_bytes: &[u8], manifest: &Manifest) {
    let again = Manifest::decode(&manifest.encode()).expect("what was decoded can be encoded");
    assert_eq!(&again, manifest);
    let inside = |extent: Extent| {
        let file = &manifest.files()[extent.file as usize];
        assert!(file.data_start <= extent.offset && extent.offset + extent.bytes <= file.bytes);
    };
    for file in manifest.files() {
        assert!(file.data_start <= file.bytes && !file.path.split('/').any(|part| part.is_empty() || part == ".."));
    }
    let mut last = None;
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        let name = LeafName::new(leaf.key, leaf.name);
        assert_eq!(manifest.find(&name), Some(i));
        assert!(last.is_none_or(|last| last < name));
        last = Some(name);
        let (regions, values) = (manifest.regions(i).len(), manifest.values(i).len());
        match leaf.kind {
            LeafKind::Tensor { dtype, shape } => tensor(manifest, i, dtype, shape),
            LeafKind::Object => assert!(regions == 0 && values > 0),
            LeafKind::Alias { of } => {
                assert!(regions == 0 && values == 0);
                assert!(matches!(manifest.leaf(of).kind, LeafKind::Tensor { .. }));
            }
        }
        manifest.regions(i).for_each(|(_, extent)| inside(extent));
        let mut ranks = Vec::new();
        for (saved_by, extent) in manifest.values(i) {
            inside(extent);
            assert!(saved_by.iter().all(|range| range.start < range.end && range.end <= manifest.info.world));
            ranks.extend(saved_by);
        }
        ranks.sort_by_key(|range| range.start);
        assert!(ranks.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
}

fn tensor(manifest: &Manifest, i: usize, dtype: DType, shape: &[u64]) {
    let mut covered = 0;
    for (region, extent) in manifest.regions(i) {
        assert!(region.fits(shape));
        assert_eq!(region.numel() * dtype.size_bytes(), extent.bytes);
        covered += region.numel();
    }
    let numel = if shape.contains(&0) { 0 } else { shape.iter().product() };
    assert_eq!(covered, numel);
}
