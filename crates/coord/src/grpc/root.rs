//! Rank 0: listens, lets ranks in, keeps the rounds and the time.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, mpsc as channel, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};

use super::wire::{self, proto};
use super::workers::Workers;
use super::{BROKEN, KeepAlive, MEETING_HEADER, MESSAGE_BYTES_MAX, Pass, WINDOW_BYTES, unbracketed};
use crate::hub::{Hub, LEFT};
use crate::round::Reply;
use crate::{Coord, Decide, Error, Meeting};
use proto::coordinator_server::{Coordinator, CoordinatorServer};
use proto::from_rank::Said;

/// How long rank 0 waits at its end for the others to have read their last answers.
const FAREWELL: Duration = Duration::from_secs(10);

pub(super) struct Root {
    host: String,
    hub: Arc<Hub>,
    door: Arc<Door>,
    /// Disconnected when the last session has ended.
    sessions: Mutex<mpsc::Receiver<()>>,
    workers: Workers,
}

/// Where ranks come in. One for all connections.
struct Door {
    pass: Pass,
    meeting: Meeting,
    hub: Arc<Hub>,
    clock: Arc<Notify>,
    guests: Mutex<Guests>,
    leaving: watch::Sender<bool>,
}

struct Guests {
    /// Where each rank that ever joined came from.
    joined: HashMap<u32, Guest>,
    /// Every session holds a copy while it lasts. None once rank 0 leaves.
    session: Option<mpsc::Sender<()>>,
}

struct Guest {
    from: String,
    gone: bool,
}

impl Root {
    pub(super) fn open(host: &str, pass: Pass, keep_alive: KeepAlive) -> Result<(Root, String), Error> {
        let workers = Workers::start()?;
        let host = unbracketed(host);
        let bind = host.clone();
        let listener = workers.run(async move {
            let listened = TcpListener::bind((bind.as_str(), 0)).await;
            let listened = listened.and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
            listened.map_err(|error| Error::Unavailable(format!("cannot listen on {bind:?}: {error}")))
        });
        let (port, listener) = listener?;
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };

        let hub = Arc::new(Hub::new(pass.world));
        let clock = Arc::new(Notify::new());
        let (session, sessions) = mpsc::channel();
        let guests = Mutex::new(Guests { joined: HashMap::new(), session: Some(session) });
        let (leaving, _) = watch::channel(false);
        let door = Arc::new(Door {
            pass,
            meeting: Meeting::draw()?,
            hub: Arc::clone(&hub),
            clock: Arc::clone(&clock),
            guests,
            leaving,
        });

        workers.spawn(keep_time(Arc::clone(&hub), clock));
        let service = CoordinatorServer::new(Arc::clone(&door))
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let server = Server::builder()
            .http2_keepalive_interval(Some(keep_alive.interval))
            .http2_keepalive_timeout(Some(keep_alive.timeout))
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .add_service(service);
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        workers.spawn(async move {
            // It ends with the threads, or when the system takes the socket away; then no rank can join any more, and
            // those that try are told by the refused connection.
            let _ = server.serve_with_incoming(incoming).await;
        });
        Ok((Root { host, hub, door, sessions: Mutex::new(sessions), workers }, address))
    }
}

/// Ends rounds when their time is over, also while no thread of rank 0 waits in them.
async fn keep_time(hub: Arc<Hub>, clock: Arc<Notify>) {
    loop {
        match hub.expires_in() {
            Some(left) => {
                tokio::select! {
                    () = tokio::time::sleep(left) => hub.expire(),
                    () = clock.notified() => {}
                }
            }
            None => clock.notified().await,
        }
    }
}

impl Coord for Root {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        self.door.pass.world
    }

    fn meeting(&self) -> Meeting {
        self.door.meeting
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.workers.require_here()?;
        self.hub.agree(0, topic, contribution, decide, deadline)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if !self.workers.here() {
            return;
        }
        self.hub.lose(0, LEFT);
        self.door.close();
        let sessions = self.sessions.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Either all have read everything, or they had their time.
        let _ = sessions.recv_timeout(FAREWELL);
    }
}

