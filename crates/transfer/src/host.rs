//! Blocks of this process's memory that a load fills.

use shardfast_format::Dims;
use smallvec::SmallVec;

use crate::blocks::{Blocks, Unverified};
use crate::copy_crc::{STREAMED_BYTES_MIN, copy, copy_and_look, settle};
use crate::error::{Error, Result};

/// A block in this process's memory.
#[derive(Debug)]
pub struct HostSink {
    address: usize,
    strides_bytes: SmallVec<[i64; 4]>,
    item_bytes: u64,
}

impl HostSink {
    /// Makes a sink in host memory; arguments and errors are those of [`Sink::new`](crate::sink::Sink::new).
    ///
    /// # Safety
    /// As for [`Sink::new`](crate::sink::Sink::new).
    #[allow(unsafe_code)]
    pub(crate) unsafe fn new(
        address: usize,
        lengths: &[u64],
        strides_bytes: &[i64],
        item_bytes: u64,
    ) -> Result<HostSink> {
        let mut dims: SmallVec<[(u64, u64); 4]> =
            lengths.iter().zip(strides_bytes).filter(|d| *d.0 > 1).map(|(&n, &s)| (s.unsigned_abs(), n)).collect();
        dims.sort_unstable();
        let mut extent = item_bytes;
        for (stride, length) in dims {
            if stride < extent && !lengths.contains(&0) {
                return Err(Error::invalid(format!(
                    "the destination's elements share memory (shape {lengths:?}, strides {strides_bytes:?} bytes, \
                     {item_bytes} bytes an element): load into a tensor of its own, such as its clone()"
                )));
            }
            extent = stride.saturating_mul(length - 1).saturating_add(extent);
        }
        Ok(HostSink { address, strides_bytes: SmallVec::from_slice(strides_bytes), item_bytes })
    }

    /// Copies a box of extent `lengths` to `offsets` of this block; its elements lie `src_strides` bytes apart in
    /// `src`.
    #[allow(unsafe_code)]
    pub(crate) fn scatter(&self, offsets: &[u64], lengths: &[u64], src_strides: &[u64], src: &[u8]) {
        self.for_each_run(offsets, lengths, src_strides, |address, from, bytes| {
            let run = &src[from..from + bytes];
            // SAFETY: the box lies inside the region that `Sink::new`'s caller keeps writable and unshared, since the
            // plan cuts pieces inside the wanted region; `run` is bounds-checked above and never overlaps it.
            unsafe { copy(run.as_ptr(), address as *mut u8, bytes) };
        });
        settle();
    }

    /// Scatters like [`HostSink::scatter`] a box whose first element lies `at` bytes after the beginning of `blocks`.
    /// Each block is verified before a byte of it is copied; the next one is verified meanwhile.
    ///
    /// # Errors
    /// When a block's bytes are not the saved ones; nothing of it or after it is copied.
    #[allow(unsafe_code)]
    pub(crate) fn scatter_proven(
        &self,
        offsets: &[u64],
        lengths: &[u64],
        src_strides: &[u64],
        blocks: &mut Blocks<'_>,
        at: usize,
    ) -> std::result::Result<(), Unverified> {
        let mut ended = Ok(());
        self.for_each_run(offsets, lengths, src_strides, |address, from, bytes| {
            let mut done = 0;
            while done < bytes && ended.is_ok() {
                let Ok((block, now)) = blocks.verify(at + from + done, bytes - done) else {
                    ended = Err(Unverified);
                    return;
                };
                let to = (address + done) as *mut u8;
                let is_worth_it = now.len() >= STREAMED_BYTES_MIN;
                match blocks.unseen(block + 1).filter(|_| is_worth_it) {
                    Some(next) => {
                        // SAFETY: as in `scatter`; blocks are never a part of what a load fills.
                        let crc = unsafe { copy_and_look(now.as_ptr(), to, now.len(), next) };
                        blocks.saw(block + 1, crc);
                    }
                    // SAFETY: as above.
                    None => unsafe { copy(now.as_ptr(), to, now.len()) },
                }
                done += now.len();
            }
        });
        settle();
        ended
    }

