//! Authenticates two ranks to each other on a new connection: steps 2 and 3 of the protocol.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use crate::{Error, Meeting};

/// First bytes of the connecting side; the last digit grows with every change of the protocol.
const MAGIC: [u8; 8] = *b"sfpeers2";

const NONCE_BYTES: usize = 16;
const PROOF_BYTES: usize = 32;

/// Time that a connection may take to prove that it is a peer's.
const PROVE_WITHIN: Duration = Duration::from_secs(10);

/// A connection with one peer.
pub(super) enum Link {
    Remote(TcpStream),
    /// Connection within the machine, with the descriptor that the peer offered.
    Local(UnixStream, Option<OwnedFd>),
}

/// Identity of this rank, and the purpose of its connections.
#[derive(Clone)]
pub(super) struct This {
    pub(super) rank: u32,
    pub(super) meeting: Meeting,
    pub(super) purpose: String,
    pub(super) offered: Option<Arc<OwnedFd>>,
}

/// Returns an address in the abstract namespace, where sockets have names and no files.
pub(super) fn abstract_path(name: &str) -> String {
    format!("\0shardfast-{name}")
}

/// Connects to a rank and authenticates this one.
pub(super) async fn connect(this: This, rank: u32, address: String) -> Result<(u32, Link), Error> {
    let unreachable = |cause: &dyn std::fmt::Display| {
        Error::Unavailable(format!("rank {} cannot connect to rank {rank} at {address}: {cause}", this.rank))
    };
    let (remote, local) = address.split_once(' ').map_or((&*address, None), |(remote, local)| (remote, Some(local)));
    if let Some(name) = local
        && let Ok(mut link) = UnixStream::connect(abstract_path(name)).await
        && let Ok(true) = introduce(&this, rank, &mut link).await
    {
        let offered = async {
            send_offered(&link, this.offered.as_deref()).await?;
            receive_offered(&link).await
        };
        let offered = offered.await.map_err(|error| unreachable(&error))?;
        return Ok((rank, Link::Local(link, offered)));
    }
    let introduced = async {
        let mut link = TcpStream::connect(remote).await?;
        link.set_nodelay(true)?;
        Ok::<_, std::io::Error>((introduce(&this, rank, &mut link).await?, link))
    };
    match introduced.await {
        Ok((true, link)) => Ok((rank, Link::Remote(link))),
        Ok((false, _)) => Err(unreachable(&"it does not belong to this job")),
        Err(error) => Err(unreachable(&error)),
    }
}

/// Authenticates this rank to the other side; returns whether that is `rank` of this meeting.
async fn introduce(this: &This, rank: u32, link: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> std::io::Result<bool> {
    let (mut theirs, mut proof) = ([0; NONCE_BYTES], [0; PROOF_BYTES]);
    link.read_exact(&mut theirs).await?;
    let ours = nonce()?;
    let mut hello = Vec::from(MAGIC);
    hello.extend(this.rank.to_le_bytes());
    hello.extend(ours);
    hello.extend(this.proof(b"connect", (this.rank, rank), (&theirs, &ours)));
    link.write_all(&hello).await?;
    link.read_exact(&mut proof).await?;
    Ok(proof == this.proof(b"accept", (this.rank, rank), (&theirs, &ours)))
}

pub(super) async fn answer_remote(this: This, mut link: TcpStream) -> Option<(u32, Link)> {
    link.set_nodelay(true).ok()?;
    let rank = timeout(PROVE_WITHIN, answer(&this, &mut link)).await.ok()??;
    Some((rank, Link::Remote(link)))
}

pub(super) async fn answer_local(this: This, mut link: UnixStream) -> Option<(u32, Link)> {
    let rank = timeout(PROVE_WITHIN, answer(&this, &mut link)).await.ok()??;
    let offered = receive_offered(&link).await.ok()?;
    send_offered(&link, this.offered.as_deref()).await.ok()?;
    Some((rank, Link::Local(link, offered)))
}

/// Answers the connecting side; returns its rank, or `None` without a valid proof.
async fn answer(this: &This, link: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Option<u32> {
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
    Some(rank)
}

/// Sends one byte, with the descriptor if the system passes it.
async fn send_offered(link: &UnixStream, offered: Option<&OwnedFd>) -> std::io::Result<()> {
    let send = |offered: Option<&OwnedFd>| {
        let descriptors: Vec<_> = offered.into_iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        Ok(sendmsg(link, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).map(|_| ())?)
    };
    match link.async_io(Interest::WRITABLE, || send(offered)).await {
        Err(_) if offered.is_some() => link.async_io(Interest::WRITABLE, || send(None)).await,
        sent => sent,
    }
}

/// Receives that byte; returns the descriptor that came with it, if any.
async fn receive_offered(link: &UnixStream) -> std::io::Result<Option<OwnedFd>> {
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = recvmsg(link, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let rights = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        Ok(rights)
    };
    link.async_io(Interest::READABLE, receive).await
}

pub(super) fn nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

impl This {
    /// Returns a keyed hash that only a rank of this meeting can compute. Hashed twice, so that nothing can be
    /// appended.
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
