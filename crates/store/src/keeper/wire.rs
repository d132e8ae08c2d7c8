//! Carries requests to a keeper and its answers: a length, the message, and with some a descriptor of memory.
//!
//! A connection belongs to one thread at a time, which sends a request and waits for the answer. The keeper gives up
//! what a connection has begun to write, and not finished, when the connection ends: a writer that is killed leaves
//! nothing.
//!
//! Keepers of several machines send each other the same messages over TCP, once both ends have proven that they know
//! the key of the job. A process that opens an object of another machine gets such a connection in place of memory, and
//! reads ranges from the keeper there.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, SystemTime};

use rustix::fs::SealFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Entry, Kind};

/// Version of these messages: a process and a keeper with another one do not understand each other.
pub const VERSION: u32 = 4;

/// Longest message in bytes, without an object's own.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Longest object that is sent whole, in bytes.
pub const WHOLE_BYTES_MAX: u64 = 1 << 30;

/// Time within which a keeper answers; only one that is stopped, or a machine without memory, takes longer.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// Seals of a finished object: neither its length nor its bytes change.
pub const FINISHED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// Key of the keepers of a job, which proves that a connection is one of theirs.
pub type Key = [u8; 32];

/// Trailer of a copy on its way to another machine: CRC-64/NVME of its bytes.
pub const CRC_BYTES: usize = 8;

/// Stream that carries messages: a connection in this machine, or with another one.
pub trait Carrier: AsFd {
    /// Receives as many bytes as the buffer has.
    fn fill(&self, bytes: &mut [u8]) -> io::Result<()>;

    /// Sends all of these bytes.
    fn put(&self, bytes: &[u8]) -> io::Result<()>;
}

impl<T: AsFd> Carrier for T
where
    for<'a> &'a T: Read + Write,
{
    fn fill(&self, bytes: &mut [u8]) -> io::Result<()> {
        let mut link = self;
        link.read_exact(bytes)
    }

    fn put(&self, bytes: &[u8]) -> io::Result<()> {
        // Rust's own processes ignore SIGPIPE, and Python's do.
        let mut link = self;
        link.write_all(bytes)
    }
}

/// Role of an object for the machines of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// A file: the machine has it whose process has written it, and those with copies.
    File,
    /// A small object, which all machines have.
    Small,
    /// One that was stored under a free name: its directory is finished.
    Published,
}

/// Copies that other machines are to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// Number of other machines.
    pub count: u32,
    /// Bytes that a machine sends in a second at most; `None` for no bound.
    pub rate: Option<u64>,
}

/// A machine whose keeper has files of the same run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Host and port at which its keeper listens.
    pub address: String,
    /// Name of the rack or power domain that it fails with; its own name where none was given.
    pub domain: String,
}

/// Request to a keeper. Names are whole.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// First of a connection.
    Hello {
        /// Version of the messages that follow.
        version: u32,
    },
    /// Begins an object of this length; the answer brings its memory.
    Create {
        /// Name of the object, which must be free.
        name: String,
        /// Length of the object.
        bytes: u64,
    },
    /// Ends an object that this connection has begun.
    Finish {
        /// Name of the object.
        name: String,
    },
    /// Opens an object; the answer brings its memory.
    Open {
        /// Name of the object.
        name: String,
        /// How many of the machines that have it are passed over, this one first.
        past: u32,
    },
    /// Stores a small object, whose bytes follow.
    Store {
        /// Name of the object.
        name: String,
        /// Length of the object.
        bytes: u64,
        /// Role of the object.
        role: Role,
        /// Whether an object that has the name is replaced.
        replaces: bool,
    },
    /// Gives an object a second name.
    AlsoNamed {
        /// Name that it has.
        from: String,
        /// Name that it gets.
        name: String,
    },
    /// Lists a directory.
    List {
        /// Beginning of the names in it.
        below: String,
    },
    /// Removes these objects.
    Delete {
        /// Names of the objects.
        names: Vec<String>,
    },
    /// Removes a directory with all in it.
    DeleteTree {
        /// Beginning of the names in it.
        below: String,
    },
    /// Asks for the room that is left, on all machines of the job.
    Free,
    /// Has the keeper listen for the keepers of other machines; the answer brings its address. One that listens for
    /// another key, of an earlier job, forgets its neighbours.
    Meet {
        /// Host at which the other machines reach this one.
        host: String,
        /// First and last of the ports at which it may listen; two zeros: any.
        ports: (u16, u16),
        /// Key of the job.
        key: Key,
    },
    /// Tells the keeper the machines of the job: from now on their names are one directory.
    Neighbours {
        /// All machines, in an order that is the same on each.
        machines: Vec<Machine>,
        /// Number of the keeper's own machine.
        me: u32,
        /// Copies of each file of a finished directory on other machines.
        copies: Copies,
    },
    /// Has all keepers of the job leave.
    LeaveAll,
    /// Asks a neighbour for the length of an object.
    Locate {
        /// Name of the object.
        name: String,
    },
    /// Asks a neighbour for a range of an object, whose bytes follow the answer.
    Read {
        /// Name of the object.
        name: String,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Asks a neighbour which of these finished objects it lacks.
    Lacks {
        /// Names of the objects.
        names: Vec<String>,
    },
    /// Offers a neighbour a copy of an object. Its bytes and their CRC follow once that has agreed.
    Replica {
        /// Name of the object.
        name: String,
        /// Length of the object.
        bytes: u64,
    },
    /// Tells a neighbour that the keeper of this machine has begun, with nothing in it.
    Joined {
        /// Number of this machine.
        me: u32,
    },
    /// Asks for the number of files whose names begin with `below` that have fewer copies than asked, of all machines;
    /// of a neighbour, for those that it is to copy.
    Uncopied {
        /// Beginning of the names.
        below: String,
    },
    /// Has a keeper that is to leave, and cannot, stay.
    Stay,
    /// Tells a neighbour that the keeper of this machine ends: nothing is only there.
    Ends {
        /// Number of the machine.
        me: u32,
    },
    /// Asks what the keeper is and has.
    Status,
    /// Tells the keeper to send what only it has to the run's own place, and to end.
    Leave,
}

