//! Defines the bytes of a checkpoint: regions, leaves, manifest, safetensors headers, checksums, versions.
//!
//! This crate does no I/O. It knows no files, clocks, threads, networks, topology of ranks or frameworks.
//! `docs/format.md` specifies the format.

pub mod catalog;
pub mod checksum;
pub mod columns;
pub mod commit;
mod container;
mod digits;
pub mod dtype;
mod error;
pub mod header;
pub mod index;
pub mod manifest;
pub mod name;
pub mod object;
pub mod region;
mod version;

pub use catalog::{Catalog, Leaf, LeafBody, LeafName, Owner};
pub use checksum::{BLOCK_BYTES, Crc64, crc64, crc64_joined, sha256};
pub use columns::{Columns, Number};
pub use commit::Commit;
pub use container::NDIM_MAX;
pub use dtype::DType;
pub use error::Error;
pub use header::{DataHeader, EntrySpec, FileLayout, HeaderEntry};
pub use index::hugging_face_index;
pub use manifest::{Extent, FileEntry, LeafKind, LeafRef, Manifest, ManifestBuilder, SaveInfo};
pub use name::{
    COMMIT, COPYING, JOBS, LEAVING, PINNED, TELEMETRY, attempt_of, data_file, end_name, is_end_name, is_own_path,
    job_name, manifest_name, parse_job_name, parse_record_name, parse_step_dir, part_name, record_name, step_dir,
    value_name,
};
pub use object::{Int, Tag, Value};
pub use region::{Dims, FlatRun, Region};
pub use version::{FORMAT_MAJOR, FORMAT_MINOR};
