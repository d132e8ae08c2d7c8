//! Providers into data files: copy, checksum while the bytes are in cache, write, make durable.
//!
//! Two groups of threads share bounded slots. Fillers copy out of the providers in file order and compute the block
//! checksums; writers put slots to the store. So the state is released as soon as it is copied, writes overlap copies,
//! and a slow store slows the copy instead of growing memory. A file's header, which holds the checksums, is written
//! last: a file cut short by a crash is no valid file.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shardfast_format::{BLOCK_BYTES, FileLayout, crc64};
use shardfast_store::{ObjectWriter, Store};

use crate::commit::WrittenFile;
use crate::error::{Error, Result};
use crate::provider::Provider;
use crate::staging::{ALIGNMENT, SLOT_BYTES, Slot, Staging};

/// One data file to be written.
pub(crate) struct FileJob {
    /// Name in the checkpoint.
    pub(crate) path: String,
    /// Where each entry lies.
    pub(crate) layout: FileLayout,
    /// The entries' bytes, in the layout's order.
    pub(crate) providers: Vec<Arc<dyn Provider>>,
}

/// Slots written at the same time by one save: enough to keep a disk's queue busy.
const WRITERS: usize = 4;

/// Writes all files and makes their contents durable; their names become durable with `Store::sync`. Calls `staged`
/// once, as soon as no provider will be asked again.
///
/// # Errors
/// The first failure of a provider or of the store. No provider is asked any more once this has returned.
pub(crate) fn run(
    store: &dyn Store,
    jobs: &[FileJob],
    staging: &Arc<Staging>,
    staged: impl FnOnce() + Send,
) -> Result<Vec<WrittenFile>> {
    let mut files = Vec::with_capacity(jobs.len());
    for job in jobs {
        let object = store.create(&job.path, job.layout.file_bytes())?;
        if object.alignment() > ALIGNMENT {
            return Err(Error::internal(format!(
                "{}: the store asks for writes aligned to {} bytes; slots are aligned to {ALIGNMENT}",
                job.path,
                object.alignment()
            )));
        }
        let crcs = (0..job.layout.blocks).map(|_| AtomicU64::new(0)).collect();
        files.push(File { job, object, crcs });
    }
    let run = Run { files: &files, chunks: chunks(jobs), next: AtomicUsize::new(0), failure: Failure::default() };
    fill_and_write(&run, staging, staged);
    run.failure.into_result()?;
    finish(files, staging)
}

struct File<'a> {
    job: &'a FileJob,
    object: Box<dyn ObjectWriter>,
    crcs: Vec<AtomicU64>,
}

#[derive(Clone, Copy)]
struct Chunk {
    file: usize,
    /// Absolute in the file; a multiple of the slot size counted from the start of the data.
    offset: u64,
    bytes: usize,
}

struct Run<'a> {
    files: &'a [File<'a>],
    chunks: Vec<Chunk>,
    next: AtomicUsize,
    failure: Failure,
}

