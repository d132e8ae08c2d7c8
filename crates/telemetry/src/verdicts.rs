//! Says what made a save or load slow: whom it concerns, in which phase, why, and how much time it cost.
//!
//! A rank is slow in a phase if it took longer there than the median rank, by more than [`LOST_MIN`] and a share of the
//! whole operation. Ranks wait for each other when they plan and when they commit, so a slow one is found in the phase
//! where it was slow, and all others in the next wait. A rank says when its process did not run for a while: that time
//! counts for itself, and not as one of its work. Nothing is said where nothing is wrong.

use std::time::Duration;

use serde::Serialize;
use shardfast_engine::listen::Verb;
use shardfast_store::said_bytes;
use shardfast_transfer::events::Phase;

use crate::digest::{Digest, Place, Sum};
use crate::object::Collected;
use crate::record::Class;
use crate::text::head_of;

/// Least time that a verdict is about.
const LOST_MIN: Duration = Duration::from_millis(100);

/// Least share of the operation that a verdict is about.
const LOST_SHARE: f64 = 0.2;

/// Factor by which a rank must exceed the median rank.
const FACTOR: f64 = 1.5;

/// Least share of the operation that a commit, or the ends of objects one by one, must take to be called slow: a commit
/// waits for the storage a few times.
const COMMIT_SHARE: f64 = 0.4;

/// Bytes beyond those of the median rank from which a rank is said to have moved more.
const MORE_BYTES_MIN: f64 = 1e6;

/// Share of lost time from which another finding about the same ranks explains it.
const EXPLAINED: f64 = 0.8;

/// Share of the storage's failures from which the service is said to ask for fewer requests.
const THROTTLED_SHARE: f64 = 0.5;

/// Least number of small operations of a rank that are called too many.
const SMALL_MIN: u64 = 100;

/// Mean length up to which operations are called small, in bytes: a large object is read in longer ones.
const SMALL_BYTES_MAX: f64 = 256.0 * 1024.0;

/// Least number of ranks of which it can be said that the storage ended their objects one by one.
const JOINED_RANKS_MIN: usize = 4;

/// Deviation from evenly spaced ends, as a share of their spread, up to which the storage ended objects one by one.
const JOINED_SHARE: f64 = 0.1;

/// Sentence about a call that took long before its save or load could begin.
const STATE_READ: &str = "its call read the state for that long: `state_dict()` and values, or it did not run";

/// Finding about one save or load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Whom it concerns: `rank 3`, `ranks 1, 2`, `machine node-7`, `tp=1` for all ranks with that coordinate, or
    /// `all ranks`.
    pub subject: String,
    /// Place of a single rank, its machine and coordinates: `node-7, tp=1 pp=4`; `None` for other subjects.
    pub place: Option<String>,
    /// Phase in which the time was lost.
    pub phase: &'static str,
    /// Cause: `failed`, `missing`, `called_late`, `state`, `more_data`, `throttled`, `retries`, `storage`,
    /// `processor`, `peers`, `small_objects`, `serial_tail`, `staging_memory`, `held_up`.
    pub cause: &'static str,
    /// Time that was lost, in milliseconds.
    pub lost_ms: f64,
    /// A sentence with the evidence.
    pub text: String,
    /// Number of operations in a row, this one included, with the same subject and phase.
    pub in_a_row: usize,
}

/// A phase by which time is divided among ranks: its name, the phases at whose end it begins (the first that the rank
/// has ended, or the request), and the phase whose end is its own.
pub(crate) type PhaseOf = (&'static str, &'static [Phase], Phase);

/// Phases of a save.
const SAVE: [PhaseOf; 8] = [
    ("describe", &[], Phase::Described),
    ("plan", &[Phase::Described], Phase::Planned),
    ("copy", &[Phase::Described], Phase::Staged),
    ("write", &[Phase::Planned], Phase::Written),
    ("agree", &[Phase::Written], Phase::Agreed),
    ("compare", &[Phase::Agreed], Phase::Compared),
    ("values", &[Phase::Compared, Phase::Agreed, Phase::Written], Phase::Durable),
    ("commit", &[Phase::Durable], Phase::Committed),
];
/// Phases of a load.
const LOAD: [PhaseOf; 7] = [
    ("open", &[], Phase::Opened),
    ("describe", &[Phase::Opened], Phase::Described),
    ("match", &[Phase::Described, Phase::Opened], Phase::Matched),
    ("plan", &[Phase::Matched, Phase::Opened], Phase::Planned),
    ("agree", &[Phase::Planned], Phase::Agreed),
    ("read", &[Phase::Agreed], Phase::Read),
    ("finish", &[Phase::Read], Phase::Loaded),
];

