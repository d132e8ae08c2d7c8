//! Copies checkpoints from one place to another, between any two stores.
//!
//! # Protocol
//! 1. The source is opened: its `COMMIT` proves its manifest.
//! 2. The copy is an attempt of its own, as a save is: its manifest is the source's under the attempt's name, and so
//!    are the names of its files. Copies that are made at the same time never write the same file.
//! 3. Each data file is copied as it is, in pieces that suit the target. Every block is proven on the way, and the
//!    header by the manifest; a file becomes durable before the next step. Inside one service the service copies, and
//!    the checksum that it keeps of the copy is compared with the one that follows from the blocks'. A file that an
//!    interrupted copy left, and that is proven to be whole, gets a second name instead.
//! 4. The manifest and the indexes follow, then `COMMIT`, create-if-absent: the copy exists from now on. What other
//!    attempts left beside it goes: while `COMMIT` is there, none of them can be published.
//! 5. If another copy was first, this one removes its own files only, checks that the first one's are all there, and
//!    has succeeded. The hash in a `COMMIT` tells whether it is of the same checkpoint: that of the source's manifest
//!    under the attempt's name.
//!
//! Where the checkpoint is committed already, files that are missing or short, or damaged if the bytes are to be
//! proven, are sent again: under a name of the new attempt first, which then replaces the damaged one's whole.
//!
//! Meanwhile the mark `.copying` in the target keeps [sweeps](mod@crate::sweep) away.

mod pieces;
mod run;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use shardfast_engine::Engine;
use shardfast_engine::checkpoint::{self, Checkpoint};
use shardfast_engine::commit;
use shardfast_engine::contents;
use shardfast_engine::files_exist;
use shardfast_engine::retention;
use shardfast_format::{COPYING, Commit, FileEntry, Manifest, attempt_of};
use shardfast_store::{Kind as Stored, Location, ObjectWriter, Pieces, Store};
use shardfast_transfer::error::{Error, Kind, Result, expect_uninterrupted, retry};
use shardfast_transfer::reader::Files;
use shardfast_transfer::staging::SLOT_BYTES;
use shardfast_transfer::timeout::Timeout;

use pieces::each_piece;
pub use run::{FailedStep, Synced, sync};

/// Interval at which the mark in the target is renewed: far below the age at which files are swept.
const RENEWED_AFTER: Duration = Duration::from_secs(600);

/// Interval at which a wait looks whether the program is interrupted.
const GLANCE: Duration = Duration::from_millis(50);

/// Limit of the mean rate at which the source is read, in bytes per second.
#[derive(Debug)]
pub struct Limit {
    bytes_a_second: Option<f64>,
    /// Time at which the next piece may begin.
    next: Mutex<Instant>,
}

impl Limit {
    /// Makes a limit; `None` for no limit.
    pub fn new(bytes_a_second: Option<u64>) -> Limit {
        Limit { bytes_a_second: bytes_a_second.map(|bytes| bytes.max(1) as f64), next: Mutex::new(Instant::now()) }
    }

    /// Waits until `bytes` bytes may be read.
    ///
    /// # Errors
    /// `Cancelled` if the program is interrupted.
    fn wait(&self, bytes: u64) -> Result<()> {
        expect_uninterrupted()?;
        let Some(rate) = self.bytes_a_second else { return Ok(()) };
        let now = Instant::now();
        let begin = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = now.max(*next);
            *next = begin + Duration::from_secs_f64(bytes as f64 / rate);
            begin
        };
        while let Some(left) = begin.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            expect_uninterrupted()?;
            std::thread::sleep(left.min(GLANCE));
        }
        Ok(())
    }
}

/// Options of a copy.
#[derive(Debug)]
pub struct Copying {
    /// Limit of the rate at which the source is read.
    pub limit: Limit,
    /// `true` to verify the bytes of existing files, too.
    pub verify: bool,
}

