//! What a job remembers of its plans: which rank writes what, and whether replicas were equal.

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

/// What an engine remembers from one save to the next.
#[derive(Default)]
pub(crate) struct Plans {
    pub(crate) mine: Option<RememberedPlan>,
    /// The holders for which local plans did not fit: ranks ask rank 0 while they know the same holders.
    pub(crate) disproved: Option<Arc<Replicas>>,
    /// On rank 0, the latest last.
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
    /// Whether a save of it has found the ranks' replicas equal.
    pub(crate) is_proven: bool,
    pub(crate) values: Option<Arc<ValueClasses>>,
}

impl RememberedPlan {
    /// Whether it is the plan for these holdings.
    pub(crate) fn is_of(&self, catalog: &Arc<Catalog>, replicas: Option<&Arc<Replicas>>, rules: &Rules) -> bool {
        *self.rules == *rules
            && (Arc::ptr_eq(&self.catalog, catalog) || self.catalog.fingerprint() == catalog.fingerprint())
            && self.replicas.as_ref() == replicas
    }
}

/// How a save treats the replicas of a rank's leaves (indices of its catalog, ascending), and its files.
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

/// What a rank holds.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holdings {
    pub(crate) catalog: Catalog,
    pub(crate) rules: Rules,
}

/// What is known of a plan's replicas.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct ReplicaStatus {
    /// Whether a save of this plan has found them equal.
    pub(crate) is_proven: bool,
    /// Whether some rank holds leaves whose replicas every save compares.
    pub(crate) compares_always: bool,
}

/// What rank 0 remembers of a plan of all ranks.
pub(crate) struct GlobalPlan {
    pub(crate) id: PlanId,
    pub(crate) basis: Basis,
    pub(crate) status: Mutex<ReplicaStatus>,
    pub(crate) values: Mutex<Option<Arc<GlobalValues>>>,
}

/// How a plan was made.
pub(crate) enum Basis {
    /// Each rank planned alone.
    Claims(Vec<Vec<Claim>>),
    /// Rank 0 planned for all.
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
        let is_proven = matches!(&basis, Basis::Claims(claims) if claims.iter().all(Vec::is_empty));
        let status = Mutex::new(ReplicaStatus { is_proven, compares_always: compares_always && !is_proven });
        Arc::new(GlobalPlan { id, basis, status, values: Mutex::default() })
    }

    pub(crate) fn status(&self) -> ReplicaStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A save of this plan has found its replicas equal.
    pub(crate) fn proven(&self) {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).is_proven = true;
    }
}

/// What a rank remembers of the values that were compared.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct ValueClasses {
    pub(crate) id: PlanId,
    /// As positions among this rank's values: the members of each of its classes, in the order of the names.
    pub(crate) classes: Vec<Vec<u32>>,
    /// As positions among this rank's values: what it writes.
    pub(crate) mine: Vec<u32>,
}

/// What rank 0 remembers of the values that were compared.
pub(crate) struct GlobalValues {
    pub(crate) id: PlanId,
    /// Per rank, its classes.
    pub(crate) classes: Vec<Vec<u32>>,
    /// Every value, sorted by name.
    pub(crate) values: Vec<Value>,
}

/// A value and its writers.
pub(crate) struct Value {
    pub(crate) name: LeafName,
    pub(crate) layout: String,
    /// Per distinct content its ranks, by its writer, the lowest of them.
    pub(crate) writers: BTreeMap<u32, Vec<Range<u32>>>,
}
