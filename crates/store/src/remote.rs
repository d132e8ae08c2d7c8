//! Implements object stores that are reached by requests: the common part of S3, GCS and Azure.
//!
//! 1. *Write.* An object of one part is one request; a longer one is a multipart upload, begun by `create` and
//!    completed by `finish`. Parts are sent from the writes' own memory, which is returned once no connection uses it.
//!    The service proves each part by a checksum. An upload is invisible until it is complete; one that fails is
//!    aborted.
//! 2. *Publish* is a request that creates if absent. The client library repeats nothing. Any answer may follow our own
//!    success or not: the object carries a random token in its metadata, and the publisher reads it and compares it
//!    with its own. If the service cannot be reached then, the object may have been published.
//! 3. *Read.* The first request returns the head of the object, its length and its version; all others ask for that
//!    version, so that an object that was replaced is an error and never a mixture.
//! 4. *Names* are durable with their objects: `sync` has nothing to do. Directories are the common prefixes of names.
//!
//! [`upload`] sends an object, [`read`] reads it and [`list`] lists directories; [`network`] holds the connections,
//! [`failure`] interprets refusals, and [`carried`] collects values that no error may repeat. Each service's own file
//! builds its client.

mod carried;
mod endpoint;
mod failure;
mod flow;
mod list;
mod network;
mod pace;
mod read;
mod upload;
#[cfg(any(feature = "gcs", feature = "s3"))]
pub(crate) mod xml;

use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use http::StatusCode;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as ClientError, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, RetryConfig,
};

use crate::observe::{Action, Reports};
use crate::place::join;
use crate::write::Writes;
use crate::{
    Entry, Error, Kind, Location, Needs, ObjectReader, ObjectWriter, Parts, Pieces, Quota, ReadNeeds, Result, Service,
    Shared, Store, Upload, name,
};

pub(crate) use endpoint::is_http;
#[cfg(any(feature = "azure", feature = "gcs"))]
pub(crate) use endpoint::{expect_tls, plain};
pub(crate) use flow::Flow;
use network::{Answer, Held};
pub(crate) use network::{Connector, Network, Pool};
use pace::Pace;
use read::RemoteReader;
#[cfg(feature = "hdfs")]
pub(crate) use read::scatter;
#[cfg(feature = "hdfs")]
pub(crate) use upload::Lending;
use upload::RemoteWriter;

const MIB: u64 = 1 << 20;

/// Maximum number of reads at a time, each on a thread: as many as a slow connection can use.
const READS_MAX: usize = 32;

/// Longest request of a read, in bytes: 16 MiB and a gap. With 9 MiB loads took 1.17 times as long, the server's
/// processor 1.07 times (medians of 13 alternating rounds, MinIO beside its clients).
const REQUEST_BYTES: u64 = 17 * MIB;

/// Lengths of parts: all services take parts from 5 MiB on, and 10,000 of them.
const PARTS: Parts = Parts { bytes_min: 8 * MIB, bytes_max: 64 * MIB, count_max: 10_000 };

/// Bytes that the service copies in one request: few enough that it answers soon.
const COPIED_BYTES: u64 = 256 * MIB;

/// Maximum number of copy requests in flight.
const COPIES_AT_A_TIME: usize = 8;

/// Pauses between reads of a name whose publisher is in doubt, in milliseconds.
const LOOKS_MS: [u64; 4] = [100, 500, 2000, 5000];

/// Metadata key of the publisher's token: letters only, which all services take.
const TOKEN: &str = "shardfasttoken";

/// Client of a bucket.
pub(crate) trait Client: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Client for T {}

/// Lists uploads that are begun and not completed, which the client library does not offer.
#[async_trait::async_trait]
pub(crate) trait ListUploads: Send + Sync {
    /// Lists uploads of objects whose paths have this prefix: path, id, and time of beginning.
    async fn uploads(&self, prefix: &str) -> object_store::Result<Vec<(String, String, SystemTime)>>;
}

