//! Accepts connections, and limits those that have not shown the job's token, in number and time.
//!
//! Any process that reaches a rank's port can open connections there, and each costs a file descriptor, which saves
//! need too. So a connection that has not shown the token within [`PROVE_WITHIN`] is closed, and there are at most
//! [`UNPROVEN_MAX`] of them: for one more, the oldest is closed. A rank of the job shows the token with its first
//! message.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TlsConnectInfo};
use tonic::{Extensions, Request};

/// Time that a connection may take to show the token.
const PROVE_WITHIN: Duration = Duration::from_secs(10);

/// Maximum number of connections that have not shown the token.
pub(super) const UNPROVEN_MAX: usize = 128;

/// Pause after a connection could not be accepted, for example for lack of a free descriptor.
const RETRY: Duration = Duration::from_millis(50);

const UNPROVEN: u8 = 0;
const PROVEN: u8 = 1;
const CLOSED: u8 = 2;

/// The other end of a connection.
#[derive(Clone)]
pub(super) struct Remote {
    address: SocketAddr,
    proof: Arc<Proof>,
}

struct Proof {
    state: AtomicU8,
    /// Waker of the task that reads the connection.
    reader: Mutex<Option<Waker>>,
}

impl Proof {
    fn reader(&self) -> MutexGuard<'_, Option<Waker>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let was = self.state.compare_exchange(UNPROVEN, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        if let (Ok(_), Some(reader)) = (was, self.reader().take()) {
            reader.wake();
        }
    }
}

impl Remote {
    /// Returns the other end that makes this request.
    pub(super) fn of<T>(request: &Request<T>) -> Option<Remote> {
        let extensions: &Extensions = request.extensions();
        let secured = || extensions.get::<TlsConnectInfo<Remote>>().map(TlsConnectInfo::get_ref);
        extensions.get::<Remote>().or_else(secured).cloned()
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Marks that it has shown the token, so that the connection stays open.
    pub(super) fn set_proven(&self) {
        // If it was closed meanwhile, the next read fails.
        let _ = self.proof.state.compare_exchange(UNPROVEN, PROVEN, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// A connection that another process has opened.
pub(super) struct Connection {
    stream: TcpStream,
    remote: Remote,
    /// Time limit; `None` once the token was shown.
    until: Option<Pin<Box<Sleep>>>,
}

impl Connected for Connection {
    type ConnectInfo = Remote;

    fn connect_info(&self) -> Remote {
        self.remote.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Connection { stream, remote, until } = &mut *self;
        if let Some(time) = until {
            *remote.proof.reader() = Some(context.waker().clone());
            match remote.proof.state.load(Ordering::Acquire) {
                PROVEN => *until = None,
                UNPROVEN if time.as_mut().poll(context).is_pending() => {}
                _ => return Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            }
        }
        Pin::new(stream).poll_read(context, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Stream of the connections that a listener accepts; never ends.
pub(super) struct Connections {
    listener: TcpListener,
    /// Connections without a proof, the oldest first. Ended or proven ones are removed when there are too many.
    unproven: VecDeque<Weak<Proof>>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Connections {
    pub(super) fn new(listener: TcpListener) -> Connections {
        Connections { listener, unproven: VecDeque::new(), pause: None }
    }

    fn admit(&mut self, stream: TcpStream, address: SocketAddr) -> Connection {
        // Failing to set this only makes small messages slower.
        let _ = stream.set_nodelay(true);
        if self.unproven.len() >= UNPROVEN_MAX {
            let is_unproven = |proof: Arc<Proof>| proof.state.load(Ordering::Acquire) == UNPROVEN;
            self.unproven.retain(|remote| remote.upgrade().is_some_and(is_unproven));
        }
        while self.unproven.len() >= UNPROVEN_MAX
            && let Some(oldest) = self.unproven.pop_front()
        {
            oldest.upgrade().into_iter().for_each(|oldest| oldest.close());
        }
        let proof = Arc::new(Proof { state: AtomicU8::new(UNPROVEN), reader: Mutex::new(None) });
        self.unproven.push_back(Arc::downgrade(&proof));
        Connection { stream, remote: Remote { address, proof }, until: Some(Box::pin(sleep(PROVE_WITHIN))) }
    }
}

impl Stream for Connections {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Connection>>> {
        loop {
            if let Some(pause) = &mut self.pause {
                if pause.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                self.pause = None;
            }
            match self.listener.poll_accept(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok((stream, address))) => return Poll::Ready(Some(Ok(self.admit(stream, address)))),
                Poll::Ready(Err(_)) => self.pause = Some(Box::pin(sleep(RETRY))),
            }
        }
    }
}
