//! Draws what the saves and loads of a run did, as one page that needs no network and no other file.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;

use serde::Serialize;
use shardfast_engine::listen::Verb;
use shardfast_engine::{Error, Result};

use crate::digest::Digest;
use crate::object::{Collected, word};
use crate::report::{Operation, RunReport};
use crate::storage::StorageNow;
use crate::told::{Row, Told};
use crate::verdicts::{PhaseOf, Verdict, phases_of};

/// The page around the data.
const TEMPLATE: &str = include_str!("page.html");

/// Mark in the template in whose place the data go.
const DATA: &str = "/*DATA*/";

/// Bytes that the times of single ranks take in a page, of the saves and loads that lost most and of the newest.
const TIMES_BYTES_MAX: usize = 2_300_000;

/// Bytes that events of single ranks take in a page.
const EVENTS_BYTES_MAX: usize = 900_000;

/// Bytes that the facts of whole saves and loads take in a page, and how many of these are listed.
const LISTED_BYTES_MAX: usize = 800_000;
const LISTED_MAX: usize = 300;

/// Saves and loads of which a page has a few numbers, for its charts: the newest.
const CHARTED_MAX: usize = 7_500;

/// Verdicts of one save or load that a page has.
const VERDICTS_MAX: usize = 6;

/// A phase: its name, the phases at whose end it begins, and the place of its own end in a rank's row.
#[derive(Serialize)]
struct Phase {
    name: &'static str,
    from: Vec<usize>,
    to: usize,
}

/// Facts of an operation as a whole, as the page shows them.
#[derive(Serialize)]
struct Summary<'a> {
    verb: &'static str,
    step: u64,
    outcome: &'static str,
    began_unix_ms: Option<u64>,
    world: Option<usize>,
    not_reporting: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    clocks: Option<String>,
    staged_ms: Option<f64>,
    stalled_ms: Option<f64>,
    ended_ms: Option<f64>,
    bytes: u64,
    files: u64,
    failures: u64,
    operations: &'a std::collections::BTreeMap<&'static str, crate::report::Operations>,
    #[serde(skip_serializing_if = "Option::is_none")]
    storage: Option<&'a StorageNow>,
    verdicts: &'a [Verdict],
    verdicts_left_out: usize,
    /// Place among all saves and loads.
    at: usize,
}

/// Times of all ranks in an operation.
#[derive(Serialize)]
struct Times {
    machines: Vec<String>,
    /// Runs of ranks on one machine: its index, -1 for ranks that said nothing, and how many they are.
    machine: Vec<(i64, usize)>,
    /// Dimensions of the job's meshes, and the coordinates of each rank in them: 16 bits each, little-endian, in base
    /// 64; 65,535 for none.
    mesh: Vec<std::sync::Arc<str>>,
    coordinates: String,
    /// Phases that ranks have ended.
    phases: Vec<usize>,
    /// Ends of these phases of each rank, in microseconds, 0 for one that it has not ended: 32 bits each,
    /// little-endian, in base 64.
    ends: String,
}

/// Events of single ranks in an operation.
#[derive(Serialize)]
struct Events<'a> {
    words: &'a [String],
    objects: &'a [String],
    ranks: std::collections::BTreeMap<u32, EventsOfRank>,
}

#[derive(Serialize)]
struct EventsOfRank {
    left_out: u64,
    rows: Vec<EventOfRank>,
}

/// Event: its word, begin and duration in microseconds, offset, bytes, object, attempt, and outcome.
type EventOfRank = (u8, u32, u32, u64, u64, u32, u16, u8);

/// Details of one operation, as JSON.
struct Detail {
    verb: Verb,
    key: Key,
    lost_ms: f64,
    times: String,
    events: Option<String>,
}

impl Detail {
    fn bytes(&self) -> (usize, usize) {
        (self.times.len(), self.events.as_ref().map_or(0, String::len))
    }
}

