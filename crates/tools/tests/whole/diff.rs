//! Tests that two checkpoints are compared by their contents, not by their layout.

use shardfast_engine::Kind;
use shardfast_format::{DType, Region, Tag, Value};
use shardfast_tools::diff::{Difference, DifferenceKind};
use shardfast_tools::{Diff, diff};

use crate::checkpoints::*;

fn compare(a: &str, b: &str) -> Diff {
    diff(&opened(a), &opened(b), &|_, _| ()).unwrap()
}

/// Saves two jobs and compares them.
fn differences(name: &str, a: Vec<Vec<Held>>, b: Vec<Vec<Held>>) -> Vec<Difference> {
    let a = save_ranks(&format!("memory://diff-{name}/a"), None, a);
    let b = save_ranks(&format!("memory://diff-{name}/b"), None, b);
    compare(&a, &b).differences
}

#[test]
fn layouts_do_not_matter() {
    let tensor = Tensor::random(1, DType::F32, &[37, 11, 5]);
    let args = dict(&[("lr", Value::Float(0.1))]);
    let whole = vec![vec![tensor.whole("model", "w"), object("extra", "args", &args)]];
    let rows = |rank: u64| Region::new(&[rank * 20, 0, 0], &[20 - rank * 3, 11, 5]);
    let columns = |rank: u64| Region::new(&[0, 0, rank * 2], &[37, 11, 2 + rank]);
    let ranks = |parts: &dyn Fn(u64) -> Vec<Region>| -> Vec<Vec<Held>> {
        let held = |rank| vec![tensor.held("model", "w", &parts(rank)), object("extra", "args", &args)];
        (0..2).map(held).collect()
    };
    let flat = ranks(&|rank| Region::flat_run(&tensor.shape, rank * 777, 777 + rank * 1258).collect());
    let jobs = [whole, ranks(&|rank| vec![rows(rank)]), ranks(&|rank| vec![columns(rank)]), flat];
    let urls: Vec<String> =
        (0..).zip(jobs).map(|(i, job)| save_ranks(&format!("memory://diff-layouts/{i}"), None, job)).collect();
    for a in &urls {
        for b in &urls {
            let found = compare(a, b);
            assert!(found.differences.is_empty(), "{a} {b}: {:?}", found.differences);
            assert_eq!((found.equal, found.bytes), (2, 37 * 11 * 5 * 4));
        }
    }
}

