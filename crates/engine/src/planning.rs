//! Who writes what: agreed once, then remembered as long as every rank holds what it held.
//!
//! A rank opens with the fingerprint of its catalog. While rank 0 remembers a plan for exactly these fingerprints of
//! all ranks, 32 bytes a rank are all that travels; otherwise catalogs are sent, and rank 0 plans anew.

use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, LeafBody, sha256};
use shardfast_plan::{ObjectWrite, PartRef, SavePlan};

use crate::agree::Operation;
use crate::error::{Error, Result};

/// The plan as a rank remembers it.
#[derive(Clone)]
pub(crate) struct Planned {
    /// Of the fingerprints of all ranks.
    id: [u8; 32],
    writes: Arc<Vec<PartRef>>,
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
    pub(crate) writes: Arc<Vec<PartRef>>,
    /// The encoded values to write, as indices of the rank's catalog.
    pub(crate) values: Vec<u32>,
    /// What rank 0 needs for the manifest.
    pub(crate) root: Option<RootOrders>,
}

/// Rank 0's view of the whole save.
pub(crate) struct RootOrders {
    pub(crate) all: Arc<PlannedAll>,
    /// For each value that is stored: its leaf in the merged order, who holds it, who writes it.
    pub(crate) values: Vec<ObjectWrite>,
}

#[derive(Serialize, Deserialize)]
struct Opening {
    fingerprint: [u8; 32],
    /// The plan that this rank remembers, if any.
    known: Option<[u8; 32]>,
    /// When this rank remembers no plan for its catalog, or was asked.
    catalog: Option<Catalog>,
    /// SHA-256 of each encoded value, in the catalog's order.
    digests: Vec<[u8; 32]>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// Rank 0 knows no plan for these fingerprints: everyone sends its catalog.
    Replan,
    Go {
        attempt: String,
        id: [u8; 32],
        /// `None`: as this rank remembers them.
        writes: Option<Vec<PartRef>>,
        values: Vec<u32>,
    },
}

/// Agrees with all ranks on who writes what. `digests` are the SHA-256 of the encoded values in the catalog's order;
/// `admit` is rank 0's last word before anything is planned.
///
/// # Errors
/// The same on every rank: what any of them brought, what `admit` said, or how their catalogs contradict each other.
pub(crate) fn agree(
    operation: &Operation,
    catalog: &Catalog,
    digests: Result<Vec<[u8; 32]>>,
    admit: impl Fn() -> Result<()>,
) -> Result<Orders> {
    let lock = || operation.engine.planned.lock().unwrap_or_else(PoisonError::into_inner);
    let remembered = lock().clone();
    let fingerprint = catalog.fingerprint();
    let mut all = remembered.as_ref().and_then(|planned| planned.all.clone());
    let mut root_values = Vec::new();
    let mut digests = Some(digests);
    for (stage, send) in [("open", remembered.is_none()), ("plan", true)] {
        let opening = digests.take().unwrap_or(Ok(Vec::new())).map(|digests| Opening {
            fingerprint,
            known: remembered.as_ref().map(|planned| planned.id),
            catalog: send.then(|| catalog.clone()),
            digests,
        });
        let kept = opening.as_ref().map(|opening| opening.digests.clone()).map_err(Error::clone);
        let answer = operation.agree(stage, opening, |openings| {
            admit()?;
            let Some(planned) = plan(all.take(), &openings)? else {
                return Ok(openings.iter().map(|_| Answer::Replan).collect());
            };
            root_values = values(&planned, &openings)?;
            let answers = answers(&planned, &root_values, openings)?;
            all = Some(planned);
            Ok(answers)
        })?;
        let Answer::Go { attempt, id, writes, values } = answer else {
            digests = Some(kept);
            continue;
        };
        let writes = match (writes, remembered) {
            (Some(writes), _) => Arc::new(writes),
            (None, Some(planned)) if planned.id == id => planned.writes,
            _ => return Err(Error::internal("rank 0 refers to a plan that this rank does not remember")),
        };
        *lock() = Some(Planned { id, writes: Arc::clone(&writes), all: all.clone() });
        let root = all.map(|all| RootOrders { all, values: root_values });
        return Ok(Orders { attempt, writes, values, root });
    }
    Err(Error::internal("rank 0 asked twice for the same catalogs"))
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

fn values(all: &PlannedAll, openings: &[Opening]) -> Result<Vec<ObjectWrite>> {
    let mut digests = Vec::with_capacity(openings.len());
    for (rank, (opening, catalog)) in openings.iter().zip(&all.catalogs).enumerate() {
        let objects: Vec<_> = objects(catalog).collect();
        if objects.len() != opening.digests.len() {
            return Err(Error::internal(format!(
                "rank {rank}: expected the digests of {} values, found {}",
                objects.len(),
                opening.digests.len()
            )));
        }
        let merged = objects.iter().map(|&leaf| all.plan.merged[rank][leaf as usize]);
        digests.push(merged.zip(opening.digests.iter().copied()).collect());
    }
    Ok(shardfast_plan::objects(&all.plan, &digests)?)
}

fn answers(all: &PlannedAll, values: &[ObjectWrite], openings: Vec<Opening>) -> Result<Vec<Answer>> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Error::internal(format!("no random number for a name: {error}")))?;
    let attempt = format!("{:016x}", u64::from_le_bytes(bytes));
    let mut to_write = vec![std::collections::HashSet::new(); openings.len()];
    for value in values {
        to_write[value.writer as usize].insert(value.leaf);
    }
    let answers = openings.into_iter().enumerate().map(|(rank, opening)| {
        let mine = objects(&all.catalogs[rank]);
        Answer::Go {
            attempt: attempt.clone(),
            id: all.id,
            writes: (opening.known != Some(all.id)).then(|| all.plan.writes[rank].clone()),
            values: mine.filter(|&leaf| to_write[rank].contains(&all.plan.merged[rank][leaf as usize])).collect(),
        }
    });
    Ok(answers.collect())
}

fn objects(catalog: &Catalog) -> impl Iterator<Item = u32> + '_ {
    let leaves = catalog.leaves.iter().enumerate();
    leaves.filter(|(_, leaf)| matches!(leaf.body, LeafBody::Object { .. })).map(|(i, _)| i as u32)
}
