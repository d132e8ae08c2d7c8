//! Starts keepers, is one, and asks them.

use std::ffi::OsString;
use std::fmt::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_engine::retention::Keep;
use shardfast_engine::{Error, Kind, Result, TIMEOUT};
use shardfast_keeper::{Keeper, Status};
use shardfast_tools::drain::{Drain, memory_place, real};
use shardfast_tools::inspect::{Held, held_in_memory};

use crate::FINE;
use crate::args::Keeping;
use crate::outcome::{Outcome, outcome};
use crate::text::{count, plain, size};

/// Time within which a keeper that was started answers.
const STARTS_WITHIN: Duration = Duration::from_secs(30);

/// Kind of the error of a keeper that is just ending.
const UNREACHED: shardfast_keeper::Kind = shardfast_keeper::Kind::Unavailable;

/// Pause between two looks at a keeper.
const LOOKS_EVERY: Duration = Duration::from_millis(20);

/// Answer of `status` and `start`.
#[derive(Debug, Serialize)]
struct Told {
    url: String,
    place: String,
    process: u32,
    bytes: u64,
    objects: u64,
    free_bytes: u64,
    users: u64,
    linger_s: u64,
    failure: Option<String>,
    neighbours: Vec<String>,
    copies: u32,
    uncopied: Option<u64>,
    changed: u64,
    lone: Vec<String>,
    steps: Vec<Held>,
}

/// Answer of `run` and `leave`.
#[derive(Debug, Serialize)]
struct Left {
    url: String,
    place: String,
}

/// Answer of `persist`.
#[derive(Debug, Serialize)]
struct Persisted {
    url: String,
    place: String,
    step: Option<u64>,
    bytes: u64,
}

pub(crate) fn run(asked: Keeping, me: &[OsString]) -> Result<Outcome> {
    match asked {
        Keeping::Start { url, linger } => {
            start_process(&url, Duration::from_secs_f64(linger), me)?;
            Ok(told(&url, shardfast_keeper::status(&memory_place(&url).0)?))
        }
        Keeping::Run { url, linger, detached } => keep(&url, linger, detached),
        Keeping::Status { url } => Ok(told(&url, shardfast_keeper::status(&memory_place(&url).0)?)),
        Keeping::Persist { url } => persist(&url),
        Keeping::Leave { url, within } => leave(&url, within),
    }
}

/// Returns the process of the keeper of that name; `None` without one, or if it does not answer.
pub fn process(name: &str) -> Option<u32> {
    shardfast_keeper::status(name).ok().map(|status| status.process)
}

/// Returns the number of processes that use the keeper of that name.
pub fn users(name: &str) -> u64 {
    shardfast_keeper::status(name).map_or(0, |status| status.users)
}

/// Has the keeper of that name end, and those of the job's other machines if `all` are to, once what only they have is
/// at the run's own place.
///
/// # Errors
/// `NotFound` without one.
pub fn dismiss(name: &str, all: bool) -> Result<()> {
    let leave = if all { shardfast_keeper::leave_all } else { shardfast_keeper::leave };
    Ok(leave(name)?)
}

