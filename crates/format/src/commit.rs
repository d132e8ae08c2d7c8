//! The commit record: a few lines of text that make a checkpoint exist, with the SHA-256 of its manifest.

use crate::checksum::{crc64, sha256};
use crate::digits::{decimal_u64, hex, hex_bytes, hex_u64};
use crate::error::Error;
use crate::name::{check_attempt, check_file_name};
use crate::version::{FORMAT_MAJOR, FORMAT_MINOR, other_major, parse_version};

/// Largest record of any version, in bytes: readers need not fetch more.
pub const COMMIT_BYTES_MAX: u64 = 4096;

const MAGIC: &str = "shardfast ";
const CRC: &str = "crc64 ";

/// The contents of `COMMIT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// Major version of the format that the checkpoint is written in.
    pub major: u32,
    /// Minor version of the format.
    pub minor: u32,
    /// Attempt that wrote the checkpoint: 16 lowercase hexadecimal digits.
    pub attempt: String,
    /// File name of the manifest, beside `COMMIT`.
    pub manifest: String,
    /// Size of the manifest, in bytes.
    pub manifest_bytes: u64,
    /// SHA-256 of the manifest.
    pub manifest_sha256: [u8; 32],
}

impl Commit {
    /// Encodes the record, its checksum included.
    pub fn encode(&self) -> Vec<u8> {
        let body = self.body();
        let crc = crc64(body.as_bytes());
        format!("{body}{CRC}{crc:016x}\n").into_bytes()
    }

    /// Decodes a record: checks its checksum first, then its version, then the rest. Lines that a later minor version
    /// adds between the known lines and the checksum are ignored.
    ///
    /// # Errors
    /// `Corrupt` for any byte that [`Commit::encode`] would not have written; `Unsupported` for another major version.
    pub fn decode(bytes: &[u8]) -> Result<Commit, Error> {
        let corrupt = |message: String| Error::Corrupt(format!("COMMIT: {message}"));
        if bytes.len() as u64 > COMMIT_BYTES_MAX {
            return Err(corrupt(format!("expected at most {COMMIT_BYTES_MAX} bytes, found {}", bytes.len())));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| corrupt("expected text".to_owned()))?;
        let last = text.strip_suffix('\n').map(|text| text.rfind('\n').map_or(0, |newline| newline + 1));
        let (body, digits) = match last.map(|last| text.split_at(last)) {
            Some((body, line)) if line.starts_with(CRC) => (body, &line[CRC.len()..line.len() - 1]),
            _ => return Err(corrupt("expected the line \"crc64 …\" at the end".to_owned())),
        };
        let found = crc64(body.as_bytes());
        if hex_u64(digits.as_bytes()) != Some(found) {
            return Err(corrupt(format!("its checksum: expected {digits}, found {found:016x}")));
        }
        let mut lines = body.lines();
        let version = lines.next().and_then(|line| line.strip_prefix(MAGIC)).and_then(parse_version);
        let Some((major, minor)) = version else {
            return Err(corrupt("expected the line \"shardfast <major>.<minor>\" at the start".to_owned()));
        };
        if major != FORMAT_MAJOR {
            return Err(other_major("COMMIT", (major, minor), ""));
        }
        let mut field = |name: &str| {
            let line = lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.ok_or_else(|| corrupt(format!("expected the line \"{name} …\" in its place")))
        };
        let (attempt, manifest) = (field("attempt")?.to_owned(), field("manifest")?.to_owned());
        check_attempt(&attempt).map_err(|error| corrupt(error.message().to_owned()))?;
        check_file_name(&manifest).map_err(|error| corrupt(error.message().to_owned()))?;
        let size = field("manifest_bytes")?;
        let manifest_bytes = decimal_u64(size);
        let manifest_bytes = manifest_bytes.ok_or_else(|| corrupt(format!("manifest_bytes: found {size:?}")))?;
        let digest = field("manifest_sha256")?;
        let manifest_sha256 = hex_bytes(digest.as_bytes());
        let manifest_sha256 = manifest_sha256.ok_or_else(|| corrupt(format!("manifest_sha256: found {digest:?}")))?;
        let commit = Commit { major, minor, attempt, manifest, manifest_bytes, manifest_sha256 };
        let known = commit.body();
        if body == known || minor > FORMAT_MINOR && body.starts_with(&known) {
            return Ok(commit);
        }
        Err(corrupt(format!("expected nothing but {known:?} before the checksum, found {body:?}")))
    }

    /// Checks that size and SHA-256 of `manifest` are those of this record.
    ///
    /// # Errors
    /// `Corrupt`, naming the file and both sizes or digests.
    pub fn verify(&self, manifest: &[u8]) -> Result<(), Error> {
        let Commit { manifest: name, manifest_bytes: expected, .. } = self;
        if manifest.len() as u64 != *expected {
            return Err(Error::Corrupt(format!("{name}: expected {expected} bytes, found {}", manifest.len())));
        }
        let found = sha256(manifest);
        if found != self.manifest_sha256 {
            let (expected, found) = (hex(&self.manifest_sha256), hex(&found));
            return Err(Error::Corrupt(format!("{name}: expected SHA-256 {expected}, found {found}")));
        }
        Ok(())
    }

    fn body(&self) -> String {
        let Commit { major, minor, attempt, manifest, manifest_bytes, .. } = self;
        let digest = hex(&self.manifest_sha256);
        format!(
            "{MAGIC}{major}.{minor}\nattempt {attempt}\nmanifest {manifest}\n\
             manifest_bytes {manifest_bytes}\nmanifest_sha256 {digest}\n"
        )
    }
}
