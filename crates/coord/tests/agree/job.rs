//! Runs a job of real processes: the test binary runs itself again for each rank, and sends it commands line by line.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_coord::Coord;
use shardfast_coord::grpc::{Membership, Place};

use crate::{HOST, LONG, membership, tree};

const ROLE: &str = "SHARDFAST_TEST_ROLE";
/// Prefix of the lines that a child sends its parent, among those of the test runner.
const MARK: &str = "told: ";

pub(crate) const WORLD: u32 = 8;

/// Host and network namespace of a process.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Network namespace; `None` for the one that the test runs in.
    pub(crate) namespace: Option<String>,
    pub(crate) host: String,
}

impl Site {
    pub(crate) fn here() -> Site {
        Site { namespace: None, host: HOST.to_owned() }
    }
}

pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Outcome of a round at a rank, and the time since the rank contributed.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) after: Duration,
    pub(crate) what: String,
}

impl Heard {
    /// Returns whether `missing` did not contribute, of which `silent` does not answer pings.
    pub(crate) fn misses(&self, missing: &str, silent: u32) -> bool {
        let begins = format!("agreement on \"plan\" failed: {missing} did not contribute within ");
        self.what.starts_with(&begins) && self.what.ends_with(&format!("; rank {silent} does not answer"))
    }
}

impl Process {
    pub(crate) fn start(role: &str, site: &Site) -> Process {
        let itself = env::current_exe().unwrap();
        let mut command = match &site.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(itself);
                command
            }
            None => Command::new(itself),
        };
        command.args(["--exact", "job::child", "--nocapture"]).env(ROLE, format!("{role} {}", site.host));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, input, output }
    }

    /// Returns the next line that the child sends.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some((_, told)) = line.trim_end().split_once(MARK) {
                return told.to_owned();
            }
            line.clear();
        }
        panic!("the child ended without a word");
    }

    pub(crate) fn heard(&mut self) -> Heard {
        let told = self.hear();
        let (after, what) = told.split_once(' ').unwrap_or_else(|| panic!("told {told:?} in place of an outcome"));
        Heard { after: Duration::from_millis(after.parse().unwrap()), what: what.to_owned() }
    }

    /// Makes the rank contribute to that round.
    pub(crate) fn come(&mut self, topic: &str, deadline: Duration) {
        self.say(&format!("{topic} {}", deadline.as_millis()));
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends the rank that signal. After `STOP` it returns once every thread stands: on a busy machine the others run
    /// on until one of them has taken the signal.
    pub(crate) fn signal(&self, name: &str) {
        let process = self.child.id();
        let sent = Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status();
        assert!(sent.unwrap().success());
        let until = Instant::now() + LONG;
        while name == "STOP" && !stands(process) {
            assert!(Instant::now() < until, "process {process} does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns whether all threads of a process are stopped.
fn stands(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.flatten().all(|thread| {
        // A thread that has just ended stands, too.
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}

/// All ranks, each below its parent.
pub(crate) struct Job {
    pub(crate) ranks: Vec<Process>,
}

impl Job {
    /// Makes all of them join.
    pub(crate) fn start(site: impl Fn(u32) -> Site) -> Job {
        let (root, address) = root(&site(0));
        let others = (1..WORLD).map(|rank| Process::start(&format!("join {rank} {address}"), &site(rank)));
        let mut ranks: Vec<Process> = [root].into_iter().chain(others).collect();
        ranks[1..].iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        Job { ranks }
    }

    /// Makes all contribute to that round, except these.
    pub(crate) fn all_come(&mut self, but: &[u32], topic: &str, deadline: Duration) {
        let ranks = self.ranks.iter_mut().zip(0..).filter(|(_, rank)| !but.contains(rank));
        ranks.for_each(|(process, _)| process.come(topic, deadline));
    }

    /// Lets rank 0 decide on "plan" only now.
    pub(crate) fn let_decide(&mut self) {
        assert_eq!(self.ranks[0].hear(), "deciding");
        self.ranks[0].say("decide 0");
    }

    /// Checks that a rank that was stopped gets the outcome of its round. Rank 0 may still decide it, if it receives
    /// all parts before it finds that their ranks no longer wait.
    pub(crate) fn comes_back(&mut self, rank: u32) {
        let process = &mut self.ranks[rank as usize];
        if process.hear() == "deciding" {
            process.say("decide 0");
            process.hear();
        }
    }

    /// Checks that all ranks can agree.
    pub(crate) fn agrees(&mut self, topic: &str) {
        self.all_come(&[], topic, LONG);
        for (rank, process) in self.ranks.iter_mut().enumerate() {
            assert_eq!(process.heard().what, answer(), "rank {rank}");
        }
    }
}

/// Returns the answer of a decided round.
pub(crate) fn answer() -> String {
    format!("answer {:?}", (0..WORLD as u8).collect::<Vec<_>>())
}

/// Returns rank 0 and its address.
pub(crate) fn root(site: &Site) -> (Process, String) {
    let mut root = Process::start("root", site);
    let address = root.hear();
    (root, address)
}

fn tell(text: &str) {
    println!("{MARK}{text}");
}

/// Runs the processes that the tests start; not a test by itself. Roles: `root`, `join RANK ADDRESS`, `open RANK
/// ADDRESS` (never joins); each with the host of the process. Then, line by line, `TOPIC MILLISECONDS`: contribute to
/// that round; rank 0 decides on "plan" when it reads `decide`.
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let member = |rank| Membership { host: role[role.len() - 1].to_owned(), ..membership(tree(WORLD), rank) };
    if role[0] == "root" {
        let place = Place::open(member(0), 0).unwrap();
        tell(place.address().unwrap());
        return obey(place.join(None, LONG).unwrap());
    }
    let place = Place::open(member(role[1].parse().unwrap()), 0).unwrap();
    let parent = place.find_parent(role[2], LONG).unwrap();
    if role[0] == "open" {
        tell("opened");
        return thread::sleep(LONG);
    }
    match place.join(Some(&parent), LONG) {
        Ok(coord) => {
            tell("joined");
            obey(coord);
        }
        Err(error) => tell(&error.to_string()),
    }
}

fn obey(coord: Arc<dyn Coord>) {
    let (decide, go) = channel();
    let go = Arc::new(Mutex::new(go));
    for line in io::stdin().lines() {
        let line = line.unwrap();
        let (topic, millis) = line.split_once(' ').unwrap();
        if topic == "decide" {
            decide.send(()).unwrap();
            continue;
        }
        let (coord, topic, go) = (Arc::clone(&coord), topic.to_owned(), Arc::clone(&go));
        let deadline = Duration::from_millis(millis.parse().unwrap());
        thread::spawn(move || come(&*coord, &topic, &go, deadline));
    }
}

fn come(coord: &dyn Coord, topic: &str, go: &Mutex<Receiver<()>>, deadline: Duration) {
    let mut decide = |parts: Vec<Vec<u8>>| {
        if topic == "plan" {
            tell("deciding");
            go.lock().unwrap().recv().unwrap();
        }
        Ok(vec![parts.concat(); parts.len()])
    };
    let came = Instant::now();
    let answer = coord.agree(topic, Ok(vec![coord.rank() as u8]), &mut decide, deadline);
    let what = answer.map_or_else(|error| error.to_string(), |answer| format!("answer {answer:?}"));
    tell(&format!("{} {what}", came.elapsed().as_millis()));
}
