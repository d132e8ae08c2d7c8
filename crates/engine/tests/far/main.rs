//! Saves and loads over object storage while it fails: each request of them meets each fault.

mod campaign;
mod checkpoint;
mod proxy;
mod sweep;

use shardfast_store::servers::Server;

#[test]
fn each_request_of_a_save_meets_each_fault() {
    Server::with("minio", "each_request_of_a_save_meets_each_fault", campaign::saves);
}

#[test]
fn each_request_of_a_load_meets_each_fault() {
    Server::with("minio", "each_request_of_a_load_meets_each_fault", campaign::loads);
}

#[test]
fn debris_is_swept() {
    Server::with("versitygw", "debris_is_swept", sweep::debris);
}