/// Returns the phases of a kind of operation.
pub(crate) fn phases_of(verb: Verb) -> &'static [PhaseOf] {
    match verb {
        Verb::Save => &SAVE,
        Verb::Load => &LOAD,
    }
}

/// Begin and end of a rank in a phase, in microseconds since the request; `None` for one that has not ended it.
pub(crate) type Span = Option<(u32, u32)>;

/// Returns when each rank was in each phase of that kind of operation.
pub(crate) fn spans(collected: &Collected) -> Vec<(&'static str, Vec<Span>)> {
    let span = |said: &Option<Digest>, (_, from, to): &PhaseOf| {
        let us = |phase: Phase| said.as_ref().map(|said| said.phases_us[phase as usize]).filter(|&us| us > 0);
        let end = us(*to)?;
        Some((from.iter().find_map(|&phase| us(phase)).unwrap_or(0).min(end), end))
    };
    phases_of(collected.verb)
        .iter()
        .map(|phase| (phase.0, collected.ranks.iter().map(|said| span(said, phase)).collect()))
        .collect()
}

/// Returns the times of all ranks in each phase of that kind of operation, in milliseconds; `None` for a rank that has
/// not ended the phase.
pub(crate) fn phases(collected: &Collected) -> Vec<(&'static str, Vec<Option<f64>>)> {
    let ms = |span: Span| span.map(|(from, to)| f64::from(to - from) / 1e3);
    spans(collected).into_iter().map(|(phase, spans)| (phase, spans.into_iter().map(ms).collect())).collect()
}

/// Returns the findings about one operation, the most time first.
pub(crate) fn verdicts(collected: &Collected) -> Vec<Verdict> {
    let mut found = Vec::new();
    failed(collected, &mut found);
    let total_ms = median(collected.said().map(|rank| rank.ended_us as f64 / 1e3));
    let least_ms = (LOST_SHARE * total_ms).max(LOST_MIN.as_secs_f64() * 1e3);
    held_up(collected, least_ms, &mut found);
    let all = phases(collected);
    for (phase, times) in &all {
        let ran = ran(collected, phase);
        match *phase {
            "agree" | "match" => called_late(collected, phase, times, least_ms, &mut found),
            "open" => {
                called_late(collected, phase, times, least_ms, &mut found);
                slow_ranks(collected, phase, &ran, least_ms, &mut found);
            }
            "commit" => serial_tail(collected, times, total_ms, &mut found),
            "finish" => {}
            _ => slow_ranks(collected, phase, &ran, least_ms, &mut found),
        }
    }
    staging_memory(collected, least_ms, &mut found);
    everywhere(collected, total_ms, least_ms, &mut found);
    joined_one_by_one(collected, total_ms, &mut found);
    let is_explained: Vec<bool> = (0..found.len()).map(|at| is_explained(&found, at)).collect();
    let mut is_explained = is_explained.into_iter();
    found.retain(|_| is_explained.next() == Some(false));
    found.sort_by(|a, b| b.lost_ms.total_cmp(&a.lost_ms));
    found
}

/// Returns whether another finding says why this time was lost.
fn is_explained(found: &[Verdict], at: usize) -> bool {
    let one = &found[at];
    found.iter().enumerate().any(|(other, by)| {
        let failed = |verdict: &Verdict| matches!(verdict.cause, "failed" | "missing");
        if other == at || failed(one) || failed(by) {
            return false;
        }
        // Rank 0 also looks at each object before it commits.
        if (by.cause, one.cause) == ("small_objects", "serial_tail") {
            return true;
        }
        if by.subject != one.subject {
            return by.subject == "all ranks" && (by.phase, by.cause) == (one.phase, one.cause);
        }
        let is_enough = by.lost_ms > EXPLAINED * one.lost_ms;
        match (by.phase, one.phase) {
            // The copy is measured from the same moment on.
            ("plan", "copy") => is_enough,
            // What is written slowly is copied late if staging memory is full, and what is copied late is written late.
            ("write", "copy") => by.cause != "held_up",
            ("copy", "write") => one.cause == "held_up",
            // The others also wait for a rank that was slow before.
            _ => one.cause == "called_late" && by.cause != "called_late" && is_enough,
        }
    })
}

