//! The format as its readers and writers meet it.

mod commit;
mod golden;
mod header;
mod index;
mod manifest;
mod object;
#[path = "../hostile/decoders/manifest.rs"]
mod promises;
mod sample;
mod values;
