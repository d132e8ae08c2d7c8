//! Counts the messages of ranks before and during a save: none that they can do without.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shardfast_coord::{Coord, Decide, Meeting};
use shardfast_engine::{Engine, Error, Kind, Pending, State, checkpoint, save};
use shardfast_format::{Catalog, DType, LeafName};
use shardfast_plan::{RankSet, Replicas};

use crate::job::{Content, Job, LONG, Truth, Whole, alike, destination, outcomes};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

/// Messages of each rank in each exchange, in order.
type Said = Arc<Mutex<Vec<(u32, String, Vec<u8>)>>>;

/// Ranks whose words are counted.
struct Counted {
    coord: Arc<dyn Coord>,
    said: Said,
    /// Gate at which rank 0 waits before it decides on the opening, if there is one.
    gate: Option<Mutex<Receiver<()>>>,
}

impl Coord for Counted {
    fn rank(&self) -> u32 {
        self.coord.rank()
    }

    fn world(&self) -> u32 {
        self.coord.world()
    }

    fn meeting(&self) -> Meeting {
        self.coord.meeting()
    }

    fn host(&self) -> &str {
        self.coord.host()
    }

    fn absent(&self, topic: &str) -> shardfast_coord::Absent {
        self.coord.absent(topic)
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, shardfast_coord::Error> {
        let payload = contribution.clone().unwrap_or_default();
        self.said.lock().unwrap().push((self.rank(), topic.to_owned(), payload));
        let mut gated = |contributions| {
            if let (Some(gate), true) = (&self.gate, topic.ends_with("open")) {
                gate.lock().unwrap().recv().unwrap();
            }
            decide(contributions)
        };
        self.coord.agree(topic, contribution, &mut gated, deadline)
    }
}

/// Makes a job whose messages are counted, and in which rank 0 waits before it decides, if `gated`.
fn counted(layout: Layout, gated: bool) -> (Job, Said, Sender<()>) {
    let said = Said::default();
    let (open, gate) = channel();
    let mut gate = gated.then(|| Mutex::new(gate));
    let engine = |coord: Arc<dyn Coord>| {
        let gate = if coord.rank() == 0 { gate.take() } else { None };
        let coord = Counted { coord, said: Arc::clone(&said), gate };
        Engine::new(Arc::new(coord), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap()
    };
    let engines = shardfast_coord::local(layout.world()).into_iter().map(engine).collect();
    (Job { engines, layout }, said, open)
}

/// The most that a rank said in each exchange since the last call.
fn most(said: &Said) -> BTreeMap<String, usize> {
    let mut most = BTreeMap::new();
    for (_, topic, payload) in said.lock().unwrap().drain(..) {
        let stage = topic.split_once(' ').unwrap().1.to_owned();
        let known = most.entry(stage).or_insert(0);
        *known = payload.len().max(*known);
    }
    most
}

/// Returns the bytes of bundles of all ranks since the last call, but for receipts: equal payloads travel once. Two
/// bytes frame a payload, and one for each rank says which is its own where neither all are equal nor all different.
fn bundled(said: &Said) -> usize {
    let mut rounds: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    let is_receipt = |topic: &str| topic.starts_with("commit ") || topic.ends_with(" commit");
    for (_, topic, payload) in said.lock().unwrap().drain(..).filter(|(_, topic, _)| !is_receipt(topic)) {
        rounds.entry(topic).or_default().push(payload);
    }
    let bytes = |payloads: Vec<Vec<u8>>| {
        let distinct: BTreeSet<&Vec<u8>> = payloads.iter().collect();
        let places = if distinct.len() == 1 || distinct.len() == payloads.len() { 0 } else { payloads.len() };
        distinct.iter().map(|payload| payload.len() + 2).sum::<usize>() + places
    };
    rounds.into_values().map(bytes).sum()
}

fn stages(most: &BTreeMap<String, usize>) -> Vec<&str> {
    most.keys().map(String::as_str).collect()
}

fn save_and_compare(job: &Job, url: &str, truth: &Truth) {
    job.save(url, truth, &mut Dice(1)).unwrap();
    let loading = Job::new(Layout::rows(2));
    assert_eq!(loading.compare(|engine| checkpoint::open(engine, url, LONG), truth, &mut Dice(2)), Ok(None));
}

#[test]
fn ranks_that_know_who_holds_what_say_little_and_then_less() {
    let place = scratch();
    let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let truth = Truth::small(1, 7);
    for (name, layout, first_open) in
        [("known", Layout::replicas(4), 48), ("asked", Layout::replicas(4).ignorant(), 999)]
    {
        let (job, said, _) = counted(layout, false);
        save_and_compare(&job, &url(&format!("{name} 1")), &truth);
        let first = most(&said);
        assert_eq!(stages(&first), ["commit", "open", "replicas", "values"], "{name}");
        assert!(first["open"] <= first_open, "{name}: {first:?}");

        save_and_compare(&job, &url(&format!("{name} 2")), &truth);
        let cached = most(&said);
        assert_eq!(stages(&cached), ["commit", "open", "values"], "{name}");
        assert!(cached["open"] <= 32 && cached["values"] <= 32, "{name}: {cached:?}");
        assert_eq!(cached["commit"], first["commit"], "{name}: every receipt is complete");
    }
}

/// A state like those of training, on so many ranks that one message for all of them is little.
#[test]
fn an_unchanged_state_is_planned_in_16_bytes_a_rank() {
    const RANKS: u32 = 16;
    let place = scratch();
    let mut dice = Dice(3);
    let mut leaves = BTreeMap::new();
    for (key, name) in [("model", "weight"), ("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq")] {
        let whole = Whole::random(&mut dice, DType::F32, &[64, 600]);
        leaves.insert(LeafName::new(key, name), Content::Tensor(whole));
    }
    let args = Content::Object { per_rank: false, values: vec![dice.bytes(40)] };
    leaves.insert(LeafName::new("extra", "args"), args);
    let mut truth = Truth { leaves };
    let mut without = BTreeMap::new();
    for with_rng in [false, true] {
        if with_rng {
            let values = (0..RANKS).map(|_| dice.bytes(700)).collect();
            truth.leaves.insert(LeafName::new("extra", "rng"), Content::Object { per_rank: true, values });
        }
        for (name, layout) in [("ddp", Layout::replicas(RANKS)), ("zero", Layout::rows(RANKS))] {
            for layout in [layout.clone(), layout.ignorant()] {
                let (job, said, _) = counted(layout, false);
                let url = |number: usize| {
                    let name = format!("{name} {with_rng} {:?} {number}", job.layout.holders(0, &[1], 0).is_some());
                    place.path().join(name).to_str().unwrap().to_owned()
                };
                let mut bytes = Vec::new();
                for number in 0..4 {
                    job.save(&url(number), &truth, &mut Dice(1)).unwrap();
                    bytes.push(bundled(&said) as f64 / f64::from(RANKS));
                }
                println!("{name}, a value of each rank's own {with_rng}: {bytes:.1?} bytes a rank");
                let cached = bytes[3];
                match with_rng {
                    false => _ = without.insert(name, cached),
                    true => assert!(cached <= without[name], "{name}: {bytes:?}"),
                }
                assert!(cached <= 16.0, "{name}: {bytes:?}");
                assert_eq!(bytes[1], cached, "{name}: it is the first save alone that tells everything");
                let loading = Job::new(Layout::rows(2));
                let flaw = loading.compare(|engine| checkpoint::open(engine, &url(3), LONG), &truth, &mut Dice(2));
                assert_eq!(flaw, Ok(None));
            }
        }
    }
}

/// Tests that rank 0 remembers a rank's values of the last save that was committed.
#[test]
fn values_that_grow_and_shrink_are_where_they_were_written() {
    let place = scratch();
    let layout = Layout::replicas(2);
    let (job, _, _) = counted(layout.clone(), false);
    let truth = |bytes: [usize; 2]| {
        let mut truth = Truth::small(1, 7);
        let values = bytes.iter().map(|&bytes| Dice(bytes as u64).bytes(bytes)).collect();
        truth.leaves.insert(LeafName::new("extra", "loader"), Content::Object { per_rank: true, values });
        truth
    };
    let sizes = [[10, 10], [10, 11], [10, 11], [300, 11], [10, 10], [10, 0], [10, 10]];
    let url = |number: usize| place.path().join(number.to_string()).to_str().unwrap().to_owned();
    // One by one, and then three at a time.
    for (number, &sizes) in sizes.iter().enumerate() {
        save_and_compare(&job, &url(number), &truth(sizes));
    }
    for (at, three) in sizes.windows(3).enumerate() {
        let url = |number: usize| url(100 * (at + 1) + number);
        let begin = |(number, &sizes): (usize, &[usize; 2])| {
            let state = |engine: &Arc<Engine>| state(&truth(sizes), &layout, engine.rank());
            let ranks = job.engines.iter();
            ranks.map(|engine| save(engine, destination(&url(number)), state(engine), LONG)).collect::<Vec<_>>()
        };
        let begun: Vec<Vec<Pending>> = three.iter().enumerate().map(begin).collect();
        for (number, pendings) in begun.into_iter().enumerate() {
            alike(outcomes(pendings)).unwrap();
            let loading = Job::new(Layout::rows(2));
            let open = |engine: &Arc<Engine>| checkpoint::open(engine, &url(number), LONG);
            assert_eq!(loading.compare(open, &truth(three[number]), &mut Dice(2)), Ok(None));
        }
    }
}

/// Rank 0 has not yet decided on the opening when everything is staged. Only ranks that must ask wait for that, once.
#[test]
fn ranks_that_can_plan_alone_wait_for_nobody_before_their_state_may_change() {
    let place = scratch();
    let truth = Truth::small(1, 7);
    let begin = |job: &Job, name: &str| -> Vec<Pending> {
        let url = place.path().join(name);
        let ranks = job.engines.iter();
        let state = |engine: &Arc<Engine>| truth.state(&job.layout, engine.rank(), &mut Dice(1));
        ranks.map(|engine| save(engine, destination(url.to_str().unwrap()), state(engine), LONG)).collect()
    };
    for layout in [Layout::replicas(3), Layout::rows(3), Layout::rows(3).ignorant()] {
        let (job, _, open) = counted(layout.clone(), true);
        let name = |save| format!("{layout:?} {save}").replace(['/', ' '], "");
        for save in [1, 2] {
            let pendings = begin(&job, &name(save));
            let must_ask = save == 1 && job.layout.holders(0, &[1], 0).is_none();
            if !must_ask {
                pendings.iter().for_each(|pending| pending.staged(Some(LONG)).unwrap());
            }
            assert!(pendings.iter().all(|pending| !pending.done()));
            open.send(()).unwrap();
            alike(outcomes(pendings)).unwrap();
        }
    }
}

/// The state of a rank of a job in which all hold all.
fn state(truth: &Truth, layout: &Layout, rank: u32) -> State {
    truth.state(layout, rank, &mut Dice(1))
}

fn save_states(job: &Job, url: &str, states: Vec<State>) -> Result<(), Error> {
    let begun = job.engines.iter().zip(states).map(|(engine, state)| save(engine, destination(url), state, LONG));
    alike(outcomes(begun.collect())).map(drop)
}

#[test]
fn what_changed_on_one_rank_is_planned_around_the_others() {
    let place = scratch();
    let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let small = Truth::small(1, 7);
    let mut large = Truth::small(1, 7);
    large
        .leaves
        .insert(LeafName::new("model", "late"), Content::Tensor(Whole::random(&mut Dice(3), DType::F16, &[5, 3])));
    let layout = Layout::replicas(3).ignorant();
    let (job, said, _) = counted(layout.clone(), false);
    save_and_compare(&job, &url("before"), &small);
    most(&said);
    // Rank 2 alone has something new; ranks 0 and 1 have begun with what they remember.
    let states = vec![state(&small, &layout, 0), state(&small, &layout, 1), state(&large, &layout, 2)];
    save_states(&job, &url("one"), states).unwrap();
    // What is new on rank 2 is compared with what others hold; what all held before was.
    assert_eq!(stages(&most(&said)), ["commit", "open", "replicas", "values"]);
    let loading = Job::new(Layout::rows(2));
    let flaw = loading.compare(|engine| checkpoint::open(engine, &url("one"), LONG), &large, &mut Dice(2));
    assert_eq!(flaw, Ok(None));

    // What rank 0 was to write (all that is small) is gone there, and the others have begun without it: nothing is
    // published, all ranks get one error, and the next save is planned anew.
    let mut without = state(&small, &layout, 0);
    let kept: Vec<bool> = without.catalog.leaves.iter().map(|leaf| leaf.name.key != "model").collect();
    let mut keep = kept.iter();
    without.providers.retain(|_| *keep.next().unwrap());
    let mut keep = kept.iter();
    let mut leaves = without.catalog.leaves.clone();
    leaves.retain(|_| *keep.next().unwrap());
    without.catalog = Arc::new(Catalog { leaves });
    let states = |without| vec![without, state(&small, &layout, 1), state(&large, &layout, 2)];
    let gone = State { catalog: Arc::clone(&without.catalog), providers: without.providers.clone(), ..without };
    let error = save_states(&job, &url("gone"), states(gone)).unwrap_err();
    assert!(error.message.contains("save again, which makes a new plan"), "{error}");
    let again = State { catalog: without.catalog, providers: without.providers, ..State::default() };
    save_states(&job, &url("again"), states(again)).unwrap();
    let flaw = loading.compare(|engine| checkpoint::open(engine, &url("again"), LONG), &large, &mut Dice(2));
    assert_eq!(flaw, Ok(None));
}

/// Tests that ranks with known holders claim nothing about parts that each holds alone, and that these may change.
#[test]
fn what_is_held_alone_is_planned_anew_when_it_changes() {
    let place = scratch();
    let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let mut other = Truth::small(1, 7);
    other.leaves.retain(|name, _| name.key == "optimizer");
    let truths = [Truth::small(1, 7), other];
    for layout in [Layout::rows(1), Layout::rows(3)] {
        let (job, said, _) = counted(layout, false);
        for (number, truth) in [0, 1, 0, 0].into_iter().enumerate() {
            save_and_compare(&job, &url(&format!("{} {number}", job.layout.world())), &truths[truth]);
        }
        // A tensor that is smaller than the number of ranks has replicas.
        let expected = [&["commit", "open"][..], &["replicas"][usize::from(job.layout.world() == 1)..], &["values"]];
        assert_eq!(stages(&most(&said)), expected.concat());
    }
}

#[test]
fn a_rank_that_does_not_know_makes_all_tell() {
    let place = scratch();
    let url = place.path().join("mixed");
    let truth = Truth::small(1, 7);
    let (knowing, layout) = (Layout::replicas(3), Layout::replicas(3).ignorant());
    let (job, said, _) = counted(layout.clone(), false);
    let states = vec![state(&truth, &knowing, 0), state(&truth, &layout, 1), state(&truth, &knowing, 2)];
    save_states(&job, url.to_str().unwrap(), states).unwrap();
    assert_eq!(stages(&most(&said)), ["commit", "open", "plan", "replicas", "replicas in full", "values"]);
    let loading = Job::new(Layout::rows(2));
    let flaw = loading.compare(|engine| checkpoint::open(engine, url.to_str().unwrap(), LONG), &truth, &mut Dice(2));
    assert_eq!(flaw, Ok(None));
}

#[test]
fn ranks_that_believe_different_things_are_told_who_and_what() {
    let place = scratch();
    let truth = Truth::small(1, 7);
    let layout = Layout::replicas(3);
    let job = Job::new(layout.clone());
    let mut states: Vec<State> = (0..3).map(|rank| state(&truth, &layout, rank)).collect();
    // Rank 1 takes itself and rank 2 for the only holders.
    let leaves = states[1].replicas.as_ref().unwrap().leaves.clone();
    states[1].replicas = Some(Arc::new(Replicas { groups: vec![RankSet::new([1, 2])], leaves }));
    let again = |state: &State| State {
        catalog: Arc::clone(&state.catalog),
        providers: state.providers.clone(),
        replicas: state.replicas.clone(),
        ..State::default()
    };
    let url = place.path().join("a");
    let error = save_states(&job, url.to_str().unwrap(), states.iter().map(again).collect()).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(error.message.contains("ranks 1-2") && error.message.contains("ranks 0-2"), "{error}");
    assert!(!url.join("COMMIT").exists());
    // From then on ranks ask instead of believing.
    save_states(&job, url.to_str().unwrap(), states).unwrap();
    let loading = Job::new(Layout::rows(2));
    let flaw = loading.compare(|engine| checkpoint::open(engine, url.to_str().unwrap(), LONG), &truth, &mut Dice(2));
    assert_eq!(flaw, Ok(None));

    // Rank 1 is not among those that it takes for the holders.
    let job = Job::new(layout.clone());
    let mut states: Vec<State> = (0..3).map(|rank| state(&truth, &layout, rank)).collect();
    let leaves = states[1].replicas.as_ref().unwrap().leaves.clone();
    states[1].replicas = Some(Arc::new(Replicas { groups: vec![RankSet::new([0, 2])], leaves }));
    let error = save_states(&job, place.path().join("b").to_str().unwrap(), states).unwrap_err();
    assert!(error.message.contains("rank 1"), "{error}");
    assert!(!place.path().join("b/COMMIT").exists());
}

#[test]
fn values_that_differ_from_now_on_are_written_by_each_from_now_on() {
    let place = scratch();
    let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let with = |values: Vec<Vec<u8>>| {
        let mut truth = Truth::small(1, 7);
        let object = Content::Object { per_rank: false, values };
        truth.leaves.insert(LeafName::new("optimizer", "rng"), object);
        truth
    };
    let (job, said, _) = counted(Layout::replicas(2), false);
    save_and_compare(&job, &url("equal"), &with(vec![vec![1; 20]]));
    assert_eq!(stages(&most(&said)), ["commit", "open", "replicas", "values"]);
    save_and_compare(&job, &url("apart"), &with(vec![vec![2; 20], vec![3; 30]]));
    assert_eq!(stages(&most(&said)), ["commit", "open", "values", "values in full"]);
    save_and_compare(&job, &url("still apart"), &with(vec![vec![4; 10], vec![5; 40]]));
    assert_eq!(stages(&most(&said)), ["commit", "open", "values"]);
    save_and_compare(&job, &url("equal again"), &with(vec![vec![6; 20]]));
    assert_eq!(stages(&most(&said)), ["commit", "open", "values"]);
}

#[test]
fn replicas_are_written_in_even_shares() {
    let place = scratch();
    let mut truth = Truth { leaves: BTreeMap::new() };
    // Three ranks, one tensor of 3 MB and one of 0.6 MB: no rank may write a whole one.
    for (name, rows) in [("large", 1001), ("small", 200)] {
        let whole = Whole::random(&mut Dice(5), DType::F32, &[rows, 750]);
        truth.leaves.insert(LeafName::new("model", name), Content::Tensor(whole));
    }
    for layout in [Layout::replicas(3), Layout::replicas(3).ignorant()] {
        let job = Job::new(layout.clone());
        let url = place.path().join(format!("{}", layout.holders(0, &[1], 0).is_some()));
        let url = url.to_str().unwrap();
        let begin = |engine: &Arc<Engine>| {
            save(engine, destination(url), truth.state(&layout, engine.rank(), &mut Dice(1)), LONG)
        };
        let pendings: Vec<Pending> = job.engines.iter().map(begin).collect();
        alike(outcomes(pendings.clone())).unwrap();
        let written: Vec<u64> = pendings.iter().map(|pending| pending.report().bytes_written).collect();
        let mean = written.iter().sum::<u64>() / 3;
        assert!(*written.iter().max().unwrap() <= mean + mean / 50 + (64 << 10), "{written:?}");
        let loading = Job::new(Layout::rows(2));
        let flaw = loading.compare(|engine| checkpoint::open(engine, url, LONG), &truth, &mut Dice(2));
        assert_eq!(flaw, Ok(None));
    }
}
