//! The ranks that save and load together.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use shardfast_engine::{Engine, Error, staging_bytes_default};

use crate::errors::{invalid, kind, raise};
use crate::process::Own;

/// The ranks that save and load together, and the memory that they stage in.
#[pyclass(frozen, weakref, module = "shardfast._native")]
pub(crate) struct Session {
    engine: Own<Arc<Engine>>,
    address: Option<String>,
}

impl Session {
    fn new(engine: Arc<Engine>, address: Option<String>) -> Session {
        Session { engine: Own::new("this job's session", engine), address }
    }

    pub(crate) fn engine(&self) -> PyResult<&Arc<Engine>> {
        self.engine.get()
    }
}

#[pymethods]
impl Session {
    /// One process alone.
    #[staticmethod]
    #[pyo3(signature = (*, staging_bytes=None))]
    fn solo(staging_bytes: Option<u64>) -> PyResult<Session> {
        let staging_bytes = staging_bytes.unwrap_or_else(|| staging_bytes_default(1));
        Ok(Session::new(Engine::new(shardfast_coord::solo(), staging_bytes).map_err(raise)?, None))
    }

    /// Rank 0 of `world`: listens on a free port of `host`. The other ranks `join` its `address`.
    #[staticmethod]
    #[pyo3(signature = (host, world, token, *, local_world=1, staging_bytes=None))]
    fn serve(
        py: Python<'_>,
        host: &str,
        world: u32,
        token: &str,
        local_world: u32,
        staging_bytes: Option<u64>,
    ) -> PyResult<Session> {
        let (coord, address) = py
            .detach(|| shardfast_coord::grpc::serve(host, world, token))
            .map_err(|error| raise(Error::from(error)))?;
        let staging_bytes = staging_bytes.unwrap_or_else(|| staging_bytes_default(local_world));
        Ok(Session::new(Engine::new(coord, staging_bytes).map_err(raise)?, Some(address)))
    }

    /// Rank `rank` of `world`, which joins rank 0 at `address` and can itself be reached at `host`.
    #[staticmethod]
    #[pyo3(signature = (address, host, rank, world, token, timeout_s, *, local_world=1, staging_bytes=None))]
    #[allow(clippy::too_many_arguments)] // as many as Python names
    fn join(
        py: Python<'_>,
        address: &str,
        host: &str,
        rank: u32,
        world: u32,
        token: &str,
        timeout_s: f64,
        local_world: u32,
        staging_bytes: Option<u64>,
    ) -> PyResult<Session> {
        let timeout = seconds(timeout_s)?;
        let coord = py
            .detach(|| shardfast_coord::grpc::join(address, host, rank, world, token, timeout))
            .map_err(|error| raise(Error::from(error)))?;
        let staging_bytes = staging_bytes.unwrap_or_else(|| staging_bytes_default(local_world));
        Ok(Session::new(Engine::new(coord, staging_bytes).map_err(raise)?, None))
    }

    /// This rank's number.
    #[getter]
    fn rank(&self) -> PyResult<u32> {
        Ok(self.engine()?.rank())
    }

    /// Number of ranks.
    #[getter]
    fn world(&self) -> PyResult<u32> {
        Ok(self.engine()?.world())
    }

    /// Where rank 0 listens; `None` on other ranks and alone.
    #[getter]
    fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Bytes of staging memory that saves and loads may use together.
    #[getter]
    fn staging_bytes(&self) -> PyResult<u64> {
        Ok(self.engine()?.staging_bytes())
    }

    /// Takes part in the next operation with a failure, so that every rank raises it instead of waiting for this one.
    /// Always raises.
    fn refuse(&self, py: Python<'_>, kind_name: &str, message: String, timeout_s: f64) -> PyResult<()> {
        let error = Error::new(kind(kind_name)?, message);
        let timeout = seconds(timeout_s)?;
        let engine = self.engine()?;
        Err(raise(py.detach(|| engine.refuse(error, timeout))))
    }
}

pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(format!("a time of {seconds} seconds: {error}")))
}
