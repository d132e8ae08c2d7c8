//! Tests that a sweep removes debris, and neither checkpoints nor files in use nor foreign ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use shardfast_engine::retention::{Keep, Retention};
use shardfast_engine::rewind::rewind_in;
use shardfast_engine::runs::{self, step_url};
use shardfast_engine::{Engine, Kind, Timeout, checkpoint, pin, unpin};
use shardfast_format::{JOBS, TELEMETRY, crc64, end_name, job_name, record_name, step_dir};
use shardfast_store::disk::{Disk, Errno, FileKind};
use shardfast_store::testing::simdisk::{Fault, SimDisk};
use shardfast_tools::sweep::{AGE_MIN, RECORDS_MAX, SAVE_MAX, Swept, sweep, sweep_in};
use shardfast_tools::verify::Problem;
use shardfast_tools::verify_in;

use crate::count;
use crate::crash::{Hooked, store as on_disk};
use crate::job::{Job, LONG, Truth, alike};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// Path of a run on a simulated disk.
const RUN: &str = "/runs/gpt";

const DAY: Duration = Duration::from_secs(86_400);
const ATTEMPT: &str = "0123456789abcdef";
const LAST: Keep = Keep { last: Some(1), every: None, best: Vec::new() };

fn run(dir: &Path, steps: &[u64]) -> String {
    let url = dir.to_str().unwrap().to_owned();
    let job = Job::new(Layout::rows(2));
    for &step in steps {
        job.save(&step_url(&url, step), &Truth::small(step, 50), &mut Dice(1)).unwrap();
    }
    url
}

/// Every file below a directory, by its path below it.
fn files(dir: &Path) -> Vec<String> {
    fn walk(dir: &Path, root: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(&path, root, found),
                false => found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, dir, &mut found);
    found.sort();
    found
}

