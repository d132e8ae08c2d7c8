//! What system calls answer.

pub use rustix::io::Errno;

/// A system call's result.
pub type Sys<T> = Result<T, Errno>;
