//! Connects pairs of ranks, which swap messages in rounds. This is bulk transport, apart from the tree on which ranks
//! agree.
//!
//! # Protocol
//!
//! 1. Every rank [`listen`](Joining::listen)s on a free port at [`Coord::host`] and on an abstract Unix socket of its
//!    machine with a random name; the ranks exchange these addresses by agreeing. Of two ranks the higher one connects,
//!    through the Unix socket if it finds that: then they are on one machine.
//! 2. The accepting side sends 16 random bytes. The connecting side answers with `MAGIC`, its rank, 16 random bytes of
//!    its own and a proof: a keyed SHA-256 of all bytes sent so far, of both ranks and of the connection's purpose. The
//!    accepting side answers with a proof of its own. The key is the name of the meeting, which the coordinator gave to
//!    admitted ranks only; it is not sent. A side without a valid proof is disconnected and learns nothing.
//! 3. On one machine the connecting side and then the accepting one send a byte, with which a descriptor may come
//!    (`SCM_RIGHTS`): what the rank [offers](Joining::listen), such as shared memory.
//! 4. Then messages travel in both directions: their length in 8 bytes, least significant first, and that many bytes.
//!
//! There is one round at a time, in which one message goes to each peer and one comes from each. All of it happens on
//! the calling thread, so a `fork` leaves no thread behind. Messages are not encrypted.

mod handshake;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::handshake::{Link, This, abstract_path, answer_local, answer_remote, connect, nonce};
use crate::{Coord, Error};

/// Maximum number of connections without a proof; more wait until one of them has proven itself, or is closed.
const UNPROVEN_MAX: usize = 128;

/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// A message, as consecutive pieces, which messages to several peers may share.
pub type Message = Vec<Arc<Vec<u8>>>;

/// A rank that is connecting with its peers.
pub struct Joining {
    runtime: Runtime,
    socket: TcpListener,
    /// Abstract Unix socket; `None` if the system has none, or refuses them.
    local_socket: Option<UnixListener>,
    address: String,
    this: This,
    expected: BTreeSet<u32>,
    links: BTreeMap<u32, Link>,
    connecting: JoinSet<Result<(u32, Link), Error>>,
    answering: JoinSet<Option<(u32, Link)>>,
}

/// Connections with every peer.
pub struct Peers {
    runtime: Runtime,
    links: BTreeMap<u32, Link>,
    message_bytes_max: u64,
    deadline: Duration,
}

impl Joining {
    /// Listens at the coordinator's host, on one of its ports. `purpose` must be the same on all ranks that are to be
    /// connected, and differ each time.
    ///
    /// Peers on this machine get the descriptor `offered`, if the system can pass it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the host cannot be listened on.
    pub fn listen(coord: &dyn Coord, purpose: &str, offered: Option<Arc<OwnedFd>>) -> Result<Joining, Error> {
        let (rank, host) = (coord.rank(), coord.host());
        let fail = |error: std::io::Error| {
            Error::Unavailable(format!("rank {rank} cannot listen for its peers at {host}: {error}"))
        };
        let runtime = Builder::new_current_thread().enable_io().enable_time().build().map_err(fail)?;
        let socket = runtime.block_on(coord.ports().listen(host)).map_err(fail)?;
        let port = socket.local_addr().map_err(fail)?.port();
        let mut address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let name: String = nonce().map_err(fail)?.iter().map(|byte| format!("{byte:02x}")).collect();
        let local_socket = {
            let _runtime = runtime.enter();
            UnixListener::bind(abstract_path(&name)).ok()
        };
        if local_socket.is_some() {
            address = format!("{address} {name}");
        }
        Ok(Joining {
            runtime,
            socket,
            local_socket,
            address,
            this: This { rank, meeting: coord.meeting(), purpose: purpose.to_owned(), offered },
            expected: BTreeSet::new(),
            links: BTreeMap::new(),
            connecting: JoinSet::new(),
            answering: JoinSet::new(),
        })
    }

    /// Returns the address for peers: `host:port`, and after a space the name of the machine's abstract Unix socket, if
    /// any.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Begins to connect with these peers, given with their addresses; each of them must do so with this rank, too.
    pub fn begin(&mut self, peers: &[(u32, String)]) {
        let _runtime = self.runtime.enter();
        for (rank, address) in peers {
            self.expected.insert(*rank);
            if *rank < self.this.rank {
                self.connecting.spawn(connect(self.this.clone(), *rank, address.clone()));
            }
        }
    }

