//! Python's builtin values and `Tagged` ones as the format's typed encoding.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyType};
use shardfast_format::object::{self, DEPTH_MAX};
use shardfast_format::{Int, Tag, Value};

use crate::errors::{invalid, raise};

/// A value that is no builtin, said in builtins: `tag` is a name of the format's closed table.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Tagged {
    tag: Tag,
    value: Py<PyAny>,
}

#[pymethods]
impl Tagged {
    #[new]
    fn new(tag: &str, value: Py<PyAny>) -> PyResult<Tagged> {
        let tag = Tag::from_name(tag).ok_or_else(|| invalid(format!("the format has no tag {tag:?}")))?;
        Ok(Tagged { tag, value })
    }

    #[getter]
    fn tag(&self) -> &'static str {
        self.tag.name()
    }

    #[getter]
    fn value(&self, py: Python<'_>) -> Py<PyAny> {
        self.value.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Tagged({:?}, {})", self.tag.name(), self.value.bind(py).repr()?))
    }
}

/// The encoding of `None`, `bool`, `int`, `float`, `str`, `bytes`, `list`, `dict` and `Tagged`, of exactly these types.
#[pyfunction]
pub(crate) fn encode<'py>(py: Python<'py>, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let value = to_value(value, 0)?;
    let bytes = object::encode(&value).map_err(|error| raise(error.into()))?;
    Ok(PyBytes::new(py, &bytes))
}

/// The value that [`encode`] encoded.
#[pyfunction]
pub(crate) fn decode<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let value = object::decode(data).map_err(|error| raise(error.into()))?;
    to_python(py, &value)
}

fn to_value(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth > 2 * DEPTH_MAX {
        return Err(invalid(format!("a value is nested deeper than {DEPTH_MAX} levels")));
    }
    if value.is_none() {
        return Ok(Value::None);
    }
    if let Ok(value) = value.cast_exact::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if let Ok(value) = value.cast_exact::<PyInt>() {
        return integer(value);
    }
    if let Ok(value) = value.cast_exact::<PyFloat>() {
        return Ok(Value::Float(value.value()));
    }
    if let Ok(value) = value.cast_exact::<PyString>() {
        return Ok(Value::Str(value.to_cow()?.into_owned()));
    }
    if let Ok(value) = value.cast_exact::<PyBytes>() {
        return Ok(Value::Bytes(value.as_bytes().to_vec()));
    }
    if let Ok(value) = value.cast_exact::<PyList>() {
        return Ok(Value::List(value.iter().map(|item| to_value(&item, depth + 1)).collect::<PyResult<_>>()?));
    }
    if let Ok(value) = value.cast_exact::<PyDict>() {
        let items = value.iter().map(|(k, v)| Ok((to_value(&k, depth + 1)?, to_value(&v, depth + 1)?)));
        return Ok(Value::Dict(items.collect::<PyResult<_>>()?));
    }
    if let Ok(tagged) = value.cast::<Tagged>() {
        let tagged = tagged.get();
        let inner = to_value(tagged.value.bind(value.py()), depth + 1)?;
        return Ok(Value::Tagged(tagged.tag, Box::new(inner)));
    }
    Err(invalid(format!("a value of type {} is neither a builtin nor Tagged", value.get_type().qualname()?)))
}

fn integer(value: &Bound<'_, PyInt>) -> PyResult<Value> {
    if let Ok(small) = value.extract::<i64>() {
        return Ok(Value::Int(Int::Small(small)));
    }
    let negative = value.lt(0)?;
    let magnitude = value.abs()?;
    let bits: usize = magnitude.call_method0("bit_length")?.extract()?;
    let bytes = magnitude.call_method1("to_bytes", (bits.div_ceil(8), "big"))?.cast_into::<PyBytes>()?;
    Ok(Value::Int(Int::new(negative, bytes.as_bytes())))
}

fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Int(Int::Small(value)) => value.into_pyobject(py)?.into_any(),
        Value::Int(Int::Big { negative, magnitude_be }) => {
            let int: Bound<'py, PyType> = py.get_type::<PyInt>();
            let magnitude = int.call_method1("from_bytes", (PyBytes::new(py, magnitude_be), "big"))?;
            if *negative { magnitude.neg()? } else { magnitude }
        }
        Value::Float(value) => PyFloat::new(py, *value).into_any(),
        Value::Str(value) => PyString::new(py, value).into_any(),
        Value::Bytes(value) => PyBytes::new(py, value).into_any(),
        Value::List(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_python(py, item)?)?;
            }
            list.into_any()
        }
        Value::Dict(items) => {
            let dict = PyDict::new(py);
            for (key, value) in items {
                dict.set_item(to_python(py, key)?, to_python(py, value)?)?;
            }
            dict.into_any()
        }
        Value::Tagged(tag, inner) => {
            let value = to_python(py, inner)?.unbind();
            Bound::new(py, Tagged { tag: *tag, value })?.into_any()
        }
    })
}
