//! A save, from the state that a rank holds to the commit that all ranks share.
//!
//! ```text
//! agree on a plan → bind providers to files → fill, write, make durable → commit
//! ```
//! Ranks first agree who writes what, then each writes its own files, and the commit publishes all of them or none.
//! Tensors flow first: values are encoded meanwhile, compared between ranks, and follow in files of their own.

use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use shardfast_format::{Catalog, EntrySpec, FileLayout, Leaf, LeafBody, data_file, part_name, sha256, value_name};
use shardfast_store::Store;
use smallvec::smallvec;

use crate::ablation;
use crate::agree::{Engine, Operation};
use crate::commit::{self, Receipt, Written};
use crate::error::{Error, Result};
use crate::pending::{Pending, Progress, panicked};
use crate::planning::{self, Orders};
use crate::provider::{Fences, Provider};
use crate::writer::{self, FileJob};

/// The priority of the threads that save while the program goes on: half of an ordinary thread's share of a core.
const BACKGROUND_NICE: i32 = 3;

/// What one rank gives to a save.
pub struct State {
    /// The rank's leaves.
    pub catalog: Arc<Catalog>,
    /// For each leaf of the catalog its parts' bytes, in order: one provider for an object, none for an alias.
    pub providers: Vec<Vec<Arc<dyn Provider>>>,
    /// Whether the caller lets the providers' memory be written only after the save is staged, and looks afterwards
    /// whether everybody kept to it: the save commits only after it has said so with [`Pending::vouch`].
    pub is_vouched_for: bool,
    /// Whether the caller does nothing else until the save has ended.
    pub is_waited_for: bool,
}

/// Where a save goes, and what is noted about it.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The URL of the checkpoint; must hold no committed checkpoint.
    pub url: String,
    /// The training step, if it is one of a run.
    pub step: Option<u64>,
    /// Whatever the user wants noted.
    pub user: BTreeMap<String, String>,
}

/// Begins to save `state` in the background. Every rank of the engine must call it; an exchange between ranks that
/// takes longer than `deadline` fails the save.
///
/// # Errors
/// Through the [`Pending`], the same on every rank: `Invalid` when the state is not one state (two leaves of one name,
/// ranks that disagree, elements that nobody or several hold), `Conflict` when a checkpoint is already there,
/// `Exhausted`, `Unavailable` or `Invalid` when the store fails. Nothing is published then.
pub fn save(engine: &Arc<Engine>, destination: Destination, state: State, deadline: Duration) -> Pending {
    let (devices, url) = (Arc::clone(&engine.devices), destination.url.clone());
    // Not here: even to look at a place can take long where it is far away.
    let open = move || shardfast_store::open_on(&url, &devices).map_err(Error::from);
    begin(engine, open, destination, state, deadline)
}

/// [`save`] into a store that is already open at the checkpoint's place.
pub fn save_to(
    engine: &Arc<Engine>,
    store: Result<Arc<dyn Store>>,
    destination: Destination,
    state: State,
    deadline: Duration,
) -> Pending {
    begin(engine, move || store, destination, state, deadline)
}

fn begin(
    engine: &Arc<Engine>,
    open: impl FnOnce() -> Result<Arc<dyn Store>> + Send + 'static,
    destination: Destination,
    state: State,
    deadline: Duration,
) -> Pending {
    let operation = engine.begin(format!("save {}", destination.url), deadline);
    let captured = !state.providers.iter().flatten().any(|provider| provider.is_urgent());
    Pending::spawn(captured, move |progress| run(&operation, open(), &destination, state, progress))
}

