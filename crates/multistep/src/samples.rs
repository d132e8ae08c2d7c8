//! The rehearsal: which implementation of an optimizer the training uses, found by its bits.

use std::ops::Range;
use std::sync::Arc;

use shardfast_optim::Variant;
use shardfast_transfer::digest::{RUNS_MAX, digest};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::provider::{Fences, Provider};

use super::{Class, DeviceCopies, Rehearsed, Shared, Unit, device_copies};

/// Number of elements at the beginning and at the end of a unit that are replayed. More than the widest vectors and
/// than one thread of a training steps of a small tensor.
const SAMPLE_ELEMENTS: u64 = 4096;

/// Units of each class, at most.
const SAMPLE_UNITS: usize = 8;

/// Returns beginning and end of the largest units of each class, and of the smallest ones: tensors shorter than a
/// vector, and those whose last vector is not full.
pub(super) fn of(classes: &[Class], units: &[Unit]) -> Vec<(usize, Range<u64>)> {
    let mut out = Vec::new();
    for class in 0..classes.len() {
        let mut own: Vec<usize> = (0..units.len()).collect();
        own.retain(|&unit| units[unit].class == class && !units[unit].arrays.is_empty());
        own.sort_by_key(|&unit| (std::cmp::Reverse(units[unit].numel), unit));
        let few = own.len().min(SAMPLE_UNITS / 2);
        let last = own.len().saturating_sub(SAMPLE_UNITS / 2).max(few);
        let sampled = own[..few].iter().chain(&own[last..]);
        for &unit in sampled {
            let numel = units[unit].numel;
            let first = 0..SAMPLE_ELEMENTS.min(numel);
            out.push((unit, first.clone()));
            out.push((unit, numel.saturating_sub(SAMPLE_ELEMENTS).max(first.end)..numel));
        }
    }
    out
}

/// Returns, by class, the variant that agrees with the training in every bit of every sample.
pub(super) fn rehearse(shared: &Shared) -> Vec<Rehearsed> {
    let unproven = match &shared.beside {
        None => None,
        Some(beside) => match digests_agree(shared, beside) {
            Ok(true) => None,
            Ok(false) => Some("what the device sums of its memory is not what its memory holds".to_owned()),
            Err(error) => Some(error.message),
        },
    };
    if let Some(why) = unproven {
        return vec![Rehearsed::ByNone(why); shared.classes.len()];
    }
    (0..shared.classes.len()).map(|class| of_class(shared, class)).collect()
}

/// Returns whether the device sums the samples as a host does.
fn digests_agree(shared: &Shared, beside: &DeviceCopies) -> Result<bool> {
    let (mut runs, mut expected) = (Vec::new(), Vec::new());
    for tile in &shared.tiles {
        for piece in &tile.pieces {
            for (array, of) in shared.units[piece.unit].arrays.iter().enumerate() {
                let range = piece.of_unit(tile.width(array));
                let bytes = range.end - range.start;
                let Some((_, address)) = of.memory.on_device(range.start, bytes) else { return Ok(false) };
                runs.push((address, bytes as usize));
                expected.push(digest(&read(&*of.memory, range)?));
            }
        }
    }
    for (runs, expected) in runs.chunks(RUNS_MAX).zip(expected.chunks(RUNS_MAX)) {
        match device_copies::digests(Arc::clone(beside.tiles()) as _, runs, &shared.staging)? {
            Some(digests) if digests.wait()? == expected => {}
            Some(_) => return Ok(false),
            None => return Err(Error::invalid("there was no memory for a rehearsal")),
        }
    }
    Ok(true)
}

/// Reads a range of the training's bytes.
fn read(memory: &dyn Provider, range: Range<u64>) -> Result<Vec<u8>> {
    let (mut live, mut fences) = (vec![0; (range.end - range.start) as usize], Fences::default());
    memory.fill(range.start, &mut live, &mut fences)?;
    fences.wait()?;
    Ok(live)
}

fn of_class(shared: &Shared, number: usize) -> Rehearsed {
    let Class { kind, dtypes, device, is_fused, .. } = shared.classes[number];
    let of = |unit: usize| shared.units[unit].class == number;
    if !(0..shared.units.len()).any(|unit| of(unit) && !shared.units[unit].arrays.is_empty()) {
        let why = "is copied in the call, as small ones are, or does not lie in one run";
        return Rehearsed::ByNone(format!("every tensor that {kind} steps {why}"));
    }
    let tiles = || shared.tiles.iter().filter(|tile| tile.pieces.iter().any(|piece| of(piece.unit)));
    if tiles().next().is_none() || tiles().any(|tile| !tile.is_held()) {
        let why = shared.lock().reason.clone();
        return Rehearsed::Unknown(why.unwrap_or_else(|| "there was no memory for a rehearsal".to_owned()));
    }
    // With one step, implementations that differ later could agree.
    if tiles().any(|tile| tile.steps() < 2) {
        return Rehearsed::Unknown("the rehearsal saw fewer than two steps of it".to_owned());
    }
    let mut candidates = 0;
    for variant in Variant::candidates(kind, dtypes, device) {
        candidates += 1;
        // Implementations that differ in the last elements of tensors alone may agree by chance in those few.
        if is_fused.is_some_and(|is_fused| variant.is_fused() != is_fused) {
            continue;
        }
        let agrees = |shared: &Shared| -> Result<bool> {
            for tile in tiles() {
                let Some(found) = tile.tried(variant, &shared.units)? else { return Ok(false) };
                for (piece, arrays) in tile.pieces.iter().zip(found) {
                    for (array, replayed) in arrays.into_iter().enumerate() {
                        let memory = &*shared.units[piece.unit].arrays[array].memory;
                        if read(memory, piece.of_unit(tile.width(array)))? != replayed {
                            return Ok(false);
                        }
                    }
                }
            }
            Ok(true)
        };
        if agrees(shared).unwrap_or(false) {
            return Rehearsed::By(variant);
        }
    }
    Rehearsed::ByNone(match candidates {
        0 => format!("no implementation of {kind} is known for these dtypes there"),
        _ => format!("none of the {candidates} known implementations of {kind} has this training's bits"),
    })
}
