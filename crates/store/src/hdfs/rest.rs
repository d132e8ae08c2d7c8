//! Makes calls over the NameNode's REST interface, [WebHDFS], that the client library does not have.
//!
//! [WebHDFS]: https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html

use std::env;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{Method, Request};
use object_store::client::{HttpClient, HttpRequestBody};
use serde::Deserialize;
use tokio::time::timeout;

use super::STILL_MAX;
use super::configuration::Configuration;

/// Longest list of sources in a request's URL, in bytes: a NameNode takes 64 KiB of headers.
const SOURCES_BYTES: usize = 16 << 10;

/// Time for which an interface that did not answer is not asked again: a call may take [`STILL_MAX`].
const SILENT_FOR: Duration = Duration::from_secs(600);

/// Exception of a NameNode that is not the active one of its pair.
const STANDBY: &str = "StandbyException";

/// REST interface of the NameNodes of a store.
pub(super) struct Rest {
    client: HttpClient,
    /// Addresses of the NameNodes, of which one is active.
    addresses: Vec<String>,
    user: String,
    /// The store's directory, and what it is called at the NameNode.
    mount: (String, String),
    /// Reason why there are no such calls.
    missing: Option<&'static str>,
    /// Time at which none of the NameNodes answered.
    silence: Arc<Mutex<Option<Instant>>>,
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
    pub(super) fn new(
        client: HttpClient,
        configuration: &Configuration,
        scheme: &str,
        authority: &str,
        root: &str,
        silence: Arc<Mutex<Option<Instant>>>,
    ) -> Rest {
        let mounted = match scheme {
            "viewfs" => configuration.mount(authority, root).and_then(|(link, target)| {
                let (authority, path) = target.strip_prefix("hdfs://")?.split_once('/')?;
                Some((authority.to_owned(), link.to_owned(), format!("/{}", path.trim_end_matches('/'))))
            }),
            _ => Some((authority.to_owned(), String::new(), String::new())),
        };
        let missing = if configuration.is("dfs.webhdfs.enabled", "false") {
            Some("WebHDFS is switched off (dfs.webhdfs.enabled)")
        } else if configuration.text("hadoop.security.authentication").is_some_and(|way| way != "simple") {
            Some("WebHDFS of a cluster with Kerberos takes a token")
        } else if mounted.is_none() {
            Some("the mount table has no link for this directory")
        } else {
            None
        };
        let (authority, link, target) = mounted.unwrap_or_default();
        let user = ["HADOOP_USER_NAME", "USER", "LOGNAME"].iter().find_map(|name| env::var(name).ok());
        let user = user.unwrap_or_else(|| "root".to_owned());
        let addresses = configuration.http_addresses(&authority);
        Rest { client, addresses, user, mount: (link, target), missing, silence }
    }

    /// Returns a path's name at the NameNode, percent-encoded for a URL.
    fn path(&self, path: &str) -> String {
        let (link, target) = &self.mount;
        let path = path.strip_prefix(link.as_str()).unwrap_or(path);
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
        let encoded = |byte: u8| if is_plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        format!("{target}{path}").bytes().map(encoded).collect()
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
        self.call(&Method::POST, &call).await
    }

    /// Makes a call at the active NameNode.
    async fn call(&self, method: &Method, call: &str) -> Result<(), String> {
        if let Some(missing) = self.missing {
            return Err(missing.to_owned());
        }
        let silence = || self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        if silence().is_some_and(|since| since.elapsed() < SILENT_FOR) {
            return Err(format!("no answer to calls before; it is asked again after {} s", SILENT_FOR.as_secs()));
        }
        let mut last = "the configuration has no address of WebHDFS for this name service".to_owned();
        for address in &self.addresses {
            let url = format!("{address}/webhdfs/v1{call}&user.name={}", self.user);
            match within(self.ask(method, &url)).await {
                Ok(()) => return Ok(()),
                Err(why) => {
                    let is_elsewhere = why.contains(STANDBY) || why.starts_with(NO_ANSWER);
                    last = format!("{address}: {why}");
                    if !is_elsewhere {
                        break;
                    }
                }
            }
        }
        if last.contains(NO_ANSWER) {
            *silence() = Some(Instant::now());
        }
        Err(last)
    }

    async fn ask(&self, method: &Method, url: &str) -> Result<(), String> {
        let request = Request::builder().method(method).uri(url).body(HttpRequestBody::empty());
        let request = request.map_err(|error| error.to_string())?;
        let answer =
            self.client.execute(request).await.map_err(|error| format!("{NO_ANSWER}: {}", innermost(&error)))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let body = answer.into_body().bytes().await.map_err(|error| innermost(&error))?;
        let why = serde_json::from_slice::<Refused>(&body).map(|refused| refused.exception);
        Err(why.map_or_else(
            |_| format!("it answered {status}"),
            |why| format!("{}: {}", why.exception, why.message.lines().next().unwrap_or_default()),
        ))
    }
}

const NO_ANSWER: &str = "no answer";

async fn within<T>(call: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    timeout(STILL_MAX, call).await.unwrap_or_else(|_| Err(format!("{NO_ANSWER} within {} s", STILL_MAX.as_secs())))
}

/// Returns the text of the innermost cause: the others repeat it, with the URL.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.last().map_or_else(String::new, ToString::to_string)
}
