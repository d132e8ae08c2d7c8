//! What happened, and when: lines that a run of the same seed repeats word for word.

use std::time::Duration;

use shardfast_coord::node::{Downward, FromChild, FromParent, Part, Upward};
use shardfast_format::sha256;

/// The lines of a run.
#[derive(Default)]
pub(crate) struct Journal(Vec<String>);

impl Journal {
    pub(crate) fn note(&mut self, now: Duration, text: impl FnOnce() -> String) {
        self.0.push(format!("{:12.6} s  {}", now.as_secs_f64(), without_chance(&text())));
    }

    pub(crate) fn headline(&mut self, text: String) {
        self.0.push(text);
    }

    pub(crate) fn digest(&self) -> [u8; 32] {
        sha256(self.0.join("\n").as_bytes())
    }

    pub(crate) fn into_lines(self) -> Vec<String> {
        self.0
    }
}

/// Without what differs between runs: temporary files have names from the system's random numbers; how far a rank's
/// part of a save had come when one of its threads failed is up to its other threads, as is which part of an object
/// fails first if all of them fail.
fn without_chance(text: &str) -> String {
    let text = ["planned, not yet captured", "captured, not yet staged", "staged, not yet durable"]
        .iter()
        .fold(text.to_owned(), |text, stage| text.replace(&format!(" (its part was {stage})"), ""));
    let without = |text: String, name: &str, number: fn(char) -> bool| {
        let mut parts = text.split(name);
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |known, rest| known + name + rest.trim_start_matches(number))
    };
    let text = without(text, ".tmp-", |c| c.is_ascii_hexdigit());
    without(text, ": part ", |c| c.is_ascii_digit())
}

pub(crate) fn of_upward(message: &Upward) -> String {
    let number = message.number;
    match &message.word {
        FromChild::Part(Part { topic, report, .. }) => {
            let what = if report.payloads.is_some() {
                "all of it".to_owned()
            } else {
                format!("failures, or missing {:?}", report.missing)
            };
            format!("#{number} part of {topic:?}, {what}")
        }
        FromChild::Lost { rank, .. } => format!("#{number} rank {rank} is lost"),
        FromChild::Overdue { topic } => format!("#{number} {topic:?} is overdue"),
        FromChild::Asks { .. } => "do you live?".to_owned(),
        FromChild::Lives => "it lives".to_owned(),
    }
}

pub(crate) fn of_downward(message: &Downward) -> String {
    let number = message.number;
    match &message.word {
        FromParent::Close { topic } => format!("#{number} close {topic:?}"),
        FromParent::Answer { topic, .. } => format!("#{number} answers on {topic:?}"),
        FromParent::Failed { topic, error } => format!("#{number} {topic:?} failed: {error}"),
        FromParent::OutcomeUnknown { topic, rank } => {
            format!("#{number} the outcome of {topic:?} is unknown: rank {rank} is silent")
        }
        FromParent::Lost { rank, .. } => format!("#{number} rank {rank} is lost"),
        FromParent::Asks { .. } => "do you live?".to_owned(),
        FromParent::Lives => "it lives".to_owned(),
    }
}
