//! Computes how many steps to train between two saves so that least time is wasted. Pure: no clock, no storage, no
//! state.
//!
//! # The model
//! Failures come at random, `M` seconds after each other on average. The training saves after every `T` seconds of
//! quiet steps. A save costs `c` seconds, and commits `lag` seconds after the step that it saves. A restart takes `R`
//! seconds, and goes on from the newest commit.
//!
//! Between a restart and the next failure, which come every `M + R` seconds, `exp(-(T + lag) / M) / (1 - exp(-(T + c) /
//! M))` saves commit on average (the sum of the probabilities that the first, the second, ... one does). Each is worth
//! `T` seconds of training. So the time wasted for each second of training is
//!
//! ```text
//! waste = (M + R) / T · exp((T + lag) / M) · (1 - exp(-(T + c) / M)) - 1
//! ```
//!
//! Its derivative by `T` is zero where `(1 - T / M) exp(T / M) = exp(-c / M)`, that is at `T = M (1 + W0(-exp(-1 - c /
//! M)))`, with the principal branch of Lambert's function. Neither `lag` nor `R` moves this optimum. For small `c / M`
//! it is Young's `sqrt(2 c M)` (1974). GoCkpt (arXiv 2511.07035, section 3.1) has the first order of this waste,
//! without the lag.

use serde::Serialize;
use shardfast_transfer::error::{Error, Result};

/// Least share of the time between two saves in which no save is in flight. The cost of a save can only be measured
/// against such quiet steps: without them an interval that is too short would stay too short.
const QUIET_SHARE: f64 = 0.1;

/// Figures that determine the interval, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Seconds of a step while no save is in flight; above zero.
    pub step_s: f64,
    /// Cost of a save for the training: its waits, and the slowdown of steps while it is in flight.
    pub cost_s: f64,
    /// Seconds from the saved step to the commit.
    pub lag_s: f64,
    /// Mean time between failures of the whole job; above zero.
    pub mtbf_s: f64,
    /// Seconds from a failure to the first step after it.
    pub restart_s: f64,
}

/// The user's bounds of the interval, in steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Least number of steps, at least 1.
    pub at_least: u64,
    /// Largest number of steps; `None` for no bound.
    pub at_most: Option<u64>,
}

/// Interval between saves, and its waste.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// Steps from one save to the next.
    pub steps: u64,
    /// The same in seconds of quiet steps.
    pub interval_s: f64,
    /// Seconds wasted for each second of training.
    pub waste: f64,
    /// Limit that determined the interval.
    pub limit: Limit,
}

/// Limit that determines an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The interval with the least waste of time.
    Waste,
    /// The storage's throughput: it takes no more saves.
    Storage,
    /// The user's lower bound.
    AtLeast,
    /// The user's upper bound.
    AtMost,
}

impl Limit {
    /// Returns the limit's name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Waste => "waste",
            Limit::Storage => "storage",
            Limit::AtLeast => "at_least",
            Limit::AtMost => "at_most",
        }
    }
}

impl Costs {
    /// Seconds wasted for each second of training, with `interval_s` seconds of quiet steps between two saves.
    pub fn waste(&self, interval_s: f64) -> f64 {
        let Costs { cost_s, lag_s, mtbf_s, restart_s, .. } = *self;
        let failing = -(-(interval_s + cost_s) / mtbf_s).exp_m1();
        (mtbf_s + restart_s) / interval_s * ((interval_s + lag_s) / mtbf_s).exp() * failing - 1.0
    }

    /// Returns the seconds of quiet steps between two saves that waste least, whatever the storage sustains.
    pub fn optimum_s(&self) -> f64 {
        self.mtbf_s * one_plus_w0(self.cost_s / self.mtbf_s)
    }

    /// Returns the fewest seconds between two saves that the storage sustains: a save commits before the next one
    /// begins, and a tenth of the steps are quiet. Two saves in flight would share the storage and take twice as long.
    pub fn sustained_s(&self) -> f64 {
        self.lag_s / (1.0 - QUIET_SHARE)
    }