/// Step and time of an operation, by which it is found in the report.
type Key = (u64, Option<u64>);

/// A page in the making: it gets the records of a run one after the other, and keeps of them what it has room for: the
/// newest in half of the room, in the other one those that lost most.
#[derive(Default)]
pub(crate) struct Page {
    details: Vec<Detail>,
}

impl Page {
    /// Adds a record and what the report says of it. Records come in the order of time.
    pub(crate) fn add(&mut self, collected: &Collected, operation: &Operation) -> Result<()> {
        let key = (operation.step, operation.began_unix_ms);
        let (times, events) = (json(&times(collected))?, Some(json(&events(&collected.told))?));
        let (verb, lost_ms) = (collected.verb, lost_ms(operation));
        self.details.push(Detail { verb, key, lost_ms, times, events });
        self.details.sort_by_key(|detail| Reverse(detail.key.1));
        let (mut times, mut events, mut recent) = (0, 0, 0);
        for detail in &self.details {
            let bytes = detail.bytes();
            (times, events) = (times + bytes.0, events + bytes.1);
            if times > TIMES_BYTES_MAX / 2 || events > EVENTS_BYTES_MAX / 2 {
                break;
            }
            recent += 1;
        }
        self.details[recent..].sort_by(|a, b| b.lost_ms.total_cmp(&a.lost_ms));
        (times, events) = (0, 0);
        self.details.retain_mut(|detail| {
            let bytes = detail.bytes();
            let is_kept = times + bytes.0 <= TIMES_BYTES_MAX;
            if is_kept && events + bytes.1 > EVENTS_BYTES_MAX {
                detail.events = None;
            }
            (times, events) = if is_kept { (times + bytes.0, events + detail.bytes().1) } else { (times, events) };
            is_kept
        });
        Ok(())
    }

    /// Returns the page of a report whose records were added.
    pub(crate) fn html(self, report: &RunReport) -> Result<String> {
        let all: Vec<(&Operation, Verb)> = (report.saves.iter().map(|save| (save, Verb::Save)))
            .chain(report.loads.iter().map(|load| (load, Verb::Load)))
            .collect();
        let places: HashMap<(bool, Key), usize> = (all.iter().enumerate())
            .map(|(at, (of, verb))| ((*verb == Verb::Save, (of.step, of.began_unix_ms)), at))
            .collect();
        let details: Vec<(usize, &Detail)> = (self.details.iter())
            .filter_map(|detail| Some((*places.get(&(detail.verb == Verb::Save, detail.key))?, detail)))
            .collect();
        let by_place: HashMap<usize, &Detail> = details.iter().copied().collect();
        let phase = |phase: &PhaseOf| Phase {
            name: phase.0,
            from: phase.1.iter().map(|&of| of as usize).collect(),
            to: phase.2 as usize,
        };
        let phases =
            [Verb::Save, Verb::Load].map(|verb| (word(verb), phases_of(verb).iter().map(phase).collect::<Vec<_>>()));
        let mut data = format!("{{\"url\":{},\"phases\":{}", json(&report.url)?, json(&phases)?);
        let _ = write!(data, ",\"unreadable\":{}", json(&report.unreadable)?);
        let (saves, median) = (report.saves.len(), report.median_ms());
        let counts = (saves, report.loads.len(), median);
        let _ = write!(data, ",\"counts\":{},\"all\":{}", json(&counts)?, json(&charted(&all))?);
        data += ",\"operations\":[";
        let mut is_first = true;
        let detailed: Vec<usize> = details.iter().map(|(at, _)| *at).collect();
        for at in listed(&all, &detailed)? {
            let mut row = json(&summary(at, all[at].0, all[at].1))?;
            if let Some(detail) = by_place.get(&at) {
                row.pop();
                let events = detail.events.as_deref().unwrap_or("null");
                let _ = write!(row, ",\"times\":{},\"events\":{events}}}", detail.times);
            }
            let _ = write!(data, "{}{row}", if is_first { "" } else { "," });
            is_first = false;
        }
        data += "]}";
        Ok(TEMPLATE.replacen(DATA, &data, 1))
    }
}

