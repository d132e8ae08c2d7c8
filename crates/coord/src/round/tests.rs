use super::*;

const WORLD: u32 = 5;
const LONG: Duration = Duration::from_secs(60);

/// A seat is the rank that waits on it.
type Told = Vec<(u32, Reply)>;

fn rounds() -> Rounds<u32> {
    Rounds::new(WORLD)
}

fn bytes(rank: u32) -> Vec<u8> {
    vec![rank as u8; rank as usize]
}

fn come(rounds: &mut Rounds<u32>, rank: u32, topic: &str) -> Told {
    rounds.contribute(rank, topic, Ok(bytes(rank)), rank, Duration::ZERO, LONG)
}

fn all(value: impl Fn(u32) -> Vec<u8>) -> Vec<Vec<u8>> {
    (0..WORLD).map(value).collect()
}

fn error(reply: &Reply) -> &Error {
    match reply {
        Reply::Answer(Err(error)) => error,
        reply => panic!("expected an error, found {reply:?}"),
    }
}

/// All ranks in `told` have the same error, and those in it are exactly `ranks`.
fn same_error(told: &Told, mut ranks: Vec<u32>) -> Error {
    let mut found: Vec<u32> = told.iter().map(|(rank, _)| *rank).collect();
    found.sort_unstable();
    ranks.sort_unstable();
    assert_eq!(found, ranks);
    let first = error(&told[0].1);
    assert!(told.iter().all(|(_, reply)| error(reply) == first));
    first.clone()
}

