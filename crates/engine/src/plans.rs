//! Remembers a job's plans: which rank writes what, and whether replicas were equal.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, LeafName};
use shardfast_plan::{Claim, Replicas, Write};

/// Names a plan of all ranks, or rank 0's findings about their values, by the number of the operation that made it: a
/// few bytes, the same on all ranks.
pub(crate) type PlanId = u64;

/// Plans that rank 0 remembers: those of the saves in flight, and the one before.
pub(crate) const PLANS_MAX: usize = 4;

/// Plans that an engine remembers from one save to the next.
#[derive(Default)]
pub(crate) struct Plans {
    pub(crate) mine: Option<RememberedPlan>,
    /// The holders for which local plans did not fit: ranks ask rank 0 while they know the same holders.
    pub(crate) disproved: Option<Arc<Replicas>>,
    /// Plans of all ranks, on rank 0; the latest last.
    pub(crate) all: Vec<Arc<GlobalPlan>>,
}

/// The last plan, as one rank remembers it.
#[derive(Clone)]
pub(crate) struct RememberedPlan {
    pub(crate) id: PlanId,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) replicas: Option<Arc<Replicas>>,
    pub(crate) rules: Arc<Rules>,
    pub(crate) writes: Arc<Vec<Write>>,
    /// `true` if a save of it has found the ranks' replicas equal.
    pub(crate) is_proven: bool,
    pub(crate) values: Option<Arc<ValueClasses>>,
}

impl RememberedPlan {
    /// Returns whether the plan is for these holdings.
    pub(crate) fn is_of(&self, catalog: &Arc<Catalog>, replicas: Option<&Arc<Replicas>>, rules: &Rules) -> bool {
        *self.rules == *rules
            && (Arc::ptr_eq(&self.catalog, catalog) || self.catalog.fingerprint() == catalog.fingerprint())
            && self.replicas.as_ref() == replicas
    }
}

/// Rules of a save for the replicas of a rank's leaves (indices of its catalog, ascending), and for its files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rules {
    /// The leaves whose copies may differ: ranks do not share the writing of a region.
    pub(crate) unshared: Vec<u32>,
    /// The leaves whose copies every save compares.
    pub(crate) always: Vec<u32>,
    /// The multiple at which the data of files begin.
    pub(crate) data_at: u64,
}

impl Rules {
    pub(crate) fn compares_always(&self) -> bool {
        !self.always.is_empty()
    }
}

/// Catalog and rules of a rank.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holdings {
    pub(crate) catalog: Catalog,
    pub(crate) rules: Rules,
}

/// State of a plan's replicas.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct ReplicaStatus {
    /// `true` if a save of this plan has found the replicas equal.
    pub(crate) is_proven: bool,
    /// `true` if some rank holds leaves whose replicas every save compares.
    pub(crate) compares_always: bool,
    /// `true` if ranks share no tensor.
    pub(crate) shares_nothing: bool,
}

/// Plan of all ranks, as rank 0 remembers it.
pub(crate) struct GlobalPlan {
    pub(crate) id: PlanId,
    pub(crate) basis: Basis,
    pub(crate) status: Mutex<ReplicaStatus>,
    pub(crate) values: Mutex<Option<Arc<GlobalValues>>>,
}

/// Basis of a plan.
pub(crate) enum Basis {
    /// Claims of ranks that planned alone.
    Claims(Vec<Vec<Claim>>),
    /// Holdings and writes of all ranks, planned by rank 0.
    Catalogs { holdings: Vec<Holdings>, writes: Vec<Vec<Write>> },
}

impl Basis {
    pub(crate) fn world(&self) -> usize {
        match self {
            Basis::Claims(claims) => claims.len(),
            Basis::Catalogs { holdings, .. } => holdings.len(),
        }
    }
}

impl GlobalPlan {
    pub(crate) fn new(id: PlanId, basis: Basis, compares_always: bool) -> Arc<GlobalPlan> {
        // Ranks that share nothing have nothing to compare.
        let shares_nothing = matches!(&basis, Basis::Claims(claims) if claims.iter().all(Vec::is_empty));
        let compares_always = compares_always && !shares_nothing;
        let status = ReplicaStatus { is_proven: shares_nothing, compares_always, shares_nothing };
        Arc::new(GlobalPlan { id, basis, status: Mutex::new(status), values: Mutex::default() })
    }

    pub(crate) fn status(&self) -> ReplicaStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a save of this plan has found its replicas equal.
    pub(crate) fn proven(&self) {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).is_proven = true;
    }
}

/// Compared values, as a rank remembers them.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct ValueClasses {
    pub(crate) id: PlanId,
    /// Members of each of its classes, in the order of the names, as positions among this rank's values.
    pub(crate) classes: Vec<Vec<u32>>,
    /// Values that it writes, as positions among this rank's values.
    pub(crate) mine: Vec<u32>,
}

/// Compared values, as rank 0 remembers them.
pub(crate) struct GlobalValues {
    pub(crate) id: PlanId,
    /// Classes of each rank, by rank.
    pub(crate) classes: Vec<Vec<u32>>,
    /// Every value, sorted by name.
    pub(crate) values: Vec<Value>,
}

/// A value and its writers.
pub(crate) struct Value {
    pub(crate) name: LeafName,
    pub(crate) layout: String,
    /// Ranks of each distinct content, by its writer, the lowest of them.
    pub(crate) writers: BTreeMap<u32, Vec<Range<u32>>>,
}
