//! The two checksums of the format: CRC-64/NVME for data, SHA-256 for the manifest of a commit.
//!
//! CRC-64/NVME: width 64, polynomial 0xad93d23594c93659, initial value and final XOR all ones, input and output
//! reflected, check value 0xae8b14860a799888 (NVM Express command set specification, 5.2.1.3.4; also the CRC64NVME that
//! S3 returns).

use crc_fast::{CrcAlgorithm, Digest as CrcDigest};
use sha2::{Digest, Sha256};

/// The block of a data file that one CRC-64 covers, in bytes, counted from the file's `data_start`.
pub const BLOCK_BYTES: u64 = 65_536;

/// Returns the CRC-64/NVME of `bytes`.
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// Joins two CRC-64/NVME: that of `first`, and that of `second`, which follows it and has `second_bytes` bytes.
pub fn crc64_joined(first: u64, second: u64, second_bytes: u64) -> u64 {
    const BLOCK: u64 = power_of_x(BLOCK_BYTES);
    let shift = if second_bytes == BLOCK_BYTES { BLOCK } else { power_of_x(second_bytes) };
    product(shift, first) ^ second
}

/// The polynomial without its highest power, reflected: the highest bit is the coefficient of 1.
const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659_u64.reverse_bits();

/// Multiplies two polynomials modulo [`POLYNOMIAL`].
const fn product(a: u64, mut b: u64) -> u64 {
    let (mut product, mut bit) = (0, 64);
    while bit > 0 {
        bit -= 1;
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = (b >> 1) ^ (POLYNOMIAL & (b & 1).wrapping_neg());
    }
    product
}

/// Returns `x` to the power of the number of bits in `bytes` bytes.
const fn power_of_x(mut bytes: u64) -> u64 {
    let (mut power, mut square) = (1 << 63, 1 << (63 - 8));
    while bytes > 0 {
        if bytes & 1 == 1 {
            power = product(square, power);
        }
        square = product(square, square);
        bytes >>= 1;
    }
    power
}

/// A CRC-64/NVME computed piece by piece.
#[derive(Debug, Clone)]
pub struct Crc64(CrcDigest);

impl Crc64 {
    /// Starts with no bytes.
    pub fn new() -> Crc64 {
        Crc64(CrcDigest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Adds the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all pieces.
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Crc64 {
        Crc64::new()
    }
}

/// Returns the SHA-256 of `bytes` (FIPS 180-4).
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::hex;

    #[test]
    fn crc64_has_the_published_check_value() {
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(crc64(b""), 0);
    }

    #[test]
    fn crc64_in_pieces_is_crc64_at_once() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 31) as u8).collect();
        for cut in [0, 1, 7, 64, 255, 4096, 9_999, 10_000] {
            let mut crc = Crc64::new();
            crc.update(&bytes[..cut]);
            crc.update(&bytes[cut..]);
            assert_eq!(crc.finish(), crc64(&bytes), "cut at {cut}");
        }
    }

    #[test]
    fn crc64_of_two_pieces_is_joined_from_those_of_each() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i * 31) as u8).collect();
        let ends = [0, 1, 7, 64, 4096, BLOCK_BYTES as usize, BLOCK_BYTES as usize + 1, bytes.len()];
        for (first, end) in ends.into_iter().flat_map(|first| ends.map(|end| (first, end))).filter(|(a, b)| a <= b) {
            let joined = crc64_joined(crc64(&bytes[..first]), crc64(&bytes[first..end]), (end - first) as u64);
            assert_eq!(joined, crc64(&bytes[..end]), "cut at {first} of {end}");
        }
    }

    #[test]
    fn sha256_has_the_published_value() {
        assert_eq!(hex(&sha256(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
