//! Many jobs over each kind of storage, each of which must keep every promise; and a seed is all that a job depends on.

use std::collections::BTreeMap;
use std::sync::Mutex;

use shardfast_sim::{Medium, Weather, run, run_all, train};

/// How many times as many seeds a campaign runs.
const TIMES: &str = "SHARDFAST_SIM_TIMES";

/// Seeds that are run twice, and must go the same way.
const TWICE: u64 = 20;

/// Calm jobs whose first two saves overlap, and whose ranks always hold the same. The ranks get the answers to these
/// saves in different orders, and begin the third save with different plans.
const WITH_DIFFERENT_PLANS: [u64; 2] = [3610, 3780];

/// Endings that jobs over any storage meet.
const ENDINGS: [&str; 16] = [
    "save: Ok",
    "save: Conflict",
    "save: Corrupt",
    "save: Exhausted",
    "save: Internal",
    "save: Invalid",
    "save: Unavailable",
    "call: Failed",
    "call: Missing",
    "call: Lost",
    "call: Unavailable",
    "captured ahead",
    "load: Ok",
    "load: shared",
    "load: Corrupt",
    "load: Unavailable",
];

/// The jobs of a test.
struct Jobs {
    medium: Medium,
    seeds: u64,
    /// Each ending is met once in so many seeds at least.
    seeds_per_ending: u64,
    /// Endings beside [`ENDINGS`].
    endings: &'static [&'static str],
    /// Endings that only a campaign is sure to meet.
    rare: &'static [&'static str],
}

/// Runs these jobs, or a campaign's many. Each weather and each ending is met often enough: promises that nothing puts
/// to the test are kept easily.
fn keep_every_promise(jobs: &Jobs) {
    let times = std::env::var(TIMES).map_or(1, |times| times.parse().unwrap());
    let (medium, seeds) = (jobs.medium, times * jobs.seeds);
    let (broken, seen) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<String, u64>::new()));
    run_all(
        0..seeds,
        |seed| run(seed, medium),
        |seed, first| {
            let weather = [(format!("{:?}", first.weather), 1)];
            for (ending, times) in first.endings.into_iter().chain(weather) {
                *seen.lock().unwrap().entry(ending).or_default() += times;
            }
            let replay = medium.replay(seed);
            let fails =
                |how: String| broken.lock().unwrap().push(format!("seed {seed}: {how}; replay with `{replay}`"));
            if let Some(promise) = first.broken {
                fails(format!("{:?}: {promise}", first.weather));
            }
            if seed < times * TWICE {
                let again = run(seed, medium);
                let differs = first.log.iter().zip(&again.log).find(|(first, again)| first != again);
                if first.digest != again.digest {
                    fails(format!("went two ways: {differs:#?}"));
                }
            }
        },
    );
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{} of {seeds} seeds failed:\n{}", broken.len(), broken.join("\n"));

    let seen = seen.into_inner().unwrap();
    let weathers = [
        Weather::Calm,
        Weather::Mischief,
        Weather::Crash,
        Weather::Links,
        Weather::Still,
        Weather::Disk,
        Weather::Sweep,
        Weather::Slow,
        Weather::Absent,
        Weather::Storm,
    ];
    let weathers = weathers.iter().map(|weather| format!("{weather:?}"));
    let endings = ENDINGS.iter().chain(jobs.endings).filter(|ending| times > 1 || !jobs.rare.contains(ending));
    let often = (seeds / jobs.seeds_per_ending).max(1);
    for what in weathers.chain(endings.map(|&ending| ending.to_owned())) {
        let is_met = seen.get(&what).is_some_and(|met| *met >= often);
        assert!(is_met, "{what} is hardly ever met: {seen:#?}");
    }
}

#[test]
fn every_promise_is_kept_on_a_disk() {
    keep_every_promise(&Jobs {
        medium: Medium::Disk,
        seeds: 300,
        seeds_per_ending: 300,
        endings: &["call: OutcomeUnknown", "crashes: 2"],
        rare: &["crashes: 2"],
    });
}

#[test]
fn ranks_that_remember_different_plans_save_together() {
    for seed in WITH_DIFFERENT_PLANS {
        let run = run(seed, Medium::Disk);
        assert_eq!((run.weather, run.broken), (Weather::Calm, None), "seed {seed}");
    }
}

#[test]
fn every_promise_is_kept_at_a_service_of_objects() {
    keep_every_promise(&Jobs {
        medium: Medium::Objects,
        seeds: 80,
        seeds_per_ending: 200,
        endings: &["save: NotFound", "load: replaced, Corrupt", "load: failed request, shared"],
        rare: &["save: Corrupt", "save: Internal", "load: Ok"],
    });
}

#[test]
fn all_ranks_of_a_training_stop_after_one_step() {
    let seeds = 200 * std::env::var(TIMES).map_or(1, |times| times.parse().unwrap());
    let (broken, seen) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<String, u64>::new()));
    run_all(0..seeds, train, |seed, first| {
        for (ending, times) in first.endings.into_iter().chain([(format!("{:?}", first.weather), 1)]) {
            *seen.lock().unwrap().entry(ending).or_default() += times;
        }
        let replay = format!("cargo run -p shardfast-sim -- --stopping --seed {seed}");
        let fails = |how: String| broken.lock().unwrap().push(format!("seed {seed}: {how}; replay with `{replay}`"));
        if let Some(promise) = first.broken {
            fails(format!("{:?}: {promise}", first.weather));
        }
        if seed < TWICE && train(seed).digest != first.digest {
            fails("went two ways".to_owned());
        }
    });
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{} of {seeds} seeds failed:\n{}", broken.len(), broken.join("\n"));
    let seen = seen.into_inner().unwrap();
    for (what, often) in [
        ("Calm", 30),
        ("Still", 30),
        ("Links", 30),
        ("Crash", 30),
        ("stopped", 300),
        ("trained to the end", 30),
        ("could not agree", 10),
        ("gave up", 30),
        ("crashed", 30),
    ] {
        assert!(seen.get(what).is_some_and(|met| *met >= often), "{what} is hardly ever met: {seen:#?}");
    }
}
