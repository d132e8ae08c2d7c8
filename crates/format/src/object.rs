//! Python values as typed, self-describing CBOR (RFC 8949): data, never code.
//!
//! A small part of CBOR: definite lengths, 64-bit floats, text, bytes, arrays, maps, null, booleans, integers and
//! bignums (tags 2 and 3), and the closed table of [`Tag`]s.

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
    /// `None`.
    None,
    /// `bool`.
    Bool(bool),
    /// `int`.
    Int(Int),
    /// `float`, bit by bit: a NaN keeps its payload.
    Float(f64),
    /// `str`; one with lone surrogates is a [`Tag::SurrogateStr`].
    Str(String),
    /// `bytes`.
    Bytes(Vec<u8>),
    /// `list`.
    List(Vec<Value>),
    /// `dict`, in its order; keys may be of any kind. Keys are not checked to differ: whether two are equal (`1` and
    /// `True`, two NaNs) is defined by Python.
    Dict(Vec<(Value, Value)>),
    /// Anything else, as the [`Tag`] says.
    Tagged(Tag, Box<Value>),
}

impl Value {
    /// What kind of value this is, for messages.
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
