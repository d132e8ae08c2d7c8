//! Storage that does not answer, or stops answering: each call without a deadline of its own ends in its time.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shardfast_engine::checkpoint::open_from;
use shardfast_engine::retention::{Keep, Retention};
use shardfast_engine::rewind::rewind_in;
use shardfast_engine::runs::step_url;
use shardfast_engine::{
    Checkpoint, Engine, Error, Kind, Result, Timeout, locate, locate_all, open, pin, rewind, unpin,
};
use shardfast_store::Store;
use shardfast_store::testing::servers::Server;
use shardfast_tools::sweep::{AGE_MIN, sweep_in};
use shardfast_tools::{Copying, Limit, copy, copy_between, diff, export, history, sweep, sync, verify, verify_in};

use crate::campaign::Place;
use crate::checkpoint::{direct, save, store};
use crate::proxy::{Fault, Harm};

const TIMEOUT: Duration = Duration::from_millis(300);

/// A request in which nothing moves for so long is cut.
const STILL_MAX: Duration = Duration::from_millis(100);

/// Time that a call may take beyond its timeout on a busy machine: far below the minute of pauses between twelve tries.
const SLACK: Duration = Duration::from_secs(10);

/// A call, by its name.
type Call<'a, T> = (&'static str, Box<dyn Fn(&T) -> Result<()> + 'a>);

fn call<'a, T: ?Sized, R>(name: &'static str, act: impl Fn(&T) -> Result<R> + 'a) -> Call<'a, T> {
    (name, Box::new(move |at| act(at).map(drop)))
}

fn timeout() -> Timeout {
    Timeout::of_call(TIMEOUT)
}

fn engine() -> Arc<Engine> {
    Engine::waiting(timeout())
}

fn how() -> Copying {
    Copying { limit: Limit::new(None), verify: false }
}

fn quiet(_: u64, _: u64) {}

fn opened(url: &str) -> Result<Checkpoint> {
    let engine = engine();
    open(&engine, url, engine.timeout().clone())
}

/// A server that accepts connections, and gives each request this answer, or none.
fn server(answer: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming().flatten() {
            let Some(answer) = answer else {
                kept.push(stream);
                continue;
            };
            thread::spawn(move || {
                let head = BufReader::new(&stream).lines().map_while(std::result::Result::ok);
                head.take_while(|line| !line.is_empty()).for_each(drop);
                write!(&stream, "HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            });
        }
    });
    endpoint
}

/// Returns the error with which a call fails; checks that it fails in time.
fn expect_end(name: &str, call: impl FnOnce() -> Result<()>) -> Error {
    let began = Instant::now();
    let error = call().expect_err(name);
    let took = began.elapsed();
    assert!(took < TIMEOUT + SLACK, "{name} took {took:.1?}: {error}");
    assert_eq!(error.kind, Kind::Unavailable, "{name}: {error}");
    assert!(error.message.contains("within the timeout of 0.3 s"), "{name}: {error}");
    error
}

/// Calls on a store that is open.
fn on_store<'a>(whole: &'a str, dir: &'a str) -> Vec<Call<'a, Arc<dyn Store>>> {
    let retention = |store: &Arc<dyn Store>| {
        let keep = Keep { last: Some(1), ..Keep::default() };
        Retention::on(Arc::clone(store), store.url(), keep).within(TIMEOUT)
    };
    let local = |url: &str| shardfast_store::open(url).unwrap();
    vec![
        call("open", |store: &Arc<dyn Store>| open_from(&engine(), Ok(Arc::clone(store)), store.url(), timeout())),
        call("verify", |store: &Arc<dyn Store>| verify_in(&engine(), Arc::clone(store), store.url(), &quiet)),
        call("copy from", move |store: &Arc<dyn Store>| {
            let target = format!("{dir}/copied");
            let (from, to) = ((Arc::clone(store), store.url()), (local(&target), &*target));
            copy_between(&engine(), from, to, &how(), &quiet)
        }),
        call("copy to", move |store: &Arc<dyn Store>| {
            let (from, to) = ((local(whole), whole), (Arc::clone(store), store.url()));
            copy_between(&engine(), from, to, &how(), &quiet)
        }),
        call("sweep", |store: &Arc<dyn Store>| sweep_in(&**store, store.url(), AGE_MIN, false, &timeout(), &quiet)),
        call("rewind", |store: &Arc<dyn Store>| rewind_in(&**store, store.url(), 1, &timeout())),
        call("retain", move |store: &Arc<dyn Store>| retention(store).retain(&[1, 2])),
        call("clear", move |store: &Arc<dyn Store>| retention(store).clear(None)),
        call("clear some", move |store: &Arc<dyn Store>| retention(store).clear(Some(&[1, 2]))),
    ]
}

/// Calls that open the store themselves.
fn on_url<'a>(dir: &'a str) -> Vec<Call<'a, str>> {
    vec![
        call("ls", |url: &str| history(url, &timeout())),
        call("locate", |url: &str| locate(url, &timeout())),
        call("locate all", |url: &str| locate_all(url, &timeout())),
        call("open", opened),
        call("verify", |url: &str| verify(&engine(), url, &quiet)),
        call("copy", move |url: &str| copy(&engine(), url, &format!("{dir}/copied"), &how(), &quiet)),
        call("sync", move |url: &str| sync(&engine(), url, &format!("{dir}/synced"), &how(), &quiet)),
        call("sweep", |url: &str| sweep(url, AGE_MIN, true, &timeout(), &quiet)),
        call("rewind", |url: &str| rewind(url, 1, &timeout())),
        call("pin", |url: &str| pin(url, "", &timeout())),
        call("unpin", |url: &str| unpin(url, &timeout())),
    ]
}

