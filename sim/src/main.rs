//! `sim --seeds A..B` runs many seeds; `sim --seed N` replays one, with all that happened.

use std::collections::BTreeMap;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use shardfast_sim::run;

/// Whole jobs in seeded virtual time.
#[derive(Parser)]
struct Arguments {
    /// The seeds to run, as `first..end`.
    #[arg(long, value_parser = seeds, required_unless_present = "seed")]
    seeds: Option<Range<u64>>,
    /// The seed to replay.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let numbers = text.split_once("..").and_then(|(first, end)| Some((first.parse().ok()?, end.parse().ok()?)));
    numbers.map(|(first, end)| first..end).ok_or_else(|| format!("{text:?}: expected numbers as in 0..1000"))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match (arguments.seed, arguments.seeds) {
        (Some(seed), _) => replay(seed),
        (None, seeds) => sweep(seeds.unwrap_or_default()),
    }
}

fn replay(seed: u64) -> ExitCode {
    let run = run(seed);
    run.log.iter().for_each(|line| println!("{line}"));
    for (ending, times) in &run.endings {
        println!("{times:6}  {ending}");
    }
    match run.broken {
        None => ExitCode::SUCCESS,
        Some(broken) => {
            println!("BROKEN: {broken}");
            ExitCode::FAILURE
        }
    }
}

fn sweep(seeds: Range<u64>) -> ExitCode {
    let (next, failed) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let endings: Mutex<BTreeMap<String, u64>> = Mutex::default();
    // A rank that waits for another thread leaves the core to another seed.
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let run = run(seed);
                    if let Some(broken) = run.broken {
                        failed.fetch_add(1, Ordering::Relaxed);
                        println!("seed {seed} ({:?}): {broken}", run.weather);
                        println!("    replay: cargo run -p shardfast-sim -- --seed {seed}");
                    }
                    let mut endings = endings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    for (ending, times) in run.endings {
                        *endings.entry(ending).or_default() += times;
                    }
                }
            });
        }
    });
    for (ending, times) in endings.into_inner().unwrap_or_default() {
        println!("{times:8}  {ending}");
    }
    let failed = failed.into_inner();
    println!("{failed} of {} seeds failed", seeds.end.saturating_sub(seeds.start));
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
