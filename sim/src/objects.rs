//! One rank's view of the shared service of objects: its own client and connections, which end with the rank, and
//! requests that fail where a trap is set.
//!
//! The service answers after it has carried a request out, so an answer means that the object is durable. What a rank
//! of a later job finds is the state of the service, whenever the earlier processes ended.
//!
//! # What is a function of the seed
//! * Small requests are made one after the other ([`READS_MAX`]): those of a decision have numbers. Further pages of
//!   a list have none, since leftovers of a dead rank may lengthen a list.
//! * A client sends the parts of its objects in parallel, and completes its uploads in parallel. Their order is not a
//!   function of the seed, so a trap counts only requests of one kind, for one key and one part.
//! * What else a rank has in flight when it dies, or when one of its requests fails for good, may be carried out or
//!   not. What a later job finds is checked, and not in the journal; nor is how far a rank had come when it failed.
//! * Pauses before a request is made again take real time, tenths of a second, and no virtual time. So what fails for
//!   longer fails for good, by a status that is not tried again.

use std::path::Path;
use std::sync::Arc;

use shardfast_engine::Result;
use shardfast_store::sims3::{Ask, Fault, SimS3};
use shardfast_store::{Parts, Shared, Store, open_on};

use crate::process::{Process, Word};
use crate::storage::Storage;
use crate::trap::{Failure, Fate, is_data};

/// The bucket.
const BUCKET: &str = "simulated";

/// What a dead process gets for each request, which is never repeated: its connections are gone.
pub(crate) const DEAD: Fault = Fault::Answered(403);

/// Reads and small requests of a client that are made at a time.
const READS_MAX: usize = 1;

/// Parts of a client that are sent at a time: each takes a thread.
const SENDS_MAX: usize = 3;

/// A service, and a client of it.
#[derive(Clone)]
pub(crate) struct Objects {
    service: SimS3,
    part_bytes: u64,
    client: Arc<Shared>,
}

impl Objects {
    pub(crate) fn new(part_bytes: u64) -> Objects {
        Objects::on(SimS3::default(), part_bytes)
    }

    /// A client of its own.
    fn on(service: SimS3, part_bytes: u64) -> Objects {
        let parts = Parts { bytes_min: part_bytes, bytes_max: 8 * part_bytes, count_max: 10_000 };
        let client = Arc::new(Shared::simulated_in_parts(service.clone(), parts, READS_MAX, SENDS_MAX));
        Objects { service, part_bytes, client }
    }

    pub(crate) fn open(&self, place: &str) -> Result<Arc<dyn Store>> {
        Ok(open_on(&format!("s3://{BUCKET}{place}?endpoint=http://{BUCKET}"), &self.client)?)
    }

    /// The same service for another client, whose requests `way` sees before they are carried out.
    pub(crate) fn behind(&self, way: impl Fn(&Ask<'_>) -> Option<Fault> + Send + Sync + 'static) -> Objects {
        Objects::on(self.service.behind(way), self.part_bytes)
    }

    /// As a rank sees it.
    pub(crate) fn of(&self, process: &Arc<Process>) -> Objects {
        let (objects, process) = (self.clone(), Arc::clone(process));
        self.behind(move |ask| objects.fault(ask, &process))
    }

    /// What it holds now.
    pub(crate) fn left(&self) -> Objects {
        Objects::on(self.service.snapshot(), self.part_bytes)
    }

    pub(crate) fn damage(&self, file: &Path, at: u64, bit: u64) {
        self.service.replace(&name(file), |bytes| bytes[at as usize] ^= 1 << bit);
    }

    /// What goes wrong with a request of this process.
    fn fault(&self, ask: &Ask<'_>, process: &Process) -> Option<Fault> {
        if process.is_dead() {
            return Some(DEAD);
        }
        let (what, name) = (ask.what(), ask.name());
        if matches!(what, "credentials" | "page") {
            return None;
        }
        match process.trapped(what, path(&name))? {
            Fate::Die { after } => {
                if after {
                    ask.carry_out(&self.service);
                }
                process.die();
                Some(DEAD)
            }
            Fate::Fails(Failure::Request(fault)) => Some(fault),
            Fate::Fails(Failure::Call { .. }) => None,
            Fate::Slow(time) => {
                process.linger(time);
                process.is_dead().then_some(DEAD)
            }
            Fate::Blackout { seed } => {
                let left = self.left();
                if seed.is_multiple_of(2) {
                    ask.carry_out(&left.service);
                }
                process.say(Word::Blackout(Storage::Objects(left)));
                None
            }
            Fate::Sweep => {
                self.sweep(what, path(&name), (!process.is_deciding()).then_some(process.rank));
                None
            }
        }
    }

    /// Removes data files of a checkpoint without a `COMMIT`, and aborts uploads of such: all, or `path`, or those of
    /// one rank where that begins an upload, since it begins one after the other.
    fn sweep(&self, what: &str, path: &Path, of: Option<u32>) {
        let is_step = |dir: &&Path| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
        let Some(step) = path.ancestors().find(is_step) else { return };
        if !self.service.objects(&name(&step.join("COMMIT"))).is_empty() {
            return;
        }
        let (begins, step) = (of.map_or_else(String::new, |rank| format!("{rank:05}-")), step.to_owned());
        self.service.remove(|found| {
            let found = self::path(found);
            let of_rank = found.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&begins));
            let is_meant = if of.is_none() || what == "begin" { of_rank } else { found == path };
            is_meant && is_data(found) && found.starts_with(&step)
        });
    }
}

/// The name at the service of what a path of the simulation names.
fn name(path: &Path) -> String {
    format!("{BUCKET}{}", path.display())
}

/// The path of what has this name at the service.
pub(crate) fn path(name: &str) -> &Path {
    Path::new(name.strip_prefix(BUCKET).unwrap_or(name))
}
