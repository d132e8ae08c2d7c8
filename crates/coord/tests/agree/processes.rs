//! Ranks that are real processes, in a tree, and die by SIGKILL or stop. The test binary runs itself again for each.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use shardfast_coord::grpc::Place;
use shardfast_coord::{Coord, Error};

use crate::{LONG, each, everyone, membership, promptly, tree};

const ROLE: &str = "SHARDFAST_TEST_ROLE";
const ADDRESS: &str = "SHARDFAST_TEST_ADDRESS";
/// Begins the lines that a child tells its parent, among those of the test runner.
const MARK: &str = "told: ";

const WORLD: u32 = 8;
/// Of rounds that are to expire.
const SHORT: Duration = Duration::from_millis(700);

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

    fn stop(&self) {
        assert!(Command::new("kill").args(["-STOP", &self.child.id().to_string()]).status().unwrap().success());
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

fn told(answer: &Result<Vec<u8>, Error>) -> String {
    match answer {
        Ok(answer) => format!("answer {answer:?}"),
        Err(error) => error.to_string(),
    }
}

/// Not a test by itself: what the processes that the tests start do. Roles: `wait RANK MILLISECONDS` (agrees on
/// "plan"), `idle RANK` (never comes), `open RANK` (never joins), `decide` (is rank 0, and never done with its
/// decision).
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let number = |index: usize| role[index].parse::<u32>().unwrap();
    let root = env::var(ADDRESS).unwrap();
    let found = |rank| {
        let place = Place::open(membership(tree(WORLD), rank), 0).unwrap();
        let parent = place.find_parent(&root, LONG).unwrap();
        (place, parent)
    };
    match role[0] {
        "decide" => {
            let place = Place::open(membership(tree(WORLD), 0), 0).unwrap();
            tell(place.address().unwrap());
            let decide = &mut |_| {
                tell("deciding");
                thread::sleep(LONG);
                Err(String::new())
            };
            drop(place.join(None, LONG).unwrap().agree("plan", Ok(vec![]), decide, LONG));
        }
        "open" => {
            let _found = found(number(1));
            tell("opened");
            thread::sleep(LONG);
        }
        "idle" | "wait" => {
            let (place, parent) = found(number(1));
            match place.join(Some(&parent), LONG) {
                Ok(coord) if role[0] == "wait" => {
                    tell("joined");
                    let deadline = Duration::from_millis(number(2).into());
                    tell(&told(&everyone(&*coord, "plan", deadline)));
                }
                Ok(_coord) => {
                    tell("joined");
                    thread::sleep(LONG);
                }
                Err(error) => tell(&error.to_string()),
            }
        }
        role => panic!("unknown role {role}"),
    }
}

/// Rank 0 here, and its address.
fn root() -> (Arc<dyn Coord>, String) {
    let place = Place::open(membership(tree(WORLD), 0), 0).unwrap();
    let address = place.address().unwrap().to_owned();
    (place.join(None, LONG).unwrap(), address)
}

/// Ranks 1 to 7, of which one has a role of its own.
fn others(address: &str, deadline: Duration, special: Option<(u32, &str)>) -> Vec<(u32, Process)> {
    let role = |rank| match special {
        Some((special, role)) if special == rank => format!("{role} {rank}"),
        _ => format!("wait {rank} {}", deadline.as_millis()),
    };
    (1..WORLD).map(|rank| (rank, Process::start(&role(rank), address))).collect()
}

fn gone(rank: u32) -> Error {
    Error::Lost { rank, cause: "its process ended or cannot be reached".into() }
}

#[test]
fn processes_agree() {
    let (root, address) = root();
    let mut others = others(&address, LONG, None);
    let all: Vec<u8> = (0..WORLD as u8).collect();
    assert_eq!(everyone(&*root, "plan", LONG), Ok(all.clone()));
    for (rank, other) in &mut others {
        assert_eq!(other.hear(), "joined");
        assert_eq!(other.hear(), format!("answer {all:?}"), "rank {rank}");
    }
}

