//! Checks decoded columns.

use shardfast_format::{Columns, Error};

pub(crate) fn decode(bytes: &[u8]) -> Result<Columns, Error> {
    Columns::decode("columns", bytes)
}

/// Checks that what was decoded says the same when it is encoded again.
pub(crate) fn hold(_: &[u8], columns: &Columns) {
    assert_eq!(decode(&columns.encode()).as_ref(), Ok(columns));
}
