//! Reads ranges of an object, all of the version that was opened. A range whose answer is late is requested a second
//! time: the first complete answer counts, and the other one is dropped with its connection.

use std::future::ready;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, SelectAll};
use futures_util::{StreamExt, TryStreamExt};
use http::StatusCode;
use object_store::path::Path;
use object_store::{Error as ClientError, GetOptions, GetRange, ObjectMeta};
use tokio::time::timeout_at;

use super::Place;
use super::network::{self, Answer};
use super::pace::SOONEST;
use crate::observe::Action;
use crate::place::join;
use crate::{Error, Kind, ObjectReader, PageCache, Requests, Result};

/// An object as it was when it was opened.
pub(super) struct RemoteReader {
    pub(super) place: Arc<Place>,
    pub(super) name: String,
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) etag: Option<String>,
    pub(super) version: Option<String>,
}

impl ObjectReader for RemoteReader {
    fn bytes(&self) -> u64 {
        self.bytes
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
        let options =
            GetOptions { if_match: self.etag.clone(), version: self.version.clone(), ..GetOptions::default() };
        // Both answers are the same bytes, so a range may take some bytes from each.
        let mut filled = first;
        let take = |_: usize, at: u64, piece: &[u8]| {
            let end = at + piece.len() as u64;
            if filled < end {
                scatter(filled.max(at), &piece[filled.saturating_sub(at) as usize..], ranges);
                filled = end;
            }
        };
        let _turn = self.place.reading.enter();
        let began = Instant::now();
        let read = self.place.fetch(Action::Read, &self.name, &self.path, first..end, options, take)?;
        match read.map(|found| found.at) {
            Ok(at) if at == end => {
                self.place.reading.moved(end - first);
                Ok(())
            }
            Ok(at) => {
                let message = format!("expected bytes {first}..{end}, found them up to {at}");
                Err(self.place.fail(Kind::Unavailable, Action::Read, &self.name, message))
            }
            Err((error, answer)) if answer.status == Some(StatusCode::PRECONDITION_FAILED) => {
                let message = format!("the object was replaced while it was read ({})", error.message);
                Err(self.place.fail(Kind::Corrupt, Action::Read, &self.name, message))
            }
            Err((error, _)) if error.kind == Kind::NotFound => {
                let message = format!("the object was removed while it was read ({})", error.message);
                Err(self.place.fail(Kind::Corrupt, Action::Read, &self.name, message))
            }
            Err((error, answer)) => {
                self.place.reading.refused(answer.status, began);
                Err(error)
            }
        }
    }

