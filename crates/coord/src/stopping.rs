//! Agrees on the step after which all ranks stop, once the program of any rank was told to stop.
//!
//! Each rank counts its steps: its calls of [`Stopping::passed`].
//!
//! 1. *No rank is told to stop.* Rank 0 waits in the round `told`, to which no other rank comes. The other ranks wait
//!    in the round `stop`, to which rank 0 does not come. No rank sends a message.
//! 2. *A rank is told to stop.* That rank comes to `told` with a deadline of zero, so that the round expires, and rank
//!    0 gets the error. Then rank 0 comes to `stop`, which is complete with it, and every rank gets its answer.
//! 3. *The ranks agree.* Each rank contributes the number of its next step, and rank 0 decides for the largest. A rank
//!    that ends this step before it has the answer waits for it. All ranks contribute at once, whatever their programs
//!    do, so that no rank waits for another one's step.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::{Coord, Error};

/// Time for which a rank waits to be told: longer than any training.
const FOREVER: Duration = Duration::from_secs(1_000_000_000);

/// Interval at which a wait is ended again that may not have begun.
const HURRIES_EVERY: Duration = Duration::from_millis(10);

/// Agreement of all ranks on the step after which they stop. [`Stopping::end`] ends it.
pub struct Stopping {
    coord: Arc<dyn Coord>,
    /// Name of the agreement, the same on all ranks.
    name: String,
    /// Time for which ranks wait for each other once one of them is told to stop.
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Steps that have passed.
    steps: u64,
    is_told: bool,
    /// Whether this rank has contributed the number of its next step.
    is_asked: bool,
    is_over: bool,
    /// Whether its thread has ended.
    has_ended: bool,
    at: Option<Result<u64, Error>>,
    /// Loss of a rank before any rank was told to stop.
    lost: Option<Error>,
}

