//! Who writes what: agreed once, then remembered as long as every rank holds what it held.
//!
//! A rank opens with the fingerprint of its catalog. While rank 0 remembers a plan for exactly these fingerprints of
//! all ranks, 32 bytes a rank are all that travels; otherwise catalogs are sent, and rank 0 plans anew. Values are
//! compared apart from that, by their digests, while tensors are being written already: encoding them takes its time.

use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, LeafBody, sha256};
use shardfast_plan::{ObjectWrite, SavePlan, Write};

use crate::agree::Operation;
use crate::error::{Error, Result};

/// The plan as a rank remembers it.
#[derive(Clone)]
pub(crate) struct Planned {
    /// Of the fingerprints of all ranks.
    id: [u8; 32],
    writes: Arc<Vec<Write>>,
    /// On rank 0.
    all: Option<Arc<PlannedAll>>,
}

/// What rank 0 remembers of the plan of all ranks.
pub(crate) struct PlannedAll {
    id: [u8; 32],
    pub(crate) catalogs: Vec<Catalog>,
    pub(crate) plan: SavePlan,
}

/// What one rank has to do.
pub(crate) struct Orders {
    /// Names the attempt: nothing that another attempt at the same checkpoint wrote has this name.
    pub(crate) attempt: String,
    /// The parts to write, of the rank's catalog.
    pub(crate) writes: Arc<Vec<Write>>,
    /// On rank 0.
    pub(crate) all: Option<Arc<PlannedAll>>,
}

/// Which values one rank has to write.
pub(crate) struct ValueOrders {
    /// As indices of the rank's catalog.
    pub(crate) mine: Vec<u32>,
    /// On rank 0, for each value that is stored: its leaf in the merged order, who holds it, who writes it.
    pub(crate) all: Vec<ObjectWrite>,
}

#[derive(Serialize, Deserialize)]
struct Opening {
    fingerprint: [u8; 32],
    /// The plan that this rank remembers, if any.
    known: Option<[u8; 32]>,
    /// When this rank remembers no plan for its catalog, or was asked.
    catalog: Option<Catalog>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// Rank 0 knows no plan for these fingerprints: everyone sends its catalog.
    Replan,
    Go {
        attempt: String,
        id: [u8; 32],
        /// `None`: as this rank remembers them.
        writes: Option<Vec<Write>>,
    },
}

/// Agrees with all ranks on who writes which parts. `ready` is whether this rank can save at all, `admit` rank 0's last
/// word before anything is planned.
///
/// # Errors
/// The same on every rank: what any of them brought, what `admit` said, or how their catalogs contradict each other.
pub(crate) fn agree(
    operation: &Operation,
    catalog: &Catalog,
    ready: Result<()>,
    admit: impl Fn() -> Result<()>,
) -> Result<Orders> {
    let lock = || operation.engine.planned.lock().unwrap_or_else(PoisonError::into_inner);
    let remembered = lock().clone();
    let fingerprint = catalog.fingerprint();
    let mut all = remembered.as_ref().and_then(|planned| planned.all.clone());
    for (stage, send) in [("open", remembered.is_none()), ("plan", true)] {
        let opening = ready.clone().map(|()| Opening {
            fingerprint,
            known: remembered.as_ref().map(|planned| planned.id),
            catalog: send.then(|| catalog.clone()),
        });
        let answer = operation.agree(stage, opening, |openings| {
            admit()?;
            let Some(planned) = plan(all.take(), &openings)? else {
                return Ok(openings.iter().map(|_| Answer::Replan).collect());
            };
            let answers = answers(&planned, openings)?;
            all = Some(planned);
            Ok(answers)
        })?;
        let Answer::Go { attempt, id, writes } = answer else { continue };
        let writes = match (writes, remembered) {
            (Some(writes), _) => Arc::new(writes),
            (None, Some(planned)) if planned.id == id => planned.writes,
            _ => return Err(Error::internal("rank 0 refers to a plan that this rank does not remember")),
        };
        *lock() = Some(Planned { id, writes: Arc::clone(&writes), all: all.clone() });
        return Ok(Orders { attempt, writes, all });
    }
    Err(Error::internal("rank 0 asked twice for the same catalogs"))
}

