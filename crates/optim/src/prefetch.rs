//! Memory that will be needed.

/// Asks the processor to fetch `bytes` into its first-level cache while it computes.
#[inline(always)]
#[allow(unsafe_code)] // there is no safe call for it
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of every x86-64; fetching into a cache changes nothing that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}
