//! Compares what the ranks were told of a run, and lets them stop together.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use shardfast_coord::Stopping;
use shardfast_transfer::error::{Error, Result};

use crate::engine::Engine;
use crate::operation::of_ranks;

/// Terms of a run, each a name and what this rank was told.
pub type Terms = Vec<(String, String)>;

impl Engine {
    /// Checks that all ranks have the same terms for the run at `url`, as a part of that `call`. Every rank must call
    /// it.
    ///
    /// # Errors
    /// `Invalid`, the same on every rank, with the first term that differs.
    pub fn expect_same(self: &Arc<Engine>, call: &str, url: &str, terms: Terms, deadline: Duration) -> Result<()> {
        let operation = self.begin(format!("{call} {url}"), deadline);
        operation.agree("open", Ok(terms), |ranks: Vec<Terms>| {
            let first = &ranks[0];
            for (rank, terms) in ranks.iter().enumerate() {
                if let Some((found, expected)) = terms.iter().zip(first).find(|(found, expected)| found != expected) {
                    let ((name, found), (_, expected)) = (found, expected);
                    return Err(Error::invalid(format!(
                        "{url}: rank {rank} was given {name}={found}, and rank 0 {name}={expected}: give all ranks the \
                         same"
                    )));
                }
            }
            Ok(vec![(); ranks.len()])
        })
    }

    /// Has rank 0 decide on what the ranks contribute, as that `call` for the run at `url`; returns this rank's answer.
    /// Every rank must call it.
    ///
    /// # Errors
    /// The same on every rank: the first contribution that is an error, or why there is no decision.
    pub fn decide<M, A>(
        self: &Arc<Engine>,
        (call, url): (&str, &str),
        contribution: Result<M>,
        decide: impl FnMut(Vec<M>) -> Result<Vec<A>>,
        deadline: Duration,
    ) -> Result<A>
    where
        M: Serialize + DeserializeOwned,
        A: Serialize + DeserializeOwned,
    {
        self.begin(format!("{call} {url}"), deadline).agree("open", contribution, decide)
    }

    /// Begins to wait until a rank is told to stop. Every rank must call it, in the same order as other calls of it.
    ///
    /// # Errors
    /// `Unavailable` if the system gives no thread.
    pub fn stopping(&self, deadline: Duration) -> Result<Arc<Stopping>> {
        let number = self.stoppings.fetch_add(1, Ordering::Relaxed);
        Stopping::begin(Arc::clone(&self.coord), &format!("stop {number}"), deadline).map_err(of_ranks)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use shardfast_transfer::error::Kind;
    use shardfast_transfer::staging::STAGING_BYTES_MIN;

    use super::*;

    #[test]
    fn terms_that_differ_are_named_on_every_rank() {
        let terms = |every: &str| vec![("every".to_owned(), every.to_owned()), ("over".to_owned(), "1".to_owned())];
        for (last, is_refused) in [("steps(5)", false), ("steps(6)", true)] {
            let ranks: Vec<_> = shardfast_coord::local(3)
                .into_iter()
                .zip(["steps(5)", "steps(5)", last])
                .map(|(coord, every)| {
                    let (engine, terms) = (Engine::new(coord, STAGING_BYTES_MIN).unwrap(), terms(every));
                    thread::spawn(move || engine.expect_same("begin", "runs/a", terms, Duration::from_secs(30)))
                })
                .collect();
            for rank in ranks {
                match rank.join().unwrap() {
                    Ok(()) => assert!(!is_refused),
                    Err(error) => {
                        assert_eq!(error.kind, Kind::Invalid);
                        let expected = "rank 2 was given every=steps(6), and rank 0 every=steps(5)";
                        assert!(is_refused && error.message.contains(expected), "{error}");
                    }
                }
            }
        }
    }
}
