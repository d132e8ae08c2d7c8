//! Streams: queues, each worked off in order by a thread of its own. Events: marks in such a queue.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::memory::{self, Copy};
use crate::state::{Answer, Code, INVALID_HANDLE, current, state};

type Job = Box<dyn FnOnce(&mut Delays) + Send>;

/// A queue of jobs; its thread ends when the queue does.
pub(crate) struct Stream {
    jobs: Sender<Job>,
}

/// Something that happens once.
#[derive(Default)]
pub(crate) struct Flag {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Flag {
    pub(crate) fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_set {
            is_set = self.changed.wait(is_set).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How long a device takes to get to the next job.
struct Delays(u64);

impl Delays {
    fn sleep(&mut self) {
        let delay_max_us = state().delay_max_us;
        if delay_max_us > 0 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            thread::sleep(Duration::from_micros(self.0 % (delay_max_us + 1)));
        }
    }
}

impl Stream {
    fn new(seed: u64) -> Stream {
        let (jobs, queue) = channel::<Job>();
        thread::spawn(move || {
            let mut delays = Delays(seed | 1);
            queue.into_iter().for_each(|job| job(&mut delays));
        });
        Stream { jobs }
    }

    fn push(&self, job: impl FnOnce(&mut Delays) + Send + 'static) -> Answer {
        self.jobs.send(Box::new(job)).map_err(|_| INVALID_HANDLE)
    }

    /// A flag that is set when everything is done that the stream has been given.
    fn mark(&self) -> Result<Arc<Flag>, Code> {
        let flag = Arc::<Flag>::default();
        let set = Arc::clone(&flag);
        self.push(move |_| set.set())?;
        Ok(flag)
    }
}

/// The stream of that handle in the thread's context; 0 is the default one.
fn stream(handle: usize) -> Result<Arc<Stream>, Code> {
    let (device, mut state) = (current()?, state());
    if handle == 0 && !state.streams.contains_key(&(0, device)) {
        let stream = Arc::new(Stream::new(state.seed));
        state.streams.insert((0, device), stream);
    }
    state.streams.get(&(handle, device)).map(Arc::clone).ok_or(INVALID_HANDLE)
}

pub(crate) fn create(place: usize) -> Answer {
    let (device, mut state) = (current()?, state());
    let handle = state.handle();
    let stream = Arc::new(Stream::new(state.seed.wrapping_mul(handle as u64 | 1)));
    state.streams.insert((handle, device), stream);
    memory::put(place, handle)
}

pub(crate) fn destroy(handle: usize) -> Answer {
    let key = (handle, current()?);
    state().streams.remove(&key).map(drop).ok_or(INVALID_HANDLE)
}

pub(crate) fn synchronize(handle: usize) -> Answer {
    stream(handle)?.mark()?.wait();
    state().lost.map_or(Ok(()), Err)
}

pub(crate) fn create_event(place: usize) -> Answer {
    let mut state = state();
    let handle = state.handle();
    let flag = Arc::<Flag>::default();
    flag.set();
    state.events.insert(handle, flag);
    memory::put(place, handle)
}

pub(crate) fn destroy_event(handle: usize) -> Answer {
    state().events.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
}

pub(crate) fn record(event: usize, handle: usize) -> Answer {
    let mark = stream(handle)?.mark()?;
    *state().events.get_mut(&event).ok_or(INVALID_HANDLE)? = mark;
    Ok(())
}

fn recorded(event: usize) -> Result<Arc<Flag>, Code> {
    state().events.get(&event).map(Arc::clone).ok_or(INVALID_HANDLE)
}

pub(crate) fn synchronize_event(event: usize) -> Answer {
    recorded(event)?.wait();
    state().lost.map_or(Ok(()), Err)
}

pub(crate) fn wait_event(handle: usize, event: usize) -> Answer {
    let flag = recorded(event)?;
    if state().forgets_waits {
        return Ok(());
    }
    stream(handle)?.push(move |_| flag.wait())
}

pub(crate) fn copy(copy: Copy, handle: usize) -> Answer {
    let stream = stream(handle)?;
    let is_asynchronous = state().memory.admit(&copy)?;
    stream.push(move |delays| {
        delays.sleep();
        let mut state = state();
        if state.lost.is_none()
            && let Err(code) = state.memory.make(&copy)
        {
            state.lost = Some(code);
        }
        state.memory.retire(&copy);
    })?;
    if !is_asynchronous {
        stream.mark()?.wait();
    }
    Ok(())
}

/// Work that goes on until all streams are released.
pub(crate) fn hold(handle: usize) -> Answer {
    let flag = Arc::<Flag>::default();
    state().held.push(Arc::clone(&flag));
    stream(handle)?.push(move |_| flag.wait())
}

/// Work that takes its time and then writes memory.
pub(crate) fn kernel(handle: usize, address: usize, bytes: usize, value: u8, takes_us: u64) -> Answer {
    stream(handle)?.push(move |_| {
        thread::sleep(Duration::from_micros(takes_us));
        let mut state = state();
        if let Err(code) = state.memory.fill(address, bytes, value) {
            state.lost = Some(code);
        }
    })
}
