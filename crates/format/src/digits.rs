//! Reads and writes the one spelling of numbers that the format accepts: lowercase hexadecimal, two digits per byte,
//! and decimal without sign, leading zeros or spaces.

/// Returns the hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for &byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            out.push(char::from(b"0123456789abcdef"[usize::from(nibble)]));
        }
    }
    out
}

/// Parses exactly 16 hexadecimal digits.
pub(crate) fn hex_u64(digits: &[u8]) -> Option<u64> {
    if digits.len() != 16 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| Some(value << 4 | u64::from(nibble(digit)?)))
}

/// Parses exactly `2 * N` hexadecimal digits into bytes.
pub(crate) fn hex_bytes<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    if digits.len() != 2 * N {
        return None;
    }
    let mut out = [0; N];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(out)
}

/// Parses decimal digits.
pub(crate) fn decimal_u64(digits: &str) -> Option<u64> {
    let value: u64 = digits.parse().ok()?;
    (value.to_string() == digits).then_some(value)
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}
