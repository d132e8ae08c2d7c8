//! Holds the job's engine: the state that all of its saves and loads share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use shardfast_coord::Coord as Ranks;
use shardfast_format::{Catalog, sha256};
use shardfast_plan::Write;
use shardfast_store::Store;
use shardfast_transfer::Accelerators;
use shardfast_transfer::error::{Error, Result, random_below, retry};
use shardfast_transfer::memory::staging_bytes_default;
use shardfast_transfer::observed::Observed;
use shardfast_transfer::staging::Staging;
use shardfast_transfer::timeout::Timeout;

use crate::background::Background;
use crate::calls::Calls;
use crate::jobs::{Job, Jobs};
use crate::listen::Listener;
use crate::plans;

/// Duration from which a save fails instead of committing: a sweep may remove files of twice that age.
pub const SAVE_MAX: Duration = Duration::from_secs(3 * 3600);

/// The longest [`spread`].
const SPREAD_MAX_MS: u64 = 1000;

/// Returns a random pause before the first request of each rank: services refuse many requests that begin at one
/// moment. At most a millisecond for each of `world` ranks, and [`SPREAD_MAX_MS`].
fn spread(world: u32) -> Duration {
    random_below(u64::from(world).min(SPREAD_MAX_MS))
}

/// Largest sizes of one data file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileLimits {
    /// Bytes of data. Each 64 KiB of them take 16 bytes of the header.
    pub(crate) data_bytes: u64,
    /// Bytes that names and shapes take in the header.
    pub(crate) entries_bytes: u64,
}

impl Default for FileLimits {
    /// Allows 16 MiB of header for checksums and 64 MiB for names: below the format's 100 MB.
    fn default() -> FileLimits {
        FileLimits { data_bytes: 64 << 30, entries_bytes: 64 << 20 }
    }
}

/// State that the saves and loads of one job share: the other ranks, staging memory, the last plan.
pub struct Engine {
    pub(crate) coord: Arc<dyn Ranks>,
    /// Number of agreements to stop that were begun.
    pub(crate) stoppings: AtomicU64,
    pub(crate) staging: Arc<Staging>,
    /// State that its stores share.
    pub(crate) storage: Arc<shardfast_store::Shared>,
    accelerators: Accelerators,
    pub(crate) background: Background,
    pub(crate) plans: std::sync::Mutex<plans::Plans>,
    /// The same for all saves; tests lower it.
    pub(crate) file_limits: FileLimits,
    /// Longest duration of a save; tests lower it.
    pub(crate) save_max: Duration,
    /// Function of the world's size that returns a rank's pause before its first request; tests have another.
    pub(crate) spread: fn(u32) -> Duration,
    pub(crate) calls: Arc<Calls>,
    /// Numbers of this job in the runs into which it saves.
    pub(crate) jobs: Jobs,
    /// Listener to its saves and loads.
    pub(crate) listener: OnceLock<Arc<dyn Listener>>,
    /// Timeout of calls without a deadline.
    timeout: Timeout,
}

impl Engine {
    /// Makes an engine whose operations are agreed through `coord`, with at most `staging_bytes` of staging memory.
    ///
    /// # Errors
    /// `Invalid` for a budget below [`STAGING_BYTES_MIN`](shardfast_transfer::staging::STAGING_BYTES_MIN).
    pub fn new(coord: Arc<dyn Ranks>, staging_bytes: u64) -> Result<Arc<Engine>> {
        Ok(Engine::with(coord, Staging::new(staging_bytes)?))
    }

    /// Makes an engine of one rank with the default staging budget.
    pub fn solo() -> Arc<Engine> {
        Engine::waiting(Timeout::default())
    }

    /// Makes an engine like [`solo`](Engine::solo), where calls without a deadline, such as copies, have this timeout.
    pub fn waiting(timeout: Timeout) -> Arc<Engine> {
        let staging = Staging::at_least(staging_bytes_default(1));
        let accelerators = Accelerators::new(&staging);
        Engine::on(shardfast_coord::solo(), staging, accelerators, timeout)
    }

