//! Observes stores for tests: keeps every operation, in the order in which they ended.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Action, Event, Kind, Observer, Requests, Result, Shared, Store, open_on};

/// An operation that was reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Kind of the operation.
    pub action: Action,
    /// Name of the object or directory.
    pub object: String,
    /// Offset of the bytes in the object.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Requests that it made.
    pub requests: Requests,
    /// Kind of its error, if it failed.
    pub failure: Option<Kind>,
}

/// Observer that keeps all operations.
#[derive(Default)]
pub struct Noted(Mutex<Vec<Seen>>);

impl Noted {
    /// Opens a store whose operations it keeps.
    ///
    /// # Errors
    /// As [`open`](crate::open).
    pub fn open(url: &str) -> Result<(Arc<dyn Store>, Arc<Noted>)> {
        Noted::open_on(url, &Shared::default())
    }

    /// Opens a store like [`open`](Noted::open), with the state that stores share.
    ///
    /// # Errors
    /// As [`open`](crate::open).
    pub fn open_on(url: &str, shared: &Shared) -> Result<(Arc<dyn Store>, Arc<Noted>)> {
        let noted = Arc::new(Noted::default());
        let shared = shared.observed_by(Arc::clone(&noted) as Arc<dyn Observer>);
        Ok((open_on(url, &shared)?, noted))
    }

    /// Returns the operations so far, and forgets them.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the numbers of requests in the operations that it has kept.
    pub fn requests(&self) -> Requests {
        let mut all = Requests::default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|seen| all.add(seen.requests));
        all
    }
}

impl Observer for Noted {
    fn stored(&self, event: &Event<'_>) {
        let Event { action, object, offset, bytes, requests, failure, .. } = *event;
        let (object, failure) = (object.to_owned(), failure.map(|error| error.kind));
        let seen = Seen { action, object, offset, bytes, requests, failure };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }
}
