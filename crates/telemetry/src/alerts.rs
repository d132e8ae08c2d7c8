//! Decides from the saves of a run which alerts fire and which are resolved.
//!
//! Pure rules: saves come in the order of time, moments carry the time and what else is known then. A rule compares a
//! save with the median of those before it, so that it speaks only once there are some.

use std::collections::VecDeque;

use serde::Serialize;
use shardfast_engine::{Error, Result};
use shardfast_store::said_bytes;

use crate::report::Operation;
use crate::verdicts::{Verdict, median, said_ms};

/// Saves that medians are of, the newest.
pub(crate) const KEPT: usize = 100;

/// Saves before a save that a rule compares it with, at least.
const BEFORE_MIN: usize = 5;

/// Milliseconds that a save of a low rate must take longer than it would at the median rate.
const SLOWER_MIN_MS: f64 = 1e3;

/// Median stalls, and milliseconds, that a stall must exceed where no bound is given.
const STALL: (f64, f64) = (10.0, 5e3);

/// Milliseconds without a durable checkpoint that are never too long, whatever the interval between saves.
const OVERDUE_MIN_MS: f64 = 60e3;

/// Times that a save must take of the median one, and milliseconds at least, before it counts as cut off.
const CUT_OFF: (f64, f64) = (10.0, 60e3);

/// Bounds of the rules. Zero turns a rule off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Share of the median rate below which a save is too slow: 0.5.
    pub rate: f64,
    /// Time until the state could change that is too long, in milliseconds; `None` for ten times the median, and more
    /// than 5 s.
    pub stall_ms: Option<f64>,
    /// Usual intervals between two saves after which a durable checkpoint is overdue: 3.
    pub overdue: f64,
    /// Saves in a row in which the same rank, machine or coordinate is slow: 3.
    pub slow: usize,
    /// Saves that must have room in the storage: 2.
    pub room: f64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { rate: 0.5, stall_ms: None, overdue: 3.0, slow: 3, room: 2.0 }
    }
}

impl Rules {
    /// Checks that each bound can be one.
    ///
    /// # Errors
    /// `Invalid`, naming the rule by the command's option.
    pub fn expect_valid(&self) -> Result<()> {
        let wrong = |rule: &str, expected: &str, found: String| {
            Err(Error::invalid(format!("--{rule} {found}: expected {expected}, or 0 to turn the rule off")))
        };
        let is_number = |value: f64, least: f64| value == 0.0 || (value.is_finite() && value >= least);
        match *self {
            Rules { rate, .. } if !(0.0..=1.0).contains(&rate) => {
                wrong("rate", "a share of the median rate, at most 1", rate.to_string())
            }
            Rules { stall_ms: Some(ms), .. } if !is_number(ms, 0.0) => {
                wrong("stall", "a time", format!("{} s", ms / 1e3))
            }
            Rules { overdue, .. } if !is_number(overdue, 1.0) => {
                wrong("overdue", "a number of intervals between saves, at least 1", overdue.to_string())
            }
            Rules { room, .. } if !is_number(room, 0.0) => {
                wrong("room", "a number of saves that have room in the storage", room.to_string())
            }
            _ => Ok(()),
        }
    }
}

/// Condition of a run that an operator is told of, such as a failed save.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alert {
    /// Rule: `failed`, `cut_off`, `overdue`, `rate`, `stall`, `slow`, `room`; of a job also `silent`, `silent_ranks`.
    pub rule: &'static str,
    /// Subject: `run`, a step, or as in a verdict; of a job the URL of the run, or `job`.
    pub subject: String,
    /// Training step of the save that shows it, if one does.
    pub step: Option<u64>,
    /// A sentence with the numbers.
    pub text: String,
}

/// Begin or end of an alert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Either `firing` or `resolved`.
    pub state: &'static str,
    /// Alert that began, or is over.
    #[serde(flatten)]
    pub alert: Alert,
}

