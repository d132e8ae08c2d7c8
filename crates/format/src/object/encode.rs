//! Encodes values as CBOR: one spelling for each value, so that equal values have equal bytes.

use super::int::u64_of;
use super::limits::excess;
use super::{Counts, DEPTH_MAX, Int, Tag, Value};
use crate::error::Error;

/// Encodes a value. Sets are ordered by their items' encodings, integers and lengths take their shortest form.
///
/// `Invalid` for nesting beyond [`DEPTH_MAX`], for a tag whose payload breaks the table, and for a value that
/// [`decode`](super::decode()) refuses for its size.
pub fn encode(value: &Value) -> Result<Vec<u8>, Error> {
    let mut out = Writer::default();
    put(&mut out, value, 0)?;
    match excess(out.bytes.len() as u64, out.counts) {
        Some(excess) => Err(Error::Invalid(format!("object: {excess}"))),
        None => Ok(out.bytes),
    }
}

/// Writes the same encoding value by value, without a [`Value`]: a list or dict is its head, followed by its values
/// (keys and values of a dict). The caller ensures the nesting depth, that the payload of a tag follows the table, and
/// that [`counts`](Writer::counts) stay within the limits.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
    counts: Counts,
}

impl Writer {
    /// Writes a `None`.
    pub fn none(&mut self) {
        self.bytes.push(SIMPLE << 5 | 22);
    }

    /// Writes a `bool`.
    pub fn bool(&mut self, value: bool) {
        self.bytes.push(SIMPLE << 5 | (20 + u8::from(value)));
    }

    /// Writes an `int` of 64 bits.
    #[inline]
    pub fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(n) => self.head(UNSIGNED, n),
            Err(_) => self.head(NEGATIVE, !value as u64),
        }
    }

    /// Writes a `float`.
    #[inline]
    pub fn float(&mut self, value: f64) {
        let mut out = [SIMPLE << 5 | 27; 9];
        out[1..].copy_from_slice(&value.to_be_bytes());
        self.bytes.extend_from_slice(&out);
    }

    /// Writes a `str`.
    #[inline]
    pub fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    /// Writes the head of `bytes`, which must follow.
    pub fn bytes(&mut self, count: u64) {
        self.head(BYTES, count);
    }

    /// Writes the head of a `list`, whose items must follow.
    pub fn list(&mut self, items: u64) {
        self.counts.enter(items);
        self.head(LIST, items);
    }

    /// Writes the head of a `dict`, whose entries must follow, each a key and its value.
    pub fn dict(&mut self, entries: u64) {
        self.counts.enter(2 * entries);
        self.head(DICT, entries);
    }

    /// Writes a tag, whose payload must follow.
    pub fn tag(&mut self, tag: Tag) {
        self.counts.tag();
        self.head(TAG, tag.number());
    }

    /// Writes a whole value.
    ///
    /// # Errors
    /// `Invalid` for nesting beyond [`DEPTH_MAX`] within it, and for a tag whose payload breaks the table.
    pub fn value(&mut self, value: &Value) -> Result<(), Error> {
        put(self, value, 0)
    }

    /// Returns the items and containers begun so far, in bytes already taken, too.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Writes bytes that are encoded already, such as the bytes behind a head.
    pub fn raw(&mut self, encoded: &[u8]) {
        self.bytes.extend_from_slice(encoded);
    }

    /// Writes the first `bytes` bytes of `encoded`. Copies all 32 and truncates, which is faster than a copy of
    /// variable length.
    #[inline]
    pub fn short(&mut self, encoded: &[u8; 32], bytes: usize) {
        let end = self.bytes.len() + bytes.min(encoded.len());
        self.bytes.extend_from_slice(encoded);
        self.bytes.truncate(end);
    }

    /// Returns the bytes written since the last call, and removes them.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Returns the bytes since the last [`take`](Writer::take), from byte `at` on.
    #[inline]
    pub fn since(&self, at: usize) -> &[u8] {
        &self.bytes[at..]
    }

    /// Returns the number of bytes since the last [`take`](Writer::take).
    pub fn written(&self) -> usize {
        self.bytes.len()
    }

    /// Truncates to the first `written` bytes since the last [`take`](Writer::take), and resets the counts to `counts`.
    pub fn rewind(&mut self, written: usize, counts: Counts) {
        self.bytes.truncate(written);
        self.counts = counts;
    }

    /// Writes the first byte of an item, and its argument in the shortest form.
    #[inline]
    fn head(&mut self, major: u8, n: u64) {
        if n < 24 {
            return self.bytes.push(major << 5 | n as u8);
        }
        let (info, argument_bytes) = match n {
            0..0x100 => (24, 1),
            0x100..0x1_0000 => (25, 2),
            0x1_0000..0x1_0000_0000 => (26, 4),
            _ => (27, 8),
        };
        // Copies a fixed number of bytes, which is faster than a copy of variable length.
        let mut out = [major << 5 | info; 9];
        out[1..].copy_from_slice(&(n << (64 - 8 * argument_bytes)).to_be_bytes());
        let end = self.bytes.len() + 1 + argument_bytes;
        self.bytes.extend_from_slice(&out);
        self.bytes.truncate(end);
    }
}

