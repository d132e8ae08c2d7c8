//! Python's builtin values and `Tagged` ones as the format's typed encoding.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};
use shardfast_engine::{Error, Fences, Kind, Provider};
use shardfast_format::object::{self, Counts, DEPTH_MAX, Writer};
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

/// The encoding of a Python value as it was when this was made: `None`, `bool`, `int`, `float`, `str`, `bytes`, `list`,
/// `dict`, `tuple` and `Tagged`, of exactly these types. What is none of these goes, with the keys and indices that
/// lead to it, through `lower`, which says it in them; `place` says in errors where it stands.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Value {
    pub(crate) encoded: Arc<Encoded>,
}

#[pymethods]
impl Value {
    #[new]
    #[pyo3(signature = (value, lower=None, place=""))]
    fn new(value: &Bound<'_, PyAny>, lower: Option<&Bound<'_, PyAny>>, place: &str) -> PyResult<Value> {
        let mut walk = Walk {
            lower,
            place,
            trail: Vec::new(),
            open: Vec::new(),
            loud: Vec::new(),
            keys: Keys::new(),
            out: Out::default(),
        };
        walk.value(value, 0)?;
        walk.expect_within_limits(walk.out.bytes_in_pieces())?;
        Ok(Value { encoded: Arc::new(walk.out.encoded()) })
    }

    /// Bytes of the encoding.
    fn encoded<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.encoded.pieces.iter().map(Piece::as_slice).collect::<Vec<_>>().concat())
    }
}

/// `bytes` from this size on are not copied, since they are immutable.
const HELD_BYTES_MIN: usize = 1 << 12;

/// A part of an encoding.
enum Piece {
    Made(Vec<u8>),
    /// A `bytes` of the program's.
    Held(PyBackedBytes),
}

impl Piece {
    fn as_slice(&self) -> &[u8] {
        match self {
            Piece::Made(bytes) => bytes,
            Piece::Held(bytes) => bytes,
        }
    }
}

/// A value's encoding.
pub(crate) struct Encoded {
    pieces: Vec<Piece>,
}

impl Provider for Encoded {
    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.as_slice().len() as u64).sum()
    }

    fn fill(&self, at: u64, mut out: &mut [u8], _: &mut Fences) -> Result<(), Error> {
        let mut at = at as usize;
        for piece in self.pieces.iter().map(Piece::as_slice) {
            let bytes = piece.get(at..).unwrap_or_default();
            let (filled, rest) = out.split_at_mut(bytes.len().min(out.len()));
            filled.copy_from_slice(&bytes[..filled.len()]);
            at = at.saturating_sub(piece.len());
            out = rest;
        }
        Ok(())
    }
}

/// An encoding in the making.
#[derive(Default)]
struct Out {
    writer: Writer,
    pieces: Vec<Piece>,
}

impl Out {
    fn bytes(&mut self, bytes: &Bound<'_, PyBytes>) {
        let data = bytes.as_bytes();
        self.writer.bytes(data.len() as u64);
        if data.len() < HELD_BYTES_MIN {
            self.writer.raw(data);
        } else {
            self.pieces.push(Piece::Made(self.writer.take()));
            self.pieces.push(Piece::Held(PyBackedBytes::from(bytes.clone())));
        }
    }

    fn bytes_in_pieces(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.as_slice().len() as u64).sum()
    }

    /// A position for [`rewind`](Out::rewind).
    fn mark(&self) -> (usize, usize, Counts) {
        (self.pieces.len(), self.writer.written(), self.writer.counts())
    }

    /// Discards what was written since the mark was made.
    fn rewind(&mut self, (pieces, written, counts): (usize, usize, Counts)) {
        if let Some(Piece::Made(bytes)) = self.pieces.drain(pieces..).next() {
            self.writer = Writer::from(bytes);
        }
        self.writer.rewind(written, counts);
    }

    fn encoded(mut self) -> Encoded {
        self.pieces.push(Piece::Made(self.writer.take()));
        Encoded { pieces: self.pieces }
    }
}

/// The value that [`Value`] encoded.
#[pyfunction]
pub(crate) fn decode<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let value = object::decode(data).map_err(|error| raise(error.into()))?;
    to_python(py, value)
}

