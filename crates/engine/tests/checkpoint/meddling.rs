//! Another program that writes data files in place while loads read them: a load gives the saved bytes or an error, and
//! puts no other byte anywhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_engine::{Checkpoint, Engine, Error, Kind, PeerReads, Result, checkpoint};
use shardfast_format::{BLOCK_BYTES, DType, LeafName, Region};

use crate::block::{Block, RUBBISH};
use crate::job::{Content, Job, LONG, Place, Truth, Whole, wants};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// Enough that two ranks have memory that both see.
const STAGING_BYTES: u64 = 32 << 20;

/// Time in which many loads are made beside one that writes all the time.
const MEDDLED: Duration = Duration::from_secs(1);

/// A checkpoint in files: a tensor and a value, saved by one rank.
struct Saved {
    place: tempfile::TempDir,
    whole: Region,
    /// Bytes of the tensor, and of the value.
    expected: [Vec<u8>; 2],
}

impl Saved {
    fn new(rows: u64) -> Saved {
        let (place, mut dice) = (scratch(), Dice(rows));
        let (whole, value) = (Whole::random(&mut dice, DType::C64, &[rows, 512]), dice.bytes(700_000));
        let (region, bytes) = (Region::whole(&whole.shape), whole.bytes.clone());
        let values = Content::Object { per_rank: false, values: vec![value.clone()] };
        let leaves = [(LeafName::new("model", "w"), Content::Tensor(whole)), (LeafName::new("model", "v"), values)];
        let saved = Saved { place, whole: region, expected: [bytes, value] };
        let truth = Truth { leaves: BTreeMap::from(leaves) };
        Job::new(Layout::rows(1)).save(&saved.url(), &truth, &mut dice).unwrap();
        saved
    }

    fn url(&self) -> String {
        self.place.path().join("saved").to_str().unwrap().to_owned()
    }

    /// Opens the checkpoint and loads all of it; checks what the tensor's memory holds, whatever the result.
    fn load(&self, engine: &Arc<Engine>, way: PeerReads) -> Result<()> {
        let checkpoint = checkpoint::open(engine, &self.url(), LONG)?;
        let block = Block::dense(&self.whole.lengths, DType::C64.size_bytes());
        let mut places = [Place { name: LeafName::new("model", "w"), region: self.whole.clone(), block }];
        let (wants, values) = wants(checkpoint.manifest(), &mut places);
        let loaded = checkpoint.load_by(way, None, &wants, &values, LONG);
        let (found, [tensor, value], rubbish) = (places[0].block.memory(), &self.expected, [RUBBISH; 4096]);
        for (found, saved) in found.chunks(4096).zip(tensor.chunks(4096)) {
            let is_partly_saved = || found.iter().zip(saved).all(|(found, saved)| [*saved, RUBBISH].contains(found));
            let is_saved_or_none = found == saved || found == &rubbish[..found.len()];
            assert!(is_saved_or_none || is_partly_saved(), "unproven bytes, and {:?}", loaded.as_ref().err());
        }
        let loaded = loaded?;
        assert!(
            found == tensor && loaded.values == [value.as_slice()],
            "other bytes than the saved ones, and no error"
        );
        Ok(())
    }

    /// Opens every data file for writing; returns each with the place of its data and its length.
    fn data_files(&self) -> Vec<(File, u64, u64)> {
        let opened: Checkpoint = checkpoint::open(&Engine::solo(), &self.url(), LONG).unwrap();
        let files = opened.manifest().files().iter().map(|entry| {
            let path = Path::new(&self.url()).join(&entry.path);
            let file = File::options().read(true).write(true).open(path).unwrap();
            (file, entry.data_start, entry.bytes)
        });
        files.collect()
    }
}

/// Tells who writes that it is over, also after a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Flips bytes of each data file and restores them, again and again, until `is_over` is set.
fn flip(files: &[(File, u64, u64)], is_over: &AtomicBool) {
    let places = files.iter().flat_map(|(file, start, end)| {
        let step = (end - start).div_ceil(3).next_multiple_of(BLOCK_BYTES) as usize;
        (start + 777..*end).step_by(step).map(move |at| (file, at))
    });
    let byte_at = |(file, at): (&File, u64)| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte
    };
    let saved: Vec<_> = places.map(|(file, at)| (file, at, byte_at((file, at)))).collect();
    for (file, at, [byte]) in saved.iter().cycle() {
        for _ in 0..1000 {
            file.write_all_at(&[!byte], *at).unwrap();
            file.write_all_at(&[*byte], *at).unwrap();
        }
        if is_over.load(Ordering::Relaxed) {
            return;
        }
    }
}

#[test]
fn bytes_that_change_while_they_are_loaded_are_the_saved_ones_or_corrupt() {
    let saved = Saved::new(1024);
    let files = saved.data_files();
    for (ranks, way) in [(1, PeerReads::Auto), (2, PeerReads::Never), (2, PeerReads::Always)] {
        let job = Job::staged(Layout::replicas(ranks), STAGING_BYTES);
        let load = || {
            thread::scope(|threads| {
                let begun = job.engines.iter().map(|engine| threads.spawn(|| saved.load(engine, way)));
                let begun: Vec<_> = begun.collect();
                begun.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<()>>>()
            })
        };
        let is_over = AtomicBool::new(false);
        let (loads, failed) = thread::scope(|threads| {
            threads.spawn(|| flip(&files, &is_over));
            let _over = Over(&is_over);
            let (began, mut outcomes) = (Instant::now(), Vec::new());
            while began.elapsed() < MEDDLED {
                outcomes.push(load());
            }
            (outcomes.len(), outcomes.into_iter().filter_map(Result::err).collect::<Vec<Error>>())
        });
        assert!(failed.iter().all(|error| error.kind == Kind::Corrupt), "{way:?}: {failed:#?}");
        eprintln!("{ranks} ranks, {way:?}: {} of {loads} loads were refused", failed.len());
        load().unwrap();
    }
}

#[test]
fn a_file_that_is_cut_short_while_it_is_loaded_ends_the_load_and_not_the_process() {
    let (saved, engine) = (Saved::new(4096), Engine::solo());
    let began = Instant::now();
    saved.load(&engine, PeerReads::Auto).unwrap();
    let usual = began.elapsed();
    for (file, start, end) in saved.data_files() {
        let mut contents = vec![0; end as usize];
        file.read_exact_at(&mut contents, 0).unwrap();
        for i in 0..30u32 {
            let kept = if i % 2 == 0 { start } else { start + (end - start) / 2 + 1 };
            let cut = || {
                thread::sleep(usual * i / 30);
                file.set_len(kept).unwrap();
            };
            thread::scope(|threads| {
                threads.spawn(cut);
                // Which of the two it is depends on the moment.
                let _ = saved.load(&engine, PeerReads::Auto);
            });
            file.write_all_at(&contents, 0).unwrap();
        }
    }
    saved.load(&engine, PeerReads::Auto).unwrap();
}
