//! The data path: frames between guests and NIC queues.
//!
//! All code that touches a frame. A [`lane::Lane`] joins a guest's queue pair with a NIC queue, another guest, or a
//! network. One [`worker`] thread owns it; control reaches it only by messages to that thread.
//!
//! Invariants: nothing here imports control modules (`port`, `vhost_user`, `api`); nothing here blocks, logs or takes a
//! lock while frames move; each loss has a counter of its own ([`device::counters`]).

pub(crate) mod backend;
pub(crate) mod fdb;
pub(crate) mod frame;
pub(crate) mod guest;
pub(crate) mod host;
pub(crate) mod lane;
pub(crate) mod link;
pub(crate) mod policy;
pub(crate) mod port_lane;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod tests;
pub(crate) mod uplink;
pub(crate) mod worker;
