//! What can be wrong with a call.

use crate::dtype::Dtype;
use crate::kind::Kind;

/// A block, a gradient or scalars that do not fit together. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An array has another length than the parameter's elements need.
    #[error("replay: {what} has {found} bytes, expected {expected}; pass the same run of elements of every array")]
    Length {
        /// Which array.
        what: &'static str,
        /// Bytes that the parameter's elements need in this dtype.
        expected: usize,
        /// Bytes of the array.
        found: usize,
    },
    /// The parameter's bytes are no whole number of elements.
    #[error(
        "replay: the parameter has {found} bytes, expected a multiple of {element}; pass whole elements of {dtype}"
    )]
    Element {
        /// Bytes of the array.
        found: usize,
        /// Bytes of one element.
        element: usize,
        /// The dtype of the array.
        dtype: Dtype,
    },
    /// The block reaches beyond its tensor.
    #[error("replay: the block has elements {offset} to {end}, its tensor has {numel}; pass both in elements")]
    Place {
        /// First element of the block in its flattened tensor.
        offset: u64,
        /// The element behind the last one; `u64::MAX` where it does not fit.
        end: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// The block has more or fewer moments than the step uses.
    #[error("replay: step {step} of {kind} uses {expected} moments, the block has {found}; pass them in their order")]
    Moments {
        /// Which step of the call, from 0.
        step: usize,
        /// The optimizer.
        kind: Kind,
        /// Moments that the step's flags ask for.
        expected: usize,
        /// Moments of the block.
        found: usize,
    },
    /// The implementation has no such arrays.
    #[error(
        "replay: {variant} does not step a parameter of {parameter} with moments of {moments} and gradients of \
         {gradient}; choose from Variant::candidates"
    )]
    Dtypes {
        /// The variant's name.
        variant: &'static str,
        /// Dtype of the parameter.
        parameter: Dtype,
        /// Dtype of the moments; the parameter's where there are none.
        moments: Dtype,
        /// Dtype of the gradient.
        gradient: Dtype,
    },
    /// A gradient of 16 bits that was multiplied before it met a parameter of 16 bits: how that was rounded is unknown.
    #[error("replay: {variant} takes gradients as they are, step {step} has a factor; pass the multiplied gradient")]
    Factor {
        /// The variant's name.
        variant: &'static str,
        /// Which step of the call, from 0.
        step: usize,
    },
    /// The scalars are those of another optimizer.
    #[error("replay: {variant} steps {expected}, step {step} has the scalars of {found}; pass those of {expected}")]
    Scalars {
        /// The variant's name.
        variant: &'static str,
        /// Which step of the call, from 0.
        step: usize,
        /// The variant's optimizer.
        expected: Kind,
        /// The optimizer whose scalars came.
        found: Kind,
    },
    /// The bias corrections come from the wrong place.
    #[error(
        "replay: {variant} takes bias corrections from the {expected}, step {step} has those of the other; pass them"
    )]
    Bias {
        /// The variant's name.
        variant: &'static str,
        /// Which step of the call, from 0.
        step: usize,
        /// `host` or `device`.
        expected: &'static str,
    },
}
