//! Captures ahead of a save: part of the state is copied in the steps before the save, and rolled forward.
//!
//! A [`Window`] opens some steps before a save is due, on each rank alone. Between two steps of the optimizer its
//! thread copies *blocks* (runs of parameters' elements with their moments) into slots that it keeps. After each step
//! the gradients of what is held are copied, and applied to it in the slots, as the training applied them. The save
//! then finds these bytes on the host: [`Captured::over`] puts them in place of the tensors, and the save reads the
//! tensors' own only to prove that the bits are the same ([`Evidence`](crate::provider::Evidence)).
//!
//! Whatever goes wrong on the way, the block is let go, and the save copies it as it copies everything else. So a
//! window can make a save neither wrong nor impossible, but for one case: a tensor that was changed by something else
//! than the optimizer's step. Then the bits differ, and the save fails.
//!
//! Which [`Variant`] of an optimizer rounds as this training does is found by rehearsal: a window of a few samples,
//! whose gradients are only kept, and to which [`Window::rehearse`] applies every candidate.

mod block;
mod captured;
mod samples;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_format::{Catalog, LeafBody};
pub use shardfast_optim::{
    AdagradScalars, AdamScalars, Bias, Device, Dtype, Dtypes, Kind as OptimizerKind, LionScalars, Scalars, SgdScalars,
    Variant,
};

use crate::background;
use crate::engine::Engine;
use crate::error::{Error, Kind, Result};
use crate::provider::{Fences, Provider};
use crate::staging::Staging;

use block::{Block, Waiting};
pub use captured::Captured;

/// What steps alike: one optimizer, one arithmetic.
#[derive(Debug, Clone)]
pub struct Class {
    /// The optimizer.
    pub kind: OptimizerKind,
    /// How its arrays are stored.
    pub dtypes: Dtypes,
    /// Where it steps.
    pub device: Device,
    /// How it rounds; `None` for a rehearsal, which finds it.
    pub variant: Option<&'static Variant>,
}

/// A parameter and its moments on this rank.
pub struct Unit {
    /// The number of its class.
    pub class: usize,
    /// Elements of the tensor that the optimizer steps.
    pub numel: u64,
    /// The parameter, then its moments in the order of [`shardfast_optim::Block`].
    pub arrays: Vec<Array>,
}

/// A tensor of a unit: all of one part of a leaf.
pub struct Array {
    /// Index of the leaf in the catalog.
    pub leaf: u32,
    /// Index of the part.
    pub part: u32,
    /// Its bytes, where the training has them.
    pub memory: Arc<dyn Provider>,
}

/// What an optimizer's step used for a unit that took part in it.
pub struct Applied {
    /// The number of the unit.
    pub unit: usize,
    /// How the gradient is stored.
    pub dtype: Dtype,
    /// The unit's gradient, which does not change before [`Window::stepped`] returns.
    pub gradient: Arc<dyn Provider>,
    /// The scalars of this step.
    pub scalars: Scalars,
}

/// What the rehearsal of a class found.
#[derive(Debug, Clone, PartialEq)]
pub enum Rehearsed {
    /// The variant whose bits are the training's.
    By(&'static Variant),
    /// There is none; why.
    ByNone(String),
    /// It could not be tried; why.
    Unknown(String),
}

/// What a window did.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
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
    /// Milliseconds that steps of the optimizer waited for a block under way.
    pub wait_ms: f64,
    /// Milliseconds in which gradients were copied, while the training waited.
    pub gradient_ms: f64,
    /// Milliseconds of the replay.
    pub replay_ms: f64,
    /// Milliseconds in which the replayed bytes were summed for the proof.
    pub proof_ms: f64,
}

