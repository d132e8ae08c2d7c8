//! Tests objects of other programs in a bucket, with names that no store uses: they are passed over, and stay.

mod http;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Kind, Store, open};

use crate::http::{Message, answer, pass_on, serve};

/// Names below a directory, as they appear in URLs.
const FOREIGN: [&str; 5] = ["//theirs", "/theirs/", "/a%09b", "/step//theirs", "/step/"];

/// Sends a server `METHOD /TARGET`, signed with its keys; returns the status.
fn ask(server: &Server, method: &str, target: &str, body: &str) -> String {
    let mut request = ::http::Request::builder().method(method).uri(format!("{}/{target}", server.endpoint()));
    if method == "PUT" {
        request = request.header("x-ms-blob-type", "BlockBlob");
    }
    let mut signed: HttpRequest = request.body(HttpRequestBody::from(body.to_owned())).unwrap();
    signed.headers_mut().insert("content-length", body.len().into());
    let (key, secret) = server.keys();
    if key.starts_with("devstore") {
        let credential = AzureCredential::AccessKey(AzureAccessKey::try_new(secret).unwrap());
        AzureAuthorizer::new(&credential, key).try_authorize(&mut signed).unwrap();
    } else {
        let keys = AwsCredential { key_id: key.to_owned(), secret_key: secret.to_owned(), token: None };
        let authorizer = AwsAuthorizer::new(&keys, "s3", "us-east-1").with_sign_payload(false);
        authorizer.try_authorize(&mut signed, None).unwrap();
    }
    let headers = signed.headers().iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    let mut headers: Vec<_> = headers.filter(|(name, _)| name != "host").collect();
    let host = signed.uri().authority().unwrap().to_string();
    headers.push(("host".to_owned(), host.clone()));
    let first = format!("{method} {} HTTP/1.1", signed.uri().path_and_query().unwrap());
    let request = Message { first, headers, body: body.as_bytes().to_vec() };
    pass_on(request, &format!("http://{host}")).unwrap().first
}

fn names(store: &dyn Store, dir: &str) -> Vec<(String, bool)> {
    store.list(dir).unwrap().into_iter().map(|entry| (entry.name, entry.is_dir)).collect()
}

fn stay(server: &Server, store: &dyn Store, also: &[&str]) {
    let own = ["run/ours", "run/step/a%2Fb", "run/step/data/é&<"];
    for name in own {
        store.put(name, b"ours").unwrap();
    }
    let foreign: Vec<_> =
        FOREIGN.iter().chain(also).map(|name| format!("{}/foreign/run{name}", server.bucket())).collect();
    for name in &foreign {
        let put = ask(server, "PUT", name, "theirs");
        assert!(put.contains(" 20"), "{name}: {put}");
    }
    let expected = |names: &[(&str, bool)]| names.iter().map(|(name, is_dir)| ((*name).to_owned(), *is_dir)).collect();
    let ours: Vec<_> = expected(&[("ours", false), ("step", true), ("theirs", true)]);
    assert_eq!(names(store, "run"), ours, "a name that ends in a slash is a directory's");
    let ours: Vec<_> = expected(&[("a%2Fb", false), ("data", true)]);
    assert_eq!(names(store, "run/step"), ours);
    assert_eq!(store.list("run/theirs").unwrap_err().kind, Kind::NotFound);
    store.delete_tree("run").unwrap();
    for name in own {
        assert_eq!(store.size(name).unwrap_err().kind, Kind::NotFound, "{name}");
    }
    assert_eq!(store.list("run/step").unwrap_err().kind, Kind::NotFound);
    for name in &foreign {
        let got = ask(server, "GET", name, "");
        assert!(got.contains(" 200 "), "{name}: {got}");
    }
}

#[test]
fn objects_of_others_stay_on_moto() {
    Server::with("moto", "objects_of_others_stay_on_moto", |server| {
        let store = open(&server.s3("foreign")).unwrap();
        stay(server, &*store, &["/a%01b", "/a%5Cb"]);
        // The mark of a directory is no object of the directory's name.
        store.put("run/step", b"beside").unwrap();
        store.delete_tree("run/step").unwrap();
        assert_eq!(store.size("run/step"), Ok(6));
        let begun = ask(server, "POST", &format!("{}/foreign/run//theirs?uploads=", server.bucket()), "");
        assert!(begun.contains(" 200 "), "{begun}");
        std::mem::forget(store.create("run/ours", 100 << 20).unwrap());
        let uploads: Vec<_> =
            store.service().unwrap().uploads().unwrap().into_iter().map(|upload| upload.name).collect();
        assert_eq!(uploads, ["run/ours"]);
    });
}