/// Makes a file that was last changed so long ago.
fn leave(path: PathBuf, age: Duration) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "left").unwrap();
    let file = std::fs::File::options().append(true).open(&path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

fn swept(url: &str) -> Swept {
    sweep(url, DAY, false, &Timeout::default(), &|_, _| {}).unwrap()
}

#[test]
fn debris_goes_and_nothing_else_does() {
    let dir = scratch();
    let url = run(dir.path(), &[1, 2]);
    let kept = files(dir.path());
    let below = |name: &str| dir.path().join(name);
    let (first, second, third) = (step_dir(1), step_dir(2), step_dir(3));
    let debris = [
        // In a committed step, at any age.
        (format!("{first}/manifest-{ATTEMPT}"), Duration::ZERO),
        (format!("{first}/model/00000-000-{ATTEMPT}.safetensors"), Duration::ZERO),
        (format!("{second}/gone/model.safetensors.index.json"), Duration::ZERO),
        (format!("{second}/.tmp-{ATTEMPT}"), Duration::ZERO),
        (format!("{second}/.leaving"), Duration::ZERO),
        (format!("{second}/.copying"), Duration::ZERO),
        // Without a commit, after a day.
        (format!("{third}/model/00000-000-{ATTEMPT}.safetensors"), 2 * DAY),
        (format!("{third}/manifest-{ATTEMPT}"), DAY + Duration::from_secs(60)),
        (format!(".tmp-{ATTEMPT}"), 2 * DAY),
        (format!("{TELEMETRY}/.tmp-{ATTEMPT}"), 2 * DAY),
        (format!("{JOBS}/.tmp-{ATTEMPT}"), 2 * DAY),
    ];
    for (name, age) in &debris {
        leave(below(name), *age);
    }
    let others = [
        (format!("{}/model/00000-000-{ATTEMPT}.safetensors", step_dir(4)), 2 * DAY),
        (format!("{}/model/00001-000-{ATTEMPT}.safetensors", step_dir(4)), DAY / 2),
        (format!("{first}/notes.txt"), 2 * DAY),
        (format!("{third}/model/mine.safetensors"), 2 * DAY),
        ("logs/manifest-0123456789abcdef".to_owned(), 2 * DAY),
        (".tmp-fedcba9876543210".to_owned(), DAY / 2),
        (format!("{TELEMETRY}/.tmp-fedcba9876543210"), DAY / 2),
        (format!("{JOBS}/{}", job_name(1, "ab")), 2 * DAY),
    ];
    for (name, age) in &others {
        leave(below(name), *age);
    }
    let mut expected: Vec<String> = kept.iter().cloned().chain(others.map(|(name, _)| name)).collect();
    expected.sort();
    let mut went: Vec<String> = debris.iter().map(|(name, _)| shardfast_store::join(&url, name)).collect();
    went.sort();

    let all = files(dir.path());
    let mut told = sweep(&url, DAY, true, &Timeout::default(), &|_, _| {}).unwrap();
    told.files.sort();
    assert_eq!((&told.files, told.bytes, files(dir.path())), (&went, 4 * debris.len() as u64, all), "it only says so");
    let mut found = swept(&url);
    found.files.sort();
    assert_eq!((&found.files, found.bytes), (&went, told.bytes));
    assert_eq!(found.young, [step_url(&url, 4)]);
    assert_eq!(files(dir.path()), expected);
    assert_eq!(swept(&url).files, Vec::<String>::new(), "again: nothing is left to do");
    assert!(runs::list(&url).unwrap().iter().take(2).all(|step| matches!(step.commit, Ok(Some(_)))));
}

#[test]
fn the_oldest_records_go_beyond_the_newest_ten_thousand() {
    let dir = scratch();
    let url = run(dir.path(), &[1]);
    let records = dir.path().join(TELEMETRY);
    std::fs::create_dir(&records).unwrap();
    let name = |ms: u64| if ms == 1 { end_name(ms) } else { record_name(ms, ms.is_multiple_of(2), 1) };
    for ms in 0..RECORDS_MAX as u64 + 3 {
        std::fs::write(records.join(name(ms)), "").unwrap();
    }
    std::fs::write(records.join("0-notes.txt"), "mine").unwrap();
    let gone: Vec<String> = (0..3).map(|ms| format!("{url}/{TELEMETRY}/{}", name(ms))).collect();
    assert_eq!(swept(&url).files, gone);
    assert_eq!(files(&records).len(), RECORDS_MAX + 1);
    assert!(swept(&url).files.is_empty());
}

#[test]
fn what_cannot_be_told_is_spared_and_named() {
    let dir = scratch();
    let url = run(dir.path(), &[1, 2, 3]);
    let place = |step| dir.path().join(step_dir(step));
    for step in 1..=3 {
        leave(place(step).join(format!("manifest-{ATTEMPT}")), 2 * DAY);
    }
    std::fs::write(place(1).join("COMMIT"), "damaged").unwrap();
    let manifest = |step: u64| {
        let name =
            files(&place(step)).into_iter().find(|name| name.starts_with("manifest-") && !name.contains(ATTEMPT));
        place(step).join(name.unwrap())
    };
    std::fs::write(manifest(2), "damaged").unwrap();
    let archive = scratch();
    std::fs::rename(place(3), archive.path().join("best")).unwrap();
    std::os::unix::fs::symlink(archive.path().join("best"), place(3)).unwrap();
    let before = files(dir.path());
    let found = swept(&url);
    assert_eq!((files(dir.path()), found.files.len()), (before, 0));
    let spared: Vec<&str> = found.spared.iter().map(|place| place.url.as_str()).collect();
    assert_eq!(spared, [step_url(&url, 1), step_url(&url, 2), step_url(&url, 3)]);
    assert!(found.spared[0].reason.contains("COMMIT") && found.spared[2].reason.contains("link"), "{found:?}");
}

#[test]
fn bad_ages_and_places_are_refused() {
    let dir = scratch();
    let url = dir.path().to_str().unwrap();
    let error = sweep(url, AGE_MIN - Duration::from_secs(1), false, &Timeout::default(), &|_, _| {}).unwrap_err();
    assert!(error.kind == Kind::Invalid && error.message.contains("at least 6 hours"), "{error}");
    let error = sweep(&format!("{url}/none"), DAY, false, &Timeout::default(), &|_, _| {}).unwrap_err();
    assert!(error.kind == Kind::NotFound && error.message.contains("nothing is there"), "{error}");
}

#[test]
fn a_place_of_one_checkpoint_is_swept_too() {
    let dir = scratch();
    let url = dir.path().to_str().unwrap().to_owned();
    for name in [format!("model/00000-000-{ATTEMPT}.safetensors"), format!("manifest-{ATTEMPT}")] {
        leave(dir.path().join(name), 2 * DAY);
    }
    leave(dir.path().join("mine.txt"), 2 * DAY);
    assert_eq!(swept(&url).files.len(), 2);
    assert_eq!(files(dir.path()), ["mine.txt"]);
}

#[test]
fn what_leaves_is_readable_until_the_second_round_and_pins_keep() {
    let dir = scratch();
    let url = run(dir.path(), &[1, 2, 3, 4]);
    let place = |step| dir.path().join(step_dir(step));
    let before: Vec<Vec<String>> = (1..=4).map(|step| files(&place(step))).collect();
    pin(&step_url(&url, 2), "the paper's", &Timeout::default()).unwrap();
    let mut retention = Retention::new(&url, LAST);
    let retained = retention.retain(&[]).unwrap();
    assert_eq!((&retained.left[..], &retained.pinned[..]), (&[1, 3][..], &[2][..]));
    let status = |url: &str| -> Vec<(u64, String, Option<String>)> {
        let lines = shardfast_tools::history(url, &Timeout::default()).unwrap().checkpoints;
        lines.into_iter().map(|line| (line.step.unwrap(), format!("{:?}", line.status), line.pinned)).collect()
    };
    let line = |step, status: &str| (step, status.to_owned(), None);
    let pinned = (2, "Committed".to_owned(), Some("the paper's".to_owned()));
    assert_eq!(status(&url), [line(1, "Leaving"), pinned.clone(), line(3, "Leaving"), line(4, "Committed")]);
    for (step, before) in [(1, &before[0]), (3, &before[2])] {
        let left: Vec<String> = before.iter().filter(|name| *name != "COMMIT").cloned().collect();
        assert_eq!(files(&place(step)), [vec![".leaving".to_owned()], left].concat(), "a reader can finish");
        let error = pin(&step_url(&url, step), "", &Timeout::default()).unwrap_err();
        assert!(error.kind == Kind::NotFound && error.message.contains("taken back"), "{error}");
    }
    assert_eq!(retention.clear(Some(&[1])).unwrap(), [1]);
    // Another process finds by itself what leaves.
    assert_eq!(Retention::new(&url, LAST).clear(None).unwrap(), [3]);
    assert_eq!(status(&url), [pinned, line(4, "Committed")]);
    assert_eq!(
        (unpin(&step_url(&url, 2), &Timeout::default()), unpin(&step_url(&url, 2), &Timeout::default())),
        (Ok(true), Ok(false))
    );
    assert_eq!(retention.retain(&[]).unwrap().left, [2]);
    // What no round took is swept when it is old, but never the last checkpoint that proves.
    let age = |dir: &Path| {
        for name in files(dir) {
            let file = std::fs::File::options().append(true).open(dir.join(name)).unwrap();
            file.set_modified(SystemTime::now() - 2 * DAY).unwrap();
        }
    };
    assert_eq!(swept(&url).young, [step_url(&url, 2)]);
    age(&place(2));
    let data = files(&place(4)).into_iter().find(|name| name.ends_with(".safetensors")).unwrap();
    let whole = std::fs::read(place(4).join(&data)).unwrap();
    std::fs::remove_file(place(4).join(&data)).unwrap();
    let found = swept(&url);
    assert!(found.files.is_empty() && found.spared[0].reason.contains("the last checkpoint"), "{found:?}");
    std::fs::write(place(4).join(&data), whole).unwrap();
    assert!(!swept(&url).files.is_empty());
    // A save that begins may just have made an empty directory: it goes when it is old, too.
    assert_eq!((files(&place(2)), status(&url)), (vec![], vec![line(2, "Incomplete"), line(4, "Committed")]));
    for entry in std::fs::read_dir(place(2)).unwrap().map(|entry| entry.unwrap().path()).chain([place(2)]) {
        std::fs::File::open(entry).unwrap().set_modified(SystemTime::now() - 2 * DAY).unwrap();
    }
    swept(&url);
    assert_eq!(status(&url), [line(4, "Committed")]);
    assert!(!place(2).exists());
}

/// A disk with a run of these steps, each saved by two ranks.
fn disk_with(steps: &[u64]) -> SimDisk {
    let (disk, job) = (SimDisk::new(), Job::new(Layout::rows(2)));
    for &step in steps {
        let place = step_url(RUN, step);
        alike(job.save_to(|_| on_disk(disk.clone(), &place), &Truth::small(step, 50), LONG)).unwrap();
    }
    disk
}

/// Every file of a disk below the run, with a checksum of its contents.
fn contents(disk: &SimDisk) -> BTreeMap<PathBuf, u64> {
    fn walk(disk: &SimDisk, dir: &Path, found: &mut BTreeMap<PathBuf, u64>) {
        for (name, kind) in disk.readdir(dir).unwrap_or_default() {
            let path = dir.join(name);
            if kind == FileKind::Dir {
                walk(disk, &path, found);
                continue;
            }
            let file = disk.open_read(&path, false).unwrap();
            let mut bytes = vec![0; disk.fstat(&file).unwrap().bytes as usize];
            let mut read = 0;
            while read < bytes.len() {
                read += disk.pread(&file, &mut bytes[read..], read as u64).unwrap();
            }
            found.insert(path, crc64(&bytes));
        }
    }
    let mut found = BTreeMap::new();
    walk(disk, Path::new(RUN), &mut found);
    found
}

#[test]
fn a_pin_set_while_a_checkpoint_is_taken_back_brings_it_back() {
    let disk = disk_with(&[1, 2]);
    let before = contents(&disk);
    let hook = {
        let (disk, once) = (disk.clone(), AtomicBool::new(false));
        move |name: &'static str, path: &Path| {
            // The one who pins has seen the COMMIT, which is deleted next.
            if name == "fsync_dir" && path.ends_with(step_dir(1)) && !once.swap(true, Ordering::SeqCst) {
                let store = on_disk(disk.clone(), RUN).unwrap();
                store.put(&format!("{}/.pinned", step_dir(1)), b"late").unwrap();
            }
            None
        }
    };
    let mut retention = Retention::on(on_disk(Hooked::new(&disk, hook), RUN).unwrap(), RUN, LAST);
    let retained = retention.retain(&[]).unwrap();
    assert_eq!((retained.left, retained.pinned), (vec![], vec![1]));
    let mut after = contents(&disk);
    assert_eq!(after.remove(&Path::new(RUN).join(step_dir(1)).join(".pinned")), Some(crc64(b"late")));
    assert_eq!(after, before);
}

