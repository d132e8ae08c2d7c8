//! Each request of a save and of a load meets each fault, in a run of its own.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use shardfast_engine::{Error, Kind, Result};
use shardfast_store::Store;
use shardfast_store::servers::Server;

use crate::checkpoint::{is_whole, load, save, store};
use crate::proxy::{Fault, Harm, Proxy, Seen};

/// Runs at a time: most of them wait for a retry.
const RUNS_AT_A_TIME: usize = 16;

/// Of operations that are to succeed.
const DEADLINE: Duration = Duration::from_secs(60);

/// Of operations whose storage does not come back.
const SHORT_DEADLINE: Duration = Duration::from_secs(2);

/// How much longer than its deadline an operation may take.
const SLACK: Duration = Duration::from_secs(20);

/// A request in which nothing moves for so long is cut, where one of them is silent; and where none is.
const STILL_MAX: Duration = Duration::from_secs(1);
const PATIENT: Duration = Duration::from_secs(30);

/// Faults of each request that stay, in turn.
const LASTING: usize = 3;

const FAULTS: [Fault; 18] = [
    Fault::Refused,
    // An error in the body of an answer that says that all is well.
    Fault::Answered(200),
    Fault::Answered(500),
    Fault::Answered(503),
    Fault::AnswerLost,
    Fault::Late,
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

/// What a store's error begins with.
const OPERATIONS: [&str; 9] = ["open", "create", "write", "finish", "put", "publish", "list", "read", "delete"];

/// Whether a fault can happen to a request.
fn applies(fault: Fault, seen: &Seen) -> bool {
    match fault {
        Fault::RequestCut | Fault::RequestTurned(_) => seen.has_body,
        Fault::AnswerShort | Fault::AnswerTurned(_) => seen.answer_has_body,
        // S3 does that where it puts parts together.
        Fault::Answered(200) => seen.request.what.starts_with("POST") && seen.request.what.ends_with("?uploadId"),
        _ => true,
    }
}

/// Whether it is tried for minutes, whatever the operation's deadline is: the first look at the place of a save.
fn is_unbounded(seen: &Seen) -> bool {
    seen.request.what.ends_with("?delimiter&list-type") && seen.request.nth == 0
}

/// Whether a save may fail of one such fault: the name of an upload that is not the service's own. Nothing proves it but
/// the connection, if it is `https://`.
fn may_fail(fault: Fault, seen: &Seen) -> bool {
    matches!(fault, Fault::AnswerTurned(_)) && seen.request.what.ends_with("?uploads")
}

fn is_death(fault: Fault) -> bool {
    matches!(fault, Fault::DeadBefore | Fault::DeadAfter)
}

/// A run: the harm that is done, to the request for what.
struct Run {
    number: usize,
    seen: Seen,
    harm: Harm,
}

impl Run {
    fn is_to_end(&self) -> bool {
        self.harm.stays || is_death(self.harm.fault)
    }

    fn deadline(&self) -> Duration {
        if self.is_to_end() { SHORT_DEADLINE } else { DEADLINE }
    }

    fn still_max(&self) -> Duration {
        if self.harm.fault == Fault::Silent { STILL_MAX } else { PATIENT }
    }

    /// Whether an error names an operation and its object: the one whose request failed, where others succeed.
    fn expect_named(&self, place: &Place<'_>, error: &Error) -> std::result::Result<bool, String> {
        let below = self.seen.request.what.split(' ').nth(1).and_then(|rest| rest.split('?').next());
        let object = match below.filter(|_| !is_death(self.harm.fault)) {
            // The random part of the name differs from run to run.
            Some(below) => below.split('*').next().unwrap_or_default(),
            None => "",
        };
        let object = format!("s3://{}/{object}", place.prefix()).trim_end_matches('/').to_owned();
        let is_named = OPERATIONS.iter().any(|operation| error.message.contains(&format!("{operation} {object}")));
        // Damage is told by the file and what lies in it.
        let file = below.map(|below| below.split('*').next().unwrap_or_default());
        let is_damaged = error.kind == Kind::Corrupt && file.is_some_and(|file| error.message.contains(file));
        match is_named || is_damaged {
            true => Ok(false),
            false => Err(format!("the error does not name {object}: {error}")),
        }
    }
}

/// All runs of an operation that makes these requests: each fault of each request once, and some of them for ever.
fn runs(requests: &[Seen]) -> Vec<Run> {
    let mut runs = Vec::new();
    for (i, seen) in requests.iter().enumerate() {
        let faults: Vec<Fault> = FAULTS.into_iter().filter(|&fault| applies(fault, seen)).collect();
        let mut add = |fault, stays| {
            let harm = Harm { at: seen.request.clone(), fault, stays };
            runs.push(Run { number: runs.len(), seen: seen.clone(), harm });
        };
        let once = faults.iter().filter(|&&fault| !is_death(fault) || !is_unbounded(seen));
        once.for_each(|&fault| add(fault, false));
        let lasting: Vec<Fault> = faults.into_iter().filter(|&fault| !is_death(fault)).collect();
        let count = if is_unbounded(seen) { 0 } else { LASTING };
        let lasting = lasting.iter().cycle().skip(i).step_by(3).take(count);
        lasting.for_each(|&fault| add(fault, true));
    }
    runs
}

/// How the runs with one fault ended.
#[derive(Default)]
struct Tally {
    succeeded: usize,
    failed: usize,
}

/// Makes all runs, several at a time, and fails with all that is wrong. A run returns whether its operation succeeded,
/// or what is wrong.
fn all(what: &str, requests: &[Seen], run: impl Fn(&Run) -> std::result::Result<bool, String> + Sync) {
    let (began, runs) = (Instant::now(), runs(requests));
    let (next, flaws, tallies) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    thread::scope(|threads| {
        for _ in 0..RUNS_AT_A_TIME {
            threads.spawn(|| {
                while let Some(this) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = catch_unwind(AssertUnwindSafe(|| run(this)));
                    let done = done.unwrap_or_else(|_| Err("it panicked: see above".to_owned()));
                    let mut tallies = tallies.lock().unwrap();
                    let tally: &mut Tally = tallies.entry((this.harm.fault, this.harm.stays)).or_default();
                    match done {
                        Ok(true) => tally.succeeded += 1,
                        Ok(false) => tally.failed += 1,
                        Err(flaw) => flaws.lock().unwrap().push((this.number, flaw)),
                    }
                }
            });
        }
    });
    println!("{what}: {} requests, {} runs in {:.0?}", requests.len(), runs.len(), began.elapsed());
    for ((fault, stays), Tally { succeeded, failed }) in tallies.into_inner().unwrap() {
        let how = if stays { "for ever" } else { "once" };
        println!("  {:<28} {succeeded:>3} succeeded, {failed:>3} failed", format!("{fault:?} {how}"));
    }
    let mut flaws = flaws.into_inner().unwrap();
    flaws.sort();
    for (number, flaw) in &flaws {
        println!("{what}, run {number}, {:?}: {flaw}", runs[*number].harm);
    }
    assert!(flaws.is_empty(), "{} of {} runs went wrong", flaws.len(), runs.len());
}