/// A checkpoint that was copied.
#[derive(Debug, Clone, Serialize)]
pub struct Copied {
    /// URL of the source.
    pub from: String,
    /// URL of the target.
    pub to: String,
    /// Number of data files.
    pub files: u64,
    /// Data files that existed already, from an interrupted copy.
    pub files_found: u64,
    /// `true` if the whole checkpoint was committed there already.
    pub was_there: bool,
    /// Files of it that were missing, short or damaged, and were sent again.
    pub files_mended: u64,
    /// Bytes of data files that were copied.
    pub bytes: u64,
    /// Bytes that the storage copied by itself.
    pub bytes_within: u64,
}

/// Copies the checkpoint at `from` to `to`. `progress` gets the bytes copied so far and in all.
///
/// # Errors
/// `NotFound` when there is none, or it left meanwhile; `Conflict` when another checkpoint is committed at the target;
/// `Invalid` when the target holds foreign files; `Corrupt` when the source is damaged, and the target then has no
/// `COMMIT`; the stores' errors.
pub fn copy(
    engine: &Arc<Engine>,
    from: &str,
    to: &str,
    how: &Copying,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    let (source, target) = (engine.store(from, engine.timeout())?, engine.store(to, engine.timeout())?);
    copy_between(engine, (source, from), (target, to), how, progress)
}

/// Copies like [`copy`] between stores that are already open at their places.
///
/// # Errors
/// As [`copy`].
pub fn copy_between(
    engine: &Arc<Engine>,
    source: (Arc<dyn Store>, &str),
    target: (Arc<dyn Store>, &str),
    how: &Copying,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    copy_while(engine, (source, target), how, &|| Ok(()), progress)
}

/// Copies like [`copy_between`] from the first store to the second if `may_commit` allows it right before the copy is
/// published.
///
/// # Errors
/// As [`copy`]; that of `may_commit`.
#[allow(clippy::type_complexity)] // two open places
pub(crate) fn copy_while(
    engine: &Arc<Engine>,
    ((source, from), (target, to)): ((Arc<dyn Store>, &str), (Arc<dyn Store>, &str)),
    how: &Copying,
    may_commit: &(dyn Fn() -> Result<()> + Sync),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    let bytes = checkpoint::read(&*source, from, engine.timeout())?;
    let location = |store: &dyn Store| store.service().and_then(|service| service.location());
    let (there, here) = (location(&*source), location(&*target));
    let there = there.filter(|there| here.is_some_and(|here| here.service == there.service));
    let source = Checkpoint::new(engine, from, source, &bytes)?;
    let attempt =
        getrandom::u64().map_err(|error| Error::internal(format!("copy to {to}: no random name: {error}")))?;
    let attempt = format!("{attempt:016x}");
    let total = source.manifest().files().iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let copied = Copied {
        from: from.to_owned(),
        to: to.to_owned(),
        files: source.manifest().files().len() as u64,
        files_found: 0,
        was_there: false,
        files_mended: 0,
        bytes: 0,
        bytes_within: 0,
    };
    let progress = Progress { done: AtomicU64::new(0), total, show: progress };
    let (source, bytes) = (&source, bytes.as_slice());
    let mut copy = Copy { engine, source, bytes, there, target, to, attempt, how, may_commit, progress, copied };
    if let Some(record) = copy.committed()? {
        return copy.complete(&record);
    }
    contents::refuse_foreign(&*copy.target, to, 0, engine.timeout())?;
    retry(engine.timeout(), || Ok(copy.target.can_publish()?))?;
    match copy.make() {
        Ok(()) => Ok(copy.copied),
        Err(error) => match copy.committed() {
            Ok(Some(record)) if record.attempt == copy.attempt => copy.complete(&record),
            Ok(Some(record)) => {
                copy.withdraw();
                copy.complete(&record)
            }
            Err(other) if other.kind == Kind::Conflict => {
                copy.withdraw();
                Err(other)
            }
            _ => Err(error),
        },
    }
}

struct Progress<'a> {
    done: AtomicU64,
    total: u64,
    show: &'a (dyn Fn(u64, u64) + Sync),
}

impl Progress<'_> {
    fn advance(&self, bytes: u64) {
        (self.show)(self.done.fetch_add(bytes, Ordering::Relaxed) + bytes, self.total);
    }
}

