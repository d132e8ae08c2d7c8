use super::*;

/// A generator of numbers for one seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number from 0 to 1.
    pub(crate) fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number around that one, by up to a quarter.
    pub(crate) fn about(&mut self, number: f64) -> f64 {
        number * (0.75 + 0.5 * self.roll())
    }
}

/// Times of one rank in milliseconds: until staged, and in each of the later phases.
#[derive(Clone, Copy)]
struct Rank {
    late: f64,
    copy: f64,
    write: f64,
    values: f64,
    bytes: u64,
    longest: f64,
}

fn healthy(dice: &mut Dice, world: usize) -> Vec<Rank> {
    let mut rank = || Rank {
        late: dice.about(2.0),
        copy: dice.about(80.0),
        write: dice.about(400.0),
        values: dice.about(20.0),
        bytes: (dice.about(1e9)) as u64,
        longest: dice.about(15.0),
    };
    (0..world).map(|_| rank()).collect()
}

/// The save of these ranks, which meet when they have planned and when they commit, on two ranks a machine.
fn save(dice: &mut Dice, mut ranks: Vec<Rank>, tail: f64) -> Collected {
    let met = ranks.iter().map(|rank| rank.late).fold(0.0, f64::max) + dice.about(3.0);
    let written = |rank: &Rank| rank.late + rank.copy + rank.write;
    let durable = |rank: &Rank| written(rank).max(met) + rank.values;
    let committed = ranks.iter().map(durable).fold(0.0, f64::max) + dice.about(30.0) + tail;
    let digest = |(number, rank): (usize, &mut Rank)| {
        let us = |ms: f64| (ms * 1e3) as u32;
        let own = |at: f64| us(at - rank.late);
        let mut phases_us = [0; Phase::ALL.len()];
        phases_us[Phase::Planned as usize] = us(0.5);
        phases_us[Phase::Staged as usize] = us(rank.copy);
        phases_us[Phase::Written as usize] = own(written(rank));
        phases_us[Phase::Agreed as usize] = own(written(rank).max(met));
        phases_us[Phase::Durable as usize] = own(durable(rank));
        phases_us[Phase::Committed as usize] = own(committed);
        let mut digest = Digest {
            place: Place {
                machine: format!("node-{}", number / 2),
                local_rank: None,
                coordinates: vec![("pp".into(), number as u16 / 4), ("tp".into(), number as u16 % 4)],
            },
            phases_us,
            ended_us: (committed * 1e3) as u64,
            slowest: "model/00003-000-aa.safetensors".to_owned(),
            ..Digest::default()
        };
        digest.sums[Class::LargeWrites as usize] = Sum {
            count: 60,
            bytes: rank.bytes,
            busy_us: (rank.write * 1e3) as u64,
            longest_us: us(rank.longest),
            ..Sum::default()
        };
        Some(digest)
    };
    let ranks = ranks.iter_mut().enumerate().map(digest).collect();
    Collected::new(Verb::Save, 1, 0, ranks)
}

fn first(collected: &Collected) -> (String, &'static str, &'static str) {
    let verdict = verdicts(collected).into_iter().next().expect("a verdict");
    (verdict.subject, verdict.phase, verdict.cause)
}

#[test]
fn healthy_saves_give_no_verdict() {
    let found = (0..200).flat_map(|seed| {
        let mut dice = Dice(seed);
        let ranks = healthy(&mut dice, 8);
        verdicts(&save(&mut dice, ranks, 0.0))
    });
    let found = found.collect::<Vec<_>>();
    assert!(found.len() <= 2, "{found:?}");
}

