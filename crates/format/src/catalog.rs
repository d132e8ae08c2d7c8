//! Leaves of one rank: names, kinds and regions.

use std::cmp::Ordering;
use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::container::{NDIM_MAX, tensor_bytes};
use crate::dtype::DType;
use crate::error::Error;
use crate::name::check_key;
use crate::region::{Dims, Region};

/// Place of a leaf in the user's state: its key in `state` (a directory of the checkpoint) and its fully qualified name
/// below the key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeafName {
    /// The user's key: `model`, `optimizer`, `extra`, …
    pub key: String,
    /// The fully qualified name below the key.
    pub name: String,
}

impl LeafName {
    /// Makes the name of the leaf `name` under `key`.
    pub fn new(key: impl Into<String>, name: impl Into<String>) -> LeafName {
        LeafName { key: key.into(), name: name.into() }
    }
}

/// Formats as `model/layers.0.weight`.
impl std::fmt::Display for LeafName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.key, self.name)
    }
}

/// One leaf as one rank holds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Leaf {
    /// Key and name in the user's state.
    pub name: LeafName,
    /// Kind of the leaf, and the parts of it that this rank holds.
    pub body: LeafBody,
    /// The leaf's layout in the saving job, as text (`mesh(dp=2, tp=2) [Shard(0), Replicate()]`). Information only:
    /// nothing depends on it. May be empty.
    pub layout: String,
}

/// Kind and contents of a leaf.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LeafBody {
    /// A tensor, of which this rank holds the given disjoint, non-empty parts (none for an empty shard).
    Tensor {
        /// Type of the elements.
        dtype: DType,
        /// Global shape, in elements.
        shape: Dims,
        /// This rank's parts, in the global shape.
        parts: Vec<Region>,
    },
    /// An encoded value.
    Object {
        /// Owner that the user declared.
        owner: Owner,
    },
    /// The same tensor as another leaf (tied weights): stored once, restored as tied.
    Alias {
        /// The leaf that holds the data.
        of: LeafName,
    },
}

/// Ranks that a value belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Owner {
    /// The whole job: every rank holds the same value.
    Job,
    /// One rank: each rank holds a value of its own.
    Rank,
    /// One of several pieces, each held by some rank. The leaf is named `NAME.piece.INDEX`.
    Piece {
        /// Index of the piece, from 0.
        index: u32,
        /// Number of pieces.
        count: u32,
    },
}

/// All leaves of one rank, sorted by [`LeafName`], names unique.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Catalog {
    /// Leaves, sorted by name.
    pub leaves: Vec<Leaf>,
}

impl Catalog {
    /// Returns the bytes of the whole tensors of these leaves, of which other ranks may hold parts, too. Encoded values
    /// count as none.
    pub fn tensor_bytes(&self) -> u64 {
        let bytes = |leaf: &Leaf| match &leaf.body {
            LeafBody::Tensor { dtype, shape, .. } => tensor_bytes(*dtype, shape).unwrap_or(0),
            LeafBody::Object { .. } | LeafBody::Alias { .. } => 0,
        };
        self.leaves.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Returns a SHA-256 of names, kinds, dtypes, shapes and regions, without the layouts. Catalogs with equal
    /// fingerprints have the same plan.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(b"shardfast catalog 1");
        let number = |digest: &mut Sha256, value: u64| digest.update(value.to_le_bytes());
        // Every text and list is preceded by its length, so that no two catalogs give the same bytes.
        let text = |digest: &mut Sha256, text: &str| {
            number(digest, text.len() as u64);
            digest.update(text.as_bytes());
        };
        let numbers = |digest: &mut Sha256, values: &[u64]| {
            number(digest, values.len() as u64);
            values.iter().for_each(|&value| number(digest, value));
        };
        number(&mut digest, self.leaves.len() as u64);
        for Leaf { name, body, layout: _ } in &self.leaves {
            text(&mut digest, &name.key);
            text(&mut digest, &name.name);
            match body {
                LeafBody::Tensor { dtype, shape, parts } => {
                    digest.update([0, dtype.code()]);
                    numbers(&mut digest, shape);
                    number(&mut digest, parts.len() as u64);
                    for part in parts {
                        numbers(&mut digest, &part.offsets);
                        numbers(&mut digest, &part.lengths);
                    }
                }
                LeafBody::Object { owner: Owner::Job } => digest.update([1, 0]),
                LeafBody::Object { owner: Owner::Rank } => digest.update([1, 1]),
                LeafBody::Object { owner: Owner::Piece { index, count } } => {
                    digest.update([1, 2]);
                    numbers(&mut digest, &[u64::from(*index), u64::from(*count)]);
                }
                LeafBody::Alias { of } => {
                    digest.update([2]);
                    text(&mut digest, &of.key);
                    text(&mut digest, &of.name);
                }
            }
        }
        digest.finalize().into()
    }

