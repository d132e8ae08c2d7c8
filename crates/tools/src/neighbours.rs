//! Has the keepers of a job's machines meet, so that their memory is one place.
//!
//! # Protocol
//! 1. The ranks agree who is the lowest of its machine. That one starts a keeper, unless one runs, and has it listen.
//! 2. They agree on the table of all machines. A keeper that has checkpoints of an older job of the run than another
//!    one has was away when the training went on: what it has may be of no history, and leaves.
//! 3. Each keeper gets the table. No rank goes on before all have it.
//!
//! A keeper that dies is begun anew at the same port, by its machine alone: the others need not know.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardfast_engine::{Engine, Job, jobs};
pub use shardfast_store::keeper::wire::Copies;
use shardfast_store::keeper::wire::{Key, Machine};
use shardfast_store::keeper::{join_machines, meet as listen};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::timeout::Timeout;

use crate::drain::memory_place;

/// Purpose of the key of keepers.
const PURPOSE: &str = "keepers";

/// Machines of a job, as the ranks of one of them know them.
pub struct Machines {
    /// Number of the machines.
    pub count: u32,
    /// Whether this rank is the lowest of its machine: it starts the keeper.
    pub is_lowest: bool,
    /// Table for a keeper that is begun anew; `None` with one machine, and for other ranks.
    table: Option<Table>,
}

/// Machines of a job that a rank gives its keeper.
struct Table {
    name: String,
    host: String,
    key: Key,
    machines: Vec<Machine>,
    me: u32,
    copies: Copies,
}

/// Place of a rank among the machines.
#[derive(Clone, Serialize, Deserialize)]
struct Place {
    machines: u32,
    /// Number of its machine, if it is the lowest rank there.
    lowest_of: Option<u32>,
}

/// Keeper of a machine, as its lowest rank offers it.
#[derive(Clone, Serialize, Deserialize)]
struct Offer {
    machine: Machine,
    /// Newest job whose checkpoints it has.
    job: Option<Job>,
}

/// Table of all machines, for the lowest rank of one.
#[derive(Clone, Serialize, Deserialize)]
struct Answer {
    machines: Vec<Machine>,
    /// Whether what the keeper has is to leave.
    is_stale: bool,
}

/// Starts the keeper of each machine with `start`, unless it runs, and has them meet for the run at `url`, each file
/// with `copies` on machines of other domains. `call` is the name of the verb. Every rank must call it.
///
/// # Errors
/// The same on every rank: `Invalid` with fewer machines, or domains, than the copies need; the keepers' errors; the
/// run's, if keepers have checkpoints of several jobs.
pub fn meet(
    engine: &Arc<Engine>,
    (call, url): (&str, &str),
    (copies, domain): (Copies, Option<&str>),
    start: impl FnOnce() -> Result<()>,
    deadline: Duration,
) -> Result<Machines> {
    let Place { machines, lowest_of } =
        engine.decide((&format!("{call}: machines of"), url), machine(), |ids| Ok(places(&ids)), deadline)?;
    let (name, near) = memory_place(url);
    let key = engine.key(PURPOSE);
    let offered = match lowest_of {
        Some(_) if machines > 1 => start().and_then(|()| {
            let address = listen(&name, engine.host(), engine.ports().unwrap_or_default(), key)?;
            let store = engine.store(&near, &Timeout::of_call(deadline))?;
            let job = jobs::newest(&*store, (&Timeout::of_call(deadline)).into())?;
            let domain = domain.map_or_else(|| address.clone(), str::to_owned);
            Ok(Some(Offer { machine: Machine { address, domain }, job }))
        }),
        Some(_) => start().map(|()| None),
        None => Ok(None),
    };
    let table = |offers: Vec<Option<Offer>>| {
        expect_copies(url, machines, copies.count, &offers)?;
        let newest = newest(engine, url, &offers, deadline)?;
        let all: Vec<Machine> = offers.iter().flatten().map(|offer| offer.machine.clone()).collect();
        let answer =
            |offer: &Offer| Answer { machines: all.clone(), is_stale: offer.job.is_some() && offer.job != newest };
        Ok(offers.iter().map(|offer| offer.as_ref().map(answer)).collect())
    };
    let answer: Option<Answer> = engine.decide((&format!("{call}: keepers of"), url), offered, table, deadline)?;
    let mut met = Machines { count: machines, is_lowest: lowest_of.is_some(), table: None };
    let joined = match (answer, lowest_of) {
        (Some(answer), Some(me)) => {
            let host = engine.host().to_owned();
            let table = Table { name, host, key, machines: answer.machines, me, copies };
            let cleared = match answer.is_stale {
                true => engine.store(&near, &Timeout::of_call(deadline)).and_then(|store| clear(&*store)),
                false => Ok(()),
            };
            cleared.and_then(|()| table.tell()).map(|()| met.table = Some(table))
        }
        _ => Ok(()),
    };
    engine.decide((&format!("{call}: memory of"), url), joined, Ok, deadline)?;
    Ok(met)
}

