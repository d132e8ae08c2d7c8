//! The commit, which makes a checkpoint exist.
//!
//! # Protocol
//! 1. Every rank has made its data files durable, contents first, then names; checks that they still exist with their
//!    sizes, where lists of the storage may be old; and sends a receipt of what it wrote where.
//! 2. Rank 0 checks that every element of every leaf was written exactly once.
//! 3. It writes the manifest (and a Hugging Face index where all tensors of a key are whole) under names of this
//!    attempt, durable, and checks that they and all ranks' data files exist.
//! 4. If no newer [job](crate::jobs) saves into the run, it publishes `COMMIT`, which holds the manifest's name, length
//!    and SHA-256, create-if-absent: of two attempts at one checkpoint the first wins and the second gets `Conflict`.
//!    Only now does the checkpoint exist. If files vanished while it was published, rank 0 removes it.
//! 5. The outcome goes to every rank, and with it Shardfast's own notes of the checkpoint. A rank that loses rank 0
//!    before the outcome arrives looks for its attempt's `COMMIT` itself, and makes its name durable.
//!
//! A reader looks for `COMMIT` only. Data files and manifests carry the attempt in their names, so that files of a
//! crashed or rival attempt are never read and never overwritten.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shardfast_format::name::HUGGING_FACE_INDEX;
use shardfast_format::{
    COMMIT, Commit, FORMAT_MAJOR, FORMAT_MINOR, FileEntry, Manifest, SaveInfo, hugging_face_index, manifest_name,
    sha256,
};
use shardfast_store::{Service, Store, join, said_bytes};
use shardfast_transfer::error::{Error, Kind, Patience, Result, retry};
use shardfast_transfer::progress::{Notes, Progress};
use shardfast_transfer::timeout::Timeout;

use crate::assemble::assemble;
use crate::concurrently;
use crate::contents;
use crate::files_exist;
use crate::jobs;
use crate::operation::Operation;
use crate::planning::ValuePlan;
use crate::receipt::Receipt;
use crate::state::Destination;

/// Longer than any `COMMIT` of this format.
pub(crate) const COMMIT_BYTES_MAX: u64 = 4096;

/// Time for which a publish is tried; it counts as a part of the save's duration.
const PUBLISH_MAX: Duration = Duration::from_secs(1800);

/// The note of a manifest that tells how much of the checkpoint was captured ahead of the save and replayed.
const REPLAYED: &str = "shardfast.replayed";

/// Failure of a commit.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// `true` if it is certain that nothing was published.
    pub(crate) nothing_published: bool,
}

