//! Queues of NICs for lanes: what they send and receive. [`own_queue`] is a pair's own, [`to_nic`] puts frames into a
//! queue, [`receiver`] and [`arrivals`] deliver received ones.

pub mod arrivals;
pub(crate) mod metadata_reader;
pub mod own_queue;
pub(crate) mod receiver;
pub(crate) mod to_nic;