/// The place of a checkpoint: its URL at the server and through a proxy, and its bucket and prefix.
struct Place<'a> {
    server: &'a Server,
    name: String,
}

impl<'a> Place<'a> {
    fn new(server: &'a Server, name: &str) -> Place<'a> {
        Place { server, name: format!("faults/{}/{name}", std::process::id()) }
    }

    fn direct(&self) -> String {
        self.server.s3(&self.name)
    }

    fn prefix(&self) -> String {
        format!("{}/{}", self.server.bucket(), self.name)
    }

    fn proxy(&self, harm: Option<Harm>) -> Proxy {
        Proxy::start(self.server.endpoint(), &self.prefix(), harm)
    }

    fn through(&self, proxy: &Proxy) -> String {
        format!("s3://{}?endpoint={}", self.prefix(), proxy.endpoint())
    }

    /// Removes what is there.
    fn remove(&self) {
        let (all, name) = self.name.rsplit_once('/').unwrap();
        store(&self.server.s3(all), PATIENT).delete_tree(name).unwrap();
    }

    /// Runs an operation at the place through a proxy: its outcome, and how long it took.
    fn run(
        &self,
        run: &Run,
        operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>,
    ) -> std::result::Result<Result<()>, String> {
        let proxy = self.proxy(Some(run.harm.clone()));
        let began = Instant::now();
        let done = operation(&store(&self.through(&proxy), run.still_max()), run.deadline());
        let took = began.elapsed();
        if proxy.harmed() == 0 {
            return Err(format!("no such request was made: {done:?}"));
        }
        match took > run.deadline() + SLACK {
            true => Err(format!("it took {took:.1?}: {done:?}")),
            false => Ok(done),
        }
    }

    /// The requests of an operation without a fault.
    fn requests(&self, operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>) -> Vec<Seen> {
        let proxy = self.proxy(None);
        operation(&store(&self.through(&proxy), PATIENT), DEADLINE).unwrap();
        let mut requests = proxy.seen();
        requests.sort_by(|a, b| a.request.cmp(&b.request));
        for seen in &requests {
            println!("  {} #{} ({})", seen.request.what, seen.request.nth, seen.place);
        }
        requests
    }
}

/// Saves.
pub(crate) fn saves(server: &Server) {
    let previous = Place::new(server, "save/previous");
    save(&store(&previous.direct(), PATIENT), DEADLINE).unwrap();
    let requests = Place::new(server, "save/none").requests(save);
    all("saves", &requests, |run| {
        let place = Place::new(server, &format!("save/{}", run.number));
        let saved = place.run(run, save)?;
        let is_visible = is_whole(&place.direct())?;
        if run.harm.fault == Fault::DeadAfter && !is_visible {
            let next = save(&store(&place.direct(), PATIENT), DEADLINE);
            next.map_err(|error| format!("the next save to the same place fails: {error}"))?;
        }
        place.remove();
        match saved {
            Ok(()) if !is_visible => Err("the save succeeded, and no checkpoint is there".to_owned()),
            Ok(()) => Ok(true),
            Err(error) if is_visible && !error.message.contains("may have been published") => {
                Err(format!("the checkpoint is visible, and the error does not say so: {error}"))
            }
            Err(error) if !run.is_to_end() && !may_fail(run.harm.fault, &run.seen) => {
                Err(format!("the save failed: {:?} {error}", error.kind))
            }
            Err(error) => run.expect_named(&place, &error),
        }
    });
    assert_eq!(is_whole(&previous.direct()), Ok(true), "the previous checkpoint");
    load(&store(&previous.direct(), PATIENT), DEADLINE).unwrap();
}

/// Loads.
pub(crate) fn loads(server: &Server) {
    let place = Place::new(server, "load");
    save(&store(&place.direct(), PATIENT), DEADLINE).unwrap();
    let requests = place.requests(load);
    all("loads", &requests, |run| match place.run(run, load)? {
        Ok(()) => Ok(true),
        Err(error) if !run.is_to_end() => Err(format!("the load failed: {:?} {error}", error.kind)),
        Err(error) if error.kind == Kind::NotFound => Err(format!("it is there: {error}")),
        Err(error) => run.expect_named(&place, &error),
    });
    assert_eq!(is_whole(&place.direct()), Ok(true));
}
