//! Python's builtin values and `Tagged` ones as the format's typed encoding.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};
use shardfast_engine::{Error, Fences, Provider};
use shardfast_format::object::{self, DEPTH_MAX};
use shardfast_format::{Int, Tag};

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

/// A Python value as it was when this was made: `None`, `bool`, `int`, `float`, `str`, `bytes`, `list`, `dict`, `tuple`
/// and `Tagged`, of exactly these types. What is none of these goes, with the keys and indices that lead to it, through
/// `lower`, which says it in them; `place` says in errors where it stands. It is encoded when the encoding is first
/// needed, on whatever thread that is.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Value {
    pub(crate) encoded: Arc<Encoded>,
}

#[pymethods]
impl Value {
    #[new]
    #[pyo3(signature = (value, lower=None, place=""))]
    fn new(value: &Bound<'_, PyAny>, lower: Option<&Bound<'_, PyAny>>, place: &str) -> PyResult<Value> {
        let value = Walk { lower, place, trail: Vec::new(), open: Vec::new() }.value(value, 0)?;
        Ok(Value { encoded: Arc::new(Encoded { value: Mutex::new(Some(value)), bytes: OnceLock::new() }) })
    }

    /// The encoding.
    fn encoded<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.encoded.get()).map_err(raise)?;
        Ok(PyBytes::new(py, bytes))
    }
}

/// A value's encoding, made once. The plain data is given back by that.
pub(crate) struct Encoded {
    value: Mutex<Option<object::Value>>,
    bytes: OnceLock<Result<Vec<u8>, Error>>,
}

impl Encoded {
    fn get(&self) -> Result<&[u8], Error> {
        let encoded = self.bytes.get_or_init(|| {
            let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).take();
            object::encode(&value.unwrap_or(object::Value::None)).map_err(Error::from)
        });
        encoded.as_deref().map_err(Error::clone)
    }
}

impl Provider for Encoded {
    fn bytes(&self) -> u64 {
        self.get().map_or(0, |bytes| bytes.len() as u64) // what is wrong, `fill` says
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<(), Error> {
        let at = at as usize;
        out.copy_from_slice(&self.get()?[at..at + out.len()]);
        Ok(())
    }
}

/// The value that [`Value`] encoded.
#[pyfunction]
pub(crate) fn decode<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let value = object::decode(data).map_err(|error| raise(error.into()))?;
    to_python(py, &value)
}

/// How one got to a value.
enum Step<'py> {
    Key(Bound<'py, PyAny>),
    Index(usize),
}

/// A walk through a value, container by container.
struct Walk<'a, 'py> {
    lower: Option<&'a Bound<'py, PyAny>>,
    /// Where it stands, for errors.
    place: &'a str,
    trail: Vec<Step<'py>>,
    /// The containers that one is in.
    open: Vec<usize>,
}

