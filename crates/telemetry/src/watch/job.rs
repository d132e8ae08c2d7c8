//! Asks a job that runs what its saves do and have done, as one of its ranks tells it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use shardfast_engine::{Kind, Result, Timeout};
use shardfast_store::split;

use crate::alerts::{Alert, Alerts, Change, Moment, Rules, Saved};
use crate::live::{EndedNow, Frame};
use crate::serve::ask;

/// Time for which an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Times that a job, or a rank that its answer lacks, is asked before it counts as silent, and the pause between them:
/// a busy machine may be late once.
const TRIES: (usize, Duration) = (3, Duration::from_secs(1));

/// Job as one of its ranks tells it.
pub(crate) struct Job {
    address: String,
    rules: Rules,
    /// Alerts about the job itself.
    alerts: Alerts,
    /// Alerts about its saves, by the run that they are of.
    runs: BTreeMap<String, Alerts>,
    /// Rank that tells it.
    rank: u32,
    /// Saves that have ended and were taken: begin and place of each that the job still tells.
    seen: BTreeSet<(u64, String)>,
    /// Time of the last answer.
    heard: Option<Instant>,
}

impl Job {
    /// Makes the job whose rank serves at `address`, `host:port`. Asks nothing yet.
    pub(crate) fn new(address: String, rules: Rules) -> Job {
        let (alerts, runs, seen) = (Alerts::new(rules), BTreeMap::new(), BTreeSet::new());
        Job { address, rules, alerts, runs, rank: 0, seen, heard: None }
    }

    /// Returns which alerts began since the last look and which are over. Asks up to three times.
    ///
    /// # Errors
    /// `Invalid` if the answer is not that of a process of this program.
    pub(crate) fn look(&mut self, timeout: &Timeout) -> Result<Vec<Change>> {
        let mut last = Err(None);
        // Ranks that no answer so far had.
        let mut silent: Option<BTreeMap<u32, String>> = None;
        for attempt in 0..TRIES.0 {
            if attempt > 0 {
                std::thread::sleep(TRIES.1);
            }
            match ask(&self.address, ANSWER_WITHIN.min(timeout.within())) {
                Ok(frame) => {
                    let mut now = silent_ranks(&frame);
                    now.retain(|rank, _| silent.as_ref().is_none_or(|silent| silent.contains_key(rank)));
                    let is_whole = now.is_empty();
                    (silent, last) = (Some(now), Ok(frame));
                    if is_whole {
                        break;
                    }
                }
                Err(error) if error.kind == Kind::Unavailable => last = last.map_err(|_| Some(error)),
                Err(error) => return Err(error),
            }
        }
        match last {
            Ok(frame) => {
                self.heard = Some(Instant::now());
                Ok(self.take(&frame, &silent.unwrap_or_default().into_iter().collect::<Vec<_>>()))
            }
            Err(error) => {
                let for_ms = self.heard.map(|at| at.elapsed().as_secs_f64() * 1e3);
                let why = error.map_or_else(String::new, |error| error.message);
                Ok(self.alerts.answers(Some((for_ms, &why))))
            }
        }
    }

    /// Takes what the job has answered, and the ranks that do not answer.
    fn take(&mut self, frame: &Frame, silent: &[(u32, String)]) -> Vec<Change> {
        self.rank = frame.rank;
        let mut changes = self.alerts.answers(None);
        changes.extend(self.alerts.ranks_answer(silent));
        let mut told = saves(frame);
        if told.is_empty() {
            // A job that began anew has not saved yet.
            told.extend(self.runs.keys().map(|run| (run.clone(), Saves::default())));
        }
        // Another job may serve there now.
        let gone: Vec<String> = self.runs.keys().filter(|run| !told.contains_key(*run)).cloned().collect();
        for run in gone {
            let alerts = self.runs.remove(&run).map(|alerts| alerts.firing().to_vec()).unwrap_or_default();
            changes
                .extend(alerts.into_iter().map(|alert| Change { state: "resolved", alert: self.of_run(&run, alert) }));
        }
        let mut seen = BTreeSet::new();
        for (run, saves) in told {
            let alerts = self.runs.entry(run.clone()).or_insert_with(|| Alerts::new(self.rules));
            let mut of_run = Vec::new();
            for save in &saves.ended {
                let key = (save.began_unix_ms, save.url.clone());
                if !self.seen.contains(&key) {
                    of_run.extend(alerts.saved(saved(save)));
                }
                seen.insert(key);
            }
            let last = |of: fn(&EndedNow) -> Option<u64>| saves.ended.iter().rev().find_map(|save| of(save));
            of_run.extend(alerts.at(&Moment {
                now_ms: frame.now_unix_ms,
                uncommitted: &saves.running,
                free_bytes: last(|save| save.free_bytes),
                save_bytes: last(|save| save.all_bytes),
                has_ended: false,
            }));
            let of_run = of_run.into_iter();
            changes.extend(of_run.map(|change| Change { alert: self.of_run(&run, change.alert), ..change }));
        }
        self.seen = seen;
        changes
    }

