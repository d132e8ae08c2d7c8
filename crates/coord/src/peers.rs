//! Connections between pairs of ranks, over which they swap messages in rounds.
//!
//! # Protocol
//!
//! 1. Every rank [`listen`](Joining::listen)s on a free port at [`Coord::host`], and the ranks tell each other where,
//!    by agreeing. Of two ranks the higher one connects.
//! 2. Who was connected to sends 16 random bytes. The other side answers with `MAGIC`, its rank, 16 random bytes of
//!    its own and a proof: a keyed SHA-256 of all that was said, of both ranks and of what the connection is for. The
//!    first side answers with a proof of its own. The key is the name of the meeting, which only ranks that the
//!    coordinator let in have ever heard; it does not travel. Whoever cannot prove it is dropped and learns nothing.
//! 3. Then messages travel in both directions: their length in 8 bytes, least significant first, and that many bytes.
//!
//! There is one round at a time, in which one message goes to each peer and one comes from each. All of it happens on
//! the calling thread: nothing is left to a `fork`. What is said is not encrypted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::{Coord, Error, Meeting};

/// Begins what the connecting side says; the last digit grows with every change of the protocol.
const MAGIC: [u8; 8] = *b"sfpeers1";

const NONCE_BYTES: usize = 16;
const PROOF_BYTES: usize = 32;

/// How long to wait after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// A message, in pieces that follow each other: several peers may be sent the same ones.
pub type Message = Vec<Arc<Vec<u8>>>;

/// This rank, connecting with its peers.
pub struct Joining {
    runtime: Runtime,
    socket: TcpListener,
    address: String,
    this: This,
    expected: BTreeSet<u32>,
    links: BTreeMap<u32, TcpStream>,
    connecting: JoinSet<Result<(u32, TcpStream), Error>>,
    answering: JoinSet<Option<(u32, TcpStream)>>,
}

/// Who this is, and what connections are for.
#[derive(Clone)]
struct This {
    rank: u32,
    meeting: Meeting,
    purpose: String,
}

/// A connection with each peer.
pub struct Peers {
    runtime: Runtime,
    links: BTreeMap<u32, TcpStream>,
    message_bytes_max: u64,
    deadline: Duration,
}

impl Joining {
    /// Listens on a free port at the coordinator's host. `purpose` is the same on all ranks that are to be connected,
    /// and another one each time.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the host cannot be listened on.
    pub fn listen(coord: &dyn Coord, purpose: &str) -> Result<Joining, Error> {
        let (rank, host) = (coord.rank(), coord.host());
        let fail = |error: std::io::Error| {
            Error::Unavailable(format!("rank {rank} cannot listen for its peers at {host}: {error}"))
        };
        let runtime = Builder::new_current_thread().enable_io().enable_time().build().map_err(fail)?;
        let socket = runtime.block_on(TcpListener::bind((host, 0))).map_err(fail)?;
        let port = socket.local_addr().map_err(fail)?.port();
        Ok(Joining {
            runtime,
            socket,
            address: if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") },
            this: This { rank, meeting: coord.meeting(), purpose: purpose.to_owned() },
            expected: BTreeSet::new(),
            links: BTreeMap::new(),
            connecting: JoinSet::new(),
            answering: JoinSet::new(),
        })
    }

    /// Where peers connect: `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Begins to connect with these peers, given with their addresses; each of them must give this rank, too.
    pub fn begin(&mut self, peers: &[(u32, String)]) {
        let _runtime = self.runtime.enter();
        for (rank, address) in peers {
            self.expected.insert(*rank);
            if *rank < self.this.rank {
                self.connecting.spawn(connect(self.this.clone(), *rank, address.clone()));
            }
        }
    }

    /// Goes on until there is a connection with every peer, or for that time. Returns the peers that are missing.
    ///
    /// # Errors
    /// [`Error::Unavailable`] naming a peer that cannot be connected with.
    pub fn go_on(&mut self, time: Duration) -> Result<Vec<u32>, Error> {
        let Joining { runtime, socket, this, expected, links, connecting, answering, .. } = self;
        let all = async {
            while links.len() < expected.len() {
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
                    accepted = socket.accept() => match accepted {
                        Ok((link, _)) => _ = answering.spawn(answer(this.clone(), link)),
                        // A lack of descriptors may pass; the time does in any case.
                        Err(_) => tokio::time::sleep(RETRY).await,
                    }
                }
            }
            Ok(())
        };
        runtime.block_on(async { timeout(time, all).await }).unwrap_or(Ok(()))?;
        Ok(self.expected.iter().copied().filter(|rank| !self.links.contains_key(rank)).collect())
    }

    /// The connections, when every peer has one. `deadline` bounds every round; no message is longer than
    /// `message_bytes_max`.
    pub fn joined(self, deadline: Duration, message_bytes_max: u64) -> Peers {
        Peers { runtime: self.runtime, links: self.links, message_bytes_max, deadline }
    }
}

