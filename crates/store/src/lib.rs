//! Moves named bytes and publishes one name atomically.
//!
//! A [`Store`] is a tree of objects below one URL. This crate knows nothing of what the bytes mean: no tensors, no
//! manifests, no steps, no ranks. Every backend is one file and one line of [`open`]'s table of schemes, and is tested
//! by the one `conformance` suite (feature `testing`).
//!
//! ```
//! use shardfast_store::{Kind, open};
//!
//! let store = open("memory://doc/run")?;
//! let mut object = store.create("step/data", 5)?;
//! object.write_at(0, b"bytes")?;
//! object.finish()?; // the contents are durable
//! store.sync(&["step/data"])?; // and so is the name
//! store.publish("step/COMMIT", b"done")?; // atomically visible
//! assert_eq!(store.publish("step/COMMIT", b"again").unwrap_err().kind, Kind::Conflict);
//! assert_eq!(store.read("step/COMMIT", 100)?, b"done");
//! # Ok::<(), shardfast_store::Error>(())
//! ```

use std::any::Any;
use std::sync::Arc;
use std::time::SystemTime;

#[cfg(feature = "azure")]
mod azure;
mod cachestat;
pub mod disk;
mod error;
#[cfg(feature = "gcs")]
mod gcs;
#[cfg(feature = "hdfs")]
mod hdfs;
#[cfg(feature = "keeper")]
pub mod keeper;
pub mod local;
mod map;
pub mod memory;
mod name;
mod needs;
pub mod objects;
mod observe;
mod open;
mod place;
#[cfg(feature = "remote")]
mod remote;
mod ring;
#[cfg(feature = "s3")]
mod s3;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
pub mod uring;
mod write;

pub use error::{Error, Kind, Result, said_bytes};
pub use local::probe;
pub use map::Mapping;
pub use name::{is_temporary, temporary};
pub use needs::{Needs, Parts, Pieces, ReadNeeds, Requests};
pub use observe::{Action, Event, Observer};
pub use open::{absolute, open, open_on};
pub use place::{join, split};
pub use write::{Buffer, Next, Write, Writes, by_threads};

/// Named bytes below one URL.
///
/// # Contract
///
/// **Names** are relative: UTF-8 components separated by `/`, each of 1 to 255 bytes and neither `.` nor `..`, no
/// backslash and no control character, 1024 bytes at most in all. Anything else is [`Kind::Invalid`]. A directory is
/// named the same way; `""` is the root. Directories come into being with the first object in them and are never
/// created by reading. A name is never both an object and a directory: the caller ensures that, and a backend may
/// refuse it with [`Kind::Conflict`] or [`Kind::Invalid`].
///
/// **Life of an object.** [`create`](Store::create) takes a name that is free; [`write_at`](ObjectWriter::write_at)
/// fills it in any order from any number of threads; [`finish`](ObjectWriter::finish) gives it its declared length and
/// makes its *contents* durable; [`sync`](Store::sync) makes its *name* durable. Until `finish` has returned, the
/// object under the name is undefined: absent, a part, or zeros. An object is never changed after `finish`. A writer
/// that is dropped unfinished deletes its object if the store still answers; a crash leaves debris, which
/// [`list`](Store::list) may show and [`delete`](Store::delete) and [`delete_tree`](Store::delete_tree) remove. Debris
/// that has a name of the store's own choice [is recognized by it](is_temporary).
///
/// **Publishing.** [`publish`](Store::publish) is atomic and create-if-absent: among any number of publishers of one
/// name, on any number of machines, exactly one gets `Ok`, and a reader finds the whole object or none. It returns
/// after the object and its name are durable. What `finish` and `sync` returned for earlier, in this process or in
/// another, survives any crash that the published name survives: this is what makes a commit record a proof.
///
/// **Durable** means: survives the loss of power of every machine involved, as far as the file system, the device and
/// the service keep their own promises. There is no switch. The `memory` backend is the exception that its name states.
///
/// **Failure.** What fails with [`Kind::Unavailable`] may be tried again, unless the error [is
/// final](Error::is_final). A failed flush is: of an object's contents in `finish`, and of a directory wherever one is
/// synced. A kernel forgets a failed write-back once it has reported it, so a second attempt proves nothing. Write the
/// objects concerned again under other names. An error of `publish` leaves the name as it was, unless it is
/// [`Kind::Unavailable`] and its message says that the object may have been published: check for it before retrying. A
/// failed `create` may have taken the name.
///
/// **Stores around stores** hand on every method: none has a default that a wrapper could forget, and so bring a store
/// down to its slowest way. They hand on writes as they are, with their own writers as the [objects](Write::object).
///
/// **Concurrency.** Every method may be called from any thread, and every name used by any number of processes.
pub trait Store: Send + Sync {
    /// Returns the URL with which [`open`] reaches this store again.
    fn url(&self) -> &str;

