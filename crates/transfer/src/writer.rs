//! Moves providers into data files: copies, computes checksums, writes, makes durable.
//!
//! Fillers copy out of the providers into bounded slots; the store takes the slots from there, as many at a time as it
//! chooses. The block checksums of bytes that a core copied are computed at once, while the bytes are in its cache.
//! Those of bytes that a device copied are computed when the store takes them: reading them from memory would slow the
//! copies, which the training waits for. So the state is released as soon as it is copied, writes overlap copies, and a
//! slow store slows the copy instead of growing memory. All files are written at the same time. A file's header, which
//! holds the checksums, is written last: a file cut short by a crash is no valid file.
//!
//! A storage that takes objects in parts gets each part as one write of several slots, all of which are acquired at
//! once, in the order of the parts: so none waits for slots of a later one. The part with the header is written last:
//! it comes last, and keeps its slots until the others are known, which need no slot any more by then. If a tensor in
//! it is captured eagerly, it comes first, in slots beside those that the others need, and saves with such parts take
//! turns.
//!
//! A write that fails for a reason that may pass is retried from its slot, which keeps the bytes. A failed flush fails
//! the save: the system drops the bytes, the slots have been reused by then, and the state has changed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded, unbounded};
use shardfast_format::{BLOCK_BYTES, FileLayout, crc64, crc64_joined};
use shardfast_store::{Buffer, Kind as StoreKind, Next, ObjectWriter, Pieces, Store, Write, Writes};
use smallvec::SmallVec;

use crate::capture::Capture;
use crate::error::{Error, FirstFailure, GLANCE, Patience, Result, Tries, retry_until};
use crate::events::Event;
use crate::progress::{Countdown, Progress};
use crate::provider::{Fences, Provider};
use crate::staging::{ALIGNMENT, SLOT_BYTES, Slot, Staging};
use crate::sums::{self, Part, Piece, Summed, Sums};

/// Filled slots that wait for the store in a blocking save: more would not end it sooner, and would touch memory that
/// is in no cache or was never used.
const FILLED_SLOTS_MAX: usize = 4;

/// One data file to be written.
pub struct FileJob {
    /// Name in the checkpoint.
    pub path: String,
    /// Layout of the entries in the file.
    pub layout: FileLayout,
    /// The entries' bytes, in the layout's order.
    pub providers: Vec<Arc<dyn Provider>>,
    /// The entries' names for messages.
    pub names: Vec<String>,
    /// `true` if the CRC-64 of each entry is wanted, too.
    pub is_summed: bool,
}

/// Checksums of the written bytes.
#[derive(Default)]
pub struct Written {
    /// The checksum of each file's header.
    pub header_crcs: Vec<u64>,
    /// Checksums of the entries of each file that is summed.
    pub entry_crcs: Vec<Vec<u64>>,
    /// Checksums of the bytes that were only summed.
    pub sums: Vec<u64>,
}

