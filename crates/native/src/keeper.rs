//! Starts the keeper of a run on this machine, and asks it.

use std::ffi::OsString;
use std::time::Duration;

use pyo3::prelude::*;
use shardfast_tools::neighbours::{self, Copies};

use crate::errors::raise;
use crate::interrupt::interruptible;
use crate::session::{Session, seconds};

/// Program that runs the command again, for an interpreter.
const PROGRAM: &str = "import sys; from shardfast._command import main; sys.exit(main())";

/// Returns how another process runs the `shardfast` command.
pub(crate) fn command(py: Python<'_>) -> PyResult<Vec<OsString>> {
    let interpreter: OsString = py.import("sys")?.getattr("executable")?.extract()?;
    Ok(vec![interpreter, "-c".into(), PROGRAM.into()])
}

/// Returns the name of the keeper of a run on this machine, and the run's place in its memory.
#[pyfunction]
pub(crate) fn memory_place(py: Python<'_>, url: &str) -> (String, String) {
    py.detach(|| shardfast_cli::memory_place(url))
}

/// Keepers of a job's machines, which have met.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Keepers {
    machines: neighbours::Machines,
    url: String,
    linger: Duration,
}

/// Starts the keeper of a run on each machine, unless one runs, and has them meet; each ends when it was not used for
/// `linger_s` seconds. Each file has `copies` on machines of other domains, which are sent at `rate` bytes a second at
/// most. Every rank must call it, as a part of that `call`.
#[pyfunction]
#[pyo3(signature = (session, call, url, *, linger_s, copies, rate, domain, timeout_s))]
#[allow(clippy::too_many_arguments)] // keywords of Python
pub(crate) fn meet_keepers(
    py: Python<'_>,
    session: &Session,
    call: &str,
    url: &str,
    linger_s: f64,
    copies: u32,
    rate: Option<u64>,
    domain: Option<String>,
    timeout_s: f64,
) -> PyResult<Keepers> {
    let (me, linger, within) = (command(py)?, seconds(linger_s)?, seconds(timeout_s)?);
    let copies = Copies { count: copies, rate };
    let (engine, start) = (session.engine()?, || shardfast_cli::start_keeper(url, linger, &me).map(drop));
    let machines =
        interruptible(py, || neighbours::meet(engine, (call, url), (copies, domain.as_deref()), start, within))?;
    Ok(Keepers { machines, url: url.to_owned(), linger })
}

#[pymethods]
impl Keepers {
    /// Number of the machines.
    #[getter]
    fn machines(&self) -> u32 {
        self.machines.count
    }

    /// Whether this rank is the lowest of its machine: it starts the keeper there.
    #[getter]
    fn is_lowest(&self) -> bool {
        self.machines.is_lowest
    }

    /// Starts the keeper of this machine again, in place of one that has died.
    fn revive(&self, py: Python<'_>) -> PyResult<()> {
        let me = command(py)?;
        let start = || shardfast_cli::start_keeper(&self.url, self.linger, &me).map(drop);
        py.detach(|| self.machines.revive(start)).map_err(raise)
    }
}

/// Returns the process of the keeper of that name; `None` without one, or if it does not answer.
#[pyfunction]
pub(crate) fn keeper_process(py: Python<'_>, name: &str) -> Option<u32> {
    py.detach(|| shardfast_cli::keeper_process(name))
}

/// Returns the number of processes that use the keeper of that name.
#[pyfunction]
pub(crate) fn keeper_users(py: Python<'_>, name: &str) -> u64 {
    py.detach(|| shardfast_cli::keeper_users(name))
}

/// Has the keeper of that name end, and those of the job's other machines if `all` are to, once what only they have is
/// at the run's own place.
#[pyfunction]
#[pyo3(signature = (name, *, all))]
pub(crate) fn dismiss_keeper(py: Python<'_>, name: &str, all: bool) -> PyResult<()> {
    py.detach(|| shardfast_cli::dismiss_keeper(name, all)).map_err(raise)
}

/// Makes the job of the session, which saves into the run at `url`, that of the run's nearer place `near` as well: a
/// new one, from `step` on.
#[pyfunction]
pub(crate) fn adopt_near(py: Python<'_>, session: &Session, url: &str, near: &str, step: u64) -> PyResult<()> {
    let engine = session.engine()?;
    py.detach(|| shardfast_engine::rewind::adopt(engine, url, near, step)).map_err(raise)
}
