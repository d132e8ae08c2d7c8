//! Checkpoints to look at: saved by ranks that are threads, under any layout, from tensors that the test knows whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardfast_engine::{Checkpoint, Destination, Engine, Provider, State, open, save};
use shardfast_format::object::encode;
use shardfast_format::{Catalog, DType, Dims, Int, Leaf, LeafBody, LeafName, Owner, Region, Value};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A leaf as one rank holds it, with the bytes of its parts.
pub(crate) type Held = (Leaf, Vec<Vec<u8>>);

/// A tensor that a test knows whole.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Bytes in row-major order.
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Makes a tensor of arbitrary bytes, others for every seed.
    pub(crate) fn random(seed: u64, dtype: DType, shape: &[u64]) -> Tensor {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let count = shape.iter().product::<u64>() * dtype.size_bytes();
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        Tensor { dtype, shape: shape.to_vec(), bytes: std::iter::repeat_with(next).take(count as usize).collect() }
    }

    pub(crate) fn floats(shape: &[u64], values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { dtype: DType::F32, shape: shape.to_vec(), bytes }
    }

    /// Returns the row-major bytes of one region, taken element by element.
    pub(crate) fn cut(&self, region: &Region) -> Vec<u8> {
        let item = self.dtype.size_bytes() as usize;
        let mut out = Vec::new();
        for flat in 0..region.numel() {
            let (mut rest, mut at, mut stride) = (flat, 0, 1);
            for d in (0..self.shape.len()).rev() {
                at += (region.offsets[d] + rest % region.lengths[d]) * stride;
                rest /= region.lengths[d];
                stride *= self.shape[d];
            }
            out.extend_from_slice(&self.bytes[at as usize * item..][..item]);
        }
        out
    }

    /// Returns the leaf as a rank with these parts holds it.
    pub(crate) fn held(&self, key: &str, name: &str, parts: &[Region]) -> Held {
        let body = LeafBody::Tensor { dtype: self.dtype, shape: Dims::from_slice(&self.shape), parts: parts.to_vec() };
        let bytes = parts.iter().map(|part| self.cut(part)).collect();
        (Leaf { name: LeafName::new(key, name), body, layout: format!("{} parts", parts.len()) }, bytes)
    }

    /// Returns the leaf as a rank with the whole tensor holds it.
    pub(crate) fn whole(&self, key: &str, name: &str) -> Held {
        self.held(key, name, &[Region::whole(&self.shape)])
    }
}

pub(crate) fn object(key: &str, name: &str, value: &Value) -> Held {
    encoded(key, name, encode(value).unwrap())
}

/// Makes an object whose encoding is these bytes, valid or not.
pub(crate) fn encoded(key: &str, name: &str, bytes: Vec<u8>) -> Held {
    let leaf =
        Leaf { name: LeafName::new(key, name), body: LeafBody::Object { owner: Owner::Job }, layout: String::new() };
    (leaf, vec![bytes])
}

pub(crate) fn alias(key: &str, name: &str, of: (&str, &str)) -> Held {
    let body = LeafBody::Alias { of: LeafName::new(of.0, of.1) };
    (Leaf { name: LeafName::new(key, name), body, layout: String::new() }, Vec::new())
}

pub(crate) fn int(n: i64) -> Value {
    Value::Int(Int::Small(n))
}

pub(crate) fn text(text: &str) -> Value {
    Value::Str(text.into())
}

pub(crate) fn dict(entries: &[(&str, Value)]) -> Value {
    Value::Dict(entries.iter().map(|(key, value)| (text(key), value.clone())).collect())
}

/// Saves the leaves of each rank, and returns the checkpoint's URL.
pub(crate) fn save_ranks(url: &str, step: Option<u64>, ranks: Vec<Vec<Held>>) -> String {
    let coords = shardfast_coord::local(ranks.len() as u32);
    std::thread::scope(|scope| {
        for (coord, mut held) in coords.into_iter().zip(ranks) {
            scope.spawn(move || {
                held.sort_by(|a, b| a.0.name.cmp(&b.0.name));
                let (mut leaves, mut providers) = (Vec::new(), Vec::new());
                for (leaf, parts) in held {
                    leaves.push(leaf);
                    let provider = |bytes: Vec<u8>| -> Arc<dyn Provider> { Arc::new(bytes) };
                    providers.push(parts.into_iter().map(provider).collect());
                }
                let state = State { catalog: Arc::new(Catalog { leaves }), providers, ..State::default() };
                let user = BTreeMap::from([("note".to_owned(), "a test".to_owned())]);
                let destination = Destination {
                    url: url.to_owned(),
                    step,
                    user,
                    prove: shardfast_engine::Prove::default(),
                    blocking: false,
                };
                save(&Engine::new(coord, 32 << 20).unwrap(), destination, state, DEADLINE).committed(None).unwrap();
            });
        }
    });
    url.to_owned()
}

pub(crate) fn opened(url: &str) -> Checkpoint {
    opened_within(url, 64 << 20)
}

/// Opens a checkpoint with an engine of that staging budget.
pub(crate) fn opened_within(url: &str, staging_bytes: u64) -> Checkpoint {
    open(&Engine::new(shardfast_coord::solo(), staging_bytes).unwrap(), url, DEADLINE).unwrap()
}

/// Makes two ranks with every kind of leaf: rows and columns split between them, replicas, an alias, values for all and
/// for each.
pub(crate) fn two_ranks() -> Vec<Vec<Held>> {
    two_ranks_of(0)
}

/// Makes ranks like [`two_ranks`], with other contents for every seed.
pub(crate) fn two_ranks_of(seed: u64) -> Vec<Vec<Held>> {
    let embed = Tensor::random(seed + 1, DType::F32, &[1000, 70]);
    let head = Tensor::random(seed + 2, DType::BF16, &[64, 257]);
    let norm = Tensor::random(seed + 3, DType::F32, &[70]);
    let moment = Tensor::random(seed + 4, DType::F64, &[30, 5, 7]);
    let step = Tensor::random(seed + 5, DType::I64, &[]);
    let empty = Tensor::random(seed + 6, DType::F32, &[0, 5]);
    let args = dict(&[
        ("lr", Value::Float(1e-3 + seed as f64)),
        ("betas", Value::List(vec![Value::Float(0.9), Value::Float(0.95)])),
    ]);
    (0..2)
        .map(|rank| {
            let half = rank * 500;
            vec![
                embed.held("model", "embed", &[Region::new(&[half, 0], &[500, 70])]),
                head.held("model", "head", &[Region::new(&[0, rank * 128], &[64, 128 + rank])]),
                norm.whole("model", "norm"),
                empty.whole("model", "empty"),
                alias("model", "tied", ("model", "embed")),
                moment.held(
                    "optimizer",
                    "moment",
                    &Region::flat_run(&moment.shape, rank * 333, 333 + rank * 717).collect::<Vec<_>>(),
                ),
                step.whole("optimizer", "step"),
                object("extra", "args", &args),
                object("extra", "rng", &Value::Bytes(vec![(seed + rank) as u8; 5000])),
            ]
        })
        .collect()
}
