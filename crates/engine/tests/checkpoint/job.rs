//! Simulated jobs: ranks that are threads, a state known as whole tensors, saved and loaded by the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use shardfast_engine::{
    Checkpoint, Destination, Engine, Error, PeerReads, Pending, Provider, Result, State, Traffic, ValueRef, Want, save,
    save_to,
};
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafKind, LeafName, Manifest, Owner, Region};
use shardfast_plan::Replicas;
use shardfast_store::Store;

use crate::block::{Block, Held};
use crate::layout::{Dice, Layout};

/// Deadline of operations that end sooner for another reason.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// State of the whole job, with which every load is compared.
pub(crate) struct Truth {
    pub(crate) leaves: BTreeMap<LeafName, Content>,
}

pub(crate) enum Content {
    Tensor(Whole),
    Alias(LeafName),
    /// Encoded values; rank `r` holds the one at `r` modulo their number.
    Object {
        per_rank: bool,
        values: Vec<Vec<u8>>,
    },
}

/// A tensor in one piece.
pub(crate) struct Whole {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

impl Whole {
    pub(crate) fn random(dice: &mut Dice, dtype: DType, shape: &[u64]) -> Whole {
        let bytes = shape.iter().product::<u64>() * dtype.size_bytes();
        Whole { dtype, shape: shape.to_vec(), bytes: dice.bytes(bytes as usize) }
    }

    /// The elements of a region in row-major order.
    fn gather(&self, region: &Region) -> Vec<u8> {
        if region.is_empty() {
            return Vec::new();
        }
        let item = self.dtype.size_bytes();
        // Rows, for the last dimension lies in one run; a scalar is one row of one.
        let (row, outer) = region.lengths.split_last().map_or((1, &[][..]), |(&row, outer)| (row, outer));
        let mut out = Vec::new();
        for mut number in 0..outer.iter().product::<u64>() {
            let (mut place, mut stride) = (0, 1);
            for d in (0..self.shape.len()).rev() {
                let index = if d == outer.len() { 0 } else { number % outer[d] };
                number /= if d == outer.len() { 1 } else { outer[d] };
                place += (region.offsets[d] + index) * stride;
                stride *= self.shape[d];
            }
            out.extend_from_slice(&self.bytes[(place * item) as usize..((place + row) * item) as usize]);
        }
        out
    }
}

impl Truth {
    /// A few tensors of any dtype and shape, values equal and per rank, now and then an alias.
    pub(crate) fn random(dice: &mut Dice) -> Truth {
        let mut leaves = BTreeMap::new();
        let mut tensors = Vec::new();
        for i in 0..1 + dice.below(6) {
            let (dtype, shape) = (*dice.pick(&DType::ALL), shape(dice));
            let whole = Whole::random(dice, dtype, &shape);
            let key = *dice.pick(&["model", "optimizer", "ünï code"]);
            let name = LeafName::new(key, format!("{}{i}", dice.pick(&["layers.", "a/b ", "état."])));
            tensors.push(name.clone());
            leaves.insert(name, Content::Tensor(whole));
        }
        for i in 0..dice.below(3) {
            let of = dice.pick(&tensors).clone();
            leaves.insert(LeafName::new("model", format!("tied.{i}")), Content::Alias(of));
        }
        for i in 0..dice.below(4) {
            let count = *dice.pick(&[1, 1, 2, 3, 16]);
            let values = (0..count)
                .map(|_| {
                    let bytes = if dice.once_in(8) { 70_000 } else { dice.below(300) as usize };
                    dice.bytes(bytes)
                })
                .collect();
            let key = *dice.pick(&["extra", "model"]);
            leaves.insert(LeafName::new(key, format!("value.{i}")), Content::Object { per_rank: count > 1, values });
        }
        Truth { leaves }
    }

    /// Two keys, a matrix of three rows of `columns`, a tied one, a value of all ranks and one per rank; the same for
    /// every seed but in contents.
    pub(crate) fn small(seed: u64, columns: u64) -> Truth {
        let mut dice = Dice(seed);
        let mut leaves = BTreeMap::new();
        for (key, name, dtype, shape) in [
            ("model", "bias", DType::F32, &[7][..]),
            ("model", "scale", DType::BF16, &[]),
            ("model", "weight", DType::F32, &[6, 9]),
            ("optimizer", "step", DType::I64, &[1]),
            ("optimizer", "wide", DType::C64, &[3, columns]),
        ] {
            leaves.insert(LeafName::new(key, name), Content::Tensor(Whole::random(&mut dice, dtype, shape)));
        }
        leaves.insert(LeafName::new("model", "tied"), Content::Alias(LeafName::new("model", "weight")));
        let shared = vec![dice.bytes(40)];
        leaves.insert(LeafName::new("optimizer", "args"), Content::Object { per_rank: false, values: shared });
        let own = (0..4).map(|_| dice.bytes(24)).collect();
        leaves.insert(LeafName::new("optimizer", "rng"), Content::Object { per_rank: true, values: own });
        Truth { leaves }
    }

