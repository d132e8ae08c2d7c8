//! The state of all rounds at rank 0: contributions in; decisions and answers out.
//!
//! Pure: it knows no threads, sockets or clocks. Time is what the caller says it is, and a *seat* is whatever the
//! caller needs to answer a rank that waits. Every change gives back the seats to be answered now, with what to say.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::time::Duration;

use crate::{Error, Failure, PAYLOAD_BYTES_MAX};

const TOPIC_BYTES_MAX: usize = 4096;
const REASON_BYTES_MAX: usize = 16 << 10;
/// How many failed rounds are remembered for the ranks that come late to them.
const OWED_MAX: usize = 256;

/// A rank's part of a round: its bytes, or why it has none.
pub(crate) type Contribution = Result<Vec<u8>, String>;

/// What a rank is told.
#[derive(Debug, PartialEq)]
pub(crate) enum Reply {
    /// To rank 0 only: everything is in; call [`Rounds::decided`] with the decision over these.
    Decide(Vec<Vec<u8>>),
    /// The end of the round for that rank.
    Answer(Result<Vec<u8>, Error>),
}

/// The seats to be answered now.
pub(crate) type Replies<S> = Vec<(S, Reply)>;

pub(crate) struct Rounds<S> {
    world: u32,
    open: HashMap<String, Round<S>>,
    /// Failed rounds that some ranks have yet to come to, oldest first.
    owed: VecDeque<Owed>,
    /// How the first rank went.
    lost: Option<(u32, String)>,
}

struct Round<S> {
    opened: Duration,
    expires: Duration,
    seats: BTreeMap<u32, S>,
    /// As long as they are not being decided.
    contributions: BTreeMap<u32, Contribution>,
    deciding: bool,
}

struct Owed {
    topic: String,
    ranks: BTreeSet<u32>,
    error: Error,
}

/// Why a round ends without a decision.
enum End {
    /// A rank failed, and all have come.
    Failed,
    Expired,
    Lost(u32, String),
}

impl<S> Rounds<S> {
    pub(crate) fn new(world: u32) -> Rounds<S> {
        Rounds { world, open: HashMap::new(), owed: VecDeque::new(), lost: None }
    }

    /// `rank` comes to the round of `topic` at `now` and waits there for up to `deadline`.
    pub(crate) fn contribute(
        &mut self,
        rank: u32,
        topic: &str,
        contribution: Contribution,
        seat: S,
        now: Duration,
        deadline: Duration,
    ) -> Replies<S> {
        let refuse = |seat, message| vec![(seat, Reply::Answer(Err(Error::Invalid(message))))];
        if rank >= self.world {
            return refuse(seat, format!("rank {rank} is not below the world's size, {}", self.world));
        }
        if let Err(error) = check_topic(topic) {
            return vec![(seat, Reply::Answer(Err(error)))];
        }
        if let Some(error) = self.collect_owed(rank, topic) {
            return vec![(seat, Reply::Answer(Err(error)))];
        }
        let expires = now.saturating_add(deadline);
        let round = self.open.entry(topic.to_owned()).or_insert_with(|| Round {
            opened: now,
            expires,
            seats: BTreeMap::new(),
            contributions: BTreeMap::new(),
            deciding: false,
        });
        if round.seats.contains_key(&rank) {
            return refuse(seat, format!("rank {rank} contributes to {topic:?} twice; its first call still waits"));
        }
        round.expires = round.expires.min(expires);
        round.seats.insert(rank, seat);
        round.contributions.insert(rank, bounded(contribution));

        if round.contributions.len() == self.world as usize {
            return self.complete(topic);
        }
        match &self.lost {
            Some((lost, cause)) => {
                let end = End::Lost(*lost, cause.clone());
                self.end(topic, end)
            }
            None => Vec::new(),
        }
    }

