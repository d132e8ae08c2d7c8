//! What must be true of every meeting, whatever went wrong in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardfast_coord::Error as Coord;
use shardfast_coord::node::{CLOSING, GRACE, SILENCE};
use shardfast_engine::staging::STAGING_BYTES_MIN;
use shardfast_engine::{Engine, Kind, Result, checkpoint};
use shardfast_tools::verify::Problem;
use shardfast_tools::verify_in;

use crate::meeting::{Blackout, DELAY_MAX, DETECTION_MAX, OneCall, Past};
use crate::promise::Judged;
use crate::scenario::{Save, Scenario, Weather};
use crate::storage::Storage;
use crate::truth::{Mischief, TOUCHED, UNREADABLE};

/// Of calls in real time that wait for no other rank.
const ALONE: Duration = Duration::from_secs(60);

/// All promises, over a meeting and the storage that it left. Gives the saves that were published.
///
/// # Errors
/// The first promise that was broken.
pub(crate) fn judge(scenario: &Scenario, past: &Past, storage: &Storage) -> std::result::Result<Vec<usize>, String> {
    let engine = Engine::new(shardfast_coord::solo(), STAGING_BYTES_MIN).map_err(|error| error.to_string())?;
    let mut published = Vec::new();
    let mut places: Vec<&str> = scenario.saves.iter().map(|save| save.place.as_str()).collect();
    places.sort_unstable();
    places.dedup();
    for place in places {
        published.extend(published_at(&engine, storage, place, &scenario.saves)?);
    }
    for (save, spec) in scenario.saves.iter().enumerate() {
        one_outcome(past, save, &published)?;
        let is_wrong = spec.mischief.is_some() && published.contains(&save);
        hold!(!is_wrong, "save {save} is committed, with {:?}", spec.mischief);
    }
    for blackout in &past.blackouts {
        survives(scenario, &engine, blackout)?;
    }
    for (&save, left) in &past.promised {
        let kept = published_at(&engine, left, &scenario.saves[save].place, &scenario.saves)?;
        hold!(kept == Some(save), "save {save} was said to be committed before a loss of power could not undo it");
    }
    for call in &past.calls {
        in_time(scenario, past, call)?;
        despite_silence(scenario, past, call)?;
        names_whom_it_may(scenario, past, call)?;
    }
    one_end_of_each_round(scenario, past)?;
    complete_in_time(scenario, past)?;
    if matches!(scenario.weather, Weather::Calm | Weather::Mischief) {
        for save in 0..scenario.saves.len() {
            as_expected(scenario, past, save)?;
        }
    }
    if scenario.weather == Weather::Absent {
        find_together(scenario, past)?;
    }
    Ok(published)
}

/// Ranks of which one has left out the first save find together: at the next save if the others had given the first one
/// up by then, else at the one after it.
fn find_together(scenario: &Scenario, past: &Past) -> Judged {
    let world = scenario.topology.world();
    for (save, spec) in scenario.saves.iter().enumerate() {
        let outcomes = &past.outcomes[save];
        let is_committed = outcomes.len() == world as usize && outcomes.values().all(Result::is_ok);
        let (_, elsewhere) = scenario.saves[0].left_out.unwrap_or_default();
        match spec.left_out {
            Some((absent, _)) => {
                hold!(!outcomes.contains_key(&absent), "rank {absent} reports save {save}, which it left out");
                let is_failed = outcomes.values().all(Result::is_err);
                hold!(is_failed, "save {save} is committed without rank {absent}: {outcomes:?}");
            }
            None => hold!(
                is_committed || (save == 1 && elsewhere.is_zero() && world > 1),
                "the ranks have not found together in save {save}: {outcomes:?}"
            ),
        }
    }
    Ok(())
}

