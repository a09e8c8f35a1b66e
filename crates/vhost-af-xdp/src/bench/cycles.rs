//! The CPU's counter of cycles, at its nominal rate whatever the clock is just now.
#![allow(unsafe_code)]

/// Cycles so far; `None` where this is not known how.
#[inline]
pub(super) fn now() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a counter, which every CPU of this architecture has.
    let cycles = Some(unsafe { std::arch::x86_64::_rdtsc() });
    #[cfg(not(target_arch = "x86_64"))]
    let cycles = None;
    cycles
}