    /// Returns how objects are best written and read here; the same at every call.
    fn needs(&self) -> Needs;

    /// Checks whether [`publish`](Store::publish) can keep its contract here, as far as that can be known before.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] with the reason if the storage cannot create-if-absent atomically.
    fn can_publish(&self) -> Result<()>;

    /// Begins the new object `name` of exactly `bytes` bytes, and reserves space for it if the backend can.
    ///
    /// # Errors
    /// [`Kind::Conflict`] if the name is taken (some backends detect that only in `finish`), [`Kind::Exhausted`] if
    /// there is no space, before a byte has been written.
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn ObjectWriter>>;

    /// Opens the object `name` for any number of reads, and returns its first `head_bytes` bytes, or all of it if it is
    /// shorter; in one request, if requests cost. Never waits for something that is no object, such as a pipe. The
    /// reader reads the object that existed now: after a replacement it returns the same bytes, or an error.
    ///
    /// # Errors
    /// [`Kind::NotFound`] if there is no such object; [`Kind::Corrupt`] if something that can be no object has the
    /// name, where the storage has such things: a directory, a pipe, a device.
    fn open_head(&self, name: &str, head_bytes: u64) -> Result<(Box<dyn ObjectReader>, Vec<u8>)>;

    /// Returns the length of the object `name`, from metadata alone, as it is now: changes by other machines before the
    /// call are seen.
    ///
    /// # Errors
    /// As [`open_head`](Store::open_head).
    fn size(&self, name: &str) -> Result<u64>;

    /// Stores the small object `name`, and replaces an existing one: readers see the old or the new one, whole.
    /// Durable, name and contents, when it returns.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Stores the small object `name` if there is none: atomic and durable as the contract says.
    ///
    /// # Errors
    /// [`Kind::Conflict`] if the name is taken; [`Kind::Unsupported`] if the storage cannot create-if-absent
    /// atomically; [`Kind::Unavailable`] with the words "may have been published" if that is unknown.
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Gives the object `from` of `bytes` bytes the second name `name`, without moving its bytes through this process:
    /// durable, name and contents, also those of an object that was never finished. An object that had the name is
    /// replaced: readers see the old or the new one, whole. Later changes of one of the two names do not affect the
    /// other.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the storage gives no second names; [`Kind::NotFound`] if there is no such object.
    fn also_named(&self, from: &str, name: &str, bytes: u64) -> Result<()>;

