//! Hooks where tests kill a device or write as the VMM (`tests/crash.rs`). Outside tests they do nothing.

/// Called before a store that a successor could see.
#[inline(always)]
pub(crate) fn point() {}

/// Called before each load from the inflight region.
#[inline(always)]
pub(crate) fn before_load() {}
