//! Encodes the digests of all ranks as the object that rank 0 stores below the run.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use shardfast_engine::listen::Verb;
use shardfast_engine::{Error, Result};
use shardfast_format::{Columns, record_name};
use shardfast_transfer::events::Phase;

use crate::WRITER;
use crate::digest::{COORDINATES_MAX, Coordinates, Digest, Place, Sum};
use crate::record::{BOUNDS_US, Class};
use crate::text::list;
use crate::told::Told;

/// Version of the object's columns.
const VERSION: &str = "1";

/// Dimensions of meshes that an object has at most: more than ranks of one job say.
const DIMENSIONS_MAX: usize = 2 * COORDINATES_MAX;

/// Largest object that is read, in bytes: more than one of 100,000 ranks has.
pub(crate) const OBJECT_BYTES_MAX: u64 = 64 << 20;

/// Bytes that events of single ranks take in an object at most. Those of a small model's save on 8 ranks take a
/// twentieth of it, those of thousands of operations all.
const EVENTS_BYTES_MAX: usize = 256 << 10;

/// Bytes of an object up to which events of single ranks are added: one of 8,960 ranks has room for them.
const OBJECT_BYTES_MEANT: usize = 2_999_000;

/// Milliseconds from which on clocks of two ranks differ, and ranks whose clocks an object names at most.
const CLOCKS_MS_MIN: u64 = 1000;
const CLOCKS_MAX: usize = 64;

/// Bytes that distinct texts of ranks take in an object at most.
const TEXTS_BYTES_MAX: usize = 32 << 10;

/// Text in place of those beyond [`TEXTS_BYTES_MAX`].
const TEXT_LEFT_OUT: &str = "(left out: too many different texts)";

/// One save or load, as all ranks saw it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Collected {
    pub(crate) verb: Verb,
    /// Training step of the checkpoint.
    pub(crate) step: u64,
    /// Time of the request on rank 0, by its clock, in milliseconds since 1970.
    pub(crate) began_unix_ms: u64,
    /// Version of the program.
    pub(crate) writer: String,
    /// Ranks that did not say anything in time, as far as they are known; then no other rank but 0 was heard.
    pub(crate) missing: Vec<u32>,
    /// Digest of each rank; `None` for a rank that sent none.
    pub(crate) ranks: Vec<Option<Digest>>,
    /// Longest time that the program waited on a rank before it could change the state; part of its `stalled_us`.
    pub(crate) waited_us: u32,
    /// Milliseconds by which clocks of ranks were ahead of rank 0's, of those that were furthest away from it.
    pub(crate) clocks_ms: BTreeMap<u32, i64>,
    /// Events of single ranks.
    pub(crate) told: Told,
}

impl Collected {
    /// Makes the one of a save or load, without events of single ranks.
    pub(crate) fn new(verb: Verb, step: u64, began_unix_ms: u64, ranks: Vec<Option<Digest>>) -> Collected {
        let waited_us = ranks.iter().flatten().map(|rank| rank.waited_us).max().unwrap_or_default();
        let (clocks_ms, writer) = (clocks_ms(&ranks), WRITER.to_owned());
        let (missing, told) = (Vec::new(), Told::default());
        Collected { verb, step, began_unix_ms, writer, missing, ranks, waited_us, clocks_ms, told }
    }

    /// Returns its name in the directory of records.
    pub(crate) fn name(&self) -> String {
        record_name(self.began_unix_ms, self.verb == Verb::Save, self.step)
    }