/// Answer of a keeper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The request was carried out.
    Done,
    /// Memory of an object comes with the answer.
    Memory {
        /// Length of the object.
        bytes: u64,
    },
    /// The object is on another machine; a connection with its keeper comes with the answer.
    Elsewhere {
        /// Length of the object.
        bytes: u64,
    },
    /// Bytes of an object follow.
    Bytes(u64),
    /// Host and port at which the keeper listens for others.
    Address(String),
    /// Names of objects.
    Names(Vec<String>),
    /// Entries of a directory.
    Entries(Vec<Listed>),
    /// Bytes for which there is room.
    Free(u64),
    /// Number of files with fewer copies than asked.
    Uncopied(u64),
    /// State of the keeper.
    Status(Status),
    /// The request was refused.
    Refused {
        /// Reaction of the caller.
        kind: Kind,
        /// Reason of the refusal.
        why: String,
    },
}

/// Entry of a directory.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listed {
    name: String,
    is_dir: bool,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl From<Entry> for Listed {
    fn from(entry: Entry) -> Listed {
        let Entry { name, is_dir, bytes, modified, .. } = entry;
        Listed { name, is_dir, bytes, modified }
    }
}

impl From<Listed> for Entry {
    fn from(listed: Listed) -> Entry {
        let Listed { name, is_dir, bytes, modified } = listed;
        Entry { name, is_dir, is_link: false, bytes, modified }
    }
}

/// State of a keeper.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Process of the keeper.
    pub process: u32,
    /// Run whose checkpoints it keeps.
    pub run: String,
    /// Bytes of the objects that it has.
    pub bytes: u64,
    /// Number of the objects that it has.
    pub objects: u64,
    /// Bytes for which there is room.
    pub free_bytes: u64,
    /// Processes that use it.
    pub users: u64,
    /// Whether a process has sent [`Request::Leave`]: the keeper ends once it has sent what only it has.
    pub leaves: bool,
    /// Seconds without users after which it ends.
    pub linger_s: u64,
    /// Reason why it could not send what it has to the run's own place, when it last tried.
    pub failure: Option<String>,
    /// Addresses of the keepers of the job's other machines.
    pub neighbours: Vec<String>,
    /// Copies that each file of a finished directory is to have on other machines.
    pub copies: u32,
    /// Files that have fewer; `None` while copies are made.
    pub uncopied: Option<u64>,
    /// Names of the small objects that were published under a free name.
    pub published: Vec<String>,
    /// Number of objects whose bytes were found changed in memory.
    pub changed: u64,
    /// Names of those that are still there, since no other machine has them.
    pub lone: Vec<String>,
}

/// Returns the address of the keeper of this user and name, which no file system shows.
pub fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("shardfast/keeper/{}/{name}", rustix::process::getuid().as_raw()))
}

/// Returns whether the process at the other end is this user's.
pub fn is_ours(link: &UnixStream) -> bool {
    rustix::net::sockopt::socket_peercred(link).is_ok_and(|peer| peer.uid == rustix::process::getuid())
}

/// Returns the process at the other end; 0 for one that this process cannot see.
pub fn process_of(link: &UnixStream) -> u32 {
    rustix::net::sockopt::socket_peercred(link).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs())
}

/// Sends a message, with a descriptor if there is one.
pub fn send(link: &impl Carrier, message: &impl Serialize, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let body = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    let sent = rustix::io::retry_on_intr(|| {
        let descriptors: Vec<BorrowedFd<'_>> = memory.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        sendmsg(link.as_fd(), &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    link.put(&bytes[sent..])
}

/// Receives a message, and the descriptor that comes with it; `None` at the end of the connection.
pub fn receive<T: DeserializeOwned>(link: &impl Carrier) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut length = [0; 4];
    let (found, memory) = rustix::io::retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(link.as_fd(), &mut [IoSliceMut::new(&mut length)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let memory = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        Ok((received.bytes, memory))
    })?;
    if found == 0 {
        return Ok(None);
    }
    link.fill(&mut length[found..])?;
    let bytes = u32::from_le_bytes(length) as usize;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!("a message of {bytes} bytes")));
    }
    let mut body = vec![0; bytes];
    link.fill(&mut body)?;
    Ok(Some((postcard::from_bytes(&body).map_err(io::Error::other)?, memory)))
}
