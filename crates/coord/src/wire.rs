//! Encodes and decodes the messages of `proto/coord.proto`.

mod sequence;

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

/// Limit on the ranks in a list, which bounds its memory: more than any job has.
const RANKS_MAX: u64 = 1 << 24;

/// A message of a link that can be encoded as bytes.
pub trait Encoded: Sized {
    /// Returns whether the message overtakes all others: it has no number and is short.
    fn is_urgent(&self) -> bool;

    /// Returns the answer to a ping.
    fn lives() -> Self;

    /// Encodes the message.
    fn encode(self) -> Vec<u8>;

    /// Decodes a message. Its payloads are slices of `bytes`, not copies.
    ///
    /// # Errors
    /// A message that says what is invalid.
    fn decode(bytes: Bytes) -> Result<Self, String>;
}

impl Encoded for Upward {
    fn is_urgent(&self) -> bool {
        matches!(self.word, FromChild::Asks { .. } | FromChild::Lives)
    }

    fn lives() -> Upward {
        Upward::LIVES
    }

    fn encode(self) -> Vec<u8> {
        let word = match self.word {
            FromChild::Part(Part { topic, age, left, report: Report { failures, missing, silent, payloads } }) => {
                upward::Word::Part(proto::Part {
                    topic,
                    age_ns: nanoseconds(age),
                    left_ns: nanoseconds(left),
                    payloads: payloads.map(Into::into),
                    failures: (!failures.is_empty()).then(|| failures.into()),
                    missing: missing.into_iter().map(Into::into).collect(),
                    silent,
                })
            }
            FromChild::Lost { rank, cause } => upward::Word::Lost(proto::Lost { rank, cause }),
            FromChild::Overdue { topic } => upward::Word::Overdue(topic),
            FromChild::Asks { interval } => upward::Word::Asks(interval.into()),
            FromChild::Lives => upward::Word::Lives(proto::Lives {}),
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
                    silent: part.silent,
                    payloads: part.payloads.map(bundle).transpose()?,
                };
                let (age, left) = (Duration::from_nanos(part.age_ns), Duration::from_nanos(part.left_ns));
                FromChild::Part(Part { topic: part.topic, age, left, report })
            }
            upward::Word::Lost(proto::Lost { rank, cause }) => FromChild::Lost { rank, cause },
            upward::Word::Overdue(topic) => FromChild::Overdue { topic },
            upward::Word::Asks(asks) => FromChild::Asks { interval: asks.into() },
            upward::Word::Lives(proto::Lives {}) => FromChild::Lives,
        };
        Ok(Upward { number, seen, word })
    }
}

impl Encoded for Downward {
    fn is_urgent(&self) -> bool {
        matches!(self.word, FromParent::Asks { .. } | FromParent::Lives)
    }

    fn lives() -> Downward {
        Downward::LIVES
    }

    fn encode(self) -> Vec<u8> {
        let word = match self.word {
            FromParent::Close { topic } => downward::Word::Close(topic),
            FromParent::Answer { topic, answers } => {
                downward::Word::Answer(proto::Answer { topic, answers: Some(answers.into()) })
            }
            FromParent::Failed { topic, error } => {
                downward::Word::Ended(proto::Ended { topic, error: Some(error.into()) })
            }
            FromParent::OutcomeUnknown { topic, rank } => {
                downward::Word::OutcomeUnknown(proto::OutcomeUnknown { topic, rank })
            }
            FromParent::Lost { rank, cause } => downward::Word::Lost(proto::Lost { rank, cause }),
            FromParent::Asks { interval } => downward::Word::Asks(interval.into()),
            FromParent::Lives => downward::Word::Lives(proto::Lives {}),
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
            downward::Word::OutcomeUnknown(proto::OutcomeUnknown { topic, rank }) => {
                FromParent::OutcomeUnknown { topic, rank }
            }
            downward::Word::Lost(proto::Lost { rank, cause }) => FromParent::Lost { rank, cause },
            downward::Word::Asks(asks) => FromParent::Asks { interval: asks.into() },
            downward::Word::Lives(proto::Lives {}) => FromParent::Lives,
        };
        Ok(Downward { number, word })
    }
}

impl From<Duration> for proto::Asks {
    fn from(interval: Duration) -> proto::Asks {
        proto::Asks { interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX) }
    }
}

impl From<proto::Asks> for Duration {
    fn from(asks: proto::Asks) -> Duration {
        Duration::from_millis(asks.interval_ms.into())
    }
}

impl From<Bundle> for proto::Bundle {
    fn from(Bundle { ranks, distinct, which }: Bundle) -> proto::Bundle {
        let lengths: Vec<u32> = distinct.iter().map(|payload| payload.len() as u32).collect();
        let payloads = match &distinct[..] {
            [one] => one.clone(),
            many => many.concat().into(),
        };
        let (lengths, which) = (sequence::encode(&lengths).into(), sequence::encode(&which).into());
        proto::Bundle { ranks, distinct: distinct.len() as u32, lengths, payloads, which }
    }
}