/// Which save is committed at that place, if any. What is committed is whole: it opens, is sound, and is bit for bit
/// what was saved.
fn published_at(
    engine: &Arc<Engine>,
    storage: &Storage,
    place: &str,
    saves: &[Save],
) -> std::result::Result<Option<usize>, String> {
    let checkpoint = match checkpoint::open_from(engine, storage.open(place), place, ALONE) {
        Ok(checkpoint) => checkpoint,
        Err(error) if error.kind == Kind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{place} is committed and does not open: {error}")),
    };
    let save = checkpoint.manifest().info.user.get("save").and_then(|save| save.parse::<usize>().ok());
    let Some((save, spec)) = save.and_then(|save| Some((save, saves.get(save)?))) else {
        return Err(format!("{place} holds what no rank saved"));
    };
    hold!(spec.place == place, "{place} holds save {save}, which was to go to {}", spec.place);
    let found = spec.truth.flaw(&checkpoint);
    hold!(found == Ok(None), "{place} holds save {save}, but not as it was: {found:?}");
    let verified = storage.open(place).and_then(|store| verify_in(engine, store, place, &|_, _| {}));
    // An index has one name for all attempts: one that lost to a rival and died may leave its own there.
    let has_rivals = saves.iter().any(|save| save.place == place && save.overlaps);
    let is_sound = verified.as_ref().is_ok_and(|report| {
        // A place may get other steps' saves here, one after the other.
        let is_meant = |problem| problem == Problem::Step || has_rivals && problem == Problem::Index;
        report.findings.iter().all(|finding| is_meant(finding.problem))
    });
    hold!(is_sound, "{place} holds save {save}, and is not sound: {verified:?}");
    Ok(Some(save))
}

/// Never two outcomes, and none that is not true.
fn one_outcome(past: &Past, save: usize, published: &[usize]) -> Judged {
    let is_published = published.contains(&save);
    let mut decided: Option<(u32, Kind, &str)> = None;
    for (&rank, outcome) in &past.outcomes[save] {
        match outcome {
            Ok(()) => hold!(is_published, "rank {rank} reports that save {save} is committed, and it is not"),
            Err(error) if error.kind == Kind::Unavailable => {}
            Err(error) => {
                let is_defect = error.kind == Kind::Internal && !error.message.contains(UNREADABLE);
                hold!(!is_defect, "save {save} met a defect on rank {rank}: {error}");
                hold!(!is_published, "rank {rank} reports that save {save} failed, and it is committed: {error}");
                let (first, kind, message) = *decided.get_or_insert((rank, error.kind, &error.message));
                hold!(
                    (kind, message) == (error.kind, &*error.message),
                    "save {save} failed in two ways: on rank {first} {kind:?}: {message}; on rank {rank} {:?}: {}",
                    error.kind,
                    error.message
                );
            }
        }
    }
    Ok(())
}

/// What the end of all processes leaves.
fn survives(scenario: &Scenario, engine: &Arc<Engine>, blackout: &Blackout) -> Judged {
    for spec in &scenario.saves {
        let found = published_at(engine, &blackout.left, &spec.place, &scenario.saves)
            .map_err(|broken| format!("after a loss of power {broken}"))?;
        let promised = blackout.promised.iter().find(|&&save| scenario.saves[save].place == spec.place);
        let is_kept = promised.is_none_or(|&save| found == Some(save));
        hold!(is_kept, "save {promised:?} was said to be committed, and a loss of power left {found:?}");
    }
    Ok(())
}

/// How long rounds may take to close after their time: each level waits for those below it.
fn closing(scenario: &Scenario) -> Duration {
    let levels = scenario.topology.height(0);
    CLOSING * (levels * (levels + 1) / 2) + DELAY_MAX * (4 * levels + 4)
}

/// Every call ends: twice the deadline and a grace after it came, and soon once a rank is known to be gone.
fn in_time(scenario: &Scenario, past: &Past, call: &OneCall) -> Judged {
    let OneCall { rank, topic, deadline, answered, decides, .. } = call;
    let Some(came) = call.came else { return Ok(()) };
    let Some((at, answer)) = answered else {
        hold!(past.crashed.contains_key(rank), "rank {rank} is never answered on {topic:?}");
        return Ok(());
    };
    let mut most = came + *deadline * 2 + GRACE;
    for (_, stop) in past.stops.iter().filter(|(stopped, _)| stopped == rank) {
        most = if stop.contains(&most) { stop.end } else { most };
    }
    hold!(*decides || *at <= most, "rank {rank} came to {topic:?} at {came:?} and was answered at {at:?}");
    let lost = past.crashed.values().chain(past.broken.values()).min();
    if let (Some(lost), Err(Coord::Lost { .. } | Coord::Missing { .. }), false) = (lost, answer, past.was_held_up()) {
        let known = *lost + DETECTION_MAX + closing(scenario);
        let prompt = came.max(known) + closing(scenario);
        hold!(
            *at <= prompt,
            "rank {rank} came to {topic:?} at {came:?} and was answered at {at:?}, lost at {lost:?}: {answer:?}"
        );
    }
    Ok(())
}

