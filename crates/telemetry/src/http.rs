//! Asks servers over HTTP/1, without TLS.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::HOST;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use shardfast_engine::{Error, Kind, Result};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

/// Largest answer to what is got.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Largest answer to what is posted, of which nothing but its end is needed.
const POSTED_BYTES_MAX: usize = 64 << 10;

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
    send(address, request, ANSWER_BYTES_MAX).await
}

/// Posts a body to a path there, with these headers.
///
/// # Errors
/// As [`get`]; an answer that is longer than 64 KiB.
pub(crate) async fn post(
    address: &str,
    path: &str,
    headers: &[(String, String)],
    body: Vec<u8>,
) -> std::result::Result<Bytes, String> {
    let mut request = Request::builder().method(Method::POST).uri(path);
    for (name, text) in headers {
        request = request.header(name, text);
    }
    let request = request.body(Full::from(body)).map_err(|error| error.to_string())?;
    send(address, request, POSTED_BYTES_MAX).await
}

async fn send(
    address: &str,
    mut request: Request<Full<Bytes>>,
    bytes_max: usize,
) -> std::result::Result<Bytes, String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| error.to_string())?;
    let driver = tokio::spawn(connection);
    request.headers_mut().insert(HOST, address.parse().map_err(|_| format!("{address:?} is no host"))?);
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    if response.status() != StatusCode::OK {
        return Err(format!("it answered {}", response.status()));
    }
    let body = Limited::new(response.into_body(), bytes_max).collect().await;
    driver.abort();
    body.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
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