/// Returns text that stands in a script: JSON in which nothing can end the script.
fn json(of: &impl Serialize) -> Result<String> {
    let json = serde_json::to_string(of).map_err(|error| Error::internal(format!("the page's data: {error}")))?;
    Ok(json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029"))
}

fn lost_ms(operation: &Operation) -> f64 {
    operation.verdicts.iter().map(|verdict| verdict.lost_ms).fold(0.0, f64::max)
}

/// Returns the places of the saves and loads that the page lists, in their order: in turns the newest, those that
/// failed or lost most, and those whose details the page has.
fn listed(all: &[(&Operation, Verb)], detailed: &[usize]) -> Result<Vec<usize>> {
    let mut newest: Vec<usize> = (0..all.len()).collect();
    newest.sort_by_key(|&at| Reverse((all[at].0.began_unix_ms.unwrap_or(u64::MAX), all[at].0.step)));
    let mut worst = newest.clone();
    let is_bad = |at: usize| matches!(all[at].0.outcome, "failed" | "incomplete");
    worst.sort_by(|&a, &b| is_bad(b).cmp(&is_bad(a)).then(lost_ms(all[b].0).total_cmp(&lost_ms(all[a].0))));
    let turns =
        (0..all.len()).flat_map(|turn| detailed.get(turn).copied().into_iter().chain([newest[turn], worst[turn]]));
    let (mut is_listed, mut bytes, mut count) = (vec![false; all.len()], 0, 0);
    for at in turns {
        if is_listed[at] {
            continue;
        }
        bytes += json(&summary(at, all[at].0, all[at].1))?.len();
        if bytes > LISTED_BYTES_MAX || count == LISTED_MAX {
            break;
        }
        (is_listed[at], count) = (true, count + 1);
    }
    Ok((0..all.len()).filter(|&at| is_listed[at]).collect())
}

/// A save or load in the charts.
#[derive(Serialize)]
struct Charted(
    u8,            // whether it is a load
    u64,           // step
    &'static str,  // outcome
    Option<usize>, // ranks
    Option<f64>,   // milliseconds that the program waited for it: until its end, for one that did not go on meanwhile
    Option<f64>,   // those of them before it could change the state
    Option<f64>,   // milliseconds until the outcome
    u64,           // bytes
    u64,           // operations at the storage
    Option<f64>,   // time wasted, a share of the training's
    Option<f64>,   // time wasted with the best interval
);

/// Returns the numbers of all saves and loads that the charts show, each with its place first; the newest of many.
fn charted(all: &[(&Operation, Verb)]) -> Vec<(usize, Charted)> {
    let to_us = |ms: f64| (ms * 1e3).round() / 1e3;
    let share = |share: f64| (share * 1e6).round() / 1e6;
    let one = |(at, &(of, verb)): (usize, &(&Operation, Verb))| {
        let (stalled, waited) = (of.stalled_ms.or(of.ended_ms).map(to_us), of.waited_ms.map(to_us));
        let requests = of.operations.values().map(|of| of.count).sum();
        let (waste, best) = (of.wasted.map(|of| share(of.waste)), of.wasted.map(|of| share(of.best_waste)));
        let (is_load, ended) = (u8::from(verb == Verb::Load), of.ended_ms.map(to_us));
        let (step, outcome, world) = (of.step, of.outcome, of.world);
        (at, Charted(is_load, step, outcome, world, stalled, waited, ended, of.bytes, requests, waste, best))
    };
    let mut newest: Vec<usize> = (0..all.len()).collect();
    newest.sort_by_key(|&at| Reverse((all[at].0.began_unix_ms, all[at].0.step)));
    newest.truncate(CHARTED_MAX);
    newest.sort_unstable();
    newest.into_iter().map(|at| one((at, &all[at]))).collect()
}

fn summary(at: usize, operation: &Operation, verb: Verb) -> Summary<'_> {
    let shown = operation.verdicts.len().min(VERDICTS_MAX);
    Summary {
        verb: word(verb),
        step: operation.step,
        outcome: operation.outcome,
        began_unix_ms: operation.began_unix_ms,
        world: operation.world,
        not_reporting: operation.not_reporting.len(),
        clocks: operation.clocks(),
        staged_ms: operation.staged_ms,
        stalled_ms: operation.stalled_ms,
        ended_ms: operation.ended_ms,
        bytes: operation.bytes,
        files: operation.files,
        failures: operation.failures,
        operations: &operation.operations,
        storage: operation.storage.as_ref(),
        verdicts: &operation.verdicts[..shown],
        verdicts_left_out: operation.verdicts.len() - shown,
        at,
    }
}

