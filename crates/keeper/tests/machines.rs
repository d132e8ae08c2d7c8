//! Tests keepers that serve each other, as those of several machines do, and strangers who connect to them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use shardfast_keeper::{Keeper, Status};
use shardfast_store::keeper::wire::{self, Answer, Copies, Machine, Request, Role};
use shardfast_store::keeper::{join_machines, leave, leave_all, meet, status, uncopied};
use shardfast_store::testing::conformance;
use shardfast_store::{Kind, Store, open};

const KEY: wire::Key = [7; 32];

/// Keepers of machines that have met.
struct Cluster {
    names: Vec<String>,
    machines: Vec<Machine>,
}

impl Cluster {
    /// Begins a keeper for each of these domains, with so many copies of each file.
    fn begin(domains: &[&str], copies: u32) -> Cluster {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let run = COUNT.fetch_add(1, Ordering::Relaxed);
        let names: Vec<String> =
            (0..domains.len()).map(|at| format!("machines-{}-{run}-{at}", std::process::id())).collect();
        let machines = names
            .iter()
            .zip(domains)
            .map(|(name, &domain)| Machine { address: Cluster::keeper(name, (0, 0)), domain: domain.to_owned() });
        let machines: Vec<Machine> = machines.collect();
        let cluster = Cluster { names, machines };
        (0..domains.len()).for_each(|at| cluster.join(at, copies));
        cluster
    }

    /// Begins a keeper that listens at one of these ports; returns its address.
    fn keeper(name: &str, ports: (u16, u16)) -> String {
        let keeper = Keeper::listen(name, "s3://bucket/run", Duration::from_secs(600)).unwrap();
        thread::spawn(move || keeper.serve(|_| Ok(())));
        meet(name, "127.0.0.1", ports, KEY).unwrap()
    }

    fn join(&self, at: usize, copies: u32) {
        self.join_at(at, copies, None);
    }

    fn join_at(&self, at: usize, count: u32, rate: Option<u64>) {
        join_machines(&self.names[at], &self.machines, at as u32, Copies { count, rate }).unwrap();
    }

    fn store(&self, at: usize, run: &str) -> Arc<dyn Store> {
        open(&format!("keeper://{}/{run}", self.names[at])).unwrap()
    }

    fn status(&self, at: usize) -> Status {
        status(&self.names[at]).unwrap()
    }

