//! Which optimizer, and where the training steps it.

use std::fmt;

/// An optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Adam and AdamW.
    Adam,
    /// Stochastic gradient descent.
    Sgd,
    /// Adagrad.
    Adagrad,
    /// Lion.
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

/// Where the training steps its optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// On a processor like this one.
    Cpu,
    /// On a CUDA device.
    Cuda,
}
