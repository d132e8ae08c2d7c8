//! Tests `gs://` against the contract, as far as possible without Google: no emulator speaks the interface that the
//! client uses, so a translator stands in front of a server that speaks S3. It turns generations into ETags, Google's
//! headers into Amazon's, and signs with that server's keys. It does not show Google's own answers to overload, its
//! authentication, or that its condition holds under a race as the server's does.

mod http;
mod uploads;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use shardfast_store::testing::conformance;
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Kind, open};

use crate::http::{Message, answer, pass_on, serve};

/// ETag of each generation that a client got.
type Generations = Arc<Mutex<HashMap<u64, String>>>;

/// Signs a request of Amazon's interface with the keys of this server.
fn sign(request: &mut Message, server: &Server) {
    let mut words = request.first.split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let mut unsigned = ::http::Request::builder().method(method).uri(format!("{}{target}", server.endpoint()));
    for (name, value) in request.headers.iter().filter(|(name, _)| name.starts_with("x-amz-")) {
        unsigned = unsigned.header(name, value);
    }
    let mut signed: HttpRequest = unsigned.body(HttpRequestBody::empty()).unwrap();
    let (key, secret) = server.keys();
    let keys = AwsCredential { key_id: key.to_owned(), secret_key: secret.to_owned(), token: None };
    let authorizer = AwsAuthorizer::new(&keys, "s3", "us-east-1").with_sign_payload(false);
    authorizer.try_authorize(&mut signed, None).unwrap();
    request.headers.retain(|(name, _)| !name.starts_with("x-amz-"));
    for (name, value) in signed.headers() {
        request.headers.push((name.to_string(), value.to_str().unwrap().to_owned()));
    }
}

/// Returns the request as Amazon's interface has it, and the generation that it asks for.
fn request_of(mut request: Message, server: &Server, generations: &Generations) -> (Message, Option<u64>) {
    let mut generation = None;
    let (before, after) =
        request.first.split_once('?').map_or((request.first.clone(), String::new()), |(before, rest)| {
            let (query, version) = rest.rsplit_once(' ').unwrap();
            let kept = query.split('&').filter(|part| match part.strip_prefix("generation=") {
                None => true,
                Some(number) => {
                    generation = number.parse().ok();
                    false
                }
            });
            let kept = kept.collect::<Vec<_>>().join("&");
            (before.to_owned(), if kept.is_empty() { format!(" {version}") } else { format!("?{kept} {version}") })
        });
    // Others know a name as it is, and sign it so; Google by what is encoded, too.
    let plain = [("%2D", "-"), ("%2E", "."), ("%2F", "/"), ("%5F", "_"), ("%7E", "~")];
    request.first = plain.iter().fold(before, |path, (encoded, plain)| path.replace(encoded, plain)) + &after;
    request.headers.retain(|(name, _)| !["authorization", "host", "if-match"].contains(&name.as_str()));
    for (name, value) in &mut request.headers {
        if name == "x-goog-if-generation-match" {
            assert_eq!(value, "0");
            (*name, *value) = ("if-none-match".to_owned(), "*".to_owned());
        } else if let Some(key) = name.strip_prefix("x-goog-meta-") {
            *name = format!("x-amz-meta-{key}");
        }
    }
    if let Some(generation) = generation {
        let etag = generations.lock().unwrap().get(&generation).cloned().unwrap_or_default();
        request.headers.push(("if-match".to_owned(), etag));
    }
    sign(&mut request, server);
    let host = server.endpoint().strip_prefix("http://").unwrap();
    request.headers.push(("host".to_owned(), host.to_owned()));
    (request, generation)
}

