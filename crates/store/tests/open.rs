//! Tests URLs and paths, and files that other programs may have left in a directory.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Entry, Kind, absolute, is_temporary, open};

fn refusal(url: &str) -> (Kind, String) {
    let error = open(url).err().unwrap_or_else(|| panic!("{url:?} was opened"));
    assert_eq!((error.op, error.name.as_str()), ("open", url));
    (error.kind, error.message)
}

#[test]
fn schemes() {
    let (kind, message) = refusal("ftp://host/run");
    assert_eq!(kind, Kind::Unsupported);
    let offered = "file://, memory://, az://, gs://, hdfs://, s3://, keeper://, viewfs://";
    assert_eq!(message, format!("expected a path or one of {offered}; found scheme \"ftp\""));
    for bad in [
        "",
        "\0",
        "a\0b",
        "file:/run",
        "memory:x",
        "file://",
        "file://host/run",
        "file://run",
        "file:///a%2",
        "file:///a%zz",
        "file:///%ff",
        "memory://",
        "memory:///x",
        "memory://b/../c",
        "memory://b//c",
    ] {
        assert_eq!(refusal(bad).0, Kind::Invalid, "{bad:?}");
    }
    assert_eq!(open("FILE://localhost/x/y/").unwrap().url(), "file:///x/y");
    assert_eq!(open("file:///x%20y").unwrap().url(), "file:///x y");
    assert_eq!(open("memory://b/run/").unwrap().url(), "memory://b/run");
    let here = std::env::current_dir().unwrap();
    assert_eq!(open("run").unwrap().url(), format!("file://{}/run", here.display()));
    assert_eq!(open("./a://b").unwrap().url(), format!("file://{}/a:/b", here.display()), "a path");
}

#[test]
fn paths_are_made_absolute_and_urls_are_that() {
    let here = std::env::current_dir().unwrap();
    for (given, expected) in [
        ("run", format!("{}/run", here.display())),
        ("./run//x/", format!("{}/run/x", here.display())),
        (".", here.display().to_string()),
        ("../x", format!("{}/../x", here.display())),
        ("/a/b/", "/a/b".to_owned()),
        ("/", "/".to_owned()),
        ("file:///a/b", "file:///a/b".to_owned()),
        ("memory://b/run", "memory://b/run".to_owned()),
    ] {
        assert_eq!(absolute(given).unwrap(), expected, "{given}");
        let (one, other) = (open(given).unwrap(), open(&expected).unwrap());
        assert_eq!(one.url(), other.url(), "{given}");
    }
    for (bad, kind) in [("", Kind::Invalid), ("memory:x", Kind::Invalid), ("ftp://host/run", Kind::Unsupported)] {
        assert_eq!(absolute(bad).unwrap_err().kind, kind, "{bad}");
    }
}

#[test]
fn only_names_that_the_store_chose_are_temporary() {
    assert!(is_temporary(".tmp-0123456789abcdef"));
    for other in [".tmp-", ".tmp-0123456789abcdeF", ".tmp-0123456789abcdef0", "tmp-0123456789abcdef", ".tmp-mine"] {
        assert!(!is_temporary(other), "{other}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_url_leads_back_to_its_store(path in "(/[^/\0]{1,8}){1,4}") {
        prop_assume!(path.split('/').all(|component| component != "." && component != ".."));
        // Reading a name that is not there names the path that was looked at.
        let store = open(&path).unwrap();
        let again = open(store.url()).unwrap();
        prop_assert_eq!(again.url(), store.url());
        let looked_at = again.open("o").err().unwrap().name;
        prop_assert_eq!(looked_at, format!("{path}/o"));
    }
}

#[test]
fn a_file_is_not_taken_for_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    for url in [file.display().to_string(), format!("file://{}/run/step", file.display())] {
        let error = open(&url).err().unwrap();
        assert_eq!(error.kind, Kind::Invalid);
        assert_eq!(error.to_string(), format!("open {}: expected a directory, found something else", file.display()));
    }
}

#[test]
fn a_store_tells_how_much_room_is_left_if_it_knows() {
    let dir = tempfile::tempdir().unwrap();
    for url in [dir.path().to_path_buf(), dir.path().join("not/made/yet")] {
        assert!(open(url.to_str().unwrap()).unwrap().free_bytes() > Some(0));
    }
    // A file system that counts no space, and a store without one.
    for url in ["/proc/self", "memory://room"] {
        assert_eq!(open(url).unwrap().free_bytes(), None, "{url}");
    }
}