/// Writes all files and makes their contents durable; their names become durable with `Store::sync`. Notifies
/// `progress` when no provider that is captured eagerly is read any more, and when none at all is. While the program
/// goes on it copies as fast as it can, as far as the staging memory reaches; in a `blocking` save, as fast as the
/// store. Retries last no longer than `patience`. It also reads what is `summed`, which counts like copied bytes.
///
/// # Errors
/// The first error of a provider or of the store. No provider is read any more once this has returned.
pub fn run(
    store: &dyn Store,
    jobs: &[FileJob],
    summed: &[Summed],
    staging: &Arc<Staging>,
    progress: &Progress,
    blocking: bool,
    patience: Duration,
) -> Result<Written> {
    let again = Again { progress, patience };
    let pieces = store.needs().pieces;
    let chunks = chunks(jobs, pieces);
    expect_room(jobs, &chunks, staging)?;
    let mut files: Vec<File<'_>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        let mut was_tried = false;
        let object = again.retry(|| create(store, job, std::mem::replace(&mut was_tried, true)))?;
        if object.alignment() > ALIGNMENT {
            return Err(Error::internal(format!(
                "{}: the store asks for writes aligned to {} bytes; slots are aligned to {ALIGNMENT}",
                job.path,
                object.alignment()
            )));
        }
        let crcs = (0..job.layout.blocks).map(|_| AtomicU64::new(0)).collect();
        let number = files.len();
        let own = || chunks.iter().filter(|chunk| chunk.file == number);
        let has_head = own().any(|chunk| chunk.is_head(job));
        let unsummed = AtomicUsize::new(own().filter(|chunk| !chunk.is_head(job)).count());
        let header_crc = AtomicU64::new(0);
        files.push(File { job, object, crcs, parts: Mutex::default(), has_head, unsummed, header_crc });
    }
    progress.moves(&Event::Expects { bytes: jobs.iter().map(|job| job.layout.file_bytes()).sum() });
    let (next, sums) = (Mutex::new(0), Sums::new(summed));
    // Two saves that each keep such parts could wait for each other's slots.
    let keeps_slots = chunks.iter().any(|chunk| chunk.is_eager && chunk.is_head(&jobs[chunk.file]));
    let _turn = keeps_slots.then(|| staging.turn());
    let sends_parts = matches!(pieces, Pieces::Parts(_));
    let run = Run { files: &files, chunks, sends_parts, sums, next, failure: FirstFailure::default() };
    fill_and_write(store, &run, staging, again, blocking);
    progress.staged_in(staging);
    run.failure.into_result()?;
    let sums = run.sums.into_crcs();
    let entry_crcs = files.iter_mut().filter(|file| file.job.is_summed).map(File::entry_crcs).collect();
    Ok(Written { header_crcs: finish(files, staging, again)?, entry_crcs, sums })
}

/// Creates a file under a name of this attempt alone. If it `was_tried` and the name is taken, an earlier try created
/// it, and failed later or lost its answer.
fn create(store: &dyn Store, job: &FileJob, was_tried: bool) -> Result<Box<dyn ObjectWriter>> {
    let create = || store.create(&job.path, job.layout.file_bytes());
    match create() {
        Err(error) if was_tried && error.kind == StoreKind::Conflict => {
            store.delete(&job.path)?;
            Ok(create()?)
        }
        created => Ok(created?),
    }
}

/// The retries of the store's operations.
#[derive(Clone, Copy)]
struct Again<'a> {
    progress: &'a Progress,
    patience: Duration,
}

impl Again<'_> {
    fn retry<T>(&self, act: impl FnMut() -> Result<T>) -> Result<T> {
        retry_until(Patience::of(self.progress, self.patience), || self.progress.cancelled(), act)
    }
}

struct File<'a> {
    job: &'a FileJob,
    object: Box<dyn ObjectWriter>,
    crcs: Vec<AtomicU64>,
    /// Filled pieces, if entries are summed: the entry of each, and the part of it.
    parts: Mutex<Vec<(usize, Part)>>,
    /// `true` if its header is written with the first of its data, and not after all of them.
    has_head: bool,
    /// Chunks without the header whose checksums are not known yet.
    unsummed: AtomicUsize,
    /// The header's checksum, once it was written with the data.
    header_crc: AtomicU64,
}

impl File<'_> {
    /// Returns the header, once all checksums are known.
    fn header(&self) -> Result<Vec<u8>> {
        let crcs: Vec<u64> = self.crcs.iter().map(|crc| crc.load(Ordering::Relaxed)).collect();
        let header = self.job.layout.header(&crcs)?;
        self.header_crc.store(crc64(&header), Ordering::Relaxed);
        Ok(header)
    }

    /// Returns the checksum of a chunk of whole blocks, from theirs; `None` for one that begins with the header.
    fn crc64(&self, chunk: Chunk) -> Option<u64> {
        let first = chunk.offset.checked_sub(self.job.layout.data_start)? / BLOCK_BYTES;
        let (bytes, crcs) = (chunk.bytes as u64, &self.crcs[first as usize..]);
        let blocks = (0..bytes).step_by(BLOCK_BYTES as usize).map(|at| BLOCK_BYTES.min(bytes - at));
        let join = |crc, (bytes, block): (u64, &AtomicU64)| crc64_joined(crc, block.load(Ordering::Relaxed), bytes);
        Some(blocks.zip(crcs).fold(0, join))
    }

    fn entry_crcs(&mut self) -> Vec<u64> {
        let mut of: Vec<Vec<Part>> = self.job.providers.iter().map(|_| Vec::new()).collect();
        for (entry, part) in std::mem::take(self.parts.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            of[entry].push(part);
        }
        of.into_iter().map(|parts| sums::joined(parts).crc).collect()
    }
}

