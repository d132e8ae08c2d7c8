//! Plans a save around writes that have begun.

use std::collections::BTreeMap;

use shardfast_format::{Catalog, LeafBody, LeafName, Region};

use crate::error::{Error, Problems};
use crate::ranks::RankSet;
use crate::save::{is_unshared, save_unshared};
use crate::write::{Rows, Write, row_dim};

/// Plans a save of the catalogs of all ranks around writes that some of them have begun. `drafted` has, per rank, its
/// fixed writes, or `None` for a rank that writes nothing yet and takes the rest. Equal catalogs and drafts give equal
/// plans on every rank.
///
/// # Errors
/// As [`save`](crate::save()); and [`Error::Invalid`] naming every region that two ranks have begun, and every region
/// that no rank has begun and no rank is free to write.
pub fn amend(catalogs: &[Catalog], drafted: &[Option<Vec<Write>>]) -> Result<Vec<Vec<Write>>, Error> {
    amend_unshared(catalogs, &[], drafted)
}

/// Plans like [`amend`], with some leaves [not shared](save_unshared): the rest of such a leaf goes to the lowest rank
/// that is free to write it.
///
/// # Errors
/// As [`amend`].
pub fn amend_unshared(
    catalogs: &[Catalog],
    unshared: &[Vec<u32>],
    drafted: &[Option<Vec<Write>>],
) -> Result<Vec<Vec<Write>>, Error> {
    save_unshared(catalogs, unshared)?;
    let mut problems = Vec::new();
    let mut loads = vec![0u64; catalogs.len()];
    let mut writes: Vec<Vec<Write>> = vec![Vec::new(); catalogs.len()];
    let mut regions: BTreeMap<(&LeafName, &Region), Holders> = BTreeMap::new();
    for (rank, catalog) in catalogs.iter().enumerate() {
        let drafted = drafted.get(rank).and_then(Option::as_ref);
        for (index, leaf) in (0u32..).zip(&catalog.leaves) {
            let LeafBody::Tensor { dtype, parts, .. } = &leaf.body else { continue };
            for (part, region) in (0u32..).zip(parts) {
                let holders = regions.entry((&leaf.name, region)).or_insert_with(|| Holders {
                    bytes: region.numel().saturating_mul(dtype.size_bytes()),
                    ..Holders::default()
                });
                holders.is_unshared |= is_unshared(unshared, rank as u32, index);
                match drafted {
                    None => holders.free.push((rank, Write::whole(index, part))),
                    Some(drafted) => {
                        let first = drafted.partition_point(|write| (write.leaf, write.part) < (index, part));
                        let mine =
                            drafted[first..].iter().take_while(|write| (write.leaf, write.part) == (index, part));
                        holders.begun.extend(mine.map(|&write| (rank, write)));
                    }
                }
            }
        }
    }
    for (rank, drafted) in drafted.iter().enumerate() {
        writes[rank] = drafted.clone().unwrap_or_default();
    }
    let mut largest_first: Vec<_> = regions.into_iter().collect();
    largest_first.sort_by_key(|(_, holders)| std::cmp::Reverse(holders.bytes));
    for ((name, region), mut holders) in largest_first {
        match holders.gaps(region) {
            Err((a, b)) => {
                let ranks = [a.min(b) as u32, a.max(b) as u32];
                problems.push(format!("{name}: {} write the same of {region}", RankSet::new(ranks)));
            }
            Ok(gaps) if gaps.is_empty() => {}
            Ok(gaps) => match holders.free.iter().min_by_key(|(rank, _)| holders.preference(loads[*rank])) {
                Some(&(rank, write)) => {
                    loads[rank] = loads[rank].saturating_add(holders.bytes);
                    writes[rank].extend(gaps.into_iter().map(|rows| Write { rows, ..write }));
                }
                None => problems.push(format!(
                    "{name}: no rank writes {region}: other ranks changed what they hold, and the ranks that hold it \
                     had begun to write without it; save again, which makes a new plan"
                )),
            },
        }
    }
    if !problems.is_empty() {
        return Err(Error::Invalid(Problems(problems)));
    }
    writes.iter_mut().for_each(|writes| writes.sort_unstable());
    Ok(writes)
}

/// Holders of one region.
#[derive(Default)]
struct Holders {
    bytes: u64,
    is_unshared: bool,
    begun: Vec<(usize, Write)>,
    free: Vec<(usize, Write)>,
}

impl Holders {
    /// Returns the sort key of a writer: smallest load first, among equals the lowest rank.
    fn preference(&self, load: u64) -> u64 {
        if self.is_unshared { 0 } else { load }
    }

    /// Returns the rows that no rank has begun, `None` for the whole region; or two ranks that have begun the same
    /// rows.
    fn gaps(&mut self, region: &Region) -> Result<Vec<Option<Rows>>, (usize, usize)> {
        if self.begun.is_empty() {
            return Ok(vec![None]);
        }
        let height = row_dim(region).map_or(1, |dim| region.lengths[dim]);
        let mut runs: Vec<(u64, u64, usize)> = self
            .begun
            .iter()
            .map(|&(rank, write)| {
                let rows = write.rows.unwrap_or(Rows { first: 0, count: height });
                (rows.first, rows.first.saturating_add(rows.count), rank)
            })
            .collect();
        runs.sort_unstable();
        let (mut gaps, mut end, mut before) = (Vec::new(), 0, 0);
        for (first, stop, rank) in runs {
            if first < end {
                return Err((before, rank));
            }
            if first > end {
                gaps.push(Some(Rows { first: end, count: first - end }));
            }
            (end, before) = (stop, rank);
        }
        if end < height {
            gaps.push(Some(Rows { first: end, count: height - end }));
        }
        Ok(gaps)
    }
}
