//! Computes the tree of ranks, alike on every rank, from three numbers.
//!
//! Every subtree is a run of consecutive ranks under its lowest one. Ranks of a node come first under the lowest rank
//! of that node; groups of nodes come under the lowest rank of the group, groups of groups likewise, until rank 0 is
//! left (ByteCheckpoint, NSDI 2025, section 5.2). There a leader has children at each of its levels; here all its
//! children together are at most the fan-out, so that no rank has more connections or messages than that, and the depth
//! grows with the logarithm of the world.

use std::ops::Range;

use crate::Error;

/// Smallest fan-out at which nodes are kept together: a leader needs one child for the rest of its node and two for
/// other nodes, or the depth would not be logarithmic.
const FAN_OUT_OF_NODES_MIN: u32 = 3;

/// Tree of the ranks of one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    world: u32,
    local_world: u32,
    fan_out: u32,
}

impl Topology {
    /// Default fan-out: the ranks of a usual node and two dozen groups of nodes below one rank, so that 100,000 ranks
    /// are five levels.
    pub const FAN_OUT_DEFAULT: u32 = 32;

    /// Makes the tree of `world` ranks, in which each run of `local_world` shares a node (the last one may be smaller)
    /// and no rank has more than `fan_out` children.
    ///
    /// Nodes only determine which messages stay within a machine. If real nodes have other sizes, the tree is still
    /// valid.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `world` or `local_world` is 0, or `fan_out` is below 2.
    pub fn new(world: u32, local_world: u32, fan_out: u32) -> Result<Topology, Error> {
        let least = |what: &str, least: u32, found: u32| {
            if found >= least {
                Ok(())
            } else {
                Err(Error::Invalid(format!("{what} is at least {least}, found {found}")))
            }
        };
        least("the number of ranks in a world", 1, world)?;
        least("the number of ranks on a node", 1, local_world)?;
        least("the fan-out of a tree", 2, fan_out)?;
        Ok(Topology { world, local_world: local_world.min(world), fan_out })
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Returns the number of ranks on a node.
    pub fn local_world(&self) -> u32 {
        self.local_world
    }

    /// Returns the most children that a rank may have.
    pub fn fan_out(&self) -> u32 {
        self.fan_out
    }

    /// Returns the rank that `rank` reports to; `None` for rank 0 and for a number that is no rank.
    pub fn parent(&self, rank: u32) -> Option<u32> {
        self.position(rank).parent
    }

    /// Returns `rank` and all ranks below it; empty for a number that is no rank.
    pub fn subtree(&self, rank: u32) -> Range<u32> {
        self.position(rank).subtree
    }

    /// Returns the subtrees below `rank` in ascending order; the first rank of each is the child.
    pub fn children(&self, rank: u32) -> Vec<Range<u32>> {
        self.position(rank).children
    }

    /// Returns the number of levels below `rank`; 0 when it has no children.
    pub fn height(&self, rank: u32) -> u32 {
        self.position(rank).height
    }

    /// Returns the number of levels in `below`. The largest part within a node and the largest group of nodes are the
    /// deepest.
    fn levels(&self, below: &[Range<u32>]) -> u32 {
        let is_group = |subtree: &&Range<u32>| subtree.start.is_multiple_of(self.local_world);
        let largest =
            |subtrees: &mut dyn Iterator<Item = &Range<u32>>| subtrees.max_by_key(|subtree| subtree.len()).cloned();
        let deepest = [
            largest(&mut below.iter().filter(|subtree| !is_group(subtree))),
            largest(&mut below.iter().filter(is_group)),
        ];
        deepest.into_iter().flatten().map(|subtree| 1 + self.levels(&self.split(subtree))).max().unwrap_or(0)
    }

    /// Finds a rank's position, on one walk down the tree.
    pub(crate) fn position(&self, rank: u32) -> Position {
        let (mut parent, mut subtree) = (None, 0..self.world);
        while subtree.start != rank {
            parent = Some(subtree.start);
            match self.split(subtree).into_iter().find(|subtree| subtree.contains(&rank)) {
                Some(below) => subtree = below,
                None => return Position { parent: None, subtree: rank..rank, children: Vec::new(), height: 0 },
            }
        }
        let children = self.split(subtree.clone());
        let height = self.levels(&children);
        Position { parent, subtree, children, height }
    }

    /// Returns the subtrees below the first rank of `subtree`.
    fn split(&self, subtree: Range<u32>) -> Vec<Range<u32>> {
        let Range { start, end } = subtree;
        let local_world = if self.fan_out < FAN_OUT_OF_NODES_MIN { 1 } else { self.local_world };
        let node_ends = start.saturating_add(local_world - start % local_world).min(end);
        let (rest, nodes) = (node_ends.saturating_sub(start + 1), (end - node_ends).div_ceil(local_world));
        let for_nodes = nodes.min(self.fan_out.div_ceil(2));
        let for_rest = rest.min(self.fan_out - for_nodes);
        let for_nodes = nodes.min(self.fan_out - for_rest);
        let of_rest = deal(rest, for_rest).map(|Range { start: from, end: to }| start + 1 + from..start + 1 + to);
        let of_nodes = deal(nodes, for_nodes).map(|Range { start: from, end: to }| {
            let at = |node: u32| u64::from(node_ends) + u64::from(node) * u64::from(local_world);
            at(from) as u32..at(to).min(u64::from(end)) as u32
        });
        of_rest.chain(of_nodes).collect()
    }
}

/// Position of one rank in the tree.
pub(crate) struct Position {
    pub(crate) parent: Option<u32>,
    pub(crate) subtree: Range<u32>,
    pub(crate) children: Vec<Range<u32>>,
    pub(crate) height: u32,
}

/// Divides `count` items into `parts` runs that differ by one at most.
fn deal(count: u32, parts: u32) -> impl Iterator<Item = Range<u32>> {
    let at = move |part: u32| (u64::from(count) * u64::from(part) / u64::from(parts)) as u32;
    (0..parts).map(move |part| at(part)..at(part + 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tree(world: u32, local_world: u32, fan_out: u32) -> Topology {
        Topology::new(world, local_world, fan_out).unwrap()
    }

    fn below(topology: Topology, rank: u32) -> Vec<u32> {
        topology.children(rank).iter().map(|child| child.start).collect()
    }

    #[test]
    fn nodes_come_first_and_then_groups_of_nodes() {
        let star = tree(8, 8, 32);
        assert_eq!(below(star, 0), [1, 2, 3, 4, 5, 6, 7]);
        let nodes = tree(16, 4, 6);
        assert_eq!(below(nodes, 0), [1, 2, 3, 4, 8, 12]);
        assert_eq!(below(nodes, 8), [9, 10, 11]);
        // A node larger than the fan-out has levels of its own.
        let wide = tree(32, 16, 4);
        assert_eq!(below(wide, 0), [1, 6, 11, 16]);
        assert_eq!(below(wide, 16), [17, 20, 24, 28]);
        // Groups of nodes: those of one rank are of one size, and begin with a node.
        let groups = tree(40, 2, 4);
        assert_eq!(below(groups, 0), [1, 2, 14, 26]);
        assert_eq!(groups.parent(27), Some(26));
        // The last node is not full.
        assert_eq!(below(tree(10, 4, 8), 0), [1, 2, 3, 4, 8]);
        assert_eq!(tree(10, 4, 8).subtree(8), 8..10);
        assert_eq!(below(tree(8, 1, 2), 0), [1, 4]);
    }

    #[test]
    fn a_hundred_thousand_ranks_are_few_levels() {
        for (world, fan_out, most) in [(8_960, 32, 4), (100_000, 32, 5), (100_000, 64, 4), (1_000, 8, 6)] {
            let topology = tree(world, 8, fan_out);
            assert!(topology.height(0) <= most, "{topology:?}: {}", topology.height(0));
        }
    }

    #[test]
    fn what_makes_no_tree_is_refused() {
        let refused = |world, local_world, fan_out| Topology::new(world, local_world, fan_out).unwrap_err().to_string();
        assert_eq!(refused(0, 1, 2), "the number of ranks in a world is at least 1, found 0");
        assert_eq!(refused(4, 0, 2), "the number of ranks on a node is at least 1, found 0");
        assert_eq!(refused(4, 1, 1), "the fan-out of a tree is at least 2, found 1");
        let topology = tree(4, 1, 2);
        assert_eq!((topology.parent(4), topology.subtree(4), topology.children(4)), (None, 4..4, vec![]));
    }

    #[test]
    fn the_largest_world_does_not_overflow() {
        let topology = tree(u32::MAX, 7, 16);
        assert_eq!(topology.subtree(0), 0..u32::MAX);
        assert!(topology.parent(u32::MAX - 1).is_some());
    }

    proptest! {
        #[test]
        fn every_rank_is_below_rank_0_once(world in 1_u32..700, local_world in 1_u32..40, fan_out in 2_u32..12) {
            let topology = tree(world, local_world, fan_out);
            let mut children_seen = 0;
            for rank in 0..world {
                let (subtree, children) = (topology.subtree(rank), topology.children(rank));
                prop_assert!(children.len() <= fan_out as usize);
                // Rank and children's subtrees are the subtree, without gap or overlap.
                let mut next = rank + 1;
                for child in &children {
                    prop_assert_eq!(child.start, next);
                    prop_assert!(child.end > child.start);
                    prop_assert_eq!(topology.parent(child.start), Some(rank));
                    next = child.end;
                }
                prop_assert_eq!(next, subtree.end);
                children_seen += children.len() as u32;
            }
            prop_assert_eq!(children_seen, world - 1);
            let depth = |rank| std::iter::successors(Some(rank), |rank| topology.parent(*rank)).count() as u32 - 1;
            prop_assert_eq!(Some(topology.height(0)), (0..world).map(depth).max());
            // Levels of nodes and levels within a node; each splits what is left by 2 at least.
            let levels = |count: u32| count.next_power_of_two().ilog2() + 1;
            prop_assert!(topology.height(0) <= levels(world.div_ceil(local_world)) + levels(local_world) + 1);
        }

        #[test]
        fn only_leaders_talk_across_nodes(nodes in 1_u32..40, local_world in 1_u32..10, fan_out in 3_u32..12) {
            let topology = tree(nodes * local_world, local_world, fan_out);
            for rank in 1..topology.world() {
                let parent = topology.parent(rank).unwrap();
                prop_assert!(parent < rank);
                if parent / local_world != rank / local_world {
                    prop_assert_eq!((parent % local_world, rank % local_world), (0, 0));
                }
            }
        }
    }
}