    /// Checks what one rank can check alone: keys are valid, leaves are sorted and unique, shapes are within limits,
    /// parts are in bounds and not empty (unless the tensor is), alias targets exist and are tensors. The planner
    /// checks that parts are disjoint and that the ranks agree.
    ///
    /// # Errors
    /// `Invalid`, naming every problem, one per line.
    pub fn validate(&self) -> Result<(), Error> {
        let mut problems = Vec::new();
        for pair in self.leaves.windows(2) {
            match pair[0].name.cmp(&pair[1].name) {
                Ordering::Less => {}
                Ordering::Equal => problems.push(format!("{}: two leaves have this name", pair[0].name)),
                Ordering::Greater => {
                    problems.push(format!(
                        "{}: expected leaves sorted by name, found {} after it",
                        pair[0].name, pair[1].name
                    ));
                }
            }
        }
        let tensors: HashSet<&LeafName> = self
            .leaves
            .iter()
            .filter(|leaf| matches!(leaf.body, LeafBody::Tensor { .. }))
            .map(|leaf| &leaf.name)
            .collect();
        for (i, Leaf { name, body, .. }) in self.leaves.iter().enumerate() {
            if i == 0 || self.leaves[i - 1].name.key != name.key {
                problems.extend(check_key(&name.key).err().map(|error| error.message().to_owned()));
            }
            match body {
                LeafBody::Tensor { dtype, shape, parts } => tensor_problems(name, *dtype, shape, parts, &mut problems),
                LeafBody::Object { .. } => {}
                LeafBody::Alias { of } if tensors.contains(of) => {}
                LeafBody::Alias { of } => {
                    problems.push(format!("{name}: expected a tensor to be an alias of, found no {of}"))
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::Invalid(problems.join("\n"))) }
    }
}

fn tensor_problems(name: &LeafName, dtype: DType, shape: &[u64], parts: &[Region], problems: &mut Vec<String>) {
    if shape.len() > NDIM_MAX {
        problems.push(format!("{name}: expected at most {NDIM_MAX} dimensions, found {}", shape.len()));
    }
    if tensor_bytes(dtype, shape).is_none() {
        problems.push(format!("{name}: {dtype} {shape:?} is beyond 2^64 bytes"));
    }
    for part in parts {
        if !part.fits(shape) {
            problems.push(format!("{name}: the part {part} is not inside {shape:?}"));
        } else if part.is_empty() && !part.is_whole(shape) {
            problems.push(format!("{name}: the part {part} holds no element"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[u64], parts: Vec<Region>) -> Leaf {
        let body = LeafBody::Tensor { dtype: DType::F32, shape: Dims::from_slice(shape), parts };
        Leaf { name: LeafName::new("model", name), body, layout: String::new() }
    }

    fn leaf(name: &str, body: LeafBody) -> Leaf {
        Leaf { name: LeafName::new("model", name), body, layout: String::new() }
    }

    #[test]
    fn everything_but_the_layout_counts_in_a_fingerprint() {
        let base = tensor("w", &[4, 6], vec![Region::new(&[0, 0], &[2, 6])]);
        let mut all = vec![Catalog::default(), Catalog { leaves: vec![base.clone()] }];
        let mut other = |change: &dyn Fn(&mut Leaf)| {
            let mut leaf = base.clone();
            change(&mut leaf);
            all.push(Catalog { leaves: vec![leaf] });
        };
        other(&|leaf| leaf.name.key = "ema".into());
        other(&|leaf| leaf.name = LeafName::new("mode", "lw"));
        other(&|leaf| leaf.body = tensor("w", &[4, 6], vec![]).body);
        other(&|leaf| leaf.body = tensor("w", &[4, 6], vec![Region::new(&[2, 0], &[2, 6])]).body);
        other(&|leaf| leaf.body = tensor("w", &[4, 6], vec![Region::new(&[0, 2], &[0, 6])]).body);
        other(&|leaf| leaf.body = tensor("w", &[6, 4], vec![Region::new(&[0, 0], &[2, 6])]).body);
        other(&|leaf| leaf.body = tensor("w", &[4, 6, 1], vec![Region::new(&[0, 0], &[2, 6])]).body);
        other(&|leaf| {
            leaf.body = LeafBody::Tensor {
                dtype: DType::I32,
                shape: Dims::from_slice(&[4, 6]),
                parts: vec![Region::new(&[0, 0], &[2, 6])],
            }
        });
        other(&|leaf| leaf.body = LeafBody::Object { owner: Owner::Job });
        other(&|leaf| leaf.body = LeafBody::Object { owner: Owner::Rank });
        other(&|leaf| leaf.body = LeafBody::Object { owner: Owner::Piece { index: 1, count: 2 } });
        other(&|leaf| leaf.body = LeafBody::Object { owner: Owner::Piece { index: 1, count: 3 } });
        other(&|leaf| leaf.body = LeafBody::Alias { of: LeafName::new("model", "v") });
        other(&|leaf| leaf.body = LeafBody::Alias { of: LeafName::new("mode", "lv") });
        all.push(Catalog { leaves: vec![base.clone(), tensor("x", &[], vec![])] });
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert_ne!(a.fingerprint(), b.fingerprint(), "{a:?} {b:?}");
            }
        }
        let mut renamed = base.clone();
        renamed.layout = "mesh(dp=2) [Shard(0)]".into();
        assert_eq!(Catalog { leaves: vec![renamed] }.fingerprint(), all[1].fingerprint());
    }

    #[test]
    fn a_sound_catalog_is_valid() {
        let leaves = vec![
            leaf("a", LeafBody::Object { owner: Owner::Rank }),
            leaf("b", LeafBody::Alias { of: LeafName::new("model", "w") }),
            tensor("e", &[0, 3], vec![Region::whole(&[0, 3])]),
            tensor("s", &[], vec![Region::whole(&[])]),
            tensor("w", &[4, 6], vec![Region::new(&[0, 0], &[2, 6]), Region::new(&[2, 0], &[2, 6])]),
        ];
        Catalog { leaves }.validate().unwrap();
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let mut hidden = leaf("x", LeafBody::Object { owner: Owner::Job });
        hidden.name.key = ".ssh".into();
        let leaves = vec![
            hidden,
            tensor("w", &[4, 6], vec![Region::new(&[3, 0], &[2, 6])]),
            tensor("w", &[1 << 32, 1 << 32], vec![]),
            tensor("v", &[4], vec![Region::new(&[2], &[0])]),
            tensor("y", &[1; 65], vec![]),
            leaf("z", LeafBody::Alias { of: LeafName::new("model", "missing") }),
            leaf("zz", LeafBody::Alias { of: LeafName::new("model", "z") }),
        ];
        let error = Catalog { leaves }.validate().unwrap_err();
        assert!(matches!(error, Error::Invalid(_)));
        let lines: Vec<&str> = error.message().lines().collect();
        let expected = [
            "model/w: two leaves have this name",
            "model/w: expected leaves sorted by name, found model/v after it",
            "key \".ssh\" starts with '.'",
            "model/w: the part [3:5, 0:6] is not inside [4, 6]",
            "model/w: F32 [4294967296, 4294967296] is beyond 2^64 bytes",
            "model/v: the part [2:2] holds no element",
            "model/y: expected at most 64 dimensions, found 65",
            "model/z: expected a tensor to be an alias of, found no model/missing",
            "model/zz: expected a tensor to be an alias of, found no model/z",
        ];
        assert_eq!(lines, expected);
    }
}
