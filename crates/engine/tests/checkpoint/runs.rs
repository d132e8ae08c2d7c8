//! Tests runs: the newest committed checkpoint is found; incomplete or damaged ones are named; kept ones stay.

use std::sync::Arc;
use std::thread;

use shardfast_engine::newest::{Newest, newest as open_newest};
use shardfast_engine::retention::{Keep, Retention};
use shardfast_engine::runs::{self, step_url};
use shardfast_engine::{Engine, Kind, Result};
use shardfast_format::{COMMIT, step_dir};

use crate::job::{Job, LONG, Truth, alike, wants};
use crate::layout::{Dice, Layout};

fn truth(step: u64) -> Truth {
    Truth::small(step, 50)
}

/// A run of these steps, of which the last one was cut off before its commit.
fn run(name: &str, steps: &[u64]) -> String {
    let url = format!("memory://runs/{name}");
    let job = Job::new(Layout::rows(2));
    for &step in steps {
        job.save(&step_url(&url, step), &truth(step), &mut Dice(1)).unwrap();
    }
    let store = shardfast_store::open(&url).unwrap();
    store.delete(&format!("{}/{COMMIT}", step_dir(*steps.last().unwrap()))).unwrap();
    store.put("notes/readme.txt", b"not a step").unwrap();
    store.put("step-7", b"not a step's name").unwrap();
    url
}

/// The step that is found and what was passed over, having loaded it.
fn newest(url: &str, below: Option<u64>, older: bool) -> Result<Option<(u64, Vec<String>)>> {
    let Newest { found, skipped } = open_newest(&Engine::solo(), url, below, older, LONG)?;
    let Some((step, checkpoint)) = found else { return Ok(None) };
    let manifest = checkpoint.manifest();
    assert_eq!(checkpoint.url(), step_url(url, step));
    let truth = truth(step);
    let mut places = truth.places(&Layout::rows(1), 0, &mut Dice(1));
    let (wants, values) = wants(manifest, &mut places);
    let values = checkpoint.load(&wants, &values, LONG)?;
    assert_eq!(truth.flaw(manifest, &places, &values), None);
    Ok(Some((step, skipped)))
}

#[test]
fn steps_are_listed_in_order_and_only_steps() {
    let url = run("list", &[100_000_000, 3, 20, 400]);
    let listed = runs::list(&url).unwrap();
    let committed: Vec<(u64, bool)> = listed.iter().map(|s| (s.step, matches!(s.commit, Ok(Some(_))))).collect();
    assert_eq!(committed, [(3, true), (20, true), (400, false), (100_000_000, true)]);
    assert_eq!(runs::list("memory://runs/nothing").unwrap().len(), 0);
    let error = runs::list(&step_url(&url, 3)).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    assert!(error.message.contains("found one checkpoint"), "{error}");
    assert_eq!(newest("memory://runs/nothing", None, false), Ok(None));
    assert_eq!(newest(&step_url(&url, 3), None, false).unwrap_err().kind, Kind::Invalid);
    let url = run("uncommitted", &[7]);
    let skipped = open_newest(&Engine::solo(), &url, None, false, LONG).unwrap().skipped;
    assert_eq!(skipped, ["step-00000007: not committed (its save was cut off, or is still running)"]);
}

#[test]
fn the_newest_committed_one_is_found_and_what_is_cut_off_is_named() {
    let url = run("newest", &[1, 2, 3]);
    let (step, skipped) = newest(&url, None, false).unwrap().unwrap();
    assert_eq!((step, skipped.len()), (2, 1));
    assert!(skipped[0].starts_with(&step_dir(3)) && skipped[0].contains("not committed"), "{skipped:?}");
    assert_eq!(newest(&url, Some(2), false), Ok(Some((1, Vec::new()))));
    assert_eq!(newest(&url, Some(1), false), Ok(None));
}

