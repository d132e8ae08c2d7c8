//! Captures ahead of a save: part of the state is copied in the steps before the save, and rolled forward.
//!
//! A [`Window`] opens some steps before a save is due, on each rank alone. Between two steps of the optimizer its
//! thread copies *tiles* (runs of parameters' elements with their moments) into slots that it keeps. After each step
//! it copies the gradients of the held tiles, and applies them in the slots, as the training applied them. The save
//! then finds these bytes on the host: [`Captured::over`] puts them in place of the tensors, and the save reads the
//! tensors' own only to prove that the bits are the same ([`Evidence`](shardfast_transfer::provider::Evidence)).
//!
//! On a device all of these copies go on beside the training, in the device's own order ([`DeviceCopies`]).
//!
//! If anything fails on the way, the tile is released, and the save copies it as it copies everything else. So a
//! window can make a save neither wrong nor impossible, with one exception: a tensor that was changed by something else
//! than the optimizer's step. Then the bits differ, and the save fails.
//!
//! A rehearsal finds the [`Variant`] of an optimizer that rounds as this training does: a window of a few samples,
//! whose gradients are only kept, and to which [`Window::rehearse`] applies every candidate.

mod captured;
mod device_copies;
mod samples;
mod seen;
#[cfg(test)]
mod tests;
mod tile;
mod work;

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_engine::Engine;
use shardfast_engine::background;
use shardfast_format::{Catalog, LeafBody};
pub use shardfast_optim::{
    AdamScalars, Bias, Device, Dtype, Dtypes, Kind as OptimizerKind, Scalars, SgdScalars, Variant,
};
use shardfast_plan::Write;
use shardfast_transfer::cuda::{CopyStream, ForeignStream};
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::provider::Provider;
use shardfast_transfer::staging::Staging;

pub use captured::Captured;
pub use device_copies::{DeviceCopies, Pace};
use seen::Seen;
use tile::Tile;
use work::{Ask, Kept};

/// Units that are stepped alike: one optimizer, one arithmetic.
#[derive(Debug, Clone)]
pub struct Class {
    /// Kind of the optimizer.
    pub kind: OptimizerKind,
    /// Element types of its arrays.
    pub dtypes: Dtypes,
    /// Device on which it steps.
    pub device: Device,
    /// `true` if one kernel makes the whole step; `None` if unknown.
    pub is_fused: Option<bool>,
    /// Rounding of the steps; `None` for a rehearsal, which finds it.
    pub variant: Option<&'static Variant>,
}

/// A parameter and its moments on this rank.
pub struct Unit {
    /// The number of its class.
    pub class: usize,
    /// Elements of the tensor that the optimizer steps.
    pub numel: u64,
    /// The parameter, then its moments in the order of [`shardfast_optim::Tile`].
    pub arrays: Vec<Array>,
}

/// A tensor of a unit: all of one part of a leaf.
pub struct Array {
    /// Index of the leaf in the catalog.
    pub leaf: u32,
    /// Index of the part.
    pub part: u32,
    /// The part's bytes, in the training's memory.
    pub memory: Arc<dyn Provider>,
}

/// Gradient and scalars that an optimizer's step used for a unit.
pub struct Applied {
    /// The number of the unit.
    pub unit: usize,
    /// Element type of the gradient.
    pub dtype: Dtype,
    /// The unit's gradient. On a host it does not change before [`Window::stepped`] returns; a device's is kept until
    /// it was copied, and may change before that only where the training waits ([`DeviceCopies::new`]).
    pub gradient: Arc<dyn Provider>,
    /// Factor in `f32` by which the training multiplied the gradient before the optimizer used it; `None` if it did
    /// not.
    pub factor: Option<f32>,
    /// The scalars of this step.
    pub scalars: Scalars,
    /// Adam's bias corrections `1 - beta1^t` and `sqrt(1 - beta2^t)` as the device computes them, for implementations
    /// that let it.
    pub device_bias: Option<[f32; 2]>,
}

/// Values that a step used for a piece, beside the gradient.
#[derive(Clone, Copy, PartialEq)]
struct Used {
    dtype: Dtype,
    factor: Option<f32>,
    scalars: Scalars,
    device_bias: Option<[f32; 2]>,
}

impl Used {
    /// Returns the scalars as that implementation takes them.
    fn scalars_for(&self, variant: &Variant) -> Scalars {
        match (self.scalars, self.device_bias) {
            (Scalars::Adam(adam), Some([correction1, correction2_sqrt])) if variant.takes_bias_of_device() => {
                Scalars::Adam(AdamScalars { bias: Bias::Device { correction1, correction2_sqrt }, ..adam })
            }
            (scalars, _) => scalars,
        }
    }
}

