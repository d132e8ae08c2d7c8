//! The message between two ranks in a round.
//!
//! ```text
//! head     u64 flags (1: the last one with segments, 2: this rank failed), u64 number of returned slots,
//!          u64 each: slots of the receiver's shared memory that the sender is done with, u64 CRC-64 of all that
//! segment  u64 file, u64 start, u64 end: the chunk; u64 bytes; u64 where in the sender's shared memory they lie, or
//!          all ones when they follow; u64 CRC-64 of all but itself, with bytes that follow; bytes
//! ```
//!
//! All numbers are little-endian. The bytes are the elements of the receiver's pieces of the chunk, in the plan's
//! order, each piece row-major. The sender verified the blocks that they come from. The receiver verifies bytes that
//! follow once more; bytes in shared memory never left the memory in which they were verified.

use std::ops::Range;
use std::sync::Arc;

use shardfast_format::{Crc64, crc64};
use shardfast_plan::{Chunk, Piece};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::host::pack;

/// Flag of the last message with segments.
pub(super) const LAST: u64 = 1;
/// Flag of a message whose sender failed.
pub(super) const ABANDONED: u64 = 2;

const SEGMENT_HEAD_BYTES: usize = 48;
/// Value in place of an offset in shared memory: the bytes follow in the message.
const FOLLOW: u64 = u64::MAX;

/// A received message, parsed.
pub(super) struct Parsed {
    pub(super) flags: u64,
    pub(super) returned: Vec<u64>,
    pub(super) segments: Vec<Segment>,
}

/// Part of a received message: the bytes of a chunk.
pub(super) struct Segment {
    pub(super) from: u32,
    pub(super) file: u32,
    pub(super) chunk: Range<u64>,
    pub(super) body: Body,
}

/// Location of a segment's bytes.
pub(super) enum Body {
    /// Bytes in the sender's shared memory.
    Shared { at: u64, bytes: u64 },
    /// Bytes in the message, behind the segment's head.
    Message { message: Arc<Vec<u8>>, bytes: Range<usize>, crc: u64 },
}

impl Body {
    /// Returns the bytes of the message; or the CRC-64 that was found, if it differs.
    pub(super) fn verified<'a>(
        message: &'a [u8],
        bytes: &Range<usize>,
        crc: u64,
    ) -> std::result::Result<&'a [u8], u64> {
        let head = &message[bytes.start - SEGMENT_HEAD_BYTES..bytes.start - 8];
        match segment_crc(head, &message[bytes.clone()]) {
            found if found == crc => Ok(&message[bytes.clone()]),
            found => Err(found),
        }
    }
}

pub(super) fn head(flags: u64, returned: &[u32]) -> Vec<u8> {
    let numbers = [flags, returned.len() as u64].into_iter().chain(returned.iter().map(|&slot| u64::from(slot)));
    let mut head: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
    head.extend(crc64(&head).to_le_bytes());
    head
}

/// Makes a segment whose bytes follow.
pub(super) fn carried<'a>(chunk: &Chunk, pieces: &[Piece], source: impl Fn(&Piece) -> &'a [u8]) -> Vec<u8> {
    let bytes = pieces.iter().map(Piece::bytes).sum::<u64>();
    let mut segment = Vec::with_capacity(SEGMENT_HEAD_BYTES + bytes as usize);
    numbers(chunk, bytes, FOLLOW, &mut segment);
    segment.extend([0; 8]);
    for piece in pieces {
        let out = &mut segment;
        pack(&piece.lengths, &piece.src_strides, piece.item_bytes(), source(piece), |run| out.extend_from_slice(run));
    }
    let (crc, bytes) = (SEGMENT_HEAD_BYTES - 8, SEGMENT_HEAD_BYTES);
    let found = segment_crc(&segment[..crc], &segment[bytes..]);
    segment[crc..bytes].copy_from_slice(&found.to_le_bytes());
    segment
}

/// Makes a segment whose bytes lie in the sender's shared memory.
pub(super) fn shown(chunk: &Chunk, at: u64, bytes: u64) -> Vec<u8> {
    let mut segment = Vec::with_capacity(SEGMENT_HEAD_BYTES);
    numbers(chunk, bytes, at, &mut segment);
    segment.extend(segment_crc(&segment, &[]).to_le_bytes());
    segment
}

fn numbers(chunk: &Chunk, bytes: u64, at: u64, out: &mut Vec<u8>) {
    for number in [u64::from(chunk.file), chunk.range.start, chunk.range.end, bytes, at] {
        out.extend(number.to_le_bytes());
    }
}

