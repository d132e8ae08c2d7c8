//! Connects ranks that are processes: each to its parent in the tree.
//!
//! # Protocol
//!
//! 1. A rank [opens](Place::open) its place: a rank with children listens, on a given port or one that the system
//!    chooses. The job's rendezvous takes rank 0's address and the job's token to the other ranks; it may take the
//!    addresses of all that listen, or rank 0 does so itself ([`Place::find_parent`]).
//! 2. It [joins](Place::join): it connects to its parent and opens the one call of `proto/coord.proto` that stays open
//!    for as long as it takes part. Its headers carry the token, the protocol's version, the rank, and the tree. The
//!    parent compares them before it reads anything else and refuses what differs, a rank that is not its child or
//!    is taken, and one that was lost. It answers as soon as it has joined itself; its answer's headers name the
//!    meeting.
//! 3. The messages on that call are those of [`node`](crate::node), sent in frames, so that a message may have any
//!    size.
//! 4. Both ends detect a broken connection at once: a process that dies closes its sockets. Where nothing closes them
//!    (a cable, a power loss, a stopped process, a forked child that still holds them), pings every 10 s in both
//!    directions detect it within 30 s. A rank never reconnects, since messages may have been lost: the rank and all
//!    ranks below it are lost. A round that ends sooner does not wait for these pings: nodes ping each other
//!    ([`node`](crate::node)), the threads here answer, and such messages overtake large ones, of which each frame
//!    counts as an answer.
//! 5. A rank that drops its coordinator sends a leave message on all its connections, ends its half of each call and
//!    waits a short time until the other end has ended its own half: by then it has read everything. The end of a
//!    stream alone proves nothing, since HTTP/2 libraries report some broken connections as one.
//! 6. A rank of this job (it knows the token) that is refused before the first round was decided will never join: every
//!    rank fails at once, with the reason. Later, and without the token, a refusal concerns only the refused rank.
//!
//! With [`Tls`], both ends of each connection show a certificate, and refuse a peer without one.
//!
//! Each coordinator has two threads of its own from [`Place::open`] until it is dropped; there are none before. They
//! do not survive a `fork`: in the child `agree` is an [`Error::Invalid`], and dropping the coordinator does nothing.

mod connections;
mod frames;
mod hub;
mod pass;
mod service;
mod tls;
mod uplink;
mod workers;

#[cfg(test)]
mod tests;

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::hub::ProcessHub;
use self::pass::Pass;
pub(crate) use self::pass::same_secret;
use self::service::TreeService;
pub use self::tls::Tls;
use self::workers::Workers;
use crate::hub as calls;
use crate::pulse::{BEAT, Pulse};
use crate::{Absent, Coord, Decide, Error, Meeting, Ports, Show, Topology};

/// Bytes in flight before the receiver must acknowledge them: bandwidth times delay of a fast network.
const WINDOW_BYTES: u32 = 16 << 20;

/// Cause of the loss of a rank whose call ended without a leave message.
const BROKEN: &str = "its process ended or cannot be reached";

const MEETING_HEADER: &str = "shardfast-meeting-bin";

/// Time for which a leaving rank waits until its children have read their last answers.
const FAREWELL_BELOW: Duration = Duration::from_secs(10);

/// Time for which a leaving rank waits until its parent has read its leave message.
const FAREWELL_ABOVE: Duration = Duration::from_secs(2);

/// Timing of pings, and of the loss of a peer that does not answer.
#[derive(Clone, Copy)]
struct KeepAlive {
    interval: Duration,
    timeout: Duration,
}

const KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_secs(10), timeout: Duration::from_secs(20) };

/// Rank of this process, and the job that it belongs to.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Name or IP address, without a port, at which the other ranks can reach this process.
    pub host: String,
    /// Ports at which it may listen there.
    pub ports: Ports,
    /// Rank of this process.
    pub rank: u32,
    /// Tree of the job's ranks, the same on all of them.
    pub topology: Topology,
    /// Secret of this job, visible ASCII, the same for all its ranks.
    pub token: String,
    /// Certificates: all ranks have them, or none.
    pub tls: Option<Tls>,
}

