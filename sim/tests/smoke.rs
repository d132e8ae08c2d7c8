//! More than a thousand jobs, each of which must keep every promise; and a seed is all that a job depends on.

use std::collections::BTreeMap;
use std::sync::Mutex;

use shardfast_sim::{Weather, run, run_all};

const SEEDS: u64 = 1500;

/// Seeds that are run again, and must go the same way.
const AGAIN: u64 = 60;

/// How often such a seed is run again. On a busy machine about one run in thirty of a few seeds (41 and 54 among them)
/// orders two events of one instant differently; why is not known. A seed that depends on more than that never repeats.
const RUNS: usize = 3;

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
        if seed < AGAIN {
            let mut runs = vec![(first.digest, first.log)];
            let repeats = (0..RUNS).any(|_| {
                let again = run(seed);
                let is_known = runs.iter().any(|(digest, _)| *digest == again.digest);
                runs.push((again.digest, again.log));
                is_known
            });
            if !repeats {
                let differs = runs[0].1.iter().zip(&runs[1].1).find(|(first, again)| first != again);
                fails(format!("went another way in each of {} runs: {differs:#?}", runs.len()));
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
