//! Copies long runs past the cache: loaded bytes are not needed again soon, the device reads staged bytes next, and
//! writing either through the cache would first read the bytes that it replaces. Checksums are computed on the way,
//! which costs little: the processor would wait for memory. A save sums the bytes that it copies; a load, which places
//! only verified blocks, verifies one block while it copies the one before.

use shardfast_format::crc64;

/// Length from which a copy past the cache is faster: shorter runs leave too many lines half written.
pub(crate) const STREAMED_BYTES_MIN: usize = 16 << 10;

/// Copies `bytes` bytes. Call [`settle`] before another thread reads the copy.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[allow(unsafe_code)]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAMED_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and the processor has AVX.
        return unsafe { x86::streamed(from, to, bytes, None) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Copies like [`copy`]; returns the CRC-64 of `next`, the bytes to be copied next, which this brings into the cache.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; `next` must not overlap the written bytes.
#[allow(unsafe_code)]
pub(crate) unsafe fn copy_and_look(from: *const u8, to: *mut u8, bytes: usize, next: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAMED_BYTES_MIN {
        if x86::can_fold() {
            // SAFETY: the caller's promise, and the processor has what is asked for.
            return unsafe { x86::streamed_and_folded(from, to, bytes, next) };
        }
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the caller's promise, and the processor has AVX.
            unsafe { x86::streamed(from, to, bytes, Some(next)) };
            return crc64(next);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    crc64(next)
}

/// Copies like [`copy`]; returns the CRC-64 of the copied bytes.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[allow(unsafe_code)]
pub(crate) unsafe fn copy_and_sum(from: *const u8, to: *mut u8, bytes: usize) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAMED_BYTES_MIN && x86::can_fold() && x86::is_line(to) {
        // SAFETY: the caller's promise, and the processor has what is asked for.
        return unsafe { x86::streamed_and_summed(from, to, bytes) };
    }
    // Through the cache, where it is summed then.
    // SAFETY: the caller's promise; what was written is there to be read.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, bytes);
        crc64(std::slice::from_raw_parts(to, bytes))
    }
}

