//! Keeps a parameter together with its optimizer state.
//!
//! A capture ahead of a save rolls a parameter forward together with its moments, so a rank must hold what it writes of
//! all of them. So one rank writes all leaves of one parameter. A leaf `state.<name>.<what>` belongs to the leaf called
//! `<name>`, as bundles of optimizers name their leaves, if both have as many rows and the same holders.
//!
//! A unit that must be cut is cut at the same rows in all of its parts, so that each rank has a run of the parameter
//! with its moments. If that would cut weights that could stay whole, or would be less even, the planner splits units
//! instead: then it cuts the moments before the parameter. First it splits the largest unit. While it still cuts one
//! that is not split, it goes on with the two largest, then four, and so on.

use std::collections::HashMap;

use shardfast_format::LeafName;

use crate::balance::{Item, Share, heaviest, tolerated_load};
use crate::group_small::divide_together;

/// Divides like [`divide_together`], with the leaves of one parameter on one rank, or in the same rows on several.
pub(crate) fn divide_units(world: usize, classes: &[Vec<u32>], items: &[Item], names: &[&LeafName]) -> Vec<Share> {
    let units = units(classes, items, names);
    let cut_alike = divide_with(world, classes, items, names, &units);
    let (mut apart, mut shares) = (0, cut_alike.clone());
    while units[apart..].iter().any(|unit| is_cut(unit, &shares)) {
        apart = (apart * 2).max(1).min(units.len());
        shares = divide_with(world, classes, items, names, &units[apart..]);
    }
    if apart == 0 {
        return shares;
    }
    let load = |shares: &[Share]| heaviest(world, items, shares);
    let is_even = load(&cut_alike) <= tolerated_load(world, classes, items).max(load(&shares));
    let keeps_as_many_whole = cut_priority(items, &cut_alike) <= cut_priority(items, &shares);
    if is_even && keeps_as_many_whole { cut_alike } else { shares }
}

/// Returns whether an item of the unit is cut.
fn is_cut(unit: &[usize], shares: &[Share]) -> bool {
    shares.iter().any(|share| share.rows.is_some() && unit.contains(&share.item))
}

/// Returns the highest priority against cuts among the items that are cut.
fn cut_priority(items: &[Item], shares: &[Share]) -> u32 {
    let cut = shares.iter().filter(|share| share.rows.is_some());
    cut.map(|share| items[share.item].spared).max().unwrap_or_default()
}

/// Properties that the items of a unit share: the parameter's name, the number of the part, their class and rows.
type Kin<'a> = (&'a str, u32, usize, u64);

/// Returns the items of each parameter that has state, the largest first.
fn units(classes: &[Vec<u32>], items: &[Item], names: &[&LeafName]) -> Vec<Vec<usize>> {
    let is_shared = |index: &usize| classes[items[*index].class].len() > 1;
    // Each part of a leaf with several parts is one, in order.
    let mut parts: HashMap<&LeafName, u32> = HashMap::new();
    let mut by_parameter: HashMap<Kin<'_>, (bool, Vec<usize>)> = HashMap::new();
    for index in (0..items.len()).filter(is_shared) {
        let part = parts.entry(names[index]).or_default();
        *part += 1;
        let (parameter, is_state) = match state_of(&names[index].name) {
            Some(parameter) => (parameter, true),
            None => (names[index].name.as_str(), false),
        };
        let unit = by_parameter.entry((parameter, *part, items[index].class, items[index].rows)).or_default();
        unit.0 |= is_state;
        unit.1.push(index);
    }
    let with_state = by_parameter.into_values().filter(|(has_state, unit)| *has_state && unit.len() > 1);
    let mut units: Vec<Vec<usize>> = with_state.map(|(_, unit)| unit).collect();
    let bytes = |unit: &[usize]| unit.iter().map(|&index| u128::from(items[index].bytes)).sum::<u128>();
    units.sort_unstable_by_key(|unit| (std::cmp::Reverse(bytes(unit)), unit[0]));
    units
}

/// Returns the parameter that a leaf of an optimizer belongs to.
fn state_of(name: &str) -> Option<&str> {
    name.strip_prefix("state.")?.rsplit_once('.').map(|(parameter, _)| parameter)
}

