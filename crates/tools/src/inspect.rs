//! Summarizes checkpoints and runs, without their tensors' data.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use shardfast_engine::Checkpoint;
use shardfast_engine::commit;
use shardfast_engine::files_exist::is_there;
use shardfast_engine::locate::{self, Place};
use shardfast_engine::pins;
use shardfast_engine::reads::ValueRef;
use shardfast_engine::runs;
use shardfast_engine::stream::{batches, tensor_bytes};
use shardfast_format::object::decode;
use shardfast_format::{COMMIT, Extent, LEAVING, LeafKind, Manifest, SaveInfo, parse_step_dir, step_dir};
use shardfast_store::{Shared, join, keeper};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::timeout::Timeout;

use crate::drain::memory_place;
use crate::repr;

/// Largest value, in bytes, that is decoded and shown.
const VALUE_BYTES_MAX: u64 = 1 << 20;

/// Time within which a keeper, and those of the job's other machines, answer.
const KEEPER_WITHIN: Duration = Duration::from_secs(5);

/// Bytes of encoded values that are read at a time.
const BATCH_BYTES: u64 = 4 << 20;

/// Characters of a value's text.
const VALUE_CHARS_MAX: usize = 200;

/// Checkpoints at a URL: a run with its steps, or one checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct History {
    /// URL that was inspected.
    pub url: String,
    /// `true` for a run.
    pub is_run: bool,
    /// Steps of the run, ascending; or the one checkpoint.
    pub checkpoints: Vec<Outline>,
    /// URLs of runs of steps that were moved out of its way.
    pub abandoned: Vec<String>,
    /// Checkpoints of the run in the memory of this machine's keeper, if one runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<InMemory>,
}

/// Checkpoints of a run that a keeper has.
#[derive(Debug, Clone, Serialize)]
pub struct InMemory {
    /// Place of the run in the keeper's memory.
    pub url: String,
    /// Committed steps, ascending.
    pub steps: Vec<u64>,
    /// Reason why they are not known: another machine of the job does not answer.
    pub error: Option<String>,
}

/// A checkpoint in a list.
#[derive(Debug, Clone, Serialize)]
pub struct Outline {
    /// URL of the checkpoint.
    pub url: String,
    /// Training step, from its directory's name or from its notes.
    pub step: Option<u64>,
    /// State of the checkpoint: whether it exists, and can be read.
    pub status: Status,
    /// Reason why it cannot be read.
    pub error: Option<String>,
    /// Note of its pin; `None` if it is not pinned.
    pub pinned: Option<String>,
    /// Contents; only of a committed one.
    pub holds: Option<Holdings>,
}

/// State of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Committed, with a proven manifest.
    Committed,
    /// Without a commit: its save was interrupted or is still running.
    Incomplete,
    /// Released by retention: its commit was taken back, and its files will be deleted.
    Leaving,
    /// Committed, but its commit or its manifest cannot be read.
    Unreadable,
}

/// Origin and size of a checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct Holdings {
    /// Attempt that saved it.
    pub attempt: String,
    /// Time of the request to save, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    /// Number of ranks that saved.
    pub world: u32,
    /// Program that wrote it.
    pub writer: String,
    /// Number of leaves.
    pub leaves: u64,
    /// Number of data files.
    pub files: u64,
    /// Size of the data files and the manifest, in bytes.
    pub bytes: u64,
}

impl Holdings {
    fn new(manifest: &Manifest, manifest_bytes: u64) -> Holdings {
        let SaveInfo { attempt, created_unix_ms, world, writer, .. } = &manifest.info;
        Holdings {
            attempt: attempt.clone(),
            created_unix_ms: *created_unix_ms,
            world: *world,
            writer: writer.clone(),
            leaves: manifest.len() as u64,
            files: manifest.files().len() as u64,
            bytes: manifest
                .files()
                .iter()
                .map(|file| file.bytes)
                .fold(0, u64::saturating_add)
                .saturating_add(manifest_bytes),
        }
    }
}

