//! Ranges of an object, all of the version that was opened.

use std::sync::Arc;

use futures_util::StreamExt;
use http::StatusCode;
use object_store::path::Path;
use object_store::{GetOptions, GetRange};

use super::Place;
use crate::place::join;
use crate::{Kind, ObjectReader, PageCache, Result};

/// An object as it was when it was opened.
pub(super) struct FarReader {
    pub(super) place: Arc<Place>,
    pub(super) name: String,
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) etag: Option<String>,
    pub(super) version: Option<String>,
}

impl ObjectReader for FarReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn page_cache(&self) -> Option<&dyn PageCache> {
        None
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_ranges(&mut [(offset, buf)])
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        for (offset, buf) in ranges.iter() {
            if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.bytes) {
                return Err(crate::error::too_short(join(&self.place.url, &self.name), self.bytes, *offset, buf.len()));
            }
        }
        let first = ranges.iter().map(|(offset, _)| *offset).min().unwrap_or(0);
        let end = ranges.iter().map(|(offset, buf)| offset + buf.len() as u64).max().unwrap_or(0);
        if first >= end {
            return Ok(());
        }
        let options = GetOptions {
            range: Some(GetRange::Bounded(first..end)),
            if_match: self.etag.clone(),
            version: self.version.clone(),
            ..GetOptions::default()
        };
        let read = async {
            let mut body = self.place.client().get_opts(&self.path, options).await?.into_stream();
            let mut at = first;
            while let Some(piece) = body.next().await {
                let piece = piece?;
                scatter(at, &piece, ranges);
                at += piece.len() as u64;
            }
            Ok(at)
        };
        match self.place.answered("read", &self.name, read)? {
            Ok(at) if at == end => Ok(()),
            Ok(at) => {
                let message = format!("expected bytes {first}..{end}, found them up to {at}");
                Err(self.place.fail(Kind::Unavailable, "read", &self.name, message))
            }
            Err((error, answer)) if answer.status == Some(StatusCode::PRECONDITION_FAILED) => {
                let message = format!("the object was replaced while it was read ({})", error.message);
                Err(self.place.fail(Kind::Corrupt, "read", &self.name, message))
            }
            Err((error, _)) if error.kind == Kind::NotFound => {
                let message = format!("the object was removed while it was read ({})", error.message);
                Err(self.place.fail(Kind::Corrupt, "read", &self.name, message))
            }
            Err((error, _)) => Err(error),
        }
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

/// Copies a piece that lies at `at` to all ranges that have some of it.
fn scatter(at: u64, piece: &[u8], ranges: &mut [(u64, &mut [u8])]) {
    let end = at + piece.len() as u64;
    for (offset, buf) in ranges {
        let (from, to) = (at.max(*offset), end.min(*offset + buf.len() as u64));
        if from < to {
            buf[(from - *offset) as usize..(to - *offset) as usize]
                .copy_from_slice(&piece[(from - at) as usize..(to - at) as usize]);
        }
    }
}
