//! Defines what the optimizers share: scalars become coefficients, and a piece takes a step.

use crate::dtype::Dtype;
use crate::piece::{Fma, Piece};
use crate::scalars::Scalars;

/// Moments of a piece; those that an optimizer does not have stay untouched.
pub(crate) type Moments = [Piece; 3];

/// Arithmetic of one optimizer, rounded as `self` says.
pub(crate) trait Optimizer {
    /// Scalars of a step.
    type Scalars;
    /// Scalars in the form that the arithmetic uses.
    type Coefficients;

    /// Returns the scalars, if they are this optimizer's.
    fn own(scalars: &Scalars) -> Option<&Self::Scalars>;

    /// Returns the place where bias corrections must be computed, if these were computed elsewhere.
    fn missing_bias(&self, scalars: &Self::Scalars) -> Option<&'static str>;

    /// Derives from the scalars what the implementation derives before it reads an element.
    fn coefficients(&self, scalars: &Self::Scalars, arrays: Dtype) -> Self::Coefficients;

    /// Steps a piece; overwrites `g`.
    fn step<F: Fma>(&self, c: &Self::Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece);
}
