//! Gradients applied to a block: each piece is loaded once, stepped by every gradient that waits, and stored once.

use crate::block::{Block, Dtype, Dtypes, Gradient, Step, expect_length};
use crate::error::Error;
use crate::instructions::{Instructions, prefetch};
use crate::piece::{Fma, PIECE, Piece, each, from_bf16, narrowed, to_bf16};
use crate::scalars::Scalars;
use crate::variant::{Parts, Sequences, Variant};

/// How many pieces ahead the processor fetches.
const AHEAD: usize = 2;

/// The moments of a piece; what an optimizer does not have stays untouched.
pub(crate) type Moments = [Piece; 3];

/// One optimizer's arithmetic, rounded as `self` says.
pub(crate) trait Optimizer {
    /// The scalars of a step.
    type Scalars;
    /// The same as the arithmetic uses them.
    type Coefficients;

    /// The scalars, if they are this optimizer's.
    fn own(scalars: &Scalars) -> Option<&Self::Scalars>;

    /// Where bias corrections must come from, if these come from elsewhere.
    fn missing_bias(&self, scalars: &Self::Scalars) -> Option<&'static str>;

    /// What the implementation derives from the scalars before it looks at an element.
    fn coefficients(&self, scalars: &Self::Scalars, arrays: Dtype) -> Self::Coefficients;

    /// One step of a piece; `g` is spent.
    fn step<F: Fma>(&self, c: &Self::Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece);
}

/// Applies `steps`, oldest first, to `block` as `variant` rounds, with the instructions that `on` names.
///
/// The result depends neither on `on` nor on how a tensor is cut into blocks. Threads may work on blocks side by side.
///
/// # Errors
///
/// Arrays, dtypes or scalars that do not fit together. The block is then as it was.
pub fn replay(on: Instructions, variant: &Variant, block: &mut Block<'_>, steps: &[Step<'_>]) -> Result<(), Error> {
    match &variant.sequences {
        Sequences::Adam(parts) => replay_with(on, variant, parts, block, steps),
        Sequences::Sgd(parts) => replay_with(on, variant, parts, block, steps),
        Sequences::Adagrad(parts) => replay_with(on, variant, parts, block, steps),
        Sequences::Lion(parts) => replay_with(on, variant, parts, block, steps),
    }
}

fn replay_with<O: Optimizer>(
    on: Instructions,
    variant: &Variant,
    parts: &Parts<O>,
    block: &mut Block<'_>,
    steps: &[Step<'_>],
) -> Result<(), Error> {
    let elements = block.elements()?;
    let mut taken = Vec::with_capacity(steps.len());
    for (number, step) in steps.iter().enumerate() {
        let Step::Taken { gradient, scalars } = step else { continue };
        expect_arrays(variant, block, elements, number, gradient, scalars)?;
        let Some(own) = O::own(scalars) else {
            let (expected, found) = (variant.kind(), scalars.kind());
            return Err(Error::Scalars { variant: variant.name, step: number, expected, found });
        };
        if let Some(expected) = parts.body.missing_bias(own) {
            return Err(Error::Bias { variant: variant.name, step: number, expected });
        }
        let arrays = block.dtypes.parameter;
        let (body, tail) = (parts.body.coefficients(own, arrays), parts.tail.coefficients(own, arrays));
        taken.push(Taken { gradient: *gradient, body, tail });
    }
    // The body of a tensor is what whole vectors of the implementation cover.
    let body = block.numel - block.numel % variant.lanes;
    let split = usize::try_from(body.saturating_sub(block.offset)).unwrap_or(usize::MAX).min(elements);
    on.run(Task { parts, block, split, elements, taken: &taken });
    Ok(())
}

fn expect_arrays(
    variant: &Variant,
    block: &Block<'_>,
    elements: usize,
    step: usize,
    gradient: &Gradient<'_>,
    scalars: &Scalars,
) -> Result<(), Error> {
    expect_length("a gradient", elements, gradient.dtype, gradient.values)?;
    let (expected, found) = (scalars.moments(), block.moments.len());
    if scalars.kind() == variant.kind() && expected != found {
        return Err(Error::Moments { step, kind: variant.kind(), expected, found });
    }
    let Dtypes { parameter, moments } = block.dtypes;
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

/// A step that changes the block.
pub(crate) struct Taken<'a, C> {
    gradient: Gradient<'a>,
    body: C,
    tail: C,
}

/// Work whose parts fit together.
pub(crate) struct Task<'t, 'a, O: Optimizer> {
    parts: &'t Parts<O>,
    block: &'t mut Block<'a>,
    /// Elements before the tail.
    split: usize,
    elements: usize,
    taken: &'t [Taken<'t, O::Coefficients>],
}

