//! What planning and committing cost on one core, from a thousand ranks to a hundred thousand, on generated jobs: no
//! network, no storage, no tensors. What ranks tell each other is counted as the bytes of its encoding.

mod commit;
mod layout;
mod worst;

use std::time::Instant;

use layout::Job;

/// Data parallel replicas of 128 ranks: 1,024, 8,960 (the paper's), 32,000 and 100,096 ranks.
const REPLICAS: [u64; 4] = [8, 70, 250, 782];
const REPLICAS_QUICK: [u64; 2] = [8, 70];

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let replicas: &[u64] = if quick { &REPLICAS_QUICK } else { &REPLICAS };
    let rows: Vec<commit::Row> = replicas.iter().map(|&dp| commit::measure(Job { dp })).collect();
    commit::print(&rows);
    worst::measure();
}

/// What `work` gives, and how many milliseconds it took.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begun = Instant::now();
    let done = work();
    (done, begun.elapsed().as_secs_f64() * 1e3)
}
