//! Compares the ranks' replicas.
//!
//! Ranks that hold the same region of a tensor count as replicas, and share its writing. A state with different tensors
//! under one name (experts that have the same name on every rank, pipeline stages that begin at `0` each) would lose
//! all copies but one, or become a mixture. So the first save of each plan compares them: every rank has a CRC-64 of
//! each copy that it holds, of written bytes and of bytes that it [only reads](shardfast_transfer::sums), and rank 0
//! compares.
//!
//! Ranks that know the holders of their tensors send one digest for each set of ranks; the others send everything, and
//! so do all ranks when digests differ, for the error message. A rank that remembers the plan, and that its replicas
//! were equal, reads nothing more. If another rank's plan has changed meanwhile, its new regions are compared with the
//! first rank's writes; if these are only a share of the region, the save fails, and the next one compares anew. A
//! region is new on a rank that did not hold it in the plan that the first rank remembers. After saves that overlap,
//! ranks may remember different plans; rank 0 then looks up each rank's holdings in them.
//!
//! Copies that are not compared may differ: each region of theirs comes from one rank, the lowest that holds it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, LeafBody, LeafName, Region, sha256};
use shardfast_plan::{RankSet, Replicas, Write};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::sums::{self, Part, Summed};

use crate::operation::Operation;
use crate::planning::{self, RankPlan};
use crate::plans::{Basis, GlobalPlan, Holdings, PlanId, Rules};
use crate::state::{Compared, PartRange, Prove, State};

/// Differences that one message lists.
const SPELLED_MAX: usize = 16;

/// Leaves of a rank's state that a save compares, before it is known whether another save has done so.
pub(crate) struct Scope {
    pub(crate) rules: Arc<Rules>,
    /// The others that the first save of a plan compares; ascending.
    first: Vec<u32>,
    prove: Prove,
    is_alone: bool,
    /// The plan with replicas that this rank trusts to be equal, and does not read.
    trusted: Option<PlanId>,
    /// Last plan whose replicas were equal, and this rank's catalog then.
    before: Option<(PlanId, Arc<Catalog>)>,
}

impl Scope {
    pub(crate) fn of(state: &State, prove: Prove, world: u32, data_at: u64) -> Scope {
        let (is_alone, trusted, before) = (world == 1, None, None);
        let mut rules = Rules { data_at, ..Rules::default() };
        let mut scope = Scope { rules: Arc::new(rules.clone()), first: Vec::new(), prove, is_alone, trusted, before };
        if is_alone {
            return scope;
        }
        for (index, ..) in tensors(&state.catalog) {
            let compared = state.compared.get(index as usize).copied().unwrap_or_default();
            match (compared, prove) {
                (Compared::EverySave, _) => rules.always.push(index),
                (Compared::FirstSave, Prove::FirstSave | Prove::EverySave)
                | (Compared::OnRequest, Prove::EverySave) => scope.first.push(index),
                _ => rules.unshared.push(index),
            }
        }
        scope.rules = Arc::new(rules);
        scope
    }

    /// Returns whether ranks compare their copies under this plan. The same on all of them.
    pub(crate) fn compares(&self, plan: &RankPlan) -> bool {
        let status = plan.status;
        let is_due = match self.prove {
            Prove::Nothing => false,
            Prove::FirstSave => !status.is_proven,
            Prove::EverySave => true,
        };
        is_due || status.compares_always
    }

