//! The driver's state: contexts, faults to come, captures.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::DEVICES;
use crate::answer::{
    Answer, CAPTURE_UNSUPPORTED, Code, ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, get, put,
};
use crate::memory::Memory;
use crate::ptx::Kernels;
use crate::queue::{Flag, Stream};

const CAPTURE_MODE_RELAXED: u32 = 2;

/// Calls that need no context.
const CONTEXT_FREE: [&str; 9] = [
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// Calls that would break another thread's capture.
const UNSAFE_IN_CAPTURE: [&str; 6] = [
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
];

/// A call that will fail.
struct Fault {
    name: String,
    /// Calls of that name until it does.
    left: u64,
    code: Code,
    loses_device: bool,
}

#[derive(Default)]
pub(crate) struct State {
    is_initialised: bool,
    /// The error of a device that is lost, which every call then gives.
    pub(crate) lost: Option<Code>,
    faults: Vec<Fault>,
    calls: HashMap<String, u64>,
    capturing: BTreeSet<usize>,
    retained: [u32; DEVICES as usize],
    pub(crate) forgets_waits: bool,
    pub(crate) seed: u64,
    pub(crate) delay_max_us: u64,
    pub(crate) memory: Memory,
    pub(crate) kernels: Kernels,
    pub(crate) streams: HashMap<(usize, usize), Arc<Stream>>,
    /// Each with what was recorded last.
    pub(crate) events: HashMap<usize, Arc<Flag>>,
    handles: usize,
    /// What streams that are held wait for.
    pub(crate) held: Vec<Arc<Flag>>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's handle is its device's number plus this.
const CONTEXT_BASE: usize = 0xc0de_0000;

/// The device of the thread's context.
pub(crate) fn current() -> Result<usize, Code> {
    let context = CONTEXTS.with_borrow(|contexts| contexts.last().copied()).ok_or(INVALID_CONTEXT)?;
    Ok(context - CONTEXT_BASE)
}

/// What every call goes through.
pub(crate) fn call(name: &str, body: impl FnOnce() -> Answer) -> Code {
    let admitted = state().admit(name);
    admitted.and_then(|()| body()).err().unwrap_or(0)
}

impl State {
    fn admit(&mut self, name: &str) -> Answer {
        if name.starts_with("fake") || name.starts_with("cuGetError") {
            return Ok(());
        }
        *self.calls.entry(name.to_owned()).or_default() += 1;
        if !self.is_initialised && name != "cuInit" {
            return Err(NOT_INITIALIZED);
        }
        if !CONTEXT_FREE.contains(&name) {
            current()?;
        }
        if let Some(at) = self.faults.iter().position(|fault| fault.name == name) {
            self.faults[at].left -= 1;
            if self.faults[at].left == 0 {
                let fault = self.faults.swap_remove(at);
                if fault.loses_device {
                    self.lost = Some(fault.code);
                }
                return Err(fault.code);
            }
        }
        if !self.capturing.is_empty() && UNSAFE_IN_CAPTURE.contains(&name) && CAPTURE_MODE.get() != CAPTURE_MODE_RELAXED
        {
            return Err(CAPTURE_UNSUPPORTED);
        }
        match self.lost {
            Some(code) if !CONTEXT_FREE.contains(&name) && name != "cuCtxPopCurrent_v2" => Err(code),
            _ => Ok(()),
        }
    }

    pub(crate) fn init(&mut self, flags: u32) -> Answer {
        self.is_initialised = true;
        if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.handles += 1;
        0xfa_0000 + self.handles * 16
    }

    pub(crate) fn retain(&mut self, context: usize, device: i32) -> Answer {
        self.retained[device as usize] += 1;
        put(context, CONTEXT_BASE + device as usize)
    }

    pub(crate) fn release(&mut self, device: i32) -> Answer {
        let retained = &mut self.retained[device as usize];
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }

    pub(crate) fn is_capturing(&self, stream: usize) -> bool {
        self.capturing.contains(&stream)
    }

    /// Unlocks memory; a device that still copies there is lost.
    pub(crate) fn unregister(address: usize) -> Answer {
        let mut state = state();
        if state.memory.unregister(address)? {
            state.lost = Some(ILLEGAL_ADDRESS);
        }
        Ok(())
    }

    pub(crate) fn release_streams(&mut self) -> Answer {
        self.held.drain(..).for_each(|flag| flag.set());
        Ok(())
    }

    pub(crate) fn seed(&mut self, seed: u64, delay_max_us: u64) -> Answer {
        (self.seed, self.delay_max_us) = (seed, delay_max_us);
        Ok(())
    }

    pub(crate) fn fail(&mut self, name: String, nth: u64, code: Code, loses_device: bool) -> Answer {
        self.faults.push(Fault { name, left: nth, code, loses_device });
        Ok(())
    }

    pub(crate) fn forget_waits(&mut self, forgets: bool) -> Answer {
        self.forgets_waits = forgets;
        Ok(())
    }

    pub(crate) fn capture(&mut self, stream: usize, captures: bool) -> Answer {
        if captures {
            self.capturing.insert(stream);
        } else {
            self.capturing.remove(&stream);
        }
        Ok(())
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }

    /// Streams, events and modules that were made and not destroyed; memory, locked ranges and contexts that were not
    /// given back.
    pub(crate) fn live(&self) -> u64 {
        let streams = self.streams.keys().filter(|(handle, _)| *handle != 0).count();
        let contexts: u32 = self.retained.iter().sum();
        let memory = self.memory.locked() + self.memory.given();
        (streams + self.events.len() + self.kernels.modules.len() + memory) as u64 + u64::from(contexts)
    }
}

pub(crate) fn push_context(context: usize) -> Answer {
    let device = context.checked_sub(CONTEXT_BASE).ok_or(INVALID_CONTEXT)?;
    if state().retained.get(device).is_none_or(|&retained| retained == 0) {
        return Err(INVALID_CONTEXT);
    }
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
    Ok(())
}

pub(crate) fn pop_context(context: usize) -> Answer {
    let popped = CONTEXTS.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
    put(context, popped)
}

pub(crate) fn exchange_capture_mode(mode: usize) -> Answer {
    let before = CAPTURE_MODE.replace(get(mode)?);
    put(mode, before)
}
