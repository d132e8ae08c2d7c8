//! Plans which rank writes which part.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use shardfast_format::region::checked_numel;
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafName, Owner, Region};

use crate::balance::{Item, Share, Spared};
use crate::coverage::{Flaw, tiles};
use crate::error::{Error, Problems};
use crate::ranks::RankSet;
use crate::units::divide_units;
use crate::write::Write;

/// Plans a save of the catalogs of all ranks: for each rank its writes of the parts that it holds, sorted. Exactly one
/// rank writes each element of each leaf. Several ranks write a part that was cut, some rows each.
///
/// Identical regions on several ranks are replicas and get one writer. Bytes are balanced by Worst-Fit decreasing on
/// top of what each rank must write alone. If that leaves the heaviest rank more than 2 % and 64 KiB above what
/// replicas make possible, regions are cut by rows, those of keys that consist of whole tensors last. A leaf may be
/// absent on some ranks. Equal catalogs give equal plans on every rank.
///
/// So the heaviest rank writes at most 2 % or 64 KiB more than replicas make possible, with two exceptions. Rows are
/// not cut: a rank can write up to one row more for each set of holders that it belongs to. One rank writes all parts
/// of up to 16 KiB below one name, also if they are more than 64 KiB in all.
///
/// # Errors
/// [`Error::Invalid`] with every problem of every leaf: a name that occurs twice on a rank; ranks that disagree on a
/// leaf's kind (dtype, shape, object, alias); parts that are empty, lie outside the shape, overlap each other or leave
/// elements out; an alias whose target is no tensor. A zero-size tensor needs no part, and its only possible part is
/// the whole.
pub fn save(catalogs: &[Catalog]) -> Result<Vec<Vec<Write>>, Error> {
    save_unshared(catalogs, &[])
}

/// Plans like [`save`], with some leaves not shared: the lowest rank that holds a region of such a leaf writes all of
/// it, since copies that may differ must not be mixed. `unshared` has, per rank, the ascending indices of these leaves
/// in its catalog; a leaf that one rank names is unshared on all.
///
/// # Errors
/// As [`save`].
pub fn save_unshared(catalogs: &[Catalog], unshared: &[Vec<u32>]) -> Result<Vec<Vec<Write>>, Error> {
    let mut problems = Vec::new();
    let by_name = merge(catalogs, &mut problems);
    let mut share = Replicated::default();
    let mut tensors = Vec::with_capacity(by_name.len());
    for (name, holders) in &by_name {
        match agreed(name, holders) {
            Ok(Kind::Tensor { dtype, shape }) => {
                let is_shared = !holders.iter().any(|holder| is_unshared(unshared, holder.rank, holder.index));
                let parts = share.tensor(name, (dtype, shape), holders, is_shared, &mut problems);
                let body = LeafBody::Tensor { dtype, shape: Dims::from_slice(shape), parts };
                tensors.push(Leaf { name: (*name).clone(), body, layout: String::new() });
            }
            Ok(Kind::Object { .. }) => {}
            Ok(Kind::Alias { of }) => problems.extend(alias_problem(name, of, &by_name)),
            Err(problem) => problems.push(problem),
        }
    }
    if !problems.is_empty() {
        return Err(Error::Invalid(Problems(problems)));
    }

    let spared = Spared::new(&tensors);
    for (item, leaf) in share.items.iter_mut().zip(&share.leaves) {
        item.spared = spared.of(&leaf.key);
    }
    let mut writes = vec![Vec::new(); catalogs.len()];
    for Share { item, rank, rows } in divide_units(catalogs.len(), &share.classes, &share.items, &share.leaves) {
        let holders = &share.classes[share.items[item].class];
        let place = holders.partition_point(|&holder| holder < rank);
        writes[rank as usize].push(Write { rows, ..share.copies[share.first[item] + place] });
    }
    writes.iter_mut().for_each(|parts| parts.sort_unstable());
    Ok(writes)
}

/// Returns whether the leaf with index `leaf` in the rank's catalog is not shared.
pub(crate) fn is_unshared(unshared: &[Vec<u32>], rank: u32, leaf: u32) -> bool {
    unshared.get(rank as usize).is_some_and(|leaves| leaves.binary_search(&leaf).is_ok())
}

/// A leaf as one rank holds it. Indices are `u32`: more leaves or parts would not fit into memory.
struct Holder<'a> {
    rank: u32,
    index: u32,
    leaf: &'a Leaf,
}

/// Collects every name with its holders by ascending rank, sorted by name.
fn merge<'a>(catalogs: &'a [Catalog], problems: &mut Vec<String>) -> Vec<(&'a LeafName, Vec<Holder<'a>>)> {
    let mut by_name: HashMap<&LeafName, Vec<Holder>> = HashMap::new();
    for (rank, catalog) in (0u32..).zip(catalogs) {
        for (index, leaf) in (0u32..).zip(&catalog.leaves) {
            let holders = by_name.entry(&leaf.name).or_default();
            if holders.last().is_some_and(|last| last.rank == rank) {
                problems.push(format!("{}: rank {rank} holds two leaves of this name", leaf.name));
            } else {
                holders.push(Holder { rank, index, leaf });
            }
        }
    }
    let mut sorted: Vec<_> = by_name.into_iter().collect();
    sorted.sort_unstable_by_key(|(name, _)| *name);
    sorted
}