fn bundle(bundle: proto::Bundle) -> Result<Bundle, String> {
    let proto::Bundle { ranks, distinct, lengths, mut payloads, which } = bundle;
    if u64::from(ranks) > RANKS_MAX {
        return Err(format!("payloads of {ranks} ranks, the most is {RANKS_MAX}"));
    }
    // At most one of several different payloads is empty, so the bytes at hand bound the memory.
    if distinct as usize > payloads.len() + 1 {
        return Err(format!("{distinct} different payloads in {} bytes", payloads.len()));
    }
    let lengths = sequence::decode(&lengths, distinct as usize).map_err(|error| format!("lengths: {error}"))?;
    let bytes: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    if bytes != payloads.len() as u64 {
        return Err(format!("payloads of {bytes} bytes in {}", payloads.len()));
    }
    let distinct = lengths.into_iter().map(|length| payloads.split_to(length as usize)).collect();
    let places = if which.is_empty() { 0 } else { ranks as usize };
    let which = sequence::decode(&which, places).map_err(|error| format!("places: {error}"))?;
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
            Error::Missing { ranks, silent, waited, sample, .. } => {
                let runs = ranks.chunk_by(|a, b| a + 1 == *b);
                let runs = runs.map(|run| proto::Run { first: run[0], count: run.len() as u32 });
                let (ranks, waited_ns) = (runs.collect(), nanoseconds(waited));
                ended::Error::Missing(proto::Missing { ranks, waited_ns, silent, sample: sample.into() })
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
        ended::Error::Missing(proto::Missing { ranks, waited_ns, silent, sample }) => {
            let ranks = runs(ranks)?.into_iter().flatten().collect();
            let waited = Duration::from_nanos(waited_ns);
            Error::Missing { topic, ranks, silent, waited, sample: sample.into() }
        }
        ended::Error::Lost(proto::Lost { rank, cause }) => Error::Lost { rank, cause },
        ended::Error::Unavailable(message) => Error::Unavailable(message),
        ended::Error::Invalid(message) => Error::Invalid(message),
    })
}

/// Converts to nanoseconds, at most 584 years.
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
            Error::Missing {
                topic: topic(),
                ranks: vec![0, 1, 2, 5],
                silent: vec![1],
                waited: Duration::from_millis(1500),
                sample: b"save".to_vec(),
            },
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
        let bundle = |ranks, distinct, lengths: &[u32], which: &[u32]| {
            let (lengths, which) = (sequence::encode(lengths).into(), sequence::encode(which).into());
            Some(proto::Bundle { ranks, distinct, lengths, payloads: Bytes::from_static(b"abc"), which })
        };
        let answer = |answers| downward::Word::Answer(proto::Answer { topic: String::new(), answers });
        let missing = |first, count| {
            let missing = proto::Missing { ranks: vec![proto::Run { first, count }], ..Default::default() };
            let error = Some(ended::Error::Missing(missing));
            downward::Word::Ended(proto::Ended { topic: String::new(), error })
        };
        for (word, expected) in [
            (answer(None), "an answer without answers"),
            (answer(bundle(0, 1, &[3], &[])), "a bundle of 1 payloads and 0 places that does not suit 0 ranks"),
            (answer(bundle(3, 2, &[1, 2], &[])), "a bundle of 2 payloads and 0 places that does not suit 3 ranks"),
            (
                answer(bundle(3, 2, &[1, 2], &[0, 1, 2])),
                "a bundle of 2 payloads and 3 places that does not suit 3 ranks",
            ),
            (answer(bundle(3, 2, &[1, 2], &[1; 4])), "places: a run of 4 where 3 numbers are left"),
            (answer(bundle(2, 2, &[1, 1], &[])), "payloads of 2 bytes in 3"),
            (answer(bundle(2, 2, &[3], &[])), "lengths: truncated numbers"),
            (answer(bundle(9, 5, &[], &[])), "5 different payloads in 3 bytes"),
            (answer(bundle(u32::MAX, 1, &[3], &[])), "payloads of 4294967295 ranks, the most is 16777216"),
            (missing(0, u32::MAX), "4294967295 missing ranks, the most is 16777216"),
            (missing(u32::MAX, 2), "2 ranks from rank 4294967295 on"),
            (downward::Word::Ended(proto::Ended::default()), "a failure of an unknown kind"),
        ] {
            assert_eq!(downward(word).unwrap_err(), expected);
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

        #[test]
        fn a_damaged_message_is_refused_or_is_another_message(
            payloads in prop::collection::vec(prop::collection::vec(0_u8..3, 0..4), 1..60),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let answers = Bundle::new(payloads.into_iter().map(Bytes::from));
            let message = Downward { number: 7, word: FromParent::Answer { topic: "7 commit".to_owned(), answers } };
            let mut bytes = message.clone().encode();
            prop_assert_eq!(Downward::decode(bytes.clone().into()), Ok(message));
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(cut.map_or(bytes.len(), |cut| cut.index(bytes.len())));
            let Ok(found) = Downward::decode(bytes.into()) else { return Ok(()) };
            // A decoded message is usable: every rank has a payload, and it can be sent on.
            if let FromParent::Answer { answers, .. } = &found.word {
                prop_assert_eq!(answers.payloads().count(), answers.ranks() as usize);
            }
            prop_assert_eq!(Downward::decode(found.clone().encode().into()), Ok(found));
        }
    }
}
