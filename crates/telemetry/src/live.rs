//! Keeps what the saves and loads of this process do now and have done, for those who ask while it runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_engine::Engine;
use shardfast_engine::listen::Verb;
use shardfast_transfer::events::Phase;
use shardfast_transfer::observed::Observed;

use crate::digest::Place;
use crate::object::word;
use crate::record::{BOUNDS_US, Class, Record};
use crate::{WRITER, since_1970, without_secrets};

/// Address at which others reach a server, the one at which it listens, and the descriptor of its socket.
pub type Served = (String, String, i32);

/// Saves and loads that have ended and are told.
const ENDED_MAX: usize = 32;

/// Ranks that a wait names.
const RANKS_MAX: usize = 16;

/// A process at one moment, as `/live` tells it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Frame {
    /// Program that tells it.
    pub writer: String,
    /// Number of the rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Name of its machine.
    pub machine: String,
    /// Time by its clock, in milliseconds since 1970.
    pub now_unix_ms: u64,
    /// Saves and loads that have not ended, the oldest first.
    pub running: Vec<RunningNow>,
    /// Saves and loads that have ended, the last 32, the oldest first.
    pub ended: Vec<EndedNow>,
    /// Calls that wait for other ranks.
    pub waits: Vec<WaitNow>,
    /// Other ranks, as far as rank 0 has reached them; empty on all others.
    pub ranks: Vec<OtherNow>,
}

/// A save or load that has not ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RunningNow {
    /// Kind: `save` or `load`.
    pub operation: String,
    /// Place of the checkpoint, without what may be secret.
    pub url: String,
    /// Training step, if it is known.
    pub step: Option<u64>,
    /// Milliseconds since the request.
    pub for_ms: f64,
    /// Milliseconds from the request to the end of each phase that is over.
    pub phases_ms: BTreeMap<String, f64>,
    /// Bytes that this rank moves in all, as far as it knows.
    pub bytes: u64,
    /// Bytes that are copied: into staging memory by a save, to their destination by a load.
    pub copied: u64,
    /// Bytes that the storage has taken; 0 in a load.
    pub stored: u64,
    /// Failures of the storage.
    pub failures: u64,
    /// Last of them, if there is one.
    pub failure: Option<String>,
}

/// A save or load that has ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EndedNow {
    /// Kind: `save` or `load`.
    pub operation: String,
    /// Place of the checkpoint, without what may be secret.
    pub url: String,
    /// Training step, if it is known.
    pub step: Option<u64>,
    /// Reason of the failure, if it failed.
    pub failure: Option<String>,
    /// Time of the request, in milliseconds since 1970.
    pub began_unix_ms: u64,
    /// Milliseconds until the state could change, in a save that came so far.
    pub staged_ms: Option<f64>,
    /// Milliseconds until the outcome was known.
    pub ended_ms: f64,
    /// Bytes that this rank has moved.
    pub bytes: u64,
    /// Failures of the storage.
    pub failures: u64,
    /// Bytes that all ranks have written, of a save that succeeded; only rank 0 knows them, shortly after the end.
    pub all_bytes: Option<u64>,
    /// Bytes that the storage could still take after the save, if it tells; known as `all_bytes` is.
    pub free_bytes: Option<u64>,
}

/// A call that waits for other ranks to make it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WaitNow {
    /// Description of the call.
    pub call: String,
    /// Milliseconds that it has waited.
    pub for_ms: f64,
    /// Ranks that have not come, the first 16.
    pub ranks: Vec<u32>,
    /// Ends of runs of ranks, of which at least one has not come if `ranks` is empty.
    pub among: Vec<(u32, u32)>,
}

/// Another rank, as rank 0 has reached it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct OtherNow {
    /// Number of the rank.
    pub rank: u32,
    /// Saves and loads that have not ended there.
    pub running: Vec<RunningNow>,
    /// Reason why it did not answer.
    pub problem: Option<String>,
}

/// Saves and loads of this process.
pub(crate) struct Live {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) place: Place,
    /// Places at which other ranks can ask this one, once it serves.
    pub(crate) served: OnceLock<Served>,
    /// Number of traces that could not be exported.
    pub(crate) not_exported: AtomicU64,
    state: Mutex<State>,
    engines: Mutex<Vec<Weak<Engine>>>,
    /// Addresses of other ranks, on rank 0.
    peers: Mutex<BTreeMap<u32, String>>,
}

#[derive(Default)]
struct State {
    running: Vec<Arc<Running>>,
    ended: VecDeque<EndedNow>,
    totals: Totals,
}

/// A save or load that has not ended.
pub(crate) struct Running {
    pub(crate) verb: Verb,
    pub(crate) url: String,
    pub(crate) step: Option<u64>,
    pub(crate) began: Instant,
    pub(crate) began_unix_ms: u64,
    pub(crate) observed: Weak<Observed>,
    pub(crate) record: Arc<Record>,
}

