//! Serves what this process does over HTTP, to read only: `/metrics` for Prometheus, `/live` as JSON.
//!
//! The server has one thread of its own and gives every connection a deadline, so that no client can hold up a save.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use shardfast_engine::{Error, Kind, Result};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::http::{get, runtime};
use crate::live::{Frame, Live, OtherNow};
use crate::metrics;

/// Connections at a time; others wait.
const CONNECTIONS_MAX: usize = 64;

/// Time for which a connection may last.
const CONNECTION_MAX: Duration = Duration::from_secs(60);

/// Time for which a client may take to send a request's head.
const HEAD_WITHIN: Duration = Duration::from_secs(5);

/// Time for which rank 0 waits for another rank's answer.
const PEER_WITHIN: Duration = Duration::from_secs(1);

/// Age up to which rank 0 gives what it has heard of the others once more.
const HEARD_MAX: Duration = Duration::from_millis(500);

/// Path under which other ranks are asked.
const LIVE: &str = "/live";

/// Returns the address in a text `host:port`, moved by `offset` ports: ranks of a machine serve at ports in a row. Port
/// 0 stays: any free port.
///
/// # Errors
/// `Invalid` when it is none, or names no host.
pub(crate) fn address(text: &str, offset: u16) -> Result<SocketAddr> {
    // What stands before an @ may be a password.
    let shown = text.rsplit('@').next().unwrap_or_default();
    let invalid = |what: &str| {
        Error::invalid(format!("{shown:?}: expected an address host:port, such as 127.0.0.1:9400, {what}"))
    };
    if text.contains('@') {
        return Err(invalid("found a user in front of it"));
    }
    let (_, port) = text.rsplit_once(':').ok_or_else(|| invalid("found no port"))?;
    port.parse::<u16>().map_err(|_| invalid(&format!("found the port {port:?}")))?;
    let text = if text.starts_with(':') { format!("127.0.0.1{text}") } else { text.to_owned() };
    let found = text.to_socket_addrs().map_err(|error| invalid(&error.to_string()))?.next();
    let mut found = found.ok_or_else(|| invalid("found a host without an address"))?;
    if found.port() != 0 {
        let port = found.port().checked_add(offset);
        found.set_port(port.ok_or_else(|| invalid(&format!("and {offset} ports behind it, of which there are none")))?);
    }
    Ok(found)
}

/// Returns the address `host:port` in `http://host:port` of a job; `None` for a target that is no such URL, a run.
///
/// # Errors
/// `Invalid` for a URL of a web server that is no job's.
pub fn job_address(target: &str) -> Result<Option<String>> {
    if target.starts_with("https://") {
        return Err(Error::invalid("expected http://host:port, found https: a job serves without TLS".to_owned()));
    }
    let Some(address) = target.strip_prefix("http://") else { return Ok(None) };
    let address = address.split('/').next().unwrap_or_default();
    match address.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() && !host.contains('@') => Ok(Some(address.to_owned())),
        _ => Err(Error::invalid(
            "expected http://host:port, as SHARDFAST_METRICS says them, found another http URL".to_owned(),
        )),
    }
}

/// Listens there.
///
/// # Errors
/// `Unavailable` when the port is taken or the address is not this machine's.
pub(crate) fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let failed = |error: std::io::Error| {
        let what = match error.kind() {
            std::io::ErrorKind::AddrInUse => "the port is taken: name another one".to_owned(),
            std::io::ErrorKind::AddrNotAvailable => "this machine has no such address".to_owned(),
            _ => error.to_string(),
        };
        Error::new(Kind::Unavailable, format!("{address}: {what}"))
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Serves on a thread of its own, until the process ends.
///
/// # Errors
/// `Exhausted` when there is no thread.
pub(crate) fn serve(listener: TcpListener, live: Arc<Live>) -> Result<()> {
    let runtime = runtime()?;
    let serving = move || runtime.block_on(accept(listener, live));
    let thread = std::thread::Builder::new().name("shardfast-metrics".to_owned()).spawn(serving);
    thread.map(drop).map_err(|error| Error::new(Kind::Exhausted, format!("no thread to serve metrics: {error}")))
}

/// Returns what the process at `address`, `host:port`, does at this moment.
///
/// # Errors
/// `Unavailable` when no server answers in time; `Invalid` when the answer is not that of a process of this program.
pub fn ask(address: &str, within: Duration) -> Result<Frame> {
    let answer = runtime()?.block_on(async { timeout(within, get(address, LIVE)).await });
    let failed = |what: String| Error::new(Kind::Unavailable, format!("http://{address}{LIVE}: {what}"));
    let answer = answer.map_err(|_| failed(format!("no answer within {:.0} s", within.as_secs_f64())))?;
    let bytes = answer.map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let begin = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        Error::invalid(format!(
            "http://{address}{LIVE}: expected what a training's rank tells, found {begin:?}: {error}"
        ))
    })
}

async fn accept(listener: TcpListener, live: Arc<Live>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let (places, others) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::new(Others::default()));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Without descriptors it would fail again at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (live, others) = (Arc::clone(&live), Arc::clone(&others));
        tokio::spawn(async move {
            let answer = service_fn(move |request| answer(request, Arc::clone(&live), Arc::clone(&others)));
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
            let _ = timeout(CONNECTION_MAX, http.serve_connection(TokioIo::new(stream), answer)).await;
            drop(place);
        });
    }
}