/// A range of a file that is written at once.
#[derive(Clone, Copy)]
struct Chunk {
    file: usize,
    /// Absolute in the file; whole blocks from the start of the data, but for the header in front of them.
    offset: u64,
    bytes: usize,
    /// `true` if some of it is captured eagerly.
    is_eager: bool,
    /// `true` if the save has all of it already, so that the program may change it before.
    is_held: bool,
}

impl Chunk {
    /// Returns whether the chunk begins with the file's header.
    fn is_head(&self, job: &FileJob) -> bool {
        self.offset < job.layout.data_start
    }

    /// Returns the number of slots that hold the chunk.
    fn slots(&self) -> usize {
        self.bytes.div_ceil(SLOT_BYTES)
    }

    /// Returns the part of the chunk in its slot of that number.
    fn in_slot(&self, number: usize) -> Chunk {
        let before = number * SLOT_BYTES;
        Chunk { offset: self.offset + before as u64, bytes: (self.bytes - before).min(SLOT_BYTES), ..*self }
    }
}

struct Run<'a> {
    files: &'a [File<'a>],
    chunks: Vec<Chunk>,
    /// `true` if the storage takes objects in parts, and may send their checksums.
    sends_parts: bool,
    sums: Sums<'a>,
    /// The chunk that is filled next. Slots are taken under this lock, so that they go to the chunks in their order.
    next: Mutex<usize>,
    failure: FirstFailure,
}

/// Cuts the files into chunks: eager ones first, those that the save has already after the others, those with a header
/// last, taken from all files in turn.
fn chunks(jobs: &[FileJob], pieces: Pieces) -> Vec<Chunk> {
    let mut out = Vec::new();
    for (file, job) in jobs.iter().enumerate() {
        let end = job.layout.file_bytes();
        // A header in a part of its own would be a part too short for most storage.
        let (mut offset, chunk_bytes) = match pieces {
            Pieces::Any => (job.layout.data_start, SLOT_BYTES as u64),
            Pieces::Parts(parts) => (0, parts.of(end)),
        };
        while offset < end {
            let bytes = (end - offset).min(chunk_bytes);
            let range = offset..offset + bytes;
            let mut of = job.entries_in(range.clone()).map(|entry| &job.providers[entry]);
            let is_eager = of.any(|of| of.capture() == Capture::Eager);
            let is_held = job.is_held(range);
            out.push(Chunk { file, offset, bytes: bytes as usize, is_eager, is_held });
            offset += bytes;
        }
    }
    out.sort_by_key(|chunk| (!chunk.is_eager, chunk.is_head(&jobs[chunk.file]), chunk.is_held, chunk.offset));
    out
}

/// Returns the alignment of a file's data: whole blocks if the header shares a part with them.
pub fn data_at(pieces: Pieces) -> u64 {
    match pieces {
        Pieces::Any => ALIGNMENT as u64,
        Pieces::Parts(_) => BLOCK_BYTES,
    }
}

/// Checks that the budget has slots for the longest chunk beside those that are kept for their header, and those that
/// captures ahead of saves keep.
fn expect_room(jobs: &[FileJob], chunks: &[Chunk], staging: &Staging) -> Result<()> {
    let longest = chunks.iter().map(Chunk::slots).max().unwrap_or(0);
    let kept: usize =
        chunks.iter().filter(|chunk| chunk.is_eager && chunk.is_head(&jobs[chunk.file])).map(Chunk::slots).sum();
    let expected = longest + kept;
    if expected <= staging.needs(expected) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "staging_bytes={}: this storage takes objects in parts of up to {} MiB, of which {} must be in memory at \
         a time: expected at least {} ({expected} MiB)",
        staging.budget_bytes(),
        (longest * SLOT_BYTES) >> 20,
        if kept == 0 { "one" } else { "several" },
        expected * SLOT_BYTES,
    )))
}

