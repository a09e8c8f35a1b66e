//! Tap devices of leases: to the host, to the wire, and for GSO packets.

pub(super) mod bridge_entries;
mod bridges;
mod left;
pub(super) mod network_tap;
pub(super) mod network_taps;
pub(super) mod removals;
pub(super) mod send_taps;
pub(super) mod tap;
