//! Implements the `keeper://name/path` backend: objects in memory of a process of this machine, which outlives others.
//!
//! The process is called a keeper, and made by the crate of that name. Each object is memory of its own without a name
//! in any file system (`memfd_create`), whose descriptor the keeper hands out:
//!
//! 1. *Write.* The keeper makes the memory in its declared length; the writer fills it with `pwrite`, one copy.
//! 2. *Finish.* The keeper seals it, so that its bytes and its length never change, and gives it its name.
//! 3. *Read.* A reader gets the sealed memory, and checks the seals before it maps or reads it.
//!
//! An object of another machine of the job is read from the keeper there.
//!
//! Only processes of the same user are served, and believed. "Durable" means here: as long as the keeper lives.

mod reader;
pub mod wire;

use std::any::Any;
use std::collections::HashMap;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use self::reader::Opened;
use self::wire::{Answer, Carrier, Copies, Key, Machine, Request, Role};
use crate::disk::Errno;
use crate::observe::{Action, Reports};
use crate::place::{Url, join};
use crate::write::{Writes, by_threads};
use crate::{
    Entry, Error, Kind, Needs, ObjectReader, ObjectWriter, Result, Service, Shared, Store, WRITE_THREADS, name,
};

/// Idle connections to a keeper that a process holds on to.
const IDLE_MAX: usize = 8;

/// Message for a machine without the keeper.
const NOT_THERE: &str = "no keeper of this name runs on this machine: `shardfast keeper start` starts one";

/// Connections of a process to keepers, by their names.
#[derive(Default)]
pub(crate) struct Keepers(Mutex<HashMap<String, Arc<Keeper>>>);

/// A keeper, as this process reaches it.
struct Keeper {
    name: String,
    /// Process that made the connections, and those without a request under way. A forked child has its own.
    idle: Mutex<(u32, Vec<UnixStream>)>,
}

/// Opens the URL `keeper://name/path`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let (name, prefix) = url.bucket_and_prefix()?;
    name::check("open", &url.shown(), &name)?;
    name::check_dir("open", &url.shown(), &prefix)?;
    let mut keepers = shared.keepers.0.lock().unwrap_or_else(PoisonError::into_inner);
    let keeper = keepers.entry(name.clone()).or_insert_with(|| Arc::new(Keeper { name, idle: Mutex::default() }));
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    Ok(Arc::new(KeeperStore { keeper: Arc::clone(keeper), url: url.usual(), prefix, reports: shared.reports.clone() }))
}

/// Returns what the keeper of this user and name is and has.
///
/// # Errors
/// [`Kind::NotFound`] if none runs; [`Kind::Unsupported`] for one of another version.
pub fn status(name: &str) -> Result<wire::Status> {
    match ask(name, &Request::Status)? {
        Answer::Status(status) => Ok(status),
        other => Err(unexpected(name, &other)),
    }
}

/// Tells the keeper of this user and name to send what only it has to the run's own place, and to end.
///
/// # Errors
/// As [`status`].
pub fn leave(name: &str) -> Result<()> {
    ask(name, &Request::Leave).map(drop)
}

/// Tells all keepers of the job to do so.
///
/// # Errors
/// As [`status`].
pub fn leave_all(name: &str) -> Result<()> {
    ask(name, &Request::LeaveAll).map(drop)
}

/// Has the keeper of this user and name stay that is to leave, since what only it has cannot be sent.
///
/// # Errors
/// As [`status`].
pub fn stay(name: &str) -> Result<()> {
    ask(name, &Request::Stay).map(drop)
}

/// Returns how many files whose names begin with `below` have fewer copies on other machines than asked.
///
/// # Errors
/// As [`status`]; [`Kind::Unavailable`] if a machine does not answer.
pub fn uncopied(name: &str, below: &str) -> Result<u64> {
    match ask(name, &Request::Uncopied { below: below.to_owned() })? {
        Answer::Uncopied(count) => Ok(count),
        other => Err(unexpected(name, &other)),
    }
}

/// Has the keeper of this user and name listen for those of other machines with that key, at a host of this machine
/// and one of these ports (two zeros: any); returns its address.
///
/// # Errors
/// As [`status`]; [`Kind::Unavailable`] if it cannot listen there.
pub fn meet(name: &str, host: &str, ports: (u16, u16), key: Key) -> Result<String> {
    match ask(name, &Request::Meet { host: host.to_owned(), ports, key })? {
        Answer::Address(address) => Ok(address),
        other => Err(unexpected(name, &other)),
    }
}

