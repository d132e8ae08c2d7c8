//! Threads that work while the program goes on, and give way to it.
//!
//! A thread that is made, or woken, may take the core of the one that makes or wakes it at once: the scheduler owes it
//! time. In a call that holds up the training that costs as long as the new thread cares to run. So threads for the
//! background are made by one under `SCHED_BATCH` (sched(7)), and inherit this from it; to wake that one takes nobody's
//! core.

#![allow(unsafe_code)] // asks the kernel for a scheduling policy, for which there is no safe call

use std::io;
use std::sync::OnceLock;

use crossbeam_channel::{Sender, unbounded};

/// Half of an ordinary thread's share of a core.
const NICE: i32 = 3;

type Job = Box<dyn FnOnce() + Send>;

/// Does `run` on a thread of its own; `unable` when there is no thread for it.
pub(crate) fn on_a_thread(run: impl FnOnce() + Send + 'static, unable: impl FnOnce(io::Error)) {
    if let Err(error) = std::thread::Builder::new().name("shardfast-save".into()).spawn(run) {
        unable(error);
    }
}

/// Makes threads for the background.
#[derive(Default)]
pub(crate) struct Background {
    /// To the thread that makes them, from the first job on; `None` when there is no such thread.
    maker: OnceLock<Option<Sender<Job>>>,
}

impl Background {
    /// As [`on_a_thread`], on one that gives way.
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

/// From now on this thread, and those that it makes, preempt nobody. Where that is not allowed they are as others are.
fn give_way() {
    let batch = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads a structure of ours, and 0 means this thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &batch) };
}

/// From now on this thread, and those that it makes, have a smaller share of a core than others.
pub(crate) fn take_less() {
    let _ = rustix::process::setpriority_process(None, NICE);
}
