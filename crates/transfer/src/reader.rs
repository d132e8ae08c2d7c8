//! Planned reads into sinks: many ranges in flight, every block verified before a byte of it is used.
//!
//! Bytes are read into slots of staging memory, verified there, and scattered from there. So what was verified is what
//! is used, whatever another program does to a file meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use shardfast_format::{BLOCK_BYTES, DataHeader, Extent, FileEntry, Manifest, crc64, crc64_joined};
use shardfast_plan::{Limits, Piece, Read};
use shardfast_store::{Fetch, ObjectReader, ReadNeeds, Store};

use crate::blocks::Unverified;
use crate::error::{Error, FirstFailure, Kind, Patience, Result, retry};
use crate::events::{Event, Observer};
use crate::interrupt;
use crate::observed::Observed;
use crate::provider::Fences;
use crate::sink::Sink;
use crate::staging::{SLOT_BYTES, Slot, Staging};
use crate::timeout::Timeout;
use crate::verify_block;

use batches::{Announced, Batch, Batches, Planned};

pub use batches::Span;

mod batches;

/// Number of reads that are announced ahead: those that a disk can fetch while the cores process the last ones.
const ANNOUNCED_READS: usize = 32;

/// Number of data files open at the same time: far below a process's limit, and more than reads in flight can use.
const OPEN_MAX: usize = 256;

/// Samples of the page cache: number of ranges at even distances, and bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 256 << 10;

/// Leaves that a message names.
const NAMES_MAX: usize = 16;

/// Limits of one planned read: grown to whole blocks on both sides it fills at most a slot. Gaps below
/// half a block are cheaper to read than to seek over.
pub const LIMITS: Limits =
    Limits { gap_max_bytes: BLOCK_BYTES / 2, read_max_bytes: SLOT_BYTES as u64 - 2 * BLOCK_BYTES };

/// Explains why the store does not find a data file, given the store's error.
pub type Missing = fn(&dyn Store, &FileEntry, Error) -> Error;

/// A place of a checkpoint's data files.
pub struct Level {
    /// Name of the level, for people.
    pub name: String,
    /// Store at the place.
    pub store: Arc<dyn Store>,
    /// Manifest of the checkpoint as it is there: the files have names of that attempt.
    pub manifest: Arc<Manifest>,
    /// Bytes that were read there.
    bytes_read: AtomicU64,
}

impl Level {
    /// Makes a level of which nothing was read yet.
    pub fn new(name: String, store: Arc<dyn Store>, manifest: Arc<Manifest>) -> Level {
        Level { name, store, manifest, bytes_read: AtomicU64::new(0) }
    }
}

/// A checkpoint's data files, each opened and its header verified when it is first needed.
///
/// They may lie in several places. Each file comes from the first that has it, and each block that does not prove there
/// from the next one.
pub struct Files {
    levels: Vec<Level>,
    /// Bytes that were read from other machines' memory, by machine.
    hosts: Mutex<BTreeMap<String, u64>>,
    place: String,
    manifest: Arc<Manifest>,
    /// Timeout of its requests.
    pub timeout: Timeout,
    /// Load that reads them, which notes the failures; `None` if nobody asks.
    pub observed: Option<Arc<Observed>>,
    missing: Missing,
    open: Vec<Mutex<Option<Arc<OpenFile>>>>,
    /// The open ones, the one opened first in front: reads come file by file, so that one is done with soonest.
    order: Mutex<VecDeque<u32>>,
}

/// A data file whose header is that of the manifest.
pub struct OpenFile {
    /// Opened object of the file.
    pub object: Box<dyn ObjectReader>,
    /// Verified header of the file.
    pub header: DataHeader,
    /// Number of the level that it lies on.
    level: usize,
}

/// Name of the only level of most checkpoints.
pub const ONLY_LEVEL: &str = "url";

impl Files {
    /// Returns the files of a manifest, none of them opened; `place` names the checkpoint in messages.
    pub fn new(
        store: Arc<dyn Store>,
        place: String,
        manifest: Arc<Manifest>,
        timeout: Timeout,
        missing: Missing,
    ) -> Files {
        let open = manifest.files().iter().map(|_| Mutex::default()).collect();
        let levels = vec![Level::new(ONLY_LEVEL.to_owned(), store, Arc::clone(&manifest))];
        let (hosts, order) = (Mutex::default(), Mutex::default());
        Files { levels, hosts, place, manifest, timeout, observed: None, missing, open, order }
    }

