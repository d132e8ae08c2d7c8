//! Looks at the records and commits of a run, at those that are new since the last look.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use shardfast_engine::{Kind, Result, Timeout, runs};
use shardfast_format::{COMMIT, TELEMETRY, is_end_name, parse_record_name, step_dir};
use shardfast_store::{Entry, Store};
use shardfast_transfer::error::retry;

use crate::alerts::{Alert, Alerts, Change, KEPT, Moment, Rules};
use crate::report::{count_in_a_row, no_run, operation, read};
use crate::verdicts::Verdict;

/// Run as its storage shows it.
pub(crate) struct Run {
    url: String,
    store: Arc<dyn Store>,
    alerts: Alerts,
    /// Names of the records that were read.
    seen: BTreeSet<String>,
    /// Steps that are known to be committed, or to have failed.
    ended: BTreeSet<u64>,
    /// Steps without a commit: since when, in milliseconds since 1970.
    begun: BTreeMap<u64, u64>,
    /// Verdicts on the last save.
    last: Vec<Verdict>,
    /// Whether its job has ended since the last save.
    has_ended: bool,
    /// Changes of which no look has told: one that failed has kept them.
    changes: Vec<Change>,
    has_looked: bool,
}

impl Run {
    /// Makes the run at `url`. Reads nothing yet.
    ///
    /// # Errors
    /// `Invalid` for a URL that is none.
    pub(crate) fn new(url: &str, rules: Rules, timeout: &Timeout) -> Result<Run> {
        Ok(Run {
            url: url.to_owned(),
            store: runs::store(url, timeout)?,
            alerts: Alerts::new(rules),
            seen: BTreeSet::new(),
            ended: BTreeSet::new(),
            begun: BTreeMap::new(),
            last: Vec::new(),
            has_ended: false,
            changes: Vec::new(),
            has_looked: false,
        })
    }

    /// Returns which alerts began since the last look and which are over. Lists the run and its records, and reads the
    /// records that are new, at first the newest 100.
    ///
    /// # Errors
    /// `NotFound` if there is no run; the store's errors. The next look returns what this one could not.
    pub(crate) fn look(&mut self, timeout: &Timeout) -> Result<Vec<Change>> {
        let entries = runs::entries(&*self.store, timeout)?;
        let steps = runs::steps(&self.url, &entries)?;
        if steps.is_empty() && !entries.iter().any(|entry| entry.is_dir && entry.name == TELEMETRY) {
            return Err(no_run(&self.url));
        }
        self.read_records(timeout)?;
        let now_ms = unix_ms(SystemTime::now());
        let uncommitted = self.uncommitted(&steps, now_ms, timeout)?;
        let (free_bytes, has_ended) = (self.store.free_bytes(), self.has_ended);
        let moment = Moment { now_ms, uncommitted: &uncommitted, free_bytes, has_ended, save_bytes: None };
        self.changes.extend(self.alerts.at(&moment));
        self.has_looked = true;
        Ok(std::mem::take(&mut self.changes))
    }

    pub(crate) fn firing(&self) -> &[Alert] {
        self.alerts.firing()
    }

    /// Reads the records of saves that are new.
    fn read_records(&mut self, timeout: &Timeout) -> Result<()> {
        let listed = match retry(timeout, || Ok(self.store.list(TELEMETRY)?)) {
            Err(error) if error.kind == Kind::NotFound => Vec::new(),
            listed => listed?,
        };
        let is_save = |name: &str| parse_record_name(name).is_some() && name.contains("-save-");
        let names: Vec<String> = listed.into_iter().filter(|entry| !entry.is_dir).map(|entry| entry.name).collect();
        // Names sort by time.
        let end = names.iter().filter(|name| is_end_name(name)).max().cloned();
        let present: BTreeSet<String> = names.into_iter().filter(|name| is_save(name)).collect();
        self.has_ended = end.as_ref() > present.last();
        let mut new: Vec<String> = present.difference(&self.seen).cloned().collect();
        if !self.has_looked {
            let older = new.len().saturating_sub(KEPT);
            self.seen.extend(new.drain(..older));
        }
        // Records that a sweep removed do not come back.
        self.seen.retain(|name| present.contains(name));
        for (name, found) in read(&*self.store, &self.url, &new, timeout) {
            match found {
                Ok(collected) => {
                    let mut save = operation(&collected);
                    count_in_a_row(&mut save.verdicts, &self.last);
                    self.changes.extend(self.alerts.saved(&save));
                    self.ended.insert(save.step);
                    self.last = save.verdicts;
                }
                Err(error)
                    if [Kind::Corrupt, Kind::Unsupported, Kind::NotFound, Kind::Invalid].contains(&error.kind) => {}
                Err(error) => return Err(error),
            }
            self.seen.insert(name);
        }
        Ok(())
    }

