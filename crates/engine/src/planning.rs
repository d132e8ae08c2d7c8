//! Who writes what: planned by each rank alone where it can, agreed once otherwise, then remembered.
//!
//! A rank that remembers a plan for what it holds, or that knows who holds what it holds, *drafts* its writes and
//! begins with them at once: no message stands in front of the first byte. Meanwhile it opens the operation with what
//! its draft rests on, and rank 0 finds whether all drafts are one plan. A rank without a draft opens with its catalog
//! and [copies](crate::ahead) its state until its orders come. What was drafted is binding: the others' orders are
//! planned around it, and where that is impossible the save fails on every rank.
//!
//! Nothing here is proof that a checkpoint is whole. That is the commit's, which counts what was written.

mod opening;
mod values;

use std::sync::{Arc, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, sha256};
use shardfast_plan::{RankSet, Replicas, Write};

use crate::agree::Operation;
use crate::commit::ValueFiles;
use crate::error::{Error, Kind, Result};

pub(crate) use opening::{KnownFiles, PlannedAll, Standing};
pub(crate) use values::{Value, ValueOrders, agree_values};

use opening::{Answer, Holdings, Opening, Told};

/// Names a plan of all ranks, or what rank 0 found of their values: the number of the operation that it was made in,
/// which makes one at most. So all ranks say it in the same few bytes.
pub(crate) type PlanId = u64;

/// Plans that rank 0 remembers: those of the saves in flight, and the one before.
const PLANS_MAX: usize = 4;

/// What an engine remembers from one save to the next.
#[derive(Default)]
pub(crate) struct Memory {
    mine: Option<Planned>,
    /// What some rank knew of who holds what was not so: ranks ask, until it is another that they know.
    disproved: Option<Arc<Replicas>>,
    /// On rank 0, the latest last.
    all: Vec<Arc<PlannedAll>>,
}

/// The last plan, as one rank remembers it.
#[derive(Clone)]
struct Planned {
    id: PlanId,
    catalog: Arc<Catalog>,
    replicas: Option<Arc<Replicas>>,
    rules: Arc<Rules>,
    writes: Arc<Vec<Write>>,
    /// Whether a save of it has found the ranks' replicas equal.
    is_proven: bool,
    /// Whether rank 0 has a structure of this plan from this rank: a save of it was committed.
    is_known: bool,
    values: Option<Arc<values::Remembered>>,
    /// How this rank's files of values looked, by the number of the save that told rank 0; the latest last.
    value_files: Vec<(u64, Arc<ValueFiles>)>,
}

/// What a rank has to do in one save.
#[derive(Clone)]
pub(crate) struct Orders {
    pub(crate) id: PlanId,
    /// The parts to write, of the rank's catalog.
    pub(crate) writes: Arc<Vec<Write>>,
    /// What is known of its replicas.
    pub(crate) standing: Standing,
    /// Whether rank 0 remembers how this plan's files look.
    pub(crate) is_known: bool,
    values: Option<Arc<values::Remembered>>,
    /// On rank 0.
    pub(crate) all: Option<Arc<PlannedAll>>,
}

/// The writes that a rank begins with, and what they rest on.
pub(crate) struct Draft {
    pub(crate) writes: Arc<Vec<Write>>,
    /// The remembered plan that it is, if a save of that has found the ranks' replicas equal.
    pub(crate) proven: Option<PlanId>,
    opening: Opening,
}

/// The planning of one save.
pub(crate) struct Planning<'a> {
    pub(crate) operation: &'a Operation,
    /// What this rank holds.
    pub(crate) catalog: &'a Arc<Catalog>,
    /// Who else does, where that is known.
    pub(crate) replicas: Option<&'a Arc<Replicas>>,
    pub(crate) rules: Arc<Rules>,
}

/// What a save does with the replicas of a rank's leaves. Indices of its catalog, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rules {
    /// The leaves whose copies may differ: ranks do not share the writing of a region.
    pub(crate) unshared: Vec<u32>,
    /// The leaves whose copies every save compares.
    pub(crate) always: Vec<u32>,
}

