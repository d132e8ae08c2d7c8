//! Real servers of object storage keep the contract.

use shardfast_store::servers::Server;
use shardfast_store::{conformance, open};

#[test]
fn minio() {
    Server::with("minio", "minio", |server| {
        conformance::check(|name| open(&server.s3(&format!("c/{}/{name}", std::process::id()))).unwrap())
    });
}

#[test]
fn moto() {
    Server::with("moto", "moto", |server| {
        conformance::check(|name| open(&server.s3(&format!("c/{}/{name}", std::process::id()))).unwrap())
    });
}
