//! Steps a tile: loads each piece once, applies all waiting gradients, and stores it once.

use crate::dtype::{Dtype, Dtypes};
use crate::optimizer::Optimizer;
use crate::piece::{Fma, PIECE, Piece, each, from_bf16, narrowed, to_bf16};
use crate::tile::{Gradient, Tile};
use crate::variant::Parts;

/// A step that changes the tile.
pub(crate) struct Taken<'a, C> {
    pub(crate) gradient: Gradient<'a>,
    pub(crate) body: C,
    pub(crate) tail: C,
}

/// Checked work on one tile.
pub(crate) struct Task<'t, 'a, O: Optimizer> {
    pub(crate) parts: &'t Parts<O>,
    pub(crate) tile: &'t mut Tile<'a>,
    /// Number of elements before the tail.
    pub(crate) split: usize,
    pub(crate) elements: usize,
    pub(crate) taken: &'t [Taken<'t, O::Coefficients>],
}

impl<O: Optimizer> Task<'_, '_, O> {
    /// Steps the tile; compiled once for each set of instructions.
    #[inline(always)]
    pub(crate) fn run<F: Fma>(self) {
        let Dtypes { parameter, moments } = self.tile.dtypes;
        // The rest of an incomplete piece keeps its old values, which nothing reads.
        let (mut p, mut state, mut g) = ([0.0; PIECE], [[0.0; PIECE]; 3], [0.0; PIECE]);
        for is_tail in [false, true] {
            let (start, end) = if is_tail { (self.split, self.elements) } else { (0, self.split) };
            let sequence = if is_tail { &self.parts.tail } else { &self.parts.body };
            for at in (start..end).step_by(PIECE) {
                let count = PIECE.min(end - at);
                load(parameter, self.tile.parameter, at, count, &mut p);
                for (piece, moment) in state.iter_mut().zip(&*self.tile.moments) {
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
                store(parameter, self.tile.parameter, at, count, &p);
                for (piece, moment) in state.iter().zip(self.tile.moments.iter_mut()) {
                    store(moments, moment, at, count, piece);
                }
            }
        }
    }
}

/// Reads `count` elements of `bytes` from the element `at` on.
#[inline(always)]
fn load(dtype: Dtype, bytes: &[u8], at: usize, count: usize, into: &mut Piece) {
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