    /// Returns the object's bytes.
    ///
    /// # Errors
    /// `Internal` if it cannot be said in columns.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut columns = Columns::default();
        let mut note = |name: &str, text: String| _ = columns.notes.insert(format!("shardfast.{name}"), text);
        note("telemetry", VERSION.to_owned());
        note("verb", word(self.verb).to_owned());
        note("step", self.step.to_string());
        note("began_unix_ms", self.began_unix_ms.to_string());
        note("writer", self.writer.clone());
        note("waited_us", self.waited_us.to_string());
        note("clocks_ms", list(&self.clocks_ms));
        note("missing", list(&self.missing));
        note("phases", list(Phase::ALL.map(Phase::word)));
        note("operations", list(Class::ALL.map(Class::words)));
        note("bounds_us", list(BOUNDS_US));
        let mut machines: Vec<&str> = self.said().map(|rank| &*rank.place.machine).collect();
        machines.sort_unstable();
        machines.dedup();
        note("machines", list(&machines));
        let mesh = self.mesh();
        note("mesh", list(&mesh));
        let nothing = Digest::default();
        let ranks: Vec<&Digest> = self.ranks.iter().map(|said| said.as_ref().unwrap_or(&nothing)).collect();
        let sums = || ranks.iter().flat_map(|rank| &rank.sums);
        let said: Vec<u8> = self.ranks.iter().map(|said| u8::from(said.is_some())).collect();
        let locked: Vec<u8> = ranks.iter().map(|rank| u8::from(rank.is_page_locked)).collect();
        let of_machine = |rank: &&Digest| machines.binary_search(&&*rank.place.machine).unwrap_or_default() as u32;
        let local = |rank: &&Digest| rank.place.local_rank.unwrap_or(u16::MAX);
        let machine: Vec<u32> = ranks.iter().map(of_machine).collect();
        let local_rank: Vec<u16> = ranks.iter().map(local).collect();
        let phases: Vec<u32> = ranks.iter().flat_map(|rank| rank.phases_us).collect();
        let u32s = |of: fn(&Digest) -> u32| ranks.iter().map(|rank| of(rank)).collect::<Vec<u32>>();
        let u64s = |of: fn(&Digest) -> u64| ranks.iter().map(|rank| of(rank)).collect::<Vec<u64>>();
        let files = u32s(|rank| rank.files);
        let failures: Vec<u32> = ranks.iter().flat_map(|rank| [rank.failures, rank.throttled]).collect();
        let (ended, paused) = (u64s(|rank| rank.ended_us), u64s(|rank| rank.paused_us));
        let mut texts = Texts::default();
        let failure: Vec<u32> = ranks.iter().map(|rank| texts.number(&rank.failure)).collect();
        let slowest: Vec<u32> = ranks.iter().map(|rank| texts.number(&rank.slowest)).collect();
        let classes = Class::ALL.len();
        if !mesh.is_empty() {
            let of =
                |rank: &&Digest| mesh.iter().map(|name| rank.place.at(name).unwrap_or(u16::MAX)).collect::<Vec<_>>();
            columns.add("coordinates", mesh.len(), &ranks.iter().flat_map(of).collect::<Vec<u16>>())?;
        }
        columns.add("said", 1, &said)?;
        columns.add("page_locked", 1, &locked)?;
        columns.add("machine", 1, &machine)?;
        columns.add("local_rank", 1, &local_rank)?;
        columns.add("phases_us", Phase::ALL.len(), &phases)?;
        columns.add("files", 1, &files)?;
        columns.add("failed", 2, &failures)?;
        columns.add("ended_us", 1, &ended)?;
        columns.add("paused_us", 1, &paused)?;
        columns.add("stalled_us", 1, &u32s(|rank| rank.stalled_us))?;
        columns.add("awaited_us", 1, &u32s(|rank| rank.awaited_us))?;
        columns.add("worked_ms", 2, &ranks.iter().flat_map(|rank| rank.worked_ms).collect::<Vec<_>>())?;
        columns.add("held_up_us", 2, &ranks.iter().flat_map(|rank| rank.held_up_us).collect::<Vec<_>>())?;
        columns.add("count", classes, &sums().map(|sum| sum.count).collect::<Vec<_>>())?;
        columns.add("bytes", classes, &sums().map(|sum| sum.bytes).collect::<Vec<_>>())?;
        columns.add("busy_us", classes, &sums().map(|sum| sum.busy_us).collect::<Vec<_>>())?;
        columns.add("longest_us", classes, &sums().map(|sum| sum.longest_us).collect::<Vec<_>>())?;
        let by_duration: Vec<u16> = sums().flat_map(|sum| sum.by_duration).collect();
        columns.add("by_duration", classes * (BOUNDS_US.len() + 1), &by_duration)?;
        columns.add("failure", 1, &failure)?;
        columns.add("slowest", 1, &slowest)?;
        columns.notes.insert("shardfast.texts".to_owned(), list(&texts.texts));
        Told::default().put(&mut columns)?;
        let room = OBJECT_BYTES_MEANT.saturating_sub(columns.encode().len()).min(EVENTS_BYTES_MAX);
        self.told.fitted(room).put(&mut columns)?;
        Ok(columns.encode())
    }

    /// Decodes an object; `what` names it in messages.
    ///
    /// # Errors
    /// `Corrupt` if the bytes are damaged or no such object; `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(what: &str, bytes: &[u8]) -> Result<Collected> {
        let columns = Columns::decode(what, bytes)?;
        let corrupt = |problem: String| Error::corrupt(format!("{what}: {problem}"));
        let note = |name: &str| {
            let note = columns.notes.get(&format!("shardfast.{name}"));
            note.map(String::as_str).ok_or_else(|| corrupt(format!("expected a note {name:?}, found none")))
        };
        let version = note("telemetry")?;
        if version != VERSION {
            let newer = format!("{what}: expected version {VERSION}, found {version:?}: a newer Shardfast wrote it");
            return Err(Error::new(shardfast_engine::Kind::Unsupported, newer));
        }
        let number = |name: &str| {
            let text = note(name)?;
            text.parse::<u64>().map_err(|_| corrupt(format!("{name}: expected a number, found {text:?}")))
        };
        let word = note("verb")?;
        let verb = verb(word).ok_or_else(|| corrupt(format!("verb: expected save or load, found {word:?}")))?;
        for (name, expected) in [
            ("phases", list(Phase::ALL.map(Phase::word))),
            ("operations", list(Class::ALL.map(Class::words))),
            ("bounds_us", list(BOUNDS_US)),
        ] {
            let found = note(name)?;
            if found != expected {
                return Err(corrupt(format!("{name}: expected {expected}, found {found}")));
            }
        }
        fn parsed<T: serde::de::DeserializeOwned>(text: &str) -> Option<T> {
            serde_json::from_str(text).ok()
        }
        let machines: Vec<String> = parsed(note("machines")?).ok_or_else(|| corrupt("machines: no list".to_owned()))?;
        let texts: Vec<String> = parsed(note("texts")?).ok_or_else(|| corrupt("texts: no list".to_owned()))?;
        let text = |number: u32| texts.get((number as usize).wrapping_sub(1)).cloned().unwrap_or_default();

        let rows = columns.rows("said").unwrap_or_default();
        let (said, _) = columns.get::<u8>("said", rows)?;
        let (locked, _) = columns.get::<u8>("page_locked", rows)?;
        let (machine, _) = columns.get::<u32>("machine", rows)?;
        let (local_rank, _) = columns.get::<u16>("local_rank", rows)?;
        let (phases, phases_width) = columns.get::<u32>("phases_us", rows)?;
        let mut coordinates = coordinates(&columns, note("mesh")?, rows).map_err(corrupt)?;
        let (files, _) = columns.get::<u32>("files", rows)?;
        let (failed, failed_width) = columns.get::<u32>("failed", rows)?;
        let (ended, _) = columns.get::<u64>("ended_us", rows)?;
        let (paused, _) = columns.get::<u64>("paused_us", rows)?;
        let (stalled, _) = columns.get::<u32>("stalled_us", rows)?;
        let (awaited, _) = columns.get::<u32>("awaited_us", rows)?;
        let (worked, worked_width) = columns.get::<u32>("worked_ms", rows)?;
        let (held_up, held_up_width) = columns.get::<u32>("held_up_us", rows)?;
        let sums = sums(&columns, rows)?
            .ok_or_else(|| corrupt("sums: expected one for each kind, found others".to_owned()))?;
        let (failure, _) = columns.get::<u32>("failure", rows)?;
        let (slowest, _) = columns.get::<u32>("slowest", rows)?;
        let (widths, expected) =
            ([phases_width, held_up_width, failed_width, worked_width], [Phase::ALL.len(), 2, 2, 2]);
        if widths != expected {
            return Err(corrupt(format!("expected rows of {expected:?} numbers, found {widths:?}")));
        }
        let digest = |rank: usize| {
            (said[rank] != 0).then(|| Digest {
                place: Place {
                    machine: machines.get(machine[rank] as usize).cloned().unwrap_or_default(),
                    local_rank: (local_rank[rank] != u16::MAX).then_some(local_rank[rank]),
                    coordinates: std::mem::take(&mut coordinates[rank]),
                },
                phases_us: std::array::from_fn(|i| phases[rank * Phase::ALL.len() + i]),
                sums: sums[rank],
                files: files[rank],
                ended_us: ended[rank],
                failure: text(failure[rank]),
                failures: failed[2 * rank],
                throttled: failed[2 * rank + 1],
                paused_us: paused[rank],
                stalled_us: stalled[rank],
                waited_us: 0,
                began_unix_ms: 0,
                awaited_us: awaited[rank],
                worked_ms: [worked[2 * rank], worked[2 * rank + 1]],
                held_up_us: [held_up[2 * rank], held_up[2 * rank + 1]],
                slowest: text(slowest[rank]),
                is_page_locked: locked[rank] != 0,
                address: String::new(),
            })
        };
        Ok(Collected {
            verb,
            step: number("step")?,
            began_unix_ms: number("began_unix_ms")?,
            writer: note("writer")?.to_owned(),
            waited_us: number_of(&columns, what, "waited_us", "0")?,
            clocks_ms: number_of(&columns, what, "clocks_ms", "{}")?,
            missing: parsed(note("missing")?).ok_or_else(|| corrupt("missing: no list".to_owned()))?,
            told: Told::take(what, &columns, rows)?,
            ranks: (0..rows).map(digest).collect(),
        })
    }

    /// Returns the names of the dimensions in which ranks have coordinates, in the order in which they say them.
    pub(crate) fn mesh(&self) -> Vec<Arc<str>> {
        let mut mesh: Vec<Arc<str>> = Vec::new();
        for (name, _) in self.said().flat_map(|rank| &rank.place.coordinates) {
            if mesh.len() < DIMENSIONS_MAX && !mesh.contains(name) {
                mesh.push(Arc::clone(name));
            }
        }
        mesh
    }

    /// Returns what those ranks said that said something.
    pub(crate) fn said(&self) -> impl Iterator<Item = &Digest> {
        self.ranks.iter().flatten()
    }
}

