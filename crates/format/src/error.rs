//! What can be wrong with bytes, or with a call that makes them.

/// A closed set, grouped by what the caller would do. Every message names the thing, what was expected and what was
/// found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are not what was written: use another checkpoint.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// The bytes are of a version, or hold a thing, that this build does not know: upgrade.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The call asks for something that the format cannot say: fix the call.
    #[error("invalid: {0}")]
    Invalid(String),
}

impl Error {
    /// The message without the kind in front.
    pub fn message(&self) -> &str {
        match self {
            Error::Corrupt(message) | Error::Unsupported(message) | Error::Invalid(message) => message,
        }
    }
}
