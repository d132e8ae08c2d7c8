//! What a round can end with when it does not end with an answer.

use std::fmt::{self, Write};
use std::time::Duration;

/// How many failures a message spells out; the rest is counted, and listed in the error itself.
const FAILURES_SHOWN_MAX: usize = 16;

/// Why a rank got no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Ranks contributed a failure, or rank 0's decision failed.
    #[error("agreement on {topic:?} failed: {}", Failures(.failures, *.more))]
    Failed {
        /// What was to be agreed on.
        topic: String,
        /// The ranks that failed, ascending: the lowest, if there are many.
        failures: Vec<Failure>,
        /// How many ranks more failed.
        more: u32,
    },
    /// Ranks did not contribute in time.
    #[error("agreement on {topic:?} failed: no word from {} within {waited:?}", Ranks(.ranks))]
    Missing {
        /// What was to be agreed on.
        topic: String,
        /// The ranks that did not contribute, ascending.
        ranks: Vec<u32>,
        /// How long the round had been open.
        waited: Duration,
    },
    /// A rank is gone, and with it every agreement that needs it.
    #[error("rank {rank} is gone: {cause}")]
    Lost {
        /// The first rank that went.
        rank: u32,
        /// How it went.
        cause: String,
    },
    /// Rank 0 cannot be reached or does not answer; nothing is known about the outcome.
    #[error("{0}")]
    Unavailable(String),
    /// The call is wrong, or refused.
    #[error("{0}")]
    Invalid(String),
}

/// One rank's reason why it could not do its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank that failed.
    pub rank: u32,
    /// Its own words, at most 16 KiB of them.
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

/// Ascending ranks, runs of them as `first-last`: thousands of ranks that share a fate stay one short line.
struct Ranks<'a>(&'a [u32]);

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

        let missing = |ranks: &[u32]| {
            let waited = Duration::from_millis(1500);
            Error::Missing { topic: "save/7".into(), ranks: ranks.to_vec(), waited }.to_string()
        };
        assert_eq!(missing(&[3]), r#"agreement on "save/7" failed: no word from rank 3 within 1.5s"#);
        assert_eq!(
            missing(&[0, 3, 4, 5, 9, u32::MAX]),
            r#"agreement on "save/7" failed: no word from ranks 0, 3-5, 9, 4294967295 within 1.5s"#
        );
        let lost = Error::Lost { rank: 2, cause: "its connection broke".into() };
        assert_eq!(lost.to_string(), "rank 2 is gone: its connection broke");
    }
}
