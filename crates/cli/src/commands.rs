//! The commands: each calls the engine and prints the results.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use shardfast_engine::{Checkpoint, Engine, Located, Result, Timeout, locate, locate_all, open, pin, rewind, unpin};
use shardfast_telemetry::report::RunReport;
use shardfast_tools::{
    Copied, Copying, Diff, Exported, Limit, Summary, Swept, Synced, VerifyReport, copy, diff, examine, export, history,
    summary, sweep, sync, verify, verify_stored,
};

use crate::args::{Command, Watching};
use crate::doctor::{Host, Report};
use crate::outcome::{Outcome, outcome};
use crate::text::{bar, count, plain, size};
use crate::{FINE, FOUND, describe, exit_code, interval, keeper, report, top, wasted, watch};

/// Width of a progress bar: beside its figures it fits into 80 columns.
const BAR_CELLS: usize = 30;

pub(crate) fn run(
    command: Command,
    is_json: bool,
    timeout: Timeout,
    me: &[OsString],
    host: impl FnOnce() -> Host,
) -> Result<Outcome> {
    let timeout = &timeout;
    let engine = || Engine::waiting(timeout.clone());
    match command {
        Command::Ls { url } => {
            let history = history(&url, timeout)?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            Ok(outcome(describe::history(&history, now.as_millis() as u64), &history, FINE))
        }
        Command::Inspect { url, leaf, values } => {
            let (located, checkpoint) = opened(&url, timeout)?;
            let summary = summary(&checkpoint, leaf.as_deref(), values)?;
            let mut text = describe::located(&located) + &describe::summary(&summary);
            if let Some(pattern) = leaf.as_deref().filter(|_| summary.leaves.is_empty()) {
                text += &format!("\nno leaf matches {}\n", plain(pattern));
            }
            Ok(outcome(text, &Inspected { run: &located.run, passed_over: &located.passed_over, summary }, FINE))
        }
        Command::Verify { url, all, stored } => verify_command(&url, all, stored, timeout),
        Command::Diff { a, b } => {
            let ((located_a, a), (located_b, b)) = (opened(&a, timeout)?, opened(&b, timeout)?);
            let progress = Progress::new("compared");
            let diff: Diff = diff(&a, &b, &|done, total| progress.show(done, total))?;
            drop(progress);
            let text = describe::located(&located_a) + &describe::located(&located_b) + &describe::diff(&diff);
            let exit_code = if diff.differences.is_empty() { FINE } else { FOUND };
            Ok(outcome(text, &diff, exit_code))
        }
        Command::Export { url, out, key, shard_size } => {
            let (located, checkpoint) = opened(&url, timeout)?;
            let exported: Exported = export(&checkpoint, &out, &key, shard_size)?;
            let text = describe::located(&located) + &describe::exported(&exported);
            Ok(outcome(text, &Export { checkpoint: checkpoint.url(), exported: &exported }, FINE))
        }
        Command::Copy { from, to, limit, verify } => {
            let located = locate(&from, timeout)?;
            let progress = Progress::new("copied");
            let how = Copying { limit: Limit::new(limit), verify };
            let show = |done, total| progress.show(done, total);
            let copied: Copied = copy(&engine(), &located.url, &to, &how, &show)?;
            drop(progress);
            Ok(outcome(describe::located(&located) + &describe::copied(&copied), &copied, FINE))
        }
        Command::Sync { from, to, limit, verify } => {
            let progress = Progress::new("copied");
            let how = Copying { limit: Limit::new(limit), verify };
            let show = |done, total| progress.show(done, total);
            let synced: Synced = sync(&engine(), &from, &to, &how, &show)?;
            drop(progress);
            let exit_code = synced.failed.first().map_or(FINE, |failed| exit_code(failed.kind));
            Ok(outcome(describe::synced(&synced), &synced, exit_code))
        }
        Command::Report { url, step, csv: true, .. } => csv_command(&url, step, timeout),
        Command::Report { url, step, out, trace: None, storage, mtbf, .. } => {
            report_command(&url, step, storage.as_deref(), out, mtbf, timeout)
        }
        Command::Report { url, step, trace: Some(out), .. } => trace_command(&url, step, &out, timeout),
        Command::Top { target, every, once, storage } => top::run(&target, every, once, storage.as_deref(), timeout),
        Command::Watch(asked) => watch_command(&asked, is_json, timeout),
        Command::Rewind { url, to } => {
            let rewound = rewind(&url, to.saturating_add(1), timeout)?;
            Ok(outcome(describe::rewound(&rewound), &rewound, FINE))
        }
        Command::Pin { url, note, remove } => {
            let located = locate(&url, timeout)?;
            let changed = match remove {
                true => unpin(&located.url, timeout)?,
                false => pin(&located.url, &note, timeout).map(|()| true)?,
            };
            let what = match (remove, changed) {
                (false, _) => "pinned",
                (true, true) => "no longer pinned",
                (true, false) => "was not pinned",
            };
            let text = describe::located(&located) + &format!("{}: {what}\n", plain(&located.url));
            Ok(outcome(text, &Pinned { url: &located.url, pinned: !remove, changed }, FINE))
        }
        Command::Sweep { url, dry_run, older_than } => {
            let progress = Progress::of("looked at", |n| count(n, "directory", "directories"));
            let swept: Swept = sweep(&url, older_than, dry_run, timeout, &|done, total| progress.show(done, total))?;
            drop(progress);
            Ok(outcome(describe::swept(&swept, dry_run), &Sweeping { dry_run, swept: &swept }, FINE))
        }
        Command::Interval(asked) => interval::answer(&asked).map(|answer| outcome(answer.text(), &answer, FINE)),
        Command::Keeper { asked } => keeper::run(asked, me),
        Command::Doctor { path } => {
            let report = Report::new(&examine(&path)?, host());
            let exit_code = if report.is_usable() { FINE } else { FOUND };
            Ok(outcome(report.text(), &report, exit_code))
        }
    }
}

