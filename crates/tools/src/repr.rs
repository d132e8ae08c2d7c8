//! Values as short text, in the manner of Python's `repr`. For people: nothing ever reads it back.

use std::fmt::{self, Write};

use shardfast_format::{Int, Tag, Value};

/// Bytes of a bytes object that are shown.
const BYTES_SHOWN: usize = 16;

/// Returns the value as text of at most `chars_max` characters; a longer one ends with `…`. Control characters are
/// escaped.
pub(crate) fn short(value: &Value, chars_max: usize) -> String {
    let mut out = Limited { text: String::new(), chars_left: chars_max.saturating_sub(1) };
    if write(&mut out, value).is_err() {
        out.text.push('…');
    }
    out.text
}

struct Limited {
    text: String,
    chars_left: usize,
}

impl Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            self.chars_left = self.chars_left.checked_sub(1).ok_or(fmt::Error)?;
            self.text.push(char);
        }
        Ok(())
    }
}

fn write(out: &mut Limited, value: &Value) -> fmt::Result {
    match value {
        Value::None => out.write_str("None"),
        Value::Bool(true) => out.write_str("True"),
        Value::Bool(false) => out.write_str("False"),
        Value::Int(int) => write_int(out, int),
        Value::Float(float) if float.is_nan() => out.write_str("nan"),
        Value::Float(float) => write!(out, "{float:?}"),
        Value::Str(text) => write!(out, "{text:?}"),
        Value::Bytes(bytes) => write_bytes(out, bytes),
        Value::List(items) => write_items(out, "[", items, "]"),
        Value::Dict(entries) => write_dict(out, entries),
        Value::Tagged(tag, payload) => write_tagged(out, *tag, payload),
    }
}

fn write_int(out: &mut Limited, int: &Int) -> fmt::Result {
    match int {
        Int::Small(value) => write!(out, "{value}"),
        Int::Big { negative, magnitude_be } => {
            out.write_str(if *negative { "-0x" } else { "0x" })?;
            magnitude_be.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
        }
    }
}

fn write_bytes(out: &mut Limited, bytes: &[u8]) -> fmt::Result {
    let shown = &bytes[..bytes.len().min(BYTES_SHOWN)];
    write!(out, "b\"{}\"", shown.escape_ascii())?;
    if shown.len() < bytes.len() { write!(out, "… ({} bytes)", bytes.len()) } else { Ok(()) }
}

fn write_items(out: &mut Limited, open: &str, items: &[Value], close: &str) -> fmt::Result {
    out.write_str(open)?;
    for (i, item) in items.iter().enumerate() {
        out.write_str(if i > 0 { ", " } else { "" })?;
        write(out, item)?;
    }
    out.write_str(close)
}

fn write_dict(out: &mut Limited, entries: &[(Value, Value)]) -> fmt::Result {
    out.write_str("{")?;
    for (i, (key, value)) in entries.iter().enumerate() {
        out.write_str(if i > 0 { ", " } else { "" })?;
        write(out, key)?;
        out.write_str(": ")?;
        write(out, value)?;
    }
    out.write_str("}")
}

fn write_tagged(out: &mut Limited, tag: Tag, payload: &Value) -> fmt::Result {
    let items = match payload {
        Value::List(items) => items.as_slice(),
        _ => &[],
    };
    match (tag, payload, items) {
        (Tag::Tuple, _, [one]) => {
            write_items(out, "(", std::slice::from_ref(one), "")?;
            out.write_str(",)")
        }
        (Tag::Tuple, ..) => write_items(out, "(", items, ")"),
        (Tag::Set, _, [_, ..]) => write_items(out, "{", items, "}"),
        (Tag::Ellipsis, ..) => out.write_str("..."),
        (Tag::Pickle | Tag::SurrogateStr, Value::Bytes(bytes), _) => write!(out, "{tag} ({} bytes)", bytes.len()),
        (Tag::TensorRef, _, [Value::Str(key), Value::Str(name)]) => write!(out, "tensor {:?}", format!("{key}/{name}")),
        (Tag::Array, _, [Value::Str(framework), Value::Str(dtype), shape, _]) => {
            write!(out, "{} array {} ", framework.escape_debug(), dtype.escape_debug())?;
            write(out, shape)
        }
        (Tag::NamedTuple | Tag::Namespace | Tag::Dataclass, _, [Value::Str(class), Value::Dict(fields)]) => {
            write!(out, "{}(", class.escape_debug())?;
            for (i, (field, value)) in fields.iter().enumerate() {
                out.write_str(if i > 0 { ", " } else { "" })?;
                match field {
                    Value::Str(field) => write!(out, "{}=", field.escape_debug())?,
                    other => write(out, other)?,
                }
                write(out, value)?;
            }
            out.write_str(")")
        }
        (Tag::Enum, _, [Value::Str(class), Value::Str(member), _]) => {
            write!(out, "{}.{}", class.escape_debug(), member.escape_debug())
        }
        _ => {
            write!(out, "{tag}(")?;
            write(out, payload)?;
            out.write_str(")")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> Value {
        Value::Str(value.into())
    }

    fn tagged(tag: Tag, payload: Value) -> Value {
        Value::Tagged(tag, Box::new(payload))
    }

    #[test]
    fn values_read_like_python() {
        let int = |n: i64| Value::Int(Int::Small(n));
        let cases = [
            (Value::None, "None"),
            (Value::List(vec![Value::Bool(true), int(-3), Value::Float(0.5)]), "[True, -3, 0.5]"),
            (Value::Float(-f64::NAN), "nan"),
            (Value::Dict(vec![(text("lr"), Value::Float(1e-5)), (int(1), Value::None)]), r#"{"lr": 1e-5, 1: None}"#),
            (Value::Int(Int::new(true, &[1, 0, 0, 0, 0, 0, 0, 0, 0])), "-0x010000000000000000"),
            (tagged(Tag::Tuple, Value::List(vec![int(1)])), "(1,)"),
            (tagged(Tag::Tuple, Value::List(vec![int(1), int(2)])), "(1, 2)"),
            (tagged(Tag::Set, Value::List(vec![int(1)])), "{1}"),
            (tagged(Tag::Set, Value::List(vec![])), "set([])"),
            (tagged(Tag::TensorRef, Value::List(vec![text("model"), text("w")])), r#"tensor "model/w""#),
            (
                tagged(Tag::Dataclass, Value::List(vec![text("m:C"), Value::Dict(vec![(text("x"), int(2))])])),
                "m:C(x=2)",
            ),
            (Value::Bytes(vec![0, b'a']), r#"b"\x00a""#),
            (text("\u{1b}[31m"), r#""\u{1b}[31m""#),
        ];
        for (value, expected) in cases {
            assert_eq!(short(&value, 100), expected);
        }
    }

    #[test]
    fn long_values_are_cut() {
        let long = Value::List((0..1_000_000).map(|n| Value::Int(Int::Small(n))).collect());
        assert_eq!(short(&long, 12), "[0, 1, 2, 3…");
        assert_eq!(short(&text("ääää"), 4), "\"ää…");
        assert_eq!(short(&Value::Bytes(vec![b'x'; 40]), 60), "b\"xxxxxxxxxxxxxxxx\"… (40 bytes)");
    }
}