type Answer = std::result::Result<Response<Full<Bytes>>, Infallible>;

async fn answer(request: Request<Incoming>, live: Arc<Live>, others: Arc<Others>) -> Answer {
    let answer = |status: StatusCode, kind: &'static str, text: Vec<u8>| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
        response
    };
    const PLAIN: &str = "text/plain; charset=utf-8";
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = answer(StatusCode::METHOD_NOT_ALLOWED, PLAIN, b"expected GET\n".to_vec());
        response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return Ok(response);
    }
    Ok(match request.uri().path() {
        "/metrics" => answer(StatusCode::OK, metrics::CONTENT_TYPE, metrics::text(&live).into_bytes()),
        LIVE => {
            let mut frame = live.frame();
            frame.ranks = others.heard(&live).await;
            let text = serde_json::to_vec(&frame).unwrap_or_default();
            answer(StatusCode::OK, "application/json", text)
        }
        path => {
            let text = format!("{path}: expected /metrics or /live\n");
            answer(StatusCode::NOT_FOUND, PLAIN, text.into_bytes())
        }
    })
}

/// Other ranks, as they were last heard of.
#[derive(Default)]
struct Others {
    last: Mutex<Option<(Instant, Vec<OtherNow>)>>,
    /// Held while they are asked.
    asking: tokio::sync::Mutex<()>,
}

impl Others {
    /// Asks the ranks whose addresses are known, unless they were asked just now.
    async fn heard(&self, live: &Live) -> Vec<OtherNow> {
        let peers = live.peers();
        if peers.is_empty() {
            return Vec::new();
        }
        let _asking = self.asking.lock().await;
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, heard)) = last.filter(|(at, _)| at.elapsed() < HEARD_MAX) {
            return heard;
        }
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut asked = JoinSet::new();
        for (rank, address) in peers {
            let places = Arc::clone(&places);
            asked.spawn(async move {
                let _place = places.acquire_owned().await;
                other(rank, &address).await
            });
        }
        let mut heard = BTreeMap::new();
        while let Some(other) = asked.join_next().await {
            if let Ok(other) = other {
                heard.insert(other.rank, other);
            }
        }
        let heard: Vec<OtherNow> = heard.into_values().collect();
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), heard.clone()));
        heard
    }
}

/// Asks another rank.
async fn other(rank: u32, address: &str) -> OtherNow {
    let problem = |what: String| OtherNow { rank, problem: Some(what), ..OtherNow::default() };
    match timeout(PEER_WITHIN, get(address, LIVE)).await {
        Err(_) => problem(format!("no answer within {:.0} s", PEER_WITHIN.as_secs_f64())),
        Ok(Err(error)) => problem(error),
        Ok(Ok(bytes)) => match serde_json::from_slice::<Frame>(&bytes) {
            Ok(frame) if frame.rank == rank => OtherNow { rank, running: frame.running, problem: None },
            Ok(frame) => problem(format!("{address}: expected rank {rank}, found rank {}", frame.rank)),
            Err(error) => problem(format!("{address}: {error}")),
        },
    }
}

/// Returns the address at which others reach a server that listens at `bound` on the machine `host`.
pub(crate) fn seen_from_outside(bound: SocketAddr, host: &str) -> String {
    match bound.ip() {
        ip if !ip.is_unspecified() => bound.to_string(),
        IpAddr::V4(_) | IpAddr::V6(_) if host.contains(':') => format!("[{host}]:{}", bound.port()),
        _ => format!("{host}:{}", bound.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        assert_eq!(address("127.0.0.1:9400", 3).unwrap(), "127.0.0.1:9403".parse().unwrap());
        assert_eq!(address(":9400", 0).unwrap(), "127.0.0.1:9400".parse().unwrap());
        assert_eq!(address("127.0.0.1:0", 3).unwrap().port(), 0);
        for (text, found) in [("9400", "no port"), ("a:b", "\"b\""), ("127.0.0.1:65535", "3 ports"), ("", "no port")] {
            let error = address(text, 3).unwrap_err();
            assert!(error.message.contains(found) && error.message.contains("host:port"), "{error}");
        }
    }

    #[test]
    fn a_job_is_asked_over_http_alone() {
        assert_eq!(job_address("http://127.0.0.1:9400/live").unwrap().as_deref(), Some("127.0.0.1:9400"));
        assert_eq!(job_address("runs/a").unwrap(), None);
        assert!(job_address("https://a:1").is_err() && job_address("http://a").is_err());
    }

    #[test]
    fn others_reach_a_server_at_its_own_address_or_its_host() {
        let bound = |text: &str| text.parse().unwrap();
        assert_eq!(seen_from_outside(bound("10.0.0.1:9400"), "node-1"), "10.0.0.1:9400");
        assert_eq!(seen_from_outside(bound("0.0.0.0:9400"), "node-1"), "node-1:9400");
        assert_eq!(seen_from_outside(bound("[::]:9400"), "fe80::1"), "[fe80::1]:9400");
    }

    #[test]
    fn a_taken_port_is_named() {
        let (_listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = listen(address).unwrap_err();
        assert!(error.message.contains("the port is taken"), "{error}");
    }
}
