//! Copies of checkpoints: between stores of other kinds, interrupted at every operation, and damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shardfast_engine::{Engine, Kind};
use shardfast_format::attempt_of;
use shardfast_store::open;
use shardfast_tools::{Copying, Limit, copy, copy_between, sync, verify};

use crate::checkpoints::{save_ranks, two_ranks};
use crate::dying::{Dying, Life};

/// Returns every object below a place, by name.
fn objects(url: &str) -> BTreeMap<String, Vec<u8>> {
    let store = open(url).unwrap();
    let (mut found, mut to_do) = (BTreeMap::new(), vec![String::new()]);
    while let Some(dir) = to_do.pop() {
        for entry in store.list(&dir).unwrap_or_default() {
            let path = if dir.is_empty() { entry.name } else { format!("{dir}/{}", entry.name) };
            match entry.is_dir {
                true => to_do.push(path),
                false => _ = found.insert(path.clone(), store.read(&path, u64::MAX).unwrap()),
            }
        }
    }
    found
}

fn silent(_: u64, _: u64) {}

/// Makes options of a copy without a limit, which only compares lengths of existing files.
fn fast() -> Copying {
    Copying { limit: Limit::new(None), verify: false }
}

/// Returns every object below a place, by name, with one name for all attempts.
fn nameless(url: &str) -> BTreeMap<String, Vec<u8>> {
    let is_hex = |text: &str| text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let named = |name: String| {
        name.split(['-', '.']).map(|part| if is_hex(part) { "attempt" } else { part }).collect::<Vec<_>>().join("-")
    };
    let data = |(name, _): &(String, Vec<u8>)| name.contains('/');
    objects(url).into_iter().filter(data).map(|(name, bytes)| (named(name), bytes)).collect()
}

#[test]
fn a_copy_is_not_faster_than_its_limit() {
    let from = save_ranks("memory://duplicate/limited", Some(7), two_ranks());
    let files = objects(&from).into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let bytes: Vec<u64> = files.map(|(_, bytes)| bytes.len() as u64).collect();
    let (total, largest) = (bytes.iter().sum::<u64>(), bytes.iter().max().unwrap());
    let begun = Instant::now();
    let slow = Copying { limit: Limit::new(Some(4 * total)), verify: false };
    assert_eq!(copy(&Engine::solo(), &from, "memory://duplicate/slowly", &slow, &silent).unwrap().bytes, total);
    // Each file waits until those before it have had their time.
    let least = Duration::from_secs_f64((total - largest) as f64 / (4 * total) as f64);
    assert!(begun.elapsed() >= least && !least.is_zero(), "{least:?}");
}

#[test]
fn a_copy_is_the_same_checkpoint_byte_for_byte() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/whole", Some(7), two_ranks());
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("a/copy").to_str().unwrap().to_owned();
    let copied = copy(&engine, &from, &place, &fast(), &silent).unwrap();
    assert!(!copied.was_there && copied.files_found == 0 && copied.bytes > 0);
    assert!(nameless(&from) == nameless(&place));
    assert!(verify(&engine, &place, &silent).unwrap().is_sound());
    assert!(copy(&engine, &from, &place, &fast(), &silent).unwrap().was_there);
    // And back, in parts.
    let (target, life) = (open("memory://duplicate/back").unwrap(), Life::whole());
    let parted = Dying { store: target, life, in_parts: true };
    let source = open(&place).unwrap();
    copy_between(&engine, (source, &place), (Arc::new(parted), "back"), &fast(), &silent).unwrap();
    assert!(nameless(&from) == nameless("memory://duplicate/back"));

    let before = objects(&place);
    let other = save_ranks("memory://duplicate/other", Some(7), two_ranks());
    let error = copy(&engine, &other, &place, &fast(), &silent).unwrap_err();
    assert!(error.kind == Kind::Conflict && error.message.contains("another checkpoint"), "{error}");
    assert!(before == objects(&place), "nothing of the other one is there");
}

