//! Everything that can be wrong with a checkpoint is found, and the right leaves are named.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardfast_engine::{Engine, Kind, Timeout, ValueRef};
use shardfast_format::{
    BLOCK_BYTES, Commit, DType, Extent, FileEntry, LeafKind, LeafName, Manifest, ManifestBuilder, Region, Tag, Value,
    hugging_face_index, manifest_name, object as objects, sha256,
};
use shardfast_store::Store;
use shardfast_tools::verify::{Finding, Problem};
use shardfast_tools::{VerifyReport, diff, export, summary, verify, verify_in};

use crate::checkpoints::*;
use crate::stores::Faulty;

fn report(dir: &Path) -> VerifyReport {
    verify(&Engine::new(shardfast_coord::solo(), 16 << 20).unwrap(), dir.to_str().unwrap(), &|_, _| ()).unwrap()
}

fn saved(ranks: Vec<Vec<Held>>) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("step-00000007");
    save_ranks(place.to_str().unwrap(), Some(7), ranks);
    (dir, place)
}

/// Returns every extent of the checkpoint's leaves, by file, from its manifest.
fn extents(place: &Path) -> BTreeMap<String, Vec<(String, Range<u64>)>> {
    let checkpoint = opened(place.to_str().unwrap());
    let manifest = checkpoint.manifest();
    let mut by_file: BTreeMap<String, Vec<(String, Range<u64>)>> = BTreeMap::new();
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        let of_regions = manifest.regions(i).map(|(_, extent)| extent);
        for Extent { file, offset, bytes } in of_regions.chain(manifest.values(i).map(|(_, extent)| extent)) {
            let path = manifest.files()[file as usize].path.clone();
            by_file.entry(path).or_default().push((format!("{}/{}", leaf.key, leaf.name), offset..offset + bytes));
        }
    }
    by_file
}

fn flip(path: &Path, byte: u64, bit: u8) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[byte as usize] ^= 1 << bit;
    std::fs::write(path, bytes).unwrap();
}

fn names(finding: &Finding) -> BTreeSet<String> {
    finding.leaves.iter().map(|hit| hit.leaf.clone()).collect()
}

fn only(report: &VerifyReport) -> &Finding {
    assert_eq!(report.findings.len(), 1, "{:#?}", report.findings);
    &report.findings[0]
}

#[test]
fn a_sound_checkpoint_is_sound_and_read_whole() {
    let (_dir, place) = saved(two_ranks());
    let progress = std::sync::Mutex::new(Vec::new());
    let url = place.to_str().unwrap();
    let report = verify(&Engine::solo(), url, &|done, total| progress.lock().unwrap().push((done, total))).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    let data: u64 = opened(url).manifest().files().iter().map(|file| file.bytes - file.data_start).sum();
    assert_eq!((report.bytes, report.step, report.leaves, report.files), (data, Some(7), 9, 6));
    // `args` is equal on both ranks, `rng` is not.
    assert_eq!(report.values, 3);
    assert_eq!(progress.lock().unwrap().iter().max(), Some(&(data, data)));
}

#[test]
fn a_flipped_bit_in_any_block_names_exactly_the_leaves_of_that_block() {
    let (_dir, place) = saved(two_ranks());
    let manifest = opened(place.to_str().unwrap()).manifest().clone();
    let extents = extents(&place);
    let mut seed = 1u64;
    let mut blocks = 0;
    for file in manifest.files() {
        for start in (file.data_start..file.bytes).step_by(BLOCK_BYTES as usize) {
            let end = file.bytes.min(start + BLOCK_BYTES);
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (byte, bit) = (start + (seed >> 20) % (end - start), (seed >> 60) as u8 % 8);
            flip(&place.join(&file.path), byte, bit);
            let report = report(&place);
            let finding = only(&report);
            assert_eq!((finding.problem, finding.file.as_deref()), (Problem::Block, Some(file.path.as_str())));
            let block = finding.block.as_ref().unwrap();
            assert_eq!((block.start, block.end), (start, end));
            assert_ne!(block.expected, block.found);
            let expected: BTreeSet<String> = extents[&file.path]
                .iter()
                .filter(|(_, span)| !span.is_empty() && span.start < end && start < span.end)
                .map(|(name, _)| name.clone())
                .collect();
            assert_eq!(names(finding), expected);
            assert_eq!(report.leaves_damaged, expected.into_iter().collect::<Vec<_>>());
            assert_the_element_is_named(&manifest, finding, &file.path, byte);
            flip(&place.join(&file.path), byte, bit);
            blocks += 1;
        }
    }
    assert!(blocks > 8, "{blocks}");
    assert!(report(&place).is_sound());
}

