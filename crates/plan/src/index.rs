//! Finds the regions of a tensor that meet a box, without looking at all of them.

use shardfast_format::Region;

/// Number of regions in a node that is not divided further.
const LEAF_MAX: usize = 8;

/// A bounding-volume tree over disjoint regions: each node halves its regions along the dimension that cuts them most.
/// For shards of one dimension this is a binary search, for a mesh one in every sharded dimension. The same holds for
/// uneven shards and decomposed flat runs.
pub(crate) struct Index<'a> {
    regions: &'a [Region],
    /// Indices of `regions`, in the order of the tree's leaves.
    order: Vec<usize>,
    /// Nodes in pre-order.
    nodes: Vec<Node>,
}

struct Node {
    bounds: Region,
    /// Index of the node after this one's subtree.
    next: usize,
    /// First index in `order` of the node's own regions; an inner node has a `count` of 0.
    first: usize,
    count: usize,
}

impl<'a> Index<'a> {
    /// Indexes regions that lie inside one shape, except those without elements.
    pub(crate) fn new(regions: &'a [Region]) -> Index<'a> {
        let order: Vec<usize> = (0..regions.len()).filter(|&i| !regions[i].is_empty()).collect();
        let mut index = Index { regions, nodes: Vec::new(), order };
        index.grow(0, index.order.len());
        index
    }

    fn grow(&mut self, first: usize, count: usize) {
        let (regions, order) = (self.regions, &mut self.order[first..first + count]);
        let Some(bounds) = bounds(order.iter().map(|&i| &regions[i])) else { return };
        let node = self.nodes.len();
        if count <= LEAF_MAX {
            self.nodes.push(Node { bounds, next: node + 1, first, count });
            return;
        }
        // Number of cuts: how many times longer than its regions the node is.
        let cuts =
            |d: usize| bounds.lengths[d] as f64 / order.iter().map(|&i| regions[i].lengths[d] as f64).sum::<f64>();
        let most = (0..bounds.ndim()).max_by(|&a, &b| cuts(a).total_cmp(&cuts(b)));
        let half = count / 2;
        if let Some(d) = most {
            order.select_nth_unstable_by_key(half, |&i| (regions[i].offsets[d], i));
        }
        self.nodes.push(Node { bounds, next: 0, first, count: 0 });
        self.grow(first, half);
        self.grow(first + half, count - half);
        self.nodes[node].next = self.nodes.len();
    }

    /// Adds to `found` the regions that meet `wanted`, each with the common part, in a fixed but arbitrary order.
    /// Returns the number of nodes and regions that were visited.
    pub(crate) fn search(&self, wanted: &Region, found: &mut Vec<(usize, Region)>) -> usize {
        let mut looked = 0;
        let mut at = 0;
        while let Some(node) = self.nodes.get(at) {
            looked += 1 + node.count;
            if node.bounds.intersect(wanted).is_none() {
                at = node.next;
                continue;
            }
            for &i in &self.order[node.first..node.first + node.count] {
                found.extend(self.regions[i].intersect(wanted).map(|common| (i, common)));
            }
            at += 1;
        }
        looked
    }
}

/// Returns the smallest box around regions; `None` if there are none.
fn bounds<'a>(mut regions: impl Iterator<Item = &'a Region>) -> Option<Region> {
    let mut bounds = regions.next()?.clone();
    for region in regions {
        for d in 0..bounds.ndim() {
            let end = (bounds.offsets[d] + bounds.lengths[d]).max(region.offsets[d] + region.lengths[d]);
            bounds.offsets[d] = bounds.offsets[d].min(region.offsets[d]);
            bounds.lengths[d] = end - bounds.offsets[d];
        }
    }
    Some(bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches for every wanted region, compares with the regions that meet it by definition, and returns the mean
    /// number of nodes and regions visited.
    fn mean_looked(saved: &[Region], wanted: &[Region], expected: impl Fn(&Region) -> usize) -> usize {
        let index = Index::new(saved);
        let mut looked = 0;
        for want in wanted {
            let mut found = Vec::new();
            looked += index.search(want, &mut found);
            assert_eq!(found.len(), expected(want), "{want}");
            assert_eq!(found.iter().map(|(_, common)| common.numel()).sum::<u64>(), want.numel(), "{want}");
            assert!(found.iter().all(|(i, common)| saved[*i].intersect(want).as_ref() == Some(common)));
        }
        looked / wanted.len()
    }

    #[test]
    fn shards_of_one_dimension_are_found_by_binary_search() {
        let saved: Vec<Region> = (0..4096).map(|i| Region::new(&[0, i * 10], &[8, 10])).collect();
        let wanted: Vec<Region> = (0..4095).map(|i| Region::new(&[0, i * 10 + 5], &[8, 10])).collect();
        assert!(mean_looked(&saved, &wanted, |_| 2) < 64);
    }

    #[test]
    fn shards_of_any_dimension_are_found_alike() {
        for d in 0..3 {
            let shard = |i: u64| {
                let mut shard = Region::whole(&[1024; 3]);
                (shard.offsets[d], shard.lengths[d]) = (i, 1);
                shard
            };
            // In no order that would help.
            let saved: Vec<Region> = (0..1024).map(|i| shard(i * 389 % 1024)).collect();
            assert!(mean_looked(&saved, &saved, |_| 1) < 64);
        }
    }

    #[test]
    fn a_mesh_of_shards_is_searched_in_every_dimension() {
        let n = 64;
        let saved: Vec<Region> = (0..n * n).map(|i| Region::new(&[i / n * 3, i % n * 500], &[3, 500])).collect();
        let wanted: Vec<Region> = (0..n * n).map(|i| Region::new(&[i / n * 3, i % n * 500], &[1, 500])).collect();
        assert!(mean_looked(&saved, &wanted, |_| 1) < 64);
    }

    #[test]
    fn flat_runs_are_searched_too() {
        let shape = [300, 7, 11];
        let saved: Vec<Region> = (0..1100).flat_map(|i| Region::flat_run(&shape, i * 21, (i + 1) * 21)).collect();
        let wanted: Vec<Region> = (0..700).flat_map(|i| Region::flat_run(&shape, i * 33, (i + 1) * 33)).collect();
        let expected = |want: &Region| saved.iter().filter(|region| region.intersect(want).is_some()).count();
        assert!(mean_looked(&saved, &wanted, expected) < 64);
    }

    #[test]
    fn nothing_and_scalars_are_found() {
        let mut found = Vec::new();
        Index::new(&[]).search(&Region::whole(&[4]), &mut found);
        Index::new(&[Region::new(&[0], &[0])]).search(&Region::whole(&[4]), &mut found);
        assert_eq!(found, []);
        let scalar = [Region::whole(&[])];
        Index::new(&scalar).search(&scalar[0], &mut found);
        assert_eq!(found, [(0, scalar[0].clone())]);
    }
}
