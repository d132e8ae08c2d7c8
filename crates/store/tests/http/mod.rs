//! Implements HTTP/1.1 as tests need it: a server of their own, which may pass requests on to a real one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// A request or an answer.
#[derive(Clone)]
pub(crate) struct Message {
    pub(crate) first: String,
    /// Headers, with names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Message {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    fn is_head(&self) -> bool {
        self.first.starts_with("HEAD")
    }

    fn encoded(&self) -> Vec<u8> {
        let headers: String = self.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        [format!("{}\r\n{headers}\r\n", self.first).into_bytes(), self.body.clone()].concat()
    }
}

fn head(reader: &mut impl BufRead) -> Option<Message> {
    let (mut first, mut headers) = (String::new(), Vec::new());
    reader.read_line(&mut first).ok().filter(|&bytes| bytes > 0)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            None => break,
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
        }
    }
    Some(Message { first: first.trim_end().to_owned(), headers, body: Vec::new() })
}

/// Answers the requests of one connection until the client ends it.
fn answer_all(client: &TcpStream, answer: &impl Fn(Message) -> Option<Message>) -> Option<()> {
    let mut reader = BufReader::new(client);
    loop {
        let mut request = head(&mut reader)?;
        let length = request.header("content-length").map_or(0, |length| length.parse().unwrap());
        request.body = vec![0; length];
        reader.read_exact(&mut request.body).ok()?;
        let is_head = request.is_head();
        let mut answer = answer(request)?;
        answer.headers.retain(|(name, _)| name != "connection" && name != "transfer-encoding");
        if !is_head {
            answer.headers.retain(|(name, _)| name != "content-length");
            answer.headers.push(("content-length".to_owned(), answer.body.len().to_string()));
        }
        let mut writer = client;
        writer.write_all(&answer.encoded()).ok()?;
    }
}

/// Starts a server that answers like this as long as this process runs; returns its URL. Without an answer it closes
/// the connection.
pub(crate) fn serve(answer: impl Fn(Message) -> Option<Message> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || answer_all(&client, &*answer));
        }
    });
    endpoint
}

/// Makes an answer with this status, such as `200 OK`.
pub(crate) fn answer(status: &str, body: &str) -> Message {
    Message { first: format!("HTTP/1.1 {status}"), headers: vec![], body: body.as_bytes().to_vec() }
}

/// Returns the answer of the server at `http://HOST:PORT`.
pub(crate) fn pass_on(mut request: Message, endpoint: &str) -> Option<Message> {
    request.headers.retain(|(name, _)| name != "connection");
    request.headers.push(("connection".to_owned(), "close".to_owned()));
    let mut service = TcpStream::connect(endpoint.strip_prefix("http://")?).ok()?;
    service.write_all(&request.encoded()).ok()?;
    let mut answers = BufReader::new(service);
    let mut answer = head(&mut answers)?;
    if !request.is_head() {
        match answer.header("content-length") {
            Some(length) => {
                answer.body = vec![0; length.parse().unwrap()];
                answers.read_exact(&mut answer.body).ok()?;
            }
            None => _ = answers.read_to_end(&mut answer.body).ok()?,
        }
    }
    Some(answer)
}
