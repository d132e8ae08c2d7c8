//! Keys of roles, which profiles name: asked of the STS of real servers, used, renewed, or refused by name.

mod http;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use shardfast_store::servers::Server;
use shardfast_store::{Error, Kind, Store, conformance, open};

use crate::http::{Message, answer, pass_on, serve};

const ROLE: &str = "role_arn = arn:aws:iam::123456789012:role/saver\n";

/// A request as a test looks at it.
#[derive(Clone, Debug)]
struct Seen {
    /// Of a request to STS.
    form: Option<String>,
    /// The key that signs it.
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

/// Stands in front of a server and notes what is asked.
#[derive(Clone, Default)]
struct Watch {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Replaces how long the keys of a role last.
    lasts: Arc<Mutex<Option<Duration>>>,
    /// A key whose requests are refused, as when it has expired.
    expired: Arc<Mutex<Option<String>>>,
}

impl Watch {
    /// Where it stands.
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

    /// What was asked since the last time.
    fn take(&self) -> (Vec<Seen>, Vec<Seen>) {
        std::mem::take(&mut *self.seen.lock().unwrap()).into_iter().partition(|seen| seen.form.is_some())
    }
}

/// Gives the tests with this server a profile, in a file that they write.
fn prepare(server: &mut Server) {
    let config = server.dir().join("config");
    server.has_profile_in(&config);
}

fn config(server: &Server) -> std::path::PathBuf {
    server.dir().join("config")
}

/// A profile with the server's keys.
fn base(server: &Server, secret: &str) -> String {
    format!("[profile base]\naws_access_key_id = {}\naws_secret_access_key = {secret}\n", server.keys().0)
}

/// A store that is reached at this endpoint, with the profile as it is now.
fn store(server: &Server, endpoint: &str, prefix: &str) -> Arc<dyn Store> {
    open(&format!("s3://{}/{prefix}?endpoint={endpoint}", server.bucket())).unwrap()
}

/// Checks that all requests were signed with keys of one role, which are others than these.
fn of_one_role(objects: &[Seen], key: &str) -> String {
    let first = objects.first().expect("requests of objects");
    assert!(first.key != key && !first.key.is_empty() && first.token.is_some(), "{first:?}");
    assert!(objects.iter().all(|seen| (&seen.key, &seen.token) == (&first.key, &first.token)), "{objects:?}");
    first.key.clone()
}

/// The keys of a role are asked for, used and renewed: where the server is watched, and the profile there.
fn keys_of_a_role(server: &Server) -> (String, String) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let (key, secret) = server.keys();
    let profile = format!(
        "[default]\nendpoint_url = {endpoint}\nsource_profile = base\n{ROLE}role_session_name = a+b=c\n\
         external_id = ex/ternal\nduration_seconds = 900\n"
    );
    std::fs::write(config(server), format!("{profile}{}", base(server, secret))).unwrap();
    let place = store(server, &endpoint, "roles");

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
    assert!(place.uploads().is_ok());
    let (asked, objects) = watch.take();
    let form = asked[0].form.clone().unwrap();
    assert_eq!((asked.len(), &*asked[0].key, &asked[0].token), (1, key, &None), "{form}");
    for field in [
        "Action=AssumeRole",
        "RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole/saver",
        "RoleSessionName=a%2Bb%3Dc",
        "ExternalId=ex/ternal",
        "DurationSeconds=900",
    ] {
        assert!(form.split('&').any(|found| found == field), "{field} in {form}");
    }
    let objects: Vec<Seen> = objects.into_iter().filter(|seen| !seen.key.is_empty()).collect();
    let first = of_one_role(&objects, key);

    // Keys that the service does not take any more are asked for again.
    *watch.expired.lock().unwrap() = Some(first.clone());
    *watch.lasts.lock().unwrap() = Some(Duration::from_secs(4));
    assert_eq!(place.put("again", b"bytes").unwrap_err().kind, Kind::Unavailable);
    place.put("again", b"bytes").unwrap();
    let second = watch.take().1.last().unwrap().key.clone();
    assert_ne!(second, first);

    // So are those that expire soon, before they do.
    place.put("again", b"bytes").unwrap();
    assert_eq!(watch.take().0.len(), 0);
    std::thread::sleep(Duration::from_millis(2500));
    let before = place.requests().puts;
    place.put("again", b"bytes").unwrap();
    let (asked, objects) = watch.take();
    // Requests to STS are not counted as such to the store.
    assert_eq!((asked.len(), objects.len(), place.requests().puts - before), (1, 1, 1));
    assert_ne!(objects[0].key, second);

    // Those that last are used on while STS refuses others.
    *watch.expired.lock().unwrap() = Some(key.to_owned());
    std::thread::sleep(Duration::from_millis(2500));
    place.put("again", b"bytes").unwrap();
    let (asked, others) = watch.take();
    assert_eq!((asked.len(), &others[0].key), (1, &objects[0].key));
    *watch.expired.lock().unwrap() = None;
    (endpoint, profile)
}

