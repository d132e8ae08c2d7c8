//! Defines the results of system calls.

pub use rustix::io::Errno;

/// Result of a system call.
pub type Sys<T> = Result<T, Errno>;
