//! Runs a window's threads: copies, replays and checksums.
//!
//! On a host one thread does it all. On a device another one begins the copies, so that neither the training nor a
//! replay waits for that.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use shardfast_format::crc64;
use shardfast_transfer::digest::digest;
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::provider::Fences;

use super::tile::{Tile, Waiting};
use super::{Applied, Shared, Used, ms};

/// Purposes for which a device's copies are begun, in this order.
pub(super) enum Ask {
    /// Gradients of the held tiles.
    Gradients(Vec<Applied>),
    /// Tiles, until the next step.
    Tiles,
}

/// Gradients that are kept until they were copied.
pub(super) struct Kept {
    fences: Fences,
    _gradients: Vec<Applied>,
    bytes: u64,
}

/// Copies of gradients that were begun.
#[derive(Default)]
pub(super) struct Followed {
    pub(super) fences: Fences,
    bytes: u64,
}

/// Next job of the window's thread.
enum Job {
    Copy(usize),
    GiveBack(Kept),
    Replay(usize),
    Settle,
    End,
}

impl Shared {
    /// Asks for copies from the device.
    pub(super) fn ask(&self, ask: Ask) {
        let mut state = self.lock();
        if !state.ends() {
            state.asked.push_back(ask);
            self.changed.notify_all();
        }
    }

