//! Implements HDFS: files that are written once, from beginning to end, and joined by their metadata.
//!
//! 1. *Write.* Each part of an object is a file of its own, written on a connection of its own: the first one has the
//!    object's name, the others have temporary names beside it. `finish` joins them by `concat`, in the order of the
//!    parts. Where the NameNode refuses that, the parts are read back and written as one file. A DataNode that
//!    acknowledges the end of a block has it on disk.
//! 2. *Publish.* The bytes are written beside the name and renamed to it without overwriting. A lost answer is settled
//!    by looking: if the file that was renamed is gone, the rename was carried out.
//! 3. *Read.* Opening asks the NameNode once, for the length and all blocks; a file that was deleted or replaced since
//!    then has other blocks, so that reads of it fail.
//! 4. *Names* are durable when the NameNode answers: `sync` has nothing to do. HDFS has no `:` in names, so it is
//!    stored percent-encoded.
//!
//! [`configuration`] and [`token`] read Hadoop's files, [`rest`] makes the calls that the client library lacks,
//! [`writer`] and [`reader`] move bytes, and [`failure`] interprets refusals. Nothing is repeated here: the engine
//! retries.

mod configuration;
mod failure;
mod reader;
mod rest;
mod token;
mod writer;

use std::borrow::Cow;
use std::collections::HashSet;
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::stream;
use futures_util::{StreamExt, TryStreamExt};
use hdfs_native::client::{FileStatus, WriteOptions};
use hdfs_native::{Client, ClientBuilder, HdfsError};
use tokio::time::timeout;

use self::configuration::Configuration;
use self::reader::HdfsReader;
use self::rest::Rest;
use self::writer::HdfsWriter;
use crate::observe::{Action, Reports};
use crate::place::{Url, decoded, join};
use crate::remote::{Flow, Network};
use crate::write::Writes;
use crate::{
    Entry, Error, Kind, Location, Needs, ObjectReader, ObjectWriter, Parts, Pieces, Quota, ReadNeeds, Requests, Result,
    Service, Shared, Store, Upload, name,
};

/// Names of the URL's options.
pub(crate) const OPTIONS: &[&str] = &["block_size", "replication", STORAGE_POLICY];

/// Option with the name of the storage policy by which the NameNode places the blocks of what is saved.
const STORAGE_POLICY: &str = "storage_policy";

const MIB: u64 = 1 << 20;

/// Lengths of parts: each is a block of its own after the join, and small blocks burden the NameNode.
const PARTS: Parts = Parts { bytes_min: 32 * MIB, bytes_max: 128 * MIB, count_max: 10_000 };

/// Longest read: a connection is opened for each.
const REQUEST_BYTES: u64 = 17 * MIB;

/// Maximum number of reads at a time, each on a thread.
const READS_MAX: usize = 32;

/// Largest block that the client library takes: it keeps lengths in signed numbers of 32 bits.
const BLOCK_BYTES_MAX: u32 = i32::MAX as u32;

/// Largest replication that a NameNode accepts by default (dfs.replication.max).
const REPLICATION_MAX: u32 = 512;

/// Beginnings of erasure coding policies whose parity the client library writes wrongly.
const WRONG_PARITY: [&str; 2] = ["XOR-", "RS-LEGACY-"];

/// Maximum number of files written at a time, each on a thread.
const WRITES_MAX: usize = 64;

/// Deletions in flight.
const DELETES_AT_A_TIME: usize = 16;

/// Time for a call to the NameNode, or without progress of a read or a write.
const STILL_MAX: Duration = Duration::from_secs(30);

/// Time for which the store asks the NameNode whether it has published an object, and the pauses between the questions:
/// later callers cannot tell.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
const SETTLES_EVERY: Duration = Duration::from_secs(2);

/// Settings of the client library in place of its own, which tries for minutes: tries after the first one to find the
/// active NameNode, and the pauses between them.
const TRIES: [(&str, &str); 3] = [
    ("dfs.client.failover.max.attempts", "4"),
    ("dfs.client.failover.sleep.base.millis", "200"),
    ("dfs.client.failover.sleep.max.millis", "1000"),
];

/// Setting with the place of the servers that have the keys of encryption zones.
const KEYS_AT: &str = "hadoop.security.key.provider.path";