/// Returns the numbers of a note that records of the first versions do not have: those of `otherwise` in its place.
fn number_of<T: serde::de::DeserializeOwned>(columns: &Columns, what: &str, name: &str, otherwise: &str) -> Result<T> {
    let text = columns.notes.get(&format!("shardfast.{name}")).map_or(otherwise, String::as_str);
    serde_json::from_str(text).map_err(|_| Error::corrupt(format!("{what}: {name}: expected numbers, found {text:?}")))
}

/// Returns by how much clocks of ranks are ahead of rank 0's: all learn at the same time that they agree.
fn clocks_ms(ranks: &[Option<Digest>]) -> BTreeMap<u32, i64> {
    let agreed_ms = |said: &Option<Digest>| {
        let (began_ms, us) = said.as_ref().map(|said| (said.began_unix_ms, said.phases_us[Phase::Agreed as usize]))?;
        (began_ms > 0 && us > 0).then(|| began_ms.saturating_add(u64::from(us) / 1000))
    };
    let Some(first) = ranks.first().and_then(agreed_ms) else { return BTreeMap::new() };
    let ahead = |(rank, said)| Some((rank, i64::try_from(agreed_ms(said)?).ok()? - i64::try_from(first).ok()?));
    let mut differing: Vec<(u32, i64)> = (0..).zip(ranks).filter_map(ahead).collect();
    differing.retain(|(_, ms)| ms.unsigned_abs() >= CLOCKS_MS_MIN);
    differing.sort_by_key(|(_, ms)| Reverse(ms.unsigned_abs()));
    differing.truncate(CLOCKS_MAX);
    differing.into_iter().collect()
}

