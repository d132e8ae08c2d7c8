//! Tells the listener of an engine what a save or load does, and brings to rank 0 what those of all ranks have to say.
//!
//! What a listener says is sent when the outcome of the operation is known: no call waits for it, and without it no
//! outcome changes.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use shardfast_coord::{Error as Coord, Pulse};
use shardfast_transfer::error::Result;
use shardfast_transfer::events::{Event, Observer};
use shardfast_transfer::observed::Observed;

use crate::background;
use crate::engine::Engine;
use crate::listen::{Begun, Listener, Listening, SAID_BYTES_MAX, TOLD_BYTES_MAX, Verb};

/// Time for which rank 0 waits for what other ranks have to say of an operation that has ended.
const COLLECTED_WITHIN: Duration = Duration::from_secs(20);

/// Time for which it waits after a failure: a rank may be why, and processes that have failed end.
const FAILED_WITHIN: Duration = Duration::from_secs(5);

/// Time for which rank 0 waits for what chosen ranks tell in addition. All ranks have come to the round before, and
/// rank 0's listener gets what they said there when this round is over.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

/// Operations that are collected in the background: the process that does it, and their number.
static COLLECTING: (Mutex<(u32, usize)>, Condvar) = (Mutex::new((0, 0)), Condvar::new());

/// A rank that is left out takes nothing from what the others have said.
const _: () = assert!(SAID_BYTES_MAX <= shardfast_coord::SHOWN_BYTES);

/// Answers to what a rank has said, where some ranks are chosen to tell more; if none is, the answer is empty.
const NOT_CHOSEN: u8 = 0;
const CHOSEN: u8 = 1;

/// Save or load of this rank, with the listener to it if the engine has one.
pub(crate) struct Listened {
    /// Observer of all that happens in it.
    pub(crate) observed: Arc<Observed>,
    listening: Option<Arc<dyn Listening>>,
    /// Pulse of the process, until the operation has ended.
    pulse: Mutex<Option<Arc<Pulse>>>,
    /// Number of the operation if ranks have met in it, and whether it failed, once it has ended.
    ended: OnceLock<(Option<u64>, bool)>,
}

impl Engine {
    /// Tells this listener of all saves and loads that begin from now on. Only the first call counts.
    pub fn listen(&self, listener: Arc<dyn Listener>) {
        let _ = self.listener.set(listener);
    }
}

impl Listened {
    /// Begins to tell the engine's listener of an operation.
    pub(crate) fn begin(
        engine: &Engine,
        observed: Arc<Observed>,
        verb: Verb,
        (url, step): (&str, Option<u64>),
    ) -> Listened {
        let (rank, world) = (engine.rank(), engine.world());
        let meeting = engine.meeting();
        let begun = Begun { verb, url, step, observed: &observed, meeting, rank, world, storage: &engine.storage };
        let listening = engine.listener.get().map(|listener| listener.begins(&begun));
        let mut pulse = None;
        if let Some(listening) = &listening {
            observed.listen(&(Arc::clone(listening) as Arc<dyn Observer>));
            let of = Arc::downgrade(&observed);
            let held_up = move |last: Instant, took| {
                if let Some(observed) = of.upgrade() {
                    let after = last.saturating_duration_since(observed.began);
                    observed.noted(&Event::HeldUp { after, took });
                }
            };
            pulse = Some(Arc::new(Pulse::new(held_up))).filter(|pulse| engine.coord.beats(pulse));
        }
        Listened { observed, listening, pulse: Mutex::new(pulse), ended: OnceLock::new() }
    }

    /// Notes the outcome of the operation, which has that number if ranks have met in it. Returns whether this is the
    /// first call, which alone counts.
    pub(crate) fn note_outcome(&self, outcome: &Result<()>, number: Option<u64>) -> bool {
        let is_first = self.ended.set((number, outcome.is_err())).is_ok();
        if is_first {
            // The process may have been held up until this moment.
            if let Some(pulse) = self.pulse.lock().unwrap_or_else(PoisonError::into_inner).take() {
                pulse.beat();
            }
            let after = self.observed.began.elapsed();
            self.observed.noted(&Event::Outcome { failure: outcome.as_ref().err(), number, after });
        }
        is_first
    }

