//! The data path: frames between guests and NIC queues.
//!
//! All code that touches a frame. A [`lane::Lane`] joins a guest's queue pair with a NIC queue, another guest, or a
//! network. One [`worker`] thread owns it; control reaches it only by messages to that thread.
//!
//! Invariants: nothing here imports control modules (`port`, `vhost_user`, `api`); nothing here blocks, logs or takes a
//! lock while frames move; each loss has a counter of its own ([`device::counters`]).

#[cfg(test)]
mod answer_tests;
#[cfg(test)]
mod any_order_tests;
pub(crate) mod arrivals;
mod bucket;
pub(crate) mod bytes;
pub(crate) mod capture;
pub(crate) mod checksums;
mod copies;
mod cross_worker_mark;
#[cfg(test)]
mod fairness_tests;
pub(crate) mod fdb;
mod fdb_key;
pub(crate) mod filter;
pub(crate) mod flows;
pub(crate) mod forwarding;
pub(crate) mod from_guest;
pub(crate) mod from_tap;
pub(crate) mod gso;
pub(crate) mod guard;
pub(crate) mod guest_frame;
pub(crate) mod inner_queue;
pub(crate) mod lane;
mod lane_id;
pub(crate) mod learned;
pub(crate) mod limits;
pub(crate) mod link;
#[cfg(test)]
mod long_chains_tests;
mod metadata_reader;
mod moderation;
pub(crate) mod multicast_lane;
#[cfg(test)]
mod network_tests;
pub(crate) mod new_lane;
#[cfg(test)]
mod no_allocation_tests;
pub(crate) mod own_queue;
pub(crate) mod passing;
pub(crate) mod pending;
#[cfg(test)]
mod pieces_tests;
#[cfg(test)]
mod policy_tests;
pub(crate) mod polling;
pub(crate) mod port_lane;
pub(crate) mod progress;
pub(crate) mod rate_limit;
pub(crate) mod readings;
pub(crate) mod receiver;
mod retag;
pub(crate) mod role;
mod segmenter;
mod sleeping;
mod slots;
mod spread;
pub(crate) mod statistics;
#[cfg(test)]
mod stop_tests;
mod tap_frame;
pub(crate) mod tap_lane;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_guest;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_lanes;
#[cfg(test)]
pub(crate) mod test_nic;
#[cfg(test)]
pub(crate) mod test_siblings;
pub(crate) mod to_guest;
pub(crate) mod to_nic;
pub(crate) mod to_tap;
#[cfg(test)]
mod unexpected_completion_tests;
pub(crate) mod uplink_lane;
pub(crate) mod vlans;
pub(crate) mod worker;
mod worker_time;
pub(crate) mod workers;
