//! Opens committed checkpoints for Python.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use shardfast_engine::newest::newest_since;
use shardfast_engine::{Error, Kind, Loaded, PeerReads, ValueRef, Want};
use shardfast_format::region::checked_numel;
use shardfast_format::{DType, LeafKind, Manifest};

use crate::errors::{invalid, kind, raise};
use crate::interrupt::interruptible;
use crate::leaves::{self, Streams};
use crate::process::Own;
use crate::session::{Session, began, seconds};

/// A committed checkpoint whose manifest is verified.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Checkpoint {
    checkpoint: Own<Arc<shardfast_engine::Checkpoint>>,
    info: Py<PyDict>,
    leaves: Py<PyList>,
}

impl Checkpoint {
    fn new(py: Python<'_>, checkpoint: shardfast_engine::Checkpoint) -> PyResult<Checkpoint> {
        let (info, leaves) =
            (info(py, checkpoint.manifest())?.unbind(), leaves_of(py, checkpoint.manifest())?.unbind());
        Ok(Checkpoint { checkpoint: Own::new("this checkpoint", Arc::new(checkpoint)), info, leaves })
    }

    pub(crate) fn engine(&self) -> PyResult<&Arc<shardfast_engine::Checkpoint>> {
        self.checkpoint.get()
    }
}

/// Opens the checkpoint at `url`. Every rank calls it; rank 0 reads. `after_s`: seconds since the user's call of a
/// load; `None` for what only looks at the checkpoint.
#[pyfunction]
#[pyo3(signature = (session, url, *, timeout_s, after_s=None))]
pub(crate) fn open(
    py: Python<'_>,
    session: &Session,
    url: &str,
    timeout_s: f64,
    after_s: Option<f64>,
) -> PyResult<Checkpoint> {
    let timeout = seconds(timeout_s)?;
    let engine = session.engine()?;
    let since = after_s.map(began).transpose()?;
    let opened = interruptible(py, || match since {
        Some(began) => shardfast_engine::open_to_load(engine, url, timeout, began),
        None => shardfast_engine::open(engine, url, timeout).map(shardfast_engine::Checkpoint::looked_at),
    })?;
    Checkpoint::new(py, opened)
}

/// A step and its checkpoint, if there is one, and the checkpoints that were passed over.
type Found = (Option<(u64, Checkpoint)>, Vec<String>);

/// Opens the newest committed checkpoint of the run at `url`, of those of a step lower than `below` if that is given.
/// `near` is the run's nearer place, if it has one. Returns its step, it, and what was passed over, or `None` for a run
/// without one. `after_s`: seconds since the user's call.
#[pyfunction]
#[pyo3(signature = (session, url, *, near=None, older, below=None, timeout_s, after_s=0.0))]
#[allow(clippy::too_many_arguments)] // keywords of Python
pub(crate) fn newest(
    py: Python<'_>,
    session: &Session,
    url: &str,
    near: Option<&str>,
    older: bool,
    below: Option<u64>,
    timeout_s: f64,
    after_s: f64,
) -> PyResult<Found> {
    let timeout = seconds(timeout_s)?;
    let (engine, began) = (session.engine()?, began(after_s)?);
    let newest = interruptible(py, || newest_since(engine, (url, near), (below, older), began, timeout))?;
    let found = match newest.found {
        Some((step, checkpoint)) => Some((step, Checkpoint::new(py, checkpoint)?)),
        None => None,
    };
    Ok((found, newest.skipped))
}

/// Makes sure that the run at `url`, and its nearer place `near` if it has one, hold no committed checkpoint of the
/// step `step` or a later one; with `rewind`, and in the nearer place with its own flag, those move out of its way.
/// Makes the job the newest of the run. Returns for each place from which steps moved its URL, the steps, and the URL
/// of the run that they are now.
#[pyfunction]
#[pyo3(signature = (session, url, step, *, near=None, rewind, timeout_s))]
#[allow(clippy::type_complexity)] // it is what Python gets
pub(crate) fn begin_run(
    py: Python<'_>,
    session: &Session,
    url: &str,
    step: u64,
    near: Option<(String, bool)>,
    rewind: bool,
    timeout_s: f64,
) -> PyResult<Vec<(String, Vec<u64>, Option<String>)>> {
    let timeout = seconds(timeout_s)?;
    let engine = session.engine()?;
    let near = near.as_ref().map(|(near, moves)| (near.as_str(), *moves));
    let rewound = interruptible(py, || shardfast_engine::rewind::begin(engine, (url, near), step, rewind, timeout))?;
    Ok(rewound.into_iter().map(|rewound| (rewound.url, rewound.moved, rewound.into)).collect())
}