/// Process that first opened an HDFS. The client library keeps connections for all stores of a process, which a forked
/// child would share with its parent.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Opens the URL `hdfs://namenode:port/path?option=value`, `hdfs://nameservice/path` or `viewfs://cluster/path`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let invalid = |message: String| Error::new(Kind::Invalid, Action::Open.word(), url.shown(), message);
    if *PROCESS.get_or_init(std::process::id) != std::process::id() {
        let what = "HDFS was used before this process was forked, and its connections are the parent's: start the \
                    process anew (spawn) instead of forking it";
        return Err(Error::new(Kind::Unsupported, Action::Open.word(), url.shown(), what));
    }
    let (authority, path) = url.bucket_and_prefix()?;
    name::check_dir(Action::Open.word(), &url.shown(), &path)?;
    let configuration = Configuration::read().map_err(invalid)?;
    let mut options = WriteOptions::default().block_size(configuration.block_size());
    options.replication = configuration.number("dfs.replication").map(|number| number as u32);
    let mut storage_policy = None;
    for (name, value) in url.options()? {
        if name == STORAGE_POLICY {
            storage_policy = Some(value);
            continue;
        }
        let most = if name == "block_size" { BLOCK_BYTES_MAX } else { REPLICATION_MAX };
        let number = value.parse::<u32>().ok().filter(|number| (1..=most).contains(number));
        let number =
            number.ok_or_else(|| invalid(format!("expected {name}= a number from 1 to {most}, found {value:?}")))?;
        match name.as_str() {
            "block_size" => options.block_size = Some(u64::from(number)),
            _ => options.replication = Some(number),
        }
    }
    let network = shared.remote.network(&url.usual())?;
    let root = format!("/{}", encoded(&path));
    let server = format!("{}://{authority}", url.scheme);
    let mut settings: Vec<(String, String)> = TRIES.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    if url.scheme == "viewfs" {
        let fallback = format!("fs.viewfs.mounttable.{authority}.linkFallback");
        // The client library wants one, although no path of this store is there.
        match (configuration.text(&fallback), configuration.mount(&authority, &root)) {
            (Some(_), _) => {}
            (None, Some((_, target))) => settings.push((fallback, target.to_owned())),
            (None, None) => {
                let links = configuration.links(&authority).join(", ");
                let message = format!("expected a path below a link of the mount table; its links: {links}");
                return Err(invalid(message));
            }
        }
    }
    settings.extend(keys_at(&configuration));
    let user = std::env::var("HADOOP_USER_NAME").ok();
    if user.as_deref() == Some("") {
        return Err(invalid("expected a name in HADOOP_USER_NAME, found none: unset it, or name the user".to_owned()));
    }
    let key = format!("{server} {settings:?} {user:?} {}", configuration.fingerprint());
    let Known { client, memory } = network.client(&key, || {
        let client = ClientBuilder::new()
            .with_url(&server)
            .with_config(settings)
            .with_io_runtime(network.handle(&server)?)
            .build()
            .map_err(|error| failure::of(&error, Action::Open.word(), url.shown()))?;
        Ok(Known { client, memory: Arc::default() })
    })?;
    let rest = Rest::new(network.direct().map_err(invalid)?, &configuration, url.scheme, &authority, &root, memory);
    let rest = rest.map_err(invalid)?;
    let umask = configuration.umask().map_err(invalid)?;
    options.permission = 0o666 & !umask;
    let (reports, sending) = (shared.reports.clone(), Flow::up_to(WRITES_MAX));
    let root = root.trim_end_matches('/').to_owned();
    let (dir_permission, made) = (0o777 & !umask, Mutex::default());
    let url = url.usual();
    let cluster =
        Cluster { url, root, client, options, storage_policy, dir_permission, made, rest, network, reports, sending };
    Ok(Arc::new(HdfsStore { cluster: Arc::new(cluster) }))
}

/// Prepares reads and writes in encryption zones; returns a setting in place of one that the client library refuses.
fn keys_at(configuration: &Configuration) -> Option<(String, String)> {
    let at = configuration.text(KEYS_AT)?;
    if !at.starts_with("kms://") {
        return Some((KEYS_AT.to_owned(), String::new()));
    }
    // The library's client of these servers takes TLS from the process, and panics without it. It may be there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    None
}

/// Encodes the `:` of a name, which HDFS refuses, and the `%` that encodes it.
fn encoded(name: &str) -> Cow<'_, str> {
    if name.contains(['%', ':']) { name.replace('%', "%25").replace(':', "%3A").into() } else { name.into() }
}