#[test]
fn one_slow_rank_is_found_in_each_phase_with_the_cause() {
    type Fault = fn(&mut Rank);
    let faults: [(&str, &str, Fault); 6] = [
        ("copy", "held_up", |rank| rank.copy += 1500.0),
        ("values", "held_up", |rank| rank.values += 300.0),
        ("agree", "called_late", |rank| rank.late += 1500.0),
        ("write", "more_data", |rank| (rank.write, rank.bytes) = (rank.write * 2.0 + 300.0, 2_000_000_000)),
        ("write", "storage", |rank| (rank.write, rank.longest) = (rank.write + 600.0, 600.0)),
        ("write", "storage", |rank| rank.write = rank.write * 3.0 + 300.0),
    ];
    for (phase, cause, fault) in faults {
        let found = (0..20).filter(|&seed| {
            let mut dice = Dice(1000 + seed);
            let mut ranks = healthy(&mut dice, 8);
            let slow = seed as usize % 8;
            fault(&mut ranks[slow]);
            first(&save(&mut dice, ranks, 0.0)) == (format!("rank {slow}"), phase, cause)
        });
        assert!(found.count() >= 19, "{phase} {cause}");
    }
}

#[test]
fn a_slow_machine_is_named_as_one() {
    let mut dice = Dice(7);
    let mut ranks = healthy(&mut dice, 8);
    ranks[4..6].iter_mut().for_each(|rank| rank.write *= 4.0);
    assert_eq!(first(&save(&mut dice, ranks, 0.0)).0, "machine node-2");
}

#[test]
fn slow_ranks_are_named_by_the_coordinate_that_they_share() {
    let found = (0..20).filter(|&seed| {
        let mut dice = Dice(2000 + seed);
        let mut ranks = healthy(&mut dice, 16);
        let tp = seed as usize % 4;
        ranks.iter_mut().skip(tp).step_by(4).for_each(|rank| rank.write = rank.write * 3.0 + 300.0);
        let verdict = verdicts(&save(&mut dice, ranks, 0.0)).remove(0);
        (verdict.subject, verdict.place, verdict.cause) == (format!("tp={tp}"), None, "storage")
    });
    assert!(found.count() >= 19);
}

#[test]
fn one_rank_is_named_with_its_place() {
    let found = (0..20).filter(|&seed| {
        let mut dice = Dice(3000 + seed);
        let mut ranks = healthy(&mut dice, 16);
        let slow = seed as usize % 16;
        ranks[slow].late += 1500.0;
        let verdict = verdicts(&save(&mut dice, ranks, 0.0)).remove(0);
        let place = format!("node-{}, pp={} tp={}", slow / 2, slow / 4, slow % 4);
        (verdict.subject, verdict.place) == (format!("rank {slow}"), Some(place))
    });
    assert!(found.count() >= 19);
}

#[test]
fn what_ranks_share_is_named_only_if_it_is_all_of_it() {
    let mut dice = Dice(5);
    let ranks = healthy(&mut dice, 16);
    let mut collected = save(&mut dice, ranks, 0.0);
    let named = |collected: &Collected, slow: &[usize]| subject(collected, slow);
    // Both ranks of a machine, which are all that have its number as a coordinate, too.
    for rank in [2, 3] {
        let place = &mut collected.ranks[rank].as_mut().unwrap().place;
        place.coordinates.push(("node".into(), 1));
    }
    assert_eq!(named(&collected, &[2, 3]), "machine node-1");
    assert_eq!(named(&collected, &[0, 1, 2, 3]), "pp=0");
    assert_eq!(named(&collected, &[0, 1, 2]), "ranks 0, 1, 2");
    assert_eq!(named(&collected, &[1, 5, 9, 13]), "tp=1");
    assert_eq!(named(&collected, &[1, 5, 9]), "ranks 1, 5, 9");
    assert_eq!(named(&collected, &[1, 5, 9, 12, 13]), "ranks 1, 5, 9, 12, 13");
    assert_eq!(named(&collected, &(0..16).collect::<Vec<_>>()), "all ranks");
    // One rank with a coordinate of its own is a rank.
    collected.ranks[7].as_mut().unwrap().place.coordinates[0].1 = 9;
    assert_eq!(named(&collected, &[7]), "rank 7");
    // Ranks that said nothing share nothing.
    collected.ranks[1] = None;
    collected.ranks[5] = None;
    assert_eq!(named(&collected, &[1, 5]), "ranks 1, 5");
}