    /// Sets the levels on which the files lie, the nearest first, before any of them is opened.
    pub fn lie_on(&mut self, levels: Vec<Level>) {
        self.levels = levels;
    }

    /// Returns the names of the levels and the bytes that were read from each on this machine, or far away; and other
    /// machines whose memory was read, as `peer 10.0.0.7`.
    pub fn sources(&self) -> Vec<(String, u64)> {
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let levels = self.levels.iter().map(|level| (level.name.clone(), level.bytes_read.load(Ordering::Relaxed)));
        levels.chain(hosts.iter().map(|(host, bytes)| (format!("peer {host}"), *bytes))).collect()
    }

    /// Reports an event of the load to its observer, if there is one.
    pub fn moves(&self, event: &Event<'_>) {
        if let Some(load) = &self.observed {
            load.noted(event);
        }
    }

    fn retry<T>(&self, act: impl FnMut() -> Result<T>) -> Result<T> {
        let patience = Patience::from(&self.timeout);
        retry(self.observed.as_deref().map_or(patience, |load| patience.noted_by(load)), act)
    }

    /// Returns the file, opened, with a verified header.
    pub fn open(&self, file: u32) -> Result<Arc<OpenFile>> {
        self.retry(|| self.open_once(file))
    }

    fn open_once(&self, file: u32) -> Result<Arc<OpenFile>> {
        let slot = |file: u32| self.open[file as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let mut open = slot(file);
        if let Some(open) = &*open {
            return Ok(Arc::clone(open));
        }
        let opened = self.open_below(0, file)?;
        let opened = Arc::clone(open.insert(Arc::new(opened)));
        // One lock at a time: another thread may hold the file that is closed here.
        drop(open);
        let first = {
            let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
            order.push_back(file);
            if order.len() > OPEN_MAX { order.pop_front() } else { None }
        };
        if let Some(first) = first {
            *slot(first) = None;
        }
        Ok(opened)
    }

    /// Opens a file on the first level from `level` on that has it.
    ///
    /// # Errors
    /// That of a level which may have it later, else that of the first one.
    fn open_below(&self, level: usize, file: u32) -> Result<OpenFile> {
        let mut failure: Option<Error> = None;
        for (level, at) in self.levels.iter().enumerate().skip(level) {
            match open_file((level, &*at.store), &at.manifest.files()[file as usize], self.missing) {
                Ok(open) => return Ok(open),
                Err(error) if failure.is_none() || error.kind == Kind::Unavailable => failure = Some(error),
                Err(_) => {}
            }
        }
        let failure = failure.unwrap_or_else(|| Error::internal(format!("there is no level {level}")));
        Err(failure.within(&self.place))
    }

    /// Reads from the file on the levels behind that of `open`, until `read` succeeds there.
    fn read_below(
        &self,
        mut level: usize,
        file: u32,
        mut read: impl FnMut(&OpenFile) -> Option<()>,
    ) -> Option<OpenFile> {
        while level + 1 < self.levels.len() {
            let open = self.open_below(level + 1, file).ok()?;
            if read(&open).is_some() {
                return Some(open);
            }
            level = open.level;
        }
        None
    }

    fn count(&self, open: &OpenFile, bytes: u64) {
        match open.object.host() {
            Some(host) => {
                let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
                *hosts.entry(host.to_owned()).or_default() += bytes;
            }
            None => _ = self.levels[open.level].bytes_read.fetch_add(bytes, Ordering::Relaxed),
        }
    }

    /// Reads from a file, which each retry opens anew: an open file of a network file system may be stale.
    pub fn read_from(
        &self,
        file: u32,
        range: &Range<u64>,
        mut read: impl FnMut(&OpenFile) -> shardfast_store::Result<()>,
    ) -> Result<Arc<OpenFile>> {
        let path = &self.manifest.files()[file as usize].path;
        let place = || format!("{}: file {path}, bytes {}..{}", self.place, range.start, range.end);
        self.retry(|| {
            let open = self.open_once(file)?;
            let Err(error) = read(&open) else { return Ok(open) };
            let below = self.read_below(open.level, file, |open| read(open).ok()).map(Arc::new);
            self.open[file as usize].lock().unwrap_or_else(PoisonError::into_inner).clone_from(&below);
            below.ok_or_else(|| Error::from(error).within(place()))
        })
    }

    /// Reads ranges of whole blocks of a file's data in one request, each into a slot. Returns the blocks whose bytes
    /// are not the saved ones, even after a second read. The ranges ascend and lie near each other; offsets are
    /// absolute.
    pub fn read_blocks(&self, file: u32, ranges: &[Range<u64>], slots: &mut [Slot]) -> Result<Vec<Damage>> {
        let open = self.read_together(file, ranges, slots)?;
        let (mut damaged, began) = (Vec::new(), Instant::now());
        for (range, slot) in ranges.iter().zip(slots) {
            self.count(&open, range.end - range.start);
            damaged.extend(self.check(file, range.clone(), &open, slot, |_| true)?);
        }
        self.moves(&Event::Placed { took: began.elapsed() });
        Ok(damaged)
    }

    /// Reads ranges of a file in one request, each into a slot.
    fn read_together(&self, file: u32, ranges: &[Range<u64>], slots: &mut [Slot]) -> Result<Arc<OpenFile>> {
        let starts = ranges.iter().map(|range| range.start).min().unwrap_or(0);
        let whole = starts..ranges.iter().map(|range| range.end).max().unwrap_or(0);
        self.read_from(file, &whole, |open| {
            let part = |(range, slot): (&Range<u64>, _)| -> (u64, &mut [u8]) {
                let slot: &mut Slot = slot;
                (range.start, &mut slot[..(range.end - range.start) as usize])
            };
            let mut parts: Vec<(u64, &mut [u8])> = ranges.iter().zip(&mut *slots).map(part).collect();
            open.object.read_ranges(&mut parts)
        })
    }

    /// Returns the damaged blocks of a range that was read into a slot, which is read again if there are any.
    fn check(
        &self,
        file: u32,
        range: Range<u64>,
        open: &OpenFile,
        slot: &mut Slot,
        needed: impl Fn(Range<u64>) -> bool,
    ) -> Result<Vec<Damage>> {
        let bytes = &mut slot[..(range.end - range.start) as usize];
        let damaged = self.damaged(file, &open.header, range.start, bytes, &needed);
        if damaged.is_empty() {
            return Ok(damaged);
        }
        // A bit may have flipped in transit or in the page cache, while the medium has it right.
        let again = self.read_from(file, &range, |open| open.object.read_again(range.start, bytes));
        let mut still = damaged.clone();
        if let Ok(open) = again {
            still = self.damaged(file, &open.header, range.start, bytes, &needed);
            for block in &mut still {
                block.before = damaged.iter().find(|before| before.span == block.span).map(|before| before.found);
            }
        }
        if still.is_empty() {
            return Ok(still);
        }
        let proven = self.read_below(open.level, file, |open| {
            open.object.read_at(range.start, bytes).ok()?;
            self.damaged(file, &open.header, range.start, bytes, &needed).is_empty().then_some(())
        });
        let Some(open) = proven else { return Ok(still) };
        self.count(&open, range.end - range.start);
        Ok(Vec::new())
    }

    /// Returns the damaged blocks among `bytes`, which lie at `offset` of the file.
    fn damaged(
        &self,
        file: u32,
        header: &DataHeader,
        offset: u64,
        bytes: &[u8],
        needed: &impl Fn(Range<u64>) -> bool,
    ) -> Vec<Damage> {
        let first = ((offset - header.data_start) / BLOCK_BYTES) as usize;
        let mut damaged = Vec::new();
        for (i, block) in bytes.chunks(BLOCK_BYTES as usize).enumerate() {
            let start = offset + i as u64 * BLOCK_BYTES;
            let span = start..start + block.len() as u64;
            if needed(span.clone()) {
                let (expected, found) = (header.block_crcs[first + i], crc64(block));
                if found != expected {
                    let path = self.manifest.files()[file as usize].path.clone();
                    damaged.push(Damage { path, span, expected, found, before: None });
                }
            }
        }
        damaged
    }

    /// Returns the manifest's entry of a file.
    pub fn entry(&self, file: u32) -> &FileEntry {
        &self.manifest.files()[file as usize]
    }

    /// Returns the checkpoint's place, for messages.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Returns the leaves with bytes in a range of a file, as text.
    pub fn leaves_in(&self, file: u32, range: &Range<u64>) -> String {
        let meets = |e: Extent| e.file == file && e.offset < range.end && range.start < e.offset + e.bytes;
        let (mut names, mut more) = (Vec::new(), 0);
        for i in 0..self.manifest.len() {
            let is_tensor = self.manifest.regions(i).any(|(_, extent)| meets(extent));
            if !is_tensor && !self.manifest.values(i).any(|(_, extent)| meets(extent)) {
                continue;
            }
            if names.len() == NAMES_MAX {
                more += 1;
                continue;
            }
            let leaf = self.manifest.leaf(i);
            names.push(format!("{} {}/{}", if is_tensor { "tensor" } else { "value" }, leaf.key, leaf.name));
        }
        let names = names.join(", ");
        if more == 0 { names } else { format!("{names} and {more} more") }
    }

    /// Announces that a range will be read soon, `shared_on_host` by other processes of this machine too.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn prefetch(&self, file: u32, range: Range<u64>, shared_on_host: bool) -> Result<Fetch> {
        let open = self.open(file)?;
        let cache = open.object.page_cache();
        Ok(cache.map_or(Fetch::WhenRead, |cache| cache.prefetch(range.start, range.end - range.start, shared_on_host)))
    }

