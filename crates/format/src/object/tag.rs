//! Defines the closed table of kinds of values beyond CBOR's own.

use super::{Int, Value};

/// First number of the table, in CBOR's range for first come, first served; not registered, since only Shardfast uses
/// it.
const FIRST: u64 = 57_600;

/// Kind of a value, which says what its payload means. The table is append-only; a reader that finds an unknown number
/// returns `Unsupported`. Types are named as `module:qualname` and are data: whether to import one is the reader's
/// decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tag {
    /// `tuple`: the list of its items.
    Tuple = 0,
    /// `set`: the list of its items; written in the order of their encodings.
    Set,
    /// `frozenset`: as [`Tag::Set`].
    FrozenSet,
    /// `bytearray`: its bytes.
    ByteArray,
    /// `complex`: `[real, imaginary]`, both floats.
    Complex,
    /// `str` with lone surrogates: its bytes in UTF-8, surrogates encoded as if they were characters (`surrogatepass`).
    SurrogateStr,
    /// `range`: `[start, stop, step]`, integers.
    Range,
    /// `slice`: `[start, stop, step]`, any values.
    Slice,
    /// `...` (Ellipsis): null.
    Ellipsis,
    /// `collections.OrderedDict`: a map.
    OrderedDict,
    /// `collections.defaultdict`: `[factory, map]`; the factory is null or a type's name.
    DefaultDict,
    /// `collections.Counter`: a map.
    Counter,
    /// `collections.deque`: `[maxlen, items]`; `maxlen` is null or an integer not below zero.
    Deque,
    /// A `typing.NamedTuple` or `collections.namedtuple`: `[type, map from field to value]`, fields in their order.
    NamedTuple,
    /// `types.SimpleNamespace`, `argparse.Namespace`: `[type, map from attribute to value]`.
    Namespace,
    /// A dataclass: `[type, map from field to value]`.
    Dataclass,
    /// An `enum.Enum` member: `[type, name, value]`; the name is null for unnamed flags.
    Enum,
    /// `pathlib`: `[class, text]`, the class one of `PosixPath`, `WindowsPath`, `PurePosixPath`, `PureWindowsPath`; the
    /// text a string, with surrogates or without.
    Path,
    /// `datetime.datetime`: `[year, month, day, hour, minute, second, microsecond, fold, zone]`; the zone null or a
    /// [`Tag::TimeZone`].
    DateTime,
    /// `datetime.date`: `[year, month, day]`.
    Date,
    /// `datetime.time`: `[hour, minute, second, microsecond, fold, zone]`; the zone as in [`Tag::DateTime`].
    Time,
    /// `datetime.timedelta`: `[days, seconds, microseconds]`.
    TimeDelta,
    /// `datetime.timezone` or `zoneinfo.ZoneInfo`: the offset from UTC in microseconds, or the zone's name.
    TimeZone,
    /// `decimal.Decimal`: its text.
    Decimal,
    /// `fractions.Fraction`: `[numerator, denominator]`.
    Fraction,
    /// `uuid.UUID`: its 16 bytes, most significant first.
    Uuid,
    /// A tensor that is a leaf of its own: `[key, name]`.
    TensorRef,
    /// A small tensor or array kept as a value: `[framework, dtype, shape, bytes]`. The framework is `torch` or
    /// `numpy`; the dtype torch's name without `torch.` (little-endian then) or NumPy's type string (`<f4`, which tells
    /// the byte order); the shape a list of integers; the bytes in row-major order.
    Array,
    /// A NumPy scalar: `[type string, bytes]`.
    NumpyScalar,
    /// A dtype: `[framework, name]`, as in [`Tag::Array`].
    DType,
    /// `torch.Size`: a list of integers.
    TorchSize,
    /// `torch.device`: its text, `cuda:1`.
    TorchDevice,
    /// A pickle, which holds code: written and read only with the user's explicit permission.
    Pickle,
    /// `collections.OrderedDict`, `collections.Counter` with attributes: `[that, map from attribute to value]`.
    Attributed,
}

impl Tag {
    /// All tags, by number.
    pub const ALL: [Tag; 34] = [
        Tag::Tuple,
        Tag::Set,
        Tag::FrozenSet,
        Tag::ByteArray,
        Tag::Complex,
        Tag::SurrogateStr,
        Tag::Range,
        Tag::Slice,
        Tag::Ellipsis,
        Tag::OrderedDict,
        Tag::DefaultDict,
        Tag::Counter,
        Tag::Deque,
        Tag::NamedTuple,
        Tag::Namespace,
        Tag::Dataclass,
        Tag::Enum,
        Tag::Path,
        Tag::DateTime,
        Tag::Date,
        Tag::Time,
        Tag::TimeDelta,
        Tag::TimeZone,
        Tag::Decimal,
        Tag::Fraction,
        Tag::Uuid,
        Tag::TensorRef,
        Tag::Array,
        Tag::NumpyScalar,
        Tag::DType,
        Tag::TorchSize,
        Tag::TorchDevice,
        Tag::Pickle,
        Tag::Attributed,
    ];

