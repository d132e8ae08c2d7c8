//! Tests real servers of object storage: they keep the contract, or are refused.

mod uploads;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use shardfast_store::testing::conformance;
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;
use shardfast_store::testing::sims3::SimS3;
use shardfast_store::{Kind, Shared, open, open_on};

#[test]
#[ignore = "MinIO is built by the campaigns: make campaigns"]
fn minio() {
    Server::with("minio", "minio", |server| {
        conformance::check(|name| open(&server.s3(&format!("c/{}/{name}", std::process::id()))).unwrap())
    });
}

#[test]
fn a_simulated_service() {
    let service = SimS3::default();
    conformance::check(|name| {
        let shared = Arc::new(Shared::simulated(service.clone()));
        open_on(&format!("s3://simulated/{name}?endpoint=http://simulated"), &shared).unwrap()
    });
    assert_eq!(service.uploads(), 0);
}

#[test]
fn versitygw() {
    let check = |server: &Server| {
        conformance::check(|name| open(&server.s3(&format!("c/{name}"))).unwrap());
        conformance::check_reports(&server.s3("reports"));
    };
    Server::with("versitygw", "versitygw", check);
}

#[test]
fn azurite() {
    let check = |server: &Server| {
        conformance::check(|name| open(&server.az(&format!("c/{name}"))).unwrap());
        conformance::check_reports(&server.az("reports"));
    };
    Server::with("azurite", "azurite", check);
}

fn is_refused(url: &str) {
    let store = open(url).unwrap();
    let error = store.can_publish().unwrap_err();
    assert_eq!(error.kind, Kind::Unsupported, "{error}");
    assert!(error.message.contains("expected exactly one to succeed, found both"), "{error}");
}

/// Tests a server that ignores the condition.
#[test]
fn s3rver_is_refused() {
    Server::with("s3rver", "s3rver_is_refused", |server| {
        is_refused(&server.s3("refused"));
        let store = open(&server.s3("refused")).unwrap();
        assert_eq!(store.list("").unwrap_err().kind, Kind::NotFound, "the probe is removed");
    });
}

/// State of a hasty server: for each path whether an object exists, and how many requests have checked it.
#[derive(Default)]
struct Hasty {
    objects: Mutex<HashMap<String, (bool, u32)>>,
    looked: Condvar,
}

/// Answers as a server that checks the condition when a request begins, and overwrites when it ends: as several did, of
/// which no version can be installed any more. No request ends before two have checked, however slow the machine.
fn hasty(stream: &TcpStream, hasty: &Hasty) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut line, mut length, mut if_absent) = (String::new(), 0, false);
        reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let header = header.trim().to_ascii_lowercase();
            match header.split_once(": ") {
                None => break,
                Some(("content-length", value)) => length = value.parse().ok()?,
                Some(("if-none-match", _)) => if_absent = true,
                Some(_) => {}
            }
        }
        let path = line.split(' ').nth(1)?.to_owned();
        let mut is_taken = false;
        if if_absent {
            let mut objects = hasty.objects.lock().unwrap();
            let object = objects.entry(path.clone()).or_default();
            (is_taken, object.1) = (object.0, object.1 + 1);
            hasty.looked.notify_all();
        }
        reader.read_exact(&mut vec![0; length]).ok()?;
        if if_absent && !is_taken {
            let are_few = |objects: &mut HashMap<String, (bool, u32)>| objects[&path].1 < 2;
            let waiting = hasty.objects.lock().unwrap();
            let wait = hasty.looked.wait_timeout_while(waiting, Duration::from_secs(60), are_few);
            wait.unwrap().0.get_mut(&path)?.0 = true;
        }
        let status = if is_taken { "412 Precondition Failed" } else { "200 OK" };
        let mut writer = stream;
        write!(writer, "HTTP/1.1 {status}\r\netag: \"1\"\r\ncontent-length: 0\r\n\r\n").ok()?;
    }
}

#[test]
fn a_server_that_looks_at_the_condition_too_early_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let objects: Arc<Hasty> = Arc::default();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let objects = Arc::clone(&objects);
            std::thread::spawn(move || hasty(&stream, &objects));
        }
    });
    let given = Server::given(&format!("url={endpoint} bucket=b key=k secret=s"));
    given.again("a_server_that_looks_at_the_condition_too_early_is_refused", |server| {
        is_refused(&server.s3("hasty"));
    });
}

/// Tests uploads on all servers but MinIO, which lists uploads by their whole names only.
fn uploads_are_listed_and_aborted(server: &Server) -> Duration {
    uploads::are_listed_and_aborted(|prefix| open(&server.s3(prefix)).unwrap())
}

#[test]
fn uploads_that_were_not_completed_on_moto() {
    // Its uploads were all begun in 2010.
    Server::with("moto", "uploads_that_were_not_completed_on_moto", |server| {
        _ = uploads_are_listed_and_aborted(server)
    });
}

#[test]
fn uploads_that_were_not_completed_on_versitygw() {
    Server::with("versitygw", "uploads_that_were_not_completed_on_versitygw", |server| {
        let age = uploads_are_listed_and_aborted(server);
        assert!(age < Duration::from_secs(600), "{age:?}");
    });
}

/// Tests copies inside the service. MinIO does not complete an upload whose parts were copied, and this one keeps a
/// wrong checksum of it: a copy of a checkpoint then takes the other way. S3 itself was not tried.
#[test]
fn long_objects_are_copied_inside_the_service_in_parts() {
    Server::with("versitygw", "long_objects_are_copied_inside_the_service_in_parts", |server| {
        let from = open(&server.s3("within/from")).unwrap();
        let (to, noted) = Noted::open(&server.s3("within/to")).unwrap();
        let bytes = conformance::pattern(1, (256 << 20) + 5000);
        conformance::write_object(&*from, "a b", &bytes).unwrap();
        let there = from.service().unwrap().location().unwrap();
        to.service().unwrap().copy_within(&there, "a b", "c", bytes.len() as u64).unwrap();
        assert!(to.read("c", bytes.len() as u64).unwrap() == bytes);
        assert_eq!(noted.requests().puts, 4);
        assert_eq!(to.service().unwrap().copy_within(&there, "none", "none", 5).unwrap_err().kind, Kind::NotFound);
        let elsewhere = shardfast_store::Location { service: "amazon".to_owned(), ..there };
        assert_eq!(to.service().unwrap().copy_within(&elsewhere, "a b", "c", 5).unwrap_err().kind, Kind::Unsupported);
    });
}