#[test]
fn a_rank_that_is_killed_in_a_round_is_named_to_every_other_rank_at_once() {
    // A leaf, and one with ranks below it.
    for killed in [3, 4] {
        let (root, address) = root();
        let mut others = others(&address, LONG, Some((killed, "idle")));
        for (_, other) in &mut others {
            assert_eq!(other.hear(), "joined");
        }
        thread::scope(|threads| {
            let at_root = threads.spawn(|| everyone(&*root, "plan", LONG));
            // So that the round is on its way at every rank.
            thread::sleep(Duration::from_millis(300));
            promptly(|| {
                others[killed as usize - 1].1.kill();
                assert_eq!(at_root.join().unwrap(), Err(gone(killed)));
                for (_, other) in others.iter_mut().filter(|(rank, _)| *rank != killed) {
                    assert_eq!(other.hear(), gone(killed).to_string());
                }
            });
        });
        assert_eq!(promptly(|| everyone(&*root, "later", LONG)), Err(gone(killed)));
    }
}

#[test]
fn a_rank_that_is_killed_before_it_joined_is_missing_with_all_below_it() {
    let (root, address) = root();
    let mut others = others(&address, SHORT * 2, Some((4, "open")));
    for (rank, other) in &mut others {
        match rank {
            4 => assert_eq!(other.hear(), "opened"),
            1..=3 => assert_eq!(other.hear(), "joined"),
            _ => {}
        }
    }
    others[3].1.kill();
    let missing = promptly(|| everyone(&*root, "plan", SHORT * 2)).unwrap_err();
    assert!(matches!(&missing, Error::Missing { ranks, .. } if *ranks == [4, 5, 6, 7]), "{missing}");
    for (_, other) in &mut others[..3] {
        assert_eq!(other.hear(), missing.to_string());
    }
}

#[test]
fn a_rank_0_that_is_killed_while_it_decides_is_named_to_every_other_rank_at_once() {
    let mut root = Process::start("decide", "");
    let address = root.hear();
    let mut others = others(&address, LONG, None);
    for (_, other) in &mut others {
        assert_eq!(other.hear(), "joined");
    }
    assert_eq!(root.hear(), "deciding");
    promptly(|| {
        root.kill();
        for (_, other) in &mut others {
            assert_eq!(other.hear(), gone(0).to_string());
        }
    });
}

#[test]
fn a_rank_that_is_killed_before_it_passed_on_the_answer_leaves_unknowing_only_those_below_it() {
    let (root, address) = root();
    let mut others = others(&address, LONG, None);
    for (_, other) in &mut others {
        assert_eq!(other.hear(), "joined");
    }
    let decide = &mut |parts: Vec<Vec<u8>>| {
        others[0].1.kill();
        Ok(vec![vec![7]; parts.len()])
    };
    assert_eq!(root.agree("plan", Ok(vec![0]), decide, LONG), Ok(vec![7]));
    promptly(|| {
        for (rank, other) in &mut others[1..] {
            let expected = if *rank < 4 { gone(1).to_string() } else { "answer [7]".to_owned() };
            assert_eq!(other.hear(), expected, "rank {rank}");
        }
    });
    assert_eq!(promptly(|| each(&[root], |coord| everyone(coord, "later", LONG))), vec![Err(gone(1))]);
}

#[test]
fn a_rank_that_stopped_is_named_at_the_deadline() {
    for (stopped, unheard) in [(3, vec![3]), (4, vec![4, 5, 6, 7])] {
        let (root, address) = root();
        let mut others = others(&address, SHORT, Some((stopped, "idle")));
        // The others wait until all have joined: their calls begin when they are told apart from the stopped one.
        for (_, other) in &mut others {
            assert_eq!(other.hear(), "joined");
        }
        others[stopped as usize - 1].1.stop();
        let missing = promptly(|| everyone(&*root, "plan", SHORT)).unwrap_err();
        assert!(matches!(&missing, Error::Missing { ranks, .. } if *ranks == unheard), "{missing}");
        for (rank, other) in &mut others {
            if !unheard.contains(rank) {
                assert_eq!(other.hear(), missing.to_string());
            }
        }
    }
}
