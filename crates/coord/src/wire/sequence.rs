//! Encodes many small numbers in few bytes: a base that is subtracted from all of them, and the remainders in runs and
//! bit-packed groups, as in Parquet ("Run Length Encoding / Bit-Packing Hybrid").
//!
//! The base comes first, as a varint; then one byte, the width in bits of the largest remainder; then pieces, each
//! after a varint. An even varint is twice the length of a run: the repeated remainder follows, in as few whole bytes
//! as the width takes, little-endian. An odd one is twice a number of groups, plus one: each group is 8 remainders of
//! the width in bits, the first in the lowest bits, and the last group is filled with zeros. At width 0 there are only
//! runs.

/// Number of remainders in a group.
const GROUP: usize = 8;

/// Shortest run among groups: a shorter one costs more than it saves.
const RUN_MIN: usize = 16;

pub(super) fn encode(numbers: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let Some(&base) = numbers.iter().min() else { return bytes };
    let rests: Vec<u32> = numbers.iter().map(|number| number - base).collect();
    let width = rests.iter().map(|rest| u32::BITS - rest.leading_zeros()).max().unwrap_or(0);
    put_varint(&mut bytes, base.into());
    bytes.push(width as u8);
    let (mut packed_from, mut at) = (0, 0);
    while at < rests.len() {
        let run = rests[at..].iter().take_while(|rest| **rest == rests[at]).count();
        // Groups are full, but for the last one.
        let filling = (at - packed_from).next_multiple_of(GROUP) - (at - packed_from);
        if width == 0 || run >= filling + RUN_MIN {
            put_groups(&mut bytes, &rests[packed_from..at + filling], width);
            put_varint(&mut bytes, ((run - filling) as u64) << 1);
            bytes.extend_from_slice(&rests[at].to_le_bytes()[..bytes_of(width)]);
            packed_from = at + run;
        }
        at += run;
    }
    put_groups(&mut bytes, &rests[packed_from..], width);
    bytes
}

/// Decodes `count` numbers, whose memory the caller has found acceptable.
///
/// # Errors
/// A message that says what is invalid.
pub(super) fn decode(mut bytes: &[u8], count: usize) -> Result<Vec<u32>, String> {
    let mut numbers = Vec::new();
    if count == 0 && bytes.is_empty() {
        return Ok(numbers);
    }
    let base = take_varint(&mut bytes)?;
    let width = take(&mut bytes, 1)?[0];
    if u32::from(width) > u32::BITS {
        return Err(format!("numbers of {width} bits, the most is {}", u32::BITS));
    }
    let number = |rest: u64| u32::try_from(base.saturating_add(rest)).map_err(|_| "a number beyond 32 bits".to_owned());
    let width = u32::from(width);
    while numbers.len() < count {
        let (piece, left) = (take_varint(&mut bytes)?, count - numbers.len());
        let length = usize::try_from(piece >> 1).unwrap_or(usize::MAX);
        if piece & 1 == 0 {
            if length == 0 || length > left {
                return Err(format!("a run of {length} where {left} numbers are left"));
            }
            let mut rest = [0; 8];
            rest[..bytes_of(width)].copy_from_slice(take(&mut bytes, bytes_of(width))?);
            numbers.resize(numbers.len() + length, number(u64::from_le_bytes(rest))?);
        } else {
            if length == 0 || length > left.div_ceil(GROUP) || width == 0 {
                return Err(format!("{length} groups of {width} bits where {left} numbers are left"));
            }
            for group in take(&mut bytes, length * width as usize)?.chunks(width as usize) {
                for index in 0..GROUP.min(count - numbers.len()) {
                    numbers.push(number(unpacked(group, index, width))?);
                }
            }
        }
    }
    if !bytes.is_empty() {
        return Err(format!("{} bytes behind {count} numbers", bytes.len()));
    }
    Ok(numbers)
}

fn bytes_of(width: u32) -> usize {
    width.div_ceil(8) as usize
}

