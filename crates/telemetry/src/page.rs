//! Draws what the saves and loads of a run did, as one page that needs no network and no other file.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;
use shardfast_engine::listen::Verb;
use shardfast_engine::{Error, Kind, Result};

use crate::digest::Digest;
use crate::object::Collected;
use crate::report::{Operation, RunReport};
use crate::verdicts::{PhaseOf, phases_of};

/// The page around the data.
const TEMPLATE: &str = include_str!("page.html");

/// Mark in the template in whose place the data go.
const DATA: &str = "/*DATA*/";

/// Bytes that the times of single ranks take in a page, of the saves and loads that lost most and of the newest.
const DETAIL_BYTES_MAX: usize = 3_400_000;

/// Milliseconds of the first step of the scale in which times of ranks are written, and its largest number.
const SCALE: (f64, f64) = (0.01, 65_534.0);

/// Milliseconds at the end of that scale.
const SCALE_MAX_MS: f64 = 1e7;

#[derive(Serialize)]
struct Page<'a> {
    url: &'a str,
    operations: Vec<Shown<'a>>,
    unreadable: &'a [String],
    phases: [(&'static str, Vec<Phase>); 2],
    scale: (f64, f64, f64),
}

/// A phase: its name, the phases at whose end it begins, and the place of its own end in a rank's row.
#[derive(Serialize)]
struct Phase {
    name: &'static str,
    from: Vec<usize>,
    to: usize,
}

#[derive(Serialize)]
struct Shown<'a> {
    verb: &'static str,
    #[serde(flatten)]
    operation: Summary<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Detail>,
}

/// Facts of an operation as a whole, as the page shows them.
#[derive(Serialize)]
struct Summary<'a> {
    step: u64,
    outcome: &'static str,
    began_unix_ms: Option<u64>,
    world: Option<usize>,
    not_reporting: &'a [usize],
    staged_ms: Option<f64>,
    ended_ms: Option<f64>,
    bytes: u64,
    files: u64,
    failures: u64,
    operations: &'a std::collections::BTreeMap<&'static str, crate::report::Operations>,
    verdicts: &'a [crate::Verdict],
}

/// Times of all ranks in an operation.
#[derive(Serialize)]
struct Detail {
    machines: Vec<String>,
    /// Index of each rank's machine.
    machine: Vec<usize>,
    /// Ends of the phases of each rank, in the scale of the page: 16 bits each, little-endian, in base 64.
    ends: String,
}

/// Returns the page of a report, given what it was made of: `collected` are its saves and loads that were recorded, in
/// the order of the report.
pub(crate) fn page(report: &RunReport, collected: &[(Collected, usize)]) -> Result<String> {
    let all: Vec<(&Operation, &'static str, Verb, usize)> =
        [(&report.saves, "save", Verb::Save), (&report.loads, "load", Verb::Load)]
            .into_iter()
            .flat_map(|(operations, word, verb)| operations.iter().enumerate().map(move |(i, of)| (of, word, verb, i)))
            .collect();
    let of = |verb: Verb, index: usize| {
        let found = collected.iter().find(|(collected, at)| collected.verb == verb && *at == index);
        found.map(|(collected, _)| collected)
    };
    // Those that lost most first, then the newest.
    let lost = |operation: &Operation| operation.verdicts.iter().map(|verdict| verdict.lost_ms).fold(0.0, f64::max);
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|&a, &b| {
        let newest = all[b].0.began_unix_ms.cmp(&all[a].0.began_unix_ms);
        lost(all[b].0).total_cmp(&lost(all[a].0)).then(newest)
    });
    let mut left = DETAIL_BYTES_MAX;
    let mut details: Vec<Option<Detail>> = all.iter().map(|_| None).collect();
    for index in order {
        let Some(collected) = of(all[index].2, all[index].3) else { continue };
        let detail = detail(collected);
        let bytes =
            detail.ends.len() + 4 * detail.machine.len() + detail.machines.iter().map(String::len).sum::<usize>();
        if bytes <= left {
            left -= bytes;
            details[index] = Some(detail);
        }
    }
    let phase = |phase: &PhaseOf| Phase {
        name: phase.0,
        from: phase.1.iter().map(|&of| of as usize).collect(),
        to: phase.2 as usize,
    };
    let phases = [Verb::Save, Verb::Load].map(|verb| phases_of(verb).iter().map(phase).collect::<Vec<_>>());
    let [save, load] = phases;
    let data = Page {
        url: &report.url,
        operations: all
            .iter()
            .zip(details)
            .map(|(&(operation, verb, ..), detail)| Shown { verb, operation: summary(operation), detail })
            .collect(),
        unreadable: &report.unreadable,
        phases: [("save", save), ("load", load)],
        scale: (SCALE.0, SCALE.1, SCALE_MAX_MS),
    };
    let json = serde_json::to_string(&data).map_err(|error| Error::internal(format!("the page's data: {error}")))?;
    // Nothing in the data can end the script that holds it.
    let json = json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
    Ok(TEMPLATE.replacen(DATA, &json, 1))
}

