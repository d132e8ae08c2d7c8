//! Plans which rank writes what: each rank alone if it can, else all ranks agree once; the plan is then remembered.
//!
//! A rank that remembers a plan for its catalog, or that knows which ranks hold the same, makes a *local plan* of its
//! writes and begins with them at once, before any message. Meanwhile it opens the operation with the basis of its
//! local plan, and rank 0 checks whether all local plans form one plan. A rank that cannot plan alone opens with its
//! catalog and waits for rank 0's orders. A local plan is binding: rank 0 plans the other ranks around it, and if that
//! is impossible the save fails on every rank.
//!
//! Nothing here proves that a checkpoint is whole. The commit does, which checks the writes.

mod opening;
mod values;

use std::sync::{Arc, MutexGuard, PoisonError};

use crossbeam_channel::bounded;
use shardfast_format::{Catalog, sha256};
use shardfast_plan::{RankSet, Replicas, Write};
use shardfast_transfer::error::{Error, Kind, Result, panicked};
use shardfast_transfer::events::Phase;
use shardfast_transfer::progress::Progress;

use crate::operation::Operation;
use crate::plans::{
    GlobalPlan, Holdings, PLANS_MAX, PlanId, Plans, RememberedPlan, ReplicaStatus, Rules, ValueClasses,
};
use crate::state::{Maker, State};

pub(crate) use values::{ValuePlan, assign_values};

use opening::{Answer, Opening, RankCatalog};

/// One rank's part in a save.
#[derive(Clone)]
pub(crate) struct RankPlan {
    pub(crate) id: PlanId,
    /// The parts to write, of the rank's catalog.
    pub(crate) writes: Arc<Vec<Write>>,
    /// State of its replicas.
    pub(crate) status: ReplicaStatus,
    values: Option<Arc<ValueClasses>>,
    /// Plan of all ranks, on rank 0.
    pub(crate) all: Option<Arc<GlobalPlan>>,
}

/// The writes that a rank plans alone and begins with, and their basis.
pub(crate) struct LocalPlan {
    pub(crate) writes: Arc<Vec<Write>>,
    /// The remembered plan that it repeats, if a save of that plan has found the ranks' replicas equal.
    pub(crate) proven: Option<PlanId>,
    opening: Opening,
}

/// The planning of one save.
pub(crate) struct Planning<'a> {
    operation: &'a Operation,
    /// Catalog of this rank.
    catalog: &'a Arc<Catalog>,
    /// The other ranks that hold it, where known.
    replicas: Option<&'a Arc<Replicas>>,
    makers: &'a [Maker],
    rules: Arc<Rules>,
}

