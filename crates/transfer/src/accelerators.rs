//! Devices of one engine, and its staging memory, which is page-locked for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::{CopyStream, Device, Devices, ForeignStream};
use crate::error::Result;
use crate::staging::{PageLock, Staging};

/// Devices whose memory is copied through one staging memory.
pub struct Accelerators {
    devices: Devices,
    staging: Arc<Staging>,
    is_page_locked: AtomicBool,
}

impl Accelerators {
    /// Returns the devices of this machine's driver, which is loaded when the first of them is asked for.
    pub fn new(staging: &Arc<Staging>) -> Accelerators {
        Accelerators::on(Devices::default(), staging)
    }

    /// Returns the devices of the CUDA driver in the library at that path.
    pub fn of(library: &str, staging: &Arc<Staging>) -> Accelerators {
        Accelerators::on(Devices::of(library), staging)
    }

    fn on(devices: Devices, staging: &Arc<Staging>) -> Accelerators {
        Accelerators { devices, staging: Arc::clone(staging), is_page_locked: AtomicBool::new(false) }
    }

    /// Returns a stream for the copies of one save or load from or to the device `cuda:<ordinal>`: they begin after all
    /// work that `stream` has until now. The first call for any device has the staging memory page-locked, in the
    /// background.
    ///
    /// # Errors
    /// As [`Devices::device`] and [`Device::copies_after`].
    ///
    /// # Safety
    /// `stream` must be 0 or a stream of this device that has not been destroyed.
    #[allow(unsafe_code)] // the one way in for foreign streams
    pub unsafe fn copies_after(&self, ordinal: u32, stream: u64) -> Result<Arc<CopyStream>> {
        // SAFETY: the caller's promise.
        self.copies_behind(ordinal, unsafe { ForeignStream::new(stream) })
    }

    /// Returns a stream like [`Accelerators::copies_after`], for a `stream` that lives.
    ///
    /// # Errors
    /// As [`Accelerators::copies_after`].
    pub fn copies_behind(&self, ordinal: u32, stream: ForeignStream) -> Result<Arc<CopyStream>> {
        let device = self.devices.device(ordinal)?;
        self.page_lock(&device, 0);
        device.copies_behind(stream)
    }

    /// Makes staging memory for `bytes` bytes of the device `cuda:<ordinal>`, and page-locks it: in the background,
    /// since that takes longer than to copy them.
    ///
    /// # Errors
    /// As [`Devices::device`].
    pub fn reserve(&self, ordinal: u32, bytes: u64) -> Result<()> {
        self.page_lock(&self.devices.device(ordinal)?, bytes);
        Ok(())
    }

    /// Has staging memory page-locked from now on, and makes `bytes` bytes of it, in the background.
    #[allow(unsafe_code)]
    fn page_lock(&self, device: &Arc<Device>, bytes: u64) {
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
