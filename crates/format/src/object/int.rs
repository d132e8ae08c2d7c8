//! Integers of any size.

/// An integer. [`Int::new`] and decoding yield one spelling each: `Big` only beyond `i64`, without leading zeros.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Int {
    /// An integer within `i64`.
    Small(i64),
    /// An integer beyond `i64`.
    Big {
        /// Sign: `true` below zero.
        negative: bool,
        /// Absolute value, big-endian.
        magnitude_be: Vec<u8>,
    },
}

impl Int {
    /// Makes the integer of a sign and an absolute value.
    pub fn new(negative: bool, magnitude_be: &[u8]) -> Int {
        let magnitude = stripped(magnitude_be);
        if magnitude.len() <= 8 {
            let value = i128::from(u64_of(magnitude));
            if let Ok(small) = i64::try_from(if negative { -value } else { value }) {
                return Int::Small(small);
            }
        }
        Int::Big { negative, magnitude_be: magnitude.to_vec() }
    }

    /// Makes the integer of a CBOR sign and argument: `n`, or `-1 - n` when negative.
    pub(super) fn of_cbor(negative: bool, n_be: &[u8]) -> Int {
        if !negative {
            return Int::new(false, n_be);
        }
        let mut magnitude = Vec::with_capacity(n_be.len() + 1);
        magnitude.push(0);
        magnitude.extend_from_slice(n_be);
        for byte in magnitude.iter_mut().rev() {
            *byte = byte.wrapping_add(1);
            if *byte != 0 {
                break;
            }
        }
        Int::new(true, &magnitude)
    }

    /// Returns sign and CBOR argument, the latter without leading zeros.
    pub(super) fn to_cbor(&self) -> (bool, Vec<u8>) {
        let (negative, mut magnitude) = match self {
            Int::Small(value) => (*value < 0, value.unsigned_abs().to_be_bytes().to_vec()),
            Int::Big { negative, magnitude_be } => (*negative, magnitude_be.clone()),
        };
        let negative = negative && magnitude.iter().any(|&byte| byte != 0);
        if negative {
            for byte in magnitude.iter_mut().rev() {
                *byte = byte.wrapping_sub(1);
                if *byte != 0xff {
                    break;
                }
            }
        }
        (negative, stripped(&magnitude).to_vec())
    }

    /// Returns whether the integer is below zero.
    pub fn is_negative(&self) -> bool {
        match self {
            Int::Small(value) => *value < 0,
            Int::Big { negative, .. } => *negative,
        }
    }
}

impl From<i64> for Int {
    fn from(value: i64) -> Int {
        Int::Small(value)
    }
}

/// Returns the number that at most eight big-endian bytes hold.
pub(super) fn u64_of(bytes_be: &[u8]) -> u64 {
    bytes_be.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn stripped(bytes_be: &[u8]) -> &[u8] {
    let zeros = bytes_be.iter().take_while(|&&byte| byte == 0).count();
    &bytes_be[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_integer_has_one_spelling() {
        assert_eq!(Int::new(false, &[]), Int::Small(0));
        assert_eq!(Int::new(true, &[0, 0]), Int::Small(0));
        assert_eq!(Int::new(false, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 7]), Int::Small(7));
        assert_eq!(Int::new(false, &i64::MAX.to_be_bytes()), Int::Small(i64::MAX));
        assert_eq!(Int::new(true, &(1u64 << 63).to_be_bytes()), Int::Small(i64::MIN));
        let big = Int::new(false, &(1u64 << 63).to_be_bytes());
        assert_eq!(big, Int::Big { negative: false, magnitude_be: (1u64 << 63).to_be_bytes().to_vec() });
    }

    #[test]
    fn cbor_arguments_go_both_ways() {
        let powers = [0i128, 1, 255, 256, i64::MAX as i128, 1 << 63, (1 << 64) - 1, 1 << 64, i128::MAX];
        for value in powers.iter().flat_map(|&p| [p - 1, p, -p, 1 - p, -1 - p]) {
            let int = Int::new(value < 0, &value.unsigned_abs().to_be_bytes());
            assert_eq!(int.is_negative(), value < 0, "{value}");
            let (negative, n) = int.to_cbor();
            assert_eq!(negative, value < 0, "{value}");
            let argument = n.iter().fold(0u128, |n, &byte| n << 8 | u128::from(byte));
            assert_eq!(argument, if negative { (-1 - value) as u128 } else { value as u128 }, "{value}");
            assert_eq!(Int::of_cbor(negative, &n), int, "{value}");
        }
    }
}
