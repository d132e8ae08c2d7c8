//! Connects a rank to its parent.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::frames::{Arrived, Assembly, FRAME_BYTES_MAX, Frames};
use super::hub::{Above, ProcessHub};
use super::pass::Pass;
use super::tls::{self, Tls};
use super::{BROKEN, KeepAlive, MEETING_HEADER, WINDOW_BYTES};
use crate::hub::LEFT;
use crate::node::Downward;
use crate::wire::proto::tree_client::TreeClient;
use crate::wire::proto::{Asked, Frame};
use crate::{Error, Meeting};

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(1);

/// A rank to connect to.
pub(super) struct Uplink {
    to: u32,
    address: String,
    pass: Pass,
    endpoint: Endpoint,
    /// Advice on what to check when the connection fails.
    hint: String,
    started: Instant,
    timeout: Duration,
}

impl Uplink {
    pub(super) fn new(
        to: u32,
        address: &str,
        pass: &Pass,
        tls: Option<&Tls>,
        keep_alive: KeepAlive,
        timeout: Duration,
    ) -> Result<Uplink, Error> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|error| Error::Invalid(format!("rank {to}'s address {address:?} is not \"host:port\": {error}")))?
            .tcp_nodelay(true)
            .http2_keep_alive_interval(keep_alive.interval)
            .keep_alive_timeout(keep_alive.timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        if let Some(tls) = tls {
            endpoint = tls.connect(endpoint)?;
        }
        let (address, hint) = (address.to_owned(), tls::hint(tls));
        Ok(Uplink { to, address, pass: pass.clone(), endpoint, hint, started: Instant::now(), timeout })
    }

    /// Opens the session that carries `outbound`.
    pub(super) async fn join(&self, outbound: Option<Above>) -> Result<(Meeting, Streaming<Frame>), Error> {
        let Some(outbound) = outbound else {
            return Err(Error::Invalid(format!("rank {} has already joined", self.pass.rank)));
        };
        let mut client = TreeClient::new(self.reached().await?).max_decoding_message_size(FRAME_BYTES_MAX);
        let mut request = Request::new(Frames::new(outbound));
        self.pass.show(request.metadata_mut());
        let session = tokio::time::timeout(self.left(), client.join(request)).await;
        let session = session.map_err(|_| self.late("it accepted the connection and did not respond"))?;
        let session = session.map_err(|status| self.refused(&status))?;
        let meeting = session.metadata().get_bin(MEETING_HEADER).and_then(|name| name.to_bytes().ok());
        let meeting = meeting.and_then(|name| <[u8; 16]>::try_from(name.as_ref()).ok());
        let meeting = meeting.ok_or_else(|| {
            let (to, address) = (self.to, &self.address);
            Error::Unavailable(format!("rank {to} at {address} accepted this rank without naming the meeting"))
        })?;
        Ok((Meeting(meeting), session.into_inner()))
    }

    /// Asks rank 0 for the address of `parent` until it is known, and registers this rank's own.
    pub(super) async fn find(&self, parent: u32, own: String) -> Result<String, Error> {
        let mut pause = RETRY_FIRST;
        let mut found = self.ask(&own).await?;
        while found.is_empty() && parent != 0 {
            tokio::time::sleep(pause.min(self.left())).await;
            pause = (pause * 2).min(RETRY_LAST);
            found = match self.ask(&own).await {
                Err(_) if self.left().is_zero() => {
                    let (rank, timeout) = (self.pass.rank, self.timeout);
                    return Err(Error::Unavailable(format!(
                        "rank {rank}: rank {parent}, its parent in the tree of ranks, did not report its address \
                         within {timeout:?}"
                    )));
                }
                asked => asked?,
            };
        }
        Ok(found)
    }

    /// Sends one request on a connection of its own, so that rank 0 holds none for a waiting rank.
    async fn ask(&self, own: &str) -> Result<String, Error> {
        let mut client = TreeClient::new(self.reached().await?);
        let mut request = Request::new(Asked { address: own.to_owned() });
        self.pass.show(request.metadata_mut());
        let found = tokio::time::timeout(self.left(), client.find(request)).await;
        let found = found.map_err(|_| self.late("it accepted the connection and did not respond"))?;
        Ok(found.map_err(|status| self.refused(&status))?.into_inner().address)
    }

    async fn reached(&self) -> Result<Channel, Error> {
        let mut pause = RETRY_FIRST;
        let mut cause = "no answer".to_owned();
        loop {
            match tokio::time::timeout(self.left(), self.endpoint.connect()).await {
                Ok(Ok(channel)) => return Ok(channel),
                Ok(Err(error)) => {
                    if tls::is_refusal(&error) {
                        let (rank, to, address) = (self.pass.rank, self.to, &self.address);
                        let (cause, hint) = (innermost(&error), &self.hint);
                        let message = format!(
                            "rank {rank}: the TLS handshake with rank {to} at {address} failed: {cause}; {hint}"
                        );
                        return Err(Error::Invalid(message));
                    }
                    cause = innermost(&error);
                }
                Err(_) => return Err(self.late(&cause)),
            }
            if self.left().is_zero() {
                return Err(self.late(&cause));
            }
            tokio::time::sleep(pause.min(self.left())).await;
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }

    fn late(&self, cause: &str) -> Error {
        let (rank, to, address, timeout) = (self.pass.rank, self.to, &self.address, self.timeout);
        Error::Unavailable(format!("rank {rank} cannot reach rank {to} at {address} within {timeout:?}: {cause}"))
    }

    fn refused(&self, status: &Status) -> Error {
        let (rank, to, address) = (self.pass.rank, self.to, &self.address);
        match status.code() {
            Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument | Code::AlreadyExists => {
                Error::Invalid(format!("rank {to} at {address} refuses rank {rank}: {}", status.message()))
            }
            Code::Unavailable if std::error::Error::source(status).is_none() => {
                Error::Unavailable(format!("rank {to} at {address} refuses rank {rank}: {}", status.message()))
            }
            // The request failed before rank `to` answered.
            _ => {
                let (cause, hint) = (innermost(status), &self.hint);
                Error::Unavailable(format!("rank {rank} cannot join rank {to} at {address}: {cause}; {hint}"))
            }
        }
    }
}

/// Returns the innermost error, since transport errors wrap the informative one.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Receives the parent's messages until the session ends.
pub(super) async fn listen(mut inbound: Streaming<Frame>, hub: Arc<ProcessHub>, ended: mpsc::Sender<()>) {
    let mut assembly = Assembly::<Downward>::new();
    let cause = loop {
        let Ok(Some(frame)) = inbound.message().await else { break BROKEN.to_owned() };
        match assembly.take(frame) {
            Ok(Arrived::Message(message)) => hub.receive_from_parent(message),
            Ok(Arrived::Leave) => break LEFT.to_owned(),
            Err(problem) => break format!("it sent an invalid message: {problem}"),
        }
    };
    hub.lose_parent(&cause);
    // The parent is about to end its stream; to stop reading before would cut it.
    while let Ok(Some(_)) = inbound.message().await {}
    drop(ended);
}