fn put_groups(bytes: &mut Vec<u8>, rests: &[u32], width: u32) {
    if rests.is_empty() {
        return;
    }
    put_varint(bytes, (rests.len().div_ceil(GROUP) as u64) << 1 | 1);
    for group in rests.chunks(GROUP) {
        let mut packed = [0; u32::BITS as usize];
        for (index, rest) in group.iter().enumerate() {
            for bit in (0..width).filter(|bit| rest >> bit & 1 == 1) {
                let at = index * width as usize + bit as usize;
                packed[at / 8] |= 1 << (at % 8);
            }
        }
        bytes.extend_from_slice(&packed[..width as usize]);
    }
}

/// Returns the `index`-th remainder of a group.
fn unpacked(group: &[u8], index: usize, width: u32) -> u64 {
    (0..width).fold(0, |rest, bit| {
        let at = index * width as usize + bit as usize;
        rest | u64::from(group[at / 8] >> (at % 8) & 1) << bit
    })
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err("an unterminated number".to_owned())
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (taken, rest) = bytes.split_at_checked(count).ok_or_else(|| "truncated numbers".to_owned())?;
    *bytes = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_numbers_cost_nothing_each_and_similar_ones_few_bits() {
        let bytes = |numbers: &[u32]| {
            let bytes = encode(numbers);
            assert_eq!(decode(&bytes, numbers.len()), Ok(numbers.to_vec()));
            bytes.len()
        };
        assert_eq!(bytes(&[]), 0);
        assert_eq!(bytes(&[7; 100_000]), 5);
        let two: Vec<u32> = (0..100_000).map(|i| 19 + u32::from(i % 3 == 0)).collect();
        assert!(bytes(&two) <= 100_000 / 8 + 8);
        let blocks: Vec<u32> = (0..100_000).map(|i| i / 1000).collect();
        assert!(bytes(&blocks) <= 100 * 8, "{}", bytes(&blocks));
        let classes: Vec<u32> = (0..100_000).map(|i| i % 8 + i / 6250 * 8).collect();
        assert!(bytes(&classes) <= 100_000, "{}", bytes(&classes));
    }

    #[test]
    fn what_is_not_that_many_numbers_is_refused_in_words() {
        for (bytes, count, expected) in [
            (&[][..], 1, "truncated numbers"),
            (&[0], 1, "truncated numbers"),
            (&[0, 33], 1, "numbers of 33 bits, the most is 32"),
            (&[0x80; 11], 1, "an unterminated number"),
            (&[0, 1, 4, 1], 1, "a run of 2 where 1 numbers are left"),
            (&[0, 1, 0], 1, "a run of 0 where 1 numbers are left"),
            (&[0, 1, 5, 0, 0], 8, "2 groups of 1 bits where 8 numbers are left"),
            (&[0, 1, 1], 8, "0 groups of 1 bits where 8 numbers are left"),
            (
                &[0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
                8,
                "groups of 0 bits where 8 numbers are left",
            ),
            (&[0, 8, 3, 1, 2], 8, "truncated numbers"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 2], 1, "a number beyond 32 bits"),
            (&[0, 0, 2, 9], 1, "1 bytes behind 1 numbers"),
        ] {
            let refused = decode(bytes, count).unwrap_err();
            assert!(refused.ends_with(expected), "{bytes:?}: {refused}");
        }
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(
            runs in prop::collection::vec((any::<u32>(), 0_u32..32, 0_usize..40), 0..20),
        ) {
            let numbers: Vec<u32> =
                runs.iter().flat_map(|&(number, shift, count)| vec![number >> shift; count]).collect();
            prop_assert_eq!(decode(&encode(&numbers), numbers.len()), Ok(numbers));
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), count in 0_usize..1000) {
            if let Ok(numbers) = decode(&bytes, count) {
                prop_assert_eq!(numbers.len(), count);
            }
        }
    }
}