/// Parses a message, without verifying bytes that follow. `files` are the lengths of the checkpoint's, in bytes.
///
/// # Errors
/// `Corrupt` naming `place` and the rank that sent it.
pub(super) fn parse(from: u32, message: Vec<u8>, files: &[u64], place: &str) -> Result<Parsed> {
    let message = Arc::new(message);
    let damaged =
        |what: &str| Error::corrupt(format!("{place}: the message of rank {from}, which reads for this one, {what}"));
    let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
    let mut at = 0;
    let mut take = |count: u64| -> Option<(usize, Vec<u64>)> {
        let behind = usize::try_from(count).ok()?.checked_mul(8)?.checked_add(at)?;
        let bytes = message.get(at..behind)?;
        let began = std::mem::replace(&mut at, behind);
        Some((began, bytes.chunks(8).filter_map(number).collect()))
    };
    let cut = || damaged("is cut short");
    let (_, head) = take(2).ok_or_else(cut)?;
    let (_, returned) = take(head[1]).ok_or_else(cut)?;
    let (end, crc) = take(1).ok_or_else(cut)?;
    if crc64(&message[..end]) != crc[0] {
        return Err(damaged("has a head with another CRC-64 than it says"));
    }
    let mut segments = Vec::new();
    let mut at = end + 8;
    while at < message.len() {
        let numbers: Vec<u64> =
            message.get(at..at + SEGMENT_HEAD_BYTES).ok_or_else(cut)?.chunks(8).filter_map(number).collect();
        let [file, start, end, bytes, shown_at, crc] = numbers[..] else { return Err(cut()) };
        at += SEGMENT_HEAD_BYTES;
        let file = u32::try_from(file).ok().and_then(|file| Some((file, *files.get(file as usize)?)));
        let (file, file_bytes) = file.ok_or_else(|| damaged("names a file that the checkpoint does not have"))?;
        if start > end || end > file_bytes {
            return Err(damaged("names bytes beyond the end of the file"));
        }
        let body = if shown_at == FOLLOW {
            let behind = usize::try_from(bytes).ok().and_then(|bytes| at.checked_add(bytes));
            let behind = behind.filter(|&behind| behind <= message.len()).ok_or_else(cut)?;
            Body::Message { message: Arc::clone(&message), bytes: std::mem::replace(&mut at, behind)..behind, crc }
        } else {
            if segment_crc(&message[at - SEGMENT_HEAD_BYTES..at - 8], &[]) != crc {
                return Err(damaged("has a segment head with another CRC-64 than it says"));
            }
            Body::Shared { at: shown_at, bytes }
        };
        segments.push(Segment { from, file, chunk: start..end, body });
    }
    Ok(Parsed { flags: head[0], returned, segments })
}

fn segment_crc(head: &[u8], bytes: &[u8]) -> u64 {
    let mut crc = Crc64::new();
    crc.update(head);
    crc.update(bytes);
    crc.finish()
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn chunk() -> Chunk {
        Chunk { file: 1, range: 4096..8192, end: 8192, wanters: vec![0, 1].into(), reader: 0 }
    }

    const FILES: [u64; 2] = [4096, 8192];

    #[test]
    fn bytes_that_the_file_lacks_are_refused() {
        let refused = parse(3, message(), &[4096, 8191], "here").map(|_| ()).unwrap_err();
        assert!(refused.message.ends_with("names bytes beyond the end of the file"), "{refused:?}");
    }

    fn message() -> Vec<u8> {
        let piece = Piece {
            want: 0,
            src: 4096,
            lengths: smallvec![3],
            src_strides: smallvec![1],
            dst_offsets: smallvec![0],
            span_bytes: 3,
        };
        [head(LAST, &[7, 9]), carried(&chunk(), &[piece], |_| b"abc"), shown(&chunk(), 1 << 20, 5)].concat()
    }

    #[test]
    fn what_is_said_is_understood() {
        let parsed = parse(3, message(), &FILES, "here").unwrap();
        assert_eq!((parsed.flags, parsed.returned), (LAST, vec![7, 9]));
        let [carried, shown] = &parsed.segments[..] else { panic!("two segments") };
        assert!([carried, shown].iter().all(|s| (s.from, s.file, &s.chunk) == (3, 1, &(4096..8192))));
        let Body::Message { message, bytes, crc } = &carried.body else { panic!("bytes follow") };
        assert_eq!(Body::verified(message, bytes, *crc), Ok(&b"abc"[..]));
        assert!(matches!(shown.body, Body::Shared { at: 0x10_0000, bytes: 5 }));
    }

    #[test]
    fn no_cut_and_no_bit_passes() {
        let whole = message();
        let is_refused = |message: Vec<u8>| match parse(3, message, &FILES, "here") {
            Err(error) => error.message.starts_with("here: the message of rank 3, which reads for this one, "),
            Ok(parsed) => parsed.segments.iter().any(|segment| match &segment.body {
                Body::Message { message, bytes, crc } => Body::verified(message, bytes, *crc).is_err(),
                Body::Shared { .. } => false,
            }),
        };
        for bit in 0..whole.len() * 8 {
            let mut message = whole.clone();
            message[bit / 8] ^= 1 << (bit % 8);
            assert!(is_refused(message), "bit {bit}");
        }
        // Between two segments is no harm: how many there are is not said, and what is missing is missed in the end.
        let ends = [40, 40 + SEGMENT_HEAD_BYTES + 3];
        for bytes in (0..whole.len()).filter(|bytes| !ends.contains(bytes)) {
            assert!(is_refused(whole[..bytes].to_vec()), "{bytes} bytes");
        }
    }
}