/// Steps 1 to 5; returns Shardfast's own notes of the checkpoint. `receipt` may be this rank's failure, which then
/// fails the commit on all ranks.
pub(crate) fn commit(
    operation: &Operation,
    store: &dyn Store,
    destination: &Destination,
    values: &ValuePlan,
    receipt: Result<Receipt>,
    progress: &Progress,
) -> std::result::Result<Notes, Failed> {
    let patience = Patience::of(progress, operation.deadline());
    let world = operation.engine.world();
    let mut published = false;
    let attempt = operation.attempt();
    let answer = operation.try_agree("commit", receipt, |receipts| {
        let Some(compared) = &values.all else {
            return Err(Error::internal("only rank 0 can commit"));
        };
        let mut info = info(destination, &attempt, world);
        info.user.extend(replayed(&receipts).map(|note| (REPLAYED.to_owned(), note)));
        info.user.extend(progress.late_notes());
        let own_notes = own_notes(&info);
        let manifest = assemble(&compared.values, info, &receipts)?;
        let manifest_bytes = manifest.encode();
        let commit = record(&manifest_bytes, &attempt);
        let prepare = || prepare(store, destination, &commit, &manifest, &manifest_bytes);
        let files = files_and_manifest(&manifest, &commit);
        let prepared = retry(patience, prepare).and_then(|()| still_there(store, &files, patience));
        let prepared = prepared.and_then(|()| expect_newest_job(operation, destination, patience, progress, false));
        let prepared = prepared.and_then(|()| operation.expect_young(PUBLISH_MAX));
        published = prepared.is_ok();
        let outcome = prepared.and_then(|()| publish(store, &commit, patience.at_most(PUBLISH_MAX)));
        let outcome = outcome.and_then(|()| take_back_if_hollow(store, &files, patience));
        let outcome = outcome.and_then(|()| {
            let overtaken = expect_newest_job(operation, destination, patience, progress, true);
            overtaken.map_err(|error| match retry(patience, || Ok(store.delete(COMMIT)?)) {
                Ok(()) => error,
                // The checkpoint stays, and with it all its files.
                Err(kept) => {
                    let message = format!("{}; its COMMIT cannot be removed: {kept}", error.message);
                    Error::new(Kind::Unavailable, message)
                }
            })
        });
        if outcome.as_ref().is_err_and(|error| !published || error.kind != Kind::Unavailable) {
            withdraw(store, &commit);
        }
        outcome.map_err(|error| of_newer_job(operation, destination, patience, progress, error))?;
        // A rival attempt may have put its own indexes in between, and died before it could remove them. A failure here
        // is ignored: the checkpoint is committed.
        let _ = mend_indexes(store, &manifest);
        Ok(vec![own_notes; world as usize])
    });
    match answer {
        Ok(notes) => Ok(notes),
        Err(failed) if operation.is_root() => {
            let nothing_published = !published || failed.error.kind != Kind::Unavailable;
            Err(Failed { error: failed.error, nothing_published })
        }
        Err(failed) if failed.decided => {
            // An unavailable store may have published before it failed.
            let nothing_published = failed.error.kind != Kind::Unavailable;
            Err(Failed { error: failed.error, nothing_published })
        }
        Err(failed) => match retry(patience, || read_commit(store, "")) {
            // Rank 0 may have died before it could make the name durable.
            Ok(commit) if commit.attempt == attempt && store.sync(&[COMMIT]).is_ok() => {
                let manifest = retry(patience, || Ok(Manifest::decode(&manifest_of(store, "", &commit)?)?));
                Ok(manifest.map_or_else(|_| Notes::new(), |manifest| own_notes(&manifest.info)))
            }
            _ => Err(Failed { error: failed.error, nothing_published: false }),
        },
    }
}

/// Checks that no newer job saves into the run of this checkpoint, if this job has begun to save there; once it is
/// published, that no newer job goes on from an earlier one.
fn expect_newest_job(
    operation: &Operation,
    destination: &Destination,
    patience: Patience<'_>,
    progress: &Progress,
    is_published: bool,
) -> Result<()> {
    let engine = &operation.engine;
    let run = shardfast_store::split(&destination.url).map(|(run, _)| run).unwrap_or_default();
    let Some(job) = engine.jobs.find(&run) else { return Ok(()) };
    let store = engine.observed_store(&run, &operation.deadline().into(), &progress.shared.observed);
    let store = store.as_deref().map_err(Error::clone);
    job.may_commit(store, &run, (destination.step, is_published), patience)
}

/// Returns the error of a save that found its files gone or changed: that of a newer job in the run, whose rules may
/// have taken them, if there is one.
pub(crate) fn of_newer_job(
    operation: &Operation,
    destination: &Destination,
    patience: Patience<'_>,
    progress: &Progress,
    error: Error,
) -> Error {
    if !matches!(error.kind, Kind::Corrupt | Kind::NotFound) {
        return error;
    }
    let engine = &operation.engine;
    let run = shardfast_store::split(&destination.url).map(|(run, _)| run).unwrap_or_default();
    let Ok(store) = engine.observed_store(&run, &operation.deadline().into(), &progress.shared.observed) else {
        return error;
    };
    // Rank 0 knows its job; the others know what it is called.
    let job = engine.jobs.find(&run).or_else(|| jobs::named(&*store, &engine.meeting(), patience).ok()?);
    match job.map(|job| job.may_commit(Ok(&*store), &run, (destination.step, false), patience)) {
        Some(Err(newer)) if newer.kind == Kind::Conflict => newer,
        _ => error,
    }
}

/// Returns the notes that Shardfast itself made, by the prefix of their names.
fn own_notes(info: &SaveInfo) -> Notes {
    let own = info.user.iter().filter(|(name, _)| name.starts_with("shardfast."));
    own.map(|(name, text)| (name.clone(), text.clone())).collect()
}

