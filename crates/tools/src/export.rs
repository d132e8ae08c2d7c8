//! Whole tensors as plain safetensors shards, under any layout that they were saved in.
//!
//! Names are those of the Hugging Face stack: `model.safetensors` when one file is enough, otherwise
//! `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`; the state's key stands for
//! `model`. The writer's slots are filled by loads, so that no tensor is ever whole in memory.
//! The index is written last, when every shard is durable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use shardfast_engine::Checkpoint;
use shardfast_engine::stream::{FlatRun, tensor_bytes};
use shardfast_format::{DType, Dims, EntrySpec, FileLayout, LeafKind, Manifest};
use shardfast_store::Store;
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::progress::Progress;
use shardfast_transfer::provider::{Fences, Provider};
use shardfast_transfer::staging::Staging;
use shardfast_transfer::writer::{self, FileJob};

use crate::inspect::full_name;

/// Result of an export.
#[derive(Debug, Clone, Serialize)]
pub struct Exported {
    /// URL of the files.
    pub url: String,
    /// Shards that were written.
    pub files: Vec<ExportedFile>,
    /// The index's name; none when there is one shard only.
    pub index: Option<String>,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Names that are left out because another name has the same tensor, and that name.
    pub tied: BTreeMap<String, String>,
    /// Objects, which are no tensors and are left out.
    pub objects_left_out: Vec<String>,
}

/// One exported shard.
#[derive(Debug, Clone, Serialize)]
pub struct ExportedFile {
    /// Name of the file.
    pub name: String,
    /// Size in bytes, header included.
    pub bytes: u64,
    /// Number of tensors in it.
    pub tensors: u64,
}

/// Writes the tensors that the checkpoint holds under `key` to `out_url`, at most `shard_bytes_max` bytes of tensors to
/// a file; a tensor that is larger has a file of its own. On this rank alone, and within the staging budget.
///
/// # Errors
/// `NotFound` when the key holds no tensor; `Conflict` when files of these names are there already; `Corrupt` when a
/// byte is damaged; the stores' errors. All files that were written are deleted then.
pub fn export(checkpoint: &Checkpoint, out_url: &str, key: &str, shard_bytes_max: u64) -> Result<Exported> {
    export_to(checkpoint, &*shardfast_store::open(out_url)?, key, shard_bytes_max)
}

/// Exports like [`export`] into a store that is already open at the place.
///
/// # Errors
/// As [`export`].
pub fn export_to(checkpoint: &Checkpoint, store: &dyn Store, key: &str, shard_bytes_max: u64) -> Result<Exported> {
    let Chosen { tensors, tied, objects } = choose(checkpoint.manifest(), key);
    if tensors.is_empty() {
        return Err(Error::new(Kind::NotFound, no_tensors(checkpoint, key)));
    }
    refuse_taken(store, key)?;

    // Half the budget for each side: a writer that waits for a load, and a load for a slot of the writer, would
    // deadlock.
    let budget = checkpoint.engine.staging_bytes() / 2;
    let timeout = &checkpoint.files.timeout;
    let engine = checkpoint.engine.with_staging(Staging::at_least(budget));
    let source = Arc::new(checkpoint.anew(engine, checkpoint.engine.store(&checkpoint.url, timeout)?));
    let shards = shards(&tensors, shard_bytes_max);
    let data_at = writer::data_at(store.needs().pieces);
    let job = |i| job(&source, shard_name(key, i, shards.len()), &shards[i], data_at);
    let jobs: Vec<FileJob> = (0..shards.len()).map(job).collect::<Result<_>>()?;
    let index = (shards.len() > 1).then(|| format!("{key}.safetensors.index.json"));
    if let Err(error) = write(store, &jobs, &Staging::at_least(budget), index.as_deref(), &shards) {
        // Some of them may be whole, and would look like an export.
        for job in jobs.iter().filter(|_| error.kind != Kind::Conflict) {
            let _ = store.delete(&job.path);
        }
        return Err(error);
    }
    let files = jobs.iter().zip(&shards).map(|(job, shard)| ExportedFile {
        name: job.path.clone(),
        bytes: job.layout.file_bytes(),
        tensors: shard.len() as u64,
    });
    Ok(Exported {
        url: store.url().to_owned(),
        files: files.collect(),
        index,
        tensors: tensors.len() as u64,
        tensor_bytes: tensors.iter().map(|tensor| tensor.bytes).fold(0, u64::saturating_add),
        tied,
        objects_left_out: objects,
    })
}

/// A tensor to be written.
#[derive(Debug, Clone)]
struct Tensor {
    /// Name in the shard.
    name: String,
    /// The leaf that holds its data.
    leaf: usize,
    dtype: DType,
    shape: Dims,
    bytes: u64,
}

struct Chosen {
    /// Tensors, sorted by name.
    tensors: Vec<Tensor>,
    tied: BTreeMap<String, String>,
    objects: Vec<String>,
}

/// Chooses the tensors under the key. A tensor of another key that is tied to names of this one is written under the
/// first of them.
fn choose(manifest: &Manifest, key: &str) -> Chosen {
    let mut chosen = Chosen { tensors: Vec::new(), tied: BTreeMap::new(), objects: Vec::new() };
    let of_key = |i: &usize| manifest.leaf(*i).key == key;
    let mut names: BTreeMap<usize, String> =
        (0..manifest.len()).filter(of_key).map(|i| (i, manifest.leaf(i).name.to_owned())).collect();
    for i in (0..manifest.len()).filter(of_key) {
        let leaf = manifest.leaf(i);
        let data = match leaf.kind {
            LeafKind::Object => {
                chosen.objects.push(full_name(manifest, i));
                continue;
            }
            LeafKind::Tensor { .. } => i,
            LeafKind::Alias { of } => match names.get(&of) {
                Some(kept) => {
                    chosen.tied.insert(leaf.name.to_owned(), kept.clone());
                    continue;
                }
                None => of,
            },
        };
        if let LeafKind::Tensor { dtype, shape } = manifest.leaf(data).kind {
            names.insert(data, leaf.name.to_owned());
            chosen.tensors.push(Tensor {
                name: leaf.name.to_owned(),
                leaf: data,
                dtype,
                shape: Dims::from_slice(shape),
                bytes: tensor_bytes(dtype, shape),
            });
        }
    }
    chosen
}