impl Peers {
    /// Sends each peer its message and receives one of each; all at once. Who has no entry in `messages` is not spoken
    /// with any more: its connection is closed.
    ///
    /// # Errors
    /// [`Error::Unavailable`] naming the first peer that went, or said nothing for as long as the deadline. With all
    /// others the round was completed.
    pub fn swap(&mut self, messages: BTreeMap<u32, Message>) -> Result<BTreeMap<u32, Vec<u8>>, Error> {
        let mut links = std::mem::take(&mut self.links);
        let (deadline, bytes_max) = (self.deadline, self.message_bytes_max);
        let (mut received, mut failed) = (BTreeMap::new(), None);
        self.runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for (rank, message) in messages {
                match links.remove(&rank) {
                    Some(link) => _ = tasks.spawn(swap_one(rank, link, message, deadline, bytes_max)),
                    None => _ = failed.get_or_insert(gone(rank, "its connection ended before")),
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

fn gone(rank: u32, cause: impl std::fmt::Display) -> Error {
    Error::Unavailable(format!("rank {rank}, with which bytes are shared, is gone: {cause}"))
}

async fn swap_one(
    rank: u32,
    link: TcpStream,
    message: Message,
    deadline: Duration,
    bytes_max: u64,
) -> Result<(u32, TcpStream, Vec<u8>), Error> {
    let lost = |error: std::io::Error| gone(rank, error);
    let (mut from, mut to) = link.into_split();
    let send = async {
        let bytes: u64 = message.iter().map(|piece| piece.len() as u64).sum();
        to.write_all(&bytes.to_le_bytes()).await.map_err(lost)?;
        for piece in &message {
            to.write_all(piece).await.map_err(lost)?;
        }
        Ok(())
    };
    let receive = async {
        let bytes = from.read_u64_le().await.map_err(lost)?;
        if bytes > bytes_max {
            return Err(gone(rank, format!("expected a message of at most {bytes_max} bytes, found {bytes}")));
        }
        let mut message = Vec::new();
        let reserved = usize::try_from(bytes).is_ok_and(|bytes| message.try_reserve_exact(bytes).is_ok());
        if !reserved {
            return Err(gone(rank, format!("no memory for {bytes} bytes")));
        }
        let read = (&mut from).take(bytes).read_to_end(&mut message).await.map_err(lost)?;
        if read as u64 != bytes {
            return Err(gone(rank, format!("its message of {bytes} bytes ended after {read}")));
        }
        Ok(message)
    };
    let swapped = timeout(deadline, async { tokio::try_join!(send, receive) }).await;
    let ((), message) = swapped.map_err(|_| gone(rank, format!("no message within {deadline:?}")))??;
    let link = from.reunite(to).map_err(|error| gone(rank, error))?;
    Ok((rank, link, message))
}

/// The side that connects.
async fn connect(this: This, rank: u32, address: String) -> Result<(u32, TcpStream), Error> {
    let unreachable = |cause: &dyn std::fmt::Display| {
        Error::Unavailable(format!("rank {} cannot connect with rank {rank} at {address}: {cause}", this.rank))
    };
    let said: std::io::Result<_> = async {
        let mut link = TcpStream::connect(&address).await?;
        link.set_nodelay(true)?;
        let (mut theirs, mut proof) = ([0; NONCE_BYTES], [0; PROOF_BYTES]);
        link.read_exact(&mut theirs).await?;
        let ours = nonce()?;
        let mut hello = Vec::from(MAGIC);
        hello.extend(this.rank.to_le_bytes());
        hello.extend(ours);
        hello.extend(this.proof(b"connect", (this.rank, rank), (&theirs, &ours)));
        link.write_all(&hello).await?;
        link.read_exact(&mut proof).await?;
        Ok((link, proof == this.proof(b"accept", (this.rank, rank), (&theirs, &ours))))
    }
    .await;
    match said {
        Ok((link, true)) => Ok((rank, link)),
        Ok((_, false)) => Err(unreachable(&"it is not of this job")),
        Err(error) => Err(unreachable(&error)),
    }
}

/// The side that was connected to; `None` for strangers.
async fn answer(this: This, mut link: TcpStream) -> Option<(u32, TcpStream)> {
    link.set_nodelay(true).ok()?;
    let ours = nonce().ok()?;
    link.write_all(&ours).await.ok()?;
    let (mut magic, mut theirs, mut proof) = ([0; 8], [0; NONCE_BYTES], [0; PROOF_BYTES]);
    link.read_exact(&mut magic).await.ok()?;
    let rank = link.read_u32_le().await.ok()?;
    link.read_exact(&mut theirs).await.ok()?;
    link.read_exact(&mut proof).await.ok()?;
    let ranks = (rank, this.rank);
    if magic != MAGIC || !crate::grpc::same_secret(&proof, &this.proof(b"connect", ranks, (&ours, &theirs))) {
        return None;
    }
    link.write_all(&this.proof(b"accept", ranks, (&ours, &theirs))).await.ok()?;
    Some((rank, link))
}

fn nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

impl This {
    /// What only a rank of this meeting can say about a connection. Hashed twice, so that nothing can be appended.
    fn proof(
        &self,
        role: &[u8],
        (from, to): (u32, u32),
        (accepting, connecting): (&[u8; NONCE_BYTES], &[u8; NONCE_BYTES]),
    ) -> [u8; PROOF_BYTES] {
        let inner = Sha256::new()
            .chain_update(self.meeting.0)
            .chain_update(MAGIC)
            .chain_update(from.to_le_bytes())
            .chain_update(to.to_le_bytes())
            .chain_update(accepting)
            .chain_update(connecting)
            .chain_update(role)
            .chain_update(b":")
            .chain_update(self.purpose.as_bytes())
            .finalize();
        Sha256::new().chain_update(self.meeting.0).chain_update(inner).finalize().into()
    }
}