impl From<Vec<u8>> for Writer {
    /// Starts with these bytes, as if it had written them.
    fn from(bytes: Vec<u8>) -> Writer {
        Writer { bytes, counts: Counts::default() }
    }
}

/// Major types of CBOR.
const UNSIGNED: u8 = 0;
const NEGATIVE: u8 = 1;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const LIST: u8 = 4;
const DICT: u8 = 5;
const TAG: u8 = 6;
const SIMPLE: u8 = 7;

/// Tags of integers beyond 64 bits.
const POSITIVE_BIGNUM: u64 = 2;
const NEGATIVE_BIGNUM: u64 = 3;

fn put(out: &mut Writer, value: &Value, depth: usize) -> Result<(), Error> {
    match value {
        Value::None => out.none(),
        Value::Bool(value) => out.bool(*value),
        Value::Int(value) => put_int(out, value),
        Value::Float(value) => out.float(*value),
        Value::Str(text) => out.text(text),
        Value::Bytes(bytes) => {
            out.bytes(bytes.len() as u64);
            out.raw(bytes);
        }
        Value::List(items) => {
            let depth = deeper(depth)?;
            out.list(items.len() as u64);
            return items.iter().try_for_each(|item| put(out, item, depth));
        }
        Value::Dict(entries) => {
            let depth = deeper(depth)?;
            out.dict(entries.len() as u64);
            return entries.iter().try_for_each(|(key, value)| {
                put(out, key, depth)?;
                put(out, value, depth)
            });
        }
        Value::Tagged(tag, payload) => return put_tagged(out, *tag, payload, depth),
    };
    Ok(())
}

fn put_tagged(out: &mut Writer, tag: Tag, payload: &Value, depth: usize) -> Result<(), Error> {
    if let Some(expected) = tag.mismatch(payload) {
        return Err(Error::Invalid(format!("object: {tag}: expected {expected}, found {}", payload.kind())));
    }
    out.tag(tag);
    match payload {
        Value::List(items) if matches!(tag, Tag::Set | Tag::FrozenSet) => {
            let depth = deeper(depth)?;
            let mut counts = Counts::default();
            let encoded: Result<Vec<Vec<u8>>, Error> = items
                .iter()
                .map(|item| {
                    let mut out = Writer::default();
                    put(&mut out, item, depth)?;
                    counts.add(out.counts);
                    Ok(out.bytes)
                })
                .collect();
            let mut encoded = encoded?;
            encoded.sort_unstable();
            out.counts.add(counts);
            out.list(encoded.len() as u64);
            encoded.iter().for_each(|item| out.raw(item));
            Ok(())
        }
        _ => put(out, payload, depth),
    }
}

fn put_int(out: &mut Writer, value: &Int) {
    if let Int::Small(value) = value {
        return out.int(*value);
    }
    let (negative, n) = value.to_cbor();
    if n.len() <= 8 {
        out.head(if negative { NEGATIVE } else { UNSIGNED }, u64_of(&n));
    } else {
        out.head(TAG, if negative { NEGATIVE_BIGNUM } else { POSITIVE_BIGNUM });
        out.bytes(n.len() as u64);
        out.raw(&n);
    }
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth == DEPTH_MAX {
        return Err(Error::Invalid(format!("object: nested deeper than {DEPTH_MAX} lists and dicts")));
    }
    Ok(depth + 1)
}
