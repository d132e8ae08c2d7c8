//! Copies for a window on a device, beside the training's work, in the order in which the device does both.
//!
//! The host is ahead of the device, within a window by one step at most: when the program calls, the device may still
//! be at the step before. So the device orders the copies. Gradients are copied after the step that used them, tiles
//! after these, and the next step of the optimizer comes after the tiles that were begun. Their number is decided by
//! measurements of earlier steps: as many as are copied by the time at which the device gets to the next step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardfast_engine::Engine;
use shardfast_transfer::cuda::{CopyStream, ForeignStream, Moment};
use shardfast_transfer::digest::{Digester, Digests};
use shardfast_transfer::error::Result;
use shardfast_transfer::staging::Staging;

/// Bytes of the state that are begun in a step while nothing was measured.
const FIRST_BYTES: u64 = 256 << 20;

/// Fewer bytes than this say little about the rate of copies.
const MEASURED_BYTES_MIN: u64 = 16 << 20;

/// The part of the time from step to step that is used: steps differ in length.
const SHARE: f64 = 0.95;

/// Rate of a device's copies, and the time that they have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Bytes of the state that are copied in a millisecond, while the training goes on.
    pub bytes_per_ms: f64,
    /// Milliseconds between two steps of the optimizer in which it does not step.
    pub room_ms: f64,
}

impl Pace {
    /// Returns the bytes of the state that are copied until the next step, if `gradient_bytes` of gradients are copied
    /// before them.
    pub(super) fn bytes(self, gradient_bytes: u64) -> u64 {
        (SHARE * self.bytes_per_ms * self.room_ms - gradient_bytes as f64).max(0.0) as u64
    }
}

/// The copies of a window on one device.
pub struct DeviceCopies {
    tiles: Arc<CopyStream>,
    gradients: Arc<CopyStream>,
    /// `true` if the training overwrites its gradients before the next step, and must wait for their copies.
    is_waited: bool,
    times: Mutex<Times>,
}

#[derive(Default)]
struct Times {
    pace: Option<Pace>,
    rounds: Vec<Round>,
}

/// The time between two steps of the optimizer.
struct Round {
    /// Moment on the training's stream at which the time begins.
    begun: Arc<Moment>,
    /// The first copy of a tile begins, the last one has ended.
    copies: Option<[Moment; 2]>,
    bytes: u64,
    /// The training's stream is about to step the optimizer.
    arrived: Option<Moment>,
}

impl Round {
    /// Milliseconds in which tiles were copied, and until the next step; `None` before the device is there.
    fn copied_in(&self) -> Option<[f64; 2]> {
        let [from, to] = self.copies.as_ref()?;
        Some([to.ms_since(from)?, self.arrived.as_ref()?.ms_since(&self.begun)?])
    }

    /// Milliseconds by which the next step came later.
    fn late_ms(&self) -> Option<f64> {
        let ([_, to], [_, room_ms]) = (self.copies.as_ref()?, self.copied_in()?);
        Some((to.ms_since(&self.begun)? - room_ms).max(0.0))
    }
}

impl DeviceCopies {
    /// Makes copies from `cuda:<ordinal>`, whose training's stream is `on`. `pace` is the measurement of an earlier
    /// window. The first call for a device may wait for its work.
    ///
    /// # Errors
    /// As [`Accelerators::copies_after`](shardfast_transfer::Accelerators::copies_after) and
    /// [`Device::prepare_digests`](shardfast_transfer::cuda::Device::prepare_digests).
    pub fn new(
        engine: &Engine,
        ordinal: u32,
        on: ForeignStream,
        is_waited: bool,
        pace: Option<Pace>,
    ) -> Result<DeviceCopies> {
        let devices = engine.accelerators();
        let (tiles, gradients) = (devices.copies_behind(ordinal, on)?, devices.copies_behind(ordinal, on)?);
        tiles.device().prepare_digests()?;
        Ok(DeviceCopies { tiles, gradients, is_waited, times: Mutex::new(Times { pace, rounds: Vec::new() }) })
    }

    /// Returns the stream that copies parameters and moments.
    pub fn tiles(&self) -> &Arc<CopyStream> {
        &self.tiles
    }

    /// Returns the stream that copies gradients.
    pub fn gradients(&self) -> &Arc<CopyStream> {
        &self.gradients
    }

    /// Returns whether the training waits for the copies of gradients.
    pub(super) fn is_waited(&self) -> bool {
        self.is_waited
    }

