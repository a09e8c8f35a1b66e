//! A connection's lease of a queue for io_uring zero-copy receive.

use crate::protocol::ZcrxWanted;

/// A queue of an interface, by the interface's index.
pub(super) type QueueKey = (u32, u32);

/// The queue that a connection has.
#[derive(Debug, Clone)]
pub(super) struct ZcrxLease {
    pub(super) wanted: ZcrxWanted,
    /// Of the interface; none: it is the loopback, which has no queue.
    pub(super) key: Option<QueueKey>,
    /// The policy's rule that it is charged to.
    pub(super) rule: usize,
    /// Bytes of memory that are registered, or are to be.
    pub(super) bytes: Option<u64>,
    /// Rules bring it its flows.
    pub(super) steered: bool,
}
