//! Objects of Python that keep memory allocated while the engine reads it, and are given back as soon as it has.
//!
//! The engine's threads never enter Python: one that did while the interpreter ends would end the process. What they
//! drop is given back by the next thread that calls this module. So that this does not wait for the program's next
//! call, they ask the interpreter to make one between two of the program's instructions, which needs no lock of it
//! (`Py_AddPendingCall`; CPython's manual, "Asynchronous Notifications"). It makes it in its main thread: a program
//! that trains in another thread gives back at its next call.

#![allow(unsafe_code)] // asks the interpreter from any thread

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;

/// `true` while the interpreter was asked and has not called yet.
static IS_ASKED: AtomicBool = AtomicBool::new(false);
/// Threads that ask at this moment.
static ASKING: AtomicUsize = AtomicUsize::new(0);
/// `true` once the interpreter is about to end: it is not asked any more.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// An object that keeps memory allocated.
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    pub(crate) fn new(object: Py<PyAny>) -> Owner {
        Owner(Some(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.0.take());
        if !IS_ASKED.swap(true, Ordering::SeqCst) && !ask() {
            IS_ASKED.store(false, Ordering::SeqCst);
        }
    }
}

/// Asks the interpreter to call [`give_back`]; whether it will.
fn ask() -> bool {
    ASKING.fetch_add(1, Ordering::SeqCst);
    // SAFETY: any thread may call it as long as the interpreter lives, which waits for this thread before it ends.
    let asked = !IS_OVER.load(Ordering::SeqCst)
        && unsafe { ffi::Py_AddPendingCall(Some(give_back), std::ptr::null_mut()) } == 0;
    ASKING.fetch_sub(1, Ordering::SeqCst);
    asked
}

/// Runs in the interpreter: PyO3 releases dropped references when this thread attaches.
extern "C" fn give_back(_: *mut c_void) -> c_int {
    IS_ASKED.store(false, Ordering::SeqCst);
    Python::try_attach(|_| ());
    0
}

/// Records that the interpreter is about to end: no thread asks it for anything afterwards.
#[pyfunction]
pub(crate) fn interpreter_ends() {
    IS_OVER.store(true, Ordering::SeqCst);
    // Asking takes no time. A forked process does not wait for a thread that it does not have.
    let until = Instant::now() + Duration::from_secs(1);
    while ASKING.load(Ordering::SeqCst) > 0 && Instant::now() < until {
        std::thread::yield_now();
    }
}
