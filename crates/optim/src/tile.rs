//! Describes a tile of one parameter with its moments, and the steps that it waits for.

use crate::dtype::{Dtype, Dtypes};
use crate::error::Error;
use crate::scalars::Scalars;

/// A run of one parameter's elements with the same run of its moments. The arrays need no alignment.
#[derive(Debug)]
pub struct Tile<'a> {
    /// Index of the first element in the flattened tensor that the optimizer steps.
    pub offset: u64,
    /// Number of elements of that tensor.
    pub numel: u64,
    /// Element types of the arrays.
    pub dtypes: Dtypes,
    /// Array of the parameter.
    pub parameter: &'a mut [u8],
    /// Arrays of the moments. Adam: first and second moment, and the largest second moment with amsgrad. Sgd: the
    /// momentum buffer, if momentum is not 0. Adagrad: the sum of squares. Lion: the moment.
    pub moments: &'a mut [&'a mut [u8]],
}

/// A gradient of a tile, as the optimizer used it.
#[derive(Debug, Clone, Copy)]
pub struct Gradient<'a> {
    /// Element type of the values.
    pub dtype: Dtype,
    /// Values for the same run of elements as the tile.
    pub values: &'a [u8],
    /// Factor in `f32` by which the training multiplied the values before the optimizer used them; `None` if it did
    /// not.
    pub factor: Option<f32>,
}

/// One step of the optimizer for a tile.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    /// No change of this parameter (the gradient was not finite, or there was none).
    Skipped,
    /// Application of a gradient.
    Taken {
        /// Gradient that the optimizer used.
        gradient: Gradient<'a>,
        /// Scalars that the optimizer used.
        scalars: Scalars,
    },
}

impl Tile<'_> {
    /// Returns the number of elements, if all arrays have it and it lies within the tensor.
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

/// Checks that `bytes` are `elements` elements of `dtype`.
pub(crate) fn expect_length(what: &'static str, elements: usize, dtype: Dtype, bytes: &[u8]) -> Result<(), Error> {
    let expected = elements * dtype.bytes();
    match bytes.len() {
        found if found == expected => Ok(()),
        found => Err(Error::Length { what, expected, found }),
    }
}