/// Makes `work` die at each of its system calls and repeats it; the result must be that of an undisturbed one, and at
/// no moment may the newest checkpoint be missing.
fn dies_anywhere(begun: &SimDisk, work: impl Fn(&SimDisk) -> shardfast_engine::Result<()>) {
    let expected = {
        let disk = begun.crash(1);
        work(&disk).unwrap();
        contents(&disk)
    };
    let mut calls = 0;
    for at in 0.. {
        let disk = begun.crash(1);
        disk.inject(at, Fault::Die);
        let died = work(&disk).is_err();
        for seed in 0..4 {
            let after = disk.crash(seed);
            assert!(after.stat(&Path::new(RUN).join(step_dir(3)).join("COMMIT")).is_ok(), "died at {at}");
            // What a sweep itself left is young before.
            after.pass(2 * AGE_MIN);
            for _ in 0..2 {
                work(&after).unwrap_or_else(|error| panic!("died at {at}, crashed with seed {seed}: {error}"));
                assert_eq!(contents(&after), expected, "died at {at}, crashed with seed {seed}");
            }
        }
        if !died && disk.calls().len() <= at {
            calls = at;
            break;
        }
    }
    assert!(calls > 30, "only {calls} system calls were cut off");
}

#[test]
fn rounds_that_die_anywhere_are_made_again_with_the_same_result() {
    dies_anywhere(&disk_with(&[1, 2, 3]), |disk| {
        let mut retention = Retention::on(on_disk(disk.clone(), RUN)?, RUN, LAST);
        retention.retain(&[])?;
        retention.clear(None)?;
        // What a power cut brings back of files that were deleted is debris without a mark.
        disk.pass(2 * AGE_MIN);
        sweep_in(&*on_disk(disk.clone(), RUN)?, RUN, AGE_MIN, false, &Timeout::default(), &|_, _| {}).map(drop)
    });
}