fn times(collected: &Collected) -> Times {
    let mut machines: Vec<String> = collected.said().map(|said| said.place.machine.clone()).collect();
    machines.sort_unstable();
    machines.dedup();
    let mut machine: Vec<(i64, usize)> = Vec::new();
    for said in &collected.ranks {
        let index = said.as_ref().and_then(|said| machines.binary_search(&said.place.machine).ok());
        let index = index.map_or(-1, |index| index as i64);
        match machine.last_mut() {
            Some((last, count)) if *last == index => *count += 1,
            _ => machine.push((index, 1)),
        }
    }
    let shown = phases_of(collected.verb).iter().flat_map(|phase| phase.1.iter().chain([&phase.2]));
    let mut phases: Vec<usize> = shown.map(|&phase| phase as usize).collect();
    phases.sort_unstable();
    phases.dedup();
    phases.retain(|&phase| collected.said().any(|said| said.phases_us[phase] > 0));
    let nothing = Digest::default();
    let ranks = collected.ranks.iter().map(|said| said.as_ref().unwrap_or(&nothing));
    let ends = ranks.flat_map(|said| phases.iter().map(|&phase| said.phases_us[phase]));
    let ends = base64(ends.flat_map(u32::to_le_bytes));
    let mesh = collected.mesh();
    let at = |rank: &Option<Digest>, dimension: &str| rank.as_ref()?.place.at(dimension);
    let rows = collected.ranks.iter().flat_map(|rank| mesh.iter().map(|name| at(rank, name).unwrap_or(u16::MAX)));
    let coordinates = base64(rows.flat_map(u16::to_le_bytes));
    Times { machine, mesh, coordinates, ends, phases, machines }
}

fn events(told: &Told) -> Events<'_> {
    let row = |row: &Row| {
        let (offset, bytes, failed) = (row.offset, row.bytes, row.outcome as u8);
        (row.word, row.began_us, row.took_us, offset, bytes, row.object, row.attempt, failed)
    };
    let rows = |rank| told.rank(rank).unwrap_or_default().iter().map(row).collect();
    let ranks = told.left_out.iter().map(|(&rank, &left_out)| (rank, EventsOfRank { left_out, rows: rows(rank) }));
    Events { words: &told.words, objects: &told.objects, ranks: ranks.collect() }
}

