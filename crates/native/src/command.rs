//! The `shardfast` command, and Python's findings about this machine.

use std::ffi::OsString;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardfast_cli::{Finding, Host, Status};

/// Name, status, finding and consequence.
type Row = (String, String, String, String);

/// Runs the command, which holds no lock of Python's unless it calls `host`.
pub(crate) fn run(py: Python<'_>, argv: Vec<OsString>, host: &Py<PyAny>) -> PyResult<i32> {
    let mut failure = None;
    let ask = || {
        Python::attach(|py| asked(host.bind(py))).unwrap_or_else(|error| {
            failure = Some(error);
            Host::default()
        })
    };
    let me = crate::keeper::command(py)?;
    let exit_code = py.detach(|| shardfast_cli::run(argv, &me, ask));
    failure.map_or(Ok(exit_code), Err)
}

fn asked(host: &Bound<'_, PyAny>) -> PyResult<Host> {
    let (staging_bytes, rows): (Option<u64>, Vec<Row>) = host.call0()?.extract()?;
    let finding = |(name, status, found, follows): Row| {
        let status = match status.as_str() {
            "ok" => Status::Ok,
            "limited" => Status::Limited,
            "failed" => Status::Failed,
            other => {
                let message = format!("{name}: expected the status \"ok\", \"limited\" or \"failed\", found {other:?}");
                return Err(PyValueError::new_err(message));
            }
        };
        Ok(Finding { name, status, found, follows })
    };
    Ok(Host { staging_bytes, findings: rows.into_iter().map(finding).collect::<PyResult<_>>()? })
}