/// Makes the keeper of this user and name one of these machines', the one with the number `me`, with copies of its
/// files on others.
///
/// # Errors
/// As [`status`].
pub fn join_machines(name: &str, machines: &[Machine], me: u32, copies: Copies) -> Result<()> {
    ask(name, &Request::Neighbours { machines: machines.to_vec(), me, copies }).map(drop)
}

fn ask(name: &str, request: &Request) -> Result<Answer> {
    let keeper = Keeper { name: name.to_owned(), idle: Mutex::default() };
    let is_missing = |error: &Error| error.message == NOT_THERE;
    let not_found =
        |error: Error| Error { kind: if is_missing(&error) { Kind::NotFound } else { error.kind }, ..error };
    keeper.call("ask", "", request, &[]).map(|(answer, _, _)| answer).map_err(not_found)
}

fn unexpected(place: &str, answer: &Answer) -> Error {
    Error::new(Kind::Internal, "ask", place, format!("the keeper answered {answer:?}"))
}

impl Keeper {
    fn url(&self) -> String {
        format!("keeper://{}", self.name)
    }

    fn fail(&self, kind: Kind, op: &'static str, name: &str, why: impl ToString) -> Error {
        Error::new(kind, op, join(&self.url(), name), why.to_string())
    }

    /// Returns the error of a connection that has failed. A keeper that was silent for so long is not asked again: it
    /// is stopped, or its machine has no memory left.
    fn lost(&self, op: &'static str, name: &str, link: Option<&UnixStream>, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let process = link.map_or(0, wire::process_of);
                let why = format!(
                    "the keeper, process {process}, has not answered within {} s: it is stopped, or the machine is \
                     short of memory; `kill -9 {process}` ends it, with what only it has",
                    wire::ANSWERS_WITHIN.as_secs()
                );
                self.fail(Kind::Unavailable, op, name, why).finally()
            }
            _ => self.fail(Kind::Unavailable, op, name, format!("the keeper does not answer: {error}")),
        }
    }

    /// Opens a connection.
    fn connect(&self, op: &'static str, name: &str) -> Result<UnixStream> {
        let lost = |error: io::Error| match error.kind() {
            io::ErrorKind::ConnectionRefused => self.fail(Kind::Unavailable, op, name, NOT_THERE).finally(),
            _ => self.lost(op, name, None, &error),
        };
        let address = wire::address(&self.name).map_err(|error| self.fail(Kind::Invalid, op, name, error))?;
        let link = UnixStream::connect_addr(&address).map_err(lost)?;
        if !wire::is_ours(&link) {
            return Err(self.fail(Kind::Invalid, op, name, "another user's process has the keeper's name"));
        }
        let lost = |error: io::Error| self.lost(op, name, Some(&link), &error);
        link.set_read_timeout(Some(wire::ANSWERS_WITHIN)).map_err(lost)?;
        link.set_write_timeout(Some(wire::ANSWERS_WITHIN)).map_err(lost)?;
        wire::send(&link, &Request::Hello { version: wire::VERSION }, None).map_err(lost)?;
        let answer = wire::receive(&link).map_err(lost)?;
        match answer {
            Some((Answer::Done, _)) => Ok(link),
            Some((Answer::Refused { kind, why }, _)) => Err(self.fail(kind, op, name, why)),
            Some((other, _)) => Err(unexpected(&self.url(), &other)),
            None => Err(self.fail(Kind::Unavailable, op, name, "the keeper took no connection: it ends, or has many")),
        }
    }

    /// Makes one call, and returns the answer with the memory that came with it, and the connection.
    fn call(
        &self,
        op: &'static str,
        name: &str,
        request: &Request,
        bytes: &[u8],
    ) -> Result<(Answer, Option<OwnedFd>, UnixStream)> {
        let link = match self.taken() {
            Some(link) => link,
            None => self.connect(op, name)?,
        };
        self.call_on(link, op, name, request, bytes)
    }

    fn call_on(
        &self,
        link: UnixStream,
        op: &'static str,
        name: &str,
        request: &Request,
        bytes: &[u8],
    ) -> Result<(Answer, Option<OwnedFd>, UnixStream)> {
        let answered = wire::send(&link, request, None)
            .and_then(|()| link.put(bytes))
            .and_then(|()| wire::receive(&link)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()));
        match answered {
            Ok((Answer::Refused { kind, why }, _)) => {
                self.give_back(link);
                Err(self.fail(kind, op, name, why))
            }
            Ok((answer, memory)) => Ok((answer, memory, link)),
            Err(error) => {
                // The others are as old, and a keeper that is gone has ended all.
                self.idle.lock().unwrap_or_else(PoisonError::into_inner).1.clear();
                Err(self.lost(op, name, Some(&link), &error))
            }
        }
    }

    fn taken(&self) -> Option<UnixStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.0 != std::process::id() {
            // Those of the parent are its own; closing them here leaves its ends open.
            *idle = (std::process::id(), Vec::new());
        }
        idle.1.pop()
    }

    fn give_back(&self, link: UnixStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.0 == std::process::id() && idle.1.len() < IDLE_MAX {
            idle.1.push(link);
        }
    }
}

