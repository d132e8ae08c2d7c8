//! `sim --seeds A..B` runs many seeds; `sim --seed N` replays one, with all that happened.

use std::collections::BTreeMap;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use shardfast_sim::{Medium, Run, run, run_all, train};

/// Whole jobs in seeded virtual time.
#[derive(Parser)]
struct Arguments {
    /// The seeds to run, as `first..end`.
    #[arg(long, value_parser = seeds, required_unless_present = "seed")]
    seeds: Option<Range<u64>>,
    /// The seed to replay.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Where the jobs keep their checkpoints.
    #[arg(long, value_enum, default_value = "disk")]
    storage: Medium,
    /// Run trainings that are told to stop, instead of jobs that save.
    #[arg(long, conflicts_with = "storage")]
    stopping: bool,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let numbers = text.split_once("..").and_then(|(first, end)| Some((first.parse().ok()?, end.parse().ok()?)));
    numbers.map(|(first, end)| first..end).ok_or_else(|| format!("{text:?}: expected numbers as in 0..1000"))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Arguments { seeds, seed, storage, stopping } = arguments;
    let job = |seed| if stopping { train(seed) } else { run(seed, storage) };
    match seed {
        Some(seed) => replay(&job(seed)),
        None => sweep(seeds.unwrap_or_default(), job),
    }
}

fn replay(run: &Run) -> ExitCode {
    run.log.iter().for_each(|line| println!("{line}"));
    for (ending, times) in &run.endings {
        println!("{times:6}  {ending}");
    }
    match &run.broken {
        None => ExitCode::SUCCESS,
        Some(broken) => {
            println!("BROKEN: {broken}");
            ExitCode::FAILURE
        }
    }
}

fn sweep(seeds: Range<u64>, job: impl Fn(u64) -> Run + Sync) -> ExitCode {
    let (failed, endings) = (AtomicU64::new(0), Mutex::new(BTreeMap::<String, u64>::new()));
    let all = seeds.end.saturating_sub(seeds.start);
    run_all(seeds, job, |seed, run| {
        if let Some(broken) = run.broken {
            failed.fetch_add(1, Ordering::Relaxed);
            println!("seed {seed} ({:?}): {broken}", run.weather);
            println!("    replay with the same words and --seed {seed}");
        }
        let mut endings = endings.lock().unwrap_or_else(PoisonError::into_inner);
        for (ending, times) in run.endings {
            *endings.entry(ending).or_default() += times;
        }
    });
    for (ending, times) in endings.into_inner().unwrap_or_else(PoisonError::into_inner) {
        println!("{times:8}  {ending}");
    }
    let failed = failed.into_inner();
    println!("{failed} of {all} seeds failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