/// Lists every step of the run at `url`, or the one checkpoint there. Reads commits and manifests.
///
/// # Errors
/// `NotFound` when neither is there; the store's errors. A checkpoint that cannot be read has its error in its line.
pub fn history(url: &str, timeout: &Timeout) -> Result<History> {
    let shared = Arc::default();
    let of_run = |checkpoints, abandoned| {
        let memory = in_memory(url);
        History { url: url.to_owned(), is_run: true, checkpoints, abandoned, memory }
    };
    let found = match locate::look(url, timeout) {
        // All of the run may be in memory.
        Err(error) if error.kind == Kind::NotFound => match in_memory(url) {
            Some(memory) if !memory.steps.is_empty() => return Ok(of_run(Vec::new(), Vec::new())),
            _ => return Err(error),
        },
        found => found?,
    };
    Ok(match found {
        Place::Checkpoint => {
            let checkpoints = vec![outline(url, None, &shared, timeout)?];
            let (url, abandoned) = (url.to_owned(), Vec::new());
            History { url, is_run: false, checkpoints, abandoned, memory: None }
        }
        Place::Run(steps, abandoned) => of_run(
            steps
                .into_iter()
                .map(|step| outline(&step.url, Some(step.step), &shared, timeout))
                .collect::<Result<_>>()?,
            abandoned.iter().map(|dir| join(url, dir)).collect(),
        ),
    })
}

/// Returns what the keeper of the run on this machine has; `None` without one.
fn in_memory(url: &str) -> Option<InMemory> {
    let (name, place) = memory_place(url);
    keeper::status(&name).ok()?;
    let timeout = Timeout::from(KEEPER_WITHIN);
    let listed = runs::store(&place, &timeout).and_then(|store| runs::list_in(&*store, &place, &timeout));
    let committed = |steps: Vec<runs::Step>| {
        let mut steps: Vec<u64> = steps.iter().filter(|step| step.is_committed()).map(|step| step.step).collect();
        steps.sort_unstable();
        steps
    };
    Some(match listed {
        Ok((steps, _)) => InMemory { url: place, steps: committed(steps), error: None },
        Err(error) => InMemory { url: place, steps: Vec::new(), error: Some(error.message) },
    })
}

/// A committed checkpoint in memory.
#[derive(Debug, Clone, Serialize)]
pub struct Held {
    /// Training step of the checkpoint.
    pub step: u64,
    /// Machines that may be lost without it, whichever they are; `None` while a machine does not answer.
    pub survives: Option<u32>,
}

/// Returns the checkpoints that the keeper of the run with that status has. Does not count as a use of it.
pub fn held_in_memory(url: &str, status: &keeper::wire::Status) -> Vec<Held> {
    let (name, _) = memory_place(url);
    let survives = |step: u64| match keeper::uncopied(&name, &format!("{}/", step_dir(step))) {
        Ok(0) => Some(status.copies),
        Ok(_) => Some(0),
        Err(_) => None,
    };
    let step_of = |name: &String| parse_step_dir(name.strip_suffix(COMMIT)?.strip_suffix('/')?);
    let steps = status.published.iter().filter_map(step_of);
    steps.map(|step| Held { step, survives: survives(step) }).collect()
}

fn outline(url: &str, step: Option<u64>, shared: &Arc<Shared>, timeout: &Timeout) -> Result<Outline> {
    let line = |status, error: Option<Error>| Outline {
        url: url.to_owned(),
        step,
        status,
        error: error.map(|error| error.message),
        pinned: None,
        holds: None,
    };
    Ok(match look(url, shared, timeout) {
        Ok(Found::Committed { manifest, bytes, pinned }) => Outline {
            step: step.or(manifest.info.step),
            pinned,
            holds: Some(Holdings::new(&manifest, bytes)),
            ..line(Status::Committed, None)
        },
        Ok(Found::Without(status)) => line(status, None),
        Err(error) if timeout.is_over() => return Err(error),
        Err(error) => line(Status::Unreadable, Some(error)),
    })
}

enum Found {
    Committed {
        manifest: Box<Manifest>,
        bytes: u64,
        pinned: Option<String>,
    },
    /// No commit was found.
    Without(Status),
}

fn look(url: &str, shared: &Arc<Shared>, timeout: &Timeout) -> Result<Found> {
    let store = runs::store_on(url, shared, timeout)?;
    match retry(timeout, || commit::read_manifest(&*store, "")) {
        Ok(bytes) => {
            let manifest = Box::new(Manifest::decode(&bytes)?);
            Ok(Found::Committed { manifest, bytes: bytes.len() as u64, pinned: pins::note(&*store, timeout)? })
        }
        Err(error) if error.kind == Kind::NotFound => match is_there(&*store, LEAVING, timeout)? {
            true => Ok(Found::Without(Status::Leaving)),
            false => Ok(Found::Without(Status::Incomplete)),
        },
        Err(error) => Err(error),
    }
}

