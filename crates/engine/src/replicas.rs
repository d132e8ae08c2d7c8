//! Whether what ranks hold in common is the same: asked for by `prove`.
//!
//! Ranks that hold the same region of a tensor are taken for replicas, and one of them writes it. A state that is not
//! what its names say (experts that every rank calls alike) would lose all copies but one, without a word. So each rank
//! checksums every part that it holds, not only what it writes, before its state may change, and rank 0 compares.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, Crc64, LeafBody, LeafName, Region};

use crate::agree::Operation;
use crate::error::{Error, Result};
use crate::pending::Progress;
use crate::provider::{Fences, Provider};
use crate::save::State;
use crate::staging::{SLOT_BYTES, Staging};
use crate::writer::Failure;

/// Differences that one message spells.
const SPELLED_MAX: usize = 16;

/// CRC-64/NVME of every part that this rank holds, in the catalog's order.
pub(crate) struct Checksums(Vec<u64>);

#[derive(Serialize, Deserialize)]
struct Held {
    name: LeafName,
    parts: Vec<(Region, u64)>,
}

/// Reads all parts of the state, and checksums each.
///
/// # Errors
/// The first failure of a provider, naming its leaf; what made the save fail elsewhere meanwhile.
pub(crate) fn checksums(state: &State, staging: &Arc<Staging>, progress: &Progress) -> Result<Checksums> {
    let parts: Vec<(&LeafName, &Arc<dyn Provider>)> = tensors(&state.catalog)
        .flat_map(|(index, name, _)| state.providers[index].iter().map(move |provider| (name, provider)))
        .collect();
    let crcs: Vec<AtomicU64> = parts.iter().map(|_| AtomicU64::new(0)).collect();
    let (next, failure) = (AtomicUsize::new(0), Failure::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(parts.len()).clamp(1, 4);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((name, provider)) = parts.get(index) else { return };
                    match progress.cancelled().map_or_else(|| checksum(&***provider, staging), Err) {
                        Ok(crc) => crcs[index].store(crc, Ordering::Relaxed),
                        Err(error) => return failure.set(error.within(name)),
                    }
                    if failure.is_set() {
                        return;
                    }
                }
            });
        }
    });
    failure.into_result()?;
    Ok(Checksums(crcs.into_iter().map(AtomicU64::into_inner).collect()))
}

fn checksum(provider: &dyn Provider, staging: &Arc<Staging>) -> Result<u64> {
    let (mut crc, mut at) = (Crc64::new(), 0);
    let mut slot = staging.acquire()?;
    while at < provider.bytes() {
        let bytes = (provider.bytes() - at).min(SLOT_BYTES as u64) as usize;
        let mut fences = Fences::default();
        provider.fill(at, &mut slot[..bytes], &mut fences)?;
        fences.wait()?;
        crc.update(&slot[..bytes]);
        at += bytes as u64;
    }
    Ok(crc.finish())
}

/// Compares the replicas of all ranks.
///
/// # Errors
/// The same on every rank: `Invalid` naming the regions whose replicas differ, and who holds what; what kept any rank
/// from checksumming.
pub(crate) fn prove(operation: &Operation, catalog: &Catalog, checksums: Result<Checksums>) -> Result<()> {
    let held = checksums.map(|Checksums(crcs)| {
        let mut crcs = crcs.into_iter();
        let held = tensors(catalog).map(|(_, name, parts)| Held {
            name: name.clone(),
            parts: parts.iter().cloned().zip(crcs.by_ref()).collect(),
        });
        held.collect::<Vec<_>>()
    });
    operation.agree("replicas", held, |ranks: Vec<Vec<Held>>| {
        compare(&ranks)?;
        Ok(vec![(); ranks.len()])
    })
}

fn compare(ranks: &[Vec<Held>]) -> Result<()> {
    let mut copies: BTreeMap<(&LeafName, &Region), BTreeMap<u64, Vec<u32>>> = BTreeMap::new();
    for (rank, held) in (0u32..).zip(ranks) {
        for Held { name, parts } in held {
            for (region, crc) in parts {
                copies.entry((name, region)).or_default().entry(*crc).or_default().push(rank);
            }
        }
    }
    let different: Vec<_> = copies.into_iter().filter(|(_, contents)| contents.len() > 1).collect();
    if different.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<String> = different
        .iter()
        .take(SPELLED_MAX)
        .map(|((name, region), contents)| {
            let mut contents: Vec<_> = contents.iter().collect();
            contents.sort_by_key(|(_, ranks)| ranks[0]);
            let said: Vec<String> = contents
                .into_iter()
                .map(|(crc, ranks)| format!("{crc:016x} on {}", shardfast_plan::RankSet::new(ranks.iter().copied())))
                .collect();
            format!("{name}: its replicas of {region} differ, by their CRC-64: {}", said.join(", "))
        })
        .collect();
    if different.len() > SPELLED_MAX {
        lines.push(format!("and {} more", different.len() - SPELLED_MAX));
    }
    lines.push(
        "ranks that hold different data must not hold it under one name and region: name it apart, or say how it is \
         sharded"
            .to_owned(),
    );
    Err(Error::invalid(lines.join("\n")))
}

/// The tensors of a catalog: index, name, parts.
fn tensors(catalog: &Catalog) -> impl Iterator<Item = (usize, &LeafName, &Vec<Region>)> {
    catalog.leaves.iter().enumerate().filter_map(|(index, leaf)| match &leaf.body {
        LeafBody::Tensor { parts, .. } => Some((index, &leaf.name, parts)),
        _ => None,
    })
}
