//! How often a planned job should save, from its size and rates.

use std::fmt::Write;

use serde::Serialize;
use shardfast_engine::Result;
use shardfast_engine::interval::{Bounds, Costs, Forecast, Interval, Limit};

use crate::args::Question;
use crate::text;

/// What the command answers.
#[derive(Debug, Serialize)]
pub(crate) struct Answer {
    #[serde(flatten)]
    interval: Interval,
    cost_s: f64,
    lag_s: f64,
    step_s: f64,
    mtbf_s: f64,
    restart_s: f64,
    bytes: u64,
    bytes_per_rank: u64,
}

/// The interval that wastes least.
///
/// # Errors
/// `Invalid` for bounds that no interval meets.
pub(crate) fn answer(asked: &Question) -> Result<Answer> {
    let per_rank = asked.storage_per_rank.map(|rate| rate.saturating_mul(asked.ranks));
    let job = Forecast {
        bytes: asked.parameters.saturating_mul(asked.bytes_per_parameter),
        ranks: asked.ranks,
        copy_bytes_per_s: asked.copy,
        storage_bytes_per_s: asked.storage.or(per_rank).unwrap_or(u64::MAX),
    };
    let costs = Costs {
        step_s: asked.step,
        cost_s: asked.cost.unwrap_or_else(|| job.cost_s()),
        lag_s: job.lag_s(),
        mtbf_s: asked.mtbf,
        restart_s: asked.restart.unwrap_or(0.0),
    };
    let Costs { step_s, cost_s, lag_s, mtbf_s, restart_s } = costs;
    let interval = costs.best(Bounds { at_least: asked.at_least, at_most: asked.at_most })?;
    let (bytes, bytes_per_rank) = (job.bytes, job.bytes_per_rank());
    Ok(Answer { interval, cost_s, lag_s, step_s, mtbf_s, restart_s, bytes, bytes_per_rank })
}

impl Answer {
    /// It in words.
    pub(crate) fn text(&self) -> String {
        let Answer { interval, cost_s, lag_s, mtbf_s, restart_s, bytes, bytes_per_rank, .. } = self;
        let why = match interval.limit {
            Limit::Waste => "least time is wasted so",
            Limit::Storage => "the storage takes no more saves",
            Limit::AtLeast => "as --at-least says",
            Limit::AtMost => "as --at-most says",
        };
        let steps = text::count(interval.steps, "step", "steps");
        let mut out = format!("save every {steps} ({}): {why}\n", text::duration(interval.interval_s));
        let mut line = |name: &str, said: String| {
            let _ = writeln!(out, "  {name:<10} {said}");
        };
        line("waste", format!("{:.2}%, lost to saves and failures", interval.waste * 100.0));
        line("state", format!("{}, {} a rank", text::size(*bytes), text::size(*bytes_per_rank)));
        let (cost, lag) = (text::duration(*cost_s), text::duration(*lag_s));
        line("a save", format!("costs {cost} of training, commits {lag} after its step"));
        let restart = match restart_s {
            0.0 => "restarts not counted".to_owned(),
            _ => format!("a restart takes {}", text::duration(*restart_s)),
        };
        line("failures", format!("one in {}, {restart}", text::duration(*mtbf_s)));
        out
    }
}
