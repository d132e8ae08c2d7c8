//! The ranks that save and load together, and how they meet.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use shardfast_coord::grpc::{self, Membership, Tls};
use shardfast_coord::{Coord, Ports, Topology};
use shardfast_engine::listen::{Refused, Verb};
use shardfast_engine::{Engine, Error, of_ranks, staging_bytes_default};
use shardfast_telemetry::Telemetry;

use crate::errors::{invalid, kind, raise};
use crate::interrupt::{abandonable, interruptible};
use crate::leaves::Described;
use crate::process::Own;

/// Environment variable that names a file for the events of saves and loads.
const EVENTS: &str = "SHARDFAST_EVENTS";

/// A rank's place among the ranks of its job before it has joined them. Where others join through it, it listens.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Place {
    /// The place; `None` once the rank has joined.
    place: Own<Mutex<Option<grpc::Place>>>,
    parent: Option<u32>,
    address: Option<String>,
}

#[pymethods]
impl Place {
    /// The place of `rank` in the tree of `world` ranks, of which `local_world` share a node. It listens at `port`;
    /// with 0 at one of `ports`, or at any. `tls` are the files of a certificate, its key and its authority.
    #[new]
    #[pyo3(signature = (host, rank, world, token, *, local_world=1, fan_out=None, port=0, ports=None, tls=None))]
    #[allow(clippy::too_many_arguments)] // as many as Python names
    fn new(
        py: Python<'_>,
        host: String,
        rank: u32,
        world: u32,
        token: String,
        local_world: u32,
        fan_out: Option<u32>,
        port: u16,
        ports: Option<(u16, u16)>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
    ) -> PyResult<Place> {
        let open = || {
            let topology = Topology::new(world, local_world, fan_out.unwrap_or(Topology::FAN_OUT_DEFAULT))?;
            let tls = tls.map(|(certificate, key, authority)| Tls::read(&certificate, &key, &authority)).transpose()?;
            let ports = ports.map_or_else(Ports::default, |(first, last)| Ports::only(first..=last));
            grpc::Place::open(Membership { host, ports, rank, topology, token, tls }, port)
        };
        let place = py.detach(open).map_err(|error| raise(of_ranks(error)))?;
        let (parent, address) = (place.parent(), place.address().map(ToOwned::to_owned));
        Ok(Place { place: Own::new("this rank's place in its job", Mutex::new(Some(place))), parent, address })
    }

    /// Returns the rank through which this one joins; `None` for rank 0.
    #[getter]
    fn parent(&self) -> Option<u32> {
        self.parent
    }

    /// Returns the address at which this rank's children join, `host:port`; `None` without children.
    #[getter]
    fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Asks rank 0, at `root`, for the parent's address, and registers this rank's own there. All ranks of a job call
    /// it, or none.
    fn find_parent(&self, py: Python<'_>, root: &str, timeout_s: f64) -> PyResult<String> {
        let timeout = seconds(timeout_s)?;
        let (place, root) = (self.taken()?, root.to_owned());
        let (place, parent) = abandonable(py, move || {
            let parent = place.find_parent(&root, timeout);
            (place, parent)
        })?;
        *self.place.get()?.lock().unwrap_or_else(PoisonError::into_inner) = Some(place);
        parent.map_err(|error| raise(of_ranks(error)))
    }

    /// Joins the ranks of the job, through the parent at `parent`; `None` for rank 0. `is_whole_job`: none of the job's
    /// ranks is left out. `local_rank` is this rank's number on its machine; without it, ranks stand there in order.
    #[pyo3(signature = (
        parent, timeout_s, *, local_world=1, local_rank=None, staging_bytes=None, is_whole_job=true
    ))]
    #[allow(clippy::too_many_arguments)] // keywords of Python
    fn join(
        &self,
        py: Python<'_>,
        parent: Option<&str>,
        timeout_s: f64,
        local_world: u32,
        local_rank: Option<u32>,
        staging_bytes: Option<u64>,
        is_whole_job: bool,
    ) -> PyResult<Session> {
        let timeout = seconds(timeout_s)?;
        let (place, parent) = (self.taken()?, parent.map(ToOwned::to_owned));
        let coord = abandonable(py, move || place.join(parent.as_deref(), timeout))?;
        let coord = coord.map_err(|error| raise(of_ranks(error)))?;
        let local_rank = local_rank.unwrap_or(coord.rank() % local_world.max(1));
        let staging_bytes = staging_bytes.unwrap_or_else(|| staging_bytes_default(local_world));
        let session = Session::new(coord, staging_bytes, local_rank)?;
        Ok(Session { is_whole_job, local_world, ..session })
    }
}