/// Result of the rehearsal of a class.
#[derive(Debug, Clone, PartialEq)]
pub enum Rehearsed {
    /// The variant whose bits are the training's.
    By(&'static Variant),
    /// No variant has the training's bits, for this reason.
    ByNone(String),
    /// Not tried, for this reason.
    Unknown(String),
}

/// Figures of a window.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Steps over which the save is captured: those behind which copies went on, and the save's own.
    pub steps: u32,
    /// Bytes of the state that are held.
    pub held_bytes: u64,
    /// Bytes of the state that were held and let go.
    pub let_go_bytes: u64,
    /// Bytes of this rank that it could hold, and did not come to or has no memory for.
    pub left_bytes: u64,
    /// Bytes of gradients that were copied.
    pub gradient_bytes: u64,
    /// Milliseconds of copies of the state.
    pub copy_ms: f64,
    /// Milliseconds that steps of the optimizer waited for a tile under way.
    pub wait_ms: f64,
    /// Milliseconds in which gradients were copied, while the training waited; on a device, in which the copies were
    /// begun.
    pub gradient_ms: f64,
    /// The most bytes of a device's gradients that were kept at once until they were copied.
    pub gradients_kept_bytes: u64,
    /// Milliseconds of the replay.
    pub replay_ms: f64,
    /// Milliseconds in which the replayed bytes were summed for the proof.
    pub proof_ms: f64,
    /// Milliseconds in which a device summed its bytes for the proof.
    pub device_proof_ms: f64,
}

/// Some steps before a save.
pub struct Window {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Observations of a rehearsal on a device.
    seen: Mutex<Seen>,
}

/// State that a window's threads, its caller and the save share.
struct Shared {
    /// Time at which the window was opened.
    opened: Instant,
    catalog: Arc<Catalog>,
    classes: Vec<Class>,
    units: Vec<Unit>,
    tiles: Vec<Tile>,
    /// Number of tiles that are held.
    held: AtomicUsize,
    staging: Arc<Staging>,
    beside: Option<DeviceCopies>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// `true` while no optimizer steps: tensors may be copied.
    may_copy: bool,
    /// `true` while a tile is being copied.
    copies: bool,
    /// Copies to begin from a device.
    asked: VecDeque<Ask>,
    begins: bool,
    /// Gradients that are being copied.
    kept: VecDeque<Kept>,
    /// The first tile that was not copied yet.
    next: usize,
    /// Tiles with gradients that wait.
    to_replay: VecDeque<usize>,
    /// `true` once the save has begun: nothing is copied any more, and held tiles are settled.
    is_closed: bool,
    /// `true` once nothing of the window is needed any more.
    is_over: bool,
    /// `true` if one of the window's threads panicked.
    is_broken: bool,
    /// `true` if the training had other bits than those that were rolled forward.
    is_refuted: bool,
    /// First reason why a tile was released, or not held.
    reason: Option<String>,
    figures: Figures,
}

impl State {
    /// Returns whether the threads accept no more work.
    fn ends(&self) -> bool {
        self.is_closed || self.is_over || self.is_broken
    }
}

impl Window {
    /// Opens a window over this rank's writes of these units, as [`planned`](Engine::planned). Copies begin with
    /// [`Window::go_on`]. Tensors on a device are copied `beside` its work.
    ///
    /// # Errors
    /// `Invalid` if nothing can be held: then only one step is possible.
    pub fn open(
        engine: &Engine,
        catalog: &Arc<Catalog>,
        planned: &[Write],
        classes: Vec<Class>,
        units: Vec<Unit>,
        beside: Option<DeviceCopies>,
    ) -> Result<Window> {
        let runs = written(catalog, planned, &units);
        let tiles = tile::tiles(&classes, &units, &runs);
        if tiles.is_empty() {
            return Err(Error::invalid("this rank writes no parameter together with its moments"));
        }
        let shared = Arc::new(Shared::new(engine, catalog, classes, units, tiles, beside));
        let mut window = Window { shared, workers: Vec::new(), seen: Mutex::default() };
        if window.shared.beside.is_some() {
            window.spawn("shardfast-begins", Shared::begin_copies)?;
        }
        window.spawn("shardfast-ahead", Shared::work)?;
        Ok(window)
    }

    /// Opens a window over a few samples of each class, tails of tensors included, which are copied in this call and
    /// whose gradients are kept.
    pub fn rehearsal(
        engine: &Engine,
        catalog: &Arc<Catalog>,
        classes: Vec<Class>,
        units: Vec<Unit>,
        beside: Option<DeviceCopies>,
    ) -> Window {
        let tiles = tile::tiles(&classes, &units, &samples::of(&classes, &units));
        let shared = Shared::new(engine, catalog, classes, units, tiles, beside);
        for number in 0..shared.tiles.len() {
            if let Err(error) = shared.capture(number) {
                shared.lock().reason.get_or_insert(error.message);
            }
        }
        Window { shared: Arc::new(shared), workers: Vec::new(), seen: Mutex::default() }
    }

