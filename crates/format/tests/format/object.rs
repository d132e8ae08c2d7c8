use proptest::prelude::*;
use shardfast_format::object::{
    BYTES_MAX, CONTAINERS_MAX, Counts, DEPTH_MAX, ITEMS_MAX, Writer, decode, encode, excess,
};
use shardfast_format::{Error, Int, Tag, Value};

use crate::values::{int, payload, tagged, text};

/// Compares bit by bit, which `PartialEq` does not do for floats.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits(),
        (Value::List(a), Value::List(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Dict(a), Value::Dict(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(&a.0, &b.0) && same(&a.1, &b.1))
        }
        (Value::Tagged(s, a), Value::Tagged(t, b)) => s == t && same(a, b),
        _ => a == b,
    }
}

fn arbitrary_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(int),
        (-30i64..30).prop_map(int),
        (any::<bool>(), proptest::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(negative, magnitude)| Value::Int(Int::new(negative, &magnitude))),
        any::<u64>().prop_map(|bits| Value::Float(f64::from_bits(bits))),
        "\\PC{0,30}".prop_map(Value::Str),
        proptest::collection::vec(any::<u8>(), 0..300).prop_map(Value::Bytes),
        proptest::sample::select(Tag::ALL.to_vec()).prop_map(|tag| tagged(tag, payload(tag))),
    ];
    leaf.prop_recursive(6, 60, 8, |inner| {
        let items = proptest::collection::vec(inner.clone(), 0..30);
        prop_oneof![
            items.clone().prop_map(Value::List),
            proptest::collection::vec((inner.clone(), inner), 0..8).prop_map(Value::Dict),
            items.prop_map(|items| tagged(Tag::Tuple, Value::List(items))),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_value_comes_back_bit_by_bit(value in arbitrary_value()) {
        let bytes = encode(&value).unwrap();
        let decoded = decode(&bytes).unwrap();
        // A set comes back in the order it was written in, which is canonical.
        prop_assert_eq!(encode(&decoded).unwrap(), bytes);
        let has_set = format!("{value:?}").contains("Set");
        prop_assert!(has_set || same(&decoded, &value), "{:?}", decoded);
    }
}

#[test]
fn floats_keep_every_bit() {
    for bits in [0, 1 << 63, 0x7ff0_0000_0000_0001, 0x7ff8_0000_0000_0000, 0xfff8_dead_beef_0001, 0x7ff0 << 48] {
        let bytes = encode(&Value::Float(f64::from_bits(bits))).unwrap();
        match decode(&bytes).unwrap() {
            Value::Float(found) => assert_eq!(found.to_bits(), bits),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn sets_of_one_content_have_one_encoding() {
    let items = [int(300), int(2), text("b"), text("a"), Value::None];
    let forward = tagged(Tag::Set, Value::List(items.to_vec()));
    let backward = tagged(Tag::Set, Value::List(items.iter().rev().cloned().collect()));
    assert_eq!(encode(&forward).unwrap(), encode(&backward).unwrap());
    let tuple = |items: Vec<Value>| encode(&tagged(Tag::Tuple, Value::List(items))).unwrap();
    assert_ne!(tuple(items.to_vec()), tuple(items.iter().rev().cloned().collect()));
}

#[test]
fn integers_take_cbors_shortest_form() {
    let cases: [(Value, &[u8]); 8] = [
        (int(23), &[0x17]),
        (int(24), &[0x18, 24]),
        (int(-1), &[0x20]),
        (int(i64::MIN), &[0x3b, 0x7f, 255, 255, 255, 255, 255, 255, 255]),
        (Value::Int(Int::new(false, &[255; 8])), &[0x1b, 255, 255, 255, 255, 255, 255, 255, 255]),
        (Value::Int(Int::new(true, &[1, 0, 0, 0, 0, 0, 0, 0, 0])), &[0x3b, 255, 255, 255, 255, 255, 255, 255, 255]),
        (Value::Int(Int::new(false, &[1, 0, 0, 0, 0, 0, 0, 0, 0])), &[0xc2, 0x49, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        (Value::Int(Int::new(true, &[1, 0, 0, 0, 0, 0, 0, 0, 1])), &[0xc3, 0x49, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    ];
    for (value, expected) in cases {
        assert_eq!(encode(&value).unwrap(), expected, "{value:?}");
        assert_eq!(decode(expected).unwrap(), value);
    }
    // Spellings that a Big without care might have.
    let careless = Value::Int(Int::Big { negative: true, magnitude_be: vec![0, 0, 0] });
    assert_eq!(encode(&careless).unwrap(), [0x00]);
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::None, |inner, _| Value::List(vec![inner]))
}

#[test]
fn nesting_ends_at_the_limit_on_both_sides() {
    let deepest = nested(DEPTH_MAX);
    assert_eq!(decode(&encode(&deepest).unwrap()).unwrap(), deepest);
    assert!(matches!(encode(&nested(DEPTH_MAX + 1)), Err(Error::Invalid(m)) if m.contains("64")));
    let tuples = (0..DEPTH_MAX).fold(Value::None, |inner, _| tagged(Tag::Tuple, Value::List(vec![inner])));
    assert_eq!(decode(&encode(&tuples).unwrap()).unwrap(), tuples);

    let lists = |depth: usize| [vec![0x81; depth], vec![0xf6]].concat();
    assert!(decode(&lists(DEPTH_MAX)).is_ok());
    for depth in [DEPTH_MAX + 1, 1_000_000] {
        assert!(matches!(decode(&lists(depth)), Err(Error::Corrupt(m)) if m.contains("deeper")), "{depth}");
    }
    let maps = [vec![0xa1; 1_000_000], vec![0xf6]].concat();
    assert!(matches!(decode(&maps), Err(Error::Corrupt(_))));
    // Tags add no level, so they must not stack either.
    let tags = [0xd9, 0xe1, 0x00].repeat(1_000_000);
    assert!(matches!(decode(&tags), Err(Error::Corrupt(m)) if m.contains("directly")));
}

#[test]
fn counts_are_believed_only_while_the_bytes_can_hold_them() {
    for bytes in [
        &[0x9b, 255, 255, 255, 255, 255, 255, 255, 255][..],
        &[0x9b, 0, 0, 0, 255, 0, 0, 0, 0, 0xf6],
        &[0xbb, 128, 0, 0, 0, 0, 0, 0, 1, 0xf6, 0xf6],
        &[0xba, 255, 255, 255, 255],
        &[0x5b, 255, 255, 255, 255, 255, 255, 255, 255],
        &[0x7b, 0, 0, 0, 255, 0, 0, 0, 0, 0x61],
        &[0x82, 0xf6],
        // The inner list may not count on the byte that the outer one needs.
        &[0x82, 0x82, 0xf6, 0xf6],
        &[0xa1, 0xf6],
    ] {
        let found = decode(bytes);
        assert!(matches!(found, Err(Error::Corrupt(_))), "{bytes:02x?}: {found:?}");
    }
}

#[test]
fn what_the_format_does_not_use_of_cbor_is_corrupt() {
    for bytes in [
        &[][..],
        &[0xf6, 0xf6],
        &[0xf7],
        &[0xf8, 0x20],
        &[0xe0],
        &[0xff],
        &[0xf9, 0x3c, 0x00],
        &[0xfa, 0x3f, 0x80, 0x00, 0x00],
        &[0x9f, 0xff],
        &[0xbf, 0xff],
        &[0x5f, 0xff],
        &[0x7f, 0xff],
        &[0x62, 0xff, 0xfe],
        &[0x1c],
        &[0xc2, 0x01],
        &[0xc2, 0x5f, 0xff],
        &[0xd9, 0xe1],
        &[0xd9, 0xe1, 0x00],
    ] {
        let found = decode(bytes);
        assert!(matches!(found, Err(Error::Corrupt(_))), "{bytes:02x?}: {found:?}");
    }
}

#[test]
fn unknown_tags_ask_for_an_upgrade() {
    for number in [0u16, 1, 4, 258, 57_599, 57_634, 65_535] {
        let bytes = [&[0xd9][..], &number.to_be_bytes(), &[0xf6]].concat();
        let found = decode(&bytes);
        assert!(matches!(&found, Err(Error::Unsupported(m)) if m.contains("upgrade")), "{number}: {found:?}");
    }
}

#[test]
fn each_tag_wants_its_own_payload() {
    let odd = [
        Value::None,
        Value::Bool(true),
        int(-1),
        Value::Float(1.0),
        text("a:b:c"),
        Value::Bytes(vec![1]),
        Value::List(vec![]),
        Value::List(vec![text("jax"), text("x"), Value::List(vec![int(-1)]), Value::Bytes(vec![1])]),
        Value::List(vec![text(":x"), Value::Dict(vec![])]),
        Value::List(vec![text("a:b"), Value::Dict(vec![(int(1), int(2))])]),
        Value::Dict(vec![]),
    ];
    for tag in Tag::ALL {
        let right = tagged(tag, payload(tag));
        assert_eq!(decode(&encode(&right).unwrap()).unwrap(), right);
        let mut refused = 0;
        for payload in &odd {
            // What is written by hand with the wrong payload must not be read either.
            let by_hand = [&[0xd9][..], &(tag.number() as u16).to_be_bytes(), &encode(payload).unwrap()].concat();
            match encode(&tagged(tag, payload.clone())) {
                Ok(bytes) => assert_eq!(encode(&decode(&bytes).unwrap()).unwrap(), bytes),
                Err(Error::Invalid(message)) => {
                    assert!(message.contains(tag.name()), "{message}");
                    assert!(matches!(decode(&by_hand), Err(Error::Corrupt(_))), "{tag} {payload:?}");
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(refused >= 6, "{tag} takes almost anything");
    }
}

#[test]
fn strings_with_surrogates_are_otherwise_utf8() {
    let surrogate_str = |bytes: &[u8]| encode(&tagged(Tag::SurrogateStr, Value::Bytes(bytes.to_vec())));
    for bytes in [&[0xed, 0xa0, 0x80][..], &[0xed, 0xbf, 0xbf, b'a', 0xc3, 0xbc, 0xed, 0xa0, 0x80], b"", b"plain"] {
        surrogate_str(bytes).unwrap();
    }
    for bytes in [&[0xed, 0xa0][..], &[0xed, 0xa0, 0x00], &[0xff], &[0xed, 0xa0, 0x80, 0xc3], &[0x80]] {
        assert!(matches!(surrogate_str(bytes), Err(Error::Invalid(_))), "{bytes:02x?}");
    }
}

#[test]
fn arrays_hold_as_many_bytes_as_their_shape_asks_for() {
    let array = |shape: &[i64], bytes: usize| {
        let shape = Value::List(shape.iter().map(|&n| int(n)).collect());
        encode(&tagged(Tag::Array, Value::List(vec![text("numpy"), text("<i2"), shape, Value::Bytes(vec![0; bytes])])))
    };
    array(&[2, 3], 12).unwrap();
    array(&[], 2).unwrap();
    array(&[0, 3], 0).unwrap();
    array(&[i64::MAX, 0], 0).unwrap();
    for (shape, bytes) in [(&[2, 3][..], 13), (&[0], 1), (&[-1], 2), (&[i64::MAX, i64::MAX, 3], 0), (&[i64::MAX], 2)] {
        assert!(matches!(array(shape, bytes), Err(Error::Invalid(_))), "{shape:?} {bytes}");
    }
}

#[test]
fn a_value_beyond_the_limits_is_neither_written_nor_read() {
    let head = |kind: u8, count: u64| [&[kind][..], &(count as u32).to_be_bytes()].concat();
    let of = |kind: u8, count: u64, item: &[u8]| [head(kind, count), item.repeat(count as usize)].concat();
    let (items, containers) = (ITEMS_MAX, CONTAINERS_MAX);
    // By hand: nulls in a list, nulls in a map, lists in a list, tagged lists in a list.
    let tagged_list: &[u8] = &[0xd9, 0xe1, 0x00, 0x80];
    assert!(decode(&of(0x9a, containers - 1, &[0x80])).is_ok());
    assert!(decode(&of(0x9a, containers / 2 - 1, tagged_list)).is_ok());
    for beyond in [
        of(0x9a, items + 1, &[0xf6]),
        of(0xba, items / 2 + 1, &[0xf6, 0xf6]),
        of(0x9a, containers, &[0x80]),
        of(0x9a, containers / 2, tagged_list),
    ] {
        assert!(matches!(decode(&beyond), Err(Error::Unsupported(_))));
    }
    let counts = |items, containers| Counts { items, containers };
    assert_eq!(excess(BYTES_MAX, counts(items, containers)), None);
    for (bytes, counts) in [(BYTES_MAX + 1, counts(1, 1)), (1, counts(items + 1, 1)), (1, counts(1, containers + 1))] {
        assert!(excess(bytes, counts).is_some());
    }
    let list = |item: Value, count: u64| encode(&Value::List(vec![item; count as usize]));
    let sets = |count: u64| list(tagged(Tag::Set, Value::List(vec![Value::None])), count);
    assert!(list(Value::List(vec![]), containers - 1).is_ok() && sets(containers / 2 - 1).is_ok());
    for refused in [list(Value::List(vec![]), containers), sets(containers / 2)] {
        assert!(matches!(refused, Err(Error::Invalid(_))));
    }
}

#[test]
fn what_is_written_value_by_value_is_counted_alike() {
    let inner =
        Value::List(vec![tagged(Tag::Set, Value::List(vec![int(1), int(2)])), Value::Dict(vec![(int(1), int(2))])]);
    let mut writer = Writer::default();
    writer.list(1);
    let (written, before) = (writer.written(), writer.counts());
    writer.value(&inner).unwrap();
    let after = writer.counts();
    assert_eq!((after.items, after.containers), (1 + 2 + 2 + 2, 1 + 1 + 2 + 1));
    writer.rewind(written, before);
    assert_eq!(writer.counts(), before);
    writer.value(&inner).unwrap();
    assert_eq!(writer.counts(), after);
    assert_eq!(writer.take(), encode(&Value::List(vec![inner])).unwrap());
    assert_eq!(writer.counts(), after, "what was taken counts");
}