/// Every rank below a stopped rank, or below a link that delivers nothing, gets an error that names it by its deadline,
/// or soon after the silence began.
fn despite_silence(scenario: &Scenario, past: &Past, call: &OneCall) -> Judged {
    let OneCall { rank, topic, deadline, came: Some(came), answered: Some((at, answer)), decides: false, .. } = call
    else {
        return Ok(());
    };
    if past.stops.iter().any(|(stopped, stop)| stopped == rank && stop.start < *at && stop.end > *came) {
        return Ok(());
    }
    let way: Vec<u32> = std::iter::successors(Some(*rank), |rank| scenario.topology.parent(*rank)).collect();
    let stops = past.stops.iter().filter(|(stopped, _)| way.contains(stopped));
    let partitions = past.partitions.iter().filter(|(child, _)| way.contains(child));
    for (silent, silence) in stops.chain(partitions) {
        let known = (*came + *deadline).max(silence.start) + SILENCE + journeys(scenario);
        hold!(
            *at <= known || known > silence.end,
            "rank {rank} came to {topic:?} at {came:?} for {deadline:?}, and was answered at {at:?}: {answer:?}; rank \
             {silent} was silent in {silence:?}"
        );
    }
    Ok(())
}

/// How long what is known takes to all, with the questions that are asked on the way.
fn journeys(scenario: &Scenario) -> Duration {
    let levels = scenario.topology.height(0);
    CLOSING * levels + DELAY_MAX * (2 * levels + 2)
}

