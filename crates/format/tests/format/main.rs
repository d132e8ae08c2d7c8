//! Tests the format from outside, as its readers and writers use it.
#![allow(clippy::single_range_in_vec_init)] // the ranks of a value are ranges, often one

mod commit;
mod golden;
mod header;
mod index;
mod manifest;
mod object;
#[path = "../hostile/decoders/manifest.rs"]
mod promises;
mod sample;
mod specification;
mod values;
