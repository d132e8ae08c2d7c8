//! One operation of all ranks: numbered by the order of the calls, every exchange typed, every failure the same on all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use shardfast_coord::{Coord, Failure};

use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::planning::Planned;
use crate::staging::{PageLock, Staging};

/// Marks what rank 0 decided for all, as opposed to what befell it as a rank.
const DECISION: &str = "=";

/// What the saves and loads of one job share: the other ranks, staging memory, the last plan.
pub struct Engine {
    pub(crate) coord: Arc<dyn Coord>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) devices: Arc<shardfast_store::Devices>,
    accelerators: cuda::Devices,
    is_page_locked: AtomicBool,
    pub(crate) planned: std::sync::Mutex<Option<Planned>>,
    operations: AtomicU64,
}

impl Engine {
    /// An engine whose operations are agreed through `coord`, in at most `staging_bytes` of staging memory.
    ///
    /// # Errors
    /// `Invalid` for a budget below [`STAGING_BYTES_MIN`](crate::staging::STAGING_BYTES_MIN).
    pub fn new(coord: Arc<dyn Coord>, staging_bytes: u64) -> Result<Arc<Engine>> {
        Ok(Engine::with(coord, Staging::new(staging_bytes)?))
    }

    /// An engine of one rank with the default staging budget.
    pub fn solo() -> Arc<Engine> {
        Engine::with(shardfast_coord::solo(), Staging::at_least(staging_bytes_default(1)))
    }

    pub(crate) fn with(coord: Arc<dyn Coord>, staging: Arc<Staging>) -> Arc<Engine> {
        Engine::on(coord, staging, cuda::Devices::default())
    }

    /// An engine of one rank whose devices are those of the CUDA driver in that library.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_driver(library: &str, staging_bytes: u64) -> Result<Arc<Engine>> {
        let accelerators = cuda::Devices::of(library);
        Ok(Engine::on(shardfast_coord::solo(), Staging::new(staging_bytes)?, accelerators))
    }

    fn on(coord: Arc<dyn Coord>, staging: Arc<Staging>, accelerators: cuda::Devices) -> Arc<Engine> {
        Arc::new(Engine {
            coord,
            staging,
            devices: Arc::default(),
            accelerators,
            is_page_locked: AtomicBool::new(false),
            planned: std::sync::Mutex::default(),
            operations: AtomicU64::new(0),
        })
    }

    /// This rank's number.
    pub fn rank(&self) -> u32 {
        self.coord.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.coord.world()
    }

    /// Bytes of staging memory that saves and loads may use together.
    pub fn staging_bytes(&self) -> u64 {
        self.staging.budget_bytes()
    }

    /// A stream for the copies of one save or load from or to the device `cuda:<ordinal>`: they begin behind everything
    /// that `stream` was given until now. The first call for any device has the staging memory page-locked, in the
    /// background.
    ///
    /// # Errors
    /// As [`Devices::device`](cuda::Devices::device) and [`Device::copies_after`](cuda::Device::copies_after).
    ///
    /// # Safety
    /// `stream` must be 0 or a stream of this device that has not been destroyed.
    #[allow(unsafe_code)] // the one way in for foreign streams
    pub unsafe fn copies_after(&self, ordinal: u32, stream: u64) -> Result<Arc<cuda::CopyStream>> {
        let device = self.accelerators.device(ordinal)?;
        if !self.is_page_locked.swap(true, Ordering::Relaxed) {
            let (staging, device) = (Arc::clone(&self.staging), Arc::clone(&device));
            let page_lock: Arc<PageLock> = Arc::new(move |memory| {
                // SAFETY: the arena unmaps a slab after its locks are dropped.
                let lock = unsafe { device.page_lock(memory) }?;
                Ok(Box::new(lock) as Box<dyn Send>)
            });
            // Whoever stages meanwhile waits for it. Without a thread the memory stays as it is, and copies are slower.
            let _ = std::thread::Builder::new()
                .name("shardfast-page-lock".into())
                .spawn(move || staging.page_lock(page_lock));
        }
        // SAFETY: the caller's promise.
        unsafe { device.copies_after(stream) }
    }

    /// Begins the next operation. Ranks must begin the same operations in the same order.
    pub(crate) fn begin(self: &Arc<Engine>, what: String, deadline: Duration) -> Operation {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        Operation { engine: Arc::clone(self), number, what, deadline }
    }

    /// Takes part in the next operation with a failure: it fails on every rank with this rank's reason.
    pub fn refuse(self: &Arc<Engine>, error: Error, deadline: Duration) -> Error {
        let operation = self.begin(String::new(), deadline);
        match operation.agree::<(), ()>("open", Err(error.clone()), |_| Err(error.clone())) {
            Ok(()) => error,
            Err(failed) => failed,
        }
    }
}

