//! How many cycles a CPU's time stamp counter counts in a second: what others call cycles (Open vSwitch: TSC cycles),
//! whatever the CPU's own frequency is at the time.
//!
//! The rate is measured: counter and clock are read at the start and when a client asks, never for a frame.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// Shortest time over which a rate is measured.
const SHORTEST: Duration = Duration::from_millis(1);

/// See the module's head.
#[derive(Debug, Clone, Copy)]
pub struct CycleRate {
    clock: Instant,
    counter: Option<u64>,
}

impl CycleRate {
    /// Starts the measurement.
    pub fn begin() -> Self {
        Self {
            clock: Instant::now(),
            counter: counter(),
        }
    }

    /// Cycles in a microsecond; `None`: this CPU has no such counter, or too little time has passed.
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

/// `None`: reading the counter is not implemented for this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub fn counter() -> Option<u64> {
    None
}