    /// Makes the writes that `writes` yields until there are no more, into objects of this store. The storage chooses
    /// how, and how many at a time. Buffers are dropped as soon as they are written; a failed write is
    /// [returned](Writes::failed) whole.
    ///
    /// # Errors
    /// The first error that `writes` does not accept; no write is taken after it, and none is in flight any more.
    fn write_all<'a>(&self, writes: &dyn Writes<'a>) -> Result<()>;

    /// Makes the names of finished objects durable, and the directories from them up to the store's root. One call for
    /// many objects is cheaper than many calls.
    fn sync(&self, names: &[&str]) -> Result<()>;

    /// Lists the directory `dir` (`""` is the root), sorted by name. Entries whose names this crate refuses are left
    /// out.
    ///
    /// # Errors
    /// [`Kind::NotFound`] if there is no such directory; also for an empty one in a backend without directories.
    fn list(&self, dir: &str) -> Result<Vec<Entry>>;

    /// Removes the object `name`, durably. A missing object is no error.
    fn delete(&self, name: &str) -> Result<()>;

    /// Removes these objects, then those of these directories that are empty by then; durably but not atomically.
    /// Removes nothing else: a directory with other entries stays. A missing object or directory is no error.
    fn delete_all(&self, objects: &[&str], dirs: &[&str]) -> Result<()>;

    /// Removes the directory `dir` (not the root) and everything below it, durably but not atomically: a crash may
    /// leave any part of it. A missing directory is no error.
    fn delete_tree(&self, dir: &str) -> Result<()>;

    /// Returns the bytes that can still be stored here now; `None` where the storage does not tell.
    fn free_bytes(&self) -> Option<u64>;

    /// Returns what only a service offers; `None` if this machine reaches the storage without requests.
    fn service(&self) -> Option<&dyn Service>;
}

/// Operations of a storage that a service runs. [`Store::service`] returns it.
pub trait Service: Send + Sync {
    /// Returns the CRC-64/NVME of the whole object `name` that the service computed when it received the object, and
    /// keeps; `None` if it keeps none. Reads no byte of the object.
    ///
    /// # Errors
    /// As [`Store::open_head`]; [`Kind::Unsupported`] for storage that keeps none of any object.
    fn kept_crc64(&self, name: &str) -> Result<Option<u64>>;

    /// Returns the place of its objects at a service that copies objects by itself; `None` without such a
    /// service.
    fn location(&self) -> Option<Location>;

    /// Copies the object `source` of `bytes` bytes from a place of the same service to `name` here, without moving its
    /// bytes through this process. The name must be free.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] where there is no such service; [`Kind::NotFound`] if there is no such object.
    fn copy_within(&self, from: &Location, source: &str, name: &str, bytes: u64) -> Result<()>;

    /// Lists uploads into this store that are begun and not completed, by any process. Empty if writers leave only
    /// objects, or if the service drops uploads by itself.
    fn uploads(&self) -> Result<Vec<Upload>>;

    /// Aborts an upload, and drops the parts that were sent. A missing upload is no error.
    fn abort_upload(&self, upload: &Upload) -> Result<()>;

    /// Returns the quota on this store, below which its own objects count as room; `None` if there is none, or if the
    /// service does not tell now.
    fn quota(&self) -> Option<Quota>;
}

/// Message of a storage that keeps no checksums.
const NO_KEPT_CRC: &str = "this storage keeps no checksums of whole objects";

/// Message of a storage that copies nothing by itself.
const NO_COPY: &str = "this storage does not copy objects by itself";

/// Message of a storage whose objects have one name each.
const NO_SECOND_NAME: &str = "this storage gives objects no second name";

/// Number of writes in flight if each takes a thread: enough to keep a disk's queue busy.
const WRITE_THREADS: usize = 4;

/// Bytes of a small object that are read with the request that opens it.
const READ_HEAD_BYTES: u64 = 8 << 20;

