//! Gets bytes from a peer instead of from storage: if ranks want the same blocks, one of them reads for all. In
//! [`agree_route`] all ranks send their wants, rank 0 decides whether and on which [`terms`] they share, and each gets
//! its [`Route`]. [`exchange`] does a shared load. A [`carrier`] transports its messages: memory that ranks of a
//! machine share, or connections of the ranks' own.

pub mod carrier;
mod exchange;
mod terms;

use shardfast_plan::{Sharing, Wanted};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::sink::Want;

use crate::checkpoint::Checkpoint;
use crate::operation::Operation;
use crate::reads::{Loaded, ReadPlan, ValueRef, data_bytes, value_sinks};
use carrier::Carrier;
use exchange::{Ended, Neighbours, Shared, Trouble, Troubled};
pub use terms::links_max;
use terms::{Opening, Terms};

/// Rule for shared reads: whether one rank reads for its peers the blocks that several want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerReads {
    /// Sharing if the storage answers requests, or ranks of several machines read it, and much would be read twice.
    Auto,
    /// Always, if several ranks want the same blocks.
    Always,
    /// Each rank reads for itself.
    Never,
}

/// Sources of the bytes of one rank's load.
pub(crate) struct Route {
    /// `true` if other ranks of this machine read the same bytes, each for itself.
    shared_on_host: bool,
    /// Terms on which ranks share, on all ranks or on none.
    terms: Option<Terms>,
    /// Wants of this rank, each once, with its indices among the wants and values.
    wanted: Vec<(Wanted, Vec<usize>)>,
    carrier: Option<Box<dyn Carrier>>,
}

/// Outcome of a load on this rank.
pub(crate) type Outcome = Troubled<(Ended, Loaded)>;

/// Agrees that all ranks have a plan, and where each gets its bytes.
///
/// # Errors
/// The same on every rank: the errors of ranks that have no plan.
pub(crate) fn agree_route(
    operation: &Operation,
    checkpoint: &Checkpoint,
    peer_reads: PeerReads,
    plan: &Result<ReadPlan>,
    (wants, values): (&[Want], &[ValueRef]),
    carrier: Option<Box<dyn Carrier>>,
) -> Result<Route> {
    let (engine, manifest, needs) = (&checkpoint.engine, &checkpoint.manifest, checkpoint.files.needs());
    let is_alone = engine.world() == 1 || peer_reads == PeerReads::Never;
    let is_little = peer_reads == PeerReads::Auto && data_bytes(manifest) < terms::REPEATED_BYTES_MIN;
    let wanted = if is_alone || is_little { Vec::new() } else { terms::wanted(wants, values) };
    let opening = plan.as_ref().map_err(Error::clone).map(|_| Opening {
        bytes: checkpoint.bytes_wanted(wants),
        wants: wanted.iter().map(|(wanted, _)| wanted.clone()).collect(),
        exchange_bytes: engine.staging_bytes() / terms::EXCHANGE_PART,
        links_max: terms::links_max(),
    });
    let opened = operation.agree("open", opening, |ranks| terms::decide(manifest, needs, ranks, peer_reads))?;
    Ok(Route { shared_on_host: opened.shared_on_host, terms: opened.sharing, wanted, carrier })
}

/// Agrees that all ranks have received everything.
///
/// # Errors
/// The same on every rank: the errors of the ranks that failed.
pub(crate) fn agree_done(operation: &Operation, outcome: Outcome) -> Result<Loaded> {
    let (ended, loaded) = match outcome {
        Ok((ended, loaded)) => (Ok(ended), Ok(loaded)),
        Err(Trouble::Here(error)) => (Err(error.clone()), Err(error)),
        Err(Trouble::Everywhere(error)) => return Err(error),
    };
    operation.agree("done", ended, |ranks| match ranks.iter().position(|&ended| ended == Ended::Stopped) {
        None => Ok(vec![(); ranks.len()]),
        Some(rank) => Err(Error::internal(format!("rank {rank} reports that another rank failed; no rank did"))),
    })?;
    loaded
}

