//! The data path: moves frames between the virtqueues of guests, AF_XDP sockets and taps.
//!
//! ```text
//!   guest A            worker (a thread)                                        kernel
//!  ┌─────────┐        ┌──────────────────────────────────────────────────────┐
//!  │ transmit ├──────▶│ PortLane of A ──▶ Route::Fdb ──┬─▶ RxQueue of B ──────┼──▶ guest B, of any worker
//!  │ receive  │◀──────┤                                ├─▶ ToTap ─────────────┼──▶ host's stack
//!  └─────────┘        │                                └─▶ NicQueue ──────────┼──▶ NIC queue of the uplink
//!                     │               Route::OwnQueue ────▶ OwnQueue ─────────┼──▶ NIC queue, the lane's own
//!                     │               Route::Cable ───────▶ the other end     │
//!                     └──────────────────────────────────────────────────────┘
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | [`worker`] | threads that poll lanes, sleep, and take commands |
//! | [`lane`] | what a worker polls ([`lane::Lane`]), and which lane gets the frames of another one |
//! | [`port_lane`] | the forwarder: the lane of a guest's queue pair, and of a tap |
//! | [`backend`] | the other side of a pair: NIC queues, and what their frames need |
//! | [`direct`] | a backend whose UMEM is guest RAM |
//! | [`nic`] | the rings of an AF_XDP socket or a null NIC, their memory, taps |
//! | [`guest`] | chains taken from a guest, and frames delivered into its buffers |
//! | [`frame`] | a frame's bytes: checksums, tags, segmentation |
//! | [`fdb`] | (VLAN, MAC) to port: table, learning, the lanes of each port |
//! | [`policy`] | source guard, filter rules, captures, rate limits |
//! | [`uplink`], [`host`] | the other lanes of a network: NIC queues, taps |
//!
//! # Ownership
//!
//! - A worker owns its lanes. A lane owns its guest's transmit queue and its own NIC queue. It shares the guest's
//!   receive queue ([`guest::rx_queue`]), an uplink's NIC queue and the writer of a tap with lanes of all workers: each
//!   has a lock, held for a run of frames ([`lane::shared`]). It reaches other lanes through [`lane::Siblings`] only.
//! - Control threads reach a worker through its mailbox ([`worker::workers::Workers`]): they add a lane, change it by a
//!   closure, and get it back whole. Work that may wait (mapping memory, binding and closing sockets) stays with them.
//! - A chunk of a UMEM is with the kernel, in the pool, or holds a received frame. [`nic::chunk_tracker`] and
//!   `direct/in_flight.rs` record which, so that a driver cannot name a chunk twice.
//! - A fault of a guest closes its lane only. A lane that finds it while it delivers to that guest reports it
//!   ([`lane::Siblings::blame`]).
//! - A worker waits for nothing but those locks, allocates nothing for a frame and logs none. Each loss has a counter
//!   (`device::counters`).
//!
//! # From the guest
//!
//! 1. `worker/mod.rs` `round`, `poll`: polls each lane that is not idle.
//! 2. `port_lane/mod.rs` `poll`; `port_lane/batch.rs` `send`, `send_batch`: continues a GSO packet, then takes a batch.
//! 3. `guest/from_guest.rs` `take`: copies descriptors of at most [`lane::limits::BATCH`] chains.
//! 4. Outside of networks: `port_lane/batch.rs` `send_to_one`. Without source guard and rules, and while a rate limit
//!    has room for the batch, one loop sends frames as long as they need only a copy: `backend/own_queue.rs`
//!    `put_plain`, or for a cable `port_lane/mod.rs` `pass_whole`. All other frames are checked one by one, each just
//!    before it is sent: `port_lane/exits.rs` `put_checked`; `port_lane/checks.rs` `check`.
//! 5. In a network: `port_lane/batch.rs` `send_by_address`, `classify_batch`, `pass_run`: reads the first bytes of each
//!    frame once, checks them, finds the destination (`port_lane/known.rs` `find`), and passes on frames of one
//!    destination together.
//!    - To a port: `port_lane/mod.rs` `to_port`, `pass_to`; `guest/passing.rs` `pass`: one copy, from RAM to RAM.
//!    - To the uplink: `port_lane/exits.rs` `leave`, `put_to_nic`; `backend/to_nic.rs` `put`, `copy`, `segment`.
//!    - To a station on another host: `port_lane/remote.rs` `to_remote`, `put_to_underlay`: behind a tunnel's headers.
//!    - To the host: `port_lane/exits.rs` `to_host`; `host/to_tap.rs` `write`.
//!    - To all: `port_lane/mod.rs` `to_multicast`; `port_lane/copies.rs` `pass_copy`.
//! 6. `port_lane/batch.rs` `settle`: returns the chains. `nic/endpoint.rs` `send`, `kick`: the kernel gets the frames.
//!
//! # To the guest
//!
//! 1. From a queue of its own: `port_lane/exits.rs` `poll_own`, `receive`; `backend/receiver.rs` `deliver`;
//!    `nic/chunk_tracker.rs` `accept`: checks each descriptor; `backend/metadata_reader.rs` `read`: reads XDP metadata;
//!    `backend/arrivals.rs` `deliver_each`: delivers each frame at once, or, if others may be merged with it, by
//!    `add_to_batch`, `deliver_batch`.
//! 2. From the uplink: `uplink/uplink_lane.rs` `receive`: queues each frame for its port, by `inbox_by_mark` if the XDP
//!    program left only the port's mark, otherwise by `take`, `sort`; `deliver`: `backend/arrivals.rs`
//!    `deliver_waiting`.
//! 3. From the host: `host/tap_lane.rs` `read`; then as frames of a guest, above.
//! 4. `guest/to_guest.rs` `fetch`, `finish`: takes buffers, fills them, writes used elements and calls the guest.
//! 5. With guest RAM as UMEM: `direct/to_guest.rs` `post_more`, `take_received`, `give_done`: the kernel gets the
//!    buffers before frames arrive; afterwards only used elements are written.

#![allow(
    rustdoc::private_intra_doc_links,
    reason = "the documentation is for readers of the code"
)]

pub mod backend;
pub mod direct;
pub mod fdb;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod guest;
pub mod host;
pub mod lane;
pub mod nic;
pub mod policy;
pub mod port_lane;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod tests;
pub mod uplink;
pub mod worker;
