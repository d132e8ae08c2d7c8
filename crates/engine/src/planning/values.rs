//! Assigns values to ranks by comparing their digests, while tensors are being written already.
//!
//! The first time ranks send the names and digests of their values. Values that were equal on several ranks form a
//! *class* with all others that were equal on exactly these ranks: the lowest of them writes, and from then on 16 bytes
//! for each class show whether they are still equal. A rank writes a value that it alone has without a message.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, LeafBody, LeafName, Owner, sha256};
use shardfast_plan::RankSet;
use shardfast_transfer::error::{Error, Result};

use super::RankPlan;
use crate::operation::Operation;
use crate::plans::{GlobalValues, PlanId, Value, ValueClasses};
use crate::state::Maker;

/// The values that one rank has to write.
pub(crate) struct ValuePlan {
    /// Values that the rank writes, as indices of its catalog.
    pub(crate) mine: Vec<u32>,
    /// Values of all ranks, on rank 0.
    pub(crate) all: Option<Arc<GlobalValues>>,
}

#[derive(Serialize, Deserialize)]
enum Contribution {
    /// One digest for each of this rank's classes.
    Same {
        id: PlanId,
        digests: Vec<[u8; 16]>,
    },
    All {
        held: Vec<Held>,
        makers: Vec<Maker>,
    },
}

/// A value as one rank holds it.
#[derive(Serialize, Deserialize)]
struct Held {
    name: LeafName,
    layout: String,
    owner: Owner,
    digest: [u8; 32],
}

#[derive(Serialize, Deserialize)]
enum Verdict {
    /// Values that are no longer equal on the same ranks: each rank must send all of its own.
    NeedAll,
    /// The remembered values.
    Same,
    New(ValueClasses),
}

/// Agrees with all ranks on which rank writes which values. `digests` are the SHA-256 of this rank's encoded values in
/// the catalog's order.
///
/// # Errors
/// The same on every rank: the errors of any of them; `Invalid` naming classes of which two make the same state.
pub(crate) fn assign_values(
    operation: &Operation,
    plan: &RankPlan,
    (catalog, makers): (&Catalog, &[Maker]),
    digests: Result<Vec<[u8; 32]>>,
) -> Result<ValuePlan> {
    let objects: Vec<u32> = objects(catalog).collect();
    let all = |digests: &[[u8; 32]]| {
        let held = objects.iter().zip(digests).filter_map(|(&leaf, &digest)| {
            let leaf = &catalog.leaves[leaf as usize];
            let LeafBody::Object { owner } = leaf.body else { return None };
            Some(Held { name: leaf.name.clone(), layout: leaf.layout.clone(), owner, digest })
        });
        Contribution::All { held: held.collect(), makers: makers.to_vec() }
    };
    let contributions = digests.clone().map(|digests| match &plan.values {
        Some(known) => Contribution::Same { id: known.id, digests: known.digests(&digests) },
        None => all(&digests),
    });
    let mut found = None;
    let mut decide = |contributions: Vec<Contribution>| match &plan.all {
        Some(all) => {
            let mut values = all.values.lock().unwrap_or_else(PoisonError::into_inner);
            let (verdicts, renewed) = decide(operation.number(), contributions, values.as_ref())?;
            if let Some(renewed) = renewed {
                *values = Some(renewed);
            }
            found.clone_from(&*values);
            Ok(verdicts)
        }
        None => Err(Error::internal("only rank 0 can compare values")),
    };
    let mut verdict = operation.agree("values", contributions, &mut decide)?;
    if let Verdict::NeedAll = verdict {
        verdict = operation.agree("values in full", digests.map(|digests| all(&digests)), &mut decide)?;
    }
    let remembered = match (verdict, &plan.values) {
        (Verdict::Same, Some(known)) => Arc::clone(known),
        (Verdict::New(known), _) => Arc::new(known),
        _ => return Err(Error::internal("rank 0 refers to values that this rank does not remember")),
    };
    operation.remember(plan.id, |planned| planned.values = Some(Arc::clone(&remembered)));
    let mine = remembered.mine.iter().map(|&position| objects.get(position as usize).copied());
    let mine = mine.collect::<Option<_>>();
    let mine = mine.ok_or_else(|| Error::internal("rank 0 orders a value that this rank does not have"))?;
    Ok(ValuePlan { mine, all: found })
}

impl ValueClasses {
    fn digests(&self, values: &[[u8; 32]]) -> Vec<[u8; 16]> {
        let class = |class: &Vec<u32>| {
            let of = |&position: &u32| values.get(position as usize).copied().unwrap_or_default();
            let digest = sha256(&class.iter().flat_map(of).collect::<Vec<u8>>());
            digest[..16].try_into().unwrap_or_default()
        };
        self.classes.iter().map(class).collect()
    }
}

