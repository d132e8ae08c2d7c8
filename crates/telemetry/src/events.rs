//! Appends the events of operations that have ended to a file, one JSON object in a line.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use serde::Serialize;

use crate::Operation;
use crate::live::redacted;
use crate::object::word;
use crate::record::{Entry, What};

/// A file of events.
pub(crate) struct Lines {
    path: OsString,
}

/// One event, as a line says it.
#[derive(Serialize)]
struct Line<'a> {
    operation: &'static str,
    url: &'a str,
    rank: u32,
    began_unix_ms: u64,
    event: &'static str,
    at_ms: f64,
    #[serde(skip_serializing_if = "is_zero")]
    took_ms: f64,
    #[serde(skip_serializing_if = "is_empty")]
    object: Cow<'a, str>,
    #[serde(skip_serializing_if = "is_none")]
    offset: u64,
    #[serde(skip_serializing_if = "is_none")]
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u16>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<usize>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes fields by reference
fn is_none(number: &u64) -> bool {
    *number == 0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes fields by reference
fn is_zero(ms: &f64) -> bool {
    *ms == 0.0
}

impl Lines {
    pub(crate) fn new(path: OsString) -> Lines {
        Lines { path }
    }

    /// Appends all events of an operation in one write, so that those of several processes do not mix. What cannot be
    /// written is left out: no operation fails for it.
    pub(crate) fn append(&self, operation: &Operation) {
        let (entries, left_out) = operation.running.record.entries();
        let mut text = Vec::new();
        for entry in entries {
            let line = line(operation, entry, left_out);
            if serde_json::to_writer(&mut text, &line).is_ok() {
                text.push(b'\n');
            }
        }
        // A pipe that nobody reads must hold nothing up.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().create(true).append(true).custom_flags(flags).open(&self.path);
        let _ = file.and_then(|mut file| file.write_all(&text));
    }
}

fn line<'a>(operation: &'a Operation, entry: &'a Entry, left_out: usize) -> Line<'a> {
    let is_outcome = matches!(entry.what, What::Outcome);
    Line {
        operation: word(operation.running.verb),
        url: &operation.running.url,
        rank: operation.rank,
        began_unix_ms: operation.running.began_unix_ms,
        event: entry.what.word(),
        at_ms: ms(entry.at),
        took_ms: ms(entry.took),
        object: match entry.what {
            What::Failed { .. } => Cow::Owned(redacted(entry.object.as_str())),
            _ => Cow::Borrowed(entry.object.as_str()),
        },
        offset: entry.offset,
        bytes: entry.bytes,
        attempt: entry.what.attempt(),
        failed: entry.has_failed && !entry.is_missing,
        failure: operation.running.record.failure().filter(|_| is_outcome).map(redacted),
        left_out: (is_outcome && left_out > 0).then_some(left_out),
    }
}

#[allow(clippy::ptr_arg)] // serde passes fields by reference
fn is_empty(text: &Cow<'_, str>) -> bool {
    text.is_empty()
}

/// Milliseconds, to a microsecond.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