    /// Returns how the storage is read best.
    pub fn needs(&self) -> ReadNeeds {
        self.levels[0].store.needs().reads
    }

    /// Returns whether most of these ranges of files are in this machine's page cache, by samples; `false` if unknown.
    pub fn are_cached<I: Iterator<Item = (u32, Range<u64>)>>(&self, spans: impl Fn() -> I) -> bool {
        let bytes = spans().map(|(_, span)| span.end - span.start).fold(0, u64::saturating_add);
        let step = bytes.div_ceil(SAMPLES).max(1);
        let (mut passed, mut next, mut looked_at, mut cached) = (0u64, step / 2, 0, 0);
        for (file, span) in spans() {
            while next < passed.saturating_add(span.end - span.start) {
                let at = span.start + (next - passed);
                let bytes = SAMPLE_BYTES.min(span.end - at);
                // The load itself reports a damaged file.
                let Ok(open) = self.open_once(file) else { return false };
                let there = open.object.page_cache().and_then(|cache| cache.cached_bytes(at, bytes));
                let Some(there) = there else { return false };
                looked_at += bytes;
                cached += there.min(bytes);
                next = next.saturating_add(step);
            }
            passed = passed.saturating_add(span.end - span.start);
        }
        cached > looked_at / 2
    }

    /// Returns the range to read for a planned read.
    pub fn range(&self, read: &Read) -> Range<u64> {
        self.whole_blocks(read.file, read.offset..read.offset + read.bytes)
    }