fn watch_command(asked: &Watching, is_json: bool, timeout: &Timeout) -> Result<Outcome> {
    if !asked.once {
        watch::follow(asked, is_json, timeout)?;
        return Ok(Outcome { text: String::new(), json: String::new(), exit_code: FINE });
    }
    let firing = watch::once(asked, timeout)?;
    Ok(outcome(firing.text(), &firing, firing.exit_code()))
}

/// Prints rows for other programs.
fn csv_command(url: &str, step: Option<u64>, timeout: &Timeout) -> Result<Outcome> {
    let text = shardfast_telemetry::csv(url, step, timeout)?;
    Ok(Outcome { text, json: String::new(), exit_code: FINE })
}

/// Writes a trace for Perfetto.
fn trace_command(url: &str, step: Option<u64>, out: &Path, timeout: &Timeout) -> Result<Outcome> {
    let (report, bytes): (RunReport, u64) = shardfast_telemetry::trace(url, step, out, timeout)?;
    Ok(outcome(report::text(&report) + &wrote(out, bytes), &report, FINE))
}

fn report_command(
    url: &str,
    step: Option<u64>,
    storage: Option<&str>,
    out: Option<PathBuf>,
    mtbf_s: Option<f64>,
    timeout: &Timeout,
) -> Result<Outcome> {
    let complete = |report: &mut RunReport| _ = mtbf_s.map(|mtbf_s| wasted::add(report, mtbf_s));
    let (report, page_bytes) = shardfast_telemetry::report(url, step, storage, &complete, out.as_deref(), timeout)?;
    let written = out.zip(page_bytes).map(|(out, bytes)| wrote(&out, bytes as u64));
    Ok(outcome(report::text(&report) + &wasted::line(&report) + &written.unwrap_or_default(), &report, FINE))
}

fn wrote(path: &Path, bytes: u64) -> String {
    format!("wrote {} ({})\n", plain(&path.to_string_lossy()), size(bytes))
}

