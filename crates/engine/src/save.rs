//! Saves: from the state that a rank holds to the commit that all ranks share.
//!
//! ```text
//! plan → capture and write tensors → confirm → write values → commit
//! ```
//! Each rank begins with the plan that it can make alone; meanwhile the ranks check whether these plans are one.
//! Tensors are written first: values are encoded meanwhile, compared between ranks, and follow in files of their own.
//! The commit publishes the files of all ranks or none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shardfast_plan::Write;
use shardfast_store::Store;
use shardfast_transfer::capture::Captures;
use shardfast_transfer::error::{Error, Patience, Result, retry};
use shardfast_transfer::events::{Event, Phase};
use shardfast_transfer::progress::Progress;
use shardfast_transfer::writer;

use crate::background;
use crate::batch::{self, Batch, BatchOutcome};
use crate::commit;
use crate::contents;
use crate::engine::Engine;
use crate::listen::Verb;
use crate::listened::Listened;
use crate::operation::Operation;
use crate::pending::Pending;
use crate::planning::{Planning, RankPlan, ValuePlan};
use crate::replicas::{self, Scope};
use crate::state::{Destination, Prove, State};

/// Begins to save `state` in the background. Every rank of the engine must call it; an exchange between ranks that
/// takes longer than `deadline` fails the save.
///
/// # Errors
/// Through the [`Pending`], the same on every rank: `Invalid` when the state is not one state (two leaves of one name,
/// ranks that disagree, elements that no rank or several ranks hold), `Conflict` when a checkpoint is already there,
/// `Exhausted`, `Unavailable` or `Invalid` when the store fails. Nothing is published then.
pub fn save(engine: &Arc<Engine>, destination: Destination, state: State, deadline: Duration) -> Pending {
    save_deferred(engine, destination, state.captures(), || state, Instant::now(), deadline)
}

/// Saves like [`save`] the state that `state` assembles in the background, which takes a while with many tensors.
/// `captures` are those of that state, and `began` is when the caller began to read it.
pub fn save_deferred(
    engine: &Arc<Engine>,
    destination: Destination,
    captures: Captures,
    state: impl FnOnce() -> State + Send + 'static,
    began: Instant,
    deadline: Duration,
) -> Pending {
    let (storage, url) = (Arc::clone(&engine.storage), destination.url.clone());
    // Opened in the background: on remote storage even that can take long.
    let open = move |progress: &Progress| {
        let storage = storage.observed_by(progress.observer());
        retry(Patience::of(progress, deadline), || Ok(shardfast_store::open_on(&url, &storage)?))
    };
    begin(engine, open, destination, captures, state, (began, deadline))
}

/// Saves like [`save`] into a store that is already open at the checkpoint's place.
pub fn save_to(
    engine: &Arc<Engine>,
    store: Result<Arc<dyn Store>>,
    destination: Destination,
    state: State,
    deadline: Duration,
) -> Pending {
    begin(engine, move |_| store, destination, state.captures(), || state, (Instant::now(), deadline))
}

fn begin(
    engine: &Arc<Engine>,
    open: impl FnOnce(&Progress) -> Result<Arc<dyn Store>> + Send + 'static,
    destination: Destination,
    captures: Captures,
    state: impl FnOnce() -> State + Send + 'static,
    (began, deadline): (Instant, Duration),
) -> Pending {
    let described = began.elapsed();
    let how = match destination.prove {
        Prove::Nothing => ", replicas not compared",
        Prove::FirstSave => "",
        Prove::EverySave => ", all replicas compared",
    };
    // A place may be reused after a failure: the step shows whether ranks save the same state.
    let step = destination.step.map(|step| format!(", step {step}")).unwrap_or_default();
    let operation = engine.begin_one(format!("save {}{how}", destination.url), step, deadline);
    let goes_on = captures.lazy && !destination.blocking;
    // While the call waits for eager captures, the save needs no lower priority.
    let background = (goes_on && !captures.eager).then_some(&engine.background);
    Pending::spawn(background, !captures.eager, began, move |progress| {
        if goes_on {
            background::take_less();
        }
        let place = (destination.url.as_str(), destination.step);
        let listened = Listened::begin(&operation.engine, Arc::clone(&progress.shared.observed), Verb::Save, place);
        progress.note(&Event::Ended { phase: Phase::Described, after: described });
        if !destination.blocking {
            // The call may return after the end of a small save, which would leave it out.
            progress.note(&Event::Stalled { took: described });
        }
        let save =
            Save { operation: &operation, store: open(progress), destination: &destination, state: state(), progress };
        let newer = |error| commit::of_newer_job(&operation, &destination, save.patience(), progress, error);
        let outcome = save.run().map_err(newer);
        let (engine, number) = (Arc::clone(&operation.engine), operation.number_met());
        listened.note_outcome(&outcome, number);
        (outcome, move || listened.collect(&engine))
    })
}