    /// Grows the range to whole blocks of the file.
    pub fn whole_blocks(&self, file: u32, range: Range<u64>) -> Range<u64> {
        let entry = &self.manifest.files()[file as usize];
        let start = (range.start - entry.data_start) / BLOCK_BYTES * BLOCK_BYTES;
        // The manifest's size of a file is not verified before the file is opened.
        let end = (range.end - entry.data_start).checked_next_multiple_of(BLOCK_BYTES);
        let end = end.and_then(|end| entry.data_start.checked_add(end)).map_or(entry.bytes, |end| end.min(entry.bytes));
        entry.data_start + start..end
    }
}

impl OpenFile {
    /// Returns the checksum of the whole file that follows from its header, which the manifest proves.
    pub fn crc64(&self, entry: &FileEntry) -> u64 {
        let data = entry.bytes - entry.data_start;
        let lengths = (0..data).step_by(BLOCK_BYTES as usize).map(|start| BLOCK_BYTES.min(data - start));
        let blocks = self.header.block_crcs.iter().zip(lengths);
        blocks.fold(entry.header_crc, |crc, (&block, bytes)| crc64_joined(crc, block, bytes))
    }

    /// Places pieces of whole blocks that lie at `offset` of the file.
    fn place(
        &self,
        blocks: &[u8],
        offset: u64,
        pieces: &[Piece],
        sinks: &[&Sink],
    ) -> std::result::Result<(), Unverified> {
        let first = ((offset - self.header.data_start) / BLOCK_BYTES) as usize;
        let expected = &self.header.block_crcs[first..first + blocks.len().div_ceil(BLOCK_BYTES as usize)];
        verify_block::place(blocks, offset, expected, pieces, sinks)
    }
}