fn role_of_minio(server: &Server) {
    let (endpoint, profile) = keys_of_a_role(server);
    std::fs::write(config(server), format!("{profile}{}", base(server, "wrong-secret"))).unwrap();
    let error = store(server, &endpoint, "wrong").put("x", b"bytes").unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    for word in ["AWS profile \"default\"", "role/saver", "profile \"base\"", "AccessDenied: The request signature"] {
        assert!(error.message.contains(word), "{word} in {error}");
    }
    assert!(!error.to_string().contains("wrong-secret"), "{error}");
}

#[test]
#[ignore = "MinIO is built by the campaigns: make campaigns"]
fn minio_gives_keys_of_a_role() {
    Server::prepared("minio", "minio_gives_keys_of_a_role", prepare, role_of_minio);
}

fn put_with(server: &Server, endpoint: &str, text: &str) -> Result<(), Error> {
    std::fs::write(config(server), text).unwrap();
    store(server, endpoint, "roles").put("x", b"bytes")
}

/// What gives the keys of machines, as the metadata of an instance and of a container do.
fn metadata(request: &Message) -> Option<Message> {
    let path = request.first.split(' ').nth(1)?;
    let keys = r#"{"AccessKeyId": "of-the-machine", "SecretAccessKey": "s", "Token": "machine-token",
                   "Expiration": "2100-01-01T00:00:00Z"}"#;
    Some(match path {
        "/latest/api/token" => answer("200 OK", "session"),
        "/latest/meta-data/iam/security-credentials/" => answer("200 OK", "instance-role"),
        "/latest/meta-data/iam/security-credentials/instance-role" => answer("200 OK", keys),
        "/container" if request.header("authorization") == Some("container-token") => answer("200 OK", keys),
        _ => answer("404 Not Found", ""),
    })
}

fn prepare_machine(server: &mut Server) {
    prepare(server);
    let machine = serve(|request| metadata(&request));
    let write = |name: &str, text: &str| {
        let path = server.dir().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let of_container = write("container-token", "container-token");
    write("web-token", "web.identity.token\n");
    server.has_variable("AWS_METADATA_ENDPOINT", &machine);
    server.has_variable("AWS_CONTAINER_CREDENTIALS_FULL_URI", &format!("{machine}/container"));
    server.has_variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &of_container);
}

/// It does not check signatures: the test looks at who signs.
fn ways_to_a_role(server: &Server) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let default = format!("[default]\nendpoint_url = {endpoint}\n{ROLE}");
    let signs = |text: &str| {
        put_with(server, &endpoint, text).unwrap();
        let (asked, objects) = watch.take();
        of_one_role(&objects, server.keys().0);
        asked
    };

    // A role that takes a role: the keys of the first, with their token, sign the request for the second.
    let (key, secret) = server.keys();
    let lead = "[profile lead]\nrole_arn = arn:aws:iam::123456789012:role/lead\nsource_profile = base\n";
    let asked = signs(&format!("{default}source_profile = lead\n{lead}{}", base(server, secret)));
    assert_eq!((asked.len(), &*asked[0].key, &asked[0].token), (2, key, &None));
    assert!(asked[0].form.as_ref().unwrap().contains("role/lead"), "{asked:?}");
    assert!(asked[1].key != key && asked[1].token.is_some(), "{asked:?}");
    assert!(asked[1].form.as_ref().unwrap().contains("role/saver"), "{asked:?}");

    for source in ["Ec2InstanceMetadata", "EcsContainer"] {
        let asked = signs(&format!("{default}credential_source = {source}\n"));
        assert_eq!((asked.len(), &*asked[0].key), (1, "of-the-machine"));
        assert_eq!(asked[0].token.as_deref(), Some("machine-token"));
    }

    let token = |path: &Path| format!("{default}external_id = x\nweb_identity_token_file = {}\n", path.display());
    let asked = signs(&token(&server.dir().join("web-token")));
    let form = asked[0].form.clone().unwrap();
    assert_eq!((asked.len(), &*asked[0].key), (1, ""));
    assert!(form.contains("WebIdentityToken=web.identity.token"), "{form}");
    assert!(form.contains("Action=AssumeRoleWithWebIdentity") && !form.contains("ExternalId"), "{form}");
    // A role that is taken with a token may take another one.
    let lead = "[profile lead]\nrole_arn = arn:aws:iam::123456789012:role/lead\n";
    let path = server.dir().join("web-token");
    let asked = signs(&format!("{default}source_profile = lead\n{lead}web_identity_token_file = {}\n", path.display()));
    assert_eq!((asked.len(), &*asked[0].key), (2, ""));
    assert!(asked[1].token.is_some() && asked[1].form.as_ref().unwrap().contains("role/saver"), "{asked:?}");
    let error = put_with(server, &endpoint, &token(&server.dir().join("no-token"))).unwrap_err();
    assert!(error.message.contains("no-token: No such file"), "{error}");
}

