//! A save, from the state that a rank holds to the commit that all ranks share.
//!
//! ```text
//! draft a plan → bind providers to files → fill, write, make durable → commit
//!        ↘ agree on the plan, then on the values ↗
//! ```
//! Each rank drafts what it writes and begins at once; meanwhile the ranks find whether their drafts are one plan. Only
//! a rank that cannot know alone what to write waits for its orders, and copies its state meanwhile. Then each rank has
//! written its own files, and the commit publishes all of them or none. Tensors flow first: values are encoded
//! meanwhile, compared between ranks, and follow in files of their own.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Select, bounded};
use shardfast_format::{Catalog, LeafBody, sha256};
use shardfast_plan::{Replicas, Write};
use shardfast_store::Store;

use crate::ablation;
use crate::agree::{Engine, Operation};
use crate::ahead::{Ahead, Range};
use crate::background;
use crate::commit::{self, FileShape, News, Receipt, Structure, ValueFiles, WrittenLeaf};
use crate::contents;
use crate::error::{Error, Result, retry_within};
use crate::layout::{self, Layout, Placed};
use crate::pending::{Pending, Progress, panicked};
use crate::planning::{self, Orders, Planning, ValueOrders};
use crate::provider::{Fences, Provider, Run};
use crate::replicas::{self, Compared, Copies, Prove, Scope};
use crate::sums::Summed;
use crate::writer::{self, FileJob, Written};

/// What one rank gives to a save.
pub struct State {
    /// The rank's leaves.
    pub catalog: Arc<Catalog>,
    /// For each leaf of the catalog its parts' bytes, in order: one provider for an object, none for an alias.
    pub providers: Vec<Vec<Arc<dyn Provider>>>,
    /// Which ranks hold the same parts of each leaf; `None` when that is not known.
    pub replicas: Option<Arc<Replicas>>,
    /// For each leaf when the ranks' replicas of it are compared; of leaves beyond its end at the first save.
    pub compared: Arc<Vec<Compared>>,
    /// Whether the caller lets the providers' memory be written only after the save is staged, and looks afterwards
    /// whether everybody kept to it: the save commits only after it has said so with [`Pending::vouch`].
    pub is_vouched_for: bool,
    /// Whether the caller does nothing else until the save has ended.
    pub is_waited_for: bool,
}

/// What has to be known of a state before it is put together.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Whether any of its providers [is urgent](Provider::is_urgent).
    pub is_urgent: bool,
    /// Whether the program goes on while it is saved, and whatever that does goes first.
    pub gives_way: bool,
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
    /// Which replicas are compared: ranks that hold the same region with different bytes fail the save.
    pub prove: Prove,
}

/// Begins to save `state` in the background. Every rank of the engine must call it; an exchange between ranks that
/// takes longer than `deadline` fails the save.
///
/// # Errors
/// Through the [`Pending`], the same on every rank: `Invalid` when the state is not one state (two leaves of one name,
/// ranks that disagree, elements that nobody or several hold), `Conflict` when a checkpoint is already there,
/// `Exhausted`, `Unavailable` or `Invalid` when the store fails. Nothing is published then.
pub fn save(engine: &Arc<Engine>, destination: Destination, state: State, deadline: Duration) -> Pending {
    save_deferred(engine, destination, state.pace(), || state, deadline)
}

/// [`save`] of what `state` puts together in the background: with many tensors that takes a while.
pub fn save_deferred(
    engine: &Arc<Engine>,
    destination: Destination,
    pace: Pace,
    state: impl FnOnce() -> State + Send + 'static,
    deadline: Duration,
) -> Pending {
    let (devices, url) = (Arc::clone(&engine.devices), destination.url.clone());
    // Not here: even to look at a place can take long where it is far away.
    let open = move || retry_within(deadline, || None, || Ok(shardfast_store::open_on(&url, &devices)?));
    begin(engine, open, destination, pace, state, deadline)
}