/// Returns the URL of the checkpoint of a step of a run.
#[pyfunction]
pub(crate) fn step_url(run_url: &str, step: u64) -> String {
    shardfast_engine::runs::step_url(run_url, step)
}

/// Returns a path as seen from `/`; a URL with a scheme without a slash at its end.
#[pyfunction]
pub(crate) fn absolute_url(url: &str) -> PyResult<String> {
    shardfast_engine::absolute_url(url).map_err(raise)
}

#[pymethods]
impl Checkpoint {
    /// Returns the checkpoint's URL.
    #[getter]
    fn url(&self) -> PyResult<&str> {
        Ok(self.checkpoint.get()?.url())
    }

    /// Facts about the save: attempt, step, world, created_unix_ms, writer, user.
    #[getter]
    fn info(&self, py: Python<'_>) -> Py<PyDict> {
        self.info.clone_ref(py)
    }

    /// Leaves in the manifest's order: `("tensor", key, name, layout, dtype, shape, bytes)`,
    /// `("object", key, name, layout, [(ranks, bytes)])` with ranks as half-open ranges, or
    /// `("alias", key, name, layout, of_key, of_name)`.
    #[getter]
    fn leaves(&self, py: Python<'_>) -> Py<PyList> {
        self.leaves.clone_ref(py)
    }

    /// Returns the bytes that this rank's load wants, and those of them that are verified and in place.
    fn moved(&self) -> PyResult<(u64, u64)> {
        let moved = self.checkpoint.get()?.moved().unwrap_or_default();
        Ok((moved.bytes, moved.copied))
    }

    /// Returns the bytes that this rank has read from each level on which the checkpoint lies, by its name.
    fn sources(&self) -> PyResult<Vec<(String, u64)>> {
        Ok(self.checkpoint.get()?.files.sources())
    }

    /// Notes that the load has failed on this rank with this kind and message; does nothing if it has ended.
    fn failed(&self, kind_name: &str, message: String) -> PyResult<()> {
        self.checkpoint.get()?.failed(&Error::new(kind(kind_name)?, message));
        Ok(())
    }

    /// Waits for all ranks, after a step of a load that each makes alone; a rank that refuses fails all.
    fn barrier(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let timeout = seconds(timeout_s)?;
        let checkpoint = self.checkpoint.get()?;
        interruptible(py, || checkpoint.barrier(timeout))
    }

    /// Waits like `barrier` at the end of the load.
    fn done(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let timeout = seconds(timeout_s)?;
        let checkpoint = self.checkpoint.get()?;
        interruptible(py, || checkpoint.done(timeout))
    }

    /// Merges all ranks' findings, the same on every rank: the leaves that no rank has a place for (`touched` are those
    /// that this one has), and all problems, each once, with the ranks that have it.
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn agree(
        &self,
        py: Python<'_>,
        touched: Vec<u32>,
        problems: Vec<String>,
        timeout_s: f64,
    ) -> PyResult<(Vec<u32>, Vec<(Vec<u32>, String)>)> {
        let timeout = seconds(timeout_s)?;
        let checkpoint = self.checkpoint.get()?;
        let summary = interruptible(py, || checkpoint.agree_match(&touched, &problems, timeout))?;
        Ok((summary.untouched, summary.problems))
    }

    /// Returns the reads of this rank's `load`: bytes_wanted, bytes_read, reads, files. Touches no data.
    fn plan<'py>(
        &self,
        py: Python<'py>,
        wants: &Bound<'py, PyAny>,
        values: Vec<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.checkpoint.get()?;
        let wants = leaves::wants(checkpoint.engine(), checkpoint.manifest(), wants, &Streams::new())?;
        let values = refs(values);
        let forecast = py.detach(|| checkpoint.forecast(&wants, &values)).map_err(raise)?;
        let dict = PyDict::new(py);
        dict.set_item("bytes_wanted", forecast.bytes_wanted)?;
        dict.set_item("bytes_read", forecast.bytes_read)?;
        dict.set_item("reads", forecast.reads)?;
        dict.set_item("files", forecast.files)?;
        Ok(dict)
    }

    /// Fills the wants' memory; returns the encoded values, in order, and what was moved for it: bytes_read,
    /// bytes_received, bytes_sent, is_shared. Every rank calls it, with the same `peer_reads` ("auto", "always" or
    /// "never"), and every rank raises the same error. The caller keeps the memory allocated and lets no other code use
    /// it meanwhile. `streams` are as in `save`.
    #[pyo3(signature = (wants, values, timeout_s, streams=Streams::new(), peer_reads="auto"))]
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn load<'py>(
        &self,
        py: Python<'py>,
        wants: &Bound<'py, PyAny>,
        values: Vec<(usize, usize)>,
        timeout_s: f64,
        streams: Streams,
        peer_reads: &str,
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, Bound<'py, PyDict>)> {
        let (peer_reads, timeout) = (reads_by(peer_reads)?, seconds(timeout_s)?);
        let checkpoint = self.checkpoint.get()?;
        let wants = self.wants(py, wants, &streams, timeout)?;
        let values = refs(values);
        let loaded = interruptible(py, || checkpoint.load_by(peer_reads, None, &wants, &values, timeout))?;
        moved(py, loaded)
    }
}

