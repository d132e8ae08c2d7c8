//! The messages of `proto/coord.proto`, and what they say.

use std::ops::Range;
use std::time::Duration;

use prost::Message;
use prost::bytes::Bytes;

use crate::node::{Bundle, Downward, Failures, FromChild, FromParent, Part, Report, Upward};
use crate::{Error, Failure};

#[allow(missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod proto {
    tonic::include_proto!("shardfast.coord.v1");
}

use proto::{downward, ended, upward};

/// More ranks than any job has: bounds what a list of ranks may cost.
const RANKS_MAX: u64 = 1 << 24;

/// A message of a link, as bytes.
pub trait Encoded: Sized {
    /// The bytes that travel.
    fn encode(self) -> Vec<u8>;

    /// The message of these bytes. Payloads are parts of them, not copies.
    ///
    /// # Errors
    /// In words, why they are no such message.
    fn decode(bytes: Bytes) -> Result<Self, String>;
}

impl Encoded for Upward {
    fn encode(self) -> Vec<u8> {
        let word = match self.word {
            FromChild::Part(Part { topic, age, left, report: Report { failures, missing, payloads } }) => {
                upward::Word::Part(proto::Part {
                    topic,
                    age_ns: nanoseconds(age),
                    left_ns: nanoseconds(left),
                    payloads: payloads.map(Into::into),
                    failures: (!failures.is_empty()).then(|| failures.into()),
                    missing: missing.into_iter().map(Into::into).collect(),
                })
            }
            FromChild::Lost { rank, cause } => upward::Word::Lost(proto::Lost { rank, cause }),
        };
        proto::Upward { number: self.number, seen: self.seen, word: Some(word) }.encode_to_vec()
    }

    fn decode(bytes: Bytes) -> Result<Upward, String> {
        let proto::Upward { number, seen, word } = proto::Upward::decode(bytes).map_err(|error| error.to_string())?;
        let word = match word.ok_or("a message of an unknown kind")? {
            upward::Word::Part(part) => {
                let report = Report {
                    failures: part.failures.map(Into::into).unwrap_or_default(),
                    missing: runs(part.missing)?,
                    payloads: part.payloads.map(bundle).transpose()?,
                };
                let (age, left) = (Duration::from_nanos(part.age_ns), Duration::from_nanos(part.left_ns));
                FromChild::Part(Part { topic: part.topic, age, left, report })
            }
            upward::Word::Lost(proto::Lost { rank, cause }) => FromChild::Lost { rank, cause },
        };
        Ok(Upward { number, seen, word })
    }
}

impl Encoded for Downward {
    fn encode(self) -> Vec<u8> {
        let word = match self.word {
            FromParent::Close { topic } => downward::Word::Close(topic),
            FromParent::Answer { topic, answers } => {
                downward::Word::Answer(proto::Answer { topic, answers: Some(answers.into()) })
            }
            FromParent::Failed { topic, error } => {
                downward::Word::Ended(proto::Ended { topic, error: Some(error.into()) })
            }
            FromParent::Lost { rank, cause } => downward::Word::Lost(proto::Lost { rank, cause }),
        };
        proto::Downward { number: self.number, word: Some(word) }.encode_to_vec()
    }

    fn decode(bytes: Bytes) -> Result<Downward, String> {
        let proto::Downward { number, word } = proto::Downward::decode(bytes).map_err(|error| error.to_string())?;
        let word = match word.ok_or("a message of an unknown kind")? {
            downward::Word::Close(topic) => FromParent::Close { topic },
            downward::Word::Answer(proto::Answer { topic, answers }) => {
                FromParent::Answer { topic, answers: bundle(answers.ok_or("an answer without answers")?)? }
            }
            downward::Word::Ended(proto::Ended { topic, error: end }) => {
                let error = error(&topic, end.ok_or("a failure of an unknown kind")?)?;
                FromParent::Failed { topic, error }
            }
            downward::Word::Lost(proto::Lost { rank, cause }) => FromParent::Lost { rank, cause },
        };
        Ok(Downward { number, word })
    }
}

impl From<Bundle> for proto::Bundle {
    fn from(Bundle { ranks, distinct, which }: Bundle) -> proto::Bundle {
        proto::Bundle { ranks, distinct, which }
    }
}

fn bundle(proto::Bundle { ranks, distinct, which }: proto::Bundle) -> Result<Bundle, String> {
    Bundle::from_parts(ranks, distinct, which)
}

impl From<Failures> for proto::Failures {
    fn from(Failures { spelled, more }: Failures) -> proto::Failures {
        let spelled = spelled.into_iter().map(|(rank, reason)| proto::Failure { rank, reason }).collect();
        proto::Failures { spelled, more }
    }
}

impl From<proto::Failures> for Failures {
    fn from(proto::Failures { spelled, more }: proto::Failures) -> Failures {
        let mut failures = Failures { more, ..Failures::default() };
        spelled.into_iter().for_each(|failure| failures.add(failure.rank, failure.reason));
        failures
    }
}

