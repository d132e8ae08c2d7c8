//! Decides whether ranks share the reads of a load, and on which terms: once, by rank 0, for all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_coord::peers::{Joining, Peers};
use shardfast_format::{BLOCK_BYTES, Manifest};
use shardfast_plan::{CHUNK_BLOCKS_MAX, Common, Wanted, share};
use shardfast_store::ReadNeeds;
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::sink::Want;
use shardfast_transfer::staging::shared::{SharedMemory, View};

use super::PeerReads;
use super::exchange::{Neighbours, Trouble, slots_in_request};
use crate::operation::{Operation, of_ranks};
use crate::reads::{ValueRef, data_bytes};

/// The most wants of others in the answers to all ranks together; each takes about 20 bytes.
const OTHERS_MAX: usize = 16 << 20;

/// Bytes of one round with one peer, about as many as fill the network.
const LINK_BYTES: u64 = 4 << 20;

/// The least number of peers by which a round's bytes are divided: two ranks alone need no larger rounds.
const LINKS_MIN: u64 = 8;

/// The most bytes that a rank sends, or receives, in a round.
const ROUND_BYTES_MAX: u64 = 512 << 20;

/// The part of the staging budget that the messages of one round may take in one direction. Three rounds are being
/// prepared or sent at a time and two are arriving or being placed: at most half of the budget in all, with shared
/// memory.
pub(crate) const EXCHANGE_PART: u64 = 16;

/// Descriptors that are left for data files and everything else in the process.
const DESCRIPTORS_KEPT: u64 = 512;

/// Time for which ranks wait for connections before they ask whether all are still there.
const JOINING: Duration = Duration::from_secs(1);

/// The bytes that each rank must, on average, have in common with another one before connections are worth their cost.
/// They must also be a hundredth of the whole.
pub(crate) const REPEATED_BYTES_MIN: u64 = 32 << 20;

/// A rank's message at the beginning of a load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// Bytes of tensors that the rank wants.
    pub(crate) bytes: u64,
    /// Wants, sorted, none twice; empty if nothing is to be shared.
    pub(crate) wants: Vec<Wanted>,
    /// The most bytes of one round's messages in one direction.
    pub(crate) exchange_bytes: u64,
    /// The number of ranks that this one can connect to.
    pub(crate) links_max: u64,
}

/// Rank 0's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// `true` if other ranks of this machine read the same bytes, each for itself.
    pub(crate) shared_on_host: bool,
    /// Terms of sharing, on every rank or on none.
    pub(crate) sharing: Option<Terms>,
}

/// Terms on which ranks share.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// Wants that this rank has in common with others.
    pub(crate) common: Common,
    /// This and the next one as for [`shardfast_plan::Sharing::new`].
    pub(crate) chunk_blocks: u32,
    pub(crate) run_bytes: u64,
    /// The most bytes that one rank sends another one in a round.
    pub(crate) link_bytes: u64,
    /// Bound above the length of every message, in bytes.
    pub(crate) message_bytes_max: u64,
    /// `true` if ranks that need no storage for it may read for themselves after all.
    pub(crate) may_decline: bool,
}

/// Returns the wants of a load, in terms of the manifest, sorted, each once with its indices among the wants and then
/// the values.
pub(crate) fn wanted(wants: &[Want], values: &[ValueRef]) -> Vec<(Wanted, Vec<usize>)> {
    let tensors = wants.iter().filter(|want| !want.region.is_empty());
    let tensors = tensors.map(|want| Wanted { leaf: want.leaf as u32, region: want.region.clone() });
    let values = values.iter().map(|value| Wanted::of_value(value.leaf as u32, value.value as u64));
    let mut places: BTreeMap<Wanted, Vec<usize>> = BTreeMap::new();
    let nonempty = (0..wants.len()).filter(|&place| !wants[place].region.is_empty()).chain(wants.len()..);
    for (wanted, place) in tensors.chain(values).zip(nonempty) {
        places.entry(wanted).or_default().push(place);
    }
    places.into_iter().collect()
}

/// Returns the number of ranks that this process can connect to.
pub fn links_max() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.unwrap_or(u64::MAX).saturating_sub(DESCRIPTORS_KEPT)
}

/// Decides for all ranks, given the message of each.
pub(crate) fn decide(
    manifest: &Manifest,
    needs: ReadNeeds,
    ranks: Vec<Opening>,
    peer_reads: PeerReads,
) -> Result<Vec<Opened>> {
    // More than all bytes of the checkpoint: several ranks want some of them.
    let there = data_bytes(manifest);
    let shared_on_host = ranks.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.bytes)) > there;
    let least = |of: fn(&Opening) -> u64| ranks.iter().map(of).min().unwrap_or(0);
    let (exchange_bytes, links_max) = (least(|rank| rank.exchange_bytes), least(|rank| rank.links_max));
    let world = ranks.len();
    let plain = || Ok((0..world).map(|_| Opened { shared_on_host, sharing: None }).collect());
    if world == 1 || peer_reads == PeerReads::Never {
        return plain();
    }
    let wants: Vec<Vec<Wanted>> = ranks.into_iter().map(|rank| rank.wants).collect();
    let Some(matching) = share(manifest, &wants, OTHERS_MAX)? else { return plain() };
    let peers = u64::from(matching.peers_max);
    let repeated = matching.bytes_for_each - matching.bytes_for_all;
    let is_little = repeated < REPEATED_BYTES_MIN * world as u64 || repeated < matching.bytes_for_all / 100;
    if peers == 0 || peer_reads == PeerReads::Auto && is_little || peers > links_max {
        return plain();
    }
    let round_bytes = exchange_bytes.min(ROUND_BYTES_MAX).min(LINK_BYTES * peers.max(LINKS_MIN));
    let link_bytes = round_bytes / peers;
    let chunk_blocks = (link_bytes / BLOCK_BYTES).min(u64::from(CHUNK_BLOCKS_MAX)) as u32;
    if chunk_blocks == 0 {
        return plain();
    }
    let chunk_bytes = u64::from(chunk_blocks) * BLOCK_BYTES;
    // What a round has room for in shared memory.
    let run_bytes = needs.request_bytes.min(exchange_bytes / 2) / chunk_bytes * chunk_bytes;
    let sharing = matching.common.into_iter().map(|common| {
        let may_decline = peer_reads == PeerReads::Auto;
        // A rank may want an element by several wants that overlap.
        let message_bytes_max = there.saturating_mul(4).saturating_add(1 << 20);
        Terms { common, chunk_blocks, run_bytes, link_bytes, message_bytes_max, may_decline }
    });
    Ok(sharing.map(|terms| Opened { shared_on_host, sharing: Some(terms) }).collect())
}