/// Checks that files which this save wrote still exist with these sizes.
///
/// # Errors
/// As [`files_exist::expect`].
pub(crate) fn still_there(store: &dyn Store, files: &[(String, u64)], within: Patience<'_>) -> Result<()> {
    files_exist::expect(store, files, within).map_err(|error| match error.kind {
        Kind::Corrupt => Error::corrupt(format!(
            "{}. The save wrote these files: either another program removed or changed them before the commit (none \
             may delete a directory without COMMIT while a job is saving), or the ranks do not share this storage",
            error.message
        )),
        _ => error,
    })
}

/// Returns the data files of a manifest, with their sizes.
pub(crate) fn files(manifest: &Manifest) -> impl Iterator<Item = (String, u64)> {
    manifest.files().iter().map(|file| (file.path.clone(), file.bytes))
}

/// Returns the data files of a manifest and the manifest itself, each with its size in bytes.
pub fn files_and_manifest(manifest: &Manifest, commit: &Commit) -> Vec<(String, u64)> {
    files(manifest).chain([(commit.manifest.clone(), commit.manifest_bytes)]).collect()
}

/// Checks the files again after `COMMIT` was published: another program may have removed them meanwhile.
fn take_back_if_hollow(store: &dyn Store, files: &[(String, u64)], within: Patience<'_>) -> Result<()> {
    match still_there(store, files, within) {
        Err(error) if error.kind == Kind::Corrupt => match store.delete(COMMIT) {
            Ok(()) => Err(error),
            Err(kept) => Err(Error::corrupt(format!("{}; its COMMIT cannot be removed: {kept}", error.message))),
        },
        // If the store cannot be asked now, the commit stays: all files were there before.
        _ => Ok(()),
    }
}

/// Checks that a new checkpoint may go there: none is committed there yet, it holds no foreign files, and the storage
/// has no quota below `bytes_min`, which the checkpoint needs at least.
pub(crate) fn admit(store: &dyn Store, destination: &Destination, bytes_min: u64) -> Result<()> {
    refuse_taken(store, destination)?;
    // The caller tries it again.
    contents::refuse_foreign(store, &destination.url, 1, Duration::ZERO)?;
    match store.service().and_then(Service::quota) {
        Some(quota) if quota.left_bytes < bytes_min => {
            let [needed, left, all] = [bytes_min, quota.left_bytes, quota.bytes].map(|bytes| said_bytes(bytes as f64));
            let message = format!(
                "save {}: expected room for {needed} below the quota of {}, found {left} of {all} left: raise the \
                 quota or keep fewer checkpoints",
                destination.url, quota.of
            );
            Err(Error::new(Kind::Exhausted, message))
        }
        _ => Ok(()),
    }
}