impl FileJob {
    /// Returns the entries that may have bytes in a range of the file.
    fn entries_in(&self, range: Range<u64>) -> Range<usize> {
        let first = self.layout.offsets.partition_point(|&offset| offset <= range.start).saturating_sub(1);
        first..self.layout.offsets.partition_point(|&offset| offset < range.end)
    }

    /// Returns whether the save has all entries' bytes in a range of the file already, some of them by a capture ahead.
    fn is_held(&self, range: Range<u64>) -> bool {
        let mut is_ahead = false;
        let is_held = |entry: usize| {
            let (start, provider) = (self.layout.offsets[entry], &self.providers[entry]);
            let (from, to) = (range.start.max(start), range.end.min(start + provider.bytes()));
            if from < to && provider.is_held(from - start, to - from) {
                is_ahead = true;
                return true;
            }
            from >= to || provider.capture() == Capture::Inline
        };
        self.entries_in(range.clone()).all(is_held) && is_ahead
    }
}

fn fill_and_write(store: &dyn Store, run: &Run<'_>, staging: &Arc<Staging>, again: Again<'_>, blocking: bool) {
    let progress = again.progress;
    let fillers = std::thread::available_parallelism().map_or(1, usize::from).min(4).min(run.chunks.len().max(1));
    let (sender, receiver) = if blocking { bounded::<FilledChunk>(FILLED_SLOTS_MAX) } else { unbounded() };
    let pieces = run.sums.pieces();
    let eager = run.chunks.iter().map(|chunk| chunk.is_eager).chain(pieces.iter().map(|piece| piece.is_eager));
    let captured = Countdown::new(eager.filter(|is_eager| *is_eager).count(), || progress.captured());
    let unheld = run.chunks.iter().filter(|chunk| !chunk.is_held).count();
    let staged = Countdown::new(unheld + pieces.len(), || progress.staged());
    let passed = |is_eager: bool, is_held: bool| {
        if is_eager {
            captured.one();
        }
        if !is_held {
            staged.one();
        }
    };
    let sum = || {
        let done = |piece: &Piece| passed(piece.is_eager, false);
        if let Err(error) = run.sums.work(staging, progress, &run.failure, done) {
            run.failure.set(error);
        }
    };
    std::thread::scope(|scope| {
        if !pieces.is_empty() {
            scope.spawn(sum);
        }
        for _ in 0..fillers {
            let sender = sender.clone();
            scope.spawn(|| {
                let sender = sender;
                loop {
                    let (number, chunk, slots) = {
                        let mut next = run.next.lock().unwrap_or_else(PoisonError::into_inner);
                        let Some(&chunk) = run.chunks.get(*next) else { break };
                        *next += 1;
                        (*next - 1, chunk, staging.acquire_timed(chunk.slots()))
                    };
                    if run.failure.is_set() {
                        return;
                    }
                    if let Some(error) = progress.cancelled() {
                        return run.failure.set(error);
                    }
                    let filled = slots.and_then(|(mut slots, took)| {
                        if !blocking && !took.is_zero() {
                            progress.moves(&Event::AwaitedMemory { took });
                        }
                        let fill = |(i, slot)| fill(&run.files[chunk.file], chunk.in_slot(i), slot);
                        let unsummed = slots.iter_mut().enumerate().map(fill).collect::<Result<Vec<_>>>()?;
                        Ok(FilledChunk { number, slots, unsummed })
                    });
                    match filled {
                        Ok(filled) => {
                            progress.moves(&Event::Copied { bytes: chunk.bytes as u64 });
                            passed(chunk.is_eager, chunk.is_held);
                            // The receiver lives until the last sender is gone.
                            let _ = sender.send(filled);
                        }
                        Err(error) => return run.failure.set(error),
                    }
                }
                drop(sender);
                sum();
            });
        }
        drop(sender);
        let filled = Filled { run, receiver, again, failed: Mutex::default(), heads: Mutex::default() };
        if let Err(error) = store.write_all(&filled) {
            run.failure.set(error.into());
        }
    });
}

/// A chunk by number, and the slots that hold it.
struct FilledChunk {
    number: usize,
    slots: Vec<Slot>,
    /// Remaining checksums of each slot.
    unsummed: Vec<Option<Unsummed>>,
}