/// A rewind that dies anywhere: each step is in one of both places at least, whole, and the run has no hole.
#[test]
fn a_rewind_that_dies_anywhere_loses_nothing_and_is_made_again() {
    let begun = disk_with(&[1, 2, 3]);
    let committed = |disk: &SimDisk, dir: &str| -> Vec<u64> {
        let url = format!("{RUN}{dir}");
        let whole = |step: &u64| {
            let place = step_url(&url, *step);
            let store = on_disk(disk.clone(), &place).unwrap();
            let verified = verify_in(&Engine::solo(), store, &place, &|_, _| {});
            // The values of these jobs are any bytes, and their manifests name one step.
            let is_of_job = |problem| matches!(problem, Problem::Value | Problem::Step);
            verified.is_ok_and(|report| report.findings.iter().all(|finding| is_of_job(finding.problem)))
        };
        (1..=3).filter(whole).collect()
    };
    let rewound = |disk: &SimDisk| rewind_in(&*on_disk(disk.clone(), RUN)?, RUN, 2, &Timeout::default());
    let (kept, moved) = (vec![1], vec![2, 3]);
    let mut died_at = 0;
    for at in 0.. {
        let disk = begun.crash(1);
        disk.inject(at, Fault::Die);
        let died = rewound(&disk).is_err();
        let after = disk.crash(at as u64);
        let (here, there) = (committed(&after, ""), committed(&after, "/abandoned-from-00000002"));
        assert!((1..=3).all(|step| here.contains(&step) || there.contains(&step)), "died at {at}: {here:?} {there:?}");
        assert_eq!(here, (1..=here.len() as u64).collect::<Vec<_>>(), "died at {at}: a hole");
        rewound(&after).unwrap_or_else(|error| panic!("died at {at}: {error}"));
        assert_eq!(committed(&after, ""), kept, "died at {at}");
        assert_eq!(committed(&after, "/abandoned-from-00000002"), moved, "died at {at}");
        assert!(after.stat(&Path::new(RUN).join("abandoned-from-00000002-2")).is_err(), "died at {at}");
        if !died && disk.calls().len() <= at {
            died_at = at;
            break;
        }
    }
    assert!(died_at > 60, "only {died_at} system calls were cut off");
}

