//! Identifiers of lanes: within the process, and within their worker.

/// Identifies a lane within the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub u64);

/// The index of a lane among those of its worker, until the worker rebuilds the forwarding state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotAt(pub(crate) usize);
