//! Names the optimizers, and the devices that step them.

use std::fmt;

/// Kind of optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Optimizers Adam and AdamW.
    Adam,
    /// Optimizer SGD: stochastic gradient descent.
    Sgd,
    /// Optimizer Adagrad: adaptive gradients.
    Adagrad,
    /// Optimizer Lion: sign of the moment.
    Lion,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Adam => "Adam",
            Kind::Sgd => "SGD",
            Kind::Adagrad => "Adagrad",
            Kind::Lion => "Lion",
        })
    }
}

/// Device on which the training steps its optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// A processor like this one.
    Cpu,
    /// A CUDA device.
    Cuda,
}
