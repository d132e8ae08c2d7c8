//! Objects compared by the meaning of their values, with the path to the first difference.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;

use shardfast_engine::Checkpoint;
use shardfast_engine::reads::ValueRef;
use shardfast_engine::stream::batches;
use shardfast_format::object::{decode, encode};
use shardfast_format::{Extent, Int, Tag, Value};
use shardfast_transfer::error::{Error, Result};

use super::ValueDifference;
use crate::inspect::full_name;
use crate::repr::short;

/// Encoded values of both checkpoints read at a time, in bytes.
const BATCH_BYTES: u64 = 4 << 20;

/// Characters of the text of a difference, and of a dict's key on the way to it.
const TEXT_CHARS_MAX: usize = 80;
const KEY_CHARS_MAX: usize = 40;

/// Two values of one leaf that must be equal: their indices, and the ranks that have this pair.
struct Pair {
    leaves: (usize, usize),
    values: (usize, usize),
    bytes: u64,
    ranks: Vec<Range<u32>>,
}

/// Returns the first difference of each object that differs, with its index in `a`. `objects` are indices in `a` and
/// `b`.
pub(super) fn compare(
    a: &Checkpoint,
    b: &Checkpoint,
    objects: &[(usize, usize)],
) -> Result<Vec<(usize, ValueDifference)>> {
    let mut differences: Vec<(usize, ValueDifference)> = Vec::new();
    let mut pairs = Vec::new();
    for &leaves in objects {
        match pairs_of(a, b, leaves) {
            Ok(found) => pairs.extend(found),
            Err(difference) => differences.push((leaves.0, difference)),
        }
    }
    for batch in batches(pairs.iter().map(|pair| pair.bytes), BATCH_BYTES) {
        let batch = &pairs[batch];
        let refs = |of: fn(&Pair) -> ValueRef| batch.iter().map(of).collect::<Vec<_>>();
        let left = a.load_alone(&[], &refs(|pair| ValueRef { leaf: pair.leaves.0, value: pair.values.0 }))?;
        let right = b.load_alone(&[], &refs(|pair| ValueRef { leaf: pair.leaves.1, value: pair.values.1 }))?;
        for ((pair, left), right) in batch.iter().zip(left).zip(right) {
            // All pairs of a leaf follow each other.
            let is_known = differences.last().is_some_and(|(leaf, _)| *leaf == pair.leaves.0);
            if left == right || is_known {
                continue;
            }
            let (left, right) = (decoded(a, pair.leaves.0, &left)?, decoded(b, pair.leaves.1, &right)?);
            let mut path = String::new();
            if let Some((a, b)) = difference(&left, &right, &mut path) {
                differences.push((pair.leaves.0, ValueDifference { path, a, b, ranks: pair.ranks.clone() }));
            }
        }
    }
    Ok(differences)
}

fn decoded(checkpoint: &Checkpoint, leaf: usize, encoded: &[u8]) -> Result<Value> {
    let place = || format!("{}: value {}", checkpoint.url(), full_name(checkpoint.manifest(), leaf));
    decode(encoded).map_err(|error| Error::from(error).within(place()))
}

/// Returns the values of a leaf that are to be compared: rank by rank, where a value that all ranks share stands for
/// any rank, so that worlds of different sizes may hold equal values. `Err` when a rank has a value on one side only.
fn pairs_of(a: &Checkpoint, b: &Checkpoint, leaves: (usize, usize)) -> std::result::Result<Vec<Pair>, ValueDifference> {
    let values: (Vec<_>, Vec<_>) = (a.manifest().values(leaves.0).collect(), b.manifest().values(leaves.1).collect());
    let worlds = (a.manifest().info.world, b.manifest().info.world);
    let pair = |i: usize, j: usize, ranks| {
        let bytes = values.0[i].1.bytes + values.1[j].1.bytes;
        Pair { leaves, values: (i, j), bytes, ranks }
    };
    match (is_shared(&values.0, worlds.0), is_shared(&values.1, worlds.1)) {
        (true, true) => Ok(vec![pair(0, 0, Vec::new())]),
        (true, false) => Ok((0..values.1.len()).map(|j| pair(0, j, values.1[j].0.clone())).collect()),
        (false, true) => Ok((0..values.0.len()).map(|i| pair(i, 0, values.0[i].0.clone())).collect()),
        (false, false) => {
            let by_rank = (by_rank(&values.0), by_rank(&values.1));
            let mut lonely = ranges(by_rank.0.iter().zip(&by_rank.1).map(|(i, j)| i.is_some() != j.is_some()));
            let beyond = by_rank.0.len().min(by_rank.1.len()) as u32;
            let longest = by_rank.0.len().max(by_rank.1.len()) as u32;
            lonely.extend((beyond < longest).then_some(beyond..longest));
            if let Some(first) = lonely.first() {
                let said = |by_rank: &[Option<usize>]| {
                    let has = by_rank.get(first.start as usize).is_some_and(Option::is_some);
                    has.then(|| format!("a value of rank {}", first.start))
                };
                let (a, b) = (said(&by_rank.0), said(&by_rank.1));
                return Err(ValueDifference { path: String::new(), a, b, ranks: lonely });
            }
            let mut pairs: Vec<Pair> = Vec::new();
            let mut place: HashMap<(usize, usize), usize> = HashMap::new();
            for (rank, both) in (0u32..).zip(by_rank.0.into_iter().zip(by_rank.1)) {
                let (Some(i), Some(j)) = both else { continue };
                let place = *place.entry((i, j)).or_insert_with(|| {
                    pairs.push(pair(i, j, Vec::new()));
                    pairs.len() - 1
                });
                push_rank(&mut pairs[place].ranks, rank);
            }
            Ok(pairs)
        }
    }
}