#[test]
fn objects_of_others_stay_on_azurite() {
    Server::with("azurite", "objects_of_others_stay_on_azurite", |server| {
        // It cannot list a character that XML cannot hold, and makes a slash of a backslash.
        stay(server, &*open(&server.az("foreign")).unwrap(), &[]);
    });
}

/// Returns a page of a list of `run`: names that no store uses, these names, and the token of the next page.
fn page(scheme: &str, objects: &[&str], dirs: &[&str], next: &str) -> String {
    let properties = "<Properties><Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified>\
                      <Content-Length>1</Content-Length><Content-Type>a</Content-Type></Properties>";
    let modified = "<LastModified>2015-10-21T07:28:00.000Z</LastModified>";
    let object = |key: &&str| match scheme {
        "az" => format!("<Blob><Name>{key}</Name>{properties}</Blob>"),
        _ => format!("<Contents><Key>{key}</Key>{modified}<Size>1</Size></Contents>"),
    };
    let dir = |name: &&str| match scheme {
        "az" => format!("<BlobPrefix><Name>{name}</Name></BlobPrefix>"),
        _ => format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"),
    };
    let objects = ["run/", "run/./x", "run/&#0;", "run/a\tb"].iter().chain(objects).map(object);
    let entries = objects.chain(["run//", "run/../"].iter().chain(dirs).map(dir)).collect::<String>();
    match scheme {
        "az" => format!(
            "<EnumerationResults><Prefix>run/</Prefix><Blobs>{entries}</Blobs><NextMarker>{next}</NextMarker>\
             </EnumerationResults>"
        ),
        _ if next.is_empty() => format!("<ListBucketResult>{entries}</ListBucketResult>"),
        _ => format!(
            "<ListBucketResult>{entries}<NextContinuationToken>{next}</NextContinuationToken></ListBucketResult>"
        ),
    }
}

/// Answers as a service of two pages, and records deletions.
fn two_pages(scheme: &str, request: &Message, deleted: &Mutex<BTreeSet<String>>) -> Message {
    let target = request.first.split(' ').nth(1).unwrap().to_owned();
    let body = String::from_utf8_lossy(&request.body).into_owned();
    let is_get = request.first.starts_with("GET");
    match () {
        () if is_get && target.contains("=more") => answer("200 OK", &page(scheme, &["run/ours"], &["run/step/"], "")),
        () if is_get => answer("200 OK", &page(scheme, &[], &[], "more")),
        () if target.ends_with("?delete") => {
            deleted
                .lock()
                .unwrap()
                .extend(body.split("<Key>").skip(1).map(|key| key.split('<').next().unwrap().into()));
            answer("200 OK", "<DeleteResult><Deleted><Key>run/ours</Key></Deleted></DeleteResult>")
        }
        () => {
            assert!(request.first.starts_with("DELETE"), "{}", request.first);
            deleted.lock().unwrap().insert(target.replace("%2F", "/").trim_start_matches("/b/").to_owned());
            answer("204 No Content", "")
        }
    }
}

#[test]
fn pages_of_objects_of_others_are_passed_over() {
    let given = Server::given("url=http://127.0.0.1:9 bucket=b key=devstore secret=c2VjcmV0");
    given.again("pages_of_objects_of_others_are_passed_over", |_| {
        for scheme in ["s3", "gs", "az"] {
            let deleted: Arc<Mutex<BTreeSet<String>>> = Arc::default();
            let noted = Arc::clone(&deleted);
            let endpoint = serve(move |request| Some(two_pages(scheme, &request, &noted)));
            let (store, noted) = Noted::open(&format!("{scheme}://b?endpoint={endpoint}")).unwrap();
            let expected = [("ours".to_owned(), false), ("step".to_owned(), true)];
            assert_eq!(names(&*store, "run"), expected, "{scheme}");
            assert_eq!(noted.requests().lists, 2, "{scheme}");
            if scheme != "az" {
                store.delete_tree("run").unwrap();
                assert_eq!(*deleted.lock().unwrap(), BTreeSet::from(["run/ours".to_owned()]), "{scheme}");
            }
        }
    });
}
