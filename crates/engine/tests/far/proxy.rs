//! A proxy in front of a server of object storage: it numbers requests and does harm to one of them, or to all from
//! that one on.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardfast_store::testing::servers::Server;

/// Fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The connection is closed before the server sees the request.
    Refused,
    /// The proxy answers with this status; the server does not see the request.
    Answered(u16),
    /// A gateway answers with a page of its own; the server does not see the request.
    Invented(u16),
    /// The server carries the request out; a gateway answers with a page of its own. Of 200 without an ETag.
    Replaced(u16),
    /// The server carries the request out; the connection is closed instead of its answer.
    AnswerLost,
    /// The connection is closed; the server carries the request out just before the client's next one of the same kind.
    Late,
    /// The server gets the request twice; the client gets the second answer.
    Twice,
    /// Half of the request's body reaches the server; both connections are closed.
    RequestCut,
    /// Half of the answer's body reaches the client, or half of its head if it has no body.
    AnswerCut,
    /// Half of the answer's body reaches the client, and the head says that this is all of it.
    AnswerShort,
    /// One bit of the request's body is another one, at so many quarters of its length.
    RequestTurned(usize),
    /// One bit of the answer's body is another one, at so many quarters of its length.
    AnswerTurned(usize),
    /// The connection stays open, and nothing comes.
    Silent,
    /// The client dies before it makes the request: nothing that it sends from there on reaches the server.
    DeadBefore,
    /// The client dies after the server has carried out the request.
    DeadAfter,
    /// The credentials of the request are replaced, and the service answers this one and all later ones that have the
    /// old ones that they have expired.
    KeysExpire,
    /// The credentials of the request are replaced, and the server does not know the old ones any more.
    KeysGo,
    /// The server is killed at this moment of the request, and begins again so many seconds later.
    ServerDies(Moment, u32),
}

/// A moment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Moment {
    /// The server has seen nothing of it.
    Before,
    /// Half of its body has reached the server.
    InBody,
    /// All of it has reached the server, which has not answered yet.
    Sent,
    /// Half of the answer's body has reached the client, which gets no more of it.
    InAnswer,
    /// The server has answered, and the client gets the answer.
    Answered,
}

/// A request: what it asks for, without what differs from run to run, and how many such requests came before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Request {
    /// Method, object's name below the prefix, and the parts of the query that tell requests apart.
    pub(crate) what: String,
    pub(crate) nth: usize,
}

impl Request {
    /// Returns whether it reads bytes of an object.
    pub(crate) fn is_read(&self) -> bool {
        self.what.starts_with("GET ") && !self.what.contains("list-type")
    }
}

/// A request that the proxy has handed on.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) request: Request,
    pub(crate) has_body: bool,
    pub(crate) answer_has_body: bool,
}

/// The harm that a proxy does.
#[derive(Clone, Debug)]
pub(crate) struct Harm {
    pub(crate) at: Request,
    pub(crate) fault: Fault,
    /// `true` if the fault also happens to each later request for the same.
    pub(crate) stays: bool,
}

/// Gives clients other credentials in place of these, which the fault makes useless.
pub(crate) type Replace = Box<dyn Fn(&str, Fault) + Send + Sync>;

/// A proxy on a port of its own, until it is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