/// Connections with all peers.
pub(crate) struct Connected {
    pub(crate) peers: Peers,
    pub(crate) neighbours: Neighbours,
    /// `true` if every rank maps the memory of all its peers, so that messages carry no data.
    pub(crate) is_in_memory: bool,
}

/// A rank's message while it connects.
#[derive(Serialize, Deserialize)]
struct Joined {
    missing: usize,
    /// The ranks whose shared memory it maps, if no connection is missing.
    views: Vec<u32>,
    sees_all: bool,
}

/// A rank's message before it connects.
#[derive(Serialize, Deserialize)]
struct Meeting {
    address: String,
    peers: Vec<u32>,
    /// `true` if most of the rank's wants lie in its machine's page cache.
    is_cached: bool,
}

/// Connects with this rank's peers; every rank calls it. Returns `None` on all ranks if all have most of their wants in
/// their machines' memory: then each reads for itself, which is faster, and nothing is read from storage.
pub(crate) fn connect(
    operation: &Operation,
    known: Result<(Vec<u32>, bool)>,
    needs: ReadNeeds,
    message_bytes_max: u64,
) -> std::result::Result<Option<Connected>, Trouble> {
    let round_slots = needs.in_flight * slots_in_request(needs);
    let memory = SharedMemory::new(operation.engine.staging_bytes(), 4 * round_slots as u64);
    let offered = memory.as_ref().map(|memory| memory.descriptor());
    let joining = Joining::listen(&*operation.engine.coord, &operation.name(), offered).map_err(of_ranks);
    let opening = known.and_then(|(peers, is_cached)| {
        let address = joining.as_ref().map(|joining| joining.address().to_owned());
        Ok(Meeting { address: address.map_err(Error::clone)?, peers, is_cached })
    });
    let peers =
        operation.agree("peers", opening, |ranks: Vec<Meeting>| Ok(meet(&ranks))).map_err(Trouble::Everywhere)?;
    let Some(peers) = peers else { return Ok(None) };
    let mut joining = joining?;
    joining.begin(&peers);
    let mut views: BTreeMap<u32, View> = BTreeMap::new();
    let began = Instant::now();
    loop {
        // A wait for a peer does not detect that it died; an agreement does at once.
        let missing = joining.go_on(JOINING).map_err(of_ranks).and_then(|missing| match missing[..] {
            [peer, ..] if began.elapsed() > operation.deadline() => Err(Error::new(
                Kind::Unavailable,
                format!("no connection to rank {peer} for the shared load within {:?}", began.elapsed()),
            )),
            _ => Ok(missing.len()),
        });
        let joined = missing.map(|missing| {
            if missing == 0 {
                let offered = joining.take_offered().into_iter();
                views.extend(offered.filter_map(|(rank, descriptor)| Some((rank, View::of(&descriptor)?))));
            }
            Joined { missing, views: views.keys().copied().collect(), sees_all: views.len() == peers.len() }
        });
        let (missing, is_in_memory, viewers) =
            operation.agree("joined", joined, |ranks| Ok(joined_by_rank(&ranks))).map_err(Trouble::Everywhere)?;
        if missing == 0 {
            let neighbours = Neighbours { memory, viewers: viewers.into_iter().collect(), views };
            let peers = joining.joined(operation.deadline(), message_bytes_max);
            return Ok(Some(Connected { peers, neighbours, is_in_memory }));
        }
    }
}

/// Returns for each rank its peers' addresses, unless all ranks have their wants in memory.
fn meet(ranks: &[Meeting]) -> Vec<Option<Vec<(u32, String)>>> {
    if ranks.iter().all(|rank| rank.is_cached) {
        return ranks.iter().map(|_| None).collect();
    }
    let address = |peer: &u32| ranks.get(*peer as usize).map(|rank| (*peer, rank.address.clone()));
    ranks.iter().map(|rank| Some(rank.peers.iter().filter_map(address).collect())).collect()
}

/// Returns for each rank: missing connections, whether all ranks map all memory that they read, and which ranks map its
/// shared memory.
fn joined_by_rank(ranks: &[Joined]) -> Vec<(usize, bool, Vec<u32>)> {
    let missing = ranks.iter().map(|rank| rank.missing).sum::<usize>();
    let is_in_memory = ranks.iter().all(|rank| rank.sees_all);
    let mut answers = vec![(missing, is_in_memory, Vec::new()); ranks.len()];
    for (viewer, rank) in (0u32..).zip(ranks) {
        for &seen in &rank.views {
            if let Some((.., viewers)) = answers.get_mut(seen as usize) {
                viewers.push(viewer);
            }
        }
    }
    answers
}