/// Some steps before a save.
pub struct Window {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

/// What a window's thread, its caller and the save share.
struct Shared {
    catalog: Arc<Catalog>,
    classes: Vec<Class>,
    units: Vec<Unit>,
    blocks: Vec<Block>,
    staging: Arc<Staging>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whether no optimizer steps: tensors may be copied.
    may_copy: bool,
    /// Whether a block is being copied.
    copies: bool,
    /// The first block that was not copied yet.
    next: usize,
    /// Blocks with gradients that wait.
    to_replay: VecDeque<usize>,
    /// Whether the save has begun: nothing is copied any more, and what is held is settled.
    is_closed: bool,
    /// Whether nothing of it is needed any more.
    is_over: bool,
    /// Whether the training had other bits than those that were rolled forward.
    is_refuted: bool,
    /// Why something was let go, the first time.
    reason: Option<String>,
    figures: Figures,
}

impl Window {
    /// Opens a window over what this rank will write of these units, as the plan of its last save tells. Copies begin
    /// at once.
    ///
    /// # Errors
    /// `Invalid` if no save of such a state was planned yet, or nothing can be held: one step is all there is then.
    pub fn open(engine: &Engine, catalog: &Arc<Catalog>, classes: Vec<Class>, units: Vec<Unit>) -> Result<Window> {
        let runs = written(engine, catalog, &units)?;
        let blocks = block::blocks(&classes, &units, &runs);
        if blocks.is_empty() {
            return Err(Error::invalid("this rank writes no parameter together with its moments"));
        }
        let shared = Arc::new(Shared::new(engine, catalog, classes, units, blocks));
        shared.lock().may_copy = true;
        let work = {
            let shared = Arc::clone(&shared);
            move || {
                background::take_less();
                shared.work();
            }
        };
        let worker = std::thread::Builder::new().name("shardfast-ahead".into()).spawn(work);
        let worker = worker.map_err(|error| Error::new(Kind::Exhausted, format!("a thread that copies: {error}")))?;
        Ok(Window { shared, worker: Some(worker) })
    }

    /// Opens a window over a few samples of each class, tails of tensors included, which are copied in this call and
    /// whose gradients are kept.
    pub fn rehearsal(engine: &Engine, catalog: &Arc<Catalog>, classes: Vec<Class>, units: Vec<Unit>) -> Window {
        let blocks = block::blocks(&classes, &units, &samples::of(&classes, &units));
        let shared = Shared::new(engine, catalog, classes, units, blocks);
        for number in 0..shared.blocks.len() {
            if let Err(error) = shared.capture(number) {
                shared.lock().reason.get_or_insert(error.message);
            }
        }
        Window { shared: Arc::new(shared), worker: None }
    }

    /// Elements of a unit.
    pub fn numel(&self, unit: usize) -> Option<u64> {
        self.shared.units.get(unit).map(|unit| unit.numel)
    }