fn run(
    operation: &Operation,
    store: Result<Arc<dyn Store>>,
    destination: &Destination,
    state: State,
    progress: &Progress,
) -> Result<()> {
    if state.is_vouched_for && !state.is_waited_for {
        // The program goes on meanwhile, and whatever it does goes first; while it waits for us nothing else runs.
        let _ = rustix::process::setpriority_process(None, BACKGROUND_NICE);
    }
    let ready = store.as_ref().map_err(Error::clone).and_then(|_| state.check());
    let admit = || store.as_ref().map_err(Error::clone).and_then(|store| commit::refuse_taken(&**store, destination));
    let orders = planning::agree(operation, &state.catalog, ready, admit)?;
    let store = store?;
    progress.mark("planned");
    let waited = state.is_waited_for;

    let (values, mut written) = std::thread::scope(|scope| {
        let values = scope.spawn(|| planning::agree_values(operation, &orders, state.digests()));
        while ablation::is_off("providers") && !values.is_finished() {
            std::thread::yield_now();
        }
        let parts = orders.writes.iter().map(|write| (write.leaf, write.part)).collect();
        let written = Batch::bind(operation, &orders, &state, parts, &[]).write(operation, &*store, progress, waited);
        (values.join().unwrap_or_else(|panic| Err(panicked(&*panic))), written)
    });
    // Whatever became of the tensors here: the other ranks know no more of this save either.
    let values = values.inspect_err(|_| written.discard(&*store))?;
    let mine = values.mine.iter().map(|&leaf| (leaf, 0)).collect();
    let batch = Batch::bind(operation, &orders, &state, mine, &written.paths);
    written.extend(batch.write(operation, &*store, &Progress::unheard(), waited));
    // Of a save that has failed already nobody says anything: it was never staged.
    if state.is_vouched_for && written.receipt.is_ok() {
        // Half the time: the other ranks are waiting for this one to say how it went.
        written.fail_unless(progress.vouched(operation.deadline() / 2));
    }
    progress.mark("durable");

    let Writing { receipt, paths } = written;
    if let Ok(receipt) = &receipt {
        progress.wrote(receipt.files.len() as u64, receipt.files.iter().map(|file| file.bytes).sum());
    }
    commit::agree(operation, &*store, destination, &orders, &values, receipt).map_err(|failed| {
        if failed.nothing_published {
            discard(&*store, &paths);
        }
        failed.error
    })?;
    progress.mark("committed");
    Ok(())
}

/// Files of this rank that are written together.
struct Batch {
    jobs: Result<Vec<FileJob>>,
    written: Vec<Written>,
}

impl Batch {
    /// Lays out the files for these parts and values, one for each key of the state, and says where each will lie.
    /// `earlier` are this rank's files before these.
    fn bind(
        operation: &Operation,
        orders: &Orders,
        state: &State,
        parts: Vec<(u32, u32)>,
        earlier: &[String],
    ) -> Batch {
        let mut written = Vec::with_capacity(parts.len());
        let jobs = bind(operation, orders, state, parts, earlier, &mut written);
        Batch { jobs, written }
    }

    /// Writes the files and makes them durable, contents first, then names.
    fn write(self, operation: &Operation, store: &dyn Store, progress: &Progress, is_waited_for: bool) -> Writing {
        let paths = self.jobs.iter().flatten().map(|job| job.path.clone()).collect::<Vec<_>>();
        let receipt = self.jobs.and_then(|jobs| {
            // A defect here must fail the save on every rank, not leave the others waiting for this one.
            let files = catch_unwind(AssertUnwindSafe(|| {
                let files = writer::run(store, &jobs, &operation.engine.staging, progress, is_waited_for)?;
                let names: Vec<&str> = paths.iter().map(String::as_str).collect();
                store.sync(&names)?;
                Ok(files)
            }));
            Ok(Receipt { files: files.unwrap_or_else(|panic| Err(panicked(&*panic)))?, written: self.written })
        });
        Writing { receipt, paths }
    }
}

/// What became of one or more batches.
struct Writing {
    receipt: Result<Receipt>,
    /// Files that may be there.
    paths: Vec<String>,
}

impl Writing {
    fn extend(&mut self, other: Writing) {
        self.paths.extend(other.paths);
        match (&mut self.receipt, other.receipt) {
            (Ok(receipt), Ok(more)) => {
                receipt.files.extend(more.files);
                receipt.written.extend(more.written);
            }
            (Ok(_), Err(error)) => self.receipt = Err(error),
            (Err(_), _) => {}
        }
    }

    fn fail_unless(&mut self, kept: Result<()>) {
        if let (Ok(_), Err(error)) = (&self.receipt, kept) {
            self.receipt = Err(error);
        }
    }

    fn discard(&self, store: &dyn Store) {
        discard(store, &self.paths);
    }
}

fn bind(
    operation: &Operation,
    orders: &Orders,
    state: &State,
    parts: Vec<(u32, u32)>,
    earlier: &[String],
    written: &mut Vec<Written>,
) -> Result<Vec<FileJob>> {
    let rank = operation.engine.rank();
    let leaves = &state.catalog.leaves;
    let mut by_key: BTreeMap<&str, Vec<(u32, u32)>> = BTreeMap::new();
    for (leaf, part) in parts {
        by_key.entry(&leaves[leaf as usize].name.key).or_default().push((leaf, part));
    }
    let mut jobs: Vec<FileJob> = Vec::new();
    for (key, mut parts) in by_key {
        // The widest elements first, so that each tensor is aligned to its element.
        parts.sort_by_key(|&(leaf, part)| (std::cmp::Reverse(item_bytes(&leaves[leaf as usize])), leaf, part));
        let index =
            earlier.iter().filter(|path| path.strip_prefix(key).is_some_and(|rest| rest.starts_with('/'))).count();
        for (index, parts) in (index as u32..).zip(without_namesakes(rank, state, parts)) {
            let (parts, entries): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            let layout = FileLayout::new(&entries, &BTreeMap::new())?;
            let provider = |&(leaf, part): &(u32, u32)| &state.providers[leaf as usize][part as usize];
            let file = (earlier.len() + jobs.len()) as u32;
            for (of, &offset) in parts.iter().zip(&layout.offsets) {
                written.push(Written { leaf: of.0, part: of.1, file, offset, bytes: provider(of).bytes() });
            }
            let path = data_file(key, &orders.attempt, rank, index)?;
            let providers = parts.iter().map(|of| Arc::clone(provider(of))).collect();
            let names = parts.iter().map(|&(leaf, _)| leaves[leaf as usize].name.to_string()).collect();
            jobs.push(FileJob { path, layout, providers, names });
        }
    }
    Ok(jobs)
}