/// Checks that no checkpoint is committed there yet.
fn refuse_taken(store: &dyn Store, destination: &Destination) -> Result<()> {
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

/// Reads the commit record of the checkpoint in the directory `dir` of the store, `""` being its own place.
///
/// # Errors
/// `NotFound` when nothing is committed there; `Corrupt`; `Unsupported` when a newer version wrote it.
pub fn read_commit(store: &dyn Store, dir: &str) -> Result<Commit> {
    read_record(store, &below(dir, COMMIT))
}

/// Reads the commit record in the object `name`.
///
/// # Errors
/// As [`read_commit`].
pub(crate) fn read_record(store: &dyn Store, name: &str) -> Result<Commit> {
    twice(store, name, || {
        let bytes = read(store, name, COMMIT_BYTES_MAX)?;
        Commit::decode(&bytes).map_err(|error| Error::from(error).within(join(store.url(), name)))
    })
}

/// Returns the name of an object of the checkpoint in the directory `dir`.
fn below(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

/// Reads a whole object, which is `Corrupt` if it is larger than it can be.
fn read(store: &dyn Store, name: &str, bytes_max: u64) -> Result<Vec<u8>> {
    store.read(name, bytes_max).map_err(|error| match error.kind {
        // A permission that is missing is invalid, too, and says nothing of the bytes.
        shardfast_store::Kind::Invalid if store.size(name).is_ok_and(|bytes| bytes > bytes_max) => {
            Error::corrupt(error.to_string())
        }
        _ => error.into(),
    })
}

/// Returns the verified bytes of the manifest that is committed in the directory `dir` of the store.
///
/// # Errors
/// As [`read_commit`]; `Corrupt` when the manifest is missing or not the one that was committed.
pub fn read_manifest(store: &dyn Store, dir: &str) -> Result<Vec<u8>> {
    manifest_of(store, dir, &read_commit(store, dir)?)
}

/// Returns the verified bytes of the manifest that this commit record of the checkpoint in the directory `dir` names.
///
/// # Errors
/// `Corrupt` when the manifest is missing or not the one that was committed; `NotFound` if the checkpoint has left.
pub fn manifest_of(store: &dyn Store, dir: &str, commit: &Commit) -> Result<Vec<u8>> {
    let name = below(dir, &commit.manifest);
    let place = || join(store.url(), &name);
    twice(store, &name, || {
        let bytes = read(store, &name, commit.manifest_bytes).map_err(|error| {
            let kind = match error.kind {
                Kind::NotFound => match has_left(store, dir) {
                    Ok(true) => return Error::new(Kind::NotFound, LEFT).within(place()),
                    Ok(false) => Kind::Corrupt,
                    Err(unknown) => return unknown,
                },
                kind => kind,
            };
            let message = format!("{}: the committed manifest cannot be read: {}", place(), error.message);
            Error { kind, message, ..error }
        })?;
        commit.verify(&bytes).map_err(|error| Error::from(error).within(place()))?;
        Ok(bytes)
    })
}

/// Tells a reader that the checkpoint was taken back after the reader had opened it.
const LEFT: &str = "it left while it was read: its COMMIT is gone, as when keep= or a rewind takes a \
                               checkpoint back; read another one";

/// Explains why a data file of a committed manifest is not found: the checkpoint has left, or it is damaged.
pub fn missing(store: &dyn Store, file: &FileEntry, error: Error) -> Error {
    match has_left(store, "") {
        Ok(true) => Error::new(Kind::NotFound, LEFT),
        Ok(false) => Error::corrupt(format!("file {} is missing: {}", file.path, error.message)),
        Err(unknown) => unknown,
    }
}

/// Returns whether the checkpoint in the directory `dir`, of which a file is missing, has no `COMMIT` any more.
///
/// # Errors
/// The store's errors, at the first try.
fn has_left(store: &dyn Store, dir: &str) -> Result<bool> {
    files_exist::is_there(store, &below(dir, COMMIT), Duration::ZERO).map(|is_there| !is_there)
}

/// Reads again if the bytes are not the saved ones: a bit may have flipped on the way, while the storage has it right.
fn twice<T>(store: &dyn Store, name: &str, read: impl Fn() -> Result<T>) -> Result<T> {
    match read() {
        Err(error) if error.kind == Kind::Corrupt => {
            store.look_anew(name);
            read()
        }
        done => done,
    }
}

/// Returns the note of the replays on all ranks, which were proven; `None` if there were none.
fn replayed(receipts: &[Receipt]) -> Option<String> {
    let mut bytes = BTreeMap::<&str, u64>::new();
    for (variant, of_rank) in receipts.iter().flat_map(|receipt| &receipt.replayed) {
        *bytes.entry(variant).or_default() += of_rank;
    }
    let by_variant = bytes.iter().map(|(variant, bytes)| format!("{bytes} bytes by {variant}")).collect::<Vec<_>>();
    (!by_variant.is_empty()).then(|| format!("{}, all proven", by_variant.join(", ")))
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

/// Makes the commit record of this manifest.
pub fn record(manifest: &[u8], attempt: &str) -> Commit {
    Commit {
        major: FORMAT_MAJOR,
        minor: FORMAT_MINOR,
        attempt: attempt.to_owned(),
        manifest: manifest_name(attempt),
        manifest_bytes: manifest.len() as u64,
        manifest_sha256: sha256(manifest),
    }
}

/// Performs step 3. The indexes come last, to keep the time until step 4 short: they alone have names that rival
/// attempts share, and an attempt that dies after replacing the index of a rival's checkpoint leaves its own there.
fn prepare(
    store: &dyn Store,
    destination: &Destination,
    commit: &Commit,
    manifest: &Manifest,
    bytes: &[u8],
) -> Result<()> {
    let steps: [&(dyn Fn() -> Result<()> + Sync); 2] =
        [&|| Ok(store.put(&commit.manifest, bytes)?), &|| refuse_taken(store, destination)];
    concurrently::each(store, &steps, |step| step()).into_iter().collect::<Result<()>>()?;
    // All of them, each time: one that is visible after a failure may not be durable.
    put_indexes(store, indexes(manifest))
}

/// Steps 3 and 4 for the copy of a checkpoint whose data files are durable and in place.
///
/// # Errors
/// `Conflict` when something was committed there meanwhile; `Corrupt` when files vanished; the store's errors.
pub fn repeat(
    store: &dyn Store,
    url: &str,
    commit: &Commit,
    (manifest, bytes): (&Manifest, &[u8]),
    timeout: &Timeout,
) -> Result<()> {
    let files = files_and_manifest(manifest, commit);
    retry(timeout, || {
        store.put(&commit.manifest, bytes)?;
        // All attempts share their names: those of what is committed stay.
        if files_exist::is_there(store, COMMIT, Duration::ZERO)? {
            return Err(Error::new(Kind::Conflict, format!("copy to {url}: something was committed there meanwhile")));
        }
        put_indexes(store, indexes(manifest))
    })?;
    files_exist::expect(store, &files, timeout)?;
    publish(store, commit, timeout.into())
        .and_then(|()| take_back_if_hollow(store, &files, timeout.into()))
        .map_err(|error| error.within(format_args!("copy to {url}")))
}

/// Performs step 4. Retried only while no record is visible: a second sync cannot make a visible record durable, since
/// the system may have dropped the bytes that it could not write.
fn publish(store: &dyn Store, commit: &Commit, patience: Patience<'_>) -> Result<()> {
    let mut outcome = Ok(());
    retry(patience, || {
        outcome = store.publish(COMMIT, &commit.encode()).map_err(Error::from);
        let is_absent = || store.open(COMMIT).is_err_and(|error| error.kind == shardfast_store::Kind::NotFound);
        match &outcome {
            Err(error) if is_absent() => Err(error.clone()),
            _ => Ok(()),
        }
    })
    .and(outcome)
}

/// Returns the indexes of all keys; `None` for a key that has none.
fn indexes(manifest: &Manifest) -> impl Iterator<Item = (String, Option<Vec<u8>>)> {
    let mut keys: Vec<&str> = (0..manifest.len()).map(|leaf| manifest.leaf(leaf).key).collect();
    keys.dedup();
    keys.into_iter().map(|key| (format!("{key}/{HUGGING_FACE_INDEX}"), hugging_face_index(manifest, key)))
}

/// Puts indexes, and removes one that another attempt left under a key without an index: all attempts share its name.
fn put_indexes(store: &dyn Store, indexes: impl Iterator<Item = (String, Option<Vec<u8>>)>) -> Result<()> {
    let put = |(name, index): &(String, Option<Vec<u8>>)| {
        match index {
            Some(index) => store.put(name, index)?,
            None if store.open(name).is_ok() => store.delete(name)?,
            None => {}
        }
        Ok(())
    };
    concurrently::each(store, &indexes.collect::<Vec<_>>(), put).into_iter().collect()
}

/// Puts the indexes of a committed checkpoint where others are visible.
pub fn mend_indexes(store: &dyn Store, manifest: &Manifest) -> Result<()> {
    let is_there =
        |name: &str, index: &Vec<u8>| store.read(name, index.len() as u64).is_ok_and(|there| there == *index);
    let all: Vec<_> = indexes(manifest).collect();
    let are_there =
        concurrently::each(store, &all, |(name, index)| index.as_ref().is_some_and(|index| is_there(name, index)));
    put_indexes(store, all.into_iter().zip(are_there).filter(|(_, is_there)| !is_there).map(|(index, _)| index))
}

/// Undoes step 3 of an attempt that was not published. A rival's checkpoint, if that is why, gets its indexes back.
fn withdraw(store: &dyn Store, commit: &Commit) {
    // A file that cannot be deleted now stays as an orphan, as after a crash.
    let _ = store.delete(&commit.manifest);
    let _ = read_manifest(store, "").and_then(|bytes| mend_indexes(store, &Manifest::decode(&bytes)?));
}
