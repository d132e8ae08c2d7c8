//! Checkpoints copied from one place to another, between any two stores.
//!
//! # Protocol
//! 1. The source is opened: its `COMMIT` proves its manifest.
//! 2. Each data file is copied as it is, in the pieces that suit the target. Every block is proven on the way, and the
//!    header by the manifest; a file becomes durable before the next step. Inside one service the service copies, and
//!    the checksum that it keeps of the copy is compared with the one that follows from the blocks'.
//! 3. The manifest and the indexes follow, then `COMMIT`, create-if-absent: the copy exists from now on, and is the
//!    same attempt.
//!
//! Meanwhile the mark `.copying` in the target keeps [sweeps](mod@crate::sweep) away.
//!
//! A copy that was interrupted is made again: files that are there, and proven to be whole, are not copied again. The
//! target of an interrupted copy has no `COMMIT`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_format::{BLOCK_BYTES, COPYING, Commit, FileEntry, crc64};
use shardfast_store::{Kind as Stored, Location, ObjectWriter, Pieces, Store};

use crate::checkpoint::{self, Checkpoint};
use crate::commit;
use crate::contents;
use crate::engine::Engine;
use crate::error::{Error, FirstFailure, Kind, Result, retry};
use crate::reader::{Damage, Files};
use crate::runs;
use crate::staging::{ALIGNMENT, SLOT_BYTES};

/// How often the mark in the target is renewed: far below the age of what is swept.
const RENEWED_AFTER: Duration = Duration::from_secs(600);

/// Pieces in flight.
const THREADS_MAX: usize = 16;

/// How many bytes a second are read from the source, on average.
#[derive(Debug)]
pub struct Limit {
    bytes_a_second: Option<f64>,
    /// When the next piece may begin.
    next: Mutex<Instant>,
}

impl Limit {
    /// `None` for no limit.
    pub fn new(bytes_a_second: Option<u64>) -> Limit {
        Limit { bytes_a_second: bytes_a_second.map(|bytes| bytes.max(1) as f64), next: Mutex::new(Instant::now()) }
    }

    /// Waits until so many bytes may be read.
    fn wait(&self, bytes: u64) {
        let Some(rate) = self.bytes_a_second else { return };
        let now = Instant::now();
        let begin = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = now.max(*next);
            *next = begin + Duration::from_secs_f64(bytes as f64 / rate);
            begin
        };
        std::thread::sleep(begin - now);
    }
}

/// A checkpoint that was copied.
#[derive(Debug, Clone, Serialize)]
pub struct Copied {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
    /// Data files.
    pub files: u64,
    /// Those that were there already, from a copy that was interrupted.
    pub files_found: u64,
    /// Bytes of data files that were copied.
    pub bytes: u64,
    /// Those of them that the storage copied by itself.
    pub bytes_within: u64,
    /// Whether the whole checkpoint was there already.
    pub was_there: bool,
}

/// A run that was brought up to date.
#[derive(Debug, Clone, Serialize)]
pub struct Synced {
    /// Each committed step of the source, ascending.
    pub checkpoints: Vec<Copied>,
    /// Steps of the source without a commit, which are not copied.
    pub incomplete: Vec<u64>,
}

/// Copies the checkpoint at `from` to `to`, as fast as `limit` allows. `progress` gets the bytes copied so far and in
/// all.
///
/// # Errors
/// `NotFound` when there is none; `Conflict` when another checkpoint is committed at the target; `Invalid` when the
/// target holds foreign files; `Corrupt` when the source is damaged, and the target then has no `COMMIT`; the stores'
/// errors.
pub fn copy(
    engine: &Arc<Engine>,
    from: &str,
    to: &str,
    limit: Limit,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    copy_between(engine, (engine.store(from)?, from), (engine.store(to)?, to), &limit, progress)
}

