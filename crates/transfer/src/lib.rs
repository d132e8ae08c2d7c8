//! Moves bytes between tensors' memory, on the host or on a CUDA device, and a store.
//!
//! A save gives [providers](provider) to the [writer], which fills slots of [staging] memory, checksums them and has
//! the store write them. A load gives [sinks](sink) to the [reader], which reads whole blocks and proves each before a
//! byte of it reaches a sink. Which bytes, for whom and why, is known above.

mod accelerators;
mod blocks;
pub mod capture;
mod copy_crc;
pub mod cuda;
pub mod digest;
pub mod error;
pub mod events;
pub mod host;
pub mod interrupt;
pub mod memory;
pub mod observed;
pub mod progress;
pub mod provider;
pub mod reader;
pub mod report;
pub mod sink;
pub mod staging;
pub mod sums;
pub mod timeout;
mod verify_block;
pub mod writer;

pub use accelerators::Accelerators;