    /// Returns the entry of a save's report.
    pub(crate) fn outcome(&self, plan: &RankPlan) -> &'static str {
        match self.prove {
            _ if self.is_alone => "none: one rank holds all",
            Prove::Nothing => "not compared: of each region the lowest rank's copy",
            _ if plan.status.shares_nothing => "none: no tensor to compare",
            Prove::FirstSave if plan.status.is_proven => "compared by an earlier save",
            Prove::FirstSave | Prove::EverySave => "compared",
        }
    }

    /// Records the last plan with equal replicas, this rank's catalog then, and whether this save begins with that
    /// plan.
    pub(crate) fn remember(&mut self, before: Option<(PlanId, Arc<Catalog>)>, begins_with: Option<PlanId>) {
        self.before = before;
        self.trusted = begins_with.filter(|_| self.prove != Prove::EverySave);
    }

    /// Returns the ranges that this rank must read and does not write: all else that it holds of the compared leaves,
    /// or only of those that every save compares if it trusts the others.
    pub(crate) fn unwritten(&self, catalog: &Catalog, writes: &[Write]) -> Vec<PartRange> {
        let first = if self.trusted.is_some() { &[][..] } else { &self.first };
        let mut read = Vec::new();
        for &leaf in self.rules.always.iter().chain(first) {
            let LeafBody::Tensor { dtype, parts, .. } = &catalog.leaves[leaf as usize].body else { continue };
            for (part, region) in (0u32..).zip(parts) {
                let (mut at, end) = (0, region.numel() * dtype.size_bytes());
                let from = writes.partition_point(|write| (write.leaf, write.part) < (leaf, part));
                let mine = writes[from..].iter().take_while(|write| (write.leaf, write.part) == (leaf, part));
                for write in mine {
                    // An invalid rank plan fails when it is carried out.
                    let Some(written) = write.region(region) else { continue };
                    let start = write.skipped(region) * dtype.size_bytes();
                    read.push(PartRange { leaf, part, at, bytes: start.saturating_sub(at) });
                    at = start + written.numel() * dtype.size_bytes();
                }
                read.push(PartRange { leaf, part, at, bytes: end.saturating_sub(at) });
            }
        }
        read.retain(|range| range.bytes > 0);
        read
    }
}

/// Returns those ranges of the state, to be summed.
pub(crate) fn summed(state: &State, ranges: &[PartRange]) -> Result<Vec<Summed>> {
    let of = |range: &PartRange| {
        let provider = state.range(range)?;
        Ok(Summed { provider, name: state.catalog.leaves[range.leaf as usize].name.to_string() })
    };
    ranges.iter().map(of).collect()
}

/// Checksums of a rank's copies of the compared leaves.
pub(crate) struct Copies<'a> {
    catalog: &'a Catalog,
    scope: &'a Scope,
    by_part: HashMap<(u32, u32), Part>,
}

