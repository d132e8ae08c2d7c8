//! `gs://` keeps the contract, as far as that can be shown without Google: no emulator speaks the interface that the
//! client uses, so a translator stands in front of MinIO. It turns generations into ETags, Google's headers into
//! Amazon's, and drops the credentials. What it does not show: Google's own answers to overload, its authentication,
//! and that its condition holds under a race as MinIO's does.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use shardfast_store::servers::Server;
use shardfast_store::{conformance, open};

/// The ETag of each generation that was told.
type Generations = Arc<Mutex<HashMap<u64, String>>>;

struct Message {
    first: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Message {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
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

/// The request as Amazon's interface has it, and the generation that it asks for.
fn request_of(mut request: Message, server: &str, generations: &Generations) -> (Message, Option<u64>) {
    let mut generation = None;
    let (before, after) =
        request.first.split_once('?').map_or((request.first.clone(), String::new()), |(before, rest)| {
            let (query, version) = rest.rsplit_once(' ').unwrap();
            let kept = query.split('&').filter(|part| match part.strip_prefix("generation=") {
                None => true,
                Some(number) => {
                    generation = number.parse().ok();
                    false
                }
            });
            let kept = kept.collect::<Vec<_>>().join("&");
            (before.to_owned(), if kept.is_empty() { format!(" {version}") } else { format!("?{kept} {version}") })
        });
    // MinIO knows a bucket by its name only, Google by what is encoded, too.
    request.first = before.replace("%2D", "-") + &after;
    request.headers.retain(|(name, _)| !["authorization", "host", "connection", "if-match"].contains(&name.as_str()));
    for (name, value) in &mut request.headers {
        if name == "x-goog-if-generation-match" {
            assert_eq!(value, "0");
            (*name, *value) = ("if-none-match".to_owned(), "*".to_owned());
        } else if let Some(key) = name.strip_prefix("x-goog-meta-") {
            *name = format!("x-amz-meta-{key}");
        }
    }
    if let Some(generation) = generation {
        let etag = generations.lock().unwrap().get(&generation).cloned().unwrap_or_default();
        request.headers.push(("if-match".to_owned(), etag));
    }
    request.headers.push(("host".to_owned(), server.to_owned()));
    request.headers.push(("connection".to_owned(), "close".to_owned()));
    (request, generation)
}

/// One connection of the client's; ends when the client ends it.
fn translate(client: &TcpStream, server: &str, generations: &Generations) -> Option<()> {
    let mut reader = BufReader::new(client);
    loop {
        let mut request = head(&mut reader)?;
        let length = request.header("content-length").map_or(0, |length| length.parse().unwrap());
        request.body = vec![0; length];
        reader.read_exact(&mut request.body).ok()?;
        let is_head = request.first.starts_with("HEAD");
        let (request, generation) = request_of(request, server, generations);

        let mut service = TcpStream::connect(server).ok()?;
        service.write_all(&encoded(&request)).ok()?;
        let mut answers = BufReader::new(service);
        let mut answer = head(&mut answers)?;
        if !is_head {
            match answer.header("content-length") {
                Some(length) => {
                    answer.body = vec![0; length.parse().unwrap()];
                    answers.read_exact(&mut answer.body).ok()?;
                }
                None => _ = answers.read_to_end(&mut answer.body).ok()?,
            }
        }
        if generation.is_some() && answer.first.contains(" 412 ") {
            "HTTP/1.1 404 Not Found".clone_into(&mut answer.first);
        }
        if let Some(etag) = answer.header("etag").map(str::to_owned) {
            let digits: String = etag.chars().filter(char::is_ascii_hexdigit).take(15).collect();
            let number = u64::from_str_radix(&digits, 16).unwrap();
            generations.lock().unwrap().insert(number, etag);
            answer.headers.push(("x-goog-generation".to_owned(), number.to_string()));
        }
        for (name, _) in &mut answer.headers {
            if let Some(key) = name.strip_prefix("x-amz-meta-") {
                *name = format!("x-goog-meta-{key}");
            }
        }
        let length = answer.body.len().to_string();
        answer.headers.retain(|(name, _)| name != "connection" && name != "transfer-encoding");
        if !is_head {
            answer.headers.retain(|(name, _)| name != "content-length");
            answer.headers.push(("content-length".to_owned(), length));
        }
        let mut writer = client;
        writer.write_all(&encoded(&answer)).ok()?;
    }
}

fn encoded(message: &Message) -> Vec<u8> {
    let headers: String = message.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    [format!("{}\r\n{headers}\r\n", message.first).into_bytes(), message.body.clone()].concat()
}

/// Lets everybody use the bucket: the translator has no keys.
fn make_public(server: &Server) {
    let may = |actions: &str, resource: String| {
        format!(r#"{{"Effect":"Allow","Principal":{{"AWS":["*"]}},"Action":[{actions}],"Resource":["{resource}"]}}"#)
    };
    let bucket = format!("arn:aws:s3:::{}", server.bucket());
    let of_objects = r#""s3:GetObject","s3:PutObject","s3:DeleteObject","s3:AbortMultipartUpload""#;
    let (lists, objects) = (may(r#""s3:ListBucket""#, bucket.clone()), may(of_objects, format!("{bucket}/*")));
    let policy = format!(r#"{{"Version":"2012-10-17","Statement":[{lists},{objects}]}}"#);
    let (key, secret) = server.keys();
    let done = Command::new("curl")
        .args([
            "--silent",
            "--fail-with-body",
            "--noproxy",
            "*",
            "--aws-sigv4",
            "aws:amz:us-east-1:s3",
            "--request",
            "PUT",
        ])
        .args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"])
        .args(["--user", &format!("{key}:{secret}"), "--data", &policy])
        .arg(format!("{}/{}?policy=", server.endpoint(), server.bucket()))
        .output()
        .expect("curl runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}

#[test]
fn minio_behind_a_translator() {
    Server::with("minio", "minio_behind_a_translator", |server| {
        make_public(server);
        let service = server.endpoint().strip_prefix("http://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let generations = Generations::default();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (service, generations) = (service.clone(), Arc::clone(&generations));
                std::thread::spawn(move || translate(&client, &service, &generations));
            }
        });
        conformance::check(|name| open(&format!("gs://{}/gcs/{name}?endpoint={endpoint}", server.bucket())).unwrap());
    });
}