/// A rank that has not joined yet. If it has children, they can already connect and wait.
pub struct Place {
    host: String,
    ports: Ports,
    topology: Topology,
    pass: Pass,
    tls: Option<Tls>,
    keep_alive: KeepAlive,
    hub: Arc<ProcessHub>,
    /// Set if the rank has children.
    listening: Option<Listening>,
    workers: Workers,
}

struct Listening {
    service: Arc<TreeService>,
    address: String,
    /// Disconnects when the last child's session has ended.
    sessions: Receiver<()>,
}

impl Place {
    /// Opens a rank's place in the tree. A rank with children listens on its host's `port`; with 0 on one of its ports.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the rank is not below the world's size, the token is empty or has other characters, or
    /// the certificates cannot be used; [`Error::Unavailable`] when the host cannot be listened on.
    pub fn open(membership: Membership, port: u16) -> Result<Place, Error> {
        Place::open_with(membership, port, KEEP_ALIVE)
    }

    fn open_with(membership: Membership, port: u16, keep_alive: KeepAlive) -> Result<Place, Error> {
        let Membership { host, ports, rank, topology, token, tls } = membership;
        let pass = Pass::new(rank, &topology, &token)?;
        // An IPv6 address may come in the brackets of a URL.
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let workers = Workers::start()?;
        let hub = Arc::new(ProcessHub::new(&topology, rank));
        workers.spawn(hub::keep_time(Arc::clone(&hub)));
        let mut place = Place { host, ports, topology, pass, tls, keep_alive, hub, listening: None, workers };
        if !topology.children(rank).is_empty() {
            place.listening = Some(place.listen(port)?);
        }
        Ok(place)
    }

    fn listen(&self, port: u16) -> Result<Listening, Error> {
        let (host, ports) = (self.host.clone(), self.ports.clone());
        let listener = self.workers.run(async move {
            let ports = if port == 0 { ports } else { Ports::only(port..=port) };
            let listened = ports.listen(&host).await;
            let listened = listened.and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
            listened.map_err(|error| {
                let port = if port == 0 { String::new() } else { format!(", port {port}") };
                Error::Unavailable(format!("cannot listen on {host:?}{port}: {error}"))
            })
        });
        let (port, listener) = listener?;
        let address =
            if self.host.contains(':') { format!("[{}]:{port}", self.host) } else { format!("{}:{port}", self.host) };
        let (service, sessions) = TreeService::new(self.pass.clone(), &self.topology, Arc::clone(&self.hub));
        let service = Arc::new(service);
        let server = service::server(self.tls.as_ref(), self.keep_alive)?;
        self.workers.spawn(service::serve(server, Arc::clone(&service), listener));
        Ok(Listening { service, address, sessions })
    }

    /// Returns the address for this rank's children, `host:port`; `None` without children.
    pub fn address(&self) -> Option<&str> {
        self.listening.as_ref().map(|listening| listening.address.as_str())
    }

    /// Returns the rank that this one joins; `None` at rank 0.
    pub fn parent(&self) -> Option<u32> {
        self.topology.parent(self.pass.rank)
    }

    /// Asks rank 0, at `root`, for the address of this rank's parent, and registers this rank's own address there for
    /// its children. So every rank of the job must call it, or none.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when rank 0 refuses; [`Error::Unavailable`] when it cannot be reached within `timeout`, or
    /// the parent has not registered by then.
    pub fn find_parent(&self, root: &str, timeout: Duration) -> Result<String, Error> {
        let Some(parent) = self.parent() else {
            return Err(Error::Invalid("rank 0 has no parent to find".to_owned()));
        };
        let own = self.address().unwrap_or_default().to_owned();
        if parent == 0 && own.is_empty() {
            return Ok(root.to_owned());
        }
        let uplink = uplink::Uplink::new(0, root, &self.pass, self.tls.as_ref(), self.keep_alive, timeout)?;
        let found = self.workers.run(async move { uplink.find(parent, own).await });
        found.map(|found| if parent == 0 { root.to_owned() } else { found })
    }