#[test]
fn a_commit_that_takes_most_of_a_save_is_a_serial_tail() {
    let mut dice = Dice(8);
    let ranks = healthy(&mut dice, 8);
    let found = first(&save(&mut dice, ranks, 1500.0));
    assert_eq!(found, ("rank 0".to_owned(), "commit", "serial_tail"));
}

#[test]
fn many_small_objects_and_pauses_concern_all_ranks() {
    let mut dice = Dice(9);
    let ranks = healthy(&mut dice, 4);
    let mut collected = save(&mut dice, ranks, 0.0);
    for rank in collected.ranks.iter_mut().flatten() {
        let small = &mut rank.sums[Class::SmallWrites as usize];
        (small.count, small.bytes, small.busy_us) = (1536, 1536 * 11_000, 400_000);
    }
    let found = &verdicts(&collected)[0];
    assert_eq!((found.subject.as_str(), found.cause), ("all ranks", "small_objects"));
    assert!(found.text.starts_with("6144 operations of 11.0 KB took 400 ms"), "{}", found.text);
    // A large object is read or written in pieces; that they are many says nothing.
    let mut pieces = collected.clone();
    for rank in pieces.ranks.iter_mut().flatten() {
        rank.sums[Class::SmallWrites as usize].bytes = 1536 * 900_000;
    }
    assert!(verdicts(&pieces).iter().all(|found| found.cause != "small_objects"));
    for rank in collected.ranks.iter_mut().flatten() {
        (rank.failures, rank.paused_us) = (7, 450_000);
    }
    let found = &verdicts(&collected)[0];
    assert_eq!(found.cause, "retries");
    assert!(found.text.contains("28 failures"), "{}", found.text);
    for rank in collected.ranks.iter_mut().flatten() {
        rank.throttled = 6;
    }
    assert_eq!(verdicts(&collected)[0].cause, "throttled");
}

#[test]
fn a_process_that_did_not_run_is_found_where_it_stood_still() {
    let found = (0..20).filter(|&seed| {
        let mut dice = Dice(4000 + seed);
        let mut ranks = healthy(&mut dice, 8);
        let (slow, at): (usize, f64) = (seed as usize % 8, [90.0, 250.0, 1e9][seed as usize % 3]);
        ranks[slow].write += 300.0;
        (ranks[slow].longest, ranks[slow].copy) = (300.0, 80.0);
        let mut collected = save(&mut dice, ranks, 0.0);
        let said = collected.ranks[slow].as_mut().unwrap();
        let committed = f64::from(said.phases_us[Phase::Committed as usize]) / 1e3;
        said.held_up_us = [(at.min(committed - 151.0) * 1e3) as u32, 300_000];
        let phase = if at < 1e9 { "write" } else { "commit" };
        first(&collected) == (format!("rank {slow}"), phase, "held_up")
    });
    assert!(found.count() >= 19);
}

#[test]
fn a_copy_without_memory_is_told_if_the_program_waited_for_it() {
    let mut dice = Dice(11);
    let ranks = healthy(&mut dice, 8);
    let mut collected = save(&mut dice, ranks, 0.0);
    for said in collected.ranks.iter_mut().flatten() {
        said.awaited_us = 400_000;
    }
    assert_eq!(verdicts(&collected), []);
    for said in collected.ranks.iter_mut().flatten() {
        said.stalled_us = 350_000;
    }
    assert_eq!(first(&collected), ("all ranks".to_owned(), "copy", "staging_memory"));
}