fn orders(ranks: Vec<u32>) -> Vec<Vec<u32>> {
    if ranks.is_empty() {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for index in 0..ranks.len() {
        let mut rest = ranks.clone();
        let first = rest.remove(index);
        found.extend(orders(rest).into_iter().map(|rest| [vec![first], rest].concat()));
    }
    found
}

fn every_order() -> Vec<Vec<u32>> {
    orders((0..WORLD).collect())
}

#[test]
fn every_order_of_arrival_gives_one_decision_and_everyone_its_own_answer() {
    for order in every_order() {
        let mut rounds = rounds();
        let (last, before) = order.split_last().unwrap();
        for &rank in before {
            assert_eq!(come(&mut rounds, rank, "plan"), vec![], "{order:?}");
        }
        assert_eq!(come(&mut rounds, *last, "plan"), vec![(0, Reply::Decide(all(bytes)))], "{order:?}");
        let (own, told) = rounds.decided("plan", Ok(all(|rank| vec![9, rank as u8])));
        assert_eq!(own, Ok(vec![9, 0]));
        let expected: Told = (1..WORLD).map(|rank| (rank, Reply::Answer(Ok(vec![9, rank as u8])))).collect();
        assert_eq!(told, expected);
        assert!(rounds.open.is_empty() && rounds.owed.is_empty());
    }
}

#[test]
fn every_order_of_arrival_lists_every_failure_once_all_have_come() {
    let failure = |rank| Failure { rank, reason: format!("disk {rank} is full") };
    let expected = Error::Failed { topic: "plan".into(), failures: vec![failure(1), failure(3)] };
    for order in every_order() {
        let mut rounds = rounds();
        let mut told = Vec::new();
        for &rank in &order {
            assert_eq!(told, vec![], "{order:?}");
            let part = if [1, 3].contains(&rank) { Err(failure(rank).reason) } else { Ok(Vec::new()) };
            told = rounds.contribute(rank, "plan", part, rank, Duration::ZERO, LONG);
        }
        assert_eq!(same_error(&told, order), expected);
        assert!(rounds.open.is_empty() && rounds.owed.is_empty());
    }
}

#[test]
fn a_round_of_some_ranks_only_expires_and_late_ranks_get_the_same_error() {
    for present in 1..(1_u32 << WORLD) - 1 {
        let (here, late): (Vec<u32>, Vec<u32>) = (0..WORLD).partition(|rank| present & (1 << rank) != 0);
        let mut rounds = rounds();
        for &rank in &here {
            come(&mut rounds, rank, "plan");
        }
        assert_eq!(rounds.expires(), Some(LONG));
        assert_eq!(rounds.expire(LONG - Duration::from_nanos(1)), vec![]);
        let told = rounds.expire(LONG);
        let missing = Error::Missing { topic: "plan".into(), ranks: late.clone(), waited: LONG };
        assert_eq!(same_error(&told, here.clone()), missing);
        assert_eq!(rounds.expires(), None);

        // Who was there may try again before the others have come to the first try at all.
        let (again, told) = (here[0], come(&mut rounds, here[0], "plan"));
        assert_eq!(told, vec![]);
        for &rank in &late {
            assert_eq!(error(&come(&mut rounds, rank, "plan")[0].1), &missing);
        }
        assert!(rounds.owed.is_empty());
        let others = (0..WORLD).filter(|rank| *rank != again);
        let told: Vec<Told> = others.map(|rank| come(&mut rounds, rank, "plan")).collect();
        assert_eq!(told.last().unwrap(), &vec![(0, Reply::Decide(all(bytes)))]);
    }
}

#[test]
fn a_lost_rank_fails_what_is_not_complete_and_all_that_follows() {
    let lost = Error::Lost { rank: 2, cause: "killed".into() };
    for order in every_order() {
        for come_first in 0..WORLD as usize {
            let mut rounds = rounds();
            let (here, late) = order.split_at(come_first);
            for &rank in here {
                come(&mut rounds, rank, "plan");
            }
            let told = rounds.lose(2, "killed");
            if !here.is_empty() {
                assert_eq!(same_error(&told, here.to_vec()), lost);
            }
            // A second loss follows from the first as a rule: everybody goes on naming the first.
            assert_eq!(rounds.lose(4, "went along"), vec![]);
            for &rank in late {
                assert_eq!(error(&come(&mut rounds, rank, "plan")[0].1), &lost);
            }
            assert_eq!(error(&come(&mut rounds, 0, "another")[0].1), &lost);
            assert!(rounds.open.is_empty());
        }
    }
}

#[test]
fn a_complete_round_is_decided_whoever_is_lost_and_however_long_it_takes() {
    let mut rounds = rounds();
    for rank in 0..WORLD {
        come(&mut rounds, rank, "commit");
    }
    assert_eq!(rounds.lose(3, "killed"), vec![]);
    assert_eq!(rounds.expires(), None);
    assert_eq!(rounds.expire(LONG * 10), vec![]);
    let (own, told) = rounds.decided("commit", Ok(all(bytes)));
    assert_eq!(own, Ok(bytes(0)));
    assert_eq!(told.len(), WORLD as usize - 1);
    assert!(told.iter().all(|(rank, reply)| *reply == Reply::Answer(Ok(bytes(*rank)))));
}

#[test]
fn failures_that_were_told_come_before_what_kept_the_others_away() {
    let failed = |other: &str| {
        let failures = vec![Failure { rank: 1, reason: "disk full".into() }, Failure { rank: 2, reason: other.into() }];
        Error::Failed { topic: "plan".into(), failures }
    };
    let failing = || {
        let mut rounds = rounds();
        for rank in [0, 3, 4] {
            come(&mut rounds, rank, "plan");
        }
        rounds.contribute(1, "plan", Err("disk full".into()), 1, Duration::ZERO, LONG);
        rounds
    };
    let told = failing().expire(LONG);
    assert_eq!(same_error(&told, vec![0, 1, 3, 4]), failed("no word from it within 60s"));
    let told = failing().lose(2, "killed");
    assert_eq!(same_error(&told, vec![0, 1, 3, 4]), failed("it is gone: killed"));
}

#[test]
fn the_deadline_of_whoever_waits_shortest_counts() {
    let mut rounds = rounds();
    let (second, minute) = (Duration::from_secs(1), LONG);
    rounds.contribute(1, "plan", Ok(vec![]), 1, Duration::ZERO, minute);
    rounds.contribute(2, "plan", Ok(vec![]), 2, second * 3, second * 2);
    rounds.contribute(3, "other", Ok(vec![]), 3, Duration::ZERO, Duration::MAX);
    assert_eq!(rounds.expires(), Some(second * 5));
    let told = rounds.expire(second * 5);
    let missing = Error::Missing { topic: "plan".into(), ranks: vec![0, 3, 4], waited: second * 5 };
    assert_eq!(same_error(&told, vec![1, 2]), missing);
    assert_eq!(rounds.expires(), Some(Duration::MAX));
}

#[test]
fn a_second_call_is_refused_and_the_first_goes_on() {
    let mut rounds = rounds();
    for rank in 0..WORLD {
        come(&mut rounds, rank, "plan");
        let told = come(&mut rounds, rank, "plan");
        let message = format!(r#"rank {rank} contributes to "plan" twice; its first call still waits"#);
        assert_eq!(told, vec![(rank, Reply::Answer(Err(Error::Invalid(message))))]);
    }
    let (_, told) = rounds.decided("plan", Ok(all(bytes)));
    assert_eq!(told.len(), WORLD as usize - 1);
}

#[test]
fn topics_do_not_meet() {
    let mut rounds = rounds();
    for rank in 0..WORLD - 1 {
        come(&mut rounds, rank, "a");
        come(&mut rounds, WORLD - 1 - rank, "b");
    }
    assert_eq!(come(&mut rounds, 0, "b"), vec![(0, Reply::Decide(all(bytes)))]);
    let (_, told) = rounds.decided("b", Err("no".into()));
    let failed = Error::Failed { topic: "b".into(), failures: vec![Failure { rank: 0, reason: "no".into() }] };
    assert_eq!(same_error(&told, (1..WORLD).collect()), failed);
    assert_eq!(come(&mut rounds, WORLD - 1, "a"), vec![(0, Reply::Decide(all(bytes)))]);
}

#[test]
fn wrong_calls_and_wrong_decisions_are_named() {
    let mut rounds = rounds();
    let refused = |told: Told| error(&told[0].1).to_string();
    assert_eq!(refused(come(&mut rounds, WORLD, "plan")), "rank 5 is not below the world's size, 5");
    assert_eq!(refused(come(&mut rounds, 0, "")), "a topic is 1 to 4096 bytes long, found 0");
    assert_eq!(refused(come(&mut rounds, 0, &"x".repeat(5000))), "a topic is 1 to 4096 bytes long, found 5000");
    assert!(rounds.open.is_empty());
    assert!(rounds.decided("plan", Ok(vec![])).0.is_err());

    let mut oversized = vec![Vec::new(); 5];
    oversized[4] = vec![0; PAYLOAD_BYTES_MAX + 1];
    for (answers, reason) in [
        (vec![Vec::new(); 3], "the decision has 3 answers for 5 ranks"),
        (oversized, "the decision has an answer of 1073741825 bytes, the most is 1073741824"),
    ] {
        for rank in 0..WORLD {
            come(&mut rounds, rank, "plan");
        }
        let (own, told) = rounds.decided("plan", Ok(answers));
        let failures = vec![Failure { rank: 0, reason: reason.into() }];
        assert_eq!(own, Err(Error::Failed { topic: "plan".into(), failures }));
        assert_eq!(same_error(&told, (1..WORLD).collect()), own.unwrap_err());
    }
}

#[test]
fn what_is_kept_and_passed_on_is_bounded() {
    let mut rounds = rounds();
    for round in 0..OWED_MAX * 2 {
        come(&mut rounds, 0, &round.to_string());
        rounds.expire(LONG);
    }
    assert_eq!(rounds.owed.len(), OWED_MAX);
    assert!(matches!(come(&mut rounds, 1, &(OWED_MAX * 2 - 1).to_string())[..], [(1, Reply::Answer(Err(_)))]));
    assert_eq!(come(&mut rounds, 1, "0"), vec![]);

    let reason = bounded(Err("é".repeat(REASON_BYTES_MAX))).unwrap_err();
    assert_eq!(reason.len(), REASON_BYTES_MAX);
    let reason = bounded(Ok(vec![0; PAYLOAD_BYTES_MAX + 1])).unwrap_err();
    assert_eq!(reason, "its contribution has 1073741825 bytes, the most is 1073741824");
}
