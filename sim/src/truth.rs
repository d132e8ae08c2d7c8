//! The state of a job as a whole, what each rank holds of it, and whether a checkpoint holds it too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardfast_engine::{
    Capture, Checkpoint, Error, Fences, Kind, Provider, Result, Sink, State, ValueRef, Want, row_major_strides,
};
use shardfast_format::object::encode;
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafKind, LeafName, Manifest, Owner, Region, Value};
use shardfast_plan::{RankSet, Replicas};

use shardfast_store::testing::dice::Dice;

/// The keys of the state.
pub(crate) const KEYS: [&str; 2] = ["model", "extra"];

/// Of calls in real time that wait for no other rank.
const ALONE: Duration = Duration::from_secs(60);

/// A state and how it is spread.
#[derive(Clone)]
pub(crate) struct Truth {
    pub(crate) world: u32,
    pub(crate) tensors: Vec<Tensor>,
    values: Vec<OneValue>,
    /// Another name of the first tensor.
    alias: Option<LeafName>,
    /// The ranks that know who holds what they hold.
    knowing: Vec<bool>,
}

/// A tensor of bytes: element types are the plan's tests' business.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: LeafName,
    dtype: DType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
    /// Whether shards are runs of the flattened tensor, and not rows.
    is_flat: bool,
    /// The first row or element of each shard, and the end. Rank `r` holds the shard `r` modulo their number.
    borders: Vec<u64>,
}

#[derive(Clone)]
struct OneValue {
    name: LeafName,
    per_rank: bool,
    /// Encoded, by rank.
    contents: Vec<Vec<u8>>,
}

/// What one rank does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mischief {
    /// It calls the save of another URL.
    OtherUrl,
    /// Its first tensor has another shape.
    OtherShape,
    /// It holds nothing of the first tensor, which no other rank has whole.
    Hole,
    /// It holds an element of the first tensor that another rank holds too.
    Overlap,
    /// It holds its shard of the first tensor one place too early: as much as it should, and something else.
    Shifted,
    /// It holds the first tensor with other bytes than its replicas.
    OtherBytes,
    /// It believes itself alone in holding the first tensor.
    Alone,
    /// Its memory cannot be read.
    Unreadable,
    /// Its memory was written while it was copied, and it says so afterwards.
    Touched,
}

impl Mischief {
    pub(crate) const ALL: [Mischief; 9] = [
        Mischief::OtherUrl,
        Mischief::OtherShape,
        Mischief::Hole,
        Mischief::Overlap,
        Mischief::Shifted,
        Mischief::OtherBytes,
        Mischief::Alone,
        Mischief::Unreadable,
        Mischief::Touched,
    ];
}

/// Memory that cannot be read.
struct Unreadable(u64);

pub(crate) const UNREADABLE: &str = "the device is lost";

pub(crate) const TOUCHED: &str = "an optimizer stepped meanwhile";

/// In memory that a load has not reached.
const UNTOUCHED: u8 = 0xee;

/// Memory for a part of a tensor.
pub(crate) struct Wanted {
    tensor: usize,
    region: Region,
    memory: Vec<u8>,
}

impl Provider for Unreadable {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn fill(&self, _: u64, _: &mut [u8], _: &mut Fences) -> Result<()> {
        Err(Error::new(Kind::Internal, UNREADABLE))
    }
}

/// Another provider, captured while the program goes on.
struct Lazy(Arc<dyn Provider>);

impl Provider for Lazy {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.0.fill(at, out, fences)
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }
}

/// A leaf, the bytes of its parts, and the ranks that hold the same parts.
type Held = (Leaf, Vec<Arc<dyn Provider>>, Option<RankSet>);

