//! Tiles: runs of elements of several parameters with their moments, in slots of staging memory.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use shardfast_optim::{Dtypes, Gradient, Instructions, Step, Variant, replay};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::provider::Fences;
use shardfast_transfer::staging::{SLOT_BYTES, Slot};

use super::{Applied, Class, Unit, Used};

/// A tile: as many elements of one class as a slot holds. Each array of a tile has a slot; the gradients of each step
/// have another one. An element has the same place in all of them.
pub(super) struct Tile {
    pub(super) pieces: Vec<Piece>,
    /// The parameter and its moments.
    pub(super) arrays: usize,
    dtypes: Dtypes,
    pub(super) variant: Option<&'static Variant>,
    /// Memory, locked while gradients are applied to it. Empty if the tile is not held.
    slots: Mutex<Slots>,
    /// State, never locked for long: the training waits for it.
    state: Mutex<State>,
    settled: Condvar,
}

/// A run of one unit's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) unit: usize,
    /// Range of elements in the unit.
    pub(super) elements: Range<u64>,
    /// First element in the tile.
    at: usize,
}

/// Memory of a tile.
#[derive(Default)]
pub(super) struct Slots {
    /// Fences of the copies in flight. Declared before the slots, which are returned after the copies have ended.
    fences: Fences,
    pub(super) arrays: Vec<Slot>,
}

#[derive(Default)]
struct State {
    is_held: bool,
    /// Gradients that were not applied yet, the oldest first.
    waiting: Vec<Waiting>,
    /// Checksums by piece and array, once nothing changes any more.
    sums: Option<Vec<Vec<u64>>>,
    /// `true` if the window has ended with this tile not held.
    is_gone: bool,
}

/// The gradients of one step.
pub(super) struct Waiting {
    /// Fences of the copies in flight. Declared before the slot, which is returned after the copies have ended.
    pub(super) fences: Fences,
    pub(super) slot: Slot,
    /// Scalars and factors of the step for each piece that took part.
    pub(super) steps: Vec<Option<Used>>,
}

/// Cuts runs of units into tiles, each of one class.
pub(super) fn tiles(classes: &[Class], units: &[Unit], runs: &[(usize, Range<u64>)]) -> Vec<Tile> {
    let mut out = Vec::new();
    for (number, class) in classes.iter().enumerate() {
        // Tiles of one class may have different moments: SGD makes its buffers with the first step.
        let mut arrays: Vec<usize> = units.iter().map(|unit| unit.arrays.len()).collect();
        arrays.sort_unstable();
        arrays.dedup();
        for arrays in arrays {
            let of = |unit: usize| units[unit].class == number && units[unit].arrays.len() == arrays;
            let own = runs.iter().filter(|(unit, run)| of(*unit) && !run.is_empty());
            out.extend(cut(class, arrays, own));
        }
    }
    out
}

fn cut<'a>(class: &Class, arrays: usize, runs: impl Iterator<Item = &'a (usize, Range<u64>)>) -> Vec<Tile> {
    let elements_max = SLOT_BYTES / class.dtypes.parameter.bytes().max(class.dtypes.moments.bytes());
    let mut out: Vec<Vec<Piece>> = Vec::new();
    let mut used = elements_max;
    for (unit, run) in runs {
        let mut start = run.start;
        while start < run.end {
            if used == elements_max {
                out.push(Vec::new());
                used = 0;
            }
            let count = (run.end - start).min((elements_max - used) as u64);
            let piece = Piece { unit: *unit, elements: start..start + count, at: used };
            out.last_mut().into_iter().for_each(|pieces| pieces.push(piece.clone()));
            start += count;
            used += count as usize;
        }
    }
    let tile = |pieces| Tile {
        pieces,
        arrays,
        dtypes: class.dtypes,
        variant: class.variant,
        slots: Mutex::default(),
        state: Mutex::default(),
        settled: Condvar::new(),
    };
    out.into_iter().map(tile).collect()
}

impl Piece {
    /// Returns its bytes in the unit's array, of elements of `width` bytes.
    pub(super) fn of_unit(&self, width: usize) -> Range<u64> {
        self.elements.start * width as u64..self.elements.end * width as u64
    }

    /// Returns its bytes in the tile's slot.
    pub(super) fn of_tile(&self, width: usize) -> Range<usize> {
        let count = (self.elements.end - self.elements.start) as usize;
        self.at * width..(self.at + count) * width
    }
}

impl Tile {
    /// Bytes of an element of that array.
    pub(super) fn width(&self, array: usize) -> usize {
        if array == 0 { self.dtypes.parameter.bytes() } else { self.dtypes.moments.bytes() }
    }