impl Door {
    fn close(&self) {
        self.guests().session = None;
        self.leaving.send_replace(true);
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        // Nothing panics with the lock held, and every change is one step.
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_in(&self, rank: u32, from: String) -> Result<mpsc::Sender<()>, Status> {
        let mut guests = self.guests();
        let Some(session) = guests.session.clone() else {
            return Err(Status::new(Code::Unavailable, format!("rank 0 is gone: {LEFT}")));
        };
        if let Some(guest) = guests.joined.get(&rank) {
            let past =
                if guest.gone { "has come and gone; what is lost does not come back" } else { "is there already" };
            let first = &guest.from;
            return Err(Status::new(Code::AlreadyExists, format!("rank {rank}, joined from {first}, {past}")));
        }
        guests.joined.insert(rank, Guest { from, gone: false });
        Ok(session)
    }

    fn see_off(&self, rank: u32, cause: &str) {
        if let Some(guest) = self.guests().joined.get_mut(&rank) {
            guest.gone = true;
        }
        self.hub.lose(rank, cause);
    }
}

#[tonic::async_trait]
impl Coordinator for Arc<Door> {
    type SessionStream = UnboundedReceiverStream<Result<proto::ToRank, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::FromRank>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let from =
            request.remote_addr().map_or_else(|| "an unknown address".to_owned(), |from: SocketAddr| from.to_string());
        let rank = self.pass.check(request.metadata()).map_err(|(code, message)| Status::new(code, message))?;
        let session = self.let_in(rank, from)?;
        let (outbound, answers) = channel::unbounded_channel();
        tokio::spawn(attend(Arc::clone(self), rank, request.into_inner(), outbound, session));
        let mut response = Response::new(UnboundedReceiverStream::new(answers));
        let meeting = MetadataValue::from_bytes(&self.meeting.0);
        response.metadata_mut().insert_bin(MEETING_HEADER, meeting);
        Ok(response)
    }
}

/// Takes in one rank's contributions until it ends its stream or is lost.
async fn attend(
    door: Arc<Door>,
    rank: u32,
    mut inbound: Streaming<proto::FromRank>,
    outbound: UnboundedSender<Result<proto::ToRank, Status>>,
    session: mpsc::Sender<()>,
) {
    let mut outbound = Some(outbound);
    let mut leaving = door.leaving.subscribe();
    let cause = loop {
        let message = tokio::select! {
            message = inbound.message() => message,
            // Ends the answers once those that were given are sent; the rank ends its stream when it has read them.
            _ = leaving.wait_for(|leaving| *leaving), if outbound.is_some() => {
                if let Some(outbound) = outbound.take() {
                    let _ = outbound.send(Ok(wire::ROOT_LEAVES));
                }
                continue;
            }
        };
        let Ok(Some(message)) = message else { break BROKEN };
        match (message.said, &outbound) {
            (Some(Said::Contribution(contribution)), Some(outbound)) => {
                let (call, outbound) = (contribution.call, outbound.clone());
                let seat = Box::new(move |reply| {
                    // Rank 0 alone decides, and is never at the far end of a connection. A rank that cannot be answered
                    // any more is being lost.
                    if let Reply::Answer(answer) = reply {
                        let _ = outbound.send(Ok(wire::answer(call, answer)));
                    }
                });
                let deadline = Duration::from_nanos(contribution.deadline_ns);
                let part = wire::contributed(contribution.body);
                door.hub.contribute(rank, &contribution.topic, part, seat, deadline);
                door.clock.notify_one();
            }
            // It will find that rank 0 has left.
            (Some(Said::Contribution(_)), None) => {}
            (Some(Said::Leave(_)), _) => break LEFT,
            // No version of ours says nothing.
            (None, _) => break BROKEN,
        }
    };
    door.see_off(rank, cause);
    drop(outbound);
    // The rank is about to end its stream; to stop reading before would cut it.
    while let Ok(Some(_)) = inbound.message().await {}
    drop(session);
}