/// State of a run at a moment, beside its saves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moment<'a> {
    /// Milliseconds since 1970.
    pub(crate) now_ms: u64,
    /// Saves behind the newest committed one that have no commit: their steps, if known, each with the time since when.
    pub(crate) uncommitted: &'a [(Option<u64>, u64)],
    /// Bytes that the storage can still take, if it tells.
    pub(crate) free_bytes: Option<u64>,
    /// Bytes of a save of all ranks, where the saves do not say it.
    pub(crate) save_bytes: Option<u64>,
    /// Whether the run has ended, so that no more saves are expected.
    pub(crate) has_ended: bool,
}

/// Save that has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<'a> {
    /// Training step, if it is known.
    pub(crate) step: Option<u64>,
    /// Sentence about the failure, if it failed.
    pub(crate) failure: Option<String>,
    /// Time of the request, in milliseconds since 1970, if it is known.
    pub(crate) began_unix_ms: Option<u64>,
    /// Milliseconds until the state could change.
    pub(crate) staged_ms: f64,
    /// Milliseconds until the outcome, if they are known.
    pub(crate) ended_ms: Option<f64>,
    pub(crate) bytes: u64,
    /// Verdicts on it, counted over the saves in a row.
    pub(crate) verdicts: &'a [Verdict],
}

impl<'a> From<&'a Operation> for Saved<'a> {
    fn from(save: &'a Operation) -> Saved<'a> {
        let why = || {
            let why = save.verdicts.iter().find(|verdict| verdict.cause == "failed");
            let why = why.map_or_else(String::new, |verdict| format!(" on {}: {}", verdict.subject, verdict.text));
            format!("the save failed{why}")
        };
        Saved {
            step: Some(save.step),
            failure: (save.outcome == "failed").then(why),
            began_unix_ms: save.began_unix_ms,
            staged_ms: save.staged_ms.unwrap_or(0.0),
            ended_ms: save.ended_ms,
            bytes: save.bytes,
            verdicts: &save.verdicts,
        }
    }
}

/// Facts of a committed save that later ones are compared with.
struct Past {
    durable_ms: f64,
    ended_ms: f64,
    staged_ms: f64,
    bytes: u64,
}

impl Past {
    /// Returns bytes a millisecond.
    fn rate(&self) -> f64 {
        self.bytes as f64 / self.ended_ms.max(1e-3)
    }
}

/// Alerts of a run, followed from save to save.
pub(crate) struct Alerts {
    rules: Rules,
    past: VecDeque<Past>,
    durable_ms: Option<f64>,
    /// Alerts that have begun and are not over, as they are now.
    firing: Vec<Alert>,
    /// The same alerts, as each was when it began.
    told: Vec<Alert>,
}

impl Alerts {
    pub(crate) fn new(rules: Rules) -> Alerts {
        Alerts { rules, past: VecDeque::new(), durable_ms: None, firing: Vec::new(), told: Vec::new() }
    }

    /// Returns the alerts that have begun and are not over.
    pub(crate) fn firing(&self) -> &[Alert] {
        &self.firing
    }

