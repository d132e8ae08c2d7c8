//! Rank 0's side of the opening: whether what the ranks go by is one plan, and if not, a plan around it.

use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::Catalog;
use shardfast_plan::{Claim, Write};

use super::{PlanId, Rules, values};
use crate::agree::Operation;
use crate::commit::{Structure, ValueFiles};
use crate::error::{Error, Result};

/// What a rank goes by.
#[derive(Serialize, Deserialize)]
pub(super) enum Opening {
    /// The plan that it remembers, since it holds what it held then.
    Same { id: PlanId },
    /// A plan of its own, and what that rests on.
    Local {
        claims: Vec<Claim>,
        /// Whether it holds leaves whose replicas every save compares.
        compares_always: bool,
    },
    /// Nothing: it waits for its orders.
    Ask(Holdings),
}

/// What a rank holds.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holdings {
    pub(super) catalog: Catalog,
    pub(super) rules: Rules,
}

/// What rank 0 tells a rank.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// Rank 0 must see all catalogs.
    Tell,
    Go {
        id: PlanId,
        /// `None`: as the rank drafted.
        writes: Option<Vec<Write>>,
        standing: Standing,
    },
}

/// What is known of a plan's replicas.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Standing {
    /// Whether a save of this plan has found them equal.
    pub(crate) is_proven: bool,
    /// Whether some rank holds leaves whose replicas every save compares.
    pub(crate) compares_always: bool,
}

/// Everything about one rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) holdings: Holdings,
    /// What it has begun to write.
    pub(super) writes: Option<Vec<Write>>,
}

/// What rank 0 remembers of a plan of all ranks.
pub(crate) struct PlannedAll {
    pub(super) id: PlanId,
    basis: Basis,
    standing: Mutex<Standing>,
    /// How each rank's files look, from its first save that was committed.
    pub(crate) structures: Mutex<Vec<Option<Arc<Structure>>>>,
    pub(super) values: Mutex<Option<Arc<values::RememberedAll>>>,
    /// Of the last save that was committed.
    pub(crate) value_files: Mutex<Option<Arc<KnownFiles>>>,
}

/// How the files of values looked in one save.
pub(crate) struct KnownFiles {
    /// The save's number.
    pub(crate) number: u64,
    pub(crate) by_rank: Vec<Arc<ValueFiles>>,
}

/// What a plan rests on.
enum Basis {
    /// Each rank planned alone.
    Claims(Vec<Vec<Claim>>),
    /// Rank 0 planned for all.
    Catalogs { holdings: Vec<Holdings>, writes: Vec<Vec<Write>> },
}

impl Basis {
    fn world(&self) -> usize {
        match self {
            Basis::Claims(claims) => claims.len(),
            Basis::Catalogs { holdings, .. } => holdings.len(),
        }
    }
}

impl PlannedAll {
    fn new(id: PlanId, basis: Basis, compares_always: bool) -> Arc<PlannedAll> {
        let structures = Mutex::new(vec![None; basis.world()]);
        // Ranks that share nothing have nothing to compare.
        let is_proven = matches!(&basis, Basis::Claims(claims) if claims.iter().all(Vec::is_empty));
        let standing = Mutex::new(Standing { is_proven, compares_always: compares_always && !is_proven });
        Arc::new(PlannedAll {
            id,
            basis,
            standing,
            structures,
            values: Mutex::default(),
            value_files: Mutex::default(),
        })
    }

    fn standing(&self) -> Standing {
        *self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A save of this plan has found its replicas equal.
    pub(crate) fn proven(&self) {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner).is_proven = true;
    }

    /// Whether the rank goes by this plan, or would if it remembered it. A rank that planned alone has another plan,
    /// for what it claims does not tell what it holds alone.
    fn agrees(&self, rank: usize, opening: &Opening) -> bool {
        match (opening, &self.basis) {
            (Opening::Same { id }, _) => *id == self.id,
            (Opening::Ask(held), Basis::Catalogs { holdings, .. }) => *held == holdings[rank],
            _ => false,
        }
    }

    fn answers(&self, has_draft: impl Fn(usize) -> bool) -> Vec<Answer> {
        let go = |rank: usize| match &self.basis {
            Basis::Catalogs { writes, .. } if !has_draft(rank) => Some(writes[rank].clone()),
            _ => None,
        };
        let standing = self.standing();
        (0..self.basis.world()).map(|rank| Answer::Go { id: self.id, writes: go(rank), standing }).collect()
    }
}

