//! Tests real file systems that are full, read-only or not permitted. Mounting needs root; without it a test prints
//! that it was skipped.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::geteuid;
use shardfast_store::testing::conformance::{pattern, write_object};
use shardfast_store::{Kind, Result, Store, open};

/// A file system of its own, unmounted when dropped.
struct Mount {
    place: PathBuf,
    // The place of an image and of the mount point.
    _dir: tempfile::TempDir,
}

impl Mount {
    fn new(test: &str, prepare: impl FnOnce(&Path) -> Vec<Vec<String>>) -> Option<Self> {
        if !geteuid().is_root() {
            println!("{test} skipped: mounting takes root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("mount");
        std::fs::create_dir(&place).unwrap();
        for command in prepare(dir.path()) {
            match Command::new(&command[0]).args(&command[1..]).output() {
                Ok(output) if output.status.success() => {}
                other => {
                    println!("{test} skipped: {command:?} gave {other:?}");
                    return None;
                }
            }
        }
        Some(Self { place, _dir: dir })
    }

    fn tmpfs(test: &str, size: &str) -> Option<Self> {
        let line = |dir: &Path| format!("mount -t tmpfs -o size={size} none {}/mount", dir.display());
        Self::new(test, |dir| vec![words(&line(dir))])
    }

    fn image(test: &str, make: &str, megabytes: u64) -> Option<Self> {
        Self::new(test, |dir| {
            let dir = dir.display();
            let image = std::fs::File::create(format!("{dir}/image")).unwrap();
            image.set_len(megabytes << 20).unwrap();
            vec![words(&format!("{make} {dir}/image")), words(&format!("mount -o loop {dir}/image {dir}/mount"))]
        })
    }

    fn store(&self) -> std::sync::Arc<dyn Store> {
        open(&format!("{}/run", self.place.display())).unwrap()
    }

    fn remount_read_only(&self) {
        let done = Command::new("mount").args(["-o", "remount,ro"]).arg(&self.place).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.place).status();
    }
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn kind<T>(result: Result<T>) -> Kind {
    result.err().expect("an error").kind
}

fn a_full_disk_loses_nothing(store: &dyn Store) {
    let committed = pattern(1, 100_000);
    write_object(store, "step-1/data", &committed).unwrap();
    store.sync(&["step-1/data"]).unwrap();
    store.publish("step-1/COMMIT", b"done").unwrap();

    let error = store.create("step-2/data", 1 << 30).err().expect("there is no room");
    assert_eq!(error.kind, Kind::Exhausted, "{error}");
    assert!(error.to_string().contains("step-2/data: No space left on device"), "{error}");
    let free = error.message.split_once("expected room for 1073741824 bytes, found ").expect("what is free").1;
    let free: u64 = free.strip_suffix(" bytes free").unwrap().parse().unwrap();
    assert!((1 << 20..8 << 20).contains(&free), "{error}");
    assert_eq!(store.list("step-2").unwrap(), [], "it did not stay");

    let mut filled = 0;
    let error = loop {
        match write_object(store, &format!("fill/{filled}"), &pattern(2, 300_000)) {
            Ok(()) => filled += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind, Kind::Exhausted, "{error}");
    while write_object(store, &format!("fill/{filled}"), &[1; 4096]).is_ok() {
        filled += 1;
    }
    assert_eq!(kind(store.put("step-3/manifest", &pattern(3, 500_000))), Kind::Exhausted);
    assert_eq!(kind(store.publish("step-3/COMMIT", &pattern(3, 500_000))), Kind::Exhausted);

    assert_eq!(store.read("step-1/COMMIT", 100).unwrap(), b"done");
    assert_eq!(store.read("step-1/data", 1 << 20).unwrap(), committed);
    store.delete_tree("fill").unwrap();
    write_object(store, "step-3/data", &pattern(2, 300_000)).unwrap();
    store.publish("step-3/COMMIT", b"done").unwrap();
    assert_eq!(store.list("step-3").unwrap().len(), 2, "no temporary files stayed");
}

fn a_read_only_store_can_be_read(mount: &Mount) {
    let store = mount.store();
    store.publish("step-1/COMMIT", b"done").unwrap();
    mount.remount_read_only();
    let store = open(store.url()).unwrap();
    assert_eq!(store.read("step-1/COMMIT", 100).unwrap(), b"done");
    assert_eq!(store.list("").unwrap().len(), 1);
    let refused = [
        kind(store.create("step-2/data", 1000)),
        kind(store.create("step-1/data", 1000)),
        kind(store.put("x", b"x")),
        kind(store.publish("step-2/COMMIT", b"x")),
        kind(store.delete("step-1/COMMIT")),
        kind(store.delete_tree("step-1")),
    ];
    assert_eq!(refused, [Kind::Invalid; 6]);
    let error = store.publish("step-1/other", b"x").unwrap_err();
    assert!(error.to_string().contains("Read-only file system"), "{error}");
}

#[test]
fn tmpfs_full() {
    let Some(mount) = Mount::tmpfs("tmpfs_full", "2m") else { return };
    a_full_disk_loses_nothing(&*mount.store());
}

#[test]
fn tmpfs_read_only() {
    let Some(mount) = Mount::tmpfs("tmpfs_read_only", "2m") else { return };
    a_read_only_store_can_be_read(&mount);
}

#[test]
fn ext4_full() {
    let Some(mount) = Mount::image("ext4_full", "mkfs.ext4 -q -m 0", 8) else { return };
    a_full_disk_loses_nothing(&*mount.store());
}

#[test]
fn ext4_read_only() {
    let Some(mount) = Mount::image("ext4_read_only", "mkfs.ext4 -q", 8) else { return };
    a_read_only_store_can_be_read(&mount);
}

#[test]
fn without_permission() {
    if geteuid().is_root() {
        // Root may do everything: another user runs this test.
        let mut other = Command::new(std::env::current_exe().unwrap());
        match other.args(["--exact", "without_permission"]).uid(65_534).gid(65_534).output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout)),
            Err(error) => println!("without_permission skipped: {error}"),
        }
        return;
    }
    // The directory for temporary files may belong to root alone.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let store = open(&format!("{}/run", dir.path().display())).unwrap();
    for error in [store.create("data", 10).err(), store.publish("COMMIT", b"x").err()] {
        let error = error.unwrap();
        assert_eq!(error.kind, Kind::Invalid);
        assert!(error.to_string().contains("Permission denied"), "{error}");
    }
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
}
