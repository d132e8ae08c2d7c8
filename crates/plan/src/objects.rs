//! Which rank writes which encoded value for whom.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use shardfast_format::LeafBody;

use crate::error::{Error, Problems};
use crate::ranks::ranges;
use crate::save::SavePlan;

/// One value to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectWrite {
    /// Index in [`SavePlan::leaves`].
    pub leaf: u32,
    /// The rank that writes it: the lowest that has it.
    pub writer: u32,
    /// Every rank that has this value, ascending.
    pub ranks: Vec<Range<u32>>,
}

/// Stores equal values of a leaf once, and different ones once each. `digests` has, per rank, the index in
/// [`SavePlan::leaves`] and the SHA-256 of the encoded value of each object that the rank holds. The result is sorted
/// by leaf and writer.
///
/// Values declared per rank are merged too where they are equal: each rank gets its own back all the same.
///
/// # Errors
/// [`Error::Invalid`] naming every value whose digest is lacking, given twice or of no object that the rank holds.
pub fn objects(plan: &SavePlan, digests: &[Vec<(u32, [u8; 32])>]) -> Result<Vec<ObjectWrite>, Error> {
    let mut problems = Vec::new();
    if digests.len() != plan.merged.len() {
        problems.push(format!("digests of {} ranks for a plan of {}", digests.len(), plan.merged.len()));
    }
    let mut copies: Vec<(u32, [u8; 32], u32)> = Vec::new();
    for (rank, (held, given)) in (0u32..).zip(plan.merged.iter().zip(digests)) {
        let is_object = |&leaf: &u32| matches!(plan.leaves[leaf as usize].body, LeafBody::Object { .. });
        let mut expected: Vec<u32> = held.iter().copied().filter(is_object).collect();
        expected.sort_unstable();
        let mut found: Vec<u32> = given.iter().map(|&(leaf, _)| leaf).collect();
        found.sort_unstable();
        if expected != found {
            problems.extend(mismatches(plan, rank, &expected, &found));
        }
        copies.extend(given.iter().map(|&(leaf, digest)| (leaf, digest, rank)));
    }
    if !problems.is_empty() {
        return Err(Error::Invalid(Problems(problems)));
    }

    copies.sort_unstable();
    let same = copies.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1));
    let mut writes: Vec<ObjectWrite> = same
        .map(|same| ObjectWrite { leaf: same[0].0, writer: same[0].2, ranks: ranges(same.iter().map(|copy| copy.2)) })
        .collect();
    writes.sort_unstable_by_key(|write| (write.leaf, write.writer));
    Ok(writes)
}

/// How the sorted leaves of the digests that `rank` gave differ from those of the objects that it holds.
fn mismatches(plan: &SavePlan, rank: u32, expected: &[u32], found: &[u32]) -> Vec<String> {
    let name = |leaf: u32| match plan.leaves.get(leaf as usize) {
        Some(leaf) => leaf.name.to_string(),
        None => format!("leaf {leaf} of {}", plan.leaves.len()),
    };
    let lacking = expected.iter().filter(|leaf| found.binary_search(leaf).is_err());
    let foreign = found.iter().filter(|leaf| expected.binary_search(leaf).is_err());
    let twice = found.windows(2).filter(|pair| pair[0] == pair[1]);
    let lacking = lacking.map(|&leaf| format!("{}: rank {rank} holds this value and gave no digest of it", name(leaf)));
    let foreign =
        foreign.map(|&leaf| format!("{}: rank {rank} gave a digest of what it holds no value of", name(leaf)));
    let twice = twice.map(|pair| format!("{}: rank {rank} gave two digests of one value", name(pair[0])));
    lacking.chain(foreign).chain(twice).collect()
}
