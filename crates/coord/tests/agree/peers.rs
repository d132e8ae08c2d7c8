//! Tests ranks with connections of their own: rounds of messages, connections without a proof, lost or silent peers.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use shardfast_coord::peers::{Joining, Message, Peers};
use shardfast_coord::{Coord, Error, local};

use crate::{LONG, promptly};

const BYTES_MAX: u64 = 1 << 26;

/// Connects every rank with all others.
fn joined(coords: &[Arc<dyn Coord>], purpose: &str, deadline: Duration) -> Vec<Peers> {
    let mut joining: Vec<Joining> =
        coords.iter().map(|coord| Joining::listen(&**coord, purpose, None).unwrap()).collect();
    let addresses: Vec<(u32, String)> =
        coords.iter().zip(&joining).map(|(coord, joining)| (coord.rank(), joining.address().to_owned())).collect();
    thread::scope(|threads| {
        let ranks: Vec<_> = coords
            .iter()
            .zip(joining.drain(..))
            .map(|(coord, mut joining)| {
                let peers: Vec<_> = addresses.iter().filter(|(rank, _)| *rank != coord.rank()).cloned().collect();
                threads.spawn(move || {
                    joining.begin(&peers);
                    assert_eq!(joining.go_on(LONG), Ok(vec![]));
                    joining.joined(deadline, BYTES_MAX)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn message(text: &[u8]) -> Message {
    vec![Arc::new(text.to_vec()), Arc::new(Vec::new()), Arc::new(b"!".to_vec())]
}

#[test]
fn each_gets_what_each_other_one_sent() {
    let coords = local(5);
    let ranks = joined(&coords, "test", LONG);
    thread::scope(|threads| {
        for (rank, mut peers) in (0u32..).zip(ranks) {
            threads.spawn(move || {
                for round in 0..20u32 {
                    // Rank 4 is done with after ten rounds; some messages fill every buffer on the way.
                    let others = (0..5).filter(|&other| other != rank && (round < 10 || other.max(rank) < 4));
                    let bytes = |from: u32, to: u32| vec![(from * 5 + to) as u8; (from * to * round * 10_000) as usize];
                    let said: BTreeMap<u32, Message> =
                        others.clone().map(|to| (to, message(&bytes(rank, to)))).collect();
                    let expected: BTreeMap<u32, Vec<u8>> =
                        others.map(|from| (from, [&bytes(from, rank)[..], b"!"].concat())).collect();
                    assert!(peers.swap(said) == Ok(expected), "rank {rank}, round {round}");
                }
            });
        }
    });
}

/// Connects rank 0 and rank 1, and returns the offers that each received; `cut` alters the address of rank 0.
fn pair(offered: [Option<std::fs::File>; 2], cut: fn(&str) -> &str) -> Vec<(Vec<String>, Peers)> {
    let coords = local(2);
    let offered = offered.map(|file| file.map(|file| Arc::new(file.into())));
    let joining: Vec<Joining> = coords
        .iter()
        .zip(offered)
        .map(|(coord, offered)| Joining::listen(&**coord, "pair", offered).unwrap())
        .collect();
    let address = cut(joining[0].address()).to_owned();
    thread::scope(|threads| {
        let ranks: Vec<_> = (0u32..)
            .zip(joining)
            .map(|(rank, mut joining)| {
                let address = address.clone();
                threads.spawn(move || {
                    joining.begin(&[(1 - rank, address)]);
                    assert_eq!(joining.go_on(LONG), Ok(vec![]));
                    let text = |(from, descriptor)| {
                        let mut text = format!("{from}: ");
                        std::fs::File::from(descriptor).read_to_string(&mut text).unwrap();
                        text
                    };
                    let handed = joining.take_offered().into_iter().map(text).collect();
                    assert!(joining.take_offered().is_empty());
                    (handed, joining.joined(LONG, BYTES_MAX))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_of_one_machine_hand_each_other_descriptors() {
    let file = |text: &str| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        Some(file)
    };
    let handed = |ranks: &[(Vec<String>, Peers)]| ranks.iter().map(|(handed, _)| handed.join(",")).collect::<Vec<_>>();
    assert_eq!(handed(&pair([file("of zero"), file("of one")], |address| address)), ["1: of one", "0: of zero"]);
    assert_eq!(handed(&pair([None, file("of one")], |address| address)), ["1: of one", ""]);
    // On another machine there is no such socket: messages travel all the same.
    let ranks = pair([file("of zero"), file("of one")], |address| address.split(' ').next().unwrap());
    assert_eq!(handed(&ranks), ["", ""]);
    // A name of no socket there, one digit short.
    let other = pair([file("of zero"), file("of one")], |address| &address[..address.len() - 1]);
    assert_eq!(handed(&other), ["", ""]);
    for ranks in [ranks, other] {
        thread::scope(|threads| {
            for (rank, (_, mut peers)) in (0u32..).zip(ranks) {
                threads.spawn(move || {
                    let received = peers.swap(BTreeMap::from([(1 - rank, message(&[rank as u8; 1000]))])).unwrap();
                    assert_eq!(received[&(1 - rank)].len(), 1001);
                });
            }
        });
    }
}

#[test]
fn strangers_and_ranks_of_another_purpose_or_meeting_are_not_let_in() {
    let (coords, others) = (local(2), local(2));
    let mut root = Joining::listen(&*coords[0], "one", None).unwrap();
    let address = root.address().to_owned();
    let waits = thread::spawn(move || {
        root.begin(&[(1, String::new())]);
        root.go_on(Duration::from_secs(2))
    });
    let strangers = [(&coords[1], "other"), (&others[1], "one")];
    for (coord, purpose) in strangers {
        let mut strange = Joining::listen(&**coord, purpose, None).unwrap();
        strange.begin(&[(0, address.clone())]);
        let error = strange.go_on(LONG).unwrap_err();
        assert!(matches!(&error, Error::Unavailable(said) if said.contains("rank 1 cannot connect to rank 0")));
    }
    let (port, _) = address.split_once(' ').unwrap();
    let mut silent = TcpStream::connect(port).unwrap();
    let mut loud = TcpStream::connect(port).unwrap();
    loud.write_all(&[7; 1000]).unwrap();
    let mut heard = Vec::new();
    // Random bytes, and the end: a reset where it had not read all.
    let _ = loud.read_to_end(&mut heard);
    assert!(heard.len() <= 16, "{heard:?}");
    let _ = silent.write_all(b"sf");
    assert_eq!(waits.join().unwrap(), Ok(vec![1]));
}

#[test]
fn a_peer_that_goes_or_says_nothing_is_named() {
    let coords = local(3);
    let mut ranks = joined(&coords, "gone", LONG);
    let said = |to: &[u32]| to.iter().map(|&to| (to, message(b"hello"))).collect::<BTreeMap<u32, Message>>();
    drop(ranks.pop());
    promptly(|| {
        thread::scope(|threads| {
            let [a, b] = &mut ranks[..] else { panic!("two ranks are left") };
            let other = threads.spawn(|| b.swap(said(&[0, 2])));
            for found in [a.swap(said(&[1, 2])), other.join().unwrap()] {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("the exchange of messages with rank 2 failed"), "{error}");
            }
        });
    });
    // With each other they go on.
    thread::scope(|threads| {
        let [a, b] = &mut ranks[..] else { panic!("two ranks are left") };
        let other = threads.spawn(|| b.swap(said(&[0])));
        assert_eq!(a.swap(said(&[1])).unwrap()[&1], b"hello!");
        assert_eq!(other.join().unwrap().unwrap()[&0], b"hello!");
    });

    let mut ranks = joined(&coords, "silent", Duration::from_millis(300));
    let error = ranks[0].swap(said(&[1])).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("no message within 300ms"), "{error}");
}