impl Place {
    fn taken(&self) -> PyResult<grpc::Place> {
        self.place.get()?.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(joined)
    }
}

fn joined() -> PyErr {
    invalid("this rank has joined its job already".to_owned())
}

/// The ranks that save and load together, and the memory that they stage in.
#[pyclass(frozen, weakref, module = "shardfast._native")]
pub(crate) struct Session {
    engine: Own<Arc<Engine>>,
    telemetry: Arc<Telemetry>,
    /// Number of this job's ranks on this machine.
    local_world: u32,
    is_whole_job: bool,
}

impl Session {
    /// Makes the session of a rank that is number `local_rank` among those of its machine.
    fn new(coord: Arc<dyn Coord>, staging_bytes: u64, local_rank: u32) -> PyResult<Session> {
        let engine = Engine::new(coord, staging_bytes).map_err(raise)?;
        let telemetry = Arc::new(Telemetry::new(u16::try_from(local_rank).ok(), std::env::var_os(EVENTS)));
        engine.listen(Arc::<Telemetry>::clone(&telemetry));
        let engine = Own::new("this job's session", engine);
        Ok(Session { engine, telemetry, local_world: 1, is_whole_job: true })
    }

    /// Notes where this rank stands in the meshes of its job.
    pub(crate) fn stand(&self, coordinates: &[(String, u64)]) {
        self.telemetry.stands(coordinates.iter().map(|(name, at)| (&**name, *at)));
    }

    /// Returns whether none of the job's ranks is left out.
    pub(crate) fn is_whole_job(&self) -> bool {
        self.is_whole_job
    }

    pub(crate) fn engine(&self) -> PyResult<&Arc<Engine>> {
        self.engine.get()
    }
}

#[pymethods]
impl Session {
    /// Makes the session of one process alone.
    #[staticmethod]
    #[pyo3(signature = (*, staging_bytes=None))]
    fn solo(staging_bytes: Option<u64>) -> PyResult<Session> {
        Session::new(shardfast_coord::solo(), staging_bytes.unwrap_or_else(|| staging_bytes_default(1)), 0)
    }

    /// Returns this rank's number.
    #[getter]
    fn rank(&self) -> PyResult<u32> {
        Ok(self.engine()?.rank())
    }

    /// Returns the number of ranks.
    #[getter]
    fn world(&self) -> PyResult<u32> {
        Ok(self.engine()?.world())
    }

    /// Bytes of staging memory that saves and loads may use together.
    #[getter]
    fn staging_bytes(&self) -> PyResult<u64> {
        Ok(self.engine()?.staging_bytes())
    }

    /// Serves what saves and loads of this process do over HTTP at `host:port`, moved by as many ports as this rank's
    /// number among the ranks of its machine. Returns the address at which others reach it, the one at which it
    /// listens, and the socket's descriptor.
    fn serve(&self, py: Python<'_>, address: &str) -> PyResult<(String, String, i32)> {
        let engine = self.engine()?;
        py.detach(|| self.telemetry.serve(engine, address, self.local_world)).map_err(raise)
    }

    /// Exports traces and metrics over OTLP if the environment says where to; returns whether it does.
    fn export(&self, py: Python<'_>) -> PyResult<bool> {
        let engine = self.engine()?;
        py.detach(|| self.telemetry.export(engine)).map_err(raise)
    }

    /// Checks that all ranks have the same terms for the run at `url`, each a name and what this rank was told, as a
    /// part of that call.
    fn expect_same(
        &self,
        py: Python<'_>,
        call: &str,
        url: &str,
        terms: Vec<(String, String)>,
        timeout_s: f64,
    ) -> PyResult<()> {
        let (engine, timeout) = (self.engine()?, seconds(timeout_s)?);
        interruptible(py, || engine.expect_same(call, url, terms, timeout))
    }

