//! Checks decoded values.

use shardfast_format::object::encode;
use shardfast_format::{Error, Value};

pub(crate) fn decode(bytes: &[u8]) -> Result<Value, Error> {
    shardfast_format::object::decode(bytes)
}

/// Checks that a value, once decoded, is always encoded the same way.
pub(crate) fn hold(_bytes: &[u8], value: &Value) {
    let written = encode(value).expect("what was decoded can be encoded");
    let again = decode(&written).expect("what was encoded can be decoded");
    assert_eq!(encode(&again).expect("and once more"), written);
}
