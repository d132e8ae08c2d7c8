//! What the bytes of a checkpoint mean: regions, leaves, manifest, safetensors headers, checksums, versions.
//!
//! This crate only thinks. It knows no files, clocks, threads, networks, ranks' topology or frameworks. The format is
//! specified in `docs/format.md`.

pub mod catalog;
pub mod dtype;
pub mod region;

pub use catalog::{Catalog, Leaf, LeafBody, LeafName};
pub use dtype::DType;
pub use region::{Dims, Region};
