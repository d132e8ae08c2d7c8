//! A rank's receipt for rank 0 of the files that it wrote.

use serde::{Deserialize, Serialize};
use shardfast_format::{DType, Dims, LeafName, Region};

/// Writes of one rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) tensors: Structure,
    pub(crate) values: ValueFiles,
    /// CRC-64 of the headers, little-endian: of all files of tensors, then of all files of values.
    pub(crate) header_crcs: Vec<[u8; 8]>,
    /// Bytes that were captured ahead, replayed and proven, by the variant that replayed them.
    pub(crate) replayed: Vec<(String, u64)>,
}

/// The structure of a rank's files of tensors, without their contents.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Structure {
    pub(crate) files: Vec<FileShape>,
    /// Every tensor of which the rank wrote something, or holds nothing, so that rank 0 knows a tensor that no rank
    /// holds.
    pub(crate) leaves: Vec<WrittenLeaf>,
    /// Each alias, and the leaf that holds its data.
    pub(crate) aliases: Vec<(LeafName, LeafName)>,
}

/// A data file as its rank reports it: its key, its number among the rank's files of that key, its size, and where its
/// data begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileShape {
    pub(crate) key: String,
    pub(crate) index: u32,
    pub(crate) bytes: u64,
    pub(crate) data_start: u64,
}

/// Regions of one tensor that a rank wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WrittenLeaf {
    pub(crate) name: LeafName,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    pub(crate) layout: String,
    /// Each region, the index of its file, and its offset there from the file's start.
    pub(crate) regions: Vec<(Region, u32, u64)>,
}

/// The structure of a rank's files of values, without their contents.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ValueFiles {
    pub(crate) files: Vec<FileShape>,
    /// For each value that the rank had to write, in the order of the names: the index of its file, its offset there
    /// from the file's start, and its length, in bytes.
    pub(crate) extents: Vec<(u32, u64, u64)>,
}
