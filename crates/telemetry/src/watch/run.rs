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
        let now_ms = unix_ms(SystemTime::now());
        self.read_records(now_ms, timeout)?;
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
    fn read_records(&mut self, now_ms: u64, timeout: &Timeout) -> Result<()> {
        let listed = match retry(timeout, || Ok(self.store.list(TELEMETRY)?)) {
            Err(error) if error.kind == Kind::NotFound => Vec::new(),
            listed => listed?,
        };
        let is_save = |name: &str| parse_record_name(name).is_some() && name.contains("-save-");
        let files = listed.into_iter().filter(|entry| !entry.is_dir);
        let mut dated: Vec<(u64, String)> = files.map(|entry| (time_of(&entry, now_ms), entry.name)).collect();
        dated.sort_unstable();
        let end = dated.iter().rfind(|(_, name)| is_end_name(name)).cloned();
        dated.retain(|(_, name)| is_save(name));
        self.has_ended = end.as_ref() > dated.last();
        // Records that a sweep removed do not come back.
        let present: BTreeSet<&String> = dated.iter().map(|(_, name)| name).collect();
        self.seen.retain(|name| present.contains(name));
        let mut new: Vec<(u64, String)> = dated.into_iter().filter(|(_, name)| !self.seen.contains(name)).collect();
        if !self.has_looked {
            let older = new.len().saturating_sub(KEPT);
            self.seen.extend(new.drain(..older).map(|(_, name)| name));
        }
        let names: Vec<String> = new.iter().map(|(_, name)| name.clone()).collect();
        let mut found: BTreeMap<_, _> = read(&*self.store, &self.url, &names, timeout).into_iter().collect();
        for (time_ms, name) in new {
            let Some(found) = found.remove(&name) else { continue };
            match found {
                Ok(collected) => {
                    let mut save = operation(&collected);
                    save.began_unix_ms = save.began_unix_ms.map(|began| if began > now_ms { time_ms } else { began });
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

/// Returns the time in the name of a record, in milliseconds since 1970. A time that is still to come is one of a wrong
/// clock: then it is the time at which the storage got the object, 0 if that is not known.
fn time_of(entry: &Entry, now_ms: u64) -> u64 {
    let named = entry.name.split('-').next().and_then(|time| time.parse().ok()).filter(|&time| time <= now_ms);
    named.unwrap_or_else(|| entry.modified.map_or(0, unix_ms).min(now_ms))
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
    fn a_record_of_a_clock_that_was_ahead_silences_no_alert() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(TELEMETRY)).unwrap();
        saves(dir.path(), 0..8);
        let records = dir.path().join(TELEMETRY);
        let ahead = unix_ms(SystemTime::now()) + 365 * 86_400_000;
        let mut save = Collected { step: 8, began_unix_ms: ahead, missing: Vec::new(), ..collected(2) };
        save.ranks.iter_mut().flatten().for_each(|said| said.failure = String::new());
        std::fs::write(records.join(save.name()), save.encode().unwrap()).unwrap();
        let hours = |hours: u64| SystemTime::now() - std::time::Duration::from_secs(hours * 3600);
        std::fs::File::open(records.join(save.name())).unwrap().set_modified(hours(2)).unwrap();
        std::fs::create_dir(dir.path().join(step_dir(8))).unwrap();
        let failed = Collected { step: 9, began_unix_ms: unix_ms(hours(1)), ..collected(2) };
        std::fs::write(records.join(failed.name()), failed.encode().unwrap()).unwrap();
        let rules = Rules { room: 0.0, slow: 0, ..Rules::default() };
        let mut run = Run::new(dir.path().to_str().unwrap(), rules, &Timeout::default()).unwrap();
        run.look(&Timeout::default()).unwrap();
        let firing: Vec<&str> = run.firing().iter().map(|alert| alert.rule).collect();
        assert_eq!(firing, ["failed", "overdue"]);
        std::fs::write(records.join(end_name(unix_ms(SystemTime::now()) - 60_000)), "").unwrap();
        run.look(&Timeout::default()).unwrap();
        assert_eq!(run.firing().len(), 1, "a job that ended after it has ended");
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
