//! Assembles the tensors of a checkpoint from the writes of each rank.

use std::collections::HashMap;

use shardfast_format::{DType, Extent, LeafName, ManifestBuilder, Region};

use crate::coverage::{Flaw, tile};
use crate::error::{Error, Problems};
use crate::ranks::RankSet;

/// Collects each rank's writes, and proves that together they hold each tensor exactly once. Time and memory are linear
/// in the number of regions; names are borrowed.
#[derive(Debug, Default)]
pub struct Assembly<'a> {
    places: HashMap<&'a LeafName, usize>,
    tensors: Vec<Tensor<'a>>,
    problems: Vec<String>,
}

#[derive(Debug)]
struct Tensor<'a> {
    name: &'a LeafName,
    dtype: DType,
    shape: &'a [u64],
    layout: &'a str,
    regions: Vec<(Region, Extent)>,
    /// Ranks that reported the tensor, with the number of regions of each.
    ranks: Vec<(u32, usize)>,
}

impl<'a> Assembly<'a> {
    /// Adds the regions of the tensor `name` that `rank` wrote, each with the index of its file in the manifest and its
    /// offset there. A rank that wrote none adds none, so that a missing region is found. `layout` is used if no
    /// earlier rank has reported the tensor.
    pub fn tensor(
        &mut self,
        rank: u32,
        name: &'a LeafName,
        (dtype, shape): (DType, &'a [u64]),
        layout: &'a str,
        regions: impl IntoIterator<Item = (Region, u32, u64)>,
    ) {
        let place = *self.places.entry(name).or_insert_with(|| {
            self.tensors.push(Tensor { name, dtype, shape, layout, regions: Vec::new(), ranks: Vec::new() });
            self.tensors.len() - 1
        });
        let tensor = &mut self.tensors[place];
        if (dtype, shape) != (tensor.dtype, tensor.shape) {
            let first = tensor.ranks.first().map_or(rank, |&(first, _)| first);
            self.problems.push(format!(
                "{name}: expected the same on all ranks, found a tensor {} {:?} on rank {first}, \
                 a tensor {dtype} {shape:?} on rank {rank}",
                tensor.dtype, tensor.shape
            ));
            return;
        }
        let before = tensor.regions.len();
        tensor.regions.extend(regions.into_iter().map(|(region, file, offset)| {
            // A region outside of the shape may have any size here; `finish` reports it.
            let bytes = region.checked_numel().and_then(|numel| numel.checked_mul(dtype.size_bytes()));
            (region, Extent { file, offset, bytes: bytes.unwrap_or(u64::MAX) })
        }));
        tensor.ranks.push((rank, tensor.regions.len() - before));
    }

    /// Adds every tensor to the manifest.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming every tensor on whose dtype or shape ranks disagree, and every one with missing or
    /// doubly written elements, with the ranks.
    pub fn finish(self, manifest: &mut ManifestBuilder) -> Result<(), Error> {
        let mut problems = self.problems;
        let mut tensors = self.tensors;
        tensors.sort_unstable_by_key(|tensor| tensor.name);
        for tensor in &tensors {
            if let Err(flaw) = tile(tensor.shape, tensor.regions.iter().map(|(region, _)| region)) {
                problems.push(tensor.problem(*flaw));
            }
        }
        if !problems.is_empty() {
            return Err(Error::Invalid(Problems(problems)));
        }
        for Tensor { name, dtype, shape, layout, regions, .. } in tensors {
            manifest.tensor(name, dtype, shape, layout, &regions);
        }
        Ok(())
    }
}

impl Tensor<'_> {
    fn problem(&self, flaw: Flaw) -> String {
        let Tensor { name, shape, .. } = self;
        let on = |wanted: &Region| format!("{wanted} by {}", self.writers(wanted));
        match flaw {
            Flaw::Outside(region) => format!("{name}: {} was written, outside the shape {shape:?}", on(&region)),
            Flaw::Overlap(a, b) if a == b => format!("{name}: {} was written twice", on(&a)),
            Flaw::Overlap(a, b) => format!("{name}: {} was written, which overlaps {}", on(&a), on(&b)),
            Flaw::Missing(region) => format!("{name}: no rank wrote {region} of the shape {shape:?}"),
            flaw => format!("{name}: {flaw}"),
        }
    }

    /// Returns the ranks that wrote exactly this region.
    fn writers(&self, wanted: &Region) -> RankSet {
        let mut regions = self.regions.iter();
        let mut wrote = |count: usize| regions.by_ref().take(count).filter(|(region, _)| region == wanted).count() > 0;
        RankSet::new(self.ranks.iter().filter(|&&(_, count)| wrote(count)).map(|&(rank, _)| rank).collect::<Vec<_>>())
    }
}
