//! Who is let in, and who is refused in which words.

use std::net::TcpListener;
use std::time::Duration;

use shardfast_coord::{Error, grpc};

use crate::{HOST, LONG, PROMPT, TOKEN, each, everyone, promptly};

fn refusal(address: &str, rank: u32, world: u32, token: &str) -> String {
    match promptly(|| grpc::join(address, HOST, rank, world, token, LONG)).err().expect("must be refused") {
        Error::Invalid(message) => message.replace(address, "ADDRESS"),
        error => panic!("expected a refusal, found {error}"),
    }
}

#[test]
fn strangers_and_doubles_are_refused_by_name() {
    let (root, address) = grpc::serve(HOST, 3, TOKEN).unwrap();
    assert_eq!(
        refusal(&address, 1, 3, "another job's".replace(' ', "-").as_str()),
        "rank 0 at ADDRESS refuses rank 1: the token is not this job's"
    );
    assert_eq!(
        refusal(&address, 1, 4, TOKEN),
        "rank 0 at ADDRESS refuses rank 1: it belongs to a world of 4 ranks, rank 0 to one of 3"
    );
    for rank in [0, 3] {
        let message = format!("rank 0 at ADDRESS refuses rank {rank}: its rank is {rank}, expected one from 1 below 3");
        assert_eq!(refusal(&address, rank, 3, TOKEN), message);
    }

    let first = grpc::join(&address, HOST, 1, 3, TOKEN, LONG).unwrap();
    let double = refusal(&address, 1, 3, TOKEN);
    assert!(double.starts_with("rank 0 at ADDRESS refuses rank 1: rank 1, joined from 127.0.0.1:"), "{double}");
    assert!(double.ends_with(", is there already"), "{double}");

    // None of them disturbed those that belong here.
    let ranks = [root, first, grpc::join(&address, HOST, 2, 3, TOKEN, LONG).unwrap()];
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1, 2]); 3]);

    let [root, first, _second] = ranks;
    drop(first);
    let gone = refusal(&address, 1, 3, TOKEN);
    assert!(gone.ends_with(", has come and gone; what is lost does not come back"), "{gone}");
    drop(root);
}

#[test]
fn ranks_that_never_joined_are_missing_at_the_deadline() {
    let (root, address) = grpc::serve(HOST, 4, TOKEN).unwrap();
    let ranks = [root, grpc::join(&address, HOST, 2, 4, TOKEN, LONG).unwrap()];
    let errors = promptly(|| each(&ranks, |coord| everyone(coord, "plan", Duration::from_millis(200)).unwrap_err()));
    assert!(matches!(&errors[0], Error::Missing { ranks, .. } if *ranks == [1, 3]), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn addresses_name_the_host_that_was_asked_for() {
    for (host, prefix) in
        [("localhost", "localhost:"), ("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:"), ("[::1]", "[::1]:")]
    {
        let (root, address) = match grpc::serve(host, 2, TOKEN) {
            Ok(served) => served,
            // Not every machine speaks IPv6.
            Err(Error::Unavailable(_)) if host.contains(':') => continue,
            Err(error) => panic!("{error}"),
        };
        assert!(address.starts_with(prefix), "{address}");
        assert_eq!(root.host(), host.trim_matches(['[', ']']));
        let ranks = [root, grpc::join(&address, HOST, 1, 2, TOKEN, LONG).unwrap()];
        assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1]); 2]);
    }
}

#[test]
fn what_cannot_be_reached_or_cannot_be_meant_is_told_in_time() {
    let unavailable = |error: Error| match error {
        Error::Unavailable(message) => message,
        error => panic!("expected it to be unavailable, found {error}"),
    };
    let invalid = |error: Error| matches!(error, Error::Invalid(_));
    let wait = Duration::from_millis(300);

    // Listens and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let message = unavailable(promptly(|| grpc::join(&address, HOST, 1, 2, TOKEN, wait)).err().unwrap());
    assert!(message.starts_with(&format!("rank 1 cannot reach rank 0 at {address} within 300ms: ")), "{message}");
    drop(silent);
    let message = unavailable(promptly(|| grpc::join(&address, HOST, 1, 2, TOKEN, wait)).err().unwrap());
    assert!(message.contains("refused"), "{message}");

    assert!(invalid(grpc::join("no address", HOST, 1, 2, TOKEN, wait).err().unwrap()));
    assert!(invalid(grpc::serve(HOST, 0, TOKEN).err().unwrap()));
    for token in ["", "two words", "newline\n", "\u{e9}"] {
        assert!(invalid(grpc::serve(HOST, 2, token).err().unwrap()));
        assert!(invalid(grpc::join(&address, HOST, 1, 2, token, wait).err().unwrap()));
    }
    let message = unavailable(grpc::serve("192.0.2.1", 2, TOKEN).err().unwrap());
    assert!(message.starts_with(r#"cannot listen on "192.0.2.1": "#), "{message}");
}

#[test]
fn a_root_may_be_opened_and_dropped_by_a_program_that_has_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let (root, address) = grpc::serve(HOST, 2, TOKEN).unwrap();
        let member = grpc::join(&address, HOST, 1, 2, TOKEN, PROMPT).unwrap();
        drop(member);
        drop(root);
    });
}
