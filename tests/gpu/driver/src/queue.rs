//! Streams: queues, each worked off in order by a thread of its own. Events: marks in such a queue.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::answer::{Answer, Code, INVALID_HANDLE};

type Job = Box<dyn FnOnce(&mut Delays) + Send>;

/// A queue of jobs; its thread ends when the queue does.
pub(crate) struct Stream {
    jobs: Sender<Job>,
}

/// Something that happens once.
#[derive(Default)]
pub(crate) struct Flag {
    /// When it did.
    at: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Flag {
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self) {
        *self.lock() = Some(Instant::now());
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self) {
        let mut at = self.lock();
        while at.is_none() {
            at = self.changed.wait(at).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// When it happened, if it did.
    pub(crate) fn at(&self) -> Option<Instant> {
        *self.lock()
    }
}

/// How long a device takes to get to the next job.
pub(crate) struct Delays(u64);

impl Delays {
    pub(crate) fn sleep(&mut self, delay_max_us: u64) {
        if delay_max_us > 0 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            thread::sleep(Duration::from_micros(self.0 % (delay_max_us + 1)));
        }
    }
}

impl Stream {
    pub(crate) fn new(seed: u64) -> Stream {
        let (jobs, queue) = channel::<Job>();
        thread::spawn(move || {
            let mut delays = Delays(seed | 1);
            queue.into_iter().for_each(|job| job(&mut delays));
        });
        Stream { jobs }
    }

    pub(crate) fn push(&self, job: impl FnOnce(&mut Delays) + Send + 'static) -> Answer {
        self.jobs.send(Box::new(job)).map_err(|_| INVALID_HANDLE)
    }

    /// A flag that is set when everything is done that the stream has been given.
    pub(crate) fn mark(&self) -> Result<Arc<Flag>, Code> {
        let flag = Arc::<Flag>::default();
        let set = Arc::clone(&flag);
        self.push(move |_| set.set())?;
        Ok(flag)
    }
}
