//! Provides the HTTP client of remote stores: one small runtime and one pool of connections, made with the first.
//!
//! Every request passes through [`Connections`], the only place that knows the HTTP library. There it is counted, and
//! aborted when nothing has moved for [`STILL_MAX`], or when its answer is too slow or does not end. The client library
//! above repeats nothing: the engine decides whether to retry.

#[cfg(feature = "hdfs")]
use std::any::Any;
#[cfg(feature = "hdfs")]
use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Sleep, sleep, timeout};

use super::carried::Carried;
use super::flow::MOST;
use super::list::{Lists, is_list};
use super::{PARTS, READS_MAX};
use crate::{Error, Kind, Parts, Requests, Result};

/// Time without progress after which a request is aborted: its connection is gone.
const STILL_MAX: Duration = Duration::from_secs(30);

/// Minimum bytes of an answer in that time: fewer come from a proxy that sends single bytes to keep a connection open.
const SLOW_BYTES: u64 = 1 << 10;

/// Factor of that time for requests that change something: S3 sends spaces while it joins the parts of an object.
const CHANGES_TAKE: u32 = 20;

/// Longest answer beyond the bytes of an object that were asked for: a page of a list has a few MiB.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Total of such bytes in all answers of one call: the pages of a list of millions of objects.
const CALL_BYTES_MAX: u64 = 1 << 30;

/// Time limit for opening a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Time for which bodies are held back after the last one has begun.
const HELD_FOR: Duration = Duration::from_millis(300);

/// Number of threads that move bytes. The calls' own threads wait for them.
const THREADS: usize = 2;

/// Number of idle connections that are kept for each server.
const IDLE_MAX: usize = 32;

/// State for remote storage that the stores of one engine share; empty until the first of them is opened.
pub(crate) struct Pool {
    network: OnceLock<std::result::Result<Arc<Network>, String>>,
    /// Endpoints and buckets that passed the test of creating if absent.
    pub(super) trusted: Mutex<HashSet<String>>,
    /// Time without progress: [`STILL_MAX`]; less in tests.
    still_max: Duration,
    /// Lengths of objects' parts; shorter in simulations.
    pub(super) parts: Parts,
    /// Maximum of small requests and reads at a time; one in simulations.
    pub(super) reads_max: usize,
    /// Maximum of parts sent at a time; fewer in simulations.
    pub(super) sends_max: usize,
    /// Simulated service that answers instead of a connection.
    #[cfg(feature = "testing")]
    simulated: Option<Arc<dyn HttpService>>,
}

impl Default for Pool {
    fn default() -> Pool {
        Pool {
            network: OnceLock::new(),
            trusted: Mutex::default(),
            still_max: STILL_MAX,
            parts: PARTS,
            reads_max: READS_MAX,
            sends_max: MOST,
            #[cfg(feature = "testing")]
            simulated: None,
        }
    }
}

impl Pool {
    /// Makes a pool that aborts a request without progress after `still_max`.
    #[cfg(feature = "testing")]
    pub(crate) fn impatient(still_max: Duration) -> Pool {
        Pool { still_max, ..Pool::default() }
    }

    /// Makes a pool whose requests all go to a simulated service.
    #[cfg(all(feature = "testing", feature = "s3"))]
    pub(crate) fn simulated(service: Arc<dyn HttpService>) -> Pool {
        Pool { simulated: Some(service), ..Pool::default() }
    }

    /// Returns the same pool, with these parts of objects, and these maximum numbers of reads and small requests and of
    /// parts sent at a time.
    #[cfg(all(feature = "testing", feature = "s3"))]
    pub(crate) fn with(self, parts: Parts, reads_max: usize, sends_max: usize) -> Pool {
        Pool { parts, reads_max, sends_max, ..self }
    }

    /// Returns the network; the first call makes it.
    pub(crate) fn network(&self, url: &str) -> Result<Arc<Network>> {
        let made = self.network.get_or_init(|| Network::new(self).map(Arc::new));
        made.clone().map_err(|why| Error::new(Kind::Exhausted, "open", url, format!("no client can be made: {why}")))
    }
}

