//! Copies that the service makes by itself.

use std::time::Duration;

use shardfast_engine::Engine;
use shardfast_store::testing::servers::Server;
use shardfast_tools::{Copying, Limit, copy};

use crate::checkpoint::{direct, is_whole, save};

pub(crate) fn one_service_copies_by_itself(server: &Server) {
    let silent = |_: u64, _: u64| {};
    let fast = Copying { limit: Limit::new(None), verify: false };
    // Names of places with all that an URL or a header encodes.
    let [from, to, damaged] = ["within/a b+c&d=ü", "within/to/there", "within/damaged"].map(|place| server.s3(place));
    save(&direct(&from), Duration::from_secs(60)).unwrap();
    let copied = copy(&Engine::solo(), &from, &to, &fast, &silent).unwrap();
    assert!(copied.bytes_within == copied.bytes && copied.bytes > 9 << 20, "{copied:?}");
    assert_eq!(is_whole(&to), Ok(true));
    // As if it had been interrupted before the last step.
    direct(&to).delete("COMMIT").unwrap();
    let again = copy(&Engine::solo(), &from, &to, &fast, &silent).unwrap();
    assert_eq!((again.files_found, again.bytes), (again.files, 0));
    assert_eq!(is_whole(&to), Ok(true));

    // What is damaged at the source is not proven by a copy of it.
    let store = direct(&from);
    let name = store.list("model").unwrap().into_iter().find(|entry| entry.name.ends_with(".safetensors")).unwrap();
    let path = format!("model/{}", name.name);
    let mut bytes = store.read(&path, name.bytes).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    store.put(&path, &bytes).unwrap();
    let error = copy(&Engine::solo(), &from, &damaged, &fast, &silent).unwrap_err();
    assert!(error.message.contains(&name.name), "{error}");
    assert_eq!(is_whole(&damaged), Ok(false));
}