    /// Calls `visit(address, from, bytes)` for every run of a box without empty dimensions that is contiguous on both
    /// sides; `from` counts in the source, whose elements lie `src_strides` bytes apart.
    pub(crate) fn for_each_run(
        &self,
        offsets: &[u64],
        lengths: &[u64],
        src_strides: &[u64],
        mut visit: impl FnMut(usize, usize, usize),
    ) {
        let mut address = self.address as i64;
        let mut dims: SmallVec<[(u64, u64, i64); 4]> = SmallVec::new();
        for d in 0..lengths.len() {
            address += offsets[d] as i64 * self.strides_bytes[d];
            let (length, from, to) = (lengths[d], src_strides[d], self.strides_bytes[d]);
            match dims.last_mut() {
                _ if length == 1 => {}
                Some(last) if last.1 == from * length && last.2 == to * length as i64 => {
                    *last = (last.0 * length, from, to);
                }
                _ => dims.push((length, from, to)),
            }
        }
        let item = self.item_bytes;
        let run_bytes = match dims.last() {
            Some(&(length, from, to)) if from == item && to == item as i64 => {
                dims.pop();
                length * item
            }
            _ => item,
        } as usize;
        let mut index: SmallVec<[u64; 4]> = SmallVec::from_elem(0, dims.len());
        let mut from = 0usize;
        'runs: loop {
            visit(address as usize, from, run_bytes);
            for d in (0..dims.len()).rev() {
                let (length, from_stride, to_stride) = dims[d];
                index[d] += 1;
                from += from_stride as usize;
                address += to_stride;
                if index[d] < length {
                    continue 'runs;
                }
                index[d] = 0;
                from -= (from_stride * length) as usize;
                address -= to_stride * length as i64;
            }
            return;
        }
    }
}

/// Gives the elements of a box of extent `lengths`, which lie `src_strides` bytes apart in `src`, in row-major order.
pub fn pack(lengths: &[u64], src_strides: &[u64], item_bytes: u64, src: &[u8], mut put: impl FnMut(&[u8])) {
    let strides_bytes = row_major_strides(lengths, item_bytes).iter().map(|&stride| stride as i64).collect();
    // A block at address 0 visits its runs in the order in which they are given; nothing is written through it.
    let block = HostSink { address: 0, strides_bytes, item_bytes };
    let zeros: Dims = SmallVec::from_elem(0, lengths.len());
    block.for_each_run(&zeros, lengths, src_strides, |_, from, bytes| put(&src[from..from + bytes]));
}

/// Returns the row-major strides of a region of extent `lengths`, in bytes.
pub fn row_major_strides(lengths: &[u64], item_bytes: u64) -> Dims {
    let mut strides: Dims = SmallVec::from_elem(0, lengths.len());
    let mut stride = item_bytes;
    for d in (0..lengths.len()).rev() {
        strides[d] = stride;
        stride *= lengths[d];
    }
    strides
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn boxes_land_in_transposed_memory() {
        // Region [4][6] of u16, stored row-major in `src`; destination transposed: element (i, j) at j * 4 + i.
        let src: Vec<u8> = (0..24u16).flat_map(u16::to_le_bytes).collect();
        let mut dst = vec![u16::MAX; 24];
        // SAFETY: `dst` outlives the sink and is read only after the scatter.
        let sink = unsafe { HostSink::new(dst.as_mut_ptr() as usize, &[4, 6], &[2, 8], 2) }.unwrap();
        sink.scatter(&[1, 2], &[3, 4], &[12, 2], &src[(6 + 2) * 2..]);
        for j in 0..6 {
            for i in 0..4 {
                let inside = i >= 1 && (2..6).contains(&j);
                let expected = if inside { (i * 6 + j) as u16 } else { u16::MAX };
                assert_eq!(dst[j * 4 + i], expected, "element ({i}, {j})");
            }
        }
    }

    #[test]
    fn pieces_are_packed_in_row_major_order() {
        let source: Vec<u8> = (0..48).collect();
        let mut out = vec![99];
        // A box [2, 3] of two-byte elements out of rows of eight.
        pack(&[2, 3], &[16, 2], 2, &source[4..], |run| out.extend_from_slice(run));
        assert_eq!(out, [99, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25]);
        pack(&[], &[], 2, &source[6..8], |run| out.extend_from_slice(run));
        assert_eq!(out[13..], [6, 7]);
    }

    #[test]
    fn destinations_that_share_memory_are_refused() {
        let mut dst = [0u8; 64];
        let address = dst.as_mut_ptr() as usize;
        // SAFETY: no sink is ever written through here.
        unsafe {
            assert!(HostSink::new(address, &[4, 4], &[0, 4], 4).unwrap_err().message.contains("share memory"));
            assert!(HostSink::new(address, &[3, 4], &[8, 4], 4).is_err());
            assert!(HostSink::new(address, &[4, 4], &[4, 16], 4).is_ok());
            assert!(HostSink::new(address, &[1, 4], &[0, 4], 4).is_ok());
            assert!(HostSink::new(address, &[4, 0], &[0, 0], 4).is_ok());
        }
    }
}