/// Returns the time between two moments in which a rank's process did not run, in milliseconds.
fn held_up_ms(said: &Digest, (from, to): (u32, u32)) -> f64 {
    let [began, took] = said.held_up_us;
    let (from, to) = (from.max(began), to.min(began.saturating_add(took)));
    f64::from(to.saturating_sub(from)) / 1e3
}

/// Returns the times of all ranks in a phase, without those in which their processes did not run, in milliseconds.
fn ran(collected: &Collected, phase: &str) -> Vec<Option<f64>> {
    let of = spans(collected).into_iter().find(|(name, _)| *name == phase);
    let ran = |(said, span): (&Option<Digest>, Span)| {
        let (from, to) = span?;
        Some((f64::from(to - from) / 1e3 - held_up_ms(said.as_ref()?, (from, to))).max(0.0))
    };
    collected.ranks.iter().zip(of.into_iter().flat_map(|(_, spans)| spans)).map(ran).collect()
}

/// Finds ranks whose process did not run for a while, and in which phase that was.
fn held_up(collected: &Collected, least_ms: f64, found: &mut Vec<Verdict>) {
    let spans = spans(collected);
    let mut by_phase: Vec<(&'static str, Vec<usize>)> = Vec::new();
    let ms = |rank: usize| collected.ranks[rank].as_ref().map_or(0.0, |said| f64::from(said.held_up_us[1]) / 1e3);
    for (rank, said) in collected.ranks.iter().enumerate() {
        let Some(said) = said.as_ref().filter(|_| ms(rank) > least_ms) else { continue };
        // A process that does not run ends no phase: in the middle of that time it was where it stood still.
        let middle = said.held_up_us[0].saturating_add(said.held_up_us[1] / 2);
        let is_in = |of: &Vec<Span>| of[rank].is_some_and(|(from, to)| from <= middle && middle < to);
        // A plan comes before the copy, which comes before the write beside it.
        let Some((phase, _)) = spans.iter().find(|(_, of)| is_in(of)) else { continue };
        match by_phase.iter_mut().find(|(known, _)| known == phase) {
            Some((_, ranks)) => ranks.push(rank),
            None => by_phase.push((phase, vec![rank])),
        }
    }
    for (phase, ranks) in by_phase {
        let lost_ms = ranks.iter().map(|&rank| ms(rank)).fold(0.0, f64::max);
        let why = "it was stopped, swapped out, or had no processor";
        let text = format!("the process did not run for {}: {why}", said_ms(lost_ms));
        found.push(verdict(collected, &ranks, phase, "held_up", lost_ms, text));
    }
}

/// Finds ranks that failed or said nothing.
fn failed(collected: &Collected, found: &mut Vec<Verdict>) {
    let mut by_failure: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, said) in collected.ranks.iter().enumerate() {
        let Some(said) = said.as_ref().filter(|said| !said.failure.is_empty()) else { continue };
        match by_failure.iter_mut().find(|(failure, _)| *failure == said.failure) {
            Some((_, ranks)) => ranks.push(rank),
            None => by_failure.push((&said.failure, vec![rank])),
        }
    }
    let ended_ms = |ranks: &[usize]| {
        let ended = ranks.iter().filter_map(|&rank| collected.ranks[rank].as_ref()).map(|said| said.ended_us);
        ended.max().unwrap_or(0) as f64 / 1e3
    };
    // A rank that failed alone says why itself: that the others failed with it tells nothing more.
    let is_relayed = |failure: &str| {
        by_failure.iter().any(|(own, ranks)| {
            let told = |rank: &usize| failure.strip_prefix(&format!("rank {rank}: "));
            ranks.iter().filter_map(told).any(|told| is_same_text(told, own))
        })
    };
    for (failure, ranks) in by_failure.iter().filter(|(failure, _)| !is_relayed(failure)) {
        let text = format!("it failed: {failure}");
        found.push(verdict(collected, ranks, "outcome", "failed", ended_ms(ranks), text));
    }
    let missing = collected.missing.iter().map(|&rank| rank as usize);
    let missing: Vec<usize> = missing.filter(|&rank| rank < collected.ranks.len()).collect();
    if !missing.is_empty() {
        let text = "said nothing when the outcome was known: stopped, ended or out of reach".to_owned();
        found.push(verdict(collected, &missing, "outcome", "missing", 0.0, text));
    }
}