fn verify_command(url: &str, all: bool, stored: bool, timeout: &Timeout) -> Result<Outcome> {
    let verify = if stored { verify_stored } else { verify };
    let (mut text, urls) = if all {
        (String::new(), locate_all(url, timeout)?)
    } else {
        let located = locate(url, timeout)?;
        (describe::located(&located), vec![located.url])
    };
    let engine = Engine::waiting(timeout.clone());
    let (mut checkpoints, mut left) = (Vec::with_capacity(urls.len()), Vec::new());
    // What it was found to lack may be what retention has deleted meanwhile.
    let has_left = |at: &String| -> Result<bool> { Ok(all && !locate_all(url, timeout)?.contains(at)) };
    for at in &urls {
        let progress = Progress::new("verified");
        let report: Result<VerifyReport> = verify(&engine, at, &|done, total| progress.show(done, total));
        drop(progress);
        if !report.as_ref().is_ok_and(VerifyReport::is_sound) && has_left(at)? {
            text += &format!("{}: it left the run while it was verified\n", plain(at));
            left.push(at.clone());
            continue;
        }
        let report = report?;
        text += &describe::report(&report);
        checkpoints.push(report);
    }
    let sound = checkpoints.iter().all(VerifyReport::is_sound);
    Ok(outcome(text, &Verified { sound, checkpoints, left }, if sound { FINE } else { FOUND }))
}

fn opened(url: &str, timeout: &Timeout) -> Result<(Located, Checkpoint)> {
    let located = locate(url, timeout)?;
    let engine: Arc<Engine> = Engine::waiting(timeout.clone());
    let checkpoint = open(&engine, &located.url, timeout.clone())?;
    Ok((located, checkpoint))
}

#[derive(Serialize)]
struct Inspected<'a> {
    run: &'a Option<String>,
    passed_over: &'a [u64],
    #[serde(flatten)]
    summary: Summary,
}

#[derive(Serialize)]
struct Verified {
    sound: bool,
    checkpoints: Vec<VerifyReport>,
    /// Checkpoints of a run that left it while they were verified.
    left: Vec<String>,
}

#[derive(Serialize)]
struct Export<'a> {
    checkpoint: &'a str,
    #[serde(flatten)]
    exported: &'a Exported,
}

#[derive(Serialize)]
struct Pinned<'a> {
    url: &'a str,
    pinned: bool,
    changed: bool,
}

#[derive(Serialize)]
struct Sweeping<'a> {
    dry_run: bool,
    #[serde(flatten)]
    swept: &'a Swept,
}

/// A progress line on standard error, overwritten each time, if that is a terminal.
struct Progress {
    verb: &'static str,
    /// Format of the count.
    unit: fn(u64) -> String,
    is_shown: bool,
    /// Thousandths done when the line was last written, and one more; 0 before that.
    last: AtomicU64,
}

impl Progress {
    /// Makes the progress of a count of bytes.
    fn new(verb: &'static str) -> Progress {
        Progress::of(verb, size)
    }

    fn of(verb: &'static str, unit: fn(u64) -> String) -> Progress {
        Progress { verb, unit, is_shown: std::io::stderr().is_terminal(), last: AtomicU64::new(0) }
    }

    fn show(&self, done: u64, total: u64) {
        let thousandths = (done as f64 / total.max(1) as f64 * 1000.0) as u64;
        // Threads may come in another order than the counts that they bring: a line never goes back.
        let mut stderr = std::io::stderr().lock();
        if self.is_shown && self.advances(thousandths) {
            let bar = bar(done as f64 / total.max(1) as f64, BAR_CELLS);
            let _ = write!(stderr, "\r\x1b[K{} {bar} {} of {}", self.verb, (self.unit)(done), (self.unit)(total));
            let _ = stderr.flush();
        }
    }

    /// Returns whether more is done than ever before.
    fn advances(&self, thousandths: u64) -> bool {
        self.last.fetch_max(thousandths + 1, Ordering::Relaxed) < thousandths + 1
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown && self.last.load(Ordering::Relaxed) > 0 {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_progress_never_goes_back() {
        let progress = Progress::new("verified");
        let shown = [0, 3, 1000, 998, 1000].map(|thousandths| progress.advances(thousandths));
        assert_eq!(shown, [true, true, true, false, false]);
    }
}
