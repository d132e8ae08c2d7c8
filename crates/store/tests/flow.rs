//! Tests how many objects are sent at a time, as the service sees it.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use shardfast_store::testing::conformance::buffer;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Error, Next, ObjectWriter, Result, Write, Writes, open};

/// A service that records how many requests it has at a time.
struct Service {
    /// Number of requests at a time beyond which it throttles.
    most: usize,
    /// Time that a request takes.
    takes: Duration,
    now: AtomicUsize,
    /// Record of each request that it carried out or refused, in order: how many there were, and whether it was
    /// refused.
    seen: Mutex<Vec<(usize, bool)>>,
}

impl Service {
    /// Starts a service that forgets what it receives.
    fn start(most: usize, takes: Duration) -> (Arc<Service>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let service = Arc::new(Service { most, takes, now: AtomicUsize::new(0), seen: Mutex::default() });
        let accepting = Arc::clone(&service);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let service = Arc::clone(&accepting);
                thread::spawn(move || service.serve(&stream));
            }
        });
        (service, endpoint)
    }

    fn serve(&self, mut stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        loop {
            let (mut line, mut length) = (String::new(), 0);
            reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let Some((name, value)) = header.trim().split_once(": ") else { break };
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.parse().ok()?;
                }
            }
            reader.read_exact(&mut vec![0; length]).ok()?;
            let is_refused = now > self.most;
            self.seen.lock().unwrap().push((now, is_refused));
            if !is_refused {
                thread::sleep(self.takes);
            }
            self.now.fetch_sub(1, Ordering::SeqCst);
            let status = if is_refused { "503 Slow Down" } else { "200 OK" };
            write!(stream, "HTTP/1.1 {status}\r\netag: \"1\"\r\ncontent-length: 0\r\n\r\n").ok()?;
        }
    }
}

const BYTES: usize = 4096;

/// Writes of whole objects; a failed one is made again at once.
struct Objects<'a> {
    writers: &'a [Box<dyn ObjectWriter>],
    waiting: Mutex<Vec<usize>>,
}

impl<'a> Writes<'a> for Objects<'a> {
    fn next(&self, wait: bool) -> Next<'a> {
        assert!(wait);
        let Some(number) = self.waiting.lock().unwrap().pop() else { return Next::End };
        let object = &*self.writers[number];
        Next::Write(Write { object, offset: 0, buffers: vec![buffer(&[0; BYTES])], bytes: BYTES, number, crc64: None })
    }

    fn failed(&self, write: Write<'a>, error: Error) -> Result<()> {
        assert!(error.to_string().contains("503"), "{error}");
        self.waiting.lock().unwrap().push(write.number);
        Ok(())
    }
}

/// Sends `objects` objects to the service.
fn send(server: &Server, objects: usize) {
    let store = open(&server.s3("flow")).unwrap();
    let create = |i| store.create(&format!("object-{i}"), BYTES as u64).unwrap();
    let mut writers: Vec<Box<dyn ObjectWriter>> = (0..objects).map(create).collect();
    let waiting = Mutex::new((0..objects).collect());
    store.write_all(&Objects { writers: &writers, waiting }).unwrap();
    writers.iter_mut().for_each(|writer| writer.finish().unwrap());
}

fn given(endpoint: &str) -> Server {
    Server::given(&format!("url={endpoint} bucket=b key=k secret=s"))
}

#[test]
fn fewer_are_sent_when_the_service_throttles() {
    given("unknown").again("fewer_are_sent_when_the_service_throttles", |_| {
        let (service, endpoint) = Service::start(6, Duration::from_millis(5));
        send(&given(&endpoint), 400);
        let refused = service.seen.lock().unwrap().iter().filter(|(_, is_refused)| *is_refused).count();
        // Always 16 at a time, it refuses three hundred.
        assert!((1..=100).contains(&refused), "{refused} refused");
    });
}

#[test]
fn more_are_sent_when_that_is_faster() {
    given("unknown").again("more_are_sent_when_that_is_faster", |_| {
        let (service, endpoint) = Service::start(usize::MAX, Duration::from_millis(100));
        send(&given(&endpoint), 300);
        let most = service.seen.lock().unwrap().iter().map(|(now, _)| *now).max().unwrap();
        assert!((32..=64).contains(&most), "{most} at a time");
    });
}
