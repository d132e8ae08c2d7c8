//! Carries out the requests of connections.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use shardfast_store::keeper::wire::{self, Answer, Carrier, Key, Request, Role, Status};
use shardfast_store::objects::{Objects, Refused};
use shardfast_store::{Entry, Kind};

use crate::copies::{self, Copies};
use crate::idle::Changed;
use crate::listening::{Listening, Serves};
use crate::memory::Memory;
use crate::neighbours::{Failure, Neighbours, Table};
use crate::room::Room;
use crate::users::Users;

/// Time within which a connection says what it is.
const GREETS_WITHIN: Duration = Duration::from_secs(10);

/// Pause between two looks at the keepers of other machines, before this one ends.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// Objects of a keeper, who uses them, and the machines that have the others of the run.
pub(crate) struct Served {
    pub(crate) objects: Objects<Memory>,
    /// Copies that neighbours send, by their names.
    incoming: Mutex<BTreeMap<String, Memory>>,
    pub(crate) users: Users,
    pub(crate) neighbours: Neighbours,
    pub(crate) copies: Copies,
    pub(crate) changed: Changed,
    pub(crate) listening: Listening,
    run: String,
    pub(crate) linger: Duration,
    failure: Mutex<Option<String>>,
}

/// Objects that a connection has begun and not finished.
type Begun = Vec<(String, Memory)>;

/// Descriptor that goes with an answer.
enum With {
    Nothing,
    Memory(Memory),
    Link(TcpStream),
}

/// Answer, with what goes with it; or why there is none.
type Carried = Result<(Answer, With), Failure>;

fn refused((kind, why): Refused) -> Failure {
    (kind, why.to_owned())
}

fn of_errno(errno: Errno) -> Failure {
    let kind = match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => Kind::Exhausted,
        _ => Kind::Unavailable,
    };
    (kind, format!("the keeper has no memory for it: {errno}"))
}

fn done() -> Carried {
    answered(Answer::Done)
}

fn answered(answer: Answer) -> Carried {
    Ok((answer, With::Nothing))
}

/// Receives the bytes of a small object.
fn sent(link: &impl Carrier, bytes: u64) -> io::Result<Vec<u8>> {
    if bytes > wire::WHOLE_BYTES_MAX {
        return Err(io::Error::other("an object that is too long to be sent whole"));
    }
    let mut sent = vec![0; bytes as usize];
    link.fill(&mut sent)?;
    Ok(sent)
}

fn reply(link: &impl Carrier, carried: Carried) -> io::Result<()> {
    match carried {
        Ok((answer, with)) => wire::send(link, &answer, with.descriptor()),
        Err((kind, why)) => wire::send(link, &Answer::Refused { kind, why }, None),
    }
}

impl With {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            With::Nothing => None,
            With::Memory(memory) => memory.descriptor(),
            With::Link(link) => Some(link.as_fd()),
        }
    }
}

impl Served {
    pub(crate) fn new(run: &str, linger: Duration) -> Served {
        Served {
            objects: Objects::default(),
            incoming: Mutex::default(),
            users: Users::default(),
            neighbours: Neighbours::default(),
            copies: Copies::default(),
            changed: Changed::default(),
            listening: Listening::default(),
            run: run.to_owned(),
            linger,
            failure: Mutex::default(),
        }
    }

    /// Notes why what only the keeper has was not sent.
    pub(crate) fn note(&self, failure: Option<&String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure.cloned();
    }

    /// Serves a connection of this machine until it ends.
    pub(crate) fn connection(&self, link: &UnixStream) {
        let mut begun = Begun::new();
        // A connection that fails has ended.
        let _ = self.serve_user(link, &mut begun);
        for (name, memory) in begun {
            self.objects.give_up(&name, |taken| taken.is(&memory));
        }
    }

    fn serve_user(&self, link: &UnixStream, begun: &mut Begun) -> io::Result<()> {
        link.set_read_timeout(Some(GREETS_WITHIN))?;
        link.set_write_timeout(Some(wire::ANSWERS_WITHIN))?;
        let Some((Request::Hello { version }, _)) = wire::receive(link)? else { return Ok(()) };
        if version != wire::VERSION {
            let why = format!(
                "expected a process of the keeper's version {}, found {version}: `kill {}` has the keeper send what \
                 only it has to the run's own place, and end; then another one is started",
                wire::VERSION,
                std::process::id()
            );
            return wire::send(link, &Answer::Refused { kind: Kind::Unsupported, why }, None);
        }
        wire::send(link, &Answer::Done, None)?;
        link.set_read_timeout(None)?;
        let mut used = None;
        while let Some((request, _)) = wire::receive::<Request>(link)? {
            let asks = matches!(
                request,
                Request::Status
                    | Request::Stay
                    | Request::Uncopied { .. }
                    | Request::Leave
                    | Request::LeaveAll
                    | Request::Meet { .. }
                    | Request::Neighbours { .. }
            );
            if !asks && used.is_none() {
                used = Some(self.users.begin(wire::process_of(link)));
                if used.as_ref().is_some_and(Option::is_none) {
                    return Ok(());
                }
            }
            let carried = match request {
                Request::Store { name, bytes, role, replaces } => {
                    self.store_everywhere(&name, &sent(link, bytes)?, role, replaces)
                }
                request => self.carry_out(request, begun),
            };
            reply(link, carried)?;
        }
        Ok(())
    }

