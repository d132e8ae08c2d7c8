//! The data files that a rank writes together: laid out, written, and reported to rank 0.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use shardfast_format::{Catalog, LeafBody};
use shardfast_plan::Write;
use shardfast_store::{Pieces, Store};
use shardfast_transfer::error::{Error, Patience, Result, panicked};
use shardfast_transfer::progress::Progress;
use shardfast_transfer::provider::Evidence;
use shardfast_transfer::sums::Summed;
use shardfast_transfer::writer::{self, FileJob, Written};

use crate::commit;
use crate::layout::{Layout, Placed};
use crate::operation::Operation;
use crate::receipt::{FileShape, Receipt, Structure, ValueFiles, WrittenLeaf};
use crate::replicas::{self, Copies, Scope};
use crate::state::{PartRange, State};

/// Files to write.
pub(crate) struct Batch {
    jobs: Result<Vec<FileJob>>,
    /// Ranges that this rank holds and does not write; they are read for the comparison with other ranks' copies.
    unwritten: Vec<PartRange>,
    /// The bytes of `unwritten`, in order, then those of `evidence`.
    summed: Vec<Summed>,
    evidence: Vec<Evidence>,
    shapes: Vec<FileShape>,
    placed: Vec<Placed>,
}

impl Batch {
    /// Lays out the files for these parts and values, one for each key of the state. `earlier` are this rank's files
    /// before these; the data of each begin at a multiple of `data_at`.
    pub(crate) fn new(
        operation: &Operation,
        state: &State,
        writes: &[Write],
        earlier: &[FileShape],
        data_at: u64,
    ) -> Batch {
        let (jobs, shapes, placed) = match Layout::new(operation, state, writes, earlier, data_at) {
            Ok(Layout { jobs, shapes, placed }) => (Ok(jobs), shapes, placed),
            Err(error) => (Err(error), Vec::new(), Vec::new()),
        };
        Batch { jobs, unwritten: Vec::new(), summed: Vec::new(), evidence: Vec::new(), shapes, placed }
    }

    /// Sums the written bytes while they are written, and `unwritten`, which is read beside.
    pub(crate) fn comparing(mut self, state: &State, unwritten: Vec<PartRange>) -> Batch {
        match (&mut self.jobs, replicas::summed(state, &unwritten)) {
            (Ok(jobs), Ok(summed)) => {
                jobs.iter_mut().for_each(|job| job.is_summed = true);
                self.summed = summed;
            }
            (jobs @ Ok(_), Err(error)) => *jobs = Err(error),
            (Err(_), _) => {}
        }
        Batch { unwritten, ..self }
    }

    /// Reads the program's own bytes where the save holds copies already, and compares them.
    pub(crate) fn proving(mut self, state: &State) -> Batch {
        self.evidence = state.providers.iter().flatten().flat_map(|provider| provider.evidence()).collect();
        let live = |one: &Evidence| Summed { provider: Arc::clone(&one.live), name: one.name.clone() };
        self.summed.extend(self.evidence.iter().map(live));
        self
    }

    /// Returns the number of bytes that the save has had before it began.
    pub(crate) fn bytes_ahead(&self) -> u64 {
        self.evidence.iter().map(|one| one.live.bytes()).sum()
    }

