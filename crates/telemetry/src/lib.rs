//! Keeps what saves and loads did on every rank, and tells it.
//!
//! [`Telemetry`] listens to an engine: a record keeps the events of each operation, a digest of it goes to rank 0 when
//! the outcome is known, and rank 0 stores those of all ranks as one object in the directory `.telemetry` of the run.
//! [`report()`] reads these objects, verdicts say what was slow, where and why, and a page draws it.

mod chosen;
mod csv;
mod digest;
mod events;
mod object;
mod page;
mod record;
pub mod report;
mod text;
mod told;
mod trace;
mod verdicts;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use shardfast_engine::listen::{Begun, Listener, Listening, Verb};
use shardfast_engine::{Error, Kind, Timeout};
use shardfast_format::{TELEMETRY, parse_step_dir};
use shardfast_store::{Shared, split};
use shardfast_transfer::events::Observer;
use shardfast_transfer::report::Report;

use digest::Digest;
pub use digest::Place;
use events::Lines;
use object::Collected;
use page::Page;
use record::Record;
use report::RunReport;
use told::Told;
use trace::Trace;
pub use verdicts::Verdict;

/// Version of the program, as objects name it.
const WRITER: &str = concat!("shardfast ", env!("CARGO_PKG_VERSION"));

/// Listener to an engine, which keeps what its saves and loads do.
pub struct Telemetry {
    place: Place,
    lines: Option<Arc<Lines>>,
    spare: Arc<Spare>,
}

/// Record for the next operation: its memory is made before that begins, since the training may wait for the begin.
type Spare = Mutex<Option<Record>>;

impl Telemetry {
    /// Makes the listener of a rank. `local_rank` is its number among the ranks of this machine, and `lines` the file
    /// to which all events of operations that have ended are appended.
    pub fn new(local_rank: Option<u16>, lines: Option<OsString>) -> Telemetry {
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let lines = lines.map(|path| Arc::new(Lines::new(path)));
        Telemetry { place: Place { machine, local_rank }, lines, spare: Arc::new(Mutex::new(Some(Record::new()))) }
    }
}

impl Listener for Telemetry {
    fn begins(&self, begun: &Begun<'_>) -> Arc<dyn Listening> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let spare = self.spare.lock().ok().and_then(|mut spare| spare.take());
        let mut record = spare.unwrap_or_else(Record::new);
        record.began = begun.began;
        Arc::new(Operation {
            record,
            spare: Arc::clone(&self.spare),
            verb: begun.verb,
            run: run_of(begun.url),
            url: without_secrets(begun.url),
            rank: begun.rank,
            world: begun.world,
            began_unix_ms: now.as_millis() as u64,
            place: self.place.clone(),
            lines: self.lines.clone(),
            storage: Arc::clone(begun.storage),
        })
    }
}

/// A save or load on this rank.
struct Operation {
    record: Record,
    spare: Arc<Spare>,
    verb: Verb,
    /// Run and step of the checkpoint; `None` for a checkpoint of no run.
    run: Option<(String, u64)>,
    /// Place of the checkpoint, as it may be shown.
    url: String,
    rank: u32,
    world: u32,
    began_unix_ms: u64,
    place: Place,
    lines: Option<Arc<Lines>>,
    storage: Arc<Shared>,
}

impl shardfast_store::Observer for Operation {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        self.record.stored(event);
    }
}

impl Observer for Operation {
    fn noted(&self, event: &shardfast_transfer::events::Event<'_>) {
        self.record.noted(event);
    }
}

impl Listening for Operation {
    fn says(&self, report: &Report) -> Option<Vec<u8>> {
        if let Ok(mut spare) = self.spare.lock() {
            spare.get_or_insert_with(Record::new);
        }
        if let Some(lines) = &self.lines {
            lines.append(self);
        }
        self.run.as_ref().map(|_| Digest::new(&self.place, &self.record, report).encode())
    }

    fn chooses(&self, said: &[Vec<u8>]) -> Vec<u32> {
        let ranks = said.iter().map(|said| Digest::decode(said)).collect();
        self.run.as_ref().map(|(_, step)| chosen::chosen(&self.collection(*step, ranks))).unwrap_or_default()
    }

    fn tells(&self) -> Vec<u8> {
        Told::of(self.rank, &self.record).encode()
    }

    fn collected(&self, said: Result<Vec<Vec<u8>>, Vec<u32>>, told: Vec<(u32, Vec<u8>)>, report: &Report) {
        let Some((run, step)) = &self.run else { return };
        let (ranks, missing) = match said {
            Ok(said) => (said.iter().map(|said| Digest::decode(said)).collect(), Vec::new()),
            // What the others said is lost, but rank 0 has its own.
            Err(missing) => {
                let mut ranks = vec![None; self.world as usize];
                ranks[0] = Some(Digest::new(&self.place, &self.record, report));
                (ranks, missing)
            }
        };
        let others = told.iter().filter_map(|(rank, told)| Told::decode(*rank, told));
        let told = Told::joined(std::iter::once(Told::of(self.rank, &self.record)).chain(others));
        let collected = Collected { missing, told, ..self.collection(*step, ranks) };
        // What cannot be stored is left out: no save fails for it.
        let _ = collected.encode().and_then(|bytes| {
            let store = shardfast_store::open_on(run, &self.storage)?;
            Ok(store.put(&format!("{TELEMETRY}/{}", collected.name()), &bytes)?)
        });
    }
}