/// Contents of a checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// URL of the checkpoint.
    pub url: String,
    /// Training step in the manifest.
    pub step: Option<u64>,
    /// Origin and size of the checkpoint.
    pub holds: Holdings,
    /// Notes of the user.
    pub user: BTreeMap<String, String>,
    /// Keys of the state, sorted.
    pub keys: Vec<KeySummary>,
    /// Leaves that were asked for, by key and name.
    pub leaves: Vec<LeafSummary>,
}

/// Contents of one key of the state.
#[derive(Debug, Clone, Serialize)]
pub struct KeySummary {
    /// Key of the state.
    pub key: String,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Number of objects.
    pub objects: u64,
    /// Number of leaves that are the same tensor as another.
    pub aliases: u64,
}

/// Summary of one leaf.
#[derive(Debug, Clone, Serialize)]
pub struct LeafSummary {
    /// Key and name: `model/layers.0.weight`.
    pub leaf: String,
    /// Layout in the saving job, as text; may be empty.
    pub layout: String,
    /// Kind of the leaf.
    #[serde(flatten)]
    pub kind: KindSummary,
}

/// Kind of a leaf.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KindSummary {
    /// A tensor of the checkpoint.
    Tensor {
        /// Element type, as safetensors calls it.
        dtype: &'static str,
        /// Global shape, in elements.
        shape: Vec<u64>,
        /// Size in bytes.
        bytes: u64,
        /// Number of regions it is stored in.
        regions: u64,
        /// Number of files they lie in.
        files: u64,
    },
    /// An encoded value, or one per group of ranks.
    Object {
        /// Size of all its values in bytes.
        bytes: u64,
        /// Values of the object.
        values: Vec<ValueSummary>,
    },
    /// The same tensor as another leaf.
    Alias {
        /// Leaf that holds the data.
        of: String,
    },
}

/// One value of an object.
#[derive(Debug, Clone, Serialize)]
pub struct ValueSummary {
    /// Ranks that saved it.
    pub ranks: Vec<Range<u32>>,
    /// Size of its encoding in bytes.
    pub bytes: u64,
    /// Value as short text; only when asked for, readable and not too large.
    pub text: Option<String>,
    /// Reason why it cannot be shown.
    pub error: Option<String>,
}

/// Summarizes the checkpoint. `leaf` selects leaves by a pattern over `key/name` (`*` stands for any text, `?` for one
/// character); totals are over all leaves. With `values`, objects are read and shown. Runs on this rank alone.
///
/// # Errors
/// The store's errors. A damaged value has its error in its line.
pub fn summary(checkpoint: &Checkpoint, leaf: Option<&str>, values: bool) -> Result<Summary> {
    let manifest = checkpoint.manifest();
    let chosen: Vec<usize> =
        (0..manifest.len()).filter(|&i| leaf.is_none_or(|pattern| matches(pattern, &full_name(manifest, i)))).collect();
    let mut leaves: Vec<LeafSummary> = chosen.iter().map(|&i| leaf_summary(manifest, i)).collect();
    if values {
        show_values(checkpoint, &chosen, &mut leaves)?;
    }
    Ok(Summary {
        url: checkpoint.url().to_owned(),
        step: manifest.info.step,
        holds: Holdings::new(manifest, checkpoint.manifest_bytes()),
        user: manifest.info.user.clone(),
        keys: keys(manifest),
        leaves,
    })
}

/// Returns `key/name` of leaf `i`.
pub(crate) fn full_name(manifest: &Manifest, i: usize) -> String {
    let leaf = manifest.leaf(i);
    format!("{}/{}", leaf.key, leaf.name)
}

fn keys(manifest: &Manifest) -> Vec<KeySummary> {
    let mut keys: Vec<KeySummary> = Vec::new();
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        if keys.last().is_none_or(|last| last.key != leaf.key) {
            let key = leaf.key.to_owned();
            keys.push(KeySummary { key, tensors: 0, tensor_bytes: 0, objects: 0, aliases: 0 });
        }
        let Some(key) = keys.last_mut() else { continue };
        match leaf.kind {
            LeafKind::Tensor { dtype, shape } => {
                key.tensors += 1;
                key.tensor_bytes = key.tensor_bytes.saturating_add(tensor_bytes(dtype, shape));
            }
            LeafKind::Object => key.objects += 1,
            LeafKind::Alias { .. } => key.aliases += 1,
        }
    }
    keys
}