impl<'py> Walk<'_, 'py> {
    /// `depth` counts lists and dicts as the encoding nests them.
    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<object::Value> {
        if value.is_none() {
            return Ok(object::Value::None);
        }
        if let Ok(value) = value.cast_exact::<PyInt>() {
            return integer(value);
        }
        if let Ok(value) = value.cast_exact::<PyFloat>() {
            return Ok(object::Value::Float(value.value()));
        }
        if let Ok(text) = value.cast_exact::<PyString>() {
            // Lone surrogates have no UTF-8: `lower` knows what to do with them.
            return match text.to_str() {
                Ok(text) => Ok(object::Value::Str(text.to_owned())),
                Err(_) => self.lowered(value, depth),
            };
        }
        if let Ok(value) = value.cast_exact::<PyBool>() {
            return Ok(object::Value::Bool(value.is_true()));
        }
        if let Ok(value) = value.cast_exact::<PyBytes>() {
            return Ok(object::Value::Bytes(value.as_bytes().to_vec()));
        }
        if let Ok(tagged) = value.cast_exact::<Tagged>() {
            let inner = self.value(tagged.get().value.bind(value.py()), depth)?;
            return self.tagged(tagged.get().tag, inner);
        }
        self.container(value, depth)
    }

    fn container(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<object::Value> {
        let address = value.as_ptr() as usize;
        let is_refused = self.trail.len() >= DEPTH_MAX || self.open.contains(&address);
        if is_refused && self.lower.is_some() {
            return self.lowered(value, depth); // which tells what is wrong with it
        }
        let depth = depth + 1;
        if depth > DEPTH_MAX {
            return Err(self.invalid(&format!("nested deeper than {DEPTH_MAX} levels")));
        }
        self.open.push(address);
        let out = if let Ok(list) = value.cast_exact::<PyList>() {
            object::Value::List(self.items(list.iter(), depth)?)
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            {
                let items = self.items(tuple.iter(), depth)?;
                self.tagged(Tag::Tuple, object::Value::List(items))?
            }
        } else if let Ok(dict) = value.cast_exact::<PyDict>() {
            // A copy, since `lower` and other threads may change the dict meanwhile.
            let mut items = Vec::with_capacity(dict.len());
            for (key, value) in dict.copy()?.iter() {
                self.trail.push(Step::Key(key.clone()));
                items.push((self.value(&key, depth)?, self.value(&value, depth)?));
                self.trail.pop();
            }
            object::Value::Dict(items)
        } else {
            self.open.pop();
            return self.lowered(value, depth - 1);
        };
        self.open.pop();
        Ok(out)
    }

    fn items(&mut self, items: impl Iterator<Item = Bound<'py, PyAny>>, depth: usize) -> PyResult<Vec<object::Value>> {
        let mut out = Vec::with_capacity(items.size_hint().0);
        for (index, item) in items.enumerate() {
            self.trail.push(Step::Index(index));
            out.push(self.value(&item, depth)?);
            self.trail.pop();
        }
        Ok(out)
    }

    fn tagged(&self, tag: Tag, payload: object::Value) -> PyResult<object::Value> {
        if let Some(expected) = tag.mismatch(&payload) {
            return Err(self.invalid(&format!("object: {tag}: expected {expected}, found {}", payload.kind())));
        }
        Ok(object::Value::Tagged(tag, Box::new(payload)))
    }

    fn invalid(&self, what: &str) -> PyErr {
        let colon = if self.place.is_empty() { "" } else { ": " };
        invalid(format!("{}{colon}{what}", self.place))
    }

    fn lowered(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<object::Value> {
        let Some(lower) = self.lower else {
            let kind = value.get_type().qualname()?;
            return Err(self.invalid(&format!("a value of type {kind} is neither a builtin nor Tagged")));
        };
        let py = value.py();
        let steps = self.trail.iter().map(|step| match step {
            Step::Key(key) => Ok(key.clone()),
            Step::Index(index) => Ok(index.into_pyobject(py)?.into_any()),
        });
        let trail = PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)?;
        let lowered = lower.call1((value, trail))?;
        Walk { lower: None, place: self.place, trail: Vec::new(), open: Vec::new() }.value(&lowered, depth)
    }
}

fn integer(value: &Bound<'_, PyInt>) -> PyResult<object::Value> {
    if let Ok(small) = value.extract::<i64>() {
        return Ok(object::Value::Int(Int::Small(small)));
    }
    let negative = value.lt(0)?;
    let magnitude = value.abs()?;
    let bits: usize = magnitude.call_method0("bit_length")?.extract()?;
    let bytes = magnitude.call_method1("to_bytes", (bits.div_ceil(8), "big"))?.cast_into::<PyBytes>()?;
    Ok(object::Value::Int(Int::new(negative, bytes.as_bytes())))
}

fn to_python<'py>(py: Python<'py>, value: &object::Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        object::Value::None => py.None().into_bound(py),
        object::Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        object::Value::Int(Int::Small(value)) => value.into_pyobject(py)?.into_any(),
        object::Value::Int(Int::Big { negative, magnitude_be }) => {
            let int: Bound<'py, PyType> = py.get_type::<PyInt>();
            let magnitude = int.call_method1("from_bytes", (PyBytes::new(py, magnitude_be), "big"))?;
            if *negative { magnitude.neg()? } else { magnitude }
        }
        object::Value::Float(value) => PyFloat::new(py, *value).into_any(),
        object::Value::Str(value) => PyString::new(py, value).into_any(),
        object::Value::Bytes(value) => PyBytes::new(py, value).into_any(),
        object::Value::List(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_python(py, item)?)?;
            }
            list.into_any()
        }
        object::Value::Dict(items) => {
            let dict = PyDict::new(py);
            for (key, value) in items {
                dict.set_item(to_python(py, key)?, to_python(py, value)?)?;
            }
            dict.into_any()
        }
        object::Value::Tagged(tag, inner) => {
            let value = to_python(py, inner)?.unbind();
            Bound::new(py, Tagged { tag: *tag, value })?.into_any()
        }
    })
}