    /// Returns the CBOR tag number.
    pub const fn number(self) -> u64 {
        FIRST + self as u64
    }

    /// Returns the tag with the CBOR tag number `number`.
    pub fn from_number(number: u64) -> Option<Tag> {
        let index = usize::try_from(number.checked_sub(FIRST)?).ok()?;
        Tag::ALL.get(index).copied()
    }

    /// Returns the name in the specification and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Tag::Tuple => "tuple",
            Tag::Set => "set",
            Tag::FrozenSet => "frozenset",
            Tag::ByteArray => "bytearray",
            Tag::Complex => "complex",
            Tag::SurrogateStr => "surrogate_str",
            Tag::Range => "range",
            Tag::Slice => "slice",
            Tag::Ellipsis => "ellipsis",
            Tag::OrderedDict => "ordered_dict",
            Tag::DefaultDict => "default_dict",
            Tag::Counter => "counter",
            Tag::Deque => "deque",
            Tag::NamedTuple => "named_tuple",
            Tag::Namespace => "namespace",
            Tag::Dataclass => "dataclass",
            Tag::Enum => "enum",
            Tag::Path => "path",
            Tag::DateTime => "datetime",
            Tag::Date => "date",
            Tag::Time => "time",
            Tag::TimeDelta => "timedelta",
            Tag::TimeZone => "time_zone",
            Tag::Decimal => "decimal",
            Tag::Fraction => "fraction",
            Tag::Uuid => "uuid",
            Tag::TensorRef => "tensor_ref",
            Tag::Array => "array",
            Tag::NumpyScalar => "numpy_scalar",
            Tag::DType => "dtype",
            Tag::TorchSize => "torch_size",
            Tag::TorchDevice => "torch_device",
            Tag::Pickle => "pickle",
            Tag::Attributed => "attributed",
        }
    }

    /// Returns the tag called `name`.
    pub fn from_name(name: &str) -> Option<Tag> {
        Tag::ALL.into_iter().find(|tag| tag.name() == name)
    }

    /// Returns a description of the expected payload if `value` is another one.
    pub fn mismatch(self, value: &Value) -> Option<&'static str> {
        let (fits, expected) = match self {
            Tag::Tuple | Tag::Set | Tag::FrozenSet => (matches!(value, Value::List(_)), "a list"),
            Tag::ByteArray | Tag::Pickle => (matches!(value, Value::Bytes(_)), "bytes"),
            Tag::SurrogateStr => {
                (matches!(value, Value::Bytes(bytes) if surrogatepass(bytes)), "bytes of UTF-8 with surrogates")
            }
            Tag::Complex => {
                (matches!(items(value), Some([Value::Float(_), Value::Float(_)])), "[real, imaginary], both floats")
            }
            Tag::Range => (matches!(value, Value::List(v) if v.len() == 3 && ints(v)), "[start, stop, step], integers"),
            Tag::Slice => (matches!(items(value), Some([_, _, _])), "[start, stop, step]"),
            Tag::Ellipsis => (matches!(value, Value::None), "null"),
            Tag::OrderedDict | Tag::Counter => (matches!(value, Value::Dict(_)), "a map"),
            Tag::DefaultDict => (
                matches!(items(value), Some([factory, Value::Dict(_)]) if is_none(factory) || type_name(factory)),
                "[factory, map], the factory null or \"module:qualname\"",
            ),
            Tag::Deque => (
                matches!(items(value), Some([maxlen, Value::List(_)]) if is_none(maxlen) || count(maxlen).is_some()),
                "[maxlen, items], maxlen null or an integer not below zero",
            ),
            Tag::NamedTuple | Tag::Namespace | Tag::Dataclass => (
                matches!(items(value), Some([name, fields]) if type_name(name) && named(fields)),
                "[\"module:qualname\", map from field to value]",
            ),
            Tag::Enum => (
                matches!(items(value), Some([name, member, _]) if type_name(name) && (is_none(member) || text(member))),
                "[\"module:qualname\", name, value], the name null or a string",
            ),
            Tag::Path => (path(value), "[class, text], the class one of pathlib's four"),
            Tag::DateTime => (clock(value, 8), "[year, month, day, hour, minute, second, microsecond, fold, zone]"),
            Tag::Time => (clock(value, 5), "[hour, minute, second, microsecond, fold, zone]"),
            Tag::Date => (matches!(value, Value::List(v) if v.len() == 3 && ints(v)), "[year, month, day], integers"),
            Tag::TimeDelta => {
                (matches!(value, Value::List(v) if v.len() == 3 && ints(v)), "[days, seconds, microseconds], integers")
            }
            Tag::TimeZone => (
                matches!(value, Value::Int(Int::Small(_)) | Value::Str(_)),
                "an offset from UTC in microseconds, or a zone's name",
            ),
            Tag::Decimal | Tag::TorchDevice => (text(value), "a string"),
            Tag::Fraction => {
                (matches!(value, Value::List(v) if v.len() == 2 && ints(v)), "[numerator, denominator], integers")
            }
            Tag::Uuid => (matches!(value, Value::Bytes(bytes) if bytes.len() == 16), "16 bytes"),
            Tag::TensorRef => {
                (matches!(items(value), Some([Value::Str(_), Value::Str(_)])), "[key, name], both strings")
            }
            Tag::Array => (array(value), "[framework, dtype, shape, bytes], the bytes as many as the shape asks for"),
            Tag::NumpyScalar => {
                (matches!(items(value), Some([Value::Str(_), Value::Bytes(_)])), "[type string, bytes]")
            }
            Tag::DType => {
                (matches!(items(value), Some([f, Value::Str(_)]) if framework(f)), "[\"torch\" or \"numpy\", name]")
            }
            Tag::TorchSize => (matches!(value, Value::List(v) if ints(v)), "a list of integers"),
            Tag::Attributed => (
                matches!(
                    items(value),
                    Some([Value::Tagged(Tag::OrderedDict | Tag::Counter, _), fields]) if named(fields)
                ),
                "[ordered_dict or counter, map from attribute to value]",
            ),
        };
        (!fits).then_some(expected)
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