impl Truth {
    pub(crate) fn random(dice: &mut Dice, world: u32) -> Truth {
        let tensors = (0..1 + dice.below(4)).map(|index| Tensor::random(dice, index, world)).collect();
        let values = (0..dice.below(4)).map(|index| {
            let name = LeafName::new(*dice.pick(&KEYS), format!("value.{index}"));
            OneValue { name, per_rank: dice.once_in(3), contents: vec![Vec::new(); world as usize] }
        });
        let values = values.collect();
        let alias = dice.once_in(3).then(|| LeafName::new("model", "tied"));
        let everyone = *dice.pick(&[Some(true), Some(false), None]);
        let knowing = (0..world).map(|_| everyone.unwrap_or_else(|| dice.once_in(2))).collect();
        let mut truth = Truth { world, tensors, values, alias, knowing };
        truth.change(dice);
        truth
    }

    /// A step of the training: other bytes; values that become equal or different; now and then shards that move.
    pub(crate) fn change(&mut self, dice: &mut Dice) {
        for tensor in &mut self.tensors {
            tensor.bytes = dice.bytes(tensor.bytes.len());
            if tensor.dtype == DType::F32 {
                // Whole numbers: a step of an optimizer can be undone.
                let whole = |bytes: &[u8]| f32::from(u16::from_le_bytes([bytes[0], bytes[1]])).to_le_bytes();
                tensor.bytes = tensor.bytes.chunks(4).flat_map(whole).collect();
            }
            if dice.once_in(8) && tensor.borders.len() > 2 {
                let border = 1 + dice.below(tensor.borders.len() as u64 - 2) as usize;
                let (before, after) = (tensor.borders[border - 1], tensor.borders[border + 1]);
                tensor.borders[border] = before + dice.below(after - before + 1);
            }
        }
        for OneValue { per_rank, contents, .. } in &mut self.values {
            // Python changes most values together, and some on one rank only.
            let variants = *dice.pick(&[1, 1, 1, 2, 3]);
            let alike: Vec<Vec<u8>> = (0..variants).map(|_| value(dice)).collect();
            for content in contents {
                *content = if *per_rank { value(dice) } else { alike[dice.below(variants) as usize].clone() };
            }
        }
    }

    /// Whether this can be done wrong here, and will be found whatever the ranks know.
    pub(crate) fn allows(&self, mischief: Mischief) -> bool {
        let first = &self.tensors[0];
        let shards = first.borders.len() - 1;
        match mischief {
            Mischief::OtherUrl => self.world > 1,
            Mischief::OtherShape => self.world > 1,
            Mischief::Unreadable | Mischief::Touched => true,
            Mischief::Hole => shards == self.world as usize,
            Mischief::Overlap | Mischief::Shifted => shards == self.world as usize && shards > 1,
            Mischief::OtherBytes => shards < self.world as usize,
            Mischief::Alone => shards < self.world as usize && self.knowing.iter().all(|knows| *knows),
        }
    }

    /// Whether all know that others hold what that rank holds of the first tensor.
    pub(crate) fn plans_alone(&self, rank: u32) -> bool {
        let first = &self.tensors[0];
        let holders = (0..self.world).filter(|&other| first.run(other) == first.run(rank)).count();
        self.knowing.iter().all(|knows| *knows) && holders > 1
    }

    /// A rank whose mischief shows: one that holds something of the first tensor, and where all is held by others
    /// already, not all of it.
    pub(crate) fn culprit(&self, mischief: Mischief, dice: &mut Dice) -> Option<u32> {
        let start = dice.below_u32(self.world);
        let ranks = (0..self.world).map(|offset| (start + offset) % self.world);
        let first = &self.tensors[0];
        ranks.into_iter().find(|&rank| {
            let run = first.run(rank);
            match mischief {
                Mischief::Overlap => !run.is_empty() && (run.start > 0 || run.end < first.numel()),
                Mischief::Shifted => !run.is_empty() && run.start > 0,
                Mischief::OtherUrl => true,
                // A rank without any tensor has none that could be touched.
                Mischief::Touched => self.tensors.iter().any(|tensor| !tensor.run(rank).is_empty()),
                _ => !run.is_empty(),
            }
        })
    }

