//! Streams and events by their handles, and what streams are given to do.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::answer::{Answer, Code, ILLEGAL_ADDRESS, INVALID_HANDLE, NOT_READY, put};
use crate::memory::Copy;
use crate::queue::{Flag, Stream};
use crate::state::{State, current, state};

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
    put(place, handle)
}

pub(crate) fn destroy(handle: usize) -> Answer {
    let key = (handle, current()?);
    state().streams.remove(&key).map(drop).ok_or(INVALID_HANDLE)
}

pub(crate) fn synchronize(handle: usize) -> Answer {
    stream(handle)?.mark()?.wait();
    state().lost.map_or(Ok(()), Err)
}

/// Waits for all streams of a device.
pub(crate) fn synchronize_all(device: usize) -> Answer {
    let streams: Vec<Arc<Stream>> =
        state().streams.iter().filter(|((_, of), _)| *of == device).map(|(_, stream)| Arc::clone(stream)).collect();
    streams.iter().try_for_each(|stream| stream.mark().map(|flag| flag.wait()))
}

pub(crate) fn create_event(place: usize) -> Answer {
    let mut state = state();
    let handle = state.handle();
    let flag = Arc::<Flag>::default();
    flag.set();
    state.events.insert(handle, flag);
    put(place, handle)
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

/// Milliseconds between what two events mark, which has happened.
pub(crate) fn elapsed(place: usize, from: usize, to: usize) -> Answer {
    let (Some(from), Some(to)) = (recorded(from)?.at(), recorded(to)?.at()) else { return Err(NOT_READY) };
    let ms = |later: Instant, earlier: Instant| later.saturating_duration_since(earlier).as_secs_f32() * 1e3;
    put(place, ms(to, from) - ms(from, to))
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
        let delay_max_us = state().delay_max_us;
        delays.sleep(delay_max_us);
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

/// Gives a stream work. A device that fails at it is lost, and does nothing any more.
pub(crate) fn begin(handle: usize, work: impl FnOnce(&mut State) -> Answer + Send + 'static) -> Answer {
    stream(handle)?.push(move |delays| {
        let delay_max_us = state().delay_max_us;
        delays.sleep(delay_max_us);
        let mut state = state();
        if state.lost.is_none()
            && let Err(code) = work(&mut state)
        {
            state.lost = Some(code);
        }
    })
}

/// Sets bytes of a device's memory.
pub(crate) fn set(address: usize, value: u8, bytes: usize, handle: usize) -> Answer {
    state().memory.bytes(address..address + bytes)?;
    begin(handle, move |state| state.memory.fill(address, bytes, value).map_err(|_| ILLEGAL_ADDRESS))
}

/// Work that goes on until all streams are released.
pub(crate) fn hold(handle: usize) -> Answer {
    let flag = Arc::<Flag>::default();
    state().held.push(Arc::clone(&flag));
    stream(handle)?.push(move |_| flag.wait())
}

/// Work that takes its time and then writes these bytes.
pub(crate) fn update(handle: usize, address: usize, bytes: Vec<u8>, takes_us: u64) -> Answer {
    stream(handle)?.push(move |_| {
        thread::sleep(Duration::from_micros(takes_us));
        let mut state = state();
        if let Err(code) = state.memory.write(address, bytes.as_ptr() as usize, bytes.len()) {
            state.lost = Some(code);
        }
    })
}

/// Frees memory behind what the stream has to do, as frameworks use freed memory again. From any thread.
pub(crate) fn free(handle: usize, address: usize) -> Answer {
    let streams = &state().streams;
    let found = streams.iter().find(|((known, _), _)| *known == handle).map(|(_, stream)| Arc::clone(stream));
    found.ok_or(INVALID_HANDLE)?.push(move |_| {
        let mut state = state();
        if let Err(code) = state.memory.free(address) {
            state.lost = Some(code);
        }
    })
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