fn told(url: &str, status: Status) -> Outcome {
    let steps = held_in_memory(url, &status);
    let Status { process, bytes, objects, free_bytes, users, linger_s, failure, .. } = status;
    let Status { neighbours, copies, uncopied, changed, lone, .. } = status;
    let place = memory_place(url).1;
    let mut text = format!(
        "keeper of {}: process {process}, {} in {}, room for {}, {}\n",
        plain(url),
        size(bytes),
        count(objects, "object", "objects"),
        size(free_bytes),
        match users {
            0 => format!("not used; it ends after {linger_s} s"),
            users => format!("used by {}", count(users, "process", "processes")),
        }
    );
    let _ = writeln!(text, "its checkpoints: shardfast ls {place}");
    if !neighbours.is_empty() {
        let machines = neighbours.iter().map(|address| plain(address)).collect::<Vec<_>>().join(", ");
        let are = match uncopied {
            _ if copies == 0 => "no copies on other machines".to_owned(),
            None => format!(
                "{} of each file on other machines: they are being made",
                count(copies.into(), "copy", "copies")
            ),
            Some(0) => format!("{} of each file on other machines", count(copies.into(), "copy", "copies")),
            Some(missing) => format!("{} without a copy that was asked for", count(missing, "file", "files")),
        };
        let _ = writeln!(text, "other machines: {machines}; {are}");
    }
    for Held { step, survives } in &steps {
        let what = match survives {
            Some(0) => "lost with a machine that has files of it".to_owned(),
            Some(machines) => format!("outlives the loss of any {}", count((*machines).into(), "machine", "machines")),
            None => "not known what it outlives, since a machine does not answer".to_owned(),
        };
        let _ = writeln!(text, "step {step}: {what}");
    }
    if changed > 0 {
        let were = count(changed, "object", "objects");
        let _ = writeln!(text, "changed in memory, so that this machine's memory may fail: {were}");
    }
    for name in &lone {
        let _ = writeln!(text, "changed in memory, and no other machine has it: {}", plain(name));
    }
    if let Some(failure) = &failure {
        let _ = writeln!(text, "not sent to the run's own place: {}", plain(failure));
    }
    let url = url.to_owned();
    let told = Told {
        url,
        place,
        process,
        bytes,
        objects,
        free_bytes,
        users,
        linger_s,
        failure,
        neighbours,
        copies,
        uncopied,
        changed,
        lone,
        steps,
    };
    outcome(text, &told, FINE)
}

