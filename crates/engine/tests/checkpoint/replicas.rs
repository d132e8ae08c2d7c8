//! Copies that several ranks hold: compared when they must be, and never mixed when they are not.

use std::collections::BTreeMap;
use std::sync::Arc;

use shardfast_engine::{Compared, Error, Kind, Pending, Prove, State, checkpoint, save};
use shardfast_format::{Catalog, DType, LeafName};

use crate::job::{Content, Job, LONG, Truth, Whole, alike, destination, outcomes};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// A tensor that ranks cut to share it, one that they do not cut, and a value.
fn truth(seed: u64) -> Truth {
    let mut leaves = BTreeMap::new();
    for (name, rows) in [("large", 1001), ("small", 3)] {
        let whole = Whole::random(&mut Dice(seed), DType::F32, &[rows, 750]);
        leaves.insert(LeafName::new("model", name), Content::Tensor(whole));
    }
    let values = vec![vec![7; 20]];
    leaves.insert(LeafName::new("extra", "args"), Content::Object { per_rank: false, values });
    Truth { leaves }
}

/// The states of all ranks, those of `odd` of another truth; `compared` says for each leaf when it is compared.
fn states(layout: &Layout, odd: Option<u32>, compared: &[Compared]) -> Vec<State> {
    let of = |rank| truth(if odd == Some(rank) { 2 } else { 1 }).state(layout, rank, &mut Dice(1));
    (0..layout.world()).map(|rank| State { compared: Arc::new(compared.to_vec()), ..of(rank) }).collect()
}

fn save_as(job: &Job, url: &str, prove: Prove, states: Vec<State>) -> Result<Vec<Pending>, Error> {
    let mut destination = destination(url);
    destination.prove = prove;
    let begun = job.engines.iter().zip(states).map(|(engine, state)| save(engine, destination.clone(), state, LONG));
    let begun: Vec<Pending> = begun.collect();
    alike(outcomes(begun.clone())).map(|_| begun)
}

fn flaw(url: &str, truth: &Truth) -> Option<String> {
    let loading = Job::new(Layout::rows(2));
    loading.compare(|engine| checkpoint::open(engine, url, LONG), truth, &mut Dice(2)).unwrap()
}

fn both(layout: Layout) -> [Layout; 2] {
    [layout.clone(), layout.ignorant()]
}

#[test]
fn the_first_save_of_each_layout_compares_until_copies_were_equal_once() {
    let place = scratch();
    for (number, layout) in both(Layout::replicas(3)).into_iter().enumerate() {
        let url = |name: &str| place.path().join(format!("{name} {number}")).to_str().unwrap().to_owned();
        let job = Job::new(layout.clone());
        let odd = || states(&layout, Some(2), &[]);
        // What has failed once is compared again, not taken for proven.
        for name in ["one", "two"] {
            let error = save_as(&job, &url(name), Prove::FirstSave, odd()).map(drop).unwrap_err();
            assert_eq!(error.kind, Kind::Invalid);
            for part in ["model/large: its replicas of [0:1001, 0:750] differ", "on ranks 0-1", "on rank 2"] {
                assert!(error.message.contains(part), "{error}");
            }
            assert!(!std::path::Path::new(&url(name)).join("COMMIT").exists());
            let left = std::fs::read_dir(std::path::Path::new(&url(name)).join("model")).map_or(0, Iterator::count);
            assert_eq!(left, 0);
        }
        let begun = save_as(&job, &url("three"), Prove::FirstSave, states(&layout, None, &[])).unwrap();
        assert!(begun.iter().all(|pending| pending.report().replicas == "compared"));
        assert_eq!(flaw(&url("three"), &truth(1)), None);
        let begun = save_as(&job, &url("four"), Prove::FirstSave, odd()).unwrap();
        assert!(begun.iter().all(|pending| pending.report().replicas == "compared by an earlier save"));
        // Another layout is another plan.
        let reduced = odd().into_iter().map(|state| {
            let keep = |(leaf, _): &(shardfast_format::Leaf, Vec<_>)| leaf.name.name != "small";
            let leaves = state.catalog.leaves.iter().cloned().zip(state.providers.clone());
            let (leaves, providers) = leaves.filter(keep).unzip();
            State { catalog: Arc::new(Catalog { leaves }), providers, replicas: None, ..state }
        });
        let error = save_as(&job, &url("five"), Prove::FirstSave, reduced.collect()).map(drop).unwrap_err();
        assert!(error.message.contains("model/large: its replicas"), "{error}");
        let error = save_as(&job, &url("six"), Prove::EverySave, odd()).map(drop).unwrap_err();
        assert!(error.message.contains("model/large: its replicas"), "{error}");
    }
}

#[test]
fn replicas_of_shards_are_compared_with_their_like() {
    let place = scratch();
    for (number, layout) in both(Layout::columns_of_replicas(2, 2)).into_iter().enumerate() {
        let url = |name: &str| place.path().join(format!("{name} {number}")).to_str().unwrap().to_owned();
        let job = Job::new(layout.clone());
        let error = save_as(&job, &url("odd"), Prove::FirstSave, states(&layout, Some(3), &[])).map(drop).unwrap_err();
        assert!(error.message.contains("model/large: its replicas of") && error.message.contains("rank 3"), "{error}");
        save_as(&job, &url("even"), Prove::FirstSave, states(&layout, None, &[])).unwrap();
        assert_eq!(flaw(&url("even"), &truth(1)), None);
    }
}