    fn read_again(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

/// Part of an answer.
enum Piece {
    Beginning(ObjectMeta),
    Bytes(Bytes),
    End,
}

/// An answer, as far as it was received.
pub(super) struct Fetched {
    /// Number of the request: 0 for the first, 1 for the second.
    pub(super) number: usize,
    /// Offset of its next byte in the object.
    pub(super) at: u64,
    pub(super) meta: Option<ObjectMeta>,
    began: Instant,
    answer: Arc<Mutex<Answer>>,
    error: Option<ClientError>,
}

impl Place {
    /// Reads a range of an object, as far as the object reaches. `take` gets each piece: the number of the answer, the
    /// offset, the bytes. The pieces of an answer come in their order.
    ///
    /// # Errors
    /// The first request's, with the service's message.
    pub(super) fn fetch(
        &self,
        op: Action,
        name: &str,
        path: &Path,
        range: Range<u64>,
        options: GetOptions,
        mut take: impl FnMut(usize, u64, &[u8]),
    ) -> Result<std::result::Result<Fetched, (Error, Answer)>> {
        let bytes = range.end - range.start;
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..options };
        let began = Instant::now();
        self.pace.begins();
        let read = async {
            let (mut answers, mut coming) = (Vec::new(), SelectAll::new());
            let ask = |number: usize, coming: &mut SelectAll<_>| {
                let answer: Arc<Mutex<Answer>> = Arc::default();
                coming.push(self.ask(number, path, options.clone(), Arc::clone(&answer)));
                Fetched { number, at: range.start, began: Instant::now(), answer, meta: None, error: None }
            };
            answers.push(ask(0, &mut coming));
            let mut look = began + SOONEST;
            loop {
                let next = match answers.len() {
                    1 => timeout_at(look.into(), coming.next()).await,
                    _ => Ok(coming.next().await),
                };
                let Ok(next) = next else {
                    look = match self.pace.late_after(bytes, answers[0].meta.is_some()) {
                        Some(late) if began.elapsed() < late => began + late,
                        Some(_) if self.pace.asks_again() => {
                            answers.push(ask(1, &mut coming));
                            continue;
                        }
                        _ => Instant::now() + SOONEST,
                    };
                    continue;
                };
                let Some((number, piece)) = next else { return answers };
                let of = &mut answers[number];
                match piece {
                    Ok(Piece::Beginning(meta)) => {
                        self.pace.answered(of.began.elapsed());
                        of.meta = Some(meta);
                    }
                    Ok(Piece::Bytes(piece)) => {
                        take(number, of.at, &piece);
                        of.at += piece.len() as u64;
                    }
                    Ok(Piece::End) if of.meta.as_ref().is_some_and(|meta| of.at == range.end.min(meta.size)) => {
                        self.pace.took(bytes, of.began.elapsed());
                        answers.swap(0, number);
                        return answers;
                    }
                    Ok(Piece::End) => {}
                    Err(error) => of.error = Some(error),
                }
            }
        };
        let (answers, _) = self.network.run(&self.url, read)?;
        let said: Vec<Answer> =
            answers.iter().map(|of| of.answer.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect();
        let mut requests = Requests { asked_again: said.len() as u64 - 1, ..Requests::default() };
        said.iter().for_each(|answer| requests.add(answer.requests));
        let read = match answers.into_iter().zip(said).next() {
            Some((Fetched { error: Some(error), .. }, answer)) => {
                Err((self.failed(op, name, began, &error, &answer), answer))
            }
            Some((fetched, _)) => Ok(fetched),
            None => return Err(self.fail(Kind::Internal, op, name, "no request was made")),
        };
        self.is_admitted.fetch_or(read.is_ok(), Ordering::Relaxed);
        let moved = read.as_ref().map_or(bytes, |fetched| fetched.at - range.start);
        let moved = range.start..range.start + moved;
        self.reports.asked(began, op, name, moved, requests, read.as_ref().err().map(|(error, _)| error));
        Ok(read)
    }

    /// Sends a request; returns the stream of its pieces.
    fn ask<'a>(
        &'a self,
        number: usize,
        path: &'a Path,
        options: GetOptions,
        answer: Arc<Mutex<Answer>>,
    ) -> BoxStream<'a, (usize, object_store::Result<Piece>)> {
        let asked = network::noting(answer, self.client().get_opts(path, options));
        let pieces = stream::once(asked).map_ok(|found| {
            let beginning = stream::once(ready(Ok(Piece::Beginning(found.meta.clone()))));
            let body = found.into_stream().map_ok(Piece::Bytes);
            beginning.chain(body).chain(stream::once(ready(Ok(Piece::End))))
        });
        pieces.try_flatten().map(move |piece| (number, piece)).boxed()
    }
}

/// Copies a piece that lies at `at` to all ranges that overlap it.
pub(crate) fn scatter(at: u64, piece: &[u8], ranges: &mut [(u64, &mut [u8])]) {
    let end = at + piece.len() as u64;
    for (offset, buf) in ranges {
        let (from, to) = (at.max(*offset), end.min(*offset + buf.len() as u64));
        if from < to {
            buf[(from - *offset) as usize..(to - *offset) as usize]
                .copy_from_slice(&piece[(from - at) as usize..(to - at) as usize]);
        }
    }
}