    /// Returns the steps behind the newest one that has ended which have no commit, each with the time since when. A
    /// commit that has no record yet counts as a durable checkpoint.
    fn uncommitted(&mut self, steps: &[u64], now_ms: u64, timeout: &Timeout) -> Result<Vec<(Option<u64>, u64)>> {
        self.ended.retain(|step| steps.binary_search(step).is_ok());
        let mut uncommitted = Vec::new();
        for &step in steps.iter().rev() {
            if self.ended.contains(&step) {
                break;
            }
            let entries: Vec<Entry> = match retry(timeout, || Ok(self.store.list(&step_dir(step))?)) {
                Err(error) if error.kind == Kind::NotFound => Vec::new(),
                entries => entries?,
            };
            let modified = |entry: &Entry| entry.modified.map(unix_ms);
            if let Some(commit) = entries.iter().find(|entry| entry.name == COMMIT && !entry.is_dir) {
                self.changes.extend(self.alerts.durable(modified(commit).unwrap_or(now_ms) as f64));
                self.ended.insert(step);
                break;
            }
            let newest = entries.iter().filter_map(modified).max().unwrap_or(now_ms).min(now_ms);
            uncommitted.push((Some(step), *self.begun.entry(step).or_insert(newest)));
        }
        self.begun.retain(|step, _| uncommitted.iter().any(|&(other, _)| other == Some(*step)));
        Ok(uncommitted)
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use shardfast_format::end_name;

    use super::*;
    use crate::object::Collected;
    use crate::object::tests::collected;

    /// Stores the records of these saves, one each minute, since many years ago.
    fn saves(run: &std::path::Path, steps: std::ops::Range<u64>) {
        for step in steps {
            let began_unix_ms = 1_000_000_000_000 + step * 60_000;
            let mut save = Collected { step, began_unix_ms, missing: Vec::new(), ..collected(2) };
            save.ranks.iter_mut().flatten().for_each(|said| said.failure = String::new());
            std::fs::create_dir_all(run.join(step_dir(step))).unwrap();
            std::fs::write(run.join(TELEMETRY).join(save.name()), save.encode().unwrap()).unwrap();
        }
    }

    #[test]
    fn a_run_is_overdue_until_it_has_ended_and_when_it_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(TELEMETRY)).unwrap();
        saves(dir.path(), 0..8);
        let rules = Rules { room: 0.0, slow: 0, ..Rules::default() };
        let mut run = Run::new(dir.path().to_str().unwrap(), rules, &Timeout::default()).unwrap();
        let mut states = || -> Vec<(&str, &str)> {
            let changes = run.look(&Timeout::default()).unwrap();
            changes.iter().map(|change| (change.state, change.alert.rule)).collect()
        };
        assert_eq!(states(), [("firing", "overdue")]);
        let end = |ms: u64| std::fs::write(dir.path().join(TELEMETRY).join(end_name(ms)), "").unwrap();
        end(1_000_000_000_001);
        assert_eq!(states(), [], "the end of a job before the last save");
        end(1_000_000_430_000);
        assert_eq!(states(), [("resolved", "overdue")]);
        assert_eq!(states(), []);
        saves(dir.path(), 8..9);
        assert_eq!(states(), [("firing", "overdue")]);
    }
}
