//! Keeps objects in memory for the processes of a machine, and outlives them.
//!
//! A keeper is a process of one user and one name. It listens on a socket without a name in any file system, and serves
//! the back end `keeper://` of the store, whose [wire] says how. It knows nothing of what the objects mean.
//!
//! The keepers of the machines of a job serve each other, so that each shows the objects of all: a small object is on
//! every machine, a file where it was written, and where copies of it are kept.
//!
//! [wire]: shardfast_store::keeper::wire

mod copies;
mod idle;
mod listening;
mod memory;
mod neighbours;
mod proof;
mod room;
mod serving;
mod users;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shardfast_store::keeper::wire;
use shardfast_store::{Error, Result};

pub use shardfast_store::Kind;
pub use shardfast_store::keeper::wire::Status;
pub use shardfast_store::keeper::{leave, leave_all, status, stay, uncopied};

use serving::Served;

/// Kind of the error if no keeper of a name runs.
pub const NOT_THERE: Kind = Kind::NotFound;

/// Outcome of sending what only the keeper has, with the reason if it failed.
pub type Sent = std::result::Result<(), String>;

/// Pause before what only the keeper has is sent again.
const TRIES_EVERY: Duration = Duration::from_secs(30);

/// Time for which that is tried; then the keeper ends without.
const TRIES_FOR: Duration = Duration::from_secs(3600);

/// Connections at a time; others are refused.
const CONNECTIONS_MAX: usize = 4096;

/// Pause after a connection could not be accepted.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// A keeper that listens.
pub struct Keeper {
    listener: Arc<UnixListener>,
    served: Arc<Served>,
    name: String,
}

impl Keeper {
    /// Listens as the keeper of this user and name, for the run that it serves. `linger` is how long it waits for users
    /// once it has none.
    ///
    /// # Errors
    /// [`Kind::Conflict`] if one listens already; [`Kind::Invalid`] for a name that is none; [`Kind::Exhausted`]
    /// without memory or descriptors.
    pub fn listen(name: &str, run: &str, linger: Duration) -> Result<Keeper> {
        let fail = |kind, why: &dyn ToString| Error::new(kind, "listen", format!("keeper://{name}"), why.to_string());
        let address = wire::address(name).map_err(|error| fail(Kind::Invalid, &error))?;
        let listener = UnixListener::bind_addr(&address).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => fail(Kind::Conflict, &"a keeper of this name runs already"),
            _ => fail(Kind::Unavailable, &error),
        })?;
        // Each object is a descriptor.
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
        let served = Arc::new(Served::new(run, linger));
        let serves: Weak<Served> = Arc::downgrade(&served);
        served.listening.serve(serves);
        let listener = Arc::new(listener);
        let accepting = (Arc::clone(&listener), Arc::clone(&served));
        thread::Builder::new()
            .name("accept".to_owned())
            .spawn(move || accept(&accepting.0, &accepting.1))
            .map_err(|error| fail(Kind::Exhausted, &error))?;
        let copying = Arc::clone(&served);
        thread::Builder::new()
            .name("copy".to_owned())
            .spawn(move || copying.copies.run(&copying.objects, &copying.neighbours))
            .map_err(|error| fail(Kind::Exhausted, &error))?;
        let proving = Arc::clone(&served);
        thread::Builder::new()
            .name("prove".to_owned())
            .spawn(move || {
                proving.changed.run(&proving.objects, (&proving.neighbours, &proving.copies), &proving.users)
            })
            .map_err(|error| fail(Kind::Exhausted, &error))?;
        Ok(Keeper { listener, served, name: name.to_owned() })
    }

    /// Serves until no process has used the keeper for as long as it lingers, or one has told it to leave. Then `send`
    /// sends what only the keeper has to the run's own place; while that fails it is tried again, for an hour at most.
    /// A keeper that is used again meanwhile goes on.
    ///
    /// # Errors
    /// The reason for which it could not be sent: it is lost.
    pub fn serve(&self, mut send: impl FnMut(&str) -> Sent) -> Sent {
        loop {
            self.served.users.wait_until_unused(self.served.linger);
            self.served.wait_for_those_before();
            let began = Instant::now();
            loop {
                let sent = self.served.users.while_sending(|| send(&self.name));
                self.served.note(sent.as_ref().err());
                let is_over = sent.is_ok() || began.elapsed() > TRIES_FOR;
                if is_over && self.served.users.end_if_unused() {
                    self.served.tell_end();
                    return sent;
                }
                if is_over || self.served.users.are_there_within(TRIES_EVERY) {
                    break;
                }
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.served.users.end();
        self.served.listening.close();
        // The thread that accepts wakes up, and closes the socket.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
    }
}

/// Accepts connections, each on a thread of its own, until the keeper ends.
fn accept(listener: &UnixListener, served: &Arc<Served>) {
    for link in listener.incoming() {
        if served.users.has_ended() {
            return;
        }
        let Ok(link) = link else {
            thread::sleep(REFUSED_PAUSE);
            continue;
        };
        // Of another user, or one too many: it is closed.
        if !wire::is_ours(&link) || Arc::strong_count(served) > CONNECTIONS_MAX {
            continue;
        }
        let served = Arc::clone(served);
        // Without a thread it is closed, too.
        let _ = thread::Builder::new().stack_size(256 << 10).spawn(move || served.connection(&link));
    }
}
