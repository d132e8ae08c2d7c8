//! The storage as one rank sees it.

use std::path::PathBuf;
use std::sync::Arc;

use shardfast_engine::Result;
use shardfast_store::Store;
use shardfast_store::local::LocalStore;

use crate::disk::RankDisk;
use crate::objects;
use crate::process::Process;
use crate::service::Service;
use crate::storage::Storage;

/// What one rank sees of the storage: it ends with the rank, and fails where a trap is set.
pub(crate) enum RankStorage {
    Disk(RankDisk),
    Objects(Service),
}

impl RankStorage {
    /// Its view for the rank of that process.
    pub(crate) fn of(storage: &Storage, process: &Arc<Process>) -> RankStorage {
        match storage {
            Storage::Disk(disk) => RankStorage::Disk(RankDisk { disk: disk.client(), process: Arc::clone(process) }),
            Storage::Objects(service) => RankStorage::Objects(objects::seen_by(process, service)),
        }
    }

    /// The store at that place.
    ///
    /// # Errors
    /// The store's errors.
    pub(crate) fn open(&self, place: &str) -> Result<Arc<dyn Store>> {
        match self {
            RankStorage::Disk(disk) => Ok(Arc::new(LocalStore::on(disk.clone(), PathBuf::from(place))?)),
            RankStorage::Objects(service) => service.open(place),
        }
    }
}