#[test]
fn a_load_says_whether_its_threads_or_its_peers_were_slow() {
    let load = |worked_ms: [u32; 2]| {
        let digest = |rank: usize| {
            let mut phases_us = [0; Phase::ALL.len()];
            let phases = [Phase::Opened, Phase::Matched, Phase::Agreed, Phase::Read, Phase::Loaded];
            for (number, phase) in (1..).zip(phases) {
                phases_us[phase as usize] = number * 10_000;
            }
            let mut said = Digest { phases_us, ended_us: 3_050_000, worked_ms: [90, 0], ..Digest::default() };
            said.phases_us[Phase::Loaded as usize] = 3_050_000;
            if rank == 2 {
                said.phases_us[Phase::Read as usize] = 3_040_000;
                said.worked_ms = worked_ms;
            }
            Some(said)
        };
        Collected::new(Verb::Load, 1, 0, (0..4).map(digest).collect())
    };
    let found = |worked_ms| first(&load(worked_ms));
    assert_eq!(found([2_900, 0]), ("rank 2".to_owned(), "read", "processor"));
    assert_eq!(found([95, 2_800]), ("rank 2".to_owned(), "read", "peers"));
    assert_eq!(found([95, 0]), ("rank 2".to_owned(), "read", "held_up"));
}

#[test]
fn a_process_that_stands_still_is_found_in_each_phase_of_saves_and_loads() {
    for verb in [Verb::Save, Verb::Load] {
        for (at, (phase, from, to)) in phases_of(verb).iter().enumerate() {
            // The copy goes on beside the write, and begins with the plan.
            let is_beside = |other: &PhaseOf| *phase == "copy" && other.0 == "write";
            let digest = |rank: u32| {
                let mut said = Digest { ended_us: 500_000, ..Digest::default() };
                for (number, of) in (1..).zip(phases_of(verb)) {
                    // The others wait for it from the next meeting on: until then it is behind.
                    let is_late = number as usize > at && (rank == 5 || number as usize > at + 2 || is_beside(of));
                    said.phases_us[of.2 as usize] = number * 20_000 + if is_late { 300_000 } else { 0 };
                }
                if rank == 5 {
                    let began =
                        from.iter().find_map(|&phase| Some(said.phases_us[phase as usize]).filter(|&us| us > 0));
                    said.held_up_us = [said.phases_us[*to as usize].min(began.unwrap_or(0) + 2_000), 300_000];
                }
                Some(said)
            };
            let collected = Collected::new(verb, 1, 0, (0..8).map(digest).collect());
            let found = verdicts(&collected).into_iter().next().map(|one| (one.subject, one.phase, one.cause));
            assert_eq!(found, Some(("rank 5".to_owned(), *phase, "held_up")), "{verb:?}");
        }
    }
}

#[test]
fn objects_that_end_one_by_one_are_told_of_all_ranks() {
    let mut dice = Dice(12);
    let ranks = healthy(&mut dice, 8);
    let mut collected = save(&mut dice, ranks, 0.0);
    let set = |collected: &mut Collected, us: fn(u32) -> u32| {
        for (rank, said) in (0..).zip(collected.ranks.iter_mut().flatten()) {
            said.sums[Class::Names as usize].longest_us = us(rank * 5 % 8);
        }
    };
    set(&mut collected, |place| 100_000 * (place + 1));
    assert_eq!(first(&collected), ("all ranks".to_owned(), "write", "serial_tail"));
    set(&mut collected, |place| if place == 7 { 800_000 } else { 100_000 });
    assert_eq!(verdicts(&collected), []);
}

#[test]
fn text_is_in_the_units_that_fit() {
    assert_eq!((said_ms(1.26), said_ms(99.6), said_ms(11_240.0)), ("1.3 ms".into(), "100 ms".into(), "11.2 s".into()));
    assert_eq!(
        (said_bytes(999.0), said_bytes(11_264.0), said_bytes(2.1e8)),
        ("999 B".into(), "11.3 KB".into(), "210 MB".into())
    );
}

