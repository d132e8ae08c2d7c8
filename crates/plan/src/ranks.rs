//! Sets of ranks as ranges.

use std::fmt;
use std::ops::Range;

/// Ascending, distinct ranks as the fewest ranges.
pub fn ranges(ranks: impl IntoIterator<Item = u32>) -> Vec<Range<u32>> {
    let mut out: Vec<Range<u32>> = Vec::new();
    for rank in ranks {
        match out.last_mut() {
            Some(last) if last.end == rank => last.end += 1,
            _ => out.push(rank..rank + 1),
        }
    }
    out
}

/// Writes ascending, distinct ranks: `rank 3`, `ranks 0-2, 7`.
pub(crate) struct Ranks<'a>(pub(crate) &'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (i, range) in ranges(self.0.iter().copied()).into_iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            match range.end - range.start {
                1 => write!(f, "{comma}{}", range.start)?,
                _ => write!(f, "{comma}{}-{}", range.start, range.end - 1)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_ranks_become_ranges() {
        assert_eq!(ranges([]), []);
        assert_eq!(ranges([0, 1, 2, 7, 9, 10]), [0..3, 7..8, 9..11]);
        assert_eq!(Ranks(&[3]).to_string(), "rank 3");
        assert_eq!(Ranks(&[0, 1, 2, 7]).to_string(), "ranks 0-2, 7");
    }
}
