//! Writes an object as files, one for each of its parts, and joins them.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use hdfs_native::client::WriteOptions;
use hdfs_native::file::FileWriter;
use hdfs_native::{Client, HdfsError};
use tokio::time::{sleep, timeout};

use super::{Cluster, STILL_MAX, step, too_late};
use crate::name::temporary_of;
use crate::observe::Action;
use crate::remote::Lending;
use crate::write::{self, Write};
use crate::{Error, Kind, ObjectWriter, Requests, Result};

/// Bytes that are given to the client library at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Calls to the NameNode for a file of one block: its creation, its block, its end.
pub(super) const CALLS: u64 = 3;

/// Length of the blocks of a file into which parts are copied.
const COPIED_BLOCK_BYTES: u64 = 1 << 30;

/// Pause before the next block of a file: the NameNode gives none until it knows that the one before is written, and
/// the client library cannot ask again.
const BLOCK_PAUSE: Duration = Duration::from_secs(1);

/// An object that is being written.
pub(super) struct HdfsWriter {
    cluster: Arc<Cluster>,
    name: String,
    bytes: u64,
    part_bytes: u64,
    /// Paths of the parts' files: the object's own, and temporary ones.
    paths: Vec<String>,
    /// Options of these files: a block holds a whole part, since the next one of a file may have to be asked for again.
    options: WriteOptions,
    state: Mutex<State>,
    is_finished: bool,
}

struct State {
    /// File under the object's name, until its part is written.
    first: Option<FileWriter>,
    /// Parts whose files are begun.
    begun: Vec<bool>,
    /// Parts whose files are written.
    written: Vec<bool>,
    /// Parts that the file under the object's name has.
    joined: usize,
}

impl HdfsWriter {
    /// Makes the writer of an object in parts of `part_bytes`, whose files have these paths; `first` is the new file
    /// under its name.
    pub(super) fn new(
        cluster: Arc<Cluster>,
        name: String,
        paths: Vec<String>,
        bytes: u64,
        part_bytes: u64,
        options: WriteOptions,
        first: FileWriter,
    ) -> HdfsWriter {
        let state = Mutex::new(State {
            first: Some(first),
            begun: vec![false; paths.len()],
            written: vec![false; paths.len()],
            joined: 1,
        });
        HdfsWriter { cluster, name, bytes, part_bytes, paths, options, state, is_finished: false }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, kind: Kind, op: Action, message: impl Into<String>) -> Error {
        self.cluster.fail(kind, op, &self.name, message)
    }

    /// Returns the number of the part that these bytes are.
    fn part(&self, offset: u64, bytes: u64) -> Result<usize> {
        write::part_number(self.part_bytes, self.bytes, offset, bytes)
            .map_err(|message| self.fail(Kind::Invalid, Action::Write, message))
    }

    fn write_part(&self, part: usize, pieces: Vec<Bytes>) -> Result<()> {
        let cluster = &self.cluster;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let from = part as u64 * self.part_bytes;
        let first = if part == 0 { self.state().first.take() } else { None };
        self.state().begun[part] = true;
        let created = u64::from(first.is_some());
        let requests = Requests { puts: CALLS - created, ..Requests::default() };
        let write = async {
            match first {
                Some(file) => fill(file, pieces).await,
                // A try that failed has left its file.
                None => write_file(&cluster.client, &self.paths[part], &self.options, true, pieces).await,
            }
        };
        cluster.moved(Action::Write, &self.name, from..from + bytes, requests, write)?;
        self.state().written[part] = true;
        cluster.sending.moved(bytes);
        Ok(())
    }

