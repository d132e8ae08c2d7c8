//! Measures the cost of telemetry: an event, all digests of a large job at rank 0, records, and the report of a run.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_engine::listen::{Begun, Listener, Listening, Verb};
use shardfast_store::{Action, Event, Requests, Shared};
use shardfast_telemetry::{Telemetry, report};
use shardfast_transfer::observed::Observed;
use shardfast_transfer::report::Report;

use crate::timed;

/// Events that one operation keeps in full, and operations that emit them.
const EVENTS: u32 = 2_000;
const OPERATIONS: u32 = 200;

/// Ranks of a large job, and of a machine.
const WORLD: u32 = 8_960;
const WORLD_SMALL: u32 = 8;

/// Saves of a long run, and of one whose page is made.
const SAVES: u64 = 1_000;
const SAVES_OF_PAGE: u64 = 100;

/// Most time and bytes that the goals allow, by name.
const GOALS: [(&str, f64); 10] = [
    ("an event, ns", 50.0),
    ("digests of 8,960 ranks, MB", 5.0),
    ("rank 0 with these digests, ms of one core", 50.0),
    ("record of 8 ranks, KB", 16.0),
    ("record of 8,960 ranks, MB", 3.0),
    ("report of 1,000 saves of 8 ranks, s", 3.0),
    ("page of 100 saves of 8,960 ranks, MB", 5.0),
    ("that page made, s", f64::INFINITY),
    ("peak memory of the report of 1,000 saves, MiB", 256.0),
    ("memory of a rank with all records that it may have, MiB", 8.0),
];

/// Records that a rank has at most: of two saves in flight and a load, one made ahead, and eight that wait to be sent.
const RECORDS: u64 = 12;