/// Keys that the dicts of one stretch have in common, encoded. They are known by their addresses, which hold for a
/// stretch of a walk in which nothing is freed.
struct Keys {
    known: [Key; 64],
    stretch: usize,
}

#[derive(Clone, Copy)]
struct Key {
    address: usize,
    stretch: usize,
    bytes: usize,
    encoded: [u8; 32],
}

impl Keys {
    fn new() -> Keys {
        Keys { known: [Key { address: 0, stretch: 0, bytes: 0, encoded: [0; 32] }; 64], stretch: 1 }
    }

    #[inline]
    fn get(&self, address: usize) -> Option<&Key> {
        let key = &self.known[Keys::place(address)];
        (key.address == address && key.stretch == self.stretch).then_some(key)
    }

    fn put(&mut self, address: usize, encoding: &[u8]) {
        let key = &mut self.known[Keys::place(address)];
        if let Some(encoded) = key.encoded.get_mut(..encoding.len()) {
            encoded.copy_from_slice(encoding);
            (key.address, key.stretch, key.bytes) = (address, self.stretch, encoding.len());
        }
    }

    fn place(address: usize) -> usize {
        (address >> 4) % 64
    }
}

/// The path to a value.
enum Step<'py> {
    Key(Bound<'py, PyAny>),
    Index(usize),
}

/// A walk through a value, container by container, that encodes it.
struct Walk<'a, 'py> {
    lower: Option<&'a Bound<'py, PyAny>>,
    /// Place in the state, for errors.
    place: &'a str,
    trail: Vec<Step<'py>>,
    /// The containers around the present value.
    open: Vec<usize>,
    /// The containers known to hold something that is not encoded quietly, until they are encoded.
    loud: Vec<usize>,
    keys: Keys,
    out: Out,
}