#[test]
fn what_is_not_compared_is_the_copy_of_the_lowest_rank() {
    let place = scratch();
    let differ = [Compared::FirstSave, Compared::OnRequest, Compared::OnRequest];
    let excepted = [Compared::FirstSave, Compared::Never, Compared::Never];
    let cases = [
        ("unasked", Prove::Nothing, &[][..]),
        ("buffers", Prove::FirstSave, &differ[..]),
        ("excepted", Prove::EverySave, &excepted[..]),
    ];
    for (number, layout) in both(Layout::replicas(3)).into_iter().enumerate() {
        for (name, prove, compared) in cases {
            let url = place.path().join(format!("{name} {number}")).to_str().unwrap().to_owned();
            let job = Job::new(layout.clone());
            let begun = save_as(&job, &url, prove, states(&layout, Some(0), compared)).unwrap();
            assert_eq!(flaw(&url, &truth(2)), None, "{name}");
            let said = begun[1].report().replicas;
            assert_eq!(said.starts_with("not compared"), prove == Prove::Nothing, "{said}");
        }
        let job = Job::new(layout.clone());
        let url = place.path().join(format!("asked {number}")).to_str().unwrap().to_owned();
        let error = save_as(&job, &url, Prove::EverySave, states(&layout, Some(0), &differ)).map(drop).unwrap_err();
        assert!(error.message.contains("model/small: its replicas"), "{error}");
    }
}

#[test]
fn what_may_become_different_is_compared_by_every_save() {
    let place = scratch();
    let compared = [Compared::FirstSave, Compared::FirstSave, Compared::EverySave];
    for (number, layout) in both(Layout::replicas(2)).into_iter().enumerate() {
        for prove in [Prove::FirstSave, Prove::Nothing] {
            let url = |name: &str| place.path().join(format!("{name} {number} {prove:?}")).to_str().unwrap().to_owned();
            let job = Job::new(layout.clone());
            for name in ["one", "two"] {
                save_as(&job, &url(name), prove, states(&layout, None, &compared)).unwrap();
                assert_eq!(flaw(&url(name), &truth(1)), None);
            }
            let odd = states(&layout, Some(1), &compared);
            let error = save_as(&job, &url("odd"), prove, odd).map(drop).unwrap_err();
            assert!(error.message.contains("model/small: its replicas"), "{error}");
            assert!(!error.message.contains("model/large"), "{error}");
        }
    }
}

/// A rank that remembers that all was equal reads only what it writes. What becomes a replica of that elsewhere is
/// compared with it, or not saved.
#[test]
fn what_becomes_a_replica_on_another_rank_is_compared() {
    let place = scratch();
    let layout = Layout::replicas(3).ignorant();
    let without = |state: State, name: &str| {
        let leaves = state.catalog.leaves.iter().cloned().zip(state.providers);
        let (leaves, providers) = leaves.filter(|(leaf, _)| leaf.name.name != name).unzip();
        State { catalog: Arc::new(Catalog { leaves }), providers, ..state }
    };
    let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    for (odd, name) in [(None, "equal"), (Some(2), "odd")] {
        for (late, expected) in [("large", "[0:1001, 0:750] is new on rank 2"), ("small", "[0:3, 0:750] differ")] {
            let job = Job::new(layout.clone());
            let url = |step: &str| url(&format!("{name} {late} {step}"));
            let mut first = states(&layout, None, &[]);
            let last = first.pop().unwrap();
            first.push(without(last, late));
            save_as(&job, &url("one"), Prove::FirstSave, first).unwrap();
            // Now rank 2 holds it, too. Ranks 0 and 1 have each written a share of what is large, and one of them all
            // of what is small.
            let all = save_as(&job, &url("two"), Prove::FirstSave, states(&layout, odd, &[])).map(drop);
            if late == "small" && odd.is_none() {
                all.unwrap();
            } else {
                let error = all.unwrap_err();
                assert!(error.message.contains(&format!("model/{late}: ")), "{error}");
                assert!(error.message.contains(expected), "{error}");
            }
            let all = save_as(&job, &url("three"), Prove::FirstSave, states(&layout, odd, &[])).map(drop);
            assert_eq!(all.is_ok(), odd.is_none(), "{all:?}");
        }
    }
}

#[test]
fn a_save_without_tensors_says_that_none_was_compared() {
    let place = scratch();
    let layout = Layout::replicas(2);
    let job = Job::new(layout.clone());
    let mut only_values = truth(1);
    only_values.leaves.retain(|name, _| name.key == "extra");
    let states = || (0..2).map(|rank| only_values.state(&layout, rank, &mut Dice(1))).collect::<Vec<State>>();
    for name in ["one", "two"] {
        let url = place.path().join(name).to_str().unwrap().to_owned();
        let begun = save_as(&job, &url, Prove::FirstSave, states()).unwrap();
        assert!(begun.iter().all(|pending| pending.report().replicas == "none: no tensor to compare"));
    }
}
