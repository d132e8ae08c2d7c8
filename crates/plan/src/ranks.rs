//! Represents sets of ranks, compactly for those of meshes.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of ranks. Every n-th rank of a range, as in a mesh, takes one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Vec<Run>")]
pub struct RankSet {
    /// Runs, ascending and as [`RankSet::new`] makes them: equal sets have equal runs.
    runs: Vec<Run>,
}

/// A run of `count` ranks: `first`, `first + step`, ….
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
struct Run {
    first: u32,
    count: u32,
    /// Distance of neighbours; 1 for a single rank.
    step: u32,
}

impl Run {
    fn last(&self) -> u32 {
        self.first + (self.count - 1) * self.step
    }
}

impl RankSet {
    /// Makes the set of `ranks`, in any order; duplicates count once.
    pub fn new(ranks: impl IntoIterator<Item = u32>) -> RankSet {
        let mut ranks: Vec<u32> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut runs: Vec<Run> = Vec::new();
        for rank in ranks {
            match runs.last_mut() {
                Some(run) if run.count == 1 => (run.count, run.step) = (2, rank - run.first),
                Some(run) if run.last().checked_add(run.step) == Some(rank) => run.count += 1,
                _ => runs.push(Run { first: rank, count: 1, step: 1 }),
            }
        }
        RankSet { runs }
    }

    /// Returns the number of ranks.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// Returns whether there is no rank.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the highest rank.
    pub fn last(&self) -> Option<u32> {
        self.runs.last().map(Run::last)
    }

    /// Returns whether `rank` is in the set.
    pub fn contains(&self, rank: u32) -> bool {
        let run = self.runs.partition_point(|run| run.first <= rank);
        let Some(run) = run.checked_sub(1).map(|run| &self.runs[run]) else { return false };
        rank <= run.last() && (rank - run.first).is_multiple_of(run.step)
    }

    /// Returns the ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| (0..run.count).map(|i| run.first + i * run.step))
    }
}

impl TryFrom<Vec<Run>> for RankSet {
    type Error = String;

    /// Accepts only runs as [`RankSet::new`] makes them, since another rank sent them.
    fn try_from(runs: Vec<Run>) -> Result<RankSet, String> {
        let mut before: Option<Run> = None;
        for &run in &runs {
            let Run { first, count, step } = run;
            let last = u64::from(count).checked_sub(1).map(|steps| u64::from(first) + steps * u64::from(step));
            let ends = last.is_some_and(|last| last <= u64::from(u32::MAX));
            let plain = if count == 1 { step == 1 } else { step > 0 };
            let apart = before.is_none_or(|before| {
                before.count > 1 && first > before.last() && before.last().checked_add(before.step) != Some(first)
            });
            if !ends || !plain || !apart {
                return Err(format!("a set of ranks: the run of {count} from {first} by {step} is not canonical"));
            }
            before = Some(run);
        }
        Ok(RankSet { runs })
    }
}

/// Formats as `rank 3`, `ranks 0-2, 7`, `ranks 0-56 by 8`.
impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.len() == 1 { "rank " } else { "ranks " })?;
        for (i, run) in self.runs.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            let (first, last) = (run.first, run.last());
            match (run.count, run.step) {
                (1, _) => write!(f, "{comma}{first}")?,
                (_, 1) => write!(f, "{comma}{first}-{last}")?,
                (2, _) => write!(f, "{comma}{first}, {last}")?,
                (_, step) => write!(f, "{comma}{first}-{last} by {step}")?,
            }
        }
        Ok(())
    }
}

/// Combines ascending, distinct ranks into the fewest ranges.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_ranks_become_ranges() {
        assert_eq!(ranges([]), []);
        assert_eq!(ranges([0, 1, 2, 7, 9, 10]), [0..3, 7..8, 9..11]);
    }

    #[test]
    fn sets_are_what_they_were_made_of() {
        let cases: [&[u32]; 8] = [
            &[],
            &[3],
            &[0, 1, 2, 7],
            &[0, 8, 16, 24],
            &[0, 1, 8, 9],
            &[0, 5, 6, 7, 8],
            &[1, 2, 4, 8, 16],
            &[0, u32::MAX - 1, u32::MAX],
        ];
        for ranks in cases {
            let set = RankSet::new(ranks.iter().rev().chain(ranks).copied());
            assert_eq!(set.iter().collect::<Vec<_>>(), ranks);
            assert_eq!((set.len(), set.is_empty()), (ranks.len() as u64, ranks.is_empty()));
            assert_eq!(set.last(), ranks.last().copied());
            assert!((0..40).chain(u32::MAX - 9..=u32::MAX).all(|rank| set.contains(rank) == ranks.contains(&rank)));
            assert_eq!(RankSet::try_from(set.runs.clone()), Ok(set));
        }
        assert_eq!(RankSet::new((0..70).map(|i| 3 + 8 * i)).runs.len(), 1);
    }

    #[test]
    fn sets_are_written_shortly() {
        assert_eq!(RankSet::new([3]).to_string(), "rank 3");
        assert_eq!(RankSet::new([0, 1, 2, 7]).to_string(), "ranks 0-2, 7");
        assert_eq!(RankSet::new([0, 2]).to_string(), "ranks 0, 2");
        assert_eq!(RankSet::new([0, 8, 16, 17]).to_string(), "ranks 0-16 by 8, 17");
    }

    #[test]
    fn only_one_spelling_of_a_set_is_read() {
        let run = |first, count, step| Run { first, count, step };
        let foreign = [
            vec![run(0, 0, 1)],
            vec![run(0, 1, 2)],
            vec![run(0, 2, 0)],
            vec![run(1, u32::MAX, 2)],
            vec![run(0, 1, 1), run(1, 1, 1)],
            vec![run(0, 2, 1), run(2, 1, 1)],
            vec![run(0, 3, 4), run(6, 1, 1)],
            vec![run(8, 2, 1), run(0, 2, 1)],
        ];
        for runs in foreign {
            assert!(RankSet::try_from(runs.clone()).is_err(), "{runs:?}");
        }
    }
}
