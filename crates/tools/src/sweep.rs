//! Removes files that no commit can ever name: debris of crashed saves, copies and retention.
//!
//! # Protocol
//! 1. The time is that of the store's own clock: an object is written, looked at and deleted.
//! 2. Each step's directory is listed; after that its `COMMIT` is read.
//!    * It is committed: own files that its manifest does not name go. They were there before the `COMMIT` was seen, so
//!      any save that wrote them will find the place taken.
//!    * A list shows a `COMMIT`, and the answer to its name denies it: nothing goes. Deleting needs two witnesses.
//!    * It is not: own files go if none of them was changed for the given age. Empty directories go in a later sweep,
//!      when they were not changed for that long either: a save that begins makes them before its files.
//! 3. Of the records of what saves and loads did, the oldest beyond [`RECORDS_MAX`] go.
//! 4. Uploads that were begun before that age, and temporary objects that were not changed since, go too; the latter
//!    also from among the records and jobs.
//!
//! A save that takes longer than [`SAVE_MAX`] fails instead of committing, and the age is at least twice that: on each
//! rank its first file was begun less than that before the rank's receipt, and rank 0 publishes less than that after it
//! began. So no commit names what was old enough to be swept. A copy may take longer: it renews a mark beside its
//! files, looks whether all are there before it publishes, and the sweep looks for `COMMIT` again before it deletes.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use serde::Serialize;
pub use shardfast_engine::SAVE_MAX;
use shardfast_engine::commit;
use shardfast_engine::contents::{self, Contents, Own};
use shardfast_engine::files_exist::is_there;
use shardfast_engine::retention;
use shardfast_engine::runs;
use shardfast_format::name::HUGGING_FACE_INDEX;
use shardfast_format::{
    COMMIT, JOBS, LEAVING, Manifest, PINNED, TELEMETRY, is_end_name, is_own_path, parse_record_name, parse_step_dir,
};
use shardfast_store::{Entry, Store, Upload, is_temporary, join};
use shardfast_transfer::error::{Error, Kind, Result, retry};
use shardfast_transfer::timeout::Timeout;

/// Records of what saves and loads did that a sweep leaves, the newest.
pub const RECORDS_MAX: usize = 10_000;

/// The least age that a sweep accepts.
pub const AGE_MIN: Duration = SAVE_MAX.saturating_mul(2);

/// Files that a sweep removed, or would remove.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Swept {
    /// The run, or the checkpoint.
    pub url: String,
    /// Files, by URL.
    pub files: Vec<String>,
    /// Size of the files, in bytes.
    pub bytes: u64,
    /// Uploads that were not completed, by the URL of their object.
    pub uploads: Vec<String>,
    /// Directories without a commit in which something was changed lately: a save may be running there.
    pub young: Vec<String>,
    /// Places that were spared, with the reasons.
    pub spared: Vec<SparedPlace>,
}

/// A place that a sweep left alone.
#[derive(Debug, Clone, Serialize)]
pub struct SparedPlace {
    /// URL of the place.
    pub url: String,
    /// Reason why it was spared.
    pub reason: String,
}

/// Sweeps the run at `url`, or the place of one checkpoint. With `dry` nothing is removed. `progress` gets the
/// directories examined so far and in all.
///
/// # Errors
/// `Invalid` for an age below [`AGE_MIN`]; `NotFound` when nothing is at `url`; the store's errors. Files removed
/// before an error stay removed; the sweep can be repeated.
pub fn sweep(
    url: &str,
    older_than: Duration,
    dry: bool,
    timeout: &Timeout,
    progress: &dyn Fn(u64, u64),
) -> Result<Swept> {
    if older_than < AGE_MIN {
        return Err(Error::invalid(format!(
            "sweep {url}: expected an age of at least {} hours, found {} s: a save may last half of that",
            AGE_MIN.as_secs() / 3600,
            older_than.as_secs()
        )));
    }
    sweep_in(&*runs::store(url, timeout)?, url, older_than, dry, timeout, progress)
}