/// Returns the error of what took longer than [`STILL_MAX`].
fn too_late() -> HdfsError {
    let message = format!("nothing came within {} s", STILL_MAX.as_secs());
    HdfsError::IOError(std::io::Error::new(std::io::ErrorKind::TimedOut, message))
}

/// Runs one step of a call, as long as it may take.
async fn step<T>(step: impl Future<Output = hdfs_native::Result<T>>) -> hdfs_native::Result<T> {
    timeout(STILL_MAX, step).await.unwrap_or_else(|_| Err(too_late()))
}

/// Repeats a question for as long as a NameNode may take to come back.
fn patient<T>(ask: impl Fn() -> Result<T>) -> Result<T> {
    let until = Instant::now() + SETTLED_WITHIN;
    loop {
        match ask() {
            Err(error) if error.kind == Kind::Unavailable && Instant::now() < until => sleep(SETTLES_EVERY),
            done => return done,
        }
    }
}

/// A directory of HDFS as a [`Store`].
struct HdfsStore {
    cluster: Arc<Cluster>,
}

/// Client of a cluster that the stores of a process share, and what they remember of its REST interface.
#[derive(Clone)]
struct Known {
    client: Client,
    memory: Arc<Mutex<rest::Memory>>,
}

/// Directory of a store, with its client and network.
struct Cluster {
    url: String,
    /// Directory of the store, without a slash at its end; empty for the root of HDFS.
    root: String,
    client: Client,
    /// Options of new files: block size and replication.
    options: WriteOptions,
    /// Storage policy of the directory; by default that of the one above.
    storage_policy: Option<String>,
    /// Permission of new directories.
    dir_permission: u32,
    /// Directories that this store has made, or found.
    made: Mutex<HashSet<String>>,
    rest: Rest,
    network: Arc<Network>,
    reports: Reports,
    sending: Flow,
}

impl Cluster {
    fn fail(&self, kind: Kind, op: Action, name: &str, message: impl Into<String>) -> Error {
        Error::new(kind, op.word(), join(&self.url, name), message)
    }

    /// Returns the path of an object.
    fn path(&self, op: Action, name: &str) -> Result<String> {
        name::check(op.word(), &self.url, name)?;
        Ok(format!("{}/{}", self.root, encoded(name)))
    }

    /// Returns the path of a directory, which may be the store's own.
    fn dir(&self, op: Action, dir: &str) -> Result<String> {
        name::check_dir(op.word(), &self.url, dir)?;
        Ok(match (dir, self.root.as_str()) {
            ("", "") => "/".to_owned(),
            ("", root) => root.to_owned(),
            (dir, root) => format!("{root}/{}", encoded(dir)),
        })
    }

    /// Returns the path of a new temporary file beside a path.
    fn beside(path: &str) -> Result<String> {
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        Ok(format!("{dir}/{}", name::temporary()?))
    }

    fn block_size(&self) -> u64 {
        self.options.block_size.unwrap_or(configuration::BLOCK_BYTES)
    }

    /// Runs a call that moves a range of an object and makes these requests.
    fn moved<T>(
        &self,
        op: Action,
        name: &str,
        range: Range<u64>,
        requests: Requests,
        call: impl Future<Output = hdfs_native::Result<T>>,
    ) -> Result<T> {
        self.ran(op, name, requests, call, |_| range)
    }

    /// Runs a call whose outcome tells the range of the object that it moved.
    fn ran<T>(
        &self,
        op: Action,
        name: &str,
        requests: Requests,
        call: impl Future<Output = hdfs_native::Result<T>>,
        range: impl FnOnce(Option<&T>) -> Range<u64>,
    ) -> Result<T> {
        let began = Instant::now();
        let done = self.network.wait(&self.url, call)?;
        let done = done.map_err(|error| failure::of(&error, op.word(), join(&self.url, name)));
        self.reports.asked(began, op, name, range(done.as_ref().ok()), requests, done.as_ref().err());
        done
    }

    /// Waits for what the REST interface tells, if anything.
    fn asked<T>(&self, call: impl Future<Output = Option<T>>) -> Option<T> {
        self.network.wait(&self.url, call).ok().flatten()
    }

    /// Runs one call to the NameNode.
    fn call<T>(
        &self,
        op: Action,
        name: &str,
        requests: Requests,
        call: impl Future<Output = hdfs_native::Result<T>>,
    ) -> Result<T> {
        self.moved(op, name, 0..0, requests, step(call))
    }

