//! What a storage needs and offers, said beforehand as plain data, so that its users need not know which one it is.

use std::ops::Range;

/// What suits a storage: how its objects are written and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// In which pieces an object is written.
    pub pieces: Pieces,
    /// How objects are read.
    pub reads: ReadNeeds,
    /// Whether [`create`](crate::Store::create) or [`finish`](crate::ObjectWriter::finish) refuses a name that is
    /// taken. Where not, whoever writes an object makes sure that its name is new.
    pub refuses_taken_names: bool,
    /// Whether a [list](crate::Store::list) tells at once which objects there are and how long they are, whoever wrote
    /// them, so that one request asks for many.
    pub lists_are_current: bool,
}

/// In which pieces an object is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Any, aligned as the [writer](crate::ObjectWriter::alignment) asks.
    Any,
    /// In parts of one length, the last one shorter, each of them in one write, in any order. All of them must be
    /// written. How many of them are written at a time is up to the storage, which
    /// [takes](crate::Store::write_all) the writes, and makes each from its beginning to its end: so a storage that
    /// only appends has no other needs.
    Parts(Parts),
}

/// The lengths of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The shortest part, in bytes, but for the last one of an object.
    pub bytes_min: u64,
    /// The longest part that is of use, in bytes.
    pub bytes_max: u64,
    /// The most parts of an object.
    pub count_max: u64,
}

/// So many parts of an object suffice to keep a connection pool busy: longer objects get longer parts, in fewer
/// requests.
const PARTS_WANTED: u64 = 128;

impl Parts {
    /// The length of the parts of an object of `bytes` bytes: a multiple of the shortest one.
    pub fn of(&self, bytes: u64) -> u64 {
        let wanted = bytes.div_ceil(PARTS_WANTED).next_multiple_of(self.bytes_min);
        wanted.clamp(self.bytes_min, self.bytes_max)
    }

    /// The longest object.
    pub fn object_bytes_max(&self) -> u64 {
        self.bytes_max.saturating_mul(self.count_max)
    }
}

/// How objects are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadNeeds {
    /// Ranges of one object that are at most so far from each other are read in one request.
    pub gap_bytes: u64,
    /// How long such a request becomes at most; 0 where requests cost nothing, and each range is one.
    pub request_bytes: u64,
    /// Reads in flight, if none is announced ahead.
    pub in_flight: usize,
}

/// Of the bytes of a request, one in so many may be unwanted.
const GAPS_SHARE: u64 = 12;

impl ReadNeeds {
    /// Whether ranges of one object that span `whole`, the last one `gap` bytes behind the others, are read in one
    /// request, of which `unwanted` bytes are in no range.
    pub fn joins(&self, whole: Range<u64>, gap: u64, unwanted: u64) -> bool {
        let bytes = whole.end - whole.start;
        gap <= self.gap_bytes && bytes <= self.request_bytes && unwanted.saturating_mul(GAPS_SHARE) <= bytes
    }
}

/// Requests that a store has made since it was opened, by kind; none where storage takes no requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Objects or parts that were sent, uploads that were begun and completed.
    pub puts: u64,
    /// Ranges that were read.
    pub gets: u64,
    /// Of these, requests for a range whose first answer was late.
    pub asked_again: u64,
    /// Questions for an object's length.
    pub heads: u64,
    /// Pages of lists.
    pub lists: u64,
    /// Deletions, of one object or of many.
    pub deletes: u64,
}

impl Needs {
    /// Those of storage that this machine reads and writes itself.
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
