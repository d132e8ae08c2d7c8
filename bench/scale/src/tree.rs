//! What the exchanges of a save cost in the tree: every rank's node, run without sockets, its messages encoded.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;
use shardfast_coord::Encoded;
use shardfast_coord::Topology;
use shardfast_coord::node::{Downward, Effect, Node, Reply, Upward};

use crate::timed;

const RANKS_PER_NODE: u32 = 8;
const DEADLINE: Duration = Duration::from_secs(60);

/// What ranks send for a save when nothing has changed, by how much of it is a rank's own.
#[derive(Debug, Clone, Copy)]
enum Words {
    /// All send the same.
    Same,
    /// The same for each place among the tensor and pipeline parallel ranks: 128 different words.
    OfClass,
    /// Each rank another.
    Own,
    /// Each rank another, as numbers are written that take a byte more or less.
    OwnOfSomeLength,
}

const EXCHANGES: [(&str, usize, Words); 4] = [
    ("the same 20 bytes of all", 20, Words::Same),
    ("28 bytes, one of 128", 28, Words::OfClass),
    ("16 bytes of each rank's own", 16, Words::Own),
    ("16 or 17 bytes of each rank's own", 16, Words::OwnOfSomeLength),
];

const TOPIC: &str = "7 commit";
const TENSOR_PARALLEL: u32 = 8;
const PIPELINE_PARALLEL: u32 = 16;

impl Words {
    fn of(self, rank: u32, world: u32, bytes: usize) -> Vec<u8> {
        let number = match self {
            Words::Same => 0,
            Words::OfClass => {
                let of_stage = world.div_ceil(PIPELINE_PARALLEL);
                rank % TENSOR_PARALLEL + rank / of_stage * TENSOR_PARALLEL
            }
            Words::Own | Words::OwnOfSomeLength => rank,
        };
        let longer = usize::from(matches!(self, Words::OwnOfSomeLength) && rank.is_multiple_of(3));
        (0..bytes + longer).map(|i| (number >> (8 * (i % 4))) as u8).collect()
    }
}

/// One exchange at one size of job.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Exchange {
    words: &'static str,
    payload_bytes: usize,
    /// The most that any node takes from below.
    messages_most: u32,
    root_bytes: usize,
    /// One core doing the work of all nodes.
    all_nodes_ms: f64,
}

enum Sent {
    Up(u32, Upward),
    Down(u32, Downward),
}

/// Every exchange of a save whose plan is remembered, one answer for all ranks.
pub(crate) fn measure(world: u32) -> Vec<Exchange> {
    let topology = Topology::new(world, RANKS_PER_NODE, Topology::FAN_OUT_DEFAULT).expect("a sound tree");
    let mut nodes: Vec<Node<()>> = (0..world).map(|rank| Node::new(&topology, rank)).collect();
    let run = |(what, payload_bytes, words): (&'static str, usize, Words)| {
        let mut taken = vec![0u32; world as usize];
        let mut root_bytes = 0;
        let ((), all_nodes_ms) = timed(|| {
            let mut sent = VecDeque::new();
            for rank in 0..world {
                let payload = words.of(rank, world, payload_bytes);
                let effects = nodes[rank as usize].contribute(TOPIC, Ok(payload), (), Duration::ZERO, DEADLINE);
                send(&mut sent, rank, effects, world, &mut nodes);
            }
            while let Some(message) = sent.pop_front() {
                let (rank, effects) = match message {
                    Sent::Up(child, message) => {
                        let parent = topology.parent(child).expect("only rank 0 has none");
                        taken[parent as usize] += 1;
                        if parent == 0 {
                            root_bytes += message.clone().encode().len();
                        }
                        (parent, nodes[parent as usize].receive_from_child(child, message, Duration::ZERO))
                    }
                    Sent::Down(child, message) => {
                        (child, nodes[child as usize].receive_from_parent(message, Duration::ZERO))
                    }
                };
                send(&mut sent, rank, effects, world, &mut nodes);
            }
        });
        let messages_most = taken.into_iter().max().unwrap_or(0);
        Exchange { words: what, payload_bytes, messages_most, root_bytes, all_nodes_ms }
    };
    EXCHANGES.map(run).to_vec()
}

fn send(sent: &mut VecDeque<Sent>, rank: u32, effects: Vec<Effect<()>>, world: u32, nodes: &mut [Node<()>]) {
    for effect in effects {
        match effect {
            Effect::Up(message) => sent.push_back(Sent::Up(rank, message)),
            Effect::Down(child, message) => sent.push_back(Sent::Down(child, message)),
            Effect::Reply((), Reply::Decide(payloads)) => {
                assert_eq!(payloads.len(), world as usize, "every rank contributed");
                let (_, effects) = nodes[0].decided(TOPIC, Ok(vec![b"go".to_vec(); world as usize]));
                send(sent, 0, effects, world, nodes);
            }
            Effect::Reply((), Reply::Answer(answer)) => {
                answer.expect("an answer for all");
            }
            Effect::Reply((), Reply::Failed(error, _)) => panic!("every rank contributed: {error}"),
        }
    }
}

/// One block for each exchange, one line a figure.
pub(crate) fn print(worlds: &[u32], rows: &[Vec<Exchange>]) {
    for (at, (what, ..)) in EXCHANGES.iter().enumerate() {
        println!("{what}");
        let line = |what: &str, digits: usize, figure: &dyn Fn(&Exchange) -> f64| {
            let figures: Vec<f64> = rows.iter().map(|row| figure(&row[at])).collect();
            let cells: String = figures.iter().map(|figure| format!("{figure:>11.digits$}")).collect();
            let growth = figures.last().zip(figures.first()).map_or(1.0, |(last, first)| last / first);
            println!("  {what:<40}{cells}{growth:>8.1}x");
        };
        line("messages that any node takes, at most", 0, &|exchange| f64::from(exchange.messages_most));
        line("bytes at rank 0", 0, &|exchange| exchange.root_bytes as f64);
        line("all nodes' work on one core, ms", 0, &|exchange| exchange.all_nodes_ms);
        let beside: Vec<f64> =
            rows.iter().zip(worlds).map(|(row, &world)| row[at].root_bytes as f64 / f64::from(world)).collect();
        let cells: String = beside.iter().map(|bytes| format!("{bytes:>11.2}")).collect();
        println!("  {:<40}{cells}", "bytes a rank at rank 0");
    }
}