#[test]
fn an_older_one_is_taken_only_on_the_users_word() {
    let url = run("older", &[1, 2, 3, 4]);
    let store = shardfast_store::open(&url).unwrap();
    let damage = |step: u64| {
        let manifest =
            store.list(&step_dir(step)).unwrap().into_iter().find(|entry| entry.name.starts_with("manifest-"));
        store.put(&format!("{}/{}", step_dir(step), manifest.unwrap().name), b"damaged").unwrap();
    };
    damage(3);
    let error = newest(&url, None, false).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert!(error.message.contains(&step_dir(3)) && error.message.contains(&step_dir(2)), "{error}");
    let (step, skipped) = newest(&url, None, true).unwrap().unwrap();
    assert_eq!(step, 2);
    assert!(skipped.len() == 2 && skipped[1].starts_with(&step_dir(3)), "{skipped:?}");
    damage(2);
    store.put(&format!("{}/{COMMIT}", step_dir(1)), b"damaged").unwrap();
    let error = newest(&url, None, true).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert!((1..=3).all(|step| error.message.contains(&step_dir(step))), "{error}");
}

#[test]
fn ranks_find_the_same_one_or_hear_why_not() {
    let url = run("ranks", &[1, 2, 3]);
    let engines: Vec<Arc<Engine>> = shardfast_coord::local(2)
        .into_iter()
        .map(|coord| Engine::new(coord, shardfast_engine::staging::STAGING_BYTES_MIN).unwrap())
        .collect();
    let ask = |older: [bool; 2]| {
        let ask = |rank: usize| {
            open_newest(&engines[rank], &url, None, older[rank], LONG).map(|newest| newest.found.unwrap().0)
        };
        alike(thread::scope(|threads| {
            let second = threads.spawn(|| ask(1));
            vec![ask(0), second.join().unwrap()]
        }))
    };
    assert_eq!(ask([true, true]), Ok(vec![2, 2]));
    let error = ask([false, true]).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    assert!(error.message.contains("rank 1"), "{error}");
}

const LAST: Keep = Keep { last: Some(1), every: None, best: Vec::new() };

#[test]
fn what_a_rule_keeps_stays_and_the_newest_always() {
    let steps = [1, 2, 3, 4, 5, 6, 7, 8];
    let remaining = |url: &str| -> Vec<u64> { runs::list(url).unwrap().iter().map(|step| step.step).collect() };
    for (name, last, every, kept) in [
        ("none", None, None, &[1, 2, 3, 4, 5, 6, 7, 8][..]),
        ("last", Some(2), None, &[6, 7, 8]),
        ("zero", Some(0), None, &[7, 8]),
        ("every", None, Some(3), &[3, 6, 7, 8]),
        ("never", None, Some(0), &[7, 8]),
        ("both", Some(3), Some(2), &[2, 4, 5, 6, 7, 8]),
        ("plenty", Some(100), Some(1), &[1, 2, 3, 4, 5, 6, 7, 8]),
    ] {
        let url = run(&format!("keep/{name}"), &steps);
        let mut retention = Retention::new(&url, Keep { last, every, best: Vec::new() });
        let deleted = retention.retain(&[]).unwrap().left;
        assert_eq!(retention.clear(Some(&deleted)).unwrap(), deleted, "{name}");
        assert_eq!(remaining(&url), kept, "{name}");
        assert_eq!(deleted, steps.into_iter().filter(|step| !kept.contains(step)).collect::<Vec<_>>(), "{name}");
        assert_eq!(newest(&url, None, false).unwrap().unwrap().0, 7);
    }
    // A newest one whose commit is damaged does not count.
    let url = run("keep/damaged", &steps);
    shardfast_store::open(&url).unwrap().put(&format!("{}/{COMMIT}", step_dir(7)), b"damaged").unwrap();
    let mut retention = Retention::new(&url, LAST);
    retention.retain(&[]).unwrap();
    retention.clear(None).unwrap();
    assert_eq!(remaining(&url), [6, 7, 8]);
}

#[test]
fn nothing_is_deleted_while_the_newest_manifest_cannot_be_proven() {
    let steps = [1, 2, 3];
    let url = run("keep/unproven", &steps);
    let newest = runs::list(&url).unwrap().into_iter().rfind(|step| matches!(step.commit, Ok(Some(_)))).unwrap();
    let commit = newest.commit.unwrap().unwrap();
    shardfast_store::open(&newest.url).unwrap().put(&commit.manifest, b"damaged").unwrap();
    let before: Vec<u64> = runs::list(&url).unwrap().iter().map(|step| step.step).collect();
    let error = Retention::new(&url, LAST).retain(&[]).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert_eq!(runs::list(&url).unwrap().iter().map(|step| step.step).collect::<Vec<_>>(), before);
}
