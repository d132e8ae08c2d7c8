//! Asks servers over HTTP/1, without TLS.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use shardfast_engine::{Error, Kind, Result};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

/// Largest answer to what is got.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Largest answer to what is posted, of which nothing but its end is needed.
const POSTED_BYTES_MAX: usize = 64 << 10;

/// Failure of a request.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Reason why there is no answer, or what it was in place of "200 OK".
    pub(crate) text: String,
    /// Whether the same request has the same answer later, too.
    pub(crate) is_lasting: bool,
}

impl Failure {
    pub(crate) fn passing(text: impl ToString) -> Failure {
        Failure { text: text.to_string(), is_lasting: false }
    }
}

/// Makes what runs requests on the calling thread.
///
/// # Errors
/// `Exhausted` without descriptors.
pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Error::new(Kind::Exhausted, format!("no runtime for HTTP: {error}")))
}

/// Gets what is at a path of the server at `address`, `host:port`.
///
/// # Errors
/// The reason why there is no answer, or that it was not "200 OK".
pub(crate) async fn get(address: &str, path: &str) -> std::result::Result<Bytes, String> {
    let request = Request::get(path).body(Full::default()).map_err(|error| error.to_string())?;
    send(address, request, ANSWER_BYTES_MAX, |_| None).await.map_err(|failure| failure.text)
}

/// Posts a body to a path there, with these headers.
///
/// # Errors
/// As [`get`]; an answer that is longer than 64 KiB, or a page for people.
pub(crate) async fn post(
    address: &str,
    path: &str,
    headers: &[(String, String)],
    body: Vec<u8>,
) -> std::result::Result<Bytes, Failure> {
    let mut request = Request::builder().method(Method::POST).uri(path);
    for (name, text) in headers {
        request = request.header(name, text);
    }
    let request = request.body(Full::from(body)).map_err(Failure::passing)?;
    send(address, request, POSTED_BYTES_MAX, |answer| {
        let kind = answer.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        kind.starts_with("text/html").then(|| "it answered with a page of HTML, which no collector does".to_owned())
    })
    .await
}

async fn send(
    address: &str,
    mut request: Request<Full<Bytes>>,
    bytes_max: usize,
    refusal: impl FnOnce(&Response<Incoming>) -> Option<String>,
) -> std::result::Result<Bytes, Failure> {
    let stream = TcpStream::connect(address).await.map_err(Failure::passing)?;
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(Failure::passing)?;
    let driver = tokio::spawn(connection);
    let host = address.parse().map_err(|_| Failure::passing(format!("{address:?} is no host")))?;
    request.headers_mut().insert(HOST, host);
    let response = sender.send_request(request).await.map_err(Failure::passing)?;
    let status = response.status();
    if status != StatusCode::OK {
        let is_passing = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status);
        return Err(Failure {
            text: format!("it answered {status}"),
            is_lasting: status.is_client_error() && !is_passing,
        });
    }
    if let Some(text) = refusal(&response) {
        return Err(Failure { text, is_lasting: true });
    }
    let body = Limited::new(response.into_body(), bytes_max).collect().await;
    driver.abort();
    body.map(http_body_util::Collected::to_bytes).map_err(Failure::passing)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_answer_without_an_end_is_not_kept() {
        for head in ["Content-Length: 100000000000", "Transfer-Encoding: chunked"] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let serving = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n").as_bytes());
                let piece = format!("10000\r\n{}\r\n", "a".repeat(0x10000));
                // Until the client hangs up.
                (0..4096).take_while(|_| stream.write_all(piece.as_bytes()).is_ok()).count()
            });
            let answer = runtime().unwrap().block_on(post(&address, "/", &[], Vec::new()));
            assert!(answer.is_err(), "{head}");
            let pieces = serving.join().unwrap();
            assert!(pieces < 400, "{head}: {pieces} pieces of 64 KiB were taken");
        }
    }
}
