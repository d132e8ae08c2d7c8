//! Tests answers that repeat the request: no error may show the secrets that it carried.

#[allow(dead_code, reason = "no request is passed on")]
mod http;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use shardfast_store::testing::servers::Server;
use shardfast_store::{Error, Location, Result, Store, open};

use crate::http::{Message, answer, serve};

/// Returns the secrets of a request: signatures, credentials and tokens.
fn secrets(request: &Message) -> BTreeSet<String> {
    let headers = ["authorization", "x-amz-security-token"].into_iter().filter_map(|name| request.header(name));
    let values = headers.flat_map(|value| value.split([' ', ',', ':']));
    let query = request.first.split(['?', '&', ' ']).filter(|part| part.starts_with("sig="));
    // The scheme and the names of headers are none.
    let parts = values.chain(query).filter(|part| !part.starts_with("AWS4-") && !part.starts_with("SignedHeaders="));
    let value = |part: &str| match part.split_once('=') {
        Some(("Signature" | "Credential" | "sig", value)) => value.to_owned(),
        _ => part.to_owned(),
    };
    parts.map(value).filter(|part| part.len() >= 12).collect()
}

/// Returns the head of a request, as a page shows it.
fn head(request: &Message) -> String {
    let headers = request.headers.iter().map(|(name, value)| format!("{name}: {value}\n"));
    let head = format!("{}\n{}", request.first, headers.collect::<String>());
    head.replace('&', "&amp;").replace('<', "&lt;")
}

/// Answers that repeat a request: status and body.
const ECHOES: [&str; 7] = [
    "403 <Error><Code>SignatureDoesNotMatch</Code><Message>{}</Message><StringToSign>{}</StringToSign></Error>",
    "403 <Error><Code>SignatureDoesNotMatch</Code><Message>It is wrong.</Message><To>{}</To></Error>",
    "403 <Error><Code>{}</Code><Message>It is wrong.</Message></Error>",
    "403 <html>{}</html>",
    "200 <Error><Code>InternalError</Code><Message>{}</Message></Error>",
    "200 <html><b>{}</b></html>",
    "404 <Error><Code>NoSuchKey</Code><Message>\u{1b}[31m{}</Message></Error>",
];

/// Returns the errors of calls that fail with such an answer.
fn errors(store: &dyn Store) -> Vec<Error> {
    let none = Location { service: String::new(), bucket: "b".to_owned(), prefix: String::new() };
    let from = store.service().unwrap().location().unwrap_or(none);
    let done: [Result<()>; 10] = [
        store.list("run").map(drop),
        store.open_head("run/x", 100).map(drop),
        store.size("run/x").map(drop),
        store.put("run/x", b"bytes"),
        store.publish("run/x", b"bytes"),
        store.create("run/x", 100 << 20).map(drop),
        store.service().unwrap().uploads().map(drop),
        store.delete_all(&["run/x"], &[]),
        store.kept_crc64("run/x").map(drop),
        store.service().unwrap().copy_within(&from, "run/y", "run/x", 10),
    ];
    done.into_iter().filter_map(Result::err).collect()
}

/// Opens a store at a server that answers with echoes, and checks that the errors contain neither the requests' secrets
/// nor the store's.
fn check(url: impl Fn(&str) -> String, held: &[&str]) {
    for echo in ECHOES {
        let got: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let noted = Arc::clone(&got);
        let endpoint = serve(move |request| {
            noted.lock().unwrap().extend(secrets(&request));
            let (status, body) = echo.split_once(' ').unwrap();
            Some(answer(&format!("{status} Echo"), &body.replace("{}", &head(&request))))
        });
        let errors = errors(&*open(&url(&endpoint)).unwrap());
        let got = got.lock().unwrap();
        assert!(errors.len() > 4 && !got.is_empty(), "{echo}: {errors:?}, {got:?}");
        for error in errors {
            let shown = format!("{error} {error:?}");
            for secret in got.iter().map(String::as_str).chain(held.iter().copied()) {
                assert!(!shown.contains(secret), "{secret} of {echo} in {shown}");
            }
            assert!(!shown.contains(['\u{1b}', '\n']) && error.message.len() < 1000, "{shown}");
            if error.op == "put" && echo.contains("<Code>SignatureDoesNotMatch</Code><Message>It is wrong.") {
                assert!(shown.contains("403 Forbidden: SignatureDoesNotMatch: It is wrong."), "{shown}");
            }
        }
    }
}

const KEY: &str = "c2VjcmV0LW9mLXRoZS1hY2NvdW50LWFuZC1sb25n";

#[test]
fn s3_with_a_session() {
    let mut given = Server::given(&format!("url=http://127.0.0.1:9 bucket=b key=AKIAIOSFODNN7EXAMPLE secret={KEY}"));
    given.has_variable("AWS_SESSION_TOKEN", "FwoGZXIvYXdzEBYaDExampleTokenOfASession//0123456789+abc==");
    given.again("s3_with_a_session", |_| check(|endpoint| format!("s3://b?endpoint={endpoint}"), &[KEY]));
}

#[test]
fn azure_with_a_key() {
    let given = Server::given(&format!("url=http://127.0.0.1:9 bucket=b key=account secret={KEY}"));
    given.again("azure_with_a_key", |_| check(|endpoint| format!("az://b?endpoint={endpoint}/account"), &[KEY]));
}

#[test]
fn azure_with_a_shared_access_signature() {
    let mut given = Server::given("url=http://127.0.0.1:9 bucket=b config=none");
    given.has_variable("AZURE_STORAGE_ACCOUNT_NAME", "account");
    let sas = "sv=2023-11-03&ss=b&srt=sco&sp=rwdlac&sig=q%2Fx7Jm%2BZk0Yv3dT1uW9sQ2eR5tY8uI1oP4aS7dF0gH6%3D";
    given.has_variable("AZURE_STORAGE_SAS_KEY", sas);
    let held = ["q%2Fx7Jm%2BZk0Yv3dT1uW9sQ2eR5tY8uI1oP4aS7dF0gH6%3D", "q/x7Jm+Zk0Yv3dT1uW9sQ2eR5tY8uI1oP4aS7dF0gH6="];
    given.again("azure_with_a_shared_access_signature", |_| {
        check(|endpoint| format!("az://b?endpoint={endpoint}/account"), &held);
    });
}

#[test]
fn google_with_a_token() {
    let mut given = Server::given("url=http://127.0.0.1:9 bucket=b config=none");
    let token =
        r#"{"access_token": "ya29.token-of-the-account-0123456789", "expires_in": 3600, "token_type": "Bearer"}"#;
    let metadata = serve(move |_| Some(answer("200 OK", token)));
    given.has_variable("GCE_METADATA_HOST", metadata.strip_prefix("http://").unwrap());
    given.has_variable("HOME", "/nonexistent");
    given.again("google_with_a_token", |_| {
        check(|endpoint| format!("gs://b?endpoint={endpoint}"), &["ya29.token-of-the-account-0123456789"]);
    });
}
