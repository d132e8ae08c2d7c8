//! Shares the writing of replicas among those who hold them.

use std::ops::Range;

/// Bytes that several ranks hold and one must write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    /// What the writing costs.
    pub(crate) bytes: u64,
    /// The holders' places in the list of holders, by ascending rank; at least one.
    pub(crate) holders: Range<usize>,
}

/// One holder per item, as its place in `holders` (ranks), so that the ranks' loads are even: what only one rank holds
/// is that rank's in any case, and then, Worst-Fit decreasing, each item from the largest on goes to the least loaded
/// of its holders. Ties go to the lowest rank and the earlier item, so equal input gives equal output everywhere.
pub(crate) fn writers(world: usize, items: &[Item], holders: &[u32]) -> Vec<usize> {
    let mut loads = vec![0u64; world];
    let mut chosen: Vec<usize> = items.iter().map(|item| item.holders.start).collect();
    let mut shared = Vec::new();
    for (i, item) in items.iter().enumerate() {
        if item.holders.len() == 1 {
            let load = &mut loads[holders[item.holders.start] as usize];
            *load = load.saturating_add(item.bytes);
        } else {
            shared.push(i);
        }
    }
    shared.sort_by_key(|&i| std::cmp::Reverse(items[i].bytes));
    for i in shared {
        let Item { bytes, holders: places } = items[i].clone();
        chosen[i] = places.min_by_key(|&place| loads[holders[place] as usize]).expect("an item has a holder");
        let load = &mut loads[holders[chosen[i]] as usize];
        *load = load.saturating_add(bytes);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_item_goes_to_the_least_loaded_holder() {
        // Rank 0 writes 5 alone; 4, 6 and 5 are on all three ranks; 1 on ranks 1 and 2.
        let holders = [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2];
        let item = |bytes, holders| Item { bytes, holders };
        let items = [item(5, 0..1), item(4, 1..4), item(6, 4..7), item(5, 7..10), item(1, 10..12)];
        // 6 → rank 1; 5 → rank 2; 4 → the lowest of ranks 0 and 2, at 5 each; 1 → rank 2, at 5.
        let ranks: Vec<u32> = writers(3, &items, &holders).into_iter().map(|place| holders[place]).collect();
        assert_eq!(ranks, [0, 0, 1, 2, 2]);
    }

    #[test]
    fn equal_items_go_round() {
        let holders: Vec<u32> = (0..6).flat_map(|_| 0..3).collect();
        let items: Vec<Item> = (0..6).map(|i| Item { bytes: 8, holders: 3 * i..3 * i + 3 }).collect();
        let ranks: Vec<u32> = writers(3, &items, &holders).into_iter().map(|place| holders[place]).collect();
        assert_eq!(ranks, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn loads_beyond_u64_saturate() {
        let items = [Item { bytes: u64::MAX, holders: 0..2 }, Item { bytes: u64::MAX, holders: 2..4 }];
        assert_eq!(writers(2, &items, &[0, 1, 0, 1]), [0, 3]);
        assert_eq!(
            writers(1, &[Item { bytes: u64::MAX, holders: 0..1 }, Item { bytes: 9, holders: 1..2 }], &[0, 0]),
            [0, 1]
        );
    }
}
