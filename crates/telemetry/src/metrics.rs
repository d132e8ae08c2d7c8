//! Writes the sums of a process as Prometheus reads them: [text format 0.0.4].
//!
//! [text format 0.0.4]: https://prometheus.io/docs/instrumenting/exposition_formats/

use std::fmt::Write;

use shardfast_engine::listen::Verb;
use shardfast_transfer::events::Phase;

use crate::WRITER;
use crate::live::{Live, OfVerb, Totals};
use crate::object::word;
use crate::record::{BOUNDS_US, Class};

/// Type of the text, as HTTP names it.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Text of metrics, family by family.
struct Text {
    out: String,
    rank: u32,
}

impl Text {
    /// Begins a family: all samples that follow have its name, or its name and an ending.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP shardfast_{name} {help}\n# TYPE shardfast_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.out, "shardfast_{name}{{rank=\"{}\"", self.rank);
        for (label, text) in labels {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.out, ",{label}=\"{text}\"");
        }
        let _ = writeln!(self.out, "}} {value}");
    }

    /// Writes a family with one sample for each kind of operation.
    fn by_verb(&mut self, name: &str, kind: &str, help: &str, of: impl Fn(usize) -> Option<f64>) {
        self.family(name, kind, help);
        for verb in [Verb::Save, Verb::Load] {
            if let Some(value) = of(verb as usize) {
                self.sample(name, &[("operation", word(verb))], value);
            }
        }
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}

/// Returns the metrics of this process.
pub(crate) fn text(live: &Live) -> String {
    let totals = live.totals();
    let mut text = Text { out: String::new(), rank: live.rank };
    text.family("info", "gauge", "Always 1; its labels say who tells.");
    let world = live.world.to_string();
    text.sample("info", &[("world", &world), ("machine", &live.place.machine), ("version", WRITER)], 1.0);
    operations(&mut text, &totals);
    last(&mut text, &totals);
    storage(&mut text, &totals);
    text.out
}

fn operations(text: &mut Text, totals: &Totals) {
    let of = |value: fn(&OfVerb) -> f64| move |verb: usize| Some(value(&totals.verbs[verb]));
    text.by_verb("running", "gauge", "Saves and loads that have not ended.", of(|of| of.running as f64));
    text.family("operations_total", "counter", "Saves and loads that have ended, by outcome.");
    for verb in [Verb::Save, Verb::Load] {
        let of = &totals.verbs[verb as usize];
        for (outcome, count) in [("succeeded", of.succeeded), ("failed", of.failed)] {
            text.sample("operations_total", &[("operation", word(verb)), ("outcome", outcome)], count as f64);
        }
    }
    text.by_verb("bytes_total", "counter", "Bytes that ended saves and loads copied.", of(|of| of.bytes as f64));
    text.family("running_bytes", "gauge", "Bytes of running saves and loads: expected in all, copied, stored.");
    for verb in [Verb::Save, Verb::Load] {
        for (state, bytes) in ["all", "copied", "stored"].into_iter().zip(totals.verbs[verb as usize].now) {
            text.sample("running_bytes", &[("operation", word(verb)), ("state", state)], bytes as f64);
        }
    }
    text.family("phase_seconds", "summary", "Time from the request until a phase was over.");
    for verb in [Verb::Save, Verb::Load] {
        for (phase, (count, seconds)) in Phase::ALL.into_iter().zip(totals.verbs[verb as usize].phases) {
            if count > 0 {
                let labels = [("operation", word(verb)), ("phase", phase.word())];
                text.sample("phase_seconds_sum", &labels, seconds);
                text.sample("phase_seconds_count", &labels, count as f64);
            }
        }
    }
}

/// Writes facts of the last save and load that succeeded.
fn last(text: &mut Text, totals: &Totals) {
    let last = |verb: usize| totals.verbs[verb].last.as_ref();
    let step = |verb: usize| Some(last(verb)?.step? as f64);
    text.by_verb("last_step", "gauge", "Training step of the last one that succeeded.", step);
    let ended = |verb: usize| last(verb).map(|last| (last.began_unix_ms as f64 + last.ended_ms) / 1e3);
    text.by_verb("last_timestamp_seconds", "gauge", "Time when the last one succeeded, since 1970.", ended);
    let took = |verb: usize| last(verb).map(|last| last.ended_ms / 1e3);
    text.by_verb("last_seconds", "gauge", "Time from the request to the success of the last one.", took);
    let bytes = |verb: usize| last(verb).map(|last| last.bytes as f64);
    text.by_verb("last_bytes", "gauge", "Bytes that this rank copied in the last one.", bytes);
    text.family("last_staged_seconds", "gauge", "Time until the state could change, in the last save.");
    if let Some(ms) = totals.verbs[0].last.as_ref().and_then(|last| last.staged_ms) {
        text.sample("last_staged_seconds", &[("operation", "save")], ms / 1e3);
    }
}

fn storage(text: &mut Text, totals: &Totals) {
    text.family("storage_seconds", "histogram", "Duration of operations at the storage, by kind.");
    for (class, of) in Class::ALL.into_iter().zip(&totals.classes) {
        let mut below = 0;
        for (index, count) in of.by_duration.into_iter().enumerate() {
            below += count;
            let bound = BOUNDS_US.get(index).map_or_else(|| "+Inf".to_owned(), |&us| (us as f64 / 1e6).to_string());
            text.sample("storage_seconds_bucket", &[("kind", class.words()), ("le", &bound)], below as f64);
        }
        text.sample("storage_seconds_sum", &[("kind", class.words())], of.busy.as_secs_f64());
        text.sample("storage_seconds_count", &[("kind", class.words())], below as f64);
    }
    text.family("storage_bytes_total", "counter", "Bytes that operations at the storage moved.");
    for (class, of) in Class::ALL.into_iter().zip(&totals.classes) {
        text.sample("storage_bytes_total", &[("kind", class.words())], of.bytes as f64);
    }
    text.one("storage_failures_total", "counter", "Failures of the storage.", totals.failures as f64);
    let paused = totals.paused.as_secs_f64();
    text.one("storage_pause_seconds_total", "counter", "Pauses before what failed was tried again.", paused);
    text.one("events_left_out_total", "counter", "Events that were counted and not kept.", totals.left_out as f64);
}
