//! Defines the scalars of one step, as the implementation holds them.
//!
//! No power is computed here: bias corrections come from the training's own host or device, since powers differ between
//! libraries by an ulp. All else that a variant does with a scalar (round it to `f32`, subtract it from one, divide by
//! it) is one IEEE operation each, and part of the sequence.

use crate::kind::Kind;

/// Scalars of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalars {
    /// Scalars of Adam or AdamW.
    Adam(AdamScalars),
    /// Scalars of stochastic gradient descent.
    Sgd(SgdScalars),
    /// Scalars of Adagrad.
    Adagrad(AdagradScalars),
    /// Scalars of Lion.
    Lion(LionScalars),
}

impl Scalars {
    /// Makes the scalars of a step of `kind` from numbers in the order of their fields: flags as 0 and 1 (any other
    /// number counts as 1), bias corrections as the host computes them. Returns `None` if there are more or fewer
    /// fields.
    pub fn from_numbers(kind: Kind, numbers: &[f64]) -> Option<Scalars> {
        let is = |number: f64| number != 0.0;
        Some(match (kind, numbers) {
            (
                Kind::Adam,
                &[lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad, correction1, correction2_sqrt],
            ) => Scalars::Adam(AdamScalars {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                decoupled: is(decoupled),
                maximize: is(maximize),
                amsgrad: is(amsgrad),
                bias: Bias::Host { correction1, correction2_sqrt },
            }),
            (Kind::Sgd, &[lr, momentum, dampening, weight_decay, nesterov, maximize, first]) => {
                let (nesterov, maximize, first) = (is(nesterov), is(maximize), is(first));
                Scalars::Sgd(SgdScalars { lr, momentum, dampening, weight_decay, nesterov, maximize, first })
            }
            (Kind::Adagrad, &[corrected_lr, eps, weight_decay, maximize]) => {
                Scalars::Adagrad(AdagradScalars { corrected_lr, eps, weight_decay, maximize: is(maximize) })
            }
            (Kind::Lion, &[lr, beta1, beta2, weight_decay]) => {
                Scalars::Lion(LionScalars { lr, beta1, beta2, weight_decay })
            }
            _ => return None,
        })
    }

    /// Returns the optimizer that has such scalars.
    pub fn kind(&self) -> Kind {
        match self {
            Scalars::Adam(_) => Kind::Adam,
            Scalars::Sgd(_) => Kind::Sgd,
            Scalars::Adagrad(_) => Kind::Adagrad,
            Scalars::Lion(_) => Kind::Lion,
        }
    }

    /// Returns the number of moments that a step with these scalars reads and writes.
    pub fn moments(&self) -> usize {
        match self {
            Scalars::Adam(scalars) => 2 + usize::from(scalars.amsgrad),
            Scalars::Sgd(scalars) => usize::from(scalars.momentum != 0.0),
            Scalars::Adagrad(_) | Scalars::Lion(_) => 1,
        }
    }
}

/// Scalars of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamScalars {
    /// Learning rate of this step, after its schedule.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Epsilon, which is added to the root.
    pub eps: f64,
    /// Weight decay; 0 leaves the operation out.
    pub weight_decay: f64,
    /// `true` if the decay shrinks the parameter (AdamW), `false` if it is added to the gradient (L2).
    pub decoupled: bool,
    /// `true` if the gradient is negated.
    pub maximize: bool,
    /// `true` if the root is of the largest second moment so far, a third moment.
    pub amsgrad: bool,
    /// Bias corrections of this step.
    pub bias: Bias,
}

/// Bias corrections of Adam at step `t`: `correction1` is `1 - beta1^t`, `correction2_sqrt` is `sqrt(1 - beta2^t)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bias {
    /// Corrections that the host computed in `f64`.
    Host {
        /// Correction of the first moment, `1 - beta1^t`.
        correction1: f64,
        /// Correction of the second moment, `sqrt(1 - beta2^t)`, as the implementation takes the root.
        correction2_sqrt: f64,
    },
    /// Corrections that the device computed in `f32`, copied from there.
    Device {
        /// Correction of the first moment, `1 - beta1^t`.
        correction1: f32,
        /// Correction of the second moment, `sqrt(1 - beta2^t)`.
        correction2_sqrt: f32,
    },
}

/// Scalars of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdScalars {
    /// Learning rate of this step, after its schedule.
    pub lr: f64,
    /// Factor of the momentum buffer; 0 means that there is none.
    pub momentum: f64,
    /// Share of the gradient that is not added to the buffer.
    pub dampening: f64,
    /// Weight decay, added to the gradient; 0 leaves the operation out.
    pub weight_decay: f64,
    /// `true` for Nesterov momentum: the gradient looks ahead along the buffer.
    pub nesterov: bool,
    /// `true` if the gradient is negated.
    pub maximize: bool,
    /// `true` if this step makes the buffer, as a copy of the gradient.
    pub first: bool,
}

/// Scalars of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradScalars {
    /// Learning rate `lr / (1 + (t - 1) * lr_decay)` at step `t`, as the host or the device holds it.
    pub corrected_lr: f64,
    /// Epsilon, which is added to the root.
    pub eps: f64,
    /// Weight decay, added to the gradient; 0 leaves the operation out.
    pub weight_decay: f64,
    /// `true` if the gradient is negated.
    pub maximize: bool,
}

/// Scalars of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionScalars {
    /// Learning rate of this step, after its schedule.
    pub lr: f64,
    /// Weight of the moment in the update.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay; the factor `1 - lr * weight_decay` is always applied.
    pub weight_decay: f64,
}