    /// Copies from a host, replays, and settles the tiles that the save takes.
    pub(super) fn work(&self) {
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
                        Ok(false) => state.next = self.tiles.len(),
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
                Job::GiveBack(mut kept) => {
                    // A failure shows where the copies are used.
                    let _ = kept.fences.wait();
                    drop(kept);
                }
                Job::Settle => {
                    let begun = Instant::now();
                    // What the device sums of its own memory is compared with it.
                    let sum = if self.beside.is_some() { digest } else { crc64 };
                    for (number, tile) in self.tiles.iter().enumerate() {
                        if self.lock().is_over {
                            return;
                        }
                        if let Err(error) = tile.settle(sum) {
                            self.release(number, &error.message);
                        }
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
            if let Some(kept) = state.kept.pop_front() {
                return Job::GiveBack(kept);
            }
            if state.is_over {
                return Job::End;
            }
            if state.may_copy && !state.is_closed && state.next < self.tiles.len() {
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

    /// Begins a device's copies, as they are asked for.
    pub(super) fn begin_copies(&self) {
        // Of all optimizers, since tiles were begun.
        let mut gradient_bytes = 0;
        loop {
            let mut state = self.lock();
            state.begins = false;
            self.changed.notify_all();
            let ask = loop {
                if state.ends() {
                    let asked = std::mem::take(&mut state.asked);
                    drop(state);
                    drop(asked);
                    return;
                }
                match state.asked.pop_front() {
                    Some(ask) => break ask,
                    None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            state.begins = true;
            drop(state);
            let begun = match ask {
                Ask::Gradients(applied) => self.keep(applied).map(|bytes| gradient_bytes += bytes),
                Ask::Tiles => self.begin_tiles(std::mem::take(&mut gradient_bytes)),
            };
            if let Err(error) = begun {
                self.let_go_from(0, &error.message);
            }
        }
    }

    /// Returns those of these gradients of which a tile is held: a device's memory is kept for no others.
    pub(super) fn of_held(&self, mut applied: Vec<Applied>) -> Vec<Applied> {
        let mut is_held = vec![false; self.units.len()];
        let held = self.tiles.iter().filter(|tile| tile.is_held());
        held.flat_map(|tile| &tile.pieces).for_each(|piece| is_held[piece.unit] = true);
        applied.retain(|one| is_held[one.unit]);
        applied
    }

    /// Begins to copy gradients, and keeps them until they were copied; how many bytes are copied.
    fn keep(&self, gradients: Vec<Applied>) -> Result<u64> {
        let begun = Instant::now();
        let Followed { fences, bytes: copied } = self.follow(&gradients)?;
        let bytes = gradients.iter().map(|one| one.gradient.bytes()).sum();
        let mut state = self.lock();
        state.figures.gradient_ms += ms(begun.elapsed());
        state.kept.push_back(Kept { fences, _gradients: gradients, bytes });
        let all = state.kept.iter().map(|kept| kept.bytes).sum();
        state.figures.gradients_kept_bytes = state.figures.gradients_kept_bytes.max(all);
        self.changed.notify_all();
        Ok(copied)
    }

    /// Begins to copy as many tiles as are copied until the next step.
    fn begin_tiles(&self, gradient_bytes: u64) -> Result<()> {
        let Some(beside) = &self.beside else { return Ok(()) };
        let bytes = beside.bytes(gradient_bytes)?;
        let mut begun = 0;
        loop {
            let number = self.lock().next;
            let Some(tile) = self.tiles.get(number).filter(|tile| begun + tile.bytes() <= bytes) else { break };
            match self.capture(number)? {
                true => begun += tile.bytes(),
                // The budget is used up: what is not held is left to the save.
                false => self.lock().next = self.tiles.len(),
            }
            let mut state = self.lock();
            state.next = self.tiles.len().min(state.next + 1);
        }
        beside.copied(begun)
    }

    /// Copies a tile, or begins to; whether there was memory for it.
    pub(super) fn capture(&self, number: usize) -> Result<bool> {
        let tile = &self.tiles[number];
        // Each tile that is held needs a slot for its next gradients.
        let held = self.held.load(Ordering::Relaxed);
        let Some(mut slots) = self.staging.try_keep(tile.arrays, held + 1) else { return Ok(false) };
        let mut fences = Fences::default();
        for piece in &tile.pieces {
            let unit = &self.units[piece.unit];
            for (array, slot) in slots.iter_mut().enumerate() {
                let (from, to) = (piece.of_unit(tile.width(array)), piece.of_tile(tile.width(array)));
                unit.arrays[array].memory.fill(from.start, &mut slot[to], &mut fences)?;
            }
        }
        fences.mark()?;
        self.held.fetch_add(1, Ordering::Relaxed);
        tile.hold(slots, fences);
        Ok(true)
    }

    /// Copies the gradients of the held tiles, or begins to.
    pub(super) fn follow(&self, applied: &[Applied]) -> Result<Followed> {
        let begun = Instant::now();
        let mut of = vec![None; self.units.len()];
        for one in applied {
            of[one.unit] = Some(one);
        }
        // Declared before the fences, which are waited for before the slots go back.
        let mut waiting = Vec::new();
        let mut all = Followed::default();
        for number in 0..self.tiles.len() {
            if let Some((gradients, bytes)) = self.gradients_of(number, &of, &mut all.fences) {
                waiting.push((number, gradients));
                all.bytes += bytes;
            }
        }
        all.fences.mark()?;
        let mut to_replay = Vec::new();
        for (number, mut gradients) in waiting {
            gradients.fences = all.fences.clone();
            let waits = self.tiles[number].wait_for(gradients);
            if waits && self.tiles[number].variant.is_some() {
                to_replay.push(number);
            }
        }
        let mut state = self.lock();
        state.to_replay.extend(to_replay);
        state.figures.gradient_bytes += all.bytes;
        if self.beside.is_none() {
            state.figures.gradient_ms += ms(begun.elapsed());
        }
        self.changed.notify_all();
        Ok(all)
    }

    /// Returns the gradients of a held tile, and how many bytes are copied. They are there once `fences` was waited
    /// for.
    fn gradients_of(&self, number: usize, applied: &[Option<&Applied>], fences: &mut Fences) -> Option<(Waiting, u64)> {
        let tile = &self.tiles[number];
        if !tile.is_held() || tile.pieces.iter().all(|piece| applied[piece.unit].is_none()) {
            return None;
        }
        let mut slot = self.slot_for_gradients(number)?;
        let mut steps: Vec<Option<Used>> = Vec::with_capacity(tile.pieces.len());
        let mut bytes = 0;
        for piece in &tile.pieces {
            let Some(one) = applied[piece.unit] else {
                steps.push(None);
                continue;
            };
            let Applied { dtype, factor, scalars, device_bias, .. } = *one;
            let used = Used { dtype, factor, scalars, device_bias };
            let (from, to) = (piece.of_unit(dtype.bytes()), piece.of_tile(dtype.bytes()));
            let length = self.units[piece.unit].numel * dtype.bytes() as u64;
            // Of one tile most parameters step alike.
            let fits = if steps.contains(&Some(used)) { Ok(()) } else { tile.expect_fits(&used) };
            let filled = fits.and_then(|()| match slot.get_mut(to.clone()) {
                Some(out) if one.gradient.bytes() == length => one.gradient.fill(from.start, out, fences),
                _ => Err(Error::invalid("a gradient has another size than its parameter")),
            });
            if let Err(error) = filled {
                // The slot goes back after what was begun for it has ended.
                let _ = fences.wait();
                self.release(number, &error.message);
                return None;
            }
            bytes += to.len() as u64;
            steps.push(Some(used));
        }
        Some((Waiting { fences: Fences::default(), slot, steps }, bytes))
    }

    /// Returns a slot for a tile's gradients. If there is none, the newest tiles are released, this one last.
    fn slot_for_gradients(&self, number: usize) -> Option<shardfast_transfer::staging::Slot> {
        loop {
            if let Some(slot) = self.staging.try_keep(1, 0).and_then(|mut slots| slots.pop()) {
                return Some(slot);
            }
            let newest = self.tiles.iter().rposition(Tile::is_held)?;
            self.release(newest, "there was no memory for gradients");
            if newest <= number {
                return None;
            }
        }
    }

    fn replay(&self, number: usize) -> Result<()> {
        self.tiles[number].replay(&self.units).inspect_err(|error| self.release(number, &error.message))
    }
}
