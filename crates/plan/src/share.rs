//! Plans shared reads: which rank reads bytes that several ranks want, and for which others.
//!
//! 1. One rank has all ranks' wants. [`share`] finds the wants that touch the same blocks of the files. It gives each
//!    rank the ranks that share its wants, and the other wants in those blocks ([`Common`]). Equal wants are given
//!    once, with the set of their ranks; a rank gets no wants with which it has no block in common.
//! 2. From then on each rank plans alone ([`Sharing`]). The blocks that it wants are cut into [`Chunk`]s, each wanted
//!    by the same ranks throughout, and those ranks take turns at reading, by bytes. The reader of a chunk follows from
//!    the ranks that want it and from its place among all chunks that the same ranks want, all of which each of them
//!    knows. So they agree without a message.
//!
//! Blocks are the checksummed ones, the smallest unit that can be read and proven: ranks that want different columns of
//! a matrix want the same blocks.

mod chunks;
mod part;
mod sweep;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardfast_format::{Manifest, Region};

pub use chunks::{CHUNK_BLOCKS_MAX, Chunk, Chunks, Sharing};

use crate::error::{Error, Problems};
use crate::load::Piece;
use crate::ranks::ranges;

/// A tensor's region or an object's value that a rank wants, in terms of the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Wanted {
    /// Index of a tensor or an object in the manifest.
    pub leaf: u32,
    /// Region of the tensor; for an object `[v:v + 1]`, its value number `v`.
    pub region: Region,
}

impl Wanted {
    /// Makes the want of value number `value` of the object `leaf`.
    pub fn of_value(leaf: u32, value: u64) -> Wanted {
        Wanted { leaf, region: Region::new(&[value], &[1]) }
    }

    fn value(&self) -> Option<usize> {
        match (self.region.offsets.as_slice(), self.region.lengths.as_slice()) {
            (&[value], [1]) => usize::try_from(value).ok(),
            _ => None,
        }
    }
}

/// Wants that one rank shares with others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Common {
    /// Sets of ranks. Empty if none of this rank's wants has anything in common with another's.
    pub sets: Vec<Vec<Range<u32>>>,
    /// Index of the set of all ranks with the same want, per want of this rank, in its order.
    pub own: Vec<u32>,
    /// Wants of other ranks in the blocks that this rank wants, each with the index of the set of these ranks.
    pub others: Vec<(Wanted, u32)>,
}

/// Wants that ranks share, for all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matching {
    /// Shared wants, per rank.
    pub common: Vec<Common>,
    /// Bytes read in all if each rank read whole blocks for itself. Gaps between the elements of one want count as
    /// wanted.
    pub bytes_for_each: u64,
    /// Bytes read in all if each block is read once.
    pub bytes_for_all: u64,
    /// Largest number of ranks with which one rank has something in common.
    pub peers_max: u32,
}

/// Finds the wants that ranks share. `wants` has the wants of each rank, sorted, none twice. Returns `None` when all
/// answers together would have more than `others_max` wants of others.
///
/// # Errors
/// [`Error::Invalid`] when a want is no part of the checkpoint.
pub fn share(manifest: &Manifest, wants: &[Vec<Wanted>], others_max: usize) -> Result<Option<Matching>, Error> {
    let mut ids: HashMap<&Wanted, u32> = HashMap::new();
    let mut items: Vec<&Wanted> = Vec::new();
    let mut holders: Vec<Vec<u32>> = Vec::new();
    let mut of_rank: Vec<Vec<u32>> = Vec::with_capacity(wants.len());
    for (rank, wants) in (0u32..).zip(wants) {
        if !wants.is_sorted_by(|a, b| a < b) {
            return Err(Error::Invalid(Problems(vec![format!("rank {rank}: its wants are not sorted")])));
        }
        let ids = wants.iter().map(|wanted| {
            let id = *ids.entry(wanted).or_insert_with(|| {
                items.push(wanted);
                holders.push(Vec::new());
                items.len() as u32 - 1
            });
            holders[id as usize].push(rank);
            id
        });
        of_rank.push(ids.collect());
    }
    let mut sets = Sets::default();
    let set_of: Vec<u32> = holders.into_iter().map(|ranks| sets.of(ranks)).collect();

    let parts = part::parts(manifest, items.iter().copied())?;
    let Some(swept) = sweep::sweep(manifest, &parts, &set_of, &mut sets, others_max) else { return Ok(None) };

    let mut peers_max = 0;
    let mut peers_of: HashMap<Vec<u32>, u32> = HashMap::new();
    let common = (0u32..).zip(&of_rank).map(|(rank, own)| {
        let mut others = BTreeSet::new();
        for &id in own {
            others.extend(
                swept.beside(id).filter(|&other| sets.ranks(set_of[other as usize]).binary_search(&rank).is_err()),
            );
        }
        let known: BTreeSet<u32> =
            own.iter().copied().chain(others.iter().copied()).map(|id| set_of[id as usize]).collect();
        let known: Vec<u32> = known.into_iter().collect();
        let number: HashMap<u32, u32> = known.iter().copied().zip(0..).collect();
        let peers = *peers_of.entry(known.clone()).or_insert_with(|| {
            let all: BTreeSet<u32> = known.iter().flat_map(|&set| sets.ranks(set).iter()).copied().collect();
            all.len().saturating_sub(1) as u32
        });
        if peers == 0 {
            return Common::default();
        }
        peers_max = peers_max.max(peers);
        let number = |id: u32| number[&set_of[id as usize]];
        Common {
            sets: known.iter().map(|&set| ranges(sets.ranks(set).iter().copied())).collect(),
            own: own.iter().map(|&id| number(id)).collect(),
            others: others.into_iter().map(|id| (items[id as usize].clone(), number(id))).collect(),
        }
    });
    let common = common.collect();
    Ok(Some(Matching { common, bytes_for_each: swept.bytes_for_each, bytes_for_all: swept.bytes_for_all, peers_max }))
}

/// Sets of ranks, each stored once.
#[derive(Debug, Clone, Default)]
struct Sets {
    ranks: Vec<Arc<[u32]>>,
    ids: HashMap<Arc<[u32]>, u32>,
    unions: HashMap<Vec<u32>, u32>,
}

impl Sets {
    /// Returns the index of the set of these ascending, distinct ranks.
    fn of(&mut self, ranks: Vec<u32>) -> u32 {
        if let Some(&id) = self.ids.get(ranks.as_slice()) {
            return id;
        }
        let id = self.ranks.len() as u32;
        let ranks: Arc<[u32]> = ranks.into();
        self.ranks.push(Arc::clone(&ranks));
        self.ids.insert(ranks, id);
        id
    }

    /// Returns the index of the union of sets, given ascending and distinct.
    fn union(&mut self, sets: &[u32]) -> u32 {
        if let [set] = sets {
            return *set;
        }
        if let Some(&id) = self.unions.get(sets) {
            return id;
        }
        let ranks: BTreeSet<u32> = sets.iter().flat_map(|&set| self.ranks(set).iter()).copied().collect();
        let id = self.of(ranks.into_iter().collect());
        self.unions.insert(sets.to_vec(), id);
        id
    }

    fn ranks(&self, set: u32) -> &Arc<[u32]> {
        &self.ranks[set as usize]
    }
}

impl Piece {
    /// Returns the size of an element, in bytes.
    pub fn item_bytes(&self) -> u64 {
        self.src_strides.last().copied().unwrap_or(self.span_bytes)
    }

    /// Returns the bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.lengths.iter().product::<u64>() * self.item_bytes()
    }
}
