//! One rank's view of the shared service of objects: its own client and connections, which end with the rank, and
//! requests that fail where a trap is set.
//!
//! The service answers after it has carried a request out, so an answer means that the object is durable. What a rank
//! of a later job finds is the state of the service, whenever the earlier processes ended.
//!
//! # What is a function of the seed
//! * A rank makes small requests one after the other: those of a decision have numbers. Further pages of a list have
//!   none, since leftovers of a dead rank may lengthen a list.
//! * A client sends the parts of its objects in parallel, and completes its uploads in parallel. Their order is not a
//!   function of the seed, so a trap counts only requests of one kind, for one key and one part.
//! * What else a rank has in flight when it dies, or when one of its requests fails for good, may be carried out or
//!   not. What a later job finds is checked, and not in the journal; nor is how far a rank had come when it failed.
//! * Pauses before a request is made again take real time, tenths of a second, and no virtual time. So what fails for
//!   longer fails for good, by a status that is not tried again.

use std::path::Path;
use std::sync::Arc;

use shardfast_store::testing::sims3::{Ask, Fault};

use crate::process::{Process, Word};
use crate::service::{Service, name, path};
use crate::storage::Storage;
use crate::trap::{Failure, Fate, is_data};

/// What a dead process gets for each request, which is never repeated: its connections are gone.
pub(crate) const DEAD: Fault = Fault::Answered(403);

/// The service as a rank sees it.
pub(crate) fn seen_by(process: &Arc<Process>, service: &Service) -> Service {
    let seen = Requests { service: service.clone(), process: Arc::clone(process) };
    service.behind(move |ask| seen.fault(ask))
}

/// The requests of one rank.
struct Requests {
    service: Service,
    process: Arc<Process>,
}

impl Requests {
    /// What goes wrong with a request of this process.
    fn fault(&self, ask: &Ask<'_>) -> Option<Fault> {
        let Requests { service, process } = self;
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
                    ask.carry_out(&service.holds);
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
                let left = service.left();
                if seed.is_multiple_of(2) {
                    ask.carry_out(&left.holds);
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
        if !self.service.holds.objects(&name(&step.join("COMMIT"))).is_empty() {
            return;
        }
        let (begins, step) = (of.map_or_else(String::new, |rank| format!("{rank:05}-")), step.to_owned());
        self.service.holds.remove(|found| {
            let found = self::path(found);
            let of_rank = found.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&begins));
            let is_meant = if of.is_none() || what == "begin" { of_rank } else { found == path };
            is_meant && is_data(found) && found.starts_with(&step)
        });
    }
}