    /// Returns the number of steps between two saves that wastes least, not below what the storage sustains. The user's
    /// bounds come last: above what the storage sustains they cost more, below it the training waits.
    ///
    /// # Errors
    /// `Invalid` for times that are not finite or negative, for a step or a mean time between failures of zero, and for
    /// bounds that no interval meets.
    pub fn best(&self, bounds: Bounds) -> Result<Interval> {
        self.check()?;
        bounds.check()?;
        let of = |steps: u64| self.waste(steps as f64 * self.step_s);
        let down = ((self.optimum_s() / self.step_s) as u64).max(1);
        let (mut steps, mut limit) =
            (if of(down.saturating_add(1)) < of(down) { down + 1 } else { down }, Limit::Waste);
        let sustained = (self.sustained_s() / self.step_s).ceil() as u64;
        if steps < sustained {
            (steps, limit) = (sustained, Limit::Storage);
        }
        if steps < bounds.at_least {
            (steps, limit) = (bounds.at_least, Limit::AtLeast);
        }
        if let Some(at_most) = bounds.at_most
            && steps > at_most
        {
            (steps, limit) = (at_most, Limit::AtMost);
        }
        // Where failures come faster than steps end, the waste is beyond all numbers.
        let waste = of(steps).min(f64::MAX);
        Ok(Interval { steps, interval_s: steps as f64 * self.step_s, waste, limit })
    }

    fn check(&self) -> Result<()> {
        let Costs { step_s, cost_s, lag_s, mtbf_s, restart_s } = *self;
        let named = [
            ("a step", step_s, true),
            ("the mean time between failures", mtbf_s, true),
            ("the cost of a save", cost_s, false),
            ("the lag of a commit", lag_s, false),
            ("a restart", restart_s, false),
        ];
        for (name, seconds, is_above_zero) in named {
            if !seconds.is_finite() || seconds < 0.0 || (is_above_zero && seconds == 0.0) {
                let expected = if is_above_zero { "above zero" } else { "of zero or more" };
                return Err(Error::invalid(format!("{name}: expected a time {expected}, found {seconds} s")));
            }
        }
        Ok(())
    }
}

impl Bounds {
    fn check(&self) -> Result<()> {
        if self.at_least == 0 {
            return Err(Error::invalid("at_least=0: expected a number of steps of at least 1"));
        }
        match self.at_most {
            Some(at_most) if at_most < self.at_least => Err(Error::invalid(format!(
                "at_least={}, at_most={at_most}: expected at_least to be the smaller one; lower it or raise at_most",
                self.at_least
            ))),
            _ => Ok(()),
        }
    }
}

/// Returns the mean time between failures: `restarts` failures in `trained_s` seconds were observed, and one in the
/// `expected_s` seconds that the user expects.
pub fn mean_time_between_failures(expected_s: f64, restarts: u64, trained_s: f64) -> f64 {
    (expected_s + trained_s) / (1.0 + restarts as f64)
}

/// A job as it is planned, before any save of it was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// Bytes of the whole state.
    pub bytes: u64,
    /// Ranks that share it; at least 1.
    pub ranks: u64,
    /// Bytes that a rank copies to host memory in a second; above zero.
    pub copy_bytes_per_s: u64,
    /// Bytes that the storage takes of all ranks in a second; above zero.
    pub storage_bytes_per_s: u64,
}

impl Forecast {
    /// Bytes that the rank with the most writes.
    pub fn bytes_per_rank(&self) -> u64 {
        self.bytes.div_ceil(self.ranks.max(1))
    }

    /// Returns the cost of a save at most, in seconds, if it only copies: no part of the copy is hidden behind a step.
    pub fn cost_s(&self) -> f64 {
        self.bytes_per_rank() as f64 / self.copy_bytes_per_s as f64
    }

    /// Returns the seconds from the saved step to the commit: copies and writes overlap, and the slower of them
    /// decides.
    pub fn lag_s(&self) -> f64 {
        self.cost_s().max(self.bytes as f64 / self.storage_bytes_per_s as f64)
    }
}