impl<'py> Walk<'_, 'py> {
    /// `depth` counts lists and dicts as the encoding nests them.
    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        self.keys.stretch += 1;
        if self.quiet(value, depth) { Ok(()) } else { self.compound(value, depth) }
    }

    /// Encodes a value for which no code of the program has to run, so that nothing changes meanwhile: an atom, or a
    /// container that holds only such all the way down. For any other it leaves no trace and says `false`.
    #[inline(always)]
    fn quiet(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> bool {
        self.atom(value) || self.quiet_container(value, depth)
    }

    /// Encodes a value of exactly one of the builtin types. The code per value is minimal: a state may hold hundreds of
    /// thousands.
    #[inline(always)]
    fn atom(&mut self, value: &Bound<'py, PyAny>) -> bool {
        if let Ok(value) = value.cast_exact::<PyFloat>() {
            self.out.writer.float(value.value());
        } else if let Ok(value) = value.cast_exact::<PyString>() {
            let Ok(text) = value.to_str() else { return false };
            self.out.writer.text(text);
        } else if value.is_exact_instance_of::<PyInt>() {
            let Ok(small) = value.extract() else { return false };
            self.out.writer.int(small);
        } else if value.is_none() {
            self.out.writer.none();
        } else if let Ok(value) = value.cast_exact::<PyBool>() {
            self.out.writer.bool(value.is_true());
        } else if let Ok(value) = value.cast_exact::<PyBytes>() {
            self.out.bytes(value);
        } else {
            return false;
        }
        true
    }

    /// [`quiet`](Walk::quiet) of a dict's key: most dicts of a list have the same ones.
    #[inline(always)]
    fn quiet_key(&mut self, key: &Bound<'py, PyAny>, depth: usize) -> bool {
        let address = key.as_ptr() as usize;
        if let Some(known) = self.keys.get(address) {
            self.out.writer.short(&known.encoded, known.bytes);
            return true;
        }
        let written = self.out.writer.written();
        let is_done = self.quiet(key, depth);
        if is_done && key.is_exact_instance_of::<PyString>() {
            self.keys.put(address, self.out.writer.since(written));
        }
        is_done
    }

    #[inline(never)]
    fn quiet_container(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> bool {
        if !is_container(value) {
            return false;
        }
        let address = value.as_ptr() as usize;
        if depth == DEPTH_MAX || self.open.contains(&address) || self.loud.contains(&address) {
            return false;
        }
        let mark = self.out.mark();
        self.open.push(address);
        let is_done = if let Ok(dict) = value.cast_exact::<PyDict>() {
            self.out.writer.dict(dict.len() as u64);
            // Of what is encoded quietly, only tuples can share a hash in numbers.
            let mut may_collide = false;
            let is_done = dict.iter().all(|(key, value)| {
                may_collide |= key.is_exact_instance_of::<PyTuple>();
                self.quiet_key(&key, depth + 1) && self.quiet(&value, depth + 1)
            });
            is_done && (!may_collide || is_spread(dict))
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            self.out.writer.list(list.len() as u64);
            list.iter().all(|item| self.quiet(&item, depth + 1))
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.out.writer.tag(Tag::Tuple);
            self.out.writer.list(tuple.len() as u64);
            tuple.iter().all(|item| self.quiet(&item, depth + 1))
        } else {
            false
        };
        self.open.pop();
        if !is_done {
            self.out.rewind(mark);
            self.loud.push(address);
        }
        is_done
    }

    fn compound(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        if !is_container(value) {
            let is_plain = value.is_exact_instance_of::<PyInt>() || value.is_exact_instance_of::<Tagged>();
            return if is_plain { self.plain(value, depth) } else { self.lowered(value, depth) };
        }
        let address = value.as_ptr() as usize;
        let is_refused = self.trail.len() >= DEPTH_MAX || self.open.contains(&address);
        if is_refused && self.lower.is_some() {
            return self.lowered(value, depth); // which returns the error
        }
        if depth == DEPTH_MAX {
            return Err(too_deep(self.place));
        }
        self.open.push(address);
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            if let Some(excess) = expect_spread(dict)? {
                return Err(at(self.place, &excess));
            }
            self.dict(dict, depth + 1)?;
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            self.list(list, depth + 1)?;
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.out.writer.tag(Tag::Tuple);
            self.out.writer.list(tuple.len() as u64);
            self.items(tuple.iter().enumerate(), depth + 1)?;
        }
        self.open.pop();
        self.loud.retain(|loud| *loud != address);
        Ok(())
    }

    fn list(&mut self, list: &Bound<'py, PyList>, depth: usize) -> PyResult<()> {
        self.out.writer.list(list.len() as u64);
        self.keys.stretch += 1;
        let first = list.iter().take_while(|item| self.quiet(item, depth)).count();
        if first == list.len() {
            return Ok(());
        }
        // A copy, since `lower` and other threads may change the list meanwhile.
        let rest = list.get_slice(first, list.len());
        self.items((first..).zip(rest.iter()), depth)
    }

    fn items(&mut self, items: impl Iterator<Item = (usize, Bound<'py, PyAny>)>, depth: usize) -> PyResult<()> {
        for (index, item) in items {
            self.trail.push(Step::Index(index));
            self.value(&item, depth)?;
            self.trail.pop();
        }
        Ok(())
    }

    fn dict(&mut self, dict: &Bound<'py, PyDict>, depth: usize) -> PyResult<()> {
        self.out.writer.dict(dict.len() as u64);
        self.keys.stretch += 1;
        let mut is_key_done = false;
        let entry = |(key, value): &(Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            is_key_done = self.quiet(key, depth);
            is_key_done && self.quiet(value, depth)
        };
        let done = dict.iter().take_while(entry).count();
        if done == dict.len() {
            return Ok(());
        }
        // As of a list.
        for (key, value) in dict.copy()?.iter().skip(done) {
            self.trail.push(Step::Key(key.clone()));
            if !std::mem::take(&mut is_key_done) {
                self.value(&key, depth)?;
            }
            self.value(&value, depth)?;
            self.trail.pop();
        }
        Ok(())
    }

    fn lowered(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        let Some(lower) = self.lower else {
            return Err(no_builtin(value, self.place));
        };
        let py = value.py();
        let steps = self.trail.iter().map(|step| match step {
            Step::Key(key) => Ok(key.clone()),
            Step::Index(index) => Ok(index.into_pyobject(py)?.into_any()),
        });
        let trail = PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)?;
        let lowered = lower.call1((value, trail))?;
        if self.atom(&lowered) { Ok(()) } else { self.plain(&lowered, depth) }
    }

    /// Encodes builtins and `Tagged`.
    fn plain(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        let value = plain(value, depth, self.place)?;
        self.out.writer.value(&value).map_err(|error| at(self.place, error.message()))?;
        self.expect_within_limits(0)
    }

    /// Refuses a value beyond the limits of a load. `elsewhere` are the bytes that the writer no longer holds.
    fn expect_within_limits(&self, elsewhere: u64) -> PyResult<()> {
        match object::excess(elsewhere + self.out.writer.written() as u64, self.out.writer.counts()) {
            Some(excess) => {
                let remedy = "store what is large as tensors or arrays in entries of their own, or in several values";
                Err(at(self.place, &format!("{excess}: {remedy}")))
            }
            None => Ok(()),
        }
    }
}

