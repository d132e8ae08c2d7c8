//! A checkpoint exists or it does not.
//!
//! # Protocol
//! 1. Every rank has made its data files durable, contents first, then names, and sends what it wrote where.
//! 2. Rank 0 checks that every element of every leaf was written exactly once.
//! 3. It writes the manifest (and a Hugging Face index where all tensors of a key are whole) under names of this
//!    attempt, durable.
//! 4. It publishes `COMMIT`, which holds the manifest's name, length and SHA-256, create-if-absent: of two attempts at
//!    one checkpoint the first wins and the second is told so. Only now does the checkpoint exist.
//! 5. The outcome goes to every rank. A rank that loses rank 0 before it hears looks for its attempt's `COMMIT` itself,
//!    and makes its name durable.
//!
//! A reader looks for `COMMIT` only. Data files and manifests carry the attempt in their names, so that what a crashed
//! or rival attempt left behind is never read and never overwritten.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use shardfast_format::index::HUGGING_FACE_INDEX;
use shardfast_format::{
    COMMIT, Commit, Dims, Extent, FORMAT_MAJOR, FORMAT_MINOR, FileEntry, LeafBody, LeafName, Manifest, ManifestBuilder,
    Region, SaveInfo, hugging_face_index, manifest_name, sha256,
};
use shardfast_plan::ObjectWrite;
use shardfast_store::Store;

use crate::agree::Operation;
use crate::error::{Error, Kind, Result};
use crate::planning::{Orders, PlannedAll, ValueOrders};
use crate::save::Destination;

/// Longer than any `COMMIT` of this format.
const COMMIT_BYTES_MAX: u64 = 4096;

/// What one rank wrote.
#[derive(Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) files: Vec<WrittenFile>,
    pub(crate) written: Vec<Written>,
}

/// A data file as its rank reports it.
#[derive(Serialize, Deserialize)]
pub(crate) struct WrittenFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    pub(crate) data_start: u64,
    pub(crate) header_crc: u64,
}

/// Where one part, or one value, lies.
#[derive(Serialize, Deserialize)]
pub(crate) struct Written {
    /// Index in the rank's catalog.
    pub(crate) leaf: u32,
    /// Index of the part; 0 for a value.
    pub(crate) part: u32,
    /// Index in the rank's files.
    pub(crate) file: u32,
    /// Absolute in the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// How a commit failed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether it is certain that nothing was published.
    pub(crate) nothing_published: bool,
}

/// Steps 1 to 5. `receipt` may be this rank's failure, which then fails the commit on all ranks.
pub(crate) fn agree(
    operation: &Operation,
    store: &dyn Store,
    destination: &Destination,
    orders: &Orders,
    values: &ValueOrders,
    receipt: Result<Receipt>,
) -> std::result::Result<(), Failed> {
    let world = operation.engine.world();
    let mut published = false;
    let answer = operation.try_agree("commit", receipt, |receipts| {
        let all = orders.all.as_ref().ok_or_else(|| Error::internal("only rank 0 can commit"))?;
        let manifest = assemble(all, &values.all, info(destination, &orders.attempt, world), &receipts)?;
        let manifest_bytes = manifest.encode();
        let commit = prepare(store, &manifest, &manifest_bytes, &orders.attempt)?;
        published = true;
        let outcome = store.publish(COMMIT, &commit.encode());
        if outcome.as_ref().is_err_and(|error| error.kind != shardfast_store::Kind::Unavailable) {
            withdraw(store, &commit);
        }
        outcome?;
        Ok(vec![(); world as usize])
    });
    match answer {
        Ok(()) => Ok(()),
        Err(failed) if operation.is_root() => {
            let nothing_published = !published || failed.error.kind != Kind::Unavailable;
            Err(Failed { error: failed.error, nothing_published })
        }
        Err(failed) if failed.decided => {
            // An unavailable store may have published before it failed.
            let nothing_published = failed.error.kind != Kind::Unavailable;
            Err(Failed { error: failed.error, nothing_published })
        }
        Err(failed) => match read_commit(store) {
            // Rank 0 may have gone before it could make the name durable.
            Ok(commit) if commit.attempt == orders.attempt && store.sync(&[COMMIT]).is_ok() => Ok(()),
            _ => Err(Failed { error: failed.error, nothing_published: false }),
        },
    }
}