fn is_shared(values: &[(Vec<Range<u32>>, Extent)], world: u32) -> bool {
    matches!(values, [(ranks, _)] if matches!(ranks.as_slice(), [all] if *all == (0..world)))
}

/// Returns the index of each rank's value, up to the last rank that has one.
fn by_rank(values: &[(Vec<Range<u32>>, Extent)]) -> Vec<Option<usize>> {
    let end = values.iter().flat_map(|(ranks, _)| ranks).map(|range| range.end).max().unwrap_or(0);
    let mut out = vec![None; end as usize];
    for (i, (ranks, _)) in values.iter().enumerate() {
        ranks.iter().for_each(|range| out[range.start as usize..range.end as usize].fill(Some(i)));
    }
    out
}

fn ranges(chosen: impl Iterator<Item = bool>) -> Vec<Range<u32>> {
    let mut out = Vec::new();
    (0u32..).zip(chosen).filter(|(_, chosen)| *chosen).for_each(|(rank, _)| push_rank(&mut out, rank));
    out
}

fn push_rank(ranges: &mut Vec<Range<u32>>, rank: u32) {
    match ranges.last_mut() {
        Some(last) if last.end == rank => last.end += 1,
        _ => ranges.push(rank..rank + 1),
    }
}

/// Texts of both sides at their difference; `None` for a side that has nothing there.
type Differing = Option<(Option<String>, Option<String>)>;

/// Finds the first difference of two values, whose path is then in `path`. Floats are compared bit by bit; the order of
/// a dict counts only where it does in Python.
fn difference(a: &Value, b: &Value, path: &mut String) -> Differing {
    match (a, b) {
        (Value::Float(left), Value::Float(right)) if left.to_bits() == right.to_bits() => None,
        (Value::Bytes(left), Value::Bytes(right)) => in_bytes(left, right, path),
        (Value::List(left), Value::List(right)) => in_items(left, right, path),
        (Value::Dict(left), Value::Dict(right)) => in_dict(left, right, path),
        (Value::Tagged(tag, left), Value::Tagged(other, right)) if tag == other => {
            in_payload(*tag, left, right, path).unwrap_or_else(|Whole| here(a, b))
        }
        (Value::Float(_), Value::Float(_)) => here(a, b),
        _ if a == b => None,
        _ => here(a, b),
    }
}

fn here(a: &Value, b: &Value) -> Differing {
    Some((Some(short(a, TEXT_CHARS_MAX)), Some(short(b, TEXT_CHARS_MAX))))
}

/// The values differ, and it takes both of them whole to say how.
struct Whole;

fn in_payload(tag: Tag, a: &Value, b: &Value, path: &mut String) -> std::result::Result<Differing, Whole> {
    match (tag, a, b) {
        (Tag::Tuple, Value::List(left), Value::List(right)) => Ok(in_items(left, right, path)),
        (Tag::ByteArray, Value::Bytes(left), Value::Bytes(right)) => Ok(in_bytes(left, right, path)),
        (Tag::Counter, Value::Dict(left), Value::Dict(right)) => Ok(in_dict(left, right, path)),
        (Tag::OrderedDict, Value::Dict(left), Value::Dict(right)) => match in_dict(left, right, path) {
            None if !left.iter().zip(right).all(|(a, b)| is_same(&a.0, &b.0)) => Err(Whole),
            found => Ok(found),
        },
        (_, Value::List(left), Value::List(right)) => match (tag, left.as_slice(), right.as_slice()) {
            (Tag::DefaultDict, [head, Value::Dict(left)], [other, Value::Dict(right)]) if is_same(head, other) => {
                Ok(in_dict(left, right, path))
            }
            (
                Tag::NamedTuple | Tag::Namespace | Tag::Dataclass,
                [head, Value::Dict(left)],
                [other, Value::Dict(right)],
            ) if is_same(head, other) => Ok(in_fields(left, right, path)),
            (Tag::Deque, [head, Value::List(left)], [other, Value::List(right)]) if is_same(head, other) => {
                Ok(in_items(left, right, path))
            }
            (Tag::Attributed, [left, head], [right, other]) if is_same(head, other) => {
                Ok(difference(left, right, path))
            }
            (Tag::Array, [head @ .., Value::Bytes(left)], [other @ .., Value::Bytes(right)])
                if is_same_list(head, other) && left.len() == right.len() =>
            {
                in_array(head, left, right, path)
            }
            _ if is_same_list(left, right) => Ok(None),
            _ => Err(Whole),
        },
        _ if is_same(a, b) => Ok(None),
        _ => Err(Whole),
    }
}