#[test]
fn elements_are_counted_located_and_measured() {
    let a = Tensor::floats(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let b = Tensor::floats(&[2, 3], &[1.0, 2.0, 3.0, 4.5, 5.0, 7.5]);
    let rows = |tensor: &Tensor, rank: u64| vec![tensor.held("model", "w", &[Region::new(&[rank, 0], &[1, 3])])];
    let same = || Tensor::random(5, DType::U8, &[10]).whole("model", "same");
    let found = differences(
        "elements",
        vec![[rows(&a, 0), vec![same()]].concat(), [rows(&a, 1), vec![same()]].concat()],
        vec![vec![b.whole("model", "w"), same()]],
    );
    let [Difference { leaf, kind: DifferenceKind::Data(elements) }] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((leaf.as_str(), elements.dtype, elements.elements), ("model/w", "F32", 6));
    assert_eq!((elements.elements_different, elements.bytes_different), (2, 2));
    assert_eq!((&elements.first, elements.max_abs_difference), (&vec![1, 0], Some(1.5)));
}

#[test]
fn differences_beyond_one_batch_are_found() {
    // Elements of 8 bytes, more than two batches of 8 MiB that cut rows, and small leaves around them.
    let shape = [733_335, 3];
    let a = Tensor::random(1, DType::F64, &shape);
    let mut b = a.clone();
    let last = b.bytes.len() - 1;
    b.bytes[last] ^= 1;
    b.bytes[(8 << 20) + 3] ^= 1;
    let small = |i: u64| Tensor::random(i, DType::U8, &[5]).whole("model", &format!("small{i}"));
    let job = |tensor: &Tensor| vec![vec![tensor.whole("model", "large"), small(1), small(2), small(3)]];
    let found = differences("batches", job(&a), job(&b));
    let [Difference { leaf, kind: DifferenceKind::Data(elements) }] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((leaf.as_str(), elements.elements_different), ("model/large", 2));
    assert_eq!(elements.first, [(1 << 20) / 3, (1 << 20) % 3]);
}

#[test]
fn leaves_of_one_side_and_of_another_kind() {
    let tensor = Tensor::random(1, DType::F32, &[6]);
    let reshaped = Tensor { shape: vec![2, 3], ..tensor.clone() };
    let recast = Tensor { dtype: DType::I32, ..tensor.clone() };
    let found = differences(
        "kinds",
        vec![vec![
            tensor.whole("model", "cast"),
            tensor.whole("model", "here"),
            tensor.whole("model", "shape"),
            tensor.whole("model", "tied"),
            tensor.whole("model", "value"),
            alias("model", "alias", ("model", "here")),
        ]],
        vec![vec![
            recast.whole("model", "cast"),
            reshaped.whole("model", "shape"),
            alias("model", "tied", ("model", "shape")),
            object("model", "value", &int(1)),
            alias("model", "alias", ("model", "shape")),
            tensor.whole("other", "there"),
        ]],
    );
    let said: Vec<(String, String)> = found
        .iter()
        .map(|Difference { leaf, kind }| match kind {
            DifferenceKind::Kind { a, b } => (leaf.clone(), format!("{a} | {b}")),
            DifferenceKind::OnlyInA => (leaf.clone(), "a".into()),
            DifferenceKind::OnlyInB => (leaf.clone(), "b".into()),
            other => panic!("{leaf}: {other:?}"),
        })
        .collect();
    let expected = [
        ("model/alias", "alias of model/here | alias of model/shape"),
        ("model/cast", "tensor F32 [6] | tensor I32 [6]"),
        ("model/here", "a"),
        ("model/shape", "tensor F32 [6] | tensor F32 [2, 3]"),
        ("model/tied", "tensor F32 [6] | alias of model/shape"),
        ("model/value", "tensor F32 [6] | object"),
        ("other/there", "b"),
    ];
    assert_eq!(said, expected.map(|(leaf, said)| (leaf.to_owned(), said.to_owned())));
}

/// Returns the one difference of the values of `extra/v`.
fn value_difference(name: &str, a: &[Value], b: &[Value]) -> Option<(String, Option<String>, Option<String>, String)> {
    let job = |values: &[Value]| values.iter().map(|value| vec![object("extra", "v", value)]).collect();
    let found = differences(name, job(a), job(b));
    match found.as_slice() {
        [] => None,
        [Difference { kind: DifferenceKind::Value(value), .. }] => {
            Some((value.path.clone(), value.a.clone(), value.b.clone(), format!("{:?}", value.ranks)))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn values_are_compared_by_what_they_mean() {
    let sched = |lr: f64, last: i64| dict(&[("lr", Value::Float(lr)), ("steps", Value::List(vec![int(1), int(last)]))]);
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(value_difference("same", &[sched(0.1, 2)], &[sched(0.1, 2)]), None);
    assert_eq!(
        value_difference("path", &[sched(0.1, 2)], &[sched(0.1, 3)]),
        Some(("[\"steps\"][1]".into(), some("2"), some("3"), "[]".into()))
    );
    let reordered = Value::Dict(match sched(0.1, 2) {
        Value::Dict(entries) => entries.into_iter().rev().collect(),
        _ => unreachable!(),
    });
    assert_eq!(value_difference("order", &[sched(0.1, 2)], &[reordered]), None);
    let tuple = Value::Tagged(Tag::Tuple, Box::new(Value::List(vec![int(1)])));
    assert_eq!(
        value_difference("tuple", &[Value::List(vec![int(1)])], &[tuple]),
        Some((String::new(), some("[1]"), some("(1,)"), "[]".into()))
    );
}

#[test]
fn values_by_rank_are_compared_rank_by_rank() {
    let some = |text: &str| Some(text.to_owned());
    // A value that all share is the same in any world.
    assert_eq!(value_difference("worlds", &[int(1), int(1), int(1)], &[int(1)]), None);
    assert_eq!(value_difference("ranks-same", &[int(1), int(2)], &[int(1), int(2)]), None);
    assert_eq!(
        value_difference("ranks", &[int(1), int(2), int(2)], &[int(1), int(2), int(3)]),
        Some((String::new(), some("2"), some("3"), "[2..3]".into()))
    );
    assert_eq!(
        value_difference("shared", &[int(1), int(1)], &[int(1), int(2)]),
        Some((String::new(), some("1"), some("2"), "[1..2]".into()))
    );
    assert_eq!(
        value_difference("lonely", &[int(1), int(2)], &[int(1), int(2), int(3), int(4)]),
        Some((String::new(), None, some("a value of rank 2"), "[2..4]".into()))
    );
}

#[test]
fn damage_ends_the_comparison() {
    let dir = tempfile::tempdir().unwrap();
    let job = || vec![vec![Tensor::random(1, DType::F32, &[100]).whole("model", "w")]];
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (a, b) = (save_ranks(&place("a"), None, job()), save_ranks(&place("b"), None, job()));
    let file = opened(&b).manifest().files()[0].clone();
    let path = dir.path().join("b").join(&file.path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[file.data_start as usize + 17] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let error = diff(&opened(&a), &opened(&b), &|_, _| ()).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    assert!(error.message.contains("model/w") && error.message.contains(&file.path), "{error}");
}

#[test]
fn progress_reaches_its_total() {
    let a = save_ranks("memory://diff-progress/a", None, two_ranks());
    let last = std::cell::Cell::new((0, 1));
    diff(&opened(&a), &opened(&a), &|done, total| last.set((done, total))).unwrap();
    assert_eq!(last.get().0, last.get().1);
}
