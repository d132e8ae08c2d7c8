//! Reads everything that a checkpoint holds and reports all damage.
//!
//! It follows the chain of proof from the top: the commit, the manifest, each file's size and header, each block. It
//! compares the manifest with the files: each region and each value must be an entry of that name, dtype and shape in
//! its file, and each entry must belong to a leaf. It collects damage, with the leaves that it hits; only a damaged
//! commit or manifest ends the search, since nothing else is known then.

mod findings;
mod spans;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use shardfast_engine::Engine;
use shardfast_engine::checkpoint::{self, Checkpoint};
use shardfast_engine::commit;
use shardfast_engine::reads::{ValueRef, data_bytes};
use shardfast_engine::stream::batches;
use shardfast_format::name::HUGGING_FACE_INDEX;
use shardfast_format::object::decode;
use shardfast_format::{
    BLOCK_BYTES, LeafKind, LeafName, Manifest, Region, Tag, Value, hugging_face_index, parse_step_dir, step_dir,
};
use shardfast_store::{Fetch, Store};
use shardfast_transfer::error::{Error, FirstFailure, Kind, Result, retry};
use shardfast_transfer::reader::{self, Files};
use shardfast_transfer::staging::SLOT_BYTES;
use shardfast_transfer::timeout::Timeout;

pub use findings::{Block, Finding, Hit, Problem};

use crate::inspect::{load_each, tells_of_bytes};
use findings::Findings;
use spans::Spans;

/// Files that are open at a time.
const FILES_OPEN: usize = 64;

/// Encoded values read at a time, in bytes.
const BATCH_BYTES: u64 = 4 << 20;

/// Results of `verify`, and what it read.
#[derive(Debug, Clone, Serialize)]
pub struct VerifyReport {
    /// The checkpoint's URL.
    pub url: String,
    /// Training step, if one was noted.
    pub step: Option<u64>,
    /// Number of leaves.
    pub leaves: u64,
    /// Number of data files.
    pub files: u64,
    /// `true` if files were compared with checksums that the storage keeps of them, instead of being read.
    pub is_stored: bool,
    /// Bytes of data, and blocks that were compared with their checksums.
    pub bytes: u64,
    /// Number of these blocks.
    pub blocks: u64,
    /// Number of encoded values that were decoded.
    pub values: u64,
    /// The damage, by file and offset.
    pub findings: Vec<Finding>,
    /// Number of findings beyond those listed.
    pub findings_left_out: u64,
    /// Every leaf that any finding hits, listed or not.
    pub leaves_damaged: Vec<String>,
}

