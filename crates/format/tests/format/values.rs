//! Makes values of every tag.

use shardfast_format::{Int, Tag, Value};

pub(crate) fn int(value: i64) -> Value {
    Value::Int(Int::Small(value))
}

pub(crate) fn text(text: &str) -> Value {
    Value::Str(text.to_owned())
}

pub(crate) fn tagged(tag: Tag, payload: Value) -> Value {
    Value::Tagged(tag, Box::new(payload))
}

/// Returns a payload for each tag, as the table demands.
pub(crate) fn payload(tag: Tag) -> Value {
    let list = Value::List;
    let type_name = || text("pkg.mod:Outer.Inner");
    let fields = || Value::Dict(vec![(text("x"), int(1)), (text("y"), Value::None)]);
    match tag {
        Tag::Tuple | Tag::Set | Tag::FrozenSet => list(vec![int(1), text("a")]),
        Tag::ByteArray => Value::Bytes(vec![0, 255]),
        Tag::Complex => list(vec![Value::Float(1.5), Value::Float(-0.0)]),
        Tag::SurrogateStr => Value::Bytes(vec![0x61, 0xed, 0xb3, 0xbf]),
        Tag::Range => list(vec![int(0), int(10), int(-2)]),
        Tag::Slice => list(vec![Value::None, int(3), Value::None]),
        Tag::Ellipsis => Value::None,
        Tag::OrderedDict | Tag::Counter => Value::Dict(vec![(int(30), int(1)), (text("a"), int(2))]),
        Tag::DefaultDict => list(vec![text("builtins:list"), fields()]),
        Tag::Deque => list(vec![int(8), list(vec![int(1)])]),
        Tag::NamedTuple | Tag::Namespace | Tag::Dataclass => list(vec![type_name(), fields()]),
        Tag::Enum => list(vec![type_name(), text("RED"), int(1)]),
        Tag::Path => list(vec![text("PosixPath"), text("/data/run")]),
        Tag::DateTime => {
            let mut items: Vec<Value> = [2026, 11, 20, 12, 34, 56, 789_000, 0].map(int).into();
            items.push(tagged(Tag::TimeZone, int(3_600_000_000)));
            list(items)
        }
        Tag::Date => list(vec![int(2026), int(11), int(20)]),
        Tag::Time => {
            list(vec![int(12), int(34), int(56), int(789_000), int(1), tagged(Tag::TimeZone, text("Europe/Berlin"))])
        }
        Tag::TimeDelta => list(vec![int(-1), int(86_399), int(999_999)]),
        Tag::TimeZone => text("Europe/Berlin"),
        Tag::Decimal => text("1.10"),
        Tag::Fraction => list(vec![int(-1), int(3)]),
        Tag::Uuid => Value::Bytes((0..16).collect()),
        Tag::TensorRef => list(vec![text("model"), text("w")]),
        Tag::Array => {
            list(vec![text("torch"), text("int16"), list(vec![int(2), int(1)]), Value::Bytes(vec![1, 0, 2, 0])])
        }
        Tag::NumpyScalar => list(vec![text("<f4"), Value::Bytes(vec![0, 0, 128, 63])]),
        Tag::DType => list(vec![text("torch"), text("bfloat16")]),
        Tag::TorchSize => list(vec![int(2), int(3)]),
        Tag::TorchDevice => text("cuda:1"),
        Tag::Pickle => Value::Bytes(b"\x80\x04N.".to_vec()),
        Tag::Attributed => list(vec![tagged(Tag::OrderedDict, payload(Tag::OrderedDict)), fields()]),
    }
}
