//! Recognizes other programs' checkpoints by names and first bytes, for the error when one is opened as ours.

use shardfast_format::{COMMIT, is_own_path, parse_step_dir};
use shardfast_store::{Entry, split};
use shardfast_transfer::error::{Error, Kind, Result};

/// Names that a message lists.
const NAMES_MAX: usize = 4;

/// First bytes by which a file is recognized.
const HEAD_BYTES: u64 = 16;

/// The longest header of a safetensors file, in bytes.
const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;

const SAVED_BY_TORCH: &str = "that `torch.save` wrote: load it with `torch.load` and give its parts to \
                              `load_state_dict`; `sf.save` then saves them as a checkpoint";
const SAFETENSORS: &str = "of plain safetensors: load it with `safetensors.torch.load_file` and give the result to \
                           `load_state_dict`; `sf.save` then saves it as a checkpoint";
const DCP: &str = "`torch.distributed.checkpoint.load` loads it, and `sf.save` then saves the state as a checkpoint of \
                   Shardfast";

/// Describes a directory without a `COMMIT`, with what to do about it.
pub(crate) fn directory(entries: &[Entry]) -> String {
    let files = || files(entries);
    let ending = |endings: &[&str]| files().filter(|name| endings.iter().any(|end| name.ends_with(end))).count();
    if let Some(what) = sharded(entries) {
        return what;
    }
    if entries.iter().any(|entry| entry.is_dir && parse_step_dir(&entry.name).is_some()) {
        return "it is a run: name one of its steps (`shardfast ls` lists them)".to_owned();
    }
    if files().any(|name| is_own_path(&format!("key/{name}")) && name.contains('-')) {
        return "it is one key's directory of a checkpoint: name the directory above it".to_owned();
    }
    if ending(&[".safetensors"]) > 0 {
        return format!("it holds {}: files {SAFETENSORS}", names(entries));
    }
    if ending(&[".pt", ".pth", ".bin", ".ckpt"]) > 0 {
        return format!("it holds {}: files {SAVED_BY_TORCH}", names(entries));
    }
    if entries.iter().any(|entry| entry.is_dir || is_own_path(&entry.name)) {
        return format!(
            "a save was begun there and not finished, or something else is there: it holds {} and no {COMMIT}",
            names(entries)
        );
    }
    if entries.is_empty() {
        return format!("it is empty: it has no {COMMIT}");
    }
    format!("it holds {} and no {COMMIT}", names(entries))
}

/// Refuses a run without steps where another program's checkpoint is: a restore would silently begin anew.
///
/// # Errors
/// `Invalid`, with a description of what is there.
pub(crate) fn refuse_as_run(url: &str, entries: &[Entry]) -> Result<()> {
    match sharded(entries) {
        Some(what) => Err(Error::invalid(format!("{url}: expected a run, a directory of checkpoints: {what}"))),
        None => Ok(()),
    }
}

fn sharded(entries: &[Entry]) -> Option<String> {
    let distcp = files(entries).filter(|name| name.ends_with(".distcp")).count();
    let is_sharded = distcp > 0 || files(entries).any(|name| name == ".metadata");
    is_sharded.then(|| {
        format!("it is a directory of torch.distributed.checkpoint (`.metadata`, {distcp} `.distcp` files): {DCP}")
    })
}

fn files(entries: &[Entry]) -> impl Iterator<Item = &str> {
    entries.iter().filter(|entry| !entry.is_dir).map(|entry| entry.name.as_str())
}

/// Adds a description of the file to the error of opening a place that is a file.
pub(crate) fn explained(url: &str, error: Error) -> Error {
    if error.kind != Kind::Invalid {
        return error;
    }
    let Some((dir, name)) = split(url) else { return error };
    let Some(head) =
        shardfast_store::open(&dir).ok().and_then(|store| Some(store.open_head(&name, HEAD_BYTES).ok()?.1))
    else {
        return error;
    };
    let what = match (name.as_str(), split(&dir)) {
        (name, _) if name == COMMIT || is_own_path(name) => {
            format!("a file of a checkpoint: name its directory, {dir}")
        }
        (name, Some((checkpoint, _))) if is_own_path(&format!("key/{name}")) && name.contains('-') => {
            format!("a data file of a checkpoint: name the checkpoint's directory, {checkpoint}")
        }
        _ => format!("a file {}", file(&name, &head)),
    };
    Error::new(error.kind, format!("{url}: expected a directory that holds a checkpoint, found {what}"))
}

/// Describes a file, by its first bytes and its name, with what to do about it.
fn file(name: &str, head: &[u8]) -> String {
    let ends = |endings: &[&str]| endings.iter().any(|end| name.to_ascii_lowercase().ends_with(end));
    let length = head.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
    let is_safetensors = length.is_some_and(|length| length <= SAFETENSORS_HEADER_MAX) && head.get(8) == Some(&b'{');
    let is_pickle = matches!(head, [0x80, 2..=5, ..]);
    if is_safetensors || ends(&[".safetensors"]) {
        SAFETENSORS.to_owned()
    } else if ends(&[".npz", ".npy"]) || head.starts_with(b"\x93NUMPY") {
        "that NumPy wrote: `numpy.load` reads it".to_owned()
    } else if head.starts_with(b"PK\x03\x04") || is_pickle || ends(&[".pt", ".pth", ".bin", ".ckpt"]) {
        SAVED_BY_TORCH.to_owned()
    } else {
        "of an unknown format".to_owned()
    }
}

fn names(entries: &[Entry]) -> String {
    let named = entries.iter().take(NAMES_MAX).map(|entry| entry.name.as_str()).collect::<Vec<_>>().join(", ");
    match entries.len().saturating_sub(NAMES_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
