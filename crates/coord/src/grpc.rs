//! Ranks that are processes: rank 0 listens, every other rank has one connection to it.
//!
//! # Protocol
//!
//! 1. [`serve`] listens on a port that the system chooses; the job's rendezvous takes the address and the token to the
//!    other ranks.
//! 2. [`join`] connects and opens the one call of `proto/coord.proto`, which stays open for as long as the rank takes
//!    part. Its headers carry the token, the protocol's version, the rank and the world's size. Rank 0 compares all
//!    four before it reads anything else and refuses what differs, a rank that is taken, and one that was lost. Its
//!    answer's headers name the meeting.
//! 3. Contributions and answers travel on that call in any order, told apart by number. Rank 0 keeps the rounds and the
//!    time.
//! 4. Either end of a connection that breaks knows at once: a process that dies closes its sockets. Where nothing
//!    closes them (a cable, a power loss, a stopped process, a forked child that still holds them), pings every 10 s
//!    in both directions find out within 30 s. A connection is never made anew: what might have been said meanwhile
//!    is unknown, so the rank is lost.
//! 5. Whoever drops its coordinator says so, ends its half of the call and waits, not for long, until the other end has
//!    ended its own: by then everything that was said has been read. The end of a stream alone proves nothing, since
//!    HTTP/2 libraries show some broken connections as one.
//!
//! Each coordinator has two threads of its own from `serve` or `join` until it is dropped; there are none before. They
//! do not survive a `fork`: in the child `agree` is an [`Error::Invalid`], and dropping the coordinator does nothing.

mod member;
mod root;
mod wire;
mod workers;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tonic::Code;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use self::member::Member;
use self::root::Root;
use crate::{Coord, Error, PAYLOAD_BYTES_MAX};

/// Grows with every change of `coord.proto` or of its meaning.
const PROTOCOL: u32 = 1;

/// A payload of the largest size with all that travels around it.
const MESSAGE_BYTES_MAX: usize = PAYLOAD_BYTES_MAX + (1 << 20);

/// Bytes in flight before the receiver has to say that it goes on: a fast network's bandwidth times its delay.
const WINDOW_BYTES: u32 = 16 << 20;

/// How a rank went whose call ended without its saying so.
const BROKEN: &str = "its process ended or cannot be reached";

const TOKEN_HEADER: &str = "authorization";
const PROTOCOL_HEADER: &str = "shardfast-protocol";
const RANK_HEADER: &str = "shardfast-rank";
const WORLD_HEADER: &str = "shardfast-world";
const MEETING_HEADER: &str = "shardfast-meeting-bin";

/// When a silent peer counts as gone.
#[derive(Clone, Copy)]
struct KeepAlive {
    interval: Duration,
    timeout: Duration,
}

const KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_secs(10), timeout: Duration::from_secs(20) };

/// Opens the coordinator of rank 0, and gives the address, `host:port`, under which the other ranks [`join`].
///
/// `bind_host` is a name or an IP address of this machine; the address repeats it, so it must mean this machine to the
/// other ranks too (or the caller puts such a name in its place, as after `0.0.0.0`). `token` is a secret of this job,
/// visible ASCII, the same for all its ranks.
///
/// # Errors
///
/// [`Error::Invalid`] when `world` is zero or the token is empty or has other characters; [`Error::Unavailable`] when
/// the host cannot be listened on.
pub fn serve(bind_host: &str, world: u32, token: &str) -> Result<(Arc<dyn Coord>, String), Error> {
    if world == 0 {
        return Err(Error::Invalid("a world has at least 1 rank, found 0".to_owned()));
    }
    let (root, address) = Root::open(bind_host, Pass::new(0, world, token)?, KEEP_ALIVE)?;
    Ok((Arc::new(root), address))
}

/// Joins rank 0, which [`serve`]s under `address`, as `rank`. Tries for `timeout` to reach it. `host` is this process's
/// own name or IP address, as the other ranks know it.
///
/// # Errors
///
/// [`Error::Invalid`] when rank 0 refuses: another token, protocol or world, or a rank that is taken or was lost;
/// [`Error::Unavailable`] when it cannot be reached in time.
pub fn join(
    address: &str,
    host: &str,
    rank: u32,
    world: u32,
    token: &str,
    timeout: Duration,
) -> Result<Arc<dyn Coord>, Error> {
    let pass = Pass::new(rank, world, token)?;
    Ok(Arc::new(Member::join(address, host, &pass, timeout, KEEP_ALIVE)?))
}

/// An IPv6 address may come as it stands in a URL.
fn unbracketed(host: &str) -> String {
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}

/// What a rank shows to be let in, and what rank 0 compares it with.
struct Pass {
    protocol: u32,
    rank: u32,
    world: u32,
    bearer: AsciiMetadataValue,
}

impl Pass {
    fn new(rank: u32, world: u32, token: &str) -> Result<Pass, Error> {
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Invalid("a job's token must be visible ASCII characters, at least one".to_owned()));
        }
        let mut bearer: AsciiMetadataValue = format!("Bearer {token}")
            .parse()
            .map_err(|error| Error::Invalid(format!("a job's token must be a header's value: {error}")))?;
        bearer.set_sensitive(true);
        Ok(Pass { protocol: PROTOCOL, rank, world, bearer })
    }

    fn show(&self, headers: &mut MetadataMap) {
        headers.insert(TOKEN_HEADER, self.bearer.clone());
        headers.insert(PROTOCOL_HEADER, self.protocol.into());
        headers.insert(RANK_HEADER, self.rank.into());
        headers.insert(WORLD_HEADER, self.world.into());
    }

    /// The rank that asks to be let in, or why it is not. The token comes first: strangers learn nothing else.
    fn check(&self, headers: &MetadataMap) -> Result<u32, (Code, String)> {
        let number = |name: &str| {
            let text = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("none");
            text.parse::<u32>().map_err(|_| text.to_owned())
        };
        let named = |name: &str| number(name).map_or_else(|text| text, |number| number.to_string());
        let shown = headers.get(TOKEN_HEADER).map_or(&b""[..], |value| value.as_encoded_bytes());
        if !same_secret(shown, self.bearer.as_encoded_bytes()) {
            return Err((Code::Unauthenticated, "the token is not this job's".to_owned()));
        }
        if number(PROTOCOL_HEADER) != Ok(self.protocol) {
            let (theirs, ours) = (named(PROTOCOL_HEADER), self.protocol);
            return Err((
                Code::FailedPrecondition,
                format!("it speaks protocol {theirs}, rank 0 speaks {ours}: all ranks must run the same version"),
            ));
        }
        if number(WORLD_HEADER) != Ok(self.world) {
            let (theirs, ours) = (named(WORLD_HEADER), self.world);
            return Err((
                Code::FailedPrecondition,
                format!("it belongs to a world of {theirs} ranks, rank 0 to one of {ours}"),
            ));
        }
        match number(RANK_HEADER) {
            Ok(rank) if 0 < rank && rank < self.world => Ok(rank),
            _ => Err((
                Code::InvalidArgument,
                format!("its rank is {}, expected one from 1 below {}", named(RANK_HEADER), self.world),
            )),
        }
    }
}

/// Takes a time that says nothing about where the two differ.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
