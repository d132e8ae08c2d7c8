//! Reports the operations of stores to an observer, each when it has ended.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Error, Requests, Result};

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Creation of an object that is written in parts.
    Create,
    /// Write of a part of an object, or of all of it.
    Write,
    /// End of an object: its contents become durable.
    Finish,
    /// Small object stored, perhaps in place of another one.
    Put,
    /// Small object stored if there is none.
    Publish,
    /// Object copied inside the storage, or given a second name.
    Copy,
    /// Names made durable.
    Sync,
    /// Beginning of an object's reads: its length, and perhaps its first bytes.
    Open,
    /// Range of an object read.
    Read,
    /// Names in a directory listed.
    List,
    /// Objects removed, one or many.
    Delete,
    /// Directory removed with all below it.
    DeleteTree,
    /// Unfinished object removed.
    Abort,
    /// Question for the checksum that a service keeps.
    Checksum,
    /// Unfinished uploads listed.
    Uploads,
}

impl Action {
    /// Returns the word that errors have for it.
    pub fn word(self) -> &'static str {
        match self {
            Action::Create => "create",
            Action::Write => "write",
            Action::Finish => "finish",
            Action::Put => "put",
            Action::Publish => "publish",
            Action::Copy => "copy",
            Action::Sync => "sync",
            Action::Open => "open",
            Action::Read => "read",
            Action::List => "list",
            Action::Delete => "delete",
            Action::DeleteTree => "delete_tree",
            Action::Abort => "abort",
            Action::Checksum => "checksum",
            Action::Uploads => "uploads",
        }
    }
}

/// An operation of a store that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Kind of the operation.
    pub action: Action,
    /// Name of the object or directory in the store; the first name of several.
    pub object: &'a str,
    /// Offset of the bytes in the object.
    pub offset: u64,
    /// Number of bytes that were moved, or were to be moved if it failed; 0 for an operation that moves none.
    pub bytes: u64,
    /// Begin of the operation.
    pub began: Instant,
    /// Time that it took.
    pub took: Duration,
    /// Requests that it made to a service; none at storage that takes no requests.
    pub requests: Requests,
    /// Error, if it failed.
    pub failure: Option<&'a Error>,
}

/// Observer of the operations of stores.
///
/// A store calls it on the thread that made the operation, possibly several at a time. It must return at once: it takes
/// no lock that another thread may hold for long, and does no input or output.
pub trait Observer: Send + Sync {
    /// Receives an operation that has ended.
    fn stored(&self, event: &Event<'_>);
}

/// Handle through which a store reports its operations; without an observer it costs nothing.
#[derive(Clone, Default)]
pub(crate) struct Reports(pub(crate) Option<Arc<dyn Observer>>);

impl Reports {
    /// Makes an operation on bytes of an object, given their offset and number, and reports it.
    pub(crate) fn during<T>(
        &self,
        action: Action,
        object: &str,
        (offset, bytes): (u64, usize),
        act: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let began = self.begin();
        let done = act();
        self.end(began, action, object, offset..offset.saturating_add(bytes as u64), done.as_ref().err());
        done
    }

    /// Returns the time, if an observer wants to know it.
    pub(crate) fn begin(&self) -> Option<Instant> {
        self.0.as_ref().map(|_| Instant::now())
    }

    /// Reports an operation on a range of an object that began at `began`, without requests.
    pub(crate) fn end(
        &self,
        began: Option<Instant>,
        action: Action,
        object: &str,
        range: Range<u64>,
        failure: Option<&Error>,
    ) {
        let Some(began) = began else { return };
        self.asked(began, action, object, range, Requests::default(), failure);
    }

    /// Reports an operation that made these requests.
    pub(crate) fn asked(
        &self,
        began: Instant,
        action: Action,
        object: &str,
        range: Range<u64>,
        requests: Requests,
        failure: Option<&Error>,
    ) {
        if let Some(observer) = &self.0 {
            let (offset, bytes) = (range.start, range.end - range.start);
            observer.stored(&Event { action, object, offset, bytes, began, took: began.elapsed(), requests, failure });
        }
    }
}
