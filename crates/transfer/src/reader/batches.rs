//! Planned reads, grouped with adjacent ones.

use std::collections::VecDeque;
use std::ops::Range;

use shardfast_plan::Read;
use shardfast_store::{Fetch, ReadNeeds};

/// A planned read, and the range to read for it.
pub(super) struct Planned {
    pub(super) read: Read,
    pub(super) range: Range<u64>,
}

/// Planned reads by ascending offset, each with the stretch of its file that is read with it without a gap: all before
/// it, and as much after it as matters.
pub(super) struct Stretches<I> {
    reads: I,
    ahead: VecDeque<Planned>,
    /// Beginning of the last read's stretch: its file, and the first and the last byte so far.
    last: (u32, Range<u64>),
}

/// Distance after a read for which the following reads are known, in bytes.
const STRETCH_BYTES: u64 = 4 << 20;

impl<I: Iterator<Item = Planned>> Stretches<I> {
    pub(super) fn new(reads: I) -> Self {
        Stretches { reads, ahead: VecDeque::new(), last: (u32::MAX, 0..0) }
    }

    /// Returns the end of the stretch of `file` that reaches `end`, as far as it matters.
    fn end(&mut self, file: u32, mut end: u64) -> u64 {
        let enough = end.saturating_add(STRETCH_BYTES);
        let mut next = 0;
        while end < enough {
            if next == self.ahead.len() {
                let Some(planned) = self.reads.next() else { break };
                self.ahead.push_back(planned);
            }
            let Planned { read, range } = &self.ahead[next];
            if read.file != file || range.start > end {
                break;
            }
            end = end.max(range.end);
            next += 1;
        }
        end
    }
}

impl<I: Iterator<Item = Planned>> Iterator for Stretches<I> {
    type Item = (Planned, Range<u64>);

    fn next(&mut self) -> Option<Self::Item> {
        let planned = self.ahead.pop_front().or_else(|| self.reads.next())?;
        let (file, Range { start, end }) = (planned.read.file, planned.range.clone());
        let goes_on = self.last.0 == file && self.last.1.start <= start && start <= self.last.1.end;
        let start = if goes_on { self.last.1.start } else { start };
        let end = if goes_on { end.max(self.last.1.end) } else { end };
        self.last = (file, start..end);
        let stretch = start..self.end(file, end);
        Some((planned, stretch))
    }
}

/// A planned read that was announced to the storage.
pub(super) struct Announced {
    pub(super) planned: Planned,
    pub(super) fetch: Fetch,
    /// `true` if all of it is for this process's memory.
    pub(super) is_host: bool,
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

/// Reads of one thread: several only if they may be lent as one, without a gap, or read in one request.
pub(super) struct Batch {
    pub(super) span: Span,
    pub(super) planned: Vec<Planned>,
    pub(super) fetch: Fetch,
    pub(super) is_host: bool,
}

/// Preferences for lending: the longer the ranges, the fewer first blocks, which are verified without a copy beside.
const LENT: ReadNeeds = ReadNeeds { gap_bytes: 0, request_bytes: 4 << 20, in_flight: 1 };

impl Batch {
    pub(super) fn new(Announced { planned, fetch, is_host }: Announced) -> Batch {
        let span = Span::new(planned.read.file, planned.range.clone());
        Batch { span, planned: vec![planned], fetch, is_host }
    }

