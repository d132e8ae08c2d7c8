//! Simulates jobs: how tensors are spread over ranks, given as whole tensors, and how such jobs are drawn at random.

use proptest::collection::vec;
use proptest::prelude::*;
use shardfast_format::Region;

/// Placement of a tensor along one dimension of a device mesh. Dimensions are taken modulo the tensor's.
#[derive(Debug, Clone)]
pub(crate) enum Placement {
    Replicate,
    Shard(usize),
    /// Sharding of each of `split` chunks of the rest of the dimension by itself.
    StridedShard(usize, u64),
}

/// Spread of one tensor over all ranks. Fractions are in 65,536ths.
#[derive(Debug, Clone)]
pub(crate) enum Spread {
    /// Spread by one placement per mesh dimension, from the left.
    Mesh(Vec<Placement>),
    /// Spread as flat runs of any length, one per rank, by their borders.
    Flat(Vec<u16>),
    /// Spread by planes (dimension, position in the box that is cut, which box), each box on the ranks of a bit mask.
    Boxes { cuts: Vec<(usize, u16, usize)>, holders: Vec<u16> },
}

/// A job: its mesh, whose ranks are in row-major order, and the spread of each tensor.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) mesh: Vec<u64>,
    pub(crate) spreads: Vec<Spread>,
}

impl Job {
    pub(crate) fn world(&self) -> u64 {
        self.mesh.iter().product()
    }

    /// Returns the parts of tensor `leaf` that `rank` holds.
    pub(crate) fn parts(&self, leaf: usize, shape: &[u64], rank: u64) -> Vec<Region> {
        if shape.contains(&0) {
            return Vec::new();
        }
        match &self.spreads[leaf] {
            Spread::Mesh(placements) => self.mesh_parts(placements, shape, rank),
            Spread::Flat(borders) => {
                let numel = shape.iter().product::<u64>();
                let mut borders: Vec<u64> =
                    borders.iter().take(self.world() as usize - 1).map(|&b| part(b, numel)).collect();
                borders.sort_unstable();
                let border = |i: u64| *borders.get(i as usize).unwrap_or(&numel);
                Region::flat_run(shape, if rank == 0 { 0 } else { border(rank - 1) }, border(rank)).collect()
            }
            Spread::Boxes { cuts, holders } => {
                let boxes = boxes(shape, cuts);
                let all = (1u32 << self.world()) - 1;
                let holders = holders.iter().cycle().map(|&mask| match u32::from(mask) & all {
                    0 => 1,
                    mask => mask,
                });
                boxes.into_iter().zip(holders).filter(|(_, mask)| mask >> rank & 1 == 1).map(|(part, _)| part).collect()
            }
        }
    }

    fn mesh_parts(&self, placements: &[Placement], shape: &[u64], rank: u64) -> Vec<Region> {
        let mut runs: Vec<Vec<(u64, u64)>> = shape.iter().map(|&n| vec![(0, n)]).collect();
        let mut stride = self.world();
        for (&size, placement) in self.mesh.iter().zip(placements) {
            stride /= size;
            let coordinate = rank / stride % size;
            let (d, split) = match placement {
                Placement::Shard(d) if !shape.is_empty() => (d % shape.len(), 1),
                Placement::StridedShard(d, split) if !shape.is_empty() => (d % shape.len(), *split),
                _ => continue,
            };
            let length = runs[d].iter().map(|run| run.1).sum();
            let cut = (0..split).flat_map(|i| {
                let (start, stop) = chunk(0, length, i, split);
                let (start, stop) = chunk(start, stop, coordinate, size);
                slice(&runs[d], start, stop)
            });
            runs[d] = cut.collect();
        }
        let scalar = Region::new(&[], &[]);
        runs.iter().fold(vec![scalar], |boxes, runs| {
            let extended = |part: &Region, &(offset, length): &(u64, u64)| {
                let mut part = part.clone();
                part.offsets.push(offset);
                part.lengths.push(length);
                part
            };
            boxes.iter().flat_map(|part| runs.iter().map(move |run| extended(part, run))).collect()
        })
    }
}

/// Returns chunk `i` of `n` of `[start, stop)`: all of equal length but for the last ones, which may be short or empty.
fn chunk(start: u64, stop: u64, i: u64, n: u64) -> (u64, u64) {
    let length = (stop - start).div_ceil(n);
    ((start + i * length).min(stop), (start + (i + 1) * length).min(stop))
}

/// Returns the runs at positions `[start, stop)` of the concatenation of runs.
fn slice(runs: &[(u64, u64)], start: u64, stop: u64) -> Vec<(u64, u64)> {
    let mut position = 0;
    let mut out = Vec::new();
    for &(offset, length) in runs {
        let (from, to) = (start.max(position), stop.min(position + length));
        if from < to {
            out.push((offset + from - position, to - from));
        }
        position += length;
    }
    out
}

/// Returns the boxes that planes cut a tensor into.
pub(crate) fn boxes(shape: &[u64], cuts: &[(usize, u16, usize)]) -> Vec<Region> {
    let mut boxes = vec![Region::whole(shape)];
    for &(d, at, which) in cuts.iter().filter(|_| !shape.is_empty()) {
        let (d, which) = (d % shape.len(), which % boxes.len());
        let at = part(at, boxes[which].lengths[d]);
        if at > 0 {
            let mut rest = boxes[which].clone();
            rest.offsets[d] += at;
            rest.lengths[d] -= at;
            boxes[which].lengths[d] = at;
            boxes.push(rest);
        }
    }
    boxes
}

fn part(fraction: u16, of: u64) -> u64 {
    (of * u64::from(fraction)) >> 16
}

/// Draws shapes of few elements: 0 to 4 dimensions, sometimes of zero size.
pub(crate) fn shape() -> impl Strategy<Value = Vec<u64>> {
    let length = prop_oneof![1 => Just(0u64), 40 => 1..8u64, 10 => 8..40u64];
    vec(length, 0..5).prop_map(|mut shape| {
        let mut numel = 1;
        for length in &mut shape {
            *length = (*length).min(240 / numel);
            numel *= (*length).max(1);
        }
        shape
    })
}

/// Draws jobs of up to 16 ranks with as many tensors as asked for.
pub(crate) fn job(leaves: usize) -> impl Strategy<Value = Job> {
    let mesh = vec(1..9u64, 1..4).prop_map(|mut mesh| {
        let mut world = 1;
        for size in &mut mesh {
            *size = (*size).min(16 / world);
            world *= *size;
        }
        mesh
    });
    (mesh, vec(spread(), leaves)).prop_map(|(mesh, spreads)| Job { mesh, spreads })
}

fn spread() -> impl Strategy<Value = Spread> {
    let placement = prop_oneof![
        1 => Just(Placement::Replicate),
        3 => (0..4usize).prop_map(Placement::Shard),
        1 => (0..4usize, 1..4u64).prop_map(|(d, split)| Placement::StridedShard(d, split)),
    ];
    prop_oneof![
        4 => vec(placement, 3).prop_map(Spread::Mesh),
        1 => vec(any::<u16>(), 15).prop_map(Spread::Flat),
        1 => (vec((0..4usize, any::<u16>(), 0..16usize), 0..12), vec(any::<u16>(), 1..6))
            .prop_map(|(cuts, holders)| Spread::Boxes { cuts, holders }),
    ]
}
