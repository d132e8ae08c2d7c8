//! A block of one parameter with its moments, and the steps that wait for it.

use crate::dtype::{Dtype, Dtypes};
use crate::error::Error;
use crate::scalars::Scalars;

/// A run of one parameter's elements with the same run of its moments. The arrays need no alignment.
#[derive(Debug)]
pub struct Block<'a> {
    /// The first element's place in the flattened tensor that the optimizer steps.
    pub offset: u64,
    /// Elements of that tensor.
    pub numel: u64,
    /// How the arrays are stored.
    pub dtypes: Dtypes,
    /// The parameter.
    pub parameter: &'a mut [u8],
    /// Adam: first and second moment, and the largest second moment with amsgrad. Sgd: the momentum buffer, if momentum
    /// is not 0. Adagrad: the sum of squares. Lion: the moment.
    pub moments: &'a mut [&'a mut [u8]],
}

/// A gradient of a block, as the optimizer used it.
#[derive(Debug, Clone, Copy)]
pub struct Gradient<'a> {
    /// How it is stored.
    pub dtype: Dtype,
    /// The same run of elements as the block.
    pub values: &'a [u8],
    /// What the training multiplied the values by, in `f32`, before the optimizer saw them; `None` if it did not.
    pub factor: Option<f32>,
}

/// One step of the optimizer for a block.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    /// The optimizer left this parameter as it was (a gradient that was not finite, or none).
    Skipped,
    /// The optimizer applied this gradient.
    Taken {
        /// The gradient.
        gradient: Gradient<'a>,
        /// The scalars.
        scalars: Scalars,
    },
}

impl Block<'_> {
    /// The number of elements, if all arrays have it and it lies within the tensor.
    pub(crate) fn elements(&self) -> Result<usize, Error> {
        let (dtype, bytes) = (self.dtypes.parameter, self.parameter.len());
        if bytes % dtype.bytes() != 0 {
            return Err(Error::Element { found: bytes, element: dtype.bytes(), dtype });
        }
        let elements = bytes / dtype.bytes();
        for moment in self.moments.iter() {
            expect_length("a moment", elements, self.dtypes.moments, moment)?;
        }
        let end = self.offset.saturating_add(elements as u64);
        if end > self.numel {
            return Err(Error::Place { offset: self.offset, end, numel: self.numel });
        }
        Ok(elements)
    }
}

/// Whether `bytes` are `elements` of `dtype`.
pub(crate) fn expect_length(what: &'static str, elements: usize, dtype: Dtype, bytes: &[u8]) -> Result<(), Error> {
    let expected = elements * dtype.bytes();
    match bytes.len() {
        found if found == expected => Ok(()),
        found => Err(Error::Length { what, expected, found }),
    }
}
