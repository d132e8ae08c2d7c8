//! Holds the manifest: the leaves of a checkpoint, and the extents of their regions and values. Columns in memory as in
//! the file, so that a million regions open in a fraction of a second.

mod attempt;
mod build;
mod check;
mod codec;
mod requires;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::catalog::LeafName;
use crate::dtype::DType;
use crate::region::{Dims, Region};

pub use build::ManifestBuilder;

/// Facts about the save as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveInfo {
    /// Attempt of the save: 16 lowercase hexadecimal digits, drawn at random.
    pub attempt: String,
    /// Training step; `None` if the caller gave none.
    pub step: Option<u64>,
    /// Number of ranks that saved.
    pub world: u32,
    /// Time of the request to save, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    /// Program that wrote the manifest: `shardfast 0.1.0`.
    pub writer: String,
    /// Notes of the user.
    pub user: BTreeMap<String, String>,
}

/// A data file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// Path relative to the checkpoint.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Offset of the data in the file, in bytes.
    pub data_start: u64,
    /// CRC-64/NVME of the file's first `data_start` bytes, which hold the checksums of the rest.
    pub header_crc: u64,
}

/// A run of bytes in a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Index of the file.
    pub file: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// One leaf of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafRef<'a> {
    /// Key of the user's state.
    pub key: &'a str,
    /// Fully qualified name below the key.
    pub name: &'a str,
    /// Layout of the leaf in the saving job, as text. Information only.
    pub layout: &'a str,
    /// Kind of the leaf.
    pub kind: LeafKind<'a>,
}

/// Kind of a leaf of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafKind<'a> {
    /// A tensor; its data are [`Manifest::regions`].
    Tensor {
        /// Type of the elements.
        dtype: DType,
        /// Global shape, in elements.
        shape: &'a [u64],
    },
    /// An encoded value, or one per group of ranks: [`Manifest::values`].
    Object,
    /// The same tensor as another leaf.
    Alias {
        /// Index of the leaf that holds the data; always a tensor.
        of: usize,
    },
}

/// A checked manifest: extents lie inside their files, regions inside their tensors, the regions of a tensor have as
/// many elements as the tensor, alias targets are tensors, names are unique and sorted.
///
/// The check does not prove that a tensor's regions are disjoint, nor that extents of different leaves are, since that
/// takes more than linear time; the writer proved the former before the commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Facts about the save.
    pub info: SaveInfo,
    files: Vec<FileEntry>,
    strings: Strings,
    leaves: Leaves,
    regions: Regions,
    values: Values,
}

/// Texts, each stored once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Strings {
    text: String,
    ends: Vec<u64>,
}

/// Values of the column `leaves.kind`.
const KIND_TENSOR: u8 = 0;
const KIND_OBJECT: u8 = 1;
const KIND_ALIAS: u8 = 2;

/// Columns with one row per leaf. Ends are cumulative: the rows of leaf `i` are `ends[i - 1]` (0 for the first) to
/// `ends[i]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Leaves {
    key: Vec<u32>,
    name: Vec<u32>,
    layout: Vec<u32>,
    kind: Vec<u8>,
    dtype: Vec<u8>,
    /// Index of an alias's target, else 0.
    alias_of: Vec<u32>,
    dims_end: Vec<u64>,
    regions_end: Vec<u64>,
    values_end: Vec<u64>,
    /// All shapes, concatenated.
    shape: Vec<u64>,
}

/// Columns with one row per region. The coordinates of a region take one number for each dimension of its tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Regions {
    offsets: Vec<u64>,
    lengths: Vec<u64>,
    file: Vec<u32>,
    offset: Vec<u64>,
    /// Size of the elements, in bytes.
    bytes: Vec<u64>,
    /// Size in the file, in bytes: equal to `bytes` in this version.
    stored_bytes: Vec<u64>,
    /// First row of each leaf's coordinates. Not stored: computed from the rest.
    coords_start: Vec<usize>,
}