/// Parses a time in seconds: a number with `ms`, `s`, `m`, `h` or `d`, such as `6h`, `1.5d` or `450ms`; without a unit
/// it is in seconds.
///
/// # Errors
/// `Invalid` for a text that is no time above zero.
pub fn seconds(text: &str) -> Result<f64> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let scale = match unit {
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => f64::NAN,
    };
    let found = number.trim_end().parse::<f64>().map_or(f64::NAN, |number| number * scale);
    if found.is_finite() && found > 0.0 {
        return Ok(found);
    }
    Err(Error::invalid(format!(
        "{text:?}: expected a time above zero: a number with ms, s, m, h or d, such as 6h, 30m or 2d"
    )))
}

/// Returns `1 + W0(-exp(-1 - x))` for `x >= 0`, with Lambert's `W0`, to full double precision also where `x` is tiny:
/// there `W0` itself is so close to its branch point, -1, that adding 1 would leave few digits.
///
/// It is the `y` in 0 .. 1 with `-y - ln(1 - y) = x`, found by Newton's method.
fn one_plus_w0(x: f64) -> f64 {
    if x > 36.0 {
        return 1.0; // to the last bit
    }
    // The series of `y` in powers of sqrt(2 x) (Corless et al. 1996, "On the Lambert W function", section 4), or W0(z)
    // = z - z² for small z.
    let mut y = if x < 1.0 {
        let s = (2.0 * x).sqrt();
        s * (1.0 + s * (-1.0 / 3.0 + s * (1.0 / 36.0 + s * (1.0 / 270.0 + s / 4320.0))))
    } else {
        let z = (-1.0 - x).exp();
        1.0 - z - z * z
    };
    if y == 0.0 {
        return 0.0;
    }
    for _ in 0..8 {
        let step = (minus_y_minus_ln_of_rest(y) - x) * (1.0 - y) / y;
        y -= step;
        if step.abs() <= y * f64::EPSILON {
            break;
        }
    }
    y
}

/// Returns `-y - ln(1 - y)` for `0 < y < 1`: for a small `y` its series, since both terms would cancel.
fn minus_y_minus_ln_of_rest(y: f64) -> f64 {
    if y > 0.25 {
        return -y - (-y).ln_1p();
    }
    // y²/2 + y³/3 + ...: of y = 1/4 the term 27 is below the last bit.
    (2..=27).rev().fold(0.0, |sum, k| sum * y + 1.0 / f64::from(k)) * y * y
}

#[cfg(test)]
mod tests {
    use shardfast_store::testing::dice::Dice;

    use super::*;

    const HOUR: f64 = 3600.0;

    fn costs(step_s: f64, cost_s: f64, lag_s: f64, mtbf_s: f64, restart_s: f64) -> Costs {
        Costs { step_s, cost_s, lag_s, mtbf_s, restart_s }
    }

    const FREE: Bounds = Bounds { at_least: 1, at_most: None };

    /// Values of `1 + W0(-exp(-1 - x))` by mpmath with 60 digits.
    #[test]
    fn lamberts_function_has_full_precision_up_to_its_branch_point() {
        for (x, expected) in [
            (1e-18, 1.4142135617064285e-9),
            (1e-12, 1.414212895706507e-6),
            (1e-6, 0.0014135469742886646),
            (0.001, 0.044057192259048084),
            (0.03, 0.2253707459126364),
            (0.0316, 0.23078578433652744),
            (0.1, 0.38318316820829484),
            (0.3, 0.5888868861354236),
            (0.5, 0.698290437315664),
            (0.9, 0.8211374074798767),
            (1.0, 0.8414056604369606),
            (1.5, 0.9102029297761838),
            (2.0, 0.9475309025422851),
            (5.0, 0.9975150806648505),
            (10.0, 0.999983298020256),
            (30.0, 0.9999999999999656),
            (37.0, 1.0),
            (f64::MAX, 1.0),
            (0.0, 0.0),
        ] {
            let found = one_plus_w0(x);
            assert!((found - expected).abs() <= 2.0 * f64::EPSILON * expected, "{x}: {found:?}, expected {expected:?}");
        }
    }