    /// A connection with a keeper as its neighbours make one, with that key, and with its answer.
    fn neighbour(&self, at: usize, key: &wire::Key) -> (TcpStream, std::io::Result<()>) {
        let mut link = TcpStream::connect(&self.machines[at].address).unwrap();
        link.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let (mut theirs, ours, magic) = ([0; 16], [3; 16], b"sfkeep1\n");
        link.read_exact(&mut theirs).unwrap();
        let proof = |role: &[u8]| -> [u8; 32] {
            let inner = Sha256::new().chain_update(key).chain_update(magic).chain_update(theirs).chain_update(ours);
            Sha256::new().chain_update(key).chain_update(inner.chain_update(role).finalize()).finalize().into()
        };
        link.write_all(&[&magic[..], &ours, &proof(b"connect")].concat()).unwrap();
        let mut answer = [0; 32];
        let answered = link.read_exact(&mut answer);
        assert!(answered.is_err() || answer == proof(b"accept"));
        (link, answered)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| drop(leave(name)));
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn several_machines_keep_the_contract_of_one_store() {
    let cluster = Cluster::begin(&["a", "b", "c"], 0);
    let turn = AtomicUsize::new(0);
    conformance::check(|run| {
        // A store and one below it are compared by their URLs.
        let at = if run.starts_with("run") { 0 } else { turn.fetch_add(1, Ordering::Relaxed) };
        cluster.store(at % 3, run)
    });
}

#[test]
fn copies_go_to_other_domains_and_serve_in_place_of_the_first() {
    let cluster = Cluster::begin(&["a", "a", "b"], 1);
    let bytes = vec![5; 3_000_001];
    conformance::write_object(&*cluster.store(0, "step"), "x/file", &bytes).unwrap();
    // Nothing is finished: no copy is made.
    assert_eq!(cluster.status(2).bytes, 0);
    cluster.store(1, "step").publish("COMMIT", b"done").unwrap();
    wait_until("a copy is on the machine of another domain", || cluster.status(2).bytes > 3_000_000);
    wait_until("all is copied", || cluster.status(0).uncopied == Some(0));
    assert!(cluster.status(1).bytes < 100, "{:?}", cluster.status(1));
    leave(&cluster.names[0]).unwrap();
    wait_until("it has ended", || cluster.status(1).neighbours.len() == 1);
    assert_eq!(cluster.store(1, "step").read("x/file", u64::MAX).unwrap(), bytes);
}

#[test]
fn copies_are_sent_at_the_rate_that_was_asked_for() {
    let cluster = Cluster::begin(&["a", "b"], 1);
    (0..2).for_each(|at| cluster.join_at(at, 1, Some(4 << 20)));
    let bytes = vec![5; 6 << 20];
    conformance::write_object(&*cluster.store(0, "step"), "file", &bytes).unwrap();
    let began = Instant::now();
    cluster.store(0, "step").publish("COMMIT", b"done").unwrap();
    wait_until("all is copied", || cluster.status(0).uncopied == Some(0) && cluster.status(1).bytes > 6 << 20);
    // The last of six pieces is due after 1.25 s.
    assert!(began.elapsed() > Duration::from_millis(1200), "{:?}", began.elapsed());
    assert_eq!(cluster.store(1, "step").read("file", u64::MAX).unwrap(), bytes);
}

#[test]
fn a_machine_that_joins_empty_gets_what_it_lacks() {
    let cluster = Cluster::begin(&["a", "b"], 1);
    conformance::write_object(&*cluster.store(0, "step"), "file", &[5; 70_000]).unwrap();
    cluster.store(0, "step").publish("COMMIT", b"done").unwrap();
    wait_until("a copy is there", || cluster.status(1).objects == 2);
    let port = cluster.machines[0].address.rsplit_once(':').unwrap().1.parse().unwrap();
    leave(&cluster.names[0]).unwrap();
    wait_until("it has ended", || cluster.status(1).neighbours.is_empty());
    wait_until("its name and port are free", || {
        std::panic::catch_unwind(|| Cluster::keeper(&cluster.names[0], (port, port))).is_ok()
    });
    (0..2).for_each(|at| cluster.join(at, 1));
    wait_until("it has its files again", || cluster.status(0).objects == 2);
    assert_eq!(cluster.store(0, "step").read("file", u64::MAX).unwrap(), [5; 70_000]);
}

#[test]
fn what_is_deleted_while_it_is_copied_comes_back_on_no_machine() {
    let cluster = Cluster::begin(&["a", "b", "c"], 2);
    for round in 0..60 {
        let step = format!("step-{round}");
        for at in 0..3 {
            conformance::write_object(&*cluster.store(at, &step), &format!("{at}"), &vec![1; 400_000]).unwrap();
        }
        cluster.store(round % 3, &step).publish("COMMIT", b"done").unwrap();
        thread::sleep(Duration::from_micros(150 * (round as u64 % 20)));
        cluster.store((round + 1) % 3, "").delete_tree(&step).unwrap();
    }
    wait_until("nothing is copied, and nothing is left", || {
        (0..3).map(|at| cluster.status(at)).all(|status| status.uncopied == Some(0) && status.objects == 0)
    });
}

#[test]
fn who_does_not_know_the_key_is_not_served() {
    let cluster = Cluster::begin(&["a", "b"], 0);
    assert!(cluster.neighbour(0, &[8; 32]).1.is_err());
    let (mut noise, mut answer) = (TcpStream::connect(&cluster.machines[0].address).unwrap(), Vec::new());
    noise.write_all(&[255; 4096]).unwrap();
    noise.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = noise.read_to_end(&mut answer);
    assert!(answer.len() <= 16, "it answered {answer:?}");
    // Silent ones take no more than their share, and for ten seconds.
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(&cluster.machines[0].address)).collect();
    let (first, second) = (cluster.store(0, ""), cluster.store(1, ""));
    conformance::write_object(&*first, "one", b"bytes").unwrap();
    wait_until("it is served as soon as there is a place", || {
        second.read("one", 5).is_ok_and(|bytes| bytes == b"bytes")
    });
    drop(silent);
}

#[test]
fn a_copy_of_other_bytes_than_were_sent_is_refused() {
    let cluster = Cluster::begin(&["a", "b"], 0);
    let (link, proven) = cluster.neighbour(0, &KEY);
    proven.unwrap();
    let asked = |request: &Request, bytes: &[u8]| -> Answer {
        wire::send(&link, request, None).unwrap();
        (&link).write_all(bytes).unwrap();
        wire::receive(&link).unwrap().unwrap().0
    };
    let replica = Request::Replica { name: "one".into(), bytes: 5 };
    assert!(matches!(asked(&replica, &[]), Answer::Done));
    (&link).write_all(&[&b"bytes"[..], &[0; 8]].concat()).unwrap();
    let Some((Answer::Refused { kind, .. }, _)) = wire::receive(&link).unwrap() else { panic!("it was taken") };
    assert_eq!(kind, Kind::Corrupt);
    assert_eq!(cluster.store(0, "").size("one").unwrap_err().kind, Kind::NotFound);
    // Nothing shows what is under way, and a neighbour that dies in the middle leaves its name free.
    assert!(matches!(asked(&replica, b"byt"), Answer::Done));
    assert_eq!(cluster.store(1, "").list("").unwrap_err().kind, Kind::NotFound);
    drop(link);
    wait_until("its name is free", || conformance::write_object(&*cluster.store(1, ""), "one", b"other").is_ok());
    // The same small object again is none twice; another one of its name is refused.
    let (link, _) = cluster.neighbour(0, &KEY);
    let stored = |bytes: &[u8]| {
        let request = Request::Store { name: "two".into(), bytes: 4, role: Role::Published, replaces: false };
        wire::send(&link, &request, None).unwrap();
        (&link).write_all(bytes).unwrap();
        wire::receive::<Answer>(&link).unwrap().unwrap().0
    };
    assert!(matches!(stored(b"same"), Answer::Done) && matches!(stored(b"same"), Answer::Done));
    assert!(matches!(stored(b"else"), Answer::Refused { kind: Kind::Conflict, .. }));
}

