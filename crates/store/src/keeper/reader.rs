//! Reads objects of keepers: in this machine's memory, or in another one's, range by range, from the keeper there.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::Keeper;
use super::wire::{self, Answer, Carrier, Request};
use crate::disk::RealDisk;
use crate::local::LocalReader;
use crate::observe::{Action, Reports};
use crate::{Error, Kind, ObjectReader, PageCache, Result, one_by_one};

/// Names of an object: the whole one, its URL, and that in its store.
type Names = (String, String, String);

/// An object that was opened.
pub(super) enum Opened {
    /// Object in this machine's memory.
    Here(LocalReader<RealDisk>, Arc<Keeper>, Names),
    /// Object in another one's.
    Elsewhere(Elsewhere),
}

impl Opened {
    /// Opens an object on the first machine that has it but for so many; reads report nothing yet.
    pub(super) fn open(keeper: &Arc<Keeper>, names: &Names, past: u32) -> Result<Opened> {
        let (key, url, name) = names;
        let (answer, memory, link) = keeper.call("open", name, &Request::Open { name: key.clone(), past }, &[])?;
        keeper.give_back(link);
        let fail = |why: &str| Err(Error::new(Kind::Corrupt, "open", url, why));
        let (bytes, memory) = match (answer, memory) {
            (Answer::Memory { bytes }, Some(memory)) => (bytes, memory),
            (Answer::Elsewhere { bytes }, Some(link)) => {
                return Ok(Opened::Elsewhere(Elsewhere::new(Arc::clone(keeper), link, names.clone(), bytes)));
            }
            _ => return fail("expected memory of an object, and the keeper sent none"),
        };
        let seals = rustix::fs::fcntl_get_seals(&memory).unwrap_or(rustix::fs::SealFlags::empty());
        let found = rustix::fs::fstat(&memory).map_or(0, |stat| stat.st_size);
        if !seals.contains(wire::FINISHED) || u64::try_from(found) != Ok(bytes) {
            return fail("expected sealed memory of the object's length, and the keeper sent other memory");
        }
        let reader = LocalReader::new(Arc::new(RealDisk), memory, None, (PathBuf::from(url), name), bytes);
        Ok(Opened::Here(reader, Arc::clone(keeper), names.clone()))
    }

    /// Returns the object, whose reads are reported from now on.
    pub(super) fn reporting(mut self, to: &Reports) -> Opened {
        match &mut self {
            Opened::Here(reader, ..) => reader.reports = to.clone(),
            Opened::Elsewhere(reader) => reader.reports = to.clone(),
        }
        self
    }
}

impl ObjectReader for Opened {
    fn bytes(&self) -> u64 {
        match self {
            Opened::Here(reader, ..) => reader.bytes(),
            Opened::Elsewhere(reader) => reader.bytes,
        }
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        match self {
            Opened::Here(reader, ..) => reader.page_cache(),
            Opened::Elsewhere(_) => None,
        }
    }

    fn host(&self) -> Option<&str> {
        match self {
            Opened::Elsewhere(reader) if reader.here.get().is_none() => Some(&reader.host),
            _ => None,
        }
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match self {
            Opened::Here(reader, ..) => reader.read_at(offset, buf),
            Opened::Elsewhere(reader) => reader.read(offset, buf),
        }
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        one_by_one(self, ranges)
    }

    /// Reads it where another machine has it, if one has.
    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (keeper, names, reports) = match self {
            Opened::Here(reader, keeper, names) => (keeper, names, &reader.reports),
            Opened::Elsewhere(reader) => (&reader.keeper, &reader.names, &reader.reports),
        };
        match Opened::open(keeper, names, 1) {
            Ok(other) if other.bytes() == self.bytes() => other.reporting(reports).read_at(offset, buf),
            _ => self.read_at(offset, buf),
        }
    }
}

/// An object of another machine's keeper.
pub(super) struct Elsewhere {
    keeper: Arc<Keeper>,
    /// Connections with the keeper that has it, without a request under way: one for each thread that reads.
    idle: Mutex<Vec<TcpStream>>,
    /// The object in this machine's memory, once a copy of it has come here.
    here: OnceLock<LocalReader<RealDisk>>,
    names: Names,
    bytes: u64,
    /// Machine that has it.
    host: String,
    reports: Reports,
}

impl Elsewhere {
    /// Makes the reader of an object of that length, with a proven connection that this machine's keeper has made.
    fn new(keeper: Arc<Keeper>, link: OwnedFd, names: Names, bytes: u64) -> Elsewhere {
        let link = TcpStream::from(link);
        let host = link.peer_addr().map_or_else(|_| "?".to_owned(), |address| address.ip().to_string());
        let (idle, reports) = (Mutex::new(vec![link]), Reports::default());
        Elsewhere { keeper, idle, here: OnceLock::new(), names, bytes, host, reports }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, kind: Kind, why: impl ToString) -> Error {
        Error::new(kind, "read", &self.names.1, why.to_string())
    }

    /// Returns a connection: an idle one, or one more. `None` if the object is here.
    fn link(&self) -> Result<Option<TcpStream>> {
        if let Some(link) = self.idle().pop() {
            return Ok(Some(link));
        }
        match Opened::open(&self.keeper, &self.names, 0)? {
            Opened::Here(reader, ..) if reader.bytes() == self.bytes => {
                let _ = self.here.set(reader);
                Ok(None)
            }
            Opened::Elsewhere(other) if other.bytes == self.bytes => Ok(other.idle().pop()),
            _ => Err(self.fail(Kind::Corrupt, "another object has its name").finally()),
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reports.during(Action::Read, &self.names.2, (offset, buf.len()), || self.fill(offset, buf))
    }

    fn fill(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = buf.len() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let why = format!("expected {bytes} bytes at {offset}, found an object of {}", self.bytes);
            return Err(self.fail(Kind::Corrupt, why));
        }
        let link = if self.here.get().is_some() { None } else { self.link()? };
        let Some(link) = link else {
            let here = self.here.get().ok_or_else(|| self.fail(Kind::Internal, "no connection came with it"))?;
            return here.read_at(offset, buf);
        };
        match self.ask(&link, offset, buf) {
            Ok(Ok(())) => {
                self.idle().push(link);
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(error) => {
                // The others are as old.
                self.idle().clear();
                let from = link.peer_addr().map_or_else(|_| "?".to_owned(), |address| address.to_string());
                let why = format!("the keeper at {from} does not answer: {error}");
                Err(self.fail(Kind::Unavailable, why))
            }
        }
    }

    /// Reads a range; the outer error is the connection's.
    fn ask(&self, link: &TcpStream, offset: u64, buf: &mut [u8]) -> io::Result<Result<()>> {
        let request = Request::Read { name: self.names.0.clone(), offset, bytes: buf.len() as u64 };
        wire::send(link, &request, None)?;
        match wire::receive(link)?.map(|(answer, _)| answer) {
            Some(Answer::Bytes(bytes)) if bytes == buf.len() as u64 => link.fill(buf).map(Ok),
            Some(Answer::Refused { kind, why }) => Ok(Err(self.fail(kind, why))),
            other => Err(io::Error::other(format!("it answered {other:?}"))),
        }
    }
}