    /// What `rank` gives to a save; whether the program goes on meanwhile.
    pub(crate) fn state(&self, rank: u32, mischief: Option<Mischief>, is_lazy: bool) -> State {
        let mut leaves: Vec<Held> = Vec::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            leaves.push(self.held(tensor, rank, mischief.filter(|_| index == 0)));
        }
        for OneValue { name, per_rank, contents } in &self.values {
            let body = LeafBody::Object { owner: if *per_rank { Owner::Rank } else { Owner::Job } };
            leaves.push((leaf(name, body), vec![Arc::new(contents[rank as usize].clone())], None));
        }
        if let Some(name) = &self.alias {
            leaves.push((leaf(name, LeafBody::Alias { of: self.tensors[0].name.clone() }), Vec::new(), None));
        }
        leaves.sort_by(|one, other| one.0.name.cmp(&other.0.name));
        let mut replicas = Replicas::default();
        for (_, _, holders) in &mut leaves {
            replicas.leaves.push(holders.take().map(|holders| {
                let group = replicas.groups.iter().position(|group| *group == holders);
                group.unwrap_or_else(|| {
                    replicas.groups.push(holders);
                    replicas.groups.len() - 1
                }) as u32
            }));
        }
        let lazily = |provider| Arc::new(Lazy(provider)) as Arc<dyn Provider>;
        let captured = |providers: Vec<Arc<dyn Provider>>| match is_lazy {
            true => providers.into_iter().map(lazily).collect(),
            false => providers,
        };
        let (leaves, providers) = leaves.into_iter().map(|(leaf, providers, _)| (leaf, captured(providers))).unzip();
        let replicas = self.knowing[rank as usize].then(|| Arc::new(replicas));
        let (catalog, compared) = (Arc::new(Catalog { leaves }), Arc::default());
        State { catalog, providers, replicas, compared, ..State::default() }
    }

    fn held(&self, tensor: &Tensor, rank: u32, mischief: Option<Mischief>) -> Held {
        let mut run = tensor.run(rank);
        let mut bytes = tensor.bytes.clone();
        let mut shape = tensor.shape.clone();
        let mut holders: Vec<u32> = (0..self.world).filter(|&other| tensor.run(other) == run).collect();
        match mischief {
            Some(Mischief::OtherShape) => {
                let row = bytes.len() / shape[0] as usize;
                shape[0] += 1;
                bytes.extend(vec![0; row]);
            }
            Some(Mischief::Hole) => run = 0..0,
            Some(Mischief::Shifted) => run = run.start - tensor.unit()..run.end - tensor.unit(),
            Some(Mischief::Overlap) if run.start > 0 => run.start -= tensor.unit(),
            Some(Mischief::Overlap) => run.end += tensor.unit(),
            Some(Mischief::OtherBytes) => bytes.iter_mut().for_each(|byte| *byte ^= 1),
            Some(Mischief::Alone) => holders = vec![rank],
            _ => {}
        }
        let parts: Vec<Region> = Region::flat_run(&shape, run.start, run.end).collect();
        let item = tensor.dtype.size_bytes();
        let mut at = (run.start * item) as usize;
        let held = parts.iter().map(|part| {
            let length = (part.numel() * item) as usize;
            at += length;
            match mischief {
                Some(Mischief::Unreadable) => Arc::new(Unreadable(length as u64)) as Arc<dyn Provider>,
                _ => Arc::new(bytes[at - length..at].to_vec()),
            }
        });
        let held = held.collect();
        let holders = (!parts.is_empty()).then(|| RankSet::new(holders));
        let body = LeafBody::Tensor { dtype: tensor.dtype, shape: shape.as_slice().into(), parts };
        (leaf(&tensor.name, body), held, holders)
    }

    /// How what a checkpoint says and gives differs from this, if it does.
    ///
    /// # Errors
    /// What the load says.
    pub(crate) fn flaw(&self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        let manifest = checkpoint.manifest();
        let leaves = self.tensors.len() + self.values.len() + usize::from(self.alias.is_some());
        if manifest.len() != leaves || manifest.info.world != self.world {
            let (found, world) = (manifest.len(), manifest.info.world);
            return Ok(Some(format!("{leaves} leaves of {} ranks became {found} of {world}", self.world)));
        }
        let mut memory: Vec<Vec<u8>> = self.tensors.iter().map(|tensor| vec![0; tensor.bytes.len()]).collect();
        let mut wants = Vec::new();
        for (tensor, memory) in self.tensors.iter().zip(&mut memory) {
            let leaf = manifest.find(&tensor.name).filter(|&leaf| match manifest.leaf(leaf).kind {
                LeafKind::Tensor { dtype, shape } => dtype == tensor.dtype && *shape == *tensor.shape,
                _ => false,
            });
            let Some(leaf) = leaf else { return Ok(Some(format!("{} is not there", tensor.name))) };
            wants.push(Want {
                leaf,
                region: Region::whole(&tensor.shape),
                sink: sink(memory, &tensor.shape, tensor.dtype)?,
            });
        }
        if let Some(name) = &self.alias {
            let leaf = manifest.find(name).map(|leaf| manifest.leaf(leaf).kind);
            let of = manifest.find(&self.tensors[0].name);
            if !matches!(leaf, Some(LeafKind::Alias { of: found }) if Some(found) == of) {
                return Ok(Some(format!("{name} became {leaf:?}")));
            }
        }
        let mut expected = Vec::new();
        let mut refs = Vec::new();
        for OneValue { name, contents, .. } in &self.values {
            let Some(leaf) = manifest.find(name) else { return Ok(Some(format!("{name} is not there"))) };
            let mut by_rank = BTreeMap::new();
            for (value, (ranks, _)) in manifest.values(leaf).enumerate() {
                ranks.into_iter().flatten().for_each(|rank| _ = by_rank.insert(rank, refs.len()));
                refs.push(ValueRef { leaf, value });
            }
            expected.extend((0..).zip(contents).map(|(rank, content)| {
                let found: Option<usize> = by_rank.get(&rank).copied();
                (name, rank, content, found)
            }));
        }
        let values = checkpoint.load(&wants, &refs, ALONE)?;
        drop(wants);
        let tensor = self.tensors.iter().zip(&memory).find(|(tensor, memory)| tensor.bytes != **memory);
        if let Some((tensor, _)) = tensor {
            return Ok(Some(format!("{}: other bytes", tensor.name)));
        }
        let value = expected.into_iter().find(|(_, _, content, found)| found.map(|at| &values[at]) != Some(content));
        Ok(value.map(|(name, rank, ..)| format!("{name}: rank {rank} has another value")))
    }
}

