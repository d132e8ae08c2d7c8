//! More than a thousand jobs, each of which must keep every promise; and a seed is all that a job depends on.

use std::collections::BTreeMap;
use std::sync::Mutex;

use shardfast_sim::{Weather, run, run_all};

const SEEDS: u64 = 1500;

/// Seeds that are run twice, and must go the same way.
const TWICE: u64 = 60;

fn replay(seed: u64) -> String {
    format!("replay with `cargo run -p shardfast-sim -- --seed {seed}`")
}

#[test]
fn every_promise_is_kept_whatever_goes_wrong() {
    let (broken, seen) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<String, u64>::new()));
    run_all(0..SEEDS, |seed, first| {
        let weather = [(format!("{:?}", first.weather), 1)];
        for (ending, times) in first.endings.into_iter().chain(weather) {
            *seen.lock().unwrap().entry(ending).or_default() += times;
        }
        let fails = |how: String| broken.lock().unwrap().push(format!("seed {seed}: {how}; {}", replay(seed)));
        if let Some(promise) = first.broken {
            fails(format!("{:?}: {promise}", first.weather));
        }
        if seed < TWICE {
            let again = run(seed);
            let differs = first.log.iter().zip(&again.log).find(|(first, again)| first != again);
            if first.digest != again.digest {
                fails(format!("went two ways: {differs:#?}"));
            }
        }
    });
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{} of {SEEDS} seeds failed:\n{}", broken.len(), broken.join("\n"));

    // Promises that nothing puts to the test are kept easily.
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
    let endings = ["save: Ok", "save: Conflict", "save: Corrupt", "save: Exhausted", "save: Internal", "save: Invalid"];
    let loads = ["load: Ok", "load: shared", "load: Corrupt", "load: Unavailable"];
    let more = ["save: Unavailable", "call: Failed", "call: Missing", "call: Lost", "call: OutcomeUnknown"];
    let more = more.into_iter().chain(["call: Unavailable", "crashes: 2"]);
    let expected = weathers.iter().map(|weather| format!("{weather:?}"));
    for what in expected.chain(endings.into_iter().chain(more).chain(loads).map(str::to_owned)) {
        assert!(seen.get(&what).is_some_and(|times| *times >= 5), "{what} is hardly ever met: {seen:#?}");
    }
}