    /// Returns what the NameNode knows of a file.
    fn status(&self, op: Action, name: &str, path: &str) -> Result<FileStatus> {
        self.call(op, name, Requests { heads: 1, ..Requests::default() }, self.client.get_file_info(path))
    }

    fn remove(&self, op: Action, name: &str, path: &str) -> Result<()> {
        let requests = Requests { deletes: 1, ..Requests::default() };
        self.call(op, name, requests, self.client.delete(path, false)).map(|_| ())
    }

    /// Makes the directory of a path, once for each store. A directory that the NameNode makes by itself inherits the
    /// permissions of the one above.
    fn make_dir(&self, op: Action, name: &str, path: &str) -> Result<()> {
        let made = || self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        if dir.is_empty() || made().contains(dir) {
            return Ok(());
        }
        let requests = Requests { puts: 1, ..Requests::default() };
        match self.call(op, name, requests, self.client.mkdirs(dir, self.dir_permission, true)) {
            Err(error) if error.kind == Kind::Conflict => {
                return Err(self.fail(Kind::Invalid, op, name, format!("expected a directory at {dir}, found a file")));
            }
            done => done?,
        }
        made().insert(dir.to_owned());
        Ok(())
    }

    /// Has the NameNode place the blocks of all files in the store's directory by a storage policy.
    fn place_by(&self, policy: &str) -> Result<()> {
        let op = Action::Create;
        self.make_dir(op, "", &format!("{}/", self.root))?;
        let began = Instant::now();
        let set = self.network.wait(&self.url, self.rest.set_storage_policy(&self.root, policy))?;
        let set = set.map_err(|why| {
            let message = format!("{STORAGE_POLICY}={policy} was not set: {why}; `hdfs storagepolicies -listPolicies`");
            self.fail(self.rest.kind_of(&why), op, "", message)
        });
        self.reports.asked(began, op, "", 0..0, Requests { puts: 1, ..Requests::default() }, set.as_ref().err());
        set
    }

    /// Writes a small file of its own.
    fn write_whole(&self, op: Action, name: &str, path: &str, bytes: &[u8]) -> Result<()> {
        self.make_dir(op, name, path)?;
        let (length, bytes) = (bytes.len() as u64, vec![Bytes::copy_from_slice(bytes)]);
        let requests = Requests { puts: writer::CALLS, ..Requests::default() };
        self.moved(op, name, 0..length, requests, writer::write_file(&self.client, path, &self.options, false, bytes))
    }

    fn rename(&self, op: Action, name: &str, from: &str, to: &str, overwrite: bool) -> Result<()> {
        let requests = Requests { puts: 1, ..Requests::default() };
        self.call(op, name, requests, self.client.rename(from, to, overwrite))
    }

    /// Settles the rename of `temporary` to `path`, whose outcome is unknown after `error`.
    fn settled(&self, name: &str, temporary: &str, path: &str, error: Error) -> Result<()> {
        let op = Action::Publish;
        // Once the file is removed, a rename that is still on its way does nothing.
        let requests = Requests { deletes: 1, ..Requests::default() };
        let unsure = |unseen: &Error| {
            let message = format!(
                "{}, and it cannot be looked for: {}; the object may have been published: check for it before retrying",
                error.message, unseen.message
            );
            Error { wait: Some(Duration::ZERO), ..self.fail(Kind::Unavailable, op, name, message) }
        };
        let removed = patient(|| self.call(op, name, requests, self.client.delete(temporary, false)));
        if removed.map_err(|unseen| unsure(&unseen))? {
            return Err(error);
        }
        patient(|| self.status(op, name, path)).map(drop).map_err(|unseen| unsure(&unseen))
    }
}

impl Store for HdfsStore {
    fn url(&self) -> &str {
        &self.cluster.url
    }

    /// Returns needs that keep blocks large and connections few.
    fn needs(&self) -> Needs {
        Needs {
            pieces: Pieces::Parts(PARTS),
            reads: ReadNeeds { gap_bytes: MIB, request_bytes: REQUEST_BYTES, in_flight: READS_MAX },
            refuses_taken_names: true,
            lists_are_current: true,
        }
    }

