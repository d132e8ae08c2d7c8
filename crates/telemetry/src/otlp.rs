//! Exports traces of saves and loads, and metrics, over OTLP/HTTP in protobuf: [OpenTelemetry's protocol 1].
//!
//! One thread sends, so that no save and no load waits; what it has no room for is counted and left out.
//!
//! [OpenTelemetry's protocol 1]: https://opentelemetry.io/docs/specs/otlp/

mod message;
mod settings;
mod trace;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardfast_engine::{Error, Kind, Result};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::http::{Failure, post, runtime};
use crate::live::Live;
use crate::metrics;

use message::Encoded as _;
pub(crate) use settings::Settings;
use settings::Target;
pub(crate) use trace::Ended;

/// Saves and loads that wait to be sent: their records take 2 MiB.
const WAITING_MAX: usize = 8;

/// Sender of traces and metrics.
pub(crate) struct Exporter {
    sender: SyncSender<Ended>,
    shared: Arc<Shared>,
    live: Arc<Live>,
}

#[derive(Default)]
struct Shared {
    /// Number of saves and loads that are not sent yet.
    waiting: Mutex<usize>,
    changed: Condvar,
    /// Reason why the endpoint has refused what it was sent, the first one, until it is said.
    refused: Mutex<Option<String>>,
    has_refused: AtomicBool,
}

impl Exporter {
    /// Begins to export what `live` tells.
    ///
    /// # Errors
    /// `Exhausted` when there is no thread.
    pub(crate) fn start(settings: Settings, live: Arc<Live>) -> Result<Exporter> {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let (shared, runtime) = (Arc::<Shared>::default(), runtime()?);
        let (told, waiting) = (Arc::clone(&live), Arc::clone(&shared));
        let sending = Sending { settings, live: told, shared: waiting, runtime, began: crate::since_1970() };
        let thread =
            std::thread::Builder::new().name("shardfast-otlp".to_owned()).spawn(move || sending.run(&receiver));
        let failed = |error| Error::new(Kind::Exhausted, format!("no thread to export traces: {error}"));
        thread.map(|_| Exporter { sender, shared, live }).map_err(failed)
    }

    /// Hands a save or load that has ended to the thread that sends.
    pub(crate) fn send(&self, ended: Ended) {
        let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        match self.sender.try_send(ended) {
            Ok(()) => *waiting += 1,
            Err(_) => _ = self.live.not_exported.fetch_add(1, Relaxed),
        }
    }

    /// Returns why the endpoint refuses what it is sent, once.
    pub(crate) fn refused(&self) -> Option<String> {
        self.shared.refused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits until all is sent, for at most that long.
    pub(crate) fn flush(&self, within: Duration) {
        let waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.shared.changed.wait_timeout_while(waiting, within, |waiting| *waiting > 0);
    }
}

/// Thread that sends.
struct Sending {
    settings: Settings,
    live: Arc<Live>,
    shared: Arc<Shared>,
    runtime: Runtime,
    /// Time from which counters count, since 1970.
    began: Duration,
}

impl Sending {
    fn run(self, receiver: &Receiver<Ended>) {
        let mut due = Instant::now() + self.settings.interval;
        loop {
            match receiver.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(ended) => {
                    self.send_trace(&ended);
                    drop(ended);
                    let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                    *waiting = waiting.saturating_sub(1);
                    self.shared.changed.notify_all();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= due {
                due = Instant::now() + self.settings.interval;
                if let Some(target) = &self.settings.metrics {
                    let families = metrics::families(&self.live);
                    let resource = self.settings.resource(&self.live);
                    let body = message::metrics(families, resource, self.began, crate::since_1970()).encoded();
                    // The next ones have the same counters.
                    let _ = self.post(target, body);
                }
            }
        }
    }

    fn send_trace(&self, ended: &Ended) {
        let Some(target) = &self.settings.traces else { return };
        let body = trace::request(ended, self.settings.resource(&self.live)).encoded();
        if self.post(target, body).is_err() {
            self.live.not_exported.fetch_add(1, Relaxed);
        }
    }

    fn post(&self, target: &Target, body: Vec<u8>) -> std::result::Result<(), Failure> {
        let sent = post(&target.address, &target.path, &target.headers, body);
        let answer = self.runtime.block_on(async { timeout(target.timeout, sent).await });
        let sent = answer.unwrap_or_else(|_| Err(Failure::passing("no answer in time"))).map(drop);
        if let Err(failure) = &sent
            && failure.is_lasting
            && !self.shared.has_refused.swap(true, Relaxed)
        {
            let said =
                format!("http://{}{}: {}; no save waits for it or fails", target.address, target.path, failure.text);
            *self.shared.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(said);
        }
        sent
    }
}