impl Route {
    /// Reads as planned, each block from storage or from a peer.
    pub(crate) fn read(
        self,
        operation: &Operation,
        checkpoint: &Checkpoint,
        plan: Result<ReadPlan>,
        wants: &[Want],
    ) -> Outcome {
        let Route { shared_on_host, terms, wanted, carrier } = self;
        let plan = plan?;
        match terms {
            None => Ok((Ended::Done, checkpoint.read(plan, wants, shared_on_host)?)),
            Some(terms) => {
                let load = SharedLoad { operation, checkpoint, wants };
                load.run(plan, wanted, &terms, carrier)
            }
        }
    }
}

/// A load on terms that all ranks have agreed on.
struct SharedLoad<'a> {
    operation: &'a Operation,
    checkpoint: &'a Checkpoint,
    wants: &'a [Want],
}

impl SharedLoad<'_> {
    /// Reads with others. `wanted` has the indices among the wants and values of each thing wanted.
    fn run(
        &self,
        plan: ReadPlan,
        wanted: Vec<(Wanted, Vec<usize>)>,
        terms: &Terms,
        carrier: Option<Box<dyn Carrier>>,
    ) -> Outcome {
        let SharedLoad { checkpoint, wants, .. } = *self;
        let (names, places): (Vec<Wanted>, Vec<Vec<usize>>) = wanted.into_iter().unzip();
        let has_peers = !terms.common.sets.is_empty();
        let rank = checkpoint.engine.rank();
        let Terms { common, chunk_blocks, run_bytes, .. } = terms;
        let sharing =
            has_peers.then(|| Sharing::new(&checkpoint.manifest, rank, &names, common, *chunk_blocks, *run_bytes));
        let sharing = sharing.transpose().map_err(Error::from);
        let Some((carrier, neighbours)) = self.connect(&plan, &sharing, terms, carrier)? else {
            return Ok((Ended::Done, checkpoint.read(plan, wants, has_peers)?));
        };
        let Some(sharing) = sharing? else {
            return Ok((Ended::Done, checkpoint.read(plan, wants, false)?));
        };
        let mut values: Vec<Vec<u8>> = plan.values_bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let value_sinks = value_sinks(&mut values)?;
        let sink =
            |&place: &usize| wants.get(place).map_or_else(|| &value_sinks[place - wants.len()], |want| &want.sink);
        let shared = Shared {
            files: &checkpoint.files,
            manifest: &checkpoint.manifest,
            staging: &checkpoint.engine.staging,
            sharing: &sharing,
            sinks: places.iter().map(|places| places.iter().map(sink).collect()).collect(),
            link_bytes: terms.link_bytes,
            neighbours,
        };
        let (ended, traffic) = shared.run(carrier)?;
        drop(value_sinks);
        Ok((ended, Loaded { values, traffic }))
    }

    /// Returns the carrier of messages to the peers of `sharing`, and the peers whose memory this rank maps. `None` on
    /// all ranks if each reads for itself after all.
    fn connect(
        &self,
        plan: &ReadPlan,
        sharing: &Result<Option<Sharing>>,
        terms: &Terms,
        carrier: Option<Box<dyn Carrier>>,
    ) -> Troubled<Option<(Box<dyn Carrier>, Neighbours)>> {
        if let Some(carrier) = carrier {
            return Ok(Some((carrier, Neighbours::default())));
        }
        let known = sharing.as_ref().map_err(Error::clone).map(|sharing| {
            // A rank that shares no blocks accepts either decision.
            let is_cached = |_: &Sharing| self.checkpoint.files.are_cached(|| plan.tensors.spans());
            let peers = sharing.as_ref().map_or(Vec::new(), Sharing::peers);
            (peers, terms.may_decline && sharing.as_ref().is_none_or(is_cached))
        });
        let needs = self.checkpoint.files.needs();
        let Some(connected) = terms::connect(self.operation, known, needs, terms.message_bytes_max)? else {
            return Ok(None);
        };
        // From a file system, the page cache of one machine reads each byte once for all of its ranks.
        if terms.may_decline && connected.is_in_memory && needs.request_bytes == 0 {
            return Ok(None);
        }
        Ok(Some((Box::new(connected.peers), connected.neighbours)))
    }
}
