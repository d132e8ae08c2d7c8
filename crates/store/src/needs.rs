//! Describes what a storage needs and offers, as plain data, so that callers need not know which storage it is.

use std::ops::Range;

/// Ways in which objects of a storage are best written and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Pieces in which an object is written.
    pub pieces: Pieces,
    /// Preferences for reads.
    pub reads: ReadNeeds,
    /// `true` if [`create`](crate::Store::create) or [`finish`](crate::ObjectWriter::finish) refuses a name that is
    /// taken. If `false`, the writer must ensure that the name is new.
    pub refuses_taken_names: bool,
    /// `true` if a [list](crate::Store::list) is always current, with names and lengths of objects of all writers, so
    /// that one request replaces many.
    pub lists_are_current: bool,
}

/// Pieces in which an object is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Pieces of any length, aligned as the [writer](crate::ObjectWriter::alignment) asks.
    Any,
    /// Parts of one length, the last one shorter, each in one write, in any order. All of them must be written. The
    /// storage chooses how many are written at a time: it [takes](crate::Store::write_all) the writes, and makes each
    /// from its beginning to its end. So a storage that only appends has no other needs.
    Parts(Parts),
}

/// Lengths of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Shortest part, in bytes, except for the last one of an object.
    pub bytes_min: u64,
    /// Longest part that is of use, in bytes.
    pub bytes_max: u64,
    /// Maximum number of parts of an object.
    pub count_max: u64,
}

/// Number of parts of an object that keep a connection pool busy: longer objects get longer parts, in fewer requests.
const PARTS_WANTED: u64 = 128;

impl Parts {
    /// Returns the length of the parts of an object of `bytes` bytes: a multiple of the shortest one.
    pub fn of(&self, bytes: u64) -> u64 {
        let wanted = bytes.div_ceil(PARTS_WANTED).next_multiple_of(self.bytes_min);
        wanted.clamp(self.bytes_min, self.bytes_max)
    }

    /// Returns the length of the longest object, in bytes.
    pub fn object_bytes_max(&self) -> u64 {
        self.bytes_max.saturating_mul(self.count_max)
    }
}

/// Preferences for reading objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadNeeds {
    /// Largest gap, in bytes, between ranges of one object that are read in one request.
    pub gap_bytes: u64,
    /// Longest such request, in bytes; 0 if requests cost nothing, and each range is one.
    pub request_bytes: u64,
    /// Number of reads in flight, if none is announced ahead.
    pub in_flight: usize,
}

/// Share of a request's bytes that may be unwanted: one in 12.
const GAPS_SHARE: u64 = 12;

impl ReadNeeds {
    /// Returns whether ranges of one object that span `whole`, the last one `gap` bytes after the others, are read in
    /// one request, of which `unwanted` bytes are in no range.
    pub fn joins(&self, whole: Range<u64>, gap: u64, unwanted: u64) -> bool {
        let bytes = whole.end - whole.start;
        gap <= self.gap_bytes && bytes <= self.request_bytes && unwanted.saturating_mul(GAPS_SHARE) <= bytes
    }
}

/// Numbers of requests to a service, by kind; zero if storage takes no requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Objects or parts sent, and uploads begun and completed.
    pub puts: u64,
    /// Ranges that were read.
    pub gets: u64,
    /// Requests among `gets` for a range whose first answer was late.
    pub asked_again: u64,
    /// Requests for an object's length.
    pub heads: u64,
    /// Pages of lists.
    pub lists: u64,
    /// Deletions, of one object or of many.
    pub deletes: u64,
}

impl Requests {
    /// Adds other numbers to these.
    pub fn add(&mut self, other: Requests) {
        self.puts += other.puts;
        self.gets += other.gets;
        self.asked_again += other.asked_again;
        self.heads += other.heads;
        self.lists += other.lists;
        self.deletes += other.deletes;
    }
}

impl Needs {
    /// Needs of storage that this machine reads and writes itself.
    pub const LOCAL: Needs = Needs {
        pieces: Pieces::Any,
        reads: ReadNeeds { gap_bytes: 0, request_bytes: 0, in_flight: 8 },
        refuses_taken_names: true,
        // A client of a network file system may answer from its cache.
        lists_are_current: false,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_grow_with_the_object_and_all_lengths_are_multiples() {
        const MIB: u64 = 1 << 20;
        let parts = Parts { bytes_min: 8 * MIB, bytes_max: 64 * MIB, count_max: 10_000 };
        let found = [0, 1, 100 * MIB, 1024 * MIB, 1025 * MIB, 4096 * MIB, 8192 * MIB, 65_536 * MIB];
        assert_eq!(found.map(|bytes| parts.of(bytes) / MIB), [8, 8, 8, 8, 16, 32, 64, 64]);
        assert_eq!(parts.object_bytes_max(), 640_000 * MIB);
    }
}