/// Checks that the element, or the rank's value, that has this byte is among those that the finding names.
fn assert_the_element_is_named(manifest: &Manifest, finding: &Finding, path: &str, byte: u64) {
    let is_here = |extent: &Extent| {
        manifest.files()[extent.file as usize].path == path
            && (extent.offset..extent.offset + extent.bytes).contains(&byte)
    };
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        let hit = || finding.leaves.iter().find(|hit| hit.leaf == format!("{}/{}", leaf.key, leaf.name)).unwrap();
        if let LeafKind::Tensor { dtype, .. } = leaf.kind {
            for (region, extent) in manifest.regions(i).filter(|(_, extent)| is_here(extent)) {
                let mut flat = (byte - extent.offset) / dtype.size_bytes();
                let mut index = vec![0; region.ndim()];
                for d in (0..region.ndim()).rev() {
                    index[d] = region.offsets[d] + flat % region.lengths[d];
                    flat /= region.lengths[d];
                }
                let element = Region::new(&index, &vec![1; index.len()]);
                let named: Vec<&Region> =
                    hit().regions.iter().filter(|hit| hit.ndim() == 0 || hit.intersect(&element).is_some()).collect();
                assert_eq!(named.len(), 1, "{element} in {:?}", hit().regions);
                // Only what lies in the block is hit, not all that the file has.
                let block = finding.block.as_ref().unwrap();
                let most = (block.end - block.start) / dtype.size_bytes();
                assert!(hit().regions.iter().map(Region::numel).sum::<u64>() <= most);
            }
        }
        for (ranks, _) in manifest.values(i).filter(|(_, extent)| is_here(extent)) {
            assert!(ranks.iter().all(|range| hit().ranks.contains(range)), "{ranks:?} in {:?}", hit().ranks);
        }
    }
}

#[test]
fn all_damage_is_collected() {
    let (_dir, place) = saved(two_ranks());
    let manifest = opened(place.to_str().unwrap()).manifest().clone();
    let mut blocks = 0;
    for file in manifest.files() {
        let path = place.join(&file.path);
        for start in (file.data_start..file.bytes).step_by(BLOCK_BYTES as usize) {
            flip(&path, start, 0);
            blocks += 1;
        }
    }
    let report = report(&place);
    assert_eq!(report.findings.len(), blocks);
    assert_eq!((report.blocks, report.findings_left_out), (blocks as u64, 0));
    // All but the alias and the tensor without elements; a damaged value is not decoded as well.
    assert_eq!(report.leaves_damaged.len(), 7);
    assert_eq!(report.values, 0);
}