/// A value of builtins and `Tagged`. `depth` is its own; `place` says in errors where it stands.
fn plain(value: &Bound<'_, PyAny>, depth: usize, place: &str) -> PyResult<object::Value> {
    if value.is_none() {
        return Ok(object::Value::None);
    }
    if let Ok(value) = value.cast_exact::<PyInt>() {
        return integer(value);
    }
    if let Ok(value) = value.cast_exact::<PyFloat>() {
        return Ok(object::Value::Float(value.value()));
    }
    if let Ok(text) = value.cast_exact::<PyString>()
        && let Ok(text) = text.to_str()
    {
        return Ok(object::Value::Str(text.to_owned()));
    }
    if let Ok(value) = value.cast_exact::<PyBool>() {
        return Ok(object::Value::Bool(value.is_true()));
    }
    if let Ok(value) = value.cast_exact::<PyBytes>() {
        return Ok(object::Value::Bytes(value.as_bytes().to_vec()));
    }
    if let Ok(tagged) = value.cast_exact::<Tagged>() {
        let payload = plain(tagged.get().value.bind(value.py()), depth, place)?;
        return with_tag(tagged.get().tag, payload, place);
    }
    let items = |items: &mut dyn Iterator<Item = Bound<'_, PyAny>>| {
        if depth == DEPTH_MAX {
            return Err(too_deep(place));
        }
        items.map(|item| plain(&item, depth + 1, place)).collect::<PyResult<Vec<_>>>()
    };
    if let Ok(list) = value.cast_exact::<PyList>() {
        return Ok(object::Value::List(items(&mut list.iter())?));
    }
    if let Ok(tuple) = value.cast_exact::<PyTuple>() {
        return with_tag(Tag::Tuple, object::Value::List(items(&mut tuple.iter())?), place);
    }
    if let Ok(dict) = value.cast_exact::<PyDict>() {
        let dict = dict.copy()?; // other threads may change it meanwhile
        let (keys, values) = (items(&mut dict.keys().iter())?, items(&mut dict.values().iter())?);
        return Ok(object::Value::Dict(keys.into_iter().zip(values).collect()));
    }
    Err(no_builtin(value, place))
}

fn with_tag(tag: Tag, payload: object::Value, place: &str) -> PyResult<object::Value> {
    if let Some(expected) = tag.mismatch(&payload) {
        return Err(at(place, &format!("object: {tag}: expected {expected}, found {}", payload.kind())));
    }
    Ok(object::Value::Tagged(tag, Box::new(payload)))
}

fn at(place: &str, what: &str) -> PyErr {
    let colon = if place.is_empty() { "" } else { ": " };
    invalid(format!("{place}{colon}{what}"))
}

fn too_deep(place: &str) -> PyErr {
    at(place, &format!("nested deeper than {DEPTH_MAX} levels"))
}

