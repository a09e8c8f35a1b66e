//! Taps: the host as a neighbour of a network, and tap mode.

pub mod from_tap;
pub(crate) mod inner_queue;
pub(crate) mod tap_frame;
pub mod tap_lane;
pub(crate) mod to_tap;