    /// Sends this rank's bytes about an operation that has ended to rank 0, whose listener gets those of all ranks. It
    /// waits for the other ranks, so no call of the user may wait for it.
    pub(crate) fn collect(&self, engine: &Engine) {
        let (Some(listening), Some((number, has_failed))) = (&self.listening, self.ended.get()) else { return };
        let report = self.observed.report();
        let Some(mut own) = listening.says(&report) else { return };
        own.truncate(SAID_BYTES_MAX);
        let mut came: Vec<Option<Vec<u8>>> = vec![None; engine.world() as usize];
        came[0] = Some(own.clone());
        let Some(number) = number else {
            // Ranks that did not meet in it do not meet behind it.
            if engine.rank() == 0 {
                listening.collected(came, engine.coord.lost().into_iter().collect(), Vec::new(), &report);
            }
            return;
        };
        let topic = format!("{number} said");
        let within = if *has_failed { FAILED_WITHIN } else { COLLECTED_WITHIN };
        let mut all = None;
        let mut choose = |said: Vec<Vec<u8>>| {
            let mut chosen = listening.chooses(&said);
            chosen.retain(|&rank| rank != 0 && (rank as usize) < said.len());
            let answer = |rank| if chosen.contains(&rank) { CHOSEN } else { NOT_CHOSEN };
            let length = usize::from(!chosen.is_empty());
            let answers = (0..).zip(&said).map(|(rank, _)| vec![answer(rank); length]).collect();
            all = Some((said, chosen));
            Ok(answers)
        };
        let mut show = |some: Vec<(u32, Vec<u8>)>| {
            for (rank, said) in some {
                if let Some(place) = came.get_mut(rank as usize) {
                    *place = Some(said);
                }
            }
        };
        let answer = engine.coord.agree_or_show(&topic, Ok(own), &mut choose, &mut show, within);
        let told = match &answer {
            Ok(answer) if !answer.is_empty() => self.tell(engine, *number, answer[..] == [CHOSEN]),
            _ => Vec::new(),
        };
        if engine.rank() == 0 {
            let missing = match answer {
                Err(Coord::Missing { ranks, .. }) => ranks,
                Err(Coord::Lost { rank, .. }) => vec![rank],
                _ => Vec::new(),
            };
            let (said, chosen) =
                all.map_or((came, Vec::new()), |(said, chosen)| (said.into_iter().map(Some).collect(), chosen));
            let told = (0..).zip(told).filter(|(rank, _)| chosen.contains(rank)).collect();
            listening.collected(said, missing, told, &report);
        }
    }

    /// Brings what the chosen ranks tell to rank 0, to which all of it is returned, in the order of the ranks: empty
    /// texts of others, nothing if a rank does not come.
    fn tell(&self, engine: &Engine, number: u64, is_chosen: bool) -> Vec<Vec<u8>> {
        let mut own = self.listening.as_ref().filter(|_| is_chosen).map(|own| own.tells()).unwrap_or_default();
        own.truncate(TOLD_BYTES_MAX);
        let mut all = Vec::new();
        let mut keep = |told: Vec<Vec<u8>>| {
            let nothing = vec![Vec::new(); told.len()];
            all = told;
            Ok(nothing)
        };
        // What a rank that does not come would have told is left out.
        let _ = engine.coord.agree(&format!("{number} told"), Ok(own), &mut keep, TOLD_WITHIN);
        all
    }

    /// Collects like [`collect`](Listened::collect) in the background.
    pub(crate) fn collect_later(self: &Arc<Listened>, engine: &Arc<Engine>) {
        if self.listening.is_some() {
            let (listened, engine, counted) = (Arc::clone(self), Arc::clone(engine), Collecting::begin());
            let collect = move || {
                listened.collect(&engine);
                drop(counted);
            };
            background::on_a_thread(collect, drop);
        }
    }
}

/// Counts an operation as collected in the background until it is dropped.
struct Collecting;

impl Collecting {
    fn begin() -> Collecting {
        let mut collecting = COLLECTING.0.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        // A forked process has none of its parent's threads.
        let before = if collecting.0 == process { collecting.1 } else { 0 };
        *collecting = (process, before + 1);
        Collecting
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        COLLECTING.0.lock().unwrap_or_else(PoisonError::into_inner).1 -= 1;
        COLLECTING.1.notify_all();
    }
}

/// Waits until no operation of this process is collected in the background any more, for at most that long.
pub fn wait_collected(within: Duration) {
    let process = std::process::id();
    let collecting = COLLECTING.0.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = COLLECTING.1.wait_timeout_while(collecting, within, |(of, number)| *of == process && *number > 0);
}