#[test]
fn moto_gives_keys_of_a_role() {
    Server::prepared("moto", "moto_gives_keys_of_a_role", prepare, |server| _ = keys_of_a_role(server));
}

#[test]
fn moto_gives_keys_of_a_role_in_each_way() {
    Server::prepared("moto", "moto_gives_keys_of_a_role_in_each_way", prepare_machine, ways_to_a_role);
}

/// Keys of the environment count more than a profile, unless the profile that is asked for takes its role with them.
fn with_the_environment(server: &Server) {
    let watch = Watch::default();
    let endpoint = watch.before(server);
    let profile = format!("[profile team]\nendpoint_url = {endpoint}\n{ROLE}credential_source = Environment\n");
    put_with(server, &endpoint, &profile).unwrap();
    let (asked, objects) = watch.take();
    assert_eq!((asked.len(), &*asked[0].key), (1, "environment"));
    of_one_role(&objects, "environment");
    // What this profile says of its keys is not asked.
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

/// The error of asking an STS that answers so.
fn refused(server: &Server, sts: &str) -> Error {
    let profile = format!("[default]\nendpoint_url = {sts}\n{ROLE}source_profile = base\n");
    let text = format!("{profile}{}", base(server, "base-secret"));
    // No request comes to the service of the objects.
    let error = put_with(server, server.endpoint(), &text).unwrap_err();
    for word in ["AWS profile \"default\"", "role/saver", "profile \"base\"", sts.strip_prefix("http://").unwrap()] {
        assert!(error.message.contains(word), "{word} in {error}");
    }
    assert!(!error.to_string().contains("base-secret"), "{error}");
    error
}

fn bad_answers(server: &Server) {
    let html = "<!DOCTYPE html><html><body>Sign in, base-secret</body></html>";
    let fault = |code: &str, said: &str| {
        format!("<ErrorResponse><Error><Code>{code}</Code><Message>{said}</Message></Error></ErrorResponse>")
    };
    let keys = "<AccessKeyId>k</AccessKeyId><SecretAccessKey>base-secret</SecretAccessKey>";
    let taken = move |rest: &str| {
        format!("<R><AssumeRoleResult><Credentials>{keys}{rest}</Credentials></AssumeRoleResult></R>")
    };
    let ended = "<SessionToken>t</SessionToken><Expiration>2001-01-01T00:00:00Z</Expiration>";
    let odd = "<SessionToken>\u{1}</SessionToken><Expiration>2100-01-01T00:00:00Z</Expiration>";
    for (status, body, kind, message) in [
        ("200 OK", html.to_owned(), Kind::Invalid, "expected an answer of STS, with Credentials"),
        ("200 OK", String::new(), Kind::Invalid, "expected an answer of STS, with Credentials"),
        ("404 Not Found", html.to_owned(), Kind::Invalid, "404 Not Found, without a code of STS"),
        ("502 Bad Gateway", html.to_owned(), Kind::Unavailable, "502 Bad Gateway"),
        ("400 Bad Request", fault("Throttling", "Rate exceeded"), Kind::Unavailable, "Throttling: Rate exceeded"),
        ("403 Forbidden", fault("AccessDenied", "not for\nbase-secret"), Kind::Invalid, "AccessDenied: not for;"),
        (
            "403 Forbidden",
            fault("AccessDenied", "signed by base-secret"),
            Kind::Invalid,
            "AccessDenied; STS must know who asks",
        ),
        ("200 OK", taken(""), Kind::Invalid, "expected an answer of STS, with Credentials"),
        ("200 OK", taken(ended), Kind::Invalid, "its keys expired at 2001"),
    ] {
        let sts = serve(move |_| Some(answer(status, &body)));
        let error = refused(server, &sts);
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.contains(message), "{message} in {error}");
        assert_eq!(error.wait, (kind == Kind::Unavailable).then_some(Duration::ZERO), "{error}");
    }
    let error = refused(server, &serve(|_| None));
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    let sts = serve(move |_| Some(answer("200 OK", &taken(odd))));
    let profile = format!("[default]\nendpoint_url = {sts}\n{ROLE}source_profile = base\n");
    let error = put_with(server, server.endpoint(), &format!("{profile}{}", base(server, "s"))).unwrap_err();
    assert!(error.message.contains("printable characters"), "{error}");
}

#[test]
fn answers_that_give_no_keys_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config").display().to_string();
    let given = format!("url=http://127.0.0.1:9 bucket=b key=k secret=s config={config} dir={}", dir.path().display());
    Server::given(&given).again("answers_that_give_no_keys_are_refused_by_name", bad_answers);
}
