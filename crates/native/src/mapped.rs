//! Tensors in a checkpoint's files, mapped into memory.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use shardfast_tools::View;

use crate::checkpoint::Checkpoint;
use crate::errors::raise;
use crate::process::Own;

/// A checkpoint whose data files are mapped into memory when they are first read.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Mapped {
    mapped: Own<shardfast_tools::Mapped>,
}

#[pymethods]
impl Mapped {
    #[new]
    fn new(checkpoint: &Checkpoint) -> PyResult<Mapped> {
        let mapped = shardfast_tools::Mapped::new(checkpoint.engine()?.clone());
        Ok(Mapped { mapped: Own::new("this mapped checkpoint", mapped) })
    }

    /// Returns the saved parts of the tensor that is leaf `leaf`, proven. One rank alone calls it.
    fn parts(&self, py: Python<'_>, leaf: usize) -> PyResult<Vec<Part>> {
        let mapped = self.mapped.get()?;
        let views = py.detach(|| mapped.tensor(leaf)).map_err(raise)?;
        Ok(views.into_iter().map(|view| Part { view }).collect())
    }
}

/// One saved part of a tensor. Its memory is there as long as this is, in forked processes too.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Part {
    view: View,
}

#[pymethods]
impl Part {
    /// Returns the part's offsets in the tensor's global shape.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.region.offsets)
    }

    /// Returns the view's shape, in elements.
    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.region.lengths)
    }

    /// Returns the address of the elements, row-major. Writing there changes this process's memory and no file.
    #[getter]
    fn address(&self) -> usize {
        self.view.as_ptr() as usize
    }

    /// Returns its size in bytes.
    #[getter]
    fn bytes(&self) -> usize {
        self.view.len()
    }
}
