//! Keeps what saves and loads did on every rank, and tells it.
//!
//! [`Telemetry`] listens to an engine: a record keeps the events of each operation, a digest of it goes to rank 0 when
//! the outcome is known, and rank 0 stores those of all ranks as one object in the directory `.telemetry` of the run.
//! [`report()`] reads these objects, verdicts say what was slow, where and why, and a page draws it. While the job
//! runs, a process [serves](Telemetry::serve) what it does, and [exports](Telemetry::export) it.

mod alerts;
mod chosen;
mod csv;
mod digest;
mod events;
mod http;
pub mod live;
mod metrics;
mod object;
mod otlp;
mod page;
mod record;
pub mod report;
mod runs;
mod serve;
mod storage;
mod text;
mod told;
mod trace;
mod verdicts;
mod watch;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shardfast_engine::listen::{Begun, Listener, Listening, Verb};
use shardfast_engine::{Engine, Error, Kind, Result, Timeout};
use shardfast_format::{TELEMETRY, end_name};
use shardfast_store::Shared;
use shardfast_transfer::events::{Event, Observer, Phase};
use shardfast_transfer::report::Report;

pub use alerts::{Alert, Change, Rules};
pub use digest::Place;
use digest::{Digest, bounded};
use events::Lines;
use live::{Live, Running, Served};
use object::Collected;
use otlp::Exporter;
use page::Page;
use record::{Class, Record};
use report::RunReport;
use runs::Run;
pub use serve::{ask, job_address};
use storage::History;
pub use storage::{Figure, Storage, StorageNow};
use told::Told;
use trace::Trace;
pub use verdicts::Verdict;
pub use watch::Watcher;

/// Version of the program, as objects name it.
const WRITER: &str = concat!("shardfast ", env!("CARGO_PKG_VERSION"));

/// Saves and loads of this process, once it serves or exports them.
static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// Saves and loads of a process, and its exporter.
#[derive(Clone)]
struct Process {
    live: Arc<Live>,
    exporter: Option<Arc<Exporter>>,
    /// Number of the process: a forked one has its parent's memory, but none of its threads.
    id: u32,
}

impl Process {
    /// Returns those of this process.
    fn of_this(known: Option<&Process>) -> Option<&Process> {
        known.filter(|known| known.id == std::process::id())
    }
}

/// Listener to an engine, which keeps what its saves and loads do.
pub struct Telemetry {
    place: Arc<Mutex<Place>>,
    lines: Option<Arc<Lines>>,
    live: OnceLock<Arc<Live>>,
    exporter: OnceLock<Option<Arc<Exporter>>>,
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
        let place = Arc::new(Mutex::new(Place { machine, local_rank, coordinates: Vec::new() }));
        Telemetry {
            place,
            lines,
            live: OnceLock::new(),
            exporter: OnceLock::new(),
            spare: Arc::new(Mutex::new(Some(Record::new(Instant::now())))),
        }
    }

    /// Says where the rank stands in the meshes of its job: names of dimensions, each with the rank's number there. It
    /// counts for saves that begin from now on, and for loads that are under way, too, since a load begins before its
    /// state is looked at. Of more than 8 the first ones are kept, of a name the first 16 bytes; none changes nothing.
    pub fn stands<'a>(&self, coordinates: impl IntoIterator<Item = (&'a str, u64)>) {
        let coordinates = bounded(coordinates);
        if let Ok(mut place) = self.place.lock()
            && !coordinates.is_empty()
        {
            place.coordinates = coordinates;
        }
    }

    /// Serves `/metrics` and `/live` at the address `host:port`, moved by as many ports as the rank's number among the
    /// `local_world` ranks of this machine. Returns where others reach it, where it listens, and the socket's
    /// descriptor, which a forked process must close. A process has one server, which also tells of its other engines.
    ///
    /// # Errors
    /// `Invalid` for another text; `Unavailable` when the port is taken; `Exhausted` when there is no thread.
    pub fn serve(&self, engine: &Arc<Engine>, address: &str, local_world: u32) -> Result<Served> {
        let mut beginning = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let live = self.tell(engine, &mut beginning).live.clone();
        if let Some(served) = live.served.get() {
            return Ok(served.clone());
        }
        let wanted = serve::address(address, place_in(&self.place).local_rank.unwrap_or_default())?;
        let (listener, bound) = serve::listen(wanted)?;
        if engine.rank() == 0 && wanted.port() != 0 {
            let ip = if bound.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { bound.ip() };
            for other in 1..local_world.min(engine.world()) {
                if let Some(port) = u16::try_from(other).ok().and_then(|other| bound.port().checked_add(other)) {
                    live.found(other, &SocketAddr::new(ip, port).to_string());
                }
            }
        }
        let served = (serve::seen_from_outside(bound, engine.host()), bound.to_string(), listener.as_raw_fd());
        serve::serve(listener, Arc::clone(&live))?;
        Ok(live.served.get_or_init(|| served).clone())
    }

    /// Exports traces and metrics over OTLP, if the environment says where to; returns whether it does.
    ///
    /// # Errors
    /// `Invalid` names a variable that cannot be used; `Exhausted` when there is no thread.
    pub fn export(&self, engine: &Arc<Engine>) -> Result<bool> {
        let Some(settings) = otlp::Settings::read(|name| std::env::var(name).ok())? else { return Ok(false) };
        let mut beginning = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let process = self.tell(engine, &mut beginning);
        if process.exporter.is_none() {
            process.exporter = Some(Arc::new(Exporter::start(settings, Arc::clone(&process.live))?));
        }
        let _ = self.exporter.set(process.exporter.clone());
        Ok(true)
    }

    /// Tells of that engine from now on.
    fn tell<'a>(&self, engine: &Arc<Engine>, known: &'a mut Option<Process>) -> &'a mut Process {
        if Process::of_this(known.as_ref()).is_none() {
            *known = None;
        }
        let process = known.get_or_insert_with(|| Process {
            live: Arc::new(Live::new(engine, place_in(&self.place))),
            exporter: None,
            id: std::process::id(),
        });
        if self.live.set(Arc::clone(&process.live)).is_ok() {
            process.live.attach(engine);
        }
        process
    }
}