/// The filled chunks, as writes.
struct Filled<'a> {
    run: &'a Run<'a>,
    receiver: Receiver<FilledChunk>,
    again: Again<'a>,
    failed: Mutex<Failed<'a>>,
    /// Chunks that wait for all others of their file, since their header holds the checksums.
    heads: Mutex<Vec<(usize, Vec<Slot>)>>,
}

/// Failed writes to retry.
#[derive(Default)]
struct Failed<'a> {
    /// Writes to retry, and the time of each.
    writes: Vec<(Instant, Write<'a>)>,
    /// Tries of every chunk that ever failed.
    tries: HashMap<usize, Tries>,
}

impl Drop for Filled<'_> {
    /// Unblocks threads that wait to fill or to hand over a slot, so that they see the error.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.run.failure.set(Error::internal("the store panicked"));
        }
        self.lock().writes.clear();
        self.heads().clear();
        self.receiver.iter().for_each(drop);
    }
}

impl<'a> Writes<'a> for Filled<'a> {
    fn next(&self, wait: bool) -> Next<'a> {
        loop {
            let now = Instant::now();
            let (again, until) = self.lock().due(now);
            if self.run.failure.is_set() {
                // Returns the slots: a thread may wait for one.
                self.lock().writes.clear();
                self.heads().clear();
                return Next::End;
            }
            if let Some(write) = again {
                return Next::Write(write);
            }
            match self.head() {
                Ok(Some(write)) => return Next::Write(write),
                Ok(None) => {}
                Err(error) => {
                    self.run.failure.set(error);
                    continue;
                }
            }
            // Without a retry there is no timeout: a thread that returns a failed write calls this next.
            let filled = match until {
                _ if !wait => self.receiver.recv_deadline(now),
                None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => self.receiver.recv_deadline(until.min(now + GLANCE)),
            };
            match (filled, until) {
                (Ok(_), _) if self.run.failure.is_set() => continue,
                (Ok(filled), _) => match self.write(filled) {
                    Some(write) => return Next::Write(write),
                    None => continue,
                },
                // The thread that takes the last of the others takes the head as well.
                (Err(RecvTimeoutError::Disconnected), None) => return Next::End,
                (Err(_), _) if !wait => return Next::Later,
                (Err(RecvTimeoutError::Disconnected), Some(until)) => {
                    std::thread::sleep(until.saturating_duration_since(now).min(GLANCE));
                }
                (Err(RecvTimeoutError::Timeout), _) => {}
            }
            if let Some(error) = self.again.progress.cancelled() {
                self.run.failure.set(error);
            }
        }
    }

    fn failed(&self, write: Write<'a>, error: shardfast_store::Error) -> shardfast_store::Result<()> {
        let mut failed = self.lock();
        let tries = failed.tries.entry(write.number).or_insert_with(Tries::begin);
        match tries.again(error.clone().into(), Patience::of(self.again.progress, self.again.patience)) {
            Ok(due) => failed.writes.push((due, write)),
            Err(last) => {
                self.run.failure.set(last);
                return Err(error);
            }
        }
        Ok(())
    }
}

impl<'a> Filled<'a> {
    fn lock(&self) -> MutexGuard<'_, Failed<'a>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heads(&self) -> MutexGuard<'_, Vec<(usize, Vec<Slot>)>> {
        self.heads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the write of a filled chunk; keeps a chunk with a header until all others of its file were filled.
    fn write(&self, FilledChunk { number, slots, unsummed }: FilledChunk) -> Option<Write<'a>> {
        let chunk = self.run.chunks[number];
        let file = &self.run.files[chunk.file];
        for (i, unsummed) in unsummed.into_iter().enumerate() {
            if let Some(unsummed) = unsummed {
                unsummed.sum(file, chunk.in_slot(i), &slots[i]);
            }
        }
        if chunk.is_head(file.job) {
            self.heads().push((number, slots));
            return None;
        }
        file.unsummed.fetch_sub(1, Ordering::AcqRel);
        Some(self.whole(number, slots))
    }

    /// Returns the write of a chunk whose file is known up to its header.
    fn head(&self) -> Result<Option<Write<'a>>> {
        let mut heads = self.heads();
        let file_of = |number: usize| &self.run.files[self.run.chunks[number].file];
        let is_known = |(number, _): &(usize, Vec<Slot>)| file_of(*number).unsummed.load(Ordering::Acquire) == 0;
        let Some(place) = heads.iter().position(is_known) else { return Ok(None) };
        let (number, mut slots) = heads.swap_remove(place);
        drop(heads);
        let header = file_of(number).header()?;
        for (part, slot) in header.chunks(SLOT_BYTES).zip(&mut slots) {
            slot[..part.len()].copy_from_slice(part);
        }
        Ok(Some(self.whole(number, slots)))
    }

    fn whole(&self, number: usize, mut slots: Vec<Slot>) -> Write<'a> {
        let chunk = self.run.chunks[number];
        let object = &*self.run.files[chunk.file].object;
        let before = (slots.len() - 1) * SLOT_BYTES;
        let last = slots.last_mut().map_or(0, |slot| pad(object, slot, chunk.bytes - before));
        let buffers = slots.into_iter().map(|slot| Box::new(slot) as Box<dyn Buffer>).collect();
        let crc64 = self.run.sends_parts.then(|| self.run.files[chunk.file].crc64(chunk)).flatten();
        Write { object, offset: chunk.offset, buffers, bytes: before + last, number, crc64 }
    }
}

