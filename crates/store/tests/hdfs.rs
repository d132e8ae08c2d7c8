//! Tests the store on a real HDFS: a NameNode and three DataNodes.

use shardfast_store::open;
use shardfast_store::testing::conformance;

#[test]
fn contract() {
    let base = std::env::var("SHARDFAST_TEST_HDFS").unwrap();
    conformance::check(|name| open(&format!("{base}/c/{name}")).unwrap());
    conformance::check_reports(&format!("{base}/reports"));
}
