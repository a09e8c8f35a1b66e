//! Where tests let a device die, or a VMM write: `tests/crash.rs`. Here nothing happens.

/// Called before a store that a successor could see.
#[inline(always)]
pub(crate) fn point() {}

/// Called before each load from the inflight region.
#[inline(always)]
pub(crate) fn before_load() {}