fn items(value: &Value) -> Option<&[Value]> {
    match value {
        Value::List(items) => Some(items),
        _ => None,
    }
}

fn is_none(value: &Value) -> bool {
    matches!(value, Value::None)
}

fn text(value: &Value) -> bool {
    matches!(value, Value::Str(_))
}

fn ints(values: &[Value]) -> bool {
    values.iter().all(|value| matches!(value, Value::Int(_)))
}

fn count(value: &Value) -> Option<u64> {
    match value {
        Value::Int(Int::Small(n)) => u64::try_from(*n).ok(),
        _ => None,
    }
}

fn type_name(value: &Value) -> bool {
    match value {
        Value::Str(name) => name
            .split_once(':')
            .is_some_and(|(module, qualname)| !module.is_empty() && !qualname.is_empty() && !qualname.contains(':')),
        _ => false,
    }
}

/// Returns whether `value` is a map whose keys are all strings.
fn named(value: &Value) -> bool {
    matches!(value, Value::Dict(entries) if entries.iter().all(|(key, _)| text(key)))
}

fn framework(value: &Value) -> bool {
    matches!(value, Value::Str(name) if name == "torch" || name == "numpy")
}

/// Returns whether the bytes are UTF-8 once encoded surrogates (U+D800 to U+DFFF) are removed.
fn surrogatepass(mut bytes: &[u8]) -> bool {
    while let Err(error) = std::str::from_utf8(bytes) {
        match &bytes[error.valid_up_to()..] {
            [0xed, 0xa0..=0xbf, 0x80..=0xbf, rest @ ..] => bytes = rest,
            _ => return false,
        }
    }
    true
}

fn path(value: &Value) -> bool {
    match items(value) {
        Some([Value::Str(class), Value::Str(_) | Value::Tagged(Tag::SurrogateStr, _)]) => {
            matches!(class.as_str(), "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath")
        }
        _ => false,
    }
}

/// Returns whether `value` is a list of `numbers` integers and a zone.
fn clock(value: &Value, numbers: usize) -> bool {
    match items(value) {
        Some([fields @ .., zone]) => {
            fields.len() == numbers && ints(fields) && matches!(zone, Value::None | Value::Tagged(Tag::TimeZone, _))
        }
        _ => false,
    }
}

fn array(value: &Value) -> bool {
    let Some([name, Value::Str(_), Value::List(shape), Value::Bytes(bytes)]) = items(value) else {
        return false;
    };
    let shape: Option<Vec<u64>> = shape.iter().map(count).collect();
    let numel = shape.and_then(|shape| crate::region::checked_numel(&shape));
    framework(name)
        && match numel {
            None => false,
            Some(0) => bytes.is_empty(),
            Some(numel) => (bytes.len() as u64).is_multiple_of(numel),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_dense_and_its_names_unique() {
        for (i, tag) in Tag::ALL.into_iter().enumerate() {
            assert_eq!(tag.number(), 57_600 + i as u64);
            assert_eq!(Tag::from_number(tag.number()), Some(tag));
            assert_eq!(Tag::from_name(tag.name()), Some(tag));
        }
        for number in [0, 2, 57_599, 57_634, u64::MAX] {
            assert_eq!(Tag::from_number(number), None);
        }
    }
}
