//! Writes through a ring: the calling thread keeps writes in flight and continues short ones.

use std::time::Instant;

use super::{LocalWriter, failed, of_errno};
use crate::disk::{Disk, Errno, Flight, Ring};
use crate::observe::Action;
use crate::write::{Next, Write, Writes};
use crate::{Error, Kind, Result};

/// Number of writes in flight: with requests of 1 MiB enough for a fast device, and not so many that each waits long.
pub(super) const DEPTH: u32 = 8;

/// A write of which some part is in flight.
struct Begun<'a, D: Disk> {
    object: &'a LocalWriter<D>,
    number: usize,
    end: usize,
    /// `true` if the last answer advanced it by no unit: once may be chance, twice is a defect.
    stalled: bool,
    began: Option<Instant>,
}

/// Implements [`Store::write_all`](crate::Store::write_all) through a ring.
pub(super) fn write_all<'a, D: Disk>(mut ring: D::Ring, writes: &dyn Writes<'a>) -> Result<()> {
    let mut begun: Vec<Option<Begun<'a, D>>> = (0..DEPTH).map(|_| None).collect();
    let mut failure: Option<Error> = None;
    let mut is_over = false;
    loop {
        while let Some(place) = begun.iter().position(Option::is_none).filter(|_| failure.is_none() && !is_over) {
            let is_idle = begun.iter().all(Option::is_none);
            match writes.next(is_idle) {
                Next::Write(write) => failure = begin(&mut ring, &mut begun, place, write, writes).err(),
                Next::Later if is_idle => {}
                Next::Later => break,
                Next::End => is_over = true,
            }
        }
        let Some(any) = begun.iter().flatten().next().map(|begun| begun.object) else {
            return failure.map_or(Ok(()), Err);
        };
        let (flight, taken) = ring.wait().map_err(|errno| of_errno("write", &any.path, errno))?;
        let Some(write) = begun[flight.write].take() else { continue };
        match advance(&mut ring, write, flight, taken) {
            Ok(Advanced::Goes(place, write)) => begun[place] = Some(write),
            Ok(Advanced::Done) => {}
            Ok(Advanced::Failed(write, error)) => match writes.failed(write, error) {
                Ok(()) => is_over = false,
                Err(error) => _ = failure.get_or_insert(error),
            },
            Err(error) => _ = failure.get_or_insert(error),
        }
    }
}

fn begin<'a, D: Disk>(
    ring: &mut D::Ring,
    begun: &mut [Option<Begun<'a, D>>],
    place: usize,
    write: Write<'a>,
    writes: &dyn Writes<'a>,
) -> Result<()> {
    // Through the page cache a ring's workers would wait for each other at the file's lock.
    let local = write.object.storage().downcast_ref::<LocalWriter<D>>().filter(|object| object.alignment > 1);
    let Some(object) = local.filter(|_| write.buffers.len() == 1) else {
        return write.make().or_else(|error| writes.failed(write, error));
    };
    if let Err(error) = object.check(write.offset, &write.buffers[0].bytes()[..write.bytes]) {
        return writes.failed(write, error);
    }
    let Write { offset, mut buffers, bytes, number, .. } = write;
    let Some(buffer) = buffers.pop() else { return Ok(()) };
    if bytes > 0 {
        let began = object.reports.begin();
        let flight = Flight { buffer, range: 0..bytes, offset, write: place };
        ring.submit(object.file(), flight).map_err(|errno| of_errno("write", &object.path, errno))?;
        begun[place] = Some(Begun { object, number, end: bytes, stalled: false, began });
    }
    Ok(())
}

/// State of a write after an answer.
enum Advanced<'a, D: Disk> {
    /// The rest is in flight, at that index.
    Goes(usize, Begun<'a, D>),
    Done,
    /// The write failed, and is returned as it was before it began.
    Failed(Write<'a>, Error),
}

/// Continues a write after the ring's answer, until all of it is written.
///
/// # Errors
/// The error of the ring, which accepts nothing more.
fn advance<'a, D: Disk>(
    ring: &mut D::Ring,
    mut write: Begun<'a, D>,
    mut flight: Flight,
    taken: std::result::Result<usize, Errno>,
) -> Result<Advanced<'a, D>> {
    let LocalWriter { path, alignment, .. } = write.object;
    match taken {
        Err(Errno::INTR) => {}
        Err(errno) => {
            let error = write.object.failed("write", errno);
            reported(&write, &flight, Some(&error));
            return Ok(Advanced::Failed(whole(write, flight), error));
        }
        Ok(taken) => {
            // The rest of a direct write must be aligned again: bytes of an incomplete unit are written once more.
            let units = taken - taken % alignment;
            if units == 0 && (taken == 0 || write.stalled) {
                let message = format!("expected {} bytes to be written, found {taken}", flight.range.len());
                let error = failed(Kind::Unavailable, "write", path, message);
                reported(&write, &flight, Some(&error));
                return Ok(Advanced::Failed(whole(write, flight), error));
            }
            write.stalled = units == 0;
            flight.range.start += units;
            flight.offset += units as u64;
        }
    }
    if flight.range.start >= write.end {
        reported(&write, &flight, None);
        return Ok(Advanced::Done);
    }
    let place = flight.write;
    ring.submit(write.object.file(), flight).map_err(|errno| of_errno("write", path, errno))?;
    Ok(Advanced::Goes(place, write))
}

/// Returns the whole write of which this was a part.
fn whole<'a, D: Disk>(begun: Begun<'a, D>, flight: Flight) -> Write<'a> {
    let (Begun { object, number, end, .. }, offset) = (begun, offset(&flight));
    Write { object, offset, buffers: vec![flight.buffer], bytes: end, number, crc64: None }
}

/// Returns the offset of the whole write of which this is a part.
fn offset(flight: &Flight) -> u64 {
    flight.offset - flight.range.start as u64
}

/// Reports a write that has ended.
fn reported<D: Disk>(write: &Begun<'_, D>, flight: &Flight, failure: Option<&Error>) {
    let (object, offset) = (write.object, offset(flight));
    object.reports.end(write.began, Action::Write, &object.name, offset..offset + write.end as u64, failure);
}
