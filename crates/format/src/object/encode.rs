//! From values to CBOR: one spelling for each value, so that equal values have equal bytes.

use std::convert::Infallible;

use minicbor::Encoder;
use minicbor::data::{IanaTag, Int as CborInt, Tag as CborTag};

use super::int::u64_of;
use super::{DEPTH_MAX, Int, Tag, Value};
use crate::error::Error;

/// Encodes a value. Sets are ordered by their items' encodings, integers and lengths take their shortest form.
///
/// # Errors
/// `Invalid` for nesting beyond [`DEPTH_MAX`], and for a tag whose payload is not what the table says.
pub fn encode(value: &Value) -> Result<Vec<u8>, Error> {
    let mut out = Encoder::new(Vec::new());
    put(&mut out, value, 0)?;
    Ok(out.into_writer())
}

type Out = Encoder<Vec<u8>>;

fn put(out: &mut Out, value: &Value, depth: usize) -> Result<(), Error> {
    match value {
        Value::None => out.null().map_err(unwritable)?,
        Value::Bool(value) => out.bool(*value).map_err(unwritable)?,
        Value::Int(value) => return put_int(out, value),
        Value::Float(value) => out.f64(*value).map_err(unwritable)?,
        Value::Str(text) => out.str(text).map_err(unwritable)?,
        Value::Bytes(bytes) => out.bytes(bytes).map_err(unwritable)?,
        Value::List(items) => {
            let depth = deeper(depth)?;
            out.array(items.len() as u64).map_err(unwritable)?;
            return items.iter().try_for_each(|item| put(out, item, depth));
        }
        Value::Dict(entries) => {
            let depth = deeper(depth)?;
            out.map(entries.len() as u64).map_err(unwritable)?;
            return entries.iter().try_for_each(|(key, value)| {
                put(out, key, depth)?;
                put(out, value, depth)
            });
        }
        Value::Tagged(tag, payload) => return put_tagged(out, *tag, payload, depth),
    };
    Ok(())
}

fn put_tagged(out: &mut Out, tag: Tag, payload: &Value, depth: usize) -> Result<(), Error> {
    if let Some(expected) = tag.mismatch(payload) {
        return Err(Error::Invalid(format!("object: {tag}: expected {expected}, found {}", payload.kind())));
    }
    out.tag(CborTag::new(tag.number())).map_err(unwritable)?;
    match payload {
        Value::List(items) if matches!(tag, Tag::Set | Tag::FrozenSet) => {
            let depth = deeper(depth)?;
            let encoded: Result<Vec<Vec<u8>>, Error> = items
                .iter()
                .map(|item| {
                    let mut out = Encoder::new(Vec::new());
                    put(&mut out, item, depth)?;
                    Ok(out.into_writer())
                })
                .collect();
            let mut encoded = encoded?;
            encoded.sort_unstable();
            out.array(encoded.len() as u64).map_err(unwritable)?;
            encoded.iter().for_each(|item| out.writer_mut().extend_from_slice(item));
            Ok(())
        }
        _ => put(out, payload, depth),
    }
}

fn put_int(out: &mut Out, value: &Int) -> Result<(), Error> {
    let (negative, n) = value.to_cbor();
    if n.len() <= 8 {
        let n = i128::from(u64_of(&n));
        let value = CborInt::try_from(if negative { -1 - n } else { n });
        let value = value.map_err(|_| Error::Invalid("object: integer beyond CBOR's own range".to_owned()))?;
        out.int(value).map_err(unwritable)?;
    } else {
        out.tag(if negative { IanaTag::NegBignum } else { IanaTag::PosBignum }).map_err(unwritable)?;
        out.bytes(&n).map_err(unwritable)?;
    }
    Ok(())
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth == DEPTH_MAX {
        return Err(Error::Invalid(format!("object: nested deeper than {DEPTH_MAX} lists and dicts")));
    }
    Ok(depth + 1)
}

/// Memory takes every write.
fn unwritable(error: minicbor::encode::Error<Infallible>) -> Error {
    Error::Invalid(format!("object: {error}"))
}
