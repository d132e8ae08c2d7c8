//! Tests every backend against the contract.

use std::path::Path;
use std::sync::Arc;

use shardfast_store::disk::Errno;
use shardfast_store::local::LocalStore;
use shardfast_store::testing::appended::AppendStore;
use shardfast_store::testing::conformance;
use shardfast_store::testing::simdisk::SimDisk;
use shardfast_store::{Parts, Store, open};

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
