//! How an implementation rounds: every choice that two implementations of one optimizer make differently.
//!
//! In the formulas `p` is the parameter, `g` the gradient, `m` and `v` the moments; `f(x)` rounds to `f32`, and every
//! operation rounds to `f32` unless the choice says otherwise.

use crate::dtype::Dtype;

/// How `a * b + c` is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MulAdd {
    /// Once, behind the sum: `fma(a, b, c)`.
    Once,
    /// Twice, behind the product and behind the sum.
    Twice,
}

/// How `a * b + c * d` is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TwoProducts {
    /// Both products and the sum: three times.
    Separate,
    /// `fma(a, b, c * d)`.
    FirstInSum,
    /// `fma(c, d, a * b)`.
    SecondInSum,
}

/// What is rounded to the dtype of arrays narrower than `f32`, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Narrowing {
    /// Parameter and moments, at the end of a step; within it they stay `f32`.
    AtStore,
    /// The result of every operation of the framework, each of which is computed in `f32`.
    EveryOperation,
}

impl Narrowing {
    /// Whether results of operations on arrays of this dtype are narrowed one by one.
    pub(crate) fn is_after_every_operation(self, arrays: Dtype) -> bool {
        self == Narrowing::EveryOperation && arrays != Dtype::F32
    }
}

/// Adam and AdamW. `w1 = f(1 - beta1)`, `w2 = f(1 - beta2)`, `ss = lr / correction1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamSequence {
    /// Decoupled weight decay.
    pub decay: Decay,
    /// L2 weight decay, `g + wd * p`.
    pub l2: MulAdd,
    /// The first moment.
    pub first: FirstMoment,
    /// The second moment.
    pub second: SecondMoment,
    /// The largest second moment.
    pub largest: Largest,
    /// The denominator `d`, and how the parameter moves.
    pub update: AdamUpdate,
    /// When results are narrowed.
    pub narrowing: Narrowing,
}

/// Decoupled weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// `p * f(1 - lr * wd)`, the factor in `f64`.
    Factor,
    /// `p - (f(lr) * f(wd)) * p`.
    Subtracted(MulAdd),
}

/// The first moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstMoment {
    /// `m + w1 * (g - m)` where `w1 < 0.5`, else `g - (g - m) * (1 - w1)`.
    Lerp(MulAdd),
    /// The same, else `(w1 - 1) * (g - m) + g`: another sign of zero where `w1` is 1.
    LerpOfVectors(MulAdd),
    /// `fma(b1, m, fma(-b1, g, g))`.
    Nested,
}

/// The second moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondMoment {
    /// `v * b2 + (w2 * g) * g`.
    ScaledGradient(TwoProducts),
    /// `fma(w2, g * g, v * b2)`.
    ScaledSquare,
    /// `fma(b2, v, fma(-b2, g * g, g * g))`.
    Nested,
}

/// The larger of the largest second moment `a` and the new one `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Largest {
    /// `b` where they are equal (zeros of two signs); not a number where either is not.
    SecondIfEqual,
    /// `if a < b { b } else { a }`.
    FirstIfEqual,
    /// The positive one of two zeros; not a number where either is not.
    PositiveZero,
}

/// How the parameter moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdamUpdate {
    /// `p + (f(-ss) * m) / d`, `d = sqrt(v) / f(correction2_sqrt) + f(eps)`; corrections from the host.
    ScaledMoment,
    /// The same with `ss` divided in `f32`; corrections from the device.
    ScaledMomentOfDevice,
    /// `fma(f(-ss), m / d, p)`, `d` as above; corrections from the host.
    Quotient,
    /// The same with `d = sqrt(v) * (1 / f(correction2_sqrt)) + f(eps)`.
    QuotientOfReciprocal,
    /// `p + m / d`, `d = (sqrt(v) / correction2_sqrt + f(eps)) / s`, `s = 1 / (-correction1 / f(lr))`; corrections from
    /// the device.
    StepInDenominator,
    /// `p + m / d`, `d = sqrt(v) / (correction2_sqrt * s) + (1 / s) * f(eps)`, `s = -((1 / correction1) * f(lr))`;
    /// corrections from the device.
    StepInParts,
}

impl AdamUpdate {
    /// Whether bias corrections come from the device.
    pub(crate) fn is_of_device(self) -> bool {
        matches!(self, AdamUpdate::ScaledMomentOfDevice | AdamUpdate::StepInDenominator | AdamUpdate::StepInParts)
    }
}

/// Stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgdSequence {
    /// Weight decay, `g + wd * p`.
    pub decay: MulAdd,
    /// The buffer, `buffer * momentum + (1 - dampening) * g`.
    pub buffer: TwoProducts,
    /// Where `1 - dampening` is computed.
    pub dampening: Complement,
    /// `g + momentum * buffer`.
    pub nesterov: MulAdd,
    /// `p + f(-lr) * g`.
    pub update: MulAdd,
    /// When results are narrowed.
    pub narrowing: Narrowing,
}

/// Where `1 - x` is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Complement {
    /// `f(1 - x)`, in `f64`.
    Double,
    /// `1 - f(x)`.
    Single,
}

/// Adagrad. `sd = sqrt(sum) + eps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdagradSequence {
    /// Weight decay, `g + wd * p`.
    pub decay: MulAdd,
    /// The sum, `sum + g * g`.
    pub square: MulAdd,
    /// How the parameter moves.
    pub update: AdagradUpdate,
    /// When results are narrowed.
    pub narrowing: Narrowing,
}

/// How Adagrad moves the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdagradUpdate {
    /// `p + (f(-lr) * g) / sd`.
    ScaledGradient,
    /// `fma(f(-lr), g / sd, p)`.
    Quotient,
    /// `f(p - (lr * g) / sd)` in `f64`, with a root of `f32`; decay in `f64` as well, rounded to `f32` behind its sum.
    Double,
}

/// Lion. The parameter is `p * f(1 - lr * wd)`, then `p + f(-lr) * sign(u)`, which is exact up to the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LionSequence {
    /// The update `u`, `m * b1 + f(1 - beta1) * g`.
    pub update: TwoProducts,
    /// The moment, `m * b2 + f(1 - beta2) * g`.
    pub moment: TwoProducts,
    /// When results are narrowed.
    pub narrowing: Narrowing,
}
