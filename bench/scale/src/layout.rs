//! The job that ByteCheckpoint's paper reports on (section 6.4): a dense transformer of 405 billion parameters under
//! Megatron's tensor, data and pipeline parallelism with its distributed optimizer, described rank by rank.

use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafName, Region};
use shardfast_plan::{RankSet, Replicas};

const LAYERS: u64 = 126;
const HIDDEN: u64 = 16_384;
const FFN: u64 = 53_248;
/// 128 query heads and 8 heads each of keys and values, 128 wide.
const QKV: u64 = 18_432;
const VOCABULARY: u64 = 128_256;

const TP: u64 = 8;
const PP: u64 = 16;
/// Layers of a stage; the first and the last have one less and an embedding.
const STAGE_LAYERS: u64 = 8;

/// What the optimizer keeps of each parameter, in 32 bits.
const STATES: [&str; 3] = ["param", "exp_avg", "exp_avg_sq"];

/// A job of `dp` replicas of 128 ranks. As Megatron numbers them: tensor parallel innermost, pipeline outermost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) dp: u64,
}

/// A rank's place in the mesh.
#[derive(Debug, Clone, Copy)]
struct Place {
    tp: u64,
    dp: u64,
    pp: u64,
}

/// A parameter, and the dimension along which tensor parallelism shards it.
struct Parameter {
    name: String,
    shape: Vec<u64>,
    sharded: Option<usize>,
}

impl Parameter {
    /// What each rank of a tensor parallel group has of it.
    fn shard(&self, tp: u64) -> Region {
        let mut region = Region::whole(&self.shape);
        if let Some(d) = self.sharded {
            region.lengths[d] /= TP;
            region.offsets[d] = tp * region.lengths[d];
        }
        region
    }
}

/// The parameters of a pipeline stage, in the order of the optimizer's buffer.
fn parameters(pp: u64) -> Vec<Parameter> {
    let parameter = |name: String, shape: &[u64], sharded| Parameter { name, shape: shape.to_vec(), sharded };
    let mut out = Vec::new();
    if pp == 0 {
        out.push(parameter("embedding.word_embeddings.weight".into(), &[VOCABULARY, HIDDEN], Some(0)));
    }
    // A place in front of the first layer and one behind the last go to embedding and output.
    for layer in (0..LAYERS).filter(|layer| (layer + 1) / STAGE_LAYERS == pp) {
        let of = |what: &str| format!("decoder.layers.{layer}.{what}");
        out.push(parameter(of("input_layernorm.weight"), &[HIDDEN], None));
        out.push(parameter(of("self_attention.linear_qkv.weight"), &[QKV, HIDDEN], Some(0)));
        out.push(parameter(of("self_attention.linear_proj.weight"), &[HIDDEN, HIDDEN], Some(1)));
        out.push(parameter(of("pre_mlp_layernorm.weight"), &[HIDDEN], None));
        out.push(parameter(of("mlp.linear_fc1.gate.weight"), &[FFN, HIDDEN], Some(0)));
        out.push(parameter(of("mlp.linear_fc1.up.weight"), &[FFN, HIDDEN], Some(0)));
        out.push(parameter(of("mlp.linear_fc2.weight"), &[HIDDEN, FFN], Some(1)));
    }
    if pp == PP - 1 {
        out.push(parameter("decoder.final_layernorm.weight".into(), &[HIDDEN], None));
        out.push(parameter("output_layer.weight".into(), &[VOCABULARY, HIDDEN], Some(0)));
    }
    out
}

impl Job {
    pub(crate) fn world(&self) -> u32 {
        (TP * PP * self.dp) as u32
    }

    fn place(&self, rank: u32) -> Place {
        let rank = u64::from(rank);
        Place { tp: rank % TP, dp: rank / TP % self.dp, pp: rank / (TP * self.dp) }
    }

    fn rank(&self, place: Place) -> u32 {
        (place.tp + TP * (place.dp + self.dp * place.pp)) as u32
    }

    /// What `rank` holds, and who else does: bf16 weights on all replicas, and of each buffer of the optimizer, all
    /// shards of a stage behind each other, an even flat share.
    pub(crate) fn describe(&self, rank: u32) -> (Catalog, Replicas) {
        let place = self.place(rank);
        let tps = |dp| (0..TP).map(move |tp| Place { tp, dp, ..place });
        let dps = |tp| (0..self.dp).map(move |dp| Place { tp, dp, ..place });
        let set = |places: &mut dyn Iterator<Item = Place>| RankSet::new(places.map(|place| self.rank(place)));
        let mut described = Described::default();
        let weight = described.set(set(&mut dps(place.tp)));
        let norm = described.set(set(&mut (0..TP).flat_map(dps)));
        let moment = described.set(set(&mut [place].into_iter()));
        let norm_moment = described.set(set(&mut tps(place.dp)));

        let parameters = parameters(place.pp);
        let numel = |parameter: &Parameter| parameter.shard(place.tp).numel();
        let total: u64 = parameters.iter().map(numel).sum();
        let (start, stop) = (total * place.dp / self.dp, total * (place.dp + 1) / self.dp);
        let mut at = 0;
        for parameter in &parameters {
            let shard = parameter.shard(place.tp);
            let (first, end) = (at, at + shard.numel());
            at = end;
            let whole = parameter.sharded.is_none();
            let run = (start.clamp(first, end) - first, stop.clamp(first, end) - first);
            let mut parts: Vec<Region> = Region::flat_run(&shard.lengths, run.0, run.1).collect();
            for part in &mut parts {
                part.offsets.iter_mut().zip(&shard.offsets).for_each(|(offset, origin)| *offset += origin);
            }
            let group = if whole { norm } else { weight };
            described.leaf("model", &parameter.name, DType::BF16, &parameter.shape, vec![shard], group);
            if !parts.is_empty() {
                let group = if whole { norm_moment } else { moment };
                for state in STATES {
                    let name = format!("{}.{state}", parameter.name);
                    described.leaf("optimizer", &name, DType::F32, &parameter.shape, parts.clone(), group);
                }
            }
        }
        described.finish()
    }
}

#[derive(Default)]
struct Described {
    groups: Vec<RankSet>,
    leaves: Vec<(Leaf, Option<u32>)>,
}

impl Described {
    fn set(&mut self, ranks: RankSet) -> u32 {
        self.groups.push(ranks);
        self.groups.len() as u32 - 1
    }

    fn leaf(&mut self, key: &str, name: &str, dtype: DType, shape: &[u64], parts: Vec<Region>, group: u32) {
        let body = LeafBody::Tensor { dtype, shape: Dims::from_slice(shape), parts };
        let layout = "mesh(pp=16, dp, tp=8)".to_owned();
        self.leaves.push((Leaf { name: LeafName::new(key, name), body, layout }, Some(group)));
    }

    fn finish(mut self) -> (Catalog, Replicas) {
        self.leaves.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let (leaves, holders) = self.leaves.into_iter().unzip();
        (Catalog { leaves }, Replicas { groups: self.groups, leaves: holders })
    }
}
