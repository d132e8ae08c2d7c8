//! Writes through a ring: kept in flight by the calling thread, continued where they were cut short.

use std::any::Any;

use super::{LocalWriter, failed, of_errno};
use crate::disk::{Disk, Errno, Flight, Ring};
use crate::write::{Next, Write, Writes};
use crate::{Error, Kind, Result};

/// Writes in flight: with requests of 1 MiB, enough for a fast device and not so many that each waits for long.
pub(super) const DEPTH: u32 = 8;

/// A write of which some part is in flight.
struct Begun<'a, D: Disk> {
    object: &'a LocalWriter<D>,
    end: usize,
    /// Whether the last answer brought it no unit further: once may be chance, twice is a defect.
    stalled: bool,
}

/// As [`Store::write_all`](crate::Store::write_all).
pub(super) fn write_all<'a, D: Disk>(mut ring: D::Ring, writes: &dyn Writes<'a>) -> Result<()> {
    let mut begun: Vec<Option<Begun<'a, D>>> = (0..DEPTH).map(|_| None).collect();
    let mut failure: Option<Error> = None;
    let mut is_over = false;
    loop {
        while let Some(place) = begun.iter().position(Option::is_none).filter(|_| failure.is_none() && !is_over) {
            let is_idle = begun.iter().all(Option::is_none);
            match writes.next(is_idle) {
                Next::Write(write) => failure = begin(&mut ring, &mut begun, place, write).err(),
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
            Ok(Some((place, write))) => begun[place] = Some(write),
            Ok(None) => {}
            Err(error) => _ = failure.get_or_insert(error),
        }
    }
}

fn begin<'a, D: Disk>(
    ring: &mut D::Ring,
    begun: &mut [Option<Begun<'a, D>>],
    place: usize,
    write: Write<'a>,
) -> Result<()> {
    let Write { object, offset, buffer, bytes } = write;
    // Through the page cache a ring's workers would wait for each other at the file's lock.
    let local = (object as &dyn Any).downcast_ref::<LocalWriter<D>>().filter(|object| object.alignment > 1);
    let Some(object) = local else {
        return object.write_at(offset, &buffer.bytes()[..bytes]);
    };
    object.check(offset, &buffer.bytes()[..bytes])?;
    if bytes > 0 {
        let flight = Flight { buffer, range: 0..bytes, offset, write: place };
        ring.submit(&object.file, flight).map_err(|errno| of_errno("write", &object.path, errno))?;
        begun[place] = Some(Begun { object, end: bytes, stalled: false });
    }
    Ok(())
}

/// What becomes of a write after an answer: `None` when it is done, otherwise the rest of it is in flight.
fn advance<'a, D: Disk>(
    ring: &mut D::Ring,
    mut write: Begun<'a, D>,
    mut flight: Flight,
    taken: std::result::Result<usize, Errno>,
) -> Result<Option<(usize, Begun<'a, D>)>> {
    let LocalWriter { file, path, alignment, .. } = write.object;
    match taken {
        Err(Errno::INTR | Errno::AGAIN) => {}
        Err(errno) => return Err(of_errno("write", path, errno)),
        Ok(taken) => {
            // The rest of a direct write must be aligned again: what was written of a unit is written once more.
            let whole = taken - taken % alignment;
            if whole == 0 && (taken == 0 || write.stalled) {
                let message = format!("expected {} bytes to be taken, found {taken}", flight.range.len());
                return Err(failed(Kind::Unavailable, "write", path, message));
            }
            write.stalled = whole == 0;
            flight.range.start += whole;
            flight.offset += whole as u64;
        }
    }
    if flight.range.start >= write.end {
        return Ok(None);
    }
    let place = flight.write;
    ring.submit(file, flight).map_err(|errno| of_errno("write", path, errno))?;
    Ok(Some((place, write)))
}
