//! Tests keys of roles, which profiles name: found by a command, used, renewed, or refused by name. The command
//! replaces AWS's, which no package index has: it asks a real STS through the library that AWS's own is built on.

mod http;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use shardfast_store::testing::conformance;
use shardfast_store::testing::noted::Noted;
use shardfast_store::testing::servers::Server;
use shardfast_store::{Error, Kind, Store, open};

use crate::http::{Message, answer, pass_on, serve};

/// Region of the profiles: the library asks for one before it asks an STS.
const AT: &str = "region = us-east-1\n";

const ROLE: &str = "role_arn = arn:aws:iam::123456789012:role/saver\n";

/// Time that keys last; they are used for half of it.
const LASTS: Duration = Duration::from_secs(12);

/// Time after which keys have been used for half of theirs.
const HALF: Duration = Duration::from_millis(6500);

/// A recorded request.
#[derive(Clone, Debug)]
struct Seen {
    /// Form of a request to STS; `None` for other requests.
    form: Option<String>,
    /// Key that signs it.
    key: String,
    token: Option<String>,
}

fn seen(request: &Message) -> Seen {
    let is_sts = request.first.starts_with("POST / ");
    let key = |header: &str| Some(header.split_once("Credential=")?.1.split_once('/')?.0.to_owned());
    Seen {
        form: is_sts.then(|| String::from_utf8(request.body.clone()).unwrap()),
        key: request.header("authorization").and_then(key).unwrap_or_default(),
        token: request.header("x-amz-security-token").map(str::to_owned),
    }
}

/// Proxy in front of a server that records requests.
#[derive(Clone, Default)]
struct Watch {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Time that the keys of a role last, in place of the server's.
    lasts: Arc<Mutex<Option<Duration>>>,
    /// Key whose requests are refused, as when it has expired.
    expired: Arc<Mutex<Option<String>>>,
}

impl Watch {
    /// Starts the proxy; returns its URL.
    fn before(&self, server: &Server) -> String {
        let (watch, service) = (self.clone(), server.endpoint().to_owned());
        serve(move |request| {
            let seen = seen(&request);
            watch.seen.lock().unwrap().push(seen.clone());
            if watch.expired.lock().unwrap().as_ref() == Some(&seen.key) {
                return Some(answer("400 Bad Request", "<Error><Code>ExpiredToken</Code></Error>"));
            }
            let mut answer = pass_on(request, &service)?;
            if let (Some(lasts), Some(_)) = (*watch.lasts.lock().unwrap(), seen.form) {
                let text = String::from_utf8(answer.body.clone()).unwrap();
                // Refusals have none.
                if let Some((before, rest)) = text.split_once("<Expiration>") {
                    let after = rest.split_once('<').unwrap().1;
                    let expires = chrono::DateTime::<chrono::Utc>::from(SystemTime::now() + lasts).to_rfc3339();
                    answer.body = format!("{before}<Expiration>{expires}<{after}").into_bytes();
                }
            }
            Some(answer)
        })
    }

    /// Returns the requests since the last call, those to STS first.
    fn take(&self) -> (Vec<Seen>, Vec<Seen>) {
        std::mem::take(&mut *self.seen.lock().unwrap()).into_iter().partition(|seen| seen.form.is_some())
    }
}

/// Prints the keys of a profile as `aws configure export-credentials --profile NAME --format process` does.
const EXPORT: &str = r#"[ "$1 $2 $3 $5 $6" = "configure export-credentials --profile --format process" ] || exit 99
exec "$PYTHON" - "$4" <<'END'
import json, sys
from botocore.session import Session
keys = Session(profile=sys.argv[1]).get_credentials()
one = keys.get_frozen_credentials()
print(json.dumps({"Version": 1, "AccessKeyId": one.access_key, "SecretAccessKey": one.secret_key,
                  "SessionToken": one.token, "Expiration": keys._expiry_time.isoformat()}))
END"#;