    /// Returns the leaves that `rank` holds under a layout. A rank without a part of a tensor may not know it; rank 0
    /// knows all.
    pub(crate) fn state(&self, layout: &Layout, rank: u32, dice: &mut Dice) -> State {
        let mut leaves = Vec::new();
        let mut providers: Vec<Vec<Arc<dyn Provider>>> = Vec::new();
        let mut absent = BTreeSet::new();
        let tensors = self.leaves.iter().filter(|(_, content)| matches!(content, Content::Tensor(_)));
        for (index, (name, content)) in tensors.enumerate() {
            let Content::Tensor(whole) = content else { continue };
            if layout.parts(index, &whole.shape, rank).0.is_empty() && rank > 0 && dice.once_in(2) {
                absent.insert(name);
            }
        }
        let mut index = 0;
        let mut replicas = Some(Replicas::default());
        for (name, content) in &self.leaves {
            let mut holders = None;
            let (body, bytes) = match content {
                Content::Tensor(whole) => {
                    index += 1;
                    if absent.contains(name) {
                        continue;
                    }
                    holders = layout.holders(index - 1, &whole.shape, rank);
                    let (parts, blocks) = whole.hold(layout.parts(index - 1, &whole.shape, rank), dice);
                    // A tensor of no element, which a rank may hold or not as it likes.
                    holders = holders.filter(|_| !whole.shape.contains(&0) || parts.is_empty());
                    if holders.is_none() {
                        replicas = None;
                    }
                    let held = blocks.into_iter().map(|block| Arc::new(Held::new(block)) as Arc<dyn Provider>);
                    let shape = whole.shape.as_slice().into();
                    (LeafBody::Tensor { dtype: whole.dtype, shape, parts }, held.collect())
                }
                Content::Alias(of) if absent.contains(of) => continue,
                Content::Alias(of) => (LeafBody::Alias { of: of.clone() }, Vec::new()),
                Content::Object { per_rank, values } => {
                    let value = values[rank as usize % values.len()].clone();
                    (
                        LeafBody::Object { owner: if *per_rank { Owner::Rank } else { Owner::Job } },
                        vec![Arc::new(value) as Arc<dyn Provider>],
                    )
                }
            };
            leaves.push(Leaf { name: name.clone(), body, layout: "simulated".to_owned() });
            providers.push(bytes);
            if let Some(replicas) = &mut replicas {
                let known = holders.map(|holders| {
                    let group = replicas.groups.iter().position(|group| *group == holders);
                    group.unwrap_or_else(|| {
                        replicas.groups.push(holders);
                        replicas.groups.len() - 1
                    }) as u32
                });
                replicas.leaves.push(known);
            }
        }
        let (catalog, replicas) = (Arc::new(Catalog { leaves }), replicas.map(Arc::new));
        State { catalog, providers, replicas, ..State::default() }
    }

    /// Returns the destinations of `rank`, which wants everything under a layout: its part of every tensor, in memory
    /// of any strides.
    pub(crate) fn places(&self, layout: &Layout, rank: u32, dice: &mut Dice) -> Vec<Place> {
        let mut places = Vec::new();
        let mut index = 0;
        for (name, content) in &self.leaves {
            let (whole, regions) = match content {
                Content::Object { .. } => continue,
                Content::Tensor(whole) => {
                    index += 1;
                    (whole, layout.parts(index - 1, &whole.shape, rank).0)
                }
                Content::Alias(of) => (self.whole(of), vec![Region::whole(&self.whole(of).shape)]),
            };
            let empty = Region::new(&vec![0; whole.shape.len()], &vec![0; whole.shape.len()]);
            let empty = (!whole.shape.is_empty()).then_some(empty);
            for region in regions.into_iter().chain(empty) {
                let block = Block::random(dice, &region.lengths, whole.dtype.size_bytes());
                places.push(Place { name: name.clone(), region, block });
            }
        }
        places
    }

    /// Returns the tensor of that name, or that of which it is an alias.
    pub(crate) fn whole(&self, name: &LeafName) -> &Whole {
        match &self.leaves[name] {
            Content::Tensor(whole) => whole,
            Content::Alias(of) => self.whole(of),
            Content::Object { .. } => panic!("{name} is no tensor"),
        }
    }

    /// Returns the expected elements of a place.
    pub(crate) fn elements(&self, place: &Place) -> Vec<u8> {
        self.whole(&place.name).gather(&place.region)
    }

