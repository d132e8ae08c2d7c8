//! Tests the contract that every kind of coordinator must keep.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use shardfast_coord::{Coord, Error, Failure, PAYLOAD_BYTES_MAX, local, local_tree, solo};

use crate::{HOST, LONG, connected, each, everyone, promptly, star, tree};

/// Runs every check, for ranks that are threads and for ranks that are connected, all below rank 0 and below each
/// other.
macro_rules! contract {
    ($($check:ident($world:expr);)*) => {
        mod threads {
            $(#[test] fn $check() { super::$check(super::local($world)); })*
        }
        mod tree_of_threads {
            $(#[test] fn $check() { super::$check(super::local_tree(super::tree($world))); })*
        }
        mod connections {
            $(#[test] fn $check() { super::$check(super::connected(super::star($world))); })*
        }
        mod tree_of_connections {
            $(#[test] fn $check() { super::$check(super::connected(super::tree($world))); })*
        }
    };
}

contract! {
    a_meeting_has_one_name_and_no_other_has_it(3);
    everyone_gets_its_own_answer(8);
    many_threads_agree_on_many_topics_at_once(4);
    a_thousand_rounds_on_one_topic(4);
    failures_are_told_to_everyone(4);
    a_failed_decision_is_told_to_everyone(4);
    a_panic_in_the_decision_is_told_to_everyone(3);
    a_rank_that_stays_away_is_named_at_the_deadline(4);
    a_second_call_is_refused_while_the_first_waits(2);
    leaving_after_the_last_answer_disturbs_nobody(4);
    whoever_waits_for_a_rank_that_left_is_told_at_once(4);
    rank_0_may_leave_before_the_others_have_read_their_answers(4);
    a_decision_may_agree_on_something_else(3);
    large_payloads_pass(2);
    wrong_topics_are_refused(2);
}

#[test]
fn one_rank_agrees_with_itself() {
    let solo = solo();
    assert_eq!((solo.rank(), solo.world()), (0, 1));
    let decide = &mut |parts: Vec<Vec<u8>>| Ok(vec![[&parts[0][..], b"!"].concat()]);
    assert_eq!(solo.agree("plan", Ok(b"yes".to_vec()), decide, Duration::ZERO), Ok(b"yes!".to_vec()));
    let failed = solo.agree("plan", Err("disk full".into()), decide, LONG).unwrap_err();
    assert_eq!(failed.to_string(), r#"agreement on "plan" failed: rank 0: disk full"#);
}

fn a_meeting_has_one_name_and_no_other_has_it(ranks: Vec<Arc<dyn Coord>>) {
    assert!(ranks.iter().all(|rank| rank.meeting() == ranks[0].meeting()));
    assert!(ranks.iter().all(|rank| rank.host() == HOST));
    assert!(
        [local(2).remove(0).meeting(), connected(star(2))[1].meeting(), solo().meeting()]
            .iter()
            .all(|other| *other != ranks[0].meeting())
    );
}

fn everyone_gets_its_own_answer(ranks: Vec<Arc<dyn Coord>>) {
    let world = ranks.len() as u32;
    let decisions = AtomicUsize::new(0);
    let answers = each(&ranks, |coord| {
        assert_eq!(coord.world(), world);
        let mut decide = |parts: Vec<Vec<u8>>| {
            assert_eq!(coord.rank(), 0);
            decisions.fetch_add(1, Ordering::SeqCst);
            Ok(parts.into_iter().map(|part| [&part[..], b" heard"].concat()).collect())
        };
        let part = format!("rank {}", coord.rank()).into_bytes();
        coord.agree("plan", Ok(part), &mut decide, LONG).unwrap()
    });
    let expected: Vec<_> = (0..world).map(|rank| format!("rank {rank} heard").into_bytes()).collect();
    assert_eq!(answers, expected);
    assert_eq!(decisions.into_inner(), 1);
}

fn many_threads_agree_on_many_topics_at_once(ranks: Vec<Arc<dyn Coord>>) {
    each(&ranks, |coord| {
        thread::scope(|threads| {
            // Every rank starts elsewhere, so that no two come to the topics in one order.
            for thread in (0..8).map(|thread| (thread + coord.rank()) % 8) {
                threads.spawn(move || {
                    for round in 0..20 {
                        let answer = everyone(coord, &format!("topic {thread}.{round}"), LONG);
                        assert_eq!(answer, Ok(vec![0, 1, 2, 3]));
                    }
                });
            }
        });
    });
}

fn a_thousand_rounds_on_one_topic(ranks: Vec<Arc<dyn Coord>>) {
    each(&ranks, |coord| {
        for round in 0..1000_u32 {
            let mut decide = |parts: Vec<Vec<u8>>| Ok(parts);
            let answer = coord.agree("barrier", Ok(round.to_le_bytes().to_vec()), &mut decide, LONG);
            assert_eq!(answer, Ok(round.to_le_bytes().to_vec()));
        }
    });
}

fn failures_are_told_to_everyone(ranks: Vec<Arc<dyn Coord>>) {
    let failure = |rank| Failure { rank, reason: format!("disk {rank} is full") };
    let errors = each(&ranks, |coord| {
        let part = if coord.rank() % 2 == 1 { Err(failure(coord.rank()).reason) } else { Ok(vec![]) };
        coord.agree("write", part, &mut |_| panic!("nothing is to be decided"), LONG).unwrap_err()
    });
    let failed = Error::Failed { topic: "write".into(), failures: vec![failure(1), failure(3)], more: 0 };
    assert_eq!(errors, vec![failed; 4]);
    // The coordinator goes on.
    assert_eq!(each(&ranks, |coord| everyone(coord, "write", LONG)), vec![Ok(vec![0, 1, 2, 3]); 4]);
}

fn a_failed_decision_is_told_to_everyone(ranks: Vec<Arc<dyn Coord>>) {
    for (decision, reason) in [
        (Err("two ranks hold different shapes".to_owned()), "two ranks hold different shapes"),
        (Ok(vec![Vec::new(); 3]), "the decision has 3 answers for 4 ranks"),
    ] {
        let decide = |_| decision.clone();
        let errors = each(&ranks, |coord| coord.agree("plan", Ok(vec![]), &mut { decide }, LONG).unwrap_err());
        let failures = vec![Failure { rank: 0, reason: reason.into() }];
        assert_eq!(errors, vec![Error::Failed { topic: "plan".into(), failures, more: 0 }; 4]);
    }
}

fn a_panic_in_the_decision_is_told_to_everyone(ranks: Vec<Arc<dyn Coord>>) {
    let results = each(&ranks, |coord| {
        let agree = || coord.agree("plan", Ok(vec![]), &mut |_| panic!("of the test"), LONG);
        panic::catch_unwind(AssertUnwindSafe(agree)).map_err(|_| "panicked")
    });
    let failures = vec![Failure { rank: 0, reason: "the decision panicked".into() }];
    let failed = Error::Failed { topic: "plan".into(), failures, more: 0 };
    assert_eq!(results, vec![Err("panicked"), Ok(Err(failed.clone())), Ok(Err(failed))]);
}

fn a_rank_that_stays_away_is_named_at_the_deadline(ranks: Vec<Arc<dyn Coord>>) {
    // On a busy machine the others take their time to come.
    let deadline = Duration::from_secs(1);
    for away in [2, 0] {
        let topic = format!("without {away}");
        let missing = |error: &Error| matches!(error, Error::Missing { ranks, .. } if *ranks == [away]);
        let mut here = ranks.clone();
        let late = here.remove(away as usize);
        let errors = promptly(|| each(&here, |coord| everyone(coord, &topic, deadline).unwrap_err()));
        assert!(missing(&errors[0]), "{}", errors[0]);
        assert_eq!(errors, vec![errors[0].clone(); 3]);
        // It comes too late and gets the same error, without waiting for other ranks.
        assert_eq!(promptly(|| everyone(&*late, &topic, LONG)), Err(errors[0].clone()));
    }
    let together = each(&ranks, |coord| everyone(coord, "without 2", LONG));
    assert_eq!(together, vec![Ok(vec![0, 1, 2, 3]); 4]);
}

fn a_second_call_is_refused_while_the_first_waits(ranks: Vec<Arc<dyn Coord>>) {
    let member = &ranks[1];
    thread::scope(|threads| {
        let calls = [0, 1].map(|_| threads.spawn(|| everyone(&**member, "plan", LONG)));
        // Whichever came second is refused at once; the other one waits for rank 0.
        let refused = || calls.iter().filter(|call| call.is_finished()).count();
        promptly(|| {
            while refused() == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(everyone(&*ranks[0], "plan", LONG), Ok(vec![0, 1]));
        let answers = calls.map(|call| call.join().unwrap());
        let message = r#"rank 1 contributes to "plan" twice; its first call still waits"#.to_owned();
        assert!(answers.contains(&Ok(vec![0, 1])), "{answers:?}");
        assert!(answers.contains(&Err(Error::Invalid(message))), "{answers:?}");
    });
}

fn leaving_after_the_last_answer_disturbs_nobody(ranks: Vec<Arc<dyn Coord>>) {
    promptly(|| {
        thread::scope(|threads| {
            for coord in ranks {
                threads.spawn(move || {
                    for round in 0..20 {
                        assert_eq!(everyone(&*coord, &round.to_string(), LONG), Ok(vec![0, 1, 2, 3]));
                    }
                    drop(coord);
                });
            }
        });
    });
}

fn whoever_waits_for_a_rank_that_left_is_told_at_once(mut ranks: Vec<Arc<dyn Coord>>) {
    each(&ranks, |coord| everyone(coord, "last of rank 2", LONG).unwrap());
    let leaving = ranks.remove(2);
    let errors = promptly(|| {
        thread::scope(|threads| {
            let waiting = threads.spawn(|| each(&ranks, |coord| everyone(coord, "without rank 2", LONG).unwrap_err()));
            thread::sleep(Duration::from_millis(100));
            drop(leaving);
            waiting.join().unwrap()
        })
    });
    let lost = Error::Lost { rank: 2, cause: "it closed its coordinator".into() };
    assert_eq!(errors, vec![lost.clone(); 3]);
    let later = promptly(|| each(&ranks, |coord| everyone(coord, "later", LONG).unwrap_err()));
    assert_eq!(later, vec![lost; 3]);
}

fn rank_0_may_leave_before_the_others_have_read_their_answers(mut ranks: Vec<Arc<dyn Coord>>) {
    let root = ranks.remove(0);
    let answer = vec![7_u8; 4 << 20];
    let last = promptly(|| {
        thread::scope(|threads| {
            let waiting = threads.spawn(|| each(&ranks, |coord| everyone(coord, "last", LONG)));
            let decide = &mut |parts: Vec<Vec<u8>>| Ok(vec![answer.clone(); parts.len()]);
            root.agree("last", Ok(vec![]), decide, LONG).unwrap();
            drop(root);
            waiting.join().unwrap()
        })
    });
    assert!(last.iter().all(|last| last.as_ref() == Ok(&answer)));
    let later = promptly(|| each(&ranks, |coord| everyone(coord, "later", LONG).unwrap_err()));
    assert_eq!(later, vec![Error::Lost { rank: 0, cause: "it closed its coordinator".into() }; 3]);
}

fn a_decision_may_agree_on_something_else(ranks: Vec<Arc<dyn Coord>>) {
    let answers = each(&ranks, |coord| {
        thread::scope(|threads| {
            if coord.rank() > 0 {
                threads.spawn(|| everyone(coord, "inner", LONG).unwrap());
            }
            let mut decide = |_| Ok(vec![everyone(coord, "inner", LONG).unwrap(); 3]);
            coord.agree("outer", Ok(vec![]), &mut decide, LONG)
        })
    });
    assert_eq!(answers, vec![Ok(vec![0, 1, 2]); 3]);
}

fn large_payloads_pass(ranks: Vec<Arc<dyn Coord>>) {
    let bytes = 64 << 20;
    let answers = each(&ranks, |coord| {
        let mut decide = |mut parts: Vec<Vec<u8>>| {
            parts.reverse();
            Ok(parts)
        };
        coord.agree("large", Ok(vec![coord.rank() as u8 + 1; bytes]), &mut decide, LONG).unwrap()
    });
    assert!(answers[0] == vec![2; bytes] && answers[1] == vec![1; bytes]);

    let too_large = each(&ranks, |coord| {
        // Beyond what a message may have around a payload, too.
        let bytes = if coord.rank() == 1 { PAYLOAD_BYTES_MAX + (2 << 20) } else { 0 };
        coord.agree("too large", Ok(vec![0; bytes]), &mut Ok, LONG).unwrap_err()
    });
    let reason = "its contribution has 1075838976 bytes, the most is 1073741824".to_owned();
    let failures = vec![Failure { rank: 1, reason }];
    assert_eq!(too_large, vec![Error::Failed { topic: "too large".into(), failures, more: 0 }; 2]);
}

fn wrong_topics_are_refused(ranks: Vec<Arc<dyn Coord>>) {
    for coord in &ranks {
        for topic in ["", &"x".repeat(4097)] {
            let error = promptly(|| everyone(&**coord, topic, LONG).unwrap_err());
            assert_eq!(error.to_string(), format!("a topic is 1 to 4096 bytes long, found {}", topic.len()));
        }
    }
}
