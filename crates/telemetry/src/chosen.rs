//! Chooses the ranks whose events are kept in full, by what all ranks have said.

use std::cmp::Reverse;

use crate::object::Collected;
use crate::verdicts::{phases, verdicts};

/// Number of ranks up to which the events of all are kept.
const ALL_MAX: usize = 8;

/// Ranks beside rank 0 whose events are kept in a larger job.
const CHOSEN_MAX: usize = 8;

/// Ranks that are chosen for a phase of which a verdict speaks.
const OF_PHASE_MAX: usize = 3;

/// Returns the ranks but rank 0 whose events are worth keeping: all of a small job; of a larger one those that failed,
/// and the slowest in each phase of which a verdict speaks.
pub(crate) fn chosen(collected: &Collected) -> Vec<u32> {
    let world = collected.ranks.len();
    if world <= ALL_MAX {
        return (1..world as u32).collect();
    }
    let said = |rank: usize| collected.ranks[rank].as_ref();
    let failures = |rank: usize| said(rank).map_or(0, |said| said.failures);
    let mut failing: Vec<usize> = (0..world).filter(|&rank| failures(rank) > 0).collect();
    failing.sort_by_key(|&rank| Reverse(failures(rank)));
    failing.truncate(CHOSEN_MAX / 2);
    // One rank for each failure of the operation.
    let mut texts: Vec<&str> = Vec::new();
    let first = (0..world).filter(|&rank| {
        let is_new = said(rank).is_some_and(|said| !said.failure.is_empty() && !texts.contains(&&*said.failure));
        if is_new && texts.len() < CHOSEN_MAX / 4 {
            texts.extend(said(rank).map(|said| said.failure.as_str()));
            return true;
        }
        false
    });
    let mut order: Vec<usize> = failing.into_iter().chain(first.collect::<Vec<_>>()).collect();
    let times = phases(collected);
    for verdict in verdicts(collected) {
        let Some((phase, times)) = times.iter().find(|(phase, _)| *phase == verdict.phase) else { continue };
        let mut ranks: Vec<usize> = (0..world).filter(|&rank| times[rank].is_some()).collect();
        let ms = |rank: usize| times[rank].unwrap_or_default();
        ranks.sort_by(|&a, &b| ms(b).total_cmp(&ms(a)));
        // Ranks wait there for one that comes late, which takes least.
        if matches!(*phase, "agree" | "match") {
            ranks.reverse();
        }
        order.extend(ranks.into_iter().take(OF_PHASE_MAX));
    }
    let mut chosen: Vec<u32> = Vec::new();
    for rank in order.into_iter().map(|rank| rank as u32).filter(|&rank| rank != 0) {
        if chosen.len() < CHOSEN_MAX && !chosen.contains(&rank) {
            chosen.push(rank);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use shardfast_transfer::events::Phase;

    use super::*;
    use crate::object::tests::collected;

    #[test]
    fn the_failed_and_the_slowest_ranks_are_chosen() {
        assert_eq!(chosen(&collected(3)), [1, 2]);
        let mut large = collected(64);
        for said in large.ranks.iter_mut().flatten() {
            (said.failure, said.failures) = (String::new(), 0);
            said.phases_us = std::array::from_fn(|i| 1_000_000 * (i as u32 + 1));
            said.ended_us = 12_000_000;
        }
        assert_eq!(chosen(&Collected { missing: Vec::new(), ..large.clone() }), [0_u32; 0]);
        large.ranks[17].as_mut().unwrap().phases_us[Phase::Written as usize] += 8_000_000;
        large.ranks[40].as_mut().unwrap().failures = 3;
        let found = chosen(&large);
        assert!(found.len() <= CHOSEN_MAX && found.starts_with(&[40, 17]), "{found:?}");
    }
}
