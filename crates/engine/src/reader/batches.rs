//! Planned reads, grouped with adjacent ones.

use std::collections::VecDeque;
use std::ops::Range;

use shardfast_plan::Read;
use shardfast_store::Fetch;

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
    /// Where the stretch of the last one began: its file, and the first and the last byte so far.
    last: (u32, Range<u64>),
}

/// How far behind a read the following reads are known.
const STRETCH_BYTES: u64 = 4 << 20;

impl<I: Iterator<Item = Planned>> Stretches<I> {
    pub(super) fn new(reads: I) -> Self {
        Stretches { reads, ahead: VecDeque::new(), last: (u32::MAX, 0..0) }
    }

    /// Where the stretch ends, of `file` and up to `end`, as far as that matters.
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
    /// Whether all of it goes into this process's memory.
    pub(super) is_host: bool,
}

/// Reads of one thread: several only if they may be lent as one, without a gap.
pub(super) struct Batch {
    pub(super) file: u32,
    pub(super) range: Range<u64>,
    pub(super) planned: Vec<Planned>,
    pub(super) fetch: Fetch,
    pub(super) is_host: bool,
}

/// Bytes that are lent at a time: the more, the fewer first blocks, which are verified without a copy beside.
const BATCH_BYTES: u64 = 4 << 20;

impl Batch {
    pub(super) fn new(Announced { planned, fetch, is_host }: Announced) -> Batch {
        Batch { file: planned.read.file, range: planned.range.clone(), planned: vec![planned], fetch, is_host }
    }

    /// Takes a read that continues the batch in the same way; returns any other.
    fn take(&mut self, next: Announced) -> Option<Announced> {
        let range = &next.planned.range;
        let is_beside =
            next.planned.read.file == self.file && (self.range.start..=self.range.end).contains(&range.start);
        let is_alike = (next.fetch, next.is_host) == (self.fetch, self.is_host);
        let is_lent = self.is_host && self.fetch.is_to_be_lent();
        if !is_lent || !is_alike || !is_beside || range.end - self.range.start > BATCH_BYTES {
            return Some(next);
        }
        self.range.end = self.range.end.max(range.end);
        self.planned.push(next.planned);
        None
    }
}

pub(super) struct Batches<I> {
    announced: I,
    /// The first of the next batch.
    next: Option<Announced>,
}

impl<I: Iterator<Item = Announced>> Batches<I> {
    pub(super) fn new(announced: I) -> Self {
        Batches { announced, next: None }
    }
}

impl<I: Iterator<Item = Announced>> Iterator for Batches<I> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let mut batch = Batch::new(self.next.take().or_else(|| self.announced.next())?);
        for next in self.announced.by_ref() {
            if let Some(other) = batch.take(next) {
                self.next = Some(other);
                break;
            }
        }
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
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
            (0, 2 * MIB, BATCH_BYTES, Fetch::Cached, true),
            (0, BATCH_BYTES, BATCH_BYTES + 1, Fetch::Cached, true),
            // In another way, behind a gap, in another file.
            (0, BATCH_BYTES + 1, BATCH_BYTES + 2, Fetch::WhenLent, true),
            (0, BATCH_BYTES + 3, BATCH_BYTES + 4, Fetch::WhenLent, true),
            (1, BATCH_BYTES + 4, BATCH_BYTES + 5, Fetch::WhenLent, true),
            // To a device, or not to be lent at all.
            (1, BATCH_BYTES + 5, BATCH_BYTES + 6, Fetch::WhenLent, false),
            (1, BATCH_BYTES + 6, BATCH_BYTES + 7, Fetch::WhenLent, false),
            (2, 0, 1, Fetch::Begun, true),
            (2, 1, 2, Fetch::Begun, true),
            (2, 2, 3, Fetch::WhenRead, true),
            (2, 3, 4, Fetch::WhenRead, true),
        ];
        let batches: Vec<Batch> = Batches::new(reads.iter().map(announced)).collect();
        let counts: Vec<usize> = batches.iter().map(|batch| batch.planned.len()).collect();
        assert_eq!(counts, [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(batches[0].range, 0..BATCH_BYTES);
        let found = batches.iter().flat_map(|batch| {
            let fields = |planned: &Planned| {
                let range = &planned.range;
                assert!(batch.file == planned.read.file && batch.range.start <= range.start);
                (planned.read.file, range.start, range.end, batch.fetch, batch.is_host)
            };
            batch.planned.iter().map(fields).collect::<Vec<_>>()
        });
        assert!(found.eq(reads), "every read once, in order");
    }
}
