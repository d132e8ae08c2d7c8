//! What one rank holds: its leaves, said without ranks' layouts in them.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::region::{Dims, Region};

/// The leaf's place in the user's state: the key of `state` (a directory of the checkpoint) and the fully qualified
/// name below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeafName {
    /// The user's key: `model`, `optimizer`, `extra`, …
    pub key: String,
    /// The fully qualified name below the key.
    pub name: String,
}

impl LeafName {
    /// The leaf `name` under `key`.
    pub fn new(key: impl Into<String>, name: impl Into<String>) -> LeafName {
        LeafName { key: key.into(), name: name.into() }
    }
}

/// Writes `model/layers.0.weight`.
impl std::fmt::Display for LeafName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.key, self.name)
    }
}

/// One leaf as one rank holds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Leaf {
    /// Where in the user's state the leaf stands.
    pub name: LeafName,
    /// What it is and which parts of it this rank holds.
    pub body: LeafBody,
    /// How the saving job laid the leaf out, in words (`mesh(dp=2, tp=2) [Shard(0), Replicate()]`). Information only:
    /// nothing is ever decided by it. Empty when there is nothing to say.
    pub layout: String,
}

/// What a leaf is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LeafBody {
    /// A tensor, of which this rank holds the given disjoint, non-empty parts (none for an empty shard).
    Tensor {
        /// Element type.
        dtype: DType,
        /// Global shape, in elements.
        shape: Dims,
        /// This rank's parts, in the global shape.
        parts: Vec<Region>,
    },
    /// An encoded value.
    Object {
        /// Whether the user declared that it belongs to this rank alone.
        per_rank: bool,
    },
    /// The same tensor as another leaf (tied weights): stored once, restored as tied.
    Alias {
        /// The leaf that holds the data.
        of: LeafName,
    },
}

/// Every leaf that one rank holds, sorted by [`LeafName`], names unique.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Catalog {
    /// The leaves.
    pub leaves: Vec<Leaf>,
}
