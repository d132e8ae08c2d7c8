//! Steps a piece by Lion.

use crate::dtype::Dtype;
use crate::optimizer::{Moments, Optimizer};
use crate::piece::{Fma, Piece, each, each_with, narrowed, weighted};
use crate::scalars::{LionScalars, Scalars};
use crate::sequence::LionSequence;

/// Scalars of one step, as the sequence uses them.
pub(crate) struct Coefficients {
    /// `true` if the result of every operation is narrowed.
    narrows: bool,
    decay: f32,
    beta1: f32,
    weight1: f32,
    beta2: f32,
    weight2: f32,
    /// Factor of the sign that is added to the parameter.
    step: f32,
}

impl Optimizer for LionSequence {
    type Scalars = LionScalars;
    type Coefficients = Coefficients;

    fn own(scalars: &Scalars) -> Option<&LionScalars> {
        match scalars {
            Scalars::Lion(scalars) => Some(scalars),
            _ => None,
        }
    }

    fn missing_bias(&self, _: &LionScalars) -> Option<&'static str> {
        None
    }

    fn coefficients(&self, scalars: &LionScalars, arrays: Dtype) -> Coefficients {
        Coefficients {
            narrows: self.narrowing.is_after_every_operation(arrays),
            decay: (1.0 - scalars.lr * scalars.weight_decay) as f32,
            beta1: scalars.beta1 as f32,
            weight1: (1.0 - scalars.beta1) as f32,
            beta2: scalars.beta2 as f32,
            weight2: (1.0 - scalars.beta2) as f32,
            step: -(scalars.lr as f32),
        }
    }

    #[inline(always)]
    fn step<F: Fma>(&self, c: &Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece) {
        let m = &mut moments[0];
        let (decay, step) = (c.decay, c.step);
        let narrows = c.narrows;
        let narrow = |x: f32| if narrows { narrowed(x) } else { x };
        each(p, |p| narrow(p * decay));
        let mut u = *m;
        weighted::<F>(self.update, &mut u, c.beta1, c.weight1, g, narrow);
        // A sum whose rounding to 16 bits is zero has no sign.
        each_with(p, &u, |p, u| p + step * sign(narrow(u)));
        weighted::<F>(self.moment, m, c.beta2, c.weight2, g, narrow);
    }
}

/// Returns 1, 0 or -1; 0 for a NaN.
#[inline(always)]
fn sign(x: f32) -> f32 {
    f32::from(i8::from(x > 0.0) - i8::from(x < 0.0))
}
