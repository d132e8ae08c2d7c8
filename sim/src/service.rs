//! A service of objects and a client of it: the real client, below which only the connections are replaced.

use std::path::Path;
use std::sync::Arc;

use shardfast_engine::Result;
use shardfast_store::testing::sims3::{Ask, Fault, SimS3};
use shardfast_store::{Parts, Shared, Store, open_on};

/// The bucket.
const BUCKET: &str = "simulated";

/// Reads and small requests of a client that are made at a time: one, so that they have an order.
const READS_MAX: usize = 1;

/// Parts of a client that are sent at a time: each takes a thread.
const SENDS_MAX: usize = 3;

/// A service, and a client of it.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) holds: SimS3,
    part_bytes: u64,
    client: Arc<Shared>,
}

impl Service {
    /// An empty one, which takes objects in parts of so many bytes.
    pub(crate) fn new(part_bytes: u64) -> Service {
        Service::on(SimS3::default(), part_bytes)
    }

    /// A client of its own.
    fn on(holds: SimS3, part_bytes: u64) -> Service {
        let parts = Parts { bytes_min: part_bytes, bytes_max: 8 * part_bytes, count_max: 10_000 };
        let client = Arc::new(Shared::simulated_in_parts(holds.clone(), parts, READS_MAX, SENDS_MAX));
        Service { holds, part_bytes, client }
    }

    /// The store at that place.
    ///
    /// # Errors
    /// The store's errors.
    pub(crate) fn open(&self, place: &str) -> Result<Arc<dyn Store>> {
        Ok(open_on(&format!("s3://{BUCKET}{place}?endpoint=http://{BUCKET}"), &self.client)?)
    }

    /// The same service for another client, whose requests `way` sees before they are carried out.
    pub(crate) fn behind(&self, way: impl Fn(&Ask<'_>) -> Option<Fault> + Send + Sync + 'static) -> Service {
        Service::on(self.holds.behind(way), self.part_bytes)
    }

    /// A service that holds what this one holds now.
    pub(crate) fn left(&self) -> Service {
        Service::on(self.holds.snapshot(), self.part_bytes)
    }

    /// Turns a bit of the byte `at` of a file.
    pub(crate) fn damage(&self, file: &Path, at: u64, bit: u64) {
        self.holds.replace(&name(file), |bytes| bytes[at as usize] ^= 1 << bit);
    }
}

/// The name at the service of what a path of the simulation names.
pub(crate) fn name(path: &Path) -> String {
    format!("{BUCKET}{}", path.display())
}

/// The path of what has this name at the service.
pub(crate) fn path(name: &str) -> &Path {
    Path::new(name.strip_prefix(BUCKET).unwrap_or(name))
}
