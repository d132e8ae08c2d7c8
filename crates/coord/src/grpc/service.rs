//! Serves the gRPC call with which a rank's children join.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};
use tonic::metadata::MetadataValue;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

use super::connections::{Connections, Remote};
use super::frames::{Arrived, Assembly, FRAME_BYTES_MAX, Frames};
use super::hub::ProcessHub;
use super::pass::{Pass, Refusal};
use super::tls::Tls;
use super::{BROKEN, KeepAlive, MEETING_HEADER, WINDOW_BYTES};
use crate::hub::LEFT;
use crate::node::Upward;
use crate::wire::proto::tree_server::{Tree, TreeServer};
use crate::wire::proto::{Asked, Found, Frame};
use crate::{Error, Meeting, Topology};

/// Serves all connections of one rank.
pub(super) struct TreeService {
    pass: Pass,
    topology: Topology,
    hub: Arc<ProcessHub>,
    /// Meeting of the ranks; `None` until this rank has joined itself, for which earlier children wait.
    meeting: watch::Sender<Option<Meeting>>,
    children: Mutex<Children>,
}

struct Children {
    /// Children that ever joined.
    joined: HashMap<u32, Child>,
    /// Sender that every session clones and holds while it lasts; `None` once this rank leaves.
    session: Option<mpsc::Sender<()>>,
    /// Addresses that ranks have registered, at rank 0.
    addresses: BTreeMap<u32, String>,
}

struct Child {
    from: String,
    is_lost: bool,
}

/// Returns a server without services yet.
pub(super) fn server(tls: Option<&Tls>, keep_alive: KeepAlive) -> Result<Server, Error> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(keep_alive.interval))
        .http2_keepalive_timeout(Some(keep_alive.timeout))
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    match tls {
        Some(tls) => tls.serve(server),
        None => Ok(server),
    }
}

/// Accepts children until the threads end.
pub(super) async fn serve(mut server: Server, service: Arc<TreeService>, listener: TcpListener) {
    let service = TreeServer::new(service).max_decoding_message_size(FRAME_BYTES_MAX);
    let _ = server.add_service(service).serve_with_incoming(Connections::new(listener)).await;
}

impl TreeService {
    /// Makes the service, and a receiver that disconnects when the last session has ended.
    pub(super) fn new(pass: Pass, topology: &Topology, hub: Arc<ProcessHub>) -> (TreeService, mpsc::Receiver<()>) {
        let (session, sessions) = mpsc::channel();
        let children = Children { joined: HashMap::new(), session: Some(session), addresses: BTreeMap::new() };
        let (meeting, _) = watch::channel(None);
        (TreeService { pass, topology: *topology, hub, meeting, children: Mutex::new(children) }, sessions)
    }

    /// Admits the children that wait, and all that come later.
    pub(super) fn open(&self, meeting: Meeting) {
        self.meeting.send_replace(Some(meeting));
    }

    /// Stops admitting children.
    pub(super) fn close(&self) {
        self.children().session = None;
    }

    fn children(&self) -> MutexGuard<'_, Children> {
        // Nothing panics with the lock held, and every change is one step.
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank that makes a request.
    fn check<T>(&self, request: &Request<T>) -> Result<u32, Status> {
        let checked = self.pass.check(request.metadata());
        // A refusal with a reason also shows that the peer knows the token.
        let is_of_this_job = checked.as_ref().map_or_else(|refusal| refusal.code != Code::Unauthenticated, |_| true);
        if let Some(remote) = Remote::of(request).filter(|_| is_of_this_job) {
            remote.set_proven();
        }
        checked.map_err(|refusal| self.refuse(refusal))
    }

    fn refuse(&self, Refusal { code, reason, rank }: Refusal) -> Status {
        if let Some(rank) = rank {
            self.hub.refuse(rank, &format!("rank {} refuses it: {reason}", self.pass.rank));
        }
        Status::new(code, reason)
    }

