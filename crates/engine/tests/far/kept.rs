//! Verification by the checksums that the storage keeps, without reading data.

use std::time::Duration;

use shardfast_engine::{Engine, Kind};
use shardfast_store::testing::servers::Server;
use shardfast_tools::verify::Problem;
use shardfast_tools::verify_stored;

use crate::checkpoint::{direct, save};

pub(crate) fn verifies(server: &Server) {
    let url = server.s3("kept/one");
    let store = direct(&url);
    save(&store, Duration::from_secs(60)).unwrap();
    let verified = || verify_stored(&Engine::solo(), &url, &|_, _| {});
    let report = verified().unwrap();
    assert!(report.is_sound() && report.is_stored && report.bytes > 9 << 20, "{report:?}");
    // The files of several parts, and those of one.
    for key in ["model", "optimizer", "extra"] {
        let name = store.list(key).unwrap().into_iter().find(|entry| entry.name.ends_with(".safetensors")).unwrap();
        let (path, bytes) = (format!("{key}/{}", name.name), name.bytes as usize);
        let good = store.read(&path, name.bytes).unwrap();
        let mut bad = good.clone();
        bad[bytes - 1] ^= 1;
        store.put(&path, &bad).unwrap();
        let report = verified().unwrap();
        let found: Vec<_> = report.findings.iter().map(|found| (found.problem, found.file.as_deref())).collect();
        assert_eq!(found, [(Problem::File, Some(&*path))]);
        assert!(report.findings[0].message.contains("the storage keeps"), "{report:?}");
        store.put(&path, &good).unwrap();
        assert!(verified().unwrap().is_sound());
    }
    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().to_str().unwrap();
    save(&shardfast_store::open(local).unwrap(), Duration::from_secs(60)).unwrap();
    let error = verify_stored(&Engine::solo(), local, &|_, _| {}).unwrap_err();
    assert!(error.kind == Kind::Unsupported && error.message.contains("keeps no checksums"), "{error}");
}