#[test]
fn missing_shortened_lengthened_and_foreign_files_name_all_that_they_hold() {
    let (_dir, place) = saved(two_ranks());
    let (_other_dir, other) = saved(two_ranks_of(100));
    let foreign: Vec<PathBuf> = extents(&other).keys().map(|path| other.join(path)).collect();
    for (i, (path, held)) in extents(&place).iter().enumerate() {
        let path_on_disk = place.join(path);
        let good = std::fs::read(&path_on_disk).unwrap();
        let all: BTreeSet<String> = held.iter().map(|(name, _)| name.clone()).collect();
        let mut longer = good.clone();
        longer.push(0);
        let mut bad_header = good.clone();
        bad_header[100 + 37 * i] ^= 1;
        let cases = [
            (None, "is missing"),
            (Some(good[..good.len() - 1].to_vec()), "expected"),
            (Some(Vec::new()), "expected"),
            (Some(longer), "expected"),
            (Some(bad_header), "header"),
            (Some(std::fs::read(&foreign[i]).unwrap()), "header"),
        ];
        for (contents, said) in cases {
            match contents {
                Some(contents) => std::fs::write(&path_on_disk, contents).unwrap(),
                None => std::fs::remove_file(&path_on_disk).unwrap(),
            }
            let report = report(&place);
            let finding = only(&report);
            assert_eq!((finding.problem, finding.file.as_ref()), (Problem::File, Some(path)));
            assert_eq!(names(finding), all, "{path}");
            assert!(finding.message.contains(said) && finding.message.contains(path), "{}", finding.message);
        }
        std::fs::write(&path_on_disk, good).unwrap();
    }
    assert!(report(&place).is_sound());
}

#[test]
fn swapped_files_are_both_found() {
    let (_dir, place) = saved(two_ranks());
    let extents = extents(&place);
    let model: Vec<&String> = extents.keys().filter(|path| path.starts_with("model/0")).collect();
    let (a, b) = (place.join(model[0]), place.join(model[1]));
    let (contents_a, contents_b) = (std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    std::fs::write(&a, contents_b).unwrap();
    std::fs::write(&b, contents_a).unwrap();
    let report = report(&place);
    let found: Vec<Option<&String>> = report.findings.iter().map(|finding| finding.file.as_ref()).collect();
    assert_eq!(found, [Some(model[0]), Some(model[1])]);
    assert!(report.findings.iter().all(|finding| finding.problem == Problem::File));
}

#[test]
fn a_broken_commit_or_manifest_is_the_only_finding() {
    let (_dir, place) = saved(two_ranks());
    let manifest = manifest_name(&opened(place.to_str().unwrap()).manifest().info.attempt);
    for (name, problem, every) in [("COMMIT", Problem::Commit, 7), (manifest.as_str(), Problem::Manifest, 977)] {
        let path = place.join(name);
        let good = std::fs::read(&path).unwrap();
        for bit in (0..good.len() * 8).step_by(every) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, bad).unwrap();
            assert_eq!(only(&report(&place)).problem, problem, "bit {bit} of {name}");
        }
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert_eq!(only(&report(&place)).problem, problem, "{name} cut short");
        std::fs::write(&path, good).unwrap();
    }
    std::fs::remove_file(place.join(&manifest)).unwrap();
    assert_eq!(only(&report(&place)).problem, Problem::Manifest);
    std::fs::remove_file(place.join("COMMIT")).unwrap();
    let url = place.to_str().unwrap();
    assert_eq!(verify(&Engine::solo(), url, &|_, _| ()).unwrap_err().kind, Kind::NotFound);
}

/// Tests that a `COMMIT` that is no file counts as damage, not as a missing commit.
#[test]
fn a_commit_that_is_no_file_is_damage_and_does_not_block() {
    let (dir, place) = saved(two_ranks());
    let commit = place.join("COMMIT");
    std::fs::remove_file(&commit).unwrap();
    let run = dir.path().to_str().unwrap();
    type Make = fn(&Path);
    let makes: [(&str, Make); 4] = [
        ("pipe", |path| {
            let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
            rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
        }),
        ("directory", |path| std::fs::create_dir(path).unwrap()),
        ("device", |path| std::os::unix::fs::symlink("/dev/zero", path).unwrap()),
        ("socket", |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap())),
    ];
    for (what, make) in makes {
        make(&commit);
        let found = report(&place);
        assert_eq!(only(&found).problem, Problem::Commit, "{what}");
        assert!(only(&found).message.contains("expected a file"), "{what}: {}", only(&found).message);
        let steps = shardfast_engine::runs::list(run).unwrap();
        assert_eq!(steps[0].commit.as_ref().unwrap_err().kind, Kind::Corrupt, "{what}");
        let listed = shardfast_tools::history(run, &Timeout::default()).unwrap();
        assert_eq!(listed.checkpoints[0].status, shardfast_tools::inspect::Status::Unreadable, "{what}");
        let opened =
            shardfast_engine::open(&Engine::solo(), place.to_str().unwrap(), std::time::Duration::from_secs(60));
        assert_eq!(opened.err().unwrap().kind, Kind::Corrupt, "{what}");
        std::fs::remove_file(&commit).or_else(|_| std::fs::remove_dir(&commit)).unwrap();
    }
    assert_eq!(
        shardfast_tools::history(run, &Timeout::default()).unwrap().checkpoints[0].status,
        shardfast_tools::inspect::Status::Incomplete
    );
}

