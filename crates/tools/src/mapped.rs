//! A checkpoint mapped into memory for inspection: nothing is copied, and only verified blocks are shown.

use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

use shardfast_engine::Checkpoint;
use shardfast_format::{BLOCK_BYTES, LeafKind, Region, crc64};
use shardfast_store::Mapping;
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::reader::{Damage, OpenFile};

/// A checkpoint whose data files are mapped when they are first read. On one rank alone.
pub struct Mapped {
    checkpoint: Arc<Checkpoint>,
    files: Vec<Mutex<Option<Arc<File>>>>,
}

struct File {
    mapping: Mapping,
    open: Arc<OpenFile>,
    /// The blocks that were proven.
    proven: Mutex<Vec<bool>>,
}

/// One saved part of a tensor, row-major, proven.
pub struct View {
    /// Region of the tensor.
    pub region: Region,
    file: Arc<File>,
    bytes: Range<usize>,
}

impl Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.file.mapping[self.bytes.clone()]
    }
}

impl Mapped {
    /// Maps an open checkpoint.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Mapped {
        let files = checkpoint.manifest().files().iter().map(|_| Mutex::default()).collect();
        Mapped { checkpoint, files }
    }

    /// Returns the checkpoint itself.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the saved parts of the tensor that is leaf `leaf` of the manifest. Reads and verifies those of their
    /// blocks that were not verified before.
    ///
    /// # Errors
    /// `Invalid` when the leaf is no tensor; `Corrupt` as in [`Checkpoint::load`]; `Unsupported` when the storage
    /// cannot map objects.
    pub fn tensor(&self, leaf: usize) -> Result<Vec<View>> {
        let manifest = self.checkpoint.manifest();
        let is_tensor = leaf < manifest.len() && matches!(manifest.leaf(leaf).kind, LeafKind::Tensor { .. });
        if !is_tensor {
            return Err(Error::invalid(format!("{}: leaf {leaf} is no tensor", self.checkpoint.url())));
        }
        let name = || format!("{}/{}", manifest.leaf(leaf).key, manifest.leaf(leaf).name);
        let views = manifest.regions(leaf).map(|(region, extent)| {
            let file = self.file(extent.file)?;
            let range = extent.offset..extent.offset + extent.bytes;
            self.verify(extent.file, &file, range.clone())
                .map_err(|error| error.within(format!("{}: tensor {}", self.checkpoint.url(), name())))?;
            Ok(View { region, file, bytes: range.start as usize..range.end as usize })
        });
        views.collect()
    }

    fn file(&self, number: u32) -> Result<Arc<File>> {
        let mut file = self.files[number as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*file {
            return Ok(Arc::clone(file));
        }
        let open = self.checkpoint.files.open(number)?;
        let Some(cache) = open.object.page_cache() else {
            let what = "this storage cannot be mapped into memory: load from it";
            return Err(Error::new(Kind::Unsupported, format!("{}: {what}", self.checkpoint.url())));
        };
        let mapping = cache.map()?;
        let proven = Mutex::new(vec![false; open.header.block_crcs.len()]);
        Ok(Arc::clone(file.insert(Arc::new(File { mapping, open, proven }))))
    }

    fn verify(&self, number: u32, file: &File, range: Range<u64>) -> Result<()> {
        let header = &file.open.header;
        let blocks =
            (range.start - header.data_start) / BLOCK_BYTES..(range.end - header.data_start).div_ceil(BLOCK_BYTES);
        let mut proven = file.proven.lock().unwrap_or_else(PoisonError::into_inner);
        for block in blocks.filter(|_| !range.is_empty()) {
            let start = header.data_start + block * BLOCK_BYTES;
            let span = start..(start + BLOCK_BYTES).min(file.mapping.len() as u64);
            let block = block as usize;
            if !proven[block] {
                let expected = header.block_crcs[block];
                let found = crc64(&file.mapping[span.start as usize..span.end as usize]);
                if found != expected {
                    let path = self.checkpoint.manifest().files()[number as usize].path.clone();
                    return Err(Error::corrupt(Damage { path, span, expected, found, before: None }.to_string()));
                }
                proven[block] = true;
            }
        }
        Ok(())
    }
}
