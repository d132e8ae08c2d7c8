//! What the public functions do not let a caller try: strangers' headers, and peers that fall silent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use super::*;

const HOST: &str = "127.0.0.1";
const LONG: Duration = Duration::from_secs(60);
const QUICK: KeepAlive = KeepAlive { interval: Duration::from_millis(100), timeout: Duration::from_millis(200) };

#[test]
fn a_pass_is_checked_field_by_field_and_both_values_are_named() {
    let root = Pass::new(0, 4, "secret").unwrap();
    let asked = |change: &dyn Fn(&mut MetadataMap)| {
        let mut headers = MetadataMap::new();
        Pass::new(3, 4, "secret").unwrap().show(&mut headers);
        change(&mut headers);
        root.check(&headers).map_err(|(_, message)| message)
    };
    let refused = |change: &dyn Fn(&mut MetadataMap)| asked(change).unwrap_err();
    assert_eq!(asked(&|_| {}), Ok(3));

    let stranger = "the token is not this job's";
    for token in ["Bearer other!", "Bearer secret2", "Bearer secre", "Bearer", "secret", ""] {
        assert_eq!(refused(&|headers| drop(headers.insert(TOKEN_HEADER, token.parse().unwrap()))), stranger);
    }
    assert_eq!(refused(&|headers| drop(headers.remove(TOKEN_HEADER))), stranger);
    assert_eq!(refused(&MetadataMap::clear), stranger);

    assert_eq!(
        refused(&|headers| drop(headers.insert(PROTOCOL_HEADER, 2.into()))),
        "it speaks protocol 2, rank 0 speaks 1: all ranks must run the same version"
    );
    assert_eq!(
        refused(&|headers| drop(headers.insert(WORLD_HEADER, 5.into()))),
        "it belongs to a world of 5 ranks, rank 0 to one of 4"
    );
    for (rank, named) in [("0", "0"), ("4", "4"), ("-1", "-1"), ("4294967299", "4294967299"), ("x", "x"), ("", "")] {
        let message = refused(&|headers| drop(headers.insert(RANK_HEADER, rank.parse().unwrap())));
        assert_eq!(message, format!("its rank is {named}, expected one from 1 below 4"));
    }
    assert_eq!(refused(&|headers| drop(headers.remove(RANK_HEADER))), "its rank is none, expected one from 1 below 4");
}

/// Carries one connection to `address` for as long as `open`, then keeps both ends and says nothing more.
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
fn both_ends_of_a_silent_connection_find_out_by_their_pings() {
    let (root, address) = Root::open("127.0.0.1", Pass::new(0, 2, "secret").unwrap(), QUICK).unwrap();
    let open = Arc::new(AtomicBool::new(true));
    let front = silenceable(address, Arc::clone(&open));
    let member = Member::join(&front, HOST, &Pass::new(1, 2, "secret").unwrap(), LONG, QUICK).unwrap();

    // Pings get through and nobody is lost, however idle the connection is.
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
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}
