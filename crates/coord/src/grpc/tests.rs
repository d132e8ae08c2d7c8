//! Tests what the public functions cannot provoke: headers of other jobs, and peers that fall silent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use tonic::metadata::MetadataMap;

use super::pass::*;
use super::*;

const HOST: &str = "127.0.0.1";
const LONG: Duration = Duration::from_secs(60);
const QUICK: KeepAlive = KeepAlive { interval: Duration::from_millis(100), timeout: Duration::from_millis(1500) };

#[test]
fn a_pass_is_checked_field_by_field_and_both_values_are_named() {
    let topology = Topology::new(4, 2, 8).unwrap();
    let root = Pass::new(0, &topology, "secret").unwrap();
    let asked = |change: &dyn Fn(&mut MetadataMap)| {
        let mut headers = MetadataMap::new();
        Pass::new(3, &topology, "secret").unwrap().show(&mut headers);
        change(&mut headers);
        root.check(&headers)
    };
    let refused = |change: &dyn Fn(&mut MetadataMap)| asked(change).unwrap_err().reason;
    assert_eq!(asked(&|_| {}), Ok(3));

    let stranger = "the token is not this job's";
    for token in ["Bearer other!", "Bearer secret2", "Bearer secre", "Bearer", "secret", ""] {
        assert_eq!(refused(&|headers| drop(headers.insert(TOKEN_HEADER, token.parse().unwrap()))), stranger);
    }
    assert_eq!(refused(&|headers| drop(headers.remove(TOKEN_HEADER))), stranger);
    assert_eq!(refused(&MetadataMap::clear), stranger);

    assert_eq!(
        refused(&|headers| drop(headers.insert(PROTOCOL_HEADER, 9.into()))),
        "it uses protocol 9, rank 0 uses 4: all ranks must run the same version"
    );
    assert_eq!(
        refused(&|headers| drop(headers.insert(WORLD_HEADER, 5.into()))),
        "it belongs to a world of 5 ranks, rank 0 to a world of 4 ranks"
    );
    for (header, expected) in [(LOCAL_WORLD_HEADER, "2 ranks on a node"), (FAN_OUT_HEADER, "a fan-out of 8")] {
        let message = refused(&|headers| drop(headers.insert(header, 5.into())));
        assert!(message.starts_with("it belongs to a tree with ") && message.ends_with(expected), "{message}");
    }
    for (rank, named) in [("4", "4"), ("-1", "-1"), ("4294967299", "4294967299"), ("x", "x"), ("", "")] {
        let message = refused(&|headers| drop(headers.insert(RANK_HEADER, rank.parse().unwrap())));
        assert_eq!(message, format!("its rank is {named}, expected one below 4"));
    }
    assert_eq!(refused(&|headers| drop(headers.remove(RANK_HEADER))), "its rank is none, expected one below 4");
}

/// Forwards one connection to `address` while `open`, then keeps both ends open and sends nothing more.
fn silenceable(address: String, open: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let front = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(address).unwrap();
        let pump = |mut from: TcpStream, mut to: TcpStream, open: Arc<AtomicBool>| {
            thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                    if open.load(Ordering::SeqCst) && to.write_all(&buffer[..bytes]).is_err() {
                        break;
                    }
                }
                // Open as long as the other end is: nothing but silence gives it away.
                drop(to);
            })
        };
        let there = pump(client.try_clone().unwrap(), server.try_clone().unwrap(), Arc::clone(&open));
        let back = pump(server, client, open);
        there.join().unwrap();
        back.join().unwrap();
    });
    front
}

#[test]
fn only_whoever_knows_the_token_can_bring_its_rank_into_disrepute() {
    let topology = Topology::new(4, 1, 8).unwrap();
    let mut headers = MetadataMap::new();
    Pass::new(3, &Topology::new(5, 1, 8).unwrap(), "secret").unwrap().show(&mut headers);
    let refused_by = |token: &str| Pass::new(0, &topology, token).unwrap().check(&headers).unwrap_err();
    assert_eq!(refused_by("secret").rank, Some(3));
    assert_eq!(refused_by("other").rank, None);
}

fn opened(rank: u32) -> Place {
    let membership = Membership {
        host: HOST.to_owned(),
        ports: Ports::default(),
        rank,
        topology: Topology::new(2, 1, 8).unwrap(),
        token: "secret".to_owned(),
        tls: None,
    };
    Place::open_with(membership, 0, QUICK).unwrap()
}

#[test]
fn both_ends_of_a_silent_connection_find_out_by_their_pings() {
    let root = opened(0);
    let address = root.address().unwrap().to_owned();
    let root = root.join(None, LONG).unwrap();
    let open = Arc::new(AtomicBool::new(true));
    let front = silenceable(address, Arc::clone(&open));
    let member = opened(1).join(Some(&front), LONG).unwrap();

    // Pings get through, and no rank is lost, however idle the connection is.
    thread::sleep(Duration::from_millis(500));
    thread::scope(|threads| {
        threads.spawn(|| member.agree("alive", Ok(vec![1]), &mut |_| Err("rank 1".into()), LONG).unwrap());
        root.agree("alive", Ok(vec![0]), &mut Ok, LONG).unwrap();
    });

    let started = Instant::now();
    open.store(false, Ordering::SeqCst);
    thread::scope(|threads| {
        let member = threads.spawn(|| member.agree("silent", Ok(vec![1]), &mut |_| Err("rank 1".into()), LONG));
        let at_root = root.agree("silent", Ok(vec![0]), &mut Ok, LONG);
        assert_eq!(at_root, Err(Error::Lost { rank: 1, cause: BROKEN.into() }));
        assert_eq!(member.join().unwrap(), Err(Error::Lost { rank: 0, cause: BROKEN.into() }));
    });
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
}
