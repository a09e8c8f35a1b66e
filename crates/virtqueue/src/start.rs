//! How a queue starts: its features, its position, and what it records.

use std::sync::Arc;

use crate::inflight::InflightQueue;
use crate::log::DirtyLog;

/// The negotiated features that concern the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueFeatures {
    /// VIRTIO_F_EVENT_IDX (29).
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC (28). Without it an indirect descriptor is a fault.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER (35). Even without it the caller must return chains in the order of
    /// [`Queue::pop`](crate::Queue::pop), unless [`Queue::takes_any_order`](crate::Queue::takes_any_order).
    pub in_order: bool,
    /// VIRTIO_F_RING_PACKED (34).
    pub packed: bool,
}

/// Where a queue starts, and what it records.
#[derive(Debug, Default)]
pub struct QueueStart {
    /// The next chain to take, in the form of VHOST_USER_SET_VRING_BASE.
    ///
    /// Split ring: bits 0 to 15 are the index in the available ring. The next used element goes to used.idx
    /// as it is in memory, as in Linux's vhost. After a clean stop the two agree.
    ///
    /// Packed ring: bits 0 to 14 are the slot to be taken next and bit 15 its wrap counter; bits 16 to 31 are
    /// the same for the slot to be used next. If the position found in the ring differs, as it does after a
    /// predecessor died, the ring's is used.
    pub base: u32,
    /// How the queue records chains in flight for a successor.
    pub journal: Journal,
    /// The dirty log for writes to the ring, during a migration.
    pub log: Option<Arc<DirtyLog>>,
}

impl QueueStart {
    /// From `base`, with no journal and no log.
    #[must_use]
    pub fn at(base: u32) -> Self {
        Self {
            base,
            ..Self::default()
        }
    }
}

/// Records of the chains in flight, for the successor of a device that dies.
#[derive(Debug, Default)]
pub enum Journal {
    /// No records: a successor continues after the last used element.
    #[default]
    None,
    /// In the ring itself, where only the device writes, so that a successor knows which chains it must not do again.
    /// In a split ring, for which the base must be used.idx, `avail_event` is the end of the chains taken, with one
    /// store per batch. In a packed ring the first descriptor of each chain gets the reserved flag `1 << 8`.
    Ring,
    /// In memory that the VMM keeps (vhost-user, "Inflight I/O tracking"). The base is a fallback for packed rings.
    Inflight(InflightQueue),
}