/// [`save`] into a store that is already open at the checkpoint's place.
pub fn save_to(
    engine: &Arc<Engine>,
    store: Result<Arc<dyn Store>>,
    destination: Destination,
    state: State,
    deadline: Duration,
) -> Pending {
    begin(engine, move || store, destination, state.pace(), || state, deadline)
}

fn begin(
    engine: &Arc<Engine>,
    open: impl FnOnce() -> Result<Arc<dyn Store>> + Send + 'static,
    destination: Destination,
    pace: Pace,
    state: impl FnOnce() -> State + Send + 'static,
    deadline: Duration,
) -> Pending {
    let how = match destination.prove {
        Prove::Nothing => ", replicas not compared",
        Prove::FirstSave => "",
        Prove::EverySave => ", all replicas compared",
    };
    // A place may be used again after a failure: the step tells whether ranks save the same state.
    let step = destination.step.map(|step| format!(", step {step}")).unwrap_or_default();
    let operation = engine.begin_one(format!("save {}{how}", destination.url), step, deadline);
    // While the caller waits for what is urgent, nothing has to go first.
    let background = (pace.gives_way && !pace.is_urgent).then_some(&engine.background);
    Pending::spawn(background, !pace.is_urgent, move |progress| {
        run(&operation, open(), &destination, state(), progress)
    })
}

fn run(
    operation: &Operation,
    store: Result<Arc<dyn Store>>,
    destination: &Destination,
    state: State,
    progress: &Progress,
) -> Result<()> {
    if state.gives_way() {
        background::take_less();
    }
    // Before anything is written there.
    let ready = store.as_ref().map_err(Error::clone).and_then(|store| {
        contents::refuse_foreign(&**store, &destination.url, 0)?;
        state.check()
    });
    let admit = || {
        let store = store.as_ref().map_err(Error::clone)?;
        retry_within(operation.deadline(), || None, || commit::admit(&**store, destination))
    };
    let mut scope = Scope::of(&state, destination.prove, operation.engine.world());
    let rules = Arc::clone(&scope.rules);
    let planning = Planning { operation, catalog: &state.catalog, replicas: state.replicas.as_ref(), rules };
    let before = planning.last_proven();
    let draft = ready.and_then(|()| planning.draft());
    let drafted = draft.as_ref().ok().and_then(|draft| draft.as_ref().map(|draft| Arc::clone(&draft.writes)));
    scope.remember(before, draft.as_ref().ok().and_then(|draft| draft.as_ref()?.proven));
    if drafted.is_some() {
        progress.mark("planned");
    }
    let is_sound = draft.is_ok();

    let (agreed, written) = std::thread::scope(|threads| {
        let (orders, planned) = bounded(1);
        let agreement = threads.spawn(|| {
            let agreed = planning.agree(draft, admit);
            let _ = orders.send(agreed.as_ref().map(|orders| Arc::clone(&orders.writes)).map_err(Error::clone));
            drop(orders);
            let agreed = agreed.and_then(|orders| {
                let values = planning::agree_values(operation, &orders, &state.catalog, state.digests())?;
                Ok((orders, values))
            });
            agreed.inspect_err(|error| progress.cancel(error))
        });
        let staging = &operation.engine.staging;
        // Without a draft nothing can be written before the others were heard; but copied.
        let ahead = (is_sound && drafted.is_none() && !state.is_waited_for)
            .then(|| Ahead::stage(&state, staging, progress, &|pause| is_heard(&planned, pause)));
        let ordered = || planned.recv().unwrap_or_else(|_| Err(unheard())).inspect(|_| progress.mark("planned"));
        let writes = drafted.map_or_else(ordered, Ok);
        let written = writes.and_then(|writes| {
            while ablation::is_off("providers") && !agreement.is_finished() {
                std::thread::yield_now();
            }
            let store = store.as_deref().map_err(Error::clone)?;
            let unwritten = scope.unwritten(&state.catalog, &writes);
            let copied = ahead.map(|ahead| ahead.over(&state, &[state.ranges(&writes), unwritten.clone()].concat()));
            let source = copied.as_ref().unwrap_or(&state);
            let batch = Batch::bind(operation, source, &writes, &[]).summing(replicas::summed(source, &unwritten));
            let written = batch.write(operation, store, progress, state.is_waited_for);
            progress.mark("written");
            Ok((written, unwritten))
        });
        (agreement.join().unwrap_or_else(|panic| Err(panicked(&*panic))), written)
    });
    // Whatever became of the tensors here: the other ranks know no more of this save either.
    let (orders, values) = agreed.inspect_err(|_| {
        if let (Ok(store), Ok((written, _))) = (&store, &written) {
            written.discard(&**store);
        }
    })?;
    let store = store?;
    let (mut written, unwritten) = written?;
    let confirmed = confirm(operation, &state, &scope, &orders, &mut written, &unwritten, progress);
    confirmed.inspect_err(|_| written.discard(&*store))?;
    let mine: Vec<Write> = values.mine.iter().map(|&leaf| Write::whole(leaf, 0)).collect();
    let values_written = Batch::bind(operation, &state, &mine, &written.shapes).write(
        operation,
        &*store,
        &Progress::unheard(),
        state.is_waited_for,
    );
    progress.mark("durable");
    progress.wrote(&written.shapes);
    progress.wrote(&values_written.shapes);

    let paths = [written.paths.as_slice(), values_written.paths.as_slice()].concat();
    let receipt = receipt(operation, &*store, &state, &orders, &values, written, values_written);
    let receipt = receipt.map_err(|error| progress.told(error));
    commit::agree(operation, &*store, destination, &orders, &values, receipt).map_err(|failed| {
        if failed.nothing_published {
            discard(&*store, &paths);
        }
        failed.error
    })?;
    planning::committed(operation, &orders);
    progress.mark("committed");
    Ok(())
}

