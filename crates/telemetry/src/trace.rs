//! Writes saves and loads as trace events in Chrome's format, which Perfetto opens: a process for each rank, and in it
//! lanes of what happened one after the other.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::object::{Collected, word};
use crate::report::Operation;
use crate::told::Outcome;
use crate::verdicts::spans;

/// Kinds of lanes of a rank: their names, and the number of the first lane of each.
const LANES: [(&str, usize); 3] = [("saves and loads", 0), ("phases", 1_000), ("storage", 10_000)];
const OPERATIONS: usize = 0;
const PHASES: usize = 1;
const STORAGE: usize = 2;

/// A trace in the making.
pub(crate) struct Trace<W: Write> {
    out: W,
    bytes: u64,
    ranks: HashMap<usize, Lanes>,
    /// Time of the first request, in milliseconds since 1970, from which the trace counts.
    first_unix_ms: Option<u64>,
}

/// Lanes of a rank: of each kind the time until which each lane is taken, in microseconds.
#[derive(Default)]
struct Lanes([Vec<u64>; LANES.len()]);

/// A piece of time on a lane.
struct Slice<'a> {
    name: &'a str,
    began_us: u64,
    took_us: u64,
    args: Map<String, Value>,
}

impl<W: Write> Trace<W> {
    pub(crate) fn new(out: W) -> Trace<W> {
        Trace { out, bytes: 0, ranks: HashMap::new(), first_unix_ms: None }
    }

    /// Adds a record and what the report says of it. Records come in the order of time.
    pub(crate) fn add(&mut self, collected: &Collected, operation: &Operation) -> io::Result<()> {
        let first = *self.first_unix_ms.get_or_insert(collected.began_unix_ms);
        let base_us = collected.began_unix_ms.saturating_sub(first).saturating_mul(1000);
        let verb = word(collected.verb);
        let all = spans(collected);
        for (rank, said) in collected.ranks.iter().enumerate() {
            let Some(said) = said else { continue };
            if !self.ranks.contains_key(&rank) {
                let machine = &said.place.machine;
                let name = if machine.is_empty() { format!("rank {rank}") } else { format!("rank {rank} ({machine})") };
                self.event(&json!({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}))?;
                let args = json!({"sort_index": rank});
                self.event(&json!({"ph": "M", "pid": rank, "name": "process_sort_index", "args": args}))?;
            }
            let mut args = fields(json!({"step": collected.step, "outcome": operation.outcome, "files": said.files}));
            if !said.failure.is_empty() {
                args.insert("failure".to_owned(), said.failure.as_str().into());
            }
            let name = format!("{verb} of step {}", collected.step);
            let whole = Slice { name: &name, began_us: base_us, took_us: said.ended_us, args };
            self.slice(rank, OPERATIONS, &whole)?;
            let mut phases: Vec<(&str, u32, u32)> =
                all.iter().filter_map(|(phase, spans)| spans[rank].map(|(from, to)| (*phase, from, to))).collect();
            phases.sort_by_key(|&(_, from, to)| (from, to));
            for (name, from, to) in phases {
                let args = fields(json!({"step": collected.step}));
                let (began_us, took_us) = (base_us.saturating_add(u64::from(from)), u64::from(to - from));
                self.slice(rank, PHASES, &Slice { name, began_us, took_us, args })?;
            }
            self.operations(collected, rank, base_us)?;
        }
        Ok(())
    }

    /// Adds the operations at the storage of a rank whose events are kept, and its failures.
    fn operations(&mut self, collected: &Collected, rank: usize, base_us: u64) -> io::Result<()> {
        let told = &collected.told;
        for row in u32::try_from(rank).ok().and_then(|rank| told.rank(rank)).unwrap_or_default() {
            let object = told.objects.get(row.object as usize).map_or("", String::as_str);
            let mut args = fields(json!({"step": collected.step, "object": object}));
            if row.bytes > 0 {
                args.extend(fields(json!({"offset": row.offset, "bytes": row.bytes})));
            }
            if row.attempt > 0 {
                args.insert("attempt".to_owned(), row.attempt.into());
            }
            match row.outcome {
                Outcome::Done => {}
                Outcome::Failed => _ = args.insert("failed".to_owned(), true.into()),
                Outcome::Missing => _ = args.insert("missing".to_owned(), true.into()),
            }
            let name = told.words.get(row.word as usize).map_or("", String::as_str);
            let (began_us, took_us) = (base_us.saturating_add(u64::from(row.began_us)), u64::from(row.took_us));
            self.slice(rank, STORAGE, &Slice { name, began_us, took_us, args })?;
        }
        Ok(())
    }

