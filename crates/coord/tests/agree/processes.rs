//! Tests ranks that are real processes, in a tree, and die by SIGKILL or are stopped by SIGSTOP in each phase of a
//! round.

use std::thread;
use std::time::Duration;

use crate::job::{Job, Process, Site, WORLD, answer, root};
use crate::{LONG, PROMPT};

/// Deadline of rounds that are to expire.
const DEADLINE: Duration = Duration::from_secs(3);
/// Time that ranks may need beyond the deadline, on a busy machine.
const SLACK: Duration = Duration::from_millis(1500);
/// Time until messages in flight have arrived.
const SETTLED: Duration = Duration::from_millis(300);

/// Phase of a round of "plan" in which a rank is struck.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Before its contribution.
    Before,
    /// Waiting, after its contribution, for a rank below it.
    Waiting,
    /// Waiting for other ranks, after it reported its subtree.
    Reported,
    /// While rank 0 decides.
    Deciding,
}

const PHASES: [Phase; 4] = [Phase::Before, Phase::Waiting, Phase::Reported, Phase::Deciding];

/// An inner rank: 5, and 6 above 7, are below it. Ranks 1 to 3 are the other half.
const INNER: u32 = 4;

/// Brings a new job to that phase; returns it with the ranks that are late to the round.
fn brought_to(phase: Phase, struck: u32, deadline: Duration) -> (Job, Vec<u32>) {
    let mut job = Job::start(|_| Site::here());
    let late = match phase {
        Phase::Before => vec![],
        Phase::Waiting => vec![if struck == 0 { 3 } else { 7 }],
        Phase::Reported => vec![3],
        Phase::Deciding => vec![],
    };
    let absent = if phase == Phase::Before { vec![struck] } else { late.clone() };
    job.all_come(&absent, "plan", deadline);
    thread::sleep(SETTLED);
    (job, late)
}

fn below(struck: u32, rank: u32) -> bool {
    struck == 0 || (struck..WORLD).contains(&rank)
}

fn gone(rank: u32) -> String {
    format!("rank {rank} is lost: its process ended or cannot be reached")
}

/// Runs all cases at once: they mostly wait.
fn each_case(struck: &[(u32, &[Phase])], run: impl Fn(u32, Phase) + Sync) {
    thread::scope(|cases| {
        for &(rank, phases) in struck {
            for &phase in phases {
                let run = &run;
                cases.spawn(move || run(rank, phase));
            }
        }
    });
}

#[test]
fn a_rank_that_stands_still_is_named_to_every_other_rank_by_the_deadline() {
    let of_root = [Phase::Before, Phase::Deciding];
    each_case(&[(INNER, &PHASES), (0, &of_root), (7, &[Phase::Before])], |struck, phase| {
        let (mut job, late) = brought_to(phase, struck, DEADLINE);
        job.ranks[struck as usize].signal("STOP");
        late.iter().for_each(|&rank| job.ranks[rank as usize].come("plan", DEADLINE));
        let is_complete = phase == Phase::Reported || phase == Phase::Deciding;
        if is_complete && struck != 0 {
            // Ranks below it get the error although rank 0 takes its time.
            thread::sleep(DEADLINE);
            job.let_decide();
        }
        for rank in (0..WORLD).filter(|rank| *rank != struck) {
            let heard = job.ranks[rank as usize].heard();
            let case = format!("rank {struck} in {phase:?}, rank {rank}: {heard:?}");
            if below(struck, rank) {
                assert!(heard.what.starts_with(&format!("rank {struck} does not answer; the outcome")), "{case}");
            } else if is_complete {
                assert_eq!(heard.what, answer(), "{case}");
                continue;
            } else {
                assert!(heard.misses(if struck == INNER { "ranks 4-7" } else { "rank 7" }, struck), "{case}");
            }
            assert!(heard.after < DEADLINE + SLACK, "{case}");
        }
        // It goes on, and has not lost its place.
        job.ranks[struck as usize].signal("CONT");
        if phase == Phase::Before {
            job.ranks[struck as usize].come("plan", DEADLINE);
        }
        job.comes_back(struck);
        job.agrees("again");
    });
}

#[test]
fn a_rank_that_is_killed_is_named_to_every_other_rank_at_once() {
    let of_root = [Phase::Waiting, Phase::Deciding];
    each_case(&[(INNER, &PHASES), (0, &of_root), (7, &[Phase::Before])], |struck, phase| {
        let (mut job, late) = brought_to(phase, struck, LONG);
        job.ranks[struck as usize].kill();
        thread::sleep(SETTLED);
        late.iter().for_each(|&rank| job.ranks[rank as usize].come("plan", LONG));
        let is_complete = phase == Phase::Deciding;
        if is_complete && struck != 0 {
            job.let_decide();
        }
        for rank in (0..WORLD).filter(|rank| *rank != struck) {
            let heard = job.ranks[rank as usize].heard();
            let expected = if is_complete && !below(struck, rank) { answer() } else { gone(struck) };
            assert_eq!(heard.what, expected, "rank {struck} in {phase:?}, rank {rank}");
            assert!(heard.after < PROMPT, "rank {struck} in {phase:?}, rank {rank}: {heard:?}");
        }
        job.all_come(&[struck], "later", LONG);
        for rank in (0..WORLD).filter(|rank| *rank != struck) {
            assert_eq!(job.ranks[rank as usize].heard().what, gone(struck));
        }
    });
}

#[test]
fn a_rank_that_is_killed_before_it_joined_is_missing_with_all_below_it() {
    let (mut root, address) = root(&Site::here());
    let role = |rank| if rank == INNER { "open" } else { "join" };
    let start = |rank| Process::start(&format!("{} {rank} {address}", role(rank)), &Site::here());
    let mut others: Vec<Process> = (1..WORLD).map(start).collect();
    assert_eq!(others[INNER as usize - 1].hear(), "opened");
    others[INNER as usize - 1].kill();
    others[..3].iter_mut().for_each(|other| assert_eq!(other.hear(), "joined"));
    for rank in [&mut root].into_iter().chain(&mut others[..3]) {
        rank.come("plan", DEADLINE);
    }
    for rank in [&mut root].into_iter().chain(&mut others[..3]) {
        let heard = rank.heard();
        assert!(heard.misses("ranks 4-7", INNER) && heard.after < DEADLINE + SLACK, "{heard:?}");
    }
}