fn no_builtin(value: &Bound<'_, PyAny>, place: &str) -> PyErr {
    match value.get_type().qualname() {
        Ok(kind) => at(place, &format!("a value of type {kind} is neither a builtin nor Tagged")),
        Err(error) => error,
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

/// Most keys of one dict with the same hash: looking one up compares it with all of these, and what a checkpoint asks
/// for must not take quadratic time. Python's side bounds the items of sets, and keys that only it can make, alike.
const EQUAL_HASHES_MAX: usize = 128;

/// Counts keys by their hashes.
#[derive(Default)]
struct Spread {
    keys: HashMap<isize, usize>,
}

impl Spread {
    /// Counts a key; says what is wrong when there are too many of its hash. Texts and bytes are hashed with a secret
    /// of the process.
    fn add(&mut self, key: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        if key.is_exact_instance_of::<PyString>() || key.is_exact_instance_of::<PyBytes>() {
            return Ok(None);
        }
        let count = self.keys.entry(key.hash()?).or_default();
        *count += 1;
        let excess = || format!("more than {EQUAL_HASHES_MAX} keys of a dict have the same hash");
        Ok((*count > EQUAL_HASHES_MAX).then(excess))
    }
}

/// Returns what is wrong with the hashes of a dict's keys, if anything. Hashing may run code of the keys' classes.
fn expect_spread(dict: &Bound<'_, PyDict>) -> PyResult<Option<String>> {
    if dict.len() <= EQUAL_HASHES_MAX {
        return Ok(None);
    }
    let mut spread = Spread::default();
    dict.keys().iter().find_map(|key| spread.add(&key).transpose()).transpose()
}

/// Returns whether the value is exactly a dict, a list or a tuple, of no class that derives from them.
fn is_container(value: &Bound<'_, PyAny>) -> bool {
    [PyDict::is_exact_type_of, PyList::is_exact_type_of, PyTuple::is_exact_type_of]
        .iter()
        .any(|is_exact| is_exact(value))
}

/// Returns whether [`expect_spread`] finds nothing wrong with a dict whose keys were encoded quietly.
fn is_spread(dict: &Bound<'_, PyDict>) -> bool {
    let mut spread = Spread::default();
    // A list of the keys would be a new object, and Python may collect garbage when one is made, which runs finalizers.
    dict.len() <= EQUAL_HASHES_MAX || dict.iter().all(|(key, _)| matches!(spread.add(&key), Ok(None)))
}

fn to_dict<'py>(py: Python<'py>, entries: Vec<(object::Value, object::Value)>) -> PyResult<Bound<'py, PyDict>> {
    // Few integers of 64 bits and few floats share a hash, and tagged values become keys later.
    let may_collide = |key: &object::Value| matches!(key, object::Value::Int(Int::Big { .. }));
    let is_suspect = entries.len() > EQUAL_HASHES_MAX && entries.iter().any(|(key, _)| may_collide(key));
    let mut spread = is_suspect.then(Spread::default);
    let dict = PyDict::new(py);
    for (key, value) in entries {
        let key = to_python(py, key)?;
        if let Some(excess) = spread.as_mut().map(|spread| spread.add(&key)).transpose()?.flatten() {
            return Err(raise(Error::new(Kind::Unsupported, excess)));
        }
        dict.set_item(key, to_python(py, value)?)?;
    }
    Ok(dict)
}

/// Uses the value up: it and what is made of it need not both be in memory as a whole.
fn to_python<'py>(py: Python<'py>, value: object::Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        object::Value::None => py.None().into_bound(py),
        object::Value::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
        object::Value::Int(Int::Small(value)) => value.into_pyobject(py)?.into_any(),
        object::Value::Int(Int::Big { negative, magnitude_be }) => {
            let int: Bound<'py, PyType> = py.get_type::<PyInt>();
            let magnitude = int.call_method1("from_bytes", (PyBytes::new(py, &magnitude_be), "big"))?;
            if negative { magnitude.neg()? } else { magnitude }
        }
        object::Value::Float(value) => PyFloat::new(py, value).into_any(),
        object::Value::Str(value) => PyString::new(py, &value).into_any(),
        object::Value::Bytes(value) => PyBytes::new(py, &value).into_any(),
        object::Value::List(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_python(py, item)?)?;
            }
            list.into_any()
        }
        object::Value::Dict(entries) => to_dict(py, entries)?.into_any(),
        object::Value::Tagged(tag, inner) => {
            let value = to_python(py, *inner)?.unbind();
            Bound::new(py, Tagged { tag, value })?.into_any()
        }
    })
}

#[cfg(test)]
mod tests;
