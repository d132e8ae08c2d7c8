//! Says in a few hundred bytes what one rank did in an operation that has ended.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};
use shardfast_engine::listen::SAID_BYTES_MAX;
use shardfast_transfer::events::Phase;
use shardfast_transfer::report::Report;

use crate::record::{BOUNDS_US, Class, FAILURE_BYTES, Record, What};
use crate::text::{Text, shortened};

/// Bytes of a machine's name that are kept.
const MACHINE_BYTES: usize = 40;

/// Bytes of an address that are kept.
const ADDRESS_BYTES: usize = 64;

/// Bytes of a failure's text, those of the address, and whether coordinates are said, in each try to fit into a
/// message. A failure keeps some bytes in all of them, since an empty one says that nothing failed.
const TRIES: [(usize, usize, bool); 7] = [
    (FAILURE_BYTES, ADDRESS_BYTES, true),
    (FAILURE_BYTES * 3 / 4, ADDRESS_BYTES, true),
    (FAILURE_BYTES / 2, ADDRESS_BYTES, true),
    (FAILURE_BYTES / 4, ADDRESS_BYTES, true),
    (FAILURE_BYTES / 4, 0, true),
    (FAILURE_BYTES / 4, 0, false),
    (8, 0, false),
];

/// Coordinates that a rank says at most.
pub(crate) const COORDINATES_MAX: usize = 8;

/// Bytes of a dimension's name that are kept.
const DIMENSION_BYTES: usize = 16;

/// Version of the encoding between ranks.
const VERSION: u8 = 1;

/// Names of dimensions of meshes, each with the number of a rank there.
pub(crate) type Coordinates = Vec<(Arc<str>, u16)>;

/// Place of a rank in its job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Name of the machine.
    pub machine: String,
    /// Number of the rank among those of its machine, if it is known.
    pub local_rank: Option<u16>,
    /// Coordinates in the meshes of the job: names of dimensions, each with the rank's number there.
    pub coordinates: Coordinates,
}

impl Place {
    /// Returns the rank's coordinate in a dimension; `None` if it has none.
    pub(crate) fn at(&self, dimension: &str) -> Option<u16> {
        self.coordinates.iter().find(|(name, _)| **name == *dimension).map(|(_, at)| *at)
    }
}

/// Returns coordinates as digests say them: at most [`COORDINATES_MAX`], with names of at most [`DIMENSION_BYTES`].
/// Leaves out a second one of a name, one without a name, and one whose number is too large.
pub(crate) fn bounded<'a>(coordinates: impl IntoIterator<Item = (&'a str, u64)>) -> Coordinates {
    let mut kept = Coordinates::new();
    for (name, at) in coordinates {
        let name = Text::<DIMENSION_BYTES>::head(name);
        let is_new = !name.as_str().is_empty() && kept.iter().all(|(other, _)| **other != *name.as_str());
        if let Some(at) = u16::try_from(at).ok().filter(|&at| is_new && at < u16::MAX && kept.len() < COORDINATES_MAX) {
            kept.push((name.as_str().into(), at));
        }
    }
    kept
}

/// Sums over the operations of one [`Class`] at the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) count: u32,
    pub(crate) bytes: u64,
    /// Time of all together, which may have run beside each other.
    pub(crate) busy_us: u64,
    pub(crate) longest_us: u32,
    /// Number of operations by their durations, as [`BOUNDS_US`] divides them.
    pub(crate) by_duration: [u16; BOUNDS_US.len() + 1],
}

/// Digest of an operation on one rank, which the rank sends to rank 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    pub(crate) place: Place,
    /// Microseconds from the request until each phase was over, in the order of [`Phase::ALL`]; 0 for one that was not.
    pub(crate) phases_us: [u32; Phase::ALL.len()],
    pub(crate) sums: [Sum; Class::ALL.len()],
    pub(crate) files: u32,
    /// Time until the outcome was known.
    pub(crate) ended_us: u64,
    /// Time of the request, by this rank's clock, in milliseconds since 1970. Objects have only clocks that differ.
    pub(crate) began_unix_ms: u64,
    /// Reason why the operation failed; empty if it did not.
    pub(crate) failure: String,
    pub(crate) failures: u32,
    /// Failures among them in which the service asked for fewer requests.
    pub(crate) throttled: u32,
    /// Pauses before what failed was tried again.
    pub(crate) paused_us: u64,
    /// Time that the program waited for the save: in its call, and before it could change the state.
    pub(crate) stalled_us: u32,
    /// Part of it before the program could change the state. Objects have the largest of all ranks.
    pub(crate) waited_us: u32,
    /// Time that the copy waited for staging memory.
    pub(crate) awaited_us: u32,
    /// Milliseconds that threads were busy verifying and copying what a load got, all of them together, and those that
    /// the rank waited for messages of ranks that read for it.
    pub(crate) worked_ms: [u32; 2],
    /// Begin and duration of the longest time in which the process did not run.
    pub(crate) held_up_us: [u32; 2],
    /// Object of the longest operation at the store.
    pub(crate) slowest: String,
    pub(crate) is_page_locked: bool,
    /// Address at which the rank tells what it does, `host:port`; empty if it does not.
    pub(crate) address: String,
}

