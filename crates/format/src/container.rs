//! The safetensors container: an 8-byte little-endian length, that many bytes of JSON (padded with spaces), then the
//! tensors without holes. Strict: anything that the container's definition does not allow is `Corrupt`.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use smallvec::SmallVec;

use crate::dtype::DType;
use crate::error::Error;
use crate::region::{Dims, checked_numel};

/// Longest JSON, in bytes: safetensors' own limit.
pub(crate) const JSON_BYTES_MAX: u64 = 100_000_000;

/// Most dimensions of a tensor: PyTorch's and NumPy's own limit.
pub const NDIM_MAX: usize = 64;

/// Size of the length field in front of the JSON, in bytes.
pub(crate) const LENGTH_BYTES: u64 = 8;

const METADATA: &str = "__metadata__";

/// A parsed and checked container.
#[derive(Debug)]
pub(crate) struct Container {
    /// First byte of the tensors, from the file's start.
    pub(crate) data_start: u64,
    /// Tensors, sorted by offset.
    pub(crate) entries: Vec<Entry>,
    /// Contents of the JSON's `__metadata__`.
    pub(crate) metadata: BTreeMap<String, String>,
}

/// A tensor of a container, as the header describes it.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Name of the tensor.
    pub(crate) name: String,
    /// Element type; `Err` holds the name of an unknown one, whose size is unchecked.
    pub(crate) dtype: Result<DType, String>,
    /// Shape as the header counts it (twice the last dimension for [`DType::F4x2`]).
    pub(crate) shape: Dims,
    /// First byte and the one after the last, from `data_start`.
    pub(crate) span: (u64, u64),
}

/// Returns the shape that a header shows for a tensor: two values per byte are counted one by one. A zero-dimensional
/// [`DType::F4x2`] shows as `[2]`, since half a byte cannot be expressed.
pub(crate) fn header_shape(dtype: DType, shape: &[u64]) -> Option<Dims> {
    let mut shown = Dims::from_slice(shape);
    if dtype == DType::F4x2 {
        match shown.last_mut() {
            Some(last) => *last = last.checked_mul(2)?,
            None => shown.push(2),
        }
    }
    Some(shown)
}

/// Returns the size of a tensor in bytes, or `None` beyond `u64`.
pub(crate) fn tensor_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    checked_numel(shape)?.checked_mul(dtype.size_bytes())
}

/// Writes the JSON of a header: the metadata in the order given, then the tensors. `spans` count from the data's start.
pub(crate) fn json<'a>(
    metadata: impl IntoIterator<Item = (&'a str, &'a str)>,
    entries: impl IntoIterator<Item = (&'a str, DType, Dims, (u64, u64))>,
) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(b"{\"__metadata__\":{");
    for (i, (key, value)) in metadata.into_iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        push_string(&mut out, key);
        out.push(b':');
        push_string(&mut out, value);
    }
    out.push(b'}');
    for (name, dtype, shape, (start, end)) in entries {
        out.push(b',');
        push_string(&mut out, name);
        out.extend_from_slice(format!(":{{\"dtype\":\"{dtype}\",\"shape\":[").as_bytes());
        for (d, length) in shape.iter().enumerate() {
            if d > 0 {
                out.push(b',');
            }
            out.extend_from_slice(length.to_string().as_bytes());
        }
        out.extend_from_slice(format!("],\"data_offsets\":[{start},{end}]}}").as_bytes());
    }
    out.push(b'}');
    out
}

/// Returns length field, JSON and padding, together `data_start` bytes; `data_start` must be at least `8 + json.len()`.
pub(crate) fn frame(json: &[u8], data_start: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(data_start as usize);
    out.extend_from_slice(&(data_start - LENGTH_BYTES).to_le_bytes());
    out.extend_from_slice(json);
    out.resize(data_start as usize, b' ');
    out
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("any text is a JSON string, and memory takes every write");
}