fn is_same(a: &Value, b: &Value) -> bool {
    difference(a, b, &mut String::new()).is_none()
}

fn is_same_list(a: &[Value], b: &[Value]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
}

/// Shows bytes from the first difference on: the bytes before it would fill the text.
fn in_bytes(a: &[u8], b: &[u8], path: &mut String) -> Differing {
    let start = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    if start == a.len() && start == b.len() {
        return None;
    }
    // Writing to a text cannot fail, here and below.
    let _ = if start > 0 { write!(path, "[{start}:]") } else { Ok(()) };
    here(&Value::Bytes(a[start..].to_vec()), &Value::Bytes(b[start..].to_vec()))
}

/// Returns the bytes of the first element that differs, by its place in row-major order. `head` is what both arrays
/// have beside their bytes: framework, dtype, shape.
fn in_array(head: &[Value], a: &[u8], b: &[u8], path: &mut String) -> std::result::Result<Differing, Whole> {
    let Some(first) = a.iter().zip(b).position(|(a, b)| a != b) else { return Ok(None) };
    let Some(Value::List(shape)) = head.last() else { return Err(Whole) };
    let numel = shape.iter().try_fold(1usize, |numel, length| match length {
        Value::Int(Int::Small(n)) => numel.checked_mul(usize::try_from(*n).ok()?),
        _ => None,
    });
    let item = numel.and_then(|numel| a.len().checked_div(numel)).filter(|&item| item > 0).ok_or(Whole)?;
    let element = first / item;
    let _ = write!(path, ".flat[{element}]");
    let bytes = |bytes: &[u8]| Value::Bytes(bytes[element * item..(element + 1) * item].to_vec());
    Ok(here(&bytes(a), &bytes(b)))
}

fn in_items(a: &[Value], b: &[Value], path: &mut String) -> Differing {
    (0..a.len().max(b.len())).find_map(|i| at(a.get(i), b.get(i), path, |path| write!(path, "[{i}]")))
}

fn in_dict(a: &[(Value, Value)], b: &[(Value, Value)], path: &mut String) -> Differing {
    by_key(a, b, path, |path, key| write!(path, "[{}]", short(key, KEY_CHARS_MAX)))
}

fn in_fields(a: &[(Value, Value)], b: &[(Value, Value)], path: &mut String) -> Differing {
    by_key(a, b, path, |path, key| match key {
        Value::Str(field) => write!(path, ".{}", field.escape_debug()),
        other => write!(path, "[{}]", short(other, KEY_CHARS_MAX)),
    })
}

fn by_key(
    a: &[(Value, Value)],
    b: &[(Value, Value)],
    path: &mut String,
    step: impl Fn(&mut String, &Value) -> std::fmt::Result,
) -> Differing {
    let mut others: HashMap<Vec<u8>, &(Value, Value)> = b.iter().map(|entry| (spelled(&entry.0), entry)).collect();
    for (key, value) in a {
        let other = others.remove(&spelled(key)).map(|(_, value)| value);
        if let Some(found) = at(Some(value), other, path, |path| step(path, key)) {
            return Some(found);
        }
    }
    let extra = b.iter().find(|(key, _)| others.contains_key(&spelled(key)))?;
    at(None, Some(&extra.1), path, |path| step(path, &extra.0))
}

/// Encodes a key, in its one spelling. Keys were decoded, so they can be encoded.
fn spelled(key: &Value) -> Vec<u8> {
    encode(key).unwrap_or_default()
}