impl Digest {
    pub(crate) fn new(place: &Place, record: &Record, report: &Report) -> Digest {
        let mut phases_us = [0; Phase::ALL.len()];
        for (us, phase) in phases_us.iter_mut().zip(Phase::ALL) {
            if let Some(ms) = report.phases_ms.get(phase.word()) {
                *us = ((ms * 1e3) as u32).max(1);
            }
        }
        let (entries, _) = record.entries();
        let (mut ended_us, mut slowest) = (0, None);
        for entry in entries {
            match entry.what {
                What::Outcome => ended_us = entry.at.as_micros() as u64,
                What::Operation(_) if slowest.is_none_or(|(longest, _)| entry.took > longest) => {
                    slowest = Some((entry.took, entry.object));
                }
                _ => {}
            }
        }
        let (failures, paused) = record.failures();
        let ended_us = if ended_us == 0 { record.began.elapsed().as_micros() as u64 } else { ended_us };
        // The call of a save that fails at once returns after the outcome.
        let bounded = |time: std::time::Duration| time.as_micros().min(u128::from(ended_us));
        let (stalled_us, waited_us) = (bounded(record.stalled()), bounded(record.waited()));
        Digest {
            place: place.clone(),
            phases_us,
            sums: Class::ALL.map(|class| sum(record, class)),
            files: u32::try_from(report.files_written).unwrap_or(u32::MAX),
            ended_us,
            failure: record.failure().unwrap_or_default().to_owned(),
            failures,
            throttled: record.throttled(),
            paused_us: u64::try_from(paused.as_micros()).unwrap_or(u64::MAX),
            stalled_us: u32::try_from(stalled_us).unwrap_or(u32::MAX),
            waited_us: u32::try_from(waited_us).unwrap_or(u32::MAX),
            awaited_us: u32::try_from(record.awaited().as_micros()).unwrap_or(u32::MAX),
            worked_ms: [record.placed(), record.exchanged()]
                .map(|time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX)),
            held_up_us: record.held_up().into(),
            slowest: slowest.map(|(_, object)| object.as_str().to_owned()).unwrap_or_default(),
            is_page_locked: report.page_lock_failure.is_none(),
            began_unix_ms: 0,
            address: String::new(),
        }
    }

    /// Returns its bytes, at most [`SAID_BYTES_MAX`]: texts are cut, and coordinates left out, as far as it takes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let coordinates = &self.place.coordinates;
        let cut = |failure: usize, address: usize, has_coordinates: bool| Digest {
            place: Place {
                machine: Text::<MACHINE_BYTES>::head(&self.place.machine).as_str().to_owned(),
                local_rank: self.place.local_rank,
                coordinates: if has_coordinates { coordinates.clone() } else { Vec::new() },
            },
            address: self.address.get(..address.min(self.address.len())).unwrap_or_default().to_owned(),
            failure: shortened(&self.failure, failure),
            // No clock says so, and it would take more room.
            began_unix_ms: if self.began_unix_ms < 1 << 42 { self.began_unix_ms } else { 0 },
            ..self.clone()
        };
        for (failure, address, has_coordinates) in TRIES {
            let mut bytes = vec![VERSION];
            bytes.extend(postcard::to_stdvec(&cut(failure, address, has_coordinates)).unwrap_or_default());
            if bytes.len() <= SAID_BYTES_MAX {
                return bytes;
            }
        }
        Vec::new()
    }

    /// Decodes the bytes of [`encode`](Digest::encode); `None` for others.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Digest> {
        let (&version, bytes) = bytes.split_first()?;
        (version == VERSION).then(|| postcard::from_bytes(bytes).ok())?
    }
}

