//! Spreads the tensors of a job over its ranks, given as whole tensors, and draws such spreads at random.

use shardfast_format::Region;
use shardfast_plan::RankSet;
pub(crate) use shardfast_store::testing::dice::Dice;

/// Placement of a tensor along one dimension of a device mesh; dimensions are taken modulo the tensor's.
#[derive(Debug, Clone, Copy)]
enum Placement {
    Replicate,
    Shard(usize),
    /// Sharding of each of this many chunks of the rest of the dimension by itself.
    Strided(usize, u64),
}

#[derive(Debug, Clone)]
enum Spread {
    /// One placement per mesh dimension, applied from the left.
    Mesh(Vec<Placement>),
    /// Flat runs, one per rank: the seed of their borders.
    Flat(u64),
}

/// A mesh whose ranks are in row-major order, and spreads that its tensors take in turn.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    mesh: Vec<u64>,
    spreads: Vec<Spread>,
    /// The ranks that know who holds what they hold, as a bit mask.
    knowing: u64,
}

impl Layout {
    /// Every tensor sharded by its first dimension.
    pub(crate) fn rows(world: u32) -> Layout {
        Layout::even(world, Placement::Shard(0))
    }

    /// Every tensor whole on every rank.
    pub(crate) fn replicas(world: u32) -> Layout {
        Layout::even(world, Placement::Replicate)
    }

    fn even(world: u32, placement: Placement) -> Layout {
        let mesh = vec![u64::from(world)];
        Layout { mesh, spreads: vec![Spread::Mesh(vec![placement])], knowing: u64::MAX }
    }

    /// Makes the same layout with unknown holders.
    pub(crate) fn ignorant(self) -> Layout {
        Layout { knowing: 0, ..self }
    }

    /// Every tensor sharded by its last dimension.
    pub(crate) fn columns(world: u32) -> Layout {
        Layout::even(world, Placement::Shard(1))
    }

    /// Replicas of such ranks.
    pub(crate) fn columns_of_replicas(replicas: u32, world: u32) -> Layout {
        let spread = Spread::Mesh(vec![Placement::Replicate, Placement::Shard(1)]);
        Layout { mesh: vec![u64::from(replicas), u64::from(world)], spreads: vec![spread], knowing: u64::MAX }
    }

    /// One to three mesh dimensions, up to 16 ranks; placements of every kind, flat runs one time in five.
    pub(crate) fn random(dice: &mut Dice) -> Layout {
        let mut mesh = Vec::new();
        let mut left = 16;
        for _ in 0..=dice.below(3) {
            let size = 1 + dice.below(left.min(6));
            mesh.push(size);
            left /= size;
        }
        let placement = |dice: &mut Dice| match dice.below(6) {
            0 | 1 => Placement::Replicate,
            2 => Placement::Strided(dice.below(4) as usize, 2 + dice.below(3)),
            _ => Placement::Shard(dice.below(4) as usize),
        };
        let spreads = (0..4)
            .map(|_| match dice.below(5) {
                0 => Spread::Flat(dice.next()),
                _ => Spread::Mesh(mesh.iter().map(|_| placement(dice)).collect()),
            })
            .collect();
        let knowing = *dice.pick(&[0, u64::MAX, dice.clone().next()]);
        Layout { mesh, spreads, knowing }
    }

    pub(crate) fn world(&self) -> u32 {
        self.mesh.iter().product::<u64>() as u32
    }

    /// The ranks that hold exactly what `rank` holds of the job's `index`-th tensor; `None` when `rank` does not know.
    pub(crate) fn holders(&self, index: usize, shape: &[u64], rank: u32) -> Option<RankSet> {
        let mine = self.parts(index, shape, rank).0;
        let holders = (0..self.world()).filter(|&other| self.parts(index, shape, other).0 == mine);
        (self.knowing >> rank & 1 == 1).then(|| RankSet::new(holders))
    }

    /// The parts that `rank` holds of the job's `index`-th tensor, none of them empty; and where they are cut out of
    /// one run of the flattened tensor, the run's first element.
    pub(crate) fn parts(&self, index: usize, shape: &[u64], rank: u32) -> (Vec<Region>, Option<u64>) {
        if shape.contains(&0) {
            return (Vec::new(), None);
        }
        match &self.spreads[index % self.spreads.len()] {
            Spread::Mesh(placements) => (self.mesh_parts(placements, shape, u64::from(rank)), None),
            Spread::Flat(seed) => {
                let numel = shape.iter().product::<u64>();
                let mut dice = Dice(*seed);
                let mut borders: Vec<u64> = (1..self.world()).map(|_| dice.below(numel + 1)).collect();
                borders.sort_unstable();
                borders.insert(0, 0);
                borders.push(numel);
                let (start, stop) = (borders[rank as usize], borders[rank as usize + 1]);
                (Region::flat_run(shape, start, stop).collect(), Some(start))
            }
        }
    }

    fn mesh_parts(&self, placements: &[Placement], shape: &[u64], rank: u64) -> Vec<Region> {
        // Per dimension of the tensor: the runs of indices that this rank holds.
        let mut runs: Vec<Vec<(u64, u64)>> = shape.iter().map(|&n| vec![(0, n)]).collect();
        let mut below = self.mesh.iter().product::<u64>();
        for (&size, &placement) in self.mesh.iter().zip(placements) {
            below /= size;
            let coordinate = rank / below % size;
            let (dim, splits) = match placement {
                Placement::Replicate => continue,
                Placement::Shard(dim) => (dim, 1),
                Placement::Strided(dim, splits) => (dim, splits),
            };
            let Some(dim) = dim.checked_rem(shape.len()) else { continue };
            let length: u64 = runs[dim].iter().map(|run| run.1).sum();
            let mut held = Vec::new();
            for split in 0..splits {
                let (start, stop) = chunk(0, length, split, splits);
                let (start, stop) = chunk(start, stop, coordinate, size);
                slice(&runs[dim], start, stop, &mut held);
            }
            runs[dim] = held;
        }
        let mut parts = vec![Region::new(&[], &[])];
        for runs in &runs {
            let extended = |part: &Region, &(offset, length): &(u64, u64)| {
                let mut part = part.clone();
                part.offsets.push(offset);
                part.lengths.push(length);
                part
            };
            parts = parts.iter().flat_map(|part| runs.iter().map(|run| extended(part, run))).collect();
        }
        parts
    }
}

/// The `i`-th of `n` chunks of `start..stop`: as long as each other, but for the last ones, which are short or empty.
fn chunk(start: u64, stop: u64, i: u64, n: u64) -> (u64, u64) {
    let length = (stop - start).div_ceil(n);
    ((start + i * length).min(stop), (start + (i + 1) * length).min(stop))
}

/// Adds what lies at the positions `start..stop` of the runs taken one after the other.
fn slice(runs: &[(u64, u64)], start: u64, stop: u64, out: &mut Vec<(u64, u64)>) {
    let mut position = 0;
    for &(offset, length) in runs {
        let (from, to) = (start.max(position), stop.min(position + length));
        if from < to {
            out.push((offset + from - position, to - from));
        }
        position += length;
    }
}
