//! Saves and loads over object storage while it fails: each request of them meets each fault, and the server is killed.

mod away;
mod campaign;
mod checkpoint;
mod crashes;
mod kept;
mod keys;
mod late;
mod proxy;
mod reports;
mod simulated;
mod space;
mod sweep;
mod within;

use shardfast_store::testing::servers::Server;

use campaign::{RUNS_AT_A_TIME, each_fault, loads, saves};
use crashes::deaths;

#[test]
fn each_request_of_a_save_meets_each_fault() {
    let check = |server: &Server| saves(server, each_fault, RUNS_AT_A_TIME);
    Server::any("each_request_of_a_save_meets_each_fault", check);
}

#[test]
fn each_request_of_a_load_meets_each_fault() {
    let check = |server: &Server| loads(server, each_fault, RUNS_AT_A_TIME);
    Server::any("each_request_of_a_load_meets_each_fault", check);
}

#[test]
fn a_save_outlives_the_death_of_the_server() {
    Server::any("a_save_outlives_the_death_of_the_server", |server| saves(server, deaths, 1));
}

#[test]
fn a_load_outlives_the_death_of_the_server() {
    Server::any("a_load_outlives_the_death_of_the_server", |server| loads(server, deaths, 1));
}

#[test]
fn keys_that_expire_are_renewed_in_the_middle() {
    let test = "keys_that_expire_are_renewed_in_the_middle";
    Server::prepared("versitygw", test, keys::prepare, keys::saves_and_loads);
}

#[test]
fn keys_that_cannot_be_renewed_end_a_save_at_once() {
    Server::any("keys_that_cannot_be_renewed_end_a_save_at_once", keys::of_the_environment);
}

#[test]
fn a_server_without_space_ends_a_save_at_once() {
    Server::any_with_space(space::SPACE_MIB, "a_server_without_space_ends_a_save_at_once", space::is_used_up);
}

#[test]
fn late_reads_are_asked_for_again() {
    Server::any("late_reads_are_asked_for_again", late::reads_are_asked_for_again);
}

#[test]
fn debris_is_swept() {
    Server::with("versitygw", "debris_is_swept", sweep::debris);
}

#[test]
fn a_report_lists_each_failure() {
    Server::any("a_report_lists_each_failure", reports::list_each_failure);
}

#[test]
fn checkpoints_are_verified_by_what_the_storage_keeps() {
    let test = "checkpoints_are_verified_by_what_the_storage_keeps";
    Server::any(test, kept::verifies);
}

#[test]
fn one_service_copies_by_itself() {
    Server::any("one_service_copies_by_itself", within::one_service_copies_by_itself);
}

#[test]
fn storage_that_does_not_answer_ends_each_call() {
    let given = Server::given("url=unknown bucket=b key=k secret=s");
    given.again("storage_that_does_not_answer_ends_each_call", away::ends_each_call);
}

#[test]
fn storage_that_stops_answering_ends_what_it_interrupts() {
    Server::any("storage_that_stops_answering_ends_what_it_interrupts", away::ends_what_it_interrupts);
}
