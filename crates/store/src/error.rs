//! Defines the errors, grouped by the caller's reaction.

use std::time::Duration;

use rustix::io::Errno;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of an [`Error`], by the caller's reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "keeper", derive(serde::Serialize, serde::Deserialize))]
pub enum Kind {
    /// The object is not as expected, for example shorter: use another one.
    Corrupt,
    /// No such object or directory exists.
    NotFound,
    /// The name is taken.
    Conflict,
    /// Space or another budget is used up: disk, quota, memory, open files.
    Exhausted,
    /// The storage cannot be reached or fails: retry, unless the error [is final](Error::is_final).
    Unavailable,
    /// The storage, or this version, does not offer the operation.
    Unsupported,
    /// The call, the configuration or the permission is wrong: correct it.
    Invalid,
    /// A defect of this crate.
    Internal,
}

/// A failed operation: which one, on which object, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} {name}: {message}")]
pub struct Error {
    /// Kind of the error.
    pub kind: Kind,
    /// Operation that failed, such as `create` or `fsync`.
    pub op: &'static str,
    /// Path or URL of the object on which it failed.
    pub name: String,
    /// Description of what was expected and what was found.
    pub message: String,
    /// `true` if a retry of the same call would prove nothing: a kernel reports a failed write-back once, and forgets
    /// it.
    pub is_final: bool,
    /// Time that the storage asks to wait before a retry, zero if it gives none. `None` for errors that do not last,
    /// unlike an overloaded or unreachable service.
    pub wait: Option<Duration>,
}

impl Error {
    /// Makes an error from its parts.
    pub fn new(kind: Kind, op: &'static str, name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind, op, name: name.into(), message: message.into(), is_final: false, wait: None }
    }

    /// Returns the same error, marked as not to be retried.
    pub(crate) fn finally(self) -> Self {
        Self { is_final: true, ..self }
    }

    pub(crate) fn of_errno(op: &'static str, name: impl Into<String>, errno: Errno) -> Self {
        Self::new(kind_of(errno), op, name, errno.to_string())
    }
}

/// Returns the kind of a system call's error.
pub(crate) fn kind_of(errno: Errno) -> Kind {
    match errno {
        Errno::NOENT | Errno::NOTDIR => Kind::NotFound,
        Errno::EXIST | Errno::NOTEMPTY => Kind::Conflict,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::NOMEM | Errno::MFILE | Errno::NFILE => Kind::Exhausted,
        Errno::IO
        | Errno::STALE
        // Clients of NFS and GlusterFS say so of an open file that the server has lost.
        | Errno::BADF
        | Errno::BADFD
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

/// Returns the error of reading past an object's end.
pub(crate) fn too_short(name: impl Into<String>, found: u64, offset: u64, length: usize) -> Error {
    let message = format!("expected {length} bytes at {offset}, found an object of {found} bytes");
    Error::new(Kind::Corrupt, "read", name, message)
}

/// Returns a number of bytes as text.
pub fn said_bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let power = UNITS.iter().enumerate().skip(1).take_while(|(i, _)| bytes >= 1e3_f64.powi(*i as i32)).count();
    let number = bytes / 1e3_f64.powi(power as i32);
    let digits = if power == 0 || number >= 100.0 { 0 } else { 1 };
    format!("{number:.digits$} {}", UNITS[power])
}
