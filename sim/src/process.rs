//! One rank's process: whether it still runs, what the storage does to it, and how its threads talk to the simulation.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use shardfast_coord::node::{Contribution, Reply};
use shardfast_coord::{Absent, Coord, Decide, Error, Meeting};

use crate::storage::Storage;
use crate::trap::{Fate, Trap};

/// What a thread of a rank sends the simulation.
pub(crate) enum Word {
    /// It is in `agree` and waits.
    Called(Call),
    /// Rank 0 has decided, and waits for its own answer.
    Decided(Result<Vec<Vec<u8>>, String>),
    /// An operation of this rank on the storage takes that long, until `resume` is dropped.
    Slow { time: Duration, resume: Sender<()> },
    /// A thread ends the wait of its rank's call on a topic.
    Hurries { rank: u32, topic: String },
    /// The storage that the next process would find if all ended at this operation.
    Blackout(Storage),
}

/// A call of `agree`.
pub(crate) struct Call {
    pub(crate) rank: u32,
    pub(crate) topic: String,
    pub(crate) contribution: Contribution,
    pub(crate) deadline: Duration,
    /// Dropping it ends the call.
    pub(crate) reply: Sender<Reply>,
}

/// What all threads of one rank share.
pub(crate) struct Process {
    pub(crate) rank: u32,
    is_dead: AtomicBool,
    words: Mutex<Sender<Word>>,
    traps: Mutex<Vec<Trap>>,
    /// The decisions that are being made: by whom, of which stage, and how many operations on the storage it has made.
    deciding: Mutex<Vec<(ThreadId, String, u32)>>,
}

impl Process {
    pub(crate) fn new(rank: u32, words: Sender<Word>, traps: Vec<Trap>) -> Arc<Process> {
        Arc::new(Process {
            rank,
            is_dead: AtomicBool::new(false),
            words: Mutex::new(words),
            traps: Mutex::new(traps),
            deciding: Mutex::default(),
        })
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Acquire)
    }

    /// Kills it: its threads reach no other rank, and their operations on the storage have no effect.
    pub(crate) fn die(&self) {
        self.is_dead.store(true, Ordering::Release);
    }

    /// The trap of this operation, if any.
    pub(crate) fn trapped(&self, name: &str, path: &std::path::Path) -> Option<Fate> {
        let mut deciding = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let here = thread::current().id();
        let deciding = deciding.iter_mut().find(|(thread, ..)| *thread == here).map(|(_, stage, calls)| {
            *calls += 1;
            (stage.as_str(), *calls)
        });
        let mut traps = self.traps.lock().unwrap_or_else(PoisonError::into_inner);
        let sprung = traps.iter_mut().position(|trap| trap.is_sprung(name, path, deciding))?;
        Some(traps.swap_remove(sprung).fate)
    }

    /// Whether this thread makes a decision for all ranks.
    pub(crate) fn is_deciding(&self) -> bool {
        let deciding = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        deciding.iter().any(|(thread, ..)| *thread == thread::current().id())
    }

    /// Waits until the simulation says that `time` has passed.
    pub(crate) fn linger(&self, time: Duration) {
        let (resume, resumed) = channel();
        self.say(Word::Slow { time, resume });
        // Until the other end is dropped.
        let _ = resumed.recv();
    }

    pub(crate) fn say(&self, word: Word) {
        if !self.is_dead() {
            // Without a simulation no rank waits for an answer either.
            let _ = self.words.lock().unwrap_or_else(PoisonError::into_inner).send(word);
        }
    }

    fn crashed(&self) -> Error {
        Error::Lost { rank: self.rank, cause: "its process has crashed".to_owned() }
    }

    fn decide(&self, topic: &str, parts: Vec<Vec<u8>>, decide: Decide<'_>) -> Result<Vec<Vec<u8>>, String> {
        let stage = topic.split_once(' ').map_or(topic, |(_, stage)| stage).to_owned();
        let deciding = || self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let here = thread::current().id();
        deciding().push((here, stage, 0));
        let decision = panic::catch_unwind(AssertUnwindSafe(|| decide(parts)));
        deciding().retain(|(thread, ..)| *thread != here);
        decision.unwrap_or_else(|_| Err("the decision panicked".to_owned()))
    }
}

/// A rank's place in a simulated meeting: every call waits until the simulation answers it.
pub(crate) struct ProcessCoord {
    pub(crate) process: Arc<Process>,
    pub(crate) world: u32,
    pub(crate) meeting: Meeting,
}

impl Coord for ProcessCoord {
    fn rank(&self) -> u32 {
        self.process.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn meeting(&self) -> Meeting {
        self.meeting
    }

    fn host(&self) -> &str {
        "simulated"
    }

    fn absent(&self, _topic: &str) -> Absent {
        Absent::default()
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Contribution,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        let process = &self.process;
        let (reply, replies) = channel();
        process.say(Word::Called(Call { rank: self.rank(), topic: topic.to_owned(), contribution, deadline, reply }));
        let answer = match replies.recv() {
            Ok(Reply::Decide(parts)) => {
                process.say(Word::Decided(process.decide(topic, parts, decide)));
                replies.recv()
            }
            answer => answer,
        };
        match answer {
            Ok(Reply::Answer(answer)) if !process.is_dead() => answer,
            _ => Err(process.crashed()),
        }
    }

    fn hurry(&self, topic: &str) {
        self.process.say(Word::Hurries { rank: self.rank(), topic: topic.to_owned() });
    }
}