/// Parses the container at the start of `bytes`, which must hold at least its header. `file_bytes` is the size of the
/// whole file; `what` names the file in messages.
pub(crate) fn parse(what: &str, bytes: &[u8], file_bytes: u64) -> Result<Container, Error> {
    let corrupt = |message: String| Error::Corrupt(format!("{what}: {message}"));
    let length = match bytes.first_chunk::<8>() {
        Some(field) => u64::from_le_bytes(*field),
        None => return Err(corrupt(format!("expected at least 8 bytes, found {}", bytes.len()))),
    };
    if length > JSON_BYTES_MAX {
        return Err(corrupt(format!("header length: expected at most {JSON_BYTES_MAX} bytes, found {length}")));
    }
    let data_start = LENGTH_BYTES + length;
    let json = match bytes.get(LENGTH_BYTES as usize..data_start as usize) {
        Some(json) => json,
        None => return Err(corrupt(format!("expected {data_start} bytes of header, found {}", bytes.len()))),
    };
    if json.first() != Some(&b'{') {
        return Err(corrupt("header: expected '{' as the first byte of the JSON".to_owned()));
    }
    let header: Header = serde_json::from_slice(json).map_err(|error| corrupt(format!("header: {error}")))?;
    let mut entries = header.entries;
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(corrupt(format!("header: the name {:?} occurs twice", pair[0])));
    }
    drop(names);
    entries.sort_by_key(|entry| entry.span);
    let mut position = 0;
    for entry in &entries {
        let Entry { name, dtype, shape, span: (start, end) } = entry;
        if *start != position || end < start {
            return Err(corrupt(format!(
                "tensor {name:?}: expected data from byte {position}, found [{start}, {end})"
            )));
        }
        if let Ok(dtype) = dtype {
            let expected = shown_bytes(*dtype, shape);
            if expected != Some(end - start) {
                let expected = expected.map_or_else(|| "a whole number of bytes".to_owned(), |n| format!("{n} bytes"));
                let found = end - start;
                return Err(corrupt(format!("tensor {name:?}: {dtype} {shape:?} is {expected}, found {found} bytes")));
            }
        }
        position = *end;
    }
    match data_start.checked_add(position) {
        Some(end) if end == file_bytes => {}
        _ => {
            let found = file_bytes.saturating_sub(data_start);
            return Err(corrupt(format!("expected {position} bytes of data after the header, found {found}")));
        }
    }
    Ok(Container { data_start, entries, metadata: header.metadata })
}

/// Returns the bytes of a tensor of a header's shape; `None` when that is no whole number within `u64`.
fn shown_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    let numel = checked_numel(shape)?;
    match dtype {
        DType::F4x2 => numel.is_multiple_of(2).then_some(numel / 2),
        _ => numel.checked_mul(dtype.size_bytes()),
    }
}

/// Undoes [`header_shape`] for a tensor that [`parse`] has checked; `None` when the values do not pair up in the last
/// dimension.
pub(crate) fn true_shape(dtype: DType, mut shown: Dims) -> Option<Dims> {
    if dtype == DType::F4x2 {
        let last = shown.last_mut()?;
        if !last.is_multiple_of(2) {
            return None;
        }
        *last /= 2;
    }
    Some(shown)
}

/// The JSON as parsed. The types bound its depth (serde_json's own limit bounds what they skip); no memory is reserved
/// beyond the bytes at hand.
struct Header {
    entries: Vec<Entry>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        let Strings(found) = map.next_value()?;
                        if metadata.replace(found).is_some() {
                            return Err(A::Error::custom("__metadata__ occurs twice"));
                        }
                    } else {
                        let info: Info = map.next_value()?;
                        let dtype = DType::from_name(&info.dtype).ok_or(info.dtype);
                        entries.push(Entry { name, dtype, shape: info.shape.0, span: info.data_offsets });
                    }
                }
                Ok(Header { entries, metadata: metadata.unwrap_or_default() })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Dims);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an array of at most {NDIM_MAX} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape: Dims = SmallVec::new();
                while let Some(length) = seq.next_element()? {
                    if shape.len() == NDIM_MAX {
                        return Err(A::Error::invalid_length(NDIM_MAX + 1, &self));
                    }
                    shape.push(length);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct Strings(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strings, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                let mut strings = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if strings.contains_key(&key) {
                        return Err(A::Error::custom(format!("the metadata {key:?} occurs twice")));
                    }
                    strings.insert(key, value);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_map(StringsVisitor)
    }
}
