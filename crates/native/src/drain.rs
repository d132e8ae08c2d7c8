//! Sends checkpoints from the local disk to the run's own place.

use std::sync::Arc;

use pyo3::prelude::*;
use shardfast_engine::retention::{Best, Keep, Spared};
use shardfast_tools::drain;

use crate::errors::raise;
use crate::interrupt::interruptible;
use crate::process::Own;
use crate::session::{Session, seconds};

/// A checkpoint that no rule keeps, and that stays: its URL and the reason.
type Stays = (String, String);

/// Sends the checkpoints of one run from the local disk to the run's own place, and keeps some on both. One rank has
/// it.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Drain {
    drain: Own<Arc<drain::Drain>>,
}

#[pymethods]
impl Drain {
    /// Makes the drain of the run at `url` whose checkpoints are saved at `near`, at most `rate` bytes per second. The
    /// rules are those of `Retention` for the run's own place.
    #[new]
    #[pyo3(signature = (near, url, *, last, every, best, rate, timeout_s))]
    fn new(
        near: &str,
        url: &str,
        last: Option<u64>,
        every: Option<u64>,
        best: Vec<(String, u64, bool)>,
        rate: Option<u64>,
        timeout_s: f64,
    ) -> PyResult<Drain> {
        let within = seconds(timeout_s)?;
        let best = best.into_iter().map(|(metric, count, largest)| Best { metric, count, largest }).collect();
        let drain = drain::Drain::new(near, url, &Keep { last, every, best }, rate, within).map_err(raise)?;
        Ok(Drain { drain: Own::new("this drain", Arc::new(drain)) })
    }

    /// Sends and deletes from now on only while the job of that session is the newest of the run.
    fn begin(&self, session: &Session) -> PyResult<()> {
        self.drain.get()?.begin(session.engine()?);
        Ok(())
    }

    /// Sends from now on as the job whose checkpoints the local disk has, if that is the newest of the run; returns
    /// whether it is.
    fn stand_in(&self, py: Python<'_>) -> PyResult<bool> {
        let drain = self.drain.get()?;
        py.detach(|| drain.stand_in()).map_err(raise)
    }

    /// Sends the checkpoint that waits longest: its step, the bytes that were sent, the checkpoints of the run's own
    /// place that stay though no rule keeps them, and what failed beside it; `None` if none waits.
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn next(&self, py: Python<'_>) -> PyResult<Option<(u64, u64, Vec<Stays>, Option<String>)>> {
        let drain = self.drain.get()?;
        let sent = py.detach(|| drain.next()).map_err(raise)?;
        Ok(sent.map(|sent| {
            let failure = sent.failure.map(|error| error.to_string());
            (sent.step, sent.bytes, stays(sent.spared), failure)
        }))
    }

    /// Sends from now on only the steps that `every` divides, and those that are chosen.
    #[pyo3(signature = (every))]
    fn send_every(&self, every: Option<u64>) -> PyResult<()> {
        self.drain.get()?.send_every(every);
        Ok(())
    }

    /// Has the newest step sent that is there.
    fn choose_newest(&self, py: Python<'_>) -> PyResult<()> {
        let drain = self.drain.get()?;
        interruptible(py, || drain.choose_newest())
    }

    /// Returns the newest step that the run's own place has now.
    fn reached(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let drain = self.drain.get()?;
        interruptible(py, || drain.reached())
    }

    /// Returns whether a newer job saves into the run, so that nothing is sent any more.
    fn is_overtaken(&self) -> PyResult<bool> {
        Ok(self.drain.get()?.is_overtaken())
    }

    /// Ends the sending that is under way, and each one that begins later.
    fn stop(&self) -> PyResult<()> {
        self.drain.get()?.stop();
        Ok(())
    }

    /// Applies the rules of the local disk, as `Retention.retain` does; returns also the steps that left unsent.
    #[allow(clippy::type_complexity)] // it is what Python gets
    fn retain(&self, py: Python<'_>, made: Vec<u64>) -> PyResult<(Vec<u64>, Vec<Stays>, Vec<u64>)> {
        let drain = self.drain.get()?;
        let (retained, skipped) = interruptible(py, || drain.retain(&made))?;
        Ok((retained.left, stays(retained.spared), skipped))
    }

    /// Deletes the files of checkpoints of the local disk that were taken back, as `Retention.clear` does.
    #[pyo3(signature = (steps))]
    fn clear(&self, py: Python<'_>, steps: Option<Vec<u64>>) -> PyResult<Vec<u64>> {
        let drain = self.drain.get()?;
        interruptible(py, || drain.clear(steps.as_deref()))
    }
}

fn stays(spared: Vec<Spared>) -> Vec<Stays> {
    spared.into_iter().map(|spared| (spared.url, spared.reason)).collect()
}

/// Returns the place of the run at `url` below the directory `local`, which is to be on a disk of this machine.
#[pyfunction]
pub(crate) fn near_place(py: Python<'_>, local: &str, url: &str) -> PyResult<String> {
    py.detach(|| drain::near_place(local, url)).map_err(raise)
}
