//! Tests a pulled cable: ranks in network namespaces of their own, whose link goes down in the middle of a round.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::job::{Job, Site, WORLD};

const DEADLINE: Duration = Duration::from_secs(3);
/// Time that ranks may need beyond the deadline, on a busy machine.
const SLACK: Duration = Duration::from_millis(1500);

fn run(line: &str) -> bool {
    let mut words = line.split(' ');
    let command = Command::new(words.next().unwrap()).args(words).stderr(Stdio::null()).status();
    command.is_ok_and(|status| status.success())
}

/// A namespace with one end of a cable, of this process alone.
struct Network {
    name: String,
    here: Site,
    there: Site,
}

impl Network {
    /// Makes the `number`-th namespace of this process; `None` if that is not permitted.
    fn new(number: u32) -> Option<Network> {
        let id = std::process::id() % 16384 * 4 + number;
        let name = format!("sf{id}");
        if !run(&format!("ip netns add {name}")) {
            return None;
        }
        let subnet = format!("10.{}.{}", 64 + id / 256 % 128, id % 256);
        let site = |end, namespace| Site { namespace, host: format!("{subnet}.{end}") };
        let network = Network { here: site(1, None), there: site(2, Some(name.clone())), name };
        let (name, here, there) = (&network.name, &network.here.host, &network.there.host);
        let is_up = run(&format!("ip link add {name}a type veth peer name {name}b netns {name}"))
            && run(&format!("ip addr add {here}/24 dev {name}a"))
            && run(&format!("ip link set {name}a up"))
            && run(&format!("ip -n {name} addr add {there}/24 dev {name}b"))
            && run(&format!("ip -n {name} link set {name}b up"))
            && run(&format!("ip -n {name} link set lo up"));
        is_up.then_some(network)
    }

    fn cut(&self) {
        assert!(run(&format!("ip -n {0} link set {0}b down", self.name)));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        run(&format!("ip link del {}a", self.name));
        run(&format!("ip netns del {}", self.name));
    }
}

/// Tests a cut cable with rank 4 beyond it: with all ranks below it, or alone, so that it is cut off from those, too.
fn ranks_beyond_a_cut(number: u32, beyond: std::ops::Range<u32>) {
    let Some(network) = Network::new(number) else {
        println!("skipped: network namespaces cannot be made here (they need root, and `ip` of iproute2)");
        return;
    };
    let is_beyond = |rank| beyond.contains(&rank);
    let site = |rank| if is_beyond(rank) { network.there.clone() } else { network.here.clone() };
    let mut job = Job::start(site);
    job.agrees("linked");
    // Rank 7 is late, so that no other rank knows the state of rank 4 and those below it.
    job.all_come(&[7], "plan", DEADLINE);
    thread::sleep(Duration::from_millis(500));
    network.cut();
    for rank in 0..WORLD {
        if rank == 7 {
            job.ranks[7].come("plan", DEADLINE);
        }
        let heard = job.ranks[rank as usize].heard();
        let cut_off = "; the outcome of";
        let is_named = match rank {
            0..=3 => heard.misses("ranks 4-7", 4),
            5..WORLD if !is_beyond(rank) => heard.what.starts_with(&format!("rank 4 does not answer{cut_off}")),
            _ => heard.what.starts_with(&format!("rank 0 does not answer{cut_off}")),
        };
        assert!(is_named && heard.after < DEADLINE + SLACK, "rank {rank}: {heard:?}");
    }
}

#[test]
fn both_sides_of_a_cut_above_a_subtree_name_who_is_on_the_other() {
    ranks_beyond_a_cut(0, 4..WORLD);
}

#[test]
fn a_rank_that_is_cut_off_alone_is_named_above_and_below() {
    ranks_beyond_a_cut(1, 4..5);
}