    /// Returns the difference between a checkpoint's contents and this truth.
    pub(crate) fn flaw(&self, manifest: &Manifest, places: &[Place], values: &[Vec<u8>]) -> Option<String> {
        if manifest.len() != self.leaves.len() {
            return Some(format!("{} leaves became {}", self.leaves.len(), manifest.len()));
        }
        let mut values = values.iter();
        for (i, (name, content)) in self.leaves.iter().enumerate() {
            let leaf = manifest.leaf(i);
            let described = match (content, leaf.kind) {
                (Content::Tensor(whole), LeafKind::Tensor { dtype, shape }) => {
                    whole.dtype == dtype && whole.shape == shape
                }
                (Content::Alias(name), LeafKind::Alias { of }) => manifest.find(name) == Some(of),
                (Content::Object { .. }, LeafKind::Object) => true,
                _ => false,
            };
            if (leaf.key, leaf.name) != (&name.key, &name.name) || !described {
                return Some(format!("{name} became {leaf:?}"));
            }
            if let Content::Object { values: expected, .. } = content {
                let groups: Vec<Vec<Range<u32>>> = manifest.values(i).map(|(ranks, _)| ranks).collect();
                let found: Vec<(Vec<Range<u32>>, &Vec<u8>)> = groups.into_iter().zip(&mut values).collect();
                for rank in 0..manifest.info.world {
                    let mut own = found.iter().filter(|(ranks, _)| ranks.iter().any(|ranks| ranks.contains(&rank)));
                    let own = (own.next(), own.next());
                    if !matches!(own, (Some((_, value)), None) if **value == expected[rank as usize % expected.len()]) {
                        return Some(format!("{name}: rank {rank} got {own:?}"));
                    }
                }
            }
        }
        for place in places {
            let Place { name, region, block } = place;
            if block.elements() != self.elements(place) {
                return Some(format!("{name} {region}: wrong bytes"));
            }
            if !block.surroundings_are_intact() {
                return Some(format!("{name} {region}: bytes beside the elements were written"));
            }
        }
        None
    }
}

impl Whole {
    /// The parts and their memory. What is one run of the flattened tensor is cut out of it front to back.
    fn hold(&self, (mut parts, run): (Vec<Region>, Option<u64>), dice: &mut Dice) -> (Vec<Region>, Vec<Block>) {
        if self.shape.contains(&0) && dice.once_in(2) {
            parts = vec![Region::whole(&self.shape)];
        }
        let item = self.dtype.size_bytes();
        let mut at = (run.unwrap_or(0) * item) as usize;
        let mut blocks = Vec::new();
        for part in &parts {
            let bytes = (part.numel() * item) as usize;
            blocks.push(match run {
                Some(_) => Block::dense(&part.lengths, item).put(&self.bytes[at..at + bytes]),
                None => Block::random(dice, &part.lengths, item).put(&self.gather(part)),
            });
            at += bytes;
        }
        (parts, blocks)
    }
}

/// Zero to four dimensions, mostly small, now and then without elements, now and then of several blocks.
fn shape(dice: &mut Dice) -> Vec<u64> {
    let numel_max = if dice.once_in(12) { 120_000 } else { 400 };
    let mut numel = 1;
    (0..dice.below(5))
        .map(|_| {
            let length = if dice.once_in(50) { 0 } else { 1 + *dice.pick(&[1, 2, 3, 4, 6, 12, 39, 499]) };
            let length = length.min(numel_max / numel);
            numel *= length.max(1);
            length
        })
        .collect()
}

/// Memory for a region of a tensor.
pub(crate) struct Place {
    pub(crate) name: LeafName,
    pub(crate) region: Region,
    pub(crate) block: Block,
}

/// The wants that fill the places, and all values.
pub(crate) fn wants(manifest: &Manifest, places: &mut [Place]) -> (Vec<Want>, Vec<ValueRef>) {
    let tensor = |name: &LeafName| {
        let leaf = manifest.find(name).unwrap_or_else(|| panic!("the checkpoint lacks {name}"));
        match manifest.leaf(leaf).kind {
            LeafKind::Alias { of } => of,
            _ => leaf,
        }
    };
    let wants = places
        .iter_mut()
        .map(|place| Want {
            leaf: tensor(&place.name),
            region: place.region.clone(),
            sink: place.block.sink().unwrap(),
        })
        .collect();
    let values = (0..manifest.len())
        .flat_map(|leaf| (0..manifest.values(leaf).len()).map(move |value| ValueRef { leaf, value }));
    (wants, values.collect())
}

/// Ranks that save and load together.
pub(crate) struct Job {
    pub(crate) engines: Vec<Arc<Engine>>,
    pub(crate) layout: Layout,
}

impl Job {
    /// Makes a job with the least staging memory.
    pub(crate) fn new(layout: Layout) -> Job {
        Job::staged(layout, shardfast_engine::staging::STAGING_BYTES_MIN)
    }