impl Rules {
    pub(crate) fn compares_always(&self) -> bool {
        !self.always.is_empty()
    }
}

impl Planning<'_> {
    /// The writes of this rank as far as it can know them alone: those of the remembered plan when it holds what it
    /// held then, or those that follow from who holds what. `None` when it must ask.
    ///
    /// # Errors
    /// `Invalid` when the replicas contradict themselves or the catalog.
    pub(crate) fn draft(&self) -> Result<Option<Draft>> {
        let Planning { operation, catalog, replicas, ref rules } = *self;
        if let Some(planned) = operation.memory().mine.clone()
            && planned.is_of(catalog, replicas, rules)
        {
            let (proven, opening) = (planned.is_proven.then_some(planned.id), Opening::Same { id: planned.id });
            return Ok(Some(Draft { writes: planned.writes, proven, opening }));
        }
        let (rank, world) = (operation.engine.rank(), operation.engine.world());
        let alone = || Replicas { groups: vec![RankSet::new([0])], leaves: vec![Some(0); catalog.leaves.len()] };
        let local = match replicas {
            _ if world == 1 => shardfast_plan::local_unshared(catalog, &rules.unshared, &alone(), rank, world)?,
            Some(replicas) if operation.memory().disproved.as_ref() != Some(replicas) => {
                shardfast_plan::local_unshared(catalog, &rules.unshared, replicas, rank, world)?
            }
            _ => None,
        };
        Ok(local.map(|local| {
            let opening = Opening::Local { claims: local.claims, compares_always: rules.compares_always() };
            Draft { writes: Arc::new(local.writes), proven: None, opening }
        }))
    }

    /// The last plan of which a save has found the ranks' replicas equal, and what this rank held then.
    pub(crate) fn last_proven(&self) -> Option<(PlanId, Arc<Catalog>)> {
        let mine = self.operation.memory().mine.clone();
        mine.filter(|planned| planned.is_proven).map(|planned| (planned.id, planned.catalog))
    }

    fn holdings(&self) -> Holdings {
        Holdings { catalog: (**self.catalog).clone(), rules: (*self.rules).clone() }
    }

    /// Agrees with all ranks on who writes which parts. `draft` is what this rank begins with, or its failure; `admit`
    /// rank 0's last word before anything is agreed.
    ///
    /// # Errors
    /// The same on every rank: what any of them brought, what `admit` said, or how their catalogs or drafts contradict
    /// each other.
    pub(crate) fn agree(&self, draft: Result<Option<Draft>>, admit: impl FnOnce() -> Result<()>) -> Result<Orders> {
        let (mut drafted, mut is_local) = (None, false);
        let first = draft.map(|draft| match draft {
            Some(Draft { writes, opening, .. }) => {
                is_local = matches!(opening, Opening::Local { .. });
                drafted = Some(writes);
                opening
            }
            None => Opening::Ask(self.holdings()),
        });
        let mut all = None;
        let agreed = self.open(first, drafted.as_ref(), admit, &mut all);
        let (id, writes, standing) = agreed.inspect_err(|error| {
            // What was no plan of all ranks once is none the next time either.
            let mut memory = self.operation.memory();
            memory.mine = None;
            if is_local && error.kind == Kind::Invalid {
                memory.disproved = self.replicas.cloned();
            }
        })?;
        Ok(self.remembered(id, writes, standing, all))
    }

    /// Asks rank 0, twice if it must see everything, for the plan's name and this rank's writes. On rank 0 the plan
    /// then stands in `all`.
    fn open(
        &self,
        first: Result<Opening>,
        drafted: Option<&Arc<Vec<Write>>>,
        admit: impl FnOnce() -> Result<()>,
        all: &mut Option<Arc<PlannedAll>>,
    ) -> Result<(PlanId, Arc<Vec<Write>>, Standing)> {
        let mut admit = Some(admit);
        let mut answer = self.operation.agree("open", first, |openings| {
            admit.take().map_or(Ok(()), |admit| admit())?;
            opening::decide(self.operation, &openings, all)
        })?;
        if let Answer::Tell = answer {
            let told = Told { holdings: self.holdings(), writes: drafted.map(|writes| (**writes).clone()) };
            answer = self
                .operation
                .agree("plan", Ok(told), |told| opening::decide_told(self.operation.number(), told, all))?;
        }
        let Answer::Go { id, writes, standing } = answer else {
            return Err(Error::internal("rank 0 asked twice for the same catalogs"));
        };
        let writes = match (writes.map(Arc::new), drafted) {
            (None, Some(drafted)) => Arc::clone(drafted),
            (Some(writes), None) => writes,
            (Some(writes), Some(drafted)) if writes == *drafted => writes,
            _ => return Err(Error::internal("rank 0 orders something else than this rank has drafted, or nothing")),
        };
        Ok((id, writes, standing))
    }

    /// The orders of that plan, with what is remembered of it already.
    fn remembered(
        &self,
        id: PlanId,
        writes: Arc<Vec<Write>>,
        standing: Standing,
        all: Option<Arc<PlannedAll>>,
    ) -> Orders {
        let mut memory = self.operation.memory();
        if let Some(all) = &all {
            memory.all.retain(|known| known.id != all.id);
            memory.all.push(Arc::clone(all));
            let surplus = memory.all.len().saturating_sub(PLANS_MAX);
            memory.all.drain(..surplus);
        }
        let planned = match memory.mine.take() {
            Some(planned) if planned.id == id => planned,
            _ => Planned {
                id,
                catalog: Arc::clone(self.catalog),
                replicas: self.replicas.cloned(),
                rules: Arc::clone(&self.rules),
                writes: Arc::clone(&writes),
                is_proven: false,
                is_known: false,
                values: None,
                value_files: Vec::new(),
            },
        };
        let planned = memory.mine.insert(planned);
        planned.is_proven = standing.is_proven;
        Orders { id, writes, standing, is_known: planned.is_known, values: planned.values.clone(), all }
    }
}

