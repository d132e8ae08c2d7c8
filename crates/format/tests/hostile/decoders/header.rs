//! Checks decoded headers of data files.

use safetensors::SafeTensors;
use shardfast_format::{DataHeader, Error};

/// Parses `bytes` as a whole file.
pub(crate) fn decode(bytes: &[u8]) -> Result<DataHeader, Error> {
    let length = bytes.first_chunk().map_or(0, |field| u64::from_le_bytes(*field));
    let data_start = length.saturating_add(8).min(bytes.len() as u64);
    DataHeader::parse(&bytes[..data_start as usize], bytes.len() as u64)
}

/// Checks the promises of a header against the safetensors crate's reading of the same file.
pub(crate) fn hold(bytes: &[u8], header: &DataHeader) {
    let theirs = SafeTensors::deserialize(bytes).expect("what we take, safetensors takes");
    assert_eq!(theirs.len(), header.entries.len());
    let mut position = header.data_start;
    for entry in &header.entries {
        let data = theirs.tensor(&entry.name).expect("the same names");
        assert_eq!(entry.offset, position);
        assert_eq!(data.data(), &bytes[entry.offset as usize..(entry.offset + entry.bytes) as usize]);
        assert_eq!(data.dtype().to_string(), entry.dtype.name());
        let numel: u64 = entry.shape.iter().product();
        assert_eq!(numel * entry.dtype.size_bytes(), entry.bytes);
        position += entry.bytes;
    }
    assert_eq!(position, bytes.len() as u64);
    assert_eq!(header.block_crcs.len() as u64, header.data_bytes.div_ceil(header.block_bytes));
}