/// Sums over all saves and loads of this process.
#[derive(Clone, Default)]
pub(crate) struct Totals {
    /// Saves, then loads.
    pub(crate) verbs: [OfVerb; 2],
    pub(crate) classes: [OfClass; Class::ALL.len()],
    pub(crate) failures: u64,
    pub(crate) paused: Duration,
    /// Events that were counted and not kept.
    pub(crate) left_out: u64,
    /// Bytes that all ranks wrote in the newest save of which rank 0 knows it, and that the storage could take then.
    pub(crate) all_bytes: Option<u64>,
    pub(crate) free_bytes: Option<u64>,
}

/// Sums over the saves, or the loads.
#[derive(Clone, Default)]
pub(crate) struct OfVerb {
    pub(crate) running: u64,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// Number and seconds of each phase that was over.
    pub(crate) phases: [(u64, f64); Phase::ALL.len()],
    /// Bytes of those that have ended.
    pub(crate) bytes: u64,
    /// Bytes of those that run: in all, copied, stored.
    pub(crate) now: [u64; 3],
    pub(crate) last: Option<EndedNow>,
}

/// Sums over the operations of one class at the storage.
#[derive(Clone, Default)]
pub(crate) struct OfClass {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) busy: Duration,
    pub(crate) by_duration: [u64; BOUNDS_US.len() + 1],
}

impl Live {
    pub(crate) fn new(engine: &Arc<Engine>, place: Place) -> Live {
        Live {
            rank: engine.rank(),
            world: engine.world(),
            place,
            served: OnceLock::new(),
            not_exported: AtomicU64::new(0),
            state: Mutex::default(),
            engines: Mutex::default(),
            peers: Mutex::default(),
        }
    }

    /// Tells also of the calls of that engine.
    pub(crate) fn attach(&self, engine: &Arc<Engine>) {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|engine| engine.strong_count() > 0);
        engines.push(Arc::downgrade(engine));
    }

    pub(crate) fn begin(&self, running: &Arc<Running>) {
        self.state().running.push(Arc::clone(running));
    }

    /// Notes that a save or load is over; without an outcome it was given up, as a look at a checkpoint is. Only the
    /// first call counts.
    pub(crate) fn end(&self, running: &Arc<Running>, outcome: Option<(Duration, Option<String>)>) {
        let mut state = self.state();
        let Some(at) = state.running.iter().position(|one| Arc::ptr_eq(one, running)) else { return };
        state.running.remove(at);
        state.totals.add(running);
        let Some((after, failure)) = outcome else { return };
        let now = running.now();
        let of = &mut state.totals.verbs[running.verb as usize];
        for (phase, (count, seconds)) in Phase::ALL.into_iter().zip(&mut of.phases) {
            if let Some(ms) = now.phases_ms.get(phase.word()) {
                *count += 1;
                *seconds += ms / 1e3;
            }
        }
        let ended = running.ended(now, after, failure);
        if ended.failure.is_none() {
            of.succeeded += 1
        } else {
            of.failed += 1
        }
        of.bytes += ended.bytes;
        if ended.failure.is_none() {
            of.last = Some(ended.clone());
        }
        if state.ended.len() == ENDED_MAX {
            state.ended.pop_front();
        }
        state.ended.push_back(ended);
    }

    /// Notes the bytes that all ranks have written in a save that is over, and those that the storage can still take.
    pub(crate) fn stored(&self, running: &Running, all_bytes: Option<u64>, free_bytes: Option<u64>) {
        let is_same = |ended: &&mut EndedNow| {
            ended.operation == word(running.verb)
                && (ended.began_unix_ms, &ended.url) == (running.began_unix_ms, &running.url)
        };
        let mut state = self.state();
        if let Some(ended) = state.ended.iter_mut().rev().find(is_same) {
            (ended.all_bytes, ended.free_bytes) = (all_bytes, free_bytes);
            (state.totals.all_bytes, state.totals.free_bytes) = (all_bytes, free_bytes);
        }
    }

    /// Notes the address of another rank.
    pub(crate) fn found(&self, rank: u32, address: &str) {
        if rank != self.rank && !address.is_empty() {
            let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.insert(rank, address.to_owned());
        }
    }

    pub(crate) fn peers(&self) -> Vec<(u32, String)> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.iter().map(|(&rank, address)| (rank, address.clone())).collect()
    }

    /// Returns this process at this moment.
    pub(crate) fn frame(&self) -> Frame {
        let state = self.state();
        let running = state.running.iter().map(|running| running.now()).collect();
        let ended = state.ended.iter().cloned().collect();
        drop(state);
        Frame {
            writer: WRITER.to_owned(),
            rank: self.rank,
            world: self.world,
            machine: self.place.machine.clone(),
            now_unix_ms: since_1970().as_millis() as u64,
            running,
            ended,
            waits: self.waits(),
            ranks: Vec::new(),
        }
    }

    /// Returns the sums so far, those of running operations included.
    pub(crate) fn totals(&self) -> Totals {
        let state = self.state();
        let mut totals = state.totals.clone();
        for running in &state.running {
            totals.add(running);
            let of = &mut totals.verbs[running.verb as usize];
            let now = running.now();
            of.running += 1;
            of.now.iter_mut().zip([now.bytes, now.copied, now.stored]).for_each(|(sum, bytes)| *sum += bytes);
        }
        totals
    }

    fn waits(&self) -> Vec<WaitNow> {
        let engines: Vec<Arc<Engine>> = {
            let engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
            engines.iter().filter_map(Weak::upgrade).collect()
        };
        let waits = engines.iter().flat_map(|engine| engine.waits());
        waits
            .map(|waits| WaitNow {
                call: redacted(&waits.call),
                for_ms: ms(waits.waited),
                ranks: waits.ranks.into_iter().take(RANKS_MAX).collect(),
                among: waits
                    .among
                    .into_iter()
                    .take(RANKS_MAX)
                    .map(|run| (run.start, run.end.saturating_sub(1)))
                    .collect(),
            })
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    fn now(&self) -> RunningNow {
        let observed = self.observed.upgrade();
        let (moved, report) = observed.map(|observed| (observed.moved(), observed.report())).unwrap_or_default();
        RunningNow {
            operation: word(self.verb).to_owned(),
            url: self.url.clone(),
            step: self.step,
            for_ms: ms(self.began.elapsed()),
            phases_ms: report.phases_ms.into_iter().map(|(phase, ms)| (phase.to_owned(), ms)).collect(),
            bytes: moved.bytes,
            copied: moved.copied,
            stored: moved.stored,
            failures: report.failures.len() as u64 + report.failures_left_out,
            failure: report.failures.last().map(|text| redacted(text)),
        }
    }

    fn ended(&self, now: RunningNow, after: Duration, failure: Option<String>) -> EndedNow {
        EndedNow {
            staged_ms: now.phases_ms.get(Phase::Staged.word()).copied(),
            operation: now.operation,
            url: now.url,
            step: now.step,
            failure: failure.map(|text| redacted(&text)),
            began_unix_ms: self.began_unix_ms,
            ended_ms: ms(after),
            bytes: now.copied,
            failures: now.failures,
            all_bytes: None,
            free_bytes: None,
        }
    }
}

