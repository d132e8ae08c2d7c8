//! The requests of a shared load: chunks that storage reads best together are read in one.

use std::ops::Range;

use shardfast_plan::{Chunk, Piece};
use shardfast_store::ReadNeeds;
use shardfast_transfer::error::Result;
use shardfast_transfer::reader::Span;
use shardfast_transfer::staging::SLOT_BYTES;
use shardfast_transfer::staging::shared::SharedSlot;

use super::Shared;

/// Chunks of a file that are read in one request.
pub(super) struct Request {
    pub(super) span: Span,
    pub(super) tasks: Vec<Task>,
}

/// A chunk to read, and the others' pieces of it.
pub(super) struct Task {
    pub(super) chunk: Chunk,
    pub(super) others: Vec<(Vec<u32>, Vec<Piece>)>,
    /// Slot in which the bytes for neighbours are packed.
    pub(super) slot: Option<SharedSlot>,
}

impl Shared<'_> {
    /// Returns the span of the last of these requests with a chunk, if the storage is best read like that.
    pub(super) fn continued(&self, requests: &[Request], chunk: &Chunk) -> Option<Span> {
        let last = requests.last().filter(|last| last.tasks.len() < self.staging.slots() / 2)?;
        last.span.with(chunk.file, &self.range(chunk), self.files.needs())
    }

    /// Adds a chunk to the requests that read it and others.
    pub(super) fn request(&self, task: Task, requests: &mut Vec<Request>) {
        match (self.continued(requests, &task.chunk), requests.last_mut()) {
            (Some(span), Some(last)) => {
                last.span = span;
                last.tasks.push(task);
            }
            _ => {
                requests.push(Request { span: Span::new(task.chunk.file, self.range(&task.chunk)), tasks: vec![task] })
            }
        }
    }

    /// Returns the range that is read for a chunk.
    pub(super) fn range(&self, chunk: &Chunk) -> Range<u64> {
        self.files.whole_blocks(chunk.file, chunk.range.start..chunk.end)
    }

    /// Announces a request; returns on how many threads to read.
    pub(super) fn announce(&self, request: &Request) -> Result<usize> {
        let Span { file, range, .. } = &request.span;
        let fetch = self.files.prefetch(*file, range.clone(), false).map_err(|error| {
            let leaves = self.files.leaves_in(*file, range);
            error.within(format_args!("{leaves} cannot be read"))
        })?;
        // Neighbours read from the same storage and keep it busy together.
        let in_flight = self.files.needs().in_flight;
        let readers = (2 * in_flight / (1 + self.neighbours.viewers.len())).max(2).min(in_flight);
        Ok(if fetch.is_ahead() { cores().min(in_flight) } else { readers })
    }
}

/// Returns the number of slots that one request fills.
pub(crate) fn slots_in_request(needs: ReadNeeds) -> usize {
    (needs.request_bytes / SLOT_BYTES as u64).max(1) as usize
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