impl Truth {
    /// Memory for random parts of the tensors, which may overlap.
    pub(crate) fn wanted(&self, dice: &mut Dice) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for (tensor, of) in self.tensors.iter().enumerate() {
            for _ in 0..dice.below(3) {
                let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
                for &length in &of.shape {
                    let start = if dice.once_in(2) { 0 } else { dice.below(length) };
                    offsets.push(start);
                    lengths.push(if dice.once_in(2) { length - start } else { 1 + dice.below(length - start) });
                }
                let region = Region::new(&offsets, &lengths);
                let memory = vec![UNTOUCHED; (region.numel() * of.dtype.size_bytes()) as usize];
                wanted.push(Wanted { tensor, region, memory });
            }
        }
        wanted
    }

    /// How a load fills the memory.
    ///
    /// # Errors
    /// Where the checkpoint lacks a tensor.
    pub(crate) fn wants(&self, manifest: &Manifest, wanted: &mut [Wanted]) -> Result<Vec<Want>> {
        let want = |Wanted { tensor, region, memory }: &mut Wanted| {
            let tensor = &self.tensors[*tensor];
            let missing = || Error::new(Kind::NotFound, format!("{} is not there", tensor.name));
            let leaf = manifest.find(&tensor.name).ok_or_else(missing)?;
            Ok(Want { leaf, region: region.clone(), sink: sink(memory, &region.lengths, tensor.dtype)? })
        };
        wanted.iter_mut().map(want).collect()
    }

    /// The elements that belong into the memory.
    fn elements(&self, Wanted { tensor, region, .. }: &Wanted) -> Vec<u8> {
        let Tensor { shape, bytes, dtype, .. } = &self.tensors[*tensor];
        let item = dtype.size_bytes();
        let row = |row: u64| {
            let start = ((region.offsets[0] + row) * shape[1] + region.offsets[1]) * item;
            &bytes[start as usize..(start + region.lengths[1] * item) as usize]
        };
        (0..region.lengths[0]).flat_map(row).copied().collect()
    }

    /// Whether a load has brought all of it.
    pub(crate) fn is_there(&self, wanted: &Wanted) -> bool {
        wanted.memory == self.elements(wanted)
    }

    /// Whether a load has brought nothing else.
    pub(crate) fn is_proven(&self, wanted: &Wanted) -> bool {
        let item = self.tensors[wanted.tensor].dtype.size_bytes() as usize;
        let elements = self.elements(wanted);
        let mut pairs = wanted.memory.chunks(item).zip(elements.chunks(item));
        pairs.all(|(found, expected)| found == expected || found.iter().all(|&byte| byte == UNTOUCHED))
    }
}