#[test]
fn a_copy_that_is_killed_at_any_operation_goes_on() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/killed", Some(7), two_ranks());
    let expected = nameless(&from);
    for in_parts in [false, true] {
        let mut found = 0;
        for operations in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let place = dir.path().join("copy").to_str().unwrap().to_owned();
            let dying = Dying { store: open(&place).unwrap(), life: Life::of(operations), in_parts };
            let source = open(&from).unwrap();
            match copy_between(&engine, (source, &from), (Arc::new(dying), &place), &fast(), &silent) {
                Ok(_) => break,
                Err(error) => assert!(error.message.contains("the process was killed"), "{error}"),
            }
            assert!(!dir.path().join("copy/COMMIT").exists(), "after {operations} operations");
            let again = copy(&engine, &from, &place, &fast(), &silent).unwrap();
            found += again.files_found;
            assert!(nameless(&place) == expected, "after {operations} operations");
        }
        assert!(found > 0, "nothing was ever resumed");
    }
}

#[test]
fn damage_on_the_way_fails_the_copy_by_name() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/damaged", Some(7), two_ranks());
    let store = open(&from).unwrap();
    let names: Vec<String> = objects(&from).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
    for (round, name) in names.iter().enumerate() {
        let sound = store.read(name, u64::MAX).unwrap();
        for at in [20, sound.len() - 1] {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            store.put(name, &bytes).unwrap();
            let to = format!("memory://duplicate/to/{round}/{at}");
            let error = copy(&engine, &from, &to, &fast(), &silent).unwrap_err();
            assert!(error.kind == Kind::Corrupt && error.message.contains(name.as_str()), "{error}");
            assert!(!objects(&to).contains_key("COMMIT"));
        }
        store.put(name, &sound).unwrap();
    }
}

#[test]
fn a_run_is_brought_up_to_date() {
    let engine = Engine::solo();
    let (from, to) = ("memory://duplicate/run", "memory://duplicate/run2");
    for step in [1, 2] {
        save_ranks(&format!("{from}/step-{step:08}"), Some(step), two_ranks());
    }
    open(from).unwrap().put("step-00000003/model/00000-0123456789abcdef.safetensors", b"begun").unwrap();
    let synced = sync(&engine, from, to, &fast(), &silent).unwrap();
    assert_eq!((synced.checkpoints.len(), synced.incomplete.as_slice()), (2, [3].as_slice()));
    save_ranks(&format!("{from}/step-00000004"), Some(4), two_ranks());
    let synced = sync(&engine, from, to, &fast(), &silent).unwrap();
    let was_there: Vec<bool> = synced.checkpoints.iter().map(|copied| copied.was_there).collect();
    assert_eq!(was_there, [true, true, false]);
    for step in [1, 2, 4] {
        let of = |run: &str| nameless(&format!("{run}/step-{step:08}"));
        assert!(of(from) == of(to));
    }
    assert_eq!(sync(&engine, "memory://duplicate/nothing", to, &fast(), &silent).unwrap_err().kind, Kind::NotFound);
}

/// Returns the attempts that wrote the files of a place.
fn attempts(url: &str) -> BTreeSet<String> {
    objects(url).keys().filter_map(|name| attempt_of(name)).map(str::to_owned).collect()
}

/// Begins a second copy to the same place in the midst of a first one, before each operation of that, and kills the
/// second one at each third of its own operations.
#[test]
fn copies_that_meet_leave_one_whole_checkpoint() {
    let from = save_ranks("memory://duplicate/meet", Some(7), two_ranks());
    let expected = nameless(&from);
    let copy_into = |place: &str, life: Arc<Life>, in_parts: bool| {
        let dying = Dying { store: open(place).unwrap(), life, in_parts };
        copy_between(&Engine::solo(), (open(&from).unwrap(), &from), (Arc::new(dying), place), &fast(), &silent)
    };
    let (mut at, mut met) = (0, 0);
    loop {
        let (mut is_over, mut was_second) = (false, false);
        for killed_after in (0..).step_by(3) {
            let place = format!("memory://duplicate/met/{at}/{killed_after}");
            let beside = Arc::new(Mutex::new(None));
            let (other_place, other) = (place.clone(), Arc::clone(&beside));
            let (source, in_parts) = (from.clone(), killed_after % 2 == 1);
            let life = Life::with(at, move || {
                let dying = Dying { store: open(&other_place).unwrap(), life: Life::of(killed_after), in_parts };
                let source = (open(&source).unwrap(), source.as_str());
                let done = copy_between(&Engine::solo(), source, (Arc::new(dying), &other_place), &fast(), &silent);
                *other.lock().unwrap() = Some(done.is_ok());
            });
            let copied = copy_into(&place, life, !in_parts).unwrap();
            was_second |= copied.was_there;
            assert_eq!(copied.files_mended, 0, "{place}: the first one's files are left alone");
            assert!(nameless(&place) == expected, "{place}");
            assert!(verify(&Engine::solo(), &place, &silent).unwrap().is_sound(), "{place}");
            let other = *beside.lock().unwrap();
            is_over = other.is_none();
            met += 1;
            if other.is_none_or(|is_done| is_done) {
                assert!(attempts(&place).len() == 1, "{place}: {:?}", attempts(&place));
                break;
            }
        }
        if is_over {
            break;
        }
        at += 1;
        assert!(was_second || at > 5, "no copy ever was the second one");
    }
    assert!(met > 50, "{met}");
}

