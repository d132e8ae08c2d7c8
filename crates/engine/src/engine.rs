//! The job's engine: what all of its saves and loads share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shardfast_coord::Coord as Ranks;
use shardfast_store::Store;

use crate::background::Background;
use crate::calls::Calls;
use crate::cuda;
use crate::error::{Result, retry, spread};
use crate::memory::staging_bytes_default;
use crate::plans;
use crate::staging::{PageLock, Staging};
use crate::timeout::Timeout;

/// A save that has lasted so long fails instead of committing: a sweep may take what is twice as old.
pub const SAVE_MAX: Duration = Duration::from_secs(3 * 3600);

/// The most that one data file holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileLimits {
    /// Bytes of data. Each 64 KiB of them take 16 bytes of the header.
    pub(crate) data_bytes: u64,
    /// Bytes that names and shapes take in the header.
    pub(crate) entries_bytes: u64,
}

impl Default for FileLimits {
    /// 16 MiB of header for checksums and 64 MiB for names: below the format's 100 MB.
    fn default() -> FileLimits {
        FileLimits { data_bytes: 64 << 30, entries_bytes: 64 << 20 }
    }
}

/// What the saves and loads of one job share: the other ranks, staging memory, the last plan.
pub struct Engine {
    pub(crate) coord: Arc<dyn Ranks>,
    pub(crate) staging: Arc<Staging>,
    /// What its stores share.
    pub(crate) storage: Arc<shardfast_store::Shared>,
    accelerators: cuda::Devices,
    is_page_locked: AtomicBool,
    pub(crate) background: Background,
    pub(crate) plans: std::sync::Mutex<plans::Plans>,
    /// The same for all saves; tests lower it.
    pub(crate) file_limits: FileLimits,
    /// How long a save may last; tests lower it.
    pub(crate) save_max: Duration,
    /// The pause of a rank of so many before its first request; tests have another.
    pub(crate) spread: fn(u32) -> Duration,
    pub(crate) calls: Arc<Calls>,
    /// Timeout of what has no deadline.
    timeout: Timeout,
}

impl Engine {
    /// An engine whose operations are agreed through `coord`, in at most `staging_bytes` of staging memory.
    ///
    /// # Errors
    /// `Invalid` for a budget below [`STAGING_BYTES_MIN`](crate::staging::STAGING_BYTES_MIN).
    pub fn new(coord: Arc<dyn Ranks>, staging_bytes: u64) -> Result<Arc<Engine>> {
        Ok(Engine::with(coord, Staging::new(staging_bytes)?))
    }

    /// An engine of one rank with the default staging budget.
    pub fn solo() -> Arc<Engine> {
        Engine::waiting(Timeout::default())
    }

    /// [`solo`](Engine::solo), where calls without a deadline, such as [`copy`](crate::copy()), have this timeout.
    pub fn waiting(timeout: Timeout) -> Arc<Engine> {
        let staging = Staging::at_least(staging_bytes_default(1));
        Engine::on(shardfast_coord::solo(), staging, cuda::Devices::default(), timeout)
    }

    pub(crate) fn with(coord: Arc<dyn Ranks>, staging: Arc<Staging>) -> Arc<Engine> {
        Engine::on(coord, staging, cuda::Devices::default(), Timeout::default())
    }

    /// An engine of one rank whose devices are those of the CUDA driver in that library.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_driver(library: &str, staging_bytes: u64) -> Result<Arc<Engine>> {
        let accelerators = cuda::Devices::of(library);
        Ok(Engine::on(shardfast_coord::solo(), Staging::new(staging_bytes)?, accelerators, Timeout::default()))
    }

    fn on(coord: Arc<dyn Ranks>, staging: Arc<Staging>, accelerators: cuda::Devices, timeout: Timeout) -> Arc<Engine> {
        Arc::new(Engine {
            coord,
            staging,
            storage: Arc::default(),
            accelerators,
            is_page_locked: AtomicBool::new(false),
            background: Background::default(),
            plans: std::sync::Mutex::default(),
            file_limits: FileLimits::default(),
            save_max: SAVE_MAX,
            spread,
            calls: Arc::default(),
            timeout,
        })
    }

    /// The store at a URL, for reading, with what this engine's stores share.
    pub(crate) fn store(&self, url: &str, timeout: &Timeout) -> Result<Arc<dyn Store>> {
        retry(timeout, || Ok(shardfast_store::open_on(url, &self.storage)?))
    }

    /// The timeout of calls that have no deadline.
    pub fn timeout(&self) -> &Timeout {
        &self.timeout
    }

    /// This rank's number.
    pub fn rank(&self) -> u32 {
        self.coord.rank()
    }

    /// The name of this meeting of ranks.
    pub(crate) fn meeting(&self) -> [u8; 16] {
        self.coord.meeting().0
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.coord.world()
    }

    /// Bytes of staging memory that saves and loads may use together.
    pub fn staging_bytes(&self) -> u64 {
        self.staging.budget_bytes()
    }

    /// A stream for the copies of one save or load from or to the device `cuda:<ordinal>`: they begin after all work
    /// that `stream` has until now. The first call for any device has the staging memory page-locked, in the
    /// background.
    ///
    /// # Errors
    /// As [`Devices::device`](cuda::Devices::device) and [`Device::copies_after`](cuda::Device::copies_after).
    ///
    /// # Safety
    /// `stream` must be 0 or a stream of this device that has not been destroyed.
    #[allow(unsafe_code)] // the one way in for foreign streams
    pub unsafe fn copies_after(&self, ordinal: u32, stream: u64) -> Result<Arc<cuda::CopyStream>> {
        // SAFETY: the caller's promise.
        self.copies_behind(ordinal, unsafe { cuda::ForeignStream::new(stream) })
    }

    /// [`Engine::copies_after`] of a stream that lives.
    ///
    /// # Errors
    /// As [`Engine::copies_after`].
    pub(crate) fn copies_behind(&self, ordinal: u32, stream: cuda::ForeignStream) -> Result<Arc<cuda::CopyStream>> {
        let device = self.accelerators.device(ordinal)?;
        self.page_lock(&device, 0);
        device.copies_behind(stream)
    }

    /// Makes staging memory for `bytes` bytes of the device `cuda:<ordinal>`, and page-locks it: in the background,
    /// since that takes longer than to copy them.
    ///
    /// # Errors
    /// As [`Devices::device`](cuda::Devices::device).
    pub fn reserve(&self, ordinal: u32, bytes: u64) -> Result<()> {
        self.page_lock(&self.accelerators.device(ordinal)?, bytes);
        Ok(())
    }

    /// Has staging memory page-locked from now on, and makes `bytes` bytes of it, in the background.
    #[allow(unsafe_code)]
    fn page_lock(&self, device: &Arc<cuda::Device>, bytes: u64) {
        let is_first = !self.is_page_locked.swap(true, Ordering::Relaxed);
        if !is_first && bytes == 0 {
            return;
        }
        let (staging, device) = (Arc::clone(&self.staging), Arc::clone(device));
        let page_lock: Arc<PageLock> = Arc::new(move |memory| {
            // SAFETY: the arena unmaps a slab after its locks are dropped.
            let lock = unsafe { device.page_lock(memory) }?;
            Ok(Box::new(lock) as Box<dyn Send>)
        });
        let work = move || {
            staging.page_lock(page_lock);
            staging.reserve(bytes);
        };
        // A save or load that stages meanwhile waits for it. If no thread can be made, copies are slower.
        let _ = std::thread::Builder::new().name("shardfast-page-lock".into()).spawn(work);
    }
}
