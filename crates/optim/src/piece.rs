//! Computes on pieces: runs of elements that stay in the first-level cache, in loops that compilers vectorize.

use crate::sequence::{MulAdd, TwoProducts};

/// Number of elements of a piece: so many that branches on a sequence's choices cost nothing, and so few that all
/// arrays of a piece, with the pieces that are prefetched meanwhile, fit into the cache. Below 128 compilers unroll
/// loops instead of vectorizing them.
pub(crate) const PIECE: usize = 256;

/// Elements of one array, of one piece.
pub(crate) type Piece = [f32; PIECE];

/// Way to compute `a * b + c` with one rounding.
pub(crate) trait Fma {
    /// Returns `a * b + c`, rounded once.
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Computes `a * b + c` by an instruction of the processor.
pub(crate) struct Instruction;

impl Fma for Instruction {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Computes it with sums and products of `f64`, for processors without such an instruction.
pub(crate) struct Emulated;

impl Fma for Emulated {
    /// Multiplies exactly, since the product of two `f32` fits into `f64`. The sum is rounded to odd there, so that its
    /// second rounding, to `f32`, is that of the exact sum (Boldo and Melquiond, "Emulation of a FMA and correctly
    /// rounded sums", 2008).
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
        let sum = product + c;
        let of_c = sum - product;
        let error = (product - (sum - of_c)) + (c - of_c);
        let bits = sum.to_bits();
        let is_inexact = error != 0.0 && sum.is_finite() && bits & 1 == 0;
        // One ulp away from zero where the exact sum lies there, else one toward it.
        let outward = (error > 0.0) == (sum > 0.0);
        let odd = if outward { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
        (if is_inexact { f64::from_bits(odd) } else { sum }) as f32
    }
}

/// Returns `a * b + c`.
#[inline(always)]
pub(crate) fn mul_add<F: Fma>(how: MulAdd, a: f32, b: f32, c: f32) -> f32 {
    match how {
        MulAdd::Once => F::fma(a, b, c),
        MulAdd::Twice => a * b + c,
    }
}

/// Sets `x[i] = f(x[i])`.
#[inline(always)]
pub(crate) fn each(x: &mut Piece, f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

/// Sets `x[i] = f(x[i], y[i])`.
#[inline(always)]
pub(crate) fn each_with(x: &mut Piece, y: &Piece, f: impl Fn(f32, f32) -> f32) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = f(*x, *y);
    }
}

/// Sets `x[i] = f(x[i], y[i], z[i])`.
#[inline(always)]
pub(crate) fn each_with_two(x: &mut Piece, y: &Piece, z: &Piece, f: impl Fn(f32, f32, f32) -> f32) {
    for ((x, y), z) in x.iter_mut().zip(y).zip(z) {
        *x = f(*x, *y, *z);
    }
}

/// Sets `x` to `x + a * y`.
#[inline(always)]
pub(crate) fn add_scaled<F: Fma>(how: MulAdd, x: &mut Piece, a: f32, y: &Piece) {
    match how {
        MulAdd::Once => each_with(x, y, |x, y| F::fma(a, y, x)),
        MulAdd::Twice => each_with(x, y, |x, y| x + a * y),
    }
}

/// Sets `x` to `x * a + b * y`; applies `narrow` to each product that is rounded by itself.
#[inline(always)]
pub(crate) fn weighted<F: Fma>(
    how: TwoProducts,
    x: &mut Piece,
    a: f32,
    b: f32,
    y: &Piece,
    narrow: impl Fn(f32) -> f32,
) {
    match how {
        TwoProducts::Separate => each_with(x, y, |x, y| narrow(x * a) + narrow(b * y)),
        TwoProducts::FirstInSum => each_with(x, y, |x, y| F::fma(x, a, narrow(b * y))),
        TwoProducts::SecondInSum => each_with(x, y, |x, y| F::fma(b, y, narrow(x * a))),
    }
}

/// Rounds `x` to the upper half of a binary32, to nearest, ties to even. Every NaN becomes the quiet one.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// Returns the value whose upper half is `x`.
#[inline(always)]
pub(crate) fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Rounds `x` as an array of 16 bits would hold it.
#[inline(always)]
pub(crate) fn narrowed(x: f32) -> f32 {
    from_bf16(to_bf16(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generates bits, of all exponents alike (Marsaglia's xorshift).
    fn bits(state: &mut u64) -> u32 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 16) as u32
    }

    fn expect_exact(a: f32, b: f32, c: f32) {
        let (ours, exact) = (Emulated::fma(a, b, c), a.mul_add(b, c));
        let is_same = ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan());
        assert!(is_same, "{a:e} * {b:e} + {c:e} is {exact:e}, not {ours:e}");
    }

    #[test]
    fn the_emulated_fma_is_the_exact_one() {
        let mut state = 17;
        for _ in 0..1_000_000 {
            let (a, b) = (f32::from_bits(bits(&mut state)), f32::from_bits(bits(&mut state)));
            let near = -(a * b);
            expect_exact(a, b, f32::from_bits(bits(&mut state)));
            // Sums that cancel, wholly or but for some bits.
            expect_exact(a, b, f32::from_bits(near.to_bits() ^ (bits(&mut state) & 0xff)));
            expect_exact(a, b, near * f32::from_bits(0x3300_0000 + (bits(&mut state) & 0x01ff_ffff)));
        }
    }

    #[test]
    fn a_sum_just_beside_the_middle_is_not_rounded_twice() {
        // 2^24 + 1 is in the middle of two values; `f64` forgets what is below 2^-29 of it.
        let (a, b) = (97.0, 172_961.0);
        for power in 20..140 {
            let c = f32::exp2(-power as f32);
            for (a, c) in [(a, c), (a, -c), (-a, c), (-a, -c)] {
                expect_exact(a, b, c);
            }
        }
        assert_eq!((f64::from(a) * f64::from(b) + f64::exp2(-40.0)) as f32, 16_777_216.0, "rounded twice");
        assert_eq!(Emulated::fma(a, b, f32::exp2(-40.0)), 16_777_218.0);
    }
}
