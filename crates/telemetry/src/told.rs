//! Events of single ranks in full: the ranks that are chosen send them, and the record has them in columns.
//!
//! The ends of phases are not among them: the record has those of every rank.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardfast_engine::listen::TOLD_BYTES_MAX;
use shardfast_engine::{Error, Result};
use shardfast_format::Columns;

use crate::record::{Record, What};
use crate::text::list;

/// Bytes of an event in the columns of a record, without its object's name.
const ROW_BYTES: usize = 36;

/// Event of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) rank: u32,
    /// Index of its word.
    pub(crate) word: u8,
    /// Time from the request on that rank to its begin.
    pub(crate) began_us: u32,
    pub(crate) took_us: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Index of the object's name, or of the beginning of a failure.
    pub(crate) object: u32,
    /// Number of the try that failed; 0 for what is no failure of a try.
    pub(crate) attempt: u16,
    pub(crate) outcome: Outcome,
}

/// Outcome of an event, as columns have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Done = 0,
    Failed = 1,
    /// There is no such object, which is often the answer that was hoped for.
    Missing = 2,
}

/// Events of some ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) words: Vec<String>,
    pub(crate) objects: Vec<String>,
    /// Ranks whose events these are, each with the number of its events that are left out.
    pub(crate) left_out: BTreeMap<u32, u64>,
    /// Events of each rank in the order of their begins, rank by rank.
    pub(crate) rows: Vec<Row>,
}

/// Texts by number, each once.
#[derive(Default)]
struct Numbered {
    numbers: HashMap<String, u32>,
    texts: Vec<String>,
}

impl Numbered {
    fn number(&mut self, text: &str) -> u32 {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        let number = self.texts.len() as u32;
        self.numbers.insert(text.to_owned(), number);
        self.texts.push(text.to_owned());
        number
    }
}

impl Told {
    /// Returns the events that a rank's record has kept.
    pub(crate) fn of(rank: u32, record: &Record) -> Told {
        let us = |time: Duration| u32::try_from((time.as_nanos() + 500) / 1000).unwrap_or(u32::MAX);
        let (mut words, mut objects) = (Numbered::default(), Numbered::default());
        let (entries, left_out) = record.entries();
        let is_elsewhere = |what: What| matches!(what, What::Phase(_) | What::Outcome);
        let mut rows: Vec<Row> = entries
            .filter(|entry| entry.has_failed && !matches!(entry.what, What::Outcome) || !is_elsewhere(entry.what))
            .map(|entry| Row {
                rank,
                word: words.number(entry.what.word()) as u8,
                began_us: us(entry.at),
                took_us: us(entry.took),
                offset: entry.offset,
                bytes: entry.bytes,
                object: objects.number(entry.object.as_str()),
                attempt: entry.what.attempt().unwrap_or(0),
                outcome: match (entry.has_failed, entry.is_missing) {
                    (_, true) => Outcome::Missing,
                    (true, false) => Outcome::Failed,
                    (false, false) => Outcome::Done,
                },
            })
            .collect();
        rows.sort_by_key(|row| (row.began_us, row.took_us));
        let left_out = BTreeMap::from([(rank, left_out as u64)]);
        Told { words: words.texts, objects: objects.texts, left_out, rows }
    }