/// [`copy`] between stores that are already open at their places.
///
/// # Errors
/// As [`copy`].
pub fn copy_between(
    engine: &Arc<Engine>,
    (source, from): (Arc<dyn Store>, &str),
    (target, to): (Arc<dyn Store>, &str),
    limit: &Limit,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    let bytes = checkpoint::read(&*source, from, Duration::MAX)?;
    let record = retry(|| commit::read_commit(&*source, ""))?;
    let (there, here) = (source.location(), target.location());
    let there = there.filter(|there| here.is_some_and(|here| here.service == there.service));
    let opened = Checkpoint::new(engine, from, source, &bytes)?;
    let files = opened.manifest().files();
    let mut copied = Copied {
        from: from.to_owned(),
        to: to.to_owned(),
        files: files.len() as u64,
        files_found: 0,
        bytes: 0,
        bytes_within: 0,
        was_there: is_there(&*target, to, &record)?,
    };
    if copied.was_there {
        return Ok(copied);
    }
    contents::refuse_foreign(&*target, to, 0, Duration::MAX)?;
    retry(|| Ok(target.can_publish()?))?;
    let mark = Mark::put(&*target)?;
    let total = files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let found = Files::new(Arc::clone(&target), to.to_owned(), Arc::clone(&opened.manifest));
    let done = AtomicU64::new(0);
    for (number, file) in (0u32..).zip(files) {
        let advance = |bytes| {
            mark.renew();
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total);
        };
        if retry(|| Ok(target.size(&file.path)?)).is_ok_and(|bytes| bytes == file.bytes)
            && is_whole(&*target, &found, number, file, engine, limit)
        {
            copied.files_found += 1;
            advance(file.bytes);
            continue;
        }
        if let Some(there) = &there
            && copied_within(&opened.files, number, file, there, &*target)?
        {
            copied.bytes_within += file.bytes;
            copied.bytes += file.bytes;
            advance(file.bytes);
            continue;
        }
        copy_file(&opened.files, number, file, &*target, engine, limit, &advance)?;
        copied.bytes += file.bytes;
    }
    let names: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    retry(|| Ok(target.sync(&names)?))?;
    commit::repeat(&*target, to, &record, opened.manifest(), &bytes)?;
    // A mark that stays goes with the next sweep.
    let _ = target.delete(COPYING);
    Ok(copied)
}

/// Copies each committed step of the run at `from` that the run at `to` does not have, oldest first. Steps that only
/// the target has stay.
///
/// # Errors
/// As [`copy`]; steps before the failed one are complete.
pub fn sync(
    engine: &Arc<Engine>,
    from: &str,
    to: &str,
    limit: Limit,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Synced> {
    let mut synced = Synced { checkpoints: Vec::new(), incomplete: Vec::new() };
    let steps = runs::list_in(&*engine.store(from)?, from)?.0;
    if steps.is_empty() {
        return Err(Error::new(Kind::NotFound, format!("{from}: there is no run with a step to copy")));
    }
    for step in steps {
        match step.commit? {
            None => synced.incomplete.push(step.step),
            Some(_) => {
                let target = runs::step_url(to, step.step);
                let (source, place) = (engine.store(&step.url)?, engine.store(&target)?);
                let copied = copy_between(engine, (source, &step.url), (place, &target), &limit, progress)?;
                synced.checkpoints.push(copied);
            }
        }
    }
    Ok(synced)
}

/// Says in the target that a copy is being made there: a sweep leaves alone where something was changed lately.
struct Mark<'a> {
    target: &'a dyn Store,
    put: Mutex<Instant>,
}

impl Mark<'_> {
    fn put(target: &dyn Store) -> Result<Mark<'_>> {
        retry(|| Ok(target.put(COPYING, b"")?))?;
        Ok(Mark { target, put: Mutex::new(Instant::now()) })
    }

    /// Puts it again from time to time. A mark that cannot be renewed now is renewed with the next piece.
    fn renew(&self) {
        if let Ok(mut put) = self.put.try_lock()
            && put.elapsed() >= RENEWED_AFTER
            && self.target.put(COPYING, b"").is_ok()
        {
            *put = Instant::now();
        }
    }
}

