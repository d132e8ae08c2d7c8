//! Tests a loss of power at every system call: published objects stay whole, unpublished ones stay invisible.

mod save;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use save::{committed, mount, save};
use shardfast_store::testing::conformance::{pattern, write_object};
use shardfast_store::testing::simdisk::{Call, Fault, SimDisk};
use shardfast_store::{Kind, Store};

const SEEDS: std::ops::Range<u64> = 0..12;

/// Returns a disk with step 1 on it, after a reboot.
fn disk_with_a_step() -> SimDisk {
    let disk = SimDisk::new();
    save(&mount(&disk).unwrap(), 1).unwrap();
    disk.crash(1)
}

#[test]
fn dying_at_any_call_leaves_steps_whole_or_invisible() {
    let base = disk_with_a_step();
    let mut seen = BTreeSet::new();
    for at in 0.. {
        let disk = base.crash(1);
        disk.inject(at, Fault::Die);
        let saved = mount(&disk).and_then(|store| save(&store, 2));
        for seed in SEEDS {
            let store = mount(&disk.crash(seed)).unwrap();
            assert_eq!(committed(&store, 1), Ok(true), "died at call {at}, seed {seed}");
            let second = committed(&store, 2).unwrap_or_else(|flaw| panic!("died at call {at}, seed {seed}: {flaw}"));
            match &saved {
                Ok(()) => assert!(second, "died at call {at}, seed {seed}: a step said to be saved is gone"),
                Err(error) if second => assert!(error.message.contains("may have been published"), "{at}: {error}"),
                Err(_) => {}
            }
            seen.insert((saved.is_ok(), second));
            // Debris hinders no other process.
            save(&store, 3).unwrap();
            store.delete_tree("step-2").unwrap();
            assert_eq!(store.list("").unwrap().iter().filter(|entry| entry.is_dir).count(), 2);
        }
        if at >= disk.calls().len() {
            assert!(at > 30, "a save makes more calls than {at}");
            break;
        }
    }
    // All three outcomes were there: invisible, visible although the call failed, and saved.
    assert_eq!(seen, BTreeSet::from([(false, false), (false, true), (true, true)]));
}

/// Tests the first save of a run, with all the directories above it new.
#[test]
fn dying_at_any_call_of_the_first_save() {
    for at in 0.. {
        let disk = SimDisk::new();
        disk.inject(at, Fault::Die);
        let saved = mount(&disk).and_then(|store| save(&store, 1)).is_ok();
        for seed in SEEDS {
            let found = committed(&mount(&disk.crash(seed)).unwrap(), 1);
            assert!(found == Ok(true) || (found == Ok(false) && !saved), "call {at}, seed {seed}: {found:?}");
        }
        if saved {
            break;
        }
    }
}

/// Returns the calls of a whole save that make something durable, in groups that sync the same object.
fn syncs(base: &SimDisk) -> BTreeMap<String, Vec<usize>> {
    let disk = base.crash(1);
    save(&mount(&disk).unwrap(), 2).unwrap();
    let mut groups = BTreeMap::<String, Vec<usize>>::new();
    for (at, Call { name, path }) in disk.calls().iter().enumerate() {
        if ["fdatasync", "fsync_dir"].contains(name) {
            // Temporary files have another name each time; each is synced once.
            let path = path.display().to_string();
            let path = if path.contains(".tmp-") { format!("temporary {at}") } else { path };
            groups.entry(format!("{name} {path}")).or_default().push(at);
        }
    }
    groups
}

/// Tests that the crash model catches every missing sync, so that no sync of the protocol is superfluous.
#[test]
fn the_crash_model_catches_a_missing_sync() {
    let fresh = SimDisk::new();
    let groups = syncs(&fresh);
    // 3 objects, 2 temporary files; model, extra, the step, the run and 3 directories above it.
    assert_eq!(groups.len(), 12, "{groups:?}");
    for (what, calls) in groups {
        let disk = fresh.crash(1);
        for &at in &calls {
            disk.inject(at, Fault::Skip);
        }
        save(&mount(&disk).unwrap(), 2).unwrap();
        let caught = SEEDS.filter(|&seed| committed(&mount(&disk.crash(seed)).unwrap(), 2) != Ok(true)).count();
        assert!(caught > 0, "nothing happens without {what}");
    }
}

/// Tests that directories are synced although the process that made them may have died before syncing them.
#[test]
fn directories_that_a_dead_process_made_are_synced() {
    for at in 0.. {
        let disk = SimDisk::new();
        disk.inject(at, Fault::Die);
        let other = |store| write_object(&store, "step-1/model/other", b"other");
        let survived = mount(&disk).and_then(other).is_ok();
        let disk = disk.crash(1);
        save(&mount(&disk).unwrap(), 1).unwrap();
        for seed in SEEDS {
            assert_eq!(
                committed(&mount(&disk.crash(seed)).unwrap(), 1),
                Ok(true),
                "first process died at call {at}, seed {seed}"
            );
        }
        if survived {
            break;
        }
    }
}