    /// Carries out a request of this machine, where all of its job are asked.
    fn carry_out(&self, request: Request, begun: &mut Begun) -> Carried {
        match request {
            Request::Hello { .. } => Err((Kind::Internal, "it has said hello before".to_owned())),
            Request::Create { name, bytes } => self.create(name, bytes, begun),
            Request::Finish { name } => self.finish(&name, begun),
            Request::Open { name, past } => self.open(name, past),
            Request::Meet { host, ports, key } => self.meet(&host, ports, key),
            Request::Neighbours { machines, me, copies } => {
                if self.neighbours.set(machines, me as usize, copies) {
                    let table = self.neighbours.table();
                    table.ask_all(&Request::Joined { me }, &[]);
                    self.copies.wake();
                }
                done()
            }
            Request::Uncopied { below } => {
                let table = self.neighbours.table();
                let mut missing = copies::uncopied(&self.objects, &table, &below)?;
                for answer in table.expect_all(&Request::Uncopied { below }, &[])? {
                    missing += if let Answer::Uncopied(count) = answer { count } else { 0 };
                }
                answered(Answer::Uncopied(missing))
            }
            Request::LeaveAll => {
                // One that does not answer ends by itself.
                self.neighbours.table().ask_all(&Request::Leave, &[]);
                self.carry_out_here(Request::Leave)
            }
            Request::List { below } => self.list(below),
            Request::Free => {
                let table = self.neighbours.table();
                let mut free = self.free_bytes(Room::now());
                let others = table.expect_all(&Request::Free, &[])?;
                for answer in &others {
                    free = free.min(if let Answer::Free(bytes) = answer { *bytes } else { 0 });
                }
                // Each machine takes its part.
                answered(Answer::Free(free.saturating_mul(others.len() as u64 + 1)))
            }
            Request::AlsoNamed { from, name } => self.name_everywhere(&from, name),
            request @ (Request::Delete { .. } | Request::DeleteTree { .. }) => self.delete_everywhere(&request),
            request => self.carry_out_here(request),
        }
    }

    /// Carries out a request on this machine alone.
    fn carry_out_here(&self, request: Request) -> Carried {
        match request {
            Request::AlsoNamed { from, name } => {
                self.objects.also_named(&from, name).map_err(refused).and_then(|()| done())
            }
            Request::List { below } => {
                let found = self.objects.list(&below, |memory| memory.bytes).map_err(refused)?;
                answered(Answer::Entries(found.into_iter().map(Into::into).collect()))
            }
            Request::Delete { .. } | Request::DeleteTree { .. } => {
                self.delete(&request);
                done()
            }
            Request::Free => answered(Answer::Free(self.free_bytes(Room::now()))),
            Request::Status => answered(Answer::Status(self.status())),
            Request::Leave => {
                self.note(None);
                self.users.leave();
                done()
            }
            Request::Locate { name } => answered(Answer::Bytes(self.objects.get(&name).map_err(refused)?.bytes)),
            Request::Lacks { names } => {
                let lacks = |name: &String| !self.objects.holds(name);
                answered(Answer::Names(names.into_iter().filter(lacks).collect()))
            }
            Request::Joined { me } => {
                self.neighbours.with(me as usize);
                self.copies.wake();
                done()
            }
            Request::Stay => {
                self.users.stay();
                done()
            }
            Request::Uncopied { below } => {
                let table = self.neighbours.table();
                answered(Answer::Uncopied(copies::uncopied(&self.objects, &table, &below)?))
            }
            Request::Ends { me } => {
                self.neighbours.without(&[me as usize]);
                done()
            }
            other => Err((Kind::Internal, format!("this is no request to it: {other:?}"))),
        }
    }