struct Copy<'a> {
    engine: &'a Arc<Engine>,
    source: &'a Checkpoint,
    /// The source's manifest, encoded.
    bytes: &'a [u8],
    /// The place of the source, if its service can copy to the target by itself.
    there: Option<Location>,
    target: Arc<dyn Store>,
    to: &'a str,
    attempt: String,
    how: &'a Copying,
    may_commit: &'a (dyn Fn() -> Result<()> + Sync),
    progress: Progress<'a>,
    copied: Copied,
}

impl<'a> Copy<'a> {
    fn timeout(&self) -> &'a Timeout {
        self.engine.timeout()
    }

    /// Returns the commit record at the target, if it is of this very checkpoint; `None` if nothing is committed there.
    fn committed(&self) -> Result<Option<Commit>> {
        let record = match retry(self.timeout(), || commit::read_commit(&*self.target, "")) {
            Err(error) if error.kind == Kind::NotFound => return Ok(None),
            record => record?,
        };
        let expected = Manifest::under_attempt(self.bytes, &record.attempt)?;
        if record.verify(&expected).is_ok() {
            return Ok(Some(record));
        }
        let to = self.to;
        Err(Error::new(
            Kind::Conflict,
            format!("{to}: another checkpoint is committed there: copy to another place, or delete it first"),
        ))
    }

    /// Performs steps 2 to 4.
    fn make(&mut self) -> Result<()> {
        let target = Arc::clone(&self.target);
        let mark = Mark::put(&*target, self.timeout())?;
        let bytes = Manifest::under_attempt(self.bytes, &self.attempt)?;
        let manifest = Manifest::decode(&bytes)?;
        let earlier = self.earlier()?;
        for (number, file) in (0u32..).zip(manifest.files()) {
            let found = earlier.iter().map(|earlier| self.taken_over(earlier, number, file));
            if found.into_iter().find(|taken| !matches!(taken, Ok(false))).unwrap_or(Ok(false))? {
                self.copied.files_found += 1;
                self.progress.advance(file.bytes);
                mark.renew();
                continue;
            }
            self.send(number, file, &mark)?;
        }
        let names: Vec<&str> = manifest.files().iter().map(|file| file.path.as_str()).collect();
        retry(self.timeout(), || Ok(target.sync(&names)?))?;
        let record = commit::record(&bytes, &self.attempt);
        (self.may_commit)()?;
        commit::repeat(&*target, self.to, &record, (&manifest, &bytes), self.timeout())?;
        // An attempt that was second may have put its own in between.
        let _ = commit::mend_indexes(&*target, &manifest);
        // What stays goes with the next sweep, as the mark does.
        let _ = self.remove(|attempt| attempt != self.attempt);
        let _ = target.delete(COPYING);
        Ok(())
    }

    /// Returns the files of this manifest at the target.
    fn files(&self, manifest: Arc<Manifest>) -> Files {
        let (target, to) = (Arc::clone(&self.target), self.to.to_owned());
        Files::new(target, to, manifest, self.timeout().clone(), commit::missing)
    }

    /// Files at the target that other attempts left there, as they would be named by each.
    fn earlier(&self) -> Result<Vec<Files>> {
        let found = contents::own(&*self.target, "", self.timeout())?;
        let attempts: BTreeSet<&str> = found.own.iter().filter_map(|own| attempt_of(&own.path)).collect();
        let named = |attempt: &str| -> Result<Files> {
            let manifest = Manifest::decode(&Manifest::under_attempt(self.bytes, attempt)?)?;
            Ok(self.files(Arc::new(manifest)))
        };
        attempts.into_iter().map(named).collect()
    }

    /// Gives the file `number` of an earlier attempt the name of this one's as well, if it is there and whole.
    fn taken_over(&self, earlier: &Files, number: u32, file: &FileEntry) -> Result<bool> {
        let path = &earlier.entry(number).path;
        let is_there = retry(self.timeout(), || Ok(self.target.size(path)?)).is_ok_and(|bytes| bytes == file.bytes);
        // What was sent was limited then.
        if !is_there || !self.is_whole(earlier, number, &Limit::new(None)) {
            return Ok(false);
        }
        match retry(self.timeout(), || Ok(self.target.also_named(path, &file.path, file.bytes)?)) {
            Ok(()) => self.is_kept(number, &file.path),
            Err(error) if error.kind == Kind::Unavailable => Err(error),
            // It gives no second names, or the other attempt has removed it.
            Err(_) => Ok(false),
        }
    }

    /// Sends the file `number` of the source under the name that `file` has.
    fn send(&mut self, number: u32, file: &FileEntry, mark: &Mark<'_>) -> Result<()> {
        if let Some(there) = &self.there
            && self.copied_within(number, there, file)?
        {
            self.copied.bytes_within += file.bytes;
            self.progress.advance(file.bytes);
        } else {
            self.send_bytes(number, file, mark)?;
        }
        self.copied.bytes += file.bytes;
        mark.renew();
        Ok(())
    }

    /// Has the storage copy a file by itself. Returns whether the copy is there and proven.
    fn copied_within(&self, number: u32, there: &Location, file: &FileEntry) -> Result<bool> {
        let source = &self.source.files.entry(number).path;
        let Some(service) = self.target.service() else { return Ok(false) };
        match retry(self.timeout(), || Ok(service.copy_within(there, source, &file.path, file.bytes)?)) {
            Ok(()) => self.is_kept(number, &file.path),
            // The service may be away for the other way as well.
            Err(error) if error.kind == Kind::Unavailable => Err(error),
            // It may not read there, or does not copy: the other way says which.
            Err(_) => Ok(false),
        }
    }

    /// Compares the checksum that the storage keeps of a copy with that of the blocks of the file `number`; deletes the
    /// copy if they differ. Storage that keeps none, and gave the object a second name, has moved no byte.
    fn is_kept(&self, number: u32, path: &str) -> Result<bool> {
        let expected = self.source.files.open(number)?.crc64(self.source.files.entry(number));
        match retry(self.timeout(), || Ok(self.target.kept_crc64(path)?)) {
            Ok(Some(kept)) if kept == expected => Ok(true),
            Err(error) if error.kind == Kind::Unsupported => Ok(true),
            Err(error) if error.kind == Kind::Unavailable => Err(error),
            _ => retry(self.timeout(), || Ok(self.target.delete(path)?)).map(|()| false),
        }
    }

    fn send_bytes(&self, number: u32, file: &FileEntry, mark: &Mark<'_>) -> Result<()> {
        let piece_bytes = match self.target.needs().pieces {
            Pieces::Any => SLOT_BYTES as u64,
            Pieces::Parts(parts) => parts.of(file.bytes),
        };
        let create = || match self.target.create(&file.path, file.bytes) {
            // An earlier try of this attempt made the file, and its answer was lost: no other attempt uses the name.
            Err(error) if error.kind == Stored::Conflict && attempt_of(&file.path) == Some(&*self.attempt) => {
                self.target.delete(&file.path)?;
                Ok(self.target.create(&file.path, file.bytes)?)
            }
            created => Ok(created?),
        };
        let mut object: Box<dyn ObjectWriter> = retry(self.timeout(), create)?;
        each_piece(&self.source.files, number, self.engine, piece_bytes, &self.how.limit, |offset, piece| {
            let padded = piece.bytes.next_multiple_of(object.alignment());
            let bytes = &piece.memory[piece.start..piece.start + padded];
            retry(self.timeout(), || Ok(object.write_at(offset, bytes)?))?;
            mark.renew();
            self.progress.advance(piece.bytes as u64);
            Ok(())
        })?;
        retry(self.timeout(), || Ok(object.finish()?))
    }

    /// Returns whether a file of the right length is that of the manifest: by the checksum that the storage keeps of
    /// it, or read and proven if it keeps none. A file on a disk may have its length and not its bytes.
    fn is_whole(&self, found: &Files, number: u32, limit: &Limit) -> bool {
        let Ok(open) = found.open(number) else { return false };
        match self.target.kept_crc64(&found.entry(number).path) {
            Ok(Some(kept)) if kept == open.crc64(found.entry(number)) => true,
            _ => each_piece(found, number, self.engine, SLOT_BYTES as u64, limit, |_, _| Ok(())).is_ok(),
        }
    }

    /// Performs step 5, or the rest of it if the checkpoint existed already.
    fn complete(mut self, record: &Commit) -> Result<Copied> {
        let expected = Manifest::under_attempt(self.bytes, &record.attempt)?;
        let manifest = Arc::new(Manifest::decode(&expected)?);
        let own = Manifest::decode(&Manifest::under_attempt(self.bytes, &self.attempt)?)?;
        let target = Arc::clone(&self.target);
        let found = self.files(Arc::clone(&manifest));
        let flawed = files_exist::flawed(&*target, &commit::files_and_manifest(&manifest, record), self.timeout())?;
        self.copied.was_there = record.attempt != self.attempt;
        let verify = self.how.verify;
        if flawed.contains(&record.manifest) || (verify && commit::manifest_of(&*target, "", record).is_err()) {
            retry(self.timeout(), || Ok(target.put(&record.manifest, &expected)?))?;
            self.copied.files_mended += 1;
        }
        // All attempts share their names, and one that was second or died may have put its own.
        retry(self.timeout(), || commit::mend_indexes(&*target, &manifest))?;
        let is_flawed = |number: u32, file: &FileEntry| {
            flawed.contains(&file.path) || (verify && !self.is_whole(&found, number, &self.how.limit))
        };
        let files = (0u32..).zip(manifest.files());
        let flawed: Vec<(u32, &FileEntry)> = files.filter(|(number, file)| is_flawed(*number, file)).collect();
        if flawed.is_empty() {
            return Ok(self.copied);
        }
        self.progress.total = flawed.iter().map(|(_, file)| file.bytes).sum();
        let mark = Mark::put(&*target, self.timeout())?;
        for (number, file) in flawed {
            self.mend(number, file, &own.files()[number as usize], &mark)?;
        }
        let _ = target.delete(COPYING);
        Ok(self.copied)
    }

    /// Sends a file of the committed copy again. Where a name that is taken cannot be written whole, that is done under
    /// this attempt's.
    fn mend(&mut self, number: u32, file: &FileEntry, own: &FileEntry, mark: &Mark<'_>) -> Result<()> {
        if self.target.needs().refuses_taken_names {
            self.send(number, own, mark)?;
            let replaced = retry(self.timeout(), || Ok(self.target.also_named(&own.path, &file.path, file.bytes)?));
            replaced.map_err(|error| match error.kind {
                Kind::Unsupported => error.within(format_args!("{}: delete {} and copy again", self.to, file.path)),
                _ => error,
            })?;
            retry(self.timeout(), || Ok(self.target.delete(&own.path)?))?;
        } else {
            self.send(number, file, mark)?;
        }
        self.copied.files_mended += 1;
        Ok(())
    }

    /// Removes this attempt's files, none of which a committed manifest names.
    fn withdraw(&self) {
        // What stays goes with the next sweep.
        let _ = self.remove(|attempt| attempt == self.attempt);
    }

    /// Removes the files of some attempts. Something is committed, and none of them is.
    fn remove(&self, goes: impl Fn(&str) -> bool) -> Result<()> {
        let found = contents::own(&*self.target, "", self.timeout())?;
        let paths = found.own.into_iter().map(|own| own.path);
        retention::delete(
            &*self.target,
            &paths.filter(|path| attempt_of(path).is_some_and(&goes)).collect::<Vec<_>>(),
            &[],
            self.timeout(),
        )
    }
}

/// Says in the target that a copy is being made there: a sweep leaves alone where something was changed lately.
struct Mark<'a> {
    target: &'a dyn Store,
    put: Mutex<Instant>,
}

impl Mark<'_> {
    fn put<'a>(target: &'a dyn Store, timeout: &Timeout) -> Result<Mark<'a>> {
        retry(timeout, || Ok(target.put(COPYING, b"")?))?;
        Ok(Mark { target, put: Mutex::new(Instant::now()) })
    }

    /// Puts it again from time to time. A mark that cannot be renewed now is renewed with the next piece.
    fn renew(&self) {
        if let Ok(mut put) = self.put.try_lock()
            && put.elapsed() >= RENEWED_AFTER
            && self.target.put(COPYING, b"").is_ok()
        {
            *put = Instant::now();
        }
    }
}