fn no_tensors(checkpoint: &Checkpoint, key: &str) -> String {
    let manifest = checkpoint.manifest();
    let keys: BTreeSet<&str> = (0..manifest.len()).map(|i| manifest.leaf(i).key).collect();
    format!("{}: there is no tensor under the key {key:?}; its keys are {keys:?}", checkpoint.url())
}

fn refuse_taken(store: &dyn Store, key: &str) -> Result<()> {
    let entries = match store.list("") {
        Err(error) if error.kind == shardfast_store::Kind::NotFound => return Ok(()),
        entries => entries?,
    };
    let is_ours = |name: &str| {
        name.strip_prefix(key).is_some_and(|rest| {
            rest == ".safetensors"
                || rest == ".safetensors.index.json"
                || rest.starts_with('-') && rest.ends_with(".safetensors")
        })
    };
    match entries.iter().find(|entry| is_ours(&entry.name)) {
        Some(entry) => Err(Error::new(
            Kind::Conflict,
            format!("{}: {} is there already: export to an empty directory", store.url(), entry.name),
        )),
        None => Ok(()),
    }
}

/// Divides the tensors in their order into shards, as many to a shard as fit. A tensor that is too large for any stands
/// alone, and those around it stay together.
fn shards(tensors: &[Tensor], shard_bytes_max: u64) -> Vec<Vec<Tensor>> {
    let mut shards: Vec<Vec<Tensor>> = Vec::new();
    let mut open: Option<(usize, u64)> = None;
    for tensor in tensors {
        match open {
            _ if tensor.bytes > shard_bytes_max => shards.push(vec![tensor.clone()]),
            Some((shard, bytes)) if bytes.saturating_add(tensor.bytes) <= shard_bytes_max => {
                shards[shard].push(tensor.clone());
                open = Some((shard, bytes + tensor.bytes));
            }
            _ => {
                open = Some((shards.len(), tensor.bytes));
                shards.push(vec![tensor.clone()]);
            }
        }
    }
    for shard in &mut shards {
        // The widest elements first, so that each tensor is aligned to its element.
        shard.sort_by(|a, b| (b.dtype.size_bytes(), &a.name).cmp(&(a.dtype.size_bytes(), &b.name)));
    }
    shards
}

fn shard_name(key: &str, i: usize, of: usize) -> String {
    if of == 1 { format!("{key}.safetensors") } else { format!("{key}-{:05}-of-{of:05}.safetensors", i + 1) }
}

fn job(source: &Arc<Checkpoint>, path: String, shard: &[Tensor], data_at: u64) -> Result<FileJob> {
    let entries: Vec<EntrySpec> = shard
        .iter()
        .map(|tensor| EntrySpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() })
        .collect();
    let provider = |tensor: &Tensor| -> Arc<dyn Provider> {
        let (leaf, bytes, item_bytes) = (tensor.leaf, tensor.bytes, tensor.dtype.size_bytes());
        Arc::new(Stored { source: Arc::clone(source), leaf, bytes, item_bytes })
    };
    Ok(FileJob {
        is_summed: false,
        path,
        layout: FileLayout::new(&entries, &BTreeMap::new())?.beginning_at_multiple_of(data_at)?,
        providers: shard.iter().map(provider).collect(),
        names: shard.iter().map(|tensor| tensor.name.clone()).collect(),
    })
}

fn write(
    store: &dyn Store,
    jobs: &[FileJob],
    staging: &Arc<Staging>,
    index: Option<&str>,
    shards: &[Vec<Tensor>],
) -> Result<()> {
    writer::run(store, jobs, &[], staging, &Progress::detached(), true, Duration::ZERO)?;
    let names: Vec<&str> = jobs.iter().map(|job| job.path.as_str()).collect();
    store.sync(&names)?;
    let Some(index) = index else { return Ok(()) };
    let tensors = || jobs.iter().zip(shards).flat_map(|(job, shard)| shard.iter().map(move |tensor| (job, tensor)));
    let weight_map: BTreeMap<&str, &str> =
        tensors().map(|(job, tensor)| (tensor.name.as_str(), job.path.as_str())).collect();
    let total_size = tensors().map(|(_, tensor)| tensor.bytes).fold(0, u64::saturating_add);
    let index_json = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    Ok(store.put(index, format!("{index_json:#}\n").as_bytes())?)
}

/// A tensor of a checkpoint as the bytes of a file that is being written.
struct Stored {
    source: Arc<Checkpoint>,
    leaf: usize,
    bytes: u64,
    item_bytes: u64,
}

impl Provider for Stored {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        let end = at + out.len() as u64;
        if !at.is_multiple_of(self.item_bytes) || !end.is_multiple_of(self.item_bytes) {
            return Err(Error::internal(format!("bytes {at}..{end} cut elements of {} bytes", self.item_bytes)));
        }
        let elements = at / self.item_bytes..end / self.item_bytes;
        self.source.load_runs(&[FlatRun { leaf: self.leaf, elements }], out)
    }
}