/// Other operations of a service that the client library does not offer.
#[async_trait::async_trait]
pub(crate) trait ExtraApi: Send + Sync {
    /// Returns the CRC-64/NVME of a whole object that the service keeps.
    async fn kept_crc64(&self, path: &Path) -> object_store::Result<Option<u64>>;

    /// Returns the service, equal for buckets between which it copies, and the bucket.
    fn place(&self) -> (String, String);

    /// Copies an object, `bucket/path`, inside the service.
    async fn copy(&self, source: &str, path: &Path, attributes: &Attributes) -> object_store::Result<()>;

    /// Sends a part of an upload with its CRC-64/NVME, which the service compares with the bytes that arrive.
    async fn put_part(
        &self,
        path: &Path,
        upload: &str,
        number: usize,
        payload: PutPayload,
        crc64: u64,
    ) -> object_store::Result<PartId>;

    /// Copies a range of an object, `bucket/path`, into a part of an upload.
    async fn copy_part(
        &self,
        source: &str,
        path: &Path,
        upload: &str,
        number: usize,
        range: Range<u64>,
    ) -> object_store::Result<PartId>;
}

/// A bucket at a service.
pub(crate) struct Bucket {
    /// Client that the service's own file made.
    pub(crate) client: Arc<dyn Client>,
    pub(crate) uploads: Option<Arc<dyn ListUploads>>,
    pub(crate) extra_api: Option<Arc<dyn ExtraApi>>,
    /// Attributes of new objects, such as their storage class.
    pub(crate) attributes: Attributes,
    /// Keys and tokens of the configuration, which no error may repeat.
    pub(crate) secrets: Vec<String>,
    /// Name of the service and the bucket, if the service claims to create if absent but must be tested: under this
    /// name a passed test is remembered.
    pub(crate) untrusted: Option<String>,
    /// Called when the service rejects the credentials; `None`: the client renews by expiry.
    pub(crate) renew: Option<Renew>,
}

/// Forgets credentials that are older than the rejected request; returns whether other ones will follow.
pub(crate) type Renew = Arc<dyn Fn(Instant) -> bool + Send + Sync>;

/// Disables the client library's retries: the engine retries.
pub(crate) fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Function with which a service's file builds its client from an HTTP client.
type Build<'a> = &'a dyn Fn(Connector) -> Result<Bucket>;

/// A prefix of a bucket as a [`Store`].
pub(crate) struct RemoteStore {
    place: Arc<Place>,
    /// Tokens of names whose publishing ended in doubt: a second try uses the same one.
    doubtful: Mutex<HashMap<String, String>>,
    shared: Arc<Shared>,
}

/// Address of a store, with its client and network.
struct Place {
    url: String,
    /// Prefix of all objects: empty, or ending in `/`.
    prefix: String,
    bucket: Bucket,
    network: Arc<Network>,
    reports: Reports,
    /// `true` once the service has accepted the credentials of a request.
    is_admitted: AtomicBool,
    pace: Pace,
    sending: Flow,
    reading: Flow,
}

impl RemoteStore {
    /// Opens the store at `url`, whose objects have this prefix in the bucket that `build` opens.
    pub(crate) fn open(url: String, prefix: &str, shared: &Arc<Shared>, build: Build<'_>) -> Result<Arc<dyn Store>> {
        name::check_dir(Action::Open.word(), &url, prefix)?;
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let network = shared.remote.network(&url)?;
        let bucket = build(network.connector())?;
        let (reports, is_admitted) = (shared.reports.clone(), AtomicBool::new(false));
        let place = Arc::new(Place {
            url,
            prefix,
            bucket,
            network,
            reports,
            is_admitted,
            pace: Pace::default(),
            sending: Flow::up_to(shared.remote.sends_max),
            reading: Flow::default(),
        });
        Ok(Arc::new(RemoteStore { place, doubtful: Mutex::default(), shared: Arc::clone(shared) }))
    }

