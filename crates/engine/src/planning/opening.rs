//! Rank 0's side of the opening: whether what the ranks go by is one plan, and if not, a plan around it.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use shardfast_format::Catalog;
use shardfast_plan::{Claim, Write};

use super::{PlanId, values};
use crate::agree::Operation;
use crate::commit::{Structure, ValueFiles};
use crate::error::{Error, Result};

/// What a rank goes by.
#[derive(Serialize, Deserialize)]
pub(super) enum Opening {
    /// The plan that it remembers, since it holds what it held then.
    Same { id: PlanId },
    /// A plan of its own, and what that rests on.
    Local { claims: Vec<Claim> },
    /// Nothing: it waits for its orders.
    Ask { catalog: Catalog },
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
    },
}

/// Everything about one rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) catalog: Catalog,
    /// What it has begun to write.
    pub(super) writes: Option<Vec<Write>>,
}

/// What rank 0 remembers of a plan of all ranks.
pub(crate) struct PlannedAll {
    pub(super) id: PlanId,
    basis: Basis,
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
    Catalogs { catalogs: Vec<Catalog>, writes: Vec<Vec<Write>> },
}

impl Basis {
    fn world(&self) -> usize {
        match self {
            Basis::Claims(claims) => claims.len(),
            Basis::Catalogs { catalogs, .. } => catalogs.len(),
        }
    }
}

impl PlannedAll {
    fn new(id: PlanId, basis: Basis) -> Arc<PlannedAll> {
        let structures = Mutex::new(vec![None; basis.world()]);
        Arc::new(PlannedAll { id, basis, structures, values: Mutex::default(), value_files: Mutex::default() })
    }

    /// Whether the rank goes by this plan, or would if it remembered it. A rank that planned alone has another plan,
    /// for what it claims does not tell what it holds alone.
    fn agrees(&self, rank: usize, opening: &Opening) -> bool {
        match (opening, &self.basis) {
            (Opening::Same { id }, _) => *id == self.id,
            (Opening::Ask { catalog }, Basis::Catalogs { catalogs, .. }) => *catalog == catalogs[rank],
            _ => false,
        }
    }

    fn answers(&self, has_draft: impl Fn(usize) -> bool) -> Vec<Answer> {
        let go = |rank: usize| match &self.basis {
            Basis::Catalogs { writes, .. } if !has_draft(rank) => Some(writes[rank].clone()),
            _ => None,
        };
        (0..self.basis.world()).map(|rank| Answer::Go { id: self.id, writes: go(rank) }).collect()
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
    let has_draft = |rank: usize| !matches!(openings[rank], Opening::Ask { .. });
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
    let claims = openings.iter().enumerate().map(|(rank, opening)| match opening {
        Opening::Local { claims } => Some(claims.clone()),
        Opening::Same { id } => match &remembered(*id)?.basis {
            Basis::Claims(claims) => Some(claims[rank].clone()),
            Basis::Catalogs { .. } => None,
        },
        Opening::Ask { .. } => None,
    });
    if let Some(claims) = claims.collect::<Option<Vec<_>>>() {
        shardfast_plan::prove(&claims)?;
        return Ok(Some(PlannedAll::new(number, Basis::Claims(claims))));
    }
    let told = openings.iter().enumerate().map(|(rank, opening)| match opening {
        Opening::Ask { catalog } => Some(Told { catalog: catalog.clone(), writes: None }),
        Opening::Same { id } => match &remembered(*id)?.basis {
            Basis::Catalogs { catalogs, writes } => {
                Some(Told { catalog: catalogs[rank].clone(), writes: Some(writes[rank].clone()) })
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
    let (catalogs, drafted): (Vec<_>, Vec<_>) = told.into_iter().map(|told| (told.catalog, told.writes)).unzip();
    for (rank, catalog) in catalogs.iter().enumerate() {
        catalog.validate().map_err(|error| Error::from(error).within(format!("rank {rank}")))?;
    }
    let writes = if drafted.iter().all(Option::is_none) {
        shardfast_plan::save(&catalogs)?
    } else {
        shardfast_plan::amend(&catalogs, &drafted)?
    };
    Ok(PlannedAll::new(number, Basis::Catalogs { catalogs, writes }))
}
