//! Steps a piece by Adam or AdamW.

use crate::dtype::Dtype;
use crate::optimizer::{Moments, Optimizer};
use crate::piece::{Fma, Piece, add_scaled, each, each_with, each_with_two, mul_add, narrowed};
use crate::scalars::{AdamScalars, Bias, Scalars};
use crate::sequence::{AdamSequence, AdamUpdate, Decay, FirstMoment, Largest, MulAdd, SecondMoment, TwoProducts};

/// Scalars of one step, as the sequence uses them.
pub(crate) struct Coefficients {
    /// `true` if the result of every operation is narrowed.
    narrows: bool,
    /// Factor of the parameter, or the share that is subtracted from it; `None` without decoupled decay.
    decay: Option<f32>,
    /// Share of the parameter that is added to the gradient; `None` without L2 decay.
    l2: Option<f32>,
    negated: bool,
    amsgrad: bool,
    beta1: f32,
    weight1: f32,
    beta2: f32,
    weight2: f32,
    /// Divisor or factor of the root.
    root: f32,
    eps: f32,
    /// Factor of the moment or the quotient, or divisor of the denominator.
    step: f32,
}

impl Optimizer for AdamSequence {
    type Scalars = AdamScalars;
    type Coefficients = Coefficients;

    fn own(scalars: &Scalars) -> Option<&AdamScalars> {
        match scalars {
            Scalars::Adam(scalars) => Some(scalars),
            _ => None,
        }
    }

    fn missing_bias(&self, scalars: &AdamScalars) -> Option<&'static str> {
        let found = matches!(scalars.bias, Bias::Device { .. });
        match self.update.is_of_device() {
            expected if expected == found => None,
            expected => Some(if expected { "device" } else { "host" }),
        }
    }

    fn coefficients(&self, scalars: &AdamScalars, arrays: Dtype) -> Coefficients {
        let decays = scalars.weight_decay != 0.0;
        let decay = match self.decay {
            Decay::Factor => (1.0 - scalars.lr * scalars.weight_decay) as f32,
            Decay::Subtracted(_) => scalars.lr as f32 * scalars.weight_decay as f32,
        };
        let (root, eps, step) = self.denominator(scalars);
        Coefficients {
            narrows: self.narrowing.is_after_every_operation(arrays),
            decay: (decays && scalars.decoupled).then_some(decay),
            l2: (decays && !scalars.decoupled).then_some(scalars.weight_decay as f32),
            negated: scalars.maximize,
            amsgrad: scalars.amsgrad,
            beta1: scalars.beta1 as f32,
            weight1: (1.0 - scalars.beta1) as f32,
            beta2: scalars.beta2 as f32,
            weight2: (1.0 - scalars.beta2) as f32,
            root,
            eps,
            step,
        }
    }

    #[inline(always)]
    fn step<F: Fma>(&self, c: &Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece) {
        let [m, v, largest] = moments;
        let narrows = c.narrows;
        if c.negated {
            each(g, |g| -g);
        }
        if let Some(decay) = c.decay {
            match self.decay {
                Decay::Factor => each(p, |p| p * decay),
                Decay::Subtracted(MulAdd::Once) => each(p, |p| F::fma(-decay, p, p)),
                Decay::Subtracted(MulAdd::Twice) => each(p, |p| p - decay * p),
            }
            narrow_if(narrows, p);
        }
        if let Some(decay) = c.l2 {
            add_scaled::<F>(self.l2, g, decay, p);
            narrow_if(narrows, g);
        }
        first_moment::<F>(self.first, c, m, g);
        narrow_if(narrows, m);
        second_moment::<F>(self.second, c, v, g, narrows);
        narrow_if(narrows, v);
        if c.amsgrad {
            match self.largest {
                Largest::SecondIfEqual => each_with(largest, v, second_if_equal),
                Largest::FirstIfEqual => each_with(largest, v, |a, b| if a < b { b } else { a }),
                Largest::PositiveZero => each_with(largest, v, positive_zero),
            }
        }
        update::<F>(self.update, c, p, m, if c.amsgrad { largest } else { v }, narrows);
        narrow_if(narrows, p);
    }
}

