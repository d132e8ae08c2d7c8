//! Test doubles and suites, for the tests of this crate and of those above it.

pub mod appended;
pub mod around;
pub mod conformance;
pub mod dice;
pub mod noted;
pub mod servers;
pub mod simdisk;
#[cfg(feature = "s3")]
pub mod sims3;