    fn lock(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders copies after the work that the training has submitted until now.
    pub(super) fn follow(&self, on: ForeignStream) -> Result<()> {
        self.tiles.follow(on)?;
        self.gradients.follow(on)
    }

    /// Orders the training's next work after the copies of gradients that were begun.
    pub(super) fn wait_for_gradients(&self, on: ForeignStream) -> Result<()> {
        self.gradients.precede(on)
    }

    /// Begins the time for copies after the work that the training has submitted until now.
    pub(super) fn begin(&self, on: ForeignStream) -> Result<()> {
        let begun = Arc::new(self.tiles.device().moment(on)?);
        self.lock().rounds.push(Round { begun, copies: None, bytes: 0, arrived: None });
        Ok(())
    }

    /// Waits until the device is where [`DeviceCopies::begin`] was called; returns how many bytes are to be copied
    /// then, behind the gradients.
    pub(super) fn bytes(&self, gradient_bytes: u64) -> Result<u64> {
        let Some(begun) = self.lock().rounds.last().map(|round| Arc::clone(&round.begun)) else { return Ok(0) };
        begun.wait()?;
        self.tiles.follow(self.gradients.as_foreign())?;
        let from = self.tiles.device().moment(self.tiles.as_foreign())?;
        let to = self.tiles.device().moment(self.tiles.as_foreign())?;
        let mut times = self.lock();
        if let Some(round) = times.rounds.last_mut() {
            round.copies = Some([from, to]);
        }
        times.measure();
        Ok(times.pace.map_or(FIRST_BYTES, |pace| pace.bytes(gradient_bytes)))
    }

    /// Records that all copies of this time were begun, of `bytes` bytes.
    pub(super) fn copied(&self, bytes: u64) -> Result<()> {
        let to = self.tiles.device().moment(self.tiles.as_foreign())?;
        let mut times = self.lock();
        if let Some(Round { copies: Some([_, end]), bytes: all, .. }) = times.rounds.last_mut() {
            (*end, *all) = (to, bytes);
        }
        Ok(())
    }

    /// Orders the optimizer's next step after the copies begun.
    pub(super) fn arrive(&self, on: ForeignStream) -> Result<()> {
        let mut times = self.lock();
        if let Some(round) = times.rounds.last_mut().filter(|round| round.arrived.is_none()) {
            round.arrived = Some(self.tiles.device().moment(on)?);
        }
        drop(times);
        self.tiles.precede(on)
    }

    /// Returns the measurements so far.
    pub(super) fn pace(&self) -> Option<Pace> {
        let mut times = self.lock();
        times.measure();
        times.pace
    }

    /// Milliseconds in which tiles were copied, and in which the training waited for these copies.
    pub(super) fn copy_and_wait_ms(&self) -> [f64; 2] {
        let times = self.lock();
        let copied = times.rounds.iter().filter_map(Round::copied_in).map(|[copied, _]| copied).sum();
        [copied, times.rounds.iter().filter_map(Round::late_ms).sum()]
    }
}

/// Has a device sum runs of its memory, addresses and lengths in bytes, after the work submitted to `copies`; returns
/// `None` if there is no memory for that.
///
/// # Errors
/// As [`Digester::digests`].
pub(super) fn digests(
    copies: Arc<dyn Digester>,
    runs: &[(usize, usize)],
    staging: &Arc<Staging>,
) -> Result<Option<Arc<dyn Digests>>> {
    let Some(slot) = staging.try_keep(1, 0).and_then(|mut slots| slots.pop()) else { return Ok(None) };
    // SAFETY: the runs are parts of units, whose memory is kept allocated by the providers that the window and the save
    // hold; both are held until the digests were waited for.
    #[allow(unsafe_code)]
    unsafe { copies.digests(runs, slot) }.map(Some)
}

impl Times {
    /// Takes over the measurement of the newest round that has ended.
    fn measure(&mut self) {
        let Some((round, [copy_ms, room_ms])) =
            self.rounds.iter().rev().find_map(|round| Some((round, round.copied_in()?)))
        else {
            return;
        };
        let known = self.pace.map(|pace| pace.bytes_per_ms);
        let measured = (round.bytes >= MEASURED_BYTES_MIN && copy_ms > 0.0).then(|| round.bytes as f64 / copy_ms);
        if let Some(bytes_per_ms) = measured.or(known) {
            self.pace = Some(Pace { bytes_per_ms, room_ms });
        }
    }
}