impl<O: Optimizer> Task<'_, '_, O> {
    /// Does the work; compiled once for each set of instructions.
    #[inline(always)]
    pub(crate) fn run<F: Fma>(self) {
        let Dtypes { parameter, moments } = self.block.dtypes;
        // Behind the last element of a block they keep what was there: nothing reads it.
        let (mut p, mut state, mut g) = ([0.0; PIECE], [[0.0; PIECE]; 3], [0.0; PIECE]);
        for is_tail in [false, true] {
            let (start, end) = if is_tail { (self.split, self.elements) } else { (0, self.split) };
            let sequence = if is_tail { &self.parts.tail } else { &self.parts.body };
            for at in (start..end).step_by(PIECE) {
                let count = PIECE.min(end - at);
                load(parameter, self.block.parameter, at, count, &mut p);
                for (piece, moment) in state.iter_mut().zip(&*self.block.moments) {
                    load(moments, moment, at, count, piece);
                }
                for Taken { gradient, body, tail } in self.taken {
                    load(gradient.dtype, gradient.values, at, count, &mut g);
                    if let Some(factor) = gradient.factor {
                        each(&mut g, |g| g * factor);
                    }
                    sequence.step::<F>(if is_tail { tail } else { body }, &mut p, &mut state, &mut g);
                    if parameter == Dtype::Bf16 {
                        each(&mut p, narrowed);
                    }
                    if moments == Dtype::Bf16 {
                        state.iter_mut().for_each(|moment| each(moment, narrowed));
                    }
                }
                store(parameter, self.block.parameter, at, count, &p);
                for (piece, moment) in state.iter().zip(self.block.moments.iter_mut()) {
                    store(moments, moment, at, count, piece);
                }
            }
        }
    }
}

/// Reads `count` elements of `bytes` from the element `at` on.
#[inline(always)]
fn load(dtype: Dtype, bytes: &[u8], at: usize, count: usize, into: &mut Piece) {
    let later = (at + AHEAD * PIECE) * dtype.bytes();
    if let Some(later) = bytes.get(later..later + PIECE * dtype.bytes()) {
        prefetch(later);
    }
    let bytes = &bytes[at * dtype.bytes()..(at + count) * dtype.bytes()];
    match dtype {
        Dtype::F32 => {
            let get = |(x, bytes): (&mut f32, &[u8; 4])| *x = f32::from_le_bytes(*bytes);
            match bytes.first_chunk::<{ 4 * PIECE }>() {
                // Of constant length, these are moves of vectors.
                Some(whole) => into.iter_mut().zip(whole.as_chunks().0).for_each(get),
                None => into.iter_mut().zip(bytes.as_chunks().0).for_each(get),
            }
        }
        Dtype::Bf16 => {
            let get = |(x, bytes): (&mut f32, &[u8; 2])| *x = from_bf16(u16::from_le_bytes(*bytes));
            match bytes.first_chunk::<{ 2 * PIECE }>() {
                Some(whole) => into.iter_mut().zip(whole.as_chunks().0).for_each(get),
                None => into.iter_mut().zip(bytes.as_chunks().0).for_each(get),
            }
        }
    }
}

/// Writes `count` elements of `bytes` from the element `at` on.
#[inline(always)]
fn store(dtype: Dtype, bytes: &mut [u8], at: usize, count: usize, from: &Piece) {
    let bytes = &mut bytes[at * dtype.bytes()..(at + count) * dtype.bytes()];
    match dtype {
        Dtype::F32 => {
            let put = |(x, bytes): (&f32, &mut [u8; 4])| *bytes = x.to_le_bytes();
            match bytes.first_chunk_mut::<{ 4 * PIECE }>() {
                Some(whole) => from.iter().zip(whole.as_chunks_mut().0).for_each(put),
                None => from.iter().zip(bytes.as_chunks_mut().0).for_each(put),
            }
        }
        Dtype::Bf16 => {
            let put = |(x, bytes): (&f32, &mut [u8; 2])| *bytes = to_bf16(*x).to_le_bytes();
            match bytes.first_chunk_mut::<{ 2 * PIECE }>() {
                Some(whole) => from.iter().zip(whole.as_chunks_mut().0).for_each(put),
                None => from.iter().zip(bytes.as_chunks_mut().0).for_each(put),
            }
        }
    }
}