/// Waits until the caller says that the memory was left alone, then compares replicas where these orders ask for it.
///
/// # Errors
/// As [`replicas::prove`]. What the caller says becomes the failure of what was `written`.
fn confirm(
    operation: &Operation,
    state: &State,
    scope: &Scope,
    orders: &Orders,
    written: &mut Writing,
    unwritten: &[Range],
    progress: &Progress,
) -> Result<()> {
    // A save that has failed was never staged: its caller confirms nothing.
    if state.is_vouched_for && written.failure.is_none() {
        // Half the time: the other ranks are waiting for this one to say how it went.
        written.fail_unless(progress.vouched(operation.deadline() / 2).and_then(|()| state.expect_whole()));
    }
    progress.compared(scope.outcome(orders));
    if !scope.compares(orders) {
        return Ok(());
    }
    let copies = written.copies(state, scope, unwritten).map_err(|error| progress.told(error));
    replicas::prove(operation, orders, state.replicas.as_deref(), copies)?;
    progress.mark("compared");
    Ok(())
}

/// Whether the orders are there, or will never be, within that time.
fn is_heard<T>(orders: &Receiver<T>, within: Duration) -> bool {
    let mut arrival = Select::new();
    arrival.recv(orders);
    arrival.ready_timeout(within).is_ok()
}

fn unheard() -> Error {
    Error::internal("the agreement between ranks ended without a word")
}

/// Files of this rank that are written together.
struct Batch {
    jobs: Result<Vec<FileJob>>,
    /// What is read beside, to be summed.
    summed: Option<Vec<Summed>>,
    shapes: Vec<FileShape>,
    placed: Vec<Placed>,
}

