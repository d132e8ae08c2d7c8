//! A committed checkpoint, opened: its manifest is verified, its data files are opened when they are first needed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_format::Manifest;
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::events::Phase;
use shardfast_transfer::observed::Observed;
use shardfast_transfer::reader::Files;
use shardfast_transfer::report::{Moved, Report};
use shardfast_transfer::timeout::Timeout;

use crate::commit;
use crate::engine::Engine;
use crate::foreign;
use crate::listen::Verb;
use crate::listened::Listened;
use crate::operation::Operation;

/// A committed checkpoint whose manifest is verified.
pub struct Checkpoint {
    /// Engine that opened it.
    pub engine: Arc<Engine>,
    /// Data files of the checkpoint.
    pub files: Files,
    /// Manifest, decoded and verified.
    pub manifest: Arc<Manifest>,
    /// Place of the checkpoint.
    pub url: String,
    /// Size of the encoded manifest in bytes.
    pub manifest_bytes: u64,
    /// Load that it was opened for, and the number of the operation that opened it.
    load: Option<(Arc<Listened>, u64)>,
}

impl Checkpoint {
    /// Returns the checkpoint's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the size of its manifest, in bytes.
    pub fn manifest_bytes(&self) -> u64 {
        self.manifest_bytes
    }

    /// Returns the engine that opened it.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the checkpoint's URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Merges the findings of all ranks about this checkpoint; every rank calls it and gets the same. `touched` are the
    /// leaves that this rank has a place for, `problems` the obstacles to a load here.
    ///
    /// # Errors
    /// When the ranks do not all call it in time, or one of them refuses.
    pub fn agree_match(&self, touched: &[u32], problems: &[String], deadline: Duration) -> Result<MatchSummary> {
        self.ended(Phase::Described);
        let operation = self.engine.begin(format!("match {}", self.url), deadline);
        let contribution = Ok((touched.to_vec(), problems.to_vec()));
        let matched = operation.agree("open", contribution, |ranks: Vec<(Vec<u32>, Vec<String>)>| {
            let mut is_touched = vec![false; self.manifest.len()];
            let mut merged: Vec<(Vec<u32>, String)> = Vec::new();
            let mut place: HashMap<String, usize> = HashMap::new();
            let world = ranks.len();
            for (rank, (touched, problems)) in ranks.into_iter().enumerate() {
                for leaf in touched {
                    *is_touched.get_mut(leaf as usize).ok_or_else(|| {
                        Error::internal(format!("rank {rank} names leaf {leaf}; the manifest has fewer leaves"))
                    })? = true;
                }
                for problem in problems {
                    let at = *place.entry(problem.clone()).or_insert_with(|| {
                        merged.push((Vec::new(), problem));
                        merged.len() - 1
                    });
                    merged[at].0.push(rank as u32);
                }
            }
            let untouched = (0..).zip(&is_touched).filter(|(_, touched)| !**touched).map(|(leaf, _)| leaf).collect();
            Ok(vec![MatchSummary { untouched, problems: merged }; world])
        });
        self.ended(Phase::Matched);
        self.noted(matched)
    }

    /// Waits for all ranks, which call it after a step of a load that each makes alone.
    ///
    /// # Errors
    /// When the ranks do not all call it in time, or one of them refuses.
    pub fn barrier(&self, deadline: Duration) -> Result<()> {
        let operation = self.engine.begin(format!("install {}", self.url), deadline);
        self.noted(operation.agree("open", Ok(()), |ranks: Vec<()>| Ok(ranks)))
    }

    /// Waits like [`barrier`](Checkpoint::barrier) at the end of the load.
    ///
    /// # Errors
    /// As [`barrier`](Checkpoint::barrier).
    pub fn done(&self, deadline: Duration) -> Result<()> {
        self.barrier(deadline)?;
        self.ended(Phase::Loaded);
        self.conclude(&Ok(()));
        Ok(())
    }

    /// Refuses like [`Engine::refuse`] of the engine that opened this checkpoint.
    pub fn refuse(&self, error: Error, deadline: Duration) -> Error {
        self.engine.refuse(error, deadline)
    }

    /// Returns the same checkpoint, whose requests have this timeout.
    pub fn within(mut self, timeout: Timeout) -> Checkpoint {
        self.files.timeout = timeout;
        self
    }