impl Totals {
    /// Adds what an operation has done so far.
    fn add(&mut self, running: &Running) {
        for (class, of) in Class::ALL.into_iter().zip(&mut self.classes) {
            let sums = running.record.sums(class);
            of.count += u64::from(sums.count());
            of.bytes = of.bytes.saturating_add(sums.bytes.load(Relaxed));
            of.busy += Duration::from_nanos(sums.busy_ns.load(Relaxed));
            let counts = sums.by_duration.iter().map(|count| u64::from(count.load(Relaxed)));
            of.by_duration.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
        }
        let (failures, paused) = running.record.failures();
        self.failures += u64::from(failures);
        self.paused += paused;
        self.left_out += running.record.entries().1 as u64;
    }
}

/// Returns a text whose URLs have nothing in them that may be secret.
pub(crate) fn redacted(text: &str) -> String {
    let clean = |word: &str| {
        let url = word.trim_end_matches([':', ',', ';', ')', '"', '\'']);
        if word.contains("://") { without_secrets(url) + &word[url.len()..] } else { word.to_owned() }
    };
    text.split(' ').map(clean).collect::<Vec<_>>().join(" ")
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_told_without_secrets() {
        let text = "save s3://key:secret@host/run?sig=1, step 4: 503 from https://a/b?X-Amz-Signature=2 again";
        assert_eq!(redacted(text), "save s3://host/run, step 4: 503 from https://a/b again");
    }

    #[test]
    fn sums_never_fall_when_an_operation_ends() {
        let engine = Engine::solo();
        let live = Live::new(&engine, Place::default());
        let observed = Arc::<Observed>::default();
        let running = Arc::new(Running {
            verb: Verb::Save,
            url: "run".to_owned(),
            step: Some(4),
            began: Instant::now(),
            began_unix_ms: 0,
            observed: Arc::downgrade(&observed),
            record: Arc::new(Record::new(Instant::now())),
        });
        live.begin(&running);
        running.record.sums(Class::Names).by_duration[0].store(7, Relaxed);
        let before = live.totals();
        assert_eq!((before.classes[4].count, before.verbs[0].running), (7, 1));
        live.end(&running, Some((Duration::from_millis(5), None)));
        live.end(&running, Some((Duration::from_millis(6), None)));
        let after = live.totals();
        assert_eq!((after.classes[4].count, after.verbs[0].running, after.verbs[0].succeeded), (7, 0, 1));
        live.stored(&running, Some(8), Some(1 << 40));
        let frame = live.frame();
        assert_eq!((frame.running.len(), frame.ended.len(), frame.ended[0].ended_ms), (0, 1, 5.0));
        assert_eq!((frame.ended[0].all_bytes, frame.ended[0].free_bytes), (Some(8), Some(1 << 40)));
        let text = crate::metrics::text(&live);
        assert!(text.contains("shardfast_last_all_bytes{rank=\"0\",operation=\"save\"} 8\n"), "{text}");
        assert!(text.contains("shardfast_storage_free_bytes{rank=\"0\"} 1099511627776\n"), "{text}");
    }
}
