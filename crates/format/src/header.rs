//! Lays out and reads data files: safetensors files whose layout is fixed before the first byte is written. Their
//! header, written last, holds the checksums of their blocks.

use std::collections::BTreeMap;

use crate::checksum::BLOCK_BYTES;
use crate::container::{self, JSON_BYTES_MAX, LENGTH_BYTES, NDIM_MAX};
use crate::digits::{decimal_u64, hex, hex_u64};
use crate::dtype::DType;
use crate::error::Error;
use crate::region::Dims;

/// Alignment of a file's data, in bytes: suits direct I/O.
pub const DATA_ALIGNMENT: u64 = 4096;

const FORMAT: &str = "format";
const BLOCKS: &str = "shardfast.blocks";
const BLOCK_SIZE: &str = "shardfast.block_bytes";

/// Digits of one block's checksum in the header.
const CRC_DIGITS: usize = 16;

/// JSON up to the checksums' digits, which stand first so that their offset is fixed.
const BEFORE_DIGITS: &str = "{\"__metadata__\":{\"shardfast.blocks\":\"";

/// A tensor of a data file that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntrySpec {
    /// Name in the file.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Shape, in elements.
    pub shape: Dims,
}

impl EntrySpec {
    /// Returns the most bytes that the tensor takes in a file's header, without the checksums of its data.
    pub fn header_bytes_max(&self) -> u64 {
        let spelled = |byte| match byte {
            b'"' | b'\\' => 2,
            0..0x20 => 6,
            _ => 1,
        };
        // The members' names, a dtype, two offsets and the brackets; each dimension is 20 digits and a comma.
        128 + self.name.bytes().map(spelled).sum::<u64>() + 21 * self.shape.len() as u64
    }
}

/// Layout of a data file that is to be written.
#[derive(Debug, Clone)]
pub struct FileLayout {
    /// Offset of the data in the file, in bytes: a multiple of [`DATA_ALIGNMENT`].
    pub data_start: u64,
    /// Size of the data, in bytes.
    pub data_bytes: u64,
    /// Offset of each tensor in the file, in bytes.
    pub offsets: Vec<u64>,
    /// Number of blocks of [`BLOCK_BYTES`] in the data (the last one may be shorter).
    pub blocks: usize,
    json: Vec<u8>,
}

impl FileLayout {
    /// Lays the tensors out in the order given, without gaps, and adds `metadata` to the header's `__metadata__`.
    ///
    /// # Errors
    /// `Invalid` for duplicate names, more than 64 dimensions, a file beyond `u64`, a header beyond 100 MB, or metadata
    /// that the format itself writes.
    pub fn new(entries: &[EntrySpec], metadata: &BTreeMap<String, String>) -> Result<FileLayout, Error> {
        let invalid = |message: String| Error::Invalid(format!("data file: {message}"));
        for key in [FORMAT, BLOCKS, BLOCK_SIZE] {
            if metadata.contains_key(key) {
                return Err(invalid(format!("the metadata {key:?} is written by the format itself")));
            }
        }
        let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(invalid(format!("two tensors are called {:?}", pair[0])));
        }
        if names.binary_search(&"__metadata__").is_ok() {
            return Err(invalid("\"__metadata__\" cannot be a tensor's name in a safetensors file".to_owned()));
        }
        let mut position = 0u64;
        let mut spans = Vec::with_capacity(entries.len());
        for EntrySpec { name, dtype, shape } in entries {
            if shape.len() > NDIM_MAX {
                let found = shape.len();
                return Err(invalid(format!("tensor {name:?}: expected at most {NDIM_MAX} dimensions, found {found}")));
            }
            let end = container::tensor_bytes(*dtype, shape).and_then(|bytes| position.checked_add(bytes));
            let shown = container::header_shape(*dtype, shape);
            match (end, shown) {
                (Some(end), Some(shown)) => {
                    spans.push((shown, (position, end)));
                    position = end;
                }
                _ => return Err(invalid(format!("tensor {name:?}: {dtype} {shape:?} is beyond 2^64 bytes"))),
            }
        }
        let blocks = position.div_ceil(BLOCK_BYTES);
        if blocks > JSON_BYTES_MAX / CRC_DIGITS as u64 {
            return Err(too_large(position));
        }
        let blocks = blocks as usize;
        let digits = "0".repeat(blocks * CRC_DIGITS);
        let block_bytes = BLOCK_BYTES.to_string();
        let own = [(BLOCKS, digits.as_str()), (BLOCK_SIZE, block_bytes.as_str()), (FORMAT, "pt")];
        let given = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let tensors =
            entries.iter().zip(&spans).map(|(e, (shown, span))| (e.name.as_str(), e.dtype, shown.clone(), *span));
        let json = container::json(own.into_iter().chain(given), tensors);
        debug_assert!(json.starts_with(BEFORE_DIGITS.as_bytes()));
        let data_start = (LENGTH_BYTES + json.len() as u64).next_multiple_of(DATA_ALIGNMENT);
        if data_start - LENGTH_BYTES > JSON_BYTES_MAX || data_start.checked_add(position).is_none() {
            return Err(too_large(position));
        }
        let offsets = spans.iter().map(|(_, (start, _))| data_start + start).collect();
        Ok(FileLayout { data_start, data_bytes: position, offsets, blocks, json })
    }

    /// Moves the start of the data to the next multiple of `bytes`, itself rounded up to a multiple of
    /// [`DATA_ALIGNMENT`].
    ///
    /// # Errors
    /// `Invalid` for a header beyond 100 MB.
    pub fn beginning_at_multiple_of(mut self, bytes: u64) -> Result<FileLayout, Error> {
        let ahead = self.data_start.next_multiple_of(bytes.max(1).next_multiple_of(DATA_ALIGNMENT)) - self.data_start;
        self.data_start += ahead;
        if self.data_start - LENGTH_BYTES > JSON_BYTES_MAX || self.data_start.checked_add(self.data_bytes).is_none() {
            return Err(too_large(self.data_bytes));
        }
        self.offsets.iter_mut().for_each(|offset| *offset += ahead);
        Ok(self)
    }

    /// Returns the size of the whole file, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.data_start + self.data_bytes
    }

    /// Returns the file's first `data_start` bytes. `block_crcs` are the CRC-64 of the data's blocks, in order.
    ///
    /// # Errors
    /// `Invalid` when their number is not [`FileLayout::blocks`].
    pub fn header(&self, block_crcs: &[u64]) -> Result<Vec<u8>, Error> {
        if block_crcs.len() != self.blocks {
            let (expected, found) = (self.blocks, block_crcs.len());
            return Err(Error::Invalid(format!("data file: expected {expected} block checksums, found {found}")));
        }
        let mut out = container::frame(&self.json, self.data_start);
        let digits = &mut out[LENGTH_BYTES as usize + BEFORE_DIGITS.len()..];
        for (place, crc) in digits.chunks_exact_mut(CRC_DIGITS).zip(block_crcs) {
            place.copy_from_slice(hex(&crc.to_be_bytes()).as_bytes());
        }
        Ok(out)
    }
}

