//! Signals that a forked process outlives unless its parent ends it by one.
//!
//! Python's handlers do not learn who sent a signal, and libraries set handlers past Python in workers of their data
//! loaders. So this one is set past Python, too: `exec` takes it away, and a later handler of Python's replaces it.

#![allow(unsafe_code)] // handlers of signals, see `ARCHITECTURE.md`

use std::io;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, c_void, siginfo_t};
use pyo3::prelude::*;

/// Process whose signals end this one.
static PARENT: AtomicI32 = AtomicI32::new(0);

/// Exit code with which they do; below zero, the signal itself ends the process.
static EXIT_CODE: AtomicI32 = AtomicI32::new(-1);

/// Lets this process outlive these signals, unless `parent` sends `SIGTERM`, or is no more its parent. Then it ends
/// with that exit code; without one, by the signal.
#[pyfunction]
#[pyo3(signature = (signals, parent, exit_code=None))]
pub(crate) fn outlive(signals: Vec<i32>, parent: i32, exit_code: Option<i32>) -> PyResult<()> {
    PARENT.store(parent, Ordering::Relaxed);
    EXIT_CODE.store(exit_code.unwrap_or(-1), Ordering::Relaxed);
    for signal in signals {
        // SAFETY: all zeros are a valid `sigaction` without flags, with an empty mask.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = taken as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // SAFETY: the handler has the type that SA_SIGINFO asks for, lives as long as this library, which Python never
        // unloads, and calls only functions that a handler may call.
        if unsafe { libc::sigaction(signal, &action, null_mut()) } != 0 {
            return Err(io::Error::last_os_error().into());
        }
    }
    Ok(())
}

extern "C" fn taken(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let parent = PARENT.load(Ordering::Relaxed);
    // SAFETY: the kernel hands a valid `info` to a handler that was set with SA_SIGINFO. These functions may be called
    // in a handler; a signal that is raised in its own handler arrives when that returns.
    unsafe {
        let is_ended = signal == libc::SIGTERM && (*info).si_pid() == parent;
        if is_ended || libc::getppid() != parent {
            match EXIT_CODE.load(Ordering::Relaxed) {
                code @ 0.. => libc::_exit(code),
                _ => {
                    libc::signal(signal, libc::SIG_DFL);
                    libc::raise(signal);
                }
            }
        }
    }
}
