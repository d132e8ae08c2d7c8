//! Ranks that are real processes and die by SIGKILL. The test binary runs itself again for each of them.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use shardfast_coord::{Coord, Error, grpc};

use crate::{HOST, LONG, TOKEN, each, everyone, promptly};

const ROLE: &str = "SHARDFAST_TEST_ROLE";
const ADDRESS: &str = "SHARDFAST_TEST_ADDRESS";
/// Begins the lines that a child tells its parent, among those of the test runner.
const MARK: &str = "told: ";

struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str, address: &str) -> Process {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--nocapture"]);
        command.env(ROLE, role).env(ADDRESS, address).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, output }
    }

    /// The next thing that the child tells.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some((_, told)) = line.trim_end().split_once(MARK) {
                return told.to_owned();
            }
            line.clear();
        }
        panic!("the child ended without a word");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn tell(text: &str) {
    println!("{MARK}{text}");
}

/// Not a test by itself: what the processes that the tests start do. Roles: `serve WORLD`, `wait RANK WORLD` (agrees on
/// "plan"), `idle RANK WORLD` (never comes).
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let number = |index: usize| role[index].parse::<u32>().unwrap();
    let join = || grpc::join(&env::var(ADDRESS).unwrap(), HOST, number(1), number(2), TOKEN, LONG).unwrap();
    let wait = |coord: &dyn Coord| {
        tell("joined");
        match everyone(coord, "plan", LONG) {
            Ok(answer) => tell(&format!("answer {answer:?}")),
            Err(error) => tell(&error.to_string()),
        }
    };
    match role[0] {
        "serve" => {
            let (root, address) = grpc::serve(HOST, number(1), TOKEN).unwrap();
            tell(&address);
            thread::sleep(LONG);
            drop(root);
        }
        "idle" => {
            let coord = join();
            tell("joined");
            thread::sleep(LONG);
            drop(coord);
        }
        "wait" => wait(&*join()),
        role => panic!("unknown role {role}"),
    }
}

#[test]
fn processes_agree() {
    let (root, address) = grpc::serve(HOST, 4, TOKEN).unwrap();
    let mut others: Vec<_> = (1..4).map(|rank| Process::start(&format!("wait {rank} 4"), &address)).collect();
    assert_eq!(everyone(&*root, "plan", LONG), Ok(vec![0, 1, 2, 3]));
    for other in &mut others {
        assert_eq!(other.hear(), "joined");
        assert_eq!(other.hear(), "answer [0, 1, 2, 3]");
    }
}

#[test]
fn a_killed_rank_is_named_to_every_other_rank_at_once() {
    let (root, address) = grpc::serve(HOST, 4, TOKEN).unwrap();
    let roles = ["wait 1 4", "idle 2 4", "wait 3 4"];
    let mut others = roles.map(|role| Process::start(role, &address));
    for other in &mut others {
        assert_eq!(other.hear(), "joined");
    }
    let lost = Error::Lost { rank: 2, cause: "its process ended or cannot be reached".into() };
    thread::scope(|threads| {
        let at_root = threads.spawn(|| everyone(&*root, "plan", LONG));
        // So that the round is on its way at every rank.
        thread::sleep(Duration::from_millis(300));
        promptly(|| {
            others[1].kill();
            assert_eq!(at_root.join().unwrap(), Err(lost.clone()));
            assert_eq!(others[0].hear(), lost.to_string());
            assert_eq!(others[2].hear(), lost.to_string());
        });
    });
    assert_eq!(promptly(|| everyone(&*root, "later", LONG)), Err(lost));
}

#[test]
fn a_killed_rank_0_is_named_to_every_other_rank_at_once() {
    let mut root = Process::start("serve 3", "");
    let address = root.hear();
    let here = grpc::join(&address, HOST, 1, 3, TOKEN, LONG).unwrap();
    let mut there = Process::start("wait 2 3", &address);
    assert_eq!(there.hear(), "joined");
    let lost = Error::Lost { rank: 0, cause: "its process ended or cannot be reached".into() };
    thread::scope(|threads| {
        let at_member = threads.spawn(|| everyone(&*here, "plan", LONG));
        thread::sleep(Duration::from_millis(300));
        promptly(|| {
            root.kill();
            assert_eq!(at_member.join().unwrap(), Err(lost.clone()));
            assert_eq!(there.hear(), lost.to_string());
        });
    });
    assert_eq!(promptly(|| each(&[here], |coord| everyone(coord, "later", LONG))), vec![Err(lost)]);
}
