//! Shares the writing of replicas among their holders, and cuts parts that are too large to be shared whole.
//!
//! 1. **Worst-Fit decreasing**: each part, from the largest on, goes to its least loaded holder, on top of what ranks
//!    must write anyway. If the result is within the tolerance of the best possible sharing, nothing is cut.
//! 2. Else [`crate::levels`] says how much of each class (the parts of one set of holders) each holder would write if
//!    parts were arbitrarily divisible. These are quotas: parts are assigned whole while they fit under the tolerance,
//!    from the largest on, to the rank with most of its quota left, and one that fits nowhere is cut there. A cut fills
//!    a quota, so a class has at most as many cuts as members, and mostly far fewer.
//! 3. A part without rows to cut can exceed a quota, also on a rank whose tolerance the large parts of other classes
//!    have used up. If a rank is above the tolerance after step 2, the planner repeats the step with the parts without
//!    rows first, and cuts the large ones around them.
//! 4. Other programs can open the files of keys that consist of whole tensors. Such parts are cut only if cutting the
//!    others does not bring the heaviest rank under the tolerance, and then those of the largest such key first:
//!    optimizer states before weights.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use shardfast_format::region::checked_numel;
use shardfast_format::{BLOCK_BYTES, DType, Leaf, LeafBody, Region};

use crate::levels::{Levels, levels};
use crate::write::{Rows, row_dim};

/// Tolerance: 1/50 of the load (2 %). Neither that nor a block is worth a cut.
const TOLERANCE: u64 = 50;

/// Limit of the total bytes that are balanced; beyond it loads could overflow.
const TOTAL_MAX: u128 = 1 << 62;

/// A part that one of several holders must write, or several together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Cost of writing it, in bytes.
    pub(crate) bytes: u64,
    /// Number of equal rows into which it can be cut.
    pub(crate) rows: u64,
    /// Priority against cuts: 0 for none, else that of its key in [`Spared`].
    pub(crate) spared: u32,
    /// Index of the class of its holders.
    pub(crate) class: usize,
}

impl Item {
    /// Makes an item of the part `region` of a tensor of `dtype`.
    pub(crate) fn new(region: &Region, dtype: DType, spared: u32, class: usize) -> Item {
        // Callers refuse tensors beyond 2^64 bytes, or know of none.
        let bytes = region.checked_numel().and_then(|numel| numel.checked_mul(dtype.size_bytes())).unwrap_or(u64::MAX);
        let rows = row_dim(region).map_or(1, |dim| region.lengths[dim]);
        Item { bytes, rows: if bytes == 0 { 1 } else { rows }, spared, class }
    }
}

/// Number of priorities: keys are distinguished by size up to this many, and all smaller ones have the highest.
const SPARED_MAX: u32 = 3;

/// Keys that consist of whole tensors (and values) only, with the order in which their parts may be cut: from 1, the
/// largest key first.
pub(crate) struct Spared<'a>(HashMap<&'a str, u32>);

impl<'a> Spared<'a> {
    pub(crate) fn new(leaves: impl IntoIterator<Item = &'a Leaf>) -> Spared<'a> {
        let mut keys: BTreeMap<&str, (bool, u64)> = BTreeMap::new();
        for Leaf { name, body, .. } in leaves {
            if let LeafBody::Tensor { dtype, shape, parts } = body {
                let (whole, bytes) = keys.entry(&name.key).or_insert((true, 0));
                *whole &= parts.iter().all(|part| part.is_whole(shape));
                let numel = checked_numel(shape).unwrap_or(u64::MAX);
                *bytes = bytes.saturating_add(numel.saturating_mul(dtype.size_bytes()));
            }
        }
        let mut whole: Vec<(&str, u64)> =
            keys.into_iter().filter_map(|(key, (whole, bytes))| whole.then_some((key, bytes))).collect();
        whole.sort_by_key(|&(_, bytes)| Reverse(bytes));
        let order = (1..).map(|place: u32| place.min(SPARED_MAX));
        Spared(whole.into_iter().zip(order).map(|((key, _), place)| (key, place)).collect())
    }

    /// Returns the priority of parts under `key`.
    pub(crate) fn of(&self, key: &str) -> u32 {
        self.0.get(key).copied().unwrap_or(0)
    }
}

/// Part of one item that one rank writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    /// Index of the item.
    pub(crate) item: usize,
    /// Rank that writes.
    pub(crate) rank: u32,
    /// Rows to write; `None` for the whole item.
    pub(crate) rows: Option<Rows>,
}