impl Machines {
    /// Starts the keeper of this machine again, with `start`, in place of one that has died.
    ///
    /// # Errors
    /// The keeper's; `Unavailable` if its port is taken.
    pub fn revive(&self, start: impl FnOnce() -> Result<()>) -> Result<()> {
        start()?;
        self.table.as_ref().map_or(Ok(()), |table| {
            let address = &table.machines[table.me as usize].address;
            let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default();
            listen(&table.name, &table.host, (port, port), table.key)?;
            table.tell()
        })
    }
}

impl Table {
    fn tell(&self) -> Result<()> {
        Ok(join_machines(&self.name, &self.machines, self.me, self.copies)?)
    }
}

/// Returns what this machine has since it was started, and no other one: processes see one keeper there.
fn machine() -> Result<String> {
    let read = || -> std::io::Result<String> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok(format!("{} {}", boot.trim(), fs::metadata("/proc/self/ns/net")?.ino()))
    };
    read().map_err(|error| Error::invalid(format!("this machine does not say which it is: {error}")))
}

fn places(ids: &[String]) -> Vec<Place> {
    let mut seen: Vec<&String> = Vec::new();
    let mut lowest = Vec::new();
    let known: BTreeSet<&String> = ids.iter().collect();
    let mut left = known;
    for id in ids {
        lowest.push(left.remove(id).then(|| {
            seen.push(id);
            seen.len() as u32 - 1
        }));
    }
    let machines = seen.len() as u32;
    lowest.into_iter().map(|lowest_of| Place { machines, lowest_of }).collect()
}

/// Checks that there are machines of enough domains for so many copies.
fn expect_copies(url: &str, machines: u32, copies: u32, offers: &[Option<Offer>]) -> Result<()> {
    if machines <= copies {
        return Err(Error::invalid(format!(
            "{url}: peers=sf.copies({copies}): expected at least {} machines, found {machines}: leave peers= out, or \
             ask for fewer copies",
            copies + 1
        )));
    }
    let domains: BTreeSet<&str> = offers.iter().flatten().map(|offer| &*offer.machine.domain).collect();
    if copies > 0 && domains.len() as u32 <= copies {
        return Err(Error::invalid(format!(
            "{url}: peers=sf.copies({copies}): expected machines of at least {} domains, found {} (SHARDFAST_DOMAIN, \
             or a machine's own address): machines that fail together cannot have each other's copies",
            copies + 1,
            domains.into_iter().collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(())
}

/// Returns the job whose checkpoints count, of those that the keepers have.
fn newest(engine: &Engine, url: &str, offers: &[Option<Offer>], deadline: Duration) -> Result<Option<Job>> {
    let jobs: BTreeSet<Job> = offers.iter().flatten().filter_map(|offer| offer.job.clone()).collect();
    let jobs: Vec<Job> = jobs.into_iter().collect();
    if jobs.len() < 2 {
        return Ok(jobs.into_iter().next());
    }
    let timeout = Timeout::of_call(deadline);
    jobs::newest_of(&jobs, &*engine.store(url, &timeout)?, (&timeout).into())
}

/// Deletes all that a keeper has of the run.
fn clear(near: &dyn shardfast_store::Store) -> Result<()> {
    for entry in near.list("")? {
        match entry.is_dir {
            true => near.delete_tree(&entry.name)?,
            false => near.delete(&entry.name)?,
        }
    }
    Ok(())
}