impl Operation {
    /// Returns what its ranks have said, as it is kept.
    fn collection(&self, step: u64, ranks: Vec<Option<Digest>>) -> Collected {
        Collected {
            verb: self.verb,
            step,
            began_unix_ms: self.began_unix_ms,
            writer: WRITER.to_owned(),
            missing: Vec::new(),
            ranks,
            told: Told::default(),
        }
    }
}

/// Reads what the saves and loads of the run at `url` did, or those of one step. Writes it as a page to the new file
/// `out` if that is given; returns also the page's size in bytes.
///
/// # Errors
/// `NotFound` when there is no run; the store's errors; `Conflict` when something is at `out`. Objects that are
/// damaged, foreign or of a newer version are listed and passed over.
pub fn report(
    url: &str,
    step: Option<u64>,
    out: Option<&Path>,
    timeout: &Timeout,
) -> shardfast_engine::Result<(RunReport, Option<usize>)> {
    let Some(out) = out else { return Ok((report::read_run(url, step, timeout, &mut |_, _| Ok(()))?, None)) };
    let mut page = Page::default();
    let report = report::read_run(url, step, timeout, &mut |collected, operation| page.add(collected, operation))?;
    let html = page.html(&report)?;
    new_file(out)?.write_all(html.as_bytes()).map_err(|error| unwritten(out, &error))?;
    Ok((report, Some(html.len())))
}

/// Writes what the saves and loads of the run at `url` did, or those of one step, as a trace to the new file `out`:
/// Chrome's format of trace events, which Perfetto opens. Returns the report, and the trace's size in bytes.
///
/// # Errors
/// As [`report`](report()).
pub fn trace(
    url: &str,
    step: Option<u64>,
    out: &Path,
    timeout: &Timeout,
) -> shardfast_engine::Result<(RunReport, u64)> {
    // A run that is not there leaves no file.
    let mut trace: Option<Trace<BufWriter<File>>> = None;
    let report = report::read_run(url, step, timeout, &mut |collected, operation| {
        if trace.is_none() {
            trace = Some(Trace::new(BufWriter::new(new_file(out)?)));
        }
        trace.as_mut().map_or(Ok(()), |trace| trace.add(collected, operation)).map_err(|error| unwritten(out, &error))
    })?;
    let trace = match trace {
        Some(trace) => trace,
        None => Trace::new(BufWriter::new(new_file(out)?)),
    };
    let bytes = trace.end().map_err(|error| unwritten(out, &error))?;
    Ok((report, bytes))
}

/// Returns the times of the saves and loads of the run at `url`, or of those of one step, as a table of comma-separated
/// values: a row for each operation, rank and phase.
///
/// # Errors
/// As [`report`](report()).
pub fn csv(url: &str, step: Option<u64>, timeout: &Timeout) -> shardfast_engine::Result<String> {
    let mut table = csv::head();
    report::read_run(url, step, timeout, &mut |collected, operation| {
        csv::rows(&mut table, collected, operation);
        Ok(())
    })?;
    Ok(table)
}

/// Creates a file.
///
/// # Errors
/// `Conflict` when something is there already; `Invalid` or `Exhausted` when it cannot be created.
fn new_file(path: &Path) -> shardfast_engine::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path).map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &std::io::Error) -> Error {
    let (kind, what) = match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            (Kind::Conflict, "a file is there already: name another one, or remove it".to_owned())
        }
        std::io::ErrorKind::StorageFull => (Kind::Exhausted, error.to_string()),
        _ => (Kind::Invalid, error.to_string()),
    };
    Error::new(kind, format!("{}: {what}", path.display()))
}

/// Returns the run of a checkpoint and its step; `None` for a checkpoint that is no step of a run.
fn run_of(url: &str) -> Option<(String, u64)> {
    let (run, name) = split(url)?;
    Some((run, parse_step_dir(&name)?))
}

/// Returns a URL without what may be secret: its query, and a user in front of its host.
fn without_secrets(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    format!("{scheme}://{}{path}", host.rsplit_once('@').map_or(host, |(_, host)| host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_directory_of_steps() {
        assert_eq!(run_of("/runs/a/step-00000010"), Some(("/runs/a".to_owned(), 10)));
        assert_eq!(run_of("s3://bucket/runs/step-00000010"), Some(("s3://bucket/runs".to_owned(), 10)));
        assert_eq!(run_of("/runs/a/last"), None);
    }

    #[test]
    fn a_url_is_shown_without_secrets() {
        assert_eq!(without_secrets("s3://key:secret@host/a@b/c?sig=1#x"), "s3://host/a@b/c");
        assert_eq!(without_secrets("/runs/a@b"), "/runs/a@b");
    }
}