/// Waits until what this process exports is sent, for at most that long.
pub fn flush(within: Duration) {
    let known = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let exporter = Process::of_this(known.as_ref()).and_then(|process| process.exporter.clone());
    drop(known);
    if let Some(exporter) = exporter {
        exporter.flush(within);
    }
}

/// Returns why the endpoint of OTLP refuses what this process exports, once; `None` if it does not.
pub fn export_refused() -> Option<String> {
    let known = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    Process::of_this(known.as_ref())?.exporter.as_ref()?.refused()
}

/// Notes beside the records of the run at `url` that its job has ended, so that a watch expects no more saves. Waits
/// for at most that long; a note that cannot be stored is left out.
pub fn note_end(url: &str, within: Duration) {
    let (done, noted) = std::sync::mpsc::channel();
    let url = url.to_owned();
    let noting = move || {
        let unix_ms = since_1970().as_millis() as u64;
        let note = format!("{{\"writer\": \"{WRITER}\", \"ended_unix_ms\": {unix_ms}}}\n");
        let name = format!("{TELEMETRY}/{}", end_name(unix_ms));
        let _ = shardfast_store::open(&url).and_then(|store| store.put(&name, note.as_bytes()));
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("shardfast-end".to_owned()).spawn(noting).is_ok() {
        let _ = noted.recv_timeout(within);
    }
}

impl Listener for Telemetry {
    fn begins(&self, begun: &Begun<'_>) -> Arc<dyn Listening> {
        let spare = self.spare.lock().ok().and_then(|mut spare| spare.take());
        let began = begun.observed.began;
        let mut record = spare.unwrap_or_else(|| Record::new(began));
        record.began = began;
        let run = Run::of(begun.verb, begun.url, begun.step);
        let running = Arc::new(Running {
            verb: begun.verb,
            url: without_secrets(begun.url),
            step: begun.step.or_else(|| run.as_ref().map(|run| run.step)),
            began,
            began_unix_ms: since_1970().saturating_sub(began.elapsed()).as_millis() as u64,
            observed: Arc::downgrade(begun.observed),
            record: Arc::new(record),
        });
        let live = self.live.get().cloned();
        if let Some(live) = &live {
            live.begin(&running);
        }
        Arc::new(Operation {
            running,
            live,
            exporter: self.exporter.get().cloned().flatten(),
            spare: Arc::clone(&self.spare),
            run,
            meeting: begun.meeting,
            rank: begun.rank,
            world: begun.world,
            place: match begun.verb {
                Verb::Save => Arc::new(Mutex::new(place_in(&self.place))),
                Verb::Load => Arc::clone(&self.place),
            },
            lines: self.lines.clone(),
            storage: Arc::clone(begun.storage),
        })
    }
}

/// A save or load on this rank.
struct Operation {
    running: Arc<Running>,
    live: Option<Arc<Live>>,
    exporter: Option<Arc<Exporter>>,
    spare: Arc<Spare>,
    /// Run of the checkpoint; `None` for a checkpoint of no run.
    run: Option<Run>,
    meeting: [u8; 16],
    rank: u32,
    world: u32,
    place: Arc<Mutex<Place>>,
    lines: Option<Arc<Lines>>,
    storage: Arc<Shared>,
}

impl shardfast_store::Observer for Operation {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        self.running.record.stored(event);
    }
}

