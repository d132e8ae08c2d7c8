//! Tests that uploads that are begun and not completed are listed and aborted.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shardfast_store::Store;

/// Tests a server that lists all below a prefix, where `open` opens prefixes of its bucket; returns the age of an
/// upload.
pub(crate) fn are_listed_and_aborted(open: impl Fn(&str) -> Arc<dyn Store>) -> Duration {
    let [run, other] = ["uploads/run", "uploads/other"].map(open);
    assert_eq!(run.service().unwrap().uploads(), Ok(vec![]));
    for (store, name) in [(&run, "step/a b"), (&run, "step/c"), (&other, "d")] {
        // As after a crash of its writer.
        std::mem::forget(store.create(name, 100 << 20).unwrap());
    }
    let uploads = run.service().unwrap().uploads().unwrap();
    assert_eq!(uploads.iter().map(|upload| &*upload.name).collect::<Vec<_>>(), ["step/a b", "step/c"]);
    for _ in 0..2 {
        run.service().unwrap().abort_upload(&uploads[0]).unwrap();
        assert_eq!(run.service().unwrap().uploads().unwrap(), uploads[1..]);
    }
    assert_eq!(other.service().unwrap().uploads().unwrap().len(), 1);
    SystemTime::now().duration_since(uploads[0].begun).unwrap_or_default()
}
