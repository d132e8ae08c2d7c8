//! Checks the features that a reader must know in order to read a manifest correctly.

use crate::error::Error;
use crate::version::{FORMAT_MAJOR, FORMAT_MINOR, parse_version};

/// Longest name of a feature, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Checks that the features of `requires` are spelled correctly and known to this build. Format 1.0 has none, so any
/// required feature is of a later version.
///
/// # Errors
/// `Corrupt` for any spelling but `<name>>=<major>.<minor>`, sorted by name, with single spaces between; `Unsupported`
/// naming every feature and the version that introduced it. `writer` is the program that wrote the manifest.
pub(super) fn check(requires: &str, writer: &str) -> Result<(), Error> {
    if requires.is_empty() {
        return Ok(());
    }
    let mut last = "";
    let mut unknown = Vec::new();
    for feature in requires.split(' ') {
        let sound = feature.split_once(">=").filter(|(name, since)| is_name(name) && parse_version(since).is_some());
        let Some((name, since)) = sound.filter(|(name, _)| *name > last) else {
            return Err(Error::Corrupt(format!(
                "manifest: metadata \"shardfast.requires\": expected <name>>=<major>.<minor>, sorted by name and \
                 separated by single spaces, found {requires:?}"
            )));
        };
        unknown.push(format!("{name:?} of format {since}"));
        last = name;
    }
    let by = if writer.is_empty() { String::new() } else { format!(" (it was written by {writer})") };
    Err(Error::Unsupported(format!(
        "manifest: expected what format {FORMAT_MAJOR}.{FORMAT_MINOR} can read, found a checkpoint that requires \
         {}{by}; upgrade shardfast",
        unknown.join(", ")
    )))
}

fn is_name(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX
        && text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}