/// Sweeps like [`sweep`] a store that is open, with any age.
///
/// # Errors
/// As [`sweep`].
pub fn sweep_in(
    store: &dyn Store,
    url: &str,
    older_than: Duration,
    dry: bool,
    timeout: &Timeout,
    progress: &dyn Fn(u64, u64),
) -> Result<Swept> {
    let entries = runs::entries(store, timeout)?;
    if entries.is_empty() {
        return Err(Error::new(Kind::NotFound, format!("sweep {url}: nothing is there")));
    }
    let now = clock(store, timeout)?;
    let is_old = |modified: Option<SystemTime>| {
        modified.is_some_and(|at| now.duration_since(at).is_ok_and(|age| age >= older_than))
    };
    let mut swept = Swept { url: url.to_owned(), ..Swept::default() };
    let is_step = |name: &str| parse_step_dir(name).is_some();
    let steps: Vec<&Entry> = entries.iter().filter(|entry| entry.is_dir && is_step(&entry.name)).collect();
    let is_run = !steps.is_empty();
    let root = Entry { name: String::new(), is_dir: true, is_link: false, bytes: 0, modified: None };
    let places = if is_run { steps } else { vec![&root] };
    let sweep = Sweep { store, url, is_old: &is_old, dry, timeout };
    let mut young: Vec<&str> = Vec::new();
    for (done, place) in (0..).zip(&places) {
        let dir = place.name.as_str();
        progress(done, places.len() as u64);
        if place.is_link {
            swept.spare(join(url, dir), "it is a link");
        } else if sweep.place(place, &mut swept)? == Age::Young {
            swept.young.push(join(url, dir));
            young.push(dir);
        }
    }
    progress(places.len() as u64, places.len() as u64);
    if is_run {
        let stale = entries.iter().filter(|entry| sweep.is_stale(entry));
        let objects = stale.map(|entry| (entry.name.clone(), entry.bytes)).collect();
        sweep.remove(objects, &[], &mut swept)?;
        sweep.records(&mut swept)?;
    }
    sweep.uploads(&young, &mut swept)?;
    Ok(swept)
}

/// Returns the time by the store's own clock.
fn clock(store: &dyn Store, timeout: &Timeout) -> Result<SystemTime> {
    let name = shardfast_store::temporary()?;
    retry(timeout, || Ok(store.put(&name, b"now")?))?;
    let listed = retry(timeout, || Ok(store.list("")?));
    retry(timeout, || Ok(store.delete(&name)?))?;
    let modified = listed?.into_iter().find(|entry| entry.name == name).and_then(|entry| entry.modified);
    modified.ok_or_else(|| {
        let message = format!("{}: an object that was written is in no list, so its time is unknown", store.url());
        Error::new(Kind::Unavailable, message)
    })
}

impl Swept {
    fn spare(&mut self, url: String, reason: impl Into<String>) {
        self.spared.push(SparedPlace { url, reason: reason.into() });
    }
}

/// Age of a directory without a commit: whether it may be a save's or a copy's in progress.
#[derive(PartialEq, Eq)]
enum Age {
    Young,
    Old,
}

struct Sweep<'a> {
    store: &'a dyn Store,
    url: &'a str,
    is_old: &'a dyn Fn(Option<SystemTime>) -> bool,
    dry: bool,
    timeout: &'a Timeout,
}