/// Makes the command `aws` of the tests with this server.
fn command(server: &Server, script: &str) {
    let path = server.dir().join("aws");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn path_with(dir: &Path) -> String {
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

/// Gives the tests with this server a profile, in a file that they write, and the command.
fn prepare(server: &mut Server) {
    let config = server.dir().join("config");
    server.has_profile_in(&config);
    command(server, EXPORT);
    let path = path_with(server.dir());
    server.has_variable("PATH", &path);
    server.has_variable("PYTHON", concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/servers/moto/bin/python"));
}

fn config(server: &Server) -> std::path::PathBuf {
    server.dir().join("config")
}

/// Returns a profile with the server's keys.
fn base(server: &Server, secret: &str) -> String {
    format!("[profile base]\naws_access_key_id = {}\naws_secret_access_key = {secret}\n", server.keys().0)
}

/// Opens a store at this endpoint, with the profile as it is now.
fn store(server: &Server, endpoint: &str, prefix: &str) -> Arc<dyn Store> {
    open(&url(server, endpoint, prefix)).unwrap()
}

fn url(server: &Server, endpoint: &str, prefix: &str) -> String {
    format!("s3://{}/{prefix}?endpoint={endpoint}", server.bucket())
}

/// Checks that all requests were signed with keys of one role, which differ from these.
fn of_one_role(objects: &[Seen], key: &str) -> String {
    let first = objects.first().expect("requests of objects");
    assert!(first.key != key && !first.key.is_empty() && first.token.is_some(), "{first:?}");
    assert!(objects.iter().all(|seen| (&seen.key, &seen.token) == (&first.key, &first.token)), "{objects:?}");
    first.key.clone()
}

/// Checks that keys of 12 s, which are about to expire, are asked for again before they do, and that these last when
/// STS refuses others. Returns whether the keys were still valid then: a busy machine may take longer.
fn renewed(place: &dyn Store, noted: &Noted, watch: &Watch, (key, old): (&str, &str)) -> bool {
    *watch.expired.lock().unwrap() = None;
    std::thread::sleep(HALF);
    noted.take();
    let begun = Instant::now();
    place.put("again", b"bytes").unwrap();
    let (asked, objects) = watch.take();
    // Requests to STS are not counted as such to the store.
    assert_eq!((asked.len(), objects.len(), noted.requests().puts), (1, 1, 1));
    assert_ne!(objects[0].key, old);

    *watch.expired.lock().unwrap() = Some(key.to_owned());
    std::thread::sleep(HALF);
    let put = place.put("again", b"bytes");
    let (asked, others) = watch.take();
    if put.is_err() && begun.elapsed() > LASTS {
        return false;
    }
    put.unwrap();
    assert_eq!((asked.len(), &others[0].key), (1, &objects[0].key));
    true
}

/// Tests that the keys of a role are requested, used and renewed.
fn keys_of_a_role(server: &Server) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let (key, secret) = server.keys();
    let profile = format!(
        "[default]\nendpoint_url = {endpoint}\n{AT}source_profile = base\n{ROLE}role_session_name = a+b=c\n\
         external_id = ex/ternal\nduration_seconds = 900\n"
    );
    std::fs::write(config(server), format!("{profile}{}", base(server, secret))).unwrap();
    let (place, noted) = Noted::open(&url(server, &endpoint, "roles")).unwrap();

    // One request asks for the keys, the others wait for it.
    std::thread::scope(|scope| {
        for i in 0..8 {
            let place = &place;
            scope.spawn(move || place.put(&format!("small/{i}"), b"bytes").unwrap());
        }
    });
    let bytes = conformance::pattern(1, 20 << 20);
    conformance::write_object(&*place, "large", &bytes).unwrap();
    assert!(place.read("large", bytes.len() as u64).unwrap() == bytes);
    assert!(place.service().unwrap().uploads().is_ok());
    let (asked, objects) = watch.take();
    let form = asked[0].form.clone().unwrap();
    assert_eq!((asked.len(), &*asked[0].key, &asked[0].token), (1, key, &None), "{form}");
    for field in [
        "Action=AssumeRole",
        "RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Fsaver",
        "RoleSessionName=a%2Bb%3Dc",
        "ExternalId=ex%2Fternal",
        "DurationSeconds=900",
    ] {
        assert!(form.split('&').any(|found| found == field), "{field} in {form}");
    }
    let objects: Vec<Seen> = objects.into_iter().filter(|seen| !seen.key.is_empty()).collect();
    let first = of_one_role(&objects, key);

    // Keys that the service does not take any more are asked for again.
    *watch.expired.lock().unwrap() = Some(first.clone());
    *watch.lasts.lock().unwrap() = Some(LASTS);
    assert_eq!(place.put("again", b"bytes").unwrap_err().kind, Kind::Unavailable);
    place.put("again", b"bytes").unwrap();
    let second = watch.take().1.last().unwrap().key.clone();
    assert_ne!(second, first);

    // So are those that expire soon.
    place.put("again", b"bytes").unwrap();
    assert_eq!(watch.take().0.len(), 0);
    assert!((0..5).any(|_| renewed(&*place, &noted, &watch, (key, &second))));
}

fn put_with(server: &Server, endpoint: &str, text: &str) -> Result<(), Error> {
    std::fs::write(config(server), text).unwrap();
    store(server, endpoint, "roles").put("x", b"bytes")
}

/// Tests a role that takes a role: the keys of the first, with their token, sign the request for the second.
fn chain_of_roles(server: &Server) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let (key, secret) = server.keys();
    let lead = format!("[profile lead]\n{AT}role_arn = arn:aws:iam::123456789012:role/lead\nsource_profile = base\n");
    let text = format!(
        "[default]\nendpoint_url = {endpoint}\n{AT}{ROLE}source_profile = lead\n{lead}{}",
        base(server, secret)
    );
    put_with(server, &endpoint, &text).unwrap();
    let (asked, objects) = watch.take();
    of_one_role(&objects, key);
    assert_eq!((asked.len(), &*asked[0].key, &asked[0].token), (2, key, &None));
    assert!(asked[0].form.as_ref().unwrap().contains("role%2Flead"), "{asked:?}");
    assert!(asked[1].key != key && asked[1].token.is_some(), "{asked:?}");
    assert!(asked[1].form.as_ref().unwrap().contains("role%2Fsaver"), "{asked:?}");
}

#[test]
fn moto_gives_keys_of_a_role() {
    Server::prepared("moto", "moto_gives_keys_of_a_role", prepare, keys_of_a_role);
}

#[test]
fn moto_gives_keys_of_a_role_of_a_role() {
    Server::prepared("moto", "moto_gives_keys_of_a_role_of_a_role", prepare, chain_of_roles);
}

/// Tests that the profile that is asked for takes its role with the keys of the environment.
fn with_the_environment(server: &Server) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let profile = format!("[profile team]\nendpoint_url = {endpoint}\n{AT}{ROLE}credential_source = Environment\n");
    put_with(server, &endpoint, &profile).unwrap();
    let (asked, objects) = watch.take();
    assert_eq!((asked.len(), &*asked[0].key), (1, "environment"));
    of_one_role(&objects, "environment");
    // Keys of the environment count more than any other profile.
    put_with(server, &endpoint, "[profile team]\nsso_session = x\n").unwrap();
    let (asked, objects) = watch.take();
    assert_eq!((asked.len(), &*objects[0].key), (0, "environment"));
}