impl dyn Store + '_ {
    /// Lists the directory of an object that is not as it should be, before it is asked for again: a client of a
    /// network file system may remember its length and bytes from the time when it was written. Does nothing where
    /// lists are current: answers are those of now there.
    pub fn look_anew(&self, name: &str) {
        if !self.needs().lists_are_current {
            _ = self.list(name::parent(name).unwrap_or_default());
        }
    }

    /// Opens the object `name`, as [`open_head`](Store::open_head) does, without its head.
    ///
    /// # Errors
    /// As [`open_head`](Store::open_head).
    pub fn open(&self, name: &str) -> Result<Box<dyn ObjectReader>> {
        Ok(self.open_head(name, 0)?.0)
    }

    /// Returns the checksum of an object as [`Service::kept_crc64`] does.
    ///
    /// # Errors
    /// As there; [`Kind::Unsupported`] if no service has the object.
    pub fn kept_crc64(&self, name: &str) -> Result<Option<u64>> {
        let none = || Error::new(Kind::Unsupported, "checksum", join(self.url(), name), NO_KEPT_CRC);
        self.service().ok_or_else(none)?.kept_crc64(name)
    }

    /// Reads the whole small object `name`.
    ///
    /// # Errors
    /// As [`Store::open_head`]; [`Kind::Invalid`] if it is larger than `bytes_max`, before memory is allocated for more
    /// than its head.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Vec<u8>> {
        let (object, mut contents) = self.open_head(name, bytes_max.min(READ_HEAD_BYTES))?;
        let fail = |kind, message| Error::new(kind, "read", join(self.url(), name), message);
        let bytes = object.bytes();
        if bytes > bytes_max {
            return Err(fail(Kind::Invalid, format!("expected at most {bytes_max} bytes, found {bytes}")));
        }
        let length = usize::try_from(bytes).map_err(|e| fail(Kind::Exhausted, e.to_string()))?;
        let head = contents.len();
        contents.try_reserve_exact(length - head).map_err(|e| fail(Kind::Exhausted, e.to_string()))?;
        contents.resize(length, 0);
        if head < length {
            object.read_at(head as u64, &mut contents[head..])?;
        }
        Ok(contents)
    }
}

/// An object that is being written; see the [contract](Store#contract).
pub trait ObjectWriter: Send + Sync {
    /// Returns the writer of the storage itself, which [`Store::write_all`] recognizes: a writer around another one
    /// returns that of the other.
    fn storage(&self) -> &dyn Any;

    /// Returns the alignment of the address, the offset and the length of `write_at`, in bytes: a power of two, at most
    /// 4096. 1 if the backend needs none.
    fn alignment(&self) -> usize;

    /// Writes all of `bytes` at `offset`. Any order, any thread; ranges of concurrent calls do not overlap.
    ///
    /// If the object's length is no multiple of the alignment, the caller pads the last write; `finish` cuts the
    /// padding off.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a range that is misaligned or exceeds the object's padded length.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Ends the object at its declared length and makes its contents durable. Bytes never written read as zeros. No
    /// call may follow, unless it fails with an error that is not [final](Error::is_final).
    fn finish(&mut self) -> Result<()>;
}

/// An open object; see the [contract](Store#contract).
pub trait ObjectReader: Send + Sync {
    /// Returns the object's length when it was opened, in bytes.
    fn bytes(&self) -> u64;

    /// Returns further ways to read the object, if this machine's page cache caches it.
    fn page_cache(&self) -> Option<&dyn PageCache>;

    /// Fills `buf` from `offset`, or fails. Any order, any thread. If the address of `buf` is a multiple of 4096, the
    /// storage may fill it without a copy.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] if the object ends before the range does.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Reads several ranges that lie near each other like [`read_at`](Self::read_at), by ascending offset; they may
    /// overlap. Makes one request, if requests cost. After an error any part of the ranges may have been filled.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()>;

    /// Returns the other machine whose memory the object is read from; `None` for any other place.
    fn host(&self) -> Option<&str>;

    /// Reads a range like [`read_at`](Self::read_at) again after damage: in another way if there is one, from the
    /// medium.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

/// Ways to read an object of a storage that this machine's page cache caches.
pub trait PageCache {
    /// Maps the whole object into memory, for reading.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the storage is no file system.
    fn map(&self) -> Result<Mapping>;

    /// Announces that a range will be read soon, so that the storage may begin to fetch it. Returns at once.
    /// `shared_on_host` is whether other processes of this machine will read it too, so that it is kept for them.
    fn prefetch(&self, offset: u64, bytes: u64, shared_on_host: bool) -> Fetch;

    /// Returns how many bytes of a range this machine has in memory already; `None` if unknown.
    fn cached_bytes(&self, offset: u64, bytes: u64) -> Option<u64>;
}

/// Implements [`ObjectReader::read_ranges`] with one read for each range.
///
/// # Errors
/// As [`ObjectReader::read_at`].
pub fn one_by_one(object: &dyn ObjectReader, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
    ranges.iter_mut().try_for_each(|(offset, buf)| object.read_at(*offset, buf))
}

/// Way in which an announced range comes into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// The range is in memory.
    Cached,
    /// The kernel has begun to fetch it.
    Begun,
    /// Reading fetches it, and waits.
    WhenRead,
}