impl Sweep<'_> {
    /// Performs step 2 for one directory.
    fn place(&self, place: &Entry, swept: &mut Swept) -> Result<Age> {
        let dir = place.name.as_str();
        let found = match contents::own(self.store, dir, self.timeout) {
            // Probably a foreign directory: this process may not list it.
            Err(error) if error.kind == Kind::Invalid => {
                swept.spare(join(self.url, dir), error.message);
                return Ok(Age::Old);
            }
            found => found?,
        };
        let committed = match retry(self.timeout, || commit::read_commit(self.store, dir)) {
            Ok(record) => {
                retry(self.timeout, || commit::manifest_of(self.store, dir, &record)).map(|bytes| (record, bytes))
            }
            Err(error) if error.kind == Kind::NotFound && found.has(COMMIT) => {
                swept.spare(
                    join(self.url, dir),
                    format!("a list shows its {COMMIT}, but it cannot be read: {}", error.message),
                );
                return Ok(Age::Young);
            }
            Err(error) if error.kind == Kind::NotFound => return self.uncommitted(place, &found, swept),
            Err(error) => Err(error),
        };
        let manifest = committed.and_then(|(record, bytes)| Ok((record.manifest, Manifest::decode(&bytes)?)));
        let (name, manifest) = match manifest {
            Err(error) if matches!(error.kind, Kind::Corrupt | Kind::Unsupported) => {
                swept.spare(join(self.url, dir), error.message);
                return Ok(Age::Old);
            }
            manifest => manifest?,
        };
        let mut named: HashSet<&str> = manifest.files().iter().map(|file| file.path.as_str()).collect();
        named.extend([COMMIT, PINNED, name.as_str()]);
        let keys: HashSet<&str> = (0..manifest.len()).map(|leaf| manifest.leaf(leaf).key).collect();
        let is_index = |path: &str| {
            path.split_once('/').is_some_and(|(key, file)| file == HUGGING_FACE_INDEX && keys.contains(key))
        };
        // A save of a run inside this checkpoint may be writing a temporary object below another directory.
        let is_here =
            |path: &str| path.split_once('/').is_none_or(|(key, file)| keys.contains(key) && !file.contains('/'));
        let is_temporary = |path: &str| is_temporary(path.rsplit('/').next().unwrap_or(path));
        let goes = |own: &&Own| !is_temporary(&own.path) || is_here(&own.path) || (self.is_old)(own.modified);
        let unnamed = found.own.iter().filter(|own| !named.contains(own.path.as_str()) && !is_index(&own.path));
        let unnamed = unnamed.filter(goes);
        let objects = unnamed.map(|own| (contents::join(dir, &own.path), own.bytes)).collect();
        let dirs: Vec<String> = found.dirs.iter().map(|path| contents::join(dir, path)).collect();
        self.remove(objects, &dirs, swept)?;
        Ok(Age::Old)
    }

    /// Performs step 3, and step 4 for the objects beside the records and jobs.
    fn records(&self, swept: &mut Swept) -> Result<()> {
        let listed = |dir| listed(self.store, dir, self.timeout);
        let (mut going, others) = beyond(listed(TELEMETRY)?, RECORDS_MAX);
        going.extend(others.into_iter().filter(|entry| self.is_stale(entry)));
        let jobs = listed(JOBS)?.into_iter().filter(|entry| self.is_stale(entry));
        let among = |dir| move |entry: Entry| (contents::join(dir, &entry.name), entry.bytes);
        let objects = going.into_iter().map(among(TELEMETRY)).chain(jobs.map(among(JOBS))).collect();
        self.remove(objects, &[], swept)
    }

    /// Returns whether an entry is a temporary object that was not changed for the given age.
    fn is_stale(&self, entry: &Entry) -> bool {
        !entry.is_dir && is_temporary(&entry.name) && (self.is_old)(entry.modified)
    }

    /// Performs step 2 for a directory without a commit.
    fn uncommitted(&self, place: &Entry, found: &Contents, swept: &mut Swept) -> Result<Age> {
        let dir = place.name.as_str();
        if found.own.is_empty() {
            // A save may be about to use a directory that is younger.
            let are_old = (self.is_old)(place.modified) && found.dirs_modified.is_none_or(|at| (self.is_old)(Some(at)));
            if are_old && !self.dry {
                let dirs = found.dirs.iter().map(|path| contents::join(dir, path)).chain([dir.to_owned()]);
                retention::delete(self.store, &[], &dirs.collect::<Vec<_>>(), self.timeout)?;
            }
            return Ok(Age::Old);
        }
        if !found.own.iter().all(|own| (self.is_old)(own.modified)) {
            return Ok(Age::Young);
        }
        if found.has(PINNED) {
            swept.spare(join(self.url, dir), "it is pinned, and has no COMMIT");
            return Ok(Age::Old);
        }
        if found.has(LEAVING)
            && let Err(error) = self.newest_proves()
        {
            swept.spare(join(self.url, dir), format!("it may be the last checkpoint: {}", error.message));
            return Ok(Age::Old);
        }
        if is_there(self.store, &contents::join(dir, COMMIT), self.timeout)?
            || contents::own(self.store, dir, self.timeout)?.has(COMMIT)
        {
            return Ok(Age::Young);
        }
        // The mark comes last: a sweep that is interrupted is made again.
        let (marks, rest): (Vec<&Own>, Vec<&Own>) = found.own.iter().partition(|own| own.path == LEAVING);
        for some in [rest, marks] {
            let objects = some.iter().map(|own| (contents::join(dir, &own.path), own.bytes)).collect();
            self.remove(objects, &[], swept)?;
        }
        Ok(Age::Old)
    }

    /// Checks the newest committed checkpoint, as retention does.
    fn newest_proves(&self) -> Result<()> {
        let (steps, _) = runs::list_in(self.store, self.url, self.timeout)?;
        let newest = steps.iter().rfind(|step| matches!(step.commit, Ok(Some(_))));
        let newest = newest.ok_or_else(|| Error::new(Kind::NotFound, "the run has no committed one"))?;
        retention::expect_complete(self.store, self.url, newest.step, self.timeout)
    }

    /// Performs step 4: uploads of own files. Those below a place that was changed recently may be a copy's.
    fn uploads(&self, young: &[&str], swept: &mut Swept) -> Result<()> {
        let Some(service) = self.store.service() else { return Ok(()) };
        let uploads = match retry(self.timeout, || Ok(service.uploads()?)) {
            Err(error) if error.kind == Kind::Unsupported => {
                swept.spare(self.url.to_owned(), error.message);
                return Ok(());
            }
            uploads => uploads?,
        };
        let place = |name: &str| match name.split_once('/') {
            Some((dir, path)) if parse_step_dir(dir).is_some() => (dir.to_owned(), path.to_owned()),
            _ => (String::new(), name.to_owned()),
        };
        let goes = |upload: &&Upload| {
            let (dir, path) = place(&upload.name);
            is_own_path(&path) && !young.contains(&dir.as_str()) && (self.is_old)(Some(upload.begun))
        };
        for upload in uploads.iter().filter(goes) {
            if !self.dry {
                retry(self.timeout, || Ok(service.abort_upload(upload)?))?;
            }
            swept.uploads.push(join(self.url, &upload.name));
        }
        Ok(())
    }

    /// Deletes these objects, by name and size, and directories that are empty then.
    fn remove(&self, objects: Vec<(String, u64)>, dirs: &[String], swept: &mut Swept) -> Result<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = objects.iter().map(|(name, _)| name.clone()).collect();
        if !self.dry {
            retention::delete(self.store, &names, dirs, self.timeout)?;
        }
        swept.bytes += objects.iter().map(|(_, bytes)| bytes).sum::<u64>();
        swept.files.extend(names.iter().map(|name| join(self.url, name)));
        Ok(())
    }
}

