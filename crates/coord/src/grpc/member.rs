//! Every rank but 0: one connection to rank 0, shared by all threads that agree.

use std::collections::HashMap;
use std::mem;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{self as channel, UnboundedSender};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::wire::{self, proto};
use super::workers::Workers;
use super::{BROKEN, KeepAlive, MEETING_HEADER, MESSAGE_BYTES_MAX, Pass, WINDOW_BYTES, unbracketed};
use crate::hub::{self, GRACE, LEFT};
use crate::round;
use crate::{Coord, Decide, Error, Meeting};
use proto::coordinator_client::CoordinatorClient;
use proto::to_rank::Said;

/// How long a rank that leaves waits for rank 0 to have seen it.
const FAREWELL: Duration = Duration::from_secs(2);

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(1);

pub(super) struct Member {
    rank: u32,
    world: u32,
    meeting: Meeting,
    host: String,
    link: Arc<Mutex<Link>>,
    /// Disconnected when the session has ended.
    session: Mutex<mpsc::Receiver<()>>,
    workers: Workers,
}

/// This rank's half of the session.
struct Link {
    calls: HashMap<u64, SyncSender<Result<Vec<u8>, Error>>>,
    calls_made: u64,
    state: State,
}

enum State {
    Open(UnboundedSender<proto::FromRank>),
    /// Why no call can be made any more.
    Closed(Error),
}

impl Member {
    pub(super) fn join(
        address: &str,
        host: &str,
        pass: &Pass,
        timeout: Duration,
        keep_alive: KeepAlive,
    ) -> Result<Member, Error> {
        let (rank, world) = (pass.rank, pass.world);
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Error::Invalid(format!("rank 0's address {address:?} is not \"host:port\": {error}")))?
            .tcp_nodelay(true)
            .http2_keep_alive_interval(keep_alive.interval)
            .keep_alive_timeout(keep_alive.timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let (outbound, contributions) = channel::unbounded_channel();
        let mut request = Request::new(UnboundedReceiverStream::new(contributions));
        pass.show(request.metadata_mut());

        let workers = Workers::start()?;
        let address = address.to_owned();
        let opened = workers.run(async move {
            let started = Instant::now();
            let late = |cause| {
                Error::Unavailable(format!("rank {rank} cannot reach rank 0 at {address} within {timeout:?}: {cause}"))
            };
            let channel = connect(&endpoint, started, timeout).await.map_err(late)?;
            let mut client = CoordinatorClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX);
            let left = timeout.saturating_sub(started.elapsed());
            let session = tokio::time::timeout(left, client.session(request)).await;
            let session = session.map_err(|_| late("it accepted the connection and says nothing".to_owned()))?;
            let session = session.map_err(|status| refused(rank, &address, &status))?;
            let meeting = session.metadata().get_bin(MEETING_HEADER).and_then(|name| name.to_bytes().ok());
            let meeting = meeting.and_then(|name| <[u8; 16]>::try_from(name.as_ref()).ok());
            let meeting = meeting.ok_or_else(|| {
                Error::Unavailable(format!("rank 0 at {address} lets in and does not name the meeting"))
            })?;
            Ok((session.into_inner(), Meeting(meeting)))
        });
        let (inbound, meeting) = opened?;

        let link = Link { calls: HashMap::new(), calls_made: 0, state: State::Open(outbound) };
        let link = Arc::new(Mutex::new(link));
        let (ended, session) = mpsc::channel();
        workers.spawn(listen(inbound, Arc::clone(&link), ended));
        Ok(Member { rank, world, meeting, host: unbracketed(host), link, session: Mutex::new(session), workers })
    }
}

async fn connect(endpoint: &Endpoint, started: Instant, timeout: Duration) -> Result<Channel, String> {
    let mut pause = RETRY_FIRST;
    let mut cause = "no answer".to_owned();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        match tokio::time::timeout(left, endpoint.connect()).await {
            Ok(Ok(channel)) => return Ok(channel),
            Ok(Err(error)) => cause = innermost(&error),
            Err(_) => return Err(cause),
        }
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(cause);
        }
        tokio::time::sleep(pause.min(left)).await;
        pause = (pause * 2).min(RETRY_LAST);
    }
}

/// Transport errors wrap the one that says something.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

fn refused(rank: u32, address: &str, status: &Status) -> Error {
    let message = format!("rank 0 at {address} refuses rank {rank}: {}", status.message());
    match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument | Code::AlreadyExists => {
            Error::Invalid(message)
        }
        _ => Error::Unavailable(message),
    }
}

/// Hands out the answers until the session ends, by this rank's wish or otherwise.
async fn listen(mut inbound: Streaming<proto::ToRank>, link: Arc<Mutex<Link>>, ended: mpsc::Sender<()>) {
    let cause = loop {
        let Ok(Some(message)) = inbound.message().await else { break BROKEN };
        match message.said {
            Some(Said::Answer(answer)) => {
                let call = lock(&link).calls.remove(&answer.call);
                if let Some(call) = call {
                    // Its thread may have given up.
                    let _ = call.try_send(wire::answered(answer.outcome));
                }
            }
            Some(Said::Leave(_)) => break LEFT,
            // No version of ours says nothing.
            None => break BROKEN,
        }
    };
    let lost = Error::Lost { rank: 0, cause: cause.to_owned() };
    let calls = lock(&link).close(lost.clone());
    for call in calls.into_values() {
        let _ = call.try_send(Err(lost.clone()));
    }
    // Rank 0 is about to end its stream; to stop reading before would cut it.
    while let Ok(Some(_)) = inbound.message().await {}
    drop(ended);
}

impl Link {
    /// Ends this rank's stream of contributions and gives the calls that wait.
    fn close(&mut self, reason: Error) -> HashMap<u64, SyncSender<Result<Vec<u8>, Error>>> {
        if let State::Open(outbound) = &self.state {
            // Where it cannot be sent any more, rank 0 knows.
            let _ = outbound.send(wire::RANK_LEAVES);
            self.state = State::Closed(reason);
        }
        mem::take(&mut self.calls)
    }
}

fn lock(link: &Mutex<Link>) -> MutexGuard<'_, Link> {
    // Nothing panics with the lock held, and every change is one step.
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Coord for Member {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn meeting(&self) -> Meeting {
        self.meeting
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        _decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.workers.require_here()?;
        round::check_topic(topic)?;
        let contribution = round::bounded(contribution);
        let (sender, receiver) = mpsc::sync_channel(1);
        let call = {
            let mut link = lock(&self.link);
            let call = link.calls_made;
            match &link.state {
                // Where it cannot be sent any more, the listener closes the link and answers the call.
                State::Open(outbound) => {
                    let _ = outbound.send(wire::contribution(call, topic, contribution, deadline));
                }
                State::Closed(reason) => return Err(reason.clone()),
            }
            link.calls_made += 1;
            link.calls.insert(call, sender);
            call
        };
        let wait = deadline.saturating_mul(2).saturating_add(GRACE);
        receiver.recv_timeout(wait).unwrap_or_else(|_| {
            lock(&self.link).calls.remove(&call);
            Err(hub::undecided(topic, deadline))
        })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if !self.workers.here() {
            // Closing would wake threads that do not exist here. The parent's session goes on.
            return;
        }
        lock(&self.link).close(Error::Invalid("this rank closed its coordinator".to_owned()));
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Either rank 0 has seen the end, or it had its time.
        let _ = session.recv_timeout(FAREWELL);
    }
}
