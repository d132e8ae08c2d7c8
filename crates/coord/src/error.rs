//! Defines the errors with which a round of agreement can end.

use std::fmt::{self, Write};
use std::time::Duration;

/// Number of failures in a message; the others are counted, and listed in the error itself.
const FAILURES_SHOWN_MAX: usize = 16;

/// Bytes of a contribution that a failed round shows to all ranks.
pub const SAMPLE_BYTES: usize = 16;

/// Bytes of a contribution that rank 0 gets if the round fails because others are missing.
pub const SHOWN_BYTES: usize = 512;

/// Prefix of the reason of a rank that did not contribute, where others have failed.
pub const NOT_CONTRIBUTED: &str = "it did not contribute within";

/// Reason why a rank got no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Ranks contributed a failure, or rank 0's decision failed.
    #[error("agreement on {topic:?} failed: {}", Failures(.failures, *.more))]
    Failed {
        /// Topic of the round.
        topic: String,
        /// Ranks that failed, ascending; the lowest, if there are many.
        failures: Vec<Failure>,
        /// Number of further ranks that failed.
        more: u32,
    },
    /// Ranks did not contribute in time.
    #[error("agreement on {topic:?} failed: {} did not contribute within {waited:?}{}", Ranks(.ranks), Silent(.silent))]
    Missing {
        /// Topic of the round.
        topic: String,
        /// Ranks that did not contribute, ascending.
        ranks: Vec<u32>,
        /// Ranks of `ranks` that did not answer a ping, ascending: their processes are stopped or cannot be reached.
        /// The state of ranks below them is unknown.
        silent: Vec<u32>,
        /// Time for which the round had been open.
        waited: Duration,
        /// First [`SAMPLE_BYTES`] of the first contribution, in the order of the ranks, that is not empty.
        sample: Vec<u8>,
    },
    /// Loss of a rank, and with it of every agreement that needs it.
    #[error("rank {rank} is lost: {cause}")]
    Lost {
        /// First rank that was lost.
        rank: u32,
        /// Cause of the loss.
        cause: String,
    },
    /// Rank 0 or a rank on the way to it cannot be reached or does not answer; the outcome is unknown.
    #[error("{0}")]
    Unavailable(String),
    /// The call is wrong, or refused.
    #[error("{0}")]
    Invalid(String),
}

/// Reason why one rank could not do its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Rank that failed.
    pub rank: u32,
    /// Reason that it gave, at most 16 KiB.
    pub reason: String,
}

struct Failures<'a>(&'a [Failure], u32);

impl fmt::Display for Failures<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, failure) in self.0.iter().take(FAILURES_SHOWN_MAX).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}rank {}: {}", failure.rank, failure.reason)?;
        }
        match self.0.len().saturating_sub(FAILURES_SHOWN_MAX) + self.1 as usize {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// Formats ascending ranks, runs of them as `first-last`, so that thousands of consecutive ranks take one short line.
pub struct Ranks<'a>(pub &'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        for (index, run) in runs.enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{}", run[0])?;
            if run.len() > 1 {
                f.write_char('-')?;
                write!(f, "{}", run[run.len() - 1])?;
            }
        }
        Ok(())
    }
}

/// Formats as nothing if there are no ranks.
struct Silent<'a>(&'a [u32]);

impl fmt::Display for Silent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            0 => Ok(()),
            1 => write!(f, "; {} does not answer", Ranks(self.0)),
            _ => write!(f, "; {} do not answer", Ranks(self.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_topic_every_rank_and_every_reason() {
        let failure = |rank| Failure { rank, reason: format!("disk {rank} is full") };
        let failed =
            |count, more| Error::Failed { topic: "save/7".into(), failures: (1..=count).map(failure).collect(), more };
        assert_eq!(
            failed(2, 0).to_string(),
            r#"agreement on "save/7" failed: rank 1: disk 1 is full; rank 2: disk 2 is full"#
        );
        assert!(failed(20, 0).to_string().ends_with("; rank 16: disk 16 is full; and 4 more"));
        assert!(failed(1, 7).to_string().ends_with("rank 1: disk 1 is full; and 7 more"));

        let missing = |ranks: &[u32], silent: &[u32]| {
            let (ranks, silent, waited) = (ranks.to_vec(), silent.to_vec(), Duration::from_millis(1500));
            Error::Missing { topic: "save/7".into(), ranks, silent, waited, sample: Vec::new() }.to_string()
        };
        assert_eq!(missing(&[3], &[]), r#"agreement on "save/7" failed: rank 3 did not contribute within 1.5s"#);
        assert!(
            missing(&[0, 3, 4, 5, u32::MAX], &[3])
                .ends_with(": ranks 0, 3-5, 4294967295 did not contribute within 1.5s; rank 3 does not answer")
        );
        assert!(missing(&[3, 4, 5], &[3, 5]).ends_with("; ranks 3, 5 do not answer"));
        let lost = Error::Lost { rank: 2, cause: "its connection broke".into() };
        assert_eq!(lost.to_string(), "rank 2 is lost: its connection broke");
    }
}
