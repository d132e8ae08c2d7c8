//! Saves and loads with faults at any of their requests, by seeds: the real client over a simulated service.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shardfast_engine::Kind;
use shardfast_store::testing::sims3::{Fault, SimS3};
use shardfast_store::{Shared, Store, open_on};

use crate::checkpoint::{is_whole_in, load, save};

/// Deadline of operations that are to succeed.
const LONG: Duration = Duration::from_secs(60);

/// Deadline of operations that meet faults: long enough for a few pauses.
const SHORT: Duration = Duration::from_millis(700);

/// Runs at a time: they wait more than they work.
const THREADS: usize = 16;

/// Seeds of a usual run; a campaign sets more.
fn seeds() -> u64 {
    std::env::var("SHARDFAST_FAR_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(24)
}

fn place(service: &SimS3, name: &str) -> Arc<dyn Store> {
    let shared = Arc::new(Shared::simulated(service.clone()));
    open_on(&format!("s3://simulated/{name}?endpoint=http://simulated"), &shared).unwrap()
}

/// A number of this seed for a request.
fn dice(seed: u64, number: u64) -> u64 {
    let mut state = (seed << 32 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for shift in [30, 27, 31] {
        state = (state ^ state >> shift).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    state
}

/// Faults of some requests, and for some seeds the end of the connection for good.
fn weather(seed: u64) -> impl Fn(u64) -> Option<Fault> + Send + Sync {
    let faults = [
        Fault::Refused,
        Fault::Answered(500),
        Fault::Answered(503),
        Fault::Silent(false),
        Fault::Silent(true),
        Fault::Lost,
        Fault::Cut,
        Fault::RequestTurned,
        Fault::ObjectTurned,
    ];
    let one_in = [3, 10, 30][(dice(seed, u64::MAX) % 3) as usize];
    let ends = if seed.is_multiple_of(4) { dice(seed, u64::MAX - 1) % 40 } else { u64::MAX };
    move |number| {
        let thrown = dice(seed, number);
        match number {
            _ if number >= ends => Some(Fault::Refused),
            _ if thrown.is_multiple_of(one_in) => Some(faults[(thrown >> 32) as usize % faults.len()]),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Endings {
    saved: AtomicU64,
    failed: AtomicU64,
    in_doubt: AtomicU64,
    loaded: AtomicU64,
}

fn run(seed: u64, endings: &Endings) {
    let service = SimS3::default();
    let [old, new] = ["run/1", "run/2"].map(|name| place(&service, name));
    save(&old, LONG).unwrap();
    service.weather(weather(seed));
    let saved = save(&new, SHORT);
    service.weather(|_| None);
    let [is_old, is_new] = [&old, &new].map(is_whole_in);
    assert_eq!(is_old, Ok(true), "seed {seed}: the earlier checkpoint");
    let is_new = is_new.unwrap_or_else(|flaw| panic!("seed {seed}: {flaw}; {saved:?}"));
    match &saved {
        Ok(()) => {
            assert!(is_new, "seed {seed}: it was said to be saved");
            endings.saved.fetch_add(1, Ordering::Relaxed);
        }
        Err(error) => {
            assert!(!error.message.is_empty() && error.kind != Kind::Internal, "seed {seed}: {error}");
            let in_doubt = is_new && error.kind == Kind::Unavailable;
            assert!(!is_new || in_doubt, "seed {seed}: it failed and is there: {error}");
            let ending = if in_doubt { &endings.in_doubt } else { &endings.failed };
            ending.fetch_add(1, Ordering::Relaxed);
        }
    }
    service.weather(weather(seed ^ 1 << 40));
    // It panics if it succeeds with other bytes.
    endings.loaded.fetch_add(u64::from(load(&old, SHORT).is_ok()), Ordering::Relaxed);
    service.weather(|_| None);
    if !is_new {
        save(&place(&service, "run/2"), LONG).unwrap_or_else(|error| panic!("seed {seed}: again: {error}"));
    }
    load(&old, LONG).unwrap();
    load(&place(&service, "run/2"), LONG).unwrap();
}

#[test]
fn seeded_faults_never_leave_a_wrong_checkpoint() {
    let (next, endings) = (AtomicU64::new(0), Endings::default());
    std::thread::scope(|threads| {
        for _ in 0..THREADS {
            threads.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds() {
                        return;
                    }
                    run(seed, &endings);
                }
            });
        }
    });
    let Endings { saved, failed, loaded, .. } = endings;
    assert!([saved, failed, loaded].into_iter().all(|ending| ending.into_inner() > 0), "each ending happens");
}

#[test]
fn a_refusal_is_not_taken_for_damage() {
    let service = SimS3::default();
    save(&place(&service, "run/1"), LONG).unwrap();
    for refused in ["COMMIT", "manifest-"] {
        let behind = service.behind(move |ask| ask.name().contains(refused).then_some(Fault::Answered(403)));
        let error = load(&place(&behind, "run/1"), LONG).unwrap_err();
        assert_eq!(error.kind, Kind::Invalid, "{refused}: {error}");
        assert!(error.message.contains("AccessDenied"), "{refused}: {error}");
    }
}
