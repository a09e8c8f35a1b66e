//! Kicks and calls of the packed ring: publication and sleep, the same for both sides.
//!
//! Theory of operation: as in `notify.rs`, with other words. There is no idx: a side publishes by the flags of the
//! first descriptor of a batch, and the other side polls only those. The request (`EventSuppression`) is one structure of 32
//! bits for each side (VirtIO 1.3, 2.8.10 and 2.8.14): never, always, or with VIRTIO_F_EVENT_IDX when a given slot
//! of a given lap is published. It is loaded and stored as a whole, so that slot and mode always belong together.
//!
//! ```text
//!     publisher                          sleeper
//!     store flags         (Release)      store wish           (Relaxed)
//!     fence               (SeqCst)  <->  fence                (SeqCst)
//!     load wish           (Relaxed)      load flags           (Acquire)
//!     wake, if wanted                    sleep, if nothing new
//! ```
//!
//! Both sides do the same with the roles changed, so the functions here serve the device and the driver model.

use std::sync::atomic::Ordering;

use crate::QueueSize;
use crate::cell::Cell;
use crate::notify::crosses;
use crate::position::Position;

/// Values of the flags in bits 16 and 17 (2.8.10); 3 is reserved.
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const DESC: u16 = 2;

/// An event suppression structure as one value: slot and wrap counter in bits 0 to 15, flags in 16 to 31.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventSuppression(pub(crate) u32);

impl EventSuppression {
    /// Notify for every publication.
    pub(crate) const ALWAYS: Self = Self::new(0, ENABLE);
    /// Never notify.
    pub(crate) const NEVER: Self = Self::new(0, DISABLE);

    const fn new(position: u16, flags: u16) -> Self {
        Self(position as u32 | (flags as u32) << 16)
    }

    /// Notify when the slot at `position` is published.
    pub(crate) const fn at(position: Position) -> Self {
        Self::new(position.to_bits(), DESC)
    }

    /// Whether publishing `slots` slots that end before `end` must notify. A reserved value notifies: the
    /// driver's mistake then costs a call instead of a stall.
    #[inline(always)]
    pub(crate) fn wants(self, end: Position, slots: u16, size: QueueSize, event_idx: bool) -> bool {
        match (self.0 >> 16) as u16 & 3 {
            DISABLE => false,
            DESC if event_idx => {
                let event = Position::from_bits(self.0 as u16);
                // Relative to the start of the lap of `end`. A slot with the other wrap counter counts as one
                // of the previous lap: if it was one of the next lap, it is computed as so far before the start
                // of this lap that no publication reaches it.
                let at = if event.wrap == end.wrap {
                    event.offset
                } else {
                    event.offset.wrapping_sub(size.get())
                };
                crosses(at, end.offset, end.offset.wrapping_sub(slots))
            }
            _ => true,
        }
    }
}

/// Slots to be published together.
pub(crate) struct Batch<'a, D> {
    /// The second word of the first slot, and the value to store there.
    pub(crate) first: &'a D,
    pub(crate) word: u64,
    /// The slot after the last one, the number of slots, and the size of the ring.
    pub(crate) end: Position,
    pub(crate) slots: u16,
    pub(crate) size: QueueSize,
}

/// Publishes a batch by storing the word of its first descriptor. Returns whether the other side requests a
/// notification in `wish`.
#[inline(always)]
pub(crate) fn publish<D: Cell<u64>, E: Cell<u32>>(batch: &Batch<'_, D>, wish: &E, event_idx: bool) -> bool {
    // Publishes the whole batch, and what was written to its buffers. Pairs with the other side's acquire
    // load of these flags: for a used descriptor the driver's read barrier after it found it used (2.8.22;
    // virtio_rmb in virtqueue_get_buf_ctx_packed, drivers/virtio/virtio_ring.c). Without it the driver reads
    // descriptors and frames before they are written.
    batch.first.store(batch.word, Ordering::Release);
    // Orders that store before the load below. Pairs with the fence in `enable` (2.8.10; virtio_mb in
    // virtqueue_enable_cb_prepare_packed and virtqueue_kick_prepare_packed). Without it: a lost call or kick.
    D::fence(Ordering::SeqCst);
    EventSuppression(wish.load(Ordering::Relaxed)).wants(batch.end, batch.slots, batch.size, event_idx)
}

/// Requests a notification when the slot at `next` is published. Returns the present second word of that
/// slot: the caller must not sleep if it is published already.
#[inline(always)]
pub(crate) fn enable<D: Cell<u64>, E: Cell<u32>>(wish: &E, next: Position, slot: &D, event_idx: bool) -> u64 {
    let asked = if event_idx {
        EventSuppression::at(next)
    } else {
        EventSuppression::ALWAYS
    };
    wish.store(asked.0, Ordering::Relaxed);
    // Orders that store before the load below; pairs with the fence in `publish`. Without it: a lost kick or
    // call.
    E::fence(Ordering::SeqCst);
    slot.load(Ordering::Acquire)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u16, wrap: bool) -> Position {
        Position { offset, wrap }
    }

    fn wants(event: Position, end: Position, slots: u16) -> bool {
        let size = QueueSize::packed(10).unwrap();
        EventSuppression::at(event).wants(end, slots, size, true)
    }

    #[test]
    fn event_is_crossed_only_by_its_own_slot() {
        assert!(wants(at(5, true), at(6, true), 1));
        assert!(wants(at(5, true), at(9, true), 7));
        assert!(!wants(at(5, true), at(5, true), 3), "slot 5 is not yet published");
        assert!(!wants(at(5, true), at(9, true), 3), "slot 5 was published before");
        assert!(!wants(at(5, false), at(6, true), 1), "slot 5 of the lap before");
    }

    #[test]
    fn event_is_crossed_over_the_end_of_the_ring() {
        assert!(wants(at(9, true), at(0, false), 1));
        assert!(wants(at(9, true), at(2, false), 3));
        assert!(wants(at(1, false), at(2, false), 3));
        assert!(!wants(at(2, false), at(2, false), 3));
        assert!(!wants(at(3, false), at(5, true), 10), "ahead, in the next lap");
        assert!(wants(at(5, true), at(5, false), 10), "a whole lap at once");
    }

    #[test]
    fn modes_are_those_of_the_specification() {
        let (end, size) = (Position::START, QueueSize::packed(10).unwrap());
        assert!(EventSuppression(0).wants(end, 1, size, true));
        assert!(!EventSuppression(1 << 16).wants(end, 1, size, true));
        assert!(
            EventSuppression(2 << 16).wants(end, 1, size, false),
            "not negotiated: on"
        );
        assert!(
            EventSuppression(3 << 16).wants(end, 1, size, true),
            "reserved: on"
        );
        assert_eq!(EventSuppression::at(end).0, 0x0002_8000);
    }
}

#[cfg(all(test, loom))]
#[path = "tests/packed_loom.rs"]
mod loom_model;
