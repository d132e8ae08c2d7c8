//! Damages files slightly, by seed.

/// Random numbers that are the same on every run (xorshift64*; Vigna, 2016).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns a number that is unusual as a length, count or offset.
    fn extreme(&mut self) -> u64 {
        let edge = 1u64.checked_shl(self.below(66) as u32).unwrap_or(0);
        edge.wrapping_add(self.next() % 5).wrapping_sub(2)
    }
}

/// Returns `seed` with one to four changes; `other` is a well-formed file to take bytes from.
pub(crate) fn mutate(dice: &mut Dice, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=dice.below(4) {
        if bytes.is_empty() {
            return bytes;
        }
        // Most of a data file is padding and data: strike its head as often as all of it.
        let reach = if dice.below(2) == 0 { bytes.len() } else { bytes.len().min(600) };
        let at = dice.below(reach);
        match dice.below(10) {
            0 => bytes[at] ^= 1 << dice.below(8),
            1 => bytes[at] = dice.next() as u8,
            2 => bytes.truncate(at),
            3 => overwrite(&mut bytes, at, &dice.extreme().to_le_bytes()),
            4 => overwrite(&mut bytes, at, &dice.extreme().to_be_bytes()),
            5 => overwrite(&mut bytes, at / 8 * 8, &dice.extreme().to_le_bytes()),
            6 => renumber(&mut bytes, at, dice.extreme()),
            7 => {
                let end = (at + 1 + dice.below(16)).min(bytes.len());
                bytes.drain(at..end);
            }
            8 => {
                let end = (at + 1 + dice.below(64)).min(bytes.len());
                let again = bytes[at..end].repeat(1 + dice.below(4));
                bytes.splice(at..at, again);
            }
            _ => {
                let from = dice.below(other.len());
                let end = (from + 1 + dice.below(64)).min(other.len());
                bytes.splice(at..at, other[from..end].iter().copied());
            }
        }
    }
    bytes
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    let end = (at + with.len()).min(bytes.len());
    bytes[at..end].copy_from_slice(&with[..end - at]);
}

/// Replaces the next decimal number by another one.
fn renumber(bytes: &mut Vec<u8>, at: usize, number: u64) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|skip| at + skip) else { return };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    bytes.splice(start..start + digits, number.to_string().into_bytes());
}