/// Compares two values one step further, which stays in the path when they differ.
fn at(
    a: Option<&Value>,
    b: Option<&Value>,
    path: &mut String,
    step: impl Fn(&mut String) -> std::fmt::Result,
) -> Differing {
    let length = path.len();
    let _ = step(path);
    let found = match (a, b) {
        (Some(a), Some(b)) => difference(a, b, path),
        (a, b) => Some((a.map(|a| short(a, TEXT_CHARS_MAX)), b.map(|b| short(b, TEXT_CHARS_MAX)))),
    };
    if found.is_none() {
        path.truncate(length);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int(n: i64) -> Value {
        Value::Int(Int::Small(n))
    }

    fn text(text: &str) -> Value {
        Value::Str(text.into())
    }

    fn dict(entries: &[(&str, Value)]) -> Value {
        Value::Dict(entries.iter().map(|(key, value)| (text(key), value.clone())).collect())
    }

    fn tagged(tag: Tag, payload: Value) -> Value {
        Value::Tagged(tag, Box::new(payload))
    }

    fn first(a: &Value, b: &Value) -> Option<String> {
        let mut path = String::new();
        let (a, b) = difference(a, b, &mut path)?;
        let text = |side: Option<String>| side.unwrap_or_else(|| "-".to_owned());
        Some(format!("{path}: {} {}", text(a), text(b)))
    }

    #[test]
    fn the_first_difference_is_found_where_it_is() {
        let list = |items: &[Value]| Value::List(items.to_vec());
        let array = |shape: &[i64], bytes: &[u8]| {
            let shape = list(&shape.iter().map(|&n| int(n)).collect::<Vec<_>>());
            tagged(Tag::Array, list(&[text("some"), text("int16"), shape, Value::Bytes(bytes.to_vec())]))
        };
        let class = |name: &str, fields: Value| tagged(Tag::Dataclass, list(&[text(name), fields]));
        let attributed = |item: i64, attribute: i64| {
            let items = tagged(Tag::OrderedDict, dict(&[("a", int(item))]));
            tagged(Tag::Attributed, list(&[items, dict(&[("v", int(attribute))])]))
        };
        let cases = [
            (int(1), int(2), ": 1 2"),
            (int(1), Value::Bool(true), ": 1 True"),
            (dict(&[("a", list(&[int(1), int(2)]))]), dict(&[("a", list(&[int(1), int(3)]))]), r#"["a"][1]: 2 3"#),
            (list(&[int(1)]), list(&[int(1), int(5)]), "[1]: - 5"),
            (dict(&[("a", int(1))]), dict(&[("b", int(1))]), r#"["a"]: 1 -"#),
            (dict(&[]), dict(&[("b", int(1))]), r#"["b"]: - 1"#),
            (class("m:C", dict(&[("x", int(1))])), class("m:C", dict(&[("x", int(2))])), ".x: 1 2"),
            (class("m:C", dict(&[])), class("m:D", dict(&[])), ": m:C() m:D()"),
            (tagged(Tag::Tuple, list(&[int(1)])), list(&[int(1)]), ": (1,) [1]"),
            (
                tagged(Tag::Deque, list(&[Value::None, list(&[int(1)])])),
                tagged(Tag::Deque, list(&[Value::None, list(&[int(2)])])),
                "[0]: 1 2",
            ),
            (tagged(Tag::Set, list(&[int(1)])), tagged(Tag::Set, list(&[int(2)])), ": {1} {2}"),
            (attributed(1, 3), attributed(2, 3), "[\"a\"]: 1 2"),
            (
                attributed(1, 3),
                attributed(1, 4),
                r#": attributed([ordered_dict({"a": 1}), {"v": 3}]) attributed([ordered_dict({"a": 1}), {"v": 4}])"#,
            ),
            (Value::Float(0.0), Value::Float(-0.0), ": 0.0 -0.0"),
            (Value::Bytes(b"abcd".to_vec()), Value::Bytes(b"abxd".to_vec()), r#"[2:]: b"cd" b"xd""#),
            (Value::Bytes(b"ab".to_vec()), Value::Bytes(b"a".to_vec()), r#"[1:]: b"b" b"""#),
            (array(&[3], b"aabbcc"), array(&[3], b"aabdcc"), r#".flat[1]: b"bb" b"bd""#),
            (array(&[3], b"aabbcc"), array(&[1, 3], b"aabbcc"), ": some array int16 [3] some array int16 [1, 3]"),
        ];
        for (a, b, expected) in &cases {
            assert_eq!(first(a, b).as_deref(), Some(*expected));
            assert_eq!(first(a, a), None, "{expected}");
        }
    }

    #[test]
    fn order_counts_in_an_ordered_dict_only_and_nan_is_itself() {
        let (ab, ba) = (dict(&[("a", int(1)), ("b", int(2))]), dict(&[("b", int(2)), ("a", int(1))]));
        assert_eq!(first(&ab, &ba), None);
        assert!(first(&tagged(Tag::OrderedDict, ab), &tagged(Tag::OrderedDict, ba)).is_some());
        assert_eq!(first(&Value::Float(f64::NAN), &Value::Float(f64::NAN)), None);
    }
}