#[test]
fn a_role_is_taken_with_keys_of_the_environment() {
    let prepare = |server: &mut Server| {
        prepare(server);
        for (name, value) in
            [("AWS_ACCESS_KEY_ID", "environment"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_PROFILE", "team")]
        {
            server.has_variable(name, value);
        }
    };
    Server::prepared("moto", "a_role_is_taken_with_keys_of_the_environment", prepare, with_the_environment);
}

fn failing_commands(server: &Server) {
    let profile = format!("[default]\n{ROLE}source_profile = base\n{}", base(server, "base-secret"));
    for (script, message) in [
        (
            "echo said first >&2; echo an error occurred >&2; exit 254",
            "exit status: 254: an error occurred; it needs AWS",
        ),
        ("echo base-secret", "expected JSON with Version, AccessKeyId"),
        (
            r#"printf '{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "base-secret", %s}' \
               '"Expiration": "2001-01-01T00:00:00Z"'"#,
            "its keys expired at 2001",
        ),
        (
            r#"printf '{"Version": 1, "AccessKeyId": "\\u0001", "SecretAccessKey": "base-secret"}'"#,
            "expected a key and a token of printable characters",
        ),
    ] {
        command(server, script);
        let error = put_with(server, server.endpoint(), &profile).unwrap_err();
        assert_eq!(error.kind, Kind::Invalid, "{error}");
        for word in ["AWS profile \"default\"", message] {
            assert!(error.message.contains(word), "{word} in {error}");
        }
        assert!(!error.to_string().contains("base-secret"), "{error}");
    }
    std::fs::remove_file(server.dir().join("aws")).unwrap();
    let error = put_with(server, server.endpoint(), &profile).unwrap_err();
    for word in ["it says role_arn: `aws configure export-credentials --profile default`: No such file", "AWS CLI 2"] {
        assert!(error.message.contains(word), "{word} in {error}");
    }
}

#[test]
fn a_command_that_gives_no_keys_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config").display().to_string();
    let given = format!("url=http://127.0.0.1:9 bucket=b key=k secret=s config={config} dir={}", dir.path().display());
    let mut server = Server::given(&given);
    server.has_variable("PATH", &dir.path().display().to_string());
    server.again("a_command_that_gives_no_keys_is_named", failing_commands);
}