/// Returns whether two texts begin alike, as far as neither is cut.
fn is_same_text(one: &str, other: &str) -> bool {
    let (one, other) = (head_of(one), head_of(other));
    one.starts_with(other) || other.starts_with(one)
}

/// Finds ranks for which all others waited: they took least in a phase that all end together.
fn called_late(
    collected: &Collected,
    phase: &'static str,
    times: &[Option<f64>],
    least_ms: f64,
    found: &mut Vec<Verdict>,
) {
    // Of two ranks the one that waited.
    let median_ms = upper_median(times.iter().flatten().copied());
    let late: Vec<usize> =
        (0..times.len()).filter(|&rank| times[rank].is_some_and(|ms| median_ms - ms > least_ms)).collect();
    if late.is_empty() || late.len() * 2 > times.len() {
        return;
    }
    let lost_ms = late.iter().filter_map(|&rank| times[rank]).map(|ms| median_ms - ms).fold(0.0, f64::max);
    let text = format!("came {} after the others, which waited for it", said_ms(lost_ms));
    found.push(verdict(collected, &late, phase, "called_late", lost_ms, text));
}

/// Finds ranks that took longer than the median rank.
fn slow_ranks(
    collected: &Collected,
    phase: &'static str,
    times: &[Option<f64>],
    least_ms: f64,
    found: &mut Vec<Verdict>,
) {
    let median_ms = median(times.iter().flatten().copied());
    let is_slow = |ms: f64| ms - median_ms > least_ms && ms > FACTOR * median_ms;
    let slow: Vec<usize> = (0..times.len()).filter(|&rank| times[rank].is_some_and(is_slow)).collect();
    if slow.is_empty() {
        return;
    }
    let worst = slow.iter().copied().max_by(|&a, &b| times[a].unwrap_or(0.0).total_cmp(&times[b].unwrap_or(0.0)));
    let Some((worst, said)) = worst.and_then(|rank| Some((rank, collected.ranks[rank].as_ref()?))) else { return };
    let lost_ms = times[worst].unwrap_or(0.0) - median_ms;
    let (cause, why) = cause(collected, said, phase, lost_ms);
    let text =
        format!("took {} in {phase}, the median rank {}: {why}", said_ms(lost_ms + median_ms), said_ms(median_ms));
    found.push(verdict(collected, &slow, phase, cause, lost_ms, text));
}