/// Starts the keeper of the run at `url` as a process of its own, unless one runs; returns its number. `me` is the
/// program that runs the command, with its first arguments.
///
/// # Errors
/// `Unavailable` with the reason if it does not start.
pub fn start_process(url: &str, linger: Duration, me: &[OsString]) -> Result<u32> {
    let name = memory_place(url).0;
    let until = Instant::now() + STARTS_WITHIN;
    loop {
        match shardfast_keeper::status(&name) {
            Ok(status) if status.leaves && status.failure.is_none() && Instant::now() < until => {
                thread::sleep(LOOKS_EVERY);
            }
            Ok(status) => {
                if status.leaves {
                    shardfast_keeper::stay(&name)?;
                }
                return Ok(status.process);
            }
            Err(error) if error.kind == shardfast_keeper::NOT_THERE => break,
            // It is stopped, of another version, or just ends.
            Err(error) if Instant::now() > until || error.is_final || error.kind != UNREACHED => {
                return Err(error.into());
            }
            Err(_) => thread::sleep(LOOKS_EVERY),
        }
    }
    let fail = |why: String| Error::new(Kind::Unavailable, format!("keeper of {url}: it cannot be started: {why}"));
    let (program, first) = me.split_first().ok_or_else(|| fail("the program's name is not known".to_owned()))?;
    let mut child = Command::new(program)
        .args(first)
        .args(["keeper", "run", "--detached", "--linger"])
        .args([format!("{}s", linger.as_secs_f64()), "--".to_owned(), url.to_owned()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| fail(error.to_string()))?;
    let until = Instant::now() + STARTS_WITHIN;
    loop {
        if let Some(process) = process(&name) {
            return Ok(process);
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(fail(format!("it has ended ({status}): `shardfast keeper run` says why")));
        }
        if Instant::now() > until {
            return Err(fail(format!("it does not answer within {} s", STARTS_WITHIN.as_secs())));
        }
        thread::sleep(LOOKS_EVERY);
    }
}

/// Serves as the keeper of a run, until no process has used it for `linger` seconds.
fn keep(url: &str, linger: f64, detached: bool) -> Result<Outcome> {
    if detached {
        // A signal to the group of the training would end it, too. The call fails if it leads a session already.
        let _ = rustix::process::setsid();
    }
    // A link may lead elsewhere later.
    let (url, (name, place)) = (&*real(url), memory_place(url));
    let keeper = Keeper::listen(&name, url, Duration::from_secs_f64(linger))?;
    let sent = keeper.serve(|_| send(&place, url).map_err(|error| error.to_string()));
    sent.map_err(|why| {
        Error::new(Kind::Unavailable, format!("keeper of {url}: what only its memory had is lost: {why}"))
    })?;
    let left = Left { url: url.to_owned(), place };
    Ok(outcome(format!("keeper of {}: it has ended\n", plain(url)), &left, FINE))
}

/// Sends the checkpoints of a run that are newer than all at its own place.
fn send(place: &str, url: &str) -> Result<()> {
    let drain = Drain::new(place, url, &Keep::default(), None, TIMEOUT)?;
    if !drain.has_any()? {
        return Ok(());
    }
    if drain.stand_in()? {
        send_all(&drain)?;
    }
    drain.expect_run()
}

/// Sends what waits; returns the bytes that were sent.
fn send_all(drain: &Drain) -> Result<u64> {
    let mut bytes = 0;
    loop {
        match drain.next() {
            Ok(Some(sent)) => bytes += sent.bytes,
            Ok(None) => return Ok(bytes),
            Err(error) if error.kind == Kind::NotFound => {} // another program has removed it
            Err(error) => return Err(error),
        }
    }
}

/// Sends what is only in memory to the run's own place, while no process uses the keeper: a training sends by itself.
fn persist(url: &str) -> Result<Outcome> {
    let (url, (name, place)) = (&*real(url), memory_place(url));
    let users = shardfast_keeper::status(&name)?.users;
    let refused = |why: &str| Err(Error::new(Kind::Conflict, format!("keeper of {url}: {why}")));
    if users > 0 {
        let who = count(users, "process uses", "processes use");
        return refused(&format!("{who} it: a training sends what is due by itself, and its newest step at its end"));
    }
    let drain = Drain::new(&place, url, &Keep::default(), None, TIMEOUT)?;
    let mut bytes = 0;
    if drain.has_any()? {
        if !drain.stand_in()? {
            return refused(
                "what it has is of a job that is not the run's newest one: nothing was sent, and `shardfast copy` of \
                 its place copies it elsewhere",
            );
        }
        bytes = send_all(&drain)?;
        drain.expect_run()?;
    }
    let step = drain.reached()?;
    let sent = if bytes > 0 { format!("sent {}", size(bytes)) } else { "memory has nothing that is newer".to_owned() };
    let text = match step {
        Some(step) => format!("{}: its newest step is {step}; {sent}\n", plain(url)),
        None => format!("{}: it has no checkpoint; {sent}\n", plain(url)),
    };
    Ok(outcome(text, &Persisted { url: url.to_owned(), place, step, bytes }, FINE))
}

/// Has a keeper leave, and waits for its end.
fn leave(url: &str, within: f64) -> Result<Outcome> {
    let (name, place) = memory_place(url);
    match shardfast_keeper::leave(&name) {
        // One with nothing to send may have ended before it could answer.
        Err(error) if error.kind == UNREACHED && !error.is_final => {}
        left => left?,
    }
    let until = Instant::now() + Duration::from_secs_f64(within);
    loop {
        let status = match shardfast_keeper::status(&name) {
            Ok(status) => status,
            Err(error) if error.kind == shardfast_keeper::NOT_THERE => break,
            // It closes its connections.
            Err(_) if Instant::now() < until => Status::default(),
            Err(error) => return Err(error.into()),
        };
        if Instant::now() > until || status.failure.is_some() {
            let why = status.failure.unwrap_or_else(|| format!("it has not ended within {within} s"));
            let message = format!(
                "keeper of {url}: what only it has is not at the run's own place: {why}; it tries again for an hour; \
                 `kill -9 {}` ends it, with what only it has",
                status.process
            );
            return Err(Error::new(Kind::Unavailable, message));
        }
        thread::sleep(LOOKS_EVERY);
    }
    let left = Left { url: url.to_owned(), place };
    Ok(outcome(format!("keeper of {}: it has ended\n", plain(url)), &left, FINE))
}