/// That no checkpoint is committed there yet.
pub(crate) fn refuse_taken(store: &dyn Store, destination: &Destination) -> Result<()> {
    match store.open(COMMIT) {
        Err(error) if error.kind == shardfast_store::Kind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(Error::new(
            Kind::Conflict,
            format!(
                "{}: a checkpoint is committed there already, and checkpoints are never overwritten: save under \
                 another name, or delete it first",
                destination.url
            ),
        )),
    }
}

/// The commit record at the store's place.
///
/// # Errors
/// `NotFound` when nothing is committed there; `Corrupt`; `Unsupported` when a newer version wrote it.
pub(crate) fn read_commit(store: &dyn Store) -> Result<Commit> {
    let bytes = read(store, COMMIT, COMMIT_BYTES_MAX)?;
    Commit::decode(&bytes).map_err(|error| Error::from(error).within(format!("{}/{COMMIT}", store.url())))
}

/// A whole object, which is `Corrupt` if it is larger than it can be.
fn read(store: &dyn Store, name: &str, bytes_max: u64) -> Result<Vec<u8>> {
    let bytes = store.open(name)?.bytes();
    if bytes > bytes_max {
        let place = format!("{}/{name}", store.url());
        return Err(Error::corrupt(format!("{place}: expected at most {bytes_max} bytes, found {bytes}")));
    }
    Ok(store.read(name, bytes_max)?)
}

/// The proven bytes of the manifest that is committed at the store's place.
///
/// # Errors
/// As [`read_commit`]; `Corrupt` when the manifest is missing or not the one that was committed.
pub(crate) fn read_manifest(store: &dyn Store) -> Result<Vec<u8>> {
    let commit = read_commit(store)?;
    let place = || format!("{}/{}", store.url(), commit.manifest);
    let bytes = read(store, &commit.manifest, commit.manifest_bytes).map_err(|error| {
        let kind = if error.kind == Kind::NotFound { Kind::Corrupt } else { error.kind };
        Error::new(kind, format!("{}: the committed manifest cannot be read: {}", place(), error.message))
    })?;
    commit.prove(&bytes).map_err(|error| Error::from(error).within(place()))?;
    Ok(bytes)
}

fn info(destination: &Destination, attempt: &str, world: u32) -> SaveInfo {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    SaveInfo {
        attempt: attempt.to_owned(),
        step: destination.step,
        world,
        created_unix_ms: now.as_millis() as u64,
        writer: format!("shardfast {}", env!("CARGO_PKG_VERSION")),
        user: destination.user.clone(),
    }
}