/// One rank's part in a save.
struct Save<'a> {
    operation: &'a Operation,
    /// Store at the checkpoint's place; a rank that cannot open it takes part with its error.
    store: Result<Arc<dyn Store>>,
    destination: &'a Destination,
    state: State,
    progress: &'a Progress,
}

impl Save<'_> {
    fn run(&self) -> Result<()> {
        let data_at = self.data_at().unwrap_or_default();
        let mut scope = Scope::of(&self.state, self.destination.prove, self.operation.engine.world(), data_at);
        let planning = Planning::new(self.operation, &self.state, &scope.rules);
        let local = self.check().and_then(|()| planning.plan_alone());
        scope.remember(planning.last_proven(), local.as_ref().ok().and_then(|local| local.as_ref()?.proven));

        let (agreed, tensors) = planning.agree_while(
            local,
            || self.admit(),
            || self.state.digests(),
            self.progress,
            |writes| self.write_tensors(&scope, writes),
        );
        // Also after an error of the tensors here: the other ranks have forgotten this save, too.
        self.progress.ended(Phase::Agreed);
        let (plan, values) = agreed.inspect_err(|_| {
            tensors.iter().flatten().for_each(|tensors| self.discard(&tensors.paths));
        })?;
        let (store, mut tensors) = (self.store()?, tensors.and_then(|tensors| tensors)?);
        self.confirm(&plan, &scope, &mut tensors).inspect_err(|_| self.discard(&tensors.paths))?;
        let written = self.write_values(store, &values, &tensors);
        self.commit(store, &values, tensors, written)
    }

    fn store(&self) -> Result<&dyn Store> {
        self.store.as_deref().map_err(Error::clone)
    }

    /// Returns how long requests are retried.
    fn patience(&self) -> Patience<'_> {
        Patience::of(self.progress, self.operation.deadline())
    }

    /// Returns the alignment of the files' data there.
    fn data_at(&self) -> Result<u64> {
        Ok(writer::data_at(self.store()?.needs().pieces))
    }

    /// Checks that this rank can take part and the storage publish, before anything is written.
    fn check(&self) -> Result<()> {
        let store = self.store()?;
        contents::refuse_foreign(store, &self.destination.url, 0, self.patience())?;
        self.state.check()?;
        retry(self.patience(), || Ok(store.can_publish()?))
    }

    /// Makes rank 0's last check of the place before ranks agree.
    fn admit(&self) -> Result<()> {
        let store = self.store()?;
        retry(self.patience(), || commit::admit(store, self.destination, self.state.catalog.tensor_bytes()))
    }

    /// Captures and writes this rank's parts, and reads the other ranges that are compared.
    fn write_tensors(&self, scope: &Scope, writes: &[Write]) -> Result<BatchOutcome> {
        let unwritten = scope.unwritten(&self.state.catalog, writes);
        let batch = Batch::new(self.operation, &self.state, writes, &[], self.data_at()?);
        let batch = batch.comparing(&self.state, unwritten).proving(&self.state);
        if let Some(since) = self.state.ahead_since {
            let before = self.progress.shared.observed.began.saturating_duration_since(since);
            self.progress.note(&Event::Ahead { before, bytes: batch.bytes_ahead() });
        }
        let written = batch.write(self.operation, self.store()?, self.progress, self.destination.blocking);
        self.note_files(&written, Phase::Written);
        Ok(written)
    }

    /// Waits until the caller confirms that it did not modify the tensors that were captured lazily, then compares
    /// replicas if the plan asks for it.
    ///
    /// # Errors
    /// As [`replicas::prove`]. A modification becomes the failure of the writes.
    fn confirm(&self, plan: &RankPlan, scope: &Scope, tensors: &mut BatchOutcome) -> Result<()> {
        // A save that has failed was never staged: its caller confirms nothing.
        if self.state.captures().lazy && tensors.failure.is_none() {
            // Half the time: the other ranks wait for this rank's receipt.
            let confirmed = self.progress.confirmation(self.operation.deadline() / 2);
            tensors.fail_unless(confirmed.and_then(|()| self.state.expect_whole()));
        }
        self.progress.note(&Event::Compared { outcome: scope.outcome(plan) });
        if !scope.compares(plan) {
            return Ok(());
        }
        let copies = tensors.copies(&self.state, scope).map_err(|error| self.progress.with_stage(error));
        replicas::prove(self.operation, plan, self.state.replicas.as_deref(), copies)?;
        self.progress.ended(Phase::Compared);
        Ok(())
    }

    /// Writes this rank's values, after its tensors.
    fn write_values(&self, store: &dyn Store, values: &ValuePlan, tensors: &BatchOutcome) -> BatchOutcome {
        // A save that has failed writes no more.
        let mine = values.mine.iter().filter(|_| tensors.failure.is_none());
        let mine: Vec<Write> = mine.map(|&leaf| Write::whole(leaf, 0)).collect();
        let data_at = writer::data_at(store.needs().pieces);
        let batch = Batch::new(self.operation, &self.state, &mine, &tensors.shapes, data_at);
        let written = batch.write(self.operation, store, &self.progress.beside(), self.destination.blocking);
        if tensors.failure.is_none() {
            self.note_files(&written, Phase::Durable);
        }
        written
    }

    /// Notes that files are durable, and the end of the phase that wrote them, or that it failed.
    fn note_files(&self, written: &BatchOutcome, phase: Phase) {
        if written.failure.is_some() {
            return self.progress.shared.observed.gave_up(phase);
        }
        for file in &written.shapes {
            self.progress.note(&Event::Wrote { bytes: file.bytes });
        }
        self.progress.ended(phase);
    }

    /// Publishes the files of all ranks, or deletes this rank's files.
    fn commit(
        &self,
        store: &dyn Store,
        values: &ValuePlan,
        tensors: BatchOutcome,
        written: BatchOutcome,
    ) -> Result<()> {
        let paths = [tensors.paths.as_slice(), written.paths.as_slice()].concat();
        let patience = self.patience();
        let receipt = batch::receipt(self.operation, store, &self.state, [tensors, written], patience);
        let receipt = receipt.map_err(|error| self.progress.with_stage(error));
        let committed = commit::commit(self.operation, store, self.destination, values, receipt, self.progress);
        let notes = committed.map_err(|failed| {
            if failed.nothing_published {
                self.discard(&paths);
            }
            failed.error
        })?;
        self.progress.noted(notes);
        self.progress.ended(Phase::Committed);
        Ok(())
    }

    /// Deletes the files of a failed attempt. Their names are this attempt's alone, so no other file is hit; a file
    /// that cannot be deleted now stays as an orphan, as after a crash.
    fn discard(&self, paths: &[String]) {
        for path in paths {
            let _ = self.store().map(|store| store.delete(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardfast_format::{COMMIT, Catalog};
    use shardfast_transfer::error::Kind;
    use shardfast_transfer::staging::STAGING_BYTES_MIN;

    use super::*;

    #[test]
    fn a_save_that_lasts_too_long_on_any_rank_fails_and_leaves_nothing() {
        const DEADLINE: Duration = Duration::from_secs(60);
        for slow in 0..2 {
            let dir = tempfile::tempdir().unwrap();
            let url = dir.path().join("step-00000001").to_str().unwrap().to_owned();
            let engine = |(rank, coord)| {
                let mut engine = Engine::new(coord, STAGING_BYTES_MIN).unwrap();
                if rank == slow {
                    Arc::get_mut(&mut engine).unwrap().save_max = Duration::ZERO;
                }
                engine
            };
            let engines: Vec<Arc<Engine>> = shardfast_coord::local(2).into_iter().enumerate().map(engine).collect();
            let begin = |engine: &Arc<Engine>| {
                let catalog = Arc::new(Catalog { leaves: Vec::new() });
                let state = State { catalog, providers: Vec::new(), ..State::default() };
                let user = BTreeMap::new();
                let prove = Prove::default();
                save(
                    engine,
                    Destination { url: url.clone(), step: Some(1), user, prove, blocking: true },
                    state,
                    DEADLINE,
                )
            };
            let saves: Vec<_> = engines.iter().map(begin).collect();
            for saved in saves {
                let error = saved.committed(None).unwrap_err();
                assert_eq!(error.kind, Kind::Unavailable, "{error}");
                assert!(error.message.contains("lasts less than") && error.message.contains("save again"), "{error}");
            }
            assert!(!dir.path().join("step-00000001").join(COMMIT).exists());
        }
    }
}
