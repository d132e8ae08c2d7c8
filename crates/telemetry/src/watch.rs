//! Watches a run, or a job that runs: says at each look which alerts began and which are over.

mod job;
mod run;

use shardfast_engine::{Result, Timeout};

use crate::alerts::{Alert, Change, Rules};
use crate::serve::job_address;
use job::Job;
use run::Run;

/// Watcher of a run or of a job.
pub struct Watcher {
    source: Source,
    has_looked: bool,
}

/// Source of what a watcher knows.
enum Source {
    Run(Box<Run>),
    Job(Box<Job>),
}

impl Watcher {
    /// Makes the watcher of `target`: the path or URL of a run, or `http://host:port` of a job. Asks nothing yet.
    ///
    /// # Errors
    /// `Invalid` for rules that are none, or a target that is none.
    pub fn new(target: &str, rules: Rules, timeout: &Timeout) -> Result<Watcher> {
        rules.expect_valid()?;
        let source = match job_address(target)? {
            Some(address) => Source::Job(Box::new(Job::new(address, rules))),
            None => Source::Run(Box::new(Run::new(target, rules, timeout)?)),
        };
        Ok(Watcher { source, has_looked: false })
    }

    /// Looks at the run or the job; returns which alerts began since the last look and which are over. The first look
    /// returns those that fire.
    ///
    /// # Errors
    /// Of a run: `NotFound` if it is not there; the store's errors. Of a job: `Invalid` if the answer is not that of a
    /// process of this program; a job that does not answer is an alert. The next look returns what this one could not.
    pub fn look(&mut self, timeout: &Timeout) -> Result<Vec<Change>> {
        let changes = match &mut self.source {
            Source::Run(run) => run.look(timeout)?,
            Source::Job(job) => job.look(timeout)?,
        };
        if !std::mem::replace(&mut self.has_looked, true) {
            return Ok(self.firing().into_iter().map(|alert| Change { state: "firing", alert }).collect());
        }
        Ok(changes)
    }

    /// Returns the alerts that fire, as of the last look.
    pub fn firing(&self) -> Vec<Alert> {
        match &self.source {
            Source::Run(run) => run.firing().to_vec(),
            Source::Job(job) => job.firing(),
        }
    }
}
