//! Shows what a job does now, or the last saves and loads of a run, again and again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_engine::{Result, Timeout};
use shardfast_telemetry::live::{EndedNow, Frame, RunningNow};
use shardfast_telemetry::{Figure, Storage, StorageNow, ask, job_address};

use crate::FINE;
use crate::outcome::{Outcome, outcome};
use crate::report;
use crate::text::{bar, count, date, duration, plain, ranks, size, wrapped};

/// Time for which an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Time without an answer after which the job is taken to have ended.
const GONE_AFTER: Duration = Duration::from_secs(30);

/// Ranks that are shown of a save or load, those with the least done.
const RANKS_MAX: usize = 8;

/// Ended saves and loads that are shown.
const ENDED_MAX: usize = 8;

/// Largest and smallest width of a bar.
const BAR: (usize, usize) = (40, 6);

/// Columns of the name in front of a bar, and of the space and the brackets around its cells.
const NAME: usize = 12;
const BRACKETS: usize = 3;

/// Saves and loads of a run that are shown.
const OF_RUN_MAX: usize = 20;

/// Shows what happens at `target`, `http://host:port` of a job or a run; once, or again after each `every` until the
/// terminal's user ends it or the job has ended. `storage` is the place of the storage's metrics, which are shown, too.
pub(crate) fn run(
    target: &str,
    every: Duration,
    once: bool,
    storage: Option<&str>,
    timeout: &Timeout,
) -> Result<Outcome> {
    let is_terminal = std::io::stdout().is_terminal();
    let mut storage = storage.map(Storage::new).transpose()?;
    if let Some(storage) = &mut storage {
        storage.look(ANSWER_WITHIN)?; // rates need two looks
        if once || !is_terminal {
            std::thread::sleep(every);
        }
    }
    let mut source = match job_address(target)? {
        Some(address) => Source::Job { address, last: None, heard: Instant::now() },
        None => Source::Run(target.to_owned()),
    };
    loop {
        let (columns, rows) = terminal();
        let told = storage.as_mut().map(|storage| storage.look(ANSWER_WITHIN));
        let (mut shown, is_over) = source.look(columns, told.as_ref().and_then(|told| told.as_ref().ok()), timeout)?;
        match told {
            Some(Ok(told)) => shown.text += &storage_text(&told),
            Some(Err(error)) if once || !is_terminal => return Err(error),
            Some(Err(error)) => shown.text += &format!("\n{}\n", plain(&error.message)),
            None => {}
        }
        if is_terminal {
            shown.text = wrapped(&shown.text, columns);
        }
        if once || !is_terminal {
            return Ok(shown);
        }
        // What is shown last is printed in whole, in the place of what was drawn before.
        let drawn = if is_over { 0 } else { rows.saturating_sub(1) };
        let lines: String = shown.text.lines().take(drawn).flat_map(|line| [line, "\n"]).collect();
        let mut stdout = std::io::stdout().lock();
        if write!(stdout, "\x1b[H\x1b[J{lines}").and_then(|()| stdout.flush()).is_err() {
            return Ok(outcome(String::new(), &(), FINE)); // the terminal is closed
        }
        drop(stdout);
        if is_over {
            return Ok(shown);
        }
        std::thread::sleep(every);
    }
}

/// Fields that `--json` prints.
#[derive(Serialize)]
struct Shown<'a, T: Serialize> {
    #[serde(flatten)]
    of: &'a T,
    /// Metrics of the storage, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    storage: Option<&'a StorageNow>,
}

/// Returns the metrics of the storage as text.
fn storage_text(told: &StorageNow) -> String {
    let mut out = format!("\nstorage {}:\n", plain(&told.url));
    if told.rates.is_empty() {
        out += "  no counter grows\n";
    }
    let value = |figure: &Figure| match figure.is_bytes {
        true => size(figure.value as u64),
        false => format!("{:.1}", figure.value),
    };
    for figure in &told.rates {
        let _ = writeln!(out, "  {}  {}/s", plain(&figure.name), value(figure));
    }
    for figure in &told.capacity {
        let _ = writeln!(out, "  {}  {}", plain(&figure.name), value(figure));
    }
    out
}

