//! The virtio-net device as a guest sees it (VirtIO 1.3, 5.1), and nothing else.
//!
//! Features and what rests on them ([`features`], [`offloads`]), vrings ([`vring`]) and the queue pairs that are made of
//! them ([`pair`]), which judge each frame of the guest. Who speaks with a VMM, and where frames go, is not known here.

#![forbid(unsafe_code)]

pub mod call;
pub mod counters;
pub mod features;
pub mod offloads;
pub mod pair;
pub mod vring;