/// Returns whether [`copy_and_sum`] sums while it copies, instead of afterwards.
pub(crate) fn sums_in_passing() -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::can_fold();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Makes the copies of this thread visible to threads that synchronize with it afterwards.
#[allow(unsafe_code)]
pub(crate) fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the instruction, and it touches nothing.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256,
        _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set4_epi64, _mm512_storeu_si512, _mm512_stream_si512,
        _mm512_ternarylogic_epi64,
    };

    use shardfast_format::{Crc64, crc64};

    const LINE_BYTES: usize = 64;

    /// Bytes that are folded at a time: four registers, since a product takes longer than the next one waits to begin.
    const STEP_BYTES: usize = 4 * LINE_BYTES;

    /// Prefetch distance ahead of the folding: the bytes that arrive within the latency of one line.
    const FETCH_BYTES: usize = 4096;

    /// Copies, and meanwhile prefetches as many bytes of `next`.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`]; the processor has AVX.
    #[target_feature(enable = "avx")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn streamed(from: *const u8, to: *mut u8, bytes: usize, next: Option<&[u8]>) {
        const HALF: usize = LINE_BYTES / 2;
        let head = to.align_offset(LINE_BYTES).min(bytes);
        let lines = (bytes - head) / LINE_BYTES;
        let tail = head + lines * LINE_BYTES;
        // SAFETY: head, lines and tail follow each other and end at `bytes`; every line of `to` is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            for line in 0..lines {
                let (from, to) = (from.add(head + line * LINE_BYTES), to.add(head + line * LINE_BYTES));
                if let Some(next) = next {
                    // Into the second level: a block does not fit into the first. What is not mapped is not fetched.
                    _mm_prefetch::<_MM_HINT_T1>(next.as_ptr().wrapping_add(line * LINE_BYTES).cast::<i8>());
                }
                let low = _mm256_loadu_si256(from.cast::<__m256i>());
                let high = _mm256_loadu_si256(from.add(HALF).cast::<__m256i>());
                _mm256_stream_si256(to.cast::<__m256i>(), low);
                _mm256_stream_si256(to.add(HALF).cast::<__m256i>(), high);
            }
            std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
        }
    }

    /// Returns whether the processor can fold.
    pub(super) fn can_fold() -> bool {
        std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("vpclmulqdq")
    }

    /// CRC-64/NVME of bytes as they pass, step by step.
    ///
    /// The bytes so far are kept as one step's bytes that leave the same remainder: their 16-byte parts, times `x` to
    /// the power of a step's bits, are added to those of the next step (V. Gopal et al., Fast CRC Computation for
    /// Generic Polynomials Using PCLMULQDQ Instruction, Intel, 2009). The product of two reflected factors is short of
    /// one power of `x`, hence the odd exponents. The initial value is the same as other first 8 bytes.
    struct Folded([__m512i; 4]);

    impl Folded {
        /// # Safety
        /// A step's bytes lie at `first`; the processor is one that [`can_fold`].
        #[target_feature(enable = "avx512f,vpclmulqdq")]
        #[allow(unsafe_code)]
        #[inline]
        unsafe fn new(first: *const u8) -> Folded {
            let mut step = [0; STEP_BYTES];
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(first, step.as_mut_ptr(), STEP_BYTES) };
            invert_first(&mut step);
            // SAFETY: a step has four lines.
            Folded(std::array::from_fn(|i| unsafe { line(step.as_ptr(), i) }))
        }

        /// Takes line `i` of the next step.
        #[target_feature(enable = "avx512f,vpclmulqdq")]
        #[inline]
        fn take(&mut self, i: usize, line: __m512i) {
            const STEP_BITS: u32 = 8 * STEP_BYTES as u32;
            const HIGH: i64 = power(STEP_BITS + 63);
            const LOW: i64 = power(STEP_BITS - 1);
            let factors = _mm512_set4_epi64(LOW, HIGH, LOW, HIGH);
            let high = _mm512_clmulepi64_epi128::<0x00>(self.0[i], factors);
            let low = _mm512_clmulepi64_epi128::<0x11>(self.0[i], factors);
            self.0[i] = _mm512_ternarylogic_epi64::<0x96>(high, low, line);
        }

        /// Returns the checksum of all bytes so far and of the `rest`.
        #[target_feature(enable = "avx512f")]
        #[allow(unsafe_code)]
        #[inline]
        fn finish(self, rest: &[u8]) -> u64 {
            let mut step = [0; STEP_BYTES];
            for (i, line) in self.0.into_iter().enumerate() {
                // SAFETY: a step has four lines.
                unsafe { _mm512_storeu_si512(step.as_mut_ptr().add(i * LINE_BYTES).cast::<__m512i>(), line) };
            }
            invert_first(&mut step);
            let mut crc = Crc64::new();
            crc.update(&step);
            crc.update(rest);
            crc.finish()
        }
    }

    /// Turns the initial value of the CRC, which is all ones, into a part of the following bytes, or back.
    fn invert_first(step: &mut [u8; STEP_BYTES]) {
        step[..8].iter_mut().for_each(|byte| *byte = !*byte);
    }

    /// Returns `x^n` modulo the polynomial of CRC-64/NVME, the coefficient of `x^63` in the lowest bit.
    const fn power(n: u32) -> i64 {
        const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;
        let (mut power, mut i) = (1u64, 0);
        while i < n {
            power = (power << 1) ^ (POLYNOMIAL * (power >> 63));
            i += 1;
        }
        power.reverse_bits().cast_signed()
    }

    /// # Safety
    /// Line `i` of the bytes at `bytes` can be read; the processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    #[inline]
    unsafe fn line(bytes: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(bytes.add(i * LINE_BYTES).cast::<__m512i>()) }
    }

    /// Prefetches line `i` of the bytes [`FETCH_BYTES`] after `bytes`, if there are any.
    #[allow(unsafe_code)]
    #[inline]
    fn fetch(bytes: *const u8, i: usize) {
        // SAFETY: what is not mapped is not fetched.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(FETCH_BYTES + i * LINE_BYTES).cast::<i8>()) };
    }

    /// Copies past the cache, and returns the CRC-64/NVME of `next`: while there is enough of both, step by step.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`]; `next` must not overlap the written bytes, and the processor is one
    /// that [`can_fold`].
    #[target_feature(enable = "avx,avx512f,vpclmulqdq")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn streamed_and_folded(from: *const u8, to: *mut u8, bytes: usize, next: &[u8]) -> u64 {
        let head = to.align_offset(LINE_BYTES).min(bytes);
        let steps = next.len() / STEP_BYTES;
        if steps == 0 {
            // SAFETY: the caller's promise.
            unsafe { streamed(from, to, bytes, None) };
            return crc64(next);
        }
        let both = (steps - 1).min((bytes - head) / STEP_BYTES);
        // SAFETY: `both` steps of lines of `to`, which are aligned, follow its head, and end at `bytes` at the latest;
        // as many and all further `steps` of `next` follow its first one.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            let mut folded = Folded::new(next.as_ptr());
            for step in 0..both {
                let ahead = next.as_ptr().add((step + 1) * STEP_BYTES);
                let (from, to) = (from.add(head + step * STEP_BYTES), to.add(head + step * STEP_BYTES));
                for i in 0..4 {
                    fetch(ahead, i);
                    folded.take(i, line(ahead, i));
                    _mm512_stream_si512(to.add(i * LINE_BYTES).cast::<__m512i>(), line(from, i));
                }
            }
            for step in both + 1..steps {
                let ahead = next.as_ptr().add(step * STEP_BYTES);
                (0..4).for_each(|i| folded.take(i, line(ahead, i)));
            }
            let done = head + both * STEP_BYTES;
            streamed(from.add(done), to.add(done), bytes - done, None);
            folded.finish(&next[steps * STEP_BYTES..])
        }
    }

    /// Copies past the cache, and returns the CRC-64/NVME of the copied bytes.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`]; `to` is a multiple of [`LINE_BYTES`], and the processor is one that
    /// [`can_fold`].
    #[target_feature(enable = "avx,avx512f,vpclmulqdq")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn streamed_and_summed(from: *const u8, to: *mut u8, bytes: usize) -> u64 {
        let steps = bytes / STEP_BYTES;
        let (done, rest) = (steps * STEP_BYTES, bytes % STEP_BYTES);
        // SAFETY: the steps and the rest follow each other and end at `bytes`; every line of `to` is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), rest);
            let rest = std::slice::from_raw_parts(to.add(done), rest);
            if steps == 0 {
                return crc64(rest);
            }
            std::ptr::copy_nonoverlapping(from, to, STEP_BYTES);
            let mut folded = Folded::new(to);
            for step in 1..steps {
                let (from, to) = (from.add(step * STEP_BYTES), to.add(step * STEP_BYTES));
                for i in 0..4 {
                    fetch(from, i);
                    let line = line(from, i);
                    folded.take(i, line);
                    _mm512_stream_si512(to.add(i * LINE_BYTES).cast::<__m512i>(), line);
                }
            }
            folded.finish(rest)
        }
    }

    /// Returns whether a line begins at `to`.
    pub(super) fn is_line(to: *const u8) -> bool {
        to.addr().is_multiple_of(LINE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 31 % 251) as u8).collect()
    }

    #[test]
    fn every_length_and_alignment_is_copied_whole_and_nothing_beside_it() {
        let from = pattern(STREAMED_BYTES_MIN + 400);
        let next = pattern(70_000);
        for bytes in [0, 1, 63, 64, STREAMED_BYTES_MIN - 1, STREAMED_BYTES_MIN, STREAMED_BYTES_MIN + 129] {
            for (source, target, looked_at) in [
                (0, 0, None),
                (1, 0, Some(0)),
                (0, 1, Some(255)),
                (3, 77, Some(65_536)),
                (64, 32, None),
                (17, 63, Some(16_000)),
            ] {
                let mut to = vec![0xee; bytes + 256];
                // SAFETY: both ranges lie inside their vectors.
                #[allow(unsafe_code)]
                unsafe {
                    let (from, to) = (from.as_ptr().add(source), to.as_mut_ptr().add(target));
                    match looked_at {
                        None => copy(from, to, bytes),
                        Some(length) => _ = copy_and_look(from, to, bytes, &next[..length]),
                    }
                }
                assert_eq!(to[target..target + bytes], from[source..source + bytes], "{bytes} {source} {target}");
                assert!(to[..target].iter().chain(&to[target + bytes..]).all(|&byte| byte == 0xee));
            }
        }
    }

    #[test]
    fn what_is_summed_in_passing_is_copied_whole_and_nothing_beside_it() {
        let from = pattern(100_000);
        for bytes in [0, 1, 255, 256, 511, STREAMED_BYTES_MIN - 1, STREAMED_BYTES_MIN, 65_535, 65_536, 65_537, 99_000] {
            for (source, target) in [(0, 0), (1, 0), (0, 1), (63, 64)] {
                let mut to = vec![0xee; bytes + 256];
                let to = &mut to[..];
                let target = to.as_ptr().align_offset(64) + target;
                let expected = &from[source..source + bytes];
                // SAFETY: both ranges lie inside their vectors.
                #[allow(unsafe_code)]
                let found = unsafe { copy_and_sum(from.as_ptr().add(source), to.as_mut_ptr().add(target), bytes) };
                assert_eq!(found, crc64(expected), "{bytes} {source} {target}");
                assert!(to[target..target + bytes] == *expected, "{bytes} {source} {target}");
                assert!(to[..target].iter().chain(&to[target + bytes..]).all(|&byte| byte == 0xee));
            }
        }
    }

    #[test]
    fn what_is_looked_at_is_checksummed_whatever_its_length_and_that_of_the_copy() {
        let (from, next) = (pattern(100_000), pattern(80_000));
        let mut to = vec![0; from.len()];
        for length in [0, 1, 8, 255, 256, 257, 511, 512, 513, 4096, 65_535, 65_536, 65_537, 80_000] {
            for bytes in [0, 100, STREAMED_BYTES_MIN, STREAMED_BYTES_MIN + 77, 65_536, 99_900] {
                for start in [0, 1] {
                    let next = &next[start..length.max(start)];
                    // SAFETY: both ranges lie inside their vectors.
                    #[allow(unsafe_code)]
                    let found = unsafe { copy_and_look(from.as_ptr(), to.as_mut_ptr().add(start), bytes, next) };
                    assert_eq!(found, crc64(next), "{length} bytes beside a copy of {bytes}");
                }
            }
        }
    }
}