impl AdamSequence {
    /// Returns scale of the root, addend of the root, and step; see [`AdamUpdate`] for the formulas.
    fn denominator(&self, scalars: &AdamScalars) -> (f32, f32, f32) {
        let (lr, eps) = (scalars.lr as f32, scalars.eps as f32);
        match scalars.bias {
            Bias::Host { correction1, correction2_sqrt } => {
                let (root, step) = (correction2_sqrt as f32, -(scalars.lr / correction1) as f32);
                (if self.update == AdamUpdate::QuotientOfReciprocal { 1.0 / root } else { root }, eps, step)
            }
            Bias::Device { correction1, correction2_sqrt } => match self.update {
                AdamUpdate::StepInDenominator => (correction2_sqrt, eps, 1.0 / (-correction1 / lr)),
                AdamUpdate::StepInParts => {
                    let step = -((1.0 / correction1) * lr);
                    (correction2_sqrt * step, (1.0 / step) * eps, step)
                }
                _ => (correction2_sqrt, eps, -(lr / correction1)),
            },
        }
    }
}

#[inline(always)]
fn narrow_if(narrows: bool, x: &mut Piece) {
    if narrows {
        each(x, narrowed);
    }
}

#[inline(always)]
fn first_moment<F: Fma>(how: FirstMoment, c: &Coefficients, m: &mut Piece, g: &Piece) {
    let (weight, rest, beta1) = (c.weight1, 1.0 - c.weight1, c.beta1);
    let (FirstMoment::Lerp(rounding) | FirstMoment::LerpOfVectors(rounding)) = how else {
        return each_with(m, g, |m, g| F::fma(beta1, m, F::fma(-beta1, g, g)));
    };
    if weight < 0.5 {
        return each_with(m, g, |m, g| mul_add::<F>(rounding, weight, g - m, m));
    }
    if matches!(how, FirstMoment::LerpOfVectors(_)) {
        each_with(m, g, |m, g| mul_add::<F>(rounding, weight - 1.0, g - m, g));
    } else {
        each_with(m, g, |m, g| mul_add::<F>(rounding, -(g - m), rest, g));
    }
}

#[inline(always)]
fn second_moment<F: Fma>(how: SecondMoment, c: &Coefficients, v: &mut Piece, g: &Piece, narrows: bool) {
    let (weight, beta2) = (c.weight2, c.beta2);
    match how {
        SecondMoment::ScaledGradient(TwoProducts::FirstInSum) => {
            each_with(v, g, |v, g| F::fma(v, beta2, (weight * g) * g));
        }
        SecondMoment::ScaledGradient(TwoProducts::SecondInSum) => {
            each_with(v, g, |v, g| F::fma(weight * g, g, v * beta2));
        }
        SecondMoment::ScaledGradient(TwoProducts::Separate) => {
            each_with(v, g, |v, g| v * beta2 + (weight * g) * g);
        }
        SecondMoment::ScaledSquare => {
            each(v, |v| v * beta2);
            narrow_if(narrows, v);
            each_with(v, g, |v, g| F::fma(weight, g * g, v));
        }
        SecondMoment::Nested => each_with(v, g, |v, g| {
            let square = g * g;
            F::fma(beta2, v, F::fma(-beta2, square, square))
        }),
    }
}

#[inline(always)]
fn second_if_equal(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

#[inline(always)]
fn positive_zero(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { second_if_equal(a, b) }
}

#[inline(always)]
fn update<F: Fma>(how: AdamUpdate, c: &Coefficients, p: &mut Piece, m: &Piece, v: &Piece, narrows: bool) {
    let (root, eps, step) = (c.root, c.eps, c.step);
    let mut d = *v;
    if narrows {
        each(&mut d, |v| narrowed(v.sqrt()));
        if how == AdamUpdate::QuotientOfReciprocal {
            each(&mut d, |d| narrowed(d * root));
        } else {
            each(&mut d, |d| narrowed(d / root));
        }
        each(&mut d, |d| narrowed(d + eps));
    } else if how == AdamUpdate::QuotientOfReciprocal {
        each(&mut d, |v| v.sqrt() * root + eps);
    } else {
        each(&mut d, |v| v.sqrt() / root + eps);
    }
    match how {
        AdamUpdate::ScaledMoment | AdamUpdate::ScaledMomentOfDevice => {
            each_with_two(p, m, &d, |p, m, d| p + (step * m) / d);
        }
        AdamUpdate::Quotient | AdamUpdate::QuotientOfReciprocal => {
            each_with_two(p, m, &d, |p, m, d| F::fma(step, m / d, p));
        }
        AdamUpdate::StepInDenominator => {
            each(&mut d, |d| d / step);
            narrow_if(narrows, &mut d);
            each_with_two(p, m, &d, |p, m, d| p + m / d);
        }
        AdamUpdate::StepInParts => each_with_two(p, m, &d, |p, m, d| p + m / d),
    }
}