    /// An optimizer is about to step: waits for the block under way. No other is begun before [`Window::stepped`].
    pub fn stepping(&self) {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        state.may_copy = false;
        while state.copies {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.figures.wait_ms += ms(begun.elapsed());
    }

    /// An optimizer has stepped, and used these gradients: they are copied for what is held. Then copies go on.
    pub fn stepped(&self, applied: &[Applied]) {
        let begun = Instant::now();
        let mut of = vec![None; self.shared.units.len()];
        for one in applied {
            of[one.unit] = Some(one);
        }
        let mut bytes = 0;
        for number in 0..self.shared.blocks.len() {
            bytes += self.shared.follow(number, &of);
        }
        let mut state = self.shared.lock();
        state.figures.gradient_bytes += bytes;
        state.figures.gradient_ms += ms(begun.elapsed());
        state.may_copy = !state.is_closed;
        self.shared.changed.notify_all();
    }

    /// Lets go of everything that is held: the save copies it. Waits for the block under way.
    pub fn let_go(&self, reason: &str) {
        self.stepping();
        self.shared.let_go_from(0, reason);
    }

    /// Why something was let go, or not held; the first reason.
    pub fn reason(&self) -> Option<String> {
        self.shared.lock().reason.clone()
    }

    /// Whether a save found other bits than those that were rolled forward.
    pub fn is_refuted(&self) -> bool {
        self.shared.lock().is_refuted
    }

    /// What it did so far.
    pub fn figures(&self) -> Figures {
        self.shared.figures()
    }

    /// Ends the copies, for the save of the state as it is now. Waits for the block under way.
    pub fn close(&self) -> Captured {
        self.stepping();
        let figures = self.shared.figures();
        let mut state = self.shared.lock();
        (state.is_closed, state.figures) = (true, figures);
        drop(state);
        self.shared.changed.notify_all();
        Captured::new(Arc::clone(&self.shared))
    }

    /// Applies every candidate to the samples of each class, and compares with what the training has now.
    pub fn rehearse(&self) -> Vec<Rehearsed> {
        self.stepping();
        samples::rehearse(&self.shared)
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
        drop(state);
        if let Some(worker) = self.worker.take().filter(|_| self.shared.lock().is_over) {
            // It panics only by a defect, after which what it held is refused.
            let _ = worker.join();
        }
    }
}

/// What the window's thread does next.
enum Job {
    Copy(usize),
    Replay(usize),
    Settle,
    End,
}

impl Shared {
    fn new(
        engine: &Engine,
        catalog: &Arc<Catalog>,
        classes: Vec<Class>,
        units: Vec<Unit>,
        blocks: Vec<Block>,
    ) -> Shared {
        let (catalog, staging) = (Arc::clone(catalog), Arc::clone(&engine.staging));
        Shared { catalog, classes, units, blocks, staging, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            match self.next() {
                Job::End => return,
                Job::Copy(number) => {
                    let begun = Instant::now();
                    let copied = self.capture(number);
                    let mut state = self.lock();
                    state.copies = false;
                    state.figures.copy_ms += ms(begun.elapsed());
                    match copied {
                        Ok(true) => {}
                        // The budget is used up: what is not held is left to the save.
                        Ok(false) => state.next = self.blocks.len(),
                        Err(error) => _ = state.reason.get_or_insert(error.message),
                    }
                    self.changed.notify_all();
                }
                Job::Replay(number) => {
                    let begun = Instant::now();
                    if let Err(error) = self.replay(number) {
                        self.lock().reason.get_or_insert(error.message);
                    }
                    self.lock().figures.replay_ms += ms(begun.elapsed());
                }
                Job::Settle => {
                    let begun = Instant::now();
                    for block in &self.blocks {
                        if self.lock().is_over {
                            return;
                        }
                        block.settle();
                    }
                    self.lock().figures.proof_ms += ms(begun.elapsed());
                    return;
                }
            }
        }
    }