pub(crate) fn ends_each_call(_: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let whole = format!("{dir}/whole");
    save(&shardfast_store::open(&whole).unwrap(), Duration::from_secs(60)).unwrap();
    let away = [None, Some("503 Slow Down")].map(|answer| format!("s3://b/run?endpoint={}", server(answer)));
    for (url, is_silent) in away.iter().zip([true, false]) {
        let store = store(url, STILL_MAX);
        for (name, call) in on_store(&whole, dir) {
            let error = expect_end(name, || call(&store));
            assert!(error.message.contains("s3://b/run"), "{name}: {error}");
        }
        // These have connections of their own, which wait for half a minute.
        for (name, call) in on_url(dir).into_iter().filter(|_| !is_silent) {
            let error = expect_end(name, || call(url));
            assert!(error.message.contains("s3://b/run"), "{name}: {error}");
        }
    }
}

pub(crate) fn ends_what_it_interrupts(server: &Server) {
    let (place, dir) = (Place::new(server, "away"), tempfile::tempdir().unwrap());
    let dir = dir.path().to_str().unwrap();
    let whole = format!("{dir}/whole");
    save(&shardfast_store::open(&whole).unwrap(), Duration::from_secs(60)).unwrap();
    for step in [1, 2, 3] {
        save(&direct(&step_url(&place.direct(), step)), Duration::from_secs(60)).unwrap();
    }
    let step = |run: &str| step_url(run, 2);
    let exported = |run: &str| export(&opened(&step(run))?, &format!("{dir}/exported"), "model", 1 << 40);
    let calls: Vec<Call<'_, str>> = vec![
        call("ls", |run: &str| history(run, &timeout())),
        call("verify", move |run: &str| verify(&engine(), &step(run), &quiet)),
        call("diff", move |run: &str| diff(&opened(&whole)?, &opened(&step(run))?, &quiet)),
        call("export", exported),
        call("copy", move |run: &str| copy(&engine(), &step(run), &format!("{dir}/copied"), &how(), &quiet)),
        call("sync", |run: &str| sync(&engine(), run, &format!("{dir}/synced"), &how(), &quiet)),
    ];
    for (name, call) in calls {
        let proxy = place.proxy(None);
        call(&place.through(&proxy)).unwrap();
        for goes in ["exported", "copied", "synced"] {
            let _ = std::fs::remove_dir_all(format!("{dir}/{goes}"));
        }
        let reads: Vec<_> = proxy.seen().into_iter().filter(|seen| seen.request.is_read()).collect();
        let at = reads[reads.len() * 2 / 3].request.clone();
        let proxy = place.proxy(Some(Harm { at, fault: Fault::DeadBefore, stays: true }));
        expect_end(name, || call(&place.through(&proxy)));
        assert!(proxy.harmed() > 0, "{name}");
    }
    place.remove();
}
