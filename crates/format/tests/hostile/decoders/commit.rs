//! A commit record.

use shardfast_format::{Commit, Error};

pub(crate) fn decode(bytes: &[u8]) -> Result<Commit, Error> {
    Commit::decode(bytes)
}

/// Checks that there is one spelling of each record of our version.
pub(crate) fn hold(bytes: &[u8], commit: &Commit) {
    if commit.minor == 0 {
        assert_eq!(commit.encode(), bytes);
    }
    assert!(!commit.manifest.contains('/'));
}