impl Checkpoint {
    fn wants(
        &self,
        py: Python<'_>,
        wants: &Bound<'_, PyAny>,
        streams: &Streams,
        timeout: Duration,
    ) -> PyResult<Vec<Want>> {
        let checkpoint = self.checkpoint.get()?;
        leaves::wants(checkpoint.engine(), checkpoint.manifest(), wants, streams).map_err(|error| {
            // The other ranks are about to load: they must not wait for a rank that cannot.
            let reason = Error::new(Kind::Invalid, error.value(py).to_string());
            let Err(refused) = interruptible(py, || Err::<Infallible, _>(checkpoint.refuse(reason, timeout)));
            refused
        })
    }
}

/// Returns a load's values and what was moved for it: bytes_read, bytes_received, bytes_sent, is_shared.
fn moved<'py>(py: Python<'py>, loaded: Loaded) -> PyResult<(Vec<Bound<'py, PyBytes>>, Bound<'py, PyDict>)> {
    let traffic = PyDict::new(py);
    traffic.set_item("bytes_read", loaded.traffic.bytes_read)?;
    traffic.set_item("bytes_received", loaded.traffic.bytes_received)?;
    traffic.set_item("bytes_sent", loaded.traffic.bytes_sent)?;
    traffic.set_item("is_shared", loaded.traffic.is_shared)?;
    Ok((loaded.values.into_iter().map(|bytes| PyBytes::new(py, &bytes)).collect(), traffic))
}

fn reads_by(name: &str) -> PyResult<PeerReads> {
    match name {
        "auto" => Ok(PeerReads::Auto),
        "always" => Ok(PeerReads::Always),
        "never" => Ok(PeerReads::Never),
        _ => Err(invalid(format!("peer_reads={name:?}: expected \"auto\", \"always\" or \"never\""))),
    }
}

fn refs(values: Vec<(usize, usize)>) -> Vec<ValueRef> {
    values.into_iter().map(|(leaf, value)| ValueRef { leaf, value }).collect()
}

/// Returns the dict of [`Checkpoint::info`].
fn info<'py>(py: Python<'py>, manifest: &Manifest) -> PyResult<Bound<'py, PyDict>> {
    let info = &manifest.info;
    let dict = PyDict::new(py);
    dict.set_item("attempt", &info.attempt)?;
    dict.set_item("step", info.step)?;
    dict.set_item("world", info.world)?;
    dict.set_item("created_unix_ms", info.created_unix_ms)?;
    dict.set_item("writer", &info.writer)?;
    dict.set_item("user", info.user.clone())?;
    Ok(dict)
}

/// Returns the list of [`Checkpoint::leaves`].
fn leaves_of<'py>(py: Python<'py>, manifest: &Manifest) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        let (key, name, layout) = (leaf.key, leaf.name, leaf.layout);
        match leaf.kind {
            LeafKind::Tensor { dtype, shape } => {
                let bytes = checked_numel(shape).unwrap_or(0) * DType::size_bytes(dtype);
                let shape = pyo3::types::PyTuple::new(py, shape)?;
                list.append(("tensor", key, name, layout, dtype.name(), shape, bytes))?;
            }
            LeafKind::Object => {
                let values: Vec<(Vec<(u32, u32)>, u64)> = manifest
                    .values(i)
                    .map(|(ranks, extent)| (ranks.iter().map(|r| (r.start, r.end)).collect(), extent.bytes))
                    .collect();
                list.append(("object", key, name, layout, values))?;
            }
            LeafKind::Alias { of } => {
                let of = manifest.leaf(of);
                list.append(("alias", key, name, layout, of.key, of.name))?;
            }
        }
    }
    Ok(list)
}