/// The first failure of a group of threads.
#[derive(Default)]
pub(crate) struct Failure {
    set: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Failure {
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, error: Error) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.set.store(true, Ordering::Release);
    }

    pub(crate) fn into_result(self) -> Result<()> {
        match self.first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

fn chunks(jobs: &[FileJob]) -> Vec<Chunk> {
    let mut out = Vec::new();
    for (file, job) in jobs.iter().enumerate() {
        let end = job.layout.file_bytes();
        let mut offset = job.layout.data_start;
        while offset < end {
            let bytes = (end - offset).min(SLOT_BYTES as u64);
            out.push(Chunk { file, offset, bytes: bytes as usize });
            offset += bytes;
        }
    }
    out
}

fn fill_and_write(run: &Run<'_>, staging: &Arc<Staging>, staged: impl FnOnce() + Send) {
    let fillers = std::thread::available_parallelism().map_or(1, usize::from).min(4).min(run.chunks.len().max(1));
    let (sender, receiver) = crossbeam_channel::unbounded::<(Chunk, Slot)>();
    let filled = AtomicUsize::new(0);
    let staged = Mutex::new(Some(staged));
    let filled_one = |count: usize| {
        if count == run.chunks.len()
            && let Some(staged) = staged.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            staged();
        }
    };
    filled_one(0);
    std::thread::scope(|scope| {
        for _ in 0..fillers {
            let sender = sender.clone();
            scope.spawn(|| {
                let sender = sender;
                while let Some(&chunk) = run.chunks.get(run.next.fetch_add(1, Ordering::Relaxed)) {
                    if run.failure.is_set() {
                        return;
                    }
                    let mut slot = staging.acquire();
                    match fill(&run.files[chunk.file], chunk, &mut slot) {
                        Ok(()) => filled_one(filled.fetch_add(1, Ordering::AcqRel) + 1),
                        Err(error) => return run.failure.set(error),
                    }
                    // The receiver lives as long as the scope.
                    let _ = sender.send((chunk, slot));
                }
            });
        }
        drop(sender);
        for _ in 0..WRITERS.min(run.chunks.len()) {
            let receiver = receiver.clone();
            scope.spawn(move || {
                for (chunk, mut slot) in receiver {
                    if !run.failure.is_set()
                        && let Err(error) = write(&*run.files[chunk.file].object, chunk.offset, &mut slot, chunk.bytes)
                    {
                        run.failure.set(error);
                    }
                }
            });
        }
    });
}

/// Fills a slot with the file's bytes from `chunk.offset` on, and notes their block checksums.
fn fill(file: &File<'_>, chunk: Chunk, slot: &mut Slot) -> Result<()> {
    let layout = &file.job.layout;
    let end = chunk.offset + chunk.bytes as u64;
    let first = layout.offsets.partition_point(|&offset| offset <= chunk.offset).saturating_sub(1);
    for (entry, &start) in layout.offsets.iter().enumerate().skip(first) {
        if start >= end {
            break;
        }
        let provider = &file.job.providers[entry];
        let from = chunk.offset.max(start);
        let to = end.min(start + provider.bytes());
        if from < to {
            let (at, position) = (from - start, (from - chunk.offset) as usize);
            provider.fill(at, &mut slot[position..position + (to - from) as usize])?;
        }
    }
    let first_block = ((chunk.offset - layout.data_start) / BLOCK_BYTES) as usize;
    for (i, block) in slot[..chunk.bytes].chunks(BLOCK_BYTES as usize).enumerate() {
        file.crcs[first_block + i].store(crc64(block), Ordering::Relaxed);
    }
    Ok(())
}

/// Writes the slot's first `bytes` bytes, padded to what the store's writes must be aligned to.
fn write(object: &dyn ObjectWriter, offset: u64, slot: &mut Slot, bytes: usize) -> Result<()> {
    let padded = bytes.next_multiple_of(object.alignment());
    slot[bytes..padded].fill(0);
    Ok(object.write_at(offset, &slot[..padded])?)
}

/// Writes the headers and makes every file durable, all files at once: flushes wait for the device, not for us.
fn finish(files: Vec<File<'_>>, staging: &Arc<Staging>) -> Result<Vec<WrittenFile>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = files.into_iter().map(|file| scope.spawn(|| finish_one(file, staging))).collect();
        running
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::internal("a thread that finishes a file panicked")))
            })
            .collect()
    })
}

fn finish_one(file: File<'_>, staging: &Arc<Staging>) -> Result<WrittenFile> {
    let layout = &file.job.layout;
    let crcs: Vec<u64> = file.crcs.iter().map(|crc| crc.load(Ordering::Relaxed)).collect();
    let header = layout.header(&crcs)?;
    let mut slot = staging.acquire();
    for (i, part) in header.chunks(SLOT_BYTES).enumerate() {
        slot[..part.len()].copy_from_slice(part);
        write(&*file.object, (i * SLOT_BYTES) as u64, &mut slot, part.len())?;
    }
    drop(slot);
    file.object.finish()?;
    Ok(WrittenFile {
        path: file.job.path.clone(),
        bytes: layout.file_bytes(),
        data_start: layout.data_start,
        header_crc: crc64(&header),
    })
}
