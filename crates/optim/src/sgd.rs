//! Steps a piece by stochastic gradient descent.

use crate::dtype::Dtype;
use crate::optimizer::{Moments, Optimizer};
use crate::piece::{Fma, Piece, add_scaled, each, narrowed, weighted};
use crate::scalars::{Scalars, SgdScalars};
use crate::sequence::{Complement, SgdSequence};

/// Scalars of one step, as the sequence uses them.
pub(crate) struct Coefficients {
    /// `true` if the result of every operation is narrowed.
    narrows: bool,
    /// Share of the parameter that is added to the gradient; `None` without decay.
    decay: Option<f32>,
    negated: bool,
    /// Factor of the buffer; `None` without a buffer.
    momentum: Option<f32>,
    /// `true` if this step makes the buffer from the gradient.
    first: bool,
    /// Factor of the gradient that is added to the buffer.
    weight: f32,
    nesterov: bool,
    /// Factor of the gradient that is added to the parameter.
    step: f32,
}

impl Optimizer for SgdSequence {
    type Scalars = SgdScalars;
    type Coefficients = Coefficients;

    fn own(scalars: &Scalars) -> Option<&SgdScalars> {
        match scalars {
            Scalars::Sgd(scalars) => Some(scalars),
            _ => None,
        }
    }

    fn missing_bias(&self, _: &SgdScalars) -> Option<&'static str> {
        None
    }

    fn coefficients(&self, scalars: &SgdScalars, arrays: Dtype) -> Coefficients {
        Coefficients {
            narrows: self.narrowing.is_after_every_operation(arrays),
            decay: (scalars.weight_decay != 0.0).then_some(scalars.weight_decay as f32),
            negated: scalars.maximize,
            momentum: (scalars.momentum != 0.0).then_some(scalars.momentum as f32),
            first: scalars.first,
            weight: match self.dampening {
                Complement::Double => (1.0 - scalars.dampening) as f32,
                Complement::Single => 1.0 - scalars.dampening as f32,
            },
            nesterov: scalars.nesterov,
            step: -(scalars.lr as f32),
        }
    }

    #[inline(always)]
    fn step<F: Fma>(&self, c: &Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece) {
        let buffer = &mut moments[0];
        let narrows = c.narrows;
        let narrow = |x: f32| if narrows { narrowed(x) } else { x };
        if c.negated {
            each(g, |g| -g);
        }
        if let Some(decay) = c.decay {
            add_scaled::<F>(self.decay, g, decay, p);
            each(g, narrow);
        }
        if let Some(momentum) = c.momentum {
            if c.first {
                *buffer = *g;
            } else {
                weighted::<F>(self.buffer, buffer, momentum, c.weight, g, narrow);
                each(buffer, narrow);
            }
            if c.nesterov {
                add_scaled::<F>(self.nesterov, g, momentum, buffer);
                each(g, narrow);
            } else {
                *g = *buffer;
            }
        }
        add_scaled::<F>(self.update, p, c.step, g);
    }
}
