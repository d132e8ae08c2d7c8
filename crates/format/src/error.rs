//! Errors of decoding and encoding.

/// Kinds of failure, grouped by the caller's reaction. Every message names the object, what was expected and what was
/// found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are damaged: use another checkpoint.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// The bytes have a version or feature that this build does not know: upgrade.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The call asks for something that the format cannot express: correct the call.
    #[error("invalid: {0}")]
    Invalid(String),
}

impl Error {
    /// Returns the message without the kind in front.
    pub fn message(&self) -> &str {
        match self {
            Error::Corrupt(message) | Error::Unsupported(message) | Error::Invalid(message) => message,
        }
    }
}
