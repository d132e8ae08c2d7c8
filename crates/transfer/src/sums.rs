//! Computes checksums of bytes that a rank holds and does not write, while it writes.
//!
//! A save that compares replicas needs the CRC-64 of each copy. Written bytes are summed on their way; the rest is only
//! read here, in pieces of a slot. It is captured like written bytes: eager pieces count for `captured`, all for
//! `staged`. One thread begins with it at once, since it needs no staging memory, for which fillers may have to wait;
//! fillers that have nothing left to copy join in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use shardfast_format::crc64_joined;

use crate::capture::Capture;
use crate::error::{FirstFailure, Result};
use crate::progress::Progress;
use crate::provider::Provider;
use crate::staging::{SLOT_BYTES, Staging};

/// Bytes to sum, and their name for messages.
pub struct Summed {
    /// Bytes to sum.
    pub provider: Arc<dyn Provider>,
    /// Name of the tensor, for messages.
    pub name: String,
}

/// The work, cut into pieces.
pub(crate) struct Sums<'a> {
    of: &'a [Summed],
    pieces: Vec<Piece>,
    /// Checksums by piece.
    crcs: Vec<AtomicU64>,
    next: AtomicUsize,
}

/// A range of one item's bytes.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    of: usize,
    at: u64,
    bytes: u64,
    /// `true` if the bytes are captured eagerly.
    pub(crate) is_eager: bool,
}

impl<'a> Sums<'a> {
    /// Cuts the bytes into pieces, eager ones first.
    pub(crate) fn new(of: &'a [Summed]) -> Sums<'a> {
        let mut pieces = Vec::new();
        for (index, Summed { provider, .. }) in of.iter().enumerate() {
            let is_eager = provider.capture() == Capture::Eager;
            let starts = (0..provider.bytes()).step_by(SLOT_BYTES);
            pieces.extend(starts.map(|at| {
                let bytes = (provider.bytes() - at).min(SLOT_BYTES as u64);
                Piece { of: index, at, bytes, is_eager }
            }));
        }
        pieces.sort_by_key(|piece| !piece.is_eager);
        let crcs = pieces.iter().map(|_| AtomicU64::new(0)).collect();
        Sums { of, pieces, crcs, next: AtomicUsize::new(0) }
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Sums pieces until none is left or the save fails, and calls `done` after each. Several threads may.
    pub(crate) fn work(
        &self,
        staging: &Arc<Staging>,
        progress: &Progress,
        failure: &FirstFailure,
        done: impl Fn(&Piece),
    ) -> Result<()> {
        let mut slot = None;
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.pieces.get(number) else { return Ok(()) };
            if failure.is_set() {
                return Ok(());
            }
            if let Some(error) = progress.cancelled() {
                return Err(error);
            }
            let slot = match &mut slot {
                Some(slot) => slot,
                none => none.insert(staging.acquire()?),
            };
            let Summed { provider, name } = &self.of[piece.of];
            let crc = provider.sum(piece.at, piece.bytes, slot).map_err(|error| error.within(name))?;
            self.crcs[number].store(crc, Ordering::Relaxed);
            done(piece);
        }
    }

    /// Returns the checksum of each, in order. Only after all pieces are done.
    pub(crate) fn into_crcs(self) -> Vec<u64> {
        let mut parts: Vec<Vec<Part>> = self.of.iter().map(|_| Vec::new()).collect();
        for (piece, crc) in self.pieces.iter().zip(self.crcs) {
            parts[piece.of].push(Part { at: piece.at, bytes: piece.bytes, crc: crc.into_inner() });
        }
        parts.into_iter().map(|parts| joined(parts).crc).collect()
    }
}

/// A range of bytes, and its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Offset in the whole's bytes.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// CRC-64 of these bytes.
    pub crc: u64,
}

/// Joins adjacent ranges, given in any order, to one.
pub fn joined(mut parts: Vec<Part>) -> Part {
    parts.sort_unstable_by_key(|part| part.at);
    let join = |whole: Part, next: Part| Part {
        at: whole.at,
        bytes: whole.bytes + next.bytes,
        crc: crc64_joined(whole.crc, next.crc, next.bytes),
    };
    parts.into_iter().reduce(join).unwrap_or_default()
}