    /// Takes the next save that has ended; returns what began and what is over.
    pub(crate) fn saved<'a>(&mut self, save: impl Into<Saved<'a>>) -> Vec<Change> {
        let Saved { step, failure, began_unix_ms, staged_ms, ended_ms, bytes, verdicts } = save.into();
        if let Some(failure) = failure {
            return self.set("failed", run("failed", step, failure));
        }
        let (Some(began), Some(ended_ms)) = (began_unix_ms, ended_ms) else { return Vec::new() };
        let durable_ms = began as f64 + ended_ms;
        let past = Past { durable_ms, ended_ms, staged_ms, bytes };
        let mut changes = self.durable(durable_ms);
        changes.extend(self.set("rate", self.rate(&past, step)));
        changes.extend(self.set("stall", self.stall(&past, step)));
        changes.extend(self.set("slow", self.slow(step, verdicts)));
        self.past.push_back(past);
        if self.past.len() > KEPT {
            self.past.pop_front();
        }
        changes
    }

    /// Takes a save that was committed, of which nothing else need be known; returns what began and what is over.
    pub(crate) fn durable(&mut self, unix_ms: f64) -> Vec<Change> {
        self.durable_ms = Some(self.durable_ms.map_or(unix_ms, |last| last.max(unix_ms)));
        let mut changes = self.set("failed", Vec::new());
        changes.extend(self.set("overdue", Vec::new()));
        changes
    }

    /// Takes the run as it is at a moment; returns what began and what is over.
    pub(crate) fn at(&mut self, moment: &Moment<'_>) -> Vec<Change> {
        // A time that is still to come is one of a wrong clock.
        self.durable_ms = self.durable_ms.map(|durable| durable.min(moment.now_ms as f64));
        let mut changes = self.set("overdue", self.overdue(moment));
        changes.extend(self.set("cut_off", self.cut_off(moment)));
        changes.extend(self.set("room", self.room(moment)));
        changes
    }

    /// Takes whether the job answers; `silence` says for how long it has not, in milliseconds, if it ever has, and why.
    pub(crate) fn answers(&mut self, silence: Option<(Option<f64>, &str)>) -> Vec<Change> {
        let alert = silence.map(|(for_ms, why)| {
            let text = match for_ms {
                Some(ms) => format!("the job has not answered for {}, or has ended: {why}", said_time(ms)),
                None => format!("the job does not answer: {why}"),
            };
            Alert { rule: "silent", subject: "job".to_owned(), step: None, text }
        });
        self.set("silent", alert.into_iter().collect())
    }

    /// Takes the ranks of a job that do not answer, each with the reason.
    pub(crate) fn ranks_answer(&mut self, silent: &[(u32, String)]) -> Vec<Change> {
        let alert = silent.first().map(|(rank, why)| {
            let text = match silent.len() {
                1 => format!("rank {rank} does not answer: {why}"),
                many => format!("{many} ranks do not answer, the first is rank {rank}: {why}"),
            };
            Alert { rule: "silent_ranks", subject: "job".to_owned(), step: None, text }
        });
        self.set("silent_ranks", alert.into_iter().collect())
    }

    /// Replaces the alerts of a rule by those of now. One that goes on is no change, and has the numbers of now.
    fn set(&mut self, rule: &'static str, now: Vec<Alert>) -> Vec<Change> {
        let is_same = |one: &Alert, other: &Alert| one.rule == other.rule && one.subject == other.subject;
        let is_over = |alert: &Alert| alert.rule == rule && !now.iter().any(|other| is_same(alert, other));
        // That which fired is over: its text may have changed since.
        let over = self.told.iter().filter(|alert| is_over(alert)).cloned();
        let mut changes: Vec<Change> = over.map(|alert| Change { state: "resolved", alert }).collect();
        self.told.retain(|alert| !is_over(alert));
        self.firing.retain(|alert| !is_over(alert));
        for alert in now {
            if let Some(known) = self.firing.iter_mut().find(|known| is_same(known, &alert)) {
                *known = alert;
            } else {
                self.firing.push(alert.clone());
                self.told.push(alert.clone());
                changes.push(Change { state: "firing", alert });
            }
        }
        changes
    }

    fn rate(&self, save: &Past, step: Option<u64>) -> Vec<Alert> {
        let usual = median(self.past.iter().map(Past::rate));
        let slower_ms = save.ended_ms - save.bytes as f64 / usual.max(f64::MIN_POSITIVE);
        if self.past.len() < BEFORE_MIN || save.rate() >= self.rules.rate * usual || slower_ms < SLOWER_MIN_MS {
            return Vec::new();
        }
        let (own, usual) = (said_bytes(save.rate() * 1e3), said_bytes(usual * 1e3));
        run("rate", step, format!("the save ran at {own}/s, the median of those before it at {usual}/s"))
    }

    fn stall(&self, save: &Past, step: Option<u64>) -> Vec<Alert> {
        let usual = median(self.past.iter().map(|past| past.staged_ms));
        let (bound, has_bound) = match self.rules.stall_ms {
            Some(ms) => (ms, ms > 0.0),
            None => ((STALL.0 * usual).max(STALL.1), self.past.len() >= BEFORE_MIN),
        };
        if !has_bound || save.staged_ms <= bound {
            return Vec::new();
        }
        let (own, bound) = (said_time(save.staged_ms), said_time(bound));
        run("stall", step, format!("the state could change after {own}, more than {bound}"))
    }

    fn slow(&self, step: Option<u64>, verdicts: &[Verdict]) -> Vec<Alert> {
        let is_one = |verdict: &&Verdict| {
            verdict.subject != "all ranks" && !["failed", "missing", "serial_tail"].contains(&verdict.cause)
        };
        let is_slow = |verdict: &&Verdict| self.rules.slow > 0 && verdict.in_a_row >= self.rules.slow;
        let alert = |verdict: &Verdict| {
            let place = verdict.place.as_ref().map_or_else(String::new, |place| format!(" ({place})"));
            let Verdict { subject, text, in_a_row, .. } = verdict;
            let text = format!("{subject}{place}: {text}; {in_a_row} times in a row");
            Alert { rule: "slow", subject: subject.clone(), step, text }
        };
        verdicts.iter().filter(is_one).filter(is_slow).map(alert).collect()
    }

    fn overdue(&self, moment: &Moment<'_>) -> Vec<Alert> {
        let times = || self.past.iter().map(|past| past.durable_ms);
        let usual = median(times().zip(times().skip(1)).map(|(one, next)| next - one));
        let since = self.durable_ms.map_or(0.0, |durable| moment.now_ms as f64 - durable);
        let bound = (self.rules.overdue * usual).max(OVERDUE_MIN_MS);
        if self.rules.overdue == 0.0 || moment.has_ended || self.past.len() < BEFORE_MIN || since <= bound {
            return Vec::new();
        }
        let (since, usual) = (said_time(since), said_time(usual));
        run("overdue", None, format!("no checkpoint became durable for {since}; usually one does every {usual}"))
    }

    fn cut_off(&self, moment: &Moment<'_>) -> Vec<Alert> {
        let bound = (CUT_OFF.0 * median(self.past.iter().map(|past| past.ended_ms))).max(CUT_OFF.1);
        let is_known = !self.past.is_empty();
        let age = |since: u64| moment.now_ms.saturating_sub(since) as f64;
        let alert = |&(step, since): &(Option<u64>, u64)| Alert {
            rule: "cut_off",
            subject: step.map_or_else(|| "save".to_owned(), |step| format!("step {step}")),
            step,
            text: format!("the save began {} ago and was not committed", said_time(age(since))),
        };
        moment.uncommitted.iter().filter(|(_, since)| is_known && age(*since) > bound).map(alert).collect()
    }

    fn room(&self, moment: &Moment<'_>) -> Vec<Alert> {
        let save_bytes = moment.save_bytes.or_else(|| self.past.back().map(|last| last.bytes));
        let (Some(bytes), Some(free)) = (save_bytes, moment.free_bytes) else { return Vec::new() };
        if moment.has_ended || free as f64 >= self.rules.room * bytes as f64 {
            return Vec::new();
        }
        let (free, bytes) = (said_bytes(free as f64), said_bytes(bytes as f64));
        run("room", None, format!("the storage has {free} free, and a save takes {bytes}"))
    }
}