impl<'a> Failed<'a> {
    /// Returns a write that is due; or when the next one will be, if any.
    fn due(&mut self, now: Instant) -> (Option<Write<'a>>, Option<Instant>) {
        let next = self.writes.iter().enumerate().min_by_key(|(_, (due, _))| *due).map(|(i, (due, _))| (i, *due));
        match next {
            Some((i, due)) if due <= now => (Some(self.writes.swap_remove(i).1), None),
            next => (None, next.map(|(_, due)| due)),
        }
    }
}

/// Fills a slot with the file's bytes from `chunk.offset` on, except its header, and stores their block checksums.
/// Returns the remaining ones if a device copied some of the bytes.
fn fill(file: &File<'_>, chunk: Chunk, slot: &mut Slot) -> Result<Option<Unsummed>> {
    const BLOCK: usize = BLOCK_BYTES as usize;
    let layout = &file.job.layout;
    let end = chunk.offset + chunk.bytes as u64;
    let mut crcs = Crcs::from_elem(None, chunk.bytes.div_ceil(BLOCK));
    let mut parts = Vec::new();
    let mut fences = Fences::default();
    for entry in file.job.entries_in(chunk.offset..end) {
        let (start, provider) = (layout.offsets[entry], &file.job.providers[entry]);
        let from = chunk.offset.max(start);
        let to = end.min(start + provider.bytes());
        if from < to {
            // The program waits for this chunk, which must not wait for the replay of a part of it.
            let live = if chunk.is_held { None } else { provider.live() };
            let provider = live.as_ref().unwrap_or(provider);
            let (first, last) = ((from - chunk.offset) as usize, (to - chunk.offset) as usize);
            // The blocks that are this entry's alone, and what lies before and behind them.
            let blocks = first.next_multiple_of(BLOCK).min(last);
            let rest = if to == end { last } else { (last / BLOCK * BLOCK).max(blocks) };
            let fill = |slot: &mut Slot, crcs: &mut Crcs, range: Range<usize>, fences: &mut Fences| {
                let at = from - start + (range.start - first) as u64;
                match range {
                    _ if range.is_empty() => Ok(()),
                    _ if range == (blocks..rest) => {
                        let crcs = &mut crcs[blocks / BLOCK..rest.div_ceil(BLOCK)];
                        provider.fill_blocks(at, &mut slot[range], crcs, fences)
                    }
                    _ => provider.fill(at, &mut slot[range], fences),
                }
            };
            [first..blocks, blocks..rest, rest..last]
                .into_iter()
                .try_for_each(|range| fill(slot, &mut crcs, range, &mut fences))
                .map_err(|error| error.within(&file.job.names[entry]))?;
            if file.job.is_summed {
                parts.push((entry, from - start, [first..blocks, blocks..rest, rest..last]));
            }
        }
    }
    let unsummed = Unsummed { crcs, parts };
    if !fences.is_empty() {
        fences.wait()?;
        return Ok(Some(unsummed));
    }
    unsummed.sum(file, chunk, slot);
    Ok(None)
}

