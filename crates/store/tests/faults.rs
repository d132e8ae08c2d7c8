//! Tests that every system call of a save may fail once, in every way: the outcome is one clear error or a whole save.

mod save;

use std::path::Path;

use save::{committed, mount, save};
use shardfast_store::disk::Errno;
use shardfast_store::local::LocalStore;
use shardfast_store::testing::conformance::{pattern, write_object};
use shardfast_store::testing::simdisk::{Call, Fault, SimDisk};
use shardfast_store::{Error, Kind, Result, Store};

/// Saves with `fault` at each call in turn; `judge` gets the call, the outcome and the disk.
fn at_every_call(fault: Fault, mut judge: impl FnMut(&Call, &Result<()>, &SimDisk)) {
    on_every_disk(|disk| at_every_call_of(disk, fault, &mut judge));
}

/// Runs a test on every kind of disk: with writes in flight through a ring, and without.
fn on_every_disk(mut test: impl FnMut(&dyn Fn() -> SimDisk)) {
    test(&SimDisk::new);
    test(&|| {
        let disk = SimDisk::new();
        disk.refuse("ring", Errno::NOSYS);
        disk
    });
}

fn at_every_call_of(new: &dyn Fn() -> SimDisk, fault: Fault, judge: &mut impl FnMut(&Call, &Result<()>, &SimDisk)) {
    for at in 0.. {
        let disk = new();
        disk.inject(at, fault);
        let saved = mount(&disk).and_then(|store| save(&store, 1));
        let calls = disk.calls();
        let Some(call) = calls.get(at) else { break };
        judge(call, &saved, &disk);
        // A published object is whole, whatever was said, and stays so if success was said.
        let store = mount(&disk).unwrap();
        let seen = committed(&store, 1).unwrap_or_else(|flaw| panic!("{fault:?} at {call:?}: {flaw}"));
        match &saved {
            Ok(()) => assert_eq!(committed(&mount(&disk.crash(0)).unwrap(), 1), Ok(true), "{fault:?} at {call:?}"),
            Err(error) if seen => {
                assert_eq!(error.kind, Kind::Unavailable, "{fault:?} at {call:?}: {error}");
                assert!(error.message.contains("may have been published"), "{error}");
            }
            Err(_) => {}
        }
        // The store is not spoilt.
        save(&store, 2).unwrap();
        assert_eq!(committed(&store, 2), Ok(true));
    }
}

#[test]
fn an_error_of_any_call_is_reported_with_its_kind() {
    let expected = [
        (Errno::NOSPC, Kind::Exhausted),
        (Errno::DQUOT, Kind::Exhausted),
        (Errno::IO, Kind::Unavailable),
        (Errno::STALE, Kind::Unavailable),
        (Errno::TIMEDOUT, Kind::Unavailable),
        (Errno::ROFS, Kind::Invalid),
        (Errno::ACCESS, Kind::Invalid),
        (Errno::PERM, Kind::Invalid),
    ];
    for (errno, kind) in expected {
        let (mut failed, mut tolerated) = (0, 0);
        at_every_call(Fault::Fail(errno), |call, saved, _| match saved {
            Err(error) => {
                failed += 1;
                let last_sync = error.message.contains("may have been published");
                let no_link = call.name == "rename_noreplace" && errno == Errno::PERM;
                let allowed = if last_sync {
                    Kind::Unavailable
                } else if no_link {
                    Kind::Unsupported
                } else {
                    kind
                };
                assert_eq!(error.kind, allowed, "{call:?}: {error}");
                // A temporary file is written again under another name.
                let is_temporary = call.path.to_string_lossy().contains("/.tmp-");
                let flushes = call.name == "fsync_dir" || (call.name == "fdatasync" && !is_temporary);
                // A data file whose handle is stale is opened anew, or lost: `stale_files_…` tells.
                if errno != Errno::STALE || is_temporary || call.name == "fsync_dir" {
                    assert_eq!(error.is_final, flushes && !last_sync, "{call:?}: {error}");
                }
                assert!(error.name.starts_with('/'), "{error}");
                assert!(error.message.contains(&errno.to_string()), "{error} does not say {errno}");
                let makes_room = ["create_new", "create_new_direct", "fallocate", "pwrite", "pwrite_direct", "mkdir"];
                if errno == Errno::NOSPC && makes_room.contains(&call.name) && !is_temporary {
                    let said = [" bytes free", "expected room for "].map(|said| error.message.contains(said));
                    assert_eq!(said, [true, call.name != "mkdir"], "{call:?}: {error}");
                }
            }
            Ok(()) => {
                tolerated += 1;
                // The removal of a temporary file that is gone already; the ring, without which there are threads.
                assert!(["unlink", "ring"].contains(&call.name), "{errno} of {call:?} is passed over");
            }
        });
        assert!(failed > 60 && tolerated < 20, "{errno}: {failed} failed, {tolerated} tolerated");
    }
}

