//! More than a thousand jobs, each of which must keep every promise; and a seed is all that a job depends on.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use shardfast_sim::{Run, Weather, run};

const SEEDS: u64 = 1500;

/// Seeds that are run twice, and must go the same way.
const TWICE: u64 = 60;

/// Runs all seeds, several at a time: a rank that waits for a thread leaves the core to another seed.
fn all(seeds: std::ops::Range<u64>, judge: impl Fn(u64, Run) + Sync) {
    let next = AtomicU64::new(seeds.start);
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    judge(seed, run(seed));
                }
            });
        }
    });
}

fn replay(seed: u64) -> String {
    format!("replay with `cargo run -p shardfast-sim -- --seed {seed}`")
}

#[test]
fn every_promise_is_kept_whatever_goes_wrong() {
    let (broken, seen) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<String, u64>::new()));
    all(0..SEEDS, |seed, run| {
        let weather = [(format!("{:?}", run.weather), 1)];
        for (ending, times) in run.endings.iter().map(|(e, n)| (e.clone(), *n)).chain(weather) {
            *seen.lock().unwrap().entry(ending).or_default() += times;
        }
        let fails = |how: String| broken.lock().unwrap().push(format!("seed {seed}: {how}; {}", replay(seed)));
        if let Some(promise) = &run.broken {
            fails(format!("{:?}: {promise}", run.weather));
        }
        if seed < TWICE {
            let again = shardfast_sim::run(seed);
            let differs = run.log.iter().zip(&again.log).find(|(first, again)| first != again);
            if run.digest != again.digest {
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
        Weather::Disk,
        Weather::Slow,
        Weather::Storm,
    ];
    let endings = ["save: Ok", "save: Conflict", "save: Exhausted", "save: Internal", "save: Invalid"];
    let more = ["save: Unavailable", "call: Failed", "call: Missing", "call: Lost", "call: Unavailable", "crashes: 2"];
    let expected = weathers.iter().map(|weather| format!("{weather:?}"));
    for what in expected.chain(endings.iter().chain(&more).map(ToString::to_string)) {
        assert!(seen.get(&what).is_some_and(|times| *times >= 5), "{what} is hardly ever met: {seen:#?}");
    }
}