    /// Rows of GoCkpt's table 1: a save that stops the training for 36.8 s, and one that hides nearly all of its cost;
    /// the paper's first order gives 210 s for the one.
    #[test]
    fn the_optimum_and_its_waste_are_those_of_the_paper_but_exact() {
        let slow = costs(0.446, 36.8, 36.8, 600.0, 10.0);
        assert!((slow.optimum_s() - 186.0).abs() < 1.0, "{}", slow.optimum_s());
        let (ours, youngs) = (slow.waste(186.0), slow.waste(210.0));
        assert!((ours - 0.4747).abs() < 0.0001 && (youngs - 0.478).abs() < 0.0005, "{ours} {youngs}");
        let hidden = costs(0.446, 0.175, 2.0, 600.0, 10.0);
        assert!((hidden.optimum_s() - 14.4).abs() < 0.05, "{}", hidden.optimum_s());
        assert!((hidden.waste(14.4) - 0.0448).abs() < 0.0005, "{}", hidden.waste(14.4));
        // Young's square root is the limit for rare failures.
        let rare = costs(1.0, 1.0, 0.0, 1e12, 0.0);
        assert!((rare.optimum_s() / (2.0 * 1e12_f64).sqrt() - 1.0).abs() < 1e-6, "{}", rare.optimum_s());
    }

    #[test]
    fn no_other_number_of_steps_wastes_less() {
        for (step_s, cost_s, mtbf_s) in [(1.0, 2.0, 300.0), (0.45, 0.02, 600.0), (30.0, 1.0, HOUR), (7.0, 900.0, 600.0)]
        {
            let costs = costs(step_s, cost_s, 0.0, mtbf_s, 60.0);
            let best = costs.best(FREE).unwrap();
            assert_eq!(best.limit, Limit::Waste);
            for steps in 1..4 * best.steps {
                assert!(costs.waste(steps as f64 * step_s) >= best.waste, "{costs:?}: {steps} steps, not {best:?}");
            }
        }
    }

    #[test]
    fn storage_and_the_user_bound_the_interval() {
        let hidden = costs(1.0, 0.001, 90.0, 6.0 * HOUR, 0.0);
        let found = |costs: Costs, at_least, at_most| {
            let best = costs.best(Bounds { at_least, at_most }).unwrap();
            (best.steps, best.limit)
        };
        assert_eq!(found(hidden, 1, None), (100, Limit::Storage));
        assert_eq!(found(hidden, 1, Some(50)), (50, Limit::AtMost));
        assert_eq!(found(hidden, 150, None), (150, Limit::AtLeast));
        let cheap = Costs { lag_s: 1.0, cost_s: 1.0, ..hidden };
        assert_eq!(found(cheap, 1, None), (207, Limit::Waste));
        // A save that costs nothing is made after each step.
        assert_eq!(found(Costs { cost_s: 0.0, lag_s: 0.0, ..hidden }, 1, None), (1, Limit::Waste));
        // A step that is longer than the optimum.
        assert_eq!(found(Costs { step_s: 1e6, ..cheap }, 1, None), (1, Limit::Waste));
    }

    #[test]
    fn nonsense_is_refused() {
        let good = costs(1.0, 1.0, 1.0, HOUR, 1.0);
        for (bad, says) in [
            (Costs { step_s: 0.0, ..good }, "a step: expected a time above zero, found 0 s"),
            (
                Costs { mtbf_s: f64::NAN, ..good },
                "the mean time between failures: expected a time above zero, found NaN s",
            ),
            (Costs { cost_s: -1.0, ..good }, "the cost of a save: expected a time of zero or more, found -1 s"),
            (
                Costs { lag_s: f64::INFINITY, ..good },
                "the lag of a commit: expected a time of zero or more, found inf s",
            ),
        ] {
            assert_eq!(bad.best(FREE).unwrap_err().message, says);
        }
        let message = |at_least, at_most| good.best(Bounds { at_least, at_most }).unwrap_err().message;
        assert!(message(0, None).starts_with("at_least=0: expected"));
        assert!(message(9, Some(8)).starts_with("at_least=9, at_most=8: expected at_least"));
    }