    fn can_publish(&self) -> Result<()> {
        let Cluster { rest, root, url, .. } = &*self.cluster;
        let policy = self.cluster.asked(rest.policy(root));
        match policy.filter(|policy| WRONG_PARITY.iter().any(|codec| policy.starts_with(codec))) {
            None => self.cluster.storage_policy.as_deref().map_or(Ok(()), |policy| self.cluster.place_by(policy)),
            Some(policy) => {
                let message = format!(
                    "expected replication, or an erasure coding policy of Reed-Solomon (RS-3-2, RS-6-3, RS-10-4), \
                     found {policy}: the client library writes parity of it from which lost blocks come back wrong; \
                     set another policy on the run's directory (`hdfs ec -setPolicy`), or none"
                );
                Err(Error::new(Kind::Unsupported, "save", url, message))
            }
        }
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>> {
        let (cluster, op) = (&self.cluster, Action::Create);
        let path = cluster.path(op, name)?;
        if bytes > PARTS.object_bytes_max() {
            let message = format!("expected an object of at most {} bytes, found {bytes}", PARTS.object_bytes_max());
            return Err(cluster.fail(Kind::Exhausted, op, name, message));
        }
        cluster.make_dir(op, name, &path)?;
        let part_bytes = PARTS.of(bytes);
        let options = cluster.options.clone().block_size(cluster.block_size().max(part_bytes));
        let requests = Requests { puts: 1, ..Requests::default() };
        let first = cluster.call(op, name, requests, cluster.client.create(&path, &options))?;
        let number = getrandom::u64().map_err(|error| cluster.fail(Kind::Internal, op, name, error.to_string()))?;
        let paths = writer::paths(&path, bytes.div_ceil(part_bytes).max(1), number);
        let (cluster, name) = (Arc::clone(cluster), name.to_owned());
        Ok(Box::new(HdfsWriter::new(cluster, name, paths, bytes, part_bytes, options, first)))
    }

    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)> {
        let (cluster, op) = (&self.cluster, Action::Open);
        let path = cluster.path(op, name)?;
        let requests = Requests { heads: 1, gets: u64::from(head_bytes > 0), ..Requests::default() };
        let open = async {
            let file = step(cluster.client.read(&path)).await?;
            let mut head = vec![0; (file.file_length() as u64).min(head_bytes) as usize];
            reader::read(&file, &mut [(0, &mut head)]).await?;
            Ok((file, head))
        };
        let (file, head) =
            cluster.ran(op, name, requests, open, |found| 0..found.map_or(0, |(_, head)| head.len() as u64))?;
        Ok((Box::new(HdfsReader { cluster: Arc::clone(cluster), name: name.to_owned(), path, file }), head))
    }

    fn size(&self, name: &str) -> Result<u64> {
        let path = self.cluster.path(Action::Open, name)?;
        let found = self.cluster.status(Action::Open, name, &path)?;
        if found.isdir {
            return Err(self.cluster.fail(Kind::Corrupt, Action::Open, name, "expected an object, found a directory"));
        }
        Ok(found.length as u64)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (cluster, op) = (&self.cluster, Action::Put);
        let path = cluster.path(op, name)?;
        let temporary = Cluster::beside(&path)?;
        let done = cluster
            .write_whole(op, name, &temporary, bytes)
            .and_then(|()| cluster.rename(op, name, &temporary, &path, true));
        if done.is_err() {
            // What cannot be removed now goes with the next sweep.
            let _ = cluster.remove(Action::Abort, name, &temporary);
        }
        done
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (cluster, op) = (&self.cluster, Action::Publish);
        let path = cluster.path(op, name)?;
        let temporary = Cluster::beside(&path)?;
        if let Err(error) = cluster.write_whole(op, name, &temporary, bytes) {
            let _ = cluster.remove(Action::Abort, name, &temporary);
            return Err(error);
        }
        match cluster.rename(op, name, &temporary, &path, false) {
            Ok(()) => Ok(()),
            Err(error) => cluster.settled(name, &temporary, &path, error),
        }
    }

    fn also_named(&self, _: &str, name: &str, _: u64) -> Result<()> {
        Err(self.cluster.fail(Kind::Unsupported, Action::Copy, name, crate::NO_SECOND_NAME))
    }

    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()> {
        self.cluster.sending.write_all(writes, &|write| match write.object.storage().downcast_ref::<HdfsWriter>() {
            Some(object) => object.send(write),
            None => write.make().map_err(|error| Box::new((write, error))),
        })
    }

