//! Lets all ranks stop after the same step, once one of them was told to.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::raise;
use crate::interrupt::SIGNALS_EVERY;
use crate::process::Own;
use crate::session::{Session, seconds};

/// Agreement of the ranks on the step after which they stop.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Stopping {
    stopping: Own<Arc<shardfast_coord::Stopping>>,
}

#[pymethods]
impl Stopping {
    /// Begins the agreement of all ranks of `session`; they wait for each other for `timeout_s` once one is told.
    #[new]
    fn new(session: &Session, timeout_s: f64) -> PyResult<Stopping> {
        let stopping = session.engine()?.stopping(seconds(timeout_s)?).map_err(raise)?;
        Ok(Stopping { stopping: Own::new("this agreement to stop", stopping) })
    }

    /// Notes that this rank is told to stop. Does not wait.
    fn tell(&self) -> PyResult<()> {
        self.stopping.get()?.tell().map_err(|error| raise(shardfast_engine::of_ranks(error)))
    }

    /// Counts a step that has passed; returns whether all ranks stop after it. Waits while they agree on that.
    fn passed(&self, py: Python<'_>) -> PyResult<bool> {
        let stopping = self.stopping.get()?;
        loop {
            if let Some(is_last) = stopping.passed() {
                return Ok(is_last);
            }
            py.detach(|| stopping.wait(SIGNALS_EVERY));
            py.check_signals()?;
        }
    }

    /// Returns why the ranks could not agree after one was told; `None` if they could, or nobody was told.
    fn failure(&self) -> PyResult<Option<String>> {
        Ok(self.stopping.get()?.failure().map(|error| error.to_string()))
    }

    /// Ends the agreement. Does not wait.
    fn end(&self) -> PyResult<()> {
        self.stopping.get()?.end();
        Ok(())
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        // A forked child has no part in it.
        if let Ok(stopping) = self.stopping.get() {
            stopping.end();
        }
    }
}