impl Observer for Operation {
    fn noted(&self, event: &Event<'_>) {
        self.running.record.noted(event);
        if let (Event::Outcome { failure, after, number }, Some(live)) = (event, &self.live) {
            live.end(&self.running, Some((*after, failure.map(|error| error.message.clone()))));
            if let Some(exporter) = &self.exporter {
                exporter.send(otlp::Ended {
                    running: Arc::clone(&self.running),
                    place: place_in(&self.place),
                    rank: self.rank,
                    world: self.world,
                    meeting: self.meeting,
                    number: *number,
                });
            }
        }
    }
}

impl Drop for Operation {
    /// Takes an operation without an outcome out of those that run.
    fn drop(&mut self) {
        if let Some(live) = &self.live {
            live.end(&self.running, None);
        }
    }
}

impl Operation {
    fn digest(&self, report: &Report) -> Digest {
        let address =
            self.live.as_ref().and_then(|live| live.served.get().map(|(seen, ..)| seen.clone())).unwrap_or_default();
        let began_unix_ms = self.running.began_unix_ms;
        Digest { address, began_unix_ms, ..Digest::new(&place_in(&self.place), &self.running.record, report) }
    }

    /// Returns what its ranks have said, as it is kept.
    fn collection(&self, step: u64, ranks: Vec<Option<Digest>>) -> Collected {
        Collected::new(self.running.verb, step, self.running.began_unix_ms, ranks)
    }

    /// Notes where other ranks tell what they do, if rank 0 can reach them there.
    fn found(&self, ranks: &[Option<Digest>]) {
        let Some(live) = &self.live else { return };
        let machine = place_in(&self.place).machine;
        for (rank, said) in (0..).zip(ranks) {
            let Some(said) = said else { continue };
            let is_loopback = said.address.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback());
            if !is_loopback || said.place.machine == machine {
                live.found(rank, &said.address);
            }
        }
    }
}

impl Listening for Operation {
    fn says(&self, report: &Report) -> Option<Vec<u8>> {
        if let Ok(mut spare) = self.spare.lock() {
            spare.get_or_insert_with(|| Record::new(Instant::now()));
        }
        if let Some(lines) = &self.lines {
            lines.append(self);
        }
        // A rank that refuses a save or load may not know its place; the other ranks do.
        let has_place = self.run.is_some() || self.running.url.is_empty();
        has_place.then(|| self.digest(report).encode())
    }

    fn chooses(&self, said: &[Vec<u8>]) -> Vec<u32> {
        let ranks = said.iter().map(|said| Digest::decode(said)).collect();
        self.run.as_ref().map(|run| chosen::chosen(&self.collection(run.step, ranks))).unwrap_or_default()
    }

    fn tells(&self) -> Vec<u8> {
        Told::of(self.rank, &self.running.record).encode()
    }

    fn collected(&self, said: Vec<Option<Vec<u8>>>, missing: Vec<u32>, told: Vec<(u32, Vec<u8>)>, report: &Report) {
        let Some(run) = &self.run else { return };
        let ranks: Vec<Option<Digest>> = said.iter().map(|said| Digest::decode(said.as_ref()?)).collect();
        self.found(&ranks);
        let others = told.iter().filter_map(|(rank, told)| Told::decode(*rank, told));
        let told = Told::joined(std::iter::once(Told::of(self.rank, &self.running.record)).chain(others));
        let collected = Collected { missing, told, ..self.collection(run.step, ranks) };
        // What cannot be stored is left out: no save fails for it.
        // A load that found nothing leaves nothing.
        let has_found = self.running.verb == Verb::Save || report.phases_ms.contains_key(Phase::Opened.word());
        let Ok(store) = run.store(&self.storage, has_found) else { return };
        let _ =
            collected.encode().and_then(|bytes| Ok(store.put(&format!("{TELEMETRY}/{}", collected.name()), &bytes)?));
        if let (Some(live), Verb::Save) = (&self.live, self.running.verb) {
            live.stored(&self.running, bytes_of_all(&collected), store.free_bytes());
        }
    }
}

/// Returns the bytes that all ranks wrote; `None` if one failed, or said nothing.
fn bytes_of_all(collected: &Collected) -> Option<u64> {
    let written = |said: &Digest| [Class::SmallWrites, Class::LargeWrites].map(|class| said.sums[class as usize].bytes);
    let of = |said: &Digest| said.failure.is_empty().then(|| written(said).into_iter().fold(0, u64::saturating_add));
    let all = collected.ranks.iter().map(|said| of(said.as_ref()?));
    all.reduce(|sum, bytes| Some(sum?.saturating_add(bytes?)))?
}

