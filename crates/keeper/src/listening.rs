//! Listens for the keepers of other machines.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use shardfast_store::keeper::wire::Key;

use crate::proof;

/// Time that a connection may take to prove that it is of the job.
const PROVES_WITHIN: Duration = Duration::from_secs(10);

/// Connections without a proof at a time; others are refused.
const UNPROVEN_MAX: usize = 128;

/// Pause after a connection could not be accepted.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);

/// Serves connections of other machines.
pub(crate) trait Serves: Send + Sync {
    /// Returns whether it serves no more.
    fn has_ended(&self) -> bool;

    /// Returns the key that the other side has to know.
    fn key(&self) -> Key;

    /// Serves a connection that has proven itself until it ends.
    fn serve(&self, link: &TcpStream) -> io::Result<()>;
}

/// Socket of the keeper for other machines, once a job has asked for it.
#[derive(Default)]
pub(crate) struct Listening(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    served: Option<Weak<dyn Serves>>,
    /// Host, and the socket there.
    socket: Option<(String, Arc<TcpListener>)>,
}

impl Listening {
    /// Says whose connections come in.
    pub(crate) fn serve(&self, served: Weak<dyn Serves>) {
        self.lock().served = Some(served);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens at a host, on one of these ports (two zeros: any), unless it does; returns the address.
    pub(crate) fn at(&self, host: &str, ports: (u16, u16)) -> io::Result<String> {
        let mut inner = self.lock();
        if inner.socket.as_ref().is_none_or(|(bound, _)| bound != host) {
            self.close_in(&mut inner);
            let socket = Arc::new(bind(host, ports)?);
            let served = inner.served.clone().ok_or(io::ErrorKind::NotConnected)?;
            let accepting = Arc::clone(&socket);
            thread::Builder::new().name("accept".to_owned()).spawn(move || accept(&accepting, &served))?;
            inner.socket = Some((host.to_owned(), socket));
        }
        let (_, socket) = inner.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let port = socket.local_addr()?.port();
        Ok(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }

    /// Listens no more.
    pub(crate) fn close(&self) {
        self.close_in(&mut self.lock());
    }

    fn close_in(&self, inner: &mut Inner) {
        if let Some((_, socket)) = inner.socket.take() {
            // The thread that accepts wakes up, and closes the socket.
            let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
        }
    }
}

fn bind(host: &str, (first, last): (u16, u16)) -> io::Result<TcpListener> {
    for port in first..=last {
        match TcpListener::bind((host, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no port from {first} to {last} is free")))
}

/// Accepts connections, each on a thread of its own, until the socket is closed.
fn accept(socket: &TcpListener, served: &Weak<dyn Serves>) {
    let unproven = Arc::new(AtomicUsize::new(0));
    loop {
        let link = match socket.accept() {
            Ok((link, _)) => link,
            // It was closed.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(_) => {
                thread::sleep(REFUSED_PAUSE);
                continue;
            }
        };
        let Some(served) = served.upgrade().filter(|served| !served.has_ended()) else { return };
        if unproven.fetch_add(1, Ordering::AcqRel) >= UNPROVEN_MAX {
            unproven.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let count = Arc::clone(&unproven);
        let spawned = thread::Builder::new().stack_size(256 << 10).spawn(move || {
            let proven = prove(&link, served.key());
            count.fetch_sub(1, Ordering::AcqRel);
            if proven.is_ok() {
                // A connection that fails has ended.
                let _ = served.serve(&link);
            }
        });
        if spawned.is_err() {
            unproven.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn prove(link: &TcpStream, key: Key) -> io::Result<()> {
    link.set_nodelay(true)?;
    link.set_read_timeout(Some(PROVES_WITHIN))?;
    link.set_write_timeout(Some(PROVES_WITHIN))?;
    proof::accept(link, &key)
}
