//! Watches a run: reads the records that are new since the last look, and says which alerts began and which are over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use shardfast_engine::{Kind, Result, Timeout, runs};
use shardfast_format::{COMMIT, TELEMETRY, parse_record_name, step_dir};
use shardfast_store::{Entry, Store};
use shardfast_transfer::error::retry;

use crate::alerts::{Alert, Alerts, Change, KEPT, Moment, Rules};
use crate::report::{count_in_a_row, no_run, operation, read};
use crate::verdicts::Verdict;

/// Watcher of a run.
pub struct Watcher {
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
    has_looked: bool,
}

impl Watcher {
    /// Makes the watcher of the run at `url`. Reads nothing yet.
    ///
    /// # Errors
    /// `Invalid` for rules that are none, or a URL that is none.
    pub fn new(url: &str, rules: Rules, timeout: &Timeout) -> Result<Watcher> {
        rules.expect_valid()?;
        Ok(Watcher {
            url: url.to_owned(),
            store: runs::store(url, timeout)?,
            alerts: Alerts::new(rules),
            seen: BTreeSet::new(),
            ended: BTreeSet::new(),
            begun: BTreeMap::new(),
            last: Vec::new(),
            has_looked: false,
        })
    }

    /// Looks at the run; returns which alerts began since the last look and which are over. The first look returns
    /// those that fire. Lists the run and its records, and reads the records that are new, at first the newest 100.
    ///
    /// # Errors
    /// `NotFound` if there is no run; the store's errors. The next look returns what this one could not.
    pub fn look(&mut self, timeout: &Timeout) -> Result<Vec<Change>> {
        let entries = runs::entries(&*self.store, timeout)?;
        let steps = runs::steps(&self.url, &entries)?;
        if steps.is_empty() && !entries.iter().any(|entry| entry.is_dir && entry.name == TELEMETRY) {
            return Err(no_run(&self.url));
        }
        let mut changes = self.read_records(timeout)?;
        let now_ms = unix_ms(SystemTime::now());
        let uncommitted = self.uncommitted(&steps, now_ms, &mut changes, timeout)?;
        let free_bytes = self.store.free_bytes();
        changes.extend(self.alerts.at(&Moment { now_ms, uncommitted: &uncommitted, free_bytes }));
        if !std::mem::replace(&mut self.has_looked, true) {
            let firing = self.firing().iter().cloned();
            return Ok(firing.map(|alert| Change { state: "firing", alert }).collect());
        }
        Ok(changes)
    }

    /// Returns the alerts that fire, as of the last look.
    pub fn firing(&self) -> &[Alert] {
        self.alerts.firing()
    }

    /// Reads the records of saves that are new.
    fn read_records(&mut self, timeout: &Timeout) -> Result<Vec<Change>> {
        let listed = match retry(timeout, || Ok(self.store.list(TELEMETRY)?)) {
            Err(error) if error.kind == Kind::NotFound => Vec::new(),
            listed => listed?,
        };
        let is_save = |name: &str| parse_record_name(name).is_some() && name.contains("-save-");
        let names = listed.into_iter().filter(|entry| !entry.is_dir).map(|entry| entry.name);
        let present: BTreeSet<String> = names.filter(|name| is_save(name)).collect();
        let mut new: Vec<String> = present.difference(&self.seen).cloned().collect();
        if !self.has_looked {
            let older = new.len().saturating_sub(KEPT);
            self.seen.extend(new.drain(..older));
        }
        // Records that a sweep removed do not come back.
        self.seen.retain(|name| present.contains(name));
        let mut changes = Vec::new();
        for (name, found) in read(&*self.store, &self.url, &new, timeout) {
            match found {
                Ok(collected) => {
                    let mut save = operation(&collected);
                    count_in_a_row(&mut save.verdicts, &self.last);
                    changes.extend(self.alerts.saved(&save));
                    self.ended.insert(save.step);
                    self.last = save.verdicts;
                }
                Err(error)
                    if [Kind::Corrupt, Kind::Unsupported, Kind::NotFound, Kind::Invalid].contains(&error.kind) => {}
                Err(error) => return Err(error),
            }
            self.seen.insert(name);
        }
        Ok(changes)
    }

    /// Returns the steps behind the newest one that has ended which have no commit, each with the time since when. A
    /// commit that has no record yet counts as a durable checkpoint.
    fn uncommitted(
        &mut self,
        steps: &[u64],
        now_ms: u64,
        changes: &mut Vec<Change>,
        timeout: &Timeout,
    ) -> Result<Vec<(u64, u64)>> {
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
                changes.extend(self.alerts.durable(modified(commit).unwrap_or(now_ms) as f64));
                self.ended.insert(step);
                break;
            }
            let newest = entries.iter().filter_map(modified).max().unwrap_or(now_ms).min(now_ms);
            uncommitted.push((step, *self.begun.entry(step).or_insert(newest)));
        }
        self.begun.retain(|step, _| uncommitted.iter().any(|(other, _)| other == step));
        Ok(uncommitted)
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
