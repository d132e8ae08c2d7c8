//! Saves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use shardfast_engine::Destination;

use crate::errors::{invalid, raise};
use crate::leaves;
use crate::session::{Session, seconds};

/// How often a wait looks for signals: Ctrl-C must not hang.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// A save in flight.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Pending {
    pending: shardfast_engine::Pending,
}

/// Begins to save these leaves as the checkpoint at `url`. `owner` is kept until the save needs their memory no more;
/// until it is staged nobody may write that memory.
#[pyfunction]
#[pyo3(signature = (session, url, leaves, owner, *, step, user, timeout_s))]
pub(crate) fn save(
    session: &Session,
    url: String,
    leaves: &Bound<'_, PyAny>,
    owner: Py<PyAny>,
    step: Option<u64>,
    user: BTreeMap<String, String>,
    timeout_s: f64,
) -> PyResult<Pending> {
    let state = leaves::state(leaves, owner)?;
    let destination = Destination { url, step, user };
    let timeout = seconds(timeout_s)?;
    Ok(Pending { pending: shardfast_engine::save(&session.engine, destination, state, timeout) })
}

#[pymethods]
impl Pending {
    /// Waits until the state may change.
    #[pyo3(signature = (timeout_s=None))]
    fn staged(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout_s, shardfast_engine::Pending::staged)
    }

    /// Waits until the checkpoint is durable and visible.
    #[pyo3(signature = (timeout_s=None))]
    fn committed(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout_s, shardfast_engine::Pending::committed)
    }

    /// Whether the save has ended, well or badly.
    fn done(&self) -> bool {
        self.pending.done()
    }

    /// What the save did so far, as JSON.
    fn report(&self) -> PyResult<String> {
        serde_json::to_string(&self.pending.report()).map_err(|error| invalid(error.to_string()))
    }
}

type Wait = fn(&shardfast_engine::Pending, Option<Duration>) -> shardfast_engine::Result<()>;

impl Pending {
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>, wait: Wait) -> PyResult<()> {
        let until = timeout_s.map(seconds).transpose()?.map(|timeout| Instant::now() + timeout);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNALS_EVERY, |left| left.min(SIGNALS_EVERY));
            let ended = self.pending.done();
            match py.detach(|| wait(&self.pending, Some(slice))) {
                Ok(()) => return Ok(()),
                // Of a save that had not ended before the wait this may be the end of the slice only.
                Err(error) if ended || left == Some(Duration::ZERO) => return Err(raise(error)),
                Err(_) => py.check_signals()?,
            }
        }
    }
}