/// An answer that denies a `COMMIT` which a list shows.
#[test]
fn a_commit_that_a_list_shows_keeps_its_files_whatever_another_answer_says() {
    let disk = disk_with(&[1, 2, 3]);
    let deny = |name: &'static str| {
        Hooked::new(&disk, move |call: &'static str, path: &Path| {
            (call == name && path.ends_with(Path::new(&step_dir(2)).join("COMMIT"))).then_some(Err(Errno::NOENT))
        })
    };
    disk.pass(2 * AGE_MIN);
    let before = contents(&disk);
    let swept =
        sweep_in(&*on_disk(deny("open_read"), RUN).unwrap(), RUN, AGE_MIN, false, &Timeout::default(), &|_, _| {})
            .unwrap();
    assert!(swept.files.is_empty() && contents(&disk) == before);
    let [spared] = &swept.spared[..] else { panic!("{swept:?}") };
    assert!(spared.url.ends_with(&step_dir(2)) && spared.reason.contains("a list shows its COMMIT"), "{spared:?}");
    // A mark of an earlier round makes no difference.
    let store = on_disk(disk.clone(), RUN).unwrap();
    let record = store.read(&format!("{}/COMMIT", step_dir(2)), 4096).unwrap();
    store.put(&format!("{}/.leaving", step_dir(2)), &record).unwrap();
    let before = contents(&disk);
    let mut retention = Retention::on(on_disk(deny("open_read"), RUN).unwrap(), RUN, LAST);
    assert!(retention.clear(None).unwrap().is_empty());
    assert!(retention.clear(Some(&[2])).unwrap().is_empty());
    assert_eq!(contents(&disk), before);
}

#[test]
fn what_this_process_committed_last_stays_whatever_its_number() {
    // Those behind it are of a save that has begun since, or of another training.
    let disk = disk_with(&[60, 70, 3, 4, 5, 6]);
    let mut retention = Retention::on(on_disk(disk.clone(), RUN).unwrap(), RUN, Keep { last: Some(2), ..LAST });
    assert_eq!(retention.retain(&[4, 5, 6]).unwrap().left, [3, 4]);
    // It went back.
    assert_eq!(retention.retain(&[60, 70, 5, 6]).unwrap().left, [60, 70]);
}

#[test]
fn a_sweep_that_dies_anywhere_is_made_again_with_the_same_result() {
    let disk = disk_with(&[1, 2, 3]);
    let store = on_disk(disk.clone(), RUN).unwrap();
    // A crashed save of another attempt, and one of a step without a commit.
    for step in [2, 4] {
        for name in ["manifest-0123456789abcdef", "model/00000-000-0123456789abcdef.safetensors"] {
            store.put(&format!("{}/{name}", step_dir(step)), b"left").unwrap();
        }
    }
    disk.pass(2 * AGE_MIN);
    dies_anywhere(&disk, |disk| {
        let store = on_disk(disk.clone(), RUN)?;
        sweep_in(&*store, RUN, AGE_MIN, false, &Timeout::default(), &|_, _| {}).map(drop)
    });
}

