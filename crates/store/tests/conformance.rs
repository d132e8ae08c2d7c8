//! Tests every backend against the contract.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shardfast_store::disk::{Disk, Errno};
use shardfast_store::local::LocalStore;
use shardfast_store::testing::appended::AppendStore;
use shardfast_store::testing::conformance;
use shardfast_store::testing::simdisk::SimDisk;
use shardfast_store::{Kind, Parts, Store, open};

/// Time for which a client of a real network file system may take a name for that of another living file.
const REMEMBERED: Duration = Duration::from_secs(4);

#[test]
fn local_by_path() {
    let dir = tempfile::tempdir().unwrap();
    conformance::check(|name| open(&format!("{}/not/yet/{name}", dir.path().display())).unwrap());
    conformance::check_reports(&format!("{}/reports", dir.path().display()));
}

#[test]
fn local_by_url() {
    let dir = tempfile::tempdir().unwrap();
    conformance::check(|name| open(&format!("file://{}/100%25%20ok/{name}", dir.path().display())).unwrap());
    assert!(dir.path().join("100% ok/run/step/COMMIT").is_file());
}

/// Tests `/dev/shm`, a tmpfs on every Linux: no block device, no preallocation on old kernels, often no direct I/O.
#[test]
fn local_on_tmpfs() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    conformance::check(|name| open(&format!("{}/{name}", dir.path().display())).unwrap());
}

#[test]
fn memory() {
    conformance::check(|name| open(&format!("memory://conformance/{name}")).unwrap());
    conformance::check_reports("memory://conformance-reports");
}

/// Tests parts that are only appended to, of which as many are open at a time as the suite has threads.
#[test]
fn appended() {
    let parts = Parts { bytes_min: 64 << 10, bytes_max: 1 << 20, count_max: 1000 };
    conformance::check(|name| {
        let joined = open(&format!("memory://appended/{name}")).unwrap();
        Arc::new(AppendStore::new(joined, parts, 4)) as Arc<dyn Store>
    });
}

/// Tests the local backend through two clients of one network file system, by turns: each remembers what was absent,
/// and what it found, until it asks anew.
#[test]
fn simulated_clients() {
    for lacks_noreplace in [false, true] {
        let disk = SimDisk::new();
        if lacks_noreplace {
            disk.refuse("rename_noreplace", Errno::INVAL);
        }
        let clients = [disk.client(), disk.client()];
        let turn = AtomicUsize::new(0);
        conformance::check(|name| {
            let client = clients[turn.fetch_add(1, Ordering::Relaxed) % 2].clone();
            Arc::new(LocalStore::on(client, Path::new("/mnt/runs").join(name)).unwrap()) as Arc<dyn Store>
        });
    }
}

/// Tests mounts of one file system, by turns, as two machines have them: `SHARDFAST_TEST_MOUNTS` names an empty
/// directory as each mount has it, with colons between them.
#[test]
fn mounted_twice() {
    let Ok(mounts) = std::env::var("SHARDFAST_TEST_MOUNTS") else {
        println!("mounted_twice skipped: SHARDFAST_TEST_MOUNTS names no mounts of one file system");
        return;
    };
    let mounts: Vec<&str> = mounts.split(':').collect();
    let turn = AtomicUsize::new(0);
    let open = |name: &str| {
        // A store below a store is on the same mount, since their URLs are compared.
        let next = usize::from(!name.contains('/'));
        let mount = mounts[(turn.fetch_add(next, Ordering::Relaxed) + next) % mounts.len()];
        open(&format!("{mount}/not/yet/{name}")).unwrap()
    };
    conformance::check_remembering(open, REMEMBERED);
}

/// A client that looked for a name before another one made it finds it, and what is in it.
#[test]
fn absent_names_are_asked_for_again() {
    let disk = SimDisk::new();
    let [one, other] = [0, 1].map(|_| disk.client());
    let open = |client: &SimDisk, place: &str| -> Arc<dyn Store> {
        Arc::new(LocalStore::on(client.clone(), Path::new("/mnt/runs").join(place)).unwrap())
    };
    let waiting = open(&other, "step-1");
    assert!(waiting.size("model/data").is_err() && waiting.list("").is_err());
    let saver = open(&one, "step-1");
    conformance::write_object(&*saver, "model/data", &[7; 100]).unwrap();
    saver.publish("COMMIT", b"done").unwrap();
    assert_eq!(waiting.size("model/data").unwrap(), 100);
    assert_eq!(waiting.read("COMMIT", 100).unwrap(), b"done");
    assert_eq!(waiting.list("").unwrap().len(), 2);

    saver.put("notes", b"1").unwrap();
    assert_eq!(waiting.list("").unwrap().iter().map(|entry| entry.bytes).sum::<u64>(), 5);
    saver.put("notes", b"longer").unwrap();
    assert_eq!(waiting.list("").unwrap().iter().map(|entry| entry.bytes).sum::<u64>(), 10);
    waiting.delete("model/data").unwrap();
    assert_eq!(saver.size("model/data").unwrap_err().kind, Kind::NotFound);
    conformance::write_object(&*saver, "late", &[1]).unwrap();
    waiting.delete_all(&["late", "COMMIT"], &["model"]).unwrap();
    assert_eq!(saver.list("").unwrap().len(), 1);
    waiting.publish("COMMIT", b"other").unwrap();
    assert_eq!(saver.publish("COMMIT", b"third").unwrap_err().kind, Kind::Conflict);
}