/// Columns with one row per stored value; the ranks that saved it are half-open ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Values {
    ranks_end: Vec<u64>,
    rank_start: Vec<u32>,
    rank_stop: Vec<u32>,
    file: Vec<u32>,
    offset: Vec<u64>,
    /// Size of the encoding, in bytes.
    bytes: Vec<u64>,
    /// Size in the file, in bytes: equal to `bytes` in this version.
    stored_bytes: Vec<u64>,
}

impl Strings {
    fn get(&self, id: u32) -> &str {
        &self.text[span(&self.ends, id as usize)]
    }
}

/// Returns the rows of parent `i` under cumulative ends.
fn span(ends: &[u64], i: usize) -> Range<usize> {
    let start = if i == 0 { 0 } else { ends[i - 1] as usize };
    start..ends[i] as usize
}

impl Manifest {
    /// Returns the number of leaves.
    pub fn len(&self) -> usize {
        self.leaves.kind.len()
    }

    /// Returns whether the manifest has no leaf.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the data files.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// Returns leaf `i`; leaves are sorted by key and name, byte by byte.
    ///
    /// # Panics
    /// When `i` is not below [`Manifest::len`]; this holds for all methods that take a leaf's index.
    pub fn leaf(&self, i: usize) -> LeafRef<'_> {
        let kind = match self.leaves.kind[i] {
            KIND_TENSOR => LeafKind::Tensor { dtype: self.dtype(i), shape: self.shape(i) },
            KIND_OBJECT => LeafKind::Object,
            _ => LeafKind::Alias { of: self.leaves.alias_of[i] as usize },
        };
        LeafRef { key: self.key(i), name: self.name(i), layout: self.strings.get(self.leaves.layout[i]), kind }
    }

    /// Returns the index of the leaf called `name`.
    pub fn find(&self, name: &LeafName) -> Option<usize> {
        let wanted = (name.key.as_str(), name.name.as_str());
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match (self.key(middle), self.name(middle)).cmp(&wanted) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// Returns the regions of leaf `i`, sorted by offsets, with the extent of each one's row-major bytes. Empty unless
    /// the leaf is a tensor.
    pub fn regions(&self, i: usize) -> impl ExactSizeIterator<Item = (Region, Extent)> + '_ {
        let rows = span(&self.leaves.regions_end, i);
        let (first, ndim) = (rows.start, span(&self.leaves.dims_end, i).len());
        let coords_start = self.regions.coords_start[i];
        rows.map(move |row| {
            let coords = coords_start + (row - first) * ndim..coords_start + (row - first + 1) * ndim;
            let region = Region {
                offsets: Dims::from_slice(&self.regions.offsets[coords.clone()]),
                lengths: Dims::from_slice(&self.regions.lengths[coords]),
            };
            let Regions { file, offset, stored_bytes, .. } = &self.regions;
            (region, Extent { file: file[row], offset: offset[row], bytes: stored_bytes[row] })
        })
    }

    /// Returns the values of leaf `i`, sorted by first rank: the ranks that saved the value (ascending, disjoint among
    /// all values of the leaf) and the extent of its encoding. Empty unless the leaf is an object.
    pub fn values(&self, i: usize) -> impl ExactSizeIterator<Item = (Vec<Range<u32>>, Extent)> + '_ {
        span(&self.leaves.values_end, i).map(move |row| {
            let Values { ranks_end, rank_start, rank_stop, file, offset, stored_bytes, .. } = &self.values;
            let ranks = span(ranks_end, row).map(|r| rank_start[r]..rank_stop[r]).collect();
            (ranks, Extent { file: file[row], offset: offset[row], bytes: stored_bytes[row] })
        })
    }

    fn key(&self, i: usize) -> &str {
        self.strings.get(self.leaves.key[i])
    }

    fn name(&self, i: usize) -> &str {
        self.strings.get(self.leaves.name[i])
    }

    fn dtype(&self, i: usize) -> DType {
        DType::ALL[usize::from(self.leaves.dtype[i])]
    }

    fn shape(&self, i: usize) -> &[u64] {
        &self.leaves.shape[span(&self.leaves.dims_end, i)]
    }
}
