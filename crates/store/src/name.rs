//! Checks the names that a store takes, the same for all backends.

use crate::{Error, Kind, Result};

const NAME_BYTES_MAX: usize = 1024;
const COMPONENT_BYTES_MAX: usize = 255;

/// Checks the name of an object; `url` is the store's, for the message.
pub(crate) fn check(op: &'static str, url: &str, name: &str) -> Result<()> {
    match flaw(name) {
        None => Ok(()),
        Some(flaw) => Err(Error::new(Kind::Invalid, op, url, format!("name {name:?} {flaw}"))),
    }
}

/// Checks the name of a directory, which may be the root.
pub(crate) fn check_dir(op: &'static str, url: &str, dir: &str) -> Result<()> {
    if dir.is_empty() { Ok(()) } else { check(op, url, dir) }
}

/// Returns the directory that holds `name`; the root is `""` and has none.
pub(crate) fn parent(name: &str) -> Option<&str> {
    match name.rsplit_once('/') {
        Some((dir, _)) => Some(dir),
        None if name.is_empty() => None,
        None => Some(""),
    }
}

/// Prefix of the names of temporary objects, in all backends; 16 hex digits follow.
const TEMPORARY: &str = ".tmp-";

/// Makes a new name for a temporary object, which [`is_temporary`] recognizes.
///
/// # Errors
/// [`Kind::Internal`] if this machine has no random numbers.
pub fn temporary() -> Result<String> {
    let random = getrandom::u64().map_err(|e| Error::new(Kind::Internal, "create", TEMPORARY, e.to_string()))?;
    Ok(temporary_of(random))
}

/// Returns the name of the temporary object with this number.
pub(crate) fn temporary_of(number: u64) -> String {
    format!("{TEMPORARY}{number:016x}")
}

/// Returns whether a name is one that [`temporary`] makes: an object that a crash left, or that a call in progress
/// uses.
pub fn is_temporary(name: &str) -> bool {
    let digits = name.strip_prefix(TEMPORARY).unwrap_or_default();
    digits.len() == 16 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

pub(crate) fn flaw(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("is empty");
    }
    if name.len() > NAME_BYTES_MAX {
        return Some("is longer than 1024 bytes");
    }
    if name.chars().any(|c| c == '\\' || c.is_control()) {
        return Some("holds a backslash or a control character");
    }
    name.split('/').find_map(|component| match component {
        "" => Some("has an empty component"),
        "." | ".." => Some("has a component \".\" or \"..\""),
        long if long.len() > COMPONENT_BYTES_MAX => Some("has a component longer than 255 bytes"),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flaws_are_found_and_good_names_pass() {
        for good in ["a", "a/b/c", ".hidden", "..a", "ünï/😀", "a b", "%20", &"x".repeat(255)] {
            assert_eq!(flaw(good), None, "{good:?}");
        }
        for bad in ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\\b", "a\0b", "a\nb", "a\u{85}b"] {
            assert!(flaw(bad).is_some(), "{bad:?}");
        }
        assert!(flaw(&"x".repeat(256)).is_some());
        assert!(flaw(&"x/".repeat(512)).is_some());
        assert!(flaw(&format!("{}y", "x/".repeat(512))).is_some());
    }

    #[test]
    fn parents_lead_to_the_root() {
        assert_eq!(parent("a/b/c"), Some("a/b"));
        assert_eq!(parent("a"), Some(""));
        assert_eq!(parent(""), None);
    }
}