#[test]
fn a_machine_that_is_silent_fails_what_it_may_have() {
    let cluster = Cluster::begin(&["a", "b"], 0);
    let store = cluster.store(0, "");
    conformance::write_object(&*store, "one", b"bytes").unwrap();
    // A table with a machine at which nothing listens.
    let mut machines = cluster.machines.clone();
    machines.push(Machine { address: "127.0.0.1:1".into(), domain: "c".into() });
    join_machines(&cluster.names[0], &machines, 0, Copies::default()).unwrap();
    for failed in [store.list("").err(), store.open("two").err(), store.publish("three", b"3").err()] {
        let error = failed.unwrap();
        assert!(error.kind == Kind::Unavailable && error.message.contains("127.0.0.1:1"), "{error}");
    }
    // What is here needs no other.
    assert_eq!(store.read("one", 5).unwrap(), b"bytes");
    assert_eq!(store.free_bytes(), None);
}

#[test]
fn all_keepers_of_a_job_leave_together() {
    let cluster = Cluster::begin(&["a", "b", "c"], 0);
    leave_all(&cluster.names[1]).unwrap();
    for name in &cluster.names {
        wait_until("it has left", || status(name).is_err_and(|error| error.kind == Kind::NotFound));
    }
}

#[test]
fn what_does_not_prove_is_read_again_from_another_machine() {
    let cluster = Cluster::begin(&["a", "b", "c"], 0);
    // Two machines have other bytes under one name, as after damage.

    (0..3).for_each(|at| join_machines(&cluster.names[at], &[], 0, Copies::default()).unwrap());
    for (at, byte) in [(0, 1), (1, 2)] {
        conformance::write_object(&*cluster.store(at, ""), "one", &[byte; 5000]).unwrap();
    }
    (0..3).for_each(|at| cluster.join(at, 0));
    let mut buf = [0; 10];
    for (at, first, again) in [(0, 1, 2), (1, 2, 1), (2, 1, 2)] {
        let object = cluster.store(at, "").open("one").unwrap();
        object.read_at(100, &mut buf).unwrap();
        assert_eq!(buf, [first; 10], "machine {at}");
        object.read_again(100, &mut buf).unwrap();
        assert_eq!(buf, [again; 10], "machine {at}");
    }
}

#[test]
fn a_keeper_that_has_left_and_begins_anew_is_asked_again() {
    let cluster = Cluster::begin(&["a", "b"], 0);
    let port = cluster.machines[1].address.rsplit_once(':').unwrap().1.parse().unwrap();
    leave(&cluster.names[1]).unwrap();
    wait_until("it has ended", || cluster.status(0).neighbours.is_empty());
    wait_until("its name and port are free", || {
        std::panic::catch_unwind(|| Cluster::keeper(&cluster.names[1], (port, port))).is_ok()
    });
    // Its machine alone tells it of the job.
    cluster.join(1, 0);
    conformance::write_object(&*cluster.store(1, ""), "one", b"bytes").unwrap();
    assert_eq!(cluster.store(0, "").read("one", 5).unwrap(), b"bytes");
}

#[test]
fn files_without_their_copies_are_counted() {
    let cluster = Cluster::begin(&["a", "b", "c"], 1);
    let count = |at: usize, below: &str| uncopied(&cluster.names[at], below).unwrap();
    for step in ["step-1", "step-2"] {
        conformance::write_object(&*cluster.store(1, step), "file", &[1; 70_000]).unwrap();
        cluster.store(1, step).publish("COMMIT", b"done").unwrap();
    }
    wait_until("all is copied", || (0..3).all(|at| count(at, "step-1/") == 0 && count(at, "step-2/") == 0));
    (0..3).for_each(|at| cluster.join(at, 2));
    wait_until("all is copied again", || count(0, "") == 0);
    let holders = (0..3).filter(|&at| cluster.status(at).bytes > 140_000).count();
    assert_eq!(holders, 3);
}
