//! What a promise that was broken looks like.

/// A broken promise, as text.
pub(crate) type Judged = std::result::Result<(), String>;

macro_rules! hold {
    ($holds:expr, $($words:tt)+) => {
        if !$holds {
            return Err(format!($($words)+));
        }
    };
}