/// Divides like [`divide_together`], with each unit in `whole` as one item.
fn divide_with(
    world: usize,
    classes: &[Vec<u32>],
    items: &[Item],
    names: &[&LeafName],
    whole: &[Vec<usize>],
) -> Vec<Share> {
    let mut is_first = vec![true; items.len()];
    let mut members: HashMap<usize, &[usize]> = HashMap::new();
    for unit in whole {
        members.insert(unit[0], unit);
        unit[1..].iter().for_each(|&index| is_first[index] = false);
    }
    let merged: Vec<usize> = (0..items.len()).filter(|&index| is_first[index]).collect();
    let of_unit = |index: &usize| match members.get(index) {
        None => items[*index],
        Some(unit) => Item {
            bytes: unit.iter().fold(0u64, |bytes, &index| bytes.saturating_add(items[index].bytes)),
            spared: unit.iter().map(|&index| items[index].spared).max().unwrap_or_default(),
            ..items[*index]
        },
    };
    let merged_items: Vec<Item> = merged.iter().map(of_unit).collect();
    let merged_names: Vec<&LeafName> = merged.iter().map(|&index| names[index]).collect();
    let mut shares = Vec::with_capacity(items.len());
    for share in divide_together(world, classes, &merged_items, &merged_names) {
        let first = merged[share.item];
        match members.get(&first) {
            None => shares.push(Share { item: first, ..share }),
            Some(unit) => shares.extend(unit.iter().map(|&item| Share { item, ..share })),
        }
    }
    shares.sort_unstable();
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::Rows;

    const MIB: u64 = 1 << 20;

    /// Key, name, bytes and rows of an item.
    type Of<'a> = (&'a str, &'a str, u64, u64);

    /// Returns for each item the ranks that write it, and which rows, for one class on two ranks. `spared` are the
    /// priorities of items of the model and of others.
    fn shares(items: &[Of<'_>], spared: [u32; 2]) -> Vec<Vec<(u32, Option<Rows>)>> {
        let names: Vec<LeafName> = items.iter().map(|(key, name, ..)| LeafName::new(*key, *name)).collect();
        let item = |&(key, _, bytes, rows): &Of<'_>| {
            let spared = spared[usize::from(key != "model")];
            Item { bytes, rows, spared, class: 0 }
        };
        let found: Vec<Item> = items.iter().map(item).collect();
        let shares = divide_units(2, &[vec![0, 1]], &found, &names.iter().collect::<Vec<_>>());
        let of = |item| {
            let own = shares.iter().filter(|share| share.item == item);
            own.map(|share| (share.rank, share.rows)).collect()
        };
        (0..items.len()).map(of).collect()
    }

    #[test]
    fn what_belongs_to_one_parameter_goes_to_one_rank() {
        let items = [
            ("model", "a", 8 * MIB, 64),
            ("model", "b", 8 * MIB, 64),
            ("optimizer", "state.a.exp_avg", 8 * MIB, 64),
            ("optimizer", "state.a.exp_avg_sq", 8 * MIB, 64),
            ("optimizer", "state.b.exp_avg", 8 * MIB, 64),
            ("optimizer", "state.b.exp_avg_sq", 8 * MIB, 64),
        ];
        let found = shares(&items, [2, 1]);
        let [a, b] = [&found[0], &found[1]];
        assert!(a.len() == 1 && b.len() == 1 && a != b, "{found:?}");
        assert!([2, 3].iter().all(|&of| found[of] == *a) && [4, 5].iter().all(|&of| found[of] == *b), "{found:?}");
    }

    #[test]
    fn weights_that_can_stay_whole_are_not_cut_for_their_moments() {
        let items = [
            ("model", "a", 100 * MIB, 64),
            ("model", "b", 10 * MIB, 64),
            ("model", "c", 10 * MIB, 64),
            ("optimizer", "state.a.momentum", 100 * MIB, 64),
            ("optimizer", "state.b.momentum", 10 * MIB, 64),
            ("optimizer", "state.c.momentum", 10 * MIB, 64),
        ];
        let found = shares(&items, [2, 1]);
        assert_ne!(found[0], found[3], "the balance counts more: {found:?}");
        assert_eq!(found[1..3], found[4..], "the small ones stay whole: {found:?}");
        assert!(found.iter().all(|shares| shares.len() == 1), "nothing is cut: {found:?}");
    }

    #[test]
    fn what_must_be_cut_is_cut_at_the_same_rows() {
        let shards = [
            ("model", "a", 90 * MIB, 90),
            ("model", "b", 10 * MIB, 10),
            ("optimizer", "state.a.exp_avg", 90 * MIB, 90),
            ("optimizer", "state.a.exp_avg_sq", 90 * MIB, 90),
        ];
        let found = shares(&shards, [0, 0]);
        assert!(found[0].len() == 2 && found[0] == found[2] && found[2] == found[3], "{found:?}");
        assert_eq!(found[1].len(), 1, "{found:?}");
        // Whole tensors of a model open elsewhere, and are not cut for this.
        let found = shares(&shards, [2, 1]);
        assert_eq!([found[0].len(), found[1].len()], [1, 1], "{found:?}");
        assert!(found[2..].iter().any(|moment| moment.len() == 2), "{found:?}");
        // Where they must be cut, they are cut with their moments.
        let one = [("model", "a", 200 * MIB, 200), ("optimizer", "state.a.momentum", 20 * MIB, 200)];
        let found = shares(&one, [2, 1]);
        assert!(found[0].len() == 2 && found[0] == found[1], "{found:?}");
    }

    #[test]
    fn rows_that_are_too_large_together_are_not_cut_together() {
        // Three rows: together 100 and 200 MiB, apart 150 and 150.
        let three = |key, name| (key, name, 75 * MIB, 3);
        let moment = |name| three("optimizer", name);
        let found =
            shares(&[three("model", "a"), moment("state.a.x"), moment("state.a.y"), moment("state.a.z")], [0, 0]);
        let mib = |rank| {
            let of = |share: &(u32, Option<Rows>)| share.1.map_or(75, |rows| 25 * rows.count);
            found.iter().flatten().filter(|share| share.0 == rank).map(of).sum::<u64>()
        };
        assert_eq!([mib(0), mib(1)], [150, 150], "{found:?}");
    }

    #[test]
    fn names_and_rows_decide() {
        assert_eq!(state_of("state.blocks.0.weight.exp_avg"), Some("blocks.0.weight"));
        assert_eq!([state_of("state.w"), state_of("blocks.state.w.m"), state_of("param_groups")], [None; 3]);
        // State of another shape is no moment.
        let items =
            |rows| [(8 * MIB, 64), (8 * MIB, rows)].map(|(bytes, rows)| Item { bytes, rows, spared: 0, class: 0 });
        let names = [LeafName::new("model", "a"), LeafName::new("optimizer", "state.a.row")];
        let names: Vec<&LeafName> = names.iter().collect();
        assert_eq!(units(&[vec![0, 1]], &items(64), &names), [vec![0, 1]]);
        assert!(units(&[vec![0, 1]], &items(1), &names).is_empty());
        assert!(units(&[vec![0]], &items(64), &names).is_empty(), "one rank writes it all");
    }
}
