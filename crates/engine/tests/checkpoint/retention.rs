//! Tests that retention deletes no older checkpoints while the newest is not whole, and no foreign files.

use std::path::{Path, PathBuf};

use shardfast_engine::retention::{Best, Held, Keep, Retained, Retention};
use shardfast_engine::runs::{list, step_url};
use shardfast_engine::{Engine, Kind, Result, checkpoint, rewind, save};
use shardfast_format::{JOBS, job_name, step_dir};

use crate::job::{Job, LONG, Truth, destination, measured, wants};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

const LAST: Keep = Keep { last: Some(1), every: None, best: Vec::new() };

/// Performs both rounds.
fn retain(url: &str, keep: Keep) -> Result<Retained> {
    let mut retention = Retention::new(url, keep);
    let retained = retention.retain(&[])?;
    assert_eq!(retention.clear(None)?, retained.left);
    Ok(retained)
}

/// A run of three committed steps in a directory.
fn run(dir: &Path) -> String {
    let url = dir.to_str().unwrap().to_owned();
    let job = Job::new(Layout::rows(2));
    for step in 1..=3 {
        job.save(&step_url(&url, step), &Truth::small(step, 50), &mut Dice(1)).unwrap();
    }
    url
}

fn steps(url: &str) -> Vec<u64> {
    list(url).unwrap().iter().filter(|step| matches!(step.commit, Ok(Some(_)))).map(|step| step.step).collect()
}

fn data_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(data_files(&path)),
            false if path.extension().is_some_and(|extension| extension == "safetensors") => found.push(path),
            false => {}
        }
    }
    found
}

/// Between the choice of what stays and the round others commit: they may have to stay, too.
#[test]
fn what_is_held_and_what_was_committed_since_it_was_chosen_stay() {
    let dir = scratch();
    let url = run(dir.path());
    let mut retention = Retention::new(&url, LAST);
    assert_eq!(retention.committed().unwrap().into_iter().collect::<Vec<_>>(), [1, 2, 3]);
    let held = |steps: &[u64], known: &[u64]| Held {
        steps: steps.iter().copied().collect(),
        known: Some(known.iter().copied().collect()),
    };
    assert!(retention.retain_beside(&[], &held(&[1], &[1])).unwrap().left.is_empty());
    assert_eq!(retention.retain_beside(&[], &held(&[], &[1])).unwrap().left, [1]);
    assert_eq!(retention.retain_beside(&[], &held(&[], &[1, 2, 3])).unwrap().left, [2]);
    assert_eq!(steps(&url), [3]);
}

/// A process that was stopped in a round, while another job has begun, deletes nothing more.
#[test]
fn a_job_that_is_not_the_newest_takes_nothing_back_and_deletes_nothing() {
    let dir = scratch();
    let url = run(dir.path());
    let mut retention = Retention::new(&url, LAST);
    assert_eq!(retention.retain(&[]).unwrap().left, [1, 2]);
    let left = data_files(dir.path());
    let engine = Engine::solo();
    rewind::begin(&engine, (&url, None), 4, false, LONG).unwrap();
    retention.begin(engine.job(&url));
    let newer = dir.path().join(JOBS).join(job_name(2, "ab"));
    std::fs::write(&newer, "host node-7\nprocess 4711\n").unwrap();
    let refused = retention.clear(None).unwrap_err();
    assert_eq!((refused.kind, data_files(dir.path())), (Kind::Conflict, left));
    assert!(refused.message.contains("on host node-7 as process 4711"), "{refused}");
    let job = Job::new(Layout::rows(2));
    job.save(&step_url(&url, 4), &Truth::small(4, 50), &mut Dice(1)).unwrap();
    assert_eq!(retention.retain(&[]).unwrap_err().kind, Kind::Conflict);
    assert_eq!(steps(&url), [3, 4]);
    std::fs::remove_file(newer).unwrap();
    assert_eq!((retention.clear(None).unwrap(), retention.retain(&[]).unwrap().left), (vec![1, 2], vec![3]));
}

/// A reader beside the retention: what it read first is gone, and nothing of it is damaged.
#[test]
fn a_checkpoint_that_leaves_while_it_is_read_is_not_called_damaged() {
    let dir = scratch();
    let url = run(dir.path());
    let (engine, place) = (Engine::solo(), dir.path().join(step_dir(1)));
    let files = data_files(&place);
    let read = |opened: &checkpoint::Checkpoint| {
        let mut places = Truth::small(1, 50).places(&Layout::rows(1), 0, &mut Dice(1));
        let (wants, values) = wants(opened.manifest(), &mut places);
        opened.load(&wants, &values, LONG).map(drop).unwrap_err()
    };
    let opened = checkpoint::open(&engine, &step_url(&url, 1), LONG).unwrap();
    std::fs::rename(&files[0], dir.path().join("kept")).unwrap();
    let error = read(&opened);
    assert!(error.kind == Kind::Corrupt && error.message.contains("is missing"), "{error}");
    std::fs::rename(dir.path().join("kept"), &files[0]).unwrap();
    assert_eq!(retain(&url, LAST).map(|retained| retained.left), Ok(vec![1, 2]));
    let error = read(&opened);
    assert!(error.kind == Kind::NotFound && error.message.contains("left while it was read"), "{error}");
}

