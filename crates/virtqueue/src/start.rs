//! How a queue starts: its features, where it goes on, and what it notes.

use std::sync::Arc;

use crate::inflight::InflightQueue;
use crate::log::DirtyLog;

/// What was negotiated, as far as it concerns the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueFeatures {
    /// VIRTIO_F_EVENT_IDX (29).
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC (28). Without it an indirect descriptor is a fault.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER (35). The caller gives chains back in the order of [`Queue::pop`](crate::Queue::pop), whether this was
    /// negotiated or not, unless [`Queue::takes_any_order`](crate::Queue::takes_any_order).
    pub in_order: bool,
    /// VIRTIO_F_RING_PACKED (34).
    pub packed: bool,
}

/// Where a queue goes on, and what it notes down on the way.
#[derive(Debug, Default)]
pub struct QueueStart {
    /// The next chain to take, as VHOST_USER_SET_VRING_BASE says it.
    ///
    /// Of a split ring bits 0 to 15 are the index in the available ring. The next used element goes where used.idx in
    /// memory stands, as in Linux's vhost. After a clean stop the two agree.
    ///
    /// Of a packed ring bits 0 to 14 are the slot to be taken next and bit 15 its wrap counter, bits 16 to 31 the same
    /// of the slot to be used next. If the ring itself says something else, as it does after a predecessor died, the
    /// ring is believed.
    pub base: u32,
    /// How a successor is to learn what was under way.
    pub journal: Journal,
    /// Where writes to guest memory are noted, while somebody migrates it.
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

/// Notes about chains that are under way, for the successor of a device that dies.
#[derive(Debug, Default)]
pub enum Journal {
    /// None: a successor takes up where used elements end.
    #[default]
    None,
    /// In the ring itself, where only the device writes, so that a successor knows which chains it must not do again.
    /// In a split ring, for which the base must be used.idx, `avail_event` says up to where chains were taken, one
    /// store a batch. A packed ring has the flag `1 << 8`, which is reserved, in the first descriptor of each chain.
    Ring,
    /// In memory that the VMM keeps (vhost-user, "Inflight I/O tracking"). The base is not looked at.
    Inflight(InflightQueue),
}