impl<'a> Copies<'a> {
    /// Combines the ranges that this rank has written and read.
    pub(crate) fn new(
        catalog: &'a Catalog,
        scope: &'a Scope,
        ranges: impl IntoIterator<Item = (PartRange, u64)>,
    ) -> Copies<'a> {
        let mut parts: HashMap<(u32, u32), Vec<Part>> = HashMap::new();
        for (PartRange { leaf, part, at, bytes }, crc) in ranges {
            parts.entry((leaf, part)).or_default().push(Part { at, bytes, crc });
        }
        let by_part = parts.into_iter().map(|(part, parts)| (part, sums::joined(parts))).collect();
        Copies { catalog, scope, by_part }
    }

    fn crc(&self, leaf: u32, part: u32, bytes: u64) -> Option<u64> {
        match self.by_part.get(&(leaf, part)) {
            Some(whole) => (whole.bytes == bytes).then_some(whole.crc),
            None => (bytes == 0).then_some(0),
        }
    }

    /// Returns the copies of a leaf.
    fn of(&self, leaf: u32) -> impl Iterator<Item = (&Region, Option<u64>)> {
        let (dtype, parts) = match &self.catalog.leaves[leaf as usize].body {
            LeafBody::Tensor { dtype, parts, .. } => (Some(*dtype), parts.as_slice()),
            _ => (None, &[][..]),
        };
        let item = dtype.map_or(0, |dtype| dtype.size_bytes());
        (0u32..).zip(parts).map(move |(part, region)| (region, self.crc(leaf, part, region.numel() * item)))
    }

    /// Returns one digest for each set of ranks.
    fn digests(&self, replicas: &Replicas) -> Contribution {
        let digest = |leaves: &[u32], group: u32| {
            let mine = leaves.iter().filter(|&&leaf| replicas.leaves.get(leaf as usize) == Some(&Some(group)));
            let crcs: Option<Vec<u64>> = mine.flat_map(|&leaf| self.of(leaf).map(|(_, crc)| crc)).collect();
            crcs.map(|crcs| {
                let mut digest = [0; 16];
                let bytes: Vec<u8> = crcs.into_iter().flat_map(u64::to_le_bytes).collect();
                digest.copy_from_slice(&sha256(&bytes)[..16]);
                digest
            })
        };
        let sets = (0u32..).zip(&replicas.groups).filter(|(_, ranks)| ranks.len() > 1);
        let of = |(group, ranks): (u32, &RankSet)| Digests {
            ranks: ranks.clone(),
            always: digest(&self.scope.rules.always, group),
            first: digest(&self.scope.first, group).filter(|_| self.scope.trusted.is_none()),
        };
        Contribution::Digests(sets.map(of).collect())
    }

    /// Returns the checksums of all copies.
    fn held(&self) -> Contribution {
        let before: HashSet<(&LeafName, &Region)> =
            self.scope.before.iter().flat_map(|(_, catalog)| regions(catalog)).collect();
        let of = |&leaf: &u32| {
            let name = &self.catalog.leaves[leaf as usize].name;
            let copy = |(region, crc): (&Region, Option<u64>)| Copy {
                region: region.clone(),
                crc,
                is_new: !before.contains(&(name, region)),
            };
            Held { name: name.clone(), copies: self.of(leaf).map(copy).collect() }
        };
        let leaves = self.scope.rules.always.iter().chain(&self.scope.first);
        Contribution::Held {
            trusted: self.scope.trusted,
            before: self.scope.before.as_ref().map(|(id, _)| *id),
            held: leaves.map(of).collect(),
        }
    }
}

/// A rank's message about the copies that it holds.
#[derive(Serialize, Deserialize)]
enum Contribution {
    Digests(Vec<Digests>),
    Held {
        /// The plan whose replicas the rank trusts to be equal.
        trusted: Option<PlanId>,
        /// The last plan with equal replicas.
        before: Option<PlanId>,
        held: Vec<Held>,
    },
}

/// Digests of the leaves that one set of ranks holds.
#[derive(Serialize, Deserialize)]
struct Digests {
    ranks: RankSet,
    /// Digest of the leaves that every save compares.
    always: Option<[u8; 16]>,
    /// Digest of the other leaves; `None` from a rank that trusts them.
    first: Option<[u8; 16]>,
}

#[derive(Serialize, Deserialize)]
struct Held {
    name: LeafName,
    copies: Vec<Copy>,
}

#[derive(Serialize, Deserialize)]
struct Copy {
    region: Region,
    /// Present if the rank has read or written all of it.
    crc: Option<u64>,
    /// `true` if the rank did not hold it when replicas were equal before.
    is_new: bool,
}

#[derive(Serialize, Deserialize, PartialEq)]
enum Verdict {
    /// Order to all ranks to send all digests.
    NeedAll,
    Equal,
}

/// Compares the copies of all ranks, and remembers with the plan that they are equal.
///
/// # Errors
/// The same on every rank: `Invalid` naming the regions with different copies, and the ranks of each; the errors of
/// ranks without checksums.
pub(crate) fn prove(
    operation: &Operation,
    plan: &RankPlan,
    replicas: Option<&Replicas>,
    copies: Result<Copies<'_>>,
) -> Result<()> {
    let contribution = copies.as_ref().map_err(Error::clone).map(|copies| match replicas {
        Some(replicas) => copies.digests(replicas),
        None => copies.held(),
    });
    let mut decide = |contributions: Vec<Contribution>| {
        let known = operation.engine.plans.lock().unwrap_or_else(PoisonError::into_inner).all.clone();
        let (world, verdict) = (contributions.len(), decide(contributions, &known)?);
        if let (Verdict::Equal, Some(all)) = (&verdict, &plan.all) {
            all.proven();
        }
        Ok((0..world).map(|_| if verdict == Verdict::Equal { Verdict::Equal } else { Verdict::NeedAll }).collect())
    };
    if operation.agree("replicas", contribution, &mut decide)? == Verdict::NeedAll {
        operation.agree("replicas in full", copies.map(|copies| copies.held()), &mut decide)?;
    }
    planning::proven(operation, plan);
    Ok(())
}

