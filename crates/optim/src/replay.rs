//! Applies gradients to a tile, after checking that all arguments fit together.

use crate::dtype::{Dtype, Dtypes};
use crate::error::Error;
use crate::instructions::Instructions;
use crate::optimizer::Optimizer;
use crate::scalars::Scalars;
use crate::task::{Taken, Task};
use crate::tile::{Gradient, Step, Tile, expect_length};
use crate::variant::{Parts, Sequences, Variant};

/// Applies `steps`, oldest first, to `tile` as `variant` rounds, with the instructions that `on` names.
///
/// The result depends neither on `on` nor on how a tensor is cut into tiles. Several threads may replay tiles in
/// parallel.
///
/// # Errors
///
/// An error for arrays, dtypes or scalars that contradict each other. The tile is then unchanged.
pub fn replay(on: Instructions, variant: &Variant, tile: &mut Tile<'_>, steps: &[Step<'_>]) -> Result<(), Error> {
    match &variant.sequences {
        Sequences::Adam(parts) => replay_with(on, variant, parts, tile, steps),
        Sequences::Sgd(parts) => replay_with(on, variant, parts, tile, steps),
        Sequences::Adagrad(parts) => replay_with(on, variant, parts, tile, steps),
        Sequences::Lion(parts) => replay_with(on, variant, parts, tile, steps),
    }
}

fn replay_with<O: Optimizer>(
    on: Instructions,
    variant: &Variant,
    parts: &Parts<O>,
    tile: &mut Tile<'_>,
    steps: &[Step<'_>],
) -> Result<(), Error> {
    let elements = tile.elements()?;
    let mut taken = Vec::with_capacity(steps.len());
    for (number, step) in steps.iter().enumerate() {
        let Step::Taken { gradient, scalars } = step else { continue };
        expect_arrays(variant, tile, elements, number, gradient, scalars)?;
        let Some(own) = O::own(scalars) else {
            let (expected, found) = (variant.kind(), scalars.kind());
            return Err(Error::Scalars { variant: variant.name, step: number, expected, found });
        };
        if let Some(expected) = parts.body.missing_bias(own) {
            return Err(Error::Bias { variant: variant.name, step: number, expected });
        }
        let arrays = tile.dtypes.parameter;
        let (body, tail) = (parts.body.coefficients(own, arrays), parts.tail.coefficients(own, arrays));
        taken.push(Taken { gradient: *gradient, body, tail });
    }
    // The body of a tensor is the elements that whole vectors of the implementation cover.
    let body = tile.numel - tile.numel % variant.lanes;
    let split = usize::try_from(body.saturating_sub(tile.offset)).unwrap_or(usize::MAX).min(elements);
    on.run(Task { parts, tile, split, elements, taken: &taken });
    Ok(())
}

fn expect_arrays(
    variant: &Variant,
    tile: &Tile<'_>,
    elements: usize,
    step: usize,
    gradient: &Gradient<'_>,
    scalars: &Scalars,
) -> Result<(), Error> {
    expect_length("a gradient", elements, gradient.dtype, gradient.values)?;
    let (expected, found) = (scalars.moments(), tile.moments.len());
    if scalars.kind() == variant.kind() && expected != found {
        return Err(Error::Moments { step, kind: variant.kind(), expected, found });
    }
    let Dtypes { parameter, moments } = tile.dtypes;
    if parameter != variant.dtypes.parameter
        || (found > 0 && moments != variant.dtypes.moments)
        || (parameter == Dtype::Bf16 && gradient.dtype != Dtype::Bf16)
    {
        let gradient = gradient.dtype;
        return Err(Error::Dtypes { variant: variant.name, parameter, moments, gradient });
    }
    if parameter == Dtype::Bf16 && gradient.factor.is_some() {
        return Err(Error::Factor { variant: variant.name, step });
    }
    Ok(())
}
