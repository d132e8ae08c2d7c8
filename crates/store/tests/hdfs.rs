//! Tests the store on a real HDFS: a NameNode and three DataNodes.

use std::sync::Arc;

use shardfast_store::testing::conformance::{self, pattern, write_object};
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Action, Kind, Quota, Service, Store, open};

/// Length of an object of four parts, the last one short.
const LONG: usize = (96 << 20) + 12_345;

fn read(store: &dyn Store, name: &str) -> Vec<u8> {
    store.read(name, u64::MAX).unwrap()
}

/// Length of its parts.
const PART: usize = 32 << 20;

/// Names in a directory.
fn names(store: &dyn Store, dir: &str) -> Vec<String> {
    store.list(dir).unwrap().into_iter().map(|entry| entry.name).collect()
}

#[test]
fn a_real_hdfs_keeps_the_contract() {
    Server::with("hdfs", "a_real_hdfs_keeps_the_contract", |server| {
        conformance::check(|name| open(&server.hdfs(&format!("c/{name}"))).unwrap());
        conformance::check_reports(&server.hdfs("reports"));
        parts_are_joined(server);
        parts_are_copied_where_concat_is_refused(server);
        an_unfinished_object_leaves_nothing(server);
        refusals_have_their_kinds(server);
        a_quota_counts_coded_bytes_once(server);
        let healthy = server.tool(&["org.apache.hadoop.hdfs.tools.DFSck", "/"]);
        assert!(healthy.contains("The filesystem under path '/' is HEALTHY"), "{healthy}");
    });
}

fn parts_are_joined(server: &Server) {
    let (store, noted) = Noted::open(&server.hdfs("parts?replication=1&block_size=16777216")).unwrap();
    let contents = pattern(3, LONG);
    write_object(&*store, "step/a:b%", &contents).unwrap();
    let finished: Vec<_> = noted.take().into_iter().filter(|seen| seen.action == Action::Finish).collect();
    assert_eq!(finished.len(), 1, "{finished:?}");
    assert_eq!((finished[0].requests.puts, finished[0].failure), (1, None));
    assert_eq!(names(&*store, "step"), ["a:b%"]);
    assert!(read(&*store, "step/a:b%") == contents);
}

fn parts_are_copied_where_concat_is_refused(server: &Server) {
    let (store, noted) = Noted::open(&format!("{}/snapshots/run?replication=1", server.endpoint())).unwrap();
    let contents = pattern(4, LONG);
    let mut object = store.create("step/data", LONG as u64).unwrap();
    for (part, piece) in contents.chunks(PART).enumerate() {
        object.write_at((part * PART) as u64, piece).unwrap();
    }
    server.tool(&["org.apache.hadoop.fs.FsShell", "-createSnapshot", "/snapshots", "taken"]);
    object.finish().unwrap();
    let failures: Vec<_> = noted.take().into_iter().filter(|seen| seen.failure.is_some()).collect();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert_eq!((failures[0].action, failures[0].failure), (Action::Finish, Some(Kind::Unsupported)));
    assert_eq!(names(&*store, "step"), ["data"]);
    assert!(read(&*store, "step/data") == contents);
}

fn an_unfinished_object_leaves_nothing(server: &Server) {
    let store: Arc<dyn Store> = open(&server.hdfs("unfinished?replication=1")).unwrap();
    let object = store.create("step/data", LONG as u64).unwrap();
    object.write_at(PART as u64, &pattern(1, PART)).unwrap();
    assert_eq!(names(&*store, "step").len(), 2);
    drop(object);
    assert_eq!(names(&*store, "step"), Vec::<String>::new());
}

fn a_quota_counts_coded_bytes_once(server: &Server) {
    let store = open(&server.hdfs("coded")).unwrap();
    let [path, coder] = ["/shardfast-test/coded", "org.apache.hadoop.hdfs.tools.ECAdmin"];
    server.tool(&["org.apache.hadoop.fs.FsShell", "-mkdir", path]);
    server.tool(&[coder, "-enablePolicy", "-policy", "XOR-2-1-1024k"]);
    server.tool(&[coder, "-setPolicy", "-policy", "XOR-2-1-1024k", "-path", path]);
    server.tool(&["org.apache.hadoop.hdfs.tools.DFSAdmin", "-setSpaceQuota", "900", path]);
    assert_eq!(store.free_bytes(), Some(900));
}

fn refusals_have_their_kinds(server: &Server) {
    let (url, admin) = (server.hdfs("refused"), "org.apache.hadoop.hdfs.tools.DFSAdmin");
    let store = open(&url).unwrap();
    store.put("file", b"x").unwrap();
    let kind = |name: &str| store.put(name, b"x").unwrap_err().kind;
    assert_eq!(kind("file/below"), Kind::Invalid, "a file is no directory");
    server.tool(&[admin, "-setSpaceQuota", "1000", "/shardfast-test/refused"]);
    let quota = store.service().and_then(Service::quota).unwrap();
    // Each byte is stored three times.
    let expected = Quota { of: "/shardfast-test/refused".to_owned(), bytes: 333, left_bytes: 333 };
    assert_eq!(quota, expected);
    assert_eq!(store.free_bytes(), Some(332));
    let error = store.put("full", b"x").unwrap_err();
    assert_eq!((error.kind, error.message.contains("quota")), (Kind::Exhausted, true), "{error}");
    server.tool(&[admin, "-clrSpaceQuota", "/shardfast-test/refused"]);
    assert_eq!(store.service().and_then(Service::quota), None);
    assert!(store.free_bytes().unwrap() > 1 << 30);
    server.tool(&[admin, "-safemode", "enter"]);
    let error = store.put("safe", b"x").unwrap_err();
    assert_eq!((error.kind, error.wait.is_some()), (Kind::Unavailable, true), "{error}");
    server.tool(&[admin, "-safemode", "leave"]);
    assert_eq!(names(&*store, ""), ["file"]);
}

#[test]
fn a_namenode_that_is_not_there_is_named_soon() {
    let began = std::time::Instant::now();
    for url in ["hdfs://127.0.0.1:9/run", "hdfs://no-such-service/run"] {
        let error = open(url).and_then(|store| store.list("")).unwrap_err();
        assert!(error.to_string().contains(url), "{error}");
    }
    assert!(began.elapsed().as_secs() < 20);
    let error = open("hdfs://127.0.0.1:9/run?replication=0").err().unwrap();
    assert_eq!((error.kind, error.message.contains("replication=")), (Kind::Invalid, true), "{error}");
}