#[test]
fn no_object_with_a_right_checksum_ends_the_process() {
    let good =
        shardfast_format::Columns::decode("here", &crate::object::tests::collected(3).encode().unwrap()).unwrap();
    let names = ["said", "machine", "coordinates", "phases_us", "count", "bytes", "by_duration", "ended_us", "other"];
    let texts = ["", "[]", "{}", "[\"a\"]", "{\"7\": \"a\"}", "-1", "18446744073709551616", "\u{0}", "[4294967296]"];
    for note in good.notes.keys() {
        for text in texts {
            let mut wrong = good.clone();
            wrong.notes.insert(note.clone(), text.to_owned());
            let _ = Collected::decode("here", &wrong.encode());
        }
        let mut wrong = good.clone();
        wrong.notes.remove(note);
        let is_added = ["shardfast.waited_us", "shardfast.clocks_ms"].contains(&note.as_str());
        assert_eq!(Collected::decode("here", &wrong.encode()).is_ok(), is_added, "{note}");
    }
    for name in names {
        for (width, rows) in [(1, 0), (1, 3), (5, 3), (12, 3), (40, 3), (12, 4)] {
            let mut wrong = good.clone();
            wrong.add(name, width, &vec![u32::MAX; width * rows]).unwrap();
            let _ = Collected::decode("here", &wrong.encode()).map(|found| verdicts(&found));
            wrong.add(name, width, &vec![u64::MAX; width * rows]).unwrap();
            let _ = Collected::decode("here", &wrong.encode()).map(|found| verdicts(&found));
        }
    }
}

#[test]
fn a_call_that_reads_its_state_for_long_is_named_and_not_called_late() {
    let described = |slow: &[usize]| {
        let mut dice = Dice(11);
        let mut ranks = healthy(&mut dice, 4);
        slow.iter().for_each(|&rank| ranks[rank].late += 1500.0);
        let mut collected = save(&mut dice, ranks, 0.0);
        for (rank, said) in collected.ranks.iter_mut().flatten().enumerate() {
            // The call of the rank began with the others, and only then read the state.
            let shift = if slow.contains(&rank) { 1_500_000 } else { 1 };
            said.phases_us.iter_mut().filter(|us| **us > 0).for_each(|us| *us += shift);
            said.phases_us[Phase::Described as usize] = shift;
        }
        verdicts(&collected).into_iter().map(|found| (found.subject, found.phase, found.cause)).collect::<Vec<_>>()
    };
    assert_eq!(described(&[2]), [("rank 2".to_owned(), "describe", "state")]);
    assert_eq!(described(&[0, 1, 2, 3]), [("all ranks".to_owned(), "describe", "state")]);
}

#[test]
fn a_failure_is_told_of_the_rank_whose_it_is() {
    let mut dice = Dice(12);
    let ranks = healthy(&mut dice, 4);
    let mut collected = save(&mut dice, ranks, 0.0);
    let failures =
        ["rank 2: ValueError: b…m", "rank 2: ValueError: boom", "ValueError: boom", "rank 2: ValueError: bo"];
    for (said, failure) in collected.ranks.iter_mut().flatten().zip(failures) {
        said.failure = failure.to_owned();
    }
    let told = |collected: &Collected| {
        let found = verdicts(collected).into_iter().filter(|found| ["failed", "missing"].contains(&found.cause));
        found.map(|found| (found.subject, found.text)).collect::<Vec<_>>()
    };
    assert_eq!(told(&collected), [("rank 2".to_owned(), "it failed: ValueError: boom".to_owned())]);
    // It did not say so itself; and ranks that are none are not named.
    (collected.ranks[2], collected.missing) = (None, vec![2, 9]);
    let found = told(&collected);
    assert!(found.iter().any(|(subject, text)| subject == "rank 2" && text.contains("said nothing")), "{found:?}");
    assert_eq!(found.len(), 4, "{found:?}");
}