    /// Rank 0 has decided the round of `topic`. Gives its own answer, and those of the others.
    pub(crate) fn decided(
        &mut self,
        topic: &str,
        decision: Result<Vec<Vec<u8>>, String>,
    ) -> (Result<Vec<u8>, Error>, Replies<S>) {
        let Some(round) = self.open.remove(topic) else {
            return (Err(Error::Invalid(format!("no round of {topic:?} is open"))), Vec::new());
        };
        let world = self.world as usize;
        let decision = decision.and_then(|answers| match answers.iter().map(Vec::len).max() {
            _ if answers.len() != world => Err(format!("the decision has {} answers for {world} ranks", answers.len())),
            Some(bytes) if bytes > PAYLOAD_BYTES_MAX => {
                Err(format!("the decision has an answer of {bytes} bytes, the most is {PAYLOAD_BYTES_MAX}"))
            }
            _ => Ok(answers),
        });
        match decision {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                let own = answers.next().unwrap_or_default();
                let replies = round.seats.into_values().zip(answers.map(|answer| Reply::Answer(Ok(answer))));
                (Ok(own), replies.collect())
            }
            Err(reason) => {
                let failures = vec![Failure { rank: 0, reason: cut(reason) }];
                let error = Error::Failed { topic: topic.to_owned(), failures };
                let replies = round.seats.into_values().map(|seat| (seat, Reply::Answer(Err(error.clone()))));
                (Err(error.clone()), replies.collect())
            }
        }
    }

    /// `rank` is gone: no round that is not complete can be completed any more.
    pub(crate) fn lose(&mut self, rank: u32, cause: &str) -> Replies<S> {
        for owed in &mut self.owed {
            owed.ranks.remove(&rank);
        }
        self.owed.retain(|owed| !owed.ranks.is_empty());
        let (first, cause) = self.lost.get_or_insert_with(|| (rank, cause.to_owned())).clone();
        let topics = self.gathering(|_| true);
        topics.iter().flat_map(|topic| self.end(topic, End::Lost(first, cause.clone()))).collect()
    }

    /// Ends the rounds whose time is over at `now`.
    pub(crate) fn expire(&mut self, now: Duration) -> Replies<S> {
        let topics = self.gathering(|round| round.expires <= now);
        topics.iter().flat_map(|topic| self.end(topic, End::Expired)).collect()
    }

    /// When [`expire`](Rounds::expire) has something to do next.
    pub(crate) fn expires(&self) -> Option<Duration> {
        self.open.values().filter(|round| !round.deciding).map(|round| round.expires).min()
    }

    fn gathering(&self, choose: impl Fn(&Round<S>) -> bool) -> Vec<String> {
        let chosen = self.open.iter().filter(|(_, round)| !round.deciding && choose(round));
        chosen.map(|(topic, _)| topic.clone()).collect()
    }

    fn collect_owed(&mut self, rank: u32, topic: &str) -> Option<Error> {
        let index = self.owed.iter().position(|owed| owed.topic == topic && owed.ranks.contains(&rank))?;
        let owed = &mut self.owed[index];
        owed.ranks.remove(&rank);
        if owed.ranks.is_empty() { self.owed.remove(index).map(|owed| owed.error) } else { Some(owed.error.clone()) }
    }

    fn complete(&mut self, topic: &str) -> Replies<S> {
        let Some(round) = self.open.get_mut(topic) else { return Vec::new() };
        if round.contributions.values().any(Result::is_err) {
            return self.end(topic, End::Failed);
        }
        round.deciding = true;
        let contributions = mem::take(&mut round.contributions).into_values().flatten().collect();
        round.seats.remove(&0).map(|seat| (seat, Reply::Decide(contributions))).into_iter().collect()
    }

    /// Ends a round without a decision. Failures that ranks told are what everybody wants to know, so they come first;
    /// ranks that kept it from ending otherwise are added to them.
    fn end(&mut self, topic: &str, end: End) -> Replies<S> {
        let Some(round) = self.open.remove(topic) else { return Vec::new() };
        let absent: BTreeSet<u32> = (0..self.world).filter(|rank| !round.seats.contains_key(rank)).collect();
        let waited = round.expires.saturating_sub(round.opened);
        let told = round.contributions.into_iter().filter_map(|(rank, contribution)| Some((rank, contribution.err()?)));
        let mut failures: BTreeMap<u32, String> = told.collect();
        let error = match end {
            End::Expired if failures.is_empty() => {
                Error::Missing { topic: topic.to_owned(), ranks: absent.iter().copied().collect(), waited }
            }
            End::Lost(rank, cause) if failures.is_empty() => Error::Lost { rank, cause },
            end => {
                match end {
                    End::Failed => {}
                    End::Expired => {
                        failures
                            .extend(absent.iter().map(|&rank| (rank, format!("no word from it within {waited:?}"))));
                    }
                    End::Lost(rank, cause) => {
                        failures.entry(rank).or_insert(format!("it is gone: {cause}"));
                    }
                }
                let failures = failures.into_iter().map(|(rank, reason)| Failure { rank, reason }).collect();
                Error::Failed { topic: topic.to_owned(), failures }
            }
        };
        if !absent.is_empty() {
            if self.owed.len() == OWED_MAX {
                self.owed.pop_front();
            }
            self.owed.push_back(Owed { topic: topic.to_owned(), ranks: absent, error: error.clone() });
        }
        round.seats.into_values().map(|seat| (seat, Reply::Answer(Err(error.clone())))).collect()
    }
}

pub(crate) fn check_topic(topic: &str) -> Result<(), Error> {
    match topic.len() {
        1..=TOPIC_BYTES_MAX => Ok(()),
        bytes => Err(Error::Invalid(format!("a topic is 1 to {TOPIC_BYTES_MAX} bytes long, found {bytes}"))),
    }
}

/// What is too large becomes a failure that every rank is told of.
pub(crate) fn bounded(contribution: Contribution) -> Contribution {
    match contribution {
        Ok(bytes) if bytes.len() > PAYLOAD_BYTES_MAX => {
            Err(format!("its contribution has {} bytes, the most is {PAYLOAD_BYTES_MAX}", bytes.len()))
        }
        Ok(bytes) => Ok(bytes),
        Err(reason) => Err(cut(reason)),
    }
}

fn cut(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

#[cfg(test)]
mod tests;