struct State {
    server: Server,
    /// Prefix of objects' names, with the bucket: left out of requests' descriptions.
    prefix: String,
    harm: Option<Harm>,
    /// Number of the first read that gets no answer, and the distance to the next ones.
    unanswered: Option<(usize, usize)>,
    reads: AtomicUsize,
    /// Replaces the credentials.
    replace: Replace,
    /// Keys that have expired.
    expired: Mutex<Option<String>>,
    seen: Mutex<Vec<Seen>>,
    counts: Mutex<HashMap<String, usize>>,
    /// A request that the server does not have yet.
    late: Mutex<Option<(String, Vec<u8>)>>,
    harmed: AtomicUsize,
    is_dead: AtomicBool,
    is_over: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Proxy {
    /// A proxy of the server, for a client whose objects are all below `prefix`, which begins with the
    /// bucket.
    pub(crate) fn start(server: &Server, prefix: &str, harm: Option<Harm>) -> Proxy {
        Proxy::replacing(server, prefix, harm, Box::new(|_, _| ()))
    }

    /// [`start`](Proxy::start) with faults that replace credentials.
    pub(crate) fn replacing(server: &Server, prefix: &str, harm: Option<Harm>, replace: Replace) -> Proxy {
        Proxy::of(State { harm, replace, ..State::new(server, prefix) })
    }

    /// A proxy that does not answer each `every`th read from that one on.
    pub(crate) fn silent(server: &Server, prefix: &str, from: usize, every: usize) -> Proxy {
        Proxy::of(State { unanswered: Some((from, every)), ..State::new(server, prefix) })
    }

    fn of(state: State) -> Proxy {
        let state = Arc::new(state);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), state) = (client, Arc::clone(&accepting)) else { continue };
                // It ends when one of both sides closes its connection, which is no error here.
                std::thread::spawn(move || _ = state.serve(&client));
            }
        });
        Proxy { address, state }
    }

    /// Returns the proxy's URL.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the requests that it has passed on so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        locked(&self.state.seen).clone()
    }

    /// Returns the number of requests that it has harmed.
    pub(crate) fn harmed(&self) -> usize {
        self.state.harmed.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

/// The first line and the headers of a request or an answer, as they came.
struct Head(String);

impl Head {
    /// Reads one; `None` at the end of the connection.
    fn read(from: &mut impl BufRead) -> io::Result<Option<Head>> {
        let mut text = String::new();
        loop {
            match from.read_line(&mut text)? {
                0 if text.is_empty() => return Ok(None),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                _ if text.ends_with("\r\n\r\n") => return Ok(Some(Head(text))),
                _ => {}
            }
        }
    }

    fn header(&self, name: &str) -> Option<&str> {
        let headers = self.0.lines().skip(1).filter_map(|line| line.split_once(':'));
        let mut found = headers.filter(|(found, _)| found.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.trim())
    }

    /// The word of the first line at that place.
    fn word(&self, at: usize) -> &str {
        self.0.split_whitespace().nth(at).unwrap_or_default()
    }

    /// The name of the key that signed it.
    fn key(&self) -> &str {
        let signed = self.header("authorization").and_then(|signed| signed.split_once("Credential="));
        signed.map_or("", |(_, rest)| rest.split('/').next().unwrap_or_default())
    }

    fn is_chunked(&self) -> bool {
        self.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"))
    }

    /// The body behind it.
    fn body(&self, from: &mut impl BufRead) -> io::Result<Vec<u8>> {
        if self.is_chunked() {
            return chunks(from);
        }
        let bytes = self.header("content-length").map_or(0, |length| length.parse().unwrap_or(0));
        let mut body = vec![0; bytes];
        from.read_exact(&mut body)?;
        Ok(body)
    }

    /// The same head for a body of this length that comes in one piece.
    fn of_length(&self, bytes: usize) -> String {
        let is_framing = |line: &&str| {
            let name = line.split(':').next().unwrap_or_default();
            ["transfer-encoding", "content-length"].iter().any(|framing| name.eq_ignore_ascii_case(framing))
        };
        let kept = self.0.lines().filter(|line| !line.is_empty() && !is_framing(line));
        let kept: String = kept.map(|line| format!("{line}\r\n")).collect();
        format!("{kept}Content-Length: {bytes}\r\n\r\n")
    }
}

/// A body in chunks, put together.
fn chunks(from: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let digits = line.trim().split(';').next().unwrap_or_default();
        let bytes = u64::from_str_radix(digits, 16).map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
        if bytes == 0 {
            break;
        }
        if from.take(bytes).read_to_end(&mut body)? as u64 != bytes {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        from.read_line(&mut String::new())?;
    }
    // Trailers, up to an empty line.
    let mut line = String::new();
    while from.read_line(&mut line)? > 0 && !line.trim().is_empty() {
        line.clear();
    }
    Ok(body)
}

impl State {
    fn new(server: &Server, prefix: &str) -> State {
        State {
            server: server.clone(),
            prefix: prefix.to_owned(),
            harm: None,
            unanswered: None,
            reads: AtomicUsize::new(0),
            replace: Box::new(|_, _| ()),
            expired: Mutex::default(),
            seen: Mutex::default(),
            counts: Mutex::default(),
            late: Mutex::default(),
            harmed: AtomicUsize::new(0),
            is_dead: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// Hands on requests of a connection until one side closes it, or the harm does.
    fn serve(&self, connection: &TcpStream) -> io::Result<()> {
        let result = self.serve_until_closed(connection);
        let _ = connection.shutdown(Shutdown::Both);
        result
    }

    fn connect(&self) -> io::Result<TcpStream> {
        TcpStream::connect(self.server.endpoint().trim_start_matches("http://").trim_end_matches('/'))
    }

    fn serve_until_closed(&self, mut to_client: &TcpStream) -> io::Result<()> {
        to_client.set_nodelay(true)?;
        let mut client = BufReader::with_capacity(1 << 18, to_client);
        let to_server = &mut self.connect()?;
        to_server.set_nodelay(true)?;
        let mut server = BufReader::with_capacity(1 << 18, to_server.try_clone()?);
        while let Some(head) = Head::read(&mut client)? {
            let (mut seen, fault) = self.count(&head);
            match fault {
                Some(Fault::Refused | Fault::DeadBefore) => return Ok(()),
                Some(Fault::Silent) => return io::copy(&mut client, &mut io::sink()).map(|_| ()),
                _ => {}
            }
            let mut body = head.body(&mut client)?;
            seen.has_body = !body.is_empty();
            if self.is_expired(head.key(), fault) {
                to_client.write_all(refusal(400, head.word(0) == "HEAD").as_bytes())?;
                continue;
            }
            match fault {
                Some(Fault::Answered(status)) => {
                    to_client.write_all(refusal(status, head.word(0) == "HEAD").as_bytes())?;
                    continue;
                }
                Some(Fault::Invented(status)) => {
                    to_client.write_all(page(status, head.word(0) == "HEAD").as_bytes())?;
                    continue;
                }
                Some(Fault::Late) => {
                    let request = [head.of_length(body.len()).as_bytes(), &body].concat();
                    *locked(&self.late) = Some((seen.request.what, request));
                    return Ok(());
                }
                Some(Fault::RequestCut) => {
                    to_server.write_all(head.0.as_bytes())?;
                    to_server.write_all(&body[..body.len() / 2])?;
                    return to_server.shutdown(Shutdown::Both);
                }
                Some(Fault::Twice) => self.send(&[head.of_length(body.len()).as_bytes(), &body].concat())?,
                Some(Fault::RequestTurned(quarters)) => turn(&mut body, quarters),
                Some(Fault::ServerDies(Moment::Before, seconds)) => self.server.crash(seconds),
                Some(Fault::ServerDies(Moment::InBody, seconds)) => {
                    to_server.write_all(head.of_length(body.len()).as_bytes())?;
                    to_server.write_all(&body[..body.len() / 2])?;
                    self.server.crash(seconds);
                }
                _ => {}
            }
            self.send_late(&seen.request.what)?;
            let head_sent = to_server.write_all(head.of_length(body.len()).as_bytes());
            // A server that refuses a request may answer and close before it has read all of it.
            let sent = head_sent.and_then(|()| to_server.write_all(&body));
            if let Some(Fault::ServerDies(Moment::Sent, seconds)) = fault {
                self.server.crash(seconds);
            }
            let answer = Head::read(&mut server)?.ok_or(ErrorKind::UnexpectedEof)?;
            let has_body = head.word(0) != "HEAD" && !["204", "304"].contains(&answer.word(1));
            let mut body = if has_body { answer.body(&mut server)? } else { Vec::new() };
            seen.answer_has_body = !body.is_empty();
            locked(&self.seen).push(seen);
            let answer = if has_body { answer.of_length(body.len()) } else { answer.0 };
            match fault {
                Some(Fault::AnswerLost | Fault::DeadAfter) => return Ok(()),
                Some(Fault::Replaced(status)) => {
                    to_client.write_all(page(status, head.word(0) == "HEAD").as_bytes())?;
                    continue;
                }
                Some(Fault::AnswerCut) if body.is_empty() => {
                    return to_client.write_all(&answer.as_bytes()[..answer.len() / 2]);
                }
                Some(Fault::AnswerCut) => {
                    to_client.write_all(answer.as_bytes())?;
                    return to_client.write_all(&body[..body.len() / 2]);
                }
                Some(Fault::AnswerShort) => {
                    body.truncate(body.len() / 2);
                    to_client.write_all(Head(answer).of_length(body.len()).as_bytes())?;
                    to_client.write_all(&body)?;
                    continue;
                }
                Some(Fault::AnswerTurned(quarters)) => turn(&mut body, quarters),
                Some(Fault::ServerDies(Moment::InAnswer, seconds)) => {
                    to_client.write_all(answer.as_bytes())?;
                    to_client.write_all(&body[..body.len() / 2])?;
                    self.server.crash(seconds);
                    return Ok(());
                }
                Some(Fault::ServerDies(Moment::Answered, seconds)) => self.server.crash(seconds),
                _ => {}
            }
            to_client.write_all(answer.as_bytes())?;
            to_client.write_all(&body)?;
            sent?;
        }
        Ok(())
    }

    /// Returns whether the credentials of a request have expired, perhaps by its fault.
    fn is_expired(&self, key: &str, fault: Option<Fault>) -> bool {
        if let Some(fault @ (Fault::KeysExpire | Fault::KeysGo)) = fault {
            (self.replace)(key, fault);
            *locked(&self.expired) = (fault == Fault::KeysExpire).then(|| key.to_owned());
        }
        locked(&self.expired).as_deref() == Some(key)
    }

    /// Hands on the request that is late, if it is of this kind, and waits until it is carried out.
    fn send_late(&self, what: &str) -> io::Result<()> {
        let late = locked(&self.late).take_if(|(late, _)| late == what);
        late.map_or(Ok(()), |(_, request)| self.send(&request))
    }

    /// Sends a request over a connection of its own, and waits until it is carried out.
    fn send(&self, request: &[u8]) -> io::Result<()> {
        let mut server = self.connect()?;
        server.write_all(request)?;
        Head::read(&mut BufReader::new(server)).map(|_| ())
    }

    /// Counts a request; returns its description and its fault.
    fn count(&self, head: &Head) -> (Seen, Option<Fault>) {
        let target = decoded(head.word(1));
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let path = path.trim_start_matches('/');
        let mut names = Vec::new();
        let mut place = path.to_owned();
        for (name, value) in query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, ""))) {
            match name {
                "partNumber" => names.push(format!("{name}={value}")),
                "prefix" => place = format!("{path}/{}", value.trim_end_matches('/')),
                _ => names.push(name.to_owned()),
            }
        }
        let below = place.strip_prefix(&self.prefix).unwrap_or(&place).trim_start_matches('/');
        let what = format!("{} {}?{}", head.word(0), without_attempt(below), names.join("&"));
        let nth = {
            let mut counts = locked(&self.counts);
            let count = counts.entry(what.clone()).or_default();
            *count += 1;
            *count - 1
        };
        let request = Request { what, nth };
        let fault = self.fault(&request);
        (Seen { request, has_body: false, answer_has_body: false }, fault)
    }

    /// Returns the fault of a request.
    fn fault(&self, request: &Request) -> Option<Fault> {
        if let Some((from, every)) = self.unanswered.filter(|_| request.is_read()) {
            let number = self.reads.fetch_add(1, Ordering::Relaxed);
            if number >= from && (number - from).is_multiple_of(every) {
                self.harmed.fetch_add(1, Ordering::Relaxed);
                return Some(Fault::Silent);
            }
        }
        let harm = self.harm.as_ref()?;
        let is_hit = harm.at == *request || harm.stays && harm.at.what == request.what && harm.at.nth <= request.nth;
        if is_hit && matches!(harm.fault, Fault::DeadBefore | Fault::DeadAfter) {
            self.harmed.fetch_add(1, Ordering::Relaxed);
            self.is_dead.store(true, Ordering::Relaxed);
            return Some(harm.fault);
        }
        if self.is_dead.load(Ordering::Relaxed) {
            return Some(Fault::Refused);
        }
        is_hit.then(|| {
            self.harmed.fetch_add(1, Ordering::Relaxed);
            harm.fault
        })
    }
}