    /// Returns the checkpoint at `url` whose encoded manifest is given.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` for a manifest that cannot be decoded.
    pub fn new(engine: &Arc<Engine>, url: &str, store: Arc<dyn Store>, manifest: &[u8]) -> Result<Checkpoint> {
        let decoded =
            Manifest::decode(manifest).map_err(|error| Error::from(error).within(format!("{url}: manifest")))?;
        let decoded = Arc::new(decoded);
        Ok(Checkpoint {
            engine: Arc::clone(engine),
            files: Files::new(store, url.to_owned(), Arc::clone(&decoded), engine.timeout().clone(), commit::missing),
            manifest: decoded,
            url: url.to_owned(),
            manifest_bytes: manifest.len() as u64,
            load: None,
        })
    }

    /// Returns this checkpoint on another engine and store, none of its files opened, for reads that are no part of its
    /// load.
    pub fn anew(&self, engine: Arc<Engine>, store: Arc<dyn Store>) -> Checkpoint {
        let (manifest, timeout) = (Arc::clone(&self.manifest), self.files.timeout.clone());
        Checkpoint {
            engine,
            files: Files::new(store, self.url.clone(), Arc::clone(&manifest), timeout, commit::missing),
            manifest,
            url: self.url.clone(),
            manifest_bytes: self.manifest_bytes,
            load: None,
        }
    }

    /// Returns the same checkpoint, opened for that load by the operation of that number.
    pub(crate) fn opened(mut self, load: Arc<Listened>, number: u64) -> Checkpoint {
        load.observed.ended(Phase::Opened);
        self.files.observed = Some(Arc::clone(&load.observed));
        self.load = Some((load, number));
        self
    }

    /// Notes the end of a phase of the load.
    pub(crate) fn ended(&self, phase: Phase) {
        if let Some((load, _)) = &self.load {
            load.observed.ended(phase);
        }
    }

    /// Returns the report of the load so far; `None` for a checkpoint that a single rank has opened.
    pub fn report(&self) -> Option<Report> {
        self.load.as_ref().map(|(load, _)| load.observed.report())
    }

    /// Returns the bytes that the load has moved so far; `None` for a checkpoint that a single rank has opened.
    pub fn moved(&self) -> Option<Moved> {
        self.load.as_ref().map(|(load, _)| load.observed.moved())
    }

    /// Notes that the load has failed, if it has.
    pub(crate) fn noted<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            self.conclude(&Err(error.clone()));
        }
        outcome
    }

    /// Notes that the load has failed with an error of its caller.
    pub fn failed(&self, error: &Error) {
        self.conclude(&Err(error.clone()));
    }

    /// Returns the same checkpoint, opened for no load: what its caller does with it is not told.
    pub fn looked_at(mut self) -> Checkpoint {
        (self.load, self.files.observed) = (None, None);
        self
    }

    /// Notes the outcome of the load. Only the first call counts.
    fn conclude(&self, outcome: &Result<()>) {
        if let Some((load, number)) = &self.load
            && load.note_outcome(outcome, Some(*number))
        {
            load.collect_later(&self.engine);
        }
    }
}

impl Drop for Checkpoint {
    /// Concludes a load that other ranks have ended: this one has failed where the engine does not see it.
    fn drop(&mut self) {
        if self.report().is_some_and(|report| report.phases_ms.contains_key(Phase::Agreed.word())) {
            self.conclude(&Err(Error::invalid("given up by its caller")));
        }
    }
}

/// Findings of all ranks about a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MatchSummary {
    /// The leaves that no rank has a place for.
    pub untouched: Vec<u32>,
    /// Each problem once, with the ranks that have it.
    pub problems: Vec<(Vec<u32>, String)>,
}

/// Opens the checkpoint at `url`. Every rank of the engine must call it; rank 0 reads and hands the manifest on.
/// `timeout` bounds the ranks' waits for each other, and their later waits for the storage.
///
/// # Errors
/// The same on every rank: `NotFound` when no checkpoint is committed there (with a description of what is there
/// instead), `Corrupt`, `Unsupported` for a newer format, the store's errors.
pub fn open(engine: &Arc<Engine>, url: &str, timeout: impl Into<Timeout>) -> Result<Checkpoint> {
    let (timeout, observed) = (timeout.into(), Arc::default());
    let store = store_of(engine, url, &timeout, &observed);
    open_as(engine, store, url, timeout, &Arc::new(Listened::begin(engine, observed, Verb::Load, (url, None))))
}

