//! Tests answers that no service gives: too slow ones, and endless ones.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shardfast_store::testing::servers::Server;
use shardfast_store::{Error, Kind, Result, Shared, Store, open_on};

/// Time without progress after which a request is aborted.
const STILL_MAX: Duration = Duration::from_secs(1);

/// Head of an answer with a part of an object.
const PART: &str = "206 Partial Content\r\ncontent-range: bytes 0-4095/4096\r\ncontent-length: 4096\r\n\
                    etag: \"1\"\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT";

/// Answers every request with a head, and then with what `body` writes until the connection is closed.
fn proxy(body: impl Fn(&TcpStream) -> std::io::Result<()> + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let body = body.clone();
            thread::spawn(move || {
                let head = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
                let is_ranged = head.filter(|line| line.starts_with("range:")).count() == 1;
                let head = match is_ranged {
                    true => PART,
                    false => "200 OK\r\nx-amz-request-id: 1",
                };
                write!(stream, "HTTP/1.1 {head}\r\n\r\n").and_then(|()| body(&stream))
            });
        }
    });
    endpoint
}

/// Returns the error of a call, and checks that it fails in time.
fn failure<T>(endpoint: &str, call: impl Fn(&dyn Store) -> Result<T>) -> Error {
    let server = Server::given(&format!("url={endpoint} bucket=b key=k secret=s"));
    let store = open_on(&server.s3("answers"), &Arc::new(Shared::impatient(STILL_MAX))).unwrap();
    let begun = Instant::now();
    let error = call(&*store).err().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60), "{error} after {:?}", begun.elapsed());
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    error
}

fn given() -> Server {
    Server::given("url=unknown bucket=b key=k secret=s")
}

#[test]
fn answers_that_drip_are_cut() {
    given().again("answers_that_drip_are_cut", |_| {
        let endpoint = proxy(|mut stream| {
            loop {
                stream.write_all(b" ")?;
                thread::sleep(STILL_MAX / 5);
            }
        });
        let list = failure(&endpoint, |store| store.list(""));
        let read = failure(&endpoint, |store| store.open_head("object", 4096).map(drop));
        for error in [list, read] {
            assert!(error.to_string().contains("bytes of the answer came in 1 s"), "{error}");
        }
    });
}

#[test]
fn answers_that_do_not_end_are_cut() {
    given().again("answers_that_do_not_end_are_cut", |_| {
        let endpoint = proxy(|mut stream| {
            loop {
                stream.write_all(&[b' '; 1 << 16])?;
            }
        });
        let error = failure(&endpoint, |store| store.list(""));
        assert!(error.to_string().contains("does not end"), "{error}");
    });
}