fn sum(record: &Record, class: Class) -> Sum {
    let of = record.sums(class);
    let us = |ns: u64| ns / 1000;
    Sum {
        count: of.count(),
        bytes: of.bytes.load(Relaxed),
        busy_us: us(of.busy_ns.load(Relaxed)),
        longest_us: u32::try_from(us(of.longest_ns.load(Relaxed))).unwrap_or(u32::MAX),
        by_duration: std::array::from_fn(|i| u16::try_from(of.by_duration[i].load(Relaxed)).unwrap_or(u16::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use shardfast_transfer::events::Event;

    use super::*;

    #[test]
    fn coordinates_are_said_once_and_in_bounds() {
        let given = [("", 1), ("a", 1), ("a", 2), ("b", 65_535), ("c", 65_534), ("ä".repeat(9).leak(), 3)];
        let expected = [("a", 1), ("c", 65_534), ("ääääääää", 3)].map(|(name, at)| (name.into(), at));
        assert_eq!(bounded(given), expected);
    }

    #[test]
    fn a_program_waits_no_longer_than_the_operation_takes() {
        let record = Record::new(std::time::Instant::now());
        let (took, after) = (std::time::Duration::from_millis(9), std::time::Duration::from_millis(5));
        record.noted(&Event::Stalled { took });
        record.noted(&Event::Waited { took: after / 5 });
        record.noted(&Event::Outcome { failure: None, number: None, after });
        let digest = Digest::new(&Place::default(), &record, &Report::default());
        assert_eq!((digest.stalled_us, digest.waited_us, digest.ended_us), (5000, 1000, 5000));
    }

    #[test]
    fn the_largest_digest_fits_into_a_message() {
        let names: Vec<String> = (0..9).map(|i| format!("{i}{}", "d".repeat(40))).collect();
        let most = Sum {
            count: u32::MAX,
            bytes: u64::MAX,
            busy_us: u64::MAX,
            longest_us: u32::MAX,
            by_duration: [u16::MAX; 8],
        };
        let coordinates = bounded((0..9).map(|i| (&*names[i], 65_534)));
        assert!(coordinates.len() == 8 && coordinates.iter().all(|(name, _)| name.len() == 16));
        let digest = Digest {
            place: Place { machine: "m".repeat(300), local_rank: Some(u16::MAX), coordinates },
            phases_us: [u32::MAX; Phase::ALL.len()],
            sums: [most; 5],
            files: u32::MAX,
            ended_us: u64::MAX,
            began_unix_ms: u64::MAX,
            failure: "ä".repeat(4000),
            failures: u32::MAX,
            throttled: u32::MAX,
            paused_us: u64::MAX,
            stalled_us: u32::MAX,
            waited_us: u32::MAX,
            awaited_us: u32::MAX,
            worked_ms: [u32::MAX; 2],
            held_up_us: [u32::MAX; 2],
            slowest: "s".repeat(48),
            is_page_locked: true,
            address: "a".repeat(80),
        };
        let bytes = digest.encode();
        assert!(!bytes.is_empty() && bytes.len() <= SAID_BYTES_MAX, "{}", bytes.len());
        let found = Digest::decode(&bytes).unwrap();
        assert_eq!((found.sums, found.files, &found.slowest), (digest.sums, u32::MAX, &digest.slowest));
        assert_eq!(found.failure, "ää…", "a rank that failed says so");
        assert_eq!(found.place.coordinates, [], "these go before the failure");
        // A real save leaves room for both.
        let coordinates = bounded(["dp_shard", "tp", "cp", "ep", "pp"].map(|name| (name, 1000)));
        let busy = Sum { count: 9999, bytes: 1 << 40, busy_us: 1 << 30, longest_us: 1 << 24, by_duration: [900; 8] };
        let place = Place { coordinates: coordinates.clone(), ..digest.place.clone() };
        let phases_us = [1 << 24; Phase::ALL.len()];
        let real = Digest { place, sums: [busy; 5], phases_us, paused_us: 1 << 24, ..digest };
        let found = Digest::decode(&real.encode()).unwrap();
        assert_eq!((found.place.coordinates, found.failure.chars().count()), (coordinates, 37));
        let usual = Digest { failure: "away".to_owned(), ..Digest::default() };
        assert_eq!(Digest::decode(&usual.encode()), Some(usual.clone()));
        assert!(usual.encode().len() < 120);
        for length in 0..bytes.len() {
            assert_eq!(Digest::decode(&bytes[..length]), None, "{length}");
        }
        assert_eq!(Digest::decode(&[VERSION + 1, 0, 0]), None);
    }
}