/// Decides over the messages of all ranks. `known` are the plans that rank 0 remembers.
fn decide(contributions: Vec<Contribution>, known: &[Arc<GlobalPlan>]) -> Result<Verdict> {
    let (mut digests, mut held) = (Vec::new(), Vec::new());
    for contribution in contributions {
        match contribution {
            Contribution::Digests(of) => digests.push(of),
            Contribution::Held { trusted, before, held: of } => held.push((trusted, before, of)),
        }
    }
    if digests.is_empty() {
        return compare(&held, known).map(|()| Verdict::Equal);
    }
    Ok(if held.is_empty() && are_equal(&digests) { Verdict::Equal } else { Verdict::NeedAll })
}

/// Returns whether all members of each set have sent the same digests. A set with a member that trusts the last
/// comparison is unchanged: ranks have agreed on their plans by the holdings of their sets.
fn are_equal(digests: &[Vec<Digests>]) -> bool {
    let mut by_set: HashMap<&RankSet, Vec<&Digests>> = HashMap::new();
    for digests in digests.iter().flatten() {
        by_set.entry(&digests.ranks).or_default().push(digests);
    }
    by_set.into_iter().all(|(ranks, of_set)| {
        let is_trusted = of_set.iter().any(|one| one.first.is_none());
        let agree = |one: &&Digests| {
            one.always.is_some() && one.always == of_set[0].always && (is_trusted || one.first == of_set[0].first)
        };
        ranks.len() == of_set.len() as u64 && of_set.iter().all(agree)
    })
}

/// The copies of one region: the ranks that have each content, those that trust, and those that did not hold it in the
/// last plan that they know to have equal replicas.
#[derive(Default)]
struct Found {
    contents: BTreeMap<u64, Vec<u32>>,
    trusting: Vec<u32>,
    new: Vec<u32>,
}

/// Returns whether that rank held that region in that plan and compared it with its replicas, as far as rank 0
/// remembers.
fn held_in(known: &[Arc<GlobalPlan>], plan: PlanId, rank: u32, name: &LeafName, region: &Region) -> bool {
    let held = known.iter().find(|known| known.id == plan).and_then(|plan| match &plan.basis {
        Basis::Catalogs { holdings, .. } => holdings.get(rank as usize),
        // Claims do not name regions.
        Basis::Claims(_) => None,
    });
    held.is_some_and(|Holdings { catalog, rules }| {
        let leaf = catalog.leaves.binary_search_by(|leaf| leaf.name.cmp(name));
        leaf.is_ok_and(|leaf| match &catalog.leaves[leaf].body {
            LeafBody::Tensor { parts, .. } => {
                parts.contains(region) && rules.unshared.binary_search(&(leaf as u32)).is_err()
            }
            _ => false,
        })
    })
}

/// Returns the members of all sets that contain `rank`, or that share a member with another such set.
fn joined(rank: u32, mut sets: Vec<Vec<u32>>) -> BTreeSet<u32> {
    let mut joined = BTreeSet::from([rank]);
    while let Some(at) = sets.iter().position(|set| set.iter().any(|rank| joined.contains(rank))) {
        joined.extend(sets.swap_remove(at));
    }
    joined
}