/// Decides over the openings of all ranks. Whatever plan comes of it stands in `found`.
pub(super) fn decide(
    operation: &Operation,
    openings: &[Opening],
    found: &mut Option<Arc<PlannedAll>>,
) -> Result<Vec<Answer>> {
    let known = operation.memory().all.clone();
    let agree = |plan: &&Arc<PlannedAll>| openings.iter().enumerate().all(|(rank, opening)| plan.agrees(rank, opening));
    let has_draft = |rank: usize| !matches!(openings[rank], Opening::Ask(_));
    let plan = match known.iter().rev().find(agree) {
        Some(plan) => Some(Arc::clone(plan)),
        None => renewed(operation.number(), &known, openings)?,
    };
    let answers = match &plan {
        Some(plan) => plan.answers(has_draft),
        None => openings.iter().map(|_| Answer::Tell).collect(),
    };
    *found = plan;
    Ok(answers)
}

/// A plan of that number of what the openings say, with what is remembered of those that say too little; `None` when
/// that does not make one plan.
fn renewed(number: PlanId, known: &[Arc<PlannedAll>], openings: &[Opening]) -> Result<Option<Arc<PlannedAll>>> {
    let remembered = |id: PlanId| known.iter().find(|plan| plan.id == id);
    let compares_always = openings.iter().any(|opening| match opening {
        Opening::Same { id } => remembered(*id).is_some_and(|plan| plan.standing().compares_always),
        Opening::Local { compares_always, .. } => *compares_always,
        Opening::Ask(held) => held.rules.compares_always(),
    });
    let claims = openings.iter().enumerate().map(|(rank, opening)| match opening {
        Opening::Local { claims, .. } => Some(claims.clone()),
        Opening::Same { id } => match &remembered(*id)?.basis {
            Basis::Claims(claims) => Some(claims[rank].clone()),
            Basis::Catalogs { .. } => None,
        },
        Opening::Ask(_) => None,
    });
    if let Some(claims) = claims.collect::<Option<Vec<_>>>() {
        shardfast_plan::prove(&claims)?;
        return Ok(Some(PlannedAll::new(number, Basis::Claims(claims), compares_always)));
    }
    let told = openings.iter().enumerate().map(|(rank, opening)| match opening {
        Opening::Ask(held) => Some(Told { holdings: held.clone(), writes: None }),
        Opening::Same { id } => match &remembered(*id)?.basis {
            Basis::Catalogs { holdings, writes } => {
                Some(Told { holdings: holdings[rank].clone(), writes: Some(writes[rank].clone()) })
            }
            Basis::Claims(_) => None,
        },
        Opening::Local { .. } => None,
    });
    told.collect::<Option<Vec<_>>>().map(|told| planned(number, told)).transpose()
}

/// Decides over everything about all ranks. Whatever plan comes of it stands in `found`.
pub(super) fn decide_told(number: PlanId, told: Vec<Told>, found: &mut Option<Arc<PlannedAll>>) -> Result<Vec<Answer>> {
    let has_draft: Vec<bool> = told.iter().map(|told| told.writes.is_some()).collect();
    let plan = planned(number, told)?;
    let answers = plan.answers(|rank| has_draft[rank]);
    *found = Some(plan);
    Ok(answers)
}

/// A plan of that number of these catalogs around what was drafted.
fn planned(number: PlanId, told: Vec<Told>) -> Result<Arc<PlannedAll>> {
    let (mut catalogs, mut unshared, mut always, mut drafted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (rank, Told { holdings: Holdings { catalog, rules }, writes }) in told.into_iter().enumerate() {
        catalog.validate().map_err(|error| Error::from(error).within(format!("rank {rank}")))?;
        catalogs.push(catalog);
        unshared.push(rules.unshared);
        always.push(rules.always);
        drafted.push(writes);
    }
    let writes = if drafted.iter().all(Option::is_none) {
        shardfast_plan::save_unshared(&catalogs, &unshared)?
    } else {
        shardfast_plan::amend_unshared(&catalogs, &unshared, &drafted)?
    };
    let compares_always = always.iter().any(|always| !always.is_empty());
    let rules = unshared.into_iter().zip(always).map(|(unshared, always)| Rules { unshared, always });
    let holdings = catalogs.into_iter().zip(rules).map(|(catalog, rules)| Holdings { catalog, rules }).collect();
    Ok(PlannedAll::new(number, Basis::Catalogs { holdings, writes }, compares_always))
}