    fn admit(&self, rank: u32, from: String) -> Result<mpsc::Sender<()>, Status> {
        let us = self.pass.rank;
        let parent = self.topology.parent(rank);
        if parent != Some(us) {
            let parent = parent.map_or("none".to_owned(), |rank| format!("rank {rank}"));
            let reason = format!("its rank is {rank}, whose parent is {parent}, not rank {us}");
            return Err(self.refuse(Refusal { code: Code::InvalidArgument, reason, rank: Some(rank) }));
        }
        let mut children = self.children();
        let Some(session) = children.session.clone() else {
            return Err(Status::new(Code::Unavailable, format!("rank {us} is lost: {LEFT}")));
        };
        match children.joined.get(&rank) {
            Some(Child { from: first, is_lost: true }) => {
                let reason = format!("rank {rank}, which had joined from {first}, is lost and cannot join again");
                Err(Status::new(Code::AlreadyExists, reason))
            }
            Some(Child { from: first, is_lost: false }) => {
                let reason =
                    format!("rank {rank} has already joined from {first}; another rank {rank} came from {from}");
                drop(children);
                Err(self.refuse(Refusal { code: Code::AlreadyExists, reason, rank: Some(rank) }))
            }
            None => {
                children.joined.insert(rank, Child { from, is_lost: false });
                Ok(session)
            }
        }
    }

    fn lose_child(&self, rank: u32, cause: &str) {
        if let Some(child) = self.children().joined.get_mut(&rank) {
            child.is_lost = true;
        }
        self.hub.lose(rank, cause);
    }
}

fn origin<T>(request: &Request<T>) -> String {
    Remote::of(request).map_or_else(|| "an unknown address".to_owned(), |from| from.address().to_string())
}

#[tonic::async_trait]
impl Tree for Arc<TreeService> {
    type JoinStream = std::pin::Pin<Box<dyn Stream<Item = Result<Frame, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<Frame>>) -> Result<Response<Self::JoinStream>, Status> {
        let from = origin(&request);
        let rank = self.check(&request)?;
        // A child that cancels here has not joined, and may try again.
        let opened = self.meeting.subscribe().wait_for(Option::is_some).await.map(|meeting| *meeting);
        let Ok(Some(meeting)) = opened else {
            return Err(Status::new(Code::Unavailable, format!("rank {} is lost: {LEFT}", self.pass.rank)));
        };
        let session = self.admit(rank, from)?;
        let Some(outbound) = self.hub.outbound_to(rank) else {
            return Err(Status::new(Code::Unavailable, format!("rank {} is lost: {LEFT}", self.pass.rank)));
        };
        tokio::spawn(receive_from(Arc::clone(self), rank, request.into_inner(), session));
        let frames: Self::JoinStream = Box::pin(Frames::new(outbound).map(Ok));
        let mut response = Response::new(frames);
        response.metadata_mut().insert_bin(MEETING_HEADER, MetadataValue::from_bytes(&meeting.0));
        Ok(response)
    }

    async fn find(&self, request: Request<Asked>) -> Result<Response<Found>, Status> {
        let rank = self.check(&request)?;
        let mut children = self.children();
        let address = request.into_inner().address;
        if !address.is_empty() {
            children.addresses.insert(rank, address);
        }
        let parent = self.topology.parent(rank).and_then(|parent| children.addresses.get(&parent));
        Ok(Response::new(Found { address: parent.cloned().unwrap_or_default() }))
    }
}

/// Receives one child's messages until it ends its stream or is lost.
async fn receive_from(service: Arc<TreeService>, rank: u32, mut inbound: Streaming<Frame>, session: mpsc::Sender<()>) {
    let mut assembly = Assembly::<Upward>::new();
    let cause = loop {
        let Ok(Some(frame)) = inbound.message().await else { break BROKEN.to_owned() };
        match assembly.take(frame) {
            Ok(Arrived::Message(message)) => {
                if !service.hub.receive_from_child(rank, message) {
                    break BROKEN.to_owned();
                }
            }
            Ok(Arrived::Leave) => break LEFT.to_owned(),
            Err(problem) => break format!("it sent an invalid message: {problem}"),
        }
    };
    service.lose_child(rank, &cause);
    // The child is about to end its stream; to stop reading before would cut it.
    while let Ok(Some(_)) = inbound.message().await {}
    drop(session);
}
