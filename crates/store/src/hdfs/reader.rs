//! Reads ranges of a file of HDFS, from the blocks that it had when it was opened.

use std::sync::Arc;

use futures_util::StreamExt;
use hdfs_native::HdfsError;
use hdfs_native::file::FileReader;
use tokio::time::timeout;

use super::{Cluster, STILL_MAX, too_late};
use crate::error::too_short;
use crate::observe::Action;
use crate::place::join;
use crate::remote::scatter;
use crate::{Error, Kind, ObjectReader, PageCache, Requests, Result};

/// An open file.
pub(super) struct HdfsReader {
    pub(super) cluster: Arc<Cluster>,
    pub(super) name: String,
    pub(super) path: String,
    pub(super) file: FileReader,
}

impl ObjectReader for HdfsReader {
    fn bytes(&self) -> u64 {
        self.file.file_length() as u64
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_ranges(&mut [(offset, buf)])
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        self.read_from(&self.file, ranges)
    }

    /// Reads the range from the blocks that the file has now, and from the replicas that the NameNode names first now.
    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let requests = Requests { heads: 1, ..Requests::default() };
        let call = self.cluster.client.read(&self.path);
        let file = self.cluster.call(Action::Open, &self.name, requests, call)?;
        if file.file_length() != self.file.file_length() {
            return Err(self.cluster.fail(Kind::Corrupt, Action::Read, &self.name, "the object was replaced"));
        }
        self.read_from(&file, &mut [(offset, buf)])
    }
}

impl HdfsReader {
    fn read_from(&self, file: &FileReader, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        for (offset, buf) in ranges.iter() {
            // The client library panics on such a range.
            if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.bytes()) {
                return Err(too_short(join(&self.cluster.url, &self.name), self.bytes(), *offset, buf.len()));
            }
        }
        let first = ranges.iter().map(|(offset, _)| *offset).min().unwrap_or(0);
        let end = ranges.iter().map(|(offset, buf)| offset + buf.len() as u64).max().unwrap_or(0);
        if first >= end {
            return Ok(());
        }
        let requests = Requests { gets: 1, ..Requests::default() };
        let read = self.cluster.moved(Action::Read, &self.name, first..end, requests, read(file, ranges));
        read.map_err(|error| Error { message: format!("bytes {first}..{end}: {}", error.message), ..error })
    }
}

/// Reads ranges of a file, which are not beyond its end, and what lies between them.
pub(super) async fn read(file: &FileReader, ranges: &mut [(u64, &mut [u8])]) -> hdfs_native::Result<()> {
    let first = ranges.iter().map(|(offset, _)| *offset).min().unwrap_or(0);
    let end = ranges.iter().map(|(offset, buf)| offset + buf.len() as u64).max().unwrap_or(0);
    let mut pieces = Box::pin(file.read_range_stream(first as usize, end.saturating_sub(first) as usize));
    let mut at = first;
    while let Some(piece) = timeout(STILL_MAX, pieces.next()).await.map_err(|_| too_late())? {
        let piece = piece?;
        scatter(at, &piece, ranges);
        at += piece.len() as u64;
    }
    match at < end {
        true => Err(HdfsError::DataTransferError(format!("expected bytes {first}..{end}, found them up to {at}"))),
        false => Ok(()),
    }
}
