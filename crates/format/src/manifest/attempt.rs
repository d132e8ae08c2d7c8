//! Renames a manifest to another attempt, as a copy of its checkpoint needs it.

use super::Manifest;
use super::codec::{ATTEMPT, PATHS};
use crate::container;
use crate::error::Error;
use crate::name::{attempt_of, check_attempt};

impl Manifest {
    /// Replaces the attempt in the encoded manifest `bytes` by `attempt`: in its metadata and in the paths of its data
    /// files. All other bytes stay, also those that only a later version knows. So two manifests describe the same
    /// checkpoint if they are equal under one attempt.
    ///
    /// # Errors
    /// As [`Manifest::decode`]; `Invalid` if `attempt` is no attempt; `Unsupported` if the manifest does not spell its
    /// attempt as shardfast writes it.
    pub fn under_attempt(bytes: &[u8], attempt: &str) -> Result<Vec<u8>, Error> {
        check_attempt(attempt)?;
        let manifest = Manifest::decode(bytes)?;
        let parsed = container::parse("manifest", bytes, bytes.len() as u64)?;
        let member = format!("\"{ATTEMPT}\":\"{}\"", manifest.info.attempt);
        let json = &bytes[..parsed.data_start as usize];
        // In the text of any member the quotes would have a backslash before them.
        let found = json.windows(member.len()).position(|window| window == member.as_bytes());
        let Some(at) = found else {
            return Err(Error::Unsupported(format!(
                "manifest: expected {member} in its metadata, as shardfast writes it"
            )));
        };
        let mut renamed = bytes.to_vec();
        let mut name_at = |end: usize| renamed[end - attempt.len()..end].copy_from_slice(attempt.as_bytes());
        name_at(at + member.len() - 1);
        let paths = parsed.entries.iter().find(|entry| entry.name == PATHS);
        let mut path_at = paths.map_or(0, |entry| (parsed.data_start + entry.span.0) as usize);
        for file in &manifest.files {
            if let Some(start) = attempt_of(&file.path).and_then(|digits| file.path.rfind(digits)) {
                name_at(path_at + start + attempt.len());
            }
            path_at += file.path.len();
        }
        Ok(renamed)
    }
}
