//! The rehearsal: which implementation of an optimizer the training uses, found by its bits.

use std::ops::Range;

use shardfast_optim::Variant;

use crate::error::Result;
use crate::provider::Fences;

use super::{Class, Rehearsed, Shared, Unit};

/// Elements at the beginning and at the end of a unit that are replayed. More than the widest vectors and than what one
/// thread of a training steps of a small tensor.
const SAMPLE_ELEMENTS: u64 = 4096;

/// Units of each class, at most.
const SAMPLE_UNITS: usize = 8;

/// Beginning and end of the largest units of each class, and of the smallest ones: tensors shorter than a vector, and
/// those whose last vector is not full.
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

/// By class the variant that agrees with the training in every bit of every sample.
pub(super) fn rehearse(shared: &Shared) -> Vec<Rehearsed> {
    (0..shared.classes.len()).map(|class| of_class(shared, class)).collect()
}

fn of_class(shared: &Shared, number: usize) -> Rehearsed {
    let Class { kind, dtypes, device, .. } = shared.classes[number];
    let of = |unit: usize| shared.units[unit].class == number;
    let blocks = || shared.blocks.iter().filter(|block| block.pieces.iter().any(|piece| of(piece.unit)));
    if blocks().next().is_none() || blocks().any(|block| !block.is_held()) {
        let why = shared.lock().reason.clone();
        return Rehearsed::Unknown(why.unwrap_or_else(|| "there was no memory for a rehearsal".to_owned()));
    }
    // With one step, implementations that differ later could agree.
    if blocks().any(|block| block.steps() < 2) {
        return Rehearsed::Unknown("the rehearsal saw fewer than two steps of it".to_owned());
    }
    let mut candidates = 0;
    for variant in Variant::candidates(kind, dtypes, device) {
        candidates += 1;
        let agrees = |shared: &Shared| -> Result<bool> {
            for block in blocks() {
                let Some(found) = block.tried(variant, &shared.units)? else { return Ok(false) };
                for (piece, arrays) in block.pieces.iter().zip(found) {
                    for (array, replayed) in arrays.into_iter().enumerate() {
                        let memory = &shared.units[piece.unit].arrays[array].memory;
                        let (mut live, mut fences) = (vec![0; replayed.len()], Fences::default());
                        memory.fill(piece.of_unit(block.width(array)).start, &mut live, &mut fences)?;
                        fences.wait()?;
                        if live != replayed {
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