    /// Takes a read that continues the batch in the same way; returns any other.
    fn take(&mut self, next: Announced, needs: ReadNeeds, slots_max: usize) -> Option<Announced> {
        let is_lent = self.is_host && self.fetch.is_to_be_lent();
        let is_alike = (next.fetch, next.is_host) == (self.fetch, self.is_host);
        let has_room = is_lent || self.fetch == Fetch::WhenRead && self.planned.len() < slots_max;
        let needs = if is_lent { LENT } else { needs };
        let span = self.span.with(next.planned.read.file, &next.planned.range, needs);
        let Some(span) = span.filter(|_| is_alike && has_room) else { return Some(next) };
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

    #[test]
    fn stretches_reach_as_far_as_is_read_without_a_gap() {
        const MIB: u64 = 1 << 20;
        // Two stretches of one file, the second one longer than is looked ahead, and another file.
        let ranges: Vec<(u32, Range<u64>)> = [
            vec![(0, 10..MIB), (0, MIB - 5..2 * MIB), (0, 2 * MIB..2 * MIB + 1)],
            (3..20).map(|i| (0, i * MIB..(i + 1) * MIB)).collect(),
            vec![(1, 20 * MIB..21 * MIB), (1, 20 * MIB..20 * MIB + 5), (1, 21 * MIB..22 * MIB)],
        ]
        .concat();
        let planned = |(file, range): (u32, Range<u64>)| {
            let read = Read { file, offset: range.start, bytes: range.end - range.start, pieces: Vec::new() };
            Planned { read, range }
        };
        let found: Vec<(u32, Range<u64>, Range<u64>)> = Stretches::new(ranges.iter().cloned().map(planned))
            .map(|(planned, stretch)| (planned.read.file, planned.range, stretch))
            .collect();
        let order = found.iter().map(|(file, range, _)| (*file, range.clone()));
        assert!(order.eq(ranges), "{found:?}");
        for (file, range, stretch) in found {
            let whole = match (file, range.start) {
                (0, start) if start < 3 * MIB => 10..2 * MIB + 1,
                (0, _) => 3 * MIB..20 * MIB,
                _ => 20 * MIB..22 * MIB,
            };
            assert!(stretch.start == whole.start && stretch.end <= whole.end, "{file} {range:?}: {stretch:?}");
            assert!(stretch.end >= whole.end.min(range.end + STRETCH_BYTES), "{file} {range:?}: {stretch:?}");
        }
    }

    #[test]
    fn only_what_may_be_lent_without_a_gap_is_one_batch() {
        const MIB: u64 = 1 << 20;
        let announced = |&(file, start, end, fetch, is_host): &(u32, u64, u64, Fetch, bool)| {
            let read = Read { file, offset: start, bytes: end - start, pieces: Vec::new() };
            Announced { planned: Planned { read, range: start..end }, fetch, is_host }
        };
        let reads = [
            // As long as a batch may be, two of them overlapping.
            (0, 0, MIB, Fetch::Cached, true),
            (0, MIB - 65_536, 2 * MIB, Fetch::Cached, true),
            (0, 2 * MIB, LENT.request_bytes, Fetch::Cached, true),
            (0, LENT.request_bytes, LENT.request_bytes + 1, Fetch::Cached, true),
            // In another way, behind a gap, in another file.
            (0, LENT.request_bytes + 1, LENT.request_bytes + 2, Fetch::WhenLent, true),
            (0, LENT.request_bytes + 3, LENT.request_bytes + 4, Fetch::WhenLent, true),
            (1, LENT.request_bytes + 4, LENT.request_bytes + 5, Fetch::WhenLent, true),
            // To a device, or not to be lent at all.
            (1, LENT.request_bytes + 5, LENT.request_bytes + 6, Fetch::WhenLent, false),
            (1, LENT.request_bytes + 6, LENT.request_bytes + 7, Fetch::WhenLent, false),
            (2, 0, 1, Fetch::Begun, true),
            (2, 1, 2, Fetch::Begun, true),
            (2, 2, 3, Fetch::WhenRead, true),
            (2, 3, 4, Fetch::WhenRead, true),
        ];
        let batches: Vec<Batch> = Batches::new(reads.iter().map(announced), Needs::LOCAL.reads, 8).collect();
        let counts: Vec<usize> = batches.iter().map(|batch| batch.planned.len()).collect();
        assert_eq!(counts, [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(batches[0].span.range, 0..LENT.request_bytes);
        let found = batches.iter().flat_map(|batch| {
            let fields = |planned: &Planned| {
                let range = &planned.range;
                assert!(batch.span.file == planned.read.file && batch.span.range.start <= range.start);
                (planned.read.file, range.start, range.end, batch.fetch, batch.is_host)
            };
            batch.planned.iter().map(fields).collect::<Vec<_>>()
        });
        assert!(found.eq(reads), "every read once, in order");
    }

    #[test]
    fn what_costs_requests_is_read_in_few_of_them() {
        const KIB: u64 = 1 << 10;
        let needs = ReadNeeds { gap_bytes: 256 * KIB, request_bytes: 8192 * KIB, in_flight: 16 };
        let counts = |slots_max, ranges: &[(u32, Range<u64>)]| -> Vec<usize> {
            let announced = ranges.iter().cloned().map(|(file, range)| {
                let bytes = range.end - range.start;
                let read = Read { file, offset: range.start, bytes, pieces: Vec::new() };
                Announced { planned: Planned { read, range }, fetch: Fetch::WhenRead, is_host: true }
            });
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
