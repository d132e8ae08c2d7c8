//! The exceptions: one for each kind of failure.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use shardfast_engine::Kind;

create_exception!(shardfast, Error, PyException, "The base class of all errors of Shardfast.");
create_exception!(shardfast, Corrupt, Error, "The bytes are not those that were saved: use another checkpoint.");
create_exception!(shardfast, NotFound, Error, "Nothing is stored under that name.");
create_exception!(shardfast, Conflict, Error, "The name is already taken.");
create_exception!(shardfast, Exhausted, Error, "A disk, a quota or a budget is full.");
create_exception!(shardfast, Unavailable, Error, "The store or another rank cannot be reached now.");
create_exception!(shardfast, Unsupported, Error, "A newer version, or a feature that is not available here.");
create_exception!(shardfast, Invalid, Error, "The call, the state or a permission is wrong: fix it and call again.");
create_exception!(shardfast, Cancelled, Error, "The operation was cancelled on request.");
create_exception!(shardfast, Internal, Error, "A defect of Shardfast.");

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    for kind in Kind::ALL {
        module.add(kind.name(), class(py, kind))?;
    }
    Ok(())
}

fn class(py: Python<'_>, kind: Kind) -> Bound<'_, pyo3::types::PyType> {
    match kind {
        Kind::Corrupt => py.get_type::<Corrupt>(),
        Kind::NotFound => py.get_type::<NotFound>(),
        Kind::Conflict => py.get_type::<Conflict>(),
        Kind::Exhausted => py.get_type::<Exhausted>(),
        Kind::Unavailable => py.get_type::<Unavailable>(),
        Kind::Unsupported => py.get_type::<Unsupported>(),
        Kind::Invalid => py.get_type::<Invalid>(),
        Kind::Cancelled => py.get_type::<Cancelled>(),
        Kind::Internal => py.get_type::<Internal>(),
    }
}

/// Converts the engine's failure to its exception.
pub(crate) fn raise(error: shardfast_engine::Error) -> PyErr {
    Python::attach(|py| PyErr::from_type(class(py, error.kind), error.message))
}

/// Makes the exception of a wrong argument.
pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    Invalid::new_err(message.into())
}

/// Returns the kind called `name`.
pub(crate) fn kind(name: &str) -> PyResult<Kind> {
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    kind.ok_or_else(|| invalid(format!("expected the name of a kind of failure, found {name:?}")))
}
