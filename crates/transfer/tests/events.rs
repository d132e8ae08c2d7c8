//! Tests that a save's report is computed from its events, which cost no allocation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shardfast_store::{Action, Requests};
use shardfast_transfer::error::{Error, Failures, Kind, Patience, retry};
use shardfast_transfer::events::{Event, Phase};
use shardfast_transfer::progress::{Progress, Shared};

fn progress() -> Progress {
    Progress::new(Arc::new(Shared::new(true, std::time::Instant::now())))
}

/// The operation of a store that reports `requests`.
fn stored(requests: Requests) -> shardfast_store::Event<'static> {
    let (began, took) = (Instant::now(), Duration::from_millis(1));
    let (action, object, failure) = (Action::Write, "model/a.safetensors", None);
    shardfast_store::Event { action, object, offset: 0, bytes: 8, began, took, requests, failure }
}

#[test]
fn an_event_takes_no_memory() {
    let save = progress();
    let (store, event) = (save.observer(), stored(Requests { puts: 1, gets: 2, ..Requests::default() }));
    let counted = allocation_counter::measure(|| {
        for _ in 0..1000 {
            store.stored(&event);
            save.note(&Event::Wrote { bytes: 8 });
            save.note(&Event::Compared { outcome: "compared" });
            Phase::ALL.into_iter().for_each(|phase| save.ended(phase));
        }
    });
    assert_eq!(counted.count_total, 0, "{counted:?}");
    let report = save.shared.observed.report();
    assert_eq!((report.files_written, report.bytes_written, report.replicas), (1000, 8000, "compared"));
    assert_eq!(report.requests.into_iter().collect::<Vec<_>>(), [("gets", 2000), ("puts", 1000)]);
}

#[test]
fn a_phase_ends_once() {
    let save = progress();
    save.ended(Phase::Written);
    let first = save.shared.observed.report().phases_ms;
    std::thread::sleep(Duration::from_millis(2));
    save.ended(Phase::Written);
    save.ended(Phase::Committed);
    let then = save.shared.observed.report().phases_ms;
    assert_eq!(first.keys().copied().collect::<Vec<_>>(), ["written"]);
    assert_eq!(then["written"], first["written"]);
    assert!(then["committed"] > then["written"], "{then:?}");
}

#[test]
fn failures_of_many_threads_are_listed_and_counted() {
    let save = progress();
    let patience = Patience::of(&save, Duration::ZERO);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| {
                for _ in 0..10 {
                    let away = || Err::<(), _>(Error::new(Kind::Unavailable, "write a: away"));
                    retry(patience, away).unwrap_err();
                    let absent = || Err::<(), _>(Error::new(Kind::NotFound, "open b: no such object"));
                    retry(patience, absent).unwrap_err();
                }
            });
        }
    });
    let report = save.shared.observed.report();
    assert_eq!((report.failures.len(), report.failures_left_out), (64, 16));
    assert!(report.failures.iter().all(|said| said.ends_with(" ms: write a: away; try 1, not again")), "{report:?}");
    assert_eq!(save.before().0, 80);
}