/// Opens like [`open`] for a load that was requested at `began`: if it cannot be opened, the load has failed.
///
/// # Errors
/// As [`open`].
pub fn open_to_load(
    engine: &Arc<Engine>,
    url: &str,
    timeout: impl Into<Timeout>,
    began: Instant,
) -> Result<Checkpoint> {
    let (timeout, observed) = (timeout.into(), Arc::new(Observed::since(began)));
    let store = store_of(engine, url, &timeout, &observed);
    let load = Arc::new(Listened::begin(engine, observed, Verb::Load, (url, None)));
    let operation = engine.begin(format!("open {url}"), timeout.within());
    open_in(&operation, store, url, timeout, &load).inspect_err(|error| {
        load.note_outcome(&Err(error.clone()), operation.number_met());
        load.collect_later(engine);
    })
}

fn store_of(engine: &Engine, url: &str, timeout: &Timeout, observed: &Arc<Observed>) -> Result<Arc<dyn Store>> {
    let store = engine.observed_store(url, &timeout.shared(), observed);
    store.map_err(|error| foreign::explained(url, error))
}

/// Opens like [`open`] from a store that is already open at the checkpoint's place; `url` names the checkpoint in
/// messages.
///
/// # Errors
/// As [`open`].
pub fn open_from(
    engine: &Arc<Engine>,
    store: Result<Arc<dyn Store>>,
    url: &str,
    timeout: impl Into<Timeout>,
) -> Result<Checkpoint> {
    let load = Listened::begin(engine, Arc::default(), Verb::Load, (url, None));
    open_as(engine, store, url, timeout.into(), &Arc::new(load))
}

fn open_as(
    engine: &Arc<Engine>,
    store: Result<Arc<dyn Store>>,
    url: &str,
    timeout: Timeout,
    load: &Arc<Listened>,
) -> Result<Checkpoint> {
    open_in(&engine.begin(format!("open {url}"), timeout.within()), store, url, timeout, load)
}

fn open_in(
    operation: &Operation,
    store: Result<Arc<dyn Store>>,
    url: &str,
    timeout: Timeout,
    load: &Arc<Listened>,
) -> Result<Checkpoint> {
    let manifest = operation.agree("open", store.as_ref().map(|_| ()).map_err(Error::clone), |ranks| {
        let manifest = store.as_ref().map_err(Error::clone).and_then(|store| read(&**store, url, &timeout.shared()))?;
        Ok(vec![manifest; ranks.len()])
    })?;
    let checkpoint = Checkpoint::new(&operation.engine, url, store?, &manifest)?.within(timeout);
    Ok(checkpoint.opened(Arc::clone(load), operation.number()))
}

/// Returns the verified manifest at `url`, or an error that describes what is there instead.
pub fn read(store: &dyn Store, url: &str, timeout: &Timeout) -> Result<Vec<u8>> {
    retry(timeout, || commit::read_manifest(store, "")).map_err(|error| {
        if error.kind != Kind::NotFound {
            return error;
        }
        let what = match store.list("") {
            Err(error) if error.kind == shardfast_store::Kind::NotFound => "nothing is there".to_owned(),
            Err(error) => format!("it cannot be listed: {error}"),
            Ok(entries) => foreign::directory(&entries),
        };
        Error::new(Kind::NotFound, format!("{url}: no checkpoint is committed there: {what}"))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardfast_format::Catalog;

    use super::*;
    use crate::{Destination, Prove, State, save};

    #[test]
    fn what_loads_find_out_about_the_storage_is_kept_for_the_next_one() {
        const DEADLINE: Duration = Duration::from_secs(60);
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().to_str().unwrap().to_owned();
        let state =
            State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
        let destination = Destination {
            url: url.clone(),
            step: None,
            user: BTreeMap::new(),
            prove: Prove::default(),
            blocking: true,
        };
        save(&Engine::solo(), destination, state, DEADLINE).committed(None).unwrap();

        let engine = Engine::solo();
        assert_eq!(Arc::strong_count(&engine.storage), 1);
        let _open = open(&engine, &url, DEADLINE).unwrap();
        assert!(engine.storage.users() > 0, "the checkpoint's store shares nothing");
    }
}
