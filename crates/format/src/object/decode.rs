//! Decodes CBOR into values: strictly, and without reserving more memory than the bytes at hand can fill.

use minicbor::Decoder;
use minicbor::data::{IanaTag, Type};

use super::limits::excess;
use super::{Counts, DEPTH_MAX, Int, Tag, Value};
use crate::error::Error;

/// Decodes exactly one value, which must fill `bytes`.
///
/// # Errors
/// `Corrupt` for anything but the part of CBOR that the format uses; `Unsupported` for a tag of a later version, and
/// for a value beyond [`BYTES_MAX`](super::BYTES_MAX), [`ITEMS_MAX`](super::ITEMS_MAX) or
/// [`CONTAINERS_MAX`](super::CONTAINERS_MAX).
pub fn decode(bytes: &[u8]) -> Result<Value, Error> {
    let mut reader = Reader { decoder: Decoder::new(bytes), items_left: 1, counts: Counts::default() };
    reader.expect_within_limits()?;
    let value = reader.value(0, None)?;
    let end = reader.decoder.position();
    if end != bytes.len() {
        return Err(Error::Corrupt(format!("object: expected {end} bytes, found {}", bytes.len())));
    }
    Ok(value)
}

struct Reader<'b> {
    decoder: Decoder<'b>,
    /// Items still missing in the lists and dicts begun so far. Each takes at least a byte, so a count is accepted only
    /// while the bytes left can hold all of them.
    items_left: usize,
    /// Items and containers entered so far.
    counts: Counts,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize, inside: Option<Tag>) -> Result<Value, Error> {
        self.items_left -= 1;
        let at = self.decoder.position();
        let flaw = |error: minicbor::decode::Error| Error::Corrupt(format!("object: byte {at}: {error}"));
        let decoder = &mut self.decoder;
        Ok(match decoder.datatype().map_err(flaw)? {
            Type::Null => {
                decoder.null().map_err(flaw)?;
                Value::None
            }
            Type::Bool => Value::Bool(decoder.bool().map_err(flaw)?),
            Type::U8 | Type::U16 | Type::U32 | Type::U64 => {
                Value::Int(Int::of_cbor(false, &decoder.u64().map_err(flaw)?.to_be_bytes()))
            }
            Type::I8 | Type::I16 | Type::I32 | Type::I64 | Type::Int => {
                // -1 - n, as CBOR has it, within 65 bits.
                let n = -1 - i128::from(decoder.int().map_err(flaw)?);
                Value::Int(Int::of_cbor(true, &n.to_be_bytes()))
            }
            Type::F64 => Value::Float(decoder.f64().map_err(flaw)?),
            Type::String => Value::Str(decoder.str().map_err(flaw)?.to_owned()),
            Type::Bytes => Value::Bytes(decoder.bytes().map_err(flaw)?.to_vec()),
            Type::Array => {
                let items = decoder.array().map_err(flaw)?;
                let items = self.owe(at, depth, items, 1)?;
                let mut list = Vec::with_capacity(items);
                for _ in 0..items {
                    list.push(self.value(depth + 1, None)?);
                }
                Value::List(list)
            }
            Type::Map => {
                let entries = decoder.map().map_err(flaw)?;
                let entries = self.owe(at, depth, entries, 2)?;
                let mut dict = Vec::with_capacity(entries);
                for _ in 0..entries {
                    let key = self.value(depth + 1, None)?;
                    dict.push((key, self.value(depth + 1, None)?));
                }
                Value::Dict(dict)
            }
            Type::Tag => {
                let number = decoder.tag().map_err(flaw)?.as_u64();
                if number == u64::from(IanaTag::PosBignum) || number == u64::from(IanaTag::NegBignum) {
                    let n = decoder.bytes().map_err(flaw)?;
                    return Ok(Value::Int(Int::of_cbor(number == u64::from(IanaTag::NegBignum), n)));
                }
                let Some(tag) = Tag::from_number(number) else {
                    return Err(Error::Unsupported(format!(
                        "object: byte {at}: the tag {number} is not known; upgrade shardfast"
                    )));
                };
                if let Some(outer) = inside {
                    return Err(Error::Corrupt(format!("object: byte {at}: {tag} stands directly in {outer}")));
                }
                self.items_left += 1;
                self.counts.tag();
                self.expect_within_limits()?;
                let payload = self.value(depth, Some(tag))?;
                if let Some(expected) = tag.mismatch(&payload) {
                    let found = payload.kind();
                    return Err(Error::Corrupt(format!(
                        "object: byte {at}: {tag}: expected {expected}, found {found}"
                    )));
                }
                Value::Tagged(tag, Box::new(payload))
            }
            other => {
                return Err(Error::Corrupt(format!("object: byte {at}: {other} has no meaning here")));
            }
        })
    }

    fn expect_within_limits(&self) -> Result<(), Error> {
        match excess(self.decoder.input().len() as u64, self.counts) {
            Some(excess) => Err(Error::Unsupported(format!("object: {excess}"))),
            None => Ok(()),
        }
    }

    /// Enters a list or dict of `count` rows of `width` items each; returns the number of rows.
    fn owe(&mut self, at: usize, depth: usize, count: Option<u64>, width: usize) -> Result<usize, Error> {
        if depth == DEPTH_MAX {
            return Err(Error::Corrupt(format!("object: byte {at}: nested deeper than {DEPTH_MAX} lists and dicts")));
        }
        let left = self.decoder.input().len() - self.decoder.position();
        let rows = count.and_then(|count| usize::try_from(count).ok());
        let items_left =
            rows.and_then(|rows| rows.checked_mul(width)).and_then(|items| items.checked_add(self.items_left));
        match (rows, items_left) {
            (Some(rows), Some(items_left)) if items_left <= left => {
                self.items_left = items_left;
                self.counts.enter((rows * width) as u64);
                self.expect_within_limits()?;
                Ok(rows)
            }
            _ => Err(Error::Corrupt(format!("object: byte {at}: more items than the {left} bytes left can hold"))),
        }
    }
}
