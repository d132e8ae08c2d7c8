//! Steps a piece by Adagrad.

use crate::dtype::Dtype;
use crate::optimizer::{Moments, Optimizer};
use crate::piece::{Fma, Piece, add_scaled, each, each_with, each_with_two, mul_add, narrowed};
use crate::scalars::{AdagradScalars, Scalars};
use crate::sequence::{AdagradSequence, AdagradUpdate, MulAdd};

/// Scalars of one step, as the sequence uses them.
pub(crate) struct Coefficients {
    /// `true` if the result of every operation is narrowed.
    narrows: bool,
    /// Share of the parameter that is added to the gradient; `None` without decay.
    decay: Option<f32>,
    negated: bool,
    eps: f32,
    /// Factor of the gradient or the quotient that is added to the parameter.
    step: f32,
    /// Scalars as given, for operations in `f64`.
    exact: AdagradScalars,
}

impl Optimizer for AdagradSequence {
    type Scalars = AdagradScalars;
    type Coefficients = Coefficients;

    fn own(scalars: &Scalars) -> Option<&AdagradScalars> {
        match scalars {
            Scalars::Adagrad(scalars) => Some(scalars),
            _ => None,
        }
    }

    fn missing_bias(&self, _: &AdagradScalars) -> Option<&'static str> {
        None
    }

    fn coefficients(&self, scalars: &AdagradScalars, arrays: Dtype) -> Coefficients {
        Coefficients {
            narrows: self.narrowing.is_after_every_operation(arrays),
            decay: (scalars.weight_decay != 0.0).then_some(scalars.weight_decay as f32),
            negated: scalars.maximize,
            eps: scalars.eps as f32,
            step: -(scalars.corrected_lr as f32),
            exact: *scalars,
        }
    }

    #[inline(always)]
    fn step<F: Fma>(&self, c: &Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece) {
        let sum = &mut moments[0];
        let (step, eps, exact) = (c.step, c.eps, &c.exact);
        let narrows = c.narrows;
        let narrow = |x: f32| if narrows { narrowed(x) } else { x };
        if c.negated {
            each(g, |g| -g);
        }
        match (self.update, c.decay) {
            (_, None) => {}
            (AdagradUpdate::Double, _) => each_with(g, p, |g, p| wide_decay(self.decay, g, p, exact.weight_decay)),
            (_, Some(decay)) => {
                add_scaled::<F>(self.decay, g, decay, p);
                each(g, narrow);
            }
        }
        each_with(sum, g, |sum, g| mul_add::<F>(self.square, g, g, sum));
        each(sum, narrow);
        let mut sd = *sum;
        match self.update {
            AdagradUpdate::Double => each_with_two(p, g, sum, |p, g, sum| {
                let sd = f64::from(sum.sqrt()) + exact.eps;
                (f64::from(p) - (exact.corrected_lr * f64::from(g)) / sd) as f32
            }),
            AdagradUpdate::ScaledGradient => {
                each(&mut sd, |sum| narrow(narrow(sum.sqrt()) + eps));
                each_with_two(p, g, &sd, |p, g, sd| p + narrow(step * g) / sd);
            }
            AdagradUpdate::Quotient => {
                each(&mut sd, |sum| narrow(narrow(sum.sqrt()) + eps));
                each_with_two(p, g, &sd, |p, g, sd| F::fma(step, g / sd, p));
            }
        }
    }
}

/// Returns `g + decay * p`, computed in `f64` and rounded to `f32`.
#[inline(always)]
fn wide_decay(how: MulAdd, g: f32, p: f32, decay: f64) -> f32 {
    let (g, p) = (f64::from(g), f64::from(p));
    (match how {
        MulAdd::Once => decay.mul_add(p, g),
        MulAdd::Twice => g + decay * p,
    }) as f32
}
