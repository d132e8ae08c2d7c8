//! The scalars of one step, as the implementation holds them.
//!
//! No power is computed here: bias corrections come from the training's own host or device, since powers differ
//! between libraries by an ulp. What a variant does with a scalar beyond that (round it to `f32`, subtract it from one,
//! divide by it) is one IEEE operation each, and part of the sequence.

use crate::kind::Kind;

/// The scalars of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalars {
    /// Adam or AdamW.
    Adam(AdamScalars),
    /// Stochastic gradient descent.
    Sgd(SgdScalars),
    /// Adagrad.
    Adagrad(AdagradScalars),
    /// Lion.
    Lion(LionScalars),
}

impl Scalars {
    /// The scalars of a step of `kind` from numbers in the order of their fields, flags as 0 and 1 (any other number
    /// counts as 1), bias corrections as the host computes them; `None` if there are more or fewer fields.
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

    /// The optimizer that has such scalars.
    pub fn kind(&self) -> Kind {
        match self {
            Scalars::Adam(_) => Kind::Adam,
            Scalars::Sgd(_) => Kind::Sgd,
            Scalars::Adagrad(_) => Kind::Adagrad,
            Scalars::Lion(_) => Kind::Lion,
        }
    }

    /// How many moments a step with these scalars reads and writes.
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
    /// The learning rate of this step, after its schedule.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// What is added to the root.
    pub eps: f64,
    /// Weight decay; 0 leaves the operation out.
    pub weight_decay: f64,
    /// Whether the decay shrinks the parameter (AdamW) instead of being added to the gradient (L2).
    pub decoupled: bool,
    /// Whether the gradient is negated.
    pub maximize: bool,
    /// Whether the root is of the largest second moment so far, a third moment.
    pub amsgrad: bool,
    /// The bias corrections of this step.
    pub bias: Bias,
}

/// Bias corrections of Adam at step `t`: `correction1` is `1 - beta1^t`, `correction2_sqrt` is `sqrt(1 - beta2^t)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bias {
    /// Computed by the host in `f64`.
    Host {
        /// `1 - beta1^t`.
        correction1: f64,
        /// `sqrt(1 - beta2^t)`, as the implementation takes the root.
        correction2_sqrt: f64,
    },
    /// Computed by the device in `f32` and copied from there.
    Device {
        /// `1 - beta1^t`.
        correction1: f32,
        /// `sqrt(1 - beta2^t)`.
        correction2_sqrt: f32,
    },
}

/// Scalars of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdScalars {
    /// The learning rate of this step, after its schedule.
    pub lr: f64,
    /// What stays of the momentum buffer; 0 means that there is none.
    pub momentum: f64,
    /// What is left out of the gradient that goes into the buffer.
    pub dampening: f64,
    /// Weight decay, added to the gradient; 0 leaves the operation out.
    pub weight_decay: f64,
    /// Whether the gradient looks ahead along the buffer.
    pub nesterov: bool,
    /// Whether the gradient is negated.
    pub maximize: bool,
    /// Whether this step makes the buffer, as a copy of the gradient.
    pub first: bool,
}

/// Scalars of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradScalars {
    /// `lr / (1 + (t - 1) * lr_decay)` at step `t`, as the host or the device holds it.
    pub corrected_lr: f64,
    /// What is added to the root.
    pub eps: f64,
    /// Weight decay, added to the gradient; 0 leaves the operation out.
    pub weight_decay: f64,
    /// Whether the gradient is negated.
    pub maximize: bool,
}

/// Scalars of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionScalars {
    /// The learning rate of this step, after its schedule.
    pub lr: f64,
    /// Weight of the moment in the update.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay; the factor `1 - lr * weight_decay` is always applied.
    pub weight_decay: f64,
}
