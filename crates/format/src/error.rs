//! Errors of decoding and encoding.

/// A closed set, grouped by what the caller would do. Every message names the thing, what was expected and what was
/// found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are not what was written: use another checkpoint.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// The bytes are of a version, or have a feature, that this build does not know: upgrade.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The call asks for something that the format cannot express: fix the call.
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