/// Source of what is shown.
enum Source {
    /// A job: its address, its last answer, and when that came.
    Job { address: String, last: Option<Frame>, heard: Instant },
    /// A run, by its URL.
    Run(String),
}

impl Source {
    /// Returns what is to be shown, and whether it is the last of it.
    fn look(&mut self, columns: usize, storage: Option<&StorageNow>, timeout: &Timeout) -> Result<(Outcome, bool)> {
        match self {
            Source::Job { address, last, heard } => match (ask(address, ANSWER_WITHIN), &last) {
                (Ok(frame), _) => {
                    *heard = Instant::now();
                    let text = frame_text(&frame, last.as_ref(), columns);
                    let shown = outcome(text, &Shown { of: &frame, storage }, FINE);
                    *last = Some(frame);
                    Ok((shown, false))
                }
                (Err(mut error), None) => {
                    error.message += "; a job with SHARDFAST_METRICS answers from its first save or load on";
                    Err(error)
                }
                (Err(error), Some(last)) => {
                    let silent = duration(heard.elapsed().as_secs_f64());
                    let note = format!("no answer for {silent}: {}\n", plain(&error.message));
                    let shown = outcome(note + &frame_text(last, None, columns), &Shown { of: last, storage }, FINE);
                    Ok((shown, heard.elapsed() > GONE_AFTER))
                }
            },
            Source::Run(url) => {
                let (mut report, _) = shardfast_telemetry::report(url, None, None, &|_| (), None, timeout)?;
                for operations in [&mut report.saves, &mut report.loads] {
                    operations.drain(..operations.len().saturating_sub(OF_RUN_MAX));
                }
                Ok((outcome(report::text(&report), &Shown { of: &report, storage }, FINE), false))
            }
        }
    }
}

/// Returns the columns and rows of the terminal.
fn terminal() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (usize::from(size.ws_col), usize::from(size.ws_row)),
        _ => (80, usize::MAX),
    }
}

/// Returns a frame as text; rates are those since the frame `before`.
fn frame_text(frame: &Frame, before: Option<&Frame>, columns: usize) -> String {
    let world = count(u64::from(frame.world), "rank", "ranks");
    let machine = plain(&frame.machine);
    let mut out = format!("{world}, seen from rank {} on {machine}, {}\n", frame.rank, date(frame.now_unix_ms));
    let now = by_operation(frame);
    let earlier = before.map(by_operation).unwrap_or_default();
    let seconds = before.map_or(0.0, |before| frame.now_unix_ms.saturating_sub(before.now_unix_ms) as f64 / 1e3);
    if now.is_empty() {
        out += "nothing is saved or loaded now\n";
    }
    for (name, on_ranks) in &now {
        operation_text(&mut out, on_ranks, earlier.get(name), seconds, columns);
    }
    for wait in &frame.waits {
        let who = match (wait.ranks.as_slice(), wait.among.as_slice()) {
            ([], []) => continue,
            ([], among) => {
                format!("one of {}", ranks(&among.iter().map(|&(a, b)| a..b.saturating_add(1)).collect::<Vec<_>>()))
            }
            (named, _) => ranks(&named.iter().map(|&rank| rank..rank.saturating_add(1)).collect::<Vec<_>>()),
        };
        let _ = writeln!(out, "waits for {who} since {}: {}", duration(wait.for_ms / 1e3), plain(&wait.call));
    }
    let silent: Vec<_> = frame.ranks.iter().filter_map(|other| Some((other.rank, other.problem.as_ref()?))).collect();
    if let Some((rank, problem)) = silent.first() {
        let many = count(silent.len() as u64, "rank does", "ranks do");
        let _ = writeln!(out, "{many} not answer: rank {rank}: {}", plain(problem));
    }
    if !frame.ended.is_empty() {
        out += "\nended:\n";
    }
    for ended in frame.ended.iter().rev().take(ENDED_MAX) {
        ended_text(&mut out, ended);
    }
    out
}

