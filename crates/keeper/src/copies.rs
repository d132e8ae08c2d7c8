//! Copies the files of finished directories to other machines, so that these survive the loss of this one.
//!
//! # Protocol
//! 1. A directory is finished once an object was published in it: what lies in it and below it does not change.
//! 2. Of the machines that have a file of it, the first one in their order copies it to the next ones that lack it,
//!    until there are as many as asked; those of another domain first. Small objects, which every machine has, are
//!    put on each that lacks them.
//! 3. Nothing shows a copy that is under way: it is shown when all bytes are there, with their CRC.
//!
//! A keeper that begins with nothing tells the others (`Joined`); they find the objects that it lacks, and copy them.

use std::collections::HashSet;
use std::io;
use std::net::TcpStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, Digest};
use shardfast_store::Kind;
use shardfast_store::keeper::wire::{self, Answer, Carrier, Request, Role};
use shardfast_store::objects::Objects;

use crate::memory::Memory;
use crate::neighbours::{Failure, Neighbours, Table};

/// Bytes of a copy that are in this process at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Pause before copies that failed are made again.
const TRIES_EVERY: Duration = Duration::from_secs(5);

/// Work of the thread that copies.
#[derive(Default)]
pub(crate) struct Copies {
    work: Mutex<Work>,
    changed: Condvar,
    /// Held while an object is copied, or while one that has changed loses its name here: a copier that finds its
    /// object gone takes it for one that was deleted.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Work {
    /// Whether there may be something to copy since it was last looked for.
    is_wanted: bool,
    is_under_way: bool,
    /// Files that had fewer copies than asked when all was copied that could be.
    missing: u64,
}

/// An object that other machines are to have.
struct Wanted {
    name: String,
    memory: Memory,
    /// Other machines that have it.
    holders: Vec<usize>,
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no object is copied, and none is until the guard is dropped.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look for what is to be copied.
    pub(crate) fn wake(&self) {
        self.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// Returns the number of files that have fewer copies than asked; `None` while copies are made.
    pub(crate) fn missing(&self) -> Option<u64> {
        let work = self.lock();
        (!work.is_wanted && !work.is_under_way).then_some(work.missing)
    }

    /// Copies what there is to copy, for as long as the keeper lives.
    pub(crate) fn run(&self, objects: &Objects<Memory>, neighbours: &Neighbours) {
        loop {
            let mut work = self.lock();
            while !work.is_wanted {
                let patience = if work.missing > 0 { TRIES_EVERY } else { Duration::MAX };
                let (now, waited) = self.changed.wait_timeout(work, patience).unwrap_or_else(PoisonError::into_inner);
                work = now;
                work.is_wanted |= waited.timed_out();
            }
            (work.is_wanted, work.is_under_way) = (false, true);
            drop(work);
            let missing = self.copy(objects, &neighbours.table());
            let mut work = self.lock();
            (work.missing, work.is_under_way) = (missing, false);
        }
    }

    /// Copies what lacks copies, the newest first; returns the number of files that still do.
    fn copy(&self, objects: &Objects<Memory>, table: &Table) -> u64 {
        let mut missing = 0;
        for (mut wanted, can_take) in wanted(objects, table, "", false).unwrap_or_default().into_iter().rev() {
            let _turn = self.turn();
            missing += u64::from(!wanted.copied(objects, table, can_take));
        }
        missing
    }
}

/// Returns the number of files below that name which this machine is to copy, and has not.
///
/// # Errors
/// That of a machine which does not answer.
pub(crate) fn uncopied(objects: &Objects<Memory>, table: &Table, below: &str) -> Result<u64, Failure> {
    let found = wanted(objects, table, below, true)?;
    Ok(found.iter().filter(|(wanted, _)| wanted.is_file() && wanted.lacks(table)).count() as u64)
}

/// Returns the finished objects below that name with those of the other machines that lack them. If `all` have to
/// answer, one that does not is an error, else it can take nothing.
fn wanted(
    objects: &Objects<Memory>,
    table: &Table,
    below: &str,
    all: bool,
) -> Result<Vec<(Wanted, Vec<usize>)>, Failure> {
    let mut found = settled(objects);
    found.retain(|(name, _)| name.starts_with(below));
    let names: Vec<String> = found.iter().map(|(name, _)| name.clone()).collect();
    if names.is_empty() || table.others().next().is_none() {
        return Ok(Vec::new());
    }
    let mut lacks: Vec<(usize, HashSet<String>)> = Vec::new();
    for (at, answer) in table.ask_all(&Request::Lacks { names }, &[]) {
        match answer {
            Ok(Answer::Names(names)) => lacks.push((at, names.into_iter().collect())),
            Err(failure) if all => return Err(failure),
            _ => {}
        }
    }
    let those = |name: &str, do_lack: bool| -> Vec<usize> {
        lacks.iter().filter(|(_, lacks)| lacks.contains(name) == do_lack).map(|(at, _)| *at).collect()
    };
    let one = |(name, memory): (String, Memory)| {
        let (holders, can_take) = (those(&name, false), those(&name, true));
        (Wanted { name, memory, holders }, can_take)
    };
    Ok(found.into_iter().map(one).collect())
}

impl Wanted {
    fn is_file(&self) -> bool {
        self.memory.role == Role::File
    }

