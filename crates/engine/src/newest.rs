//! The newest checkpoint of a run: found by rank 0, in all places of the run, and opened by all ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::observed::Observed;
use shardfast_transfer::timeout::Timeout;

use crate::checkpoint::Checkpoint;
use crate::engine::Engine;
use crate::levels::{self, At};
use crate::listen::Verb;
use crate::listened::Listened;
use crate::runs::{self, Found};

/// The newest checkpoint of a run that can be opened.
pub struct Newest {
    /// The checkpoint, opened, and its step; `None` if there is none.
    pub found: Option<(u64, Checkpoint)>,
    /// Newer ones, or all, that were passed over, each with the reason.
    pub skipped: Vec<String>,
}

/// Opens the newest committed checkpoint of the run at `url`, among those of steps lower than `below` if that is
/// given. Checkpoints without a commit are passed over; a committed one that cannot be
/// opened only if `older` allows to fall back. Every rank of the engine must call it.
///
/// # Errors
/// The same on every rank: the error of the newest committed one unless `older`; as [`runs::list`].
pub fn newest(engine: &Arc<Engine>, url: &str, below: Option<u64>, older: bool, deadline: Duration) -> Result<Newest> {
    newest_since(engine, (url, None), (below, older), Instant::now(), deadline)
}

/// Opens like [`newest`] for a load that was requested at `began`: if none can be opened, the load has failed. The run
/// may have a nearer place, as [`levels`] describes.
///
/// # Errors
/// As [`newest`].
pub fn newest_since(
    engine: &Arc<Engine>,
    (url, near): (&str, Option<&str>),
    (below, older): (Option<u64>, bool),
    began: Instant,
    deadline: Duration,
) -> Result<Newest> {
    let operation = engine.begin(format!("restore {url}"), deadline);
    let observed = Arc::new(Observed::since(began));
    let found = operation.agree("open", Ok((below, older)), |ranks| {
        if let Some(rank) = ranks.iter().position(|&asked| asked != (below, older)) {
            return Err(Error::invalid(format!(
                "restore {url}: rank {rank} asks for another checkpoint than rank 0 ({:?} against {:?})",
                ranks[rank],
                (below, older)
            )));
        }
        let timeout = Timeout::of_call(deadline);
        let found = match near {
            Some(near) => levels::find(engine, (near, url), (below, older), &timeout, &observed)?,
            None => {
                let store = engine.observed_store(url, &timeout, &observed)?;
                (runs::find(&*store, url, below, older, &timeout)?, Vec::new())
            }
        };
        Ok(vec![found; ranks.len()])
    });
    let (Found { found, skipped }, at): (Found, Vec<At>) = found.inspect_err(|error| {
        let load = Arc::new(Listened::begin(engine, Arc::clone(&observed), Verb::Load, (url, None)));
        load.note_outcome(&Err(error.clone()), operation.number_met());
        load.collect_later(engine);
    })?;
    let Some((step, manifest)) = found else { return Ok(Newest { found: None, skipped }) };
    let url = at.first().map_or_else(|| runs::step_url(url, step), |at| at.url.clone());
    let load = Arc::new(Listened::begin(engine, observed, Verb::Load, (&url, Some(step))));
    let checkpoint = if at.is_empty() {
        let store = engine.observed_store(&url, &deadline.into(), &load.observed);
        store.and_then(|store| Checkpoint::new(engine, &url, store, &manifest))
    } else {
        levels::open(engine, &at, &manifest, &deadline.into(), &load.observed)
    };
    let checkpoint =
        checkpoint.map(|checkpoint| checkpoint.within(deadline.into()).opened(Arc::clone(&load), operation.number()));
    // A rank that cannot open it takes part all the same, so that the others do not wait for it.
    let opened = checkpoint.as_ref().map(|_| ()).map_err(Error::clone);
    operation.agree("opened", opened, |ranks: Vec<()>| Ok(ranks)).inspect_err(|error| {
        load.note_outcome(&Err(error.clone()), operation.number_met());
        load.collect_later(engine);
    })?;
    Ok(Newest { found: Some((step, checkpoint?)), skipped })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardfast_format::Catalog;

    use super::*;
    use crate::runs::step_url;
    use crate::{Destination, Prove, State, save};

    #[test]
    fn what_restores_find_out_about_the_storage_is_kept_for_the_next_one() {
        const DEADLINE: Duration = Duration::from_secs(60);
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().to_str().unwrap().to_owned();
        let state =
            State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
        let destination = Destination {
            url: step_url(&url, 1),
            step: Some(1),
            user: BTreeMap::new(),
            prove: Prove::default(),
            blocking: true,
        };
        save(&Engine::solo(), destination, state, DEADLINE).committed(None).unwrap();

        let engine = Engine::solo();
        let newest = newest(&engine, &url, None, false, DEADLINE).unwrap();
        assert_eq!(newest.found.as_ref().map(|(step, _)| *step), Some(1));
        assert!(engine.storage.users() > 0, "the checkpoint's store shares nothing");
    }
}