/// Running operations by their names, each with the ranks that are known.
type ByOperation<'a> = BTreeMap<(&'a str, &'a str), Vec<(u32, &'a RunningNow)>>;

fn by_operation(frame: &Frame) -> ByOperation<'_> {
    let mut found = ByOperation::new();
    let others = frame.ranks.iter().map(|other| (other.rank, &other.running));
    for (rank, running) in std::iter::once((frame.rank, &frame.running)).chain(others) {
        for one in running {
            found.entry((&one.operation, &one.url)).or_default().push((rank, one));
        }
    }
    found
}

/// Returns the bytes that are done: those that the storage has in a save, those in place in a load.
fn done(running: &RunningNow) -> u64 {
    if running.operation == "save" { running.stored } else { running.copied }
}

fn operation_text(
    out: &mut String,
    on_ranks: &[(u32, &RunningNow)],
    earlier: Option<&Vec<(u32, &RunningNow)>>,
    seconds: f64,
    columns: usize,
) {
    let Some((_, first)) = on_ranks.first() else { return };
    let step = first.step.map(|step| format!(" of step {step}")).unwrap_or_default();
    let phase = phase(first);
    let time = duration(first.for_ms / 1e3);
    let _ = writeln!(out, "\n{}{step}, for {time}, {phase}: {}", plain(&first.operation), plain(&first.url));
    let sum = |all: &[(u32, &RunningNow)], of: fn(&RunningNow) -> u64| all.iter().map(|(_, one)| of(one)).sum::<u64>();
    let (at, total) = (sum(on_ranks, done), sum(on_ranks, |one| one.bytes));
    let since = earlier.filter(|_| seconds > 0.0).map(|earlier| at.saturating_sub(sum(earlier, done)));
    let rate = since.map(|bytes| format!("  {}/s", size((bytes as f64 / seconds) as u64))).unwrap_or_default();
    let number = on_ranks.iter().map(|(rank, _)| rank).collect::<std::collections::BTreeSet<_>>().len();
    row(out, &count(number as u64, "rank", "ranks"), at, total, &rate, columns);
    let mut slow: Vec<_> = on_ranks.iter().filter(|(_, one)| one.bytes > 0 && done(one) < one.bytes).collect();
    slow.sort_by(|(_, a), (_, b)| {
        (u128::from(done(a)) * u128::from(b.bytes)).cmp(&(u128::from(done(b)) * u128::from(a.bytes)))
    });
    for (rank, one) in slow.into_iter().take(RANKS_MAX).filter(|_| on_ranks.len() > 1) {
        row(out, &format!("rank {rank}"), done(one), one.bytes, "", columns);
    }
    for (rank, one) in on_ranks.iter().filter(|(_, one)| one.failures > 0).take(RANKS_MAX) {
        let last = one.failure.as_deref().map(|text| plain(text).into_owned()).unwrap_or_default();
        let _ = writeln!(out, "  rank {rank}: {}: {last}", count(one.failures, "failure", "failures"));
    }
}

/// Returns what a rank does in an operation, from the last phase that is over.
fn phase(running: &RunningNow) -> &'static str {
    let is_over = |phase: &str| running.phases_ms.contains_key(phase);
    match running.operation.as_str() {
        "save" if is_over("committed") => "ends",
        "save" if is_over("durable") => "commits",
        "save" if is_over("written") => "agrees and writes values",
        "save" if is_over("staged") => "writes",
        "save" => "copies and writes",
        _ if is_over("read") => "installs",
        _ if is_over("agreed") => "reads",
        _ if is_over("opened") => "matches and plans",
        _ => "opens",
    }
}

/// Adds a bar with its figures, which stand below it in a narrow terminal.
fn row(out: &mut String, name: &str, done: u64, total: u64, rate: &str, columns: usize) {
    let share = if total == 0 { 0.0 } else { done as f64 / total as f64 };
    let figures = format!("{:>3.0} %  {} of {}{rate}", share * 100.0, size(done), size(total));
    let width = figures.chars().count() + 1;
    let (room, break_before) = match columns.saturating_sub(NAME + BRACKETS + width) {
        room if room >= BAR.1 => (room, " "),
        _ => (columns.saturating_sub(NAME + BRACKETS), "\n   "),
    };
    let bar = if room < BAR.1 { String::new() } else { format!(" {}", bar(share, room.min(BAR.0))) };
    let _ = writeln!(out, "  {name:<10}{bar}{break_before}{figures}");
}

