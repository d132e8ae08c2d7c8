//! Makes calls over the NameNode's REST interface, [WebHDFS], that the client library does not have.
//!
//! [WebHDFS]: https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html

use std::collections::{HashMap, HashSet};
use std::env;
use std::future::Future;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request};
use object_store::client::{HttpClient, HttpRequestBody};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::timeout;

use super::configuration::Configuration;
use super::{STILL_MAX, failure, token};
use crate::{Kind, Quota};

/// Longest list of sources in a request's URL, in bytes: a NameNode takes 64 KiB of headers.
const SOURCES_BYTES: usize = 16 << 10;

/// Time for which an interface that did not answer is not asked again: a call may take [`STILL_MAX`].
const SILENT_FOR: Duration = Duration::from_secs(600);

/// Time for an answer that a save can do without.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

/// Number of files and directories below a directory that take a NameNode long to walk over.
const FILES_MANY: u64 = 100_000;

/// Exception of a NameNode that is not the active one of its pair.
const STANDBY: &str = "StandbyException";

/// REST interface of the NameNodes of a store.
pub(super) struct Rest {
    client: HttpClient,
    /// Addresses of the NameNodes, of which one is active.
    addresses: Vec<String>,
    /// Parameter of a URL that says who calls.
    caller: String,
    /// The store's directory, and what it is called at the NameNode.
    mount: (String, String),
    /// Reason why there are no such calls.
    missing: Option<&'static str>,
    memory: Arc<Mutex<Memory>>,
}

/// Memory that the stores of a cluster share.
#[derive(Default)]
pub(super) struct Memory {
    /// Time at which none of the NameNodes answered.
    silence: Option<Instant>,
    /// Time at which a question was not answered soon, which no save needs: none is asked for a while.
    untold: Option<Instant>,
    /// Directories above checkpoints without a quota.
    without_quota: HashSet<String>,
    /// Erasure coding policies of directories.
    policies: HashMap<String, Option<String>>,
}

/// Answer that refuses a call.
#[derive(Deserialize)]
struct Refused {
    #[serde(rename = "RemoteException")]
    exception: RemoteException,
}

#[derive(Deserialize)]
struct RemoteException {
    exception: String,
    message: String,
}