/// Shares each item among the members of its class so that ranks' loads are even. `classes` are sets of ranks below
/// `world`, ascending, none empty, each once. Equal input gives equal output on every rank: ties go to the earlier item
/// and the lower rank.
pub(crate) fn divide(world: usize, classes: &[Vec<u32>], items: &[Item]) -> Vec<Share> {
    let whole = worst_fit(world, classes, items);
    let mut best = (heaviest(world, items, &whole), whole);
    let total: u128 = items.iter().map(|item| u128::from(item.bytes)).sum();
    if best.0 <= tolerated((total / (world as u128).max(1)) as u64) || total > TOTAL_MAX {
        return best.1;
    }
    let levels = levels(world, classes, &amounts(classes, items));
    let limit = tolerated(levels.least);
    // Of a single class, the holder with most room is never above its level, and a small part fits under the limit.
    let are_several = classes.iter().filter(|class| class.len() > 1).nth(1).is_some();
    let orders = if are_several { &[Order::BySize, Order::UncuttableFirst][..] } else { &[Order::BySize] };
    let attempts = orders.iter().flat_map(|&order| (0..=SPARED_MAX).map(move |cut| (order, cut)));
    for (order, cut) in attempts {
        if best.0 <= limit {
            break;
        }
        let shares = Cutting::new(classes, &levels, limit).run(items, order, cut);
        let heaviest = heaviest(world, items, &shares);
        if heaviest < best.0 {
            best = (heaviest, shares);
        }
    }
    best.1
}

/// Returns the load up to which nothing is cut, where `least` cannot be improved.
fn tolerated(least: u64) -> u64 {
    least.saturating_add((least / TOLERANCE).max(BLOCK_BYTES))
}

/// Returns the load up to which these items count as shared evenly.
pub(crate) fn tolerated_load(world: usize, classes: &[Vec<u32>], items: &[Item]) -> u64 {
    tolerated(levels(world, classes, &amounts(classes, items)).least)
}

/// Returns the bytes of each class.
fn amounts(classes: &[Vec<u32>], items: &[Item]) -> Vec<u64> {
    let mut amounts = vec![0u64; classes.len()];
    items.iter().for_each(|item| amounts[item.class] = amounts[item.class].saturating_add(item.bytes));
    amounts
}

/// Returns the load of the rank that writes most.
pub(crate) fn heaviest(world: usize, items: &[Item], shares: &[Share]) -> u64 {
    let mut loads = vec![0u64; world];
    for share in shares {
        let item = items[share.item];
        let bytes = share.rows.map_or(item.bytes, |rows| item.bytes / item.rows * rows.count);
        loads[share.rank as usize] = loads[share.rank as usize].saturating_add(bytes);
    }
    loads.into_iter().max().unwrap_or(0)
}

/// Gives each rank what it alone holds; then each item, from the largest on, to its least loaded holder.
fn worst_fit(world: usize, classes: &[Vec<u32>], items: &[Item]) -> Vec<Share> {
    let mut loads = vec![0u64; world];
    let mut shares = Vec::with_capacity(items.len());
    let mut shared = Vec::new();
    for (i, item) in items.iter().enumerate() {
        match classes[item.class].as_slice() {
            &[rank] => {
                loads[rank as usize] = loads[rank as usize].saturating_add(item.bytes);
                shares.push(Share { item: i, rank, rows: None });
            }
            _ => shared.push(i),
        }
    }
    shared.sort_by_key(|&i| Reverse(items[i].bytes));
    // Least loaded first. Loads only grow, so an entry that is out of date is found when it comes up.
    let mut queues: Vec<BinaryHeap<Reverse<(u64, u32)>>> = vec![BinaryHeap::new(); classes.len()];
    for i in shared {
        let Item { bytes, class, .. } = items[i];
        let queue = &mut queues[class];
        if queue.is_empty() {
            queue.extend(classes[class].iter().map(|&rank| Reverse((loads[rank as usize], rank))));
        }
        while let Some(mut first) = queue.peek_mut() {
            let Reverse((known, rank)) = *first;
            let load = &mut loads[rank as usize];
            let current = known == *load;
            if current {
                *load = load.saturating_add(bytes);
                shares.push(Share { item: i, rank, rows: None });
            }
            *first = Reverse((*load, rank));
            if current {
                break;
            }
        }
    }
    shares.sort_unstable();
    shares
}

/// Order in which [`Cutting`] assigns items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Class by class, from the largest item on.
    BySize,
    /// First the items of all classes without rows to cut, from the largest on, then the others by size.
    UncuttableFirst,
}

/// Assigns items to quotas.
struct Cutting<'a> {
    classes: &'a [Vec<u32>],
    levels: &'a Levels,
    /// Load that no rank should exceed.
    limit: u64,
    /// Load of each rank once all open quotas are filled.
    expected: Vec<u64>,
    shares: Vec<Share>,
}