    /// Writes a piece on the first lane of that kind on which nothing is at its begin or later.
    fn slice(&mut self, rank: usize, kind: usize, slice: &Slice<'_>) -> io::Result<()> {
        let lanes = &mut self.ranks.entry(rank).or_default().0[kind];
        let end_us = slice.began_us.saturating_add(slice.took_us);
        let lane = lanes.iter().position(|&taken| taken <= slice.began_us).unwrap_or(lanes.len());
        let is_new = lane == lanes.len();
        if is_new {
            lanes.push(end_us);
        } else {
            lanes[lane] = end_us;
        }
        let (name, first) = LANES[kind];
        let tid = first + lane;
        if is_new {
            let name = if lane == 0 { name.to_owned() } else { format!("{name} {}", lane + 1) };
            self.event(&json!({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}))?;
            let args = json!({"sort_index": tid});
            self.event(&json!({"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": args}))?;
        }
        let Slice { name, began_us, took_us, ref args } = *slice;
        let cat = LANES[kind].0;
        self.event(&json!({"ph": "X", "pid": rank, "tid": tid, "cat": cat, "name": name, "ts": began_us,
                           "dur": took_us, "args": args}))
    }

    fn event(&mut self, event: &impl Serialize) -> io::Result<()> {
        let start = if self.bytes == 0 { "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" } else { ",\n" };
        self.put(start)?;
        let text = serde_json::to_string(event)?;
        self.put(&text)
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        self.bytes += text.len() as u64;
        self.out.write_all(text.as_bytes())
    }

    /// Ends the trace; returns its size in bytes.
    pub(crate) fn end(mut self) -> io::Result<u64> {
        let end = if self.bytes == 0 { "{\"traceEvents\":[]}\n" } else { "\n]}\n" };
        self.put(end)?;
        self.out.flush()?;
        Ok(self.bytes)
    }
}

fn fields(of: Value) -> Map<String, Value> {
    match of {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::object::tests::collected;
    use crate::report::operation;

    #[test]
    fn pieces_on_a_lane_do_not_overlap_and_none_is_lost() {
        let mut out = Vec::new();
        let mut trace = Trace::new(&mut out);
        let mut collected = collected(3);
        for after_ms in [0, 5, 5000] {
            let collected_at = collected.began_unix_ms + after_ms;
            let one = Collected { began_unix_ms: collected_at, ..collected.clone() };
            trace.add(&one, &operation(&one)).unwrap();
            collected.step += 1;
        }
        let bytes = trace.end().unwrap();
        assert_eq!(bytes, out.len() as u64);
        let trace: Value = serde_json::from_slice(&out).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let mut lanes: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let number = |name: &str| event[name].as_u64().unwrap();
            lanes.entry((number("pid"), number("tid"))).or_default().push((number("ts"), number("ts") + number("dur")));
        }
        for ((rank, lane), pieces) in &mut lanes {
            pieces.sort_unstable();
            assert!(pieces.windows(2).all(|two| two[0].1 <= two[1].0), "rank {rank}, lane {lane}: {pieces:?}");
        }
        let of = |first: u64, rank: u64| {
            lanes.iter().filter(|((pid, tid), _)| *pid == rank && *tid >= first).map(|(_, of)| of.len()).sum::<usize>()
        };
        assert_eq!((of(10_000, 0), of(10_000, 1), of(0, 0)), (9, 9, 9 + 3 * 8));
        assert!(lanes.keys().all(|(rank, _)| *rank != 2), "a rank that said nothing");
        let named = events.iter().find(|event| event["name"] == "process_name" && event["pid"] == 1).unwrap();
        assert_eq!(named["args"]["name"], "rank 1 (node-0)");
        let retry = events.iter().find(|event| event["name"] == "retry").unwrap();
        assert_eq!((&retry["args"]["attempt"], &retry["args"]["bytes"]), (&json!(1), &json!(1 << 20)));
    }

    #[test]
    fn a_trace_of_nothing_is_one() {
        let mut out = Vec::new();
        Trace::new(&mut out).end().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&out).unwrap(), json!({"traceEvents": []}));
    }
}