fn too_large(data_bytes: u64) -> Error {
    Error::Invalid(format!(
        "data file: {data_bytes} bytes of data need a header beyond {JSON_BYTES_MAX} bytes; spread them over more files"
    ))
}

/// A tensor of a data file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Name in the file.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Shape, in elements.
    pub shape: Dims,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A parsed and checked header of a data file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataHeader {
    /// Offset of the data in the file, in bytes.
    pub data_start: u64,
    /// Size of the data, in bytes.
    pub data_bytes: u64,
    /// Tensors, sorted by offset.
    pub entries: Vec<HeaderEntry>,
    /// Bytes of data that one checksum covers (the last block may be shorter).
    pub block_bytes: u64,
    /// CRC-64/NVME of each block.
    pub block_crcs: Vec<u64>,
    /// Other entries of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

impl DataHeader {
    /// Parses the first `data_start` bytes of a data file of `file_bytes` bytes.
    ///
    /// # Errors
    /// `Corrupt` for anything that [`FileLayout`] would not have written; `Unsupported` for an element type or a size
    /// of blocks that this build does not know.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<DataHeader, Error> {
        let corrupt = |message: String| Error::Corrupt(format!("data file: {message}"));
        let parsed = container::parse("data file", bytes, file_bytes)?;
        let data_start = parsed.data_start;
        if data_start != bytes.len() as u64 {
            return Err(corrupt(format!("expected a header of {} bytes, found {data_start}", bytes.len())));
        }
        if !data_start.is_multiple_of(DATA_ALIGNMENT) {
            return Err(corrupt(format!("expected data at a multiple of {DATA_ALIGNMENT} bytes, found {data_start}")));
        }
        let data_bytes = file_bytes - data_start;
        let mut metadata = parsed.metadata;
        if metadata.remove(FORMAT).as_deref() != Some("pt") {
            return Err(corrupt(format!("metadata {FORMAT:?}: expected \"pt\"")));
        }
        let block_bytes = match metadata.remove(BLOCK_SIZE).as_deref().and_then(decimal_u64) {
            Some(BLOCK_BYTES) => BLOCK_BYTES,
            Some(found) => {
                return Err(Error::Unsupported(format!(
                    "data file: expected blocks of {BLOCK_BYTES} bytes, found {found}; upgrade shardfast"
                )));
            }
            None => return Err(corrupt(format!("metadata {BLOCK_SIZE:?}: expected {BLOCK_BYTES}"))),
        };
        let Some(digits) = metadata.remove(BLOCKS) else {
            return Err(corrupt(format!("metadata {BLOCKS:?} is missing")));
        };
        let blocks = data_bytes.div_ceil(block_bytes);
        if blocks.checked_mul(CRC_DIGITS as u64) != Some(digits.len() as u64) {
            let found = digits.len();
            return Err(corrupt(format!("metadata {BLOCKS:?}: expected {blocks} checksums, found {found} digits")));
        }
        let block_crcs: Option<Vec<u64>> = digits.as_bytes().chunks_exact(CRC_DIGITS).map(hex_u64).collect();
        let Some(block_crcs) = block_crcs else {
            return Err(corrupt(format!("metadata {BLOCKS:?}: expected lowercase hexadecimal digits")));
        };
        let mut entries = Vec::with_capacity(parsed.entries.len());
        for entry in parsed.entries {
            let (name, (start, end)) = (entry.name, entry.span);
            let dtype = entry.dtype.map_err(|dtype| {
                Error::Unsupported(format!("data file: tensor {name:?} is of dtype {dtype:?}; upgrade shardfast"))
            })?;
            let Some(shape) = container::true_shape(dtype, entry.shape) else {
                return Err(corrupt(format!(
                    "tensor {name:?}: its {dtype} values do not pair up in the last dimension"
                )));
            };
            entries.push(HeaderEntry { name, dtype, shape, offset: data_start + start, bytes: end - start });
        }
        Ok(DataHeader { data_start, data_bytes, entries, block_bytes, block_crcs, metadata })
    }
}