/// Decides; returns the verdicts, and, if new, the state to remember under that number.
fn decide(
    number: PlanId,
    contributions: Vec<Contribution>,
    known: Option<&Arc<GlobalValues>>,
) -> Result<(Vec<Verdict>, Option<Arc<GlobalValues>>)> {
    let world = contributions.len();
    if let Some(known) = known
        && known.still_holds(&contributions)
    {
        return Ok(((0..world).map(|_| Verdict::Same).collect(), None));
    }
    let held = contributions.into_iter().map(|contributions| match contributions {
        Contribution::All { held, makers } => Some((held, makers)),
        Contribution::Same { .. } => None,
    });
    match held.collect::<Option<Vec<_>>>() {
        None => Ok(((0..world).map(|_| Verdict::NeedAll).collect(), None)),
        Some(contributions) => {
            let (held, makers): (Vec<_>, Vec<_>) = contributions.into_iter().unzip();
            let (all, remembered) = compared(number, held)?;
            // Ranks with equal values have equal classes.
            let differing: BTreeSet<_> =
                all.values.iter().filter(|value| value.writers.len() > 1).map(|v| &v.name).collect();
            expect_one_kind(&makers.iter().map(|of| &**of).collect::<Vec<_>>(), |name| differing.contains(name))?;
            Ok((remembered.into_iter().map(Verdict::New).collect(), Some(Arc::new(all))))
        }
    }
}

impl GlobalValues {
    fn still_holds(&self, contributions: &[Contribution]) -> bool {
        let mut digests: BTreeMap<u32, &[u8; 16]> = BTreeMap::new();
        contributions.len() == self.classes.len()
            && contributions.iter().zip(&self.classes).all(|(contributions, classes)| match contributions {
                Contribution::Same { id, digests: found } if *id == self.id && found.len() == classes.len() => {
                    classes.iter().zip(found).all(|(class, found)| *digests.entry(*class).or_insert(found) == found)
                }
                _ => false,
            })
    }
}

/// Groups equal values, for all ranks and for each rank.
fn compared(id: PlanId, held: Vec<Vec<Held>>) -> Result<(GlobalValues, Vec<ValueClasses>)> {
    let mut all = GlobalValues { id, classes: vec![Vec::new(); held.len()], values: Vec::new() };
    let mut by_name: BTreeMap<LeafName, Copies> = BTreeMap::new();
    for (rank, held) in (0u32..).zip(held) {
        for (position, Held { name, layout, owner, digest }) in (0u32..).zip(held) {
            if let Some(copies) = by_name.get(&name).filter(|copies| copies.owner != owner) {
                let first = copies.by_digest.values().flatten().map(|copy| copy.0).min().unwrap_or_default();
                let (there, here) = (said(copies.owner), said(owner));
                return Err(Error::invalid(format!(
                    "{name}: expected the same on all ranks, found {there} on rank {first}, {here} on rank {rank}"
                )));
            }
            let copies = by_name.entry(name).or_insert_with(|| Copies { layout, owner, by_digest: BTreeMap::new() });
            copies.by_digest.entry(digest).or_default().push((rank, position));
        }
    }
    let mut each = vec![ValueClasses { id, classes: Vec::new(), mine: Vec::new() }; all.classes.len()];
    let mut numbers: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    expect_pieces(&by_name)?;
    for (name, Copies { layout, by_digest, .. }) in by_name {
        let mut writers = BTreeMap::new();
        for copies in by_digest.into_values() {
            let ranks: Vec<u32> = copies.iter().map(|copy| copy.0).collect();
            let (writer, position) = copies[0];
            each[writer as usize].mine.push(position);
            writers.insert(writer, shardfast_plan::ranges(ranks.iter().copied()));
            if copies.len() == 1 {
                continue;
            }
            let next = numbers.len() as u32;
            let class = *numbers.entry(ranks).or_insert(next);
            for (rank, position) in copies {
                let (known, mine) = (&mut all.classes[rank as usize], &mut each[rank as usize].classes);
                let at = known.iter().position(|&known| known == class).unwrap_or_else(|| {
                    known.push(class);
                    mine.push(Vec::new());
                    known.len() - 1
                });
                mine[at].push(position);
            }
        }
        all.values.push(Value { name, layout, writers });
    }
    each.iter_mut().for_each(|rank| rank.mine.sort_unstable());
    Ok((all, each))
}