    fn sync(&self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| name::check(Action::Sync.word(), &self.cluster.url, name))
    }

    fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        let (cluster, op) = (&self.cluster, Action::List);
        let path = cluster.dir(op, dir)?;
        let requests = Requests { lists: 1, ..Requests::default() };
        let found = cluster.call(op, dir, requests, cluster.client.list_status(&path, false))?;
        if found.iter().any(|status| status.path == path) {
            return Err(cluster.fail(Kind::NotFound, op, dir, "expected a directory, found a file"));
        }
        let entry = |status: FileStatus| {
            let stored = status.path.rsplit('/').next()?;
            let name = decoded(stored).filter(|name| encoded(name) == stored).unwrap_or_else(|| stored.to_owned());
            let modified = UNIX_EPOCH.checked_add(Duration::from_millis(status.modification_time));
            let bytes = if status.isdir { 0 } else { status.length as u64 };
            let is_good = name::flaw(&name).is_none();
            is_good.then_some(Entry { name, is_dir: status.isdir, is_link: false, bytes, modified })
        };
        let mut entries: Vec<Entry> = found.into_iter().filter_map(entry).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.cluster.path(Action::Delete, name)?;
        self.cluster.remove(Action::Delete, name, &path)
    }

    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()> {
        let (cluster, op) = (&self.cluster, Action::Delete);
        let paths: Vec<String> = objects.iter().map(|name| cluster.path(op, name)).collect::<Result<_>>()?;
        let mut dirs: Vec<String> = dirs.iter().map(|dir| cluster.path(op, dir)).collect::<Result<_>>()?;
        // A directory is empty once those within are gone.
        dirs.sort_by(|a, b| b.cmp(a));
        let first = objects.first().copied().unwrap_or_default();
        let requests = Requests { deletes: (paths.len() + dirs.len()) as u64, ..Requests::default() };
        let all = async {
            stream::iter(paths.iter().map(|path| step(cluster.client.delete(path, false))))
                .buffer_unordered(DELETES_AT_A_TIME)
                .try_for_each(async |_| Ok(()))
                .await?;
            for dir in &dirs {
                match step(cluster.client.delete(dir, false)).await {
                    Err(error) if failure::is_not_empty(&error) => {}
                    done => _ = done?,
                }
            }
            Ok(())
        };
        cluster.moved(op, first, 0..0, requests, all)
    }

    fn delete_tree(&self, dir: &str) -> Result<()> {
        let (cluster, op) = (&self.cluster, Action::DeleteTree);
        let path = cluster.path(op, dir)?;
        let requests = Requests { deletes: 1, ..Requests::default() };
        cluster.call(op, dir, requests, cluster.client.delete(&path, true)).map(|_| ())
    }

    fn free_bytes(&self) -> Option<u64> {
        let Cluster { rest, root, options, .. } = &*self.cluster;
        self.cluster.asked(async {
            let left = rest.quota(root).await.map(|quota| quota.left_bytes);
            let least = left.into_iter().chain(rest.free_bytes().await).min()?;
            Some(least / rest.copies(root, options.replication).await)
        })
    }

    fn service(&self) -> Option<&dyn Service> {
        Some(self)
    }
}

impl Service for HdfsStore {
    fn kept_crc64(&self, name: &str) -> Result<Option<u64>> {
        Err(self.cluster.fail(Kind::Unsupported, Action::Checksum, name, crate::NO_KEPT_CRC))
    }

    fn location(&self) -> Option<Location> {
        None
    }

    fn copy_within(&self, _: &Location, _: &str, name: &str, _: u64) -> Result<()> {
        Err(self.cluster.fail(Kind::Unsupported, Action::Copy, name, crate::NO_COPY))
    }

    fn uploads(&self) -> Result<Vec<Upload>> {
        Ok(Vec::new())
    }

    fn abort_upload(&self, _: &Upload) -> Result<()> {
        Ok(())
    }

    fn quota(&self) -> Option<Quota> {
        let Cluster { rest, root, options, .. } = &*self.cluster;
        self.cluster.asked(async {
            let Quota { of, bytes, left_bytes } = rest.quota(root).await?;
            let copies = rest.copies(root, options.replication).await;
            // Asked last: the other ranks may have begun to write.
            let (files, used) = rest.used(root).await;
            let own = (used / copies).saturating_add(files.saturating_mul(PARTS.bytes_max));
            let bytes = bytes / copies;
            Some(Quota { of, bytes, left_bytes: bytes.min((left_bytes / copies).saturating_add(own)) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_no_colon_and_come_back() {
        for name in ["a", "a:b", "50%", "a%3Ab", "x/y:z"] {
            let stored = encoded(name);
            assert!(!stored.contains(':'), "{stored}");
            assert_eq!(decoded(&stored).as_deref(), Some(name));
        }
    }
}
