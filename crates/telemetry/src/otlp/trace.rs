//! Puts a save or load of one rank into a trace, which is the same one on all ranks.

use std::sync::Arc;
use std::time::Duration;

use shardfast_format::sha256;

use super::message::{
    Event, KeyValue, Resource, ResourceSpans, ScopeSpans, Span, Status, TraceRequest, nanos, number, scope, text,
};
use crate::digest::Place;
use crate::live::{Running, redacted};
use crate::object::word;
use crate::record::{Entry, What};
use crate::verdicts::phases_of;

/// Kinds of spans: of the process itself, and requests to others.
const INTERNAL: i32 = 1;
const CLIENT: i32 = 3;

/// Status of what has failed.
const FAILED: i32 = 2;

/// A save or load that has ended on this rank.
pub(crate) struct Ended {
    pub(crate) running: Arc<Running>,
    pub(crate) place: Place,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Name of the ranks' meeting, and the number of the operation among theirs if they met in it.
    pub(crate) meeting: [u8; 16],
    pub(crate) number: Option<u64>,
}

/// Numbers of a trace's spans.
struct Ids {
    trace: [u8; 16],
    rank: u32,
}

impl Ids {
    /// Returns those of an operation; ranks that met in it have one trace.
    fn of(ended: &Ended) -> Ids {
        let own = ended.running.began_unix_ms ^ u64::from(ended.rank) << 48;
        let name = ended.number.map_or([1].into_iter().chain(own.to_le_bytes()).collect::<Vec<u8>>(), |number| {
            [0].into_iter().chain(number.to_le_bytes()).collect()
        });
        let digest = sha256(&[ended.meeting.as_slice(), &name].concat());
        let mut trace = [0; 16];
        trace.copy_from_slice(&digest[..16]);
        Ids { trace, rank: ended.rank }
    }

    /// Returns the number of a span: 0 for the operation as a whole, 1 for this rank's part in it.
    fn span(&self, number: u64) -> Vec<u8> {
        let rank = if number == 0 { 0 } else { self.rank };
        sha256(&[self.trace.as_slice(), &rank.to_le_bytes(), &number.to_le_bytes()].concat())[..8].to_vec()
    }
}

/// Returns the request that tells a save or load of this rank: a span of it, below it one of each phase and of each
/// operation at the storage. Rank 0 tells the one above those of all ranks, too.
pub(crate) fn request(ended: &Ended, resource: Resource) -> TraceRequest {
    let (ids, running) = (Ids::of(ended), &ended.running);
    let began = Duration::from_millis(running.began_unix_ms);
    let (entries, left_out) = running.record.entries();
    let entries: Vec<&Entry> = entries.collect();
    let outcome = entries.iter().find(|entry| matches!(entry.what, What::Outcome));
    let end = outcome
        .map_or_else(|| entries.iter().map(|entry| entry.at + entry.took).max().unwrap_or_default(), |one| one.at);
    let failure = running.record.failure();
    let span = |number: u64, parent: Option<u64>, name: String, from: Duration, to: Duration| Span {
        trace_id: ids.trace.to_vec(),
        span_id: ids.span(number),
        parent_span_id: parent.map(|parent| ids.span(parent)).unwrap_or_default(),
        name,
        kind: INTERNAL,
        start_time_unix_nano: nanos(began + from),
        end_time_unix_nano: nanos(began + to.max(from)),
        status: None,
        ..Span::default()
    };
    let failed = |failure: &str| Some(Status { message: redacted(failure), code: FAILED });
    let whole = format!("{}{}", word(running.verb), running.step.map(|step| format!(" {step}")).unwrap_or_default());
    let attributes = |all: bool| {
        let mut attributes = vec![text("shardfast.url", running.url.as_str())];
        attributes.extend(running.step.map(|step| number("shardfast.step", step)));
        attributes.push(number("shardfast.world", u64::from(ended.world)));
        if !all {
            attributes.push(number("shardfast.rank", u64::from(ended.rank)));
            attributes.push(text("host.name", ended.place.machine.as_str()));
            let coordinates = ended.place.coordinates.iter();
            attributes.extend(coordinates.map(|(name, at)| number(&format!("shardfast.mesh.{name}"), u64::from(*at))));
        }
        attributes
    };
    let mut spans = Vec::with_capacity(entries.len() + 2);
    if ended.rank == 0 {
        let status = failure.and_then(failed);
        spans.push(Span { attributes: attributes(true), status, ..span(0, None, whole.clone(), Duration::ZERO, end) });
    }
    let events = entries.iter().filter_map(|entry| event(entry, began)).collect();
    spans.push(Span {
        attributes: attributes(false),
        events,
        dropped_events_count: u32::try_from(left_out).unwrap_or(u32::MAX),
        status: failure.and_then(failed),
        ..span(1, Some(0), format!("{whole} rank {}", ended.rank), Duration::ZERO, end)
    });
    let over = |phase| {
        let is_it = |entry: &&&Entry| matches!(entry.what, What::Phase(found) if found == phase && !entry.has_failed);
        entries.iter().find(is_it).map(|entry| entry.at)
    };
    for (index, (name, from, to)) in (2..).zip(phases_of(running.verb)) {
        if let Some(to) = over(*to) {
            let from = from.iter().find_map(|&phase| over(phase)).unwrap_or_default();
            spans.push(span(index, Some(1), (*name).to_owned(), from, to));
        }
    }
    for (index, entry) in (100..).zip(&entries) {
        if let What::Operation(action) = entry.what {
            let name = format!("storage {}", action.word());
            let one = span(index, Some(1), name, entry.at, entry.at + entry.took);
            let status = (entry.has_failed && !entry.is_missing).then(|| Status { code: FAILED, ..Status::default() });
            spans.push(Span { kind: CLIENT, attributes: operation(entry), status, ..one });
        }
    }
    let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans }];
    TraceRequest { resource_spans: vec![ResourceSpans { resource: Some(resource), scope_spans }] }
}

fn operation(entry: &Entry) -> Vec<KeyValue> {
    vec![
        text("shardfast.object", entry.object.as_str()),
        number("shardfast.offset", entry.offset),
        number("shardfast.bytes", entry.bytes),
    ]
}

/// Returns a failure that was tried again, or not, as an event of the rank's span.
fn event(entry: &Entry, began: Duration) -> Option<Event> {
    let What::Failed { attempt, is_final } = entry.what else { return None };
    Some(Event {
        time_unix_nano: nanos(began + entry.at),
        name: if is_final { "gave_up" } else { "retry" }.to_owned(),
        attributes: vec![
            text("shardfast.failure", redacted(entry.object.as_str())),
            number("shardfast.attempt", u64::from(attempt)),
            number("shardfast.pause_ms", u64::try_from(entry.took.as_millis()).unwrap_or(u64::MAX)),
        ],
    })
}