struct KeeperStore {
    keeper: Arc<Keeper>,
    url: String,
    /// Prefix of the URL's path: empty, or ending in `/`.
    prefix: String,
    reports: Reports,
}

impl KeeperStore {
    fn key(&self, op: &'static str, name: &str) -> Result<String> {
        name::check(op, &self.url, name)?;
        Ok(format!("{}{name}", self.prefix))
    }

    fn below(&self, op: &'static str, dir: &str) -> Result<String> {
        name::check_dir(op, &self.url, dir)?;
        Ok(if dir.is_empty() { self.prefix.clone() } else { format!("{}{dir}/", self.prefix) })
    }

    /// Makes a call about a name of this store.
    fn call(&self, op: &'static str, name: &str, request: &Request, bytes: &[u8]) -> Result<Answer> {
        let (answer, _, link) = self.keeper.call(op, name, request, bytes)?;
        self.keeper.give_back(link);
        Ok(answer)
    }

    fn done(&self, op: &'static str, name: &str, request: &Request, bytes: &[u8]) -> Result<()> {
        match self.call(op, name, request, bytes)? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&self.url, &other)),
        }
    }

    fn store(&self, op: &'static str, name: &str, bytes: &[u8], replaces: bool) -> Result<()> {
        let role = if replaces { Role::Small } else { Role::Published };
        let request = Request::Store { name: self.key(op, name)?, bytes: bytes.len() as u64, role, replaces };
        self.done(op, name, &request, bytes)
    }
}

