//! Copies of long runs past the cache: what is loaded is not needed again soon, and writing it through the cache would
//! first read what it replaces.

/// From this length on a copy past the cache is faster: shorter runs leave too many lines half written.
const STREAMED_BYTES_MIN: usize = 16 << 10;

/// Copies `bytes` bytes. If `ahead` is not 0, what lies so many bytes behind each of them will be read soon, and is
/// fetched meanwhile; nothing need be there. Others may be told that the copy is done after a call of [`settle`].
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[allow(unsafe_code)]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAMED_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and the processor has AVX.
        return unsafe {
            if ahead > 0 { streamed::<true>(from, to, bytes, ahead) } else { streamed::<false>(from, to, bytes, 0) }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ahead;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Whoever is told after this that copies were made will see them.
#[allow(unsafe_code)]
pub(crate) fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the instruction, and it touches nothing.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
#[allow(unsafe_code)]
unsafe fn streamed<const FETCH: bool>(from: *const u8, to: *mut u8, bytes: usize, ahead: usize) {
    use std::arch::x86_64::{__m256i, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE_BYTES: usize = 64;
    const HALF: usize = LINE_BYTES / 2;
    let head = to.align_offset(LINE_BYTES).min(bytes);
    let lines = (bytes - head) / LINE_BYTES;
    let tail = head + lines * LINE_BYTES;
    // SAFETY: head, lines and tail follow each other and end at `bytes`; every line of `to` is aligned.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let (from, to) = (from.add(head + line * LINE_BYTES), to.add(head + line * LINE_BYTES));
            if FETCH {
                // Into the second level: a block does not fit into the first. An address that is not mapped is ignored.
                _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(ahead).cast::<i8>());
            }
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(HALF).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), low);
            _mm256_stream_si256(to.add(HALF).cast::<__m256i>(), high);
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_whole_and_nothing_beside_it() {
        let from: Vec<u8> = (0..STREAMED_BYTES_MIN + 400).map(|i| (i * 31 % 251) as u8).collect();
        for bytes in [0, 1, 63, 64, STREAMED_BYTES_MIN - 1, STREAMED_BYTES_MIN, STREAMED_BYTES_MIN + 129] {
            for (source, target, ahead) in
                [(0, 0, 0), (1, 0, 64), (0, 1, 0), (3, 77, 1 << 40), (64, 32, 0), (17, 63, 5)]
            {
                let mut to = vec![0xee; bytes + 256];
                // SAFETY: both ranges lie inside their vectors.
                #[allow(unsafe_code)]
                unsafe {
                    copy(from.as_ptr().add(source), to.as_mut_ptr().add(target), bytes, ahead);
                }
                assert_eq!(to[target..target + bytes], from[source..source + bytes], "{bytes} {source} {target}");
                assert!(to[..target].iter().chain(&to[target + bytes..]).all(|&byte| byte == 0xee));
            }
        }
    }
}