/// Returns one alert about the run.
fn run(rule: &'static str, step: Option<u64>, text: String) -> Vec<Alert> {
    vec![Alert { rule, subject: "run".to_owned(), step, text }]
}

/// Returns a time as text, from two minutes on in larger units.
fn said_time(ms: f64) -> String {
    let minutes = ms / 60e3;
    match minutes {
        _ if minutes < 2.0 => said_ms(ms),
        _ if minutes < 120.0 => format!("{minutes:.0} min"),
        _ => format!("{:.1} h", minutes / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdicts::tests::Dice;

    fn save(step: u64, began_ms: f64, staged_ms: f64, ended_ms: f64, bytes: u64) -> Operation {
        Operation {
            began_unix_ms: Some(began_ms as u64),
            world: Some(8),
            staged_ms: Some(staged_ms),
            ended_ms: Some(ended_ms),
            bytes,
            ..Operation::unrecorded(step, "committed")
        }
    }

    /// Ten usual saves: each minute one of 10 GB, which takes 10 s and stalls for 100 ms.
    fn usual(rules: Rules) -> Alerts {
        let mut alerts = Alerts::new(rules);
        for step in 0..10 {
            let changes = alerts.saved(&save(step, step as f64 * 60e3, 100.0, 10e3, 10_000_000_000));
            assert_eq!(changes, []);
        }
        alerts
    }

    const NEXT: f64 = 600e3;

    fn states(changes: &[Change]) -> Vec<(&str, &str, &str)> {
        changes.iter().map(|change| (change.state, change.alert.rule, &*change.alert.subject)).collect()
    }

    #[test]
    fn healthy_runs_give_no_alert() {
        for seed in 0..200 {
            let mut dice = Dice(seed);
            let (mut alerts, mut now) = (Alerts::new(Rules::default()), 1e12);
            // From a second to half an hour between saves, that take up to half of it.
            let interval = 1e3 * 1800_f64.powf(dice.roll());
            let (took, staged, bytes) =
                (interval * 0.5 * dice.roll(), interval * 0.2 * dice.roll(), 1e12 * dice.roll());
            for step in 0..150 {
                let one = save(step, now, dice.about(staged), dice.about(took), dice.about(bytes) as u64);
                let durable = now + one.ended_ms.unwrap_or(0.0);
                now += dice.about(interval);
                let begun = [(Some(step + 1), now as u64)];
                let free_bytes = Some(dice.about(4e12) as u64);
                let looks = [durable, now, now + dice.about(took)].map(|at| at as u64);
                let moment = |now_ms| Moment { now_ms, uncommitted: &begun, free_bytes, ..Moment::default() };
                let mut changes = alerts.saved(&one);
                looks.iter().for_each(|&at| changes.extend(alerts.at(&moment(at))));
                assert_eq!(changes, [], "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn each_rule_begins_once_and_is_over_once() {
        let mut alerts = usual(Rules::default());
        let slow = |step: u64, ended_ms| save(step, NEXT + step as f64 * 60e3, 100.0, ended_ms, 10_000_000_000);
        assert_eq!(states(&alerts.saved(&slow(10, 25e3))), [("firing", "rate", "run")]);
        assert_eq!(alerts.firing()[0].text, "the save ran at 400 MB/s, the median of those before it at 1.0 GB/s");
        assert_eq!(alerts.saved(&slow(11, 26e3)), [], "said once");
        assert_eq!(states(&alerts.saved(&slow(12, 11e3))), [("resolved", "rate", "run")]);
        assert_eq!(alerts.saved(&slow(13, 19e3)), [], "more than half of the median rate");

        let stalled = |step: u64, staged_ms| save(step, NEXT + step as f64 * 60e3, staged_ms, 10e3, 10_000_000_000);
        assert_eq!(alerts.saved(&stalled(14, 4.9e3)), [], "not above 5 s");
        assert_eq!(states(&alerts.saved(&stalled(15, 5.1e3))), [("firing", "stall", "run")]);
        assert_eq!(alerts.firing()[0].text, "the state could change after 5.1 s, more than 5.0 s");
        assert_eq!(states(&alerts.saved(&stalled(16, 100.0))), [("resolved", "stall", "run")]);

        let failed = Operation { began_unix_ms: Some(1), ..Operation::unrecorded(17, "failed") };
        assert_eq!(states(&alerts.saved(&failed)), [("firing", "failed", "run")]);
        assert_eq!(alerts.saved(&failed), []);
        assert_eq!(states(&alerts.durable(NEXT + 20.0 * 60e3)), [("resolved", "failed", "run")]);
    }

    #[test]
    fn a_rank_that_is_slow_again_and_again_is_an_alert() {
        let mut alerts = usual(Rules::default());
        let with = |step: u64, subject: &str, cause: &'static str, in_a_row: usize| {
            let (subject, place, text) = (subject.to_owned(), Some("node-17, tp=1".to_owned()), "took 3 s".to_owned());
            let verdict = Verdict { subject, place, phase: "write", cause, lost_ms: 9.0, text, in_a_row };
            Operation { verdicts: vec![verdict], ..save(step, NEXT + step as f64 * 60e3, 100.0, 10e3, 10_000_000_000) }
        };
        for (subject, cause, in_a_row) in
            [("rank 3", "storage", 2), ("all ranks", "retries", 9), ("rank 0", "serial_tail", 9)]
        {
            assert_eq!(alerts.saved(&with(10, subject, cause, in_a_row)), [], "{subject}");
        }
        assert_eq!(states(&alerts.saved(&with(11, "rank 3", "storage", 3))), [("firing", "slow", "rank 3")]);
        assert_eq!(alerts.firing()[0].text, "rank 3 (node-17, tp=1): took 3 s; 3 times in a row");
        assert_eq!(alerts.saved(&with(12, "rank 3", "storage", 4)), [], "said once");
        assert_eq!(alerts.firing()[0].text, "rank 3 (node-17, tp=1): took 3 s; 4 times in a row", "as it is now");
        let other = alerts.saved(&with(13, "machine node-2", "storage", 3));
        assert_eq!(states(&other), [("resolved", "slow", "rank 3"), ("firing", "slow", "machine node-2")]);
    }

    #[test]
    fn time_without_a_durable_checkpoint_and_room_are_watched() {
        let mut alerts = usual(Rules::default());
        let durable = 9.0 * 60e3 + 10e3;
        let at =
            |after_ms: f64, free_bytes| Moment { now_ms: (durable + after_ms) as u64, free_bytes, ..Moment::default() };
        assert_eq!(alerts.at(&at(179e3, Some(20_000_000_000))), []);
        assert_eq!(states(&alerts.at(&at(181e3, None))), [("firing", "overdue", "run")]);
        let text = "no checkpoint became durable for 3 min; usually one does every 60.0 s";
        assert_eq!(alerts.firing()[0].text, text);
        assert_eq!(states(&alerts.durable(durable + 182e3)), [("resolved", "overdue", "run")]);
        assert_eq!(alerts.at(&at(182e3, None)), []);
        assert_eq!(states(&alerts.at(&at(183e3, Some(19_999_999_999)))), [("firing", "room", "run")]);
        assert_eq!(alerts.firing()[0].text, "the storage has 20.0 GB free, and a save takes 10.0 GB");
        assert_eq!(states(&alerts.at(&at(184e3, None))), [("resolved", "room", "run")]);
    }

    #[test]
    fn what_is_over_is_what_began() {
        let mut alerts = usual(Rules::default());
        let failed = |step| Operation { began_unix_ms: Some(1), ..Operation::unrecorded(step, "failed") };
        let fired = alerts.saved(&failed(10)).remove(0).alert;
        assert_eq!((fired.step, alerts.saved(&failed(11))), (Some(10), Vec::new()));
        assert_eq!(alerts.firing()[0].step, Some(11), "as it is now");
        assert_eq!(alerts.durable(NEXT), [Change { state: "resolved", alert: fired }]);
    }

    #[test]
    fn a_time_that_is_still_to_come_silences_nothing() {
        let mut alerts = usual(Rules::default());
        assert_eq!(alerts.saved(&save(10, 1e15, 100.0, 10e3, 10_000_000_000)), []);
        let at = |now_ms| Moment { now_ms, ..Moment::default() };
        assert_eq!(alerts.at(&at(700_000)), []);
        assert_eq!(states(&alerts.at(&at(900_000))), [("firing", "overdue", "run")]);
    }

    #[test]
    fn a_run_that_has_ended_needs_no_save_and_no_room() {
        let mut alerts = usual(Rules::default());
        let late = Moment { now_ms: 1 << 40, free_bytes: Some(0), ..Moment::default() };
        assert_eq!(states(&alerts.at(&late)), [("firing", "overdue", "run"), ("firing", "room", "run")]);
        let ended = Moment { has_ended: true, ..late };
        assert_eq!(states(&alerts.at(&ended)), [("resolved", "overdue", "run"), ("resolved", "room", "run")]);
        assert_eq!(alerts.at(&ended), []);
    }

    #[test]
    fn a_job_and_ranks_that_do_not_answer_are_alerts() {
        let mut alerts = Alerts::new(Rules::default());
        assert_eq!(states(&alerts.answers(Some((None, "refused")))), [("firing", "silent", "job")]);
        assert_eq!(alerts.answers(Some((Some(180e3), "refused"))), []);
        let text = "the job has not answered for 3 min, or has ended: refused";
        assert_eq!(alerts.firing()[0].text, text);
        assert_eq!(states(&alerts.answers(None)), [("resolved", "silent", "job")]);
        let silent = [(3, "refused".to_owned()), (7, "no answer".to_owned())];
        assert_eq!(states(&alerts.ranks_answer(&silent[..1])), [("firing", "silent_ranks", "job")]);
        assert_eq!(alerts.firing()[0].text, "rank 3 does not answer: refused");
        assert_eq!(alerts.ranks_answer(&silent), []);
        assert_eq!(alerts.firing()[0].text, "2 ranks do not answer, the first is rank 3: refused");
        assert_eq!(states(&alerts.ranks_answer(&[])), [("resolved", "silent_ranks", "job")]);
    }

    #[test]
    fn a_save_that_neither_ends_nor_fails_is_cut_off() {
        let mut alerts = usual(Rules::default());
        let at = |now_ms, uncommitted| Moment { now_ms, uncommitted, ..Moment::default() };
        assert_eq!(alerts.at(&at(650_000, &[(Some(10), 550_000)])), [], "ten median saves");
        assert_eq!(states(&alerts.at(&at(650_001, &[(Some(10), 550_000)]))), [("firing", "cut_off", "step 10")]);
        assert_eq!(states(&alerts.at(&at(650_002, &[]))), [("resolved", "cut_off", "step 10")]);
    }

    #[test]
    fn zero_turns_a_rule_off() {
        let off = Rules { rate: 0.0, stall_ms: Some(0.0), overdue: 0.0, slow: 0, room: 0.0 };
        let mut alerts = usual(off);
        assert_eq!(alerts.saved(&save(10, NEXT, 1e6, 1e6, 10)), []);
        assert_eq!(alerts.at(&Moment { now_ms: 1 << 50, free_bytes: Some(0), ..Moment::default() }), []);
        let mut alerts = usual(Rules { stall_ms: Some(150.0), ..off });
        assert_eq!(states(&alerts.saved(&save(10, NEXT, 151.0, 10e3, 10))), [("firing", "stall", "run")]);
    }

    #[test]
    fn bounds_that_are_none_are_refused_by_name() {
        let rules = Rules::default();
        assert!(rules.expect_valid().is_ok());
        for (wrong, name) in [
            (Rules { rate: 1.5, ..rules }, "--rate 1.5: expected a share"),
            (Rules { rate: -0.1, ..rules }, "--rate -0.1"),
            (Rules { rate: f64::NAN, ..rules }, "--rate NaN"),
            (Rules { stall_ms: Some(-1000.0), ..rules }, "--stall -1 s"),
            (Rules { overdue: 0.5, ..rules }, "--overdue 0.5"),
            (Rules { overdue: f64::INFINITY, ..rules }, "--overdue inf"),
            (Rules { room: -2.0, ..rules }, "--room -2"),
        ] {
            let refused = wrong.expect_valid().unwrap_err();
            assert!(refused.message.contains(name), "{refused}");
        }
    }
}
