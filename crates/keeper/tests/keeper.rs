//! Tests a keeper in this process against the contract of stores, and against processes that do not keep to it.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_keeper::Keeper;
use shardfast_store::keeper::wire::{self, Answer, Request};
use shardfast_store::keeper::{leave, status};
use shardfast_store::testing::conformance;
use shardfast_store::{Kind, Store, open};

/// Begins a keeper with a name of its own that lingers for that time; returns the name, and the calls of its sender.
fn keeper(linger: Duration) -> (String, mpsc::Receiver<()>, thread::JoinHandle<Result<(), String>>) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let keeper = Keeper::listen(&name, "s3://bucket/run", linger).unwrap();
    let (sent, calls) = mpsc::channel();
    let serving = thread::spawn(move || {
        keeper.serve(|_| {
            let _ = sent.send(());
            Ok(())
        })
    });
    (name, calls, serving)
}

#[test]
fn conformance_of_the_store() {
    let (name, _, serving) = keeper(Duration::from_secs(600));
    conformance::check(|run| open(&format!("keeper://{name}/{run}")).unwrap());
    conformance::check_reports(&format!("keeper://{name}/reports"));
    leave(&name).unwrap();
    serving.join().unwrap().unwrap();
    let gone = open(&format!("keeper://{name}/run")).unwrap().list("").unwrap_err();
    assert!(gone.kind == Kind::Unavailable && gone.is_final, "{gone}");
    assert_eq!(status(&name).unwrap_err().kind, Kind::NotFound);
}

#[test]
fn a_second_keeper_of_a_name_is_refused() {
    let (name, _, serving) = keeper(Duration::from_secs(600));
    assert_eq!(Keeper::listen(&name, "run", Duration::ZERO).err().unwrap().kind, Kind::Conflict);
    leave(&name).unwrap();
    serving.join().unwrap().unwrap();
    // Its name is free again, as soon as its thread has ended.
    let until = Instant::now() + Duration::from_secs(10);
    while Keeper::listen(&name, "run", Duration::ZERO).is_err() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(5));
    }
}

/// A connection as a process makes it that does not use the store.
fn connection(name: &str) -> UnixStream {
    let link = UnixStream::connect_addr(&wire::address(name).unwrap()).unwrap();
    wire::send(&link, &Request::Hello { version: wire::VERSION }, None).unwrap();
    assert!(matches!(wire::receive(&link).unwrap(), Some((Answer::Done, _))));
    link
}

fn asked(link: &UnixStream, request: &Request) -> Answer {
    wire::send(link, request, None).unwrap();
    wire::receive(link).unwrap().unwrap().0
}