impl Batch {
    /// Lays out the files for these parts and values. `earlier` are this rank's files before these.
    fn bind(operation: &Operation, state: &State, writes: &[Write], earlier: &[FileShape]) -> Batch {
        match Layout::new(operation, state, writes, earlier) {
            Ok(Layout { jobs, shapes, placed }) => Batch { jobs: Ok(jobs), summed: None, shapes, placed },
            Err(error) => Batch { jobs: Err(error), summed: None, shapes: Vec::new(), placed: Vec::new() },
        }
    }

    /// Sums what is written, and this, while it is written.
    fn summing(mut self, summed: Result<Vec<Summed>>) -> Batch {
        let (jobs, summed) = match (self.jobs, summed) {
            (Ok(jobs), Ok(summed)) => (Ok(jobs), Some(summed)),
            (Err(error), _) | (_, Err(error)) => (Err(error), None),
        };
        let jobs = jobs.map(|jobs| jobs.into_iter().map(|job| FileJob { is_summed: true, ..job }).collect());
        (self.jobs, self.summed) = (jobs, summed);
        self
    }

    /// Writes the files and makes them durable, contents first, then names.
    fn write(self, operation: &Operation, store: &dyn Store, progress: &Progress, is_waited_for: bool) -> Writing {
        let paths = self.jobs.iter().flatten().map(|job| job.path.clone()).collect::<Vec<_>>();
        let summed = self.summed.unwrap_or_default();
        let written = self.jobs.and_then(|jobs| {
            // A defect here must fail the save on every rank, not leave the others waiting for this one.
            let files = catch_unwind(AssertUnwindSafe(|| {
                let staging = &operation.engine.staging;
                let written =
                    writer::run(store, &jobs, &summed, staging, progress, is_waited_for, operation.deadline())?;
                let names: Vec<&str> = paths.iter().map(String::as_str).collect();
                store.sync(&names)?;
                Ok(written)
            }));
            files.unwrap_or_else(|panic| Err(panicked(&*panic)))
        });
        let (written, failure) = match written {
            Ok(written) => (written, None),
            Err(error) => (Written::default(), Some(error)),
        };
        Writing { shapes: self.shapes, placed: self.placed, written, failure, paths }
    }
}

/// What became of a batch.
struct Writing {
    shapes: Vec<FileShape>,
    placed: Vec<Placed>,
    written: Written,
    failure: Option<Error>,
    /// Files that may be there.
    paths: Vec<String>,
}

impl Writing {
    fn fail_unless(&mut self, kept: Result<()>) {
        if let Err(error) = kept {
            self.failure.get_or_insert(error);
        }
    }

    /// The files with their sizes; both are in the order in which the files were laid out.
    fn files(&self) -> Vec<(String, u64)> {
        self.paths.iter().cloned().zip(self.shapes.iter().map(|file| file.bytes)).collect()
    }

    /// The checksums of what was written and of what was read beside.
    ///
    /// # Errors
    /// What kept this rank from having them.
    fn copies<'a>(&self, state: &'a State, scope: &'a Scope, unwritten: &[Range]) -> Result<Copies<'a>> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let Written { entry_crcs, sums, .. } = &self.written;
        // Pieces were placed file by file, in the order of the entries.
        let crcs = entry_crcs.iter().flatten().chain(sums).copied();
        let written = self.placed.iter().map(|placed| placed.piece.range);
        let ranges = written.chain(unwritten.iter().copied()).zip(crcs);
        Ok(Copies::new(&state.catalog, scope, ranges))
    }

    fn discard(&self, store: &dyn Store) {
        discard(store, &self.paths);
    }
}