/// Whether this very checkpoint is committed at the target.
fn is_there(target: &dyn Store, to: &str, record: &Commit) -> Result<bool> {
    match retry(|| commit::read_commit(target, "")) {
        Err(error) if error.kind == Kind::NotFound => Ok(false),
        Ok(found) if found.encode() == record.encode() => Ok(true),
        Ok(_) => Err(Error::new(
            Kind::Conflict,
            format!("{to}: another checkpoint is committed there: copy to another place, or delete it first"),
        )),
        Err(error) => Err(error),
    }
}

/// Whether a file of the right length is what the manifest says: by the checksum that the storage keeps of it, or read
/// and proven where it keeps none. A file on a disk may have its length and not its bytes.
fn is_whole(
    target: &dyn Store,
    found: &Files,
    number: u32,
    file: &FileEntry,
    engine: &Arc<Engine>,
    limit: &Limit,
) -> bool {
    let Ok(open) = found.open(number) else { return false };
    match target.kept_crc64(&file.path) {
        Ok(Some(kept)) if kept == open.crc64(file) => true,
        _ => each_piece(found, number, file, engine, SLOT_BYTES as u64, limit, |_, _| Ok(())).is_ok(),
    }
}

/// Has the storage copy a file by itself, and compares the checksum that it keeps of the copy with that of the blocks.
/// Returns whether the copy is there and proven.
fn copied_within(source: &Files, number: u32, file: &FileEntry, there: &Location, target: &dyn Store) -> Result<bool> {
    let expected = source.open(number)?.crc64(file);
    let copied = retry(|| Ok(target.copy_within(there, &file.path, file.bytes)?));
    let kept = copied.and_then(|()| retry(|| Ok(target.kept_crc64(&file.path)?)));
    match kept {
        Ok(Some(kept)) if kept == expected => Ok(true),
        // The service may be away for the other way as well.
        Err(error) if error.kind == Kind::Unavailable => Err(error),
        // It may not read there, does not copy, keeps no checksum, or has damaged bytes: the other way says which.
        _ => retry(|| Ok(target.delete(&file.path)?)).map(|()| false),
    }
}

fn copy_file(
    source: &Files,
    number: u32,
    file: &FileEntry,
    target: &dyn Store,
    engine: &Arc<Engine>,
    limit: &Limit,
    advance: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let piece_bytes = match target.needs().pieces {
        Pieces::Any => SLOT_BYTES as u64,
        Pieces::Parts(parts) => parts.of(file.bytes),
    };
    let mut object: Box<dyn ObjectWriter> = retry(|| match target.create(&file.path, file.bytes) {
        // Left by a copy that was interrupted, or by a try whose answer was lost.
        Err(error) if error.kind == Stored::Conflict => {
            target.delete(&file.path)?;
            Ok(target.create(&file.path, file.bytes)?)
        }
        created => Ok(created?),
    })?;
    each_piece(source, number, file, engine, piece_bytes, limit, |offset, piece| {
        let padded = piece.bytes.next_multiple_of(object.alignment());
        retry(|| Ok(object.write_at(offset, &piece.memory[piece.start..piece.start + padded])?))?;
        advance(piece.bytes as u64);
        Ok(())
    })?;
    retry(|| Ok(object.finish()?))
}

