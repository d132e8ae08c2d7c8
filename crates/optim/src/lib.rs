//! Steps optimizers on host memory, bit for bit as the training did.
#![doc = include_str!("../README.md")]

mod adagrad;
mod adam;
mod dtype;
mod error;
mod instructions;
mod kind;
mod lion;
mod optimizer;
mod piece;
mod replay;
mod scalars;
mod sequence;
mod sgd;
mod task;
mod tile;
mod variant;

pub use dtype::{Dtype, Dtypes};
pub use error::Error;
pub use instructions::Instructions;
pub use kind::{Device, Kind};
pub use replay::replay;
pub use scalars::{AdagradScalars, AdamScalars, Bias, LionScalars, Scalars, SgdScalars};
pub use sequence::{
    AdagradSequence, AdagradUpdate, AdamSequence, AdamUpdate, Complement, Decay, FirstMoment, Largest, LionSequence,
    MulAdd, Narrowing, SecondMoment, SgdSequence, TwoProducts,
};
pub use tile::{Gradient, Step, Tile};
pub use variant::{Parts, Sequences, Variant};