    /// Races two requests that create one name if it is absent. Both begin before either ends, since some servers check
    /// the condition at the beginning only, and then overwrite.
    fn race(&self) -> Result<()> {
        let (place, op) = (&self.place, Action::Publish);
        // An object that a crash leaves there is recognized by its name.
        let name = name::temporary()?;
        let (path, held) = (place.path(op, &name)?, Held::new(2));
        let key = Attribute::Metadata(TOKEN.into());
        let tokens = [random(place, &name)?, random(place, &name)?];
        let put = |token: &String| {
            let attributes = Attributes::from_iter([(key.clone(), token.clone())]);
            let options = PutOptions { mode: PutMode::Create, attributes, ..PutOptions::default() };
            // Servers read a little of a body before they look at anything.
            let half = Bytes::from(vec![0; PROBE_BYTES / 2]);
            let payload = PutPayload::from_iter([half.clone(), half]);
            network::answered(Arc::clone(&held).call(place.client().put_opts(&path, payload, options)))
        };
        let began = Instant::now();
        let both = futures_util::future::join(put(&tokens[0]), put(&tokens[1]));
        let outcomes = <[_; 2]>::from(place.network.run(&place.url, both)?.0);
        let mut won = outcomes.iter().filter(|(outcome, _)| outcome.is_ok()).count();
        // A request that a proxy sends twice is refused the second time: the object tells that it won.
        if won == 0
            && let Ok(found) = place.head(op, &name)
            && found.attributes.get(&key).is_some_and(|found| tokens.iter().any(|token| **found == **token))
        {
            won = 1;
        }
        let _ = place.delete(op, &name);
        let is_refusal = |error: &ClientError, answer: &Answer| {
            matches!(error, ClientError::AlreadyExists { .. }) || is_refused(answer)
        };
        let failed = |(outcome, answer)| Some((Result::err(outcome)?, answer));
        let mut failed = outcomes.into_iter().filter_map(failed);
        if let Some((error, answer)) = failed.find(|(error, answer)| !is_refusal(error, answer)) {
            return Err(place.failed(op, &name, began, &error, &answer));
        }
        if won == 1 {
            return Ok(());
        }
        let found = if won == 0 { "none" } else { "both" };
        let message = format!(
            "this server does not create objects atomically: of two requests that create one name if it is absent \
             (If-None-Match: *), expected exactly one to succeed, found {found}. Two jobs could publish one \
             checkpoint: use a server that keeps this condition, such as MinIO or the service itself"
        );
        Err(place.fail(Kind::Unsupported, op, "", message))
    }