    fn spawn(&mut self, name: &str, work: fn(&Shared)) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let work = move || {
            background::take_less();
            if catch_unwind(AssertUnwindSafe(|| work(&shared))).is_err() {
                shared.break_off();
            }
        };
        let worker = std::thread::Builder::new().name(name.into()).spawn(work);
        let worker = worker.map_err(|error| Error::new(Kind::Exhausted, format!("a thread that copies: {error}")))?;
        self.workers.push(worker);
        Ok(())
    }

    /// Returns the stream that copies gradients from a device.
    pub fn gradients(&self) -> Option<&Arc<CopyStream>> {
        self.shared.beside.as_ref().map(DeviceCopies::gradients)
    }

    /// Returns the rate of copies from the device, as far as it is known.
    pub fn pace(&self) -> Option<Pace> {
        self.shared.beside.as_ref().and_then(DeviceCopies::pace)
    }

    /// Returns the number of a unit's elements; `None` for an unknown unit.
    pub fn numel(&self, unit: usize) -> Option<u64> {
        self.shared.units.get(unit).map(|unit| unit.numel)
    }

    /// Begins copies: no optimizer steps before the next call of [`Window::stepping`]. On a device they begin after the
    /// work of the stream `on`.
    ///
    /// # Errors
    /// `Unavailable` if the device is lost, `Invalid` while `on` captures a graph.
    pub fn go_on(&self, on: Option<ForeignStream>) -> Result<()> {
        self.seen().go_on();
        self.shared.lock().figures.steps += 1;
        let goes_on = |state: &State| !state.ends() && state.next < self.shared.tiles.len();
        if self.workers.is_empty() || !goes_on(&self.shared.lock()) {
            return Ok(());
        }
        if let (Some(beside), Some(on)) = (&self.shared.beside, on) {
            beside.begin(on)?;
            self.shared.ask(Ask::Tiles);
        } else {
            self.shared.lock().may_copy = true;
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    /// Announces a step of an optimizer. On a host this waits for the tile being copied, and no other is begun before
    /// [`Window::go_on`]. On a device, whose step comes after them, it waits until the copies of this time were begun.
    ///
    /// # Errors
    /// As [`Window::go_on`].
    pub fn stepping(&self, on: Option<ForeignStream>) -> Result<()> {
        self.pause();
        let (Some(beside), Some(on)) = (&self.shared.beside, on) else { return Ok(()) };
        beside.arrive(on)?;
        if self.workers.is_empty() {
            beside.follow(on)?;
            self.seen().look(&self.shared)?;
        }
        Ok(())
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the copy in progress on a host, and for the copy being begun on a device.
    fn pause(&self) {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        state.may_copy = false;
        while state.copies || state.begins || !state.asked.is_empty() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.figures.wait_ms += if self.shared.beside.is_none() { ms(begun.elapsed()) } else { 0.0 };
    }

    /// Announces that an optimizer has stepped with these gradients, which are copied for the held tiles.
    ///
    /// # Errors
    /// As [`Window::go_on`].
    pub fn stepped(&self, applied: Vec<Applied>, on: Option<ForeignStream>) -> Result<()> {
        let (Some(beside), Some(on)) = (&self.shared.beside, on) else {
            self.shared.follow(&applied)?;
            return Ok(());
        };
        beside.follow(on)?;
        let applied = self.shared.of_held(applied);
        if self.workers.is_empty() {
            self.shared.follow(&applied)?.fences.wait()?;
            self.seen().add(applied);
            return Ok(());
        }
        self.shared.ask(Ask::Gradients(applied));
        if beside.is_waited() {
            self.pause();
            beside.wait_for_gradients(on)?;
        }
        Ok(())
    }

    /// Releases all held tiles: the save copies them. Waits as [`Window::stepping`] does.
    pub fn release(&self, reason: &str) {
        self.pause();
        self.shared.let_go_from(0, reason);
    }

    /// Returns whether gradients stayed as they were until the next step, as far as a rehearsal on a device saw.
    pub fn are_gradients_left(&self) -> bool {
        !self.seen().are_overwritten()
    }

    /// Returns the first reason why a tile was released, or not held.
    pub fn reason(&self) -> Option<String> {
        self.shared.lock().reason.clone()
    }

    /// Returns whether a save found other bits than those that were rolled forward.
    pub fn is_refuted(&self) -> bool {
        self.shared.lock().is_refuted
    }

    /// Returns the figures so far.
    pub fn figures(&self) -> Figures {
        self.shared.figures()
    }

    /// Ends the copies, for the save of the state as it is now. Waits as [`Window::stepping`] does.
    pub fn close(&self) -> Captured {
        self.pause();
        let figures = self.shared.figures();
        let mut state = self.shared.lock();
        (state.is_closed, state.figures) = (true, figures);
        drop(state);
        self.shared.changed.notify_all();
        Captured::new(Arc::clone(&self.shared))
    }

    /// Applies every candidate to the samples of each class, and compares with the training's tensors now; on a device
    /// after the work of the stream `on`.
    ///
    /// # Errors
    /// As [`Window::go_on`].
    pub fn rehearse(&self, on: Option<ForeignStream>) -> Result<Vec<Rehearsed>> {
        self.pause();
        if let (Some(beside), Some(on)) = (&self.shared.beside, on) {
            beside.follow(on)?;
        }
        Ok(samples::rehearse(&self.shared))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        // What a save took is settled first: the thread does that after this, and ends.
        if !state.is_closed {
            state.is_over = true;
        }
        self.shared.changed.notify_all();
        let is_over = state.is_over;
        drop(state);
        for worker in self.workers.drain(..).filter(|_| is_over) {
            // It panics only by a defect, after which what it held is refused.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn new(
        engine: &Engine,
        catalog: &Arc<Catalog>,
        classes: Vec<Class>,
        units: Vec<Unit>,
        tiles: Vec<Tile>,
        beside: Option<DeviceCopies>,
    ) -> Shared {
        let (catalog, staging) = (Arc::clone(catalog), Arc::clone(engine.staging()));
        let figures = Figures { steps: 1, ..Figures::default() };
        let state = Mutex::new(State { figures, ..State::default() });
        let (held, changed) = (AtomicUsize::new(0), Condvar::new());
        let opened = Instant::now();
        Shared { opened, catalog, classes, units, tiles, held, staging, beside, state, changed }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the window because a thread has ended by a defect: nothing is held, and nothing waits for it.
    fn break_off(&self) {
        self.let_go_from(0, "a thread of the capture ahead has ended by a defect");
        let mut state = self.lock();
        (state.is_broken, state.copies, state.begins) = (true, false, false);
        let asked = std::mem::take(&mut state.asked);
        self.changed.notify_all();
        drop(state);
        drop(asked);
    }

    fn release(&self, number: usize, reason: &str) {
        let bytes = self.tiles[number].release();
        if bytes > 0 {
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
        let mut state = self.lock();
        state.figures.let_go_bytes += bytes;
        if bytes > 0 {
            state.reason.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// Lets go of these tiles and all behind them, and copies none of these any more.
    fn let_go_from(&self, first: usize, reason: &str) {
        (first..self.tiles.len()).for_each(|number| self.release(number, reason));
        let mut state = self.lock();
        state.next = self.tiles.len();
        state.reason.get_or_insert_with(|| reason.to_owned());
    }

    fn figures(&self) -> Figures {
        let known = self.lock();
        let (is_closed, mut figures) = (known.is_closed, known.figures.clone());
        drop(known);
        if let Some(beside) = &self.beside {
            [figures.copy_ms, figures.wait_ms] = beside.copy_and_wait_ms();
        }
        if is_closed {
            return figures;
        }
        let all: u64 = self.tiles.iter().map(Tile::bytes).sum();
        let held = self.tiles.iter().filter(|tile| tile.is_held()).map(Tile::bytes).sum();
        let left_bytes = all.saturating_sub(held + figures.let_go_bytes);
        Figures { held_bytes: held, left_bytes, ..figures }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the runs of each unit's elements that this rank writes in all of its arrays, as planned.
fn written(catalog: &Catalog, planned: &[Write], units: &[Unit]) -> Vec<(usize, Range<u64>)> {
    let mut of = vec![Vec::new(); catalog.leaves.len()];
    for write in planned {
        of[write.leaf as usize].push(*write);
    }
    let mut runs = Vec::new();
    for (number, unit) in units.iter().enumerate() {
        let of_array = |array: &Array| {
            let LeafBody::Tensor { parts, .. } = &catalog.leaves[array.leaf as usize].body else { return Vec::new() };
            let part = &parts[array.part as usize];
            let own = of[array.leaf as usize].iter().filter(|write| write.part == array.part);
            let mut runs: Vec<Range<u64>> = own
                .filter_map(|write| {
                    let first = write.skipped(part);
                    Some(first..first + write.region(part)?.numel())
                })
                .collect();
            runs.sort_unstable_by_key(|run| run.start);
            runs
        };
        let common = unit.arrays.iter().map(of_array).reduce(|common, runs| overlaps(&common, &runs));
        runs.extend(common.into_iter().flatten().map(|run| (number, run)));
    }
    runs
}

/// Returns the common ranges; each list is ascending and disjoint.
fn overlaps(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut out = Vec::new();
    for a in one {
        for b in other {
            let both = a.start.max(b.start)..a.end.min(b.end);
            if !both.is_empty() {
                out.push(both);
            }
        }
    }
    out
}
