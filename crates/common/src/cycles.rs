//! How many cycles a CPU's time stamp counter counts in a second: what others call cycles (Open vSwitch: TSC cycles),
//! whatever the CPU's own frequency is at the time.
//!
//! Measured, and not looked up: the counter is read beside the clock at the start and when somebody asks. No frame pays
//! for it.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// Shortest time from which a rate is told.
const SHORTEST: Duration = Duration::from_millis(1);

/// See the module's head.
#[derive(Debug, Clone, Copy)]
pub struct CycleRate {
    clock: Instant,
    counter: Option<u64>,
}

impl CycleRate {
    /// From now on.
    pub fn begin() -> Self {
        Self {
            clock: Instant::now(),
            counter: counter(),
        }
    }

    /// Cycles of a microsecond; `None`: this CPU has no such counter, or it is too early to tell.
    pub fn per_us(&self) -> Option<f64> {
        let passed = self.clock.elapsed();
        let cycles = counter()?.checked_sub(self.counter?)?;
        // Both fit a double's mantissa for years.
        (passed >= SHORTEST).then(|| cycles as f64 / (passed.as_nanos() as f64 / 1e3))
    }
}

/// The counter now; `None`: this CPU has none, or it is not known how to read it.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn counter() -> Option<u64> {
    // SAFETY: reads a register that each x86-64 CPU has, and no memory.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

/// The counter now: it is not known how to read it here.
#[cfg(not(target_arch = "x86_64"))]
pub fn counter() -> Option<u64> {
    None
}
