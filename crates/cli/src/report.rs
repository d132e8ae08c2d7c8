//! Prints what the saves and loads of a run did.

use std::fmt::Write;

use shardfast_telemetry::report::{Operation, RunReport};

use crate::text::Align::{Left, Right};
use crate::text::{count, date, plain, plain_lines, size, table};

/// Rates of the storage's metrics that are printed of a save or load.
const SHOWN_RATES: usize = 4;

/// Returns the report as text: of each save and load a line, and the verdicts.
pub(crate) fn text(report: &RunReport) -> String {
    let url = plain(&report.url);
    let (saves, loads) = (report.saves.len() as u64, report.loads.len() as u64);
    let median =
        report.median_ms().map_or_else(String::new, |ms| format!("; the median save is durable after {}", time(ms)));
    let mut out = format!("run {url}: {}, {}{median}\n", count(saves, "save", "saves"), count(loads, "load", "loads"));
    for (what, operations) in [("SAVE", &report.saves), ("LOAD", &report.loads)] {
        if operations.is_empty() {
            continue;
        }
        let head = [
            (what, Right),
            ("OUTCOME", Left),
            ("BEGAN", Left),
            ("RANKS", Right),
            ("SIZE", Right),
            ("STALLED", Right),
            ("COPIED", Right),
            ("ENDED", Right),
            ("FAILURES", Right),
        ];
        out += &table(&head, &operations.iter().map(row).collect::<Vec<_>>());
        for operation in operations {
            verdicts(&mut out, operation);
            if let Some(clocks) = operation.clocks() {
                let _ = writeln!(out, "step {}, {clocks}", operation.step);
            }
            storage(&mut out, operation);
        }
    }
    for problem in &report.unreadable {
        let _ = writeln!(out, "not read: {}", plain_lines(problem));
    }
    out
}

fn row(operation: &Operation) -> Vec<String> {
    let some = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let heard = |world: usize| match operation.not_reporting.len() {
        0 => world.to_string(),
        not_reporting => format!("{} of {world}", world - not_reporting),
    };
    vec![
        operation.step.to_string(),
        operation.outcome.to_owned(),
        some(operation.began_unix_ms.map(date)),
        some(operation.world.map(heard)),
        some(operation.world.map(|_| size(operation.bytes))),
        some(operation.stalled_ms.map(time)),
        some(operation.staged_ms.map(time)),
        some(operation.ended_ms.map(time)),
        some(operation.world.map(|_| operation.failures.to_string())),
    ]
}

fn verdicts(out: &mut String, operation: &Operation) {
    if operation.verdicts.is_empty() {
        return;
    }
    let _ = writeln!(out, "step {}:", operation.step);
    for (number, verdict) in (1..).zip(&operation.verdicts) {
        let lost = if verdict.lost_ms > 0.0 { format!(", {} lost", time(verdict.lost_ms)) } else { String::new() };
        let row = if verdict.in_a_row > 1 { format!("; {} times in a row", verdict.in_a_row) } else { String::new() };
        let place = verdict.place.as_ref().map_or_else(String::new, |place| format!(" ({})", plain(place)));
        let (subject, said) = (plain(&verdict.subject), plain(&verdict.text));
        let _ = writeln!(out, "  {number}. {subject}{place}: {said}{lost}{row}");
    }
}

/// Prints what the storage told of the time of an operation, the fastest rates.
fn storage(out: &mut String, operation: &Operation) {
    let Some(told) = &operation.storage else { return };
    let rates: Vec<String> = (told.rates.iter().take(SHOWN_RATES))
        .map(|rate| match rate.is_bytes {
            true => format!("{} {}/s", plain(&rate.name), size(rate.value as u64)),
            false => format!("{} {:.1}/s", plain(&rate.name), rate.value),
        })
        .collect();
    let rates = if rates.is_empty() { "nothing of that time".to_owned() } else { rates.join(", ") };
    let _ = writeln!(out, "step {}, storage: {rates}", operation.step);
}

/// Returns a time in the unit that fits it.
fn time(ms: f64) -> String {
    match ms {
        _ if ms < 10.0 => format!("{ms:.1} ms"),
        _ if ms < 1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1e3),
    }
}
