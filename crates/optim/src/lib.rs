//! Steps optimizers on host memory, bit for bit as the training did.
#![doc = include_str!("../README.md")]

mod adagrad;
mod adam;
mod block;
mod error;
mod instructions;
mod lion;
mod piece;
mod replay;
mod scalars;
mod sequence;
mod sgd;
mod variant;

pub use block::{Block, Dtype, Dtypes, Gradient, Step};
pub use error::Error;
pub use instructions::Instructions;
pub use replay::replay;
pub use scalars::{AdagradScalars, AdamScalars, Bias, LionScalars, Scalars, SgdScalars};
pub use sequence::{
    AdagradSequence, AdagradUpdate, AdamSequence, AdamUpdate, Complement, Decay, FirstMoment, Largest, LionSequence,
    MulAdd, Narrowing, SecondMoment, SgdSequence, TwoProducts,
};
pub use variant::{Device, Kind, Parts, Sequences, Variant};
