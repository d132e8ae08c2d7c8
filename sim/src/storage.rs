//! Where a job keeps its checkpoints. What goes wrong, and what must be true of the checkpoints, is the same wherever
//! they are.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardfast_engine::Result;
use shardfast_store::Store;
use shardfast_store::disk::Disk;
use shardfast_store::local::LocalStore;
use shardfast_store::testing::simdisk::SimDisk;

use crate::service::Service;

/// Where the jobs of a run keep their checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Medium {
    /// A disk that all ranks share, below the real local store.
    Disk,
    /// A service that speaks S3's protocol, below the real client: each rank has connections of its own.
    Objects,
}

impl Medium {
    /// The command that runs that seed again and tells what happened.
    pub fn replay(self, seed: u64) -> String {
        let storage = if self == Medium::Disk { "" } else { " --storage objects" };
        format!("cargo run -p shardfast-sim -- --seed {seed}{storage}")
    }
}

/// The storage of all ranks; clones are the same one.
#[derive(Clone)]
pub(crate) enum Storage {
    Disk(SimDisk),
    Objects(Service),
}

impl Storage {
    /// An empty one. A service takes objects in parts of so many bytes.
    pub(crate) fn new(medium: Medium, part_bytes: u64) -> Storage {
        match medium {
            Medium::Disk => Storage::Disk(SimDisk::new()),
            Medium::Objects => Storage::Objects(Service::new(part_bytes)),
        }
    }

    /// The store at that place, as a program sees it that nothing happens to.
    ///
    /// # Errors
    /// The store's errors.
    pub(crate) fn open(&self, place: &str) -> Result<Arc<dyn Store>> {
        match self {
            Storage::Disk(disk) => Ok(Arc::new(LocalStore::on(disk.clone(), PathBuf::from(place))?)),
            Storage::Objects(service) => service.open(place),
        }
    }

    /// What a later job finds if all processes end now: of a disk what a loss of power leaves, by chance; of a service
    /// all that was carried out, uploads that are not complete included.
    pub(crate) fn left(&self, chance: u64) -> Storage {
        match self {
            Storage::Disk(disk) => Storage::Disk(disk.crash(chance)),
            Storage::Objects(service) => Storage::Objects(service.left()),
        }
    }

    /// Turns a bit of the byte `at` of a file.
    pub(crate) fn damage(&self, file: &Path, at: u64, bit: u64) {
        match self {
            Storage::Disk(disk) => {
                let open = disk.open_read(file, false).expect("a file of the checkpoint");
                let mut byte = [0];
                disk.pread(&open, &mut byte, at).expect("a byte of the file");
                byte[0] ^= 1 << bit;
                disk.pwrite(&open, &byte, at).expect("a byte of the file");
            }
            Storage::Objects(service) => service.damage(file, at, bit),
        }
    }
}
