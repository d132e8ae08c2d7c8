//! Starts saves and waits for them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use shardfast_engine::{Destination, Error, Prove};

use crate::errors::{invalid, kind, raise};
use crate::interrupt::SIGNALS_EVERY;
use crate::leaves::{Described, Streams};
use crate::multistep::Window;
use crate::process::Own;
use crate::session::{Session, began, seconds};
use crate::values::Value;

/// A save in flight.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Pending {
    pending: Own<shardfast_engine::Pending>,
}

/// Begins to save what is described as the checkpoint at `url`. `values` are those of its objects, in order; `owner` is
/// kept until the save needs the tensors' memory no more; until it is staged that memory must not be written. `streams`
/// are those that the program uses now, by device: copies begin after their present work. `blocking`: the caller does
/// nothing else until the save has ended. `prove`: which replicas are compared, `None` for those of leaves that the
/// first save of a plan compares. `window` is what was captured ahead of this save. `file_bytes_max`: most bytes of
/// data in a file. `after_s`: seconds since the user's call, in which the state was described.
#[pyfunction]
#[pyo3(signature = (session, url, described, values, owner, *, step, user, timeout_s, streams=BTreeMap::new(),
                   blocking=false, prove=None, window=None, file_bytes_max=None, after_s=0.0))]
#[allow(clippy::too_many_arguments)] // as many as Python names
pub(crate) fn save(
    session: &Session,
    url: String,
    described: &Described,
    values: Vec<PyRef<'_, Value>>,
    owner: Py<PyAny>,
    step: Option<u64>,
    user: BTreeMap<String, String>,
    timeout_s: f64,
    streams: Streams,
    blocking: bool,
    prove: Option<bool>,
    window: Option<&Window>,
    file_bytes_max: Option<u64>,
    after_s: f64,
    py: Python<'_>,
) -> PyResult<Pending> {
    let (engine, began) = (session.engine()?, began(after_s)?);
    let state = described.state(engine, &values, owner, &streams, blocking)?;
    let captured = window.map(|window| window.close(py)).transpose()?;
    let is_whole_job = session.is_whole_job();
    let state = move || {
        let mut state = state();
        // Adapters number the ranks that hold a tensor as the whole job does.
        state.replicas = state.replicas.filter(|_| is_whole_job);
        state.file_bytes_max = file_bytes_max;
        match captured {
            Some(captured) => captured.over(state),
            None => state,
        }
    };
    let prove = match prove {
        None => Prove::FirstSave,
        Some(true) => Prove::EverySave,
        Some(false) => Prove::Nothing,
    };
    let destination = Destination { url, step, user, prove, blocking };
    let timeout = seconds(timeout_s)?;
    session.stand(described.coordinates());
    let pending = shardfast_engine::save_deferred(engine, destination, described.captures(), state, began, timeout);
    Ok(Pending { pending: Own::new("this save", pending) })
}

#[pymethods]
impl Pending {
    /// Waits until all that is captured eagerly is copied.
    #[pyo3(signature = (timeout_s=None))]
    fn captured(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout_s, shardfast_engine::Pending::captured)
    }

    /// Waits until all is copied.
    #[pyo3(signature = (timeout_s=None))]
    fn staged(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout_s, shardfast_engine::Pending::staged)
    }

    /// Confirms that lazily captured tensors were not modified before the save was staged, or fails the save on every
    /// rank with this kind and message. It commits only after this; only the first call counts.
    #[pyo3(signature = (kind_name=None, message=""))]
    fn confirm_unmodified(&self, kind_name: Option<&str>, message: &str) -> PyResult<()> {
        let unmodified = kind_name.map(kind).transpose()?.map_or(Ok(()), |kind| Err(Error::new(kind, message)));
        self.pending.get()?.confirm_unmodified(unmodified);
        Ok(())
    }

    /// Waits until the checkpoint is durable and visible.
    #[pyo3(signature = (timeout_s=None))]
    fn committed(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout_s, shardfast_engine::Pending::committed)
    }

    /// Returns whether the save has ended, with or without success.
    fn done(&self) -> PyResult<bool> {
        Ok(self.pending.get()?.done())
    }

    /// Waits for what follows a save that has ended, for at most that long.
    fn over(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let (pending, timeout) = (self.pending.get()?, seconds(timeout_s)?);
        py.detach(|| pending.over(timeout));
        Ok(())
    }

    /// Sets a note that the checkpoint records, if rank 0 sets it before it begins to commit.
    fn note(&self, name: String, text: String) -> PyResult<()> {
        self.pending.get()?.note(name, text);
        Ok(())
    }

    /// Returns Shardfast's own notes of the checkpoint, after the commit; the same on every rank.
    fn committed_notes(&self) -> PyResult<BTreeMap<String, String>> {
        Ok(self.pending.get()?.committed_notes())
    }

    /// Notes that the program has waited for that long in the save's call.
    fn stalled(&self, seconds: f64) -> PyResult<()> {
        self.pending.get()?.stalled(crate::session::seconds(seconds)?);
        Ok(())
    }

    /// Notes that the program has waited for the save for that long before it could change the state.
    fn waited(&self, seconds: f64) -> PyResult<()> {
        self.pending.get()?.waited(crate::session::seconds(seconds)?);
        Ok(())
    }

    /// Returns the bytes of this rank's part of the save so far: in all, copied, and taken by the storage.
    fn moved(&self) -> PyResult<(u64, u64, u64)> {
        let moved = self.pending.get()?.moved();
        Ok((moved.bytes, moved.copied, moved.stored))
    }

    /// Returns the results of the save so far, as JSON.
    fn report(&self) -> PyResult<String> {
        serde_json::to_string(&self.pending.get()?.report()).map_err(|error| invalid(error.to_string()))
    }
}

type Wait = fn(&shardfast_engine::Pending, Option<Duration>) -> shardfast_engine::Result<()>;

impl Pending {
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>, wait: Wait) -> PyResult<()> {
        let pending = self.pending.get()?;
        let until = timeout_s.map(seconds).transpose()?.map(|timeout| Instant::now() + timeout);
        // A state that is reached already is returned without releasing the interpreter, which other threads would keep
        // for a while.
        if wait(pending, Some(Duration::ZERO)).is_ok() {
            return Ok(());
        }
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNALS_EVERY, |left| left.min(SIGNALS_EVERY));
            let ended = pending.done();
            match py.detach(|| wait(pending, Some(slice))) {
                Ok(()) => return Ok(()),
                // If the save has not ended, only this slice of the wait has.
                Err(error) if ended || left == Some(Duration::ZERO) => return Err(raise(error)),
                Err(_) => py.check_signals()?,
            }
        }
    }
}
