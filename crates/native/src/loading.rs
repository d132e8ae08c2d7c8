//! Loads whose bytes travel between ranks through the program's own collectives.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use shardfast_engine::carrier::{Round, Rounds};
use shardfast_engine::{Error, Kind, Loaded, PeerReads};

use crate::errors::{invalid, raise};
use crate::process::Own;

/// How often a wait looks for signals: Ctrl-C must not hang.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// A load that runs on a thread of its own and asks for rounds. It owns the memory that it fills until `finish`.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Loading {
    running: Own<Running>,
    world: usize,
}

struct Running {
    /// `None` once the program carries no more rounds.
    rounds: Mutex<Option<Rounds>>,
    thread: Mutex<Option<JoinHandle<shardfast_engine::Result<Loaded>>>>,
}

impl Loading {
    pub(crate) fn new(rounds: Rounds, thread: JoinHandle<shardfast_engine::Result<Loaded>>, world: u32) -> Loading {
        let running = Running { rounds: Mutex::new(Some(rounds)), thread: Mutex::new(Some(thread)) };
        Loading { running: Own::new("this load", running), world: world as usize }
    }
}

impl Running {
    fn with_rounds<T>(&self, of: impl FnOnce(&Rounds) -> T) -> PyResult<T> {
        let rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        rounds.as_ref().map(of).ok_or_else(|| invalid("this load has been finished"))
    }

    fn join(&self) -> Option<shardfast_engine::Result<Loaded>> {
        // A load that waits for a round ends.
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let failed = |_| Err(Error::new(Kind::Internal, "the thread of this load panicked"));
        Some(thread.join().unwrap_or_else(failed))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It writes memory that its caller may free after this.
        self.join();
    }
}

#[pymethods]
impl Loading {
    /// Waits for the next round: how many bytes go to each rank, and these bytes in the order of the ranks; `None` when
    /// this rank needs no more rounds.
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(Vec<usize>, Bound<'py, PyByteArray>)>> {
        let running = self.running.get()?;
        let messages = loop {
            match py.detach(|| running.with_rounds(|rounds| rounds.next(SIGNALS_EVERY)))? {
                Round::Swap(messages) => break messages,
                Round::Waiting => py.check_signals()?,
                Round::Over => return Ok(None),
            }
        };
        let mut sizes = vec![0; self.world];
        for (&rank, message) in &messages {
            sizes[rank as usize] = message.iter().map(|piece| piece.len()).sum();
        }
        let bytes = PyByteArray::new_with(py, sizes.iter().sum(), |out| {
            let mut at = 0;
            for piece in messages.values().flatten() {
                out[at..at + piece.len()].copy_from_slice(piece);
                at += piece.len();
            }
            Ok(())
        })?;
        Ok(Some((sizes, bytes)))
    }

    /// Whether the ranks swap bytes at all; known when `next` has returned.
    #[getter]
    fn is_shared(&self) -> PyResult<bool> {
        self.running.get()?.with_rounds(Rounds::is_shared)
    }

    /// Takes what came in the round: how many bytes from each rank, and these bytes in the order of the ranks.
    fn received(&self, sizes: Vec<usize>, data: &Bound<'_, PyByteArray>) -> PyResult<()> {
        if sizes.len() != self.world || sizes.iter().sum::<usize>() != data.len() {
            let (ranks, world, found) = (sizes.len(), self.world, data.len());
            return Err(invalid(format!("{found} bytes of {ranks} ranks: expected those of {world}")));
        }
        let bytes = data.to_vec();
        let (mut at, mut messages) = (0, BTreeMap::new());
        for (rank, size) in (0u32..).zip(sizes) {
            if size > 0 {
                messages.insert(rank, bytes[at..at + size].to_vec());
            }
            at += size;
        }
        self.running.get()?.with_rounds(|rounds| rounds.received(Ok(messages)))
    }

    /// Notes that the round could not be carried out: the load fails on all ranks.
    fn broken(&self, reason: String) -> PyResult<()> {
        let error = Error::new(Kind::Unavailable, reason);
        self.running.get()?.with_rounds(|rounds| rounds.received(Err(error)))
    }

    /// Waits for the end of the load; as `Checkpoint.load`. A program that carries no more rounds calls it, too.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Bound<'py, PyBytes>>, Bound<'py, PyDict>)> {
        let running = self.running.get()?;
        let loaded = py.detach(|| running.join()).ok_or_else(|| invalid("this load has been finished"))?;
        said(py, loaded.map_err(raise)?)
    }
}

/// A load's values, and what was moved for it: bytes_read, bytes_received, bytes_sent, is_shared.
pub(crate) fn said<'py>(py: Python<'py>, loaded: Loaded) -> PyResult<(Vec<Bound<'py, PyBytes>>, Bound<'py, PyDict>)> {
    let traffic = PyDict::new(py);
    traffic.set_item("bytes_read", loaded.traffic.bytes_read)?;
    traffic.set_item("bytes_received", loaded.traffic.bytes_received)?;
    traffic.set_item("bytes_sent", loaded.traffic.bytes_sent)?;
    traffic.set_item("is_shared", loaded.traffic.is_shared)?;
    Ok((loaded.values.into_iter().map(|bytes| PyBytes::new(py, &bytes)).collect(), traffic))
}

pub(crate) fn peer_reads(name: &str) -> PyResult<PeerReads> {
    match name {
        "auto" => Ok(PeerReads::Auto),
        "always" => Ok(PeerReads::Always),
        "never" => Ok(PeerReads::Never),
        _ => Err(invalid(format!("peer_reads={name:?}: expected \"auto\", \"always\" or \"never\""))),
    }
}
