//! Answers how often a planned job should save, from its size and rates.

use std::fmt::Write;

use serde::Serialize;
use shardfast_engine::{Error, Result};
use shardfast_tools::interval::{Bounds, Costs, Forecast, Interval, Limit};

use crate::args::Question;
use crate::text;

/// The most waste that is shown as a number: with more, the training hardly goes on.
const WASTE_MAX: f64 = 10.0;

/// Answer of the command.
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

/// Returns the interval that wastes least.
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
    let best = costs.best(Bounds { at_least: asked.at_least, at_most: asked.at_most });
    let interval = best.map_err(|error| Error::new(error.kind, with_options(&error.message)))?;
    let (bytes, bytes_per_rank) = (job.bytes, job.bytes_per_rank());
    Ok(Answer { interval, cost_s, lag_s, step_s, mtbf_s, restart_s, bytes, bytes_per_rank })
}

/// Returns a message of the engine with the command's options in place of the engine's names.
fn with_options(message: &str) -> String {
    [("at_least", "--at-least"), ("at_most", "--at-most")].iter().fold(message.to_owned(), |message, (name, option)| {
        message.replace(&format!("{name}="), &format!("{option} ")).replace(name, option)
    })
}

/// Seconds lost for each second of training, as a share of it: `1.18%`, or `more than 1000%`.
fn waste(waste: f64) -> String {
    match waste > WASTE_MAX {
        true => format!("more than {:.0}%", WASTE_MAX * 100.0),
        false => format!("{:.2}%", waste * 100.0),
    }
}

impl Answer {
    /// Formats the answer in words.
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
        line("waste", format!("{}, lost to saves and failures", waste(interval.waste)));
        line("state", format!("{}, {} a rank", text::size(*bytes), text::size(*bytes_per_rank)));
        let lag = text::duration(*lag_s);
        let cost = match cost_s {
            0.0 => "costs the training nothing".to_owned(),
            _ => format!("costs {} of training", text::duration(*cost_s)),
        };
        line("a save", format!("{cost}, commits {lag} after its step"));
        let restart = match restart_s {
            0.0 => "restarts not counted".to_owned(),
            _ => format!("a restart takes {}", text::duration(*restart_s)),
        };
        line("failures", format!("one in {}, {restart}", text::duration(*mtbf_s)));
        out
    }
}