/// Bytes of a file, followed by zeros up to the next unit of direct writes, in memory that is aligned for them.
struct Piece {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

/// Reads a file in pieces of so many bytes, several at a time, proves them, and calls `take` with each.
fn each_piece(
    files: &Files,
    number: u32,
    file: &FileEntry,
    engine: &Arc<Engine>,
    piece_bytes: u64,
    limit: &Limit,
    take: impl Fn(u64, &Piece) -> Result<()> + Sync,
) -> Result<()> {
    let (next, failure) = (AtomicU64::new(0), FirstFailure::default());
    let in_budget = (engine.staging_bytes() / piece_bytes).max(1) as usize;
    let threads = THREADS_MAX.min(in_budget).min(file.bytes.div_ceil(piece_bytes).max(1) as usize);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failure.is_set() {
                    let offset = next.fetch_add(piece_bytes, Ordering::Relaxed);
                    if offset >= file.bytes {
                        return;
                    }
                    let range = offset..file.bytes.min(offset + piece_bytes);
                    limit.wait(range.end - range.start);
                    if let Err(error) = proven(files, number, file, range).and_then(|piece| take(offset, &piece)) {
                        failure.set(error);
                    }
                }
            });
        }
    });
    failure.into_result()
}

/// A range of a file, read with all blocks that it touches, which are proven.
fn proven(files: &Files, number: u32, file: &FileEntry, range: Range<u64>) -> Result<Piece> {
    let start = file.data_start;
    let first = if range.start < start { 0 } else { start + (range.start - start) / BLOCK_BYTES * BLOCK_BYTES };
    let end = match range.end.checked_sub(start) {
        Some(data) => file.bytes.min(start + data.next_multiple_of(BLOCK_BYTES)),
        // A piece that ends in the header is proven with all of it.
        None => start,
    };
    let (ahead, length) = ((range.start - first) as usize, (end - first) as usize);
    let mut memory = vec![0; length + 2 * ALIGNMENT];
    // So that the range itself begins at an aligned address.
    let skipped = memory[ahead..].as_ptr().align_offset(ALIGNMENT);
    let read = skipped..skipped + length;
    files.read_proven(number, first, &mut memory[read])?;
    let bytes = (range.end - range.start) as usize;
    let begin = skipped + ahead;
    memory[begin + bytes..].fill(0);
    Ok(Piece { memory, start: begin, bytes })
}

impl Files {
    /// Reads a range that begins with the file or with a block, and ends with the header or a block, and proves it.
    fn read_proven(&self, number: u32, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let range = offset..offset + bytes.len() as u64;
        let mut open = self.read_from(number, &range, |open| open.object.read_at(offset, bytes))?;
        let mut again = false;
        loop {
            let Some(damage) = self.damage(number, &open, offset, bytes) else { return Ok(()) };
            if again {
                let leaves = self.leaves_in(number, &damage.span);
                return Err(Error::corrupt(format!("{}: {leaves}: {damage}", self.place())));
            }
            again = true;
            open = self.read_from(number, &range, |open| open.object.read_again(offset, bytes))?;
        }
    }

    /// The first block among `bytes`, or the header, that is not what was saved.
    fn damage(&self, number: u32, open: &crate::reader::OpenFile, offset: u64, bytes: &[u8]) -> Option<Damage> {
        let entry = self.entry(number);
        let header = entry.data_start.saturating_sub(offset) as usize;
        let damage = |span: Range<u64>, expected: u64, found: u64| Damage {
            path: entry.path.clone(),
            span,
            expected,
            found,
            before: None,
        };
        if header > 0 {
            let found = crc64(&bytes[..header]);
            if found != entry.header_crc {
                return Some(damage(0..entry.data_start, entry.header_crc, found));
            }
        }
        let first = ((offset + header as u64).saturating_sub(entry.data_start) / BLOCK_BYTES) as usize;
        let blocks = bytes[header..].chunks(BLOCK_BYTES as usize).zip(&open.header.block_crcs[first..]);
        blocks.enumerate().find_map(|(i, (block, &expected))| {
            let found = crc64(block);
            let start = offset + header as u64 + i as u64 * BLOCK_BYTES;
            (found != expected).then(|| damage(start..start + block.len() as u64, expected, found))
        })
    }
}