    /// Joins the parent, which listens at `parent`; `None` at rank 0. Retries for `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the parent refuses: another token, protocol or tree, or a rank that has joined already,
    /// was lost or is not below it; [`Error::Unavailable`] when it cannot be reached in time, or has itself not joined
    /// by then.
    pub fn join(self, parent: Option<&str>, timeout: Duration) -> Result<Arc<dyn Coord>, Error> {
        let (meeting, joined) = match (self.parent(), parent) {
            (None, None) => (Meeting::draw()?, None),
            (Some(rank), Some(address)) => {
                let uplink =
                    uplink::Uplink::new(rank, address, &self.pass, self.tls.as_ref(), self.keep_alive, timeout)?;
                let outbound = self.hub.outbound();
                let (meeting, inbound) = self.workers.run(async move { uplink.join(outbound).await })?;
                let (ended, joined) = std::sync::mpsc::channel();
                self.workers.spawn(uplink::listen(inbound, Arc::clone(&self.hub), ended));
                (meeting, Some(Mutex::new(joined)))
            }
            (parent, address) => {
                let (rank, parent) = (self.pass.rank, parent.map_or("none".to_owned(), |rank| format!("rank {rank}")));
                let address = address.unwrap_or("no address");
                return Err(Error::Invalid(format!("rank {rank}'s parent is {parent}, it was given {address}")));
            }
        };
        let Place { host, ports, topology, pass, hub, listening, workers, .. } = self;
        let below = listening.map(|Listening { service, sessions, .. }| {
            service.open(meeting);
            (service, Mutex::new(sessions))
        });
        Ok(Arc::new(Process {
            host,
            ports,
            rank: pass.rank,
            world: topology.world(),
            meeting,
            hub,
            below,
            joined,
            workers,
        }))
    }
}

/// A rank that has joined.
struct Process {
    host: String,
    ports: Ports,
    rank: u32,
    world: u32,
    meeting: Meeting,
    hub: Arc<ProcessHub>,
    /// Service for children, if the rank has any; the receiver disconnects when the last of their sessions has ended.
    below: Option<(Arc<TreeService>, Mutex<Receiver<()>>)>,
    /// Disconnects when this rank's session with its parent has ended; `None` without a parent.
    joined: Option<Mutex<Receiver<()>>>,
    workers: Workers,
}

impl Coord for Process {
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

    fn ports(&self) -> Ports {
        self.ports.clone()
    }

    fn absent(&self, topic: &str) -> Absent {
        if self.workers.here() { self.hub.absent(topic) } else { Absent::default() }
    }

    fn lost(&self) -> Option<u32> {
        self.workers.here().then(|| self.hub.lost()).flatten()
    }

    fn beats(&self, pulse: &Arc<Pulse>) -> bool {
        if !self.workers.here() {
            return false;
        }
        let pulse = Arc::downgrade(pulse);
        self.workers.spawn(async move {
            while let Some(pulse) = pulse.upgrade() {
                pulse.beat();
                drop(pulse);
                tokio::time::sleep(BEAT).await;
            }
        });
        true
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.agree_or_show(topic, contribution, decide, &mut |_| (), deadline)
    }

    fn agree_or_show(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        show: Show<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.workers.require_here()?;
        calls::agree(&*self.hub, topic, contribution, decide, show, deadline)
    }

    fn hurry(&self, topic: &str) {
        if self.workers.here() {
            self.hub.hurry(topic);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.workers.here() {
            // Closing would wake threads that do not exist here. The parent process's session goes on.
            return;
        }
        if let Some((service, _)) = &self.below {
            service.close();
        }
        self.hub.leave();
        // By then the children have read everything, or their time is over.
        if let Some((_, sessions)) = &mut self.below {
            let _ = sessions.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(FAREWELL_BELOW);
        }
        if let Some(joined) = &mut self.joined {
            let _ = joined.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(FAREWELL_ABOVE);
        }
    }
}