fn compare(ranks: &[(Option<PlanId>, Option<PlanId>, Vec<Held>)], known: &[Arc<GlobalPlan>]) -> Result<()> {
    // A rank trusts only a plan in which replicas were equal.
    let proven: BTreeSet<PlanId> = ranks.iter().filter_map(|(trusted, ..)| *trusted).collect();
    let mut found: BTreeMap<(&LeafName, &Region), Found> = BTreeMap::new();
    for (rank, (.., held)) in (0u32..).zip(ranks) {
        for Held { name, copies } in held {
            for Copy { region, crc, is_new } in copies {
                let found = found.entry((name, region)).or_default();
                match crc {
                    Some(crc) => found.contents.entry(*crc).or_default().push(rank),
                    None => found.trusting.push(rank),
                }
                if *is_new {
                    found.new.push(rank);
                }
            }
        }
    }
    let mut problems: Vec<String> = Vec::new();
    let mut is_different = false;
    for ((name, region), Found { contents, trusting, new }) in found {
        if contents.len() > 1 {
            is_different = true;
            let mut contents: Vec<_> = contents.into_iter().collect();
            contents.sort_by_key(|(_, ranks)| ranks[0]);
            let shown: Vec<String> =
                contents.into_iter().map(|(crc, ranks)| format!("{crc:016x} on {}", RankSet::new(ranks))).collect();
            problems.push(format!("{name}: its replicas of {region} differ, by their CRC-64: {}", shown.join(", ")));
        } else if let Some(&first) = trusting.first() {
            let holders: Vec<u32> = contents.values().flatten().chain(&trusting).copied().collect();
            let held = |&plan: &PlanId| {
                let has_held = |rank: &u32| {
                    let (trusted, before, _) = &ranks[*rank as usize];
                    *trusted == Some(plan)
                        || (*before == Some(plan) && new.binary_search(rank).is_err())
                        || held_in(known, plan, *rank, name, region)
                };
                holders.iter().copied().filter(has_held).collect()
            };
            // Copies are equal by their checksums, and by each plan that some rank trusts.
            let equal = joined(first, contents.values().cloned().chain(proven.iter().map(held)).collect());
            let new: Vec<u32> = holders.iter().copied().filter(|rank| !equal.contains(rank)).collect();
            if !new.is_empty() {
                let trusting = trusting.into_iter().filter(|rank| equal.contains(rank));
                let (new, trusting) = (RankSet::new(new), RankSet::new(trusting));
                problems.push(format!(
                    "{name}: {region} is new on {new}, and {trusting} had begun to save without comparing it; save \
                     again: the next save compares it"
                ));
            }
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    let more = problems.len().saturating_sub(SPELLED_MAX);
    problems.truncate(SPELLED_MAX);
    if more > 0 {
        problems.push(format!("and {more} more"));
    }
    if is_different {
        problems.push(
            "data that differs between ranks needs different names, or a declared sharding; or exclude it from the \
             comparison (prove_except), which saves the copy of the lowest rank"
                .to_owned(),
        );
    }
    Err(Error::invalid(problems.join("\n")))
}

/// Returns the tensors of a catalog: index, name, parts.
fn tensors(catalog: &Catalog) -> impl Iterator<Item = (u32, &LeafName, &Vec<Region>)> {
    (0u32..).zip(&catalog.leaves).filter_map(|(index, leaf)| match &leaf.body {
        LeafBody::Tensor { parts, .. } => Some((index, &leaf.name, parts)),
        _ => None,
    })
}

fn regions(catalog: &Catalog) -> impl Iterator<Item = (&LeafName, &Region)> {
    tensors(catalog).flat_map(|(_, name, parts)| parts.iter().map(move |region| (name, region)))
}

#[cfg(test)]
mod tests {
    use shardfast_format::{DType, Leaf};
    use shardfast_transfer::error::Kind;

    use super::*;

    fn name() -> LeafName {
        LeafName::new("model", "w")
    }

    fn region() -> Region {
        Region::whole(&[8, 5])
    }

    /// Makes a plan in which the ranks of `holders` held the region, and those of `excluded` did not compare it.
    fn plan(id: PlanId, holders: &[u32], excluded: &[u32]) -> Arc<GlobalPlan> {
        let holdings = (0..3).map(|rank| {
            let parts = if holders.contains(&rank) { vec![region()] } else { Vec::new() };
            let body = LeafBody::Tensor { dtype: DType::U8, shape: vec![8, 5].into(), parts };
            let unshared = if excluded.contains(&rank) { vec![0] } else { Vec::new() };
            Holdings {
                catalog: Catalog { leaves: vec![Leaf { name: name(), body, layout: String::new() }] },
                rules: Rules { unshared, ..Rules::default() },
            }
        });
        let basis = Basis::Catalogs { holdings: holdings.collect(), writes: vec![Vec::new(); 3] };
        GlobalPlan::new(id, basis, false)
    }

    /// Makes the message of a rank that trusts this plan, with a checksum if it has written all of the region.
    fn trusting(plan: PlanId, crc: Option<u64>) -> Contribution {
        let copies = vec![Copy { region: region(), crc, is_new: false }];
        Contribution::Held { trusted: Some(plan), before: Some(plan), held: vec![Held { name: name(), copies }] }
    }

    /// Makes the message of a rank that remembers no plan with equal replicas, and has read all of the region.
    fn reading() -> Contribution {
        let copies = vec![Copy { region: region(), crc: Some(7), is_new: true }];
        Contribution::Held { trusted: None, before: None, held: vec![Held { name: name(), copies }] }
    }

    fn problem(contributions: Vec<Contribution>, known: &[Arc<GlobalPlan>]) -> Option<String> {
        let error = decide(contributions, known).map(|verdict| assert!(verdict == Verdict::Equal)).err()?;
        assert_eq!(error.kind, Kind::Invalid);
        Some(error.message)
    }

    /// Answers to saves that overlap reach ranks in different orders, and each rank remembers the plan that came last.
    #[test]
    fn ranks_may_trust_different_plans_of_what_they_held() {
        let contributions = || vec![trusting(1, None), trusting(2, None), reading()];
        let both = [plan(1, &[0, 1, 2], &[]), plan(2, &[0, 1, 2], &[])];
        assert_eq!(problem(contributions(), &both), None);
        // Plan 1 compares ranks 0 and 2, plan 2 ranks 0 and 1.
        assert_eq!(problem(contributions(), &[plan(1, &[0, 2], &[]), plan(2, &[0, 1], &[])]), None);
    }

    #[test]
    fn what_is_new_is_compared_or_refused() {
        let contributions = || vec![trusting(1, None), trusting(2, None), reading()];
        let without = [plan(1, &[0, 1], &[]), plan(2, &[0, 1], &[])];
        let new_on_2 = "model/w: [0:8, 0:5] is new on rank 2, and ranks 0-1 had begun";
        assert!(problem(contributions(), &without).is_some_and(|problem| problem.starts_with(new_on_2)));
        let excluded = [plan(1, &[0, 1, 2], &[2]), plan(2, &[0, 1, 2], &[2])];
        assert!(problem(contributions(), &excluded).is_some_and(|problem| problem.starts_with(new_on_2)));
        assert!(problem(contributions(), &[]).is_some());
        // Rank 0 has written all of it.
        assert_eq!(problem(vec![trusting(1, Some(7)), trusting(1, None), reading()], &without), None);
        let differ = problem(vec![trusting(1, Some(8)), trusting(1, None), reading()], &without);
        assert!(differ.is_some_and(|problem| problem.contains("its replicas of [0:8, 0:5] differ")));
        // The checksums do not cover rank 1, which trusts a plan in which no other rank held the region.
        let apart = [plan(1, &[0], &[]), plan(2, &[1], &[])];
        let new = problem(vec![trusting(1, Some(7)), trusting(2, None), reading()], &apart);
        assert!(new.is_some_and(|problem| problem.contains("is new on ranks 0, 2, and rank 1 had begun")));
    }
}
