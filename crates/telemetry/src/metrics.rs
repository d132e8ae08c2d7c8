//! Puts the sums of a process into families of metrics, and writes these as Prometheus reads them: [text format 0.0.4].
//!
//! [text format 0.0.4]: https://prometheus.io/docs/instrumenting/exposition_formats/

use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use shardfast_engine::listen::Verb;
use shardfast_transfer::events::Phase;

use crate::WRITER;
use crate::live::{Live, OfVerb, Totals};
use crate::object::word;
use crate::record::{BOUNDS_US, Class};

/// Type of the text, as HTTP names it.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Kind of a family, as Prometheus names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Summary,
    Histogram,
}

/// Metrics of one name.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) help: &'static str,
    pub(crate) samples: Vec<Sample>,
}

/// Labels and a value.
pub(crate) struct Sample {
    pub(crate) labels: Vec<(&'static str, String)>,
    pub(crate) value: Value,
}

/// Value of a sample.
pub(crate) enum Value {
    Number(f64),
    /// Number of observations, and their sum.
    Summary(u64, f64),
    /// Number of observations in each class of [`BOUNDS_US`], and the sum of all in seconds.
    Histogram(Vec<u64>, f64),
}

impl Family {
    fn new(name: &'static str, kind: Kind, help: &'static str) -> Family {
        Family { name, kind, help, samples: Vec::new() }
    }

