//! Tests which processes may join, and the errors of those that are refused.

use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shardfast_coord::grpc::{Membership, Place};
use shardfast_coord::{Coord, Error, Topology};

use crate::{LONG, PROMPT, connected, each, everyone, membership, promptly, star, tree};

fn join(membership: Membership, parent: &str) -> Result<Arc<dyn Coord>, Error> {
    Place::open(membership, 0)?.join(Some(parent), LONG)
}

fn refusal(membership: Membership, parent: &str) -> String {
    match promptly(|| join(membership, parent)).err().expect("must be refused") {
        Error::Invalid(message) => message.replace(parent, "ADDRESS"),
        error => panic!("expected a refusal, found {error}"),
    }
}

/// Returns rank 0 with its address.
fn serve(topology: Topology) -> (Arc<dyn Coord>, String) {
    let place = Place::open(membership(topology, 0), 0).unwrap();
    let address = place.address().unwrap().to_owned();
    (place.join(None, LONG).unwrap(), address)
}

#[test]
fn strangers_disturb_nobody() {
    let (root, address) = serve(star(3));
    let stranger = Membership { token: "another-job's".to_owned(), ..membership(star(3), 1) };
    assert_eq!(refusal(stranger, &address), "rank 0 at ADDRESS refuses rank 1: the token is not this job's");

    let ranks =
        [root, join(membership(star(3), 1), &address).unwrap(), join(membership(star(3), 2), &address).unwrap()];
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1, 2]); 3]);
    // Who comes twice when all are there is not one of them, whatever it knows.
    let double = refusal(membership(star(3), 1), &address);
    let begins = "rank 0 at ADDRESS refuses rank 1: rank 1 has already joined from 127.0.0.1:";
    assert!(double.starts_with(begins), "{double}");
    assert!(double.contains("; another rank 1 came from 127.0.0.1:"), "{double}");
    refusal(membership(star(4), 3), &address);
    let staggered = each(&ranks, |coord| {
        // So that there is a round to be ended.
        thread::sleep(Duration::from_millis(100) * coord.rank());
        everyone(coord, "plan", LONG)
    });
    assert_eq!(staggered, vec![Ok(vec![0, 1, 2]); 3]);

    let [root, first, _second] = ranks;
    drop(first);
    let gone = refusal(membership(star(3), 1), &address);
    assert!(gone.ends_with(", is lost and cannot join again"), "{gone}");
    drop(root);
}

#[test]
fn a_rank_of_this_job_that_is_refused_is_named_to_all_with_the_reason() {
    let with =
        |rank, world, local_world, fan_out| membership(Topology::new(world, local_world, fan_out).unwrap(), rank);
    let belongs = "it belongs to";
    for (wrong, rank, reason) in [
        (with(2, 4, 1, 8), 2, format!("{belongs} a world of 4 ranks, rank 0 to a world of 3 ranks")),
        (
            with(2, 3, 2, 8),
            2,
            format!("{belongs} a tree with 2 ranks on a node, rank 0 to a tree with 1 ranks on a node"),
        ),
        (with(2, 3, 1, 9), 2, format!("{belongs} a tree with a fan-out of 9, rank 0 to a tree with a fan-out of 8")),
        (with(1, 3, 1, 8), 1, "has already joined from".to_owned()),
    ] {
        let topology = Topology::new(3, 1, 8).unwrap();
        let (root, address) = serve(topology);
        let ranks = [root, join(membership(topology, 1), &address).unwrap()];
        let (told, refused) = promptly(|| {
            thread::scope(|threads| {
                let waiting = threads.spawn(|| each(&ranks, |coord| everyone(coord, "plan", LONG).unwrap_err()));
                thread::sleep(Duration::from_millis(100));
                let refused = refusal(wrong, &address);
                (waiting.join().unwrap(), refused)
            })
        });
        assert!(refused.contains(&reason), "{refused}");
        assert_eq!(told[0], told[1]);
        match &told[0] {
            Error::Lost { rank: lost, cause } => {
                assert!(
                    *lost == rank && cause.starts_with("rank 0 refuses it: ") && cause.contains(&reason),
                    "{cause}"
                );
            }
            error => panic!("{error}"),
        }
    }
}