impl VerifyReport {
    /// Returns whether the checkpoint is undamaged.
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Verifies the checkpoint at `url`, on this rank alone. `progress` gets the bytes of data read so far and in all.
///
/// # Errors
/// `NotFound` when no checkpoint is committed there; `Unsupported` when a newer version wrote it; any error that says
/// nothing of the bytes. Damage is no error.
pub fn verify(engine: &Arc<Engine>, url: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<VerifyReport> {
    verify_in(engine, engine.store(url, engine.timeout())?, url, progress)
}

/// Verifies like [`verify`] without reading data: compares each file's checksum that the storage has kept since it
/// received the file with the one that follows from the header, in two requests a file. This proves what the storage
/// received and reports, not what it would return.
///
/// # Errors
/// As [`verify`]; `Unsupported` if the storage keeps no such checksums.
pub fn verify_stored(engine: &Arc<Engine>, url: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<VerifyReport> {
    run(engine, engine.store(url, engine.timeout())?, url, true, progress)
}

/// Verifies like [`verify`] in a store that is already open at the checkpoint's place.
///
/// # Errors
/// As [`verify`].
pub fn verify_in(
    engine: &Arc<Engine>,
    store: Arc<dyn Store>,
    url: &str,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifyReport> {
    run(engine, store, url, false, progress)
}

fn run(
    engine: &Arc<Engine>,
    store: Arc<dyn Store>,
    url: &str,
    is_stored: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifyReport> {
    let top = |problem, error: Error| match error.kind {
        Kind::Corrupt => Ok(VerifyReport { is_stored, ..of_broken_top(url, problem, error) }),
        _ => Err(error),
    };
    if let Err(error) = retry(engine.timeout(), || commit::read_commit(&*store, ""))
        && error.kind != Kind::NotFound
    {
        return top(Problem::Commit, error);
    }
    let opened = checkpoint::read(&*store, url, engine.timeout())
        .and_then(|bytes| Checkpoint::new(engine, url, Arc::clone(&store), &bytes));
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) => return top(Problem::Manifest, error),
    };
    let manifest = Arc::clone(&opened.manifest);

    let findings = Findings::new(&manifest);
    check_step(url, &manifest, &findings);
    check_coverage(&manifest, &findings);
    check_indexes(&*store, &manifest, &findings, engine.timeout())?;
    let total = data_bytes(&manifest);
    let run = Run {
        spans: Spans::new(&manifest),
        unverified: Mutex::default(),
        findings,
        progress,
        total,
        bytes: AtomicU64::new(0),
        blocks: AtomicU64::new(0),
        values: AtomicU64::new(0),
        manifest: &manifest,
        is_stored,
        timeout: engine.timeout(),
        failure: FirstFailure::default(),
    };
    let files: Vec<u32> = (0..manifest.files().len() as u32).collect();
    for group in files.chunks(FILES_OPEN) {
        // One for each group, so that the files of the previous group are closed.
        let checkpoint = opened.anew(Arc::clone(engine), Arc::clone(&store));
        run.read_files(&*store, &checkpoint, group);
        if !is_stored {
            run.read_values(&checkpoint, group);
        }
    }
    let Run { findings, bytes, blocks, values, failure, .. } = run;
    failure.into_result()?;
    let (findings, findings_left_out, leaves_damaged) = findings.into_parts();
    Ok(VerifyReport {
        url: url.to_owned(),
        step: manifest.info.step,
        leaves: manifest.len() as u64,
        files: manifest.files().len() as u64,
        is_stored,
        bytes: bytes.into_inner(),
        blocks: blocks.into_inner(),
        values: values.into_inner(),
        findings,
        findings_left_out,
        leaves_damaged,
    })
}

/// Returns the report of a checkpoint with a damaged commit or manifest.
fn of_broken_top(url: &str, problem: Problem, error: Error) -> VerifyReport {
    VerifyReport {
        url: url.to_owned(),
        step: None,
        leaves: 0,
        files: 0,
        is_stored: false,
        bytes: 0,
        blocks: 0,
        values: 0,
        findings: vec![Finding { problem, file: None, block: None, leaves: Vec::new(), message: error.message }],
        findings_left_out: 0,
        leaves_damaged: Vec::new(),
    }
}

/// Checks that each tensor's regions hold each of its elements once.
fn check_coverage(manifest: &Manifest, findings: &Findings<'_>) {
    for i in 0..manifest.len() {
        let LeafKind::Tensor { shape, .. } = manifest.leaf(i).kind else { continue };
        let regions: Vec<Region> = manifest.regions(i).map(|(region, _)| region).collect();
        if let Err(flaw) = shardfast_plan::tiles(shape, &regions) {
            let message = format!("the saved parts of {shape:?} must hold each element once: {flaw}");
            findings.of_leaf(Problem::Coverage, i, message);
        }
    }
}

/// Checks that a directory with the name of a step has the checkpoint of that step.
fn check_step(url: &str, manifest: &Manifest, findings: &Findings<'_>) {
    let place = url.split('?').next().unwrap_or_default().trim_end_matches('/');
    let named = place.rsplit('/').next().and_then(parse_step_dir);
    if let (Some(named), Some(recorded)) = (named, manifest.info.step)
        && named != recorded
    {
        let name = step_dir(recorded);
        let message = format!(
            "expected the checkpoint of step {named}, found that of step {recorded}, which was copied or \
                               renamed: no run restores it; move it to {name}, or out of the run"
        );
        findings.of_all(Problem::Step, message);
    }
}

/// Checks that each key has the index that follows from the manifest, or none.
fn check_indexes(store: &dyn Store, manifest: &Manifest, findings: &Findings<'_>, timeout: &Timeout) -> Result<()> {
    let mut keys: Vec<&str> = (0..manifest.len()).map(|i| manifest.leaf(i).key).collect();
    keys.dedup();
    for key in keys {
        let path = format!("{key}/{HUGGING_FACE_INDEX}");
        let expected = hugging_face_index(manifest, key);
        let bytes_max = expected.as_ref().map_or(u64::MAX, |index| index.len() as u64);
        let found = retry(timeout, || Ok(store.open(&path)?)).map(|object| object.bytes());
        let message = match (expected, found) {
            (None, Err(error)) if error.kind == Kind::NotFound => continue,
            (None, Ok(_)) => "expected none, since the key is not one of whole tensors only".to_owned(),
            (Some(expected), Ok(bytes)) if bytes == bytes_max => {
                match retry(timeout, || Ok(store.read(&path, bytes_max)?)) {
                    Ok(found) if found == expected => continue,
                    Ok(_) => "it is not the index of the manifest's tensors".to_owned(),
                    Err(error) if !tells_of_bytes(&error) => return Err(error),
                    Err(error) => error.message,
                }
            }
            (Some(expected), Ok(bytes)) => format!("expected {} bytes, found {bytes}", expected.len()),
            (_, Err(error)) if !tells_of_bytes(&error) => return Err(error),
            (_, Err(error)) => error.message,
        };
        findings.of_file(Problem::Index, &path, message);
    }
    Ok(())
}

struct Run<'a> {
    manifest: &'a Manifest,
    spans: Spans,
    /// Files that cannot be opened or have another header: their blocks cannot be checked.
    unverified: Mutex<HashSet<u32>>,
    findings: Findings<'a>,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    total: u64,
    bytes: AtomicU64,
    blocks: AtomicU64,
    values: AtomicU64,
    is_stored: bool,
    timeout: &'a Timeout,
    /// First failure that left files unchecked.
    failure: FirstFailure,
}

enum Task {
    Header(u32),
    Blocks(u32, Range<u64>),
    /// Comparison of a whole file with the checksum that the storage keeps of it.
    Kept(u32),
}

impl Run<'_> {
    /// Verifies the headers and all blocks of the files, several at a time.
    fn read_files(&self, store: &dyn Store, checkpoint: &Checkpoint, group: &[u32]) {
        let files = &checkpoint.files;
        let announce = |task: &Task| match task {
            Task::Header(_) | Task::Kept(_) => true,
            // The header's check reports a file that cannot be opened.
            Task::Blocks(file, range) => files.prefetch(*file, range.clone(), false).is_ok_and(Fetch::is_ahead),
        };
        let work = |task| match task {
            _ if self.failure.is_set() => {}
            Task::Header(file) => self.check_header(files, file),
            Task::Blocks(file, range) => self.check_blocks(checkpoint, file, range),
            Task::Kept(file) => self.check_kept(store, files, file),
        };
        let needs = files.needs();
        let slots_max = (checkpoint.engine.staging().slots() / 2).max(1);
        let slots = (needs.request_bytes as usize / SLOT_BYTES).clamp(1, slots_max);
        let kept = |&file: &u32| [Task::Header(file), Task::Kept(file)];
        let tasks = group.iter().filter(|_| !self.is_stored);
        let tasks = tasks.flat_map(|&file| self.tasks(file, (slots * SLOT_BYTES) as u64));
        let kept = group.iter().filter(|_| self.is_stored).flat_map(kept);
        reader::each_ahead(tasks.chain(kept), needs.in_flight, announce, work);
    }

    /// Lists the tasks: verifies the header first, then the blocks, `bytes` at a time, while the file as a whole is
    /// undamaged. The manifest's size of a file is not verified before.
    fn tasks(&self, file: u32, bytes: u64) -> impl Iterator<Item = Task> {
        let entry = &self.manifest.files()[file as usize];
        let end = entry.bytes;
        let starts = (entry.data_start..end).step_by(bytes as usize);
        let blocks = starts.take_while(move |_| !self.unverified().contains(&file));
        let blocks = blocks.map(move |start| Task::Blocks(file, start..end.min(start.saturating_add(bytes))));
        std::iter::once(Task::Header(file)).chain(blocks)
    }

    /// Checks the file's size and header, and that its entries are the manifest's extents.
    fn check_header(&self, files: &Files, file: u32) {
        let path = &self.manifest.files()[file as usize].path;
        let header = match files.open(file) {
            Ok(open) => open,
            Err(error) => {
                self.unverified().insert(file);
                if self.ends(&error) {
                    return;
                }
                let problem = match error.kind {
                    Kind::Corrupt | Kind::Unsupported => Problem::File,
                    _ => Problem::Unreadable,
                };
                let all = self.spans.of(file);
                return self.findings.of_spans(problem, path, None, all.iter().map(|span| (span, None)), error.message);
            }
        };
        let mut entries: HashMap<&str, _> =
            header.header.entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
        for span in self.spans.of(file) {
            let expected = span.entry(self.manifest);
            let message = match entries.remove(expected.name.as_str()) {
                Some(found) if *found == expected => continue,
                Some(found) => format!("expected the entry {}, found {}", said(&expected), said(found)),
                None => format!("expected the entry {}, found none that no other leaf has", said(&expected)),
            };
            self.findings.of_spans(Problem::Entry, path, None, std::iter::once((span, None)), message);
        }
        let mut foreign: Vec<&str> = entries.into_keys().collect();
        foreign.sort_unstable();
        for name in foreign {
            self.findings.of_file(Problem::Entry, path, format!("the entry {name:?} belongs to no leaf"));
        }
    }

    /// Compares the checksum of the whole file that the storage keeps with that of header and blocks.
    fn check_kept(&self, store: &dyn Store, files: &Files, file: u32) {
        let open = match files.open(file) {
            Ok(open) => open,
            // The header's check, which may be another thread's, reports damage.
            Err(error) => {
                self.ends(&error);
                return;
            }
        };
        let entry = &self.manifest.files()[file as usize];
        let kept = match retry(self.timeout, || Ok(store.kept_crc64(&entry.path)?)) {
            Ok(Some(kept)) => kept,
            Ok(None) => {
                let message = format!("{}: the storage keeps no CRC-64 of {}: read it", files.place(), entry.path);
                return self.failure.set(Error::new(Kind::Unsupported, message));
            }
            Err(error) => return self.failure.set(error.within(files.place())),
        };
        let (data, expected) = (entry.bytes - entry.data_start, open.crc64(entry));
        if kept != expected {
            let all = self.spans.of(file).iter().map(|span| (span, None));
            let message = format!("expected CRC-64 {expected:016x}, the storage keeps {kept:016x}");
            self.findings.of_spans(Problem::File, &entry.path, None, all, message);
        }
        self.blocks.fetch_add(data.div_ceil(BLOCK_BYTES), Ordering::Relaxed);
        let done = self.bytes.fetch_add(data, Ordering::Relaxed) + data;
        (self.progress)(done, self.total);
    }

    /// Checks the checksums of the blocks in the range. If the range cannot be read, it tries its parts one by one.
    fn check_blocks(&self, checkpoint: &Checkpoint, file: u32, range: Range<u64>) {
        // The header's check reports damage of the file as a whole.
        if self.unverified().contains(&file) {
            return;
        }
        let open = match checkpoint.files.open(file) {
            Ok(open) => open,
            Err(error) => {
                self.ends(&error);
                return;
            }
        };
        let block_bytes = open.header.block_bytes;
        let path = &self.manifest.files()[file as usize].path;
        let parts = |bytes: u64| {
            let (range, starts) = (range.clone(), range.clone().step_by(bytes as usize));
            starts.map(move |start| start..range.end.min(start + bytes)).collect::<Vec<_>>()
        };
        let ranges = parts(SLOT_BYTES as u64);
        let slots = checkpoint.engine.staging().acquire_many(ranges.len());
        let damaged = slots.and_then(|mut slots| checkpoint.files.read_blocks(file, &ranges, &mut slots));
        let bytes = range.end - range.start;
        match damaged {
            Ok(damaged) => {
                for damage in damaged {
                    let block = Block::of(&damage);
                    let hit = self.spans.hit(file, &damage.span);
                    self.findings.of_spans(Problem::Block, path, Some(block), hit, damage.to_string());
                }
                self.blocks.fetch_add(bytes.div_ceil(block_bytes), Ordering::Relaxed);
                let done = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
                (self.progress)(done, self.total);
            }
            Err(error) if self.ends(&error) => {}
            Err(_) if bytes > block_bytes => {
                let some = if ranges.len() > 1 { ranges } else { parts(block_bytes) };
                some.into_iter().for_each(|part| self.check_blocks(checkpoint, file, part));
            }
            Err(error) => {
                let hit = self.spans.hit(file, &range);
                let block = Block { start: range.start, end: range.end, expected: None, found: None };
                self.findings.of_spans(Problem::Unreadable, path, Some(block), hit, error.message);
            }
        }
    }

    /// Returns whether the error says nothing of the bytes, or the time without an answer of the storage is over. Then
    /// the error is that of the verification: the state of the bytes is unknown.
    fn ends(&self, error: &Error) -> bool {
        let ends = self.timeout.is_over() || !tells_of_bytes(error);
        if ends {
            self.failure.set(error.clone());
        }
        ends
    }

    fn unverified(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.unverified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that every undamaged value can be decoded, and refers to tensors that exist.
    fn read_values(&self, checkpoint: &Checkpoint, group: &[u32]) {
        let values = group.iter().flat_map(|&file| self.spans.of(file)).filter(|span| {
            matches!(self.manifest.leaf(span.leaf as usize).kind, LeafKind::Object) && !self.findings.has_hit(span)
        });
        let values: Vec<_> = values.collect();
        for batch in batches(values.iter().map(|span| span.bytes()), BATCH_BYTES) {
            let refs: Vec<ValueRef> = values[batch.clone()]
                .iter()
                .map(|span| ValueRef { leaf: span.leaf as usize, value: span.row as usize })
                .collect();
            for (span, encoded) in values[batch].iter().zip(load_each(checkpoint, &refs)) {
                let missing = encoded.and_then(|encoded| Ok(missing_tensors(self.manifest, &decode(&encoded)?)));
                self.values.fetch_add(1, Ordering::Relaxed);
                let message = match missing {
                    Ok(missing) if missing.is_empty() => continue,
                    Ok(missing) => format!("it refers to tensors that are not there: {}", missing.join(", ")),
                    Err(error) if self.ends(&error) => return,
                    Err(error) => error.message,
                };
                let path = &self.manifest.files()[span.file as usize].path;
                self.findings.of_spans(Problem::Value, path, None, std::iter::once((*span, None)), message);
            }
        }
    }
}

/// Returns the tensors that a value refers to and that the checkpoint does not have.
fn missing_tensors(manifest: &Manifest, value: &Value) -> Vec<String> {
    let mut missing = Vec::new();
    let mut to_do = vec![value];
    while let Some(value) = to_do.pop() {
        match value {
            Value::Tagged(Tag::TensorRef, payload) => {
                let Value::List(parts) = &**payload else { continue };
                let [Value::Str(key), Value::Str(name)] = parts.as_slice() else { continue };
                let name = LeafName::new(key, name);
                let found = manifest.find(&name).map(|i| manifest.leaf(i).kind);
                if !matches!(found, Some(LeafKind::Tensor { .. } | LeafKind::Alias { .. })) {
                    missing.push(name.to_string());
                }
            }
            Value::Tagged(_, payload) => to_do.push(payload),
            Value::List(items) => to_do.extend(items),
            Value::Dict(entries) => to_do.extend(entries.iter().flat_map(|(key, value)| [key, value])),
            _ => {}
        }
    }
    missing
}

fn said(entry: &shardfast_format::HeaderEntry) -> String {
    let shardfast_format::HeaderEntry { name, dtype, shape, offset, bytes } = entry;
    format!("{name:?} of {dtype} {:?} at {offset} ({bytes} bytes)", shape.as_slice())
}
