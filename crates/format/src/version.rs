//! Defines the format's version, as manifests and commit records spell it.

use crate::digits::decimal_u64;
use crate::error::Error;

/// Major version of the format: a reader refuses all others.
pub const FORMAT_MAJOR: u32 = 1;

/// Minor version of the format. A reader refuses features of a later one, by name, unless it can safely ignore them.
pub const FORMAT_MINOR: u32 = 0;

/// Parses a version, `<major>.<minor>`.
pub(crate) fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    let number = |digits| u32::try_from(decimal_u64(digits)?).ok();
    Some((number(major)?, number(minor)?))
}

/// Returns the error for a major version other than [`FORMAT_MAJOR`]. `writer` may be empty.
pub(crate) fn other_major(what: &str, (major, minor): (u32, u32), writer: &str) -> Error {
    let advice = if major > FORMAT_MAJOR { "upgrade shardfast" } else { "read it with an older shardfast" };
    let by = if writer.is_empty() { String::new() } else { format!(", written by {writer}") };
    Error::Unsupported(format!("{what}: expected format {FORMAT_MAJOR}.x, found {major}.{minor}{by}; {advice}"))
}