/// A runtime and a pool of connections.
pub(crate) struct Network {
    /// Runtime, until it is dropped.
    runtime: Option<Runtime>,
    http: HttpClient,
    /// Client that goes through no proxy, made when it is first needed.
    #[cfg(feature = "hdfs")]
    direct: OnceLock<HttpClient>,
    #[cfg(feature = "hdfs")]
    still_max: Duration,
    /// Clients of other libraries, by place and settings: each keeps its connections for as long as the process lives.
    #[cfg(feature = "hdfs")]
    clients: Mutex<HashMap<String, Box<dyn Any + Send + Sync>>>,
    /// Process that has the runtime's threads.
    process: u32,
}

/// Last answer of the service in a call.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    /// Status of the answer, if there was one.
    pub(super) status: Option<StatusCode>,
    /// Time that the service asks to wait.
    pub(super) wait: Option<Duration>,
    /// `true` if the answer has a header that the services give each of their answers, and proxies do not.
    pub(super) is_of_service: bool,
    /// `true` if the request was one whose answers have no body.
    pub(super) is_head: bool,
    /// Host that was asked.
    pub(super) host: String,
    /// Requests of the call so far.
    pub(super) requests: Requests,
    /// Bytes of the call's answers so far, except those of objects that were asked for.
    pub(super) received: u64,
    /// Secret values of the requests, which no error may repeat.
    pub(super) carried: Carried,
}

/// Headers with the id of a request, in answers of S3, Azure and GCS.
const OF_SERVICES: [&str; 3] = ["x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid"];

impl Answer {
    fn take(&mut self, status: StatusCode, headers: &HeaderMap) {
        self.status = Some(status);
        self.wait = headers.get(RETRY_AFTER).and_then(wait_of);
        self.is_of_service = OF_SERVICES.iter().any(|name| headers.contains_key(*name));
    }
}

tokio::task_local! {
    /// Answer of the call that this task makes.
    static ANSWER: Arc<Mutex<Answer>>;
    /// Barrier that holds back the rest of the bodies of this task's requests.
    static HELD: Arc<Held>;
}

/// A barrier for bodies: all but the first frame is held back until `expected` requests have sent that.
pub(super) struct Held {
    expected: usize,
    arrived: AtomicUsize,
    go: Semaphore,
}

impl Held {
    pub(super) fn new(expected: usize) -> Arc<Held> {
        Arc::new(Held { expected, arrived: AtomicUsize::new(0), go: Semaphore::new(0) })
    }

    /// Runs a call whose request waits for the others after the first frame of its body, as long as none has ended.
    pub(super) async fn call<T>(self: Arc<Held>, call: impl Future<Output = T>) -> T {
        let done = HELD.scope(Arc::clone(&self), call).await;
        // A call that ends before it has begun would be waited for in vain.
        self.go.add_permits(self.expected);
        done
    }

    async fn wait(self: Arc<Held>) {
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.expected {
            // The beginnings are on their way: the server sees all of them before any end.
            sleep(HELD_FOR).await;
            self.go.add_permits(self.expected);
        }
        // It is never closed.
        let _ = self.go.acquire().await.map(SemaphorePermit::forget);
    }
}