#[test]
fn an_index_that_lies_is_found() {
    let whole = Tensor::random(1, DType::F32, &[4, 4]);
    let (_dir, place) = saved(vec![vec![whole.whole("model", "w")]]);
    let index = place.join("model/model.safetensors.index.json");
    let good = std::fs::read_to_string(&index).unwrap();
    for bad in [good.replace("\"w\"", "\"v\""), good.replace("64", "63"), good.clone() + "\n"] {
        std::fs::write(&index, bad).unwrap();
        let report = report(&place);
        assert_eq!((only(&report).problem, report.leaves_damaged.len()), (Problem::Index, 0));
    }
    std::fs::remove_file(&index).unwrap();
    assert_eq!(only(&report(&place)).problem, Problem::Index);
    std::fs::write(&index, &good).unwrap();
    assert!(report(&place).is_sound());

    let half = |rank: u64| vec![whole.held("model", "w", &[Region::new(&[rank * 2, 0], &[2, 4])])];
    let (_dir, place) = saved(vec![half(0), half(1)]);
    std::fs::write(place.join("model/model.safetensors.index.json"), good).unwrap();
    assert_eq!(only(&report(&place)).problem, Problem::Index);
}

#[test]
fn values_that_mean_nothing_are_found() {
    let tensor_ref = |name: &str| Value::Tagged(Tag::TensorRef, Box::new(Value::List(vec![text("model"), text(name)])));
    let list = |items| Value::List(items);
    let (_dir, place) = saved(vec![vec![
        Tensor::random(1, DType::U8, &[3]).whole("model", "w"),
        object("extra", "good", &list(vec![tensor_ref("w")])),
        object("extra", "lost", &dict(&[("a", list(vec![tensor_ref("v")]))])),
        encoded("extra", "noise", vec![0xff, 0x00]),
        encoded("extra", "longer", vec![0xf6, 0xf6]),
    ]]);
    let report = report(&place);
    assert_eq!(report.leaves_damaged, ["extra/longer", "extra/lost", "extra/noise"]);
    assert!(report.findings.iter().all(|finding| finding.problem == Problem::Value));
    let lost = report.findings.iter().find(|finding| names(finding).contains("extra/lost")).unwrap();
    assert!(lost.message.contains("model/v"), "{}", lost.message);
}

/// Writes another manifest over the checkpoint's own, committed as if it were the right one.
fn forge(place: &Path, builder: impl FnOnce(&Manifest, &mut ManifestBuilder)) {
    forge_of(place, |_| (), builder);
}

/// Forges like [`forge`] with other sizes of the files.
fn forge_sizes(place: &Path, size: impl Fn(u64) -> u64, builder: impl FnOnce(&Manifest, &mut ManifestBuilder)) {
    forge_of(place, |files| files.iter_mut().for_each(|file| file.bytes = size(file.bytes)), builder);
}

