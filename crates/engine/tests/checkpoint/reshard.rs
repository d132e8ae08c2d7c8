//! Any layout to any layout, through real files: saved under one, loaded under another, compared bit for bit.

use std::path::Path;

use shardfast_engine::checkpoint;

use crate::count;
use crate::job::{Job, LONG, Seed, Truth};
use crate::layout::{Dice, Layout};

/// Pairs of layouts on the disk.
const PAIRS_ON_DISK: u64 = 12;

/// A directory in memory where there is one: what this asks is not whether the disk works.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn pair(seed: u64, place: &Path) {
    let _seed = Seed(seed);
    let mut dice = Dice(seed);
    let url = place.join(format!("{seed}"));
    let url = url.to_str().unwrap();
    let truth = Truth::random(&mut dice);
    let (saving, loading) = (Layout::random(&mut dice), Layout::random(&mut dice));
    Job::new(saving).save(url, &truth, &mut dice).unwrap();
    let flaw = Job::new(loading).compare(|engine| checkpoint::open(engine, url, LONG), &truth, &mut dice);
    assert_eq!(flaw, Ok(None));
}

#[test]
fn random_pairs_of_layouts() {
    let place = scratch();
    for seed in PAIRS_ON_DISK..PAIRS_ON_DISK + count("SHARDFAST_TEST_PAIRS", 110) as u64 {
        pair(seed, place.path());
    }
}

/// Returns a directory on the disk itself, where direct I/O and its alignment matter.
#[test]
fn pairs_of_layouts_on_the_disk() {
    let place = tempfile::tempdir().unwrap();
    for seed in 0..PAIRS_ON_DISK {
        pair(seed, place.path());
    }
}

/// One job that saves different states under different layouts, and some of them again: a plan is used again only where
/// every rank still holds what it held.
#[test]
fn plans_are_remembered_only_while_they_fit() {
    let place = scratch();
    let mut dice = Dice(7);
    let truths: Vec<Truth> = (0..3).map(|_| Truth::random(&mut dice)).collect();
    let layouts: Vec<Layout> = (0..).map(|_| Layout::random(&mut dice)).filter(|l| l.world() == 4).take(3).collect();
    let mut job = Job::new(layouts[0].clone());
    for round in 0..30 {
        let _seed = Seed(round);
        // The holdings of a rank, and so its catalog, follow from these three.
        let truth = dice.pick(&truths);
        job.layout = dice.pick(&layouts).clone();
        let mut holdings = Dice(dice.below(2));
        let url = place.path().join(format!("{round}"));
        let url = url.to_str().unwrap();
        job.save(url, truth, &mut holdings).unwrap();
        let flaw = Job::new(Layout::rows(2)).compare(|engine| checkpoint::open(engine, url, LONG), truth, &mut dice);
        assert_eq!(flaw, Ok(None));
    }
}