#[test]
fn what_is_missing_short_or_damaged_at_the_target_is_sent_again() {
    let engine = Engine::solo();
    let from = save_ranks("memory://duplicate/mended", Some(7), two_ranks());
    let dir = tempfile::tempdir().unwrap();
    for in_memory in [true, false] {
        let place = match in_memory {
            true => "memory://duplicate/mend".to_owned(),
            false => dir.path().join("mend").to_str().unwrap().to_owned(),
        };
        copy(&engine, &from, &place, &fast(), &silent).unwrap();
        let (sound, store) = (objects(&place), open(&place).unwrap());
        let again = |verify: bool| copy(&engine, &from, &place, &Copying { verify, ..fast() }, &silent).unwrap();
        assert_eq!((again(false).files_mended, again(true).files_mended), (0, 0));
        for (name, bytes) in sound.iter().filter(|(name, _)| attempt_of(name).is_some()) {
            let flaws: [&dyn Fn(); 3] =
                [&|| store.delete(name).unwrap(), &|| store.put(name, &bytes[..bytes.len() - 1]).unwrap(), &|| {
                    store.put(name, &[&bytes[..bytes.len() - 1], &[!bytes[bytes.len() - 1]]].concat()).unwrap()
                }];
            for (number, flaw) in flaws.iter().enumerate() {
                flaw();
                // Of the last one the length tells nothing.
                assert_eq!(again(false).files_mended, u64::from(number < 2), "{name}, {number}");
                assert_eq!(again(true).files_mended, u64::from(number == 2), "{name}, {number}");
                assert!(objects(&place) == sound, "{name}, {number}");
            }
        }
    }
}

#[test]
fn a_step_that_is_damaged_or_leaves_does_not_keep_those_behind_it() {
    let engine = Engine::solo();
    let (from, to) = ("memory://duplicate/hurt", "memory://duplicate/hurt2");
    for step in 1..=5 {
        save_ranks(&format!("{from}/step-{step:08}"), Some(step), two_ranks());
    }
    let source = open(from).unwrap();
    let data = objects(&format!("{from}/step-00000002")).into_keys().find(|name| name.ends_with(".safetensors"));
    source.delete(&format!("step-00000002/{}", data.unwrap())).unwrap();
    save_ranks(&format!("{to}/step-00000003"), Some(3), two_ranks());
    // While step 1 is copied, step 4 leaves.
    let leaves = std::sync::Once::new();
    let synced = sync(&engine, from, to, &fast(), &|_, _| {
        leaves.call_once(|| source.delete("step-00000004/COMMIT").unwrap());
    });
    let synced = synced.unwrap();
    let failed: Vec<_> = synced.failed.iter().map(|failed| (failed.step, failed.kind)).collect();
    assert_eq!(failed, [(2, Kind::Corrupt), (3, Kind::Conflict)]);
    assert_eq!((synced.checkpoints.len(), synced.left.as_slice()), (2, [4].as_slice()));
    assert!(!objects(&format!("{to}/step-00000002")).contains_key("COMMIT"));
    assert!(objects(&format!("{to}/step-00000005")).contains_key("COMMIT"));
}