impl Network {
    fn new(pool: &Pool) -> std::result::Result<Network, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("shardfast-net")
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| format!("no thread: {error}"))?;
        #[cfg(feature = "testing")]
        let simulated = pool.simulated.clone().map(|service| HttpClient::new(Simulated(service)));
        #[cfg(not(feature = "testing"))]
        let simulated = None;
        let connections = || Connections::new(pool.still_max, reqwest::Client::builder()).map(HttpClient::new);
        let http = simulated.map_or_else(connections, Ok)?;
        let http = HttpClient::new(Lists(http));
        Ok(Network {
            runtime: Some(runtime),
            http,
            #[cfg(feature = "hdfs")]
            clients: Mutex::default(),
            #[cfg(feature = "hdfs")]
            direct: OnceLock::new(),
            #[cfg(feature = "hdfs")]
            still_max: pool.still_max,
            process: std::process::id(),
        })
    }

    /// Returns the client library's way to this HTTP client.
    pub(crate) fn connector(&self) -> Connector {
        Connector(self.http.clone())
    }

    /// Returns an HTTP client that goes through no proxy: what the environment names is for places outside.
    ///
    /// # Errors
    /// As for the other one.
    #[cfg(feature = "hdfs")]
    pub(crate) fn direct(&self) -> std::result::Result<HttpClient, String> {
        if let Some(direct) = self.direct.get() {
            return Ok(direct.clone());
        }
        let direct = Connections::new(self.still_max, reqwest::Client::builder().no_proxy()).map(HttpClient::new)?;
        Ok(self.direct.get_or_init(|| direct).clone())
    }

    /// Runs a call of the client library on this thread; returns its outcome, and the service's last answer.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] in a process that was forked from the one that made this.
    pub(super) fn run<T>(&self, url: &str, call: impl Future<Output = T>) -> Result<(T, Answer)> {
        Ok(self.runtime(url)?.block_on(answered(call)))
    }

    /// Runs a call of another client library on this thread.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[cfg(feature = "hdfs")]
    pub(crate) fn wait<T>(&self, url: &str, call: impl Future<Output = T>) -> Result<T> {
        Ok(self.runtime(url)?.block_on(call))
    }

    /// Returns a client of another library, made by the first call with this key.
    ///
    /// # Errors
    /// The maker's error.
    #[cfg(feature = "hdfs")]
    pub(crate) fn client<T: Any + Clone + Send + Sync>(
        &self,
        key: &str,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = clients.get(key).and_then(|known| known.downcast_ref::<T>()) {
            return Ok(known.clone());
        }
        let made = make()?;
        clients.insert(key.to_owned(), Box::new(made.clone()));
        Ok(made)
    }

    fn runtime(&self, url: &str) -> Result<&Runtime> {
        self.runtime.as_ref().filter(|_| std::process::id() == self.process).ok_or_else(|| {
            let what = "opened before this process was forked, which has none of its threads: open it again here";
            Error::new(Kind::Unsupported, "request", url, what)
        })
    }

    /// Returns the runtime, for a client library that has its own connections.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[cfg(feature = "hdfs")]
    pub(crate) fn handle(&self, url: &str) -> Result<tokio::runtime::Handle> {
        Ok(self.runtime(url)?.handle().clone())
    }
}

/// Runs a call, recording the service's answers in `answer`.
pub(super) fn noting<T>(answer: Arc<Mutex<Answer>>, call: impl Future<Output = T>) -> impl Future<Output = T> {
    ANSWER.scope(answer, call)
}

/// Returns the outcome of a call, and the service's last answer in it.
pub(super) async fn answered<T>(call: impl Future<Output = T>) -> (T, Answer) {
    let answer = Arc::new(Mutex::new(Answer::default()));
    let done = ANSWER.scope(Arc::clone(&answer), call).await;
    let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (done, answer)
}

impl Drop for Network {
    fn drop(&mut self) {
        match self.runtime.take() {
            Some(runtime) if std::process::id() == self.process => runtime.shutdown_background(),
            // In a forked child there is no thread to end.
            runtime => std::mem::forget(runtime),
        }
    }
}

/// Configures TLS by ring, with the certificates that this machine trusts.
fn trust() -> std::result::Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// Returns whether the HTTP library accepts this URL.
pub(super) fn is_url(text: &str) -> bool {
    reqwest::Url::parse(text).is_ok()
}

/// Connector that gives the client library this HTTP client.
#[derive(Clone, Debug)]
pub(crate) struct Connector(HttpClient);

