//! Tests agreement from outside: one contract for all kinds of ranks, refusals of rank 0, and processes that die.

mod certificates;
mod contract;
mod cut;
mod job;
mod joining;
mod peers;
mod processes;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shardfast_coord::grpc::{Membership, Place};
use shardfast_coord::{Coord, Error, Ports, Topology};

/// Deadline of rounds that end sooner for another reason.
const LONG: Duration = Duration::from_secs(60);
/// Time that counts as at once, on a busy machine.
const PROMPT: Duration = Duration::from_secs(5);

const HOST: &str = "127.0.0.1";
const TOKEN: &str = "0123456789abcdef";

type Answer = Result<Vec<u8>, Error>;

/// Places every other rank directly below rank 0.
fn star(world: u32) -> Topology {
    Topology::new(world, 1, 64).unwrap()
}

/// Makes the tree as deep as possible.
fn tree(world: u32) -> Topology {
    Topology::new(world, 1, 2).unwrap()
}

fn membership(topology: Topology, rank: u32) -> Membership {
    Membership { host: HOST.to_owned(), ports: Ports::default(), rank, topology, token: TOKEN.to_owned(), tls: None }
}

/// Returns all ranks of a world, each with connections of its own.
fn connected(topology: Topology) -> Vec<Arc<dyn Coord>> {
    let mut addresses = Vec::new();
    let ranks = (0..topology.world()).map(|rank| {
        let place = Place::open(membership(topology, rank), 0).unwrap();
        addresses.push(place.address().map(ToOwned::to_owned));
        let parent = place.parent().map(|parent| addresses[parent as usize].clone().unwrap());
        place.join(parent.as_deref(), LONG).unwrap()
    });
    ranks.collect()
}

/// Runs `act` for every rank at once, and returns the results in the order of the ranks.
fn each<T: Send>(ranks: &[Arc<dyn Coord>], act: impl Fn(&dyn Coord) -> T + Sync) -> Vec<T> {
    thread::scope(|threads| {
        let running: Vec<_> = ranks.iter().map(|rank| threads.spawn(|| act(&**rank))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Contributes each rank, and answers each with all of them.
fn everyone(coord: &dyn Coord, topic: &str, deadline: Duration) -> Answer {
    let mut decide = |parts: Vec<Vec<u8>>| Ok(vec![parts.concat(); parts.len()]);
    coord.agree(topic, Ok(vec![coord.rank() as u8]), &mut decide, deadline)
}

fn promptly<T>(act: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = act();
    assert!(started.elapsed() < PROMPT, "took {:?}", started.elapsed());
    result
}