/// Reads what the saves and loads of the run at `url` did, or those of one step. Writes it as a page to the new file
/// `out` if that is given; returns also the page's size in bytes. `storage` names a Prometheus server and which of its
/// series are those of the storage, `http://host:port/?match={job="minio"}`: the newest saves and loads have them, too.
/// `complete` adds to the report, before it is drawn, what the caller alone knows.
///
/// # Errors
/// `NotFound` when there is no run; the store's errors; `Conflict` when something is at `out`; `Invalid` or
/// `Unavailable` when `storage` is another text or server, or does not answer. Objects that are damaged, foreign or of
/// a newer version are listed and passed over.
pub fn report(
    url: &str,
    step: Option<u64>,
    storage: Option<&str>,
    complete: &dyn Fn(&mut RunReport),
    out: Option<&Path>,
    timeout: &Timeout,
) -> Result<(RunReport, Option<usize>)> {
    let history = storage.map(History::new).transpose()?;
    let mut page = out.map(|_| Page::default());
    let mut report = report::read_run(url, step, history.as_ref(), timeout, &mut |collected, operation| {
        page.as_mut().map_or(Ok(()), |page| page.add(collected, operation))
    })?;
    complete(&mut report);
    let (Some(page), Some(out)) = (page, out) else { return Ok((report, None)) };
    let html = page.html(&report)?;
    new_file(out, |mut file| file.write_all(html.as_bytes()).map_err(|error| unwritten(out, &error)))?;
    Ok((report, Some(html.len())))
}

/// Writes what the saves and loads of the run at `url` did, or those of one step, as a trace to the new file `out`:
/// Chrome's format of trace events, which Perfetto opens. Returns the report, and the trace's size in bytes.
///
/// # Errors
/// As [`report`](report()).
pub fn trace(url: &str, step: Option<u64>, out: &Path, timeout: &Timeout) -> Result<(RunReport, u64)> {
    new_file(out, |file| {
        let mut trace = Trace::new(BufWriter::new(file));
        let report = report::read_run(url, step, None, timeout, &mut |collected, operation| {
            trace.add(collected, operation).map_err(|error| unwritten(out, &error))
        })?;
        let bytes = trace.end().map_err(|error| unwritten(out, &error))?;
        Ok((report, bytes))
    })
}

/// Returns the times of the saves and loads of the run at `url`, or of those of one step, as a table of comma-separated
/// values: a row for each operation, rank and phase.
///
/// # Errors
/// As [`report`](report()).
pub fn csv(url: &str, step: Option<u64>, timeout: &Timeout) -> Result<String> {
    let mut table = csv::head();
    report::read_run(url, step, None, timeout, &mut |collected, operation| {
        csv::rows(&mut table, collected, operation);
        Ok(())
    })?;
    Ok(table)
}

/// Creates a file and writes it; leaves nothing if that fails.
///
/// # Errors
/// Those of `write`; `Conflict` when something is there already; `Invalid` or `Exhausted` when it cannot be created.
fn new_file<T>(path: &Path, write: impl FnOnce(File) -> Result<T>) -> Result<T> {
    let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(|error| unwritten(path, &error))?;
    let written = write(file);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
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

fn place_in(place: &Mutex<Place>) -> Place {
    place.lock().map(|place| place.clone()).unwrap_or_default()
}

/// Returns the time by this machine's clock.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
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
    fn a_save_has_the_coordinates_of_its_begin_and_a_load_those_of_its_end() {
        let (telemetry, storage) = (Telemetry::new(None, None), Arc::default());
        let begins = |verb| {
            let (observed, url) = (Arc::default(), "/run/step-00000001");
            let (observed, storage, meeting) = (&observed, &storage, [0; 16]);
            telemetry.begins(&Begun { verb, url, step: Some(1), observed, meeting, rank: 0, world: 1, storage })
        };
        telemetry.stands([("tp", 1)]);
        let (save, load) = (begins(Verb::Save), begins(Verb::Load));
        telemetry.stands([("tp", 2)]);
        telemetry.stands(None);
        let said = |listening: &Arc<dyn Listening>| {
            Digest::decode(&listening.says(&Report::default()).unwrap()).unwrap().place.coordinates
        };
        assert_eq!((said(&save), said(&load)), (vec![("tp".into(), 1)], vec![("tp".into(), 2)]));
        assert_eq!(said(&begins(Verb::Save)), [("tp".into(), 2)]);
    }

    #[test]
    fn a_url_is_shown_without_secrets() {
        assert_eq!(without_secrets("s3://key:secret@host/a@b/c?sig=1#x"), "s3://host/a@b/c");
        assert_eq!(without_secrets("/runs/a@b"), "/runs/a@b");
    }
}
