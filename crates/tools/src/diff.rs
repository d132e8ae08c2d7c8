//! Two checkpoints, leaf by leaf, whatever layouts they were saved under. Tensors are compared as flat runs of a few
//! MiB, values by their meaning. Every compared byte is read and verified, since equal checksums do not prove equal
//! bytes.

mod numbers;
mod values;

use std::cmp::Ordering;
use std::ops::Range;

use serde::Serialize;
use shardfast_engine::Checkpoint;
use shardfast_engine::stream::{FlatRun, tensor_bytes};
use shardfast_format::{LeafKind, Manifest};
use shardfast_transfer::error::{Error, Result};

use crate::inspect::full_name;
use numbers::Tally;

/// Bytes of tensors that are held of each checkpoint.
const BATCH_BYTES: u64 = 8 << 20;

/// Differences between two checkpoints.
#[derive(Debug, Clone, Serialize)]
pub struct Diff {
    /// The URL of the one.
    pub a: String,
    /// The URL of the other.
    pub b: String,
    /// Number of leaves that are equal.
    pub equal: u64,
    /// Bytes of tensors that were compared, counted once.
    pub bytes: u64,
    /// The leaves that differ, by key and name.
    pub differences: Vec<Difference>,
}

/// A leaf that differs.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    /// Key and name.
    pub leaf: String,
    /// Kind of the difference.
    #[serde(flatten)]
    pub kind: DifferenceKind,
}

/// Kind of a leaf's difference.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum DifferenceKind {
    /// Only `a` has it.
    OnlyInA,
    /// Only `b` has it.
    OnlyInB,
    /// The one has a tensor, the other an object, or an alias of another leaf; or dtypes or shapes differ.
    Kind {
        /// Description of the leaf in `a`.
        a: String,
        /// Description of the leaf in `b`.
        b: String,
    },
    /// Elements differ, bit by bit.
    Data(Elements),
    /// Values that differ.
    Value(ValueDifference),
}

/// Elements of a tensor that differ.
#[derive(Debug, Clone, Serialize)]
pub struct Elements {
    /// Type of the elements.
    pub dtype: &'static str,
    /// Number of elements.
    pub elements: u64,
    /// Number of those that differ.
    pub elements_different: u64,
    /// Number of bytes that differ.
    pub bytes_different: u64,
    /// Index of the first element that differs.
    pub first: Vec<u64>,
    /// The largest absolute difference of two finite numbers; none for other than floating-point types.
    pub max_abs_difference: Option<f64>,
    /// Number of elements that differ and are infinite or not a number on a side.
    pub non_finite: u64,
}

/// First difference between an object's values.
#[derive(Debug, Clone, Serialize)]
pub struct ValueDifference {
    /// The way into the value: `["lr"][3].field`; empty when it is the value itself.
    pub path: String,
    /// Text of the place in `a`, shortened.
    pub a: Option<String>,
    /// Text of the place in `b`, shortened.
    pub b: Option<String>,
    /// The ranks whose values these are, where values differ by rank.
    pub ranks: Vec<Range<u32>>,
}

/// Compares two checkpoints, on this rank alone. `progress` gets the bytes of tensors compared so far and in all.
///
/// # Errors
/// `Corrupt` when a byte that must be compared is damaged; the stores' errors.
pub fn diff(a: &Checkpoint, b: &Checkpoint, progress: &dyn Fn(u64, u64)) -> Result<Diff> {
    let (ma, mb) = (a.manifest(), b.manifest());
    let mut tensors: Vec<Pair> = Vec::new();
    let mut objects: Vec<(usize, usize)> = Vec::new();
    // By the place of the leaf in the order of both, so that the differences come out sorted.
    let mut found: Vec<((&str, &str), DifferenceKind)> = Vec::new();
    let mut shared = 0u64;
    let (mut i, mut j) = (0, 0);
    while i < ma.len() || j < mb.len() {
        let (left, right) = ((i < ma.len()).then(|| ma.leaf(i)), (j < mb.len()).then(|| mb.leaf(j)));
        let order = match (&left, &right) {
            (Some(left), Some(right)) => (left.key, left.name).cmp(&(right.key, right.name)),
            (Some(_), None) => Ordering::Less,
            (None, _) => Ordering::Greater,
        };
        match (order, left, right) {
            (Ordering::Less, Some(left), _) => {
                found.push(((left.key, left.name), DifferenceKind::OnlyInA));
                i += 1;
            }
            (Ordering::Greater, _, Some(right)) => {
                found.push(((right.key, right.name), DifferenceKind::OnlyInB));
                j += 1;
            }
            (_, Some(left), Some(_)) => {
                let (kind_a, kind_b) = (kind(ma, i), kind(mb, j));
                if kind_a != kind_b {
                    found.push(((left.key, left.name), DifferenceKind::Kind { a: kind_a, b: kind_b }));
                } else {
                    shared += 1;
                    match left.kind {
                        LeafKind::Tensor { .. } => tensors.push(Pair { a: i, b: j, tally: Tally::default() }),
                        LeafKind::Object => objects.push((i, j)),
                        LeafKind::Alias { .. } => {}
                    }
                }
                i += 1;
                j += 1;
            }
            _ => break,
        }
    }
    let bytes = compare_tensors(a, b, &mut tensors, progress)?;
    for (leaf, difference) in values::compare(a, b, &objects)? {
        let leaf = ma.leaf(leaf);
        found.push(((leaf.key, leaf.name), DifferenceKind::Value(difference)));
        shared -= 1;
    }
    for pair in &tensors {
        let leaf = ma.leaf(pair.a);
        let LeafKind::Tensor { dtype, shape } = leaf.kind else { continue };
        if let Some(elements) = pair.tally.elements(dtype, shape) {
            found.push(((leaf.key, leaf.name), DifferenceKind::Data(elements)));
            shared -= 1;
        }
    }
    found.sort_by_key(|(name, _)| *name);
    let differences = found.into_iter().map(|((key, name), kind)| Difference { leaf: format!("{key}/{name}"), kind });
    Ok(Diff { a: a.url().to_owned(), b: b.url().to_owned(), equal: shared, bytes, differences: differences.collect() })
}

