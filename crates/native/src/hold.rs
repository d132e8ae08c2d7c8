//! Keeps the memory of tensors allocated, and detects writes and moves meanwhile.

#![allow(unsafe_code)] // calls of one argument without a tuple for it

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyString, PyWeakrefReference};

use crate::errors::invalid;

/// Refers weakly to the memory of tensors, and detects writes and moves.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Hold {
    memory: Vec<Py<PyWeakrefReference>>,
    address: Py<PyAny>,
    version: Py<PyString>,
    retain: Option<Py<PyAny>>,
    wrapped: Vec<usize>,
    addresses: Vec<u64>,
    /// `true` if the held memory was found elsewhere.
    has_moved: AtomicBool,
}

/// The state of a hold's tensors at a moment. Keeps their memory allocated, and no tensor alive beyond that.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Stamp {
    memory: Vec<Py<PyAny>>,
    versions: Vec<i64>,
}

#[pymethods]
impl Hold {
    /// `memory` are the objects that hold the tensors' memory, one for each, and `address` returns the present address
    /// of one; `version` is the name of the tensors' attribute that counts writes. `retain` is called with memory that
    /// was reached through a weak reference, so that the new reference keeps it allocated. The other methods take the
    /// tensors that lie in this memory, and behind them those that wrap some of them and count writes, too: `wrapped`
    /// gives the number of what each of these wraps.
    #[new]
    fn new(
        memory: Vec<Py<PyAny>>,
        address: Py<PyAny>,
        version: Py<PyString>,
        retain: Option<Py<PyAny>>,
        wrapped: Vec<usize>,
        py: Python<'_>,
    ) -> PyResult<Hold> {
        if let Some(number) = wrapped.iter().find(|&&number| number >= memory.len()) {
            return Err(invalid(format!("expected numbers of {} tensors, found {number}", memory.len())));
        }
        let weak = memory.iter().map(|memory| Ok(PyWeakrefReference::new(memory.bind(py))?.unbind()));
        let weak = weak.collect::<PyResult<_>>()?;
        let (addresses, has_moved) = (Vec::new(), AtomicBool::new(false));
        let mut hold = Hold { memory: weak, address, version, retain, wrapped, addresses, has_moved };
        hold.addresses = hold.now(py, &memory)?;
        Ok(hold)
    }

    /// The present state of the hold's tensors; `None` when their memory was freed or has moved before. The caller has
    /// checked that the tensors have the same addresses; `changes` checks their memory, which would take too long here.
    fn stamp(&self, tensors: &Bound<'_, PyList>) -> PyResult<Option<Stamp>> {
        if self.has_moved.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let py = tensors.py();
        let memory = self.memory.iter().map(|weak| Some(weak.bind(py).upgrade()?.unbind()));
        let Some(memory) = memory.collect::<Option<Vec<_>>>() else { return Ok(None) };
        if let Some(retain) = &self.retain {
            memory.iter().try_for_each(|memory| call(py, retain, memory).map(drop))?;
        }
        Ok(Some(Stamp { memory, versions: self.versions(tensors)? }))
    }

    /// Returns the changes since the stamp was made: each tensor's number, and a word such as "written".
    fn changes(&self, tensors: &Bound<'_, PyList>, stamp: &Stamp) -> PyResult<Vec<(usize, &'static str)>> {
        let (addresses, versions) = (self.now(tensors.py(), &stamp.memory)?, self.versions(tensors)?);
        if addresses != self.addresses {
            self.has_moved.store(true, Ordering::Relaxed);
        }
        let moved = addresses.iter().zip(&self.addresses).map(|(now, then)| now != then);
        let mut is_written = vec![false; self.memory.len()];
        let numbers = (0..self.memory.len()).chain(self.wrapped.iter().copied());
        for (number, (now, then)) in numbers.zip(versions.iter().zip(&stamp.versions)) {
            is_written[number] |= now != then;
        }
        let changes = moved.zip(is_written).map(|(is_moved, is_written)| match (is_moved, is_written) {
            (true, _) => Some("resized or moved"),
            (false, true) => Some("written"),
            (false, false) => None,
        });
        Ok(changes.enumerate().filter_map(|(number, what)| Some((number, what?))).collect())
    }
}

impl Hold {
    /// Returns the present addresses, which show whether memory has moved: resized memory has its new address before
    /// the old is freed.
    fn now(&self, py: Python<'_>, memory: &[Py<PyAny>]) -> PyResult<Vec<u64>> {
        memory.iter().map(|memory| call(py, &self.address, memory)?.cast_into::<PyInt>()?.extract()).collect()
    }

    fn versions(&self, tensors: &Bound<'_, PyList>) -> PyResult<Vec<i64>> {
        let expected = self.memory.len() + self.wrapped.len();
        if tensors.len() != expected {
            return Err(invalid(format!("expected {expected} tensors, found {}", tensors.len())));
        }
        let name = self.version.bind(tensors.py());
        tensors.iter().map(|tensor| tensor.getattr(name)?.extract()).collect()
    }
}

/// Calls a function with one argument.
fn call<'py>(py: Python<'py>, function: &Py<PyAny>, argument: &Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let end = std::ptr::null_mut::<ffi::PyObject>();
    // SAFETY: both are live objects, and the interpreter is attached; a new reference or an error comes back.
    unsafe {
        let found = ffi::PyObject_CallFunctionObjArgs(function.as_ptr(), argument.as_ptr(), end);
        Bound::from_owned_ptr_or_err(py, found)
    }
}
