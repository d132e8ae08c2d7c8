//! Watches a run or a job, and prints each alert that fires or is resolved.

use std::io::{self, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use shardfast_engine::{Error, Kind, Result, Timeout};
use shardfast_telemetry::{Alert, Change, Rules, Watcher};

use crate::args::Watching;
use crate::text::{date, plain};
use crate::{FINE, FOUND};

/// Time after which a command that was run for an alert is ended.
const COMMAND_MAX: Duration = Duration::from_secs(10);

/// Time between two looks at a command that runs.
const GLANCE: Duration = Duration::from_millis(10);

/// Alerts that fire, as one look found them.
#[derive(Debug, Serialize)]
pub(crate) struct Firing {
    url: String,
    alerts: Vec<Alert>,
}

impl Firing {
    /// Returns a line for each alert.
    pub(crate) fn text(&self) -> String {
        self.alerts.iter().map(|alert| format!("{}\n", said("firing", alert))).collect()
    }

    pub(crate) fn exit_code(&self) -> i32 {
        if self.alerts.is_empty() { FINE } else { FOUND }
    }
}

/// A change as a line of JSON says it.
#[derive(Serialize)]
struct Line<'a> {
    unix_ms: u64,
    #[serde(flatten)]
    change: &'a Change,
}

/// Looks once, and runs the command for each alert that fires.
pub(crate) fn once(asked: &Watching, timeout: &Timeout) -> Result<Firing> {
    let mut watcher = Watcher::new(&asked.url, rules(asked), timeout)?;
    for change in watcher.look(timeout)? {
        run(asked, &change);
    }
    Ok(Firing { url: asked.url.clone(), alerts: watcher.firing() })
}

/// Looks again and again, and prints a line for each alert that fires or is resolved. Returns when the output's reader
/// has closed it.
///
/// # Errors
/// Those of the first look, but for a run that is not there yet; a later one that fails is said once on standard error,
/// and tried again.
pub(crate) fn follow(asked: &Watching, is_json: bool, timeout: &Timeout) -> Result<()> {
    let mut watcher = Watcher::new(&asked.url, rules(asked), timeout)?;
    let (mut changes, mut problem) = match watcher.look(timeout) {
        Ok(changes) => (changes, None),
        // The job may not have saved yet.
        Err(error) if error.kind == Kind::NotFound => {
            warn(&format!("{}: {}: waiting for it", error.kind.name(), plain(&error.message)));
            (Vec::new(), Some(error.message))
        }
        Err(error) => return Err(error),
    };
    loop {
        for change in &changes {
            match print(change, is_json) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => {
                    return Err(Error::new(Kind::Unavailable, format!("the output cannot be written: {error}")));
                }
                Ok(()) => run(asked, change),
            }
        }
        std::thread::sleep(Duration::from_secs_f64(asked.every));
        // A timeout is one of a call: each look has its own.
        match watcher.look(&Timeout::of_call(timeout.within())) {
            Ok(found) => (changes, problem) = (found, None),
            Err(error) => {
                changes = Vec::new();
                if problem.as_ref() != Some(&error.message) {
                    warn(&format!("{}: {}", error.kind.name(), plain(&error.message)));
                }
                problem = Some(error.message);
            }
        }
    }
}

fn rules(asked: &Watching) -> Rules {
    let stall_ms = asked.stall.map(|seconds| seconds * 1e3);
    Rules { rate: asked.rate, stall_ms, overdue: asked.overdue, slow: asked.slow, room: asked.room }
}

fn said(state: &str, alert: &Alert) -> String {
    let step = alert.step.map_or_else(String::new, |step| format!("step {step}: "));
    format!("{state} {}: {step}{}", alert.rule, plain(&alert.text))
}

fn print(change: &Change, is_json: bool) -> io::Result<()> {
    let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    let line = match is_json {
        true => serde_json::to_string(&Line { unix_ms, change })?,
        false => format!("{} {}", date(unix_ms), said(change.state, &change.alert)),
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Runs the command for a change. It gets the change in its environment and has [`COMMAND_MAX`]; its failure is said.
fn run(asked: &Watching, change: &Change) {
    let Some(command) = &asked.exec else { return };
    let Change { state, alert } = change;
    let step = alert.step.map_or_else(String::new, |step| step.to_string());
    let started = Command::new("sh")
        .args(["-c", command])
        .env("SHARDFAST_ALERT", alert.rule)
        .env("SHARDFAST_ALERT_STATE", state)
        .env("SHARDFAST_ALERT_SUBJECT", &*plain(&alert.subject))
        .env("SHARDFAST_ALERT_STEP", step)
        .env("SHARDFAST_ALERT_TEXT", &*plain(&alert.text))
        .env("SHARDFAST_ALERT_RUN", &asked.url)
        .stdin(Stdio::null())
        // The output is this program's own.
        .stdout(io::stderr())
        .process_group(0)
        .spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) => return warn(&format!("the command of --exec cannot be run: {error}")),
    };
    let until = Instant::now() + COMMAND_MAX;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return,
            Ok(Some(status)) => return warn(&format!("the command of --exec failed: {status}")),
            Err(error) => return warn(&format!("the command of --exec cannot be waited for: {error}")),
            Ok(None) if Instant::now() < until => std::thread::sleep(GLANCE),
            Ok(None) => {
                // What the shell has started is in its group, too.
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
                let _ = child.wait();
                return warn(&format!(
                    "the command of --exec took more than {} s: it was ended",
                    COMMAND_MAX.as_secs()
                ));
            }
        }
    }
}

fn warn(message: &str) {
    let _ = writeln!(io::stderr(), "shardfast: {message}");
}
