//! Keeps what saves and loads did on every rank, and tells it.
//!
//! [`Telemetry`] listens to an engine: a record keeps the events of each operation, a digest of it goes to rank 0 when
//! the outcome is known, and rank 0 stores those of all ranks as one object in the directory `.telemetry` of the run.
//! [`report()`] reads these objects, verdicts say what was slow, where and why, and a page draws it.

mod alerts;
mod digest;
mod events;
mod object;
mod page;
mod record;
pub mod report;
mod text;
mod verdicts;
mod watch;

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use shardfast_engine::Timeout;
use shardfast_engine::listen::{Begun, Listener, Listening, Verb};
use shardfast_format::{TELEMETRY, parse_step_dir};
use shardfast_store::{Shared, split};
use shardfast_transfer::events::Observer;
use shardfast_transfer::report::Report;

pub use alerts::{Alert, Change, Rules};
pub use digest::Place;
use digest::{Digest, bounded};
use events::Lines;
use object::Collected;
use record::Record;
pub use verdicts::Verdict;
pub use watch::Watcher;

/// Version of the program, as objects name it.
const WRITER: &str = concat!("shardfast ", env!("CARGO_PKG_VERSION"));

/// Listener to an engine, which keeps what its saves and loads do.
pub struct Telemetry {
    place: Arc<Mutex<Place>>,
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
        let place = Arc::new(Mutex::new(Place { machine, local_rank, coordinates: Vec::new() }));
        Telemetry { place, lines, spare: Arc::new(Mutex::new(Some(Record::new()))) }
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
    place: Arc<Mutex<Place>>,
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
        self.run.as_ref().map(|_| Digest::new(&place_in(&self.place), &self.record, report).encode())
    }

    fn collected(&self, said: Result<Vec<Vec<u8>>, Vec<u32>>, report: &Report) {
        let Some((run, step)) = &self.run else { return };
        let (ranks, missing) = match said {
            Ok(said) => (said.iter().map(|said| Digest::decode(said)).collect(), Vec::new()),
            // What the others said is lost, but rank 0 has its own.
            Err(missing) => {
                let mut ranks = vec![None; self.world as usize];
                ranks[0] = Some(Digest::new(&place_in(&self.place), &self.record, report));
                (ranks, missing)
            }
        };
        let collected = Collected {
            verb: self.verb,
            step: *step,
            began_unix_ms: self.began_unix_ms,
            writer: WRITER.to_owned(),
            missing,
            ranks,
        };
        // What cannot be stored is left out: no save fails for it.
        let _ = collected.encode().and_then(|bytes| {
            let store = shardfast_store::open_on(run, &self.storage)?;
            Ok(store.put(&format!("{TELEMETRY}/{}", collected.name()), &bytes)?)
        });
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
) -> shardfast_engine::Result<(report::RunReport, Option<usize>)> {
    let (report, collected) = report::read_run(url, step, timeout)?;
    let Some(out) = out else { return Ok((report, None)) };
    let page = page::page(&report, &collected)?;
    page::write(out, &page)?;
    Ok((report, Some(page.len())))
}

fn place_in(place: &Mutex<Place>) -> Place {
    place.lock().map(|place| place.clone()).unwrap_or_default()
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
    fn a_save_has_the_coordinates_of_its_begin_and_a_load_those_of_its_end() {
        let (telemetry, storage) = (Telemetry::new(None, None), Arc::default());
        let begins = |verb| {
            let (began, url) = (std::time::Instant::now(), "/run/step-00000001");
            telemetry.begins(&Begun { verb, url, step: Some(1), began, rank: 0, world: 1, storage: &storage })
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