/// Answers a request of Google's interface as this server does.
fn translate(request: Message, server: &Server, generations: &Generations) -> Option<Message> {
    let (request, generation) = request_of(request, server, generations);
    let mut answer = pass_on(request, server.endpoint())?;
    if generation.is_some() && answer.first.contains(" 412 ") {
        "HTTP/1.1 404 Not Found".clone_into(&mut answer.first);
    }
    if let Some(etag) = answer.header("etag").map(str::to_owned) {
        let digits: String = etag.chars().filter(char::is_ascii_hexdigit).take(15).collect();
        let number = u64::from_str_radix(&digits, 16).unwrap();
        generations.lock().unwrap().insert(number, etag);
        answer.headers.push(("x-goog-generation".to_owned(), number.to_string()));
    }
    for (name, _) in &mut answer.headers {
        if let Some(key) = name.strip_prefix("x-amz-meta-") {
            *name = format!("x-goog-meta-{key}");
        }
    }
    Some(answer)
}

/// Starts a server that speaks Google's interface in front of this one.
fn translator(server: &Server) -> String {
    let (service, generations) = (server.clone(), Generations::default());
    serve(move |request| translate(request, &service, &generations))
}

#[test]
fn a_server_behind_a_translator() {
    Server::any("a_server_behind_a_translator", |server| {
        let endpoint = translator(server);
        conformance::check(|name| open(&format!("gs://{}/gcs/{name}?endpoint={endpoint}", server.bucket())).unwrap());
    });
}

/// Starts the metadata of an instance, which issue its account's tokens; a profile leaves the test no other way to any.
fn prepare(server: &mut Server) {
    let config = server.dir().join("config");
    server.has_profile_in(&config);
    let token = r#"{"access_token": "of-the-account", "expires_in": 3600, "token_type": "Bearer"}"#;
    let metadata = serve(move |_| Some(answer("200 OK", token)));
    server.has_variable("GCE_METADATA_HOST", metadata.strip_prefix("http://").unwrap());
    let home = server.dir().display().to_string();
    server.has_variable("HOME", &home);
}

/// Tests that uploads are listed as Google's interface documents it, by an interface that Google has taken over.
#[test]
fn uploads_that_were_not_completed_on_moto_behind_a_translator() {
    let test = "uploads_that_were_not_completed_on_moto_behind_a_translator";
    Server::prepared("moto", test, prepare, |server| {
        let (service, generations) = (server.clone(), Generations::default());
        let endpoint = serve(move |request| match request.header("authorization") {
            Some("Bearer of-the-account") => translate(request, &service, &generations),
            _ => Some(answer("401 Unauthorized", "<Error><Code>AuthenticationRequired</Code></Error>")),
        });
        let at = |prefix: &str| open(&format!("gs://{}/{prefix}?endpoint={endpoint}", server.bucket())).unwrap();
        uploads::are_listed_and_aborted(at);
        let place = format!("gs://{}/counted?endpoint={endpoint}", server.bucket());
        let (store, noted) = Noted::open(&place).unwrap();
        store.service().unwrap().uploads().unwrap();
        assert_eq!((noted.requests().lists, noted.requests().gets), (1, 1), "of the bucket, and of the token");
    });
}

#[test]
fn lists_of_uploads_that_are_refused_say_why() {
    let given = Server::given("url=http://127.0.0.1:9 bucket=b key=k secret=s");
    given.again("lists_of_uploads_that_are_refused_say_why", |server| {
        let refusal = "<Error><Code>AccessDenied</Code><Message>no storage.multipartUploads.list</Message></Error>";
        for (status, body, kind, message) in [
            ("403 Forbidden", refusal, Kind::Invalid, "AccessDenied: no storage.multipartUploads.list"),
            ("503 Service Unavailable", "", Kind::Unavailable, "503 Service Unavailable"),
            ("200 OK", "<html>Sign in", Kind::Invalid, "no answer of such a service"),
        ] {
            let endpoint = serve(move |_| Some(answer(status, body)));
            let store = open(&format!("gs://{}/run?endpoint={endpoint}", server.bucket())).unwrap();
            let error = store.service().unwrap().uploads().unwrap_err();
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.message.contains(message), "{message} in {error}");
        }
    });
}