/// Refuses a value in pieces that some rank has whole, of which some are nowhere, which ranks count differently, or of
/// which two ranks have different states.
fn expect_pieces(by_name: &BTreeMap<LeafName, Copies>) -> Result<()> {
    let mut whole: BTreeMap<(&str, &str), BTreeMap<u32, Vec<u32>>> = BTreeMap::new();
    let mut problems = Vec::new();
    for (name, copies) in by_name {
        let Owner::Piece { index, count } = copies.owner else { continue };
        let base = name.name.strip_suffix(&format!(".piece.{index}")).unwrap_or(&name.name);
        whole.entry((&name.key, base)).or_default().entry(count).or_default().push(index);
        if copies.by_digest.len() > 1 {
            let of = |copies: &Vec<(u32, u32)>| RankSet::new(copies.iter().map(|copy| copy.0)).to_string();
            let mut copies: Vec<_> = copies.by_digest.values().collect();
            copies.sort_unstable_by_key(|copies| copies[0]);
            let states: Vec<String> = copies.into_iter().map(of).collect();
            problems.push(format!(
                "{name}: piece {index} of {count} differs between {}: all ranks of one index have the same piece",
                states.join(" and ")
            ));
        }
    }
    for ((key, name), counts) in whole {
        if let Some(copies) = by_name.get(&LeafName { key: key.to_owned(), name: name.to_owned() }) {
            let ranks = RankSet::new(copies.by_digest.values().flatten().map(|copy| copy.0));
            problems.push(format!(
                "{key}/{name}: expected a piece of it on every rank, found Sharded on some and a value of another kind \
                 on {ranks}: use Sharded(value, index, count) on all ranks, or on none"
            ));
        }
        let contributions: Vec<String> = counts.keys().map(u32::to_string).collect();
        if contributions.len() > 1 {
            problems.push(format!(
                "{key}/{name}: ranks say that it has {} pieces: count= is the same on all",
                contributions.join(" and ")
            ));
        }
        for (count, there) in counts {
            let there: BTreeSet<u32> = there.into_iter().collect();
            let lacking: Vec<String> =
                (0..count).filter(|index| !there.contains(index)).take(9).map(|i| i.to_string()).collect();
            if !lacking.is_empty() && contributions.len() == 1 {
                let more = if lacking.len() > 8 { " and others" } else { "" };
                problems.push(format!(
                    "{key}/{name}: no rank has piece {}{more} of {count}: each index below count= needs a rank",
                    lacking[..lacking.len().min(8)].join(", ")
                ));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::invalid(problems.join("\n"))) }
}

/// Refuses classes of two kinds that make the same state on two ranks, if some of it was made. `makers` are those of
/// each rank; those of other values than `of` selects are passed over.
pub(super) fn expect_one_kind(makers: &[&[Maker]], of: impl Fn(&LeafName) -> bool) -> Result<()> {
    let all = || makers.iter().copied().flatten();
    let classes: BTreeSet<(&LeafName, &str)> = all().map(|maker| (&maker.value, &*maker.class)).collect();
    if classes.len() == all().map(|maker| &maker.value).collect::<BTreeSet<_>>().len() {
        return Ok(());
    }
    let mut known: BTreeMap<(&LeafName, &str), (usize, &Maker, bool)> = BTreeMap::new();
    for (rank, makers) in makers.iter().enumerate() {
        for maker in makers.iter().filter(|maker| of(&maker.value)) {
            let all = maker.made.iter().map(|of| (of, true)).chain(maker.unmade.iter().map(|of| (of, false)));
            for (of, is_made) in all {
                let first = known.entry((&maker.value, of)).or_insert((rank, maker, is_made));
                let (other_rank, other, was_made) = *first;
                if other.class != maker.class && other.kind != maker.kind && (was_made || is_made) {
                    return Err(Error::invalid(format!(
                        "{}: the state of {of:?} belongs to {} on rank {other_rank} and to {} on rank {rank}, and a \
                         checkpoint has one state of it, which no load could give to both: use one class on all ranks \
                         that have {of:?}",
                        maker.value, other.class, maker.class
                    )));
                }
                if is_made && !was_made {
                    *first = (rank, maker, true);
                }
            }
        }
    }
    Ok(())
}

/// One value on all ranks: for each content its ranks, with their positions.
struct Copies {
    layout: String,
    owner: Owner,
    by_digest: BTreeMap<[u8; 32], Vec<(u32, u32)>>,
}

/// Returns whose a value is, in words.
fn said(owner: Owner) -> String {
    match owner {
        Owner::Job => "a value that all ranks share".to_owned(),
        Owner::Rank => "a value per rank".to_owned(),
        Owner::Piece { index, count } => format!("piece {index} of {count}"),
    }
}

fn objects(catalog: &Catalog) -> impl Iterator<Item = u32> + '_ {
    let leaves = catalog.leaves.iter().enumerate();
    leaves.filter(|(_, leaf)| matches!(leaf.body, LeafBody::Object { .. })).map(|(i, _)| i as u32)
}