#[test]
fn interruptions_and_short_transfers_are_continued() {
    at_every_call(Fault::Fail(Errno::INTR), |call, saved, _| assert_eq!(*saved, Ok(()), "{call:?}"));
    at_every_call(Fault::Short, |call, saved, _| assert_eq!(*saved, Ok(()), "{call:?}"));
}

/// Tests requests that a network file system carried out although their answer was lost.
#[test]
fn lost_answers_do_not_make_a_lie() {
    for errno in [Errno::IO, Errno::TIMEDOUT, Errno::INTR, Errno::EXIST] {
        at_every_call(Fault::Lost(errno), |call, saved, _| {
            if call.name.starts_with("rename") {
                assert_eq!(*saved, Ok(()), "it was renamed: {errno}");
            }
        });
    }
}

/// Tests that an unknown outcome is reported: the answer to the decisive request is lost, and the name cannot be read.
#[test]
fn what_cannot_be_known_is_said() {
    let disk = SimDisk::new();
    let store = mount(&disk).unwrap();
    store.put("other", b"the directories are there").unwrap();
    let before = disk.calls().len();
    store.publish("first", b"done").unwrap();
    let calls = disk.calls();
    let decisive = calls[before..].iter().position(|call| call.name == "rename_noreplace").unwrap();
    disk.inject(calls.len() + decisive, Fault::Lost(Errno::TIMEDOUT));
    disk.refuse("stat", Errno::IO);
    let error = store.publish("second", b"done").unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.message.contains("may have been published"), "{error}");
    assert_eq!(mount(&disk.crash(1)).unwrap().list("").unwrap().len(), 3);
}

#[test]
fn reads_report_errors_and_continue_short_ones() {
    let contents = pattern(1, 300_000);
    let read = |at: usize, fault| {
        let disk = SimDisk::new();
        let store = mount(&disk).unwrap();
        write_object(&store, "d/o", &contents).unwrap();
        disk.inject(disk.calls().len() + at, fault);
        let store: &dyn Store = &store;
        (store.read("d/o", 1 << 20), disk.calls())
    };
    let (whole, calls) = read(usize::MAX / 2, Fault::Short);
    assert_eq!(whole, Ok(contents.clone()));
    let last: Vec<&str> = calls.iter().rev().take(5).map(|call| call.name).collect();
    assert_eq!(last, ["pread", "will_need", "cached_bytes", "fstat", "open_read"], "one announcement, one read");
    for at in [0, 1, 3, 4] {
        for fault in [Fault::Short, Fault::Fail(Errno::INTR)] {
            assert_eq!(read(at, fault).0, Ok(contents.clone()), "{at} {fault:?}");
        }
        let failed = read(at, Fault::Fail(Errno::STALE)).0;
        assert!(at == 3 || failed.is_err_and(|error| error.kind == Kind::Unavailable), "{at}");
    }
}

