//! Damage of every kind: found before a byte of it is used, with the tensor and the file by name.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use shardfast_engine::{Checkpoint, Engine, Error, Kind, ValueRef, checkpoint};
use shardfast_format::{BLOCK_BYTES, COMMIT, DType, Extent, LeafName, Manifest, Region};
use shardfast_store::Store;

use crate::block::{Block, RUBBISH};
use crate::count;
use crate::job::{Content, Job, LONG, Place, Truth, Whole, wants};
use crate::layout::{Dice, Layout};

/// A checkpoint in memory, with its objects.
struct Saved {
    url: String,
    store: Arc<dyn Store>,
    truth: Truth,
    objects: BTreeMap<String, Vec<u8>>,
    manifest: Manifest,
    engine: Arc<Engine>,
}

/// Results of a load.
struct Verdict {
    error: Option<Error>,
    /// The saved parts of tensors into whose memory anything was written: where each lies in which file.
    written: BTreeSet<(u32, u64)>,
}

impl Saved {
    /// Saves with two ranks. Every test has a place of its own.
    fn new(place: &str, truth: Truth) -> Saved {
        let url = format!("memory://damage/{place}");
        Job::new(Layout::rows(2)).save(&url, &truth, &mut Dice(5)).unwrap();
        let store = shardfast_store::open(&url).unwrap();
        let mut objects = BTreeMap::new();
        let mut dirs = vec![String::new()];
        while let Some(dir) = dirs.pop() {
            for entry in store.list(&dir).unwrap() {
                let name = if dir.is_empty() { entry.name } else { format!("{dir}/{}", entry.name) };
                if entry.is_dir {
                    dirs.push(name);
                } else {
                    objects.insert(name.clone(), store.read(&name, u64::MAX).unwrap());
                }
            }
        }
        let engine = Engine::new(shardfast_coord::solo(), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
        let manifest = checkpoint::open(&engine, &url, LONG).unwrap().manifest().clone();
        let saved = Saved { url, store, truth, objects, manifest, engine };
        let sound = saved.load();
        assert_eq!(sound.error, None);
        assert_eq!(sound.written.len(), saved.parts().count());
        saved
    }

    /// Returns every saved part of every tensor.
    fn parts(&self) -> impl Iterator<Item = (LeafName, Region, Extent)> {
        (0..self.manifest.len()).flat_map(|i| {
            let leaf = self.manifest.leaf(i);
            let name = LeafName::new(leaf.key, leaf.name);
            self.manifest.regions(i).map(move |(region, extent)| (name.clone(), region, extent))
        })
    }

    /// Returns every leaf, as messages call it, with its extents.
    fn extents(&self) -> impl Iterator<Item = (String, Extent)> {
        (0..self.manifest.len()).flat_map(|i| {
            let leaf = self.manifest.leaf(i);
            let regions = self.manifest.regions(i).map(|(_, extent)| ("tensor", extent));
            let values = self.manifest.values(i).map(|(_, extent)| ("value", extent));
            regions.chain(values).map(move |(kind, extent)| (format!("{kind} {}/{}", leaf.key, leaf.name), extent))
        })
    }

    /// Returns the leaves with bytes in a range of a file.
    fn inside(&self, file: usize, range: Range<u64>) -> Vec<(String, Extent)> {
        let meets = |e: &Extent| e.file as usize == file && e.offset < range.end && range.start < e.offset + e.bytes;
        self.extents().filter(|(_, extent)| meets(extent)).collect()
    }

    fn manifest_name(&self) -> &str {
        self.objects.keys().find(|name| name.starts_with("manifest-")).unwrap()
    }

    fn data_files(&self) -> impl Iterator<Item = (usize, &str)> {
        self.manifest.files().iter().enumerate().map(|(file, entry)| (file, entry.path.as_str()))
    }

    /// Opens the checkpoint and loads every tensor and value.
    fn load(&self) -> Verdict {
        match checkpoint::open(&self.engine, &self.url, LONG) {
            Ok(checkpoint) => self.load_from(&checkpoint, None),
            Err(error) => Verdict { error: Some(error), written: BTreeSet::new() },
        }
    }

    /// Loads everything, or only the leaves of one file. The tensors' memory gets the saved bytes or nothing at all.
    fn load_from(&self, checkpoint: &Checkpoint, file: Option<usize>) -> Verdict {
        let mut written = BTreeSet::new();
        let parts = self.parts().filter(|(_, _, extent)| file.is_none_or(|file| file == extent.file as usize));
        let places = parts.map(|(name, region, extent)| {
            let block = Block::dense(&region.lengths, self.truth.whole(&name).dtype.size_bytes());
            (Place { name, region, block }, (extent.file, extent.offset))
        });
        let (mut places, extents): (Vec<Place>, Vec<(u32, u64)>) = places.unzip();
        let (wants, values) = wants(checkpoint.manifest(), &mut places);
        let is_in_file = |value: &ValueRef| {
            let (_, extent) = checkpoint.manifest().values(value.leaf).nth(value.value).unwrap();
            file.is_none_or(|file| file == extent.file as usize)
        };
        let values: Vec<ValueRef> = values.into_iter().filter(is_in_file).collect();
        let loaded = checkpoint.load(&wants, &values, LONG);
        for (place, extent) in places.iter().zip(extents) {
            let (elements, expected) = (place.block.elements(), self.truth.elements(place));
            if elements.iter().any(|&byte| byte != RUBBISH) {
                written.insert(extent);
                let unproven = elements != expected
                    && elements.iter().zip(&expected).any(|(&found, &right)| found != RUBBISH && found != right);
                assert!(!unproven, "{} {}: unproven bytes", place.name, place.region);
            }
        }
        Verdict { error: loaded.err(), written }
    }

    /// Loads with the object `name` as given, `None` for deleted, and puts it back.
    fn load_with(&self, name: &str, bytes: Option<&[u8]>) -> Verdict {
        match bytes {
            Some(bytes) => self.store.put(name, bytes).unwrap(),
            None => self.store.delete(name).unwrap(),
        }
        let verdict = self.load();
        self.store.put(name, &self.objects[name]).unwrap();
        verdict
    }

    /// Checks that loading ends in `Corrupt` naming `name`, with nothing written to the `untouched` tensors.
    fn expect_corrupt(&self, verdict: Verdict, name: &str, untouched: &[(String, Extent)], case: &str) -> String {
        let error = verdict.error.unwrap_or_else(|| panic!("{case}: not noticed"));
        assert_eq!(error.kind, Kind::Corrupt, "{case}: {error}");
        assert!(error.message.contains(&self.url) && error.message.contains(name), "{case}: {error}");
        for (leaf, extent) in untouched {
            assert!(!verdict.written.contains(&(extent.file, extent.offset)), "{case}: {leaf} was written");
        }
        error.message
    }

    /// Checks like [`Saved::expect_corrupt`], where nothing at all may have been written.
    fn expect_refused(&self, verdict: Verdict, name: &str, case: &str) {
        assert_eq!(verdict.written, BTreeSet::new(), "{case}");
        self.expect_corrupt(verdict, name, &[], case);
    }
}

fn flipped(bytes: &[u8], bit: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    bytes
}

#[test]
fn every_bit_of_the_commit_and_every_length() {
    let saved = Saved::new("commit", Truth::small(1, 50));
    let sound = &saved.objects[COMMIT];
    for bit in 0..sound.len() * 8 {
        saved.expect_refused(saved.load_with(COMMIT, Some(&flipped(sound, bit))), COMMIT, &format!("bit {bit}"));
    }
    for length in 0..sound.len() {
        saved.expect_refused(saved.load_with(COMMIT, Some(&sound[..length])), COMMIT, &format!("{length} bytes"));
    }
    for more in [1, 100, 4096, 100_000] {
        let longer = [&sound[..], &vec![b'\n'; more]].concat();
        saved.expect_refused(saved.load_with(COMMIT, Some(&longer)), COMMIT, &format!("{more} bytes more"));
    }
    let error = saved.load_with(COMMIT, None).error.unwrap();
    assert_eq!(error.kind, Kind::NotFound, "{error}");
    assert!(error.message.contains("no checkpoint is committed"), "{error}");
    assert_eq!(saved.load().error, None);
}

#[test]
fn every_bit_of_the_manifest_and_every_length() {
    let saved = Saved::new("manifest", Truth::small(1, 50));
    let name = saved.manifest_name();
    let sound = &saved.objects[name];
    for bit in 0..sound.len() * 8 {
        saved.expect_refused(saved.load_with(name, Some(&flipped(sound, bit))), name, &format!("bit {bit}"));
    }
    for length in 0..sound.len() {
        saved.expect_refused(saved.load_with(name, Some(&sound[..length])), name, &format!("{length} bytes"));
    }
    for more in [1, 4096] {
        let longer = [&sound[..], &vec![0; more]].concat();
        saved.expect_refused(saved.load_with(name, Some(&longer)), name, &format!("{more} bytes more"));
    }
    saved.expect_refused(saved.load_with(name, None), name, "deleted");
    assert_eq!(saved.load().error, None);
}

#[test]
fn bytes_all_over_every_header() {
    let saved = Saved::new("headers", Truth::small(1, 50));
    let mut dice = Dice(1);
    for (file, path) in saved.data_files() {
        let sound = &saved.objects[path];
        let inside = saved.inside(file, 0..u64::MAX);
        assert!(!inside.is_empty());
        // A file that could not be opened is opened anew by the next load.
        let checkpoint = checkpoint::open(&saved.engine, &saved.url, LONG).unwrap();
        let (end, one_in) = (saved.manifest.files()[file].data_start, count("SHARDFAST_DAMAGE_ONE_IN", 3));
        for byte in ((file % one_in) as u64..end).step_by(one_in) {
            let bit = byte * 8 + dice.below(8);
            saved.store.put(path, &flipped(sound, bit as usize)).unwrap();
            let verdict = saved.load_from(&checkpoint, Some(file));
            saved.expect_corrupt(verdict, path, &inside, &format!("{path}: bit {bit}"));
        }
        saved.store.put(path, sound).unwrap();
        assert_eq!(saved.load_from(&checkpoint, Some(file)).error, None);
    }
}

#[test]
fn bits_in_every_block_of_data() {
    let saved = Saved::new("data", Truth::small(1, 6000));
    let mut dice = Dice(1);
    let mut blocks = 0;
    for (file, path) in saved.data_files() {
        let sound = &saved.objects[path];
        let start = saved.manifest.files()[file].data_start;
        for from in (start..sound.len() as u64).step_by(BLOCK_BYTES as usize) {
            let to = (from + BLOCK_BYTES).min(sound.len() as u64);
            let inside = saved.inside(file, from..to);
            // Blocks before it may have arrived: what they brought is what was saved, as every load here is held to.
            let is_all = |extent: &Extent| from <= extent.offset && extent.offset + extent.bytes <= to;
            let untouched: Vec<_> = inside.iter().filter(|(_, extent)| is_all(extent)).cloned().collect();
            // The first and the last bit, some between, and the first of everything that begins here.
            let mut bits = vec![from * 8, to * 8 - 1];
            bits.extend((0..6).map(|_| from * 8 + dice.below((to - from) * 8)));
            bits.extend(
                inside.iter().map(|(_, extent)| extent.offset * 8).filter(|bit| (from * 8..to * 8).contains(bit)),
            );
            for bit in bits {
                let verdict = saved.load_with(path, Some(&flipped(sound, bit as usize)));
                let message = saved.expect_corrupt(verdict, path, &untouched, &format!("{path}: bit {bit}"));
                assert!(message.contains(&format!("bytes {from}..{to}")), "{message}");
                for (leaf, _) in &inside {
                    assert!(message.contains(leaf), "{leaf} is not named: {message}");
                }
            }
            blocks += 1;
        }
    }
    assert!(blocks >= 5, "only {blocks} blocks");
    assert_eq!(saved.load().error, None);
}

#[test]
fn data_files_cut_short_lengthened_or_gone() {
    let saved = Saved::new("lengths", Truth::small(1, 6000));
    for (file, path) in saved.data_files() {
        let sound = &saved.objects[path];
        let inside = saved.inside(file, 0..u64::MAX);
        let start = saved.manifest.files()[file].data_start as usize;
        let lengths = [0, 1, 7, 8, 100, start - 1, start, start + 1, sound.len() / 2, sound.len() - 1];
        for length in lengths {
            let verdict = saved.load_with(path, Some(&sound[..length]));
            saved.expect_corrupt(verdict, path, &inside, &format!("{path}: {length} bytes"));
        }
        let longer = [&sound[..], &[0]].concat();
        saved.expect_corrupt(saved.load_with(path, Some(&longer)), path, &inside, &format!("{path}: a byte more"));
        let message = saved.expect_corrupt(saved.load_with(path, None), path, &inside, &format!("{path}: deleted"));
        assert!(message.contains("missing"), "{message}");
    }
    assert_eq!(saved.load().error, None);
}

/// Returns two files of one size that differ only in the bytes of the data and their checksums.
fn twins(place: &str, seed: u64) -> Saved {
    let name = LeafName::new("model", "w");
    let whole = Whole::random(&mut Dice(seed), DType::F32, &[4, 64]);
    let saved = Saved::new(place, Truth { leaves: BTreeMap::from([(name, Content::Tensor(whole))]) });
    let sizes: BTreeSet<u64> = saved.manifest.files().iter().map(|file| file.bytes).collect();
    assert_eq!((saved.manifest.files().len(), sizes.len()), (2, 1));
    saved
}

#[test]
fn files_in_each_others_place() {
    let saved = twins("swapped", 1);
    let [first, second] = [0, 1].map(|file: usize| saved.manifest.files()[file].path.as_str());
    let (inside, both) = (saved.inside(0, 0..u64::MAX), saved.extents().collect::<Vec<_>>());
    saved.store.put(first, &saved.objects[second]).unwrap();
    saved.expect_corrupt(saved.load(), "model/0000", &inside, "one file twice");
    saved.store.put(second, &saved.objects[first]).unwrap();
    saved.expect_corrupt(saved.load(), "model/0000", &both, "swapped");
}

#[test]
fn files_of_another_checkpoint_of_the_same_shape() {
    let (saved, other) = (twins("one", 1), twins("other", 2));
    for (file, path) in saved.data_files() {
        let inside = saved.inside(file, 0..u64::MAX);
        let foreign = &other.objects[&other.manifest.files()[file].path];
        assert_eq!(foreign.len(), saved.objects[path].len());
        saved.expect_corrupt(saved.load_with(path, Some(foreign)), path, &inside, path);
    }
    let (name, foreign) = (saved.manifest_name(), &other.objects[other.manifest_name()]);
    saved.expect_refused(saved.load_with(name, Some(foreign)), name, "the other's manifest");
    let commit = &other.objects[COMMIT];
    saved.expect_refused(saved.load_with(COMMIT, Some(commit)), other.manifest_name(), "the other's commit");
    // Both of them together are sound, and name data files that are not here.
    saved.store.put(other.manifest_name(), foreign).unwrap();
    let verdict = saved.load_with(COMMIT, Some(commit));
    saved.expect_refused(verdict, "model/0000", "the other's commit and manifest");
    assert_eq!(saved.load().error, None);
}

/// Tests that damage that one rank reads is reported by all of them in the same words.
#[test]
fn every_rank_hears_of_damage() {
    let saved = twins("ranks", 1);
    let path = saved.manifest.files()[1].path.as_str();
    let sound = &saved.objects[path];
    saved.store.put(path, &flipped(sound, (sound.len() - 1) * 8)).unwrap();
    let open = |engine: &Arc<Engine>| checkpoint::open(engine, &saved.url, LONG);
    let error = Job::new(Layout::rows(4)).compare(open, &saved.truth, &mut Dice(1)).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    let said = |rank: u32| error.message.contains(&format!("rank {rank}: {}: tensor model/w: ", saved.url));
    assert_eq!([0, 1, 2, 3].map(said), [false, false, true, true], "{error}");
}

/// A tensor that takes many reads: around the damaged block its memory holds what was saved or what it held before.
#[test]
fn no_byte_of_a_damaged_block_arrives() {
    let name = LeafName::new("model", "w");
    let whole = Whole::random(&mut Dice(1), DType::C64, &[3 << 19]);
    let truth = Truth { leaves: BTreeMap::from([(name.clone(), Content::Tensor(whole))]) };
    let saved = Saved::new("large", truth);
    for (file, at) in [(0, 1 << 20), (1, 6 << 20)] {
        let entry = &saved.manifest.files()[file];
        assert!(entry.bytes > 6 << 20);
        let bit = (entry.data_start + at.min(entry.bytes - entry.data_start - 1)) * 8;
        let damaged = flipped(&saved.objects[&entry.path], bit as usize);
        let block = (bit / 8 - entry.data_start) / BLOCK_BYTES * BLOCK_BYTES + entry.data_start;
        // `Saved::load` sees to the rest.
        let verdict = saved.load_with(&entry.path, Some(&damaged));
        let message = saved.expect_corrupt(verdict, &entry.path, &[], "large");
        assert!(message.contains(&format!("bytes {block}..")) && message.contains("tensor model/w"), "{message}");
    }
}