/// Steps 1 and 2: the manifest of what all ranks wrote.
fn assemble(all: &PlannedAll, stored: &[ObjectWrite], info: SaveInfo, receipts: &[Receipt]) -> Result<Manifest> {
    let mut builder = ManifestBuilder::new(info);
    let mut regions: BTreeMap<&LeafName, Vec<(Region, Extent)>> = BTreeMap::new();
    let mut values: BTreeMap<(u32, u32), Extent> = BTreeMap::new();
    for (rank, receipt) in receipts.iter().enumerate() {
        let unknown = |what: &str| Error::internal(format!("rank {rank} reports {what} that it does not have"));
        let entry = |file: &WrittenFile| FileEntry {
            path: file.path.clone(),
            bytes: file.bytes,
            data_start: file.data_start,
            header_crc: file.header_crc,
        };
        let files: Vec<u32> = receipt.files.iter().map(|file| builder.file(entry(file))).collect();
        for written in &receipt.written {
            let leaf = all.catalogs[rank].leaves.get(written.leaf as usize).ok_or_else(|| unknown("a leaf"))?;
            let file = *files.get(written.file as usize).ok_or_else(|| unknown("a file"))?;
            let extent = Extent { file, offset: written.offset, bytes: written.bytes };
            match &leaf.body {
                LeafBody::Tensor { parts, .. } => {
                    let region = parts.get(written.part as usize).ok_or_else(|| unknown("a part"))?;
                    regions.entry(&leaf.name).or_default().push((region.clone(), extent));
                }
                LeafBody::Object { .. } => {
                    let merged = all.plan.merged[rank][written.leaf as usize];
                    values.insert((merged, rank as u32), extent);
                }
                LeafBody::Alias { .. } => return Err(unknown("an alias's bytes")),
            }
        }
    }
    for (merged, leaf) in all.plan.leaves.iter().enumerate() {
        match &leaf.body {
            LeafBody::Tensor { dtype, shape, .. } => {
                let mut regions = regions.remove(&leaf.name).unwrap_or_default();
                regions.sort_by(|a, b| a.0.cmp(&b.0));
                prove_coverage(&leaf.name, shape, &regions)?;
                builder.tensor(&leaf.name, *dtype, shape, &leaf.layout, &regions);
            }
            LeafBody::Object { .. } => {
                let mut extents = Vec::new();
                let first = stored.partition_point(|value| (value.leaf as usize) < merged);
                for value in stored[first..].iter().take_while(|value| value.leaf as usize == merged) {
                    let extent = values.remove(&(value.leaf, value.writer)).ok_or_else(|| {
                        Error::internal(format!("rank {} did not write its value of {}", value.writer, leaf.name))
                    })?;
                    extents.push((value.ranks.clone(), extent));
                }
                builder.object(&leaf.name, &leaf.layout, &extents);
            }
            LeafBody::Alias { of } => builder.alias(&leaf.name, of),
        }
    }
    Ok(builder.finish()?)
}

fn prove_coverage(name: &LeafName, shape: &Dims, regions: &[(Region, Extent)]) -> Result<()> {
    let boxes: Vec<Region> = regions.iter().map(|(region, _)| region.clone()).collect();
    shardfast_plan::tiles(shape, &boxes)
        .map_err(|flaw| Error::internal(format!("leaf {name}: what the ranks wrote is not all of it once: {flaw}")))
}

/// Step 3.
fn prepare(store: &dyn Store, manifest: &Manifest, bytes: &[u8], attempt: &str) -> Result<Commit> {
    put_indexes(store, manifest)?;
    let name = manifest_name(attempt);
    store.put(&name, bytes)?;
    Ok(Commit {
        major: FORMAT_MAJOR,
        minor: FORMAT_MINOR,
        attempt: attempt.to_owned(),
        manifest: name,
        manifest_bytes: bytes.len() as u64,
        manifest_sha256: sha256(bytes),
    })
}

/// Puts the index of every key that has one. Removes what another attempt left where there is none, for an index's name
/// is not of one attempt alone.
fn put_indexes(store: &dyn Store, manifest: &Manifest) -> Result<()> {
    let mut keys: Vec<&str> = (0..manifest.len()).map(|leaf| manifest.leaf(leaf).key).collect();
    keys.dedup();
    for key in keys {
        let name = format!("{key}/{HUGGING_FACE_INDEX}");
        match hugging_face_index(manifest, key) {
            Some(index) => store.put(&name, &index)?,
            None if store.open(&name).is_ok() => store.delete(&name)?,
            None => {}
        }
    }
    Ok(())
}

/// Undoes step 3 of an attempt that was not published. A rival's checkpoint, if that is why, gets its indexes back.
fn withdraw(store: &dyn Store, commit: &Commit) {
    // What cannot be undone now is an orphan like that of a crash.
    let _ = store.delete(&commit.manifest);
    let _ = read_manifest(store).and_then(|bytes| put_indexes(store, &Manifest::decode(&bytes)?));
}