#[test]
fn a_full_disk_is_found_before_a_byte_is_written() {
    let disk = SimDisk::new();
    disk.refuse("fallocate", Errno::NOSPC);
    let store = mount(&disk).unwrap();
    let error = store.create("d/big", 1 << 20).err().unwrap();
    assert_eq!(error.kind, Kind::Exhausted);
    let expected = "fallocate /mnt/runs/gpt/d/big: No space left on device (os error 28): expected room for 1048576 \
                    bytes, found 1073741824 bytes free";
    assert_eq!(error.to_string(), expected);
    let big = Path::new("/mnt/runs/gpt/d/big");
    let calls: Vec<&str> = disk.calls().iter().filter(|call| call.path == big).map(|call| call.name).collect();
    // What it was given is free again before it is said what is free.
    assert_eq!(calls, ["create_new_direct", "fstat", "fallocate", "unlink", "statvfs"]);
}

#[test]
fn without_an_atomic_create_nothing_is_published() {
    let disk = SimDisk::new();
    disk.refuse("rename_noreplace", Errno::INVAL);
    disk.refuse("link", Errno::PERM);
    let store = mount(&disk).unwrap();
    let error = store.publish("COMMIT", b"done").unwrap_err();
    assert_eq!(error.kind, Kind::Unsupported, "{error}");
    assert_eq!(store.list("").unwrap(), []);
}

#[test]
fn a_directory_that_cannot_be_synced_is_an_error() {
    let disk = SimDisk::new();
    disk.refuse("fsync_dir", Errno::INVAL);
    let store = mount(&disk).unwrap();
    write_object(&store, "d/o", b"bytes").unwrap();
    assert_eq!(store.sync(&["d/o"]).unwrap_err().kind, Kind::Unsupported);
}

/// Tests directories of other users above the root, which this process may search but not open.
#[test]
fn foreign_directories_above_the_root_need_not_be_readable() {
    let disk = SimDisk::new();
    save(&mount(&disk).unwrap(), 1).unwrap();
    let disk = disk.crash(1);
    disk.inject(disk.calls().len(), Fault::Fail(Errno::INTR));
    let store = mount(&disk).unwrap();
    let before = disk.calls().len();
    store.sync(&["step-1/COMMIT"]).unwrap();
    let synced: Vec<_> = disk.calls()[before..].iter().map(|call| call.path.clone()).collect();
    let way = ["/mnt/runs/gpt/step-1", "/mnt/runs/gpt", "/mnt/runs", "/mnt", "/"];
    assert_eq!(synced, way.map(Path::new), "each directory once");
    store.sync(&["step-1/COMMIT"]).unwrap();
    assert_eq!(disk.calls().len(), before + 7, "those above the root once per store");

    for errno in [Errno::ACCESS, Errno::PERM, Errno::ROFS] {
        let disk = disk.crash(1);
        (3..6).for_each(|at| disk.inject(at, Fault::Fail(errno)));
        mount(&disk).unwrap().sync(&["step-1/COMMIT"]).unwrap();
        assert_eq!(disk.calls().len(), 6);
    }
}

#[test]
fn what_is_no_directory_is_named() {
    let disk = SimDisk::new();
    let root = LocalStore::on(disk.clone(), "/".into()).unwrap();
    write_object(&root, "mnt/file", b"a file").unwrap();
    for place in ["/mnt/file", "/mnt/file/run", "/mnt/file/a/b"] {
        let error = LocalStore::on(disk.clone(), place.into()).err().unwrap();
        assert_eq!(error.to_string(), "open /mnt/file: expected a directory, found something else");
        assert_eq!(error.kind, Kind::Invalid);
    }
    let below: [Result<(), Error>; 3] =
        [root.create("mnt/file/x", 10).map(drop), root.put("mnt/file/y/x", b"x"), root.publish("mnt/file/x", b"x")];
    assert!(below.iter().all(|result| result.as_ref().is_err_and(|error| error.kind == Kind::Invalid)), "{below:?}");
}