    /// Returns the alerts that fire, as of the last look.
    pub(crate) fn firing(&self) -> Vec<Alert> {
        let of_runs = self
            .runs
            .iter()
            .flat_map(|(run, alerts)| alerts.firing().iter().map(move |alert| self.of_run(run, alert.clone())));
        self.alerts.firing().iter().cloned().chain(of_runs).collect()
    }

    /// Returns the alert with the run in it: a job may save several.
    fn of_run(&self, run: &str, alert: Alert) -> Alert {
        let subject = if alert.subject == "run" { run.to_owned() } else { format!("{run}, {}", alert.subject) };
        Alert { subject, text: format!("{run}, seen from rank {}: {}", self.rank, alert.text), ..alert }
    }
}

/// Saves of one run that a job tells.
#[derive(Default)]
struct Saves<'a> {
    /// Those that have ended, the oldest first.
    ended: Vec<&'a EndedNow>,
    /// Steps of those that run, if known, each with the time of its begin in milliseconds since 1970.
    running: Vec<(Option<u64>, u64)>,
}

/// Returns the saves in a frame by the run that they are of.
fn saves(frame: &Frame) -> BTreeMap<String, Saves<'_>> {
    // A checkpoint's parent is its run, also where the checkpoint is no step.
    let run = |url: &str| split(url).map_or_else(|| url.to_owned(), |(run, _)| run);
    let mut found: BTreeMap<String, Saves<'_>> = BTreeMap::new();
    for save in frame.ended.iter().filter(|one| one.operation == "save") {
        found.entry(run(&save.url)).or_default().ended.push(save);
    }
    for save in frame.running.iter().filter(|one| one.operation == "save") {
        let began_ms = frame.now_unix_ms.saturating_sub(save.for_ms as u64);
        found.entry(run(&save.url)).or_default().running.push((save.step, began_ms));
    }
    found
}

fn saved(save: &EndedNow) -> Saved<'_> {
    Saved {
        step: save.step,
        failure: save.failure.as_ref().map(|why| format!("the save failed: {why}")),
        began_unix_ms: Some(save.began_unix_ms),
        staged_ms: save.staged_ms.unwrap_or(0.0),
        ended_ms: Some(save.ended_ms),
        bytes: save.bytes,
        verdicts: &[],
    }
}