    /// Waits, before the keeper ends, for those of the machines before it that end, too: one at a time sends what only
    /// memory has, and the others still serve it. Goes on without the machines that do not answer.
    pub(crate) fn wait_for_those_before(&self) {
        loop {
            let table = self.neighbours.table();
            let asked = table.ask_all(&Request::Status, &[]);
            let silent: Vec<usize> = asked.iter().filter(|(_, answer)| answer.is_err()).map(|(at, _)| *at).collect();
            if !silent.is_empty() {
                self.neighbours.without(&silent);
            }
            let ends = |answer: &Result<Answer, Failure>| match answer {
                Ok(Answer::Status(status)) => status.leaves || (status.users == 0 && !self.users.leaves()),
                _ => false,
            };
            let is_first = !asked.iter().any(|(at, answer)| *at < table.me && ends(answer));
            if is_first || self.users.are_there_within(LOOKS_EVERY) {
                return;
            }
        }
    }

    /// Tells the other machines that the keeper ends.
    pub(crate) fn tell_end(&self) {
        let table = self.neighbours.table();
        // One that does not answer finds it out.
        table.ask_all(&Request::Ends { me: table.me as u32 }, &[]);
    }

    fn meet(&self, host: &str, ports: (u16, u16), key: Key) -> Carried {
        let address = self.listening.at(host, ports).map_err(|error| {
            (Kind::Unavailable, format!("the keeper cannot listen for other machines at {host}: {error}"))
        })?;
        self.neighbours.expect_key(&key);
        answered(Answer::Address(address))
    }

    fn open(&self, name: String, mut past: u32) -> Carried {
        let here = match self.objects.get(&name) {
            Ok(memory) if past == 0 => {
                let memory = memory.shared().map_err(of_errno)?;
                return Ok((Answer::Memory { bytes: memory.bytes }, With::Memory(memory)));
            }
            Ok(_) => {
                past -= 1;
                (Kind::NotFound, "no further machine has it".to_owned())
            }
            Err(here) => refused(here),
        };
        let table = self.neighbours.table();
        let mut silent = None;
        for (at, answer) in table.ask_all(&Request::Locate { name }, &[]) {
            match answer {
                Ok(Answer::Bytes(_)) if past > 0 => past -= 1,
                Ok(Answer::Bytes(bytes)) => match table.connect(at) {
                    Ok(link) => {
                        // The process waits as for this keeper.
                        let _ = link.set_read_timeout(Some(wire::ANSWERS_WITHIN));
                        return Ok((Answer::Elsewhere { bytes }, With::Link(link)));
                    }
                    Err(error) => silent = Some((Kind::Unavailable, table.silent(at, &error))),
                },
                Err((Kind::NotFound, _)) | Ok(_) => {}
                Err(error) => silent = Some(error),
            }
        }
        Err(silent.unwrap_or(here))
    }