/// Parts and values with their entries, spread over as few files as it takes that no file has two entries of one name:
/// a leaf may really be called `w[0:4]` or `rng@rank3`, as a part or a value of another one is in its file.
fn without_namesakes(rank: u32, state: &State, parts: Vec<(u32, u32)>) -> Vec<Vec<((u32, u32), EntrySpec)>> {
    let mut files: Vec<(HashSet<String>, Vec<_>)> = Vec::new();
    for (leaf, part) in parts {
        let entry = entry(rank, state, leaf as usize, part as usize);
        let free = files.iter().position(|(names, _)| !names.contains(&entry.name)).unwrap_or(files.len());
        if free == files.len() {
            files.push(Default::default());
        }
        files[free].0.insert(entry.name.clone());
        files[free].1.push(((leaf, part), entry));
    }
    files.into_iter().map(|(_, parts)| parts).collect()
}

fn item_bytes(leaf: &Leaf) -> u64 {
    match leaf.body {
        LeafBody::Tensor { dtype, .. } => dtype.size_bytes(),
        LeafBody::Object { .. } | LeafBody::Alias { .. } => 0,
    }
}

fn entry(rank: u32, state: &State, leaf: usize, part: usize) -> EntrySpec {
    let name = &state.catalog.leaves[leaf].name.name;
    match &state.catalog.leaves[leaf].body {
        LeafBody::Tensor { dtype, shape, parts } => {
            EntrySpec { name: part_name(name, &parts[part], shape), dtype: *dtype, shape: parts[part].lengths.clone() }
        }
        LeafBody::Object { .. } | LeafBody::Alias { .. } => EntrySpec {
            name: if rank == 0 { name.clone() } else { value_name(name, rank) },
            dtype: shardfast_format::DType::U8,
            shape: smallvec![state.providers[leaf][part].bytes()],
        },
    }
}

/// Gives the space of a failed attempt back. Its names are this attempt's alone, so nothing else can be hit; what
/// cannot be deleted now is an orphan like that of a crash.
fn discard(store: &dyn Store, paths: &[String]) {
    for path in paths {
        let _ = store.delete(path);
    }
}

impl State {
    fn check(&self) -> Result<()> {
        self.catalog.validate()?;
        if self.providers.len() != self.catalog.leaves.len() {
            return Err(Error::internal(format!(
                "expected the bytes of {} leaves, found those of {}",
                self.catalog.leaves.len(),
                self.providers.len()
            )));
        }
        for (leaf, providers) in self.catalog.leaves.iter().zip(&self.providers) {
            let expected: Vec<Option<u64>> = match &leaf.body {
                LeafBody::Tensor { dtype, parts, .. } => {
                    parts.iter().map(|part| Some(part.numel() * dtype.size_bytes())).collect()
                }
                LeafBody::Object { .. } => vec![None],
                LeafBody::Alias { .. } => Vec::new(),
            };
            let fits = expected.len() == providers.len()
                && expected.iter().zip(providers).all(|(bytes, provider)| bytes.is_none_or(|b| b == provider.bytes()));
            if !fits {
                let found: Vec<u64> = providers.iter().map(|provider| provider.bytes()).collect();
                return Err(Error::invalid(format!(
                    "leaf {}: its parts need {expected:?} bytes, its memory has {found:?}",
                    leaf.name
                )));
            }
        }
        Ok(())
    }

    /// SHA-256 of every encoded value, in the catalog's order.
    fn digests(&self) -> Result<Vec<[u8; 32]>> {
        let leaves = self.catalog.leaves.iter().zip(&self.providers);
        leaves
            .filter(|(leaf, _)| matches!(leaf.body, LeafBody::Object { .. }))
            .map(|(_, providers)| {
                let mut bytes = vec![0; providers[0].bytes() as usize];
                providers[0].fill(0, &mut bytes, &mut Fences::default())?;
                Ok(sha256(&bytes))
            })
            .collect()
    }
}
