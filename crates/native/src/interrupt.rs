//! Runs calls of the engine so that Ctrl-C ends them.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use shardfast_engine::{Error, Kind, Result};
use shardfast_transfer::interrupt::{Interrupt, within};

use crate::errors::raise;

/// Interval at which a wait checks for signals.
pub(crate) const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// Makes a call of the engine on a thread of its own, without the interpreter. A signal whose handler raises, such as
/// Ctrl-C, asks the call to end.
///
/// # Errors
/// The call's; the handler's exception, once the call has ended.
pub(crate) fn interruptible<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let interrupt = Arc::new(Interrupt::default());
    let (ended, ends) = crossbeam_channel::bounded::<()>(0);
    thread::scope(|scope| {
        let of_call = Some(Arc::clone(&interrupt));
        let body = move || {
            let _ended = ended;
            within(of_call, call)
        };
        let thread = thread::Builder::new().name("shardfast-call".to_owned()).spawn_scoped(scope, body);
        let thread = thread.map_err(|error| raise(Error::new(Kind::Exhausted, format!("start a thread: {error}"))))?;
        let mut raised = None;
        // Nothing is sent: the channel closes when the call has ended.
        while let Err(crossbeam_channel::RecvTimeoutError::Timeout) = py.detach(|| ends.recv_timeout(SIGNALS_EVERY)) {
            raised = raised.or_else(|| py.check_signals().err());
            if raised.is_some() {
                py.detach(|| interrupt.ask());
            }
        }
        match (py.detach(|| thread.join()), raised) {
            (Err(panic), _) => resume_unwind(panic),
            (Ok(_), Some(raised)) => Err(raised),
            (Ok(done), None) => done.map_err(raise),
        }
    })
}

/// Makes a call that changes nothing of the program on a thread of its own, without the interpreter, and leaves it
/// alone when a signal's handler raises.
///
/// # Errors
/// The handler's exception.
pub(crate) fn abandonable<T: Send + 'static>(py: Python<'_>, call: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (sender, answer) = crossbeam_channel::bounded(1);
    let body = move || {
        // After an interrupt the caller has gone: the answer is dropped.
        let _ = sender.send(call());
    };
    let thread = thread::Builder::new().name("shardfast-call".to_owned()).spawn(body);
    let thread = thread.map_err(|error| raise(Error::new(Kind::Exhausted, format!("start a thread: {error}"))))?;
    loop {
        match py.detach(|| answer.recv_timeout(SIGNALS_EVERY)) {
            Ok(answer) => return Ok(answer),
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(crossbeam_channel::RecvTimeoutError::Disconnected) => match py.detach(|| thread.join()) {
                Err(panic) => resume_unwind(panic),
                Ok(()) => return Err(raise(Error::internal("a call ended without an answer"))),
            },
        }
    }
}
