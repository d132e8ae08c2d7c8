//! Simulates a service with S3's protocol, below the real client: only the connections are replaced. Its objects are in
//! this process's memory, no time passes, and a function injects a fault into each request.
//!
//! It implements what the store asks of S3: objects and ranges of them, conditions, checksums, multipart uploads, pages
//! of lists, deletion of many, and the credentials of an instance. All other requests are answered with 501.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::{Bound, Range};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::{HeaderMap, Method, Response, StatusCode};
use http_body::{Body, Frame};
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService};

/// Entries of a page of a list: few, so that lists have pages.
const PAGE: usize = 5;

/// Failure of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no connection.
    Refused,
    /// The service answers with this status, without effect.
    Answered(u16),
    /// Nothing moves, with the request carried out or not.
    Silent(bool),
    /// The request is carried out, and its answer is lost.
    Lost,
    /// The request is carried out, and the body of the answer breaks off in its middle.
    Cut,
    /// A bit of the request's body flips on the way.
    RequestTurned,
    /// A bit of an object flips on the way back.
    ObjectTurned,
}

/// Function that returns the fault of a request, by its number.
type Weather = dyn Fn(u64) -> Option<Fault> + Send + Sync;

/// Function between one client and the service: it sees each request before it is carried out.
type Way = dyn Fn(&Ask<'_>) -> Option<Fault> + Send + Sync;

/// The service, or one client's connection to it; clones are the same one.
#[derive(Clone)]
pub struct SimS3 {
    state: Arc<Mutex<State>>,
    way: Option<Arc<Way>>,
}

impl std::fmt::Debug for SimS3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimS3")
    }
}

#[derive(Clone)]
struct State {
    /// Objects by bucket and name.
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    /// Last number that was given to an object or an upload.
    number: u64,
    requests: u64,
    weather: Arc<Weather>,
}

#[derive(Clone)]
struct Object {
    bytes: Bytes,
    etag: String,
    metadata: Vec<(String, String)>,
    modified: DateTime<Utc>,
}

#[derive(Clone)]
struct Upload {
    name: String,
    parts: BTreeMap<u32, (Bytes, String)>,
    begun: DateTime<Utc>,
}

impl Default for SimS3 {
    fn default() -> SimS3 {
        SimS3::of(State {
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
            number: 0,
            requests: 0,
            weather: Arc::new(|_| None),
        })
    }
}

impl SimS3 {
    fn of(state: State) -> SimS3 {
        SimS3 { state: Arc::new(Mutex::new(state)), way: None }
    }