/// Those that the answer says are silent.
fn silent(answer: &std::result::Result<Vec<u8>, Coord>) -> Vec<u32> {
    match answer {
        Err(Coord::Missing { silent, .. }) => silent.clone(),
        Err(Coord::Unavailable(said)) => {
            let named = said.strip_prefix("rank ").and_then(|said| said.split_once(" does not answer;"));
            named.and_then(|(rank, _)| rank.parse().ok()).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// When each rank came to a round.
fn comings<'a>(past: &'a Past, topic: &'a str) -> BTreeMap<u32, Duration> {
    let calls = past.calls.iter().filter(|call| call.topic == topic);
    calls.filter_map(|call| Some((call.rank, call.came?))).collect()
}

/// When a round expires: a rank that is late at one waits there for a shorter time.
fn expires(past: &Past, topic: &str) -> Duration {
    let calls = past.calls.iter().filter(|call| call.topic == topic);
    calls.filter_map(|call| Some(call.came? + call.deadline)).min().unwrap_or(Duration::MAX)
}

/// Errors name ranks that are gone, or have not come, and of those all.
fn names_whom_it_may(scenario: &Scenario, past: &Past, call: &OneCall) -> Judged {
    let (rank, topic) = (call.rank, &call.topic);
    for named in call.answered.iter().flat_map(|(_, answer)| silent(answer)) {
        let links = past.partitions.iter().map(|(child, _)| child).chain(past.broken.keys());
        let mut ends = links.flat_map(|child| [Some(*child), scenario.topology.parent(*child)]);
        let is_silent = past.stops.iter().any(|(stopped, _)| *stopped == named)
            || past.crashed.contains_key(&named)
            || ends.any(|end| end == Some(named));
        hold!(is_silent, "rank {rank} gets on {topic:?} that rank {named} does not answer, and it does");
    }
    match &call.answered {
        Some((_, Err(Coord::Lost { rank: named, .. }))) => {
            let mut ends = past.broken.keys().flat_map(|child| [Some(*child), scenario.topology.parent(*child)]);
            let is_gone = past.crashed.contains_key(named) || ends.any(|end| end == Some(*named));
            hold!(is_gone, "rank {rank} gets on {topic:?} that rank {named} is lost, and it is not");
        }
        Some((at, Err(Coord::Missing { ranks, .. }))) => {
            hold!(!ranks.is_empty(), "rank {rank} gets on {topic:?} that no rank is missing");
            if past.was_held_up() || !past.broken.is_empty() || !past.crashed.is_empty() {
                return Ok(());
            }
            let came = comings(past, topic);
            let expired = expires(past, topic);
            for missing in 0..scenario.topology.world() {
                let came = came.get(&missing);
                let (is_named, is_there) =
                    (ranks.contains(&missing), came.is_some_and(|came| *came + DELAY_MAX < expired));
                hold!(!is_named || !is_there, "rank {rank} gets on {topic:?} that rank {missing} did not come; it did");
                let is_absent = came.is_none_or(|came| came > at);
                hold!(
                    is_named || !is_absent,
                    "rank {rank} gets no error that rank {missing} did not come to {topic:?}"
                );
            }
        }
        _ => {}
    }
    Ok(())
}

/// All reachable ranks get the same outcome of a round, and no rank gets a failure if others have an answer.
fn one_end_of_each_round(scenario: &Scenario, past: &Past) -> Judged {
    let is_cut = |rank: u32| {
        let above = std::iter::successors(Some(rank), |rank| scenario.topology.parent(*rank));
        above.into_iter().any(|rank| past.crashed.contains_key(&rank) || past.broken.contains_key(&rank))
    };
    let mut ends: BTreeMap<&str, (u32, &std::result::Result<Vec<u8>, Coord>)> = BTreeMap::new();
    for call in &past.calls {
        let Some((_, answer)) = &call.answered else { continue };
        let is_known = match answer {
            Ok(_) => true,
            Err(Coord::Unavailable(_)) => false,
            Err(_) => !is_cut(call.rank),
        };
        if is_known {
            let (first, end) = *ends.entry(&call.topic).or_insert((call.rank, answer));
            hold!(
                end.as_ref().err() == answer.as_ref().err(),
                "{:?} ended in two ways: on rank {first} with {end:?}, on rank {} with {answer:?}",
                call.topic,
                call.rank
            );
        }
    }
    Ok(())
}

/// Nothing is decided that had expired.
fn complete_in_time(scenario: &Scenario, past: &Past) -> Judged {
    for (topic, at) in past.complete.iter().filter(|_| !past.was_held_up()) {
        let expires = expires(past, topic);
        let most = expires + closing(scenario);
        hold!(*at <= most, "{topic:?} expires at {expires:?}, and is decided at {at:?}");
    }
    Ok(())
}

/// What becomes of a save where at most a rank does something wrong.
fn as_expected(scenario: &Scenario, past: &Past, save: usize) -> Judged {
    let spec = &scenario.saves[save];
    let world = scenario.topology.world();
    let outcomes = &past.outcomes[save];
    hold!(outcomes.len() == world as usize, "only {} of {world} ranks have an outcome of save {save}", outcomes.len());
    let earlier = &scenario.saves[..save];
    let is_taken = earlier.iter().any(|earlier| earlier.place == spec.place && earlier.mischief.is_none());
    let (kinds, words): (&[Kind], Vec<String>) = match spec.mischief {
        None if is_taken => (&[Kind::Conflict], vec![spec.place.clone()]),
        None => (&[], Vec::new()),
        Some(mischief) => complaint(scenario, spec, mischief),
    };
    for (rank, outcome) in outcomes {
        let is_expected = match outcome {
            Ok(()) => kinds.is_empty(),
            // What is taken is found first.
            Err(error) if is_taken && error.kind == Kind::Conflict => true,
            Err(error) => kinds.contains(&error.kind) && words.iter().all(|word| error.message.contains(word)),
        };
        let mischief = spec.mischief;
        hold!(is_expected, "save {save}, {mischief:?}, on rank {rank}: expected {kinds:?}, {words:?}; {outcome:?}");
    }
    Ok(())
}

/// The error that all ranks get when one does something wrong.
fn complaint(scenario: &Scenario, spec: &Save, (culprit, mischief): (u32, Mischief)) -> (&'static [Kind], Vec<String>) {
    let leaf = spec.truth.tensors[0].name.to_string();
    let named = if scenario.topology.world() == 1 { String::new() } else { format!("rank {culprit}") };
    match mischief {
        Mischief::OtherUrl => {
            let other = if culprit == 0 { 1 } else { culprit };
            (&[Kind::Invalid], vec![format!("rank {other} calls"), format!("{}-elsewhere", spec.place)])
        }
        Mischief::Touched => (&[Kind::Invalid], vec![named, TOUCHED.to_owned()]),
        Mischief::Unreadable => (&[Kind::Internal], vec![named, leaf, UNREADABLE.to_owned()]),
        Mischief::Alone => (&[Kind::Invalid], vec![named]),
        // Those who planned alone know by digests only that they did not plan the same.
        Mischief::OtherShape if spec.truth.plans_alone(culprit) => (&[Kind::Invalid], vec!["rank".to_owned()]),
        Mischief::OtherShape | Mischief::Hole | Mischief::Overlap | Mischief::Shifted => (&[Kind::Invalid], vec![leaf]),
        Mischief::OtherBytes => (&[Kind::Invalid], vec![leaf, "replicas".to_owned()]),
    }
}