impl Connector {
    /// Returns the HTTP client itself.
    #[cfg(any(feature = "gcs", feature = "hdfs", feature = "s3"))]
    pub(crate) fn client(&self) -> HttpClient {
        self.0.clone()
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}

/// Connections to all services.
struct Connections {
    client: reqwest::Client,
    still_max: Duration,
}

impl Connections {
    fn new(still_max: Duration, builder: reqwest::ClientBuilder) -> std::result::Result<Connections, String> {
        let client = builder
            .tls_backend_preconfigured(trust()?)
            .connect_timeout(CONNECT_MAX)
            .pool_max_idle_per_host(IDLE_MAX)
            .redirect(reqwest::redirect::Policy::none())
            .http1_only()
            .tcp_nodelay(true)
            .user_agent(concat!("shardfast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Connections { client, still_max })
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connections")
    }
}

/// Simulated service that answers instead of connections.
#[cfg(feature = "testing")]
#[derive(Debug)]
struct Simulated(Arc<dyn HttpService>);

#[cfg(feature = "testing")]
#[async_trait::async_trait]
impl HttpService for Simulated {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        asked(&request);
        let response = self.0.call(request).await?;
        note(|answer| answer.take(response.status(), response.headers()));
        Ok(response)
    }
}

/// Counts a request of this task's call, and records the secret values it carries.
fn asked(request: &HttpRequest) {
    note(|answer| {
        let (mut requests, mut carried) = (answer.requests, std::mem::take(&mut answer.carried));
        count(&mut requests, request.method(), request.uri().query().unwrap_or_default());
        carried.add(request);
        let host = request.uri().host().unwrap_or_default().to_owned();
        let (is_head, received) = (*request.method() == Method::HEAD, answer.received);
        *answer = Answer { host, requests, is_head, received, carried, ..Answer::default() };
    });
}

#[async_trait::async_trait]
impl HttpService for Connections {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        asked(&request);
        let (parts, body) = request.into_parts();
        let slow_max = self.still_max * if parts.method == Method::GET { 1 } else { CHANGES_TAKE };
        let expected = parts.headers.get(RANGE).and_then(range_bytes).unwrap_or(0);
        let url = parts.uri.to_string().parse().map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let mut request = reqwest::Request::new(parts.method, url);
        *request.headers_mut() = parts.headers;
        let moved = Arc::new(AtomicU64::new(0));
        if body.content_length() > 0 {
            let held = HELD.try_with(Arc::clone).ok().map(|held| Box::pin(held.wait()) as Wait);
            let body = Sent { body, moved: Arc::clone(&moved), has_begun: false, held };
            *request.body_mut() = Some(reqwest::Body::wrap(body));
        }
        let response = while_it_moves(&moved, self.still_max, self.client.execute(request)).await?.map_err(failed)?;
        note(|answer| answer.take(response.status(), response.headers()));
        let response: http::Response<reqwest::Body> = response.into();
        let (parts, body) = response.into_parts();
        let (still, slow) = (Box::pin(sleep(self.still_max)), Box::pin(sleep(slow_max)));
        let still_max = self.still_max;
        let body = Received { body, still, slow, still_max, slow_max, received: 0, before: 0, expected };
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// Returns the number of bytes in `bytes=<first>-<last>`.
fn range_bytes(header: &HeaderValue) -> Option<u64> {
    let (first, last) = header.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
}

/// Returns the time that a service asks to wait, in whole seconds; the largest value for a number beyond the type.
fn wait_of(header: &HeaderValue) -> Option<Duration> {
    let text = header.to_str().ok()?.trim();
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Duration::from_secs(text.parse().unwrap_or(u64::MAX)))
}

/// Counts a request by its kind.
fn count(requests: &mut Requests, method: &Method, query: &str) {
    let deletes_many = query.split('&').any(|part| part == "delete" || part == "comp=batch");
    match *method {
        Method::GET if is_list(method, query) => requests.lists += 1,
        Method::GET => requests.gets += 1,
        Method::HEAD => requests.heads += 1,
        Method::DELETE => requests.deletes += 1,
        _ if deletes_many => requests.deletes += 1,
        _ => requests.puts += 1,
    }
}

fn note(change: impl FnOnce(&mut Answer)) {
    // A request outside of a call of ours is not recorded.
    let _ = ANSWER.try_with(|answer| change(&mut answer.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Failure of a request without progress.
#[derive(Debug, thiserror::Error)]
#[error("nothing moved for {} s", .0.as_secs_f32())]
struct Still(Duration);

/// Failure of an answer that was too slow.
#[derive(Debug, thiserror::Error)]
#[error("only {0} bytes of the answer came in {1} s")]
struct Slow(u64, f32);

/// Failure of an answer that is longer than any that was asked for.
#[derive(Debug, thiserror::Error)]
#[error("the answer has more than {0} bytes, and does not end")]
struct Endless(u64);

/// Waits for a request as long as it moves bytes.
async fn while_it_moves<T>(
    moved: &AtomicU64,
    still_max: Duration,
    request: impl Future<Output = T>,
) -> std::result::Result<T, HttpError> {
    let mut request = pin!(request);
    loop {
        let before = moved.load(Ordering::Relaxed);
        match timeout(still_max, &mut request).await {
            Ok(done) => return Ok(done),
            Err(_) if moved.load(Ordering::Relaxed) == before => {
                return Err(HttpError::new(HttpErrorKind::Timeout, Still(still_max)));
            }
            Err(_) => {}
        }
    }
}

/// Returns the client's error without the URL, which may contain a signature.
fn failed(error: reqwest::Error) -> HttpError {
    let kind = match () {
        () if error.is_timeout() => HttpErrorKind::Timeout,
        () if error.is_connect() => HttpErrorKind::Connect,
        () if error.is_decode() => HttpErrorKind::Decode,
        () => HttpErrorKind::Interrupted,
    };
    HttpError::new(kind, error.without_url())
}

/// Body of a request, which counts the bytes that the connection takes.
struct Sent {
    body: HttpRequestBody,
    moved: Arc<AtomicU64>,
    has_begun: bool,
    /// Barrier to wait for after the first frame.
    held: Option<Wait>,
}

type Wait = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

impl Body for Sent {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, HttpError>>> {
        self.moved.fetch_add(1, Ordering::Relaxed);
        if self.has_begun
            && let Some(held) = &mut self.held
        {
            std::task::ready!(held.as_mut().poll(context));
            self.held = None;
        }
        self.has_begun = true;
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Body of an answer, which fails when it has no or little progress for too long, or is too long.
struct Received {
    body: reqwest::Body,
    still: Pin<Box<Sleep>>,
    slow: Pin<Box<Sleep>>,
    still_max: Duration,
    slow_max: Duration,
    received: u64,
    /// Bytes received when `slow` was set.
    before: u64,
    /// Bytes of an object that were asked for.
    expected: u64,
}

impl Received {
    /// Counts bytes that were received.
    fn take(&mut self, bytes: u64) -> std::result::Result<(), HttpError> {
        self.received += bytes;
        let beyond = bytes.min(self.received.saturating_sub(self.expected));
        let mut of_call = 0;
        note(|answer| {
            answer.received += beyond;
            of_call = answer.received;
        });
        match () {
            () if self.received > self.expected + ANSWER_BYTES_MAX => Err(endless(self.received)),
            () if of_call > CALL_BYTES_MAX => Err(endless(of_call)),
            () => Ok(()),
        }
    }
}

fn endless(bytes: u64) -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, Endless(bytes))
}

impl Body for Received {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, HttpError>>> {
        let now = tokio::time::Instant::now();
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let due = now + self.still_max;
            self.still.as_mut().reset(due);
            let Some(frame) = frame else { return Poll::Ready(None) };
            let bytes = frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
            return Poll::Ready(Some(self.take(bytes).and_then(|()| frame.map_err(failed))));
        }
        if self.still.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Timeout, Still(self.still_max)))));
        }
        while self.slow.as_mut().poll(context).is_ready() {
            let bytes = self.received - self.before;
            if bytes < SLOW_BYTES {
                let slow = Slow(bytes, self.slow_max.as_secs_f32());
                return Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Timeout, slow))));
            }
            self.before = self.received;
            let due = now + self.slow_max;
            self.slow.as_mut().reset(due);
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