/// Returns why a rank was slow in a phase, and the evidence.
fn cause(collected: &Collected, said: &Digest, phase: &str, lost_ms: f64) -> (&'static str, String) {
    let moved = |rank: &Digest| {
        let large = if matches!(phase, "read") {
            [Class::SmallReads, Class::LargeReads]
        } else {
            [Class::SmallWrites, Class::LargeWrites]
        };
        let [small, large] = large.map(|class| rank.sums[class as usize]);
        (small.bytes + large.bytes, small.busy_us + large.busy_us, small.longest_us.max(large.longest_us))
    };
    if phase == "describe" {
        return ("state", STATE_READ.to_owned());
    }
    let (bytes, busy_us, longest_us) = moved(said);
    let median_bytes = median(collected.said().map(|rank| moved(rank).0 as f64));
    let paused_ms = said.paused_us as f64 / 1e3;
    if paused_ms > 0.3 * lost_ms {
        let (cause, asked) = retried(said.failures, said.throttled);
        let text = format!("{} failures, {} of pauses before it tried again{asked}", said.failures, said_ms(paused_ms));
        return (cause, text);
    }
    if phase == "copy" && f64::from(said.awaited_us) / 1e3 > 0.5 * lost_ms {
        return ("staging_memory", full(said));
    }
    // No rank is slow for bytes that take no time, or in a phase that moves none.
    if phase != "plan" && bytes as f64 > FACTOR * median_bytes && bytes as f64 - median_bytes > MORE_BYTES_MIN {
        return (
            "more_data",
            format!("it moved {}, the median rank {}", said_bytes(bytes as f64), said_bytes(median_bytes)),
        );
    }
    let rate = |(bytes, busy_us, _): (u64, u64, u32)| bytes as f64 / (busy_us.max(1) as f64 / 1e6);
    let (own, median_rate) =
        (rate((bytes, busy_us, longest_us)), median(collected.said().map(|rank| rate(moved(rank)))));
    if phase != "copy" && f64::from(longest_us) / 1e3 > 0.5 * lost_ms {
        return (
            "storage",
            format!("one operation, on {}, took {}", said.slowest, said_ms(f64::from(longest_us) / 1e3)),
        );
    }
    if phase != "copy" && own * FACTOR < median_rate {
        return (
            "storage",
            format!(
                "its operations ran at {}/s, those of the median rank at {}/s",
                said_bytes(own),
                said_bytes(median_rate)
            ),
        );
    }
    if phase == "read" {
        let of = |which: usize| move |said: &Digest| f64::from(said.worked_ms[which]);
        let (placed, waited) = (of(0), of(1));
        let (own, median_ms) = (placed(said), median(collected.said().map(placed)));
        if own - median_ms > 0.5 * lost_ms && own > FACTOR * median_ms {
            let (own, usual) = (said_ms(own), said_ms(median_ms));
            let text = format!("its threads took {own} to verify and copy the bytes, those of the median rank {usual}");
            return ("processor", text);
        }
        if waited(said) > 0.5 * lost_ms {
            return ("peers", format!("it waited {} for ranks that read for it", said_ms(waited(said))));
        }
    }
    ("held_up", "its operations at the storage were not slow: the process was stopped, or had no processor".to_owned())
}

/// Returns the cause of pauses after failures, and what the service asked for.
fn retried(failures: u32, throttled: u32) -> (&'static str, &'static str) {
    if throttled > 0 && f64::from(throttled) >= THROTTLED_SHARE * f64::from(failures) {
        ("throttled", ": the service asks for fewer requests")
    } else {
        ("retries", "")
    }
}

/// Returns why a copy waited for staging memory, as text.
fn full(said: &Digest) -> String {
    let waited = said_ms(f64::from(said.awaited_us) / 1e3);
    format!("the copy waited {waited} for staging memory that writes still used: give the process more of it")
}

/// Finds ranks whose program waited while the copy of its state had no staging memory.
fn staging_memory(collected: &Collected, least_ms: f64, found: &mut Vec<Verdict>) {
    let ms = |said: &Digest| {
        // Writes free no memory while the process does not run.
        let held_ms = held_up_ms(said, (0, said.phases_us[Phase::Staged as usize]));
        f64::from(said.awaited_us.min(said.stalled_us)) / 1e3 - held_ms
    };
    let of = |rank: usize| collected.ranks[rank].as_ref().map_or(0.0, ms);
    let waited: Vec<usize> = (0..collected.ranks.len()).filter(|&rank| of(rank) > least_ms).collect();
    let Some(&worst) = waited.iter().max_by(|&&a, &&b| of(a).total_cmp(&of(b))) else { return };
    let text = collected.ranks[worst].as_ref().map(full).unwrap_or_default();
    found.push(verdict(collected, &waited, "copy", "staging_memory", of(worst), text));
}

