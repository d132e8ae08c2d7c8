//! Plans on every rank alone, and proves later that these plans fit together.
//!
//! A rank that knows which other ranks hold the same parts of a leaf needs no message to compute who writes them. All
//! leaves that one set of ranks holds are a *class*. Each member of that set knows the class, but not the members'
//! other classes. So each class is divided among its members as if there were nothing else. Every share of every class
//! is within 2 % (or a block) of even, and so are their sums.
//!
//! A rank's assumptions about others are proven when the ranks meet: each claims the classes that it divided, by their
//! members and a digest of their leaves, and [`prove`] finds ranks with other claims.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, Leaf, LeafBody, sha256};

use crate::balance::{Item, Spared};
use crate::error::{Error, Problems};
use crate::ranks::RankSet;
use crate::units::divide_units;
use crate::write::Write;

/// Ranks that hold the same parts of each leaf of a catalog. Two ranks must hold all the same parts of a leaf, or none
/// in common.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicas {
    /// Sets of ranks, each once.
    pub groups: Vec<RankSet>,
    /// Index in `groups`, per leaf of the catalog, of all ranks that hold the leaf in exactly these parts, this rank
    /// among them; `None` if unknown. Leaves without parts are ignored.
    pub leaves: Vec<Option<u32>>,
}

/// Plan that one rank makes alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Local {
    /// Writes of the rank, sorted.
    pub writes: Vec<Write>,
    /// Claims of the rank, sorted: one for each set of ranks with which it shares writes.
    pub claims: Vec<Claim>,
}

/// A rank's claim about a class of leaves.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    /// Ranks that hold the class.
    pub ranks: RankSet,
    /// First half of a digest of the class's leaves: names, dtypes, shapes and parts, in order, and which of them are
    /// not shared.
    pub digest: [u8; 16],
}

/// Plans a save of `catalog` on `rank` of `world`, without a message from other ranks. Returns `None` when the holders
/// of some leaf are not known, so that ranks must exchange their catalogs ([`crate::save`]).
///
/// All members of a set compute the same assignment if their claims are equal, which [`prove`] checks, and if leaves
/// and parts are in the same order on each. The commit checks coverage, as always.
///
/// # Errors
/// [`Error::Invalid`] naming each leaf with impossible `replicas`: an unknown set, one without this rank, or with ranks
/// beyond the world.
pub fn local(catalog: &Catalog, replicas: &Replicas, rank: u32, world: u32) -> Result<Option<Local>, Error> {
    local_unshared(catalog, &[], replicas, rank, world)
}

