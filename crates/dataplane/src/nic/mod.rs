//! Queues of a NIC for lanes: the rings of an AF_XDP socket or of the null NIC with their UMEM, and taps.
//!
//! | files | contents |
//! |---|---|
//! | [`queue`], [`xdp`], [`null`] | the four rings: of a socket, or of a null NIC |
//! | [`endpoint`], [`chunk_tracker`] | a queue with its UMEM; which chunks the kernel has |
//! | [`lent`] | which queues outlive a lane |
//! | [`coupled`] | a queue whose UMEM is a guest's memory |
//! | [`completion_time`] | how long the NIC keeps sent frames |
//! | [`hints`] | XDP metadata before frames: the layouts that lanes read, and hints that were seen |
//! | [`tap`] | a tap device, by its descriptor |

pub(crate) mod chunk_tracker;
pub(crate) mod completion_time;
pub mod coupled;
pub mod endpoint;
pub mod hints;
pub(crate) mod lent;
pub mod null;
pub mod queue;
pub mod tap;
pub mod xdp;

/// Entries of RX and fill ring.
pub const RECEIVE_RING: u32 = 2048;
/// Entries of TX and completion ring.
pub const SEND_RING: u32 = 1024;