/// Data from which a filled slot's checksums are computed.
struct Unsummed {
    /// Checksums of blocks that are known.
    crcs: Crcs,
    /// Summed entries, if any: each with a piece in the slot, where the piece begins in it, and its ranges of the slot
    /// as [`summed`] takes them.
    parts: Vec<(usize, u64, [Range<usize>; 3])>,
}

impl Unsummed {
    fn sum(self, file: &File<'_>, chunk: Chunk, slot: &Slot) {
        if file.job.is_summed {
            let parts = self.parts.into_iter().map(|(entry, at, ranges)| (entry, summed(at, ranges, slot, &self.crcs)));
            file.parts.lock().unwrap_or_else(PoisonError::into_inner).extend(parts);
        }
        note_checksums(file, chunk, slot, &self.crcs);
    }
}

/// Returns the checksum of a piece of an entry that begins at `at` there and lies in these consecutive ranges of the
/// slot: the one in the middle begins with a block, and the known checksums of its blocks are in `known`.
fn summed(at: u64, ranges: [Range<usize>; 3], slot: &[u8], known: &Crcs) -> Part {
    const BLOCK: usize = BLOCK_BYTES as usize;
    let mut whole = Part { at, ..Part::default() };
    for (number, range) in ranges.into_iter().enumerate() {
        for start in range.clone().step_by(BLOCK) {
            let piece = start..range.end.min(start + BLOCK);
            let known = (number == 1).then(|| known[start / BLOCK]).flatten();
            let crc = known.unwrap_or_else(|| crc64(&slot[piece.clone()]));
            whole.crc = crc64_joined(whole.crc, crc, piece.len() as u64);
            whole.bytes += piece.len() as u64;
        }
    }
    whole
}

/// The checksums of a slot's blocks, as far as they are known.
type Crcs = SmallVec<[Option<u64>; SLOT_BYTES / BLOCK_BYTES as usize]>;

fn note_checksums(file: &File<'_>, chunk: Chunk, slot: &Slot, known: &[Option<u64>]) {
    let data_start = file.job.layout.data_start;
    let header = data_start.saturating_sub(chunk.offset).min(chunk.bytes as u64) as usize;
    let first_block = ((chunk.offset + header as u64).saturating_sub(data_start) / BLOCK_BYTES) as usize;
    let known = &known[header / BLOCK_BYTES as usize..];
    for (i, block) in slot[header..chunk.bytes].chunks(BLOCK_BYTES as usize).enumerate() {
        let crc = known.get(i).copied().flatten().unwrap_or_else(|| crc64(block));
        file.crcs[first_block + i].store(crc, Ordering::Relaxed);
    }
}

/// Pads the slot's first `bytes` bytes with zeros to the alignment of the store's writes; returns the padded length.
fn pad(object: &dyn ObjectWriter, slot: &mut Slot, bytes: usize) -> usize {
    let padded = bytes.next_multiple_of(object.alignment());
    slot[bytes..padded].fill(0);
    padded
}

/// Writes the headers that are not written yet and makes every file durable, all files at once, since flushes wait for
/// the device.
fn finish(files: Vec<File<'_>>, staging: &Arc<Staging>, again: Again<'_>) -> Result<Vec<u64>> {
    std::thread::scope(|scope| {
        let running = files.into_iter().map(|file| scope.spawn(move || finish_one(file, staging, again)));
        let running: Vec<_> = running.collect();
        running
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::internal("a thread that finishes a file panicked")))
            })
            .collect()
    })
}

fn finish_one(mut file: File<'_>, staging: &Arc<Staging>, again: Again<'_>) -> Result<u64> {
    if !file.has_head {
        let header = file.header()?;
        let mut slot = staging.acquire()?;
        for (i, part) in header.chunks(SLOT_BYTES).enumerate() {
            slot[..part.len()].copy_from_slice(part);
            let bytes = pad(&*file.object, &mut slot, part.len());
            again.retry(|| Ok(file.object.write_at((i * SLOT_BYTES) as u64, &slot[..bytes])?))?;
        }
        again.progress.moves(&Event::Copied { bytes: file.job.layout.data_start });
    }
    again.retry(|| Ok(file.object.finish()?))?;
    Ok(file.header_crc.into_inner())
}