/// Aligned bytes of a direct write.
#[repr(align(4096))]
struct Aligned([u8; 8192]);

/// Files that a client has open when its server forgets them fail by name; those that it opens after that do not.
#[test]
fn stale_files_are_opened_anew() {
    let disk = SimDisk::new().client();
    disk.refuse("create_new_direct", Errno::INVAL);
    let store: &dyn Store = &LocalStore::on(disk.clone(), "/mnt/run".into()).unwrap();
    conformance::write_object(store, "whole", &[7; 5000]).unwrap();
    let reader = store.open("whole").unwrap();
    let mut writer = store.create("begun", 5000).unwrap();
    disk.expire();
    let read = reader.read_at(0, &mut [0; 10]).unwrap_err();
    let finished = writer.finish().unwrap_err();
    drop(writer);
    assert_eq!([read.kind, finished.kind], [Kind::Unavailable; 2]);
    assert!(finished.to_string().contains("/mnt/run/begun"), "{finished}");
    assert_eq!((read.is_final, finished.is_final), (false, true));
    assert_eq!(store.read("whole", 5000).unwrap(), [7; 5000]);

    store.put("notes", b"after").unwrap();
    store.publish("COMMIT", b"done").unwrap();
    assert_eq!(store.list("").unwrap().len(), 3, "what was begun did not stay");
}

/// A file goes on with a new handle if its name still is this file, and all of its bytes have come to the server.
#[test]
fn stale_files_of_direct_writes_go_on() {
    let (server, bytes) = (SimDisk::new(), Aligned([9; 8192]));
    let disk = server.client();
    let store: &dyn Store = &LocalStore::on(disk.clone(), "/mnt/run".into()).unwrap();
    let mut writer = store.create("direct", 8000).unwrap();
    assert_eq!(writer.alignment(), 4096);
    writer.write_at(0, &bytes.0[..4096]).unwrap();
    disk.expire();
    let written = writer.write_at(4096, &bytes.0[4096..]).unwrap_err();
    assert!(written.kind == Kind::Unavailable && !written.is_final, "{written}");
    writer.write_at(4096, &bytes.0[4096..]).unwrap();
    writer.finish().unwrap();
    drop(writer);
    assert_eq!(store.read("direct", 8000).unwrap(), [9; 8000]);

    // The name is that of a copy, which has but the first half.
    for after_expiry in [false, true] {
        let mut writer = store.create("copied", 8000).unwrap();
        writer.write_at(0, &bytes.0[..4096]).unwrap();
        server.unlink(Path::new("/mnt/run/copied")).unwrap();
        let other = LocalStore::on(server.client(), "/mnt/run".into()).unwrap();
        conformance::write_object(&other, "copied", &bytes.0[..4096]).unwrap();
        if after_expiry {
            disk.expire();
        }
        let rest = writer.write_at(4096, &bytes.0[4096..]).and_then(|()| writer.finish()).unwrap_err();
        let kind = if after_expiry { Kind::Unavailable } else { Kind::Corrupt };
        assert!(rest.kind == kind && rest.is_final, "{rest}");
        assert!(rest.to_string().contains("/mnt/run/copied"), "{rest}");
    }
}

/// Tests the local backend on file systems that lack one feature or another.
#[test]
fn simulated() {
    let lacks: [&[(&str, Errno)]; 5] = [
        &[],
        &[("create_new_direct", Errno::INVAL)],
        &[("pwrite_direct", Errno::INVAL)],
        &[("fallocate", Errno::OPNOTSUPP), ("will_need", Errno::INVAL)],
        &[("rename_noreplace", Errno::INVAL)],
    ];
    for lacks in lacks {
        let disk = SimDisk::new();
        for &(call, errno) in lacks {
            disk.refuse(call, errno);
        }
        conformance::check(|name| {
            Arc::new(LocalStore::on(disk.clone(), Path::new("/mnt/runs").join(name)).unwrap()) as Arc<dyn Store>
        });
    }
}
