//! A link that is cut: two network namespaces with a cable between them that is pulled.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use super::*;

const ROLE: &str = "SHARDFAST_TEST_NETWORK_ROLE";
const MARK: &str = "told: ";
const LONG: Duration = Duration::from_secs(60);
const QUICK: KeepAlive = KeepAlive { interval: Duration::from_millis(200), timeout: Duration::from_millis(500) };

/// Ranks 0 and 1 on this side, rank 2 and rank 3 below it on the other.
fn opened(rank: u32, host: &str) -> Place {
    let topology = Topology::new(4, 1, 2).unwrap();
    let membership = Membership { host: host.to_owned(), rank, topology, token: "secret".to_owned(), tls: None };
    Place::open_with(membership, 0, QUICK).unwrap()
}

fn everyone(coord: &dyn Coord, topic: &str) -> Result<Vec<u8>, Error> {
    coord.agree(topic, Ok(vec![coord.rank() as u8]), &mut |parts| Ok(vec![parts.concat(); parts.len()]), LONG)
}

fn run(line: &str) -> bool {
    let mut words = line.split(' ');
    let command = Command::new(words.next().unwrap()).args(words).stderr(Stdio::null()).status();
    command.is_ok_and(|status| status.success())
}

/// A namespace with one end of a cable, of this process alone.
struct Network {
    name: String,
    here: String,
    there: String,
}

impl Network {
    /// None where that is not permitted.
    fn new() -> Option<Network> {
        let id = std::process::id() % 65536;
        let name = format!("sf{id}");
        if !run(&format!("ip netns add {name}")) {
            return None;
        }
        let subnet = format!("10.{}.{}", 64 + id / 256 % 128, id % 256);
        let network = Network { name, here: format!("{subnet}.1"), there: format!("{subnet}.2") };
        let Network { name, here, there } = &network;
        let is_up = run(&format!("ip link add {name}a type veth peer name {name}b netns {name}"))
            && run(&format!("ip addr add {here}/24 dev {name}a"))
            && run(&format!("ip link set {name}a up"))
            && run(&format!("ip -n {name} addr add {there}/24 dev {name}b"))
            && run(&format!("ip -n {name} link set {name}b up"))
            && run(&format!("ip -n {name} link set lo up"));
        is_up.then_some(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        run(&format!("ip link del {}a", self.name));
        run(&format!("ip netns del {}", self.name));
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test by itself: ranks 2 and 3, in the other namespace. `ADDRESS HOST`: where rank 0 is, and this process.
#[test]
fn far_side() {
    let Ok(role) = env::var(ROLE) else { return };
    let (root, host) = role.split_once(' ').unwrap();
    let inner = opened(2, host);
    let address = inner.address().unwrap().to_owned();
    let ranks = thread::scope(|threads| {
        let leaf = threads.spawn(move || opened(3, host).join(Some(&address), LONG).unwrap());
        [inner.join(Some(root), LONG).unwrap(), leaf.join().unwrap()]
    });
    for topic in ["linked", "cut"] {
        let answers = thread::scope(|threads| {
            let running = ranks.each_ref().map(|rank| threads.spawn(|| everyone(&**rank, topic)));
            running.map(|answer| answer.join().unwrap())
        });
        println!("{MARK}{answers:?}");
        // Nothing of the next round is under way when the link is cut.
        thread::sleep(Duration::from_millis(700));
    }
}

#[test]
fn both_sides_of_a_cut_link_name_who_is_on_the_other() {
    let Some(network) = Network::new() else {
        println!("skipped: network namespaces cannot be made here (they need root)");
        return;
    };
    let root = opened(0, &network.here);
    let address = root.address().unwrap().to_owned();
    let root = root.join(None, LONG).unwrap();
    let near = opened(1, &network.here).join(Some(&address), LONG).unwrap();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &network.name]).arg(env::current_exe().unwrap());
    command.args(["--exact", "grpc::network::far_side", "--nocapture"]).stdout(Stdio::piped());
    let mut far = Process(command.env(ROLE, format!("{address} {}", network.there)).spawn().unwrap());
    let mut output = BufReader::new(far.0.stdout.take().unwrap()).lines();
    let mut hear = || {
        let told = output.by_ref().find_map(|line| Some(line.unwrap().split_once(MARK)?.1.to_owned()));
        told.expect("the far side ended without a word")
    };

    let agree = |topic| {
        thread::scope(|threads| {
            let running = [&root, &near].map(|rank| threads.spawn(|| everyone(&**rank, topic)));
            running.map(|answer| answer.join().unwrap())
        })
    };
    let all = vec![0, 1, 2, 3];
    assert_eq!(agree("linked"), [Ok(all.clone()), Ok(all.clone())]);
    assert_eq!(hear(), format!("{:?}", [Ok::<_, Error>(all.clone()), Ok(all)]));

    assert!(run(&format!("ip link set {}a down", network.name)));
    let started = Instant::now();
    let lost = |rank| Error::Lost { rank, cause: BROKEN.to_owned() };
    assert_eq!(agree("cut"), [Err(lost(2)), Err(lost(2))]);
    assert_eq!(hear(), format!("{:?}", [Err::<Vec<u8>, _>(lost(0)), Err(lost(0))]));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}
