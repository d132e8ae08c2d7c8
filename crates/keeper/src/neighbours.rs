//! Reaches the keepers of the other machines of a job.
//!
//! A name is looked for on all machines, and one that does not answer fails the request: what it has is not known. The
//! machines change when a job begins, and when a keeper ends that has told so.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use shardfast_store::Kind;
use shardfast_store::keeper::wire::{self, Answer, Carrier, Copies, Key, Machine, Request};

use crate::proof;

/// Time within which a machine takes a connection, and proves itself on it.
const CONNECTS_WITHIN: Duration = Duration::from_secs(2);

/// Time within which a neighbour answers: the process that has asked this keeper waits for longer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(4);

/// Idle connections with a neighbour that are held on to.
const IDLE_MAX: usize = 4;

/// Failure of a request: its kind and its reason.
pub(crate) type Failure = (Kind, String);

/// The machines of a job.
#[derive(Default)]
pub(crate) struct Neighbours(Mutex<Arc<Table>>);

/// Machines, from the time at which they met.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) key: Key,
    pub(crate) me: usize,
    pub(crate) copies: Copies,
    machines: Vec<Machine>,
    /// Machines whose keepers have ended.
    ended: Vec<bool>,
    idle: Vec<Mutex<Vec<TcpStream>>>,
}

impl Neighbours {
    fn lock(&self) -> MutexGuard<'_, Arc<Table>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the machines as they are now.
    pub(crate) fn table(&self) -> Arc<Table> {
        Arc::clone(&self.lock())
    }

    /// Forgets the machines, unless they are of the job with that key.
    pub(crate) fn expect_key(&self, key: &Key) {
        let mut table = self.lock();
        if table.key != *key {
            *table = Arc::new(Table { key: *key, ..Table::default() });
        }
    }

    /// Takes the machines of the job; returns whether they are others than before.
    pub(crate) fn set(&self, machines: Vec<Machine>, me: usize, copies: Copies) -> bool {
        let mut table = self.lock();
        if table.machines == machines && table.me == me && table.copies == copies && !table.ended.contains(&true) {
            return false;
        }
        let idle = machines.iter().map(|_| Mutex::default()).collect();
        *table = Arc::new(Table { key: table.key, me, copies, ended: vec![false; machines.len()], machines, idle });
        true
    }

    /// Goes on without these machines.
    pub(crate) fn without(&self, gone: &[usize]) {
        self.change(|at, ended| ended || gone.contains(&at));
    }

    /// Goes on with a machine whose keeper has begun anew.
    pub(crate) fn with(&self, back: usize) {
        self.change(|at, ended| ended && at != back);
    }

    fn change(&self, ends: impl Fn(usize, bool) -> bool) {
        let mut table = self.lock();
        let Table { key, me, copies, machines, ended, .. } = &**table;
        let ended = ended.iter().enumerate().map(|(at, ended)| ends(at, *ended)).collect();
        let (machines, idle) = (machines.clone(), machines.iter().map(|_| Mutex::default()).collect());
        *table = Arc::new(Table { key: *key, me: *me, copies: *copies, machines, ended, idle });
    }
}

impl Table {
    /// Returns the numbers of the other machines, beginning behind this one.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let count = self.machines.len();
        (1..count).map(move |behind| (self.me + behind) % count).filter(|&at| !self.ended[at])
    }

    pub(crate) fn address(&self, at: usize) -> &str {
        &self.machines[at].address
    }

    pub(crate) fn domain(&self, at: usize) -> &str {
        &self.machines[at].domain
    }

    /// Opens a connection with a machine's keeper, with both proofs.
    pub(crate) fn connect(&self, at: usize) -> io::Result<TcpStream> {
        let addresses: Vec<SocketAddr> = self.address(at).to_socket_addrs()?.collect();
        let address = addresses.first().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let link = TcpStream::connect_timeout(address, CONNECTS_WITHIN)?;
        link.set_nodelay(true)?;
        link.set_read_timeout(Some(CONNECTS_WITHIN))?;
        link.set_write_timeout(Some(ANSWERS_WITHIN))?;
        proof::connect(&link, &self.key)?;
        link.set_read_timeout(Some(ANSWERS_WITHIN))?;
        Ok(link)
    }

    /// Makes a call of a machine's keeper; returns the answer, and the connection for what follows it.
    pub(crate) fn call(&self, at: usize, request: &Request, bytes: &[u8]) -> Result<(Answer, TcpStream), Failure> {
        let ask = |link: &TcpStream| -> io::Result<Answer> {
            wire::send(link, request, None)?;
            link.put(bytes)?;
            Ok(wire::receive(link)?.ok_or(io::ErrorKind::UnexpectedEof)?.0)
        };
        let idle = self.idle[at].lock().unwrap_or_else(PoisonError::into_inner).pop();
        let answered = idle.map(|link| ask(&link).map(|answer| (answer, link)));
        let answered = match answered {
            // One that was idle may have ended since, with the keeper of before.
            Some(Err(error)) if !is_silence(&error) => None,
            answered => answered,
        };
        let answered = answered.unwrap_or_else(|| self.connect(at).and_then(|link| Ok((ask(&link)?, link))));
        match answered {
            Ok((Answer::Refused { kind, why }, link)) => {
                self.give_back(at, link);
                Err((kind, format!("{}: {why}", self.address(at))))
            }
            Ok(answered) => Ok(answered),
            Err(error) => Err((Kind::Unavailable, self.silent(at, &error))),
        }
    }

    /// Says that a machine's keeper does not answer.
    pub(crate) fn silent(&self, at: usize, error: &io::Error) -> String {
        match is_silence(error) {
            true => format!("the keeper at {} does not answer in time", self.address(at)),
            false => format!("the keeper at {} does not answer: {error}", self.address(at)),
        }
    }

    /// Keeps a connection whose call is over.
    pub(crate) fn give_back(&self, at: usize, link: TcpStream) {
        let mut idle = self.idle[at].lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(link);
        }
    }

    /// Makes a call of a machine's keeper that nothing follows.
    pub(crate) fn ask(&self, at: usize, request: &Request, bytes: &[u8]) -> Result<Answer, Failure> {
        let (answer, link) = self.call(at, request, bytes)?;
        self.give_back(at, link);
        Ok(answer)
    }

    /// Makes the same call of all other machines at once; returns their numbers and answers.
    pub(crate) fn ask_all(&self, request: &Request, bytes: &[u8]) -> Vec<(usize, Result<Answer, Failure>)> {
        let ask = |at: usize| self.ask(at, request, bytes);
        let others: Vec<usize> = self.others().collect();
        if let [at] = others[..] {
            return vec![(at, ask(at))];
        }
        thread::scope(|threads| {
            let asked: Vec<_> = others.iter().map(|&at| (at, threads.spawn(move || ask(at)))).collect();
            let lost = |_| Err((Kind::Internal, "a thread has panicked".to_owned()));
            asked.into_iter().map(|(at, asked)| (at, asked.join().unwrap_or_else(lost))).collect()
        })
    }

    /// Makes the same call of all other machines, each of which has to answer.
    ///
    /// # Errors
    /// The first one's.
    pub(crate) fn expect_all(&self, request: &Request, bytes: &[u8]) -> Result<Vec<Answer>, Failure> {
        self.ask_all(request, bytes).into_iter().map(|(_, answer)| answer).collect()
    }
}

fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
