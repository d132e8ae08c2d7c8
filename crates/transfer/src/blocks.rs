//! Whole blocks of a file in memory, each verified before it is used.

use shardfast_format::{BLOCK_BYTES, crc64};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Error of a block whose bytes are not the saved ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unverified;

/// Whole blocks of a file, and which of them are verified.
pub(crate) struct Blocks<'a> {
    bytes: &'a [u8],
    expected: &'a [u64],
    /// Result per checked block: `true` if its bytes are the saved ones.
    seen: Vec<Option<bool>>,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(bytes: &'a [u8], expected: &'a [u64]) -> Blocks<'a> {
        Blocks { bytes, expected, seen: vec![None; expected.len()] }
    }

    fn block(&self, number: usize) -> &'a [u8] {
        &self.bytes[number * BLOCK..self.bytes.len().min((number + 1) * BLOCK)]
    }

    /// Verifies the block that holds the byte `at`; returns its number, and its bytes from `at` on, at most
    /// `bytes_max`.
    ///
    /// # Errors
    /// When its bytes are not the saved ones.
    pub(crate) fn verify(&mut self, at: usize, bytes_max: usize) -> Result<(usize, &'a [u8]), Unverified> {
        let number = at / BLOCK;
        if self.seen[number].is_none() {
            self.saw(number, crc64(self.block(number)));
        }
        let rest = &self.block(number)[at % BLOCK..];
        if self.seen[number] == Some(true) { Ok((number, &rest[..rest.len().min(bytes_max)])) } else { Err(Unverified) }
    }

    /// Checks a block, unless it was checked before.
    pub(crate) fn unseen(&self, number: usize) -> Option<&'a [u8]> {
        self.seen.get(number)?.is_none().then(|| self.block(number))
    }

    /// Notes the CRC-64 of a block.
    pub(crate) fn saw(&mut self, number: usize, crc: u64) {
        self.seen[number] = Some(crc == self.expected[number]);
    }
}