fn leaf_summary(manifest: &Manifest, i: usize) -> LeafSummary {
    let leaf = manifest.leaf(i);
    let kind = match leaf.kind {
        LeafKind::Tensor { dtype, shape } => KindSummary::Tensor {
            dtype: dtype.name(),
            shape: shape.to_vec(),
            bytes: tensor_bytes(dtype, shape),
            regions: manifest.regions(i).len() as u64,
            files: manifest.regions(i).map(|(_, extent)| extent.file).collect::<HashSet<_>>().len() as u64,
        },
        LeafKind::Object => {
            let line = |(ranks, extent): (Vec<Range<u32>>, Extent)| ValueSummary {
                ranks,
                bytes: extent.bytes,
                text: None,
                error: None,
            };
            let values: Vec<ValueSummary> = manifest.values(i).map(line).collect();
            KindSummary::Object { bytes: values.iter().map(|value| value.bytes).fold(0, u64::saturating_add), values }
        }
        LeafKind::Alias { of } => KindSummary::Alias { of: full_name(manifest, of) },
    };
    LeafSummary { leaf: full_name(manifest, i), layout: leaf.layout.to_owned(), kind }
}

/// Reads the values of the chosen leaves and writes them into their summaries.
fn show_values(checkpoint: &Checkpoint, chosen: &[usize], leaves: &mut [LeafSummary]) -> Result<()> {
    let mut wanted: Vec<(ValueRef, &mut ValueSummary)> = Vec::new();
    for (&leaf, summary) in chosen.iter().zip(leaves) {
        let KindSummary::Object { values, .. } = &mut summary.kind else { continue };
        for (value, line) in values.iter_mut().enumerate().filter(|(_, line)| line.bytes <= VALUE_BYTES_MAX) {
            wanted.push((ValueRef { leaf, value }, line));
        }
    }
    for batch in batches(wanted.iter().map(|(_, line)| line.bytes), BATCH_BYTES) {
        let refs: Vec<ValueRef> = wanted[batch.clone()].iter().map(|(value, _)| *value).collect();
        for ((_, line), encoded) in wanted[batch].iter_mut().zip(load_each(checkpoint, &refs)) {
            match encoded.and_then(|encoded| Ok(decode(&encoded)?)) {
                Ok(value) => line.text = Some(repr::short(&value, VALUE_CHARS_MAX)),
                Err(error) if checkpoint.files.timeout.is_over() || !tells_of_bytes(&error) => return Err(error),
                Err(error) => line.error = Some(error.message),
            }
        }
    }
    Ok(())
}

/// Returns each value, or its error. Reads all at once, and one by one only after a failure.
pub(crate) fn load_each(checkpoint: &Checkpoint, values: &[ValueRef]) -> Vec<Result<Vec<u8>>> {
    match checkpoint.load_alone(&[], values) {
        Ok(encoded) => encoded.into_iter().map(Ok).collect(),
        Err(error) if values.len() == 1 => vec![Err(error)],
        Err(_) => values.iter().flat_map(|value| load_each(checkpoint, &[*value])).collect(),
    }
}

/// Returns whether a failed read says something of the bytes: that they are damaged, missing, of a form that this
/// version does not read, or that a disk which answers cannot give them. Other errors are those of the reader.
pub(crate) fn tells_of_bytes(error: &Error) -> bool {
    match error.kind {
        Kind::Corrupt | Kind::NotFound | Kind::Unsupported => true,
        // A service that is away for a while says nothing of the bytes.
        Kind::Unavailable => error.wait.is_none(),
        _ => false,
    }
}

/// Returns whether `pattern` matches `text`: `*` stands for any text, `?` for one character.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Where to continue after a mismatch: after the last star, which takes one more character.
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                retry = Some((p + 1, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match retry {
                Some((after_star, given)) => {
                    retry = Some((after_star, given + 1));
                    (p, t) = (after_star, given + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_describe_names() {
        let name = "model/layers.10.weight";
        for pattern in ["model/*", "*", "*weight", "model/layers.??.weight", "*/layers.*.w*t", name, "**10**"] {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in ["model", "", "*bias", "model/layers.?.weight", "weight*", "?"] {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(matches("", "") && matches("*", "") && !matches("?", ""));
        assert!(matches("*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaab"));
    }
}