/// Plans like [`local`], with the leaves `unshared`, ascending indices of the catalog, [not
/// shared](crate::save_unshared). They are part of the ranks' claims.
///
/// # Errors
/// As [`local`].
pub fn local_unshared(
    catalog: &Catalog,
    unshared: &[u32],
    replicas: &Replicas,
    rank: u32,
    world: u32,
) -> Result<Option<Local>, Error> {
    let Some(classes) = classes(catalog, replicas, rank, world)? else { return Ok(None) };
    let mut local = Local::default();
    for (group, leaves) in classes.into_iter().enumerate().filter(|(_, leaves)| !leaves.is_empty()) {
        let ranks = &replicas.groups[group];
        let members: Vec<u32> = ranks.iter().collect();
        if ranks.len() > 1 {
            let class = Catalog { leaves: leaves.iter().map(|&leaf| catalog.leaves[leaf as usize].clone()).collect() };
            let alone = (0u32..).zip(&leaves).filter(|(_, leaf)| unshared.binary_search(leaf).is_ok());
            let alone: Vec<u8> = alone.flat_map(|(place, _)| place.to_le_bytes()).collect();
            let mut digest = [0; 16];
            digest.copy_from_slice(&sha256(&[&class.fingerprint()[..], &alone].concat())[..16]);
            local.claims.push(Claim { ranks: ranks.clone(), digest });
        }
        let held = |&leaf: &u32| &catalog.leaves[leaf as usize];
        let spared = Spared::new(leaves.iter().map(held));
        let (mut items, mut names, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for leaf in leaves {
            let Leaf { name, body: LeafBody::Tensor { dtype, parts: regions, .. }, .. } = held(&leaf) else { continue };
            let class = usize::from(unshared.binary_search(&leaf).is_ok());
            for (part, region) in (0u32..).zip(regions) {
                items.push(Item::new(region, *dtype, spared.of(&name.key), class));
                names.push(name);
                parts.push(Write::whole(leaf, part));
            }
        }
        let mine = members.binary_search(&rank).unwrap_or_default() as u32;
        // The lowest rank writes what is not shared, and the others take more of the rest.
        let classes = [(0..members.len() as u32).collect(), vec![0]];
        let classes = if members.len() > 1 { &classes[..] } else { &classes[1..] };
        items.iter_mut().for_each(|item| item.class = item.class.min(classes.len() - 1));
        let shares = divide_units(members.len(), classes, &items, &names);
        let shares = shares.into_iter().filter(|share| share.rank == mine);
        local.writes.extend(shares.map(|share| Write { rows: share.rows, ..parts[share.item] }));
    }
    local.writes.sort_unstable();
    local.claims.sort_unstable();
    Ok(Some(local))
}

/// Returns the leaves with parts of each group, in the catalog's order; `None` when one is in no group.
fn classes(catalog: &Catalog, replicas: &Replicas, rank: u32, world: u32) -> Result<Option<Vec<Vec<u32>>>, Error> {
    if replicas.leaves.len() != catalog.leaves.len() {
        let (said, held) = (replicas.leaves.len(), catalog.leaves.len());
        return Err(Error::Invalid(Problems(vec![format!(
            "rank {rank}: expected the holders of {held} leaves, found those of {said}"
        )])));
    }
    let flaw = |set: &RankSet| match set.last() {
        Some(last) if last >= world => Some(format!("holders in a world of {world}")),
        _ if !set.contains(rank) => Some(format!("rank {rank} among the holders")),
        _ => None,
    };
    let flaws: Vec<Option<String>> = replicas.groups.iter().map(flaw).collect();
    let mut problems = Vec::new();
    let mut known = true;
    let mut classes = vec![Vec::new(); replicas.groups.len()];
    for ((index, leaf), group) in (0u32..).zip(&catalog.leaves).zip(&replicas.leaves) {
        match (&leaf.body, *group) {
            (LeafBody::Tensor { parts, .. }, _) if parts.is_empty() => {}
            (LeafBody::Object { .. } | LeafBody::Alias { .. }, _) => {}
            (LeafBody::Tensor { .. }, None) => known = false,
            (LeafBody::Tensor { .. }, Some(group)) => match flaws.get(group as usize) {
                Some(None) => classes[group as usize].push(index),
                Some(Some(flaw)) => {
                    let holders = &replicas.groups[group as usize];
                    problems.push(format!("{}: expected {flaw}, found {holders}", leaf.name));
                }
                None => problems.push(format!(
                    "{}: found holder set {group}, expected one below {}",
                    leaf.name,
                    replicas.groups.len()
                )),
            },
        }
    }
    if !problems.is_empty() {
        return Err(Error::Invalid(Problems(problems)));
    }
    Ok(known.then_some(classes))
}

/// Proves that local plans fit together: for every set that any rank claims to share with, each member claims the same
/// digest, and no other rank claims it. `claims` is by rank.
///
/// # Errors
/// [`Error::Invalid`] naming each set, with the ranks that lack the claim, are not members or differ.
pub fn prove(claims: &[Vec<Claim>]) -> Result<(), Error> {
    let mut by_set: HashMap<&RankSet, Vec<(u32, [u8; 16])>> = HashMap::new();
    for (rank, claims) in (0u32..).zip(claims) {
        for claim in claims {
            by_set.entry(&claim.ranks).or_default().push((rank, claim.digest));
        }
    }
    let mut problems: Vec<(&RankSet, String)> =
        by_set.iter().filter_map(|(set, claimed)| Some((*set, disagreement(set, claimed, claims.len())?))).collect();
    problems.sort_unstable();
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::Invalid(Problems(problems.into_iter().map(|(_, problem)| problem).collect())))
}

/// Returns the contradiction in the claims of one set, given by ascending rank; `None` if there is none.
fn disagreement(set: &RankSet, claimed: &[(u32, [u8; 16])], world: usize) -> Option<String> {
    let claimants = || RankSet::new(claimed.iter().map(|&(rank, _)| rank));
    let said = || format!("{} planned with {set} as the holders of the same parts", claimants());
    if set.last().is_none_or(|last| last as usize >= world) {
        return Some(format!("{}, in a world of {world}", said()));
    }
    if set.len() != claimed.len() as u64 || !set.iter().eq(claimed.iter().map(|&(rank, _)| rank)) {
        let silent = RankSet::new(set.iter().filter(|rank| claimed.binary_search_by_key(rank, |c| c.0).is_err()));
        if !silent.is_empty() {
            return Some(format!("{}, and {silent} did not", said()));
        }
        let foreign = RankSet::new(claimed.iter().map(|c| c.0).filter(|&rank| !set.contains(rank)));
        return Some(match foreign.is_empty() {
            true => format!("{}, and some of them twice", said()),
            false => format!("{}, and {foreign} is not of them", said()),
        });
    }
    let mut opinions: HashMap<[u8; 16], Vec<u32>> = HashMap::new();
    for &(rank, digest) in claimed {
        opinions.entry(digest).or_default().push(rank);
    }
    if opinions.len() == 1 {
        return None;
    }
    let mut opinions: Vec<RankSet> = opinions.into_values().map(RankSet::new).collect();
    opinions.sort_unstable();
    let opinions: Vec<String> = opinions.iter().map(RankSet::to_string).collect();
    Some(format!(
        "{set}: they planned as holders of the same parts, and names, dtypes, shapes or parts differ between {}",
        opinions.join(" and ")
    ))
}