/// Writes a page to a new file.
///
/// # Errors
/// `Conflict` when something is there already; `Invalid` or `Exhausted` when it cannot be written.
pub(crate) fn write(path: &Path, page: &str) -> Result<()> {
    let failed = |error: &std::io::Error| {
        let (kind, what) = match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                (Kind::Conflict, "a file is there already: name another one, or remove it".to_owned())
            }
            std::io::ErrorKind::StorageFull => (Kind::Exhausted, error.to_string()),
            _ => (Kind::Invalid, error.to_string()),
        };
        Error::new(kind, format!("{}: {what}", path.display()))
    };
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(|error| failed(&error))?;
    file.write_all(page.as_bytes()).map_err(|error| failed(&error))
}

fn summary(operation: &Operation) -> Summary<'_> {
    Summary {
        step: operation.step,
        outcome: operation.outcome,
        began_unix_ms: operation.began_unix_ms,
        world: operation.world,
        not_reporting: &operation.not_reporting,
        staged_ms: operation.staged_ms,
        ended_ms: operation.ended_ms,
        bytes: operation.bytes,
        files: operation.files,
        failures: operation.failures,
        operations: &operation.operations,
        verdicts: &operation.verdicts,
    }
}

fn detail(collected: &Collected) -> Detail {
    let name = |said: &Option<Digest>| said.as_ref().map(|said| said.place.machine.clone()).unwrap_or_default();
    let mut machines: Vec<String> = collected.ranks.iter().map(name).collect();
    machines.sort_unstable();
    machines.dedup();
    let machine = collected.ranks.iter().map(|said| machines.binary_search(&name(said)).unwrap_or_default()).collect();
    let nothing = Digest::default();
    let ends = collected.ranks.iter().flat_map(|said| said.as_ref().unwrap_or(&nothing).phases_us);
    Detail { machine, ends: base64(ends.flat_map(|us| scaled(us).to_le_bytes())), machines }
}

/// Returns a time on the page's scale: 0 for none, else 1 and more, at even distances of its logarithm.
fn scaled(us: u32) -> u16 {
    if us == 0 {
        return 0;
    }
    let share = (f64::from(us) / 1e3 / SCALE.0).ln_1p() / (SCALE_MAX_MS / SCALE.0).ln_1p();
    1 + (share * SCALE.1).round().clamp(0.0, SCALE.1) as u16
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

    #[test]
    fn bytes_are_written_in_base_64() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(bytes.bytes()), text);
        }
    }

    #[test]
    fn times_keep_three_digits_on_the_scale() {
        assert_eq!((scaled(0), scaled(u32::MAX) > scaled(u32::MAX / 2)), (0, true));
        for us in [10_u32, 137, 4_200, 99_999, 13_100_000] {
            let x = f64::from(scaled(us) - 1) / SCALE.1 * (SCALE_MAX_MS / SCALE.0).ln_1p();
            let ms = SCALE.0 * x.exp_m1();
            assert!((ms * 1e3 / f64::from(us) - 1.0).abs() < 2e-3, "{us}: {ms}");
        }
    }

    #[test]
    fn a_page_of_many_ranks_stays_small() {
        let one = |step: u64| Collected { step, began_unix_ms: step, ..crate::object::tests::collected(8960) };
        let collected: Vec<(Collected, usize)> = (0..16).map(|step| (one(step as u64), step)).collect();
        let saves = collected.iter().map(|(collected, _)| crate::report::operation(collected)).collect();
        let report = RunReport { url: "run".to_owned(), saves, loads: Vec::new(), unreadable: Vec::new() };
        let page = page(&report, &collected).unwrap();
        assert!((3_000_000..5_000_000).contains(&page.len()), "{}", page.len());
        // Of the others the page says what all ranks did.
        assert_eq!(page.matches("\"outcome\":").count(), 16);
        assert!(page.matches("\"ends\":").count() < 16);
    }
}