    pub(crate) fn staged(layout: Layout, staging_bytes: u64) -> Job {
        let coords = shardfast_coord::local(layout.world());
        Job { engines: coords.into_iter().map(|coord| Engine::new(coord, staging_bytes).unwrap()).collect(), layout }
    }

    /// Saves on all ranks.
    ///
    /// # Errors
    /// The error that all ranks agree on.
    pub(crate) fn save(&self, url: &str, truth: &Truth, dice: &mut Dice) -> Result<()> {
        let pending = self
            .engines
            .iter()
            .map(|engine| save(engine, destination(url), truth.state(&self.layout, engine.rank(), dice), LONG));
        alike(outcomes(pending.collect())).map(drop)
    }

    /// Begins to save on all ranks, each through a store of its own.
    pub(crate) fn begin_save(
        &self,
        store: impl Fn(u32) -> Result<Arc<dyn Store>>,
        truth: &Truth,
        deadline: Duration,
    ) -> Vec<Pending> {
        let begin = |engine: &Arc<Engine>| {
            let state = truth.state(&self.layout, engine.rank(), &mut Dice(1));
            save_to(engine, store(engine.rank()), destination("here"), state, deadline)
        };
        self.engines.iter().map(begin).collect()
    }

    /// Saves on all ranks, each through a store of its own; returns each rank's outcome.
    pub(crate) fn save_to(
        &self,
        store: impl Fn(u32) -> Result<Arc<dyn Store>>,
        truth: &Truth,
        deadline: Duration,
    ) -> Vec<Result<()>> {
        outcomes(self.begin_save(store, truth, deadline))
    }

    /// Opens a checkpoint on all ranks, loads all of it under the job's layout, and says how it differs from the truth.
    ///
    /// # Errors
    /// The error that all ranks agree on.
    pub(crate) fn compare(
        &self,
        open: impl Fn(&Arc<Engine>) -> Result<Checkpoint> + Sync,
        truth: &Truth,
        dice: &mut Dice,
    ) -> Result<Option<String>> {
        self.compare_by(PeerReads::Auto, open, truth, dice).map(|(flaw, _)| flaw)
    }

    /// [`Job::compare`] in a way, and what each rank moved.
    ///
    /// # Errors
    /// The error that all ranks agree on.
    pub(crate) fn compare_by(
        &self,
        way: PeerReads,
        open: impl Fn(&Arc<Engine>) -> Result<Checkpoint> + Sync,
        truth: &Truth,
        dice: &mut Dice,
    ) -> Result<(Option<String>, Vec<Traffic>)> {
        let places: Vec<Vec<Place>> =
            self.engines.iter().map(|engine| truth.places(&self.layout, engine.rank(), dice)).collect();
        let load = |engine: &Arc<Engine>, mut places: Vec<Place>| {
            let checkpoint = open(engine)?;
            let (wants, values) = wants(checkpoint.manifest(), &mut places);
            let loaded = checkpoint.load_by(way, None, &wants, &values, LONG)?;
            Ok((truth.flaw(checkpoint.manifest(), &places, &loaded.values), loaded.traffic))
        };
        let loaded = thread::scope(|threads| {
            let ranks = self.engines.iter().zip(places);
            let running: Vec<_> = ranks.map(|(engine, places)| threads.spawn(|| load(engine, places))).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (flaws, traffic): (Vec<_>, Vec<_>) = alike(loaded)?.into_iter().unzip();
        Ok((flaws.into_iter().flatten().next(), traffic))
    }
}

/// Makes a destination like [`destination`], with a metric.
pub(crate) fn measured(url: &str, loss: &str) -> Destination {
    let mut destination = destination(url);
    destination.user.insert("metric.loss".to_owned(), loss.to_owned());
    destination
}

pub(crate) fn destination(url: &str) -> Destination {
    Destination {
        url: url.to_owned(),
        step: Some(7),
        user: BTreeMap::from([("note".to_owned(), "test".to_owned())]),
        prove: shardfast_engine::Prove::default(),
        blocking: false,
    }
}

/// Waits for all.
pub(crate) fn outcomes(pending: Vec<Pending>) -> Vec<Result<()>> {
    pending.into_iter().map(|pending| pending.committed(None)).collect()
}

/// Returns the results of all ranks, or the error of all of them: the same kind and the same words.
pub(crate) fn alike<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let failures: BTreeSet<Option<(&str, &str)>> = results
        .iter()
        .map(|result| result.as_ref().err().map(|Error { kind, message, .. }| (kind.name(), &**message)))
        .collect();
    assert_eq!(failures.len(), 1, "the ranks heard different things: {failures:#?}");
    results.into_iter().collect()
}

/// Tells on the way out of a failed test which seed it failed at.
pub(crate) struct Seed(pub(crate) u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("with seed {}", self.0);
        }
    }
}