/// Whether rank 0 remembers that this rank's files of values look so, by what it said when the values were compared.
/// From the commit of this operation on it will.
pub(crate) fn knows(operation: &Operation, orders: &Orders, values: &ValueOrders, files: &Arc<ValueFiles>) -> bool {
    let mut is_known = false;
    operation.remember(orders.id, |planned| {
        let told = |&number: &u64| planned.value_files.iter().find(|(of, _)| *of == number);
        is_known = values.known.as_ref().and_then(told).is_some_and(|(_, known)| known == files);
        planned.value_files.push((operation.number(), Arc::clone(files)));
        let surplus = planned.value_files.len().saturating_sub(PLANS_MAX);
        planned.value_files.drain(..surplus);
    });
    is_known
}

/// Remembers that a save of these orders was committed: rank 0 knows how this rank's files look.
pub(crate) fn committed(operation: &Operation, orders: &Orders) {
    operation.remember(orders.id, |planned| planned.is_known = true);
}

/// Remembers that the ranks' replicas were equal in a save of these orders: rank 0 does, too.
pub(crate) fn proven(operation: &Operation, orders: &Orders) {
    operation.remember(orders.id, |planned| planned.is_proven = true);
}

impl Planned {
    fn is_of(&self, catalog: &Arc<Catalog>, replicas: Option<&Arc<Replicas>>, rules: &Rules) -> bool {
        *self.rules == *rules
            && (Arc::ptr_eq(&self.catalog, catalog) || self.catalog.fingerprint() == catalog.fingerprint())
            && self.replicas.as_ref() == replicas
    }
}

impl Operation {
    /// The name of this attempt, which every rank knows without a message: nothing that another attempt wrote has it.
    pub(crate) fn attempt(&self) -> String {
        let mut seed = self.engine.meeting().to_vec();
        seed.extend(self.attempt_seed());
        sha256(&seed)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.engine.planned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what this rank remembers of a plan, if it still does.
    fn remember(&self, id: PlanId, change: impl FnOnce(&mut Planned)) {
        if let Some(planned) = self.memory().mine.as_mut().filter(|planned| planned.id == id) {
            change(planned);
        }
    }
}