/// Returns the sums of all ranks; `None` if columns have others than one for each kind of operation.
fn sums(columns: &Columns, rows: usize) -> Result<Option<Vec<[Sum; Class::ALL.len()]>>> {
    let (count, count_width) = columns.get::<u32>("count", rows)?;
    let (moved, bytes_width) = columns.get::<u64>("bytes", rows)?;
    let (busy, busy_width) = columns.get::<u64>("busy_us", rows)?;
    let (longest, longest_width) = columns.get::<u32>("longest_us", rows)?;
    let (by_duration, durations_width) = columns.get::<u16>("by_duration", rows)?;
    let (classes, durations) = (Class::ALL.len(), BOUNDS_US.len() + 1);
    if [count_width, bytes_width, busy_width, longest_width] != [classes; 4] || durations_width != classes * durations {
        return Ok(None);
    }
    let sum = |rank: usize, class: usize| {
        let at = rank * classes + class;
        Sum {
            count: count[at],
            bytes: moved[at],
            busy_us: busy[at],
            longest_us: longest[at],
            by_duration: std::array::from_fn(|i| by_duration[at * durations + i]),
        }
    };
    Ok(Some((0..rows).map(|rank| std::array::from_fn(|class| sum(rank, class))).collect()))
}

/// Returns the coordinates of all ranks, given the note that names the dimensions, or what is wrong with them.
fn coordinates(columns: &Columns, mesh: &str, rows: usize) -> std::result::Result<Vec<Coordinates>, String> {
    let mesh: Vec<Arc<str>> = serde_json::from_str(mesh).map_err(|_| "mesh: no list".to_owned())?;
    if mesh.is_empty() {
        return Ok(vec![Vec::new(); rows]);
    }
    let (coordinates, width) = columns.get::<u16>("coordinates", rows).map_err(|error| error.to_string())?;
    if width != mesh.len() {
        return Err(format!("mesh: expected {width} names, one for each coordinate, found {}", mesh.len()));
    }
    let of = |row: &[u16]| {
        let named = mesh.iter().zip(row).filter(|(_, at)| **at != u16::MAX);
        named.map(|(name, at)| (Arc::clone(name), *at)).collect()
    };
    Ok(coordinates.chunks(width).map(of).collect())
}