    /// Returns whether it is so on all ranks, each of which makes that call.
    fn are_all(&self, py: Python<'_>, call: &str, is_so: bool, timeout_s: f64) -> PyResult<bool> {
        let (engine, timeout) = (self.engine()?, seconds(timeout_s)?);
        let decide = |all: Vec<bool>| Ok(vec![!all.contains(&false); all.len()]);
        interruptible(py, || engine.decide(("agree on", call), Ok(is_so), decide, timeout))
    }

    /// Makes and page-locks staging memory for what a save of that state copies from devices, in the background.
    fn reserve(&self, described: &Described) -> PyResult<()> {
        let bytes = described.device_bytes();
        // Memory that is locked for one device is locked for all.
        let Some((device, _)) = bytes.first_key_value() else { return Ok(()) };
        self.engine()?.accelerators().reserve(*device, bytes.values().sum()).map_err(raise)
    }

    /// Notes where this rank stands in the meshes of its job, by the name of the dimension, for records of loads under
    /// way and of what follows.
    #[allow(clippy::needless_pass_by_value)] // Python hands over a list
    fn stands(&self, coordinates: Vec<(String, u64)>) {
        self.stand(&coordinates);
    }

    /// Returns a sentence for each operation that has waited longer than `patience_s` for other ranks to call it, once,
    /// and whether any waits for ranks.
    fn overdue(&self, patience_s: f64) -> PyResult<(Vec<String>, bool)> {
        let patience = seconds(patience_s)?;
        Ok(self.engine()?.overdue(patience))
    }

    /// Takes part in the next operation with a failure, so that every rank raises it instead of waiting for this one.
    /// `asked` is the save or load that fails so, if that is one: whether it is a save, its place, its step, and the
    /// seconds since the user's call. Always raises.
    #[pyo3(signature = (kind_name, message, timeout_s, asked=None))]
    fn refuse(
        &self,
        py: Python<'_>,
        kind_name: &str,
        message: String,
        timeout_s: f64,
        asked: Option<(bool, String, Option<u64>, f64)>,
    ) -> PyResult<()> {
        let error = Error::new(kind(kind_name)?, message);
        let timeout = seconds(timeout_s)?;
        let engine = self.engine()?;
        let refused = match asked {
            None => None,
            Some((is_save, url, step, after_s)) => {
                let verb = if is_save { Verb::Save } else { Verb::Load };
                Some(Refused { verb, url, step, began: began(after_s)? })
            }
        };
        interruptible(py, || {
            Err(match refused {
                Some(refused) => engine.refuse_listened(&refused, error, timeout),
                None => engine.refuse(error, timeout),
            })
        })
    }
}

/// Waits until what this process has to say of its saves and loads is stored and sent, for at most that long.
#[pyfunction]
pub(crate) fn flush(py: Python<'_>, timeout_s: f64) -> PyResult<()> {
    let timeout = seconds(timeout_s)?;
    py.detach(|| {
        let until = Instant::now() + timeout;
        shardfast_engine::wait_collected(timeout);
        shardfast_telemetry::flush(until.saturating_duration_since(Instant::now()));
    });
    Ok(())
}

/// Returns why the endpoint of OTLP refuses what this process exports, the first time that it is asked after a refusal.
#[pyfunction]
pub(crate) fn export_refused() -> Option<String> {
    shardfast_telemetry::export_refused()
}

/// Notes beside the records of a run that its job has ended; waits for at most that long.
#[pyfunction]
pub(crate) fn note_end(py: Python<'_>, url: &str, timeout_s: f64) -> PyResult<()> {
    let timeout = seconds(timeout_s)?;
    py.detach(|| shardfast_telemetry::note_end(url, timeout));
    Ok(())
}

/// Returns the time of a user's call, given the seconds since then.
pub(crate) fn began(after_s: f64) -> PyResult<Instant> {
    let now = Instant::now();
    Ok(now.checked_sub(seconds(after_s)?).unwrap_or(now))
}

pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(format!("a time of {seconds} seconds: {error}")))
}