    fn sample(mut self, labels: &[(&'static str, &str)], value: Value) -> Family {
        let labels = labels.iter().map(|&(label, text)| (label, text.to_owned())).collect();
        self.samples.push(Sample { labels, value });
        self
    }

    fn number(self, labels: &[(&'static str, &str)], value: f64) -> Family {
        self.sample(labels, Value::Number(value))
    }

    /// Adds a sample for each kind of operation that has a value.
    fn by_verb(self, of: impl Fn(usize) -> Option<f64>) -> Family {
        [Verb::Save, Verb::Load].into_iter().fold(self, |family, verb| match of(verb as usize) {
            Some(value) => family.number(&[("operation", word(verb))], value),
            None => family,
        })
    }
}

/// Returns the metrics of this process. Labels of all are the rank's, which is left out here.
pub(crate) fn families(live: &Live) -> Vec<Family> {
    let totals = live.totals();
    let world = live.world.to_string();
    let labels = [("world", world.as_str()), ("machine", &live.place.machine), ("version", WRITER)];
    let info = Family::new("info", Kind::Gauge, "Always 1; its labels say who tells.").number(&labels, 1.0);
    let mut families = vec![info];
    families.extend(operations(&totals));
    families.extend(last(&totals));
    families.extend(storage(&totals));
    let left_out = Family::new("export_left_out_total", Kind::Counter, "Traces that could not be exported.");
    families.push(left_out.number(&[], live.not_exported.load(Relaxed) as f64));
    families
}

fn operations(totals: &Totals) -> Vec<Family> {
    use Kind::{Counter, Gauge, Summary};
    let of = |value: fn(&OfVerb) -> f64| move |verb: usize| Some(value(&totals.verbs[verb]));
    let mut ended = Family::new("operations_total", Counter, "Saves and loads that have ended, by outcome.");
    let mut moving =
        Family::new("running_bytes", Gauge, "Bytes of running saves and loads: expected in all, copied, stored.");
    let mut phases = Family::new("phase_seconds", Summary, "Time from the request until a phase was over.");
    for verb in [Verb::Save, Verb::Load] {
        let (of, operation) = (&totals.verbs[verb as usize], ("operation", word(verb)));
        for (outcome, count) in [("succeeded", of.succeeded), ("failed", of.failed)] {
            ended = ended.number(&[operation, ("outcome", outcome)], count as f64);
        }
        for (state, bytes) in ["all", "copied", "stored"].into_iter().zip(of.now) {
            moving = moving.number(&[operation, ("state", state)], bytes as f64);
        }
        for (phase, (count, seconds)) in Phase::ALL.into_iter().zip(of.phases).filter(|(_, (count, _))| *count > 0) {
            phases = phases.sample(&[operation, ("phase", phase.word())], Value::Summary(count, seconds));
        }
    }
    vec![
        Family::new("running", Gauge, "Saves and loads that have not ended.").by_verb(of(|of| of.running as f64)),
        ended,
        Family::new("bytes_total", Counter, "Bytes that ended saves and loads copied.")
            .by_verb(of(|of| of.bytes as f64)),
        moving,
        phases,
    ]
}

/// Returns facts of the last save and load that succeeded.
fn last(totals: &Totals) -> Vec<Family> {
    let last = |verb: usize| totals.verbs[verb].last.as_ref();
    let gauge = |name, help| Family::new(name, Kind::Gauge, help);
    vec![
        gauge("last_step", "Training step of the last one that succeeded.")
            .by_verb(|verb| Some(last(verb)?.step? as f64)),
        gauge("last_timestamp_seconds", "Time when the last one succeeded, since 1970.")
            .by_verb(|verb| last(verb).map(|last| (last.began_unix_ms as f64 + last.ended_ms) / 1e3)),
        gauge("last_seconds", "Time from the request to the success of the last one.")
            .by_verb(|verb| last(verb).map(|last| last.ended_ms / 1e3)),
        gauge("last_bytes", "Bytes that this rank copied in the last one.")
            .by_verb(|verb| last(verb).map(|last| last.bytes as f64)),
        gauge("last_staged_seconds", "Time until the state could change, in the last save.")
            .by_verb(|verb| last(verb)?.staged_ms.map(|ms| ms / 1e3)),
        gauge("last_all_bytes", "Bytes that all ranks wrote in the last save of which rank 0 knows it.")
            .by_verb(|verb| totals.all_bytes.filter(|_| verb == Verb::Save as usize).map(|bytes| bytes as f64)),
        (totals.free_bytes.into_iter()).fold(
            gauge("storage_free_bytes", "Bytes that the storage could still take after that save."),
            |family, bytes| family.number(&[], bytes as f64),
        ),
    ]
}

fn storage(totals: &Totals) -> Vec<Family> {
    let mut times = Family::new("storage_seconds", Kind::Histogram, "Duration of operations at the storage, by kind.");
    let mut moved = Family::new("storage_bytes_total", Kind::Counter, "Bytes that operations at the storage moved.");
    for (class, of) in Class::ALL.into_iter().zip(&totals.classes) {
        let kind = [("kind", class.words())];
        times = times.sample(&kind, Value::Histogram(of.by_duration.to_vec(), of.busy.as_secs_f64()));
        moved = moved.number(&kind, of.bytes as f64);
    }
    let counter = |name, help, value| Family::new(name, Kind::Counter, help).number(&[], value);
    let paused = totals.paused.as_secs_f64();
    vec![
        times,
        moved,
        counter("storage_failures_total", "Failures of the storage.", totals.failures as f64),
        counter("storage_pause_seconds_total", "Pauses before what failed was tried again.", paused),
        counter("events_left_out_total", "Events that were counted and not kept.", totals.left_out as f64),
    ]
}

/// Returns the metrics of this process as Prometheus reads them.
pub(crate) fn text(live: &Live) -> String {
    let mut out = String::new();
    for Family { name, kind, help, samples } in families(live) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Summary => "summary",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(out, "# HELP shardfast_{name} {help}\n# TYPE shardfast_{name} {kind}");
        for Sample { labels, value } in samples {
            let mut one = |ending: &str, bound: Option<&str>, value: f64| {
                let _ = write!(out, "shardfast_{name}{ending}{{rank=\"{}\"", live.rank);
                let labels = labels.iter().map(|(label, text)| (*label, text.as_str()));
                for (label, text) in labels.chain(bound.map(|bound| ("le", bound))) {
                    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                    let _ = write!(out, ",{label}=\"{text}\"");
                }
                let _ = writeln!(out, "}} {value}");
            };
            match value {
                Value::Number(value) => one("", None, value),
                Value::Summary(count, sum) => {
                    one("_sum", None, sum);
                    one("_count", None, count as f64);
                }
                Value::Histogram(counts, sum) => {
                    let mut below = 0;
                    for (index, count) in counts.into_iter().enumerate() {
                        below += count;
                        let bound = BOUNDS_US.get(index).map_or("+Inf".to_owned(), |&us| (us as f64 / 1e6).to_string());
                        one("_bucket", Some(&bound), below as f64);
                    }
                    one("_sum", None, sum);
                    one("_count", None, below as f64);
                }
            }
        }
    }
    out
}
