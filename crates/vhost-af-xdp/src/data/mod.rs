//! The data path: guest frames between virtqueues and NIC queues.
//!
//! Purpose: everything that touches a frame, and nothing else. A [`lane::Lane`] joins one virtio
//! queue pair with one NIC queue and is owned outright by one [`worker`] thread; control reaches
//! it by message. The two placements of `--memory` are two kinds of lane ([`copy`], [`direct`]);
//! what a lane speaks to on the far side is a [`nic::Nic`], a real AF_XDP socket or none at all. A third kind
//! ([`cable`]) joins two guests of the process.
//!
//! Invariants: no module in here imports one of `control`; nothing here blocks, logs or takes a
//! lock while frames move; each loss has a counter of its own in [`counters`].

pub(crate) mod cable;
pub(crate) mod call;
pub(crate) mod copy;
pub(crate) mod copy_bytes;
pub(crate) mod counters;
pub(crate) mod direct;
pub(crate) mod guest;
pub(crate) mod in_flight;
pub(crate) mod lane;
#[cfg(test)]
mod long_chains_tests;
pub(crate) mod nic;
pub(crate) mod null;
pub(crate) mod offloads;
#[cfg(test)]
mod pieces_tests;
pub(crate) mod progress;
pub(crate) mod received;
pub(crate) mod resident;
pub(crate) mod spill;
pub(crate) mod super_frame;
#[cfg(test)]
mod test_guest;
#[cfg(test)]
pub(crate) mod test_nic;
pub(crate) mod worker;
pub(crate) mod xdp;
