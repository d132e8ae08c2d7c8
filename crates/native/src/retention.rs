//! Deletes checkpoints of a run by its retention rules.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use shardfast_engine::retention::{self, Best, Keep};

use crate::interrupt::interruptible;
use crate::process::Own;
use crate::session::{Session, seconds};

/// The retention of one run. One rank has it.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Retention {
    retention: Own<Mutex<retention::Retention>>,
}

#[pymethods]
impl Retention {
    /// Makes the retention of the run at `url`. It keeps the newest `last` checkpoints, those of a step that is a
    /// multiple of `every`, and those that are `best`: a metric, how many, and whether larger values are better. A
    /// round fails once no request has succeeded for `timeout_s`.
    #[new]
    #[pyo3(signature = (url, *, last, every, best, timeout_s))]
    fn new(
        url: &str,
        last: Option<u64>,
        every: Option<u64>,
        best: Vec<(String, u64, bool)>,
        timeout_s: f64,
    ) -> PyResult<Retention> {
        let within = seconds(timeout_s)?;
        let best = best.into_iter().map(|(metric, count, largest)| Best { metric, count, largest }).collect();
        let retention = retention::Retention::new(url, Keep { last, every, best }).within(within);
        Ok(Retention { retention: Own::new("this retention", Mutex::new(retention)) })
    }

    /// Deletes from now on only while the job of that session is the newest of the run at `url`.
    fn begin(&self, py: Python<'_>, session: &Session, url: &str) -> PyResult<()> {
        let job = session.engine()?.job(url);
        self.locked(py, |retention| {
            retention.begin(job);
            Ok(())
        })
    }

    /// Takes back the committed checkpoints that no rule keeps; `made` are the steps whose saves this process has
    /// begun, in that order. Returns the steps that left, and those that stay because of foreign files: the URL of
    /// each, and the reason.
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn retain(&self, py: Python<'_>, made: Vec<u64>) -> PyResult<(Vec<u64>, Vec<(String, String)>)> {
        let retained = self.locked(py, |retention| retention.retain(&made))?;
        Ok((retained.left, retained.spared.into_iter().map(|spared| (spared.url, spared.reason)).collect()))
    }

    /// Deletes the files of these checkpoints, or of all that were taken back earlier; returns the steps of which it
    /// deleted any.
    #[pyo3(signature = (steps))]
    fn clear(&self, py: Python<'_>, steps: Option<Vec<u64>>) -> PyResult<Vec<u64>> {
        self.locked(py, |retention| retention.clear(steps.as_deref()))
    }
}

impl Retention {
    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut retention::Retention) -> shardfast_engine::Result<T> + Send,
    ) -> PyResult<T> {
        let retention = self.retention.get()?;
        interruptible(py, || call(&mut retention.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}
