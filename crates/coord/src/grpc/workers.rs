//! Runs a coordinator's own threads. A forked child has none of them.

use std::future::Future;
use std::mem;
use std::process;
use std::sync::mpsc;

use tokio::runtime::{Builder, Runtime};

use crate::Error;

pub(super) struct Workers {
    /// Runtime of the threads, until it is dropped.
    runtime: Option<Runtime>,
    process: u32,
}

impl Workers {
    pub(super) fn start() -> Result<Workers, Error> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("shardfast-coord").enable_io().enable_time();
        let runtime = builder
            .build()
            .map_err(|error| Error::Unavailable(format!("cannot start the coordinator's threads: {error}")))?;
        Ok(Workers { runtime: Some(runtime), process: process::id() })
    }

    /// Returns whether this is the process that started the threads: a forked child has none.
    pub(super) fn here(&self) -> bool {
        self.process == process::id()
    }

    pub(super) fn require_here(&self) -> Result<(), Error> {
        if self.here() {
            return Ok(());
        }
        let (opened, now) = (self.process, process::id());
        Err(Error::Invalid(format!("the coordinator was opened by process {opened} and forked into process {now}")))
    }

    /// Starts `work` without waiting for it.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(work);
        }
    }

    /// Waits for `work`; unlike `block_on`, also works on a thread that is itself within a runtime.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.spawn(async move {
            // The receiver waits below for as long as this runs.
            let _ = sender.try_send(work.await);
        });
        receiver.recv().unwrap_or_else(|_| Err(Error::Unavailable("the coordinator's threads ended".to_owned())))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.here() {
            runtime.shutdown_background();
        } else {
            // Threads that do not exist here may hold its locks.
            mem::forget(runtime);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_forked_child_gets_an_error_and_does_not_stop_the_threads() {
        let mut workers = Workers::start().unwrap();
        workers.require_here().unwrap();
        workers.process += 1;
        assert!(workers.require_here().unwrap_err().to_string().contains("forked into process"));

        let (sender, receiver) = mpsc::channel();
        let (answer, question) = tokio::sync::oneshot::channel();
        workers.spawn(async move { sender.send(question.await).unwrap() });
        drop(workers);
        answer.send(7).unwrap();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), Ok(7));
    }
}