#[test]
fn what_a_writer_gives_up_is_gone_when_the_call_ends() {
    let (name, ..) = keeper(Duration::from_secs(600));
    let store = open(&format!("keeper://{name}")).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|threads| {
        // Other work, so that the keeper's threads are not the next to run.
        for _ in 0..16 {
            threads.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let stayed = (0..200).find(|_| {
            drop(store.create("a/b", 5).unwrap());
            store.list("a").err().map(|error| error.kind) != Some(Kind::NotFound)
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(stayed, None);
    });
}

#[test]
fn a_writer_that_dies_leaves_nothing() {
    let (name, ..) = keeper(Duration::from_secs(600));
    let store = open(&format!("keeper://{name}")).unwrap();
    let link = connection(&name);
    assert!(matches!(asked(&link, &Request::Create { name: "a/b".into(), bytes: 5 }), Answer::Memory { bytes: 5 }));
    assert_eq!(store.create("a/b", 5).err().unwrap().kind, Kind::Conflict);
    assert_eq!(store.size("a/b").unwrap_err().kind, Kind::NotFound);
    drop(link);
    let until = Instant::now() + Duration::from_secs(10);
    while store.list("a").is_ok() && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status(&name).unwrap().objects, 0);
    conformance::write_object(&*store, "a/b", b"bytes").unwrap();
}

#[test]
fn what_is_finished_never_changes() {
    let (name, ..) = keeper(Duration::from_secs(600));
    let store = open(&format!("keeper://{name}")).unwrap();
    let link = connection(&name);
    wire::send(&link, &Request::Create { name: "one".into(), bytes: 4096 }, None).unwrap();
    let (_, memory) = wire::receive::<Answer>(&link).unwrap().unwrap();
    let memory = memory.unwrap();
    rustix::io::pwrite(&memory, &[7; 4096], 0).unwrap();
    assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    // Another connection cannot finish it.
    assert!(matches!(asked(&connection(&name), &Request::Finish { name: "one".into() }), Answer::Refused { .. }));
    assert!(matches!(asked(&link, &Request::Finish { name: "one".into() }), Answer::Done));
    assert!(rustix::io::pwrite(&memory, &[8; 4096], 0).is_err());
    assert_eq!(store.read("one", 4096).unwrap(), [7; 4096]);
    let object = store.open("one").unwrap();
    assert_eq!(object.page_cache().unwrap().map().unwrap().len(), 4096);
    // Readers go on after it is deleted.
    store.delete("one").unwrap();
    let mut again = [0; 4096];
    object.read_at(0, &mut again).unwrap();
    assert_eq!(again, [7; 4096]);
}

#[test]
fn strange_connections_harm_nobody() {
    let (name, ..) = keeper(Duration::from_secs(600));
    let silent: Vec<UnixStream> =
        (0..300).map(|_| UnixStream::connect_addr(&wire::address(&name).unwrap()).unwrap()).collect();
    let noise = UnixStream::connect_addr(&wire::address(&name).unwrap()).unwrap();
    (&noise).write_all(&[255; 64]).unwrap();
    let old = UnixStream::connect_addr(&wire::address(&name).unwrap()).unwrap();
    wire::send(&old, &Request::Hello { version: 99 }, None).unwrap();
    let Some((Answer::Refused { kind, why }, _)) = wire::receive(&old).unwrap() else { panic!("it was served") };
    assert!(kind == Kind::Unsupported && why.contains("found 99"), "{why}");
    let store = open(&format!("keeper://{name}")).unwrap();
    conformance::write_object(&*store, "one", b"bytes").unwrap();
    assert_eq!(store.read("one", 5).unwrap(), b"bytes");
    drop(silent);
}

#[test]
fn an_object_without_room_is_refused_with_the_numbers() {
    let (name, ..) = keeper(Duration::from_secs(600));
    let store = open(&format!("keeper://{name}")).unwrap();
    let free = store.free_bytes().unwrap();
    assert!(free > 0);
    let error = store.create("large", 1 << 50).err().unwrap();
    assert!(error.kind == Kind::Exhausted && error.message.contains("expected memory for 1125899906842624"), "{error}");
    // What is promised to one is not promised to another.
    let half = store.create("half", free / 2).unwrap();
    assert_eq!(store.create("most", free / 4 * 3).err().unwrap().kind, Kind::Exhausted);
    drop(half);
}

#[test]
fn it_ends_when_it_was_not_used_for_a_while() {
    let (name, calls, serving) = keeper(Duration::from_millis(300));
    let store: Arc<dyn Store> = open(&format!("keeper://{name}")).unwrap();
    store.put("one", b"1").unwrap();
    // The store holds a connection.
    assert!(calls.recv_timeout(Duration::from_secs(1)).is_err());
    assert_eq!(status(&name).unwrap().users, 1);
    drop(store);
    calls.recv_timeout(Duration::from_secs(10)).unwrap();
    serving.join().unwrap().unwrap();
}

#[test]
fn what_cannot_be_sent_is_tried_again_unless_it_is_used() {
    let name = format!("test-{}-refused", std::process::id());
    let keeper = Keeper::listen(&name, "run", Duration::from_millis(50)).unwrap();
    let tries = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&tries);
    let serving = thread::spawn(move || {
        keeper.serve(|_| {
            let mut tries = counted.lock().unwrap();
            *tries += 1;
            if *tries == 1 { Err("the place is away".to_owned()) } else { Ok(()) }
        })
    });
    let until = Instant::now() + Duration::from_secs(10);
    while status(&name).unwrap().failure.is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status(&name).unwrap().failure.as_deref(), Some("the place is away"));
    let store = open(&format!("keeper://{name}")).unwrap();
    store.put("one", b"1").unwrap();
    drop(store);
    serving.join().unwrap().unwrap();
    assert_eq!(*tries.lock().unwrap(), 2);
}