    /// Returns whether too few machines have it, and this one is to copy it: the first of them does.
    fn lacks(&self, table: &Table) -> bool {
        self.holders.len() < self.asked(table) && !self.holders.iter().any(|&holder| holder < table.me)
    }

    /// Deletes an object on all machines that was deleted while it was copied: it may have come after its deletion, and
    /// have been copied on from there. Twice, as each deletion.
    fn delete(&self, objects: &Objects<Memory>, table: &Table) {
        for _ in 0..2 {
            objects.delete(&self.name);
            table.ask_all(&Request::Delete { names: vec![self.name.clone()] }, &[]);
        }
    }

    /// Returns how many other machines are to have it.
    fn asked(&self, table: &Table) -> usize {
        let count = table.others().count();
        if self.is_file() { count.min(table.copies.count as usize) } else { count }
    }

    /// Copies it to those of `can_take` that are to have it, if this machine is the one that does; returns whether
    /// there are enough copies.
    fn copied(&mut self, objects: &Objects<Memory>, table: &Table, mut can_take: Vec<usize>) -> bool {
        if !self.lacks(table) {
            return true;
        }
        while self.holders.len() < self.asked(table) {
            let domains: HashSet<&str> = self.holders.iter().chain([&table.me]).map(|&at| table.domain(at)).collect();
            let other = can_take.iter().position(|&at| !domains.contains(table.domain(at)));
            if can_take.is_empty() {
                return false;
            }
            let at = can_take.remove(other.unwrap_or(0));
            let is_there = || objects.get(&self.name).is_ok_and(|now| now.is(&self.memory));
            if !is_there() {
                return true;
            }
            let sent = send(table, at, &self.name, &self.memory);
            // A file has its name once; a small object may have been replaced.
            let is_gone = if self.is_file() { !is_there() } else { !objects.holds(&self.name) };
            if is_gone {
                self.delete(objects, table);
                return true;
            }
            if sent.is_ok() {
                self.holders.push(at);
            }
        }
        true
    }
}

/// Returns the finished objects of finished directories, and the small ones.
fn settled(objects: &Objects<Memory>) -> Vec<(String, Memory)> {
    let (mut all, mut finished) = (Vec::new(), HashSet::new());
    objects.each(|name, memory, is_finished| {
        if is_finished {
            all.push((name.to_owned(), memory.clone()));
        }
        if memory.role == Role::Published
            && let Some((dir, _)) = name.rsplit_once('/')
        {
            finished.insert(dir.to_owned());
        }
    });
    let is_settled = |name: &str| name.match_indices('/').any(|(at, _)| finished.contains(&name[..at]));
    all.retain(|(name, memory)| memory.role != Role::File || is_settled(name));
    all
}

/// Sends a copy to a machine.
fn send(table: &Table, at: usize, name: &str, memory: &Memory) -> Result<(), Failure> {
    let lost = |error: io::Error| (Kind::Unavailable, table.silent(at, &error));
    let (name, bytes) = (name.to_owned(), memory.bytes);
    if memory.role != Role::File {
        let contents = memory.read().map_err(|errno| lost(errno.into()))?;
        let request = Request::Store { name, bytes, role: memory.role, replaces: false };
        return table.ask(at, &request, &contents).map(drop);
    }
    let (_, link) = table.call(at, &Request::Replica { name, bytes }, &[])?;
    let sent = || -> io::Result<Option<Answer>> {
        let began = Instant::now();
        let crc = memory.read_all(|piece, done| {
            if let Some(rate) = table.copies.rate {
                let due = Duration::from_secs_f64(done as f64 / rate.max(1) as f64);
                thread::sleep(due.saturating_sub(began.elapsed()));
            }
            link.put(piece)
        })?;
        // Bytes that have changed since they came are refused there.
        link.put(&memory.noted_crc(crc).to_le_bytes())?;
        Ok(wire::receive(&link)?.map(|(answer, _)| answer))
    };
    match sent().map_err(lost)? {
        Some(Answer::Done) => table.give_back(at, link),
        Some(Answer::Refused { kind, why }) => return Err((kind, why)),
        _ => return Err((Kind::Unavailable, "it has not taken the copy".to_owned())),
    }
    Ok(())
}

/// Receives a copy, whose bytes and CRC follow, into this memory; returns whether they are those that were sent.
pub(crate) fn receive(link: &TcpStream, memory: &Memory) -> io::Result<bool> {
    let (mut piece, mut done, mut crc) = (vec![0; PIECE_BYTES], 0, Digest::new(CrcAlgorithm::Crc64Nvme));
    while done < memory.bytes {
        let bytes = piece.len().min((memory.bytes - done) as usize);
        link.fill(&mut piece[..bytes])?;
        crc.update(&piece[..bytes]);
        memory.write(&piece[..bytes], done)?;
        done += bytes as u64;
    }
    let mut expected = [0; wire::CRC_BYTES];
    link.fill(&mut expected)?;
    let crc = crc.finalize();
    Ok(u64::from_le_bytes(expected) == crc && memory.noted_crc(crc) == crc)
}
