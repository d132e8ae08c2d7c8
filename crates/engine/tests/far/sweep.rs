//! Tests that debris of crashed saves on object storage is removed, and that checkpoints stay.

use std::time::Duration;

use shardfast_engine::Timeout;
use shardfast_engine::runs::step_url;
use shardfast_store::testing::servers::Server;
use shardfast_tools::sweep::sweep_in;

use crate::checkpoint::{direct, load, save};

const ATTEMPT: &str = "0123456789abcdef";

pub(crate) fn debris(server: &Server) {
    let run = server.s3("sweep/run");
    let committed = direct(&step_url(&run, 1));
    save(&committed, Duration::from_secs(60)).unwrap();
    let store = direct(&run);
    let before = names(&run);
    let file = |step: u64, rank: u64| format!("step-{step:08}/model/{rank:05}-000-{ATTEMPT}.safetensors");
    for step in 1..=2 {
        store.put(&file(step, 0), b"left").unwrap();
        // As after a crash of its writer.
        std::mem::forget(store.create(&file(step, 1), 100 << 20).unwrap());
    }
    std::mem::forget(store.create("step-00000002/model/mine.bin", 100 << 20).unwrap());
    let sweep = |age: u64, dry| {
        let mut swept =
            sweep_in(&*store, &run, Duration::from_secs(age), dry, &Timeout::default(), &|_, _| {}).unwrap();
        swept.files.sort();
        swept.uploads.sort();
        swept
    };
    // All of it is young, but nothing of another attempt at a committed step can be published.
    let swept = sweep(3600, false);
    assert_eq!((swept.files, swept.uploads), (vec![shardfast_store::join(&run, &file(1, 0))], vec![]));
    assert_eq!(swept.young, [step_url(&run, 2)]);
    let told = sweep(0, true);
    let swept = sweep(0, false);
    assert_eq!((&told.files, &told.uploads), (&swept.files, &swept.uploads));
    assert_eq!(swept.files, [shardfast_store::join(&run, &file(2, 0))]);
    assert_eq!(swept.uploads, [1, 2].map(|step| shardfast_store::join(&run, &file(step, 1))));
    assert_eq!(store.service().unwrap().uploads().unwrap().len(), 1, "that of another program");
    assert_eq!(names(&run), before);
    load(&committed, Duration::from_secs(60)).unwrap();
}

/// Every object below a place.
fn names(url: &str) -> Vec<String> {
    let (store, mut found, mut dirs) = (direct(url), Vec::new(), vec![String::new()]);
    while let Some(dir) = dirs.pop() {
        for entry in store.list(&dir).unwrap() {
            let name = if dir.is_empty() { entry.name } else { format!("{dir}/{}", entry.name) };
            if entry.is_dir { dirs.push(name) } else { found.push(name) }
        }
    }
    found.sort();
    found
}