/// A block whose bytes are not the saved ones.
#[derive(Debug, Clone)]
pub struct Damage {
    /// The data file, in the checkpoint.
    pub path: String,
    /// The block's bytes in the file.
    pub span: Range<u64>,
    /// The CRC-64 in the file's header.
    pub expected: u64,
    /// CRC-64 of the bytes read, the second time if they were read twice.
    pub found: u64,
    /// CRC-64 of the bytes read the first time of two.
    pub before: Option<u64>,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "file {}, bytes {}..{}: expected CRC-64 {:016x}, found {:016x}",
            self.path, self.span.start, self.span.end, self.expected, self.found
        )?;
        match self.before {
            None => Ok(()),
            Some(before) if before == self.found => f.write_str(", and the same when it was read again"),
            Some(before) => write!(f, " when it was read again, and {before:016x} before"),
        }
    }
}

fn open_file((level, store): (usize, &dyn Store), entry: &FileEntry, missing: Missing) -> Result<OpenFile> {
    let explained = |error: shardfast_store::Error| {
        let error = Error::from(error);
        match error.kind {
            Kind::NotFound => missing(store, entry, error),
            _ => error,
        }
    };
    let open = || store.open_head(&entry.path, entry.data_start).map_err(explained);
    let (mut object, mut header) = open()?;
    if object.bytes() != entry.bytes {
        store.look_anew(&entry.path);
        (object, header) = open()?;
    }
    if object.bytes() != entry.bytes {
        return Err(Error::corrupt(format!(
            "file {}: expected {} bytes, found {}",
            entry.path,
            entry.bytes,
            object.bytes()
        )));
    }
    let mut found = crc64(&header);
    if found != entry.header_crc {
        object.read_again(0, &mut header)?;
        found = crc64(&header);
    }
    if found != entry.header_crc {
        return Err(Error::corrupt(format!(
            "file {}: its header (bytes 0..{}) is not the one that was saved: expected CRC-64 {:016x}, found \
             {found:016x}",
            entry.path, entry.data_start, entry.header_crc
        )));
    }
    let header = DataHeader::parse(&header, entry.bytes)?;
    if header.data_start != entry.data_start || header.block_bytes != BLOCK_BYTES {
        return Err(Error::corrupt(format!(
            "file {}: expected data from byte {} in blocks of {BLOCK_BYTES}, found from {} in blocks of {}",
            entry.path, entry.data_start, header.data_start, header.block_bytes
        )));
    }
    Ok(OpenFile { object, header, level })
}

/// Runs all reads into the sinks (indexed by `Piece::want`) and returns how many bytes of data were read.
/// `shared_on_host` is whether other ranks read the same bytes.
///
/// # Errors
/// `Corrupt` names the checkpoint, the leaves, the file and the byte range; no byte of a damaged block reaches a sink.
/// Sinks filled before the failure keep their data.
pub fn run(
    files: &Files,
    reads: impl Iterator<Item = Read>,
    sinks: &[&Sink],
    staging: &Arc<Staging>,
    shared_on_host: bool,
) -> Result<u64> {
    let (bytes_read, failure) = (AtomicU64::new(0), FirstFailure::default());
    let interrupt = interrupt::current();
    let announced = reads.take_while(|_| !failure.is_set()).map(|read| {
        let range = files.range(&read);
        let fetch = files.prefetch(read.file, range.clone(), shared_on_host).unwrap_or_else(|error| {
            let leaves = files.leaves_in(read.file, &(0..u64::MAX));
            failure.set(error.within(format_args!("{leaves} cannot be read")));
            Fetch::WhenRead
        });
        Announced { planned: Planned { read, range }, fetch }
    });
    let work = |batch: Batch| {
        if !failure.is_set() {
            match interrupt::within(interrupt.clone(), || run_batch(files, batch, sinks, staging)) {
                Ok(bytes) => _ = bytes_read.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => failure.set(error),
            }
        }
    };
    let needs = files.needs();
    let slots_max = staging.slots() / 2;
    each_ahead(Batches::new(announced, needs, slots_max), needs.in_flight, |batch| batch.fetch.is_ahead(), work);
    failure.into_result()?;
    Ok(bytes_read.into_inner())
}