/// Returns the ranks that did not answer, each with the reason.
fn silent_ranks(frame: &Frame) -> BTreeMap<u32, String> {
    frame.ranks.iter().filter_map(|other| Some((other.rank, other.problem.clone()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::RunningNow;
    use crate::verdicts::tests::Dice;

    fn save(run: &str, step: u64, began_ms: f64, ended_ms: f64) -> EndedNow {
        EndedNow {
            operation: "save".to_owned(),
            url: format!("{run}/step-{step:08}"),
            step: Some(step),
            began_unix_ms: began_ms as u64,
            staged_ms: Some(100.0),
            ended_ms,
            bytes: 10_000_000_000,
            all_bytes: Some(80_000_000_000),
            ..EndedNow::default()
        }
    }

    fn frame(now_ms: f64, ended: &[EndedNow]) -> Frame {
        Frame { now_unix_ms: now_ms as u64, ended: ended.to_vec(), ..Frame::default() }
    }

    fn job() -> Job {
        Job::new(String::new(), Rules::default())
    }

    /// Ten usual saves, one each minute.
    fn usual(run: &str) -> Vec<EndedNow> {
        (0..10).map(|step| save(run, step, step as f64 * 60e3, 10e3)).collect()
    }

    fn states(changes: &[Change]) -> Vec<(&str, &str, &str)> {
        changes.iter().map(|change| (change.state, change.alert.rule, &*change.alert.subject)).collect()
    }

    #[test]
    fn healthy_jobs_give_no_alert() {
        for seed in 0..200 {
            let mut dice = Dice(seed);
            let (mut job, mut now, mut ended) = (job(), 1e12, Vec::new());
            let interval = 1e3 * 1800_f64.powf(dice.roll());
            let took = interval * 0.5 * dice.roll();
            for step in 0..60 {
                // Two runs of different sizes, saved after one another.
                for (run, share) in [("runs/a", 1.0), ("runs/b", 0.01)] {
                    let one = save(run, step, now, dice.about(took * share));
                    ended.push(EndedNow { bytes: (1e10 * share) as u64, free_bytes: Some(1 << 50), ..one });
                }
                ended = ended.split_off(ended.len().saturating_sub(32));
                now += dice.about(interval);
                let mut frame = frame(now, &ended);
                let running = RunningNow {
                    operation: "save".to_owned(),
                    url: "runs/a/step-1".to_owned(),
                    ..RunningNow::default()
                };
                frame.running.push(RunningNow { for_ms: dice.about(took), ..running });
                assert_eq!(job.take(&frame, &[]), [], "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn what_a_job_tells_fires_once_and_is_over_once() {
        let (mut job, mut ended) = (job(), usual("runs/a"));
        assert_eq!(job.take(&frame(560e3, &ended), &[]), []);
        let failed = EndedNow { failure: Some("disk full".to_owned()), ..save("runs/a", 10, 600e3, 1e3) };
        ended.push(failed);
        assert_eq!(states(&job.take(&frame(610e3, &ended), &[])), [("firing", "failed", "runs/a")]);
        let firing = job.firing();
        let text = "runs/a, seen from rank 0: the save failed: disk full";
        assert_eq!((firing.len(), firing[0].step, &*firing[0].text), (1, Some(10), text));
        assert_eq!(job.take(&frame(620e3, &ended), &[]), [], "said once");
        assert_eq!(states(&job.take(&frame(800e3, &ended), &[])), [("firing", "overdue", "runs/a")]);

        let late = save("runs/a", 11, 800e3, 30e3);
        ended.push(EndedNow { staged_ms: Some(6e3), free_bytes: Some(159_999_999_999), ..late });
        let changes = job.take(&frame(840e3, &ended), &[]);
        let expected = [
            ("resolved", "failed", "runs/a"),
            ("resolved", "overdue", "runs/a"),
            ("firing", "rate", "runs/a"),
            ("firing", "stall", "runs/a"),
            ("firing", "room", "runs/a"),
        ];
        assert_eq!(states(&changes), expected);
        let room = "runs/a, seen from rank 0: the storage has 160 GB free, and a save takes 80.0 GB";
        assert_eq!(job.firing()[2].text, room);
        ended.push(EndedNow { free_bytes: Some(1 << 40), ..save("runs/a", 12, 860e3, 10e3) });
        assert_eq!(job.take(&frame(880e3, &ended), &[]).len(), 3);
        assert_eq!(job.firing(), []);
    }

    #[test]
    fn a_save_that_runs_for_too_long_is_named_by_its_step() {
        let mut job = job();
        let mut now = frame(800e3, &usual("runs/a"));
        let url = "runs/a/step-00000010".to_owned();
        let running = RunningNow { operation: "save".to_owned(), url, step: Some(10), ..RunningNow::default() };
        now.running.push(RunningNow { for_ms: 100e3, ..running.clone() });
        assert_eq!(states(&job.take(&now, &[])), [("firing", "overdue", "runs/a")]);
        now.running[0].for_ms = 101e3;
        assert_eq!(states(&job.take(&now, &[])), [("firing", "cut_off", "runs/a, step 10")]);
        now.running.clear();
        assert_eq!(states(&job.take(&now, &[])), [("resolved", "cut_off", "runs/a, step 10")]);
    }

    #[test]
    fn a_job_that_begins_anew_keeps_its_alerts_and_another_one_ends_them() {
        let (mut job, mut ended) = (job(), usual("runs/a"));
        ended.push(EndedNow { failure: Some("disk full".to_owned()), ..save("runs/a", 10, 560e3, 1e3) });
        assert_eq!(states(&job.take(&frame(570e3, &ended), &[])), [("firing", "failed", "runs/a")]);
        assert_eq!(job.take(&frame(580e3, &[]), &[]), []);
        let again = save("runs/a", 10, 600e3, 10e3);
        assert_eq!(states(&job.take(&frame(620e3, &[again]), &[])), [("resolved", "failed", "runs/a")]);
        assert_eq!(states(&job.take(&frame(900e3, &[]), &[])), [("firing", "overdue", "runs/a")]);
        let other = save("runs/b", 1, 900e3, 10e3);
        assert_eq!(states(&job.take(&frame(920e3, &[other]), &[])), [("resolved", "overdue", "runs/a")]);
    }

    #[test]
    fn ranks_that_do_not_answer_are_named() {
        let (mut job, silent) = (job(), [(3, "refused".to_owned())]);
        assert_eq!(states(&job.take(&frame(1.0, &[]), &silent)), [("firing", "silent_ranks", "job")]);
        assert_eq!(job.firing()[0].text, "rank 3 does not answer: refused");
        assert_eq!(states(&job.take(&frame(2.0, &[]), &[])), [("resolved", "silent_ranks", "job")]);
    }
}
