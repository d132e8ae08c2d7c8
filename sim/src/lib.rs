//! Whole jobs in one process, in seeded virtual time, with all kinds of faults.
//!
//! A run is a job of a few ranks that saves a few times. Ranks are real engines, and the tree between them is made of
//! the real [nodes](shardfast_coord::node). They write through the real local store to a simulated disk, or through the
//! real client of object stores, each with connections of its own, to a simulated service; the links and the clock are
//! simulated, too. [`run`] draws all of it from a seed, and checks what must be true over either [storage](Medium):
//!
//! * What is committed is whole: it opens, verifies, and loads bit for bit as it was saved.
//! * A save has one outcome. If any rank reports that it is committed, it is, and a loss of power cannot undo it; if
//!   any reports an error with a reason, there is no checkpoint, and all ranks with a reason report the same.
//! * Every call of every living rank ends within twice its deadline and a grace, soon after a rank is lost, and soon
//!   after its deadline if a rank above is stopped or its link delivers nothing; its error names ranks that are lost,
//!   are silent or did not come. No expired round is decided.
//! * Without faults every save is committed; if one rank does something wrong, all ranks get an error that names the
//!   problem and the rank.
//! * If another program removes files of a save in flight, no checkpoint is committed without them.
//! * After one rank has left a save out, all ranks meet again in the next save or the one after it.
//! * After a loss of power at any point, every save that a rank reported as committed is there, and every visible
//!   checkpoint is whole. At a service, so it is when all processes end at any request, carried out or not.
//! * With any files or unfinished uploads left behind, the next job saves to the same places.
//! * So it is in half of the jobs in which part of each save was captured ahead, one step of an optimizer before.
//! * A load that ranks share gives all of them what was saved, or the same error; no other byte reaches their memory,
//!   also after the loss of a rank or a message, or damage of the data. At a service the error says if an object was
//!   replaced while it was read; a request that fails for a moment fails no load, and a refusal fails all ranks.
//!
//! [`train`] runs a training whose ranks get signals to stop, on the same nodes.
//!
//! The same seed gives the same [`Run::digest`] of all that happened. At a service a rank has several requests in
//! flight: `objects.rs` says what of them is a function of the seed.

mod disk;
mod journal;
#[macro_use]
mod promise;
mod loading;
mod meeting;
mod objects;
mod process;
mod scenario;
mod service;
mod stopping;
mod storage;
mod trap;
mod truth;
mod verdict;
mod view;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use shardfast_coord::Error as Coord;
use shardfast_engine::Kind;

use journal::Journal;
use meeting::{Meeting, Past};
pub use scenario::Weather;
use scenario::{Save, Scenario};
use shardfast_store::testing::dice::Dice;
pub use stopping::train;
pub use storage::Medium;
use storage::Storage;

/// A run that was judged.
pub struct Run {
    /// What went wrong.
    pub weather: Weather,
    /// How saves and calls ended, over all ranks.
    pub endings: BTreeMap<String, u64>,
    /// SHA-256 of the log.
    pub digest: [u8; 32],
    /// What happened, in virtual time.
    pub log: Vec<String>,
    /// The promise that was broken, if one was.
    pub broken: Option<String>,
}

/// The job of that seed over that storage, and the job after it.
pub fn run(seed: u64, medium: Medium) -> Run {
    let (mut journal, mut endings) = (Journal::default(), BTreeMap::new());
    let scenario = Scenario::draw(seed, medium);
    let weather = scenario.weather;
    let judged = panic::catch_unwind(AssertUnwindSafe(|| live(seed, medium, scenario, &mut journal, &mut endings)));
    let broken = judged.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default())
    });
    Run { weather, endings, digest: journal.digest(), log: journal.into_lines(), broken: broken.err() }
}

/// Runs the job of each of these seeds, several at a time, and hands out each run as it ends.
pub fn run_all(seeds: Range<u64>, job: impl Fn(u64) -> Run + Sync, judge: impl Fn(u64, Run) + Sync) {
    let next = AtomicU64::new(seeds.start);
    // A rank that waits for another thread leaves the core to another seed.
    let threads = 2 * thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    judge(seed, job(seed));
                }
            });
        }
    });
}

fn live(
    seed: u64,
    medium: Medium,
    scenario: Scenario,
    journal: &mut Journal,
    endings: &mut BTreeMap<String, u64>,
) -> Result<(), String> {
    journal.headline(format!("{:?}, {:?}, {medium:?}", scenario.weather, scenario.topology));
    let traps = scenario.traps.iter().map(|(rank, trap)| format!("rank {rank}: {trap:?}"));
    traps.collect::<Vec<_>>().into_iter().for_each(|trap| journal.headline(trap));
    for (number, save) in scenario.saves.iter().enumerate() {
        let (place, deadline, mischief) = (&save.place, save.deadline, save.mischief);
        journal.headline(format!("save {number} to {place} within {deadline:?}, with {mischief:?}"));
    }
    let storage = Storage::new(medium, scenario::part_bytes(seed));
    let (scenario, past) = Meeting::new(scenario, &storage, journal).run();
    count(&past, endings);
    let published = verdict::judge(&scenario, &past, &storage)?;
    journal.headline(format!("published: {published:?}"));
    let mut dice = Dice(seed.rotate_left(32));
    if !published.is_empty() {
        let Save { place, truth, .. } = &scenario.saves[*dice.pick(&published)];
        let ending = loading::judge(&mut dice, &storage, place, truth, journal)?;
        *endings.entry(ending).or_default() += 1;
    }

    // The power may have failed since, or only the job have ended.
    let mut dice = Dice(!seed);
    let storage = storage.left(dice.below(2));
    let world = 1 + dice.below_u32(4);
    let mut later = Scenario::calm(&mut dice, world, "/runs/gpt", 1);
    let taken: BTreeSet<&str> = published.iter().map(|&save| scenario.saves[save].place.as_str()).collect();
    let free = scenario.saves.iter().map(|save| save.place.as_str()).find(|place| !taken.contains(place));
    later.saves[0].place = free.unwrap_or("/runs/gpt/step-later").to_owned();
    journal.headline(format!("a later job, {:?}, saves to {}", later.topology, later.saves[0].place));
    let (later, past) = Meeting::new(later, &storage, journal).run();
    verdict::judge(&later, &past, &storage).map(drop).map_err(|broken| format!("the later job: {broken}"))
}

/// How each save and each call ended.
fn count(past: &Past, endings: &mut BTreeMap<String, u64>) {
    let mut add = |ending: String| *endings.entry(ending).or_default() += 1;
    for outcome in past.outcomes.iter().flat_map(BTreeMap::values) {
        add(outcome
            .as_ref()
            .map_or_else(|error| format!("save: {}", Kind::name(error.kind)), |()| "save: Ok".to_owned()));
    }
    for (_, answer) in past.calls.iter().filter_map(|call| call.answered.as_ref()) {
        add(match answer {
            Ok(_) => "call: Ok".to_owned(),
            Err(Coord::Failed { .. }) => "call: Failed".to_owned(),
            Err(Coord::Missing { .. }) => "call: Missing".to_owned(),
            Err(Coord::Lost { .. }) => "call: Lost".to_owned(),
            Err(Coord::Unavailable(said)) if said.contains("does not answer;") => "call: OutcomeUnknown".to_owned(),
            Err(Coord::Unavailable(_)) => "call: Unavailable".to_owned(),
            Err(Coord::Invalid(_)) => "call: Invalid".to_owned(),
        });
    }
    add(format!("crashes: {}", past.crashed.len()));
    if past.ahead_bytes > 0 {
        add("captured ahead".to_owned());
    }
}
