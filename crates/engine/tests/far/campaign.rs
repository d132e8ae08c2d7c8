//! Each request of a save and of a load meets each fault, in a run of its own.
//!
//! 1. A run without a fault tells which requests there are.
//! 2. Each of them then meets each fault that can happen to it once, and a few that stay; or the client dies there. A
//!    campaign makes all these runs, others one in four.
//! 3. What happens once fails neither saves nor loads. What stays ends in an error that names the request's object, in
//!    bounded time, unless the operation can do without the request.
//! 4. After each save the new checkpoint, read past the proxy, is whole or invisible: whole if the save succeeded; only
//!    if the error says that it may have been published, if it failed. A load returns the right bytes or an error.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_engine::{Error, Kind, Result};
use shardfast_store::Store;
use shardfast_store::testing::servers::Server;

use crate::checkpoint::{direct, is_whole, load, save, store};
use crate::proxy::{Fault, Harm, Proxy, Seen};

/// Runs at a time: most of them wait for a retry.
pub(crate) const RUNS_AT_A_TIME: usize = 16;

/// Deadline of operations that are to succeed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Deadline of operations whose storage does not come back.
const SHORT_DEADLINE: Duration = Duration::from_secs(2);

/// Time that an operation may take beyond its deadline.
const SLACK: Duration = Duration::from_secs(20);

/// A request in which nothing moves for so long is cut, where one of them is silent; and where none is.
const STILL_MAX: Duration = Duration::from_secs(1);
pub(crate) const PATIENT: Duration = Duration::from_secs(30);

/// Faults that stay, for each request: others for the next one.
const LASTING: usize = 3;

/// Share of the runs that are made, and a few more; a campaign sets 1.
const ONE_IN: usize = 4;
const ONE_IN_VARIABLE: &str = "SHARDFAST_FAULTS_ONE_IN";

const FAULTS: [Fault; 29] = [
    Fault::Refused,
    // An error in the body of an answer that says that all is well.
    Fault::Answered(200),
    Fault::Answered(500),
    Fault::Answered(503),
    Fault::Invented(404),
    Fault::Replaced(200),
    Fault::Replaced(302),
    Fault::Replaced(400),
    Fault::Replaced(401),
    Fault::Replaced(403),
    Fault::Replaced(404),
    Fault::Replaced(413),
    Fault::Replaced(501),
    Fault::Replaced(507),
    Fault::AnswerLost,
    Fault::Late,
    Fault::Twice,
    Fault::RequestCut,
    Fault::AnswerCut,
    Fault::AnswerShort,
    Fault::RequestTurned(1),
    Fault::RequestTurned(2),
    Fault::RequestTurned(3),
    Fault::AnswerTurned(1),
    Fault::AnswerTurned(2),
    Fault::AnswerTurned(3),
    Fault::Silent,
    Fault::DeadBefore,
    Fault::DeadAfter,
];

/// Suffix of the request for a list of a directory.
const LIST: &str = "?delimiter&list-type";

/// Beginning of the request that publishes a checkpoint: it meets each fault in every run of the test.
const DECIDES: &str = "PUT COMMIT";

/// Prefix of a store's error.
const OPERATIONS: [&str; 9] = ["open", "create", "write", "finish", "put", "publish", "list", "read", "delete"];

/// Returns whether a fault can happen to a request.
fn applies(fault: Fault, seen: &Seen) -> bool {
    match fault {
        Fault::RequestCut | Fault::RequestTurned(_) => seen.has_body,
        Fault::AnswerShort | Fault::AnswerTurned(_) => seen.answer_has_body,
        // Of others the operation fails, and says so.
        Fault::Replaced(_) => seen.request.what.starts_with(DECIDES),
        // S3 does that where it puts parts together.
        Fault::Answered(200) => seen.request.what.starts_with("POST") && seen.request.what.ends_with("?uploadId"),
        _ => true,
    }
}

/// Whether it is the list of the place itself, or of a directory in it. How often those are listed depends on whether a
/// file has come into them by the first time.
fn is_list(seen: &Seen, of_the_place: bool) -> bool {
    seen.request.what.ends_with(LIST) && seen.request.what.starts_with("GET ?") == of_the_place
}