    /// Bytes of the state.
    pub(super) fn bytes(&self) -> u64 {
        let elements: u64 = self.pieces.iter().map(|piece| piece.elements.end - piece.elements.start).sum();
        (0..self.arrays).map(|array| elements * self.width(array) as u64).sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the slots, once all copies have arrived.
    ///
    /// # Errors
    /// `Unavailable` if the device was lost meanwhile.
    fn arrived(&self) -> Result<MutexGuard<'_, Slots>> {
        let mut slots = self.lock_slots();
        slots.fences.wait()?;
        Ok(slots)
    }

    pub(super) fn is_held(&self) -> bool {
        self.lock().is_held
    }

    /// Takes slots whose bytes are there when `fences` was waited for.
    pub(super) fn hold(&self, arrays: Vec<Slot>, fences: Fences) {
        *self.lock_slots() = Slots { fences, arrays };
        self.lock().is_held = true;
    }

    /// Gives the memory back, at once or when the replay under way has ended; how many bytes of the state it held.
    pub(super) fn release(&self) -> u64 {
        let mut state = self.lock();
        let was_held = std::mem::take(&mut state.is_held);
        state.waiting.clear();
        state.is_gone = true;
        self.settled.notify_all();
        drop(state);
        if let Ok(mut slots) = self.slots.try_lock() {
            *slots = Slots::default();
        }
        if was_held { self.bytes() } else { 0 }
    }

    /// Checks that a step can be replayed, by a replay of no elements: after the save it would be too late.
    ///
    /// # Errors
    /// `Invalid` if it cannot.
    pub(super) fn expect_fits(&self, used: &Used) -> Result<()> {
        let Some(variant) = self.variant else { return Ok(()) };
        let gradient = Gradient { dtype: used.dtype, values: &[], factor: used.factor };
        let step = Step::Taken { gradient, scalars: used.scalars_for(variant) };
        let mut moments: Vec<&mut [u8]> = (1..self.arrays).map(|_| &mut [][..]).collect();
        let (parameter, moments) = (&mut [][..], &mut moments[..]);
        let mut tile = shardfast_optim::Tile { offset: 0, numel: 0, dtypes: self.dtypes, parameter, moments };
        replay(Instructions::best(), variant, &mut tile, &[step]).map_err(|error| Error::invalid(error.to_string()))
    }

    /// Adds gradients; whether none waited before.
    pub(super) fn wait_for(&self, gradients: Waiting) -> bool {
        let mut state = self.lock();
        if !state.is_held {
            return false;
        }
        state.waiting.push(gradients);
        state.waiting.len() == 1
    }

    /// Applies all gradients that wait, in one pass.
    ///
    /// # Errors
    /// `Invalid` if they do not fit; `Unavailable` if the device was lost.
    pub(super) fn replay(&self, units: &[Unit]) -> Result<()> {
        let Some(variant) = self.variant else { return Ok(()) };
        let mut slots = self.lock_slots();
        let mut waiting = std::mem::take(&mut self.lock().waiting);
        let applied = match slots.arrays.is_empty() {
            true => Ok(()),
            false => slots.fences.wait().and_then(|()| self.apply(variant, units, &mut slots.arrays, &mut waiting)),
        };
        drop(slots);
        // What was let go meanwhile could not be given back then.
        if !self.is_held() {
            *self.lock_slots() = Slots::default();
        }
        applied
    }

    /// Applies gradients to these slots.
    fn apply(&self, variant: &Variant, units: &[Unit], slots: &mut [Slot], waiting: &mut [Waiting]) -> Result<()> {
        waiting.iter_mut().try_for_each(|of_step| of_step.fences.wait())?;
        for (number, piece) in self.pieces.iter().enumerate() {
            let steps: Vec<Step<'_>> = waiting
                .iter()
                .map(|of_step| match of_step.steps[number] {
                    None => Step::Skipped,
                    Some(used) => {
                        let values = &of_step.slot[piece.of_tile(used.dtype.bytes())];
                        let gradient = Gradient { dtype: used.dtype, values, factor: used.factor };
                        Step::Taken { gradient, scalars: used.scalars_for(variant) }
                    }
                })
                .collect();
            let mut arrays = slots.iter_mut().enumerate();
            let mut own = arrays.by_ref().map(|(array, slot)| &mut slot[piece.of_tile(self.width(array))]);
            let Some(parameter) = own.next() else { continue };
            let mut moments: Vec<&mut [u8]> = own.collect();
            let mut tile = shardfast_optim::Tile {
                offset: piece.elements.start,
                numel: units[piece.unit].numel,
                dtypes: self.dtypes,
                parameter,
                moments: &mut moments,
            };
            replay(Instructions::best(), variant, &mut tile, &steps)
                .map_err(|error| Error::invalid(error.to_string()))?;
        }
        Ok(())
    }