/// Properties that must be equal on all holders of a leaf.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Kind<'a> {
    Tensor { dtype: DType, shape: &'a [u64] },
    Object { owner: Owner },
    Alias { of: &'a LeafName },
}

impl<'a> Kind<'a> {
    fn of(body: &'a LeafBody) -> Kind<'a> {
        match body {
            LeafBody::Tensor { dtype, shape, .. } => Kind::Tensor { dtype: *dtype, shape },
            LeafBody::Object { owner } => Kind::Object { owner: *owner },
            LeafBody::Alias { of } => Kind::Alias { of },
        }
    }
}

impl fmt::Display for Kind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Tensor { dtype, shape } => write!(f, "a tensor {dtype} {shape:?}"),
            Kind::Object { owner: Owner::Job } => f.write_str("a value"),
            Kind::Object { owner: Owner::Rank } => f.write_str("a value per rank"),
            Kind::Object { owner: Owner::Piece { index, count } } => write!(f, "piece {index} of {count}"),
            Kind::Alias { of } => write!(f, "an alias of {of}"),
        }
    }
}

fn agreed<'a>(name: &LeafName, holders: &[Holder<'a>]) -> Result<Kind<'a>, String> {
    let mut opinions: BTreeMap<Kind<'a>, Vec<u32>> = BTreeMap::new();
    for holder in holders {
        opinions.entry(Kind::of(&holder.leaf.body)).or_default().push(holder.rank);
    }
    if opinions.len() == 1
        && let Some((kind, _)) = opinions.pop_first()
    {
        return Ok(kind);
    }
    let mut opinions: Vec<_> = opinions.into_iter().collect();
    opinions.sort_unstable_by_key(|(_, ranks)| ranks[0]);
    let said: Vec<String> =
        opinions.iter().map(|(kind, ranks)| format!("{kind} on {}", RankSet::new(ranks.iter().copied()))).collect();
    Err(format!("{name}: expected the same on all ranks, found {}", said.join(", ")))
}

fn alias_problem(name: &LeafName, of: &LeafName, by_name: &[(&LeafName, Vec<Holder>)]) -> Option<String> {
    let Ok(target) = by_name.binary_search_by_key(&of, |(name, _)| name) else {
        return Some(format!("{name}: it is an alias of {of}, which no rank holds"));
    };
    let kinds = || by_name[target].1.iter().map(|holder| Kind::of(&holder.leaf.body));
    if kinds().any(|kind| matches!(kind, Kind::Tensor { .. })) {
        return None;
    }
    let found = kinds().next()?;
    Some(format!("{name}: it is an alias of {of}, which must be a tensor and is {found}"))
}

/// All parts of all ranks, grouped by region.
#[derive(Default)]
struct Replicated<'a> {
    /// Distinct sets of holders.
    classes: Vec<Vec<u32>>,
    class_ids: HashMap<Vec<u32>, usize>,
    items: Vec<Item>,
    /// Name of the leaf, per item.
    leaves: Vec<&'a LeafName>,
    /// Index in `copies` of an item's first holder, per item.
    first: Vec<usize>,
    copies: Vec<Write>,
}

impl<'a> Replicated<'a> {
    fn class(&mut self, holders: Vec<u32>) -> usize {
        if let Some(&class) = self.class_ids.get(&holders) {
            return class;
        }
        let class = self.classes.len();
        self.classes.push(holders.clone());
        self.class_ids.insert(holders, class);
        class
    }

    /// Adds a tensor's parts, each to be written by any of its holders if it `is_shared`, else by the lowest of them.
    /// Returns its distinct regions, sorted.
    fn tensor(
        &mut self,
        name: &'a LeafName,
        (dtype, shape): (DType, &[u64]),
        holders: &[Holder],
        is_shared: bool,
        problems: &mut Vec<String>,
    ) -> Vec<Region> {
        let sound = problems.len();
        if checked_numel(shape).and_then(|numel| numel.checked_mul(dtype.size_bytes())).is_none() {
            problems.push(format!("{name}: a tensor {dtype} {shape:?} has 2^64 bytes or more"));
            return Vec::new();
        }

        let mut copies: Vec<(&Region, u32, Write)> = Vec::new();
        for &Holder { rank, index, leaf } in holders {
            let LeafBody::Tensor { parts, .. } = &leaf.body else { continue };
            for (part, region) in (0u32..).zip(parts) {
                if !region.fits(shape) {
                    problems.push(format!("{name}: {region} on rank {rank} lies outside the shape {shape:?}"));
                } else if region.is_empty() && !region.is_whole(shape) {
                    problems.push(format!("{name}: {region} on rank {rank} holds no element and must be left out"));
                } else {
                    copies.push((region, rank, Write::whole(index, part)));
                }
            }
        }
        copies.sort_unstable();

        let mut regions = Vec::new();
        for replicas in copies.chunk_by(|a, b| a.0 == b.0) {
            let region = replicas[0].0;
            for twice in replicas.windows(2).filter(|pair| pair[0].1 == pair[1].1) {
                problems.push(format!("{name}: rank {} holds {region} twice", twice[0].1));
            }
            let writers = if is_shared { replicas } else { &replicas[..1] };
            let class = self.class(writers.iter().map(|&(_, rank, _)| rank).collect());
            self.items.push(Item::new(region, dtype, 0, class));
            self.leaves.push(name);
            self.first.push(self.copies.len());
            self.copies.extend(replicas.iter().map(|&(_, _, part)| part));
            regions.push(region.clone());
        }
        if problems.len() == sound
            && let Err(flaw) = tiles(shape, &regions)
        {
            let on = |wanted: &Region| {
                let ranks = copies.iter().filter(|(region, ..)| *region == wanted).map(|&(_, rank, _)| rank);
                format!("{wanted} on {}", RankSet::new(ranks))
            };
            problems.push(match *flaw {
                Flaw::Overlap(a, b) => format!("{name}: {} overlaps {}", on(&a), on(&b)),
                Flaw::Missing(region) => format!("{name}: no rank holds {region} of the shape {shape:?}"),
                flaw => format!("{name}: {flaw}"),
            });
        }
        regions
    }
}
