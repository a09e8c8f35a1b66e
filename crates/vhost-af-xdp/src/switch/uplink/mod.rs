//! The lanes of a network's uplink.

pub(crate) mod multicast_lane;
pub(crate) mod uplink_lane;