impl<'a> Planning<'a> {
    /// Begins to plan a save of this state, with these rules for its replicas.
    pub(crate) fn new(operation: &'a Operation, state: &'a State, rules: &Arc<Rules>) -> Planning<'a> {
        let State { catalog, replicas, makers, .. } = state;
        Planning { operation, catalog, replicas: replicas.as_ref(), makers, rules: Arc::clone(rules) }
    }

    /// Returns the writes of this rank, if it can plan them alone: those of the remembered plan if its catalog is the
    /// same, or those that follow from which ranks hold what. Returns `None` when it needs rank 0.
    ///
    /// # Errors
    /// `Invalid` when the replicas contradict themselves or the catalog.
    pub(crate) fn plan_alone(&self) -> Result<Option<LocalPlan>> {
        let Planning { operation, catalog, replicas, ref rules, .. } = *self;
        if let Some(planned) = operation.plans().mine.clone()
            && planned.is_of(catalog, replicas, rules)
        {
            let (proven, opening) = (planned.is_proven.then_some(planned.id), Opening::Same { id: planned.id });
            return Ok(Some(LocalPlan { writes: planned.writes, proven, opening }));
        }
        let (rank, world) = (operation.engine.rank(), operation.engine.world());
        let alone = || Replicas { groups: vec![RankSet::new([0])], leaves: vec![Some(0); catalog.leaves.len()] };
        let local = match replicas {
            _ if world == 1 => shardfast_plan::local_unshared(catalog, &rules.unshared, &alone(), rank, world)?,
            Some(replicas) if operation.plans().disproved.as_ref() != Some(replicas) => {
                shardfast_plan::local_unshared(catalog, &rules.unshared, replicas, rank, world)?
            }
            _ => None,
        };
        Ok(local.map(|local| {
            let opening = Opening::Local { claims: local.claims, compares_always: rules.compares_always() };
            LocalPlan { writes: Arc::new(local.writes), proven: None, opening }
        }))
    }

    /// Returns the last plan with replicas that a save has found equal, and this rank's catalog then.
    pub(crate) fn last_proven(&self) -> Option<(PlanId, Arc<Catalog>)> {
        let mine = self.operation.plans().mine.clone();
        mine.filter(|planned| planned.is_proven).map(|planned| (planned.id, planned.catalog))
    }

    fn holdings(&self) -> Holdings {
        Holdings { catalog: (**self.catalog).clone(), rules: (*self.rules).clone() }
    }

    /// Agrees with all ranks on which rank writes which parts and values, while `write` gets the parts that this rank
    /// writes: at once those of `local`, else those that rank 0 orders. `local` is the plan with which this rank
    /// begins, or its error; `admit` is rank 0's last check before the agreement; `digests` are those of this rank's
    /// values. A failed agreement cancels the save of `progress`.
    ///
    /// # Errors
    /// The agreement's are the same on every rank: the errors of any of them, that of `admit`, or contradictions
    /// between their catalogs or plans. Without a plan nothing is written.
    pub(crate) fn agree_while<T>(
        &self,
        local: Result<Option<LocalPlan>>,
        admit: impl FnOnce() -> Result<()> + Send,
        digests: impl FnOnce() -> Result<Vec<[u8; 32]>> + Send,
        progress: &Progress,
        write: impl FnOnce(&[Write]) -> T,
    ) -> (Result<(RankPlan, ValuePlan)>, Result<T>) {
        let known = local.as_ref().ok().and_then(|local| local.as_ref().map(|local| Arc::clone(&local.writes)));
        // Before other ranks can see it at the agreement, where a rank without this waits and writes nothing.
        let mark = || progress.ended(Phase::Planned);
        let known = known.inspect(|_| mark());
        std::thread::scope(|threads| {
            let (sender, planned) = bounded(1);
            let agreement = threads.spawn(move || {
                let plan = self.resolve(local, admit);
                // A rank that knows its writes does not receive them here.
                let _ = sender.send(plan.as_ref().map(|plan| Arc::clone(&plan.writes)).map_err(Error::clone));
                let agreed = plan.and_then(|plan| {
                    let values = assign_values(self.operation, &plan, (self.catalog, self.makers), digests())?;
                    Ok((plan, values))
                });
                agreed.inspect_err(|error| progress.cancel(error))
            });
            let died = |_| Err(Error::internal("the agreement between ranks ended without a result"));
            let writes = known.map_or_else(|| planned.recv().unwrap_or_else(died).inspect(|_| mark()), Ok);
            let written = writes.map(|writes| write(&writes));
            (agreement.join().unwrap_or_else(|panic| Err(panicked(&*panic))), written)
        })
    }

    /// Agrees with all ranks on which rank writes which parts.
    fn resolve(&self, local: Result<Option<LocalPlan>>, admit: impl FnOnce() -> Result<()>) -> Result<RankPlan> {
        let (mut drafted, mut is_local) = (None, false);
        let first = local.map(|local| match local {
            Some(LocalPlan { writes, opening, .. }) => {
                is_local = matches!(opening, Opening::Local { .. });
                drafted = Some(writes);
                opening
            }
            None => Opening::Ask(self.holdings()),
        });
        let mut all = None;
        let agreed = self.open(first, drafted.as_ref(), admit, &mut all);
        let (id, writes, status) = agreed.inspect_err(|error| {
            // A local plan that did not fit once does not fit the next time either.
            let mut plans = self.operation.plans();
            plans.mine = None;
            if is_local && error.kind == Kind::Invalid {
                plans.disproved = self.replicas.cloned();
            }
        })?;
        Ok(self.remembered(id, writes, status, all))
    }

    /// Asks rank 0 for the plan's name and this rank's writes, a second time with everything if rank 0 needs it. On
    /// rank 0 the plan is then in `all`.
    fn open(
        &self,
        first: Result<Opening>,
        drafted: Option<&Arc<Vec<Write>>>,
        admit: impl FnOnce() -> Result<()>,
        all: &mut Option<Arc<GlobalPlan>>,
    ) -> Result<(PlanId, Arc<Vec<Write>>, ReplicaStatus)> {
        let (mut admit, mut contradiction) = (Some(admit), None);
        let mut answer = self.operation.agree("open", first, |openings| {
            admit.take().map_or(Ok(()), |admit| admit())?;
            opening::decide(self.operation, &openings, all, &mut contradiction)
        })?;
        if let Answer::NeedCatalogs = answer {
            let (writes, makers) = (drafted.map(|writes| (**writes).clone()), self.makers.to_vec());
            let full = RankCatalog { holdings: self.holdings(), writes, makers };
            answer = self.operation.agree("plan", Ok(full), |catalogs| {
                opening::decide_in_full(self.operation.number(), catalogs, all, contradiction.take())
            })?;
        }
        let Answer::Go { id, writes, status } = answer else {
            return Err(Error::internal("rank 0 asked twice for the same catalogs"));
        };
        let writes = match (writes.map(Arc::new), drafted) {
            (None, Some(drafted)) => Arc::clone(drafted),
            (Some(writes), None) => writes,
            (Some(writes), Some(drafted)) if writes == *drafted => writes,
            _ => return Err(Error::internal("rank 0 orders something else than this rank has drafted, or nothing")),
        };
        Ok((id, writes, status))
    }

    /// Returns the orders of that plan, with the parts that are remembered already.
    fn remembered(
        &self,
        id: PlanId,
        writes: Arc<Vec<Write>>,
        status: ReplicaStatus,
        all: Option<Arc<GlobalPlan>>,
    ) -> RankPlan {
        let mut plans = self.operation.plans();
        if let Some(all) = &all {
            plans.all.retain(|known| known.id != all.id);
            plans.all.push(Arc::clone(all));
            let surplus = plans.all.len().saturating_sub(PLANS_MAX);
            plans.all.drain(..surplus);
        }
        let planned = match plans.mine.take() {
            Some(planned) if planned.id == id => planned,
            _ => RememberedPlan {
                id,
                catalog: Arc::clone(self.catalog),
                replicas: self.replicas.cloned(),
                rules: Arc::clone(&self.rules),
                writes: Arc::clone(&writes),
                is_proven: false,
                values: None,
            },
        };
        let planned = plans.mine.insert(planned);
        planned.is_proven = status.is_proven;
        RankPlan { id, writes, status, values: planned.values.clone(), all }
    }
}

/// Remembers that the ranks' replicas were equal in a save of these orders, as rank 0 does.
pub(crate) fn proven(operation: &Operation, plan: &RankPlan) {
    operation.remember(plan.id, |planned| planned.is_proven = true);
}

impl Operation {
    /// Returns the name of this attempt, which every rank computes without a message and no other attempt has.
    pub(crate) fn attempt(&self) -> String {
        let mut seed = self.engine.meeting().to_vec();
        seed.extend(self.attempt_seed());
        sha256(&seed)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        self.engine.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a plan if this rank still remembers it.
    fn remember(&self, id: PlanId, change: impl FnOnce(&mut RememberedPlan)) {
        if let Some(planned) = self.plans().mine.as_mut().filter(|planned| planned.id == id) {
            change(planned);
        }
    }
}