/// Whether the fault can change the name of an upload, which nothing proves but the connection if it is `https://`. The
/// service refuses parts under a name that is none of its own, and the save fails.
fn is_unproven(fault: Fault, seen: &Seen) -> bool {
    matches!(fault, Fault::AnswerTurned(_)) && seen.request.what.ends_with("?uploads")
}

fn is_death(fault: Fault) -> bool {
    matches!(fault, Fault::DeadBefore | Fault::DeadAfter)
}

/// Returns whether the server dies and stays away for longer than the operation may take.
fn is_away(fault: Fault) -> bool {
    matches!(fault, Fault::ServerDies(_, seconds) if Duration::from_secs(seconds.into()) > SHORT_DEADLINE)
}

/// A run: the request that is harmed, and how.
pub(crate) struct Run {
    number: usize,
    seen: Seen,
    harm: Harm,
}

impl Run {
    pub(crate) fn new(number: usize, seen: &Seen, fault: Fault, stays: bool) -> Run {
        Run { number, seen: seen.clone(), harm: Harm { at: seen.request.clone(), fault, stays } }
    }

    /// Returns whether the operation may fail: the fault does not pass.
    fn may_fail(&self) -> bool {
        let fault = self.harm.fault;
        self.harm.stays || is_death(fault) || is_away(fault) || is_unproven(fault, &self.seen)
    }

    fn deadline(&self) -> Duration {
        if self.may_fail() { SHORT_DEADLINE } else { DEADLINE }
    }

    fn still_max(&self) -> Duration {
        if self.harm.fault == Fault::Silent { STILL_MAX } else { PATIENT }
    }

    /// Checks that an error names an operation and its object: the one whose request failed, where others succeed.
    fn expect_named(&self, place: &Place<'_>, error: &Error) -> Outcome {
        let below = self.seen.request.what.split(' ').nth(1).and_then(|rest| rest.split('?').next());
        let is_alone = !is_death(self.harm.fault) && !is_away(self.harm.fault);
        let object = match below.filter(|_| is_alone) {
            // The random part of the name differs from run to run.
            Some(below) => below.split('*').next().unwrap_or_default(),
            None => "",
        };
        let object = format!("s3://{}/{object}", place.prefix()).trim_end_matches('/').to_owned();
        let is_named = OPERATIONS.iter().any(|operation| error.message.contains(&format!("{operation} {object}")));
        // An error about damage names the file and the leaves in it.
        let file = below.map(|below| below.split('*').next().unwrap_or_default());
        let is_damaged = error.kind == Kind::Corrupt && file.is_some_and(|file| error.message.contains(file));
        match is_named || is_damaged {
            true => Ok(Some(false)),
            false => Err(format!("the error does not name {object}: {error}")),
        }
    }
}

/// Runs of an operation that makes these requests. All of them: each fault of each request once, and some of them for
/// ever. Whatever is left out, each request meets a fault, and each fault happens to a request.
pub(crate) fn each_fault(requests: &[Seen]) -> Vec<Run> {
    let one_in = std::env::var(ONE_IN_VARIABLE).map_or(ONE_IN, |count| count.parse().unwrap());
    let (mut made, mut left) = (Vec::new(), Vec::new());
    for (i, seen) in requests.iter().enumerate() {
        let faults: Vec<Fault> = FAULTS.into_iter().filter(|&fault| applies(fault, seen)).collect();
        let mut next = i;
        let mut add = |fault, stays| {
            let is_made = next.is_multiple_of(one_in) || seen.request.what.starts_with(DECIDES);
            next += 1;
            if is_made { &mut made } else { &mut left }.push((seen, fault, stays));
        };
        let (deaths, faults): (Vec<Fault>, Vec<Fault>) = faults.into_iter().partition(|&fault| is_death(fault));
        faults.iter().for_each(|&fault| add(fault, false));
        deaths.iter().for_each(|&fault| add(fault, false));
        faults.iter().cycle().skip(i).step_by(3).take(LASTING).for_each(|&fault| add(fault, true));
    }
    for (seen, fault, stays) in left {
        let is_met = made.iter().any(|(made, ..)| made.request == seen.request);
        let happens = made.iter().any(|&(_, made, for_ever)| (made, for_ever) == (fault, stays));
        if !is_met || !happens {
            made.push((seen, fault, stays));
        }
    }
    made.into_iter().enumerate().map(|(i, (seen, fault, stays))| Run::new(i, seen, fault, stays)).collect()
}

