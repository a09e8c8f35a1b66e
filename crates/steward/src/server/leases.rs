//! Leases: granted, listed, and what their lessees ask for.

pub(super) mod entries;
pub(super) mod hints;
pub(super) mod lease;
pub(super) mod networks;
pub(super) mod rings;
pub(super) mod sockets;
mod tunnel;