/// A tensor that both have, with equal dtype and shape.
struct Pair {
    a: usize,
    b: usize,
    tally: Tally,
}

/// A run of one pair, as far as one batch takes it.
struct Part {
    pair: usize,
    elements: Range<u64>,
    bytes: usize,
}

/// Returns a description of a leaf, as text.
fn kind(manifest: &Manifest, i: usize) -> String {
    match manifest.leaf(i).kind {
        LeafKind::Tensor { dtype, shape } => format!("tensor {dtype} {shape:?}"),
        LeafKind::Object => "object".to_owned(),
        LeafKind::Alias { of } => format!("alias of {}", full_name(manifest, of)),
    }
}

fn compare_tensors(a: &Checkpoint, b: &Checkpoint, pairs: &mut [Pair], progress: &dyn Fn(u64, u64)) -> Result<u64> {
    let size = |pair: &Pair| match a.manifest().leaf(pair.a).kind {
        LeafKind::Tensor { dtype, shape } => (dtype, tensor_bytes(dtype, shape)),
        LeafKind::Object | LeafKind::Alias { .. } => (shardfast_format::DType::U8, 0),
    };
    let total = pairs.iter().map(|pair| size(pair).1).fold(0, u64::saturating_add);
    let mut buffers = (Vec::new(), Vec::new());
    let mut done = 0;
    let mut batch: Vec<Part> = Vec::new();
    let mut left = BATCH_BYTES;
    for i in 0..pairs.len() {
        let (dtype, bytes) = size(&pairs[i]);
        let item = dtype.size_bytes();
        let elements = bytes / item;
        let mut start = 0;
        while start < elements {
            let stop = elements.min(start + left / item);
            if stop > start {
                let bytes = (stop - start) * item;
                batch.push(Part { pair: i, elements: start..stop, bytes: bytes as usize });
                left -= bytes;
                start = stop;
            }
            if start < elements {
                done += compare_batch(a, b, pairs, &std::mem::take(&mut batch), &mut buffers)?;
                progress(done, total);
                left = BATCH_BYTES;
            }
        }
    }
    done += compare_batch(a, b, pairs, &batch, &mut buffers)?;
    progress(done, total);
    Ok(done)
}

/// Loads both sides of the batch at the same time and counts the differences. Returns the bytes of one side.
fn compare_batch(
    a: &Checkpoint,
    b: &Checkpoint,
    pairs: &mut [Pair],
    batch: &[Part],
    (left, right): &mut (Vec<u8>, Vec<u8>),
) -> Result<u64> {
    let bytes: usize = batch.iter().map(|part| part.bytes).sum();
    left.resize(bytes, 0);
    right.resize(bytes, 0);
    let runs = |leaf: fn(&Pair) -> usize| -> Vec<FlatRun> {
        let runs = batch.iter().map(|part| FlatRun { leaf: leaf(&pairs[part.pair]), elements: part.elements.clone() });
        runs.collect()
    };
    let (runs_a, runs_b) = (runs(|pair| pair.a), runs(|pair| pair.b));
    let loaded = std::thread::scope(|scope| {
        let other = scope.spawn(|| b.load_runs(&runs_b, right));
        let one = a.load_runs(&runs_a, left);
        (one, other.join().unwrap_or_else(|_| Err(Error::internal("a thread that reads panicked"))))
    });
    loaded.0?;
    loaded.1?;
    let mut at = 0;
    for part in batch {
        let pair = &mut pairs[part.pair];
        if let LeafKind::Tensor { dtype, .. } = a.manifest().leaf(pair.a).kind {
            let range = at..at + part.bytes;
            pair.tally.count(dtype, part.elements.start, &left[range.clone()], &right[range]);
        }
        at += part.bytes;
    }
    Ok(bytes as u64)
}
