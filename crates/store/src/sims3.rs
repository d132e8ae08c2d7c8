//! A simulated service that speaks S3's protocol, below the real client: only the connections are replaced. Its objects
//! are in this process's memory, no time passes, and a function says what goes wrong with each request.
//!
//! It knows what the store asks of S3: objects and ranges of them, conditions, checksums, multipart uploads, pages of
//! lists, deletion of many, and the credentials of an instance. Everything else is answered with 501.

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

/// What goes wrong with a request.
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
    /// A bit of the request's body turns on the way.
    RequestTurned,
    /// A bit of an object turns on the way back.
    ObjectTurned,
}

/// Says what goes wrong with the so-manieth request, if anything.
type Weather = dyn Fn(u64) -> Option<Fault> + Send + Sync;

/// The service; clones are the same one.
#[derive(Clone)]
pub struct SimS3(Arc<Mutex<State>>);

impl std::fmt::Debug for SimS3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimS3")
    }
}

struct State {
    /// By bucket and name.
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    /// The last number that was given to an object or an upload.
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

struct Upload {
    name: String,
    parts: BTreeMap<u32, (Bytes, String)>,
    begun: DateTime<Utc>,
}

impl Default for SimS3 {
    fn default() -> SimS3 {
        SimS3(Arc::new(Mutex::new(State {
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
            number: 0,
            requests: 0,
            weather: Arc::new(|_| None),
        })))
    }
}

impl SimS3 {
    /// From now on this goes wrong with requests, which are counted from 0 again.
    pub fn weather(&self, weather: impl Fn(u64) -> Option<Fault> + Send + Sync + 'static) {
        let mut state = self.lock();
        (state.weather, state.requests) = (Arc::new(weather), 0);
    }

    /// Requests since the last change of the weather.
    pub fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// Uploads that were begun and neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        self.lock().uploads.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let fault = {
            let mut state = self.lock();
            let (number, weather) = (state.requests, Arc::clone(&state.weather));
            state.requests += 1;
            weather(number)
        };
        let lost = |kind| Err(HttpError::new(kind, Gone));
        match fault {
            Some(Fault::Refused) => return lost(HttpErrorKind::Connect),
            Some(Fault::Silent(false)) => return lost(HttpErrorKind::Timeout),
            Some(Fault::Answered(status)) => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                return Ok(refusal(status, "SlowDown").into_http());
            }
            Some(Fault::RequestTurned) => {
                let middle = bytes.len() / 2;
                bytes.get_mut(middle).into_iter().for_each(|byte| *byte ^= 1);
            }
            _ => {}
        }
        let ask = Ask::new(&parts.method, &parts.uri, &parts.headers, Bytes::from(bytes));
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

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[error("simulated")]
struct Gone;

/// What is still to come of a body, the last first.
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
        let mut response = Response::builder().status(self.status);
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

/// A request.
struct Ask<'a> {
    method: &'a Method,
    host: &'a str,
    /// The bucket and the object's name, or the bucket alone.
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

    fn asks(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn answer(&self, state: &mut State) -> Answer {
        let is_bucket = !self.name.trim_end_matches('/').contains('/');
        match *self.method {
            _ if self.host == "169.254.169.254" => self.credentials(),
            Method::GET if self.asks("list-type").is_some() => self.list(state),
            Method::GET if self.asks("uploads").is_some() => self.list_uploads(state),
            Method::GET | Method::HEAD if !is_bucket => self.get(state),
            Method::PUT if self.header("x-amz-copy-source").is_none() && !is_bucket => self.put(state),
            Method::POST if self.asks("uploads").is_some() => self.begin(state),
            Method::POST if self.asks("uploadId").is_some() => self.complete(state),
            Method::POST if self.asks("delete").is_some() => self.delete_many(state),
            Method::DELETE if self.asks("uploadId").is_some() => match self.upload(state) {
                Some(id) => {
                    state.uploads.remove(&id);
                    Answer::of(StatusCode::NO_CONTENT, "")
                }
                None => refusal(StatusCode::NOT_FOUND, "NoSuchUpload"),
            },
            Method::DELETE => {
                state.objects.remove(&self.name);
                Answer::of(StatusCode::NO_CONTENT, "")
            }
            _ => refusal(StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
        }
    }

    /// Those of the role of an instance.
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

    /// Whether the body is what its sender proved.
    fn is_proven(&self) -> bool {
        let Some(crc) = self.header("x-amz-checksum-crc64nvme") else { return true };
        let found = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &self.body);
        BASE64_STANDARD.decode(crc).is_ok_and(|crc| crc == found.to_be_bytes())
    }

    /// The upload that is meant.
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
        let text = String::from_utf8_lossy(&self.body);
        let bucket = self.name.trim_end_matches('/');
        let mut said = "<DeleteResult>".to_owned();
        for key in text.split("<Key>").skip(1).filter_map(|rest| Some(rest.split_once("</Key>")?.0)) {
            let name = key.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
            state.objects.remove(&format!("{bucket}/{}", name.replace("&amp;", "&")));
            _ = write!(said, "<Deleted><Key>{key}</Key></Deleted>");
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
    fn etag(&mut self) -> String {
        self.number += 1;
        format!("\"{:032x}\"", self.number)
    }
}