    #[test]
    fn times_are_read() {
        for (text, expected) in
            [("6h", 21_600.0), ("30m", 1800.0), ("2d", 172_800.0), ("90", 90.0), ("1.5 h", 5400.0), ("450ms", 0.45)]
        {
            assert_eq!(seconds(text).unwrap(), expected, "{text}");
        }
        for text in ["", "h", "0", "0h", "-1h", "nan", "inf", "infinity", "6 hours", "6h30m", "1e400", "soon", "1w"] {
            let message = seconds(text).unwrap_err().message;
            assert!(message.contains("expected a time above zero") && message.contains(text), "{message}");
        }
    }

    #[test]
    fn failures_that_were_seen_outweigh_the_expectation() {
        assert_eq!(mean_time_between_failures(6.0 * HOUR, 0, 0.0), 6.0 * HOUR);
        assert_eq!(mean_time_between_failures(6.0 * HOUR, 9, 4.0 * HOUR), HOUR);
    }

    #[test]
    fn a_planned_job_is_forecast_from_its_size() {
        let job = Forecast {
            bytes: 84_000_000_000,
            ranks: 8,
            copy_bytes_per_s: 10 << 30,
            storage_bytes_per_s: 2_000_000_000,
        };
        assert_eq!((job.bytes_per_rank(), job.lag_s()), (10_500_000_000, 42.0));
        assert!((job.cost_s() - 0.978).abs() < 0.001);
    }

    /// Draws an exponentially distributed time.
    fn until_failure(dice: &mut Dice, mtbf_s: f64) -> f64 {
        -(-((dice.next() >> 11) as f64 / (1_u64 << 53) as f64)).ln_1p() * mtbf_s
    }

    /// Trains step by step, with a save after every `steps`, until `failures` failures; returns the time wasted for
    /// each second of training that survived. Half of a save's cost stops the training at once, the rest slows down the
    /// next two steps.
    fn simulated(costs: Costs, steps: u64, failures: u32, dice: &mut Dice) -> f64 {
        let (mut wall, mut committed) = (0.0, 0_u64);
        for _ in 0..failures {
            let lifetime = until_failure(dice, costs.mtbf_s);
            wall += lifetime + costs.restart_s;
            let (mut now, mut done, mut durable) = (0.0, 0_u64, 0_u64);
            let mut in_flight = std::collections::VecDeque::new();
            loop {
                now += costs.step_s;
                if done >= steps && done % steps < 2 {
                    now += costs.cost_s / 4.0;
                }
                let is_over = now > lifetime;
                while in_flight.front().is_some_and(|&(at, _)| at <= now.min(lifetime)) {
                    durable = in_flight.pop_front().map_or(durable, |(_, saved)| saved);
                }
                if is_over {
                    break;
                }
                done += 1;
                if done % steps == 0 {
                    in_flight.push_back((now + costs.lag_s, done));
                    now += costs.cost_s / 2.0;
                }
            }
            committed += durable;
        }
        wall / (committed as f64 * costs.step_s) - 1.0
    }

    #[test]
    fn long_simulated_runs_waste_what_the_formula_says() {
        for (seed, (costs, intervals)) in [
            (costs(1.0, 2.0, 0.0, 300.0, 0.0), [10, 33, 100]),
            (costs(1.0, 0.2, 6.0, 200.0, 20.0), [4, 9, 40]),
            (costs(1.0, 8.0, 30.0, 150.0, 15.0), [20, 45, 90]),
        ]
        .into_iter()
        .enumerate()
        {
            for steps in intervals {
                let (found, expected) =
                    (simulated(costs, steps, 100_000, &mut Dice(seed as u64)), costs.waste(steps as f64));
                assert!((found / expected - 1.0).abs() < 0.01, "{costs:?}, {steps} steps: {found}, not {expected}");
            }
        }
    }
}