impl From<Range<u32>> for proto::Run {
    fn from(ranks: Range<u32>) -> proto::Run {
        proto::Run { first: ranks.start, count: ranks.end - ranks.start }
    }
}

fn runs(runs: Vec<proto::Run>) -> Result<Vec<Range<u32>>, String> {
    let ranks: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
    if ranks > RANKS_MAX {
        return Err(format!("{ranks} missing ranks, the most is {RANKS_MAX}"));
    }
    let run = |proto::Run { first, count }| {
        let end = first.checked_add(count).ok_or_else(|| format!("{count} ranks from rank {first} on"))?;
        Ok(first..end)
    };
    runs.into_iter().map(run).collect()
}

impl From<Error> for ended::Error {
    fn from(error: Error) -> ended::Error {
        match error {
            Error::Failed { failures, more, .. } => {
                let spelled = failures.into_iter().map(|Failure { rank, reason }| proto::Failure { rank, reason });
                ended::Error::Failed(proto::Failures { spelled: spelled.collect(), more })
            }
            Error::Missing { ranks, waited, .. } => {
                let runs = ranks.chunk_by(|a, b| a + 1 == *b);
                let runs = runs.map(|run| proto::Run { first: run[0], count: run.len() as u32 });
                ended::Error::Missing(proto::Missing { ranks: runs.collect(), waited_ns: nanoseconds(waited) })
            }
            Error::Lost { rank, cause } => ended::Error::Lost(proto::Lost { rank, cause }),
            Error::Unavailable(message) => ended::Error::Unavailable(message),
            Error::Invalid(message) => ended::Error::Invalid(message),
        }
    }
}

fn error(topic: &str, error: ended::Error) -> Result<Error, String> {
    let topic = topic.to_owned();
    Ok(match error {
        ended::Error::Failed(failures) => Failures::from(failures).into_error(&topic),
        ended::Error::Missing(proto::Missing { ranks, waited_ns }) => {
            let ranks = runs(ranks)?.into_iter().flatten().collect();
            Error::Missing { topic, ranks, waited: Duration::from_nanos(waited_ns) }
        }
        ended::Error::Lost(proto::Lost { rank, cause }) => Error::Lost { rank, cause },
        ended::Error::Unavailable(message) => Error::Unavailable(message),
        ended::Error::Invalid(message) => Error::Invalid(message),
    })
}

/// 584 years are as good as for ever.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn downward(word: downward::Word) -> Result<Downward, String> {
        Downward::decode(proto::Downward { number: 1, word: Some(word) }.encode_to_vec().into())
    }

    #[test]
    fn every_error_arrives_as_it_was() {
        let topic = || "save".to_owned();
        let failures =
            vec![Failure { rank: 3, reason: "disk full".into() }, Failure { rank: 9, reason: String::new() }];
        for error in [
            Error::Failed { topic: topic(), failures, more: 7 },
            Error::Missing { topic: topic(), ranks: vec![0, 1, 2, 5], waited: Duration::from_millis(1500) },
            Error::Lost { rank: 4, cause: "killed".into() },
            Error::Unavailable("unknown".into()),
            Error::Invalid("wrong".into()),
        ] {
            let sent = Downward { number: 3, word: FromParent::Failed { topic: topic(), error } };
            assert_eq!(Downward::decode(sent.clone().encode().into()), Ok(sent));
        }
    }

    #[test]
    fn what_no_version_of_ours_sends_is_refused_in_words() {
        let bundle = |ranks, which| proto::Bundle { ranks, distinct: vec![Bytes::from_static(b"a")], which };
        let answer = |answers| downward::Word::Answer(proto::Answer { topic: String::new(), answers });
        let missing = |first, count| {
            let missing = proto::Missing { ranks: vec![proto::Run { first, count }], waited_ns: 0 };
            let error = Some(ended::Error::Missing(missing));
            downward::Word::Ended(proto::Ended { topic: String::new(), error })
        };
        for (word, told) in [
            (answer(None), "an answer without answers"),
            (answer(Some(bundle(0, vec![]))), "a bundle of 1 payloads and 0 places that does not suit 0 ranks"),
            (answer(Some(bundle(2, vec![0, 1]))), "a bundle of 1 payloads and 2 places that does not suit 2 ranks"),
            (missing(0, u32::MAX), "4294967295 missing ranks, the most is 16777216"),
            (missing(u32::MAX, 2), "2 ranks from rank 4294967295 on"),
            (downward::Word::Ended(proto::Ended::default()), "a failure of an unknown kind"),
        ] {
            assert_eq!(downward(word).unwrap_err(), told);
        }
        assert_eq!(Downward::decode(Bytes::new()).unwrap_err(), "a message of an unknown kind");
        assert_eq!(Upward::decode(Bytes::new()).unwrap_err(), "a message of an unknown kind");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = Upward::decode(bytes.clone().into());
            let _ = Downward::decode(bytes.into());
        }
    }
}
