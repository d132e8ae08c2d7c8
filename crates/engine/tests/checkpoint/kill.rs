//! Saves of two real processes, killed by SIGKILL at random moments. The test binary runs itself again for each rank.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use shardfast_coord::grpc::{Membership, Place};
use shardfast_coord::{Ports, Topology};
use shardfast_engine::{Engine, Error, Kind, checkpoint, save};
use shardfast_format::step_dir;

use crate::count;
use crate::job::{Job, LONG, Truth, destination};
use crate::layout::{Dice, Layout};

/// Time in which a rank must learn that the other one is gone, on a busy machine.
const BOUNDED: Duration = Duration::from_secs(30);

const ROLE: &str = "SHARDFAST_TEST_ROLE";
const RUN: &str = "SHARDFAST_TEST_RUN";
pub(crate) const TOKEN: &str = "0123456789abcdef";
/// Begins the lines that a rank tells its parent, among those of the test runner.
const MARK: &str = "told: ";

fn truth(step: u64) -> Truth {
    Truth::small(step, 400)
}

pub(crate) fn tell(text: &str) {
    println!("{MARK}{text}");
}

/// The place of one of two processes.
pub(crate) fn place(rank: u32) -> Place {
    let topology = Topology::new(2, 2, Topology::FAN_OUT_DEFAULT).unwrap();
    let membership = Membership {
        host: "127.0.0.1".into(),
        ports: Ports::default(),
        rank,
        topology,
        token: TOKEN.into(),
        tls: None,
    };
    Place::open(membership, 0).unwrap()
}

/// Runs one of the two processes; not a test by itself. Rank 0's role is `0`, rank 1's its own and the address of rank
/// 0. Each line of input is a step to save; an empty line begins the save that the line before has prepared.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let run = env::var(RUN).unwrap();
    let coord = match role.split_once(' ') {
        None => {
            let place = place(0);
            tell(place.address().unwrap());
            place.join(None, LONG).unwrap()
        }
        Some((_, address)) => place(1).join(Some(address), LONG).unwrap(),
    };
    let engine = Engine::new(coord, shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
    let mut lines = io::stdin().lines();
    while let Some(Ok(step)) = lines.next() {
        let step: u64 = step.parse().unwrap();
        let state = truth(step).state(&Layout::rows(2), engine.rank(), &mut Dice(step));
        let url = Path::new(&run).join(step_dir(step));
        tell("ready");
        lines.next().unwrap().unwrap();
        match save(&engine, destination(url.to_str().unwrap()), state, LONG).committed(None) {
            Ok(()) => tell("saved"),
            Err(error) => tell(&format!("failed: {error}")),
        }
    }
}

/// A rank; killed when dropped.
pub(crate) struct Process {
    child: Child,
    told: Receiver<String>,
}

impl Process {
    /// Starts a process that runs the test of that name with these variables.
    pub(crate) fn start<'a>(test: &str, variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Process {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).envs(variables);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, told) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(io::Result::ok) {
                if let Some((_, text)) = line.split_once(MARK) {
                    // The test may have dropped the receiver.
                    let _ = sender.send(text.to_owned());
                }
            }
        });
        Process { child, told }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub(crate) fn hear(&self) -> String {
        self.told.recv_timeout(BOUNDED).expect("a word in bounded time")
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Returns the last output of a killed process.
    fn last_word(&self) -> Option<String> {
        self.told.recv_timeout(BOUNDED).ok()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start(run: &Path) -> [Process; 2] {
    let process = |role: &str| Process::start("kill::rank", [(ROLE, role), (RUN, run.to_str().unwrap())]);
    let root = process("0");
    let member = process(&format!("1 {}", root.hear()));
    [root, member]
}

fn begin(ranks: &mut [Process; 2], step: u64) {
    ranks.iter_mut().for_each(|rank| rank.say(&step.to_string()));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks.iter_mut().for_each(|rank| rank.say(""));
}

fn save_undisturbed(ranks: &mut [Process; 2], step: u64) -> Duration {
    let started = Instant::now();
    begin(ranks, step);
    ranks.iter().for_each(|rank| assert_eq!(rank.hear(), "saved"));
    started.elapsed()
}

/// Returns whether a checkpoint is visible; checks that it is whole then.
pub(crate) fn is_whole(place: &Path, truth: &Truth) -> bool {
    let open = |engine: &Arc<Engine>| checkpoint::open(engine, place.to_str().unwrap(), LONG);
    match Job::new(Layout::rows(1)).compare(open, truth, &mut Dice(3)) {
        Ok(None) => true,
        Err(Error { kind: Kind::NotFound, .. }) => false,
        other => panic!("{} is visible and broken: {other:?}", place.display()),
    }
}

fn is_there(run: &Path, step: u64) -> bool {
    is_whole(&run.join(step_dir(step)), &truth(step))
}

#[test]
fn kills_at_random_moments_leave_no_broken_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path();
    let mut dice = Dice(2024);
    let (mut kills, mut attempts, mut complete, mut cut_off) = (0, 0, 0, 0);
    let (mut previous, mut step) = (1, 1);
    let mut ranks = start(run);
    let mut duration = save_undisturbed(&mut ranks, step);
    let wanted = count("SHARDFAST_TEST_KILLS", 60);
    while kills < wanted {
        attempts += 1;
        assert!(attempts < 4 * wanted, "only {kills} of {attempts} kills came during a save");
        if attempts % 3 == 0 {
            // The next one is planned already; and the moments keep to how long a save takes.
            step += 1;
            duration = (duration + save_undisturbed(&mut ranks, step)) / 2;
            fs::remove_dir_all(run.join(step_dir(previous))).unwrap();
            previous = step;
        }
        step += 1;
        begin(&mut ranks, step);
        thread::sleep(duration.mul_f64(dice.below(1000) as f64 / 1000.0));
        let killed = [[true, true], [true, false], [false, true]][dice.below(3) as usize];
        ranks.iter_mut().zip(killed).filter(|(_, killed)| *killed).for_each(|(rank, _)| rank.kill());
        let told = [0, 1].map(|i| if killed[i] { ranks[i].last_word() } else { Some(ranks[i].hear()) });

        let saved = told.iter().flatten().any(|told| told == "saved");
        let there = is_there(run, step);
        assert!(there || !saved, "step {step} was called saved and is not there");
        assert!(is_there(run, previous), "step {previous} is gone");
        if killed != [true, true] {
            let survivor = told[usize::from(killed[0])].as_ref().unwrap();
            assert!(survivor == "saved" || survivor.contains("lost"), "{survivor}");
        }
        // Killed while a save was under way, not after it.
        if (0..2).any(|i| killed[i] && told[i].is_none()) {
            kills += 1;
            complete += usize::from(there);
            cut_off += usize::from(!there && run.join(step_dir(step)).exists());
        }
        let obsolete = if there { previous } else { step };
        let _ = fs::remove_dir_all(run.join(step_dir(obsolete)));
        previous = if there { step } else { previous };
        ranks = start(run);
    }
    println!("{kills} kills in {attempts} attempts: {complete} found the save complete, {cut_off} left files behind");
    // Few moments lie between the commit and the word of it: a campaign's many kills meet them.
    assert!(complete > 0 || wanted < 200, "{complete} complete");
    assert!(cut_off > wanted / 10, "{cut_off} cut off");
}
