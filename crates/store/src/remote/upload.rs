//! Sends an object: in one request, or part by part.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{PutOptions, PutPayload};

use super::Place;
use crate::observe::Action;
use crate::write::{self, Buffer, Write};
use crate::{Error, Kind, ObjectWriter, Result};

/// An object that is being sent.
pub(super) struct RemoteWriter {
    pub(super) place: Arc<Place>,
    pub(super) name: String,
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) part_bytes: u64,
    /// Id of the multipart upload, if it is one.
    pub(super) upload: Option<String>,
    /// Ids of the parts that were sent, with which the upload is completed.
    pub(super) parts: Mutex<Vec<Option<PartId>>>,
    pub(super) is_finished: bool,
}

impl RemoteWriter {
    fn parts(&self) -> MutexGuard<'_, Vec<Option<PartId>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the part that these bytes are.
    fn part(&self, offset: u64, bytes: u64) -> Result<usize> {
        write::part_number(self.part_bytes, self.bytes, offset, bytes)
            .map_err(|message| self.place.fail(Kind::Invalid, Action::Write, &self.name, message))
    }

    fn put_part(&self, part: usize, payload: PutPayload, crc64: Option<u64>) -> Result<()> {
        let (place, bytes, began) = (&*self.place, payload.content_length() as u64, Instant::now());
        let range = part as u64 * self.part_bytes..part as u64 * self.part_bytes + bytes;
        let sent = match &self.upload {
            None => {
                let options = PutOptions { attributes: place.bucket.attributes.clone(), ..PutOptions::default() };
                let put = place.client().put_opts(&self.path, payload, options);
                place.moved(Action::Write, &self.name, range, put)?.map(|_| PartId { content_id: String::new() })
            }
            Some(upload) => {
                let put = async {
                    match crc64.zip(place.bucket.extra_api.as_ref()) {
                        Some((crc64, extra_api)) => extra_api.put_part(&self.path, upload, part, payload, crc64).await,
                        None => place.client().put_part(&self.path, upload, part, payload).await,
                    }
                };
                let named = |error: Error| Error { message: format!("part {}: {}", part + 1, error.message), ..error };
                place.moved(Action::Write, &self.name, range, put)?.map_err(|(error, answer)| (named(error), answer))
            }
        };
        match sent {
            Ok(sent) => {
                self.parts()[part] = Some(sent);
                place.sending.moved(bytes);
                Ok(())
            }
            Err((error, answer)) => {
                place.sending.refused(answer.status, began);
                Err(error)
            }
        }
    }

    /// Sends a write from its own memory; returns it if it fails.
    pub(super) fn send<'a>(&self, write: Write<'a>) -> Result<(), Box<(Write<'a>, Error)>> {
        let part = match self.part(write.offset, write.bytes as u64) {
            Ok(part) => part,
            Err(error) => return Err(Box::new((write, error))),
        };
        let crc64 = write.crc64;
        let (pieces, lending) = Lending::of(write);
        self.put_part(part, pieces.into_iter().collect(), crc64).map_err(|error| Box::new((lending.back(), error)))
    }

    /// Completes the upload; a try whose answer was lost or cannot be parsed is recognized by the object.
    fn complete(&self, upload: &String, parts: Vec<PartId>) -> Result<()> {
        let completed = self.place.client().complete_multipart(&self.path, upload, parts);
        let error = match self.place.call(Action::Finish, &self.name, completed) {
            Err(error) if matches!(error.kind, Kind::NotFound | Kind::Invalid) => error,
            completed => return completed.map(|_| ()),
        };
        match self.place.head(Action::Finish, &self.name) {
            Ok(found) if found.meta.size == self.bytes => Ok(()),
            Err(unseen) if unseen.kind == Kind::Unavailable => Err(unseen),
            _ if error.kind == Kind::NotFound => Err(Error { kind: Kind::Unavailable, ..error }.finally()),
            _ => Err(error),
        }
    }
}

impl ObjectWriter for RemoteWriter {
    fn storage(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let part = self.part(offset, bytes.len() as u64)?;
        self.put_part(part, Bytes::copy_from_slice(bytes).into(), None)
    }

    fn finish(&mut self) -> Result<()> {
        if self.bytes == 0 && self.parts()[0].is_none() {
            self.put_part(0, PutPayload::default(), None)?;
        }
        let parts: Option<Vec<PartId>> = self.parts().iter().cloned().collect();
        let Some(parts) = parts else {
            let missing = self.parts().iter().position(Option::is_none).unwrap_or_default();
            let message = format!("part {} of {} was never written", missing + 1, self.parts().len());
            return Err(self.place.fail(Kind::Invalid, Action::Finish, &self.name, message));
        };
        if let Some(upload) = &self.upload {
            self.complete(upload, parts)?;
        }
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for RemoteWriter {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // The caller has its error; parts that cannot be removed now are debris, as after a crash.
        match &self.upload {
            // Twice, since the service may still have been processing a part when it received the first request.
            Some(upload) => {
                for _ in 0..2 {
                    let abort = self.place.client().abort_multipart(&self.path, upload);
                    if self.place.call(Action::Abort, &self.name, abort).is_err() {
                        break;
                    }
                }
            }
            None if self.parts().iter().any(Option::is_some) => _ = self.place.delete(Action::Abort, &self.name),
            None => {}
        }
    }
}

/// A write whose memory a client library sends.
pub(crate) struct Lending<'a> {
    write: Write<'a>,
    buffers: Vec<Arc<dyn Buffer>>,
}

impl<'a> Lending<'a> {
    /// Lends the memory of a write: its pieces, and what returns the write.
    pub(crate) fn of(mut write: Write<'a>) -> (Vec<Bytes>, Lending<'a>) {
        let buffers: Vec<Arc<dyn Buffer>> = std::mem::take(&mut write.buffers).into_iter().map(Arc::from).collect();
        let mut left = write.bytes;
        let pieces = buffers.iter().map(|buffer| {
            let bytes = left.min(buffer.bytes().len());
            left -= bytes;
            Bytes::from_owner(Lent { buffer: Arc::clone(buffer), bytes })
        });
        let pieces = pieces.collect();
        (pieces, Lending { write, buffers })
    }

    /// Returns the write after it failed; a connection may still be sending its memory.
    pub(crate) fn back(self) -> Write<'a> {
        let buffers = self.buffers.into_iter().map(|buffer| Box::new(CameBack(buffer)) as Box<dyn Buffer>).collect();
        Write { buffers, ..self.write }
    }
}

/// Memory that the client library sends; it is returned once no connection uses it.
struct Lent {
    buffer: Arc<dyn Buffer>,
    bytes: usize,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer.bytes()[..self.bytes]
    }
}

/// Memory of a failed write, which a connection may still be sending.
struct CameBack(Arc<dyn Buffer>);

// SAFETY: the range is that of the buffer within, which lives as long as this.
#[allow(unsafe_code)]
unsafe impl Buffer for CameBack {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    fn number(&self) -> Option<u32> {
        self.0.number()
    }
}
