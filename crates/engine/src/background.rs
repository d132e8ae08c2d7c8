//! Background threads that do not preempt the program.
//!
//! A new or woken thread may preempt the thread that makes or wakes it. In a call that holds up the training, that
//! delays the call for as long as the new thread runs. So a maker thread under `SCHED_BATCH` (sched(7)) makes the
//! background threads, which inherit this policy; waking the maker preempts no thread.

#![allow(unsafe_code)] // asks the kernel for a scheduling policy, for which there is no safe call

use std::io;
use std::sync::OnceLock;

use crossbeam_channel::{Sender, unbounded};

/// Half of an ordinary thread's share of a core.
const NICE: i32 = 3;

/// Smallest share of a core that a thread can have.
const LEAST: i32 = 19;

type Job = Box<dyn FnOnce() + Send>;

/// Does `run` on a thread of its own; `unable` when there is no thread for it.
pub(crate) fn on_a_thread(run: impl FnOnce() + Send + 'static, unable: impl FnOnce(io::Error)) {
    if let Err(error) = std::thread::Builder::new().name("shardfast-save".into()).spawn(run) {
        unable(error);
    }
}

/// Makes background threads.
#[derive(Default)]
pub(crate) struct Background {
    /// The channel to the maker thread, from the first job on; `None` if it could not be made.
    maker: OnceLock<Option<Sender<Job>>>,
}

impl Background {
    /// Runs like [`on_a_thread`], on a thread that preempts no other.
    pub(crate) fn run(&self, run: impl FnOnce() + Send + 'static, unable: impl FnOnce(io::Error) + Send + 'static) {
        let job: Job = Box::new(move || on_a_thread(run, unable));
        let refused = match self.maker.get_or_init(maker) {
            Some(maker) => maker.send(job).err().map(|error| error.0),
            None => Some(job),
        };
        refused.into_iter().for_each(|job| job());
    }
}

fn maker() -> Option<Sender<Job>> {
    let (maker, jobs) = unbounded::<Job>();
    let make = move || {
        give_way();
        jobs.iter().for_each(|job| job());
    };
    std::thread::Builder::new().name("shardfast-maker".into()).spawn(make).ok().map(|_| maker)
}

/// Sets that this thread, and those that it makes, preempt no other. Does nothing where that is not permitted.
fn give_way() {
    let batch = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads a structure of ours, and 0 means this thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &batch) };
}

/// Gives this thread, and those that it makes, a smaller share of a core than others have.
pub fn take_less() {
    // The whole job may run at a nice value.
    let own = rustix::process::getpriority_process(None).unwrap_or(0);
    let _ = rustix::process::setpriority_process(None, own + NICE);
}

/// Gives this thread, and those that it makes, what the others leave of the cores.
pub fn take_least() {
    let _ = rustix::process::setpriority_process(None, LEAST);
}