/// What this rank tells rank 0 of what it wrote.
fn receipt(
    operation: &Operation,
    store: &dyn Store,
    state: &State,
    orders: &Orders,
    compared: &ValueOrders,
    tensors: Writing,
    values: Writing,
) -> Result<Receipt> {
    let files = [tensors.files(), values.files()].concat();
    if let Some(error) = tensors.failure.or(values.failure) {
        return Err(error);
    }
    commit::still_there(store, &files, operation.deadline())?;
    let header_crcs =
        tensors.written.header_crcs.iter().chain(&values.written.header_crcs).map(|crc| crc.to_le_bytes()).collect();
    let mut placed = values.placed;
    placed.sort_by_key(|placed| placed.piece.range);
    let extents = placed.iter().map(|placed| (placed.file, placed.offset, placed.piece.range.bytes)).collect();
    let files = Arc::new(ValueFiles { files: values.shapes, extents });
    let is_known = planning::knows(operation, orders, compared, &files);
    let values = (!is_known).then(|| Arc::unwrap_or_clone(files));
    let tensors = match orders.is_known {
        true => None,
        false => Some(structure(&state.catalog, tensors.shapes, tensors.placed)),
    };
    let news = (tensors.is_some() || values.is_some()).then_some(News { tensors, values });
    Ok(Receipt { news, header_crcs })
}

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

/// Gives the space of a failed attempt back. Its names are this attempt's alone, so nothing else can be hit; what
/// cannot be deleted now is an orphan like that of a crash.
fn discard(store: &dyn Store, paths: &[String]) {
    for path in paths {
        let _ = store.delete(path);
    }
}

impl State {
    fn pace(&self) -> Pace {
        let is_urgent = self.providers.iter().flatten().any(|provider| provider.is_urgent());
        Pace { is_urgent, gives_way: self.gives_way() }
    }

    fn gives_way(&self) -> bool {
        self.is_vouched_for && !self.is_waited_for
    }

    /// The bytes of a part, or of a value.
    pub(crate) fn provider(&self, leaf: u32, part: u32) -> Result<Arc<dyn Provider>> {
        let of = self.providers[leaf as usize].get(part as usize).map(Arc::clone);
        let name = &self.catalog.leaves[leaf as usize].name;
        of.ok_or_else(|| Error::internal(format!("{name}: it has no part {part}")))
    }

    /// The bytes of a range of a part.
    pub(crate) fn range(&self, range: &Range) -> Result<Arc<dyn Provider>> {
        let of = self.provider(range.leaf, range.part)?;
        match (range.at, range.bytes) == (0, of.bytes()) {
            true => Ok(of),
            false => Ok(Arc::new(Run::new(of, range.at, range.bytes))),
        }
    }

    /// Where that lies which is to be written, as far as the orders make sense.
    fn ranges(&self, writes: &[Write]) -> Vec<Range> {
        let of = |write: &Write| {
            let (at, bytes) = self.extent(write).ok()?;
            Some(Range { leaf: write.leaf, part: write.part, at, bytes })
        };
        writes.iter().filter_map(of).collect()
    }

    /// Where in its part's bytes that lies which is to be written, and its length, in bytes.
    pub(crate) fn extent(&self, write: &Write) -> Result<(u64, u64)> {
        let leaf = &self.catalog.leaves[write.leaf as usize];
        match &leaf.body {
            LeafBody::Tensor { dtype, parts, .. } => {
                let bytes = layout::region(leaf, write)?.numel() * dtype.size_bytes();
                Ok((write.skipped(&parts[write.part as usize]) * dtype.size_bytes(), bytes))
            }
            LeafBody::Object { .. } | LeafBody::Alias { .. } => {
                Err(Error::internal(format!("{}: it is no tensor and has no extents", leaf.name)))
            }
        }
    }

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

    /// That what was copied is what was there when the save was begun, as far as samples tell.
    fn expect_whole(&self) -> Result<()> {
        let torn = self.catalog.leaves.iter().zip(&self.providers);
        let mut torn = torn.filter(|(_, providers)| providers.iter().any(|provider| provider.is_torn()));
        let Some((first, _)) = torn.next() else { return Ok(()) };
        let more = torn.count();
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        Err(Error::invalid(format!(
            "{}{more} was written while it was being captured, by a way that is not announced: wait for staged() of \
             the save before changing tensors in other ways than by a step of their optimizer",
            first.name
        )))
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