    /// Writes the files and makes them durable, contents first, then names.
    pub(crate) fn write(
        self,
        operation: &Operation,
        store: &dyn Store,
        progress: &Progress,
        blocking: bool,
    ) -> BatchOutcome {
        let Batch { jobs, unwritten, summed, evidence, shapes, placed } = self;
        let paths = jobs.iter().flatten().map(|job| job.path.clone()).collect::<Vec<_>>();
        let written = jobs.and_then(|jobs| {
            // A defect here must fail the save on every rank, not leave the others waiting for this one.
            let files = catch_unwind(AssertUnwindSafe(|| {
                if !jobs.is_empty() && matches!(store.needs().pieces, Pieces::Parts(_)) {
                    std::thread::sleep((operation.engine.spread)(operation.engine.world()));
                }
                let staging = &operation.engine.staging;
                let written = writer::run(store, &jobs, &summed, staging, progress, blocking, operation.deadline())?;
                let names: Vec<&str> = paths.iter().map(String::as_str).collect();
                store.sync(&names)?;
                prove(&evidence, &written.sums[summed.len() - evidence.len()..])?;
                Ok(written)
            }));
            files.unwrap_or_else(|panic| Err(panicked(&*panic)))
        });
        let (written, failure) = match written {
            Ok(written) => (written, None),
            Err(error) => (Written::default(), Some(error)),
        };
        let mut replayed = BTreeMap::<String, u64>::new();
        for one in &evidence {
            *replayed.entry(one.how.to_owned()).or_default() += one.live.bytes();
        }
        let replayed = replayed.into_iter().collect();
        BatchOutcome { shapes, placed, unwritten, written, failure, replayed, paths }
    }
}

/// Compares the bytes that the save held with the program's bytes at the beginning of the save.
///
/// # Errors
/// `Invalid` with the first difference.
fn prove(evidence: &[Evidence], sums: &[u64]) -> Result<()> {
    for (one, &live) in evidence.iter().zip(sums) {
        if !(one.agrees)(live)? {
            return Err(Error::invalid(format!(
                "{}: what was captured ahead of the save and rolled forward has other bits than the tensor had when \
                 the save began, so it was changed by something else than the optimizer's step (clamped or copied \
                 into after it, or its gradient was changed; on a device also if the step made it NaN, of which a \
                 host has other bits); nothing was committed, and later saves of this process \
                 are captured in one step, as with over=1",
                one.name
            )));
        }
    }
    Ok(())
}

/// A batch that was written or failed.
pub(crate) struct BatchOutcome {
    pub(crate) shapes: Vec<FileShape>,
    placed: Vec<Placed>,
    unwritten: Vec<PartRange>,
    written: Written,
    pub(crate) failure: Option<Error>,
    /// Bytes that were captured ahead, by the variant that replayed them.
    replayed: Vec<(String, u64)>,
    /// Files that may exist.
    pub(crate) paths: Vec<String>,
}

impl BatchOutcome {
    /// Notes a failure that makes it unusable.
    pub(crate) fn fail_unless(&mut self, kept: Result<()>) {
        if let Err(error) = kept {
            self.failure.get_or_insert(error);
        }
    }

    /// Returns the files with their sizes, both in the order in which the files were laid out.
    fn files(&self) -> Vec<(String, u64)> {
        self.paths.iter().cloned().zip(self.shapes.iter().map(|file| file.bytes)).collect()
    }

    /// Returns the checksums of the written bytes and of the bytes read beside.
    ///
    /// # Errors
    /// The reason why this rank does not have them.
    pub(crate) fn copies<'a>(&self, state: &'a State, scope: &'a Scope) -> Result<Copies<'a>> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let Written { entry_crcs, sums, .. } = &self.written;
        // Pieces were placed file by file, in the order of the entries.
        let crcs = entry_crcs.iter().flatten().chain(sums).copied();
        let written = self.placed.iter().map(|placed| placed.piece.range);
        let ranges = written.chain(self.unwritten.iter().copied()).zip(crcs);
        Ok(Copies::new(&state.catalog, scope, ranges))
    }
}

/// Returns the receipt of this rank's files for rank 0.
///
/// # Errors
/// The reason why it was not written, or `Corrupt` when files have been removed since.
pub(crate) fn receipt(
    operation: &Operation,
    store: &dyn Store,
    state: &State,
    [tensors, values]: [BatchOutcome; 2],
    patience: Patience<'_>,
) -> Result<Receipt> {
    let files = [tensors.files(), values.files()].concat();
    if let Some(error) = tensors.failure.or(values.failure) {
        return Err(error);
    }
    operation.expect_young(std::time::Duration::ZERO)?;
    if !store.needs().lists_are_current {
        commit::still_there(store, &files, patience)?;
    }
    let header_crcs =
        tensors.written.header_crcs.iter().chain(&values.written.header_crcs).map(|crc| crc.to_le_bytes()).collect();
    let mut placed = values.placed;
    placed.sort_by_key(|placed| placed.piece.range);
    let extents = placed.iter().map(|placed| (placed.file, placed.offset, placed.piece.range.bytes)).collect();
    Ok(Receipt {
        tensors: structure(&state.catalog, tensors.shapes, tensors.placed),
        values: ValueFiles { files: values.shapes, extents },
        header_crcs,
        replayed: tensors.replayed,
    })
}