/// Forges like [`forge`] with other files.
fn forge_of(place: &Path, of: impl FnOnce(&mut [FileEntry]), builder: impl FnOnce(&Manifest, &mut ManifestBuilder)) {
    let manifest = opened(place.to_str().unwrap()).manifest().clone();
    let mut forged = ManifestBuilder::new(manifest.info.clone());
    let mut files = manifest.files().to_vec();
    of(&mut files);
    files.into_iter().for_each(|file| _ = forged.file(file));
    builder(&manifest, &mut forged);
    let forged = forged.finish().unwrap();
    let index = place.join("model/model.safetensors.index.json");
    match hugging_face_index(&forged, "model") {
        Some(bytes) => std::fs::write(index, bytes).unwrap(),
        None => std::fs::remove_file(index).unwrap(),
    }
    let bytes = forged.encode();
    let name = manifest_name(&manifest.info.attempt);
    std::fs::write(place.join(&name), &bytes).unwrap();
    let commit = Commit::decode(&std::fs::read(place.join("COMMIT")).unwrap()).unwrap();
    let forged = Commit { manifest_bytes: bytes.len() as u64, manifest_sha256: sha256(&bytes), ..commit };
    std::fs::write(place.join("COMMIT"), forged.encode()).unwrap();
}

#[test]
fn a_value_that_is_too_large_is_refused_before_there_is_memory_for_it() {
    let (_dir, place) = saved(vec![vec![
        Tensor::random(1, DType::U8, &[3]).whole("model", "w"),
        object("extra", "large", &text("small")),
    ]]);
    let large = objects::BYTES_MAX + 1;
    let lengthen = |files: &mut [FileEntry]| {
        for file in files.iter_mut().filter(|file| file.path.starts_with("extra/")) {
            file.bytes = file.data_start + large;
            // A sparse file, which takes no room.
            let sparse = std::fs::File::options().write(true).open(place.join(&file.path)).unwrap();
            sparse.set_len(file.bytes).unwrap();
        }
    };
    forge_of(&place, lengthen, |manifest, forged| {
        let (ranks, extent) = manifest.values(0).next().unwrap();
        let w: Vec<_> = manifest.regions(1).collect();
        forged.object(&LeafName::new("extra", "large"), "", &[(ranks, Extent { bytes: large, ..extent })]);
        forged.tensor(&LeafName::new("model", "w"), DType::U8, &[3], "", &w);
    });
    let checkpoint = opened(place.to_str().unwrap());
    let error = checkpoint.load(&[], &[ValueRef { leaf: 0, value: 0 }], DEADLINE).unwrap_err();
    assert_eq!(error.kind, Kind::Unsupported);
    assert!(error.message.contains(&format!("extra/large is a value of {large} bytes")), "{error}");
}

#[test]
fn a_manifest_that_contradicts_the_files_is_found() {
    let tensors = || {
        let (a, b) = (Tensor::random(1, DType::F32, &[4]), Tensor::random(2, DType::F32, &[4]));
        saved(vec![vec![a.whole("model", "a"), b.whole("model", "b")]])
    };
    let regions = |manifest: &Manifest, leaf: usize| manifest.regions(leaf).collect::<Vec<_>>();
    let (a, b) = (LeafName::new("model", "a"), LeafName::new("model", "b"));

    // Swapped.
    let (_dir, place) = tensors();
    forge(&place, |manifest, forged| {
        forged.tensor(&a, DType::F32, &[4], "", &regions(manifest, 1));
        forged.tensor(&b, DType::F32, &[4], "", &regions(manifest, 0));
    });
    let found = report(&place);
    assert_eq!(found.leaves_damaged, ["model/a", "model/b"]);
    assert!(found.findings.iter().all(|finding| finding.problem == Problem::Entry));

    // Another dtype of the same size.
    let (_dir, place) = tensors();
    forge(&place, |manifest, forged| {
        forged.tensor(&a, DType::I32, &[4], "", &regions(manifest, 0));
        forged.tensor(&b, DType::F32, &[4], "", &regions(manifest, 1));
    });
    let found = report(&place);
    assert_eq!((only(&found).problem, found.leaves_damaged), (Problem::Entry, vec!["model/a".to_owned()]));

    // Another shape of the same size.
    let (_dir, place) = tensors();
    forge(&place, |manifest, forged| {
        let extent = regions(manifest, 0)[0].1;
        forged.tensor(&a, DType::F32, &[2, 2], "", &[(Region::whole(&[2, 2]), extent)]);
        forged.tensor(&b, DType::F32, &[4], "", &regions(manifest, 1));
    });
    assert_eq!(report(&place).leaves_damaged, ["model/a"]);

    // One of them forgotten.
    let (_dir, place) = tensors();
    forge(&place, |manifest, forged| forged.tensor(&a, DType::F32, &[4], "", &regions(manifest, 0)));
    let found = report(&place);
    assert_eq!((only(&found).problem, found.leaves_damaged.len()), (Problem::Entry, 0));
    assert!(only(&found).message.contains("\"b\""), "{}", only(&found).message);

    // Regions that hold one element twice and another not at all.
    let (_dir, place) = tensors();
    forge(&place, |manifest, forged| {
        let Extent { file, offset, .. } = regions(manifest, 0)[0].1;
        let part = |start, at| (Region::new(&[start], &[2]), Extent { file, offset: offset + at, bytes: 8 });
        forged.tensor(&a, DType::F32, &[4], "", &[part(0, 0), part(1, 8)]);
        forged.tensor(&b, DType::F32, &[4], "", &regions(manifest, 1));
    });
    let found = report(&place);
    let coverage: Vec<_> = found.findings.iter().filter(|finding| finding.problem == Problem::Coverage).collect();
    assert_eq!(coverage.len(), 1);
    assert_eq!(names(coverage[0]), BTreeSet::from(["model/a".to_owned()]));
}