#[test]
fn a_sweep_beside_eight_savers_touches_nothing_of_theirs_and_leaves_no_debris() {
    for seed in 0..count("SHARDFAST_SWEEP_SEEDS", 40) as u64 {
        let mut dice = Dice(seed);
        let disk = disk_with(&[1]);
        let store = on_disk(disk.clone(), RUN).unwrap();
        // Crashed saves, some of them of steps that are saved now.
        for step in [1, 3, 5, 20, 21] {
            store.put(&format!("{}/manifest-0123456789abcdef", step_dir(step)), b"left").unwrap();
        }
        disk.pass(AGE_MIN);
        let kept = contents(&disk);
        let savers: Vec<Job> = (2..10).map(|_| Job::new(Layout::rows(1))).collect();
        let truths: Vec<Truth> = (2..10).map(|step| Truth::small(step, 50)).collect();
        let done = AtomicBool::new(false);
        let sweeps = thread::scope(|threads| {
            let saving: Vec<_> = (2..10)
                .zip(savers.iter().zip(&truths))
                .map(|(step, (job, truth))| {
                    let (disk, place) = (disk.clone(), step_url(RUN, step));
                    threads.spawn(move || alike(job.save_to(|_| on_disk(disk.clone(), &place), truth, LONG)))
                })
                .collect();
            let sweeping = threads.spawn(|| {
                let (mut sweeps, mut passed) = (0, Duration::ZERO);
                while !done.load(Ordering::SeqCst) {
                    // All of a save takes less than it may.
                    let time = SAVE_MAX / 1000 * dice.below(100) as u32;
                    if passed + time < SAVE_MAX {
                        disk.pass(time);
                        passed += time;
                    }
                    sweep_in(&*store, RUN, AGE_MIN, false, &Timeout::default(), &|_, _| {}).unwrap();
                    sweeps += 1;
                    // The savers have the disk to themselves for a while.
                    thread::sleep(Duration::from_millis(1));
                }
                sweeps
            });
            let saved: Vec<_> = saving.into_iter().map(|saved| saved.join().unwrap()).collect();
            done.store(true, Ordering::SeqCst);
            let sweeps = sweeping.join().unwrap();
            assert!(saved.iter().all(|saved| *saved == Ok(vec![()])), "seed {seed}: {saved:?}");
            sweeps
        });
        assert!(sweeps > 0);
        disk.pass(AGE_MIN);
        sweep_in(&*store, RUN, AGE_MIN, false, &Timeout::default(), &|_, _| {}).unwrap();
        let after = contents(&disk);
        let debris = |path: &Path| path.to_str().unwrap().contains("0123456789abcdef");
        assert!(!after.keys().any(|path| debris(path)), "seed {seed}: {:?}", after.keys());
        assert!(kept.iter().filter(|(path, _)| !debris(path)).all(|(path, bytes)| after.get(path) == Some(bytes)));
        let again = disk.clone();
        for (step, truth) in (2..10).zip(&truths) {
            let place = step_url(RUN, step);
            let open =
                |engine: &Arc<Engine>| checkpoint::open_from(engine, on_disk(again.clone(), &place), &place, LONG);
            let differs = Job::new(Layout::rows(1)).compare(open, truth, &mut Dice(3));
            assert_eq!(differs, Ok(None), "seed {seed}, step {step}");
        }
    }
}

#[test]
fn what_a_run_inside_a_checkpoint_writes_is_left_alone() {
    let dir = scratch();
    let place = step_url(&run(dir.path(), &[1]), 1);
    let below = |name: &str| dir.path().join(step_dir(1)).join(name);
    let young = "finetune/step-00000002/m/.tmp-fedcba9876543210";
    let old = "finetune/step-00000001/m/.tmp-fedcba9876543210";
    leave(below(young), Duration::from_secs(60));
    leave(below(old), 2 * DAY);
    leave(below("model/.tmp-fedcba9876543210"), Duration::from_secs(60));
    let mut went = swept(&place).files;
    went.sort();
    let expected = [old, "model/.tmp-fedcba9876543210"].map(|name| shardfast_store::join(&place, name));
    assert_eq!(went, expected, "no save writes into the directories of a committed checkpoint");
    assert!(below(young).exists());
}