    fn list(&self, below: String) -> Carried {
        let mut found: Vec<Entry> = Vec::new();
        let mut missing = None;
        match self.objects.list(&below, |memory| memory.bytes) {
            Ok(entries) => found.extend(entries),
            Err(error) => missing = Some(refused(error)),
        }
        for (_, answer) in self.neighbours.table().ask_all(&Request::List { below }, &[]) {
            match answer {
                Ok(Answer::Entries(entries)) => found.extend(entries.into_iter().map(Entry::from)),
                Err((Kind::NotFound, _)) | Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
        match missing {
            Some(missing) if found.is_empty() => Err(missing),
            _ => {
                found.sort_by(|a, b| a.name.cmp(&b.name).then(b.bytes.cmp(&a.bytes)));
                found.dedup_by(|next, first| next.name == first.name);
                answered(Answer::Entries(found.into_iter().map(Into::into).collect()))
            }
        }
    }

    /// Deletes on every machine. Twice: a copy may come from one that is asked later, which looks afterwards whether it
    /// still has the object.
    fn delete_everywhere(&self, request: &Request) -> Carried {
        let table = self.neighbours.table();
        for _ in 0..if table.others().next().is_some() { 2 } else { 1 } {
            self.delete(request);
            table.expect_all(request, &[])?;
        }
        done()
    }

    fn delete(&self, request: &Request) {
        let mut incoming = self.incoming();
        match request {
            Request::Delete { names } => names.iter().for_each(|name| {
                incoming.remove(name);
                self.objects.delete(name);
            }),
            Request::DeleteTree { below } => {
                incoming.retain(|name, _| !name.starts_with(below));
                self.objects.delete_tree(below);
            }
            _ => {}
        }
    }

    /// Gives an object a second name on each machine that has it; on the others nothing else has that name afterwards.
    fn name_everywhere(&self, from: &str, name: String) -> Carried {
        let table = self.neighbours.table();
        let request = Request::AlsoNamed { from: from.to_owned(), name: name.clone() };
        let here = self.objects.also_named(from, name.clone());
        let (mut is_found, mut are_without) = (here.is_ok(), Vec::new());
        for (at, answer) in table.ask_all(&request, &[]) {
            match answer {
                Ok(_) => is_found = true,
                Err((Kind::NotFound, _)) => are_without.push(at),
                Err(error) => return Err(error),
            }
        }
        if !is_found {
            return here.map_err(refused).and_then(|()| done());
        }
        if here.is_err() {
            self.objects.delete(&name);
        }
        for at in are_without {
            table.ask(at, &Request::Delete { names: vec![name.clone()] }, &[])?;
        }
        done()
    }

    /// Stores a small object on every machine. A free name is taken first on the one with the lowest number, which says
    /// who was the first.
    fn store_everywhere(&self, name: &str, bytes: &[u8], role: Role, replaces: bool) -> Carried {
        let table = self.neighbours.table();
        let request = Request::Store { name: name.to_owned(), bytes: bytes.len() as u64, role, replaces };
        if replaces {
            table.expect_all(&request, bytes)?;
            return self.store(name, bytes, role, replaces);
        }
        self.expect_free(&table, name)?;
        let first = table.others().min().filter(|&other| other < table.me);
        if let Some(first) = first {
            table.ask(first, &request, bytes)?;
            // The first one may have sent it here, too.
            self.store(name, bytes, role, replaces).or_else(|error| self.has_already(name, bytes, error))?;
        } else {
            self.store(name, bytes, role, replaces)?;
        }
        // The first one has it: for this neighbour that is no conflict.
        table.expect_all(&request, bytes)?;
        done()
    }

    /// Checks that no other machine has an object of this name.
    fn expect_free(&self, table: &Table, name: &str) -> Result<(), Failure> {
        for answer in table.expect_all(&Request::Lacks { names: vec![name.to_owned()] }, &[])? {
            if matches!(answer, Answer::Names(lacks) if lacks.is_empty()) {
                return Err((Kind::Conflict, "the name is taken".to_owned()));
            }
        }
        Ok(())
    }

    fn store(&self, name: &str, bytes: &[u8], role: Role, replaces: bool) -> Carried {
        let memory = Memory::of(bytes, role);
        if replaces {
            self.objects.put(name.to_owned(), memory);
        } else {
            self.objects.publish(name.to_owned(), memory).map_err(refused)?;
            self.copies.wake();
        }
        done()
    }

    /// Returns that an object is there already, if it is this one: a neighbour whose request was lost makes it again.
    fn has_already(&self, name: &str, bytes: &[u8], error: Failure) -> Carried {
        let is_same = self
            .objects
            .get(name)
            .is_ok_and(|memory| memory.bytes == bytes.len() as u64 && memory.read().is_ok_and(|found| found == bytes));
        if is_same { done() } else { Err(error) }
    }

    fn incoming(&self) -> MutexGuard<'_, BTreeMap<String, Memory>> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes memory for a copy that a neighbour offers.
    fn expect_copy(&self, name: &str, bytes: u64) -> Result<Memory, Failure> {
        self.expect_room(bytes)?;
        let memory = Memory::new(bytes, Role::File).map_err(of_errno)?;
        let mut incoming = self.incoming();
        if self.objects.holds(name) || incoming.contains_key(name) {
            return Err((Kind::Conflict, "it is there, or comes".to_owned()));
        }
        incoming.insert(name.to_owned(), memory.clone());
        Ok(memory)
    }

    /// Receives a copy, which has its name once all of its bytes are there, unless it was deleted meanwhile.
    fn take_copy(&self, link: &TcpStream, name: &str, memory: &Memory) -> io::Result<Carried> {
        let received = copies::receive(link, memory);
        let sealed = match &received {
            Ok(true) => memory.seal().map_err(of_errno),
            _ => Err((Kind::Corrupt, "other bytes came than were sent".to_owned())),
        };
        // No deletion is between the two.
        let mut incoming = self.incoming();
        if !incoming.get(name).is_some_and(|taken| taken.is(memory)) {
            return received.map(|_| Err((Kind::Conflict, "deleted while it came".to_owned())));
        }
        incoming.remove(name);
        let taken = sealed.and_then(|()| self.objects.publish(name.to_owned(), memory.clone()).map_err(refused));
        received.map(|_| taken.and_then(|()| done()))
    }

    /// Returns the memory of an object that has this range.
    fn range(&self, name: &str, offset: u64, bytes: u64) -> Result<Memory, Failure> {
        let memory = self.objects.get(name).map_err(refused)?;
        if offset.checked_add(bytes).is_none_or(|end| end > memory.bytes) {
            return Err((Kind::Corrupt, format!("expected {bytes} bytes at {offset}, found {} in all", memory.bytes)));
        }
        Ok(memory)
    }

    fn create(&self, name: String, bytes: u64, begun: &mut Begun) -> Carried {
        self.expect_room(bytes)?;
        let memory = Memory::new(bytes, Role::File).map_err(of_errno)?;
        self.objects.begin(name.clone(), memory.clone()).map_err(refused)?;
        if let Err(error) = self.expect_free(&self.neighbours.table(), &name) {
            self.objects.give_up(&name, |taken| taken.is(&memory));
            return Err(error);
        }
        begun.push((name, memory.clone()));
        Ok((Answer::Memory { bytes }, With::Memory(memory)))
    }

    fn finish(&self, name: &str, begun: &mut Begun) -> Carried {
        let at = begun.iter().position(|(taken, _)| taken == name);
        let none = || (Kind::Unavailable, "this connection has not begun it".to_owned());
        let (_, memory) = &begun[at.ok_or_else(none)?];
        memory.seal().map_err(|errno| {
            (Kind::Unavailable, format!("its memory cannot be sealed, since a process maps it for writing: {errno}"))
        })?;
        self.objects.finish(name, |taken| taken.is(memory), memory.clone()).map_err(refused)?;
        begun.retain(|(taken, _)| taken != name);
        done()
    }

    /// Checks that an object of this length has room, before its first byte.
    fn expect_room(&self, bytes: u64) -> Result<(), Failure> {
        let room = Room::now();
        let free = self.free_bytes(room);
        if bytes <= free {
            return Ok(());
        }
        let why = format!(
            "expected memory for {bytes} bytes, found {free}: {} of the {} bytes that this machine or its control \
             group allows are in use, the keeper's {} of them, and a twentieth is left to others: save to memory on \
             more machines, or only to a disk",
            room.used,
            room.all,
            self.status().bytes,
        );
        Err((Kind::Exhausted, why))
    }

    fn free_bytes(&self, room: Room) -> u64 {
        let mut promised = self.incoming().values().map(Memory::unwritten).sum();
        self.objects.each(|_, memory, is_finished| promised += if is_finished { 0 } else { memory.unwritten() });
        room.bytes().saturating_sub(promised)
    }

    fn status(&self) -> Status {
        let table = self.neighbours.table();
        let (changed, lone) = self.changed.found(&self.objects);
        let (mut bytes, mut objects, mut published) = (0, 0, Vec::new());
        self.objects.each(|name, memory, _| {
            bytes += memory.bytes;
            objects += 1;
            if memory.role == Role::Published {
                published.push(name.to_owned());
            }
        });
        Status {
            process: std::process::id(),
            run: self.run.clone(),
            bytes,
            objects,
            free_bytes: self.free_bytes(Room::now()),
            users: self.users.count() as u64,
            neighbours: table.others().map(|at| table.address(at).to_owned()).collect(),
            copies: table.copies.count,
            uncopied: self.copies.missing(),
            published,
            changed,
            lone,
            leaves: self.users.leaves(),
            linger_s: self.linger.as_secs(),
            failure: self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

impl Serves for Served {
    fn has_ended(&self) -> bool {
        self.users.has_ended()
    }

    fn key(&self) -> Key {
        self.neighbours.table().key
    }

    fn serve(&self, link: &TcpStream) -> io::Result<()> {
        link.set_read_timeout(None)?;
        while let Some((request, _)) = wire::receive::<Request>(link)? {
            let carried = match request {
                Request::Store { name, bytes, role, replaces } => {
                    let bytes = sent(link, bytes)?;
                    self.store(&name, &bytes, role, replaces).or_else(|error| self.has_already(&name, &bytes, error))
                }
                Request::Replica { name, bytes } => match self.expect_copy(&name, bytes) {
                    Ok(memory) => {
                        wire::send(link, &Answer::Done, None)?;
                        self.take_copy(link, &name, &memory)?
                    }
                    Err(refused) => Err(refused),
                },
                Request::Read { name, offset, bytes } => match self.range(&name, offset, bytes) {
                    Ok(memory) => {
                        wire::send(link, &Answer::Bytes(bytes), None)?;
                        memory.send(link, offset, bytes)?;
                        continue;
                    }
                    Err(refused) => Err(refused),
                },
                request => self.carry_out_here(request),
            };
            reply(link, carried)?;
        }
        Ok(())
    }
}
