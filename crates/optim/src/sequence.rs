//! Describes how an implementation rounds: every choice that two implementations of one optimizer make differently.
//!
//! In the formulas, `p` is the parameter, `g` the gradient, `m` and `v` are the moments. `f(x)` rounds to `f32`, and
//! every operation rounds to `f32` unless the choice says otherwise.

use crate::dtype::Dtype;

/// Rounding of `a * b + c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MulAdd {
    /// One rounding, after the sum: `fma(a, b, c)`.
    Once,
    /// Two roundings, after the product and after the sum.
    Twice,
}

/// Rounding of `a * b + c * d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TwoProducts {
    /// Three roundings: of both products and of the sum.
    Separate,
    /// Computed as `fma(a, b, c * d)`.
    FirstInSum,
    /// Computed as `fma(c, d, a * b)`.
    SecondInSum,
}

/// Rounding to the dtype of arrays narrower than `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Narrowing {
    /// Parameter and moments are rounded at the end of a step; within it they stay `f32`.
    AtStore,
    /// Every operation's result is rounded; each is computed in `f32`.
    EveryOperation,
}

impl Narrowing {
    /// Returns whether results of operations on arrays of this dtype are narrowed one by one.
    pub(crate) fn is_after_every_operation(self, arrays: Dtype) -> bool {
        self == Narrowing::EveryOperation && arrays != Dtype::F32
    }
}

/// Choices of Adam and AdamW. `w1 = f(1 - beta1)`, `w2 = f(1 - beta2)`, `ss = lr / correction1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamSequence {
    /// Way of decoupled weight decay.
    pub decay: Decay,
    /// Rounding of L2 weight decay, `g + wd * p`.
    pub l2: MulAdd,
    /// Formula of the first moment.
    pub first: FirstMoment,
    /// Formula of the second moment.
    pub second: SecondMoment,
    /// Formula of the largest second moment.
    pub largest: Largest,
    /// Formula of the denominator `d` and of the parameter.
    pub update: AdamUpdate,
    /// Time at which results are narrowed.
    pub narrowing: Narrowing,
}

/// Formula of decoupled weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// Computed as `p * f(1 - lr * wd)`, the factor in `f64`.
    Factor,
    /// Computed as `p - (f(lr) * f(wd)) * p`.
    Subtracted(MulAdd),
}

/// Formula of the first moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstMoment {
    /// Computed as `m + w1 * (g - m)` if `w1 < 0.5`, else as `g - (g - m) * (1 - w1)`.
    Lerp(MulAdd),
    /// Computed as [`FirstMoment::Lerp`] if `w1 < 0.5`, else as `(w1 - 1) * (g - m) + g`: another sign of zero where
    /// `w1` is 1.
    LerpOfVectors(MulAdd),
    /// Computed as `fma(b1, m, fma(-b1, g, g))`.
    Nested,
}

/// Formula of the second moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondMoment {
    /// Computed as `v * b2 + (w2 * g) * g`.
    ScaledGradient(TwoProducts),
    /// Computed as `fma(w2, g * g, v * b2)`.
    ScaledSquare,
    /// Computed as `fma(b2, v, fma(-b2, g * g, g * g))`.
    Nested,
}

/// Formula of the larger of the largest second moment `a` and the new one `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Largest {
    /// Value `b` if they are equal (zeros of two signs); a NaN if either is one.
    SecondIfEqual,
    /// Computed as `if a < b { b } else { a }`.
    FirstIfEqual,
    /// Value with the positive sign of two zeros; a NaN if either is one.
    PositiveZero,
}

/// Formula of the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdamUpdate {
    /// Computed as `p + (f(-ss) * m) / d`, `d = sqrt(v) / f(correction2_sqrt) + f(eps)`; corrections from the host.
    ScaledMoment,
    /// Computed as [`AdamUpdate::ScaledMoment`], with `ss` divided in `f32`; corrections from the device.
    ScaledMomentOfDevice,
    /// Computed as `fma(f(-ss), m / d, p)`, `d` as in [`AdamUpdate::ScaledMoment`]; corrections from the host.
    Quotient,
    /// Computed as [`AdamUpdate::Quotient`], with `d = sqrt(v) * (1 / f(correction2_sqrt)) + f(eps)`.
    QuotientOfReciprocal,
    /// Computed as `p + m / d`, `d = (sqrt(v) / correction2_sqrt + f(eps)) / s`, `s = 1 / (-correction1 / f(lr))`;
    /// corrections from the device.
    StepInDenominator,
    /// Computed as `p + m / d`, `d = sqrt(v) / (correction2_sqrt * s) + (1 / s) * f(eps)`, `s = -((1 / correction1) *
    /// f(lr))`; corrections from the device.
    StepInParts,
}

impl AdamUpdate {
    /// Returns whether bias corrections come from the device.
    pub(crate) fn is_of_device(self) -> bool {
        matches!(self, AdamUpdate::ScaledMomentOfDevice | AdamUpdate::StepInDenominator | AdamUpdate::StepInParts)
    }
}

/// Choices of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgdSequence {
    /// Rounding of weight decay, `g + wd * p`.
    pub decay: MulAdd,
    /// Rounding of the buffer, `buffer * momentum + (1 - dampening) * g`.
    pub buffer: TwoProducts,
    /// Precision of `1 - dampening`.
    pub dampening: Complement,
    /// Rounding of `g + momentum * buffer`.
    pub nesterov: MulAdd,
    /// Rounding of `p + f(-lr) * g`.
    pub update: MulAdd,
    /// Time at which results are narrowed.
    pub narrowing: Narrowing,
}

/// Precision of `1 - x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Complement {
    /// Computed as `f(1 - x)`, in `f64`.
    Double,
    /// Computed as `1 - f(x)`.
    Single,
}

/// Choices of Adagrad. `sd = sqrt(sum) + eps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdagradSequence {
    /// Rounding of weight decay, `g + wd * p`.
    pub decay: MulAdd,
    /// Rounding of the sum, `sum + g * g`.
    pub square: MulAdd,
    /// Formula of the parameter.
    pub update: AdagradUpdate,
    /// Time at which results are narrowed.
    pub narrowing: Narrowing,
}

/// Formula of the parameter in Adagrad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdagradUpdate {
    /// Computed as `p + (f(-lr) * g) / sd`.
    ScaledGradient,
    /// Computed as `fma(f(-lr), g / sd, p)`.
    Quotient,
    /// Computed as `f(p - (lr * g) / sd)` in `f64`, with a root of `f32`; decay in `f64` as well, its sum rounded to
    /// `f32`.
    Double,
}

/// Choices of Lion. The parameter is `p * f(1 - lr * wd)`, then `p + f(-lr) * sign(u)`, which is exact up to the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LionSequence {
    /// Rounding of the update `u`, `m * b1 + f(1 - beta1) * g`.
    pub update: TwoProducts,
    /// Rounding of the moment, `m * b2 + f(1 - beta2) * g`.
    pub moment: TwoProducts,
    /// Time at which results are narrowed.
    pub narrowing: Narrowing,
}