    /// Continues until there is a connection with every peer, or for `time`. Returns the peers that are missing.
    ///
    /// # Errors
    /// [`Error::Unavailable`] naming a peer that cannot be connected with.
    pub fn go_on(&mut self, time: Duration) -> Result<Vec<u32>, Error> {
        let Joining { runtime, socket, local_socket, this, expected, links, connecting, answering, .. } = self;
        let all = async {
            while links.len() < expected.len() {
                let has_room = answering.len() < UNPROVEN_MAX;
                tokio::select! {
                    Some(connected) = connecting.join_next() => {
                        let (rank, link) = connected.map_err(|error| Error::Unavailable(error.to_string()))??;
                        links.insert(rank, link);
                    }
                    Some(answered) = answering.join_next() => {
                        if let Ok(Some((rank, link))) = answered
                            && expected.contains(&rank)
                            && rank > this.rank
                        {
                            links.entry(rank).or_insert(link);
                        }
                    }
                    accepted = socket.accept(), if has_room => match accepted {
                        Ok((link, _)) => _ = answering.spawn(answer_remote(this.clone(), link)),
                        // A lack of descriptors may pass; `time` bounds the wait.
                        Err(_) => tokio::time::sleep(RETRY).await,
                    },
                    Some(accepted) = accept_local(local_socket.as_ref()), if has_room => match accepted {
                        Ok(link) => _ = answering.spawn(answer_local(this.clone(), link)),
                        Err(_) => tokio::time::sleep(RETRY).await,
                    },
                }
            }
            Ok(())
        };
        runtime.block_on(async { timeout(time, all).await }).unwrap_or(Ok(()))?;
        Ok(self.expected.iter().copied().filter(|rank| !self.links.contains_key(rank)).collect())
    }

    /// Takes the descriptors that peers on this machine offered. Complete when [`go_on`](Joining::go_on) returns no
    /// peer.
    pub fn take_offered(&mut self) -> BTreeMap<u32, OwnedFd> {
        let offered = |(&rank, link): (&u32, &mut Link)| match link {
            Link::Local(_, offered) => offered.take().map(|descriptor| (rank, descriptor)),
            Link::Remote(_) => None,
        };
        self.links.iter_mut().filter_map(offered).collect()
    }

    /// Returns the connections; every peer must have one. `deadline` bounds every round; no message may be longer than
    /// `message_bytes_max`.
    pub fn joined(self, deadline: Duration, message_bytes_max: u64) -> Peers {
        Peers { runtime: self.runtime, links: self.links, message_bytes_max, deadline }
    }
}

impl Peers {
    /// Sends each peer its message and receives one from each, all at once. Closes the connection with a peer that has
    /// no entry in `messages`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] naming the first peer that was lost or sent nothing within the deadline. The round was
    /// completed with all other peers.
    pub fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>, Error> {
        let mut links = std::mem::take(&mut self.links);
        let (deadline, bytes_max) = (self.deadline, self.message_bytes_max);
        let (mut received, mut failed) = (BTreeMap::new(), None);
        self.runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for (rank, message) in messages {
                match links.remove(&rank) {
                    Some(link) => _ = tasks.spawn(swap_one(rank, link, message, deadline, bytes_max)),
                    None => _ = failed.get_or_insert(failed_swap(rank, "its connection is closed")),
                }
            }
            while let Some(done) = tasks.join_next().await {
                match done {
                    Ok(Ok((rank, link, message))) => {
                        self.links.insert(rank, link);
                        received.insert(rank, message);
                    }
                    Ok(Err(error)) => _ = failed.get_or_insert(error),
                    Err(error) => _ = failed.get_or_insert(Error::Unavailable(format!("a message: {error}"))),
                }
            }
        });
        failed.map_or(Ok(received), Err)
    }
}

fn failed_swap(rank: u32, cause: impl std::fmt::Display) -> Error {
    Error::Unavailable(format!("the exchange of messages with rank {rank} failed: {cause}"))
}

async fn swap_one(
    rank: u32,
    mut link: Link,
    message: Message,
    deadline: Duration,
    bytes_max: u64,
) -> Result<(u32, Link, Vec<u8>), Error> {
    let swapped = async {
        match &mut link {
            Link::Remote(link) => {
                let (from, to) = link.split();
                exchange(rank, from, to, &message, bytes_max).await
            }
            Link::Local(link, _) => {
                let (from, to) = link.split();
                exchange(rank, from, to, &message, bytes_max).await
            }
        }
    };
    let message = timeout(deadline, swapped)
        .await
        .map_err(|_| failed_swap(rank, format!("no message within {deadline:?}")))??;
    Ok((rank, link, message))
}

async fn exchange(
    rank: u32,
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    message: &Message,
    bytes_max: u64,
) -> Result<Vec<u8>, Error> {
    let lost = |error: std::io::Error| failed_swap(rank, error);
    let send = async {
        let bytes: u64 = message.iter().map(|piece| piece.len() as u64).sum();
        to.write_all(&bytes.to_le_bytes()).await.map_err(lost)?;
        for piece in message {
            to.write_all(piece).await.map_err(lost)?;
        }
        Ok(())
    };
    let receive = async {
        let bytes = from.read_u64_le().await.map_err(lost)?;
        if bytes > bytes_max {
            return Err(failed_swap(rank, format!("expected a message of at most {bytes_max} bytes, found {bytes}")));
        }
        let mut message = Vec::new();
        let reserved = usize::try_from(bytes).is_ok_and(|bytes| message.try_reserve_exact(bytes).is_ok());
        if !reserved {
            return Err(failed_swap(rank, format!("no memory for {bytes} bytes")));
        }
        let read = (&mut from).take(bytes).read_to_end(&mut message).await.map_err(lost)?;
        if read as u64 != bytes {
            return Err(failed_swap(rank, format!("its message of {bytes} bytes ended after {read}")));
        }
        Ok(message)
    };
    let ((), message) = tokio::try_join!(send, receive)?;
    Ok(message)
}

async fn accept_local(socket: Option<&UnixListener>) -> Option<std::io::Result<UnixStream>> {
    Some(socket?.accept().await.map(|(link, _)| link))
}
