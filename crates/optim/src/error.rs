//! Defines the errors of calls.

use crate::dtype::Dtype;
use crate::kind::Kind;

/// Arguments that contradict each other: a tile, a gradient or scalars. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An array whose length is not that of the parameter's elements.
    #[error("replay: {what} has {found} bytes, expected {expected}; pass the same run of elements of every array")]
    Length {
        /// Name of the array.
        what: &'static str,
        /// Bytes that the parameter's elements need in this dtype.
        expected: usize,
        /// Bytes of the array.
        found: usize,
    },
    /// Bytes of a parameter that are no whole number of elements.
    #[error(
        "replay: the parameter has {found} bytes, expected a multiple of {element}; pass whole elements of {dtype}"
    )]
    Element {
        /// Bytes of the array.
        found: usize,
        /// Bytes of one element.
        element: usize,
        /// Element type of the array.
        dtype: Dtype,
    },
    /// A tile that reaches beyond its tensor.
    #[error("replay: the tile has elements {offset} to {end}, its tensor has {numel}; pass both in elements")]
    Place {
        /// First element of the tile in its flattened tensor.
        offset: u64,
        /// Element after the last one; `u64::MAX` if it does not fit.
        end: u64,
        /// Number of elements of the tensor.
        numel: u64,
    },
    /// A tile with more or fewer moments than the step uses.
    #[error("replay: step {step} of {kind} uses {expected} moments, the tile has {found}; pass them in their order")]
    Moments {
        /// Index of the step in the call, from 0.
        step: usize,
        /// Optimizer of the step.
        kind: Kind,
        /// Number of moments that the step's flags ask for.
        expected: usize,
        /// Number of moments of the tile.
        found: usize,
    },
    /// Arrays of element types that the implementation does not have.
    #[error(
        "replay: {variant} does not step a parameter of {parameter} with moments of {moments} and gradients of \
         {gradient}; choose from Variant::candidates"
    )]
    Dtypes {
        /// Name of the variant.
        variant: &'static str,
        /// Element type of the parameter.
        parameter: Dtype,
        /// Element type of the moments; the parameter's if there are none.
        moments: Dtype,
        /// Element type of the gradient.
        gradient: Dtype,
    },
    /// A gradient of 16 bits that was multiplied before it was applied to a parameter of 16 bits: its rounding is
    /// unknown.
    #[error("replay: {variant} takes gradients as they are, step {step} has a factor; pass the multiplied gradient")]
    Factor {
        /// Name of the variant.
        variant: &'static str,
        /// Index of the step in the call, from 0.
        step: usize,
    },
    /// Scalars of another optimizer.
    #[error("replay: {variant} steps {expected}, step {step} has the scalars of {found}; pass those of {expected}")]
    Scalars {
        /// Name of the variant.
        variant: &'static str,
        /// Index of the step in the call, from 0.
        step: usize,
        /// Optimizer of the variant.
        expected: Kind,
        /// Optimizer of the scalars.
        found: Kind,
    },
    /// Bias corrections from the host for a variant that takes the device's, or the reverse.
    #[error(
        "replay: {variant} takes bias corrections from the {expected}, step {step} has those of the other; pass them"
    )]
    Bias {
        /// Name of the variant.
        variant: &'static str,
        /// Index of the step in the call, from 0.
        step: usize,
        /// `host` or `device`: the place that the variant expects.
        expected: &'static str,
    },
}
