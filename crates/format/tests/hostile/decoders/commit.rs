//! Checks decoded commit records.

use shardfast_format::{Commit, Error};

pub(crate) fn decode(bytes: &[u8]) -> Result<Commit, Error> {
    Commit::decode(bytes)
}

/// Checks that each record of our version has one spelling.
pub(crate) fn hold(bytes: &[u8], commit: &Commit) {
    if commit.minor == 0 {
        assert_eq!(commit.encode(), bytes);
    }
    assert!(!commit.manifest.contains('/'));
}