    /// Writes from the write's own memory; returns it if it fails.
    pub(super) fn send<'a>(&self, write: Write<'a>) -> Result<(), Box<(Write<'a>, Error)>> {
        let part = match self.part(write.offset, write.bytes as u64) {
            Ok(part) => part,
            Err(error) => return Err(Box::new((write, error))),
        };
        let (pieces, lending) = Lending::of(write);
        self.write_part(part, pieces).map_err(|error| Box::new((lending.back(), error)))
    }

    /// Returns the number of parts of which a file of this length is the beginning of the object.
    fn parts_of(&self, length: u64) -> Option<usize> {
        let is_end = length == self.bytes || length > 0 && length.is_multiple_of(self.part_bytes);
        (is_end && length <= self.bytes).then(|| length.div_ceil(self.part_bytes) as usize)
    }

    /// Joins the files of all parts under the object's name.
    fn join(&self) -> Result<()> {
        let (cluster, op, path) = (&self.cluster, Action::Finish, &self.paths[0]);
        let joined = |parts| self.state().joined = parts;
        loop {
            let done = self.state().joined;
            let rest = &self.paths[done..];
            if rest.is_empty() {
                return Ok(());
            }
            let rest = &rest[..cluster.rest.at_a_time(rest)];
            let began = Instant::now();
            let answer = cluster.network.wait(&cluster.url, cluster.rest.concat(path, rest))?;
            let failure = answer.as_ref().err().map(|why| {
                self.fail(
                    Kind::Unsupported,
                    op,
                    format!("the parts are copied into one file, since concat failed: {why}"),
                )
            });
            let requests = Requests { puts: 1, ..Requests::default() };
            let Some(failure) = failure else {
                cluster.reports.asked(began, op, &self.name, 0..0, requests, None);
                joined(done + rest.len());
                continue;
            };
            // It may have been carried out although the answer was lost.
            let length = cluster.status(op, &self.name, path)?.length as u64;
            let parts = self.parts_of(length).filter(|parts| *parts == done || *parts == done + rest.len());
            let Some(parts) = parts else {
                let message = format!("expected {done} joined parts, found a file of {length} bytes");
                return Err(self.fail(Kind::Unavailable, op, message).finally());
            };
            joined(parts);
            if parts == done {
                cluster.reports.asked(began, op, &self.name, 0..0, requests, Some(&failure));
                return self.copy(done);
            }
        }
    }

    /// Copies the file under the object's name, which has `joined` parts, and those of the other parts into one.
    fn copy(&self, joined: usize) -> Result<()> {
        let (cluster, op, path) = (&self.cluster, Action::Finish, &self.paths[0]);
        let copied = Cluster::beside(path)?;
        let sources: Vec<&String> = std::iter::once(path).chain(&self.paths[joined..]).collect();
        let (files, blocks) = (sources.len() as u64, self.bytes.div_ceil(COPIED_BLOCK_BYTES));
        let requests = Requests { puts: CALLS + blocks - 1, heads: files, gets: files, ..Requests::default() };
        let options =
            self.options.clone().block_size(self.bytes.next_multiple_of(PIECE_BYTES as u64).min(COPIED_BLOCK_BYTES));
        let copy = async {
            let mut file = step(cluster.client.create(&copied, &options)).await?;
            let mut length = 0;
            for source in &sources {
                let reader = step(cluster.client.read(source)).await?;
                let mut pieces = Box::pin(reader.read_range_stream(0, reader.file_length()));
                while let Some(piece) = timeout(STILL_MAX, pieces.next()).await.map_err(|_| too_late())? {
                    let mut piece = piece?;
                    while !piece.is_empty() {
                        let room = COPIED_BLOCK_BYTES - length % COPIED_BLOCK_BYTES;
                        if room == COPIED_BLOCK_BYTES && length > 0 {
                            sleep(BLOCK_PAUSE).await;
                        }
                        let next = piece.split_to((piece.len() as u64).min(room) as usize);
                        length += next.len() as u64;
                        step(file.write_bytes(next)).await?;
                    }
                }
            }
            step(file.close()).await?;
            Ok(length)
        };
        let done = cluster.moved(op, &self.name, 0..self.bytes, requests, copy).and_then(|length| match length {
            length if length == self.bytes => cluster.rename(op, &self.name, &copied, path, true),
            length => {
                let message = format!("expected {} bytes in all parts, found {length}", self.bytes);
                Err(self.fail(Kind::Unavailable, op, message).finally())
            }
        });
        if let Err(error) = done {
            // If the rename was carried out although the answer was lost, its source is gone.
            let is_whole = |length: u64| length == self.bytes;
            let is_there = cluster.status(op, &self.name, path).is_ok_and(|found| is_whole(found.length as u64));
            let was_there = cluster.status(op, &self.name, &copied).is_ok();
            let _ = cluster.remove(Action::Abort, &self.name, &copied);
            if was_there || !is_there {
                return Err(error);
            }
        }
        self.state().joined = self.paths.len();
        self.remove(&self.paths[joined..])
    }

    /// Removes files of this object.
    fn remove(&self, paths: &[String]) -> Result<()> {
        paths.iter().try_for_each(|path| self.cluster.remove(Action::Abort, &self.name, path))
    }
}

impl ObjectWriter for HdfsWriter {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let part = self.part(offset, bytes.len() as u64)?;
        self.write_part(part, vec![Bytes::copy_from_slice(bytes)])
    }

    fn finish(&mut self) -> Result<()> {
        if self.bytes == 0 && !self.state().written[0] {
            self.write_part(0, Vec::new())?;
        }
        let missing = self.state().written.iter().position(|is_written| !is_written);
        if let Some(missing) = missing {
            let message = format!("part {} of {} was never written", missing + 1, self.paths.len());
            return Err(self.fail(Kind::Invalid, Action::Finish, message));
        }
        self.join()?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for HdfsWriter {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // The caller has its error; files that cannot be removed now are debris, as after a crash.
        let _ = self.cluster.remove(Action::Abort, &self.name, &self.paths[0]);
        let begun = std::mem::take(&mut self.state().begun);
        for (path, _) in self.paths.iter().zip(begun).skip(1).filter(|(_, has_begun)| *has_begun) {
            let _ = self.cluster.remove(Action::Abort, &self.name, path);
        }
    }
}

/// Returns the paths of an object's parts: its own, and temporary ones beside it, numbered from `number` on.
pub(super) fn paths(path: &str, parts: u64, number: u64) -> Vec<String> {
    let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let others = (1..parts).map(|part| format!("{dir}/{}", temporary_of(number.wrapping_add(part))));
    std::iter::once(path.to_owned()).chain(others).collect()
}

/// Writes a new file, on disk at each of its DataNodes when this returns.
pub(super) async fn write_file(
    client: &Client,
    path: &str,
    options: &WriteOptions,
    overwrite: bool,
    pieces: Vec<Bytes>,
) -> hdfs_native::Result<()> {
    let file = step(client.create(path, options.clone().overwrite(overwrite))).await?;
    fill(file, pieces).await
}

/// Writes the contents of a new file, and closes it.
async fn fill(mut file: FileWriter, pieces: Vec<Bytes>) -> Result<(), HdfsError> {
    for mut piece in pieces {
        while !piece.is_empty() {
            let next = piece.split_to(piece.len().min(PIECE_BYTES));
            step(file.write_bytes(next)).await?;
        }
    }
    step(file.close()).await
}