/// A path with the random part of each name left out.
fn without_attempt(path: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric();
    path.split_inclusive(|c| !is_word(c))
        .map(|piece| {
            let word = piece.trim_end_matches(|c| !is_word(c));
            let is_random = word.len() >= 16 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
            if is_random { format!("*{}", &piece[word.len()..]) } else { piece.to_owned() }
        })
        .collect()
}

/// Percent-decoded, for names of ASCII.
fn decoded(target: &str) -> String {
    let mut pieces = target.split('%');
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| match piece.get(..2).map(|digits| u8::from_str_radix(digits, 16)) {
        Some(Ok(byte)) => format!("{text}{}{}", byte as char, &piece[2..]),
        _ => format!("{text}%{piece}"),
    })
}

/// Turns a bit: of the first size that a list names, instead of the middle. A body that is not there has none.
fn turn(body: &mut [u8], quarters: usize) {
    const SIZE: &[u8] = b"<Size>";
    let size = body.windows(SIZE.len()).position(|window| window == SIZE).filter(|_| quarters == 2);
    let at = size.map_or(body.len() * quarters / 4, |at| at + SIZE.len());
    if let Some(byte) = body.get_mut(at) {
        *byte ^= 1;
    }
}

/// A gateway's own answer: a page in HTML, without a code of S3.
fn page(status: u16, is_head: bool) -> String {
    let body = "<html><body>as the gateway wants it</body></html>";
    let place = if status == 302 { "Location: http://127.0.0.1:1/login\r\n" } else { "" };
    let head = format!("HTTP/1.1 {status} Page\r\nContent-Type: text/html\r\n{place}");
    format!("{head}Content-Length: {}\r\n\r\n{}", body.len(), if is_head { "" } else { body })
}

/// An answer of S3 to a request that had no effect.
fn refusal(status: u16, is_head: bool) -> String {
    let (code, reason) = match status {
        200 => ("InternalError", "OK"),
        400 => ("ExpiredToken", "Bad Request"),
        503 => ("SlowDown", "Service Unavailable"),
        _ => ("InternalError", "Internal Server Error"),
    };
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>as the test wants it</Message>\
         </Error>"
    );
    let head = format!("HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n");
    match is_head {
        true => format!("{head}Content-Length: 0\r\n\r\n"),
        false => format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()),
    }
}
