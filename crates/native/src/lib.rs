//! Binds the engine to Python as `shardfast._native`. It knows no framework, and while the engine works it never calls
//! Python.

mod checkpoint;
mod command;
mod deferred_decref;
mod dlpack;
mod drain;
mod errors;
mod hold;
mod interrupt;
mod interval;
mod keeper;
mod leaves;
mod mapped;
mod memory_samples;
mod multistep;
mod outline;
mod outlive;
mod parts;
mod pending;
mod process;
mod retention;
mod session;
mod stopping;
mod values;

use pyo3::prelude::*;

/// The Rust core of Shardfast. What it offers to people is in the package `shardfast`.
///
/// The module needs the GIL: walks through the program's containers count no references, so no other thread may change
/// a container meanwhile. A Python without the GIL turns it on, with a warning, when it imports a module that says so.
#[pymodule(gil_used = true)]
mod _native {
    use std::ffi::OsString;

    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::checkpoint::{Checkpoint, absolute_url, begin_run, newest, open, step_url};
    #[pymodule_export]
    use crate::deferred_decref::interpreter_ends;
    #[pymodule_export]
    use crate::drain::{Drain, near_place};
    #[pymodule_export]
    use crate::hold::{Hold, Stamp};
    #[pymodule_export]
    use crate::interval::{best_interval, mean_time_between_failures, time_of};
    #[pymodule_export]
    use crate::keeper::{
        Keepers, adopt_near, dismiss_keeper, keeper_process, keeper_users, meet_keepers, memory_place,
    };
    #[pymodule_export]
    use crate::leaves::Described;
    #[pymodule_export]
    use crate::mapped::{Mapped, Part};
    #[pymodule_export]
    use crate::multistep::Window;
    #[pymodule_export]
    use crate::outline::Outline;
    #[pymodule_export]
    use crate::outlive::outlive;
    #[pymodule_export]
    use crate::pending::{Pending, save};
    #[pymodule_export]
    use crate::retention::Retention;
    #[pymodule_export]
    use crate::session::{Place, Session, export_refused, flush, note_end};
    #[pymodule_export]
    use crate::stopping::Stopping;
    #[pymodule_export]
    use crate::values::{Tagged, Value, decode};

    /// Runs the `shardfast` command with these arguments, the program's name first, and returns its exit code. `host`
    /// is called if the command tells of this machine.
    #[pyfunction]
    fn cli_main(py: Python<'_>, argv: Vec<OsString>, host: Py<PyAny>) -> PyResult<i32> {
        crate::command::run(py, argv, &host)
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("VALUE_BYTES_MAX", shardfast_format::object::BYTES_MAX)?;
        module.add("VALUE_ITEMS_MAX", shardfast_format::object::ITEMS_MAX)?;
        module.add("VALUE_CONTAINERS_MAX", shardfast_format::object::CONTAINERS_MAX)?;
        crate::errors::register(module)
    }
}
