//! Tests a program that removes directories without a `COMMIT` during a save: the save fails, and no hollow checkpoint
//! stays.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shardfast_engine::{Error, Kind};
use shardfast_store::disk::{Disk, FileKind};
use shardfast_store::testing::simdisk::SimDisk;

use crate::crash::{Hooked, NEW, begun, store, survey, truth};
use crate::job::{LONG, alike};

/// Effect of a sweep on a directory without a `COMMIT`.
type Sweep = fn(&SimDisk);

fn files(disk: &SimDisk, dir: &Path, found: &mut Vec<PathBuf>) {
    for (name, kind) in disk.readdir(dir).unwrap_or_default() {
        match kind {
            FileKind::Dir => files(disk, &dir.join(name), found),
            _ => found.push(dir.join(name)),
        }
    }
}

fn data_files(disk: &SimDisk) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(disk, Path::new(NEW), &mut found);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    found
}

fn remove_everything(disk: &SimDisk) {
    let mut found = Vec::new();
    files(disk, Path::new(NEW), &mut found);
    found.iter().for_each(|path| disk.unlink(path).unwrap());
}

fn remove_one_data_file(disk: &SimDisk) {
    data_files(disk).last().into_iter().for_each(|path| disk.unlink(path).unwrap());
}

fn cut_one_data_file(disk: &SimDisk) {
    if let Some(path) = data_files(disk).first() {
        let file = disk.open_read(path, false).unwrap();
        let bytes = disk.fstat(&file).unwrap().bytes;
        disk.ftruncate(&file, bytes.saturating_sub(1)).unwrap();
    }
}

fn remove_manifests(disk: &SimDisk) {
    for (name, _) in disk.readdir(Path::new(NEW)).unwrap_or_default() {
        if name.to_string_lossy().starts_with("manifest-") {
            disk.unlink(&Path::new(NEW).join(name)).unwrap();
        }
    }
}

#[test]
fn a_sweep_at_any_moment_of_a_save_leaves_no_hollow_checkpoint() {
    let (job, begun) = begun();
    let sweeps: [(&str, Sweep); 4] = [
        ("everything", remove_everything),
        ("one data file", remove_one_data_file),
        ("the end of a data file", cut_one_data_file),
        ("manifests", remove_manifests),
    ];
    for (what, sweep) in sweeps {
        let (mut failed, mut told) = (0, 0);
        for at in 0.. {
            let disk = begun.crash(1);
            let (calls, swept) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(false)));
            let hook = {
                let (disk, calls, swept) = (disk.clone(), Arc::clone(&calls), Arc::clone(&swept));
                move |_: &'static str, _: &Path| {
                    let is_committed = disk.stat(&Path::new(NEW).join("COMMIT")).is_ok();
                    if calls.fetch_add(1, Ordering::SeqCst) == at && !is_committed {
                        sweep(&disk);
                        *swept.lock().unwrap() = true;
                    }
                    None
                }
            };
            let hooked = Hooked::new(&disk, hook);
            let saved = alike(job.save_to(|_| store(hooked.clone(), NEW), &truth(2), LONG));
            if calls.load(Ordering::SeqCst) <= at {
                break;
            }
            let place = format!("{what}, swept before call {at}");
            let visible = survey(&disk).unwrap_or_else(|violation| panic!("{place}: {violation}"));
            assert_eq!(visible, saved.is_ok(), "{place}: {saved:?}");
            if let Err(Error { kind, message, .. }) = &saved {
                assert!(*swept.lock().unwrap(), "{place}: {message}");
                failed += 1;
                told += u32::from(*kind == Kind::Corrupt && message.contains("removed or changed them"));
            }
            // The same engines go on.
            if !visible {
                assert_eq!(alike(job.save_to(|_| store(disk.clone(), NEW), &truth(2), LONG)), Ok(vec![(), ()]));
                assert_eq!(survey(&disk), Ok(true), "{place}: then");
            }
        }
        assert!(failed > 2 && told > 1, "{what}: {failed} saves failed, {told} of them by name");
    }
}
