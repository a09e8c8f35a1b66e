//! The lanes of a network's uplink.

pub mod multicast_lane;
pub mod uplink_lane;
