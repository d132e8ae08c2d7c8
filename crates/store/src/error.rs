//! What can go wrong, grouped by what the caller would do about it.

use std::time::Duration;

use rustix::io::Errno;

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller would do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The object is not what was expected, such as shorter: use another one.
    Corrupt,
    /// There is no such object or directory.
    NotFound,
    /// The name is taken.
    Conflict,
    /// No room, or another budget is used up: disk, quota, memory, open files.
    Exhausted,
    /// The storage cannot be reached or fails: may be tried again unless the error [is final](Error::is_final).
    Unavailable,
    /// The storage, or this version, does not offer it.
    Unsupported,
    /// The call, the configuration or the permission is wrong: fix it.
    Invalid,
    /// A defect of this crate.
    Internal,
}

/// A failed operation: which one, on what, why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} {name}: {message}")]
pub struct Error {
    /// What the caller would do about it.
    pub kind: Kind,
    /// The operation that failed, such as `create` or `fsync`.
    pub op: &'static str,
    /// The path or URL of what it failed on.
    pub name: String,
    /// What was found, and what was expected.
    pub message: String,
    /// Whether a retry of the same call would prove nothing: a kernel reports a failed write-back once, and forgets it.
    pub is_final: bool,
    /// Of what may last longer than a moment, such as a service that is overloaded or away: how long the storage asks
    /// to wait before a retry, zero if it does not say so.
    pub wait: Option<Duration>,
}

impl Error {
    /// Puts an error together.
    pub fn new(kind: Kind, op: &'static str, name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind, op, name: name.into(), message: message.into(), is_final: false, wait: None }
    }

    /// The same error, marked as not to be retried.
    pub(crate) fn finally(self) -> Self {
        Self { is_final: true, ..self }
    }

    pub(crate) fn of_errno(op: &'static str, name: impl Into<String>, errno: Errno) -> Self {
        Self::new(kind_of(errno), op, name, errno.to_string())
    }
}

/// The kind of a system call's error.
pub(crate) fn kind_of(errno: Errno) -> Kind {
    match errno {
        Errno::NOENT | Errno::NOTDIR => Kind::NotFound,
        Errno::EXIST | Errno::NOTEMPTY => Kind::Conflict,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::NOMEM | Errno::MFILE | Errno::NFILE => Kind::Exhausted,
        Errno::IO
        | Errno::STALE
        | Errno::TIMEDOUT
        | Errno::BUSY
        | Errno::AGAIN
        | Errno::NODEV
        | Errno::NXIO
        | Errno::NOTCONN
        | Errno::HOSTDOWN
        | Errno::HOSTUNREACH
        | Errno::REMOTEIO
        | Errno::SHUTDOWN
        | Errno::CONNABORTED
        | Errno::CONNRESET => Kind::Unavailable,
        Errno::NOSYS | Errno::OPNOTSUPP => Kind::Unsupported,
        Errno::ROFS | Errno::ACCESS | Errno::PERM | Errno::ISDIR | Errno::NAMETOOLONG | Errno::LOOP => Kind::Invalid,
        _ => Kind::Internal,
    }
}

/// The error of reading past an object's end.
pub(crate) fn too_short(name: impl Into<String>, found: u64, offset: u64, length: usize) -> Error {
    let message = format!("expected {length} bytes at {offset}, found an object of {found} bytes");
    Error::new(Kind::Corrupt, "read", name, message)
}