/// Finds objects that the storage ended one by one: the ranks' longest operations on names end at even distances.
fn joined_one_by_one(collected: &Collected, total_ms: f64, found: &mut Vec<Verdict>) {
    let longest = |said: &Digest| f64::from(said.sums[Class::Names as usize].longest_us) / 1e3;
    let mut ends: Vec<f64> = collected.said().map(longest).collect();
    ends.sort_by(f64::total_cmp);
    let (Some(&first), Some(&last)) = (ends.first(), ends.last()) else { return };
    let spread_ms = last - first;
    let least_ms = (COMMIT_SHARE * total_ms).max(2.0 * LOST_MIN.as_secs_f64() * 1e3);
    if collected.verb != Verb::Save || ends.len() < JOINED_RANKS_MIN || spread_ms < least_ms {
        return;
    }
    let step_ms = spread_ms / (ends.len() - 1) as f64;
    let is_even = |(at, end): (usize, &f64)| (end - first - step_ms * at as f64).abs() <= JOINED_SHARE * spread_ms;
    if first > 2.0 * step_ms + JOINED_SHARE * spread_ms || !ends.iter().enumerate().all(is_even) {
        return;
    }
    let (first, last) = (said_ms(first), said_ms(last));
    let text =
        format!("the storage ended objects one by one: the first rank's after {first}, the last one's after {last}");
    // Ranks are slow there by their places in the row.
    found.retain(|verdict| verdict.phase != "write" || verdict.cause != "storage");
    found.push(of_all("write", "serial_tail", spread_ms, text));
}

/// Finds a commit that took long after all bytes were durable.
fn serial_tail(collected: &Collected, times: &[Option<f64>], total_ms: f64, found: &mut Vec<Verdict>) {
    // All wait for a rank whose process does not run.
    if found.iter().any(|verdict| (verdict.phase, verdict.cause) == ("commit", "held_up")) {
        return;
    }
    // The rank that was durable last waited for the commit alone.
    let lost_ms = times.iter().flatten().copied().fold(f64::INFINITY, f64::min);
    if !lost_ms.is_finite() || lost_ms < (COMMIT_SHARE * total_ms).max(2.0 * LOST_MIN.as_secs_f64() * 1e3) {
        return;
    }
    let slowest =
        collected.ranks.first().and_then(Option::as_ref).map(|root| root.slowest.as_str()).unwrap_or_default();
    let at = if slowest.is_empty() { String::new() } else { format!("; its longest operation was on {slowest}") };
    let text = format!("committed {} after every byte was durable{at}", said_ms(lost_ms));
    found.push(verdict(collected, &[0], "commit", "serial_tail", lost_ms, text));
}

/// Finds what slowed all ranks.
fn everywhere(collected: &Collected, total_ms: f64, least_ms: f64, found: &mut Vec<Verdict>) {
    let paused_ms = median(collected.said().map(|rank| rank.paused_us as f64 / 1e3));
    if paused_ms > least_ms {
        let sum = |of: fn(&Digest) -> u32| collected.said().map(of).fold(0, u32::saturating_add);
        let failures = sum(|rank| rank.failures);
        let (cause, asked) = retried(failures, sum(|rank| rank.throttled));
        let text = format!(
            "paused {} (the median rank) after {failures} failures of the storage on all ranks{asked}",
            said_ms(paused_ms)
        );
        let phase = if collected.verb == Verb::Save { "write" } else { "read" };
        // Parts pause beside each other.
        found.push(of_all(phase, cause, paused_ms.min(total_ms), text));
    }
    let sum = |class: Class| {
        let mut all = Sum::default();
        for of in collected.said().map(|rank| rank.sums[class as usize]) {
            all.count = all.count.saturating_add(of.count);
            all.bytes = all.bytes.saturating_add(of.bytes);
            all.busy_us = all.busy_us.saturating_add(of.busy_us);
        }
        all
    };
    let took = |phase: &str| {
        let of = phases(collected).into_iter().find(|(name, _)| *name == phase);
        median(of.into_iter().flat_map(|(_, times)| times).flatten())
    };
    let described_ms = took("describe");
    if described_ms > least_ms {
        let text = format!("took {} in describe, the median rank: {STATE_READ}", said_ms(described_ms));
        found.push(of_all("describe", "state", described_ms, text));
    }
    let classes = match collected.verb {
        Verb::Save if took("values") > took("write") => (Class::SmallWrites, "values"),
        Verb::Save => (Class::SmallWrites, "write"),
        Verb::Load => (Class::SmallReads, "read"),
    };
    let (small, ranks) = (sum(classes.0), collected.said().count().max(1));
    let busy_ms = small.busy_us as f64 / 1e3 / ranks as f64;
    let until_commit_ms = total_ms - took("commit");
    let mean = small.bytes as f64 / f64::from(small.count.max(1));
    if u64::from(small.count) >= SMALL_MIN * ranks as u64
        && mean <= SMALL_BYTES_MAX
        && busy_ms > (LOST_MIN.as_secs_f64() * 1e3).max(0.3 * until_commit_ms)
    {
        let text = format!(
            "{} operations of {} took {} of requests on each rank: fewer keys, or larger units",
            small.count,
            said_bytes(mean),
            said_ms(busy_ms)
        );
        // They run beside each other.
        found.push(of_all(classes.1, "small_objects", busy_ms.min(total_ms), text));
    }
}