impl Tensor {
    fn random(dice: &mut Dice, index: u64, world: u32) -> Tensor {
        let dtype = *dice.pick(&[DType::U8, DType::F32, DType::I64]);
        // Now and then more than the largest block that is never cut.
        let is_large = dice.once_in(24);
        let (rows, columns) = if is_large { (400, 50) } else { (1 + dice.below(9), 1 + dice.below(5)) };
        let shape = vec![rows, columns];
        let is_flat = dice.once_in(3);
        let divisors: Vec<u32> = (1..=world).filter(|shards| world.is_multiple_of(*shards)).collect();
        let shards = u64::from(*dice.pick(&divisors));
        let most = if is_flat { rows * columns } else { rows };
        let mut borders: Vec<u64> = (0..=shards).map(|shard| shard * most / shards).collect();
        if dice.once_in(3) {
            borders[1..shards as usize].iter_mut().for_each(|border| *border = dice.below(most + 1));
            borders.sort_unstable();
        }
        let bytes = vec![0; (rows * columns * dtype.size_bytes()) as usize];
        let name = LeafName::new(*dice.pick(&KEYS), format!("layers.{index}"));
        Tensor { name, dtype, shape, bytes, is_flat, borders }
    }

    fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Elements of a row, or one: what shards consist of.
    fn unit(&self) -> u64 {
        if self.is_flat { 1 } else { self.shape[1] }
    }

    /// The elements of the flattened tensor that `rank` holds.
    fn run(&self, rank: u32) -> std::ops::Range<u64> {
        let shard = rank as usize % (self.borders.len() - 1);
        let (start, stop) = (self.borders[shard] * self.unit(), self.borders[shard + 1] * self.unit());
        // An empty one has no place.
        if start == stop { 0..0 } else { start..stop }
    }
}

#[allow(unsafe_code)] // as every caller of the engine hands its memory over
fn sink(memory: &mut [u8], lengths: &[u64], dtype: DType) -> Result<Sink> {
    let item = dtype.size_bytes();
    let strides: Vec<i64> = row_major_strides(lengths, item).iter().map(|&stride| stride as i64).collect();
    // SAFETY: the memory has room for all elements; no other code moves or reads it until the load has returned.
    unsafe { Sink::new(memory.as_mut_ptr() as usize, lengths, &strides, item) }
}

fn leaf(name: &LeafName, body: LeafBody) -> Leaf {
    Leaf { name: name.clone(), body, layout: "simulated".to_owned() }
}

fn value(dice: &mut Dice) -> Vec<u8> {
    let bytes = 1 + dice.below(40) as usize;
    encode(&Value::Bytes(dice.bytes(bytes))).expect("bytes are a value")
}
