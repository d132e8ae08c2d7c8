//! Answers that never come, to some reads of many: they are asked for a second time, and no load waits for them.

use std::sync::mpsc;
use std::time::Duration;

use shardfast_store::Shared;
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;

use crate::campaign::{DEADLINE, Place};
use crate::checkpoint::{direct, load, save};
use crate::proxy::Proxy;

/// Loads through one store, so that its reads have peers.
const LOADS: usize = 40;

/// The first read without an answer, and each so-manieth from there on: fewer than may be asked for again.
const FROM: usize = 120;
const EVERY: usize = 60;

/// Longer than the test: no request is cut because nothing moves.
const NEVER: Duration = Duration::from_secs(3600);

pub(crate) fn reads_are_asked_for_again(server: &Server) {
    let place = Place::new(server, "late");
    save(&direct(&place.direct()), DEADLINE).unwrap();
    let wanted = LOADS * place.requests(load).iter().filter(|seen| seen.request.is_read()).count();
    let proxy = Proxy::silent(server, &place.prefix(), FROM, EVERY);
    let (store, noted) = Noted::open_on(&place.through(&proxy), &Shared::impatient(NEVER)).unwrap();
    let (done, ended) = mpsc::channel();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            (0..LOADS).for_each(|_| load(&store, DEADLINE).unwrap());
            done.send(()).unwrap();
        });
        if ended.recv_timeout(2 * DEADLINE).is_err() {
            eprintln!("a load waits for an answer that never comes");
            std::process::abort();
        }
    });
    let (requests, unanswered) = (noted.requests(), proxy.harmed());
    let again = requests.asked_again as usize;
    let answered = proxy.seen().iter().filter(|seen| seen.request.is_read()).count();
    println!("{wanted} reads, {unanswered} without an answer, {again} asked for again");
    assert!(unanswered >= (wanted - FROM) / EVERY, "{unanswered} without an answer");
    assert!(again >= unanswered && again * 20 <= wanted, "{requests:?}");
    assert_eq!(requests.gets as usize, wanted + again);
    assert!((wanted..=wanted + again - unanswered).contains(&answered), "{answered} answers");
}