/// Outcomes of the runs with one fault.
#[derive(Default)]
struct Tally {
    succeeded: usize,
    failed: usize,
    missed: usize,
}

/// Result of a run: whether its operation succeeded (`None`: without the request), or the defect found.
type Outcome = std::result::Result<Option<bool>, String>;

/// Makes all runs, so many at a time, and fails with all that is wrong.
fn all(what: &str, at_a_time: usize, runs: &[Run], run: impl Fn(&Run) -> Outcome + Sync) {
    let began = Instant::now();
    let (next, flaws, tallies) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    thread::scope(|threads| {
        for _ in 0..at_a_time {
            threads.spawn(|| {
                while let Some(this) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = catch_unwind(AssertUnwindSafe(|| run(this)));
                    let done = done.unwrap_or_else(|_| Err("it panicked: see above".to_owned()));
                    let mut tallies = tallies.lock().unwrap();
                    let tally: &mut Tally = tallies.entry((this.harm.fault, this.harm.stays)).or_default();
                    match done {
                        Ok(Some(true)) => tally.succeeded += 1,
                        Ok(Some(false)) => tally.failed += 1,
                        Ok(None) => tally.missed += 1,
                        Err(flaw) => flaws.lock().unwrap().push((this.number, flaw)),
                    }
                }
            });
        }
    });
    println!("{what}: {} runs in {:.0?}", runs.len(), began.elapsed());
    for ((fault, stays), Tally { succeeded, failed, missed }) in tallies.into_inner().unwrap() {
        let how = if stays { "for ever" } else { "once" };
        println!("  {:<28} {succeeded:>3} succeeded, {failed:>3} failed, {missed} missed", format!("{fault:?} {how}"));
    }
    let mut flaws = flaws.into_inner().unwrap();
    flaws.sort();
    for (number, flaw) in &flaws {
        println!("{what}, run {number}, {:?}: {flaw}", runs[*number].harm);
    }
    assert!(flaws.is_empty(), "{} of {} runs went wrong", flaws.len(), runs.len());
}

/// The place of a checkpoint: its URL at the server and through a proxy, and its bucket and prefix.
pub(crate) struct Place<'a> {
    server: &'a Server,
    name: String,
}

