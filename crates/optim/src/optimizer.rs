//! What the optimizers have in common: scalars become coefficients, and a piece takes a step.

use crate::dtype::Dtype;
use crate::piece::{Fma, Piece};
use crate::scalars::Scalars;

/// The moments of a piece; what an optimizer does not have stays untouched.
pub(crate) type Moments = [Piece; 3];

/// One optimizer's arithmetic, rounded as `self` says.
pub(crate) trait Optimizer {
    /// The scalars of a step.
    type Scalars;
    /// The same as the arithmetic uses them.
    type Coefficients;

    /// The scalars, if they are this optimizer's.
    fn own(scalars: &Scalars) -> Option<&Self::Scalars>;

    /// Where bias corrections must come from, if these come from elsewhere.
    fn missing_bias(&self, scalars: &Self::Scalars) -> Option<&'static str>;

    /// What the implementation derives from the scalars before it looks at an element.
    fn coefficients(&self, scalars: &Self::Scalars, arrays: Dtype) -> Self::Coefficients;

    /// One step of a piece; `g` is spent.
    fn step<F: Fma>(&self, c: &Self::Coefficients, p: &mut Piece, moments: &mut Moments, g: &mut Piece);
}