impl Store for KeeperStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn needs(&self) -> Needs {
        Needs { lists_are_current: true, ..Needs::LOCAL }
    }

    fn can_publish(&self) -> Result<()> {
        Ok(())
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        self.reports.during(Action::Create, name, (0, 0), || {
            let key = self.key("create", name)?;
            let request = Request::Create { name: key.clone(), bytes };
            let (answer, memory, link) = self.keeper.call("create", name, &request, &[])?;
            let Some(memory) = memory else { return Err(unexpected(&self.url, &answer)) };
            let (keeper, url) = (Arc::clone(&self.keeper), join(&self.url, name));
            let (name, reports) = (name.to_owned(), self.reports.clone());
            let writer = KeeperWriter { keeper, link: Mutex::new(Some(link)), memory, key, url, bytes, name, reports };
            Ok(Box::new(writer) as Box<dyn ObjectWriter>)
        })
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let began = self.reports.begin();
        let opened = self.key("open", name).and_then(|key| {
            let object = Opened::open(&self.keeper, &(key, join(&self.url, name), name.to_owned()), 0)?;
            let mut head = vec![0; object.bytes().min(head_bytes) as usize];
            object.read_at(0, &mut head)?;
            Ok((object, head))
        });
        let bytes = opened.as_ref().map_or(0, |(_, head)| head.len() as u64);
        self.reports.end(began, Action::Open, name, 0..bytes, opened.as_ref().err());
        let (object, head) = opened?;
        Ok((Box::new(object.reporting(&self.reports)), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        Ok(self.open_head(name, 0)?.0.bytes())
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Put, name, (0, bytes.len()), || self.store("put", name, bytes, true))
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Publish, name, (0, bytes.len()), || self.store("publish", name, bytes, false))
    }

    fn also_named(&self, from: &str, name: &str, _: u64) -> Result<()> {
        self.reports.during(Action::Copy, name, (0, 0), || {
            let request = Request::AlsoNamed { from: self.key("link", from)?, name: self.key("link", name)? };
            self.done("link", from, &request, &[])
        })
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        by_threads(WRITE_THREADS, writes)
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        self.reports.during(Action::Sync, names.first().unwrap_or(&""), (0, 0), || {
            names.iter().try_for_each(|name| name::check("sync", &self.url, name))
        })
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.reports.during(Action::List, dir, (0, 0), || {
            let request = Request::List { below: self.below("list", dir)? };
            match self.call("list", dir, &request, &[])? {
                Answer::Entries(entries) => Ok(entries.into_iter().map(Entry::from).collect()),
                other => Err(unexpected(&self.url, &other)),
            }
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.delete_all(&[name], &[])
    }

    fn delete_all(&self, objects: &[&str], _: &[&str]) -> Result<()> {
        // Directories come and go with their objects.
        self.reports.during(Action::Delete, objects.first().unwrap_or(&""), (0, 0), || {
            let names = objects.iter().map(|name| self.key("delete", name)).collect::<Result<_>>()?;
            self.done("delete", objects.first().unwrap_or(&""), &Request::Delete { names }, &[])
        })
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.reports.during(Action::DeleteTree, dir, (0, 0), || {
            let below = format!("{}/", self.key("delete_tree", dir)?);
            self.done("delete_tree", dir, &Request::DeleteTree { below }, &[])
        })
    }

    fn free_bytes(&self) -> Option<u64> {
        match self.call("ask", "", &Request::Free, &[]) {
            Ok(Answer::Free(bytes)) => Some(bytes),
            _ => None,
        }
    }

    fn service(&self) -> Option<&dyn Service> {
        None
    }
}

struct KeeperWriter {
    keeper: Arc<Keeper>,
    /// Connection that has begun the object; the keeper drops the object with it.
    link: Mutex<Option<UnixStream>>,
    memory: OwnedFd,
    key: String,
    url: String,
    bytes: u64,
    name: String,
    reports: Reports,
}

impl KeeperWriter {
    fn fail(&self, kind: Kind, op: &'static str, why: impl ToString) -> Error {
        Error::new(kind, op, &self.url, why.to_string())
    }

    fn fill(&self, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.bytes) {
            let why = format!("{} bytes at {offset} reach beyond the {} bytes declared", bytes.len(), self.bytes);
            return Err(self.fail(Kind::Invalid, "write", why));
        }
        while !bytes.is_empty() {
            match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.memory, bytes, offset)) {
                Ok(0) => return Err(self.fail(Kind::Unavailable, "write", "no byte was taken")),
                Ok(written) => {
                    bytes = &bytes[written..];
                    offset += written as u64;
                }
                Err(Errno::NOMEM | Errno::NOSPC) => {
                    return Err(self.fail(Kind::Exhausted, "write", "the machine has no memory left for it"));
                }
                Err(errno) => return Err(self.fail(Kind::Unavailable, "write", errno)),
            }
        }
        Ok(())
    }
}

impl Drop for KeeperWriter {
    /// Gives up an object that was not finished: its name is free once the keeper has closed the connection, too.
    fn drop(&mut self) {
        let link = self.link.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = link.take() {
            // A keeper that does not answer has the name until it ends.
            let _ = link.shutdown(Shutdown::Write).and_then(|()| (&link).read(&mut [0]));
        }
    }
}

impl ObjectWriter for KeeperWriter {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.reports.during(Action::Write, &self.name, (offset, bytes.len()), || self.fill(offset, bytes))
    }

    fn finish(&mut self) -> Result<()> {
        self.reports.during(Action::Finish, &self.name, (0, 0), || {
            // Without its connection the object is gone: another one cannot finish it.
            let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).take();
            let link =
                link.ok_or_else(|| self.fail(Kind::Unavailable, "finish", "the keeper has lost it").finally())?;
            let request = Request::Finish { name: self.key.clone() };
            let (_, _, link) =
                self.keeper.call_on(link, "finish", &self.name, &request, &[]).map_err(Error::finally)?;
            self.keeper.give_back(link);
            Ok(())
        })
    }
}