impl<'a> Place<'a> {
    pub(crate) fn new(server: &'a Server, name: &str) -> Place<'a> {
        Place { server, name: format!("faults/{}/{name}", std::process::id()) }
    }

    pub(crate) fn direct(&self) -> String {
        self.server.s3(&self.name)
    }

    pub(crate) fn prefix(&self) -> String {
        format!("{}/{}", self.server.bucket(), self.name)
    }

    pub(crate) fn proxy(&self, harm: Option<Harm>) -> Proxy {
        Proxy::start(self.server, &self.prefix(), harm)
    }

    pub(crate) fn through(&self, proxy: &Proxy) -> String {
        format!("s3://{}?endpoint={}", self.prefix(), proxy.endpoint())
    }

    /// Removes what is there.
    pub(crate) fn remove(&self) {
        let (all, name) = self.name.rsplit_once('/').unwrap();
        direct(&self.server.s3(all)).delete_tree(name).unwrap();
    }

    /// Runs an operation at the place through a proxy: its outcome, or what is wrong; `None` if it succeeded without
    /// the request.
    fn run(
        &self,
        run: &Run,
        operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>,
    ) -> std::result::Result<Option<Result<()>>, String> {
        let proxy = self.proxy(Some(run.harm.clone()));
        let began = Instant::now();
        let done = operation(&store(&self.through(&proxy), run.still_max()), run.deadline());
        let took = began.elapsed();
        if matches!(run.harm.fault, Fault::ServerDies(..)) {
            // The next run meets a server that answers.
            while direct(&self.direct()).list("").is_err_and(|error| error.kind == shardfast_store::Kind::Unavailable) {
                thread::sleep(Duration::from_millis(20));
            }
        }
        if proxy.harmed() == 0 && done.is_ok() && is_list(&run.seen, false) {
            return Ok(None);
        }
        if proxy.harmed() == 0 {
            return Err(format!("no such request was made: {done:?}"));
        }
        match took > run.deadline() + SLACK {
            true => Err(format!("it took {took:.1?}: {done:?}")),
            false => Ok(Some(done)),
        }
    }

    /// The requests of an operation without a fault.
    pub(crate) fn requests(&self, operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>) -> Vec<Seen> {
        let proxy = self.proxy(None);
        operation(&store(&self.through(&proxy), PATIENT), DEADLINE).unwrap();
        let mut requests = proxy.seen();
        requests.sort_by(|a, b| a.request.cmp(&b.request));
        requests
    }

    /// The requests that the operation makes here, and at another place as well: not those that are made because an
    /// answer was late.
    pub(crate) fn requests_as(
        &self,
        other: &Place<'_>,
        operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>,
    ) -> Vec<Seen> {
        let again = other.requests(&operation);
        let mut requests = self.requests(&operation);
        requests.retain(|seen| again.iter().any(|other| other.request == seen.request));
        requests
    }
}

/// Saves, with the runs that `runs` makes of the requests of a save.
pub(crate) fn saves(server: &Server, runs: impl Fn(&[Seen]) -> Vec<Run>, at_a_time: usize) {
    let previous = Place::new(server, "save/previous");
    save(&direct(&previous.direct()), DEADLINE).unwrap();
    let requests = Place::new(server, "save/none").requests(save);
    all("saves", at_a_time, &runs(&requests), |run| {
        let place = Place::new(server, &format!("save/{}", run.number));
        let saved = place.run(run, save)?;
        let is_visible = is_whole(&place.direct())?;
        if run.harm.fault == Fault::DeadAfter && !is_visible {
            let next = save(&direct(&place.direct()), DEADLINE);
            next.map_err(|error| format!("the next save to the same place fails: {error}"))?;
        }
        place.remove();
        let Some(saved) = saved else { return Ok(None) };
        match saved {
            Ok(()) if !is_visible => Err("the save succeeded, and no checkpoint is there".to_owned()),
            Ok(()) => Ok(Some(true)),
            Err(error) if is_visible && !error.message.contains("may have been published") => {
                Err(format!("the checkpoint is visible, and the error does not say so: {error}"))
            }
            Err(error) if !run.may_fail() => Err(format!("the save failed: {:?} {error}", error.kind)),
            Err(error) => run.expect_named(&place, &error),
        }
    });
    assert_eq!(is_whole(&previous.direct()), Ok(true), "the previous checkpoint");
    load(&direct(&previous.direct()), DEADLINE).unwrap();
}

/// Loads, with the runs that `runs` makes of the requests of a load.
pub(crate) fn loads(server: &Server, runs: impl Fn(&[Seen]) -> Vec<Run>, at_a_time: usize) {
    let place = Place::new(server, "load");
    save(&direct(&place.direct()), DEADLINE).unwrap();
    let requests = place.requests(load);
    all("loads", at_a_time, &runs(&requests), |run| match place.run(run, load)? {
        None => Ok(None),
        Some(Ok(())) => Ok(Some(true)),
        Some(Err(error)) if !run.may_fail() => Err(format!("the load failed: {:?} {error}", error.kind)),
        Some(Err(error)) if error.kind == Kind::NotFound => Err(format!("it is there: {error}")),
        Some(Err(error)) => run.expect_named(&place, &error),
    });
    assert_eq!(is_whole(&place.direct()), Ok(true));
}