/// Sums of sizes of which nothing is known to be true, and blocks of a file that cannot have them.
#[test]
fn files_of_an_impossible_size_end_the_search_at_once() {
    let engine = Engine::solo();
    for size in [i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX, 1 << 50] {
        let (a, b) = (Tensor::random(1, DType::F32, &[4]), Tensor::random(2, DType::F32, &[4]));
        let value = object("extra", "v", &text("a value"));
        let (_dir, place) = saved(vec![vec![a.whole("model", "a"), b.whole("other", "b"), value]]);
        let (_sound_dir, sound) = saved(vec![vec![a.whole("model", "a"), b.whole("other", "b")]]);
        forge_sizes(
            &place,
            |_| size,
            |manifest, forged| {
                for leaf in 0..manifest.len() {
                    let name = LeafName::new(manifest.leaf(leaf).key, manifest.leaf(leaf).name);
                    match manifest.leaf(leaf).kind {
                        LeafKind::Tensor { dtype, shape } => {
                            forged.tensor(&name, dtype, shape, "", &manifest.regions(leaf).collect::<Vec<_>>());
                        }
                        _ => forged.object(&name, "", &manifest.values(leaf).collect::<Vec<_>>()),
                    }
                }
            },
        );
        let found = report(&place);
        assert_eq!(found.leaves_damaged, ["extra/v", "model/a", "other/b"]);
        assert_eq!((found.findings.len(), found.blocks), (3, 0));
        assert!(found.findings.iter().all(|finding| finding.problem == Problem::File), "{:#?}", found.findings);

        // The other readers say it, too.
        let (place, sound) = (place.to_str().unwrap(), sound.to_str().unwrap());
        let (checkpoint, sound) = (opened(place), opened(sound));
        assert!(summary(&checkpoint, None, true).unwrap().holds.bytes >= size);
        assert_eq!(diff(&sound, &checkpoint, &|_, _| ()).unwrap_err().kind, Kind::Corrupt);
        let out = tempfile::tempdir().unwrap();
        let exported = export(&checkpoint, out.path().to_str().unwrap(), "model", 1 << 20);
        assert_eq!(exported.unwrap_err().kind, Kind::Corrupt);
        assert_eq!(loaded_values(&engine, place).unwrap_err().kind, Kind::Corrupt);
    }
}

/// Loads every value of a checkpoint.
fn loaded_values(engine: &Arc<Engine>, url: &str) -> shardfast_engine::Result<Vec<Vec<u8>>> {
    let deadline = std::time::Duration::from_secs(60);
    let checkpoint = shardfast_engine::open(engine, url, deadline)?;
    let leaf = checkpoint.manifest().find(&LeafName::new("extra", "v")).unwrap();
    checkpoint.forecast(&[], &[ValueRef { leaf, value: 0 }])?;
    checkpoint.load(&[], &[ValueRef { leaf, value: 0 }], deadline)
}

