//! A block of one parameter with its moments, and the steps that wait for it.

use std::fmt;

use crate::{Error, Scalars};

/// How an element is stored; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "F32",
            Dtype::Bf16 => "BF16",
        })
    }
}

/// The dtypes of a parameter and of its moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtypes {
    /// Of the parameter.
    pub parameter: Dtype,
    /// Of all moments.
    pub moments: Dtype,
}

impl Dtypes {
    /// `F32` throughout.
    pub const F32: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::F32 };
    /// `BF16` throughout.
    pub const BF16: Dtypes = Dtypes { parameter: Dtype::Bf16, moments: Dtype::Bf16 };
    /// Parameters of `F32` with moments of `BF16`.
    pub const MIXED: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::Bf16 };
}

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