#[test]
fn links_are_read_through_but_not_deleted_through() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let store = open(path("run").to_str().unwrap()).unwrap();
    let archive = open(path("archive").to_str().unwrap()).unwrap();
    archive.put("step-1/data", b"kept").unwrap();
    store.put("step-2/data", b"bytes").unwrap();
    symlink(path("archive/step-1"), path("run/step-1")).unwrap();
    symlink(path("archive/step-1"), path("run/step-2/link")).unwrap();
    symlink(path("nowhere"), path("run/dangling")).unwrap();
    symlink("itself", path("run/itself")).unwrap();

    let entry = |name: &str, is_link| Entry { name: name.into(), is_dir: true, is_link, bytes: 0, modified: None };
    let listed = store.list("").unwrap().into_iter().map(|entry| Entry { modified: None, ..entry });
    assert_eq!(listed.collect::<Vec<_>>(), [entry("step-1", true), entry("step-2", false)]);
    assert!(store.list("step-2").unwrap().iter().all(|found| found.is_link == (found.name == "link")));
    store.delete_all(&[], &["step-1"]).unwrap();
    assert_eq!(store.list("").unwrap().len(), 2, "a link is no empty directory");
    assert_eq!(store.read("step-1/data", 100).unwrap(), b"kept");
    store.delete_tree("step-1").unwrap();
    store.delete_tree("step-2").unwrap();
    assert_eq!(store.list("").unwrap(), []);
    assert_eq!(archive.read("step-1/data", 100).unwrap(), b"kept");
}

#[test]
fn strange_entries_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap()).unwrap();
    store.put("d/o", b"bytes").unwrap();
    for strange in [&b"not-utf-8-\xff"[..], b"back\\slash", b"new\nline"] {
        std::fs::write(dir.path().join("d").join(std::ffi::OsStr::from_bytes(strange)), b"x").unwrap();
    }
    let pipe = dir.path().join("d/pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("d/socket")).unwrap();
    symlink("/dev/zero", dir.path().join("d/zero")).unwrap();
    std::fs::create_dir(dir.path().join("d/dir")).unwrap();
    // Opening a pipe would wait for a writer that never comes.
    for name in ["d/pipe", "d/socket", "d/zero", "d/dir"] {
        let error = store.open(name).err().unwrap();
        assert_eq!((error.kind, error.message.as_str()), (Kind::Corrupt, "expected a file, found something else"));
        assert_eq!(store.size(name).unwrap_err().kind, Kind::Corrupt, "{name}");
    }
    let names: Vec<String> = store.list("d").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["dir", "o", "pipe", "socket", "zero"]);
    store.delete_tree("d").unwrap();
    assert!(!dir.path().join("d").exists());
}

#[test]
fn an_object_that_shrank_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap()).unwrap();
    store.put("o", &[1; 1000]).unwrap();
    let object = store.open("o").unwrap();
    std::fs::File::options().write(true).open(dir.path().join("o")).unwrap().set_len(600).unwrap();
    let error = object.read_at(500, &mut [0; 200]).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    assert_eq!(error.message, "expected 200 bytes at 500, found an object of 600 bytes");
}

/// Tests places for which the client library could not sign a request, or would panic.
#[test]
fn places_that_no_request_can_be_signed_for_are_refused() {
    for (options, message) in [
        ("endpoint=http://127.0.0.1:99999", "expected an endpoint such as https://host:port"),
        ("endpoint=http://[::g]", "expected an endpoint such as https://host:port"),
        ("region=a%0Ab", "expected printable characters in region="),
    ] {
        let error = open(&format!("s3://b/p?{options}")).err().expect(options);
        assert_eq!(error.kind, Kind::Invalid, "{error}");
        assert!(error.message.contains(message), "{error}");
    }
}

#[test]
fn a_key_that_no_header_holds_is_refused() {
    let given = Server::given("url=http://127.0.0.1:9 bucket=b key=hunter2\u{1} secret=s");
    given.again("a_key_that_no_header_holds_is_refused", |server| {
        let error = open(&server.s3("p")).err().expect("a key that no header holds");
        assert!(error.message.contains("expected AWS_ACCESS_KEY_ID of printable characters"), "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    });
}

#[test]
fn a_token_goes_to_this_machine_or_is_encrypted() {
    let why =
        |url: &str| open(url).err().map(|error| (error.kind, error.message)).unwrap_or((Kind::Internal, "".into()));
    for url in [
        "gs://bucket/run?endpoint=http://10.1.2.3:80",
        "gs://bucket/run?endpoint=http://127.0.0.1.example.com",
        "gs://bucket/run?endpoint=http://[2001:db8::1]:80/x",
        "az://container/run?account=a&endpoint=http://storage/a",
    ] {
        let (kind, message) = why(url);
        assert!(
            kind == Kind::Invalid && message.contains("unencrypted: expected an endpoint with https:"),
            "{message}"
        );
    }
    for url in [
        "gs://bucket/run?endpoint=http://127.0.0.1:9",
        "gs://bucket/run?endpoint=http://LocalHost:9/x",
        "gs://bucket/run?endpoint=http://[::1]:9",
        "gs://bucket/run?endpoint=https://storage:9",
        "az://container/run?account=a&endpoint=http://127.0.0.9:1/a",
    ] {
        assert!(!why(url).1.contains("unencrypted"), "{url}");
    }
}