    fn doubtful(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.doubtful.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new random token, or that of an earlier try at this name whose outcome is unknown.
    fn token(&self, name: &str) -> Result<String> {
        if let Some(token) = self.doubtful().remove(name) {
            return Ok(token);
        }
        random(&self.place, name)
    }
}

/// Size of the objects that two requests race with, in bytes.
const PROBE_BYTES: usize = 256 << 10;

/// Returns whether the service answered that the name is taken, or that two requests for it collided.
fn is_refused(answer: &Answer) -> bool {
    matches!(answer.status, Some(StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT))
}

fn random(place: &Place, name: &str) -> Result<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| place.fail(Kind::Internal, Action::Publish, name, error.to_string()))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Place {
    fn client(&self) -> &dyn Client {
        &*self.bucket.client
    }

    fn fail(&self, kind: Kind, op: Action, name: &str, message: impl Into<String>) -> Error {
        Error::new(kind, op.word(), join(&self.url, name), message)
    }

    fn path(&self, op: Action, name: &str) -> Result<Path> {
        name::check(op.word(), &self.url, name)?;
        let path = format!("{}{name}", self.prefix);
        if path.len() > KEY_BYTES_MAX {
            let message = format!("expected at most {KEY_BYTES_MAX} bytes with the prefix, found {}", path.len());
            return Err(self.fail(Kind::Invalid, op, name, message));
        }
        Path::parse(&path).map_err(|error| self.fail(Kind::Invalid, op, name, error.to_string()))
    }

    /// Returns the prefix of a directory, without a slash at its end; `None` for the whole bucket.
    fn dir(&self, op: Action, dir: &str) -> Result<Option<Path>> {
        name::check_dir(op.word(), &self.url, dir)?;
        let path = format!("{}{dir}", self.prefix);
        match path.trim_end_matches('/') {
            "" => Ok(None),
            path => Path::parse(path).map(Some).map_err(|e| self.fail(Kind::Invalid, op, dir, e.to_string())),
        }
    }

    /// Runs a call of the client library.
    fn call<T>(&self, op: Action, name: &str, call: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        self.answered(op, name, call)?.map_err(|(error, _)| error)
    }

    /// Runs like [`call`](Self::call), and again if the answer cannot be parsed: a bit may have flipped on the way.
    fn call_twice<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        op: Action,
        name: &str,
        call: impl Fn() -> F,
    ) -> Result<T> {
        match self.answered(op, name, call())? {
            Err((error, answer))
                if error.kind == Kind::Invalid && answer.status.is_some_and(|status| status.is_success()) =>
            {
                self.call(op, name, call())
            }
            done => done.map_err(|(error, _)| error),
        }
    }

    /// Runs like [`call`](Self::call), and returns the service's answer beside the error.
    fn answered<T>(
        &self,
        op: Action,
        name: &str,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<Result<T, (Error, Answer)>> {
        self.moved(op, name, 0..0, call)
    }

    /// Runs like [`answered`](Self::answered) a call that moves a range of the object.
    fn moved<T>(
        &self,
        op: Action,
        name: &str,
        range: Range<u64>,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<Result<T, (Error, Answer)>> {
        let began = Instant::now();
        let (done, answer) = self.network.run(&self.url, call)?;
        let requests = answer.requests;
        let done = done.map_err(|error| (self.failed(op, name, began, &error, &answer), answer));
        self.reports.asked(began, op, name, range, requests, done.as_ref().err().map(|(error, _)| error));
        self.is_admitted.fetch_or(done.is_ok(), Ordering::Relaxed);
        Ok(done)
    }

    /// Returns the error of a request that began at `began`.
    fn failed(&self, op: Action, name: &str, began: Instant, error: &ClientError, answer: &Answer) -> Error {
        let mut answer = answer.clone();
        self.bucket.secrets.iter().for_each(|secret| answer.carried.hold(secret));
        let found = failure::of(op.word(), join(&self.url, name), error, &answer);
        if failure::refuses_credentials(error, &answer) { self.renewed(found, began) } else { found }
    }

    /// Returns the error of a request whose credentials the service rejects: it is temporary if other credentials will
    /// follow. Credentials that were never accepted are wrong.
    fn renewed(&self, error: Error, began: Instant) -> Error {
        let are_admitted = self.is_admitted.load(Ordering::Relaxed);
        if self.bucket.renew.as_ref().is_none_or(|renew| renew(began)) {
            let wait = Some(error.wait.unwrap_or_default());
            return if are_admitted { Error { kind: Kind::Unavailable, wait, ..error } } else { error };
        }
        let message = match are_admitted || error.kind == Kind::Unavailable {
            true => format!(
                "{}; the credentials have expired, and those of the environment stay the same as long as the process: \
                 let a profile or a role give them",
                error.message
            ),
            false => error.message,
        };
        Error { kind: Kind::Invalid, wait: None, message, ..error }
    }

    fn put_whole(&self, op: Action, name: &str, payload: PutPayload) -> Result<()> {
        let path = self.path(op, name)?;
        let options = PutOptions { attributes: self.bucket.attributes.clone(), ..PutOptions::default() };
        let range = 0..payload.content_length() as u64;
        self.moved(op, name, range, self.client().put_opts(&path, payload, options))?
            .map(|_| ())
            .map_err(|(error, _)| error)
    }

    fn head(&self, op: Action, name: &str) -> Result<GetResult> {
        let path = self.path(op, name)?;
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.answered(op, name, self.client().get_opts(&path, options))? {
            // Such an answer has no body that says why, or that it is the service's.
            Err((error, answer))
                if matches!(answer.status, Some(StatusCode::BAD_REQUEST | StatusCode::FORBIDDEN))
                    || (answer.status == Some(StatusCode::NOT_FOUND) && error.kind == Kind::Unavailable) =>
            {
                let options = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
                self.call(op, name, self.client().get_opts(&path, options))
            }
            done => done.map_err(|(error, _)| error),
        }
    }

    /// Returns an object's metadata, and its first bytes.
    fn beginning(&self, name: &str, path: &Path, bytes: u64) -> Result<(ObjectMeta, Vec<u8>)> {
        // Each answer may be another version.
        let mut heads = [Vec::new(), Vec::new()];
        let take = |number: usize, _, piece: &[u8]| heads[number].extend_from_slice(piece);
        // Services count in signed numbers.
        let range = 0..bytes.min(i64::MAX as u64);
        match self.fetch(Action::Open, name, path, range, GetOptions::default(), take)? {
            Ok(found) => {
                let nothing = || self.fail(Kind::Unavailable, Action::Open, name, "the service answered nothing");
                Ok((found.meta.ok_or_else(nothing)?, std::mem::take(&mut heads[found.number])))
            }
            // Of an empty object there is no range.
            Err((_, answer)) if answer.status == Some(StatusCode::RANGE_NOT_SATISFIABLE) => {
                Ok((self.head(Action::Open, name)?.meta, Vec::new()))
            }
            Err((error, _)) => Err(error),
        }
    }

    fn delete(&self, op: Action, name: &str) -> Result<()> {
        let path = self.path(op, name)?;
        let one = stream::iter([Ok(path)]).boxed();
        self.call(op, name, delete_each(self.client(), one))
    }
}

/// Longest name of an object that all services allow, prefix included, in bytes.
const KEY_BYTES_MAX: usize = 1024;

impl Store for RemoteStore {
    fn url(&self) -> &str {
        &self.place.url
    }

    /// Returns needs that suit the services: parts and requests so long that latency does not matter.
    fn needs(&self) -> Needs {
        let in_flight = self.shared.remote.reads_max;
        Needs {
            pieces: Pieces::Parts(self.shared.remote.parts),
            reads: ReadNeeds { gap_bytes: MIB, request_bytes: REQUEST_BYTES, in_flight },
            refuses_taken_names: false,
            lists_are_current: true,
        }
    }

    fn can_publish(&self) -> Result<()> {
        let Some(name) = &self.place.bucket.untrusted else { return Ok(()) };
        let trusted = || self.shared.remote.trusted.lock().unwrap_or_else(PoisonError::into_inner);
        if !trusted().contains(name) {
            self.race()?;
            trusted().insert(name.clone());
        }
        Ok(())
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        let (path, parts) = (self.place.path(Action::Create, name)?, self.shared.remote.parts);
        if bytes > parts.object_bytes_max() {
            let message = format!("expected an object of at most {} bytes, found {bytes}", parts.object_bytes_max());
            return Err(self.place.fail(Kind::Exhausted, Action::Create, name, message));
        }
        let part_bytes = parts.of(bytes);
        let upload = match bytes <= part_bytes {
            true => None,
            false => {
                let attributes = self.place.bucket.attributes.clone();
                let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
                let begin = || self.place.client().create_multipart_opts(&path, options.clone());
                Some(self.place.call_twice(Action::Create, name, begin)?)
            }
        };
        let parts = Mutex::new(vec![None; bytes.div_ceil(part_bytes).max(1) as usize]);
        let (place, name) = (Arc::clone(&self.place), name.to_owned());
        Ok(Box::new(RemoteWriter { place, name, path, bytes, part_bytes, upload, parts, is_finished: false }))
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let place = &self.place;
        let path = place.path(Action::Open, name)?;
        let (meta, head) = match head_bytes {
            0 => (place.head(Action::Open, name)?.meta, Vec::new()),
            _ => place.beginning(name, &path, head_bytes)?,
        };
        let expected = meta.size.min(head_bytes);
        if head.len() as u64 != expected {
            let message = format!("expected the first {expected} bytes, found {}", head.len());
            return Err(place.fail(Kind::Unavailable, Action::Open, name, message));
        }
        let (place, name) = (Arc::clone(place), name.to_owned());
        let (etag, version) = (meta.e_tag, meta.version);
        Ok((Box::new(RemoteReader { place, name, path, bytes: meta.size, etag, version }), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        Ok(self.place.head(Action::Open, name)?.meta.size)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.place.put_whole(Action::Put, name, Bytes::copy_from_slice(bytes).into())
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (place, op) = (&self.place, Action::Publish);
        let (path, token) = (place.path(op, name)?, self.token(name)?);
        let key = Attribute::Metadata(TOKEN.into());
        let mut attributes = place.bucket.attributes.clone();
        attributes.insert(key.clone(), token.clone().into());
        let options = PutOptions { mode: PutMode::Create, attributes, ..PutOptions::default() };
        let payload = Bytes::copy_from_slice(bytes).into();
        let range = 0..bytes.len() as u64;
        let answered = place.moved(op, name, range, place.client().put_opts(&path, payload, options))?;
        let (error, may_come) = match answered {
            Ok(_) => (place.fail(Kind::Unavailable, op, name, "the service answered that it is there"), true),
            // Credentials are missing: nothing was sent.
            Err((error, answer)) if answer.host.is_empty() => return Err(error),
            Err((error, answer)) => {
                let may_come = is_refused(&answer) || error.kind == Kind::Unavailable;
                (error, may_come)
            }
        };
        // Any answer may follow our own success: one that was lost, one that a proxy gave instead, a repetition that
        // found the object. And one of success may be a proxy's, too. The token decides.
        let mut pauses = LOOKS_MS.iter();
        let looked = loop {
            match (place.head(op, name), pauses.next()) {
                (Err(again), Some(&ms)) if again.kind == Kind::Unavailable => {
                    std::thread::sleep(Duration::from_millis(ms));
                }
                (looked, _) => break looked,
            }
        };
        let unsure = |why: String| {
            self.doubtful().insert(name.to_owned(), token.clone());
            let message = format!("{why}; the object may have been published: check for it before retrying");
            let wait = error.wait.or(Some(Duration::ZERO));
            Err(Error { wait, ..place.fail(Kind::Unavailable, op, name, message) })
        };
        match looked {
            Ok(found) if found.attributes.get(&key).is_some_and(|found| **found == *token) => Ok(()),
            Ok(_) => Err(place.fail(Kind::Conflict, op, name, "the name is taken")),
            Err(absent) if absent.kind == Kind::NotFound && !may_come => Err(error),
            Err(absent) if absent.kind == Kind::NotFound => unsure(error.message.clone()),
            Err(unseen) => unsure(format!("{}, and it cannot be looked for: {}", error.message, unseen.message)),
        }
    }

    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()> {
        match self.location() {
            Some(here) => self.copy_within(&here, from, name, bytes),
            None => Err(self.place.fail(Kind::Unsupported, Action::Copy, name, crate::NO_SECOND_NAME)),
        }
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        self.place.sending.write_all(writes, &|write| match write.object.storage().downcast_ref::<RemoteWriter>() {
            Some(object) => object.send(write),
            None => write.make().map_err(|error| Box::new((write, error))),
        })
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| name::check(Action::Sync.word(), &self.place.url, name))
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        self.place.list(dir)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.place.delete(Action::Delete, name)
    }

    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        // Directories come and go with their objects.
        dirs.iter().try_for_each(|dir| name::check(Action::Delete.word(), &self.place.url, dir))?;
        let paths: Vec<Path> =
            objects.iter().map(|name| self.place.path(Action::Delete, name)).collect::<Result<_>>()?;
        let all = stream::iter(paths.into_iter().map(Ok)).boxed();
        let name = objects.first().copied().unwrap_or_default();
        self.place.call(Action::Delete, name, delete_each(self.place.client(), all))
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        self.place.delete_tree(dir)
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn service(&self) -> Option<&dyn Service> {
        Some(self)
    }
}

impl Service for RemoteStore {
    fn kept_crc64(&self, name: &str) -> Result<Option<u64>> {
        let (place, op) = (&self.place, Action::Checksum);
        let path = place.path(op, name)?;
        match &place.bucket.extra_api {
            Some(extra_api) => place.call_twice(op, name, || extra_api.kept_crc64(&path)),
            None => Err(place.fail(Kind::Unsupported, op, name, crate::NO_KEPT_CRC)),
        }
    }

    fn location(&self) -> Option<Location> {
        let (service, bucket) = self.place.bucket.extra_api.as_ref()?.place();
        Some(Location { service, bucket, prefix: self.place.prefix.clone() })
    }

    fn copy_within(&self, from: &Location, source: &str, name: &str, bytes: u64) -> Result<()> {
        let (place, op) = (&self.place, Action::Copy);
        let path = place.path(op, name)?;
        let is_near = self.location().is_some_and(|here| here.service == from.service);
        let Some(extra_api) = place.bucket.extra_api.as_ref().filter(|_| is_near) else {
            return Err(place.fail(Kind::Unsupported, op, name, crate::NO_COPY));
        };
        let source = format!("{}/{}{source}", from.bucket, from.prefix);
        let attributes = place.bucket.attributes.clone();
        if bytes <= COPIED_BYTES {
            return place.call(op, name, extra_api.copy(&source, &path, &attributes));
        }
        let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
        let upload = place.call(op, name, place.client().create_multipart_opts(&path, options))?;
        let parts = (0..bytes).step_by(COPIED_BYTES as usize).map(|start| start..bytes.min(start + COPIED_BYTES));
        let copies =
            (0..).zip(parts).map(|(number, range)| extra_api.copy_part(&source, &path, &upload, number, range));
        let copies = stream::iter(copies).buffered(COPIES_AT_A_TIME).try_collect::<Vec<PartId>>();
        let complete = |parts| place.call(op, name, place.client().complete_multipart(&path, &upload, parts));
        let done = place.call(op, name, copies).and_then(complete);
        if done.is_err() {
            // What stays of it goes with the next sweep.
            let _ = place.call(Action::Abort, name, place.client().abort_multipart(&path, &upload));
        }
        done.map(|_| ())
    }

    fn uploads(&self) -> Result<Vec<Upload>> {
        self.place.uploads()
    }

    fn abort_upload(&self, upload: &Upload) -> Result<()> {
        let path = self.place.path(Action::Abort, &upload.name)?;
        match self.place.call(Action::Abort, &upload.name, self.place.client().abort_multipart(&path, &upload.id)) {
            Err(error) if error.kind == Kind::NotFound => Ok(()),
            done => done,
        }
    }

    fn quota(&self) -> Option<Quota> {
        None
    }
}

/// Deletes these objects, as far as they exist, many in one request if the service can.
async fn delete_each(
    client: &dyn Client,
    paths: BoxStream<'static, object_store::Result<Path>>,
) -> object_store::Result<()> {
    let mut deleted = client.delete_stream(paths);
    while let Some(deleted) = deleted.next().await {
        match deleted {
            Ok(_) | Err(ClientError::NotFound { .. }) => {}
            // For one of many, the client library has the status in its text only.
            Err(error) if error.to_string().ends_with("(code: 404)") => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