fn ended_text(out: &mut String, ended: &EndedNow) {
    let step = ended.step.map(|step| format!(" of step {step}")).unwrap_or_default();
    let how = match &ended.failure {
        Some(failure) => format!("failed after {}: {}", duration(ended.ended_ms / 1e3), plain(failure)),
        None => format!(
            "{} in {}, {} here",
            if ended.operation == "save" { "committed" } else { "loaded" },
            duration(ended.ended_ms / 1e3),
            size(ended.bytes)
        ),
    };
    let _ = writeln!(out, "  {}  {}{step} {how}", date(ended.began_unix_ms), plain(&ended.operation));
}

#[cfg(test)]
mod tests {
    use shardfast_telemetry::live::{OtherNow, WaitNow};

    use super::*;

    fn running(stored: u64, failures: u64) -> RunningNow {
        RunningNow {
            operation: "save".to_owned(),
            url: "runs/a".to_owned(),
            step: Some(40),
            for_ms: 2100.0,
            phases_ms: BTreeMap::from([("planned".to_owned(), 1.0), ("staged".to_owned(), 9.0)]),
            bytes: 4 << 20,
            copied: 4 << 20,
            stored,
            failures,
            failure: (failures > 0).then(|| "503 \x1b[31m".to_owned()),
        }
    }

    fn frame(now_unix_ms: u64, stored: u64) -> Frame {
        let other = |rank, running: RunningNow| OtherNow { rank, running: vec![running], problem: None };
        let silent = OtherNow { rank: 3, problem: Some("no answer".to_owned()), ..OtherNow::default() };
        let wait = WaitNow { call: "save runs/a".to_owned(), for_ms: 700.0, ranks: vec![2, 3], among: Vec::new() };
        Frame {
            world: 4,
            machine: "node".to_owned(),
            now_unix_ms,
            running: vec![running(stored, 0)],
            waits: vec![wait],
            ranks: vec![other(1, running(1 << 20, 2)), other(2, running(4 << 20, 0)), silent],
            ended: vec![EndedNow { operation: "save".to_owned(), ended_ms: 1500.0, ..EndedNow::default() }],
            ..Frame::default()
        }
    }

    #[test]
    fn a_frame_shows_ranks_rates_waits_and_failures() {
        let text = frame_text(&frame(3000, 3 << 20), Some(&frame(1000, 1 << 20)), 100);
        for part in [
            "4 ranks, seen from rank 0 on node",
            "save of step 40, for 2.1 s, writes: runs/a",
            "  3 ranks    [###########################.............]  67 %  8.0 MiB of 12.0 MiB  1.0 MiB/s",
            "  rank 1  ",
            "  rank 1: 2 failures: 503 \\u{1b}[31m",
            "waits for ranks 2, 3 since 700 ms: save runs/a",
            "1 rank does not answer: rank 3: no answer",
            "save committed in 1.5 s",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(text.find("  rank 1  ") < text.find("  rank 0  "), "{text}");
        assert!(!text.contains("rank 2  "), "{text}");
    }

    #[test]
    fn a_narrow_terminal_has_the_figures_below_the_bar() {
        for (columns, lines) in [
            (60, &["  3 ranks    [#####..]  67 %  8.0 MiB of 12.0 MiB  1.0 MiB/s"][..]),
            (40, &["  3 ranks    [#################........]", "    67 %  8.0 MiB of 12.0 MiB  1.0 MiB/s"]),
            (20, &["  3 ranks", "    67 %  8.0 MiB of", "    12.0 MiB", "    1.0 MiB/s"]),
        ] {
            let text = wrapped(&frame_text(&frame(3000, 3 << 20), Some(&frame(1000, 1 << 20)), columns), columns);
            assert!(text.contains(&format!("\n{}\n", lines.join("\n"))), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
        }
    }
}
