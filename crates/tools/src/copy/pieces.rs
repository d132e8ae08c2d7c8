//! The bytes of a data file, read in pieces and proven on the way.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shardfast_engine::Engine;
use shardfast_format::{BLOCK_BYTES, FileEntry, crc64};
use shardfast_transfer::error::{Error, FirstFailure, Result};
use shardfast_transfer::interrupt;
use shardfast_transfer::reader::{Damage, Files, OpenFile};
use shardfast_transfer::staging::ALIGNMENT;

use super::Limit;

/// Pieces in flight.
const THREADS_MAX: usize = 16;

/// Bytes of a file, followed by zeros up to the next unit of direct writes, in memory that is aligned for them.
pub(super) struct Piece {
    pub(super) memory: Vec<u8>,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

/// Reads a file in pieces of this many bytes, several at a time, proves them, and calls `take` with each.
pub(super) fn each_piece(
    files: &Files,
    number: u32,
    engine: &Arc<Engine>,
    piece_bytes: u64,
    limit: &Limit,
    take: impl Fn(u64, &Piece) -> Result<()> + Sync,
) -> Result<()> {
    let (file, next, failure) = (files.entry(number), AtomicU64::new(0), FirstFailure::default());
    let in_budget = (engine.staging_bytes() / piece_bytes).max(1) as usize;
    let threads = THREADS_MAX.min(in_budget).min(file.bytes.div_ceil(piece_bytes).max(1) as usize);
    let each = || {
        while !failure.is_set() {
            let offset = next.fetch_add(piece_bytes, Ordering::Relaxed);
            if offset >= file.bytes {
                return;
            }
            let range = offset..file.bytes.min(offset + piece_bytes);
            let waited = limit.wait(range.end - range.start);
            let piece = waited.and_then(|()| verified(files, number, file, range));
            if let Err(error) = piece.and_then(|piece| take(offset, &piece)) {
                failure.set(error);
            }
        }
    };
    let interrupt = interrupt::current();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| interrupt::within(interrupt.clone(), each));
        }
    });
    failure.into_result()
}

/// Reads a range of a file with all blocks that it touches, and proves them.
fn verified(files: &Files, number: u32, file: &FileEntry, range: Range<u64>) -> Result<Piece> {
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
    read_verified(files, number, first, &mut memory[read])?;
    let bytes = (range.end - range.start) as usize;
    let begin = skipped + ahead;
    memory[begin + bytes..].fill(0);
    Ok(Piece { memory, start: begin, bytes })
}

/// Reads a range that begins with the file or with a block, and ends with the header or a block, and proves it.
fn read_verified(files: &Files, number: u32, offset: u64, bytes: &mut [u8]) -> Result<()> {
    let range = offset..offset + bytes.len() as u64;
    let mut open = files.read_from(number, &range, |open| open.object.read_at(offset, bytes))?;
    let mut again = false;
    loop {
        let Some(damage) = damage(files, number, &open, offset, bytes) else { return Ok(()) };
        if again {
            let leaves = files.leaves_in(number, &damage.span);
            return Err(Error::corrupt(format!("{}: {leaves}: {damage}", files.place())));
        }
        again = true;
        open = files.read_from(number, &range, |open| open.object.read_again(offset, bytes))?;
    }
}

/// Returns the first damaged block among `bytes`, or the damaged header.
fn damage(files: &Files, number: u32, open: &OpenFile, offset: u64, bytes: &[u8]) -> Option<Damage> {
    let entry = files.entry(number);
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
