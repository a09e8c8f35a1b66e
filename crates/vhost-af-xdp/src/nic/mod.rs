//! Queues of interfaces: where they come from, and how frames go through them.
//!
//! | files | contents |
//! |---|---|
//! | [`interfaces`], [`interface`] | the interface of each port or network, and its state |
//! | [`interface_queue`], `queue_state.rs` | a queue's life: opened, lent to lanes, coupled with a guest's memory |
//! | [`interface_tap`], [`tap`] | tap devices: that of a port in tap mode, and those of networks |
//! | [`steering`] | program and sockets of a steward, or of the daemon's own helper |
//! | [`external`], [`afxdp_plugin`] | program, map or sockets that another process made |
//! | [`mode`], [`demand`] | why a data path is not a better one, how much memory sockets lock |
//! | [`queue`], [`xdp`], [`null`] | the four rings for a lane: of a socket, or of a null NIC |
//! | [`endpoint`], [`chunk_tracker`], [`lent`] | rings and UMEM together, who has which chunk, what outlives a lane |
//! | [`hints`], [`metadata`] | XDP metadata before frames: hints that were seen, layouts that lanes read |
//! | [`shared_memory`] | one UMEM for the queues of all ports, by option |
//! | [`numa`] | the machine's nodes, and which of them workers run on |

pub(crate) mod afxdp_plugin;
pub(crate) mod chunk_tracker;
pub(crate) mod completion_time;
pub(crate) mod demand;
pub(crate) mod endpoint;
pub(crate) mod error;
pub(crate) mod external;
pub(crate) mod hints;
pub(crate) mod interface;
pub(crate) mod interface_queue;
pub(crate) mod interface_tap;
pub(crate) mod interfaces;
pub(crate) mod lane_facts;
pub(crate) mod lent;
pub(crate) mod metadata;
pub(crate) mod mode;
pub(crate) mod null;
pub(crate) mod numa;
pub(crate) mod queue;
mod queue_state;
pub(crate) mod shared_memory;
pub(crate) mod steering;
pub(crate) mod tap;
pub(crate) mod wakers;
pub(crate) mod xdp;