/// Texts of ranks, each once, up to [`TEXTS_BYTES_MAX`].
#[derive(Default)]
struct Texts {
    texts: Vec<String>,
    numbers: std::collections::HashMap<String, u32>,
    bytes: usize,
}

impl Texts {
    /// Returns the number of a text, from 1 on; 0 for an empty one.
    fn number(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        let bytes = list(text).len() + 1;
        if self.bytes + bytes > TEXTS_BYTES_MAX && text != TEXT_LEFT_OUT {
            return self.number(TEXT_LEFT_OUT);
        }
        self.bytes += bytes;
        self.texts.push(text.to_owned());
        self.numbers.insert(text.to_owned(), self.texts.len() as u32);
        self.texts.len() as u32
    }
}

/// Returns the verb of that word.
fn verb(word: &str) -> Option<Verb> {
    match word {
        "save" => Some(Verb::Save),
        "load" => Some(Verb::Load),
        _ => None,
    }
}

/// Returns the word of a verb, in names and notes.
pub(crate) fn word(verb: Verb) -> &'static str {
    match verb {
        Verb::Save => "save",
        Verb::Load => "load",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::told::{Outcome, Row};

    /// Events of these ranks, so many of each.
    pub(crate) fn told(ranks: impl Iterator<Item = u32>, events: u32) -> Told {
        Told::joined(ranks.map(|rank| {
            let row = |number: u32| Row {
                rank,
                word: (number % 2) as u8,
                began_us: number * 100,
                took_us: 50 + number % 7 * rank,
                offset: u64::from(number) << 20,
                bytes: 1 << 20,
                object: number,
                attempt: (number % 2) as u16,
                outcome: if number % 2 == 1 { Outcome::Failed } else { Outcome::Done },
            };
            Told {
                words: vec!["write".to_owned(), "retry".to_owned()],
                objects: (0..events).map(|number| format!("del/{rank:05}-{number:03}.safetensors")).collect(),
                left_out: [(rank, 2)].into(),
                rows: (0..events).map(row).collect(),
            }
        }))
    }

    pub(crate) fn collected(world: usize) -> Collected {
        let digest = |rank: usize| Digest {
            place: Place {
                machine: format!("node-{}", rank / 2),
                local_rank: Some(rank as u16 % 2),
                coordinates: vec![("dp".into(), rank as u16 / 2), ("tp".into(), rank as u16 % 2)],
            },
            phases_us: std::array::from_fn(|i| (i * 1000 + rank) as u32),
            sums: std::array::from_fn(|i| Sum {
                count: (rank + i) as u32,
                bytes: 1 << 40,
                busy_us: 7,
                longest_us: 3,
                by_duration: [i as u16; 8],
            }),
            files: 2,
            ended_us: 12_345,
            failure: if rank == 1 { "write \"a\": away".to_owned() } else { String::new() },
            failures: 1,
            throttled: rank as u32 % 2,
            paused_us: 20,
            stalled_us: 1_100,
            waited_us: 0,
            began_unix_ms: 0,
            awaited_us: 70 + rank as u32,
            worked_ms: [60 + rank as u32, 50],
            held_up_us: [rank as u32, 90],
            slowest: "model/a.safetensors".to_owned(),
            is_page_locked: rank != 0,
            address: String::new(),
        };
        let ranks = (0..world).map(|rank| (rank != 2).then(|| digest(rank))).collect();
        let writer = "shardfast 0.1.0".to_owned();
        let told = told([0, 1].into_iter().filter(|&rank| rank < world as u32), 3);
        let began_unix_ms = 1_700_000_000_123;
        Collected {
            verb: Verb::Save,
            step: 4000,
            began_unix_ms,
            writer,
            missing: vec![2],
            ranks,
            waited_us: 100,
            clocks_ms: BTreeMap::from([(1, -5000)]),
            told,
        }
    }

    #[test]
    fn an_object_comes_back_as_it_was() {
        let object = collected(4);
        let bytes = object.encode().unwrap();
        assert_eq!(Collected::decode("here", &bytes).unwrap(), object);
        assert_eq!(object.name(), "1700000000123-save-00004000.safetensors");
        assert!(collected(8).encode().unwrap().len() < 16 << 10);
        assert!(collected(8960).encode().unwrap().len() < 3 << 20, "{}", collected(8960).encode().unwrap().len());
    }

    #[test]
    fn clocks_that_differ_are_told_by_when_ranks_agreed() {
        let rank = |began_unix_ms: u64, us: u32| {
            let mut said = Digest { began_unix_ms, waited_us: us / 1000, ..Digest::default() };
            said.phases_us[Phase::Agreed as usize] = us;
            Some(said)
        };
        let of = |ranks: Vec<Option<Digest>>| Collected::new(Verb::Save, 1, 10_000, ranks);
        // Rank 1 came 400 ms later and agreed at the same time; the clock of rank 3 is behind, rank 4's nearly right.
        let late = rank(10_400, 500_000);
        let found = of(vec![rank(10_000, 900_000), late, None, rank(5_000, 900_000), rank(11_500, 100_000)]);
        assert_eq!((found.clocks_ms.clone(), found.waited_us), (BTreeMap::from([(3, -5000)]), 900));
        let said = crate::report::operation(&found).clocks().unwrap();
        assert_eq!(said, "clocks differ: that of rank 3 is 5.0 s behind rank 0's");
        let many = (0..300).map(|at| rank(10_000 + at * 1000, 900_000)).collect();
        let found = of(many);
        assert_eq!(found.clocks_ms.keys().copied().collect::<Vec<_>>(), (236..300).collect::<Vec<u32>>());
        let said = crate::report::operation(&found).clocks().unwrap();
        assert_eq!(said, "clocks differ: that of rank 299 is 299.0 s ahead of rank 0's");
        // Some have not agreed, or say that they began before 1970, or at no time that is one.
        for other in [rank(5_000, 0), rank(0, 900_000), rank(u64::MAX, u32::MAX)] {
            assert!(of(vec![rank(10_000, 900_000), other.clone()]).clocks_ms.is_empty());
            assert!(of(vec![other, rank(10_000, 900_000)]).clocks_ms.is_empty());
        }
    }

    #[test]
    fn ranks_of_other_meshes_have_the_dimensions_of_all() {
        let mut object = collected(5);
        let mut own = |rank: usize, said: &[(&str, u16)]| {
            let said = said.iter().map(|&(name, at)| (name.into(), at)).collect();
            object.ranks[rank].as_mut().unwrap().place.coordinates = said;
        };
        own(0, &[("pp", 7)]);
        own(1, &[]);
        own(3, &[("pp", 0), ("x", 65_534)]);
        assert_eq!(object.mesh().iter().map(|name| &**name).collect::<Vec<_>>(), ["pp", "x", "dp", "tp"]);
        assert_eq!(Collected::decode("here", &object.encode().unwrap()).unwrap(), object);
        for rank in object.ranks.iter_mut().flatten() {
            rank.place.coordinates.clear();
        }
        assert_eq!(Collected::decode("here", &object.encode().unwrap()).unwrap(), object);
    }

    #[test]
    fn other_objects_are_refused_by_name() {
        let error = Collected::decode("here", b"{}").unwrap_err();
        assert!(error.message.contains("here: "), "{error}");
        let mut columns = Columns::decode("here", &collected(3).encode().unwrap()).unwrap();
        columns.notes.insert("shardfast.telemetry".to_owned(), "2".to_owned());
        let newer = Collected::decode("here", &columns.encode()).unwrap_err();
        assert!(newer.message.contains("a newer Shardfast wrote it"), "{newer}");
        columns.notes.insert("shardfast.telemetry".to_owned(), "1".to_owned());
        for (name, note) in [
            ("verb", "drop"),
            ("step", "-1"),
            ("phases", "[]"),
            ("machines", "7"),
            ("mesh", "7"),
            ("waited_us", "-1"),
            ("clocks_ms", "[]"),
            ("mesh", "[\"dp\"]"),
            ("texts", "{}"),
        ] {
            let mut wrong = columns.clone();
            wrong.notes.insert(format!("shardfast.{name}"), note.to_owned());
            let error = Collected::decode("here", &wrong.encode()).unwrap_err();
            assert!(error.message.contains(name), "{name}: {error}");
        }
        for name in ["waited_us", "clocks_ms"] {
            columns.notes.remove(&format!("shardfast.{name}"));
        }
        let first = Collected::decode("here", &columns.encode()).unwrap();
        assert_eq!((first.waited_us, first.clocks_ms.len()), (0, 0), "of the first version");
        for name in ["said", "phases_us", "coordinates", "by_duration"] {
            let mut wrong = columns.clone();
            wrong.add(name, 1, &[1_u32]).unwrap();
            assert!(Collected::decode("here", &wrong.encode()).is_err(), "{name}");
        }
    }
}