    /// Returns the same service as one client reaches it: `way` sees each of its requests before it is carried out, and
    /// returns the fault, if any.
    pub fn behind(&self, way: impl Fn(&Ask<'_>) -> Option<Fault> + Send + Sync + 'static) -> SimS3 {
        SimS3 { state: Arc::clone(&self.state), way: Some(Arc::new(way)) }
    }

    /// Copies the service with all that it holds now, incomplete uploads included. It loses nothing: everything that
    /// the service has confirmed is durable.
    pub fn snapshot(&self) -> SimS3 {
        SimS3::of(self.lock().clone())
    }

    /// Returns the objects whose names begin with `beginning`, as `bucket/name`.
    pub fn objects(&self, beginning: &str) -> Vec<String> {
        let state = self.lock();
        let from = state.objects.range::<str, _>((Bound::Included(beginning), Bound::Unbounded));
        from.map(|(name, _)| name.clone()).take_while(|name| name.starts_with(beginning)).collect()
    }

    /// Lets another program replace the object `bucket/name`, if it exists, by applying `change` to its bytes.
    pub fn replace(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.lock();
        let etag = state.etag();
        if let Some(object) = state.objects.get_mut(name) {
            let mut bytes = object.bytes.to_vec();
            change(&mut bytes);
            (object.bytes, object.etag) = (bytes.into(), etag);
        }
    }

    /// Lets another program remove the objects and abort the uploads that `is_removed` selects, by `bucket/name`.
    pub fn remove(&self, is_removed: impl Fn(&str) -> bool) {
        let mut state = self.lock();
        state.objects.retain(|name, _| !is_removed(name));
        state.uploads.retain(|_, upload| !is_removed(&upload.name));
    }

    /// Injects these faults from now on into requests, which are counted from 0 again.
    pub fn weather(&self, weather: impl Fn(u64) -> Option<Fault> + Send + Sync + 'static) {
        let mut state = self.lock();
        (state.weather, state.requests) = (Arc::new(weather), 0);
    }

    /// Returns the requests since the last change of the weather.
    pub fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// Returns the uploads that are begun and neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        self.lock().uploads.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait::async_trait]
impl HttpService for SimS3 {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, mut body) = request.into_parts();
        let mut bytes = Vec::new();
        while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            bytes.extend_from_slice(&frame?.into_data().unwrap_or_default());
        }
        let ask = Ask::new(&parts.method, &parts.uri, &parts.headers, bytes.into());
        let fault = self.way.as_ref().and_then(|way| way(&ask)).or_else(|| {
            let (number, weather) = self.lock().counted();
            weather(number)
        });
        let lost = |kind| Err(HttpError::new(kind, Gone));
        match fault {
            Some(Fault::Refused) => return lost(HttpErrorKind::Connect),
            Some(Fault::Silent(false)) => return lost(HttpErrorKind::Timeout),
            Some(Fault::Answered(status)) => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                let code = match status.as_u16() {
                    403 => "AccessDenied",
                    503 => "SlowDown",
                    507 => "StorageFull",
                    _ => "InternalError",
                };
                return Ok(refusal(status, code).into_http());
            }
            _ => {}
        }
        let ask = if fault == Some(Fault::RequestTurned) { ask.turned() } else { ask };
        let mut answer = ask.answer(&mut self.lock());
        match fault {
            Some(Fault::Lost) => lost(HttpErrorKind::Interrupted),
            Some(Fault::Silent(true)) => lost(HttpErrorKind::Timeout),
            Some(Fault::Cut) if !answer.body.is_empty() => {
                let half = answer.body.slice(..answer.body.len() / 2);
                let gone = HttpError::new(HttpErrorKind::Interrupted, Gone);
                let body = HttpResponseBody::new(Broken([Some(Err(gone)), Some(Ok(half))]));
                Ok(answer.into_http().map(|_| body))
            }
            Some(Fault::ObjectTurned) if answer.is_object && !answer.body.is_empty() => {
                let mut turned = answer.body.to_vec();
                let middle = turned.len() / 2;
                turned[middle] ^= 1;
                answer.body = turned.into();
                Ok(answer.into_http())
            }
            _ => Ok(answer.into_http()),
        }
    }
}

/// Reason why there is no answer.
#[derive(Debug, thiserror::Error)]
#[error("simulated")]
struct Gone;

/// Rest of a body, the last first.
struct Broken([Option<Result<Bytes, HttpError>>; 2]);

impl Body for Broken {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let next = self.0.iter_mut().rev().find_map(Option::take);
        Poll::Ready(next.map(|next| next.map(Frame::data)))
    }
}

struct Answer {
    status: StatusCode,
    headers: Vec<(&'static str, String)>,
    body: Bytes,
    is_object: bool,
}

impl Answer {
    fn of(status: StatusCode, body: impl Into<Bytes>) -> Answer {
        Answer { status, headers: Vec::new(), body: body.into(), is_object: false }
    }