    /// Returns its bytes for rank 0, at most [`TOLD_BYTES_MAX`]: as many events as they have room for.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut room = 2 * TOLD_BYTES_MAX;
        loop {
            let bytes = postcard::to_stdvec(&self.fitted(room)).unwrap_or_default();
            if bytes.len() <= TOLD_BYTES_MAX {
                return bytes;
            }
            room = room / 4 * 3;
        }
    }

    /// Decodes the bytes of [`encode`](Told::encode) of that rank; `None` for others.
    pub(crate) fn decode(rank: u32, bytes: &[u8]) -> Option<Told> {
        let told: Told = postcard::from_bytes(bytes).ok()?;
        (told.left_out.keys().eq([&rank]) && told.is_whole()).then_some(told)
    }

    /// Returns whether each event is of a rank that is named, and its word and object are there.
    fn is_whole(&self) -> bool {
        self.rows.iter().all(|row| {
            (row.word as usize) < self.words.len()
                && (row.object as usize) < self.objects.len()
                && self.left_out.contains_key(&row.rank)
        })
    }

    /// Returns the events of all of these ranks together.
    pub(crate) fn joined(of: impl IntoIterator<Item = Told>) -> Told {
        let (mut words, mut objects, mut all) = (Numbered::default(), Numbered::default(), Told::default());
        for told in of {
            let at: Vec<u32> = told.objects.iter().map(|object| objects.number(object)).collect();
            let word: Vec<u32> = told.words.iter().map(|word| words.number(word)).collect();
            all.rows.extend(told.rows.iter().filter_map(|row| {
                let (word, object) = (*word.get(row.word as usize)?, *at.get(row.object as usize)?);
                Some(Row { word: u8::try_from(word).ok()?, object, ..*row })
            }));
            all.left_out.extend(told.left_out);
        }
        Told { words: words.texts, objects: objects.texts, ..all }
    }

    /// Returns as many events as columns and names of that many bytes hold: the failures first, then the longest. The
    /// others are counted.
    pub(crate) fn fitted(&self, bytes_max: usize) -> Told {
        let mut order: Vec<&Row> = self.rows.iter().collect();
        order.sort_by_key(|row| (row.outcome != Outcome::Failed, Reverse(row.took_us)));
        let (mut is_named, mut bytes, mut kept) = (vec![false; self.objects.len()], 0, 0);
        for row in &order {
            let name = row.object as usize;
            // A comma behind a name, and the quotes around it, which the header escapes.
            bytes += ROW_BYTES + if is_named[name] { 0 } else { list(&self.objects[name]).len() + 3 };
            is_named[name] = true;
            if bytes > bytes_max {
                break;
            }
            kept += 1;
        }
        let mut left_out = self.left_out.clone();
        for row in order.drain(kept..) {
            left_out.entry(row.rank).and_modify(|number| *number = number.saturating_add(1));
        }
        order.sort_by_key(|row| (row.rank, row.began_us, row.took_us));
        let mut objects = Numbered::default();
        let renamed = |row: &&Row| Row { object: objects.number(&self.objects[row.object as usize]), ..**row };
        let rows = order.iter().map(renamed).collect();
        Told { words: self.words.clone(), objects: objects.texts, left_out, rows }
    }

    /// Returns the events of one rank; `None` if this has none of that rank.
    pub(crate) fn rank(&self, rank: u32) -> Option<&[Row]> {
        self.left_out.get(&rank)?;
        let start = self.rows.partition_point(|row| row.rank < rank);
        let end = self.rows.partition_point(|row| row.rank <= rank);
        self.rows.get(start..end)
    }

    /// Adds its columns and notes.
    ///
    /// # Errors
    /// `Internal` if it cannot be said in columns.
    pub(crate) fn put(&self, columns: &mut Columns) -> Result<()> {
        let mut note = |name: &str, text: String| _ = columns.notes.insert(format!("shardfast.{name}"), text);
        note("events", list(&self.words));
        note("event_objects", list(&self.objects));
        note("events_left_out", list(&self.left_out));
        let u64s = |of: fn(&Row) -> u64| self.rows.iter().map(of).collect::<Vec<u64>>();
        let u32s = |of: fn(&Row) -> u32| self.rows.iter().map(of).collect::<Vec<u32>>();
        let u8s = |of: fn(&Row) -> u8| self.rows.iter().map(of).collect::<Vec<u8>>();
        let attempts: Vec<u16> = self.rows.iter().map(|row| row.attempt).collect();
        columns.add("event_rank", 1, &u32s(|row| row.rank))?;
        columns.add("event", 1, &u8s(|row| row.word))?;
        columns.add("event_began_us", 1, &u32s(|row| row.began_us))?;
        columns.add("event_took_us", 1, &u32s(|row| row.took_us))?;
        columns.add("event_offset", 1, &u64s(|row| row.offset))?;
        columns.add("event_bytes", 1, &u64s(|row| row.bytes))?;
        columns.add("event_object", 1, &u32s(|row| row.object))?;
        columns.add("event_attempt", 1, &attempts)?;
        columns.add("event_failed", 1, &u8s(|row| row.outcome as u8))?;
        Ok(())
    }

    /// Reads the columns and notes of [`put`](Told::put) in the record of `world` ranks; `what` names it in messages.
    ///
    /// # Errors
    /// `Corrupt` if they are not there, or contradict each other.
    pub(crate) fn take(what: &str, columns: &Columns, world: usize) -> Result<Told> {
        let note = |name: &str| columns.notes.get(&format!("shardfast.{name}")).map(String::as_str);
        let corrupt = |problem: &str| Error::corrupt(format!("{what}: {problem}"));
        let texts = |name: &str| {
            let texts: Option<Vec<String>> = note(name).and_then(|note| serde_json::from_str(note).ok());
            texts.ok_or_else(|| corrupt(&format!("{name}: expected a list of texts, found none")))
        };
        let left_out: Option<BTreeMap<u32, u64>> =
            note("events_left_out").and_then(|note| serde_json::from_str(note).ok());
        let left_out = left_out.ok_or_else(|| corrupt("events_left_out: expected numbers by rank, found none"))?;
        let count = columns.rows("event_rank").unwrap_or_default();
        let u64s = |name: &str| Ok::<_, Error>(columns.get::<u64>(name, count)?.0);
        let u32s = |name: &str| Ok::<_, Error>(columns.get::<u32>(name, count)?.0);
        let u8s = |name: &str| Ok::<_, Error>(columns.get::<u8>(name, count)?.0);
        let (rank, word, object) = (u32s("event_rank")?, u8s("event")?, u32s("event_object")?);
        let (began, took) = (u32s("event_began_us")?, u32s("event_took_us")?);
        let (offset, bytes, failed) = (u64s("event_offset")?, u64s("event_bytes")?, u8s("event_failed")?);
        let (attempt, attempt_width) = columns.get::<u16>("event_attempt", count)?;
        let lengths = [rank.len(), word.len(), object.len(), began.len(), took.len(), offset.len(), bytes.len()];
        if attempt_width != 1 || failed.len() != count || lengths.iter().any(|&length| length != count) {
            return Err(corrupt("events: expected columns of one number for each event, found others"));
        }
        let row = |at: usize| Row {
            rank: rank[at],
            word: word[at],
            began_us: began[at],
            took_us: took[at],
            offset: offset[at],
            bytes: bytes[at],
            object: object[at],
            attempt: attempt[at],
            outcome: match failed[at] {
                0 => Outcome::Done,
                2 => Outcome::Missing,
                _ => Outcome::Failed,
            },
        };
        let rows: Vec<Row> = (0..count).map(row).collect();
        let told = Told { words: texts("events")?, objects: texts("event_objects")?, left_out, rows };
        let is_sorted = told.rows.is_sorted_by_key(|row| (row.rank, row.began_us));
        if !told.is_whole() || !is_sorted || told.left_out.keys().any(|&rank| rank as usize >= world) {
            return Err(corrupt("events: expected known ranks, words and objects in the order of time, found others"));
        }
        Ok(told)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use shardfast_store::{Action, Event, Requests};
    use shardfast_transfer::events::Phase;

    use super::*;
    use crate::csv;
    use crate::object::Collected;
    use crate::object::tests::{collected, told};
    use crate::report::operation;

    fn record(events: u64) -> Record {
        let record = Record::new(std::time::Instant::now());
        for number in 0..events {
            record.stored(&Event {
                action: if number % 2 == 0 { Action::Write } else { Action::Read },
                object: &format!("model/{number:05}-000-0123456789abcdef0123456789abcdef.safetensors"),
                offset: number << 40,
                bytes: u64::MAX - number,
                began: Instant::now(),
                took: Duration::from_micros(number),
                requests: Requests::default(),
                failure: None,
            });
        }
        record.noted(&shardfast_transfer::events::Event::Ended { phase: Phase::Written, after: Duration::ZERO });
        record
    }

    #[test]
    fn a_rank_tells_its_events_and_as_many_as_fit() {
        let few = Told::of(3, &record(40));
        assert_eq!((few.rows.len(), &few.left_out), (40, &BTreeMap::from([(3, 0)])), "the phase is told elsewhere");
        assert_eq!(Told::decode(3, &few.encode()), Some(few.clone()));
        assert_eq!(Told::decode(4, &few.encode()), None);
        for length in 0..few.encode().len() {
            assert_eq!(Told::decode(3, &few.encode()[..length]), None, "{length}");
        }
        let mut wrong = few.clone();
        wrong.rows[7].object = 40;
        assert_eq!(Told::decode(3, &postcard::to_stdvec(&wrong).unwrap()), None);

        let many = Told::of(3, &record(3000)).encode();
        assert!((TOLD_BYTES_MAX / 2..=TOLD_BYTES_MAX).contains(&many.len()), "{}", many.len());
        let many = Told::decode(3, &many).unwrap();
        assert_eq!(many.rows.len() as u64 + many.left_out[&3], 3001, "the phase was beyond what a record keeps");
        assert!(many.rows.iter().any(|row| row.took_us == 2047), "the longest one is told");
    }

    #[test]
    fn a_retry_is_told_with_its_pause_and_a_missing_object_is_no_failure() {
        let record = record(1);
        let error = Error::new(shardfast_engine::Kind::Unavailable, "write a: 503 SlowDown");
        let (pause, after) = (Duration::from_millis(40), Duration::from_millis(7));
        record.noted(&shardfast_transfer::events::Event::Failed {
            error: &error,
            attempt: 2,
            pause: Some(pause),
            after,
        });
        record.noted(&shardfast_transfer::events::Event::GaveUp { phase: Phase::Durable, after });
        let missing = shardfast_store::Error::new(shardfast_store::Kind::NotFound, "read", "COMMIT", "away");
        record.stored(&Event {
            action: Action::Read,
            object: "COMMIT",
            offset: 0,
            bytes: 0,
            began: record.began,
            took: Duration::ZERO,
            requests: Requests::default(),
            failure: Some(&missing),
        });
        let told = Told::of(0, &record);
        let of = |word: &str| {
            let row = told.rows.iter().find(|row| told.words[row.word as usize] == word).unwrap();
            (told.objects[row.object as usize].as_str(), row.began_us, row.took_us, row.attempt, row.outcome)
        };
        assert_eq!(of("retry"), ("write a: 503 SlowDown", 7_000, 40_000, 2, Outcome::Failed));
        assert_eq!(of("durable"), ("", 7_000, 0, 0, Outcome::Failed));
        assert_eq!((of("read").0, of("read").4), ("COMMIT", Outcome::Missing));
    }

    #[test]
    fn failures_and_the_longest_events_are_kept_of_many() {
        let all = told([0, 5].into_iter(), 100);
        let kept = all.fitted(4000);
        assert!((50..100).contains(&kept.rows.len()), "{}", kept.rows.len());
        let left_out = kept.left_out.values().sum::<u64>();
        assert_eq!(left_out, 2 + 2 + 200 - kept.rows.len() as u64);
        assert!(kept.rows.iter().all(|row| row.outcome == Outcome::Failed), "failures come first");
        let shortest = kept.rows.iter().map(|row| row.took_us).min().unwrap();
        assert!(all.rows.iter().filter(|row| row.outcome == Outcome::Failed && row.took_us > shortest).all(|row| {
            let same = |other: &&Row| (other.rank, other.began_us) == (row.rank, row.began_us);
            kept.rows.iter().any(|other| same(&other))
        }));
        assert!(kept.rows.is_sorted_by_key(|row| (row.rank, row.began_us)) && kept.is_whole());
        assert_eq!(all.fitted(1 << 20), all);
    }

    #[test]
    fn an_object_has_room_for_events() {
        let mut small = collected(8);
        small.told = told(0..8, 20);
        let bytes = small.encode().unwrap();
        assert!(bytes.len() <= 16 << 10, "{}", bytes.len());
        assert_eq!(Collected::decode("here", &bytes).unwrap(), small);
        // Each rank of a large job failed in its own way, names are long, and many events were told.
        let mut large = collected(8960);
        for (rank, said) in large.ranks.iter_mut().enumerate() {
            if let Some(said) = said {
                said.failure = format!("{rank:05} {}", "ä".repeat(70));
                said.slowest = format!("{}{rank:05}", "s".repeat(43));
                said.place.machine = format!("{}{:05}", "m".repeat(35), rank / 8);
            }
        }
        large.told = told(0..9, 2048);
        let bytes = large.encode().unwrap();
        assert!(bytes.len() <= 3_000_000, "{}", bytes.len());
        let found = Collected::decode("here", &bytes).unwrap();
        assert!(!found.told.rows.is_empty() && found.told.left_out.len() == 9, "{:?}", found.told.left_out);
        assert!(found.said().all(|said| !said.failure.is_empty()), "a failed rank stays one");
        // A job that fills an object has no room for events, and says so.
        let full = Collected { told: large.told, ..collected(11_000) };
        let found = Collected::decode("here", &full.encode().unwrap()).unwrap();
        assert_eq!((found.told.rows.len(), found.told.left_out[&8]), (0, 2048 + 2));
    }

    #[test]
    fn no_events_with_a_right_checksum_end_the_process() {
        let good = Columns::decode("here", &collected(3).encode().unwrap()).unwrap();
        let names = ["rank", "began_us", "took_us", "offset", "bytes", "object", "attempt", "failed"];
        let names = names.iter().map(|name| format!("event_{name}")).chain(["event".to_owned()]);
        for name in names {
            for (width, rows) in [(1, 6), (1, 0), (2, 6), (3, 7), (40, 1)] {
                for wrong in [
                    good.clone().add_to(&name, width, &vec![u8::MAX; width * rows]),
                    good.clone().add_to(&name, width, &vec![u16::MAX; width * rows]),
                    good.clone().add_to(&name, width, &vec![u32::MAX; width * rows]),
                    good.clone().add_to(&name, width, &vec![u64::MAX; width * rows]),
                ] {
                    let Ok(found) = Collected::decode("here", &wrong.encode()) else { continue };
                    let said = operation(&found);
                    let mut page = crate::page::Page::default();
                    page.add(&found, &said).unwrap();
                    let mut trace = crate::trace::Trace::new(Vec::new());
                    trace.add(&found, &said).unwrap();
                    csv::rows(&mut String::new(), &found, &said);
                    assert!(trace.end().unwrap() > 0, "{name}");
                }
            }
        }
        for (note, text) in [("events", "[\"write\"]"), ("event_objects", "[]"), ("events_left_out", "{\"9\": 0}")] {
            let mut wrong = good.clone();
            wrong.notes.insert(format!("shardfast.{note}"), text.to_owned());
            let error = Collected::decode("here", &wrong.encode()).unwrap_err();
            assert!(error.message.contains("here: events: expected known ranks"), "{error}");
        }
    }

    /// Columns with one in place of another.
    trait AddTo {
        fn add_to<N: shardfast_format::Number>(self, name: &str, width: usize, numbers: &[N]) -> Columns;
    }

    impl AddTo for Columns {
        fn add_to<N: shardfast_format::Number>(mut self, name: &str, width: usize, numbers: &[N]) -> Columns {
            self.add(name, width, numbers).unwrap();
            self
        }
    }
}
