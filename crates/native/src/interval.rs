//! The interval that wastes least, for `sf.optimal`.

use pyo3::prelude::*;
use shardfast_tools::interval::{self, Bounds, Costs};

use crate::errors::raise;

/// Returns the number of steps between two saves that wastes least, the waste then, and the limit that decided:
/// `waste`, `storage`, `at_least` or `at_most`.
#[pyfunction]
#[pyo3(signature = (*, step_s, cost_s, lag_s, mtbf_s, restart_s, at_least, at_most))]
pub(crate) fn best_interval(
    step_s: f64,
    cost_s: f64,
    lag_s: f64,
    mtbf_s: f64,
    restart_s: f64,
    at_least: u64,
    at_most: Option<u64>,
) -> PyResult<(u64, f64, &'static str)> {
    let costs = Costs { step_s, cost_s, lag_s, mtbf_s, restart_s };
    let best = costs.best(Bounds { at_least, at_most }).map_err(raise)?;
    Ok((best.steps, best.waste, best.limit.name()))
}

/// Returns the mean time between failures, in seconds, after `restarts` failures in `trained_s` seconds.
#[pyfunction]
pub(crate) fn mean_time_between_failures(expected_s: f64, restarts: u64, trained_s: f64) -> f64 {
    interval::mean_time_between_failures(expected_s, restarts, trained_s)
}

/// Returns the seconds of a text such as `6h`.
#[pyfunction]
pub(crate) fn time_of(text: &str) -> PyResult<f64> {
    interval::seconds(text).map_err(raise)
}
