//! Encodes Python values as typed, self-describing CBOR (RFC 8949): data, never code.
//!
//! The format uses a small part of CBOR: definite lengths, 64-bit floats, text, bytes, arrays, maps, null, booleans,
//! integers and bignums (tags 2 and 3), and the closed table of [`Tag`]s.

mod decode;
mod encode;
mod int;
mod limits;
mod tag;

pub use decode::decode;
pub use encode::{Writer, encode};
pub use int::Int;
pub use limits::{BYTES_MAX, CONTAINERS_MAX, Counts, ITEMS_MAX, excess};
pub use tag::Tag;

/// Deepest nesting of lists and dicts. A tag adds no level: it cannot stand directly in another one.
pub const DEPTH_MAX: usize = 64;

/// A Python value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// The value `None`.
    None,
    /// Python type `bool`.
    Bool(bool),
    /// Python type `int`.
    Int(Int),
    /// Python type `float`, bit by bit: a NaN keeps its payload.
    Float(f64),
    /// Python type `str`; one with lone surrogates is a [`Tag::SurrogateStr`].
    Str(String),
    /// Python type `bytes`.
    Bytes(Vec<u8>),
    /// Python type `list`.
    List(Vec<Value>),
    /// Python type `dict`, in its order, with keys of any kind. Keys are not checked to differ: whether two are equal
    /// (`1` and `True`, two NaNs) is defined by Python.
    Dict(Vec<(Value, Value)>),
    /// Any other type, named by the [`Tag`].
    Tagged(Tag, Box<Value>),
}

impl Value {
    /// Returns the kind of the value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::None => "none",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Bytes(_) => "bytes",
            Value::List(_) => "list",
            Value::Dict(_) => "dict",
            Value::Tagged(tag, _) => tag.name(),
        }
    }
}