    /// Makes an engine like [`waiting`](Engine::waiting) with at most `staging_bytes` of staging memory.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn waiting_with(timeout: Timeout, staging_bytes: u64) -> Result<Arc<Engine>> {
        let staging = Staging::new(staging_bytes)?;
        let accelerators = Accelerators::new(&staging);
        Ok(Engine::on(shardfast_coord::solo(), staging, accelerators, timeout))
    }

    pub(crate) fn with(coord: Arc<dyn Ranks>, staging: Arc<Staging>) -> Arc<Engine> {
        let accelerators = Accelerators::new(&staging);
        Engine::on(coord, staging, accelerators, Timeout::default())
    }

    /// Makes an engine of one rank whose accelerators are those of the driver in that library.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_driver(library: &str, staging_bytes: u64) -> Result<Arc<Engine>> {
        let staging = Staging::new(staging_bytes)?;
        let accelerators = Accelerators::of(library, &staging);
        Ok(Engine::on(shardfast_coord::solo(), staging, accelerators, Timeout::default()))
    }

    fn on(coord: Arc<dyn Ranks>, staging: Arc<Staging>, accelerators: Accelerators, timeout: Timeout) -> Arc<Engine> {
        Arc::new(Engine {
            coord,
            stoppings: AtomicU64::new(0),
            staging,
            storage: Arc::default(),
            accelerators,
            background: Background::default(),
            plans: std::sync::Mutex::default(),
            file_limits: FileLimits::default(),
            save_max: SAVE_MAX,
            spread,
            calls: Arc::default(),
            jobs: Jobs::default(),
            listener: OnceLock::new(),
            timeout,
        })
    }

    /// Returns an engine of the same ranks that has its own staging memory and remembers nothing.
    pub fn with_staging(&self, staging: Arc<Staging>) -> Arc<Engine> {
        Engine::with(Arc::clone(&self.coord), staging)
    }

    /// Returns the job of these ranks in the run at `url`, as rank 0 knows it; `None` if it has not begun there.
    pub fn job(&self, url: &str) -> Option<Job> {
        self.jobs.find(url)
    }

    /// Returns the staging memory that saves and loads share.
    pub fn staging(&self) -> &Arc<Staging> {
        &self.staging
    }

    /// Returns the devices whose memory is saved and loaded.
    pub fn accelerators(&self) -> &Accelerators {
        &self.accelerators
    }

    /// Returns what this rank writes of a state with these leaves, by the plan of its last save.
    ///
    /// # Errors
    /// `Invalid` if no save of such a state was planned yet.
    pub fn planned(&self, catalog: &Arc<Catalog>) -> Result<Arc<Vec<Write>>> {
        let planned = self.plans.lock().unwrap_or_else(PoisonError::into_inner).mine.clone();
        let planned = planned.filter(|planned| {
            Arc::ptr_eq(&planned.catalog, catalog) || planned.catalog.fingerprint() == catalog.fingerprint()
        });
        let Some(planned) = planned else {
            let message = "no save of this state was planned yet, so what this rank will write is not known";
            return Err(Error::invalid(message));
        };
        Ok(planned.writes)
    }

    /// Opens the store at a URL, for reading, whose operations `observed` observes.
    pub(crate) fn observed_store(
        &self,
        url: &str,
        timeout: &Timeout,
        observed: &Arc<Observed>,
    ) -> Result<Arc<dyn Store>> {
        let storage = self.storage.observed_by(Arc::clone(observed) as Arc<dyn shardfast_store::Observer>);
        retry(timeout, || Ok(shardfast_store::open_on(url, &storage)?))
    }

    /// Opens the store at a URL, for reading, with the state that this engine's stores share.
    pub fn store(&self, url: &str, timeout: &Timeout) -> Result<Arc<dyn Store>> {
        retry(timeout, || Ok(shardfast_store::open_on(url, &self.storage)?))
    }

    /// Returns the timeout of calls that have no deadline.
    pub fn timeout(&self) -> &Timeout {
        &self.timeout
    }

    /// Returns the name or address at which the other ranks can reach this process.
    pub fn host(&self) -> &str {
        self.coord.host()
    }

    /// Returns the first and the last port at which a process of this rank may listen; `None` if any.
    pub fn ports(&self) -> Option<(u16, u16)> {
        self.coord.ports().range()
    }

    /// Returns a key for that purpose, which only the ranks of this meeting can compute.
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        sha256(&[&self.meeting()[..], purpose.as_bytes()].concat())
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> u32 {
        self.coord.rank()
    }

    /// Returns the name of this meeting of ranks.
    pub(crate) fn meeting(&self) -> [u8; 16] {
        self.coord.meeting().0
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.coord.world()
    }

    /// Bytes of staging memory that saves and loads may use together.
    pub fn staging_bytes(&self) -> u64 {
        self.staging.budget_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_begin_at_different_moments() {
        assert_eq!(spread(1), Duration::ZERO);
        let spreads = |world| (0..64).map(|_| spread(world)).collect::<std::collections::BTreeSet<_>>();
        let (few, many) = (spreads(64), spreads(u32::MAX));
        assert!(few.len() > 20 && few.last() < Some(&Duration::from_millis(64)), "{few:?}");
        assert!(many.len() > 40 && many.last() < Some(&Duration::from_secs(1)), "{many:?}");
    }
}
