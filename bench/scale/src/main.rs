//! What planning and committing cost on one core, from a thousand ranks to a hundred thousand, on generated jobs: no
//! network, no storage, no tensors; what it costs to keep and collect what saves did. What ranks tell each other is
//! counted as the bytes of its encoding.
//!
//! `scale [--quick] [--telemetry] [--json <file>]`: with `--telemetry` the last alone

mod commit;
mod layout;
mod sharing;
mod telemetry;
mod tree;
mod worst;

use std::io;

use serde::Serialize;

use layout::Job;

/// Data parallel replicas of 128 ranks: 1,024, 8,960 (the paper's), 32,000 and 100,096 ranks.
const REPLICAS: [u64; 4] = [8, 70, 250, 782];
const REPLICAS_QUICK: [u64; 2] = [8, 70];

#[derive(Serialize)]
struct Figures {
    commit: Vec<commit::Row>,
    tree: Vec<Vec<tree::Exchange>>,
    worst_ms: worst::Figures,
    flat_run_ns: worst::Figures,
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let json = arguments.iter().position(|argument| argument == "--json").and_then(|at| arguments.get(at + 1));
    if arguments.iter().any(|argument| argument == "--telemetry") {
        let found = telemetry::measure(quick)?;
        telemetry::print(&found);
        return json.map_or(Ok(()), |path| std::fs::write(path, serde_json::to_string(&found)?));
    }
    let replicas: &[u64] = if quick { &REPLICAS_QUICK } else { &REPLICAS };

    println!("405 billion parameters, TP 8 x PP 16 x DP, distributed optimizer; one core; the last column: growth");
    let commit: Vec<commit::Row> = replicas.iter().map(|&dp| commit::measure(Job { dp })).collect();
    commit::print(&commit);
    println!("\nexchanges of a save whose plan is remembered, fan-out {}", shardfast_coord::Topology::FAN_OUT_DEFAULT);
    let worlds: Vec<u32> = replicas.iter().map(|&dp| Job { dp }.world()).collect();
    let tree: Vec<_> = worlds.iter().map(|&world| tree::measure(world)).collect();
    tree::print(&worlds, &tree);
    println!("\nplans that need all catalogs, and loads, ms");
    let worst_ms = worst::measure();
    worst_ms.iter().for_each(|(what, ms)| println!("{what:<62}{ms:>10.0}"));
    println!("\nregions of flat runs, ns each");
    let flat_run_ns = worst::measure_flat_runs();
    flat_run_ns.iter().for_each(|(what, ns)| println!("{what:<62}{ns:>10.0}"));
    match json {
        Some(path) => std::fs::write(path, serde_json::to_string(&Figures { commit, tree, worst_ms, flat_run_ns })?),
        None => Ok(()),
    }
}

/// What `work` gives, and how many milliseconds of a processor it took: others on this machine do not count.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let now = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let begun = now();
    let done = work();
    let (begun, ended) = (begun.tv_sec as f64 * 1e3 + begun.tv_nsec as f64 / 1e6, now());
    (done, ended.tv_sec as f64 * 1e3 + ended.tv_nsec as f64 / 1e6 - begun)
}