/// Rest of an item: its bytes, the item, its first row that is not assigned.
type Rest = (u64, Reverse<usize>, u64);

impl<'a> Cutting<'a> {
    fn new(classes: &'a [Vec<u32>], levels: &'a Levels, limit: u64) -> Cutting<'a> {
        Cutting { classes, levels, limit, expected: levels.loads.clone(), shares: Vec::new() }
    }

    /// Shares all items in that order, and cuts none with a priority above `cut`.
    fn run(mut self, items: &[Item], order: Order, cut: u32) -> Vec<Share> {
        let quotas = self.levels.quotas.iter();
        let mut rooms: Vec<Vec<i64>> =
            quotas.map(|quotas| quotas.iter().map(|&quota| quota as i64).collect()).collect();
        let is_first = |&i: &usize| {
            order == Order::UncuttableFirst && items[i].rows == 1 && self.classes[items[i].class].len() > 1
        };
        let (mut first, others): (Vec<usize>, Vec<usize>) = (0..items.len()).partition(is_first);
        first.sort_by_key(|&i| Reverse(items[i].bytes));
        first.into_iter().for_each(|i| self.place(items, i, &mut rooms[items[i].class]));
        let mut by_class: Vec<Vec<usize>> = vec![Vec::new(); self.classes.len()];
        others.into_iter().for_each(|i| by_class[items[i].class].push(i));
        for (class, members) in by_class.into_iter().enumerate() {
            if let &[rank] = self.classes[class].as_slice() {
                self.shares.extend(members.into_iter().map(|item| Share { item, rank, rows: None }));
                continue;
            }
            let rooms = rooms[class].iter().zip(&self.classes[class]);
            let mut rooms: BinaryHeap<(i64, Reverse<u32>)> =
                rooms.map(|(&room, &rank)| (room, Reverse(rank))).collect();
            let (spared, cuttable): (Vec<usize>, Vec<usize>) =
                members.into_iter().partition(|&i| items[i].spared > cut);
            for (members, may_cut) in [(spared, false), (cuttable, true)] {
                let rest = members.into_iter().map(|i| (items[i].bytes, Reverse(i), 0));
                self.lay(items, rest.collect(), &mut rooms, may_cut);
            }
        }
        self.shares.sort_unstable();
        self.shares
    }

    /// Assigns an item whole to the holder whose load is lowest afterwards. `rooms` is the rest of each quota of its
    /// class.
    fn place(&mut self, items: &[Item], i: usize, rooms: &mut [i64]) {
        let Item { bytes, class, .. } = items[i];
        let members = self.classes[class].iter().zip(rooms).map(|(&rank, room)| {
            let beyond = bytes.saturating_sub((*room).max(0) as u64);
            (self.expected[rank as usize].saturating_add(beyond), rank, room)
        });
        if let Some((load, rank, room)) = members.min_by_key(|(load, _, room)| (*load, Reverse(**room))) {
            self.expected[rank as usize] = load;
            *room -= bytes as i64;
            self.shares.push(Share { item: i, rank, rows: None });
        }
    }

    /// Assigns the rest, from the largest on, to the holder with the most room.
    fn lay(
        &mut self,
        items: &[Item],
        mut rest: BinaryHeap<Rest>,
        rooms: &mut BinaryHeap<(i64, Reverse<u32>)>,
        may_cut: bool,
    ) {
        while let (Some((bytes, Reverse(i), first)), Some(mut roomiest)) = (rest.pop(), rooms.peek_mut()) {
            let (room, Reverse(rank)) = *roomiest;
            let item = items[i];
            let row = item.bytes / item.rows;
            let beyond = |bytes: u64| bytes.saturating_sub(room.max(0) as u64);
            let expected = &mut self.expected[rank as usize];
            let left = item.rows - first;
            let count = match expected.saturating_add(beyond(bytes)) <= self.limit || !may_cut {
                true => left,
                false => (room.max(0) as u64).checked_div(row).unwrap_or(left).clamp(1, left),
            };
            let rows = (count < item.rows).then_some(Rows { first, count });
            self.shares.push(Share { item: i, rank, rows });
            *expected = expected.saturating_add(beyond(row * count));
            *roomiest = (room - (row * count) as i64, Reverse(rank));
            if count < left {
                rest.push((bytes - row * count, Reverse(i), first + count));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn item(bytes: u64, class: usize) -> Item {
        Item { bytes, rows: 1, spared: 0, class }
    }

    fn rows(bytes: u64, rows: u64, class: usize) -> Item {
        Item { bytes, rows, spared: 0, class }
    }

    fn all(world: u32) -> Vec<Vec<u32>> {
        vec![(0..world).collect()]
    }

    /// Returns the rank of each item; none may be cut.
    fn ranks(world: usize, classes: &[Vec<u32>], items: &[Item]) -> Vec<u32> {
        let shares = divide(world, classes, items);
        assert!(shares.iter().map(|share| (share.item, share.rows)).eq((0..items.len()).map(|i| (i, None))));
        shares.into_iter().map(|share| share.rank).collect()
    }

    #[test]
    fn the_largest_item_goes_to_the_least_loaded_holder() {
        let classes = [vec![0], vec![0, 1, 2], vec![1, 2]];
        // Rank 0 writes 5 alone. 6 → rank 1; 5 → rank 2; 4 → the lowest of ranks 0 and 2, at 5 each; 1 → rank 2, at 5.
        let items = [item(5, 0), item(4, 1), item(6, 1), item(5, 1), item(1, 2)];
        assert_eq!(ranks(3, &classes, &items), [0, 0, 1, 2, 2]);
    }

    #[test]
    fn equal_items_go_round() {
        assert_eq!(ranks(3, &all(3), &[item(8, 0); 6]), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn loads_beyond_u64_saturate() {
        assert_eq!(ranks(2, &all(2), &[rows(u64::MAX, 5, 0), rows(u64::MAX, 5, 0)]), [0, 1]);
        assert_eq!(ranks(1, &all(1), &[item(u64::MAX, 0), item(9, 0)]), [0, 0]);
    }

    /// Returns for each share: item, rank, first row, number of rows.
    fn pieces(shares: &[Share]) -> Vec<(usize, u32, u64, u64)> {
        let piece = |share: &Share| share.rows.map(|rows| (share.item, share.rank, rows.first, rows.count));
        shares.iter().filter_map(piece).collect()
    }

    #[test]
    fn one_large_item_is_cut_into_as_many_pieces_as_it_needs() {
        let found = divide(4, &all(4), &[rows(1000 * MIB, 1000, 0)]);
        assert_eq!(pieces(&found), [(0, 0, 0, 250), (0, 1, 250, 250), (0, 2, 500, 250), (0, 3, 750, 250)]);
        // With something small beside it, only what must be is cut.
        let items = [rows(300 * MIB, 300, 0), rows(60 * MIB, 60, 0), rows(40 * MIB, 40, 0)];
        assert_eq!(pieces(&divide(2, &all(2), &items)), [(0, 0, 0, 200), (0, 1, 200, 100)]);
    }

    #[test]
    fn what_is_nearly_even_is_not_cut() {
        let uneven = |more: u64| [rows(100 * MIB, 100, 0), rows(100 * MIB + more * MIB, 100 + more, 0)];
        assert_eq!(pieces(&divide(2, &all(2), &uneven(4))), []);
        assert_ne!(pieces(&divide(2, &all(2), &uneven(5))), []);
        let small = [rows(BLOCK_BYTES, BLOCK_BYTES, 0)];
        assert_eq!(pieces(&divide(2, &all(2), &small)), []);
    }

    #[test]
    fn whole_tensors_are_cut_last() {
        let whole = |bytes| Item { spared: 1, ..rows(bytes * MIB, bytes, 0) };
        let other = |bytes| rows(bytes * MIB, bytes, 0);
        // By size alone, the last one would be cut.
        let found = divide(2, &all(2), &[whole(190), other(200), other(300)]);
        assert_eq!(pieces(&found), [(1, 0, 0, 155), (1, 1, 155, 45)]);
        let found = divide(2, &all(2), &[other(190), other(200), other(300)]);
        assert_eq!(pieces(&found), [(0, 0, 145, 45), (0, 1, 0, 145)]);
        let found = divide(2, &all(2), &[whole(500), other(100)]);
        assert_eq!(pieces(&found), [(0, 0, 0, 300), (0, 1, 300, 200)]);
        // The larger key goes first, though its part is the smaller one.
        let weight = Item { spared: 2, ..rows(300 * MIB, 300, 0) };
        let found = divide(2, &all(2), &[weight, whole(200), whole(190)]);
        assert_eq!(pieces(&found), [(2, 0, 145, 45), (2, 1, 0, 145)]);
        // Nothing can be done about an item that has no rows.
        let found = divide(2, &all(2), &[Item { rows: 1, ..whole(500) }, whole(100)]);
        assert_eq!(pieces(&found), []);
    }

    #[test]
    fn a_cut_counts_what_its_holders_write_anyway() {
        let classes = [vec![0], vec![0, 1]];
        let found = divide(2, &classes, &[rows(60 * MIB, 60, 0), rows(100 * MIB, 100, 1)]);
        assert_eq!(pieces(&found), [(1, 0, 80, 20), (1, 1, 0, 80)]);
    }
}
