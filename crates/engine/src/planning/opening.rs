//! Rank 0's side of the opening: whether the ranks' plans are one, and if not, a plan around them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardfast_plan::{Claim, Write};
use shardfast_transfer::error::{Error, Result};

use crate::operation::Operation;
use crate::plans::{Basis, GlobalPlan, Holdings, PlanId, ReplicaStatus, Rules};
use crate::state::Maker;

use super::values::expect_one_kind;

/// The basis of a rank's writes.
#[derive(Serialize, Deserialize)]
pub(super) enum Opening {
    /// The remembered plan, whose catalog is the same.
    Same { id: PlanId },
    /// The rank's local plan, with its claims.
    Local {
        claims: Vec<Claim>,
        /// `true` if the rank holds leaves whose replicas every save compares.
        compares_always: bool,
    },
    /// Nothing: it waits for its orders.
    Ask(Holdings),
}

/// Rank 0's answer to a rank.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// Rank 0 must see all catalogs.
    NeedCatalogs,
    Go {
        id: PlanId,
        /// `None`: as the rank drafted.
        writes: Option<Vec<Write>>,
        status: ReplicaStatus,
    },
}

/// Everything that rank 0 needs of one rank.
#[derive(Serialize, Deserialize)]
pub(super) struct RankCatalog {
    pub(super) holdings: Holdings,
    /// Writes that the rank has begun.
    pub(super) writes: Option<Vec<Write>>,
    pub(super) makers: Vec<Maker>,
}

impl GlobalPlan {
    /// Returns whether the rank follows this plan, or would if it remembered it. A rank that planned alone has another
    /// plan, since its claims do not include parts that it alone holds.
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
        let status = self.status();
        (0..self.basis.world()).map(|rank| Answer::Go { id: self.id, writes: go(rank), status }).collect()
    }
}

/// Decides over the openings of all ranks. The plan, if any, is then in `found`, and in `contradiction` how local plans
/// do not fit together.
pub(super) fn decide(
    operation: &Operation,
    openings: &[Opening],
    found: &mut Option<Arc<GlobalPlan>>,
    contradiction: &mut Option<Error>,
) -> Result<Vec<Answer>> {
    let known = operation.plans().all.clone();
    let agree = |plan: &&Arc<GlobalPlan>| openings.iter().enumerate().all(|(rank, opening)| plan.agrees(rank, opening));
    let has_draft = |rank: usize| !matches!(openings[rank], Opening::Ask(_));
    let plan = match known.iter().rev().find(agree) {
        Some(plan) => Some(Arc::clone(plan)),
        None => renewed(operation.number(), &known, openings, contradiction)?,
    };
    let answers = match &plan {
        Some(plan) => plan.answers(has_draft),
        None => openings.iter().map(|_| Answer::NeedCatalogs).collect(),
    };
    *found = plan;
    Ok(answers)
}

/// Makes a plan of that number from the openings, completed from memory; returns `None` when they do not make one plan.
fn renewed(
    number: PlanId,
    known: &[Arc<GlobalPlan>],
    openings: &[Opening],
    contradiction: &mut Option<Error>,
) -> Result<Option<Arc<GlobalPlan>>> {
    let remembered = |id: PlanId| known.iter().find(|plan| plan.id == id);
    let compares_always = openings.iter().any(|opening| match opening {
        Opening::Same { id } => remembered(*id).is_some_and(|plan| plan.status().compares_always),
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
        // Where they do not fit, catalogs tell what it is about.
        *contradiction = shardfast_plan::prove(&claims).err().map(Error::from);
        let is_one = contradiction.is_none();
        return Ok(is_one.then(|| GlobalPlan::new(number, Basis::Claims(claims), compares_always)));
    }
    let catalogs = openings.iter().enumerate().map(|(rank, opening)| match opening {
        Opening::Ask(held) => Some(RankCatalog { holdings: held.clone(), writes: None, makers: Vec::new() }),
        Opening::Same { id } => match &remembered(*id)?.basis {
            Basis::Catalogs { holdings, writes } => {
                let (holdings, writes) = (holdings[rank].clone(), Some(writes[rank].clone()));
                Some(RankCatalog { holdings, writes, makers: Vec::new() })
            }
            Basis::Claims(_) => None,
        },
        Opening::Local { .. } => None,
    });
    catalogs.collect::<Option<Vec<_>>>().map(|catalogs| planned(number, catalogs)).transpose()
}

/// Decides over everything of all ranks. The plan, if any, is then in `found`; a `contradiction` of
/// their local plans is an error.
pub(super) fn decide_in_full(
    number: PlanId,
    catalogs: Vec<RankCatalog>,
    found: &mut Option<Arc<GlobalPlan>>,
    contradiction: Option<Error>,
) -> Result<Vec<Answer>> {
    let has_draft: Vec<bool> = catalogs.iter().map(|catalog| catalog.writes.is_some()).collect();
    expect_one_kind(&catalogs.iter().map(|catalog| &*catalog.makers).collect::<Vec<_>>(), |_| true)?;
    if let Some(contradiction) = contradiction {
        return Err(contradiction);
    }
    let plan = planned(number, catalogs)?;
    let answers = plan.answers(|rank| has_draft[rank]);
    *found = Some(plan);
    Ok(answers)
}

/// Makes a plan of that number from these catalogs around the local plans.
fn planned(number: PlanId, ranks: Vec<RankCatalog>) -> Result<Arc<GlobalPlan>> {
    let (mut catalogs, mut unshared, mut all_rules, mut drafted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (rank, RankCatalog { holdings: Holdings { catalog, rules }, writes, .. }) in ranks.into_iter().enumerate() {
        catalog.validate().map_err(|error| Error::from(error).within(format!("rank {rank}")))?;
        catalogs.push(catalog);
        unshared.push(rules.unshared.clone());
        all_rules.push(rules);
        drafted.push(writes);
    }
    let writes = if drafted.iter().all(Option::is_none) {
        shardfast_plan::save_unshared(&catalogs, &unshared)?
    } else {
        shardfast_plan::amend_unshared(&catalogs, &unshared, &drafted)?
    };
    let compares_always = all_rules.iter().any(Rules::compares_always);
    let holdings = catalogs.into_iter().zip(all_rules).map(|(catalog, rules)| Holdings { catalog, rules }).collect();
    Ok(GlobalPlan::new(number, Basis::Catalogs { holdings, writes }, compares_always))
}