    /// Returns the arrays of each piece after that variant has applied all gradients, which stay waiting; `None` if the
    /// tile is not held.
    ///
    /// # Errors
    /// As [`Tile::replay`].
    pub(super) fn tried(&self, variant: &Variant, units: &[Unit]) -> Result<Option<Vec<Vec<Vec<u8>>>>> {
        let (mut slots, mut state) = (self.arrived()?, self.lock());
        let slots = &mut slots.arrays;
        if slots.is_empty() {
            return Ok(None);
        }
        let before: Vec<Vec<u8>> = slots.iter().map(|slot| slot.to_vec()).collect();
        let applied = self.apply(variant, units, slots, &mut state.waiting);
        let after = |slots: &[Slot]| {
            let of = |piece: &Piece| {
                let array = |(array, slot): (usize, &Slot)| slot[piece.of_tile(self.width(array))].to_vec();
                slots.iter().enumerate().map(array).collect()
            };
            self.pieces.iter().map(of).collect()
        };
        let found = after(slots);
        slots.iter_mut().zip(&before).for_each(|(slot, before)| slot.copy_from_slice(before));
        applied.map(|()| Some(found))
    }

    /// Returns whether the gradients of the last step are the copied ones, as far as they are among `live`.
    ///
    /// # Errors
    /// `Unavailable` if the device was lost.
    pub(super) fn has_gradients(&self, live: &[Applied]) -> Result<bool> {
        let state = self.lock();
        let Some(last) = state.waiting.last() else { return Ok(true) };
        for (piece, step) in self.pieces.iter().zip(&last.steps) {
            let (Some(Used { dtype, .. }), Some(one)) = (step, live.iter().find(|one| one.unit == piece.unit)) else {
                continue;
            };
            let copied = &last.slot[piece.of_tile(dtype.bytes())];
            let (mut now, mut fences) = (vec![0; copied.len()], Fences::default());
            one.gradient.fill(piece.of_unit(dtype.bytes()).start, &mut now, &mut fences)?;
            fences.wait()?;
            if now != copied {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the number of steps whose gradients wait.
    pub(super) fn steps(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Sums the tile's bytes, which do not change any more.
    ///
    /// # Errors
    /// `Unavailable` if the device was lost.
    pub(super) fn settle(&self, sum: fn(&[u8]) -> u64) -> Result<()> {
        let slots = self.arrived()?;
        let of = |piece: &Piece| {
            let sum = |(array, slot): (usize, &Slot)| sum(&slot[piece.of_tile(self.width(array))]);
            slots.arrays.iter().enumerate().map(sum).collect()
        };
        let sums = self.pieces.iter().map(of).collect();
        drop(slots);
        let mut state = self.lock();
        state.is_gone |= !state.is_held;
        state.sums = Some(sums);
        self.settled.notify_all();
        Ok(())
    }

    /// Waits until it is settled.
    ///
    /// # Errors
    /// `Internal` if its window ended before that.
    fn when_settled(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        while state.sums.is_none() && !state.is_gone {
            state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.is_gone {
            false => Ok(state),
            true => Err(Error::internal("what was captured ahead of this save was let go while the save used it")),
        }
    }

    /// Reads the bytes of a piece's array from `at` on, once they are those of the saved step.
    ///
    /// # Errors
    /// As [`Tile::when_settled`].
    pub(super) fn read(&self, piece: usize, array: usize, at: u64, out: &mut [u8]) -> Result<()> {
        drop(self.when_settled()?);
        let slots = self.lock_slots();
        let from = self.pieces[piece].of_tile(self.width(array)).start + at as usize;
        let bytes = slots.arrays.get(array).and_then(|slot| slot.get(from..from + out.len()));
        let bytes = bytes.ok_or_else(|| Error::internal("a tile that was captured ahead has no such bytes"))?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    /// Returns the checksum of a piece's array at the saved step.
    ///
    /// # Errors
    /// As [`Tile::when_settled`].
    pub(super) fn sum(&self, piece: usize, array: usize) -> Result<u64> {
        let state = self.when_settled()?;
        let sum = state.sums.as_ref().and_then(|sums| sums.get(piece)?.get(array).copied());
        sum.ok_or_else(|| Error::internal("a tile that was captured ahead has no such sum"))
    }
}