/// Agrees with all ranks on who writes which values. `digests` are the SHA-256 of this rank's encoded values in the
/// catalog's order.
///
/// # Errors
/// The same on every rank: what any of them brought.
pub(crate) fn agree_values(
    operation: &Operation,
    orders: &Orders,
    digests: Result<Vec<[u8; 32]>>,
) -> Result<ValueOrders> {
    let mut writes = Vec::new();
    let mine = operation.agree("values", digests, |digests: Vec<Vec<[u8; 32]>>| {
        let all = orders.all.as_ref().ok_or_else(|| Error::internal("only rank 0 can compare values"))?;
        writes = values(all, &digests)?;
        let mut to_write = vec![std::collections::HashSet::new(); digests.len()];
        for value in &writes {
            to_write[value.writer as usize].insert(value.leaf);
        }
        let answers = all.catalogs.iter().enumerate().map(|(rank, catalog)| {
            let is_mine = |&leaf: &u32| to_write[rank].contains(&all.plan.merged[rank][leaf as usize]);
            objects(catalog).filter(is_mine).collect::<Vec<u32>>()
        });
        Ok(answers.collect())
    })?;
    Ok(ValueOrders { mine, all: writes })
}

/// The plan for these catalogs: the remembered one, or a new one; `None` when it must see catalogs first.
fn plan(remembered: Option<Arc<PlannedAll>>, openings: &[Opening]) -> Result<Option<Arc<PlannedAll>>> {
    let fingerprints: Vec<u8> = openings.iter().flat_map(|opening| opening.fingerprint).collect();
    let id = sha256(&fingerprints);
    if let Some(all) = remembered.filter(|all| all.id == id) {
        return Ok(Some(all));
    }
    let mut catalogs = Vec::with_capacity(openings.len());
    for (rank, opening) in openings.iter().enumerate() {
        let Some(catalog) = &opening.catalog else { return Ok(None) };
        catalog.validate().map_err(|error| Error::from(error).within(format!("rank {rank}")))?;
        if catalog.fingerprint() != opening.fingerprint {
            return Err(Error::internal(format!("rank {rank}: its catalog is not that of its fingerprint")));
        }
        catalogs.push(catalog.clone());
    }
    let plan = shardfast_plan::save(&catalogs)?;
    Ok(Some(Arc::new(PlannedAll { id, catalogs, plan })))
}

fn values(all: &PlannedAll, found: &[Vec<[u8; 32]>]) -> Result<Vec<ObjectWrite>> {
    let mut digests = Vec::with_capacity(found.len());
    for (rank, (found, catalog)) in found.iter().zip(&all.catalogs).enumerate() {
        let objects: Vec<_> = objects(catalog).collect();
        if objects.len() != found.len() {
            return Err(Error::internal(format!(
                "rank {rank}: expected the digests of {} values, found {}",
                objects.len(),
                found.len()
            )));
        }
        let merged = objects.iter().map(|&leaf| all.plan.merged[rank][leaf as usize]);
        digests.push(merged.zip(found.iter().copied()).collect());
    }
    Ok(shardfast_plan::objects(&all.plan, &digests)?)
}

fn answers(all: &PlannedAll, openings: Vec<Opening>) -> Result<Vec<Answer>> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Error::internal(format!("no random number for a name: {error}")))?;
    let attempt = format!("{:016x}", u64::from_le_bytes(bytes));
    let answers = openings.into_iter().zip(&all.plan.writes).map(|(opening, writes)| Answer::Go {
        attempt: attempt.clone(),
        id: all.id,
        writes: (opening.known != Some(all.id)).then(|| writes.clone()),
    });
    Ok(answers.collect())
}

fn objects(catalog: &Catalog) -> impl Iterator<Item = u32> + '_ {
    let leaves = catalog.leaves.iter().enumerate();
    leaves.filter(|(_, leaf)| matches!(leaf.body, LeafBody::Object { .. })).map(|(i, _)| i as u32)
}