/// Calls `work` with every item, on as many threads as there are cores, after `announce` was called with it on this
/// thread, well ahead. While `announce` returns that it has no effect, there are as many threads as reads may be
/// `in_flight`.
pub fn each_ahead<T: Send>(
    items: impl Iterator<Item = T>,
    in_flight: usize,
    announce: impl Fn(&T) -> bool,
    work: impl Fn(T) + Sync,
) {
    let (sender, receiver) = crossbeam_channel::bounded(ANNOUNCED_READS);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let mut threads = 0;
        for item in items {
            let wanted = if announce(&item) { cores.min(in_flight) } else { in_flight };
            while threads < wanted {
                let (receiver, work): (crossbeam_channel::Receiver<T>, _) = (receiver.clone(), &work);
                scope.spawn(move || {
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| receiver.iter().for_each(work))) {
                        // Otherwise the sender would block for ever once no thread receives.
                        receiver.into_iter().for_each(drop);
                        resume_unwind(panic);
                    }
                });
                threads += 1;
            }
            // The receiver lives as long as the scope.
            let _ = sender.send(item);
        }
        drop(sender);
    });
}

/// Makes the reads of a batch in one request, each into a slot, and takes them from there; returns how many bytes were
/// read.
fn run_batch(files: &Files, batch: Batch, sinks: &[&Sink], staging: &Arc<Staging>) -> Result<u64> {
    let Batch { span: Span { file, .. }, planned, .. } = batch;
    let mut slots = staging.acquire_many(planned.len())?;
    let ranges: Vec<Range<u64>> = planned.iter().map(|planned| planned.range.clone()).collect();
    let open = files.read_together(file, &ranges, &mut slots)?;
    planned.into_iter().zip(slots).map(|(planned, slot)| take(files, &open, planned, slot, sinks)).sum()
}

/// Processes the bytes of a read from its slot.
fn take(files: &Files, open: &OpenFile, planned: Planned, mut slot: Slot, sinks: &[&Sink]) -> Result<u64> {
    let Planned { read, range } = planned;
    let began = Instant::now();
    files.count(open, range.end - range.start);
    let placed = || {
        files.moves(&Event::Placed { took: began.elapsed() });
        files.moves(&copied(&read));
    };
    let bytes = &slot[..(range.end - range.start) as usize];
    if is_host(&read, sinks) && open.place(bytes, range.start, &read.pieces, sinks).is_ok() {
        placed();
        return Ok(range.end - range.start);
    }
    let is_needed = |block: Range<u64>| {
        read.pieces.iter().any(|piece| piece.src < block.end && block.start < piece.src + piece.span_bytes)
    };
    let damaged = files.check(read.file, range.clone(), open, &mut slot, is_needed)?;
    if let Some(damage) = damaged.first() {
        let leaves = files.leaves_in(read.file, &damage.span);
        return Err(Error::corrupt(format!("{}: {leaves}: {damage}", files.place)));
    }
    // Waits before the slot is returned, also after an error.
    let mut fences = Fences::default();
    for piece in &read.pieces {
        let at = (piece.src - range.start) as usize;
        let source = &slot[at..at + piece.span_bytes as usize];
        let sink = sinks[piece.want as usize];
        sink.scatter(&piece.dst_offsets, &piece.lengths, &piece.src_strides, source, &mut fences)?;
    }
    fences.wait()?;
    placed();
    Ok(range.end - range.start)
}

/// Returns the event that a read's bytes are where they are wanted.
fn copied(read: &Read) -> Event<'static> {
    Event::Copied { bytes: read.pieces.iter().map(Piece::bytes).sum() }
}

/// Returns whether all bytes of a read are for this process's memory.
fn is_host(read: &Read, sinks: &[&Sink]) -> bool {
    read.pieces.iter().all(|piece| sinks[piece.want as usize].host().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_every_thread_ends_the_work() {
        let work = || each_ahead(0..10_000, 8, |_| true, |_: u32| panic!("as was to be shown"));
        assert!(catch_unwind(work).is_err());
    }
}