/// Returns bytes in base 64, with padding.
fn base64(bytes: impl Iterator<Item = u8>) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = bytes.collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        for digit in 0..4 {
            let value = (bits >> (18 - 6 * digit)) as usize & 63;
            let _ = text.write_char(if digit <= three.len() { char::from(DIGITS[value]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Wasted;

    #[test]
    fn bytes_are_written_in_base_64() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(bytes.bytes()), text);
        }
    }

    /// The page of so many saves of `world` ranks, each of which has events of `told` ranks, so many of each.
    fn page(saves: u64, world: usize, told: u32, events: u32) -> String {
        let (mut page, mut report) = (Page::default(), RunReport::default());
        let mut collected = crate::object::tests::collected(world);
        collected.told = crate::object::tests::told(0..told, events);
        for step in 0..saves {
            (collected.step, collected.began_unix_ms) = (step, step);
            if step == saves / 4 * 3 {
                collected.ranks.iter_mut().flatten().for_each(|said| said.failure.clear());
            }
            let operation = crate::report::operation(&collected);
            page.add(&collected, &operation).unwrap();
            report.saves.push(operation);
        }
        page.html(&report).unwrap()
    }

    #[test]
    fn a_page_of_many_ranks_or_saves_stays_small() {
        for (saves, world, told, events, shown) in [(16, 8960, 9, 700, 16), (1000, 20, 9, 40, 300)] {
            let page = page(saves, world, told, events);
            assert!((500_000..5_000_000).contains(&page.len()), "{}", page.len());
            let newest = page.rsplit("\"verb\":\"save\"").next().unwrap();
            assert!(newest.contains("\"ends\":") && newest.contains("\"left_out\":"), "the newest has its details");
            let failed = page.split("\"verb\":\"save\"").filter(|save| save.contains("\"outcome\":\"failed\""));
            assert!(failed.filter(|save| save.contains("\"ends\":")).count() > 2, "those that failed have theirs");
            // Of the others the page says what all ranks did.
            assert_eq!(page.matches("\"outcome\":").count(), shown);
            let (times, events) = (page.matches("\"ends\":").count(), page.matches("\"left_out\":").count());
            assert!(times > 3 && times <= shown && (18..=9 * times).contains(&events), "{times} {events}");
        }
    }

    #[test]
    fn a_page_of_more_saves_than_are_kept_stays_small() {
        let mut report = RunReport::default();
        for step in 0..12_000 {
            let mut save = Operation::unrecorded(step + (1 << 40), "committed");
            (save.began_unix_ms, save.world) = (Some(1_800_000_000_000 + step), Some(8960));
            (save.stalled_ms, save.waited_ms) = (Some(12_345.678), Some(2_345.678));
            (save.ended_ms, save.bytes) = (Some(123_456.789), u64::MAX);
            let (interval_s, best_interval_s) = (1800.0, 600.0);
            save.wasted = Some(Wasted { interval_s, waste: 0.123_456_789, best_interval_s, best_waste: 0.023_456_789 });
            save.not_reporting = (0..100).collect();
            report.saves.push(save);
        }
        let page = Page::default().html(&report).unwrap();
        // The others of 5 MB are for details.
        assert!(page.len() < 5_000_000 - TIMES_BYTES_MAX - EVENTS_BYTES_MAX - LISTED_BYTES_MAX, "{}", page.len());
        assert_eq!(page.matches("\"outcome\":").count(), LISTED_MAX);
    }

    #[test]
    fn a_page_has_the_newest_and_the_worst_of_many_saves() {
        let saves: Vec<Operation> = (0..2000)
            .map(|step| {
                let mut save = Operation::unrecorded(step, if step == 7 { "incomplete" } else { "committed" });
                save.began_unix_ms = Some(step);
                if step < 1000 {
                    save.verdicts = crate::verdicts::verdicts(&crate::object::tests::collected(3));
                }
                save
            })
            .collect();
        let all: Vec<_> = saves.iter().map(|save| (save, Verb::Save)).collect();
        let listed = listed(&all, &[70]).unwrap();
        assert!(listed.len() == LISTED_MAX && listed.is_sorted(), "{listed:?}");
        assert!([7, 70, 1999, 1998].iter().all(|step| listed.contains(step)), "{listed:?}");
        assert!(listed.iter().filter(|&&at| at < 1000).count() > 100, "those that lost most");
        assert_eq!(charted(&all).len(), 2000);
    }
}