impl Fetch {
    /// Returns whether few threads suffice, since none waits for long.
    pub fn is_ahead(self) -> bool {
        matches!(self, Fetch::Cached | Fetch::Begun)
    }
}

/// An entry of [`Store::list`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in the listed directory: one component.
    pub name: String,
    /// `true` for a directory.
    pub is_dir: bool,
    /// `true` for a link to an object or a directory elsewhere, so that operations below it act there.
    pub is_link: bool,
    /// Length of the object, in bytes; 0 for a directory.
    pub bytes: u64,
    /// Time of its last change, by the store's own clock, which may not be this machine's; `None` for a directory that
    /// is only a common prefix of names.
    pub modified: Option<SystemTime>,
}

/// An upload that is begun and not completed: no list of objects shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Name of the object that it would become.
    pub name: String,
    /// Id of the upload at the service.
    pub id: String,
    /// Time of its beginning, by the store's own clock.
    pub begun: SystemTime,
}

/// A place at a service that copies objects by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Name of the service: equal for places between which it copies.
    pub service: String,
    /// Name of the bucket.
    pub bucket: String,
    /// Prefix of the objects' names: empty, or ending in `/`.
    pub prefix: String,
}

/// Limit of a service for the bytes of the objects in some directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Directory, as the service calls it.
    pub of: String,
    /// Bytes of objects that fit in all.
    pub bytes: u64,
    /// Bytes of objects that still fit.
    pub left_bytes: u64,
}

/// State that the stores of one program share: the devices on which names were claimed, and the client of remote
/// storage, which the first store that needs it makes.
#[derive(Default)]
pub struct Shared {
    claims: Arc<local::Claims>,
    #[cfg(feature = "remote")]
    remote: Arc<remote::Pool>,
    #[cfg(feature = "keeper")]
    keepers: Arc<keeper::Keepers>,
    reports: observe::Reports,
}

impl Shared {
    /// Returns the same state for stores that report their operations to `observer`.
    pub fn observed_by(&self, observer: Arc<dyn Observer>) -> Arc<Shared> {
        Arc::new(Shared {
            claims: Arc::clone(&self.claims),
            #[cfg(feature = "remote")]
            remote: Arc::clone(&self.remote),
            #[cfg(feature = "keeper")]
            keepers: Arc::clone(&self.keepers),
            reports: observe::Reports(Some(observer)),
        })
    }
}

#[cfg(feature = "testing")]
impl Shared {
    /// Makes the shared state of a test that aborts requests of remote storage without progress for `still_max`.
    #[cfg(feature = "remote")]
    pub fn impatient(still_max: std::time::Duration) -> Shared {
        Shared { remote: Arc::new(remote::Pool::impatient(still_max)), ..Shared::default() }
    }

    /// Makes the shared state of a test whose requests all go to a simulated service.
    #[cfg(feature = "s3")]
    pub fn simulated(service: testing::sims3::SimS3) -> Shared {
        Shared { remote: Arc::new(remote::Pool::simulated(Arc::new(service))), ..Shared::default() }
    }

    /// Makes the shared state of [`simulated`](Shared::simulated) with these parts of objects, and these maximum
    /// numbers of reads and small requests (with one, they have an order) and of parts sent at a time.
    #[cfg(feature = "s3")]
    pub fn simulated_in_parts(
        service: testing::sims3::SimS3,
        parts: Parts,
        reads_max: usize,
        sends_max: usize,
    ) -> Shared {
        Shared {
            remote: Arc::new(remote::Pool::simulated(Arc::new(service)).with(parts, reads_max, sends_max)),
            ..Shared::default()
        }
    }

    /// Returns how many stores of this machine's storage use it.
    pub fn users(&self) -> usize {
        Arc::strong_count(&self.claims) - 1
    }
}