#[test]
fn more_files_than_are_open_at_a_time() {
    let tensor = Tensor::random(1, DType::U8, &[9]);
    let leaves = (0..70).map(|i| tensor.whole(&format!("key{i:02}"), "w")).collect();
    let (_dir, place) = saved(vec![leaves]);
    let manifest = opened(place.to_str().unwrap()).manifest().clone();
    assert_eq!(manifest.files().len(), 70);
    for file in [0, 63, 64, 69] {
        let entry = &manifest.files()[file];
        flip(&place.join(&entry.path), entry.data_start, 3);
    }
    let report = report(&place);
    assert_eq!((report.files, report.blocks), (70, 70));
    assert_eq!(report.leaves_damaged, ["key00/w", "key63/w", "key64/w", "key69/w"]);
}

#[test]
fn bytes_that_the_store_cannot_give_are_narrowed_down_and_the_rest_is_read() {
    let tensors: Vec<Held> =
        (0..3).map(|i| Tensor::random(i, DType::U8, &[3 * BLOCK_BYTES]).whole("model", &format!("w{i}"))).collect();
    let url = save_ranks("memory://verify-bad-sector", None, vec![tensors]);
    let file = opened(&url).manifest().files()[0].clone();
    // In the first block of the tensor in the middle: the one before ends where it begins.
    let at = file.data_start + 3 * BLOCK_BYTES + 10;
    let bad_sector = Some((file.path, at..at + 1));
    let store: Arc<dyn Store> = Arc::new(Faulty { bad_sector, ..Faulty::over(shardfast_store::open(&url).unwrap()) });
    let report = verify_in(&Engine::solo(), store, &url, &|_, _| ()).unwrap();
    let finding = only(&report);
    assert_eq!((finding.problem, names(finding)), (Problem::Unreadable, BTreeSet::from(["model/w1".to_owned()])));
    let block = finding.block.as_ref().unwrap();
    assert_eq!((block.start, block.end), (at - 10, at - 10 + BLOCK_BYTES));
    assert_eq!(finding.leaves[0].regions, [Region::new(&[0], &[BLOCK_BYTES])]);
    assert_eq!(report.blocks, 8);
}

/// An error that says nothing of the bytes is that of the verification, whatever it hits: the checkpoint may be sound.
#[test]
fn what_the_reader_lacks_is_no_damage() {
    let whole = Tensor::random(1, DType::F32, &[4, 4]).whole("model", "w");
    let url = save_ranks("memory://verify-lacks", None, vec![vec![whole, object("extra", "v", &text("a value"))]]);
    let manifest = opened(&url).manifest().clone();
    let store = || Faulty::over(shardfast_store::open(&url).unwrap());
    let index = "model/model.safetensors.index.json".to_owned();
    let of_data = || manifest.files().iter().map(|file| file.path.clone());
    let objects: Vec<String> =
        ["COMMIT".to_owned(), manifest_name(&manifest.info.attempt), index].into_iter().chain(of_data()).collect();
    let kinds = [shardfast_store::Kind::Exhausted, shardfast_store::Kind::Invalid, shardfast_store::Kind::Internal];
    for (kind, expected) in kinds.into_iter().zip([Kind::Exhausted, Kind::Invalid, Kind::Internal]) {
        let refused = |store: Faulty| verify_in(&Engine::solo(), Arc::new(store), &url, &|_, _| ()).unwrap_err().kind;
        for name in &objects {
            assert_eq!(refused(Faulty { closed: Some(name.clone()), kind, ..store() }), expected, "{name}");
        }
        for file in manifest.files() {
            let bad_sector = Some((file.path.clone(), file.data_start..file.bytes));
            assert_eq!(refused(Faulty { bad_sector, kind, ..store() }), expected, "{}", file.path);
        }
    }
}
