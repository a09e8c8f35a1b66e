//! Queues of interfaces: where they come from.
//!
//! | files | contents |
//! |---|---|
//! | [`interfaces`], [`interface`] | the interface of each port or network, and its state |
//! | [`interface_queue`], `queue_state.rs` | a queue's life: opened, lent to lanes, coupled with a guest's memory |
//! | [`interface_tap`], [`open_tap`] | tap devices: that of a port in tap mode, and those of networks |
//! | [`steering`] | program and sockets of a steward, or of the daemon's own helper |
//! | [`external`], [`afxdp_plugin`] | program, map or sockets that another process made |
//! | [`mode`], [`demand`] | why a data path is not a better one, how much memory sockets lock |
//! | [`metadata`] | XDP metadata before frames: which hints, and how they change |
//! | [`shared_memory`] | one UMEM for the queues of all ports, by option |
//! | [`numa`] | the machine's nodes, and which of them workers run on |
//!
//! The rings themselves, and their chunks, are in [`dataplane::nic`].

pub(crate) mod afxdp_plugin;
pub(crate) mod demand;
pub(crate) mod error;
pub(crate) mod external;
pub(crate) mod interface;
pub(crate) mod interface_queue;
pub(crate) mod interface_tap;
pub(crate) mod interfaces;
pub(crate) mod lane_facts;
pub(crate) mod metadata;
pub(crate) mod mode;
pub(crate) mod numa;
pub(crate) mod open_tap;
mod queue_state;
pub(crate) mod shared_memory;
pub(crate) mod steering;
pub(crate) mod wakers;
