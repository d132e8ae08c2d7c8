//! Keeps small parts together on one rank.
//!
//! Replicas can drift apart unnoticed (statistics of normalisation layers under data parallelism), and a mean of one
//! rank beside a variance of another is a state of no rank. So one rank writes the small parts below one name, together
//! with neighbours up to a block in all. That also avoids file entries of a few bytes. It keeps the balance to 2 % or a
//! block, unless the small parts below one name are more than a block in all: one rank still writes them.

use std::collections::HashMap;

use shardfast_format::{BLOCK_BYTES, LeafName};

use crate::balance::{Item, Share, divide};

/// Largest size of a small part, in bytes.
const SMALL_BYTES_MAX: u64 = BLOCK_BYTES / 4;

/// Small parts of one class, in order.
struct Bundle<'a> {
    item: Item,
    members: Vec<usize>,
    /// Parent name of the last members, and their bytes.
    last: (&'a str, &'a str),
    last_bytes: u64,
}

/// Divides like [`divide`], with all small items below one name on one rank. `names` are those of the items.
pub(crate) fn divide_together(world: usize, classes: &[Vec<u32>], items: &[Item], names: &[&LeafName]) -> Vec<Share> {
    let mut bundles: Vec<Bundle> = Vec::new();
    let mut open: HashMap<usize, usize> = HashMap::new();
    let mut alone: Vec<usize> = Vec::new();
    for (index, (item, name)) in items.iter().zip(names).enumerate() {
        if item.bytes > SMALL_BYTES_MAX || classes[item.class].len() == 1 {
            alone.push(index);
            continue;
        }
        let parent = (name.key.as_str(), name.name.rsplit_once('.').map_or("", |(parent, _)| parent));
        let bundle = open.get(&item.class).map(|&bundle| &mut bundles[bundle]);
        let new = |members: Vec<usize>, bytes: u64| Bundle {
            item: Item { bytes, rows: 1, ..*item },
            members,
            last: parent,
            last_bytes: bytes,
        };
        match bundle {
            Some(bundle) if bundle.item.bytes + item.bytes <= BLOCK_BYTES || bundle.is_all_below(parent) => {
                if bundle.last != parent {
                    (bundle.last, bundle.last_bytes) = (parent, 0);
                }
                bundle.last_bytes += item.bytes;
                bundle.item.bytes += item.bytes;
                bundle.members.push(index);
            }
            Some(bundle) => {
                // Members below this name stay together.
                let mut taken = if bundle.last == parent { bundle.give_last(items) } else { Vec::new() };
                let bytes = taken.iter().map(|&index| items[index].bytes).sum::<u64>() + item.bytes;
                taken.push(index);
                open.insert(item.class, bundles.len());
                bundles.push(new(taken, bytes));
            }
            None => {
                open.insert(item.class, bundles.len());
                bundles.push(new(vec![index], item.bytes));
            }
        }
    }
    let merged: Vec<Item> = alone.iter().map(|&index| items[index]).chain(bundles.iter().map(|b| b.item)).collect();
    let mut shares = Vec::with_capacity(items.len());
    for share in divide(world, classes, &merged) {
        match share.item.checked_sub(alone.len()) {
            None => shares.push(Share { item: alone[share.item], ..share }),
            Some(bundle) => shares.extend(bundles[bundle].members.iter().map(|&item| Share { item, ..share })),
        }
    }
    shares.sort_unstable();
    shares
}

impl Bundle<'_> {
    fn is_all_below(&self, parent: (&str, &str)) -> bool {
        self.last == parent && self.last_bytes == self.item.bytes
    }

    /// Removes and returns the members below the last name.
    fn give_last(&mut self, items: &[Item]) -> Vec<usize> {
        let mut left = self.last_bytes;
        let mut at = self.members.len();
        while left > 0 && at > 0 {
            at -= 1;
            left -= items[self.members[at]].bytes.min(left);
        }
        self.item.bytes -= self.last_bytes;
        self.members.split_off(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rank of each item of one class on two ranks.
    fn ranks(parts: &[(&str, u64)]) -> Vec<u32> {
        let names: Vec<LeafName> = parts.iter().map(|(name, _)| LeafName::new("model", *name)).collect();
        let items: Vec<Item> = parts.iter().map(|&(_, bytes)| Item { bytes, rows: 1, spared: 0, class: 0 }).collect();
        let shares = divide_together(2, &[vec![0, 1]], &items, &names.iter().collect::<Vec<_>>());
        assert!(shares.iter().map(|share| share.item).eq(0..items.len()));
        shares.iter().map(|share| share.rank).collect()
    }

    #[test]
    fn what_hangs_below_one_name_stays_together() {
        const KIB: u64 = 1 << 10;
        // All of it is less than a block.
        assert_eq!(ranks(&[("0.mean", 8), ("0.var", 8), ("1.mean", 8), ("1.var", 8)]), [0; 4]);
        // The second name does not fit any more, and is not torn.
        let statistics =
            [("0.a", 16 * KIB), ("0.b", 16 * KIB), ("1.a", 16 * KIB), ("1.b", 16 * KIB), ("1.c", 16 * KIB)];
        let found = ranks(&statistics);
        assert_eq!(found, [1, 1, 0, 0, 0]);
        // One name of more than a block stays one.
        let found =
            ranks(&[("n.a", 16 * KIB), ("n.b", 16 * KIB), ("n.c", 16 * KIB), ("n.d", 16 * KIB), ("n.e", 16 * KIB)]);
        assert_eq!(found, [0; 5]);
        // Large parts are shared as usual.
        assert_eq!(ranks(&[("a", 900 * KIB), ("b", 900 * KIB), ("c", 4), ("d", 4)]), [0, 1, 0, 0]);
    }
}