#[test]
fn every_rank_joins_its_own_parent() {
    let ranks = connected(tree(3));
    let (root, address) = serve(tree(8));
    assert_eq!(
        refusal(membership(tree(8), 2), &address),
        "rank 1 at ADDRESS refuses rank 2: its rank is 2, whose parent is rank 1, not rank 0"
    );
    assert_eq!(
        join(membership(tree(8), 0), &address).err().unwrap().to_string(),
        format!("rank 0's parent is none, it was given {address}")
    );
    let orphan = Place::open(membership(tree(8), 2), 0).unwrap().join(None, LONG);
    assert_eq!(orphan.err().unwrap().to_string(), "rank 2's parent is rank 1, it was given no address");
    drop((root, ranks));
}

#[test]
fn children_wait_for_a_parent_that_has_not_joined() {
    let topology = tree(4);
    let (root, address) = serve(topology);
    let inner = Place::open(membership(topology, 2), 0).unwrap();
    let below = inner.address().unwrap().to_owned();
    let late = Place::open(membership(topology, 3), 0).unwrap().join(Some(&below), Duration::from_millis(200));
    let message = late.err().unwrap().to_string();
    let told =
        format!("rank 3 cannot reach rank 2 at {below} within 200ms: it accepted the connection and did not respond");
    assert_eq!(message, told);

    thread::scope(|threads| {
        // A rank that gave up may try again.
        let leaf = threads.spawn(|| join(membership(topology, 3), &below).unwrap());
        thread::sleep(Duration::from_millis(100));
        let inner = inner.join(Some(&address), LONG).unwrap();
        let last = join(membership(topology, 1), &address).unwrap();
        let ranks = [root, last, inner, leaf.join().unwrap()];
        assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1, 2, 3]); 4]);
    });
}

#[test]
fn rank_0_tells_who_listens_where() {
    let topology = tree(8);
    let root = Place::open(membership(topology, 0), 0).unwrap();
    let address = root.address().unwrap().to_owned();
    let ranks: Vec<_> = thread::scope(|threads| {
        let root = threads.spawn(|| root.join(None, LONG).unwrap());
        // Children first: they ask until their parents have.
        let others: Vec<_> = (1..8)
            .rev()
            .map(|rank| {
                let place = Place::open(membership(topology, rank), 0).unwrap();
                threads.spawn(|| {
                    let parent = place.find_parent(&address, LONG).unwrap();
                    place.join(Some(&parent), LONG).unwrap()
                })
            })
            .collect();
        let others: Vec<_> = others.into_iter().rev().map(|other| other.join().unwrap()).collect();
        [root.join().unwrap()].into_iter().chain(others).collect()
    });
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok((0..8).collect()); 8]);
}

#[test]
fn a_parent_that_does_not_come_is_named() {
    let (_root, address) = serve(tree(8));
    let place = Place::open(membership(tree(8), 3), 0).unwrap();
    let error = promptly(|| place.find_parent(&address, Duration::from_millis(300))).unwrap_err();
    let told = "rank 3: rank 1, its parent in the tree of ranks, did not report its address within 300ms";
    assert_eq!(error, Error::Unavailable(told.to_owned()));
    let stranger = Membership { token: "other".to_owned(), ..membership(tree(8), 3) };
    let error = Place::open(stranger, 0).unwrap().find_parent(&address, LONG).unwrap_err();
    assert_eq!(error, Error::Invalid(format!("rank 0 at {address} refuses rank 3: the token is not this job's")));
}