/// A quarter of the machine's memory, shared by the ranks on it; at least 64 MiB.
pub fn staging_bytes_default(local_world: u32) -> u64 {
    let memory = rustix::system::sysinfo();
    let total = (memory.totalram as u64).saturating_mul(u64::from(memory.mem_unit));
    (total / 4 / u64::from(local_world.max(1))).max(64 << 20)
}

/// One operation that every rank takes part in.
pub(crate) struct Operation {
    pub(crate) engine: Arc<Engine>,
    number: u64,
    what: String,
    deadline: Duration,
}

impl Operation {
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// What it is and its number: no other operation of these ranks is called so.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.number, self.what)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.engine.rank() == 0
    }

    /// Gathers every rank's message at rank 0, which decides once; each rank gets its own answer, or all the same
    /// error: that of the decision, or those that ranks contributed instead of a message.
    pub(crate) fn agree<M, A>(
        &self,
        stage: &str,
        contribution: Result<M>,
        decide: impl FnMut(Vec<M>) -> Result<Vec<A>>,
    ) -> Result<A>
    where
        M: Serialize + DeserializeOwned,
        A: Serialize + DeserializeOwned,
    {
        self.try_agree(stage, contribution, decide).map_err(|failed| failed.error)
    }

    /// [`Operation::agree`] that tells a decision to fail from ignorance of the decision.
    pub(crate) fn try_agree<M, A>(
        &self,
        stage: &str,
        contribution: Result<M>,
        mut decide: impl FnMut(Vec<M>) -> Result<Vec<A>>,
    ) -> std::result::Result<A, Failed>
    where
        M: Serialize + DeserializeOwned,
        A: Serialize + DeserializeOwned,
    {
        let topic = format!("{} {stage}", self.number);
        let contribution =
            contribution.and_then(|message| encode(&(&self.what, message))).map_err(|error| error.to_wire());
        let answer = self.engine.coord.agree(
            &topic,
            contribution,
            &mut |messages| {
                self.decide(messages, &mut decide).map_err(|error| format!("{DECISION}{}", error.to_wire()))
            },
            self.deadline,
        );
        match answer {
            Ok(bytes) => match decode(&bytes) {
                Ok((answer, _)) => Ok(answer),
                Err(error) => Err(Failed { error, decided: true }),
            },
            Err(error) => Err(self.failed(error)),
        }
    }

    fn decide<M: DeserializeOwned, A: Serialize>(
        &self,
        messages: Vec<Vec<u8>>,
        decide: &mut impl FnMut(Vec<M>) -> Result<Vec<A>>,
    ) -> Result<Vec<Vec<u8>>> {
        let mut contributions = Vec::with_capacity(messages.len());
        for (rank, bytes) in messages.iter().enumerate() {
            let within = |error: Error| error.within(format!("rank {rank}"));
            // What follows can be read only if it belongs to the same operation.
            let (what, message) = decode::<String>(bytes).map_err(within)?;
            if what != self.what {
                return Err(Error::invalid(format!(
                    "ranks must call the same operations in the same order: rank 0 calls `{}`, rank {rank} calls \
                     `{what}`",
                    self.what
                )));
            }
            contributions.push(decode(message).map_err(within)?.0);
        }
        decide(contributions)?.iter().map(encode).collect()
    }

    fn failed(&self, error: shardfast_coord::Error) -> Failed {
        use shardfast_coord::Error as Coord;
        match error {
            Coord::Failed { failures, .. } => Failed { error: self.merged(&failures), decided: true },
            other => {
                let error = Error::new(Kind::Unavailable, format!("{}: {other}", self.what));
                Failed { error, decided: false }
            }
        }
    }

    /// The failures of several ranks as one, each with its rank where there are several.
    fn merged(&self, failures: &[Failure]) -> Error {
        let mut kind = None;
        let mut lines = Vec::with_capacity(failures.len());
        for Failure { rank, reason } in failures {
            let decision = reason.strip_prefix(DECISION);
            // What the coordinator itself says of a rank has no kind.
            let message = match Error::from_wire(decision.unwrap_or(reason)) {
                Some(error) => {
                    kind.get_or_insert(error.kind);
                    error.message
                }
                None => reason.clone(),
            };
            let unranked = decision.is_some() || self.engine.world() == 1;
            lines.push(if unranked { message } else { format!("rank {rank}: {message}") });
        }
        Error::new(kind.unwrap_or(Kind::Internal), lines.join("\n"))
    }
}

/// Why an agreement failed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether every rank knows that it failed; otherwise this rank does not know what the others heard.
    pub(crate) decided: bool,
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(|error| Error::internal(format!("a message cannot be encoded: {error}")))
}

/// A message, and the bytes behind it.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|error| Error::internal(format!("a message cannot be decoded: {error}")))
}
