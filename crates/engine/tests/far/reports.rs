//! The report of a save lists what failed on the way, at every stage.

use shardfast_store::testing::servers::Server;

use crate::campaign::{DEADLINE, PATIENT, Place};
use crate::checkpoint::{begin, save, store};
use crate::proxy::{Fault, Harm};

/// Returns whether nothing waits for the answer: a look for an index or `COMMIT` just written, or for an index that
/// no attempt of ours wrote, and the removal of what the race of two requests left.
fn is_of_no_matter(what: &str) -> bool {
    let looks = what.starts_with("GET ") || what.starts_with("HEAD ");
    what.ends_with("?delete") || looks && (what.contains("index.json") || what.contains("COMMIT"))
}

pub(crate) fn list_each_failure(server: &Server) {
    let requests = Place::new(server, "report/none").requests_as(&Place::new(server, "report/other"), save);
    for (i, seen) in requests.iter().enumerate() {
        let what = &seen.request.what;
        if is_of_no_matter(what) {
            continue;
        }
        let place = Place::new(server, &format!("report/{i}"));
        let proxy = place.proxy(Some(Harm { at: seen.request.clone(), fault: Fault::Answered(503), stays: false }));
        let pending = begin(&store(&place.through(&proxy), PATIENT), DEADLINE);
        pending.committed(None).unwrap();
        let failures = pending.report().failures;
        let named =
            |line: &&String| line.contains("503 Service Unavailable: SlowDown") && line.contains("; try 1, again");
        assert_eq!(failures.iter().filter(named).count(), 1, "{what}: {failures:?}");
        if what.contains("partNumber=2") {
            assert!(failures[0].contains("write s3://") && failures[0].contains(": part 2: "), "{failures:?}");
        }
    }
}
