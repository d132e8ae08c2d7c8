//! The messages of `proto/coord.proto`, and what they say.

use std::time::Duration;

use crate::round::Contribution;
use crate::{Error, Failure};

#[allow(missing_docs, unreachable_pub, clippy::all)]
pub(super) mod proto {
    tonic::include_proto!("shardfast.coord.v1");
}

use proto::answer::Outcome;
use proto::contribution::Body;
use proto::{FromRank, ToRank, from_rank, to_rank};

pub(super) const RANK_LEAVES: FromRank = FromRank { said: Some(from_rank::Said::Leave(proto::Leave {})) };
pub(super) const ROOT_LEAVES: ToRank = ToRank { said: Some(to_rank::Said::Leave(proto::Leave {})) };

pub(super) fn contribution(call: u64, topic: &str, contribution: Contribution, deadline: Duration) -> FromRank {
    let body = match contribution {
        Ok(payload) => Body::Payload(payload.into()),
        Err(reason) => Body::Failure(reason),
    };
    let contribution =
        proto::Contribution { call, topic: topic.to_owned(), deadline_ns: nanoseconds(deadline), body: Some(body) };
    FromRank { said: Some(from_rank::Said::Contribution(contribution)) }
}

/// A message without a body comes from no version of ours; its rank is then told like one that failed.
pub(super) fn contributed(body: Option<Body>) -> Contribution {
    match body {
        Some(Body::Payload(payload)) => Ok(payload.into()),
        Some(Body::Failure(reason)) => Err(reason),
        None => Err("its contribution is of an unknown kind".to_owned()),
    }
}

pub(super) fn answer(call: u64, answer: Result<Vec<u8>, Error>) -> ToRank {
    let outcome = match answer {
        Ok(payload) => Outcome::Payload(payload.into()),
        Err(Error::Failed { topic, failures }) => {
            let failures =
                failures.into_iter().map(|Failure { rank, reason }| proto::Failure { rank, reason }).collect();
            Outcome::Failed(proto::Failed { topic, failures })
        }
        Err(Error::Missing { topic, ranks, waited }) => {
            Outcome::Missing(proto::Missing { topic, ranks, waited_ns: nanoseconds(waited) })
        }
        Err(Error::Lost { rank, cause }) => Outcome::Lost(proto::Lost { rank, cause }),
        Err(Error::Unavailable(message)) => Outcome::Unavailable(message),
        Err(Error::Invalid(message)) => Outcome::Invalid(message),
    };
    ToRank { said: Some(to_rank::Said::Answer(proto::Answer { call, outcome: Some(outcome) })) }
}

pub(super) fn answered(outcome: Option<Outcome>) -> Result<Vec<u8>, Error> {
    match outcome {
        Some(Outcome::Payload(payload)) => Ok(payload.into()),
        Some(Outcome::Failed(proto::Failed { topic, failures })) => {
            let failures =
                failures.into_iter().map(|proto::Failure { rank, reason }| Failure { rank, reason }).collect();
            Err(Error::Failed { topic, failures })
        }
        Some(Outcome::Missing(proto::Missing { topic, ranks, waited_ns })) => {
            Err(Error::Missing { topic, ranks, waited: Duration::from_nanos(waited_ns) })
        }
        Some(Outcome::Lost(proto::Lost { rank, cause })) => Err(Error::Lost { rank, cause }),
        Some(Outcome::Unavailable(message)) => Err(Error::Unavailable(message)),
        Some(Outcome::Invalid(message)) => Err(Error::Invalid(message)),
        None => Err(Error::Unavailable("rank 0 sent an answer of an unknown kind".to_owned())),
    }
}

/// 584 years are as good as for ever.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
