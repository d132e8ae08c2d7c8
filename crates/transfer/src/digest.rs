//! A digest of 64 bits that a device computes as easily as the host: whether two runs of bytes are the same, without
//! moving either of them.
//!
//! The digest of a run is the sum modulo 2^64 over its little-endian words `w_i` of 8 bytes, the last one padded with
//! zeros, of `mix(w_i + (i + 1) * GAMMA)`. This is the (i + 1)th output of SplitMix64 with the seed `w_i`: Steele, Lea,
//! Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. `mix` is its finalizer, with the constants of
//! Stafford's variant 13 ("Better Bit Mixing", 2011).
//!
//! - A sum: thousands of threads add in any order and find the same, and so does one.
//! - Every word is mixed before it is added, with its place: two changes that cancel in a plain sum do not cancel, and
//!   words that are swapped are found. `mix` is a bijection, so one changed word always changes the digest. Changes of
//!   several words, which do not depend on the digest, leave it as it is with a probability of about 2^-64.
//! - It takes no key: someone who wants two runs of the same digest can make them.
//!
//! Zeros at the end of a run up to a multiple of 8 bytes do not change it: compare runs of one length.

use std::sync::Arc;

use crate::error::Result;
use crate::staging::{SLOT_BYTES, Slot};

/// Runs whose addresses, lengths and digests fit in a slot.
pub const RUNS_MAX: usize = SLOT_BYTES / 24;

/// A device or thread that computes digests of a device's memory in place.
pub trait Digester: Send + Sync {
    /// Begins to compute the [`digest`] of each run, an address of the device and a length in bytes, after the copies
    /// submitted before. `scratch`, which is page-locked, is used until the result is dropped. Does not block.
    ///
    /// # Errors
    /// `Invalid` for more runs than fit in a slot, and for memory that is not the device's; `Unsupported` without
    /// page-locked memory, or where the device cannot compute them; `Unavailable` when the device is lost. After an
    /// error nothing is under way.
    ///
    /// # Safety
    /// Every run must stay allocated until the result was waited for or dropped.
    #[allow(unsafe_code)] // the one way in for a device's memory to be digested
    unsafe fn digests(self: Arc<Self>, runs: &[(usize, usize)], scratch: Slot) -> Result<Arc<dyn Digests>>;
}

/// Digests of runs that a device is computing. Dropping them waits.
pub trait Digests: Send + Sync {
    /// Returns the digests, in the order of the runs; waits until they have arrived. Several threads may wait.
    ///
    /// # Errors
    /// `Unavailable` when the device is lost; nothing is under way then.
    fn wait(&self) -> Result<&[u64]>;

    /// Milliseconds in which the device computed them; waits until they have arrived. `None` if that is not known.
    fn took_ms(&self) -> Option<f64>;
}

/// 2^64 divided by the golden ratio, odd: the increment of SplitMix64.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Bytes of a word.
const WORD_BYTES: usize = 8;

/// Words that are mixed at a time, so that the processor has multiplications that do not wait for each other.
const LANES: usize = 4;

/// Returns the digest of a run of bytes.
pub fn digest(bytes: &[u8]) -> u64 {
    let blocks = bytes.chunks_exact(LANES * WORD_BYTES);
    let rest = blocks.remainder();
    let (mut sums, mut key) = ([0u64; LANES], GAMMA);
    for block in blocks {
        for (lane, word) in block.chunks_exact(WORD_BYTES).enumerate() {
            let key = key.wrapping_add(GAMMA.wrapping_mul(lane as u64));
            sums[lane] = sums[lane].wrapping_add(mix(word_of(word).wrapping_add(key)));
        }
        key = key.wrapping_add(GAMMA.wrapping_mul(LANES as u64));
    }
    let mut sum = sums.into_iter().fold(0, u64::wrapping_add);
    for word in rest.chunks(WORD_BYTES) {
        sum = sum.wrapping_add(mix(word_of(word).wrapping_add(key)));
        key = key.wrapping_add(GAMMA);
    }
    sum
}

/// Returns up to 8 bytes as a little-endian number.
fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD_BYTES];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Applies the finalizer of SplitMix64.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns some bytes, all different from their neighbours.
    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    /// Computes the definition, word by word.
    fn defined(bytes: &[u8]) -> u64 {
        let words = bytes.chunks(8).map(|word| word.iter().rev().fold(0u64, |number, &byte| number << 8 | byte as u64));
        let of = |(place, word): (usize, u64)| {
            let key = (place as u128 + 1) * 0x9E37_79B9_7F4A_7C15 % (1 << 64);
            u128::from(mix(word.wrapping_add(key as u64)))
        };
        (words.enumerate().map(of).sum::<u128>() % (1 << 64)) as u64
    }

    #[test]
    fn digests_are_what_they_always_were() {
        assert_eq!(digest(&[]), 0);
        // The first output of SplitMix64 with the seed 0, as published with it, and the sum of its first five.
        assert_eq!(digest(&[0; 8]), 0xE220_A839_7B1D_CDAF);
        assert_eq!(digest(&[0; 40]), 0x6B22_E5CF_60D5_6F79);
        assert_eq!(digest(b"shardfast"), 0xC565_1A14_BE30_D31E);
        assert_eq!(digest(&bytes(1000)), 0xDFFF_EEE3_0E16_3E1E);
    }

    #[test]
    fn every_length_is_as_defined() {
        let all = bytes(300);
        for start in 0..9 {
            for end in start..all.len() {
                assert_eq!(digest(&all[start..end]), defined(&all[start..end]), "bytes {start}..{end}");
            }
        }
    }

    #[test]
    fn one_flipped_bit_shows_wherever_it_is() {
        let mut changed = bytes(1003);
        let before = digest(&changed);
        for bit in 0..changed.len() * 8 {
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(digest(&changed), before, "bit {bit}");
            changed[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn changes_that_cancel_in_a_plain_sum_show() {
        let values: Vec<f32> = (0..512).map(|i| 1.0 + i as f32).collect();
        let of = |values: &[f32]| digest(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
        let before = of(&values);
        for (up, down) in [(0, 1), (0, 2), (1, 0), (7, 400), (509, 511)] {
            let mut changed = values.clone();
            changed[up] = f32::from_bits(changed[up].to_bits() + 1);
            changed[down] = f32::from_bits(changed[down].to_bits() - 1);
            assert_ne!(of(&changed), before, "element {up} one up, element {down} one down");
        }
    }

    #[test]
    fn swapped_words_show() {
        let all = bytes(256);
        for first in 0..31 {
            for second in first + 1..32 {
                let mut swapped = all.clone();
                for byte in 0..8 {
                    swapped.swap(first * 8 + byte, second * 8 + byte);
                }
                assert_ne!(digest(&swapped), digest(&all), "words {first} and {second}");
            }
        }
    }

    #[test]
    fn a_tail_is_padded_with_zeros() {
        for whole in [0, 8, 24, 32, 40] {
            for tail in 1..=8 {
                let mut padded = bytes(whole + tail);
                let of_run = digest(&padded);
                padded.resize(whole + 8, 0);
                assert_eq!(of_run, digest(&padded), "{whole} bytes and {tail}");
                padded[whole + tail - 1] ^= 0x80;
                assert_ne!(of_run, digest(&padded), "{whole} bytes and {tail}");
            }
        }
    }
}