#[test]
fn ranks_that_never_joined_are_missing_at_the_deadline() {
    let (root, address) = serve(star(4));
    let ranks = [root, join(membership(star(4), 2), &address).unwrap()];
    let errors = promptly(|| each(&ranks, |coord| everyone(coord, "plan", Duration::from_millis(200)).unwrap_err()));
    assert!(matches!(&errors[0], Error::Missing { ranks, .. } if *ranks == [1, 3]), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn addresses_name_the_host_that_was_asked_for() {
    for (host, prefix) in
        [("localhost", "localhost:"), ("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:"), ("[::1]", "[::1]:")]
    {
        let place = match Place::open(Membership { host: host.to_owned(), ..membership(star(2), 0) }, 0) {
            Ok(place) => place,
            // Not every machine speaks IPv6.
            Err(Error::Unavailable(_)) if host.contains(':') => continue,
            Err(error) => panic!("{error}"),
        };
        let address = place.address().unwrap().to_owned();
        assert!(address.starts_with(prefix), "{address}");
        let root = place.join(None, LONG).unwrap();
        assert_eq!(root.host(), host.trim_matches(['[', ']']));
        let ranks = [root, join(membership(star(2), 1), &address).unwrap()];
        assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1]); 2]);
    }
}

#[test]
fn what_cannot_be_reached_or_cannot_be_meant_is_told_in_time() {
    let unavailable = |error: Error| match error {
        Error::Unavailable(message) => message,
        error => panic!("expected it to be unavailable, found {error}"),
    };
    let invalid = |error: Error| matches!(error, Error::Invalid(_));
    let wait = Duration::from_millis(300);

    // Listens and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let reach = |address: &str| {
        let place = Place::open(membership(star(2), 1), 0).unwrap();
        promptly(|| place.join(Some(address), wait)).err().unwrap()
    };
    let message = unavailable(reach(&address));
    assert!(message.starts_with(&format!("rank 1 cannot reach rank 0 at {address} within 300ms: ")), "{message}");
    drop(silent);
    let message = unavailable(reach(&address));
    assert!(message.contains("refused"), "{message}");

    assert!(invalid(reach("no address")));
    assert!(invalid(Place::open(membership(star(2), 2), 0).err().unwrap()));
    for token in ["", "two words", "newline\n", "\u{e9}"] {
        let wrong = Membership { token: token.to_owned(), ..membership(star(2), 1) };
        assert!(invalid(Place::open(wrong, 0).err().unwrap()));
    }
    let elsewhere = Membership { host: "192.0.2.1".to_owned(), ..membership(star(2), 0) };
    let message = unavailable(Place::open(elsewhere.clone(), 0).err().unwrap());
    assert!(message.starts_with(r#"cannot listen on "192.0.2.1": "#), "{message}");
    let message = unavailable(Place::open(elsewhere, 4242).err().unwrap());
    assert!(message.starts_with(r#"cannot listen on "192.0.2.1", port 4242: "#), "{message}");
}

#[test]
fn a_root_may_be_opened_and_dropped_by_a_program_that_has_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let (root, address) = serve(star(2));
        let member = join(membership(star(2), 1), &address).unwrap();
        drop(member);
        drop(root);
    });
}

/// Tests that silent connections are few, whatever their number, and do not last, while ranks can still join.
#[test]
fn silent_strangers_are_few_and_do_not_last() {
    const STRANGERS: usize = 300;
    let (root, address) = serve(star(3));
    let first = join(membership(star(3), 1), &address).unwrap();
    let is_open = |stranger: &TcpStream| {
        let mut byte = [0];
        stranger.set_nonblocking(true).unwrap();
        loop {
            match (&mut &*stranger).read(&mut byte) {
                Ok(0) => return false,
                // What the server says first.
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    };
    let strangers: Vec<TcpStream> = (0..STRANGERS).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let open = || strangers.iter().filter(|stranger| is_open(stranger)).count();
    let until = |most: usize, within: Duration| {
        let started = Instant::now();
        while open() > most {
            assert!(started.elapsed() < within, "{} connections are open, expected {most}", open());
            thread::sleep(Duration::from_millis(20));
        }
    };
    until(128, PROMPT);
    assert!(is_open(strangers.last().unwrap()), "the last ones that came are not the first to go");
    let second = join(membership(star(3), 2), &address).unwrap();
    until(0, Duration::from_secs(20));
    // Who has shown the token stays.
    let ranks = [root, first, second];
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1, 2]); 3]);
}