/// Figure, its goal, and what was found.
pub(crate) type Row = (&'static str, f64, f64);

#[derive(Serialize)]
pub(crate) struct Figures(Vec<Row>);

pub(crate) fn measure(quick: bool) -> io::Result<Figures> {
    let directory = std::env::temp_dir().join(format!("shardfast-scale-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let found = measured(&directory, quick);
    std::fs::remove_dir_all(&directory)?;
    let found = found?;
    Ok(Figures(GOALS.into_iter().zip(found).map(|((name, goal), found)| (name, goal, found)).collect()))
}

pub(crate) fn print(figures: &Figures) {
    for (name, goal, found) in &figures.0 {
        let goal = if goal.is_finite() { format!("goal {goal}") } else { String::new() };
        println!("{name:<62}{found:>10.2}  {goal}");
    }
}

fn measured(directory: &Path, quick: bool) -> io::Result<[f64; 10]> {
    let few = if quick { 10 } else { 1 };
    let listener = Telemetry::new(Some(0), None);
    let large = Job { listener: &listener, run: directory.join("large"), world: WORLD };
    let small = Job { listener: &listener, run: directory.join("small"), world: WORLD_SMALL };

    let before = memory("VmRSS:")?;
    let operations: Vec<_> = (1..=RECORDS).map(|step| small.begins(step)).collect();
    (0..2).for_each(|_| operations.iter().for_each(|operation| emits(&**operation)));
    let rank_mib = memory("VmRSS:")? - before;
    drop(operations);

    let operations: Vec<_> = (0..OPERATIONS / few as u32).map(|_| small.begins(1)).collect();
    let ((), ms) = timed(|| operations.iter().for_each(|operation| emits(&**operation)));
    let event_ns = ms * 1e6 / f64::from(EVENTS) / operations.len() as f64;
    drop(operations);

    let operation = large.begins(1);
    emits(&*operation);
    let said = operation.says(&Report::default()).unwrap_or_default();
    let all = vec![Some(said); WORLD as usize];
    let digests = all.iter().flatten().map(Vec::len).sum::<usize>() as f64 / 1e6;
    std::fs::create_dir_all(&large.run)?;
    let ((), root_ms) = timed(|| operation.collected(all, Vec::new(), Vec::new(), &Report::default()));
    let large_bytes = large.record_bytes()?;
    for step in 2..=SAVES_OF_PAGE / few {
        large.saves(step)?;
    }
    let page = directory.join("page.html");
    let began = Instant::now();
    report_of(&large.run, Some(&page))?;
    let (page_s, page_bytes) = (began.elapsed().as_secs_f64(), std::fs::metadata(&page)?.len());

    for step in 1..=SAVES / few {
        small.saves(step)?;
    }
    let small_bytes = small.record_bytes()?;
    std::fs::write("/proc/self/clear_refs", "5")?; // the peak begins anew, see proc_pid_clear_refs(5)
    let began = Instant::now();
    report_of(&small.run, None)?;
    let report_s = began.elapsed().as_secs_f64();
    let report_mib = memory("VmHWM:")?; // with what the process had before
    let (kb, mb) = (1e3, 1e6);
    let [small_kb, large_mb, page_mb] = [small_bytes as f64 / kb, large_bytes as f64 / mb, page_bytes as f64 / mb];
    Ok([event_ns, digests, root_ms, small_kb, large_mb, report_s, page_mb, page_s, report_mib, rank_mib])
}

/// A job whose ranks all did the same.
struct Job<'a> {
    listener: &'a Telemetry,
    run: std::path::PathBuf,
    world: u32,
}

impl Job<'_> {
    fn begins(&self, step: u64) -> Arc<dyn Listening> {
        let url = self.run.join(format!("step-{step:08}"));
        let (observed, storage) = (Arc::<Observed>::default(), Arc::<Shared>::default());
        let begun = Begun {
            verb: Verb::Save,
            url: &url.to_string_lossy(),
            step: Some(step),
            observed: &observed,
            meeting: [0; 16],
            rank: 0,
            world: self.world,
            storage: &storage,
        };
        self.listener.begins(&begun)
    }

    /// Stores the record of a save.
    fn saves(&self, step: u64) -> io::Result<()> {
        std::fs::create_dir_all(&self.run)?;
        let operation = self.begins(step);
        // What a rank's share of a large model takes at the storage.
        let began = Instant::now();
        (0..40).for_each(|part| operation.stored(&event(part, began)));
        let said = operation.says(&Report::default()).unwrap_or_default();
        operation.collected(vec![Some(said); self.world as usize], Vec::new(), Vec::new(), &Report::default());
        Ok(())
    }

    /// Returns the size of its newest record.
    fn record_bytes(&self) -> io::Result<u64> {
        let records = std::fs::read_dir(self.run.join(".telemetry"))?;
        let names = records.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
        names.into_iter().max().map_or(Ok(0), |newest| Ok(std::fs::metadata(newest)?.len()))
    }
}

fn emits(operation: &dyn Listening) {
    // A store reads the clock for itself.
    let began = Instant::now();
    (0..EVENTS).for_each(|part| operation.stored(&event(part, began)));
}

fn event(part: u32, began: Instant) -> Event<'static> {
    Event {
        action: Action::Write,
        object: "model/00003-000-0123456789abcdef0123456789abcdef.safetensors",
        offset: u64::from(part) << 20,
        bytes: 1 << 20,
        began,
        took: Duration::from_micros(1_300 + u64::from(part) % 700),
        requests: Requests::default(),
        failure: None,
    }
}

/// Returns a figure of this process's memory, in MiB.
fn memory(name: &str) -> io::Result<f64> {
    let told = std::fs::read_to_string("/proc/self/status")?;
    let kib = told.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {name}")))
}

fn report_of(run: &Path, page: Option<&Path>) -> io::Result<()> {
    let timeout = Duration::from_secs(60).into();
    report(&run.to_string_lossy(), None, None, &|_| (), page, &timeout)
        .map(drop)
        .map_err(|error| io::Error::other(error.message))
}