/// Returns a finding about ranks, which are named by what they have in common.
fn verdict(
    collected: &Collected,
    ranks: &[usize],
    phase: &'static str,
    cause: &'static str,
    lost_ms: f64,
    text: String,
) -> Verdict {
    let place = match ranks {
        [rank] => collected.ranks.get(*rank).and_then(Option::as_ref).and_then(|said| place(&said.place)),
        _ => None,
    };
    Verdict { subject: subject(collected, ranks), place, phase, cause, lost_ms, text, in_a_row: 1 }
}

/// Returns a finding about all ranks.
fn of_all(phase: &'static str, cause: &'static str, lost_ms: f64, text: String) -> Verdict {
    Verdict { subject: "all ranks".to_owned(), place: None, phase, cause, lost_ms, text, in_a_row: 1 }
}

/// Returns a rank's machine and coordinates as text; `None` if neither is known.
fn place(place: &Place) -> Option<String> {
    let coordinates: Vec<String> = place.coordinates.iter().map(|(name, at)| format!("{name}={at}")).collect();
    let parts: Vec<String> = [place.machine.clone(), coordinates.join(" ")].into();
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Returns whom slow ranks are. If they are several and others are not slow: a machine if they are all of its ranks,
/// else a coordinate if they are all ranks that have it.
fn subject(collected: &Collected, slow: &[usize]) -> String {
    if slow.len() > 1 && slow.len() == collected.ranks.len() {
        return "all ranks".to_owned();
    }
    let machine = |rank: usize| collected.ranks[rank].as_ref().map(|said| said.place.machine.as_str());
    let of_first = slow.first().and_then(|&rank| machine(rank));
    let on_it = (0..collected.ranks.len()).filter(|&rank| machine(rank) == of_first);
    match of_first {
        Some(name) if slow.len() > 1 && on_it.eq(slow.iter().copied()) => format!("machine {name}"),
        _ if slow.len() > 1 => coordinate(collected, slow).unwrap_or_else(|| ranks(slow)),
        _ => ranks(slow),
    }
}

/// Returns the first coordinate that these ranks have, and no others; `None` without one.
fn coordinate(collected: &Collected, slow: &[usize]) -> Option<String> {
    let at = |rank: usize, dimension: &str| collected.ranks[rank].as_ref().and_then(|said| said.place.at(dimension));
    collected.mesh().iter().find_map(|dimension| {
        let of_first = at(*slow.first()?, dimension)?;
        let share = (0..collected.ranks.len()).filter(|&rank| at(rank, dimension) == Some(of_first));
        share.eq(slow.iter().copied()).then(|| format!("{dimension}={of_first}"))
    })
}

/// Returns ranks as text, the first few of many.
fn ranks(ranks: &[usize]) -> String {
    let named = ranks.iter().take(8).map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        1 => format!("rank {named}"),
        count if count > 8 => format!("ranks {named} and {} more", count - 8),
        _ => format!("ranks {named}"),
    }
}

/// Returns the median, the lower one of two; 0 of nothing.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Returns the median, the upper one of two; 0 of nothing.
fn upper_median(values: impl Iterator<Item = f64>) -> f64 {
    -median(values.map(|value| -value))
}

/// Returns a time as text.
pub(crate) fn said_ms(ms: f64) -> String {
    if ms < 10.0 {
        format!("{ms:.1} ms")
    } else if ms < 1000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

#[cfg(test)]
pub(crate) mod tests;