#[test]
fn nothing_is_deleted_while_any_file_of_the_newest_is_missing_or_cut() {
    let dir = scratch();
    let url = run(dir.path());
    let newest = data_files(&dir.path().join(step_dir(3)));
    assert!(newest.len() > 3);
    for path in newest {
        let good = std::fs::read(&path).unwrap();
        let refused = |what: &str| {
            let error = retain(&url, LAST).unwrap_err();
            assert_eq!(error.kind, Kind::Corrupt, "{what}: {error}");
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(error.message.contains(name) && error.message.contains("no older one was deleted"), "{error}");
            assert_eq!(steps(&url), [1, 2, 3], "{what}");
        };
        std::fs::remove_file(&path).unwrap();
        refused("missing");
        std::fs::write(&path, &good[1..]).unwrap();
        refused("cut");
        std::fs::write(&path, good).unwrap();
    }
    assert_eq!(retain(&url, LAST).map(|retained| retained.left), Ok(vec![1, 2]));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Returns the spared checkpoints, and checks that they are the same each time.
fn spared(url: &str) -> Result<Vec<(String, String)>> {
    let once = retain(url, LAST)?;
    assert_eq!(retain(url, LAST)?, Retained { left: Vec::new(), ..once.clone() });
    Ok(once.spared.into_iter().map(|spared| (spared.url, spared.reason)).collect())
}

#[test]
fn a_file_of_others_keeps_its_checkpoint_whole_wherever_it_lies() {
    for name in ["eval.json", "model/notes.txt", "model/deeper/00000-000-0123456789abcdef.safetensors", ".hidden/x"] {
        let dir = scratch();
        let url = run(dir.path());
        let (step, file) = (dir.path().join(step_dir(1)), dir.path().join(step_dir(1)).join(name));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "mine").unwrap();
        let before = data_files(&step);
        let found = spared(&url).unwrap();
        assert_eq!((found.len(), found[0].0.as_str()), (1, step_url(&url, 1).as_str()));
        assert!(found[0].1.contains(name), "{found:?}");
        assert_eq!((steps(&url), data_files(&step)), (vec![1, 3], before));
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    }
}

#[test]
fn what_saves_leave_behind_goes_and_a_link_stays() {
    let dir = scratch();
    let url = run(dir.path());
    let step = dir.path().join(step_dir(1));
    std::fs::create_dir_all(step.join("empty/er")).unwrap();
    for name in [
        "manifest-0123456789abcdef",
        ".tmp-0123456789abcdef",
        "model/.tmp-0123456789abcdef",
        "gone/00007-001-0123456789abcdef.safetensors",
    ] {
        std::fs::create_dir_all(step.join(name).parent().unwrap()).unwrap();
        std::fs::write(step.join(name), "left").unwrap();
    }
    // A file that an NFS client keeps for those who have it open hinders only the removal of its directory.
    std::fs::write(dir.path().join(step_dir(2)).join(".nfs0001"), "open").unwrap();
    assert_eq!(retain(&url, LAST).unwrap(), Retained { left: vec![1, 2], ..Retained::default() });
    let left = std::fs::read_dir(dir.path().join(step_dir(2))).unwrap().count();
    assert_eq!((step.exists(), left), (false, 1));

    let (dir, archive) = (scratch(), scratch());
    let url = run(dir.path());
    let place = archive.path().join("best");
    std::fs::rename(dir.path().join(step_dir(1)), &place).unwrap();
    std::os::unix::fs::symlink(&place, dir.path().join(step_dir(1))).unwrap();
    let found = spared(&url).unwrap();
    assert!(found.len() == 1 && found[0].1.contains("link"), "{found:?}");
    assert_eq!(steps(&url), [1, 3]);
}

#[test]
fn the_best_by_a_metric_stay() {
    let dir = scratch();
    let url = dir.path().to_str().unwrap().to_owned();
    let job = Job::new(Layout::rows(1));
    // Steps 1 to 7; the metric of step 5 is missing, that of step 6 is no number.
    for (step, loss) in (1..=7).zip(["2.5", "-1e3", "0.5", "0.5", "", "NaN", "7"]) {
        let place = step_url(&url, step);
        let destination = if loss.is_empty() { destination(&place) } else { measured(&place, loss) };
        let state = Truth::small(step, 50).state(&job.layout, 0, &mut Dice(1));
        save(&job.engines[0], destination, state, LONG).committed(None).unwrap();
    }
    let best = |count, largest| Best { metric: "loss".to_owned(), count, largest };
    let keep = |best: &[Best]| Keep { best: best.to_vec(), ..Keep::default() };
    // What it read once it does not read again.
    let mut retention = Retention::new(&url, keep(&[best(3, false)]));
    assert_eq!(retention.retain(&[]).unwrap().left, [1, 5, 6]);
    assert_eq!(steps(&url), [2, 3, 4, 7]);
    let commit = list(&url).unwrap().into_iter().find(|step| step.step == 3).unwrap().commit.unwrap().unwrap();
    std::fs::write(dir.path().join(step_dir(3)).join(commit.manifest), "damaged").unwrap();
    assert_eq!(retention.retain(&[]).unwrap().left, Vec::<u64>::new());
    // Of a damaged one the metric is unknown; of equal values the newer one would be better.
    let rules = [best(1, true), best(1, false), Best { metric: "other".to_owned(), count: 9, largest: true }];
    assert_eq!(Retention::new(&url, keep(&rules)).retain(&[]).unwrap().left, [3, 4]);
    assert_eq!(steps(&url), [2, 7]);
}
