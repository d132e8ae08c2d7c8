//! A committed checkpoint, opened: its manifest is verified, its data files are opened when they are first needed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardfast_format::Manifest;
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::reader::Files;
use shardfast_transfer::timeout::Timeout;

use crate::commit;
use crate::engine::Engine;
use crate::foreign;

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
        let operation = self.engine.begin(format!("match {}", self.url), deadline);
        let contribution = Ok((touched.to_vec(), problems.to_vec()));
        operation.agree("open", contribution, |ranks: Vec<(Vec<u32>, Vec<String>)>| {
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
        })
    }

    /// Waits for all ranks, which call it after a step of a load that each makes alone.
    ///
    /// # Errors
    /// When the ranks do not all call it in time, or one of them refuses.
    pub fn barrier(&self, deadline: Duration) -> Result<()> {
        let operation = self.engine.begin(format!("install {}", self.url), deadline);
        operation.agree("open", Ok(()), |ranks: Vec<()>| Ok(ranks))
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
        })
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
    let timeout = timeout.into();
    let store = engine.store(url, &timeout.shared()).map_err(|error| foreign::explained(url, error));
    open_from(engine, store, url, timeout)
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
    let timeout = timeout.into();
    let operation = engine.begin(format!("open {url}"), timeout.within());
    let manifest = operation.agree("open", store.as_ref().map(|_| ()).map_err(Error::clone), |ranks| {
        let manifest = store.as_ref().map_err(Error::clone).and_then(|store| read(&**store, url, &timeout.shared()))?;
        Ok(vec![manifest; ranks.len()])
    })?;
    Ok(Checkpoint::new(engine, url, store?, &manifest)?.within(timeout))
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
