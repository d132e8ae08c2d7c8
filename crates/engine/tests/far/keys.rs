//! Credentials that expire in the middle of a save or a load: others are asked for, once, and it goes on.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use shardfast_engine::{Kind, Result};
use shardfast_store::Store;
use shardfast_store::testing::servers::Server;

use crate::campaign::{DEADLINE, PATIENT, Place};
use crate::checkpoint::{direct, is_whole, load, save, store};
use crate::proxy::{Fault, Harm, Proxy, Seen};

/// Number of requests of an operation, spread over it, at which keys expire.
const MOMENTS: usize = 6;

/// Does what an administrator of versitygw does.
fn administer(server: &Server, arguments: &[&str]) {
    let (key, secret) = server.keys();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/servers/bin/versitygw");
    let done = Command::new(program)
        .arg("admin")
        .args(arguments)
        .envs([("ADMIN_ACCESS_KEY_ID", key), ("ADMIN_SECRET_ACCESS_KEY", secret)])
        .env("ADMIN_ENDPOINT_URL", server.endpoint())
        .output()
        .unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Makes a user, whose keys the profile's command prints from now on.
fn employ(server: &Server, user: &str) {
    administer(server, &["create-user", "--access", user, "--secret", "secret", "--role", "admin"]);
    let until = "2100-01-01T00:00:00Z";
    let keys =
        format!(r#"{{"Version": 1, "AccessKeyId": "{user}", "SecretAccessKey": "secret", "Expiration": "{until}"}}"#);
    std::fs::write(server.dir().join("new"), keys).unwrap();
    std::fs::rename(server.dir().join("new"), server.dir().join("keys")).unwrap();
}

/// Gives a server a profile whose command prints keys, and notes each time that it was asked.
pub(crate) fn prepare(server: &mut Server) {
    let dir = server.dir().to_owned();
    let (config, dir) = (dir.join("config"), dir.display());
    let text = format!("[default]\ncredential_process = echo asked >> {dir}/asked; cat {dir}/keys\n");
    std::fs::write(&config, text).unwrap();
    employ(server, "user-0");
    server.has_profile_in(&config);
}

fn asked(file: &PathBuf) -> usize {
    std::fs::read_to_string(file).unwrap_or_default().lines().count()
}

/// Harms the operation at some of its requests.
fn check(server: &Server, what: &str, place: &Place<'_>, operation: impl Fn(&Arc<dyn Store>, Duration) -> Result<()>) {
    let other = if what == "save" { &Place::new(server, "keys/other") } else { place };
    let requests = place.requests_as(other, &operation);
    let asked_in = server.dir().join("asked");
    // A save also looks at indexes after the commit and ignores failures there, so it does not renew its keys.
    let is_index = |seen: &Seen| seen.request.what.starts_with("HEAD") && seen.request.what.contains(".index.json");
    let requests: Vec<&Seen> = requests.iter().filter(|seen| !is_index(seen)).collect();
    // Not the first request: keys that the service has never taken are wrong.
    let moments = (1..=MOMENTS).map(|i| requests[i * requests.len() / (MOMENTS + 1)]);
    let runs: Vec<(&Seen, Fault)> =
        moments.flat_map(|seen| [(seen, Fault::KeysExpire), (seen, Fault::KeysGo)]).collect();
    for (i, (seen, fault)) in runs.into_iter().enumerate() {
        let place = if what == "save" { &Place::new(server, &format!("keys/{i}")) } else { place };
        let (new, of) = (format!("{what}-{i}"), server.clone());
        let replace = move |old: &str, fault| {
            employ(&of, &new);
            if fault == Fault::KeysGo {
                administer(&of, &["delete-user", "--access", old]);
            }
        };
        let harm = Harm { at: seen.request.clone(), fault, stays: false };
        let proxy = Proxy::replacing(server, &place.prefix(), Some(harm.clone()), Box::new(replace));
        let before = asked(&asked_in);
        let done = operation(&store(&place.through(&proxy), PATIENT), DEADLINE);
        assert_eq!((done, proxy.harmed()), (Ok(()), 1), "{harm:?}");
        assert_eq!(asked(&asked_in) - before, 2, "at the beginning, and when they had expired: {harm:?}");
        assert_eq!(is_whole(&place.direct()), Ok(true), "{harm:?}");
    }
}

pub(crate) fn saves_and_loads(server: &Server) {
    check(server, "save", &Place::new(server, "keys/none"), save);
    let place = Place::new(server, "keys/load");
    save(&direct(&place.direct()), DEADLINE).unwrap();
    check(server, "load", &place, load);
}

/// Keys of the environment stay as they are: a save that nothing can help ends at once.
pub(crate) fn of_the_environment(server: &Server) {
    let requests = Place::new(server, "keys/none").requests(save);
    let place = Place::new(server, "keys/fixed");
    let part = requests.iter().find(|seen| seen.request.what.contains("partNumber=1")).unwrap();
    let harm = Harm { at: part.request.clone(), fault: Fault::KeysExpire, stays: false };
    let proxy = place.proxy(Some(harm));
    let error = save(&store(&place.through(&proxy), PATIENT), DEADLINE).unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    assert!(
        error.message.contains("ExpiredToken") && error.message.contains("those of the environment stay"),
        "{error}"
    );
    assert!(!error.message.contains("tried"), "{error}");
    assert_eq!(is_whole(&place.direct()), Ok(false));
}
