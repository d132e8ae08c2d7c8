//! Planned reads, grouped with adjacent ones.

use std::ops::Range;

use shardfast_plan::Read;
use shardfast_store::{Fetch, ReadNeeds};

/// A planned read, and the range to read for it.
pub(super) struct Planned {
    pub(super) read: Read,
    pub(super) range: Range<u64>,
}

/// A planned read that was announced to the storage.
pub(super) struct Announced {
    pub(super) planned: Planned,
    pub(super) fetch: Fetch,
}

/// Bytes of a file that are read at once.
pub struct Span {
    /// Number of the file in the manifest.
    pub file: u32,
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Bytes in it that no read asks for.
    gaps: u64,
}

impl Span {
    /// Returns a span of one range.
    pub fn new(file: u32, range: Range<u64>) -> Span {
        Span { file, range, gaps: 0 }
    }

    /// Returns the span that holds `range`, too, if storage with these needs reads both in one request. Ranges ascend.
    pub fn with(&self, file: u32, range: &Range<u64>, needs: ReadNeeds) -> Option<Span> {
        let gap = range.start.saturating_sub(self.range.end);
        let whole = self.range.start..range.end.max(self.range.end);
        let gaps = self.gaps + gap;
        let is_behind = file == self.file && self.range.start <= range.start;
        (is_behind && needs.joins(whole.clone(), gap, gaps)).then_some(Span { file, range: whole, gaps })
    }
}

/// Reads of one thread: several only if they are read in one request.
pub(super) struct Batch {
    pub(super) span: Span,
    pub(super) planned: Vec<Planned>,
    pub(super) fetch: Fetch,
}

impl Batch {
    fn new(Announced { planned, fetch }: Announced) -> Batch {
        let span = Span::new(planned.read.file, planned.range.clone());
        Batch { span, planned: vec![planned], fetch }
    }

    /// Takes a read that continues the batch in the same way; returns any other.
    fn take(&mut self, next: Announced, needs: ReadNeeds, slots_max: usize) -> Option<Announced> {
        let has_room = self.planned.len() < slots_max;
        let waits = self.fetch == Fetch::WhenRead && next.fetch == Fetch::WhenRead;
        let span = self.span.with(next.planned.read.file, &next.planned.range, needs);
        let Some(span) = span.filter(|_| waits && has_room) else { return Some(next) };
        self.span = span;
        self.planned.push(next.planned);
        None
    }
}

pub(super) struct Batches<I> {
    announced: I,
    /// The first of the next batch.
    next: Option<Announced>,
    needs: ReadNeeds,
    /// Slots that one request may fill.
    slots_max: usize,
}

impl<I: Iterator<Item = Announced>> Batches<I> {
    pub(super) fn new(announced: I, needs: ReadNeeds, slots_max: usize) -> Self {
        Batches { announced, next: None, needs, slots_max }
    }
}

impl<I: Iterator<Item = Announced>> Iterator for Batches<I> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let mut batch = Batch::new(self.next.take().or_else(|| self.announced.next())?);
        for next in self.announced.by_ref() {
            if let Some(other) = batch.take(next, self.needs, self.slots_max) {
                self.next = Some(other);
                break;
            }
        }
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use shardfast_store::Needs;

    use super::*;

    fn announced((file, range, fetch): (u32, Range<u64>, Fetch)) -> Announced {
        let read = Read { file, offset: range.start, bytes: range.end - range.start, pieces: Vec::new() };
        Announced { planned: Planned { read, range }, fetch }
    }

    #[test]
    fn every_read_comes_once_in_order_and_only_what_waits_for_requests_in_batches() {
        let costly = ReadNeeds { gap_bytes: 0, request_bytes: 100, in_flight: 16 };
        let reads = [
            (0, 0..10, Fetch::WhenRead),
            (0, 10..20, Fetch::WhenRead),
            (0, 20..30, Fetch::Begun),
            (0, 30..40, Fetch::Begun),
            (0, 40..50, Fetch::Cached),
            (0, 50..60, Fetch::Cached),
            (0, 60..70, Fetch::WhenRead),
            (0, 65..80, Fetch::WhenRead),
            (1, 80..90, Fetch::WhenRead),
        ];
        for (needs, expected) in [(costly, &[2, 1, 1, 1, 1, 2, 1][..]), (Needs::LOCAL.reads, &[1; 9])] {
            let batches: Vec<Batch> = Batches::new(reads.iter().cloned().map(announced), needs, 8).collect();
            let counts: Vec<usize> = batches.iter().map(|batch| batch.planned.len()).collect();
            assert_eq!(counts, expected);
            let found = batches.iter().flat_map(|batch| {
                batch.planned.iter().map(|planned| (planned.read.file, planned.range.clone(), batch.fetch))
            });
            assert!(found.eq(reads.iter().cloned()));
        }
    }

    #[test]
    fn what_costs_requests_is_read_in_few_of_them() {
        const KIB: u64 = 1 << 10;
        let needs = ReadNeeds { gap_bytes: 256 * KIB, request_bytes: 8192 * KIB, in_flight: 16 };
        let counts = |slots_max, ranges: &[(u32, Range<u64>)]| -> Vec<usize> {
            let announced = ranges.iter().cloned().map(|(file, range)| announced((file, range, Fetch::WhenRead)));
            Batches::new(announced, needs, slots_max).map(|batch| batch.planned.len()).collect()
        };
        let all: Vec<_> = (0..20).map(|i| (0, i * 1024 * KIB..(i + 1) * 1024 * KIB)).collect();
        assert_eq!(counts(64, &all), [8, 8, 4]);
        assert_eq!(counts(3, &all), [3, 3, 3, 3, 3, 3, 2], "the budget's slots");
        let half: Vec<_> = (0..6).map(|i| (0, i * 200 * KIB..i * 200 * KIB + 100 * KIB)).collect();
        assert_eq!(counts(64, &half), [1; 6], "as much unwanted as wanted");
        let most: Vec<_> = (0..6).map(|i| (0, i * 1024 * KIB..i * 1024 * KIB + 960 * KIB)).collect();
        assert_eq!(counts(64, &most), [6]);
        assert_eq!(counts(64, &[(0, 0..KIB), (1, KIB..2 * KIB), (1, 2 * KIB..3 * KIB)]), [1, 2], "two files");
        assert_eq!(counts(64, &[(0, 0..9000 * KIB), (0, 9300 * KIB..9400 * KIB)]), [1, 1], "a wide gap");
    }
}