impl Rest {
    /// Makes the interface of the NameNodes that have `root`, a path of `scheme://authority`.
    ///
    /// # Errors
    /// A message for a token that cannot be used.
    pub(super) fn new(
        client: HttpClient,
        configuration: &Configuration,
        scheme: &str,
        authority: &str,
        root: &str,
        memory: Arc<Mutex<Memory>>,
    ) -> Result<Rest, String> {
        let mounted = match scheme {
            "viewfs" => configuration.mount(authority, root).and_then(|(link, target)| {
                let (authority, path) = target.strip_prefix("hdfs://")?.split_once('/')?;
                Some((authority.to_owned(), link.to_owned(), format!("/{}", path.trim_end_matches('/'))))
            }),
            _ => Some((authority.to_owned(), String::new(), String::new())),
        };
        let is_secure = configuration.text("hadoop.security.authentication").is_some_and(|way| way != "simple");
        let token = match &mounted {
            Some((authority, ..)) if is_secure => token::of(authority)?,
            _ => None,
        };
        let missing = if configuration.is("dfs.webhdfs.enabled", "false") {
            Some("WebHDFS is switched off (dfs.webhdfs.enabled)")
        } else if is_secure && token.is_none() {
            Some("WebHDFS of a cluster with Kerberos takes a token, and HADOOP_TOKEN_FILE_LOCATION names none of it")
        } else if mounted.is_none() {
            Some("the mount table has no link for this directory")
        } else {
            None
        };
        let (authority, link, target) = mounted.unwrap_or_default();
        let user = ["HADOOP_USER_NAME", "USER", "LOGNAME"].iter().find_map(|name| env::var(name).ok());
        let caller = match token {
            Some(token) => format!("delegation={token}"),
            None => format!("user.name={}", user.unwrap_or_else(|| "root".to_owned())),
        };
        let addresses = configuration.http_addresses(&authority);
        Ok(Rest { client, addresses, caller, mount: (link, target), missing, memory })
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a path's name at the NameNode, percent-encoded for a URL.
    fn path(&self, path: &str) -> String {
        let (link, target) = &self.mount;
        let path = path.strip_prefix(link.as_str()).unwrap_or(path);
        encoded(&format!("{target}{path}"))
    }

    /// Returns how many of these files one call joins.
    pub(super) fn at_a_time(&self, sources: &[String]) -> usize {
        let mut bytes = 0;
        let fits = |path: &&String| {
            bytes += self.path(path).len() + 1;
            bytes <= SOURCES_BYTES
        };
        sources.iter().take_while(fits).count().max(1)
    }

    /// Appends the blocks of files to those of `target`, in this order; the files are gone then.
    ///
    /// # Errors
    /// The reason why it was not done, or may not have been.
    pub(super) async fn concat(&self, target: &str, sources: &[String]) -> Result<(), String> {
        let sources: Vec<String> = sources.iter().map(|path| self.path(path)).collect();
        let call = format!("{}?op=CONCAT&sources={}", self.path(target), sources.join(","));
        if self.memory().silence.is_some_and(|since| since.elapsed() < SILENT_FOR) {
            return Err(format!("no answer to calls before; it is asked again after {} s", SILENT_FOR.as_secs()));
        }
        let done = self.call(&Method::POST, &call, STILL_MAX).await.and_then(without_body);
        if done.as_ref().is_err_and(|why| why.contains(NO_ANSWER)) {
            self.memory().silence = Some(Instant::now());
        }
        done
    }

    /// Sets the storage policy of a directory, by which the NameNode places the blocks of new files in it.
    ///
    /// # Errors
    /// The reason why it was not set, or may not have been.
    pub(super) async fn set_storage_policy(&self, dir: &str, policy: &str) -> Result<(), String> {
        let dir = if dir.is_empty() { "/" } else { dir };
        let call = format!("{}?op=SETSTORAGEPOLICY&storagepolicy={}", self.path(dir), encoded(policy));
        self.call(&Method::PUT, &call, STILL_MAX).await.and_then(without_body)
    }

    /// Returns what a caller can do about a call that failed for this reason.
    pub(super) fn kind_of(&self, why: &str) -> Kind {
        let classes = why.split(": ").find_map(failure::class_kind);
        if self.missing.is_some() { Kind::Unsupported } else { classes.unwrap_or(Kind::Unavailable) }
    }

    /// Returns the quota of space on the directory `root`, in bytes of all [copies](Rest::copies): its own, or that of
    /// the first directory above which has one. The NameNode walks over all files below a directory without a quota, so
    /// that such a one is asked about once.
    pub(super) async fn quota(&self, root: &str) -> Option<Quota> {
        for dir in ancestors(root) {
            if self.memory().without_quota.contains(dir) {
                continue;
            }
            let usage = &self.told(dir, "GETQUOTAUSAGE").await["QuotaUsage"];
            // Without a quota the number is negative.
            if let (Some(bytes), Some(used)) = (usage["spaceQuota"].as_u64(), usage["spaceConsumed"].as_u64()) {
                return Some(Quota { of: dir.to_owned(), bytes, left_bytes: bytes.saturating_sub(used) });
            }
            match usage["fileAndDirectoryCount"].as_u64() {
                // Those above have yet more files.
                Some(FILES_MANY..) => self.memory().without_quota.extend(ancestors(dir).map(str::to_owned)),
                // A checkpoint's own directory is asked about once, and others may be its names.
                Some(_) if dir != root => _ = self.memory().without_quota.insert(dir.to_owned()),
                _ => {}
            }
        }
        None
    }

    /// Returns how many files are below the directory `root`, and how many bytes all their copies take of a quota. Each
    /// file that is being written takes a whole block more, which the NameNode does not tell.
    pub(super) async fn used(&self, root: &str) -> (u64, u64) {
        let usage = &self.told(root, "GETQUOTAUSAGE").await["QuotaUsage"];
        let of = |name| usage[name].as_u64().unwrap_or(0);
        (of("fileAndDirectoryCount"), of("spaceConsumed"))
    }

    /// Returns the bytes for which the DataNodes have room, those of all copies.
    pub(super) async fn free_bytes(&self) -> Option<u64> {
        self.told("/", "GETSTATUS").await["FsStatus"]["remaining"].as_u64()
    }

    /// Returns how often the bytes of an object in the directory `root` are stored, which is at least once. Codes that
    /// need less than two copies count as one.
    pub(super) async fn copies(&self, root: &str, replication: Option<u32>) -> u64 {
        for dir in ancestors(root) {
            let status = &self.told(dir, "GETFILESTATUS").await["FileStatus"];
            if status["ecPolicy"].is_string() {
                return 1;
            }
            if status.is_object() {
                break;
            }
        }
        let copies = match replication {
            Some(copies) => Some(copies.into()),
            None => self.told("/", "GETSERVERDEFAULTS").await["FsServerDefaults"]["replication"].as_u64(),
        };
        copies.unwrap_or(1).max(1)
    }

    /// Returns the erasure coding policy of the directory in which `root` is or will be made; `None` if its files are
    /// replicated, or WebHDFS does not answer. The NameNode is asked once for each directory.
    pub(super) async fn policy(&self, root: &str) -> Option<String> {
        let parent = root.rsplit_once('/').map_or("", |(parent, _)| parent);
        if let Some(known) = self.memory().policies.get(parent) {
            return known.clone();
        }
        for dir in ancestors(root) {
            let status = &self.told(dir, "GETFILESTATUS").await["FileStatus"];
            if status.is_object() {
                let policy = status["ecPolicy"].as_str().map(str::to_owned);
                self.memory().policies.insert(parent.to_owned(), policy.clone());
                return policy;
            }
        }
        None
    }

    /// Returns what the NameNode tells of a directory; `Null` if nothing.
    async fn told(&self, dir: &str, op: &str) -> Value {
        let is_recent = |since: Option<Instant>| since.is_some_and(|since| since.elapsed() < SILENT_FOR);
        if is_recent(self.memory().untold) || is_recent(self.memory().silence) {
            return Value::Null;
        }
        let body = self.call(&Method::GET, &format!("{}?op={op}", self.path(dir)), TOLD_WITHIN).await;
        if body.as_ref().is_err_and(|why| why.contains(NO_ANSWER)) {
            self.memory().untold = Some(Instant::now());
        }
        body.ok().and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default()
    }

    /// Makes a call at the active NameNode; returns the answer's body.
    async fn call(&self, method: &Method, call: &str, limit: Duration) -> Result<Bytes, String> {
        if let Some(missing) = self.missing {
            return Err(missing.to_owned());
        }
        let mut last = "the configuration has no address of WebHDFS for this name service".to_owned();
        for address in &self.addresses {
            let url = format!("{address}/webhdfs/v1{call}&{}", self.caller);
            match within(limit, self.ask(method, &url)).await {
                Ok(body) => return Ok(body),
                Err(why) => {
                    let is_elsewhere = why.contains(STANDBY) || why.starts_with(NO_ANSWER);
                    last = format!("{address}: {why}");
                    if !is_elsewhere {
                        break;
                    }
                }
            }
        }
        Err(last)
    }

    async fn ask(&self, method: &Method, url: &str) -> Result<Bytes, String> {
        let request = Request::builder().method(method).uri(url).body(HttpRequestBody::empty());
        let request = request.map_err(|error| error.to_string())?;
        let answer =
            self.client.execute(request).await.map_err(|error| format!("{NO_ANSWER}: {}", innermost(&error)))?;
        let status = answer.status();
        let body = answer.into_body().bytes().await.map_err(|error| innermost(&error))?;
        if status.is_success() {
            return Ok(body);
        }
        let why = serde_json::from_slice::<Refused>(&body).map(|refused| refused.exception);
        Err(why.map_or_else(
            |_| format!("it answered {status}"),
            |why| format!("{}: {}", why.exception, why.message.lines().next().unwrap_or_default()),
        ))
    }
}

const NO_ANSWER: &str = "no answer";

async fn within<T>(limit: Duration, call: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    timeout(limit, call).await.unwrap_or_else(|_| Err(format!("{NO_ANSWER} within {} s", limit.as_secs())))
}

/// Accepts the empty answer of a NameNode to a change.
///
/// # Errors
/// A message for the page of a proxy or a gateway.
fn without_body(body: Bytes) -> Result<(), String> {
    match body.is_empty() {
        true => Ok(()),
        false => Err(format!("it answered with {} bytes, and not as a NameNode does", body.len())),
    }
}

/// Percent-encodes a text for a URL, but for slashes.
fn encoded(text: &str) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
    let of_byte = |byte: u8| if is_plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(of_byte).collect()
}

/// Yields a directory and those above it.
fn ancestors(dir: &str) -> impl Iterator<Item = &str> {
    let dir = if dir.is_empty() { "/" } else { dir };
    Path::new(dir).ancestors().filter_map(Path::to_str)
}

/// Returns the text of the innermost cause: the others repeat it, with the URL.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.last().map_or_else(String::new, ToString::to_string)
}