/// A call of the store, or a loss of power.
#[derive(Clone, Debug)]
enum Op {
    Write(usize),
    Drop(usize),
    Sync(usize, usize),
    Put(usize),
    Publish(usize),
    Delete(usize),
    DeleteTree(usize),
    Reopen,
    Crash(u64),
}

const NAMES: [&str; 6] = ["a", "d/b", "d/c", "d/e/f", "g/h", "g/i"];
const DIRS: [&str; 3] = ["d", "d/e", "g"];

fn op() -> impl Strategy<Value = Op> {
    let name = || 0..NAMES.len();
    prop_oneof![
        4 => name().prop_map(Op::Write),
        1 => name().prop_map(Op::Drop),
        3 => (name(), name()).prop_map(|(a, b)| Op::Sync(a, b)),
        2 => name().prop_map(Op::Put),
        2 => name().prop_map(Op::Publish),
        1 => name().prop_map(Op::Delete),
        1 => (0..DIRS.len()).prop_map(Op::DeleteTree),
        1 => Just(Op::Reopen),
        2 => (0..1000_u64).prop_map(Op::Crash),
    ]
}

/// State of a name, as far as the model knows it.
#[derive(Default)]
struct Known {
    /// Contents that a crash may leave.
    states: Vec<Option<Vec<u8>>>,
    /// `true` if it may also leave the debris of an unfinished object.
    debris: bool,
}

fn look(store: &dyn Store, name: &str) -> Option<Vec<u8>> {
    match store.read(name, 1 << 20) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind == Kind::NotFound => None,
        Err(error) => panic!("{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Compares with a model that knows only the contract.
    #[test]
    fn any_sequence_of_calls_and_crashes_keeps_the_contract(ops in prop::collection::vec(op(), 1..40)) {
        let mut disk = SimDisk::new();
        let mut store = mount(&disk).unwrap();
        let certain = |state: Option<Vec<u8>>| Known { states: vec![state], debris: false };
        let mut model: BTreeMap<&str, Known> = NAMES.iter().map(|&name| (name, certain(None))).collect();
        for (index, op) in ops.into_iter().enumerate() {
            let value = pattern(index as u64, 300 + index * 150);
            let is_taken = |model: &BTreeMap<&str, Known>, name| model[name].states.last().is_some_and(Option::is_some);
            match op {
                Op::Write(i) => {
                    let written = write_object(&store, NAMES[i], &value).map_err(|e| e.kind);
                    if is_taken(&model, NAMES[i]) {
                        prop_assert_eq!(written, Err(Kind::Conflict));
                    } else {
                        prop_assert_eq!(written, Ok(()));
                        model.get_mut(NAMES[i]).unwrap().states.push(Some(value));
                    }
                }
                Op::Drop(i) => {
                    let created = store.create(NAMES[i], 5000).is_ok();
                    prop_assert_eq!(created, !is_taken(&model, NAMES[i]));
                    model.get_mut(NAMES[i]).unwrap().debris |= created;
                }
                Op::Sync(i, j) => {
                    let names: Vec<&str> = [NAMES[i], NAMES[j]].into_iter().filter(|n| is_taken(&model, n)).collect();
                    prop_assert_eq!(store.sync(&names), Ok(()));
                    for name in names {
                        let last = model[name].states.last().cloned().flatten();
                        model.insert(name, certain(last));
                    }
                }
                Op::Put(i) => {
                    prop_assert_eq!(store.put(NAMES[i], &value), Ok(()));
                    model.insert(NAMES[i], certain(Some(value)));
                }
                Op::Publish(i) => {
                    let published = store.publish(NAMES[i], &value).map_err(|e| e.kind);
                    if is_taken(&model, NAMES[i]) {
                        prop_assert_eq!(published, Err(Kind::Conflict));
                    } else {
                        prop_assert_eq!(published, Ok(()));
                        model.insert(NAMES[i], certain(Some(value)));
                    }
                }
                Op::Delete(i) => {
                    prop_assert_eq!(store.delete(NAMES[i]), Ok(()));
                    model.insert(NAMES[i], certain(None));
                }
                Op::DeleteTree(i) => {
                    prop_assert_eq!(store.delete_tree(DIRS[i]), Ok(()));
                    let below = format!("{}/", DIRS[i]);
                    for (_, known) in model.iter_mut().filter(|(name, _)| name.starts_with(&below)) {
                        *known = certain(None);
                    }
                }
                Op::Reopen => store = mount(&disk).unwrap(),
                Op::Crash(seed) => {
                    disk = disk.crash(seed);
                    store = mount(&disk).unwrap();
                    for (name, known) in &mut model {
                        let found = look(&store, name);
                        prop_assert!(known.debris || known.states.contains(&found), "{} must not be {:?}", name, found);
                        *known = certain(found);
                    }
                }
            }
            for (name, known) in &model {
                prop_assert_eq!(&look(&store, name), known.states.last().unwrap(), "{}", name);
            }
        }
    }
}
