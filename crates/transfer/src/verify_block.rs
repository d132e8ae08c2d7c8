//! Verifies and places bytes in memory block by block. A block is read into the cache to be verified and copied from
//! there, past the cache, while the next one is verified: this keeps memory busy in both directions.

use shardfast_plan::Piece;

use crate::blocks::{Blocks, Unverified};
use crate::sink::Sink;

/// Places all pieces that go into this process's memory. `bytes` are whole blocks in memory that nobody else writes,
/// the first of which lies at `start` in the file, and `expected` their CRC-64.
///
/// # Errors
/// When a needed block's bytes are not the saved ones: no byte of it has been placed.
pub(crate) fn place(
    bytes: &[u8],
    start: u64,
    expected: &[u64],
    pieces: &[Piece],
    sinks: &[&Sink],
) -> Result<(), Unverified> {
    let mut blocks = Blocks::new(bytes, expected);
    for piece in pieces {
        let at = (piece.src - start) as usize;
        if let Some(sink) = sinks[piece.want as usize].host() {
            sink.scatter_proven(&piece.dst_offsets, &piece.lengths, &piece.src_strides, &mut blocks, at)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use shardfast_format::{BLOCK_BYTES, Dims, crc64};

    use super::*;
    use crate::host::row_major_strides;

    const BLOCK: usize = BLOCK_BYTES as usize;

    /// Offset of `bytes` in a file.
    const START: u64 = 4096;

    fn blocks(count: usize) -> (Vec<u8>, Vec<u64>) {
        let bytes: Vec<u8> = (0..count * BLOCK - 1000).map(|i| (i * 31 % 251) as u8).collect();
        let expected = bytes.chunks(BLOCK).map(crc64).collect();
        (bytes, expected)
    }

    /// Makes a piece of bytes, `lengths` of them `strides` apart, from `at` of the blocks to a row-major want.
    fn piece(want: u32, at: usize, lengths: &[u64], strides: &[u64]) -> Piece {
        let span_bytes = lengths.iter().zip(strides).map(|(length, stride)| (length - 1) * stride).sum::<u64>() + 1;
        let zeros = Dims::from_elem(0, lengths.len());
        Piece {
            want,
            src: START + at as u64,
            lengths: Dims::from_slice(lengths),
            src_strides: Dims::from_slice(strides),
            dst_offsets: zeros,
            span_bytes,
        }
    }

    fn sink(memory: &mut [u8], lengths: &[u64]) -> Sink {
        let strides: Vec<i64> = row_major_strides(lengths, 1).iter().map(|&s| s as i64).collect();
        // SAFETY: the tests keep the memory, and look at it only after it was filled.
        unsafe { Sink::new(memory.as_mut_ptr() as usize, lengths, &strides, 1) }.unwrap()
    }

    #[test]
    fn runs_across_blocks_and_rows_far_apart_arrive() {
        let (bytes, expected) = blocks(5);
        let (mut run, mut rows) = (vec![0; 4 * BLOCK], vec![0; 4 * 300]);
        let lengths = [4, 300];
        let sinks = [&sink(&mut run, &[4 * BLOCK as u64]), &sink(&mut rows, &lengths)];
        let stride = BLOCK as u64 + 77;
        let pieces = [piece(0, 999, &[4 * BLOCK as u64], &[1]), piece(1, 123, &lengths, &[stride, 1])];
        assert_eq!(place(&bytes, START, &expected, &pieces, &sinks), Ok(()));
        assert!(run == bytes[999..999 + 4 * BLOCK]);
        for row in 0..4 {
            let at = 123 + row * stride as usize;
            assert_eq!(rows[row * 300..][..300], bytes[at..at + 300], "row {row}");
        }
    }

    #[test]
    fn no_byte_of_an_unproven_block_is_placed() {
        let (mut bytes, expected) = blocks(5);
        bytes[2 * BLOCK + 5] ^= 1;
        let mut run = vec![0xee; 4 * BLOCK];
        let pieces = [piece(0, 999, &[4 * BLOCK as u64], &[1])];
        assert_eq!(place(&bytes, START, &expected, &pieces, &[&sink(&mut run, &[4 * BLOCK as u64])]), Err(Unverified));
        assert!(run[..2 * BLOCK - 999] == bytes[999..2 * BLOCK]);
        assert!(run[2 * BLOCK - 999..].iter().all(|&byte| byte == 0xee));
    }

    #[test]
    fn a_block_that_one_piece_passes_over_is_proven_for_the_next() {
        let (mut bytes, expected) = blocks(4);
        bytes[BLOCK + 5] ^= 1;
        let (mut ends, mut middle) = (vec![0xee; 2], vec![0xee; 10]);
        let sinks = [&sink(&mut ends, &[2]), &sink(&mut middle, &[10])];
        // From the first block and the third, then from the second.
        let pieces = [piece(0, 7, &[2], &[2 * BLOCK as u64]), piece(1, BLOCK, &[10], &[1])];
        assert_eq!(place(&bytes, START, &expected, &pieces[..1], &sinks), Ok(()));
        assert_eq!(ends, [bytes[7], bytes[2 * BLOCK + 7]]);
        assert_eq!(place(&bytes, START, &expected, &pieces, &sinks), Err(Unverified));
        assert!(middle.iter().all(|&byte| byte == 0xee));
    }
}