    fn into_http(self) -> HttpResponse {
        let mut response = Response::builder().status(self.status).header("x-amz-request-id", "1");
        if self.headers.iter().all(|(name, _)| *name != "content-length") {
            response = response.header("content-length", self.body.len());
        }
        for (name, value) in self.headers {
            response = response.header(name, value);
        }
        response.body(self.body.into()).expect("a simulated answer has valid headers")
    }
}

fn refusal(status: StatusCode, code: &str) -> Answer {
    Answer::of(status, format!("<Error><Code>{code}</Code><Message>simulated</Message></Error>"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn decoded(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let hex = |byte: Option<u8>| char::from(byte.unwrap_or(b'0')).to_digit(16).unwrap_or(0) as u8;
        out.push(if byte == b'%' { hex(bytes.next()) << 4 | hex(bytes.next()) } else { byte });
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A request to the service.
pub struct Ask<'a> {
    method: &'a Method,
    host: &'a str,
    /// Bucket and object's name, or the bucket alone.
    name: String,
    query: BTreeMap<String, String>,
    headers: &'a HeaderMap,
    body: Bytes,
}

impl<'a> Ask<'a> {
    fn new(method: &'a Method, uri: &'a http::Uri, headers: &'a HeaderMap, body: Bytes) -> Ask<'a> {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (decoded(name), decoded(value))
        };
        let query = uri.query().unwrap_or_default().split('&').map(pair).collect();
        let name = decoded(uri.path().trim_start_matches('/'));
        Ask { method, host: uri.host().unwrap_or_default(), name, query, headers, body }
    }

    /// Returns the kind of request. A later page of a list is `page`, a request to the service of credentials
    /// `credentials`.
    pub fn what(&self) -> &'static str {
        let is_bucket = !self.name.trim_end_matches('/').contains('/');
        match *self.method {
            _ if self.host == "169.254.169.254" => "credentials",
            Method::GET if self.asks("list-type").is_some() => match self.asks("continuation-token") {
                Some(_) => "page",
                None => "list",
            },
            Method::GET if self.asks("uploads").is_some() => "list uploads",
            Method::GET if !is_bucket => "get",
            Method::HEAD if !is_bucket => "head",
            Method::PUT if self.header("x-amz-copy-source").is_some() || is_bucket => "",
            Method::PUT => match (self.asks("partNumber"), self.header("if-none-match")) {
                (Some("1"), _) => "part 1",
                (Some("2"), _) => "part 2",
                (Some(_), _) => "later part",
                (None, Some("*")) => "create",
                (None, _) => "put",
            },
            Method::POST if self.asks("uploads").is_some() => "begin",
            Method::POST if self.asks("uploadId").is_some() => "complete",
            Method::POST if self.asks("delete").is_some() => "delete many",
            Method::DELETE if self.asks("uploadId").is_some() => "abort",
            Method::DELETE => "delete",
            _ => "",
        }
    }

    /// Returns the target: `bucket/name`, the prefix of a list, or the first of many objects.
    pub fn name(&self) -> String {
        let bucket = self.name.trim_end_matches('/');
        match self.what() {
            "list" | "page" | "list uploads" => format!("{bucket}/{}", self.asks("prefix").unwrap_or_default()),
            "delete many" => format!("{bucket}/{}", self.keys().first().map_or("", String::as_str)),
            _ => self.name.clone(),
        }
    }

    /// Carries the request out, and drops the answer.
    pub fn carry_out(&self, service: &SimS3) {
        self.answer(&mut service.lock());
    }

    /// Returns the request with a bit of its body flipped.
    fn turned(self) -> Ask<'a> {
        let mut bytes = self.body.to_vec();
        let middle = bytes.len() / 2;
        bytes.get_mut(middle).into_iter().for_each(|byte| *byte ^= 1);
        Ask { body: bytes.into(), ..self }
    }

    /// Returns the keys of many objects that are to be deleted.
    fn keys(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.body);
        let keys = text.split("<Key>").skip(1).filter_map(|rest| Some(rest.split_once("</Key>")?.0));
        let plain = |key: &str| key.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
        keys.map(|key| plain(key).replace("&apos;", "'").replace("&amp;", "&")).collect()
    }

    fn asks(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn answer(&self, state: &mut State) -> Answer {
        match self.what() {
            "credentials" => self.credentials(),
            "list" | "page" => self.list(state),
            "list uploads" => self.list_uploads(state),
            "get" | "head" => self.get(state),
            "part 1" | "part 2" | "later part" | "create" | "put" => self.put(state),
            "begin" => self.begin(state),
            "complete" => self.complete(state),
            "delete many" => self.delete_many(state),
            "abort" => match self.upload(state) {
                Some(id) => {
                    state.uploads.remove(&id);
                    Answer::of(StatusCode::NO_CONTENT, "")
                }
                None => refusal(StatusCode::NOT_FOUND, "NoSuchUpload"),
            },
            "delete" => {
                state.objects.remove(&self.name);
                Answer::of(StatusCode::NO_CONTENT, "")
            }
            _ => refusal(StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
        }
    }

    /// Answers with the credentials of the role of an instance.
    fn credentials(&self) -> Answer {
        let name = self.name.as_str();
        let keys =
            r#"{"AccessKeyId":"key","SecretAccessKey":"secret","Token":"token","Expiration":"2100-01-01T00:00:00Z"}"#;
        let said = if name.ends_with("token") {
            "token"
        } else if name.ends_with('/') {
            "role"
        } else {
            keys
        };
        Answer::of(StatusCode::OK, said)
    }

    /// Returns whether the body has the checksum that its sender gave.
    fn is_proven(&self) -> bool {
        let Some(crc) = self.header("x-amz-checksum-crc64nvme") else { return true };
        let found = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &self.body);
        BASE64_STANDARD.decode(crc).is_ok_and(|crc| crc == found.to_be_bytes())
    }

    /// Returns the upload that the request refers to.
    fn upload(&self, state: &State) -> Option<String> {
        let id = self.asks("uploadId")?;
        state.uploads.get(id).filter(|upload| upload.name == self.name).map(|_| id.to_owned())
    }

    fn put(&self, state: &mut State) -> Answer {
        if !self.is_proven() {
            return refusal(StatusCode::BAD_REQUEST, "XAmzContentChecksumMismatch");
        }
        let etag = state.etag();
        if let Some(number) = self.asks("partNumber") {
            let (Some(id), Ok(number)) = (self.upload(state), number.parse()) else {
                return refusal(StatusCode::NOT_FOUND, "NoSuchUpload");
            };
            let parts = state.uploads.get_mut(&id).map(|upload| &mut upload.parts);
            parts.map(|parts| parts.insert(number, (self.body.clone(), etag.clone())));
            return Answer { headers: vec![("etag", etag)], ..Answer::of(StatusCode::OK, "") };
        }
        if self.header("if-none-match") == Some("*") && state.objects.contains_key(&self.name) {
            return refusal(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let metadata = self.headers.iter().filter_map(|(name, value)| {
            let name = name.as_str().strip_prefix("x-amz-meta-")?;
            Some((format!("x-amz-meta-{name}"), value.to_str().ok()?.to_owned()))
        });
        let object =
            Object { bytes: self.body.clone(), etag: etag.clone(), metadata: metadata.collect(), modified: Utc::now() };
        state.objects.insert(self.name.clone(), object);
        Answer { headers: vec![("etag", etag)], ..Answer::of(StatusCode::OK, "") }
    }

    fn get(&self, state: &State) -> Answer {
        let Some(object) = state.objects.get(&self.name) else { return refusal(StatusCode::NOT_FOUND, "NoSuchKey") };
        if self.header("if-match").is_some_and(|etag| etag != object.etag) {
            return refusal(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let bytes = object.bytes.len() as u64;
        let asked = self.header("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(first.parse::<u64>().ok()?..last.parse::<u64>().ok()? + 1)
        });
        let (status, range): (StatusCode, Range<u64>) = match asked {
            Some(range) if range.start >= bytes => return refusal(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange"),
            Some(range) => (StatusCode::PARTIAL_CONTENT, range.start..range.end.min(bytes)),
            None => (StatusCode::OK, 0..bytes),
        };
        let modified = object.modified.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let mut headers = vec![("etag", object.etag.clone()), ("last-modified", modified)];
        if status == StatusCode::PARTIAL_CONTENT {
            headers.push(("content-range", format!("bytes {}-{}/{bytes}", range.start, range.end - 1)));
        }
        let body = object.bytes.slice(range.start as usize..range.end as usize);
        let mut answer = Answer { status, headers, body, is_object: true };
        for (name, value) in &object.metadata {
            // Only the token's name is asked for.
            if name == "x-amz-meta-shardfasttoken" {
                answer.headers.push(("x-amz-meta-shardfasttoken", value.clone()));
            }
        }
        if *self.method == Method::HEAD {
            answer.headers.push(("content-length", bytes.to_string()));
            answer.body = Bytes::new();
        }
        answer
    }

    fn begin(&self, state: &mut State) -> Answer {
        state.number += 1;
        let id = format!("upload-{}", state.number);
        let upload = Upload { name: self.name.clone(), parts: BTreeMap::new(), begun: Utc::now() };
        state.uploads.insert(id.clone(), upload);
        let said = format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>");
        Answer::of(StatusCode::OK, said)
    }

    fn complete(&self, state: &mut State) -> Answer {
        let Some(id) = self.upload(state) else { return refusal(StatusCode::NOT_FOUND, "NoSuchUpload") };
        let text = String::from_utf8_lossy(&self.body);
        let named: Vec<&str> =
            text.split("<ETag>").skip(1).filter_map(|rest| Some(rest.split_once("</ETag>")?.0)).collect();
        let parts = &state.uploads[&id].parts;
        let fits = named.len() == parts.len()
            && parts.values().zip(&named).all(|((_, etag), named)| named.replace("&quot;", "\"") == *etag);
        if !fits {
            return refusal(StatusCode::BAD_REQUEST, "InvalidPart");
        }
        let bytes: Vec<u8> = parts.values().flat_map(|(bytes, _)| bytes.iter().copied()).collect();
        let (etag, metadata) = (state.etag(), Vec::new());
        state.uploads.remove(&id);
        let object = Object { bytes: bytes.into(), etag: etag.clone(), metadata, modified: Utc::now() };
        state.objects.insert(self.name.clone(), object);
        let etag = escaped(&etag);
        Answer::of(
            StatusCode::OK,
            format!("<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"),
        )
    }

    fn delete_many(&self, state: &mut State) -> Answer {
        let bucket = self.name.trim_end_matches('/');
        let mut said = "<DeleteResult>".to_owned();
        for key in self.keys() {
            state.objects.remove(&format!("{bucket}/{key}"));
            _ = write!(said, "<Deleted><Key>{}</Key></Deleted>", escaped(&key));
        }
        Answer::of(StatusCode::OK, said + "</DeleteResult>")
    }

    fn list(&self, state: &State) -> Answer {
        let bucket = format!("{}/", self.name.trim_end_matches('/'));
        let prefix = format!("{bucket}{}", self.asks("prefix").unwrap_or_default());
        let after = self.asks("continuation-token").map(|token| format!("{bucket}{token}"));
        let first = after.as_ref().map_or(Bound::Included(&prefix), Bound::Excluded);
        let (mut said, mut entries, mut common, mut last) = (String::new(), 0, String::new(), String::new());
        let mut is_truncated = false;
        for (name, object) in state.objects.range::<String, _>((first, Bound::Unbounded)) {
            let Some(rest) = name.strip_prefix(&prefix) else { break };
            let name = &name[bucket.len()..];
            let dir = self.asks("delimiter").and_then(|delimiter| rest.split_once(delimiter)).map(|(dir, _)| dir);
            let dir = dir.map(|dir| format!("{}{dir}/", &prefix[bucket.len()..]));
            if let Some(dir) = dir.filter(|dir| *dir != common || dir.is_empty()) {
                // The page before may have ended within it.
                if !after.as_ref().is_some_and(|after| after[bucket.len()..].starts_with(&dir)) {
                    if entries == PAGE {
                        is_truncated = true;
                        break;
                    }
                    _ = write!(said, "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", escaped(&dir));
                    entries += 1;
                }
                common = dir;
            } else if !name.starts_with(&common) || common.is_empty() {
                if entries == PAGE {
                    is_truncated = true;
                    break;
                }
                let (bytes, etag, modified) = (object.bytes.len(), escaped(&object.etag), object.modified.to_rfc3339());
                _ = write!(said, "<Contents><Key>{}</Key><Size>{bytes}</Size>", escaped(name));
                _ = write!(said, "<LastModified>{modified}</LastModified><ETag>{etag}</ETag></Contents>");
                entries += 1;
            }
            name.clone_into(&mut last);
        }
        let next = if is_truncated {
            format!("<NextContinuationToken>{}</NextContinuationToken>", escaped(&last))
        } else {
            String::new()
        };
        let said =
            format!("<ListBucketResult><IsTruncated>{is_truncated}</IsTruncated>{next}{said}</ListBucketResult>");
        Answer::of(StatusCode::OK, said)
    }

    fn list_uploads(&self, state: &State) -> Answer {
        let bucket = format!("{}/", self.name.trim_end_matches('/'));
        let prefix = format!("{bucket}{}", self.asks("prefix").unwrap_or_default());
        let mut said = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>".to_owned();
        for (id, upload) in state.uploads.iter().filter(|(_, upload)| upload.name.starts_with(&prefix)) {
            let (key, begun) = (escaped(&upload.name[bucket.len()..]), upload.begun.to_rfc3339());
            _ = write!(
                said,
                "<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>{begun}</Initiated></Upload>"
            );
        }
        Answer::of(StatusCode::OK, said + "</ListMultipartUploadsResult>")
    }
}

impl State {
    /// Returns the number of the next request, and the function that gives its fault.
    fn counted(&mut self) -> (u64, Arc<Weather>) {
        self.requests += 1;
        (self.requests - 1, Arc::clone(&self.weather))
    }

    fn etag(&mut self) -> String {
        self.number += 1;
        format!("\"{:032x}\"", self.number)
    }
}