    /// Copies come first, since they have only the time between two steps.
    fn next(&self) -> Job {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return Job::End;
            }
            if state.may_copy && !state.is_closed && state.next < self.blocks.len() {
                state.copies = true;
                state.next += 1;
                return Job::Copy(state.next - 1);
            }
            if let Some(number) = state.to_replay.pop_front() {
                return Job::Replay(number);
            }
            if state.is_closed {
                return Job::Settle;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies a block; whether there was memory for it.
    fn capture(&self, number: usize) -> Result<bool> {
        let block = &self.blocks[number];
        let held = self.blocks.iter().filter(|block| block.is_held()).count();
        // Each block that is held needs a slot for its next gradients.
        let Some(mut slots) = self.staging.try_keep(block.arrays, held + 1) else { return Ok(false) };
        for piece in &block.pieces {
            let unit = &self.units[piece.unit];
            for (array, slot) in slots.iter_mut().enumerate() {
                let (from, to) = (piece.of_unit(block.width(array)), piece.of_block(block.width(array)));
                let mut fences = Fences::default();
                unit.arrays[array].memory.fill(from.start, &mut slot[to], &mut fences)?;
                fences.wait()?;
            }
        }
        block.hold(slots);
        Ok(true)
    }

    /// Copies the gradients of a block that is held; how many bytes.
    fn follow(&self, number: usize, applied: &[Option<&Applied>]) -> u64 {
        let block = &self.blocks[number];
        if !block.is_held() || block.pieces.iter().all(|piece| applied[piece.unit].is_none()) {
            return 0;
        }
        let Some(mut slot) = self.slot_for_gradients(number) else { return 0 };
        let mut steps = Vec::with_capacity(block.pieces.len());
        let mut bytes = 0;
        for piece in &block.pieces {
            let Some(one) = applied[piece.unit] else {
                steps.push(None);
                continue;
            };
            let (from, to) = (piece.of_unit(one.dtype.bytes()), piece.of_block(one.dtype.bytes()));
            let length = self.units[piece.unit].numel * one.dtype.bytes() as u64;
            let filled = match slot.get_mut(to.clone()) {
                Some(out) if one.gradient.bytes() == length => {
                    let mut fences = Fences::default();
                    one.gradient.fill(from.start, out, &mut fences).and_then(|()| fences.wait())
                }
                _ => Err(Error::invalid("a gradient has another size than its parameter")),
            };
            if let Err(error) = filled {
                self.let_go(number, &error.message);
                return bytes;
            }
            bytes += to.len() as u64;
            steps.push(Some((one.dtype, one.scalars)));
        }
        let waits = block.wait_for(Waiting { slot, steps });
        if waits && block.variant.is_some() {
            self.lock().to_replay.push_back(number);
        }
        bytes
    }

    /// A slot for a block's gradients. Where there is none, the newest blocks are let go, this one at last.
    fn slot_for_gradients(&self, number: usize) -> Option<crate::staging::Slot> {
        loop {
            if let Some(slot) = self.staging.try_keep(1, 0).and_then(|mut slots| slots.pop()) {
                return Some(slot);
            }
            let newest = self.blocks.iter().rposition(Block::is_held)?;
            self.let_go(newest, "there was no memory for gradients");
            if newest <= number {
                return None;
            }
        }
    }

    fn replay(&self, number: usize) -> Result<()> {
        self.blocks[number].replay(&self.units).inspect_err(|error| self.let_go(number, &error.message))
    }

    fn let_go(&self, number: usize, reason: &str) {
        let bytes = self.blocks[number].let_go();
        let mut state = self.lock();
        state.figures.let_go_bytes += bytes;
        if bytes > 0 {
            state.reason.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// Lets go of these blocks and all behind them, and copies none of these any more.
    fn let_go_from(&self, first: usize, reason: &str) {
        (first..self.blocks.len()).for_each(|number| self.let_go(number, reason));
        let mut state = self.lock();
        state.next = self.blocks.len();
        state.reason.get_or_insert_with(|| reason.to_owned());
    }

    fn figures(&self) -> Figures {
        let known = self.lock();
        if known.is_closed {
            return known.figures.clone();
        }
        drop(known);
        let all: u64 = self.blocks.iter().map(Block::bytes).sum();
        let held = self.blocks.iter().filter(|block| block.is_held()).map(Block::bytes).sum();
        let figures = self.lock().figures.clone();
        let left_bytes = all.saturating_sub(held + figures.let_go_bytes);
        Figures { held_bytes: held, left_bytes, ..figures }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The runs of each unit's elements that this rank writes in all of its arrays, as the last plan says.
fn written(engine: &Engine, catalog: &Arc<Catalog>, units: &[Unit]) -> Result<Vec<(usize, Range<u64>)>> {
    let planned = engine.plans.lock().unwrap_or_else(PoisonError::into_inner).mine.clone();
    let planned = planned.filter(|planned| {
        Arc::ptr_eq(&planned.catalog, catalog) || planned.catalog.fingerprint() == catalog.fingerprint()
    });
    let Some(planned) = planned else {
        return Err(Error::invalid("no save of this state was planned yet, so what this rank will write is not known"));
    };
    let mut of = vec![Vec::new(); catalog.leaves.len()];
    for write in planned.writes.iter() {
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
    Ok(runs)
}

/// What lies in both; each is ascending and disjoint.
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