impl Stopping {
    /// Begins an agreement of that name, which is unique among these ranks. Every rank calls it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the system gives no thread.
    pub fn begin(coord: Arc<dyn Coord>, name: &str, deadline: Duration) -> Result<Arc<Stopping>, Error> {
        let stopping =
            Stopping { coord, name: name.to_owned(), deadline, state: Mutex::default(), changed: Condvar::new() };
        let stopping = Arc::new(stopping);
        if stopping.coord.world() == 1 {
            stopping.state().has_ended = true;
            return Ok(stopping);
        }
        let waiting = Arc::clone(&stopping);
        spawn(move || waiting.run())?;
        Ok(stopping)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn topic(&self, round: &str) -> String {
        format!("{} {round}", self.name)
    }

    /// Comes to a round in which nothing is said.
    fn come(&self, round: &str, deadline: Duration) -> Result<(), Error> {
        let mut nothing = |messages: Vec<Vec<u8>>| Ok(messages.iter().map(|_| Vec::new()).collect());
        self.coord.agree(&self.topic(round), Ok(Vec::new()), &mut nothing, deadline).map(drop)
    }

    /// Waits until some rank is told to stop, then agrees on the step.
    fn run(&self) {
        let outcome = self.told().map(|told| told.and_then(|()| self.agreed()));
        let mut state = self.state();
        state.at = outcome;
        state.has_ended = true;
        self.changed.notify_all();
    }

    /// Waits until some rank is told to stop; returns `None` when the agreement ends before.
    fn told(&self) -> Option<Result<(), Error>> {
        if self.coord.rank() != 0 {
            return match self.come("stop", FOREVER) {
                Err(_) if self.state().is_over => None,
                // Another rank has ended the agreement: rank 0 comes only after a rank was told to stop.
                Err(Error::Missing { ranks, .. }) if ranks.contains(&0) => None,
                Err(error @ Error::Lost { .. }) => {
                    self.state().lost = Some(error);
                    None
                }
                done => Some(done),
            };
        }
        match self.come("told", FOREVER) {
            Ok(()) | Err(Error::Missing { .. }) if !self.state().is_over => Some(self.come("stop", self.deadline)),
            outcome => {
                self.state().lost = outcome.err().filter(|error| matches!(error, Error::Lost { .. }));
                None
            }
        }
    }

    fn agreed(&self) -> Result<u64, Error> {
        let next = {
            let mut state = self.state();
            state.is_asked = true;
            state.steps + 1
        };
        let mut latest = |steps: Vec<Vec<u8>>| {
            let latest =
                steps.iter().map(|step| number(step)).max().flatten().ok_or("expected a number of each rank")?;
            Ok(vec![latest.to_le_bytes().to_vec(); steps.len()])
        };
        let at = self.coord.agree(&self.topic("at"), Ok(next.to_le_bytes().to_vec()), &mut latest, self.deadline)?;
        number(&at).ok_or_else(|| Error::Unavailable("rank 0 decided for no step".to_owned()))
    }

    /// Notes that this rank is told to stop, and tells the other ranks. Does not wait.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the system gives no thread.
    pub fn tell(self: &Arc<Self>) -> Result<(), Error> {
        let mut state = self.state();
        if state.is_told || state.is_over {
            return Ok(());
        }
        state.is_told = true;
        if self.coord.world() == 1 {
            state.at = Some(Ok(state.steps + 1));
            return Ok(());
        }
        drop(state);
        let this = Arc::clone(self);
        spawn(move || match this.coord.rank() {
            0 => this.hurry("told", |state| state.is_asked),
            // Rank 0 knows it by the error, and this rank by what rank 0 does then.
            _ => _ = this.come("told", Duration::ZERO),
        })
    }

    /// Ends this rank's wait in a round, which may be about to begin.
    fn hurry(&self, round: &str, is_done: impl Fn(&State) -> bool) {
        let topic = self.topic(round);
        let mut state = self.state();
        while !state.has_ended && !is_done(&state) {
            drop(state);
            self.coord.hurry(&topic);
            state = self.changed.wait_timeout(self.state(), HURRIES_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Counts a step that has passed; returns whether it is the agreed one, or one after it. Returns `None`, without
    /// counting it, while that is not known: the caller [waits](Stopping::wait), and asks again.
    pub fn passed(&self) -> Option<bool> {
        let mut state = self.state();
        if state.is_asked && state.at.is_none() {
            return None;
        }
        state.steps += 1;
        Some(matches!(state.at, Some(Ok(at)) if state.steps >= at))
    }

    /// Waits at most so long until the agreed step is known, or cannot be; returns whether it is so.
    pub fn wait(&self, at_most: Duration) -> bool {
        let state = self.state();
        let is_open = |state: &mut State| !state.has_ended;
        self.changed.wait_timeout_while(state, at_most, is_open).unwrap_or_else(PoisonError::into_inner).0.has_ended
    }

    /// Returns why the ranks could not agree after one was told, if so.
    pub fn failure(&self) -> Option<Error> {
        let state = self.state();
        match &state.at {
            Some(at) => at.clone().err(),
            None => state.lost.clone().filter(|_| state.is_told),
        }
    }

    /// Ends the agreement: nobody is told any more. Ranks that wait for it end it, too. Does not wait.
    pub fn end(self: &Arc<Self>) {
        self.state().is_over = true;
        let this = Arc::clone(self);
        let round = if self.coord.rank() == 0 { "told" } else { "stop" };
        // Without a thread this rank's wait ends with the process.
        let _ = spawn(move || this.hurry(round, |state| state.is_asked));
    }
}

fn spawn(body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = thread::Builder::new().name("shardfast-stop".to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| Error::Unavailable(format!("no thread for the agreement to stop: {error}")))
}

fn number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::{Topology, local_tree, solo};

    const DEADLINE: Duration = Duration::from_secs(30);

    /// Returns ranks in a tree of several levels.
    fn ranks_of(world: u32) -> Vec<Arc<dyn Coord>> {
        local_tree(Topology::new(world, 1, 2).unwrap())
    }

    /// Random numbers of a seed.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    /// Trains until the ranks stop, each step together with the others; returns after which step.
    fn train(stopping: &Arc<Stopping>, together: &Barrier, told_in: Option<u64>, pause: Duration) -> u64 {
        for step in 1.. {
            together.wait();
            thread::sleep(pause);
            if told_in == Some(step) {
                stopping.tell().unwrap();
            }
            let is_last = loop {
                match stopping.passed() {
                    Some(is_last) => break is_last,
                    None => _ = stopping.wait(DEADLINE),
                }
            };
            if is_last {
                return step;
            }
            assert_eq!(stopping.failure(), None);
        }
        unreachable!()
    }

    #[test]
    fn all_ranks_stop_after_one_step_whoever_is_told() {
        for seed in 0..200 {
            let mut dice = Dice(seed);
            let world = 2 + dice.below(6) as usize;
            let together = Barrier::new(world);
            let told: Vec<Option<u64>> = (0..world).map(|_| (dice.below(2) == 0).then(|| 1 + dice.below(4))).collect();
            let told = if told.iter().all(Option::is_none) { vec![Some(1); world] } else { told };
            let first = told.iter().flatten().min().copied().unwrap();
            let pauses: Vec<u64> = (0..world).map(|_| dice.below(300)).collect();
            let stopped: Vec<u64> = thread::scope(|scope| {
                let ranks = ranks_of(world as u32).into_iter().zip(told).zip(pauses);
                let run = |((coord, told), pause): ((Arc<dyn Coord>, Option<u64>), u64)| {
                    let together = &together;
                    scope.spawn(move || {
                        let stopping = Stopping::begin(coord, "run", DEADLINE).unwrap();
                        let step = train(&stopping, together, told, Duration::from_micros(pause));
                        stopping.end();
                        step
                    })
                };
                let running: Vec<_> = ranks.map(run).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            assert!(stopped.iter().all(|step| *step == stopped[0] && *step >= first), "seed {seed}: {stopped:?}");
        }
    }

    #[test]
    fn a_rank_alone_stops_at_the_next_step() {
        let stopping = Stopping::begin(solo(), "run", DEADLINE).unwrap();
        assert_eq!(stopping.passed(), Some(false));
        stopping.tell().unwrap();
        stopping.tell().unwrap();
        assert_eq!(stopping.passed(), Some(true));
        stopping.end();
    }

    #[test]
    fn nobody_waits_for_an_agreement_that_has_ended() {
        for first in 0..3 {
            let ranks: Vec<_> =
                ranks_of(3).into_iter().map(|coord| Stopping::begin(coord, "run", DEADLINE).unwrap()).collect();
            ranks[first].end();
            ranks.iter().for_each(|rank| rank.end());
            for rank in &ranks {
                assert!(rank.wait(DEADLINE));
                assert_eq!(rank.failure(), None);
            }
        }
    }

    #[test]
    fn a_rank_that_never_begins_is_named() {
        let mut coords = ranks_of(3);
        let _absent = coords.pop();
        let begin = |coord| Stopping::begin(coord, "run", Duration::from_millis(200)).unwrap();
        let ranks: Vec<_> = coords.into_iter().map(begin).collect();
        ranks[1].tell().unwrap();
        for rank in &ranks {
            assert!(rank.wait(DEADLINE));
            assert!(rank.failure().unwrap().to_string().contains("rank 2"), "{:?}", rank.failure());
            assert_eq!(rank.passed(), Some(false));
        }
    }
}