/// Lists a directory of the run, which may not be there.
fn listed(store: &dyn Store, dir: &str, timeout: &Timeout) -> Result<Vec<Entry>> {
    match retry(timeout, || Ok(store.list(dir)?)) {
        Err(error) if error.kind == Kind::NotFound => Ok(Vec::new()),
        entries => entries,
    }
}

/// Splits the objects in the directory of records into those beyond the newest `kept`, and those that are no records.
fn beyond(objects: Vec<Entry>, kept: usize) -> (Vec<Entry>, Vec<Entry>) {
    let is_record = |entry: &Entry| parse_record_name(&entry.name).is_some() || is_end_name(&entry.name);
    let (mut records, others): (Vec<Entry>, Vec<Entry>) = objects.into_iter().partition(is_record);
    records.sort_by(|a, b| a.name.cmp(&b.name));
    records.truncate(records.len().saturating_sub(kept));
    (records, others)
}

/// Deletes a run's records of what saves and loads did beyond the newest `kept`.
///
/// # Errors
/// The store's errors.
pub(crate) fn trim_records(store: &dyn Store, kept: usize, timeout: &Timeout) -> Result<()> {
    let (going, _) = beyond(listed(store, TELEMETRY, timeout)?, kept);
    let names: Vec<String> = going.iter().map(|entry| contents::join(TELEMETRY, &entry.name)).collect();
    if names.is_empty() { Ok(()) } else { retention::delete(store, &names, &[], timeout) }
}
