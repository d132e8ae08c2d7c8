//! Counts the processes that use a keeper, and tells when none has for a while.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Processes that have connections.
pub(crate) struct Users {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether a process has told the keeper to leave.
    leaves: AtomicBool,
    /// Whether the keeper's own process reads what it sends: those connections are no use.
    sends: AtomicBool,
}

struct State {
    /// Connections of each process.
    connections: BTreeMap<u32, usize>,
    /// Time since which there is none.
    unused_since: Instant,
    /// The keeper ends: nothing is served any more.
    has_ended: bool,
}

/// Use of a keeper by a connection; ends when dropped.
pub(crate) struct Use<'a> {
    users: &'a Users,
    /// Process that is counted.
    process: Option<u32>,
}

impl Default for Users {
    fn default() -> Self {
        let state = State { connections: BTreeMap::new(), unused_since: Instant::now(), has_ended: false };
        Users {
            state: Mutex::new(state),
            changed: Condvar::new(),
            leaves: AtomicBool::new(false),
            sends: AtomicBool::new(false),
        }
    }
}

impl Users {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection of a process; `None` if the keeper ends.
    pub(crate) fn begin(&self, process: u32) -> Option<Use<'_>> {
        let mut state = self.lock();
        if state.has_ended {
            return None;
        }
        let is_own = process == std::process::id() && self.sends.load(Ordering::Acquire);
        if !is_own {
            *state.connections.entry(process).or_default() += 1;
            self.changed.notify_all();
        }
        Some(Use { users: self, process: (!is_own).then_some(process) })
    }

    /// Calls `send`, which reads the keeper's objects.
    pub(crate) fn while_sending<T>(&self, send: impl FnOnce() -> T) -> T {
        self.sends.store(true, Ordering::Release);
        let sent = send();
        self.sends.store(false, Ordering::Release);
        sent
    }

    /// Returns the number of processes.
    pub(crate) fn count(&self) -> usize {
        self.lock().connections.len()
    }

    /// Has the keeper leave as soon as it has sent what only it has.
    pub(crate) fn leave(&self) {
        self.leaves.store(true, Ordering::Release);
        let _state = self.lock();
        self.changed.notify_all();
    }

    /// Has the keeper stay.
    pub(crate) fn stay(&self) {
        self.leaves.store(false, Ordering::Release);
    }

    /// Returns whether the keeper is to leave.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Acquire)
    }

    /// Waits until no process has used the keeper for `linger`, or it is to leave.
    pub(crate) fn wait_until_unused(&self, linger: Duration) {
        let mut state = self.lock();
        while !self.leaves.load(Ordering::Acquire) {
            let left = match state.connections.is_empty() {
                true => linger.saturating_sub(state.unused_since.elapsed()),
                false => linger,
            };
            if left.is_zero() && state.connections.is_empty() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the keeper if no process uses it, or it is to leave; returns whether it ends.
    pub(crate) fn end_if_unused(&self) -> bool {
        let mut state = self.lock();
        state.has_ended = state.connections.is_empty() || self.leaves.load(Ordering::Acquire);
        state.has_ended
    }

    /// Ends the keeper.
    pub(crate) fn end(&self) {
        self.lock().has_ended = true;
    }

    /// Returns whether the keeper has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().has_ended
    }

    /// Returns whether a process uses the keeper within that time.
    pub(crate) fn are_there_within(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.lock();
        loop {
            if !state.connections.is_empty() && !self.leaves.load(Ordering::Acquire) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut state = self.users.lock();
        let Some(process) = self.process else { return };
        let Some(connections) = state.connections.get_mut(&process) else { return };
        *connections -= 1;
        if *connections == 0 {
            state.connections.remove(&process);
            state.unused_since = Instant::now();
            self.users.changed.notify_all();
        }
    }
}