/// Returns the structure of the files of tensors.
fn structure(catalog: &Catalog, files: Vec<FileShape>, mut placed: Vec<Placed>) -> Structure {
    placed.sort_by_key(|placed| placed.piece.range);
    let mut placed = placed.into_iter().peekable();
    let mut structure = Structure { files, ..Structure::default() };
    for (index, leaf) in (0u32..).zip(&catalog.leaves) {
        match &leaf.body {
            LeafBody::Tensor { dtype, shape, parts } => {
                let mut regions = Vec::new();
                let is_of_it = |placed: &Placed| placed.piece.range.leaf == index;
                while let Some(Placed { piece, file, offset }) = placed.next_if(is_of_it) {
                    regions.push((piece.region, file, offset));
                }
                if !regions.is_empty() || parts.is_empty() {
                    let (name, layout, shape) = (leaf.name.clone(), leaf.layout.clone(), shape.clone());
                    structure.leaves.push(WrittenLeaf { name, dtype: *dtype, shape, layout, regions });
                }
            }
            LeafBody::Alias { of } => structure.aliases.push((leaf.name.clone(), of.clone())),
            LeafBody::Object { .. } => {}
        }
    }
    structure
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::time::Duration;

    use shardfast_format::{DType, Dims, Leaf, LeafName, Region};
    use shardfast_store::testing::appended::AppendStore;
    use shardfast_store::{Parts, open};
    use shardfast_transfer::provider::{Fences, Provider};

    use super::*;
    use crate::engine::Engine;
    use crate::save::save_to;
    use crate::state::{Destination, Prove};

    /// Log of the events, in order.
    static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn noted(world: u32) -> Duration {
        LOG.lock().unwrap().push(format!("pause of one of {world}"));
        Duration::ZERO
    }

    struct Noted;

    impl Provider for Noted {
        fn bytes(&self) -> u64 {
            8
        }

        fn fill(&self, _: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
            LOG.lock().unwrap().push("write".to_owned());
            out.fill(0);
            Ok(())
        }
    }

    /// Returns the events of a save of one tensor.
    fn log(store: Arc<dyn Store>) -> Vec<String> {
        let mut engine = Engine::new(shardfast_coord::solo(), 4 << 20).unwrap();
        Arc::get_mut(&mut engine).unwrap().spread = noted;
        let body =
            LeafBody::Tensor { dtype: DType::U8, shape: Dims::from_slice(&[8]), parts: vec![Region::whole(&[8])] };
        let leaf = Leaf { name: LeafName::new("model", "w"), body, layout: String::new() };
        let catalog = Arc::new(Catalog { leaves: vec![leaf] });
        let providers: Vec<Vec<Arc<dyn Provider>>> = vec![vec![Arc::new(Noted)]];
        let state = State { catalog, providers, ..State::default() };
        let (url, user) = (store.url().to_owned(), BTreeMap::new());
        let destination = Destination { url, step: None, user, prove: Prove::default(), blocking: true };
        save_to(&engine, Ok(store), destination, state, Duration::from_secs(60)).committed(None).unwrap();
        std::mem::take(&mut *LOG.lock().unwrap())
    }

    #[test]
    fn ranks_pause_before_the_first_request_where_storage_takes_requests() {
        let parts = Parts { bytes_min: 1 << 20, bytes_max: 1 << 20, count_max: 10 };
        let joined = open("memory://batch/parts").unwrap();
        assert_eq!(log(Arc::new(AppendStore::new(joined, parts, 1))), ["pause of one of 1", "write"]);
        assert_eq!(log(open("memory://batch/any").unwrap()), ["write"]);
    }
}
