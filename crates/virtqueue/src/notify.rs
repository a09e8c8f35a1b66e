//! Kicks and calls: how each side wakes the other, and why neither sleeps while there is work.
//!
//! Theory of operation: each side publishes entries with its `idx`, and requests notifications in a second
//! word: a flag, or with VIRTIO_F_EVENT_IDX the index at which it wants one. So on either ring there are two
//! words, and each side writes one and then reads the other:
//!
//! ```text
//!     publisher                          sleeper
//!     store idx           (Release)      store event or flag  (Relaxed)
//!     fence               (SeqCst)  <->  fence                (SeqCst)
//!     load event or flag  (Relaxed)      load idx             (Acquire)
//!     wake, if wanted                    sleep, if nothing new
//! ```
//!
//! The two fences are in one total order. If the publisher's is first, the sleeper's load sees the new idx,
//! and it does not sleep; if the sleeper's is first, the publisher's load sees the request, and it wakes the
//! sleeper. Without one of the fences both loads may miss both stores (on x86, too: a store waits in the
//! store buffer while a later load completes), and the sleeper sleeps with work in the ring: a lost kick. The
//! fences are `virtio_mb` in Linux, drivers/virtio/virtio_ring.c (virtqueue_kick_prepare_split,
//! virtqueue_enable_cb_prepare_split), and `smp_mb` in drivers/vhost/vhost.c (vhost_notify,
//! vhost_enable_notify).
//!
//! The functions are generic over the atomic, so that the loom model (`tests/notify_loom.rs`) runs this code
//! itself.

use std::sync::atomic::Ordering;

use crate::cell::Cell;
use crate::layout::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};

/// The six words of a ring that are not entries.
#[derive(Debug)]
pub(crate) struct Words<'a, W> {
    /// Written by the driver.
    pub(crate) avail_flags: &'a W,
    pub(crate) avail_idx: &'a W,
    pub(crate) used_event: &'a W,
    /// Written by the device.
    pub(crate) used_flags: &'a W,
    pub(crate) used_idx: &'a W,
    pub(crate) avail_event: &'a W,
    /// VIRTIO_F_EVENT_IDX.
    pub(crate) event_idx: bool,
}

/// Added to an index in `avail_event`, it requests no kick: the driver would have to make 32,768 more entries
/// available to reach that index, and no queue has more entries.
pub(crate) const NO_KICK: u16 = 0x8000;

/// Whether entries `[old, new)` contain the one at `event`, so that publishing them must notify (2.7.7.2 and
/// 2.7.10; vring_need_event in Linux, include/uapi/linux/virtio_ring.h). `old == new` contains nothing.
#[inline(always)]
pub(crate) fn crosses(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl<W: Cell<u16>> Words<'_, W> {
    /// Device: publishes used entries `[old, new)`. Returns whether the driver wants a call.
    #[inline]
    pub(crate) fn publish_used(&self, old: u16, new: u16) -> bool {
        // Publishes the used elements below `new`, and our writes to their buffers. Pairs with the driver's
        // read barrier after its load of used.idx (2.7.14; virtio_rmb in virtqueue_get_buf). Without it the
        // driver reads elements and frames before they are written.
        self.used_idx.store(new, Ordering::Release);
        // Orders that store before the load below. Pairs with the fence in `enable_calls` of the driver; see
        // the head of this file. Without it: a lost call, and the guest's receive path stalls.
        W::fence(Ordering::SeqCst);
        if self.event_idx {
            crosses(self.used_event.load(Ordering::Relaxed), new, old)
        } else {
            self.avail_flags.load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Device: requests a kick when the entry at `event` becomes available. Returns whether the entry at
    /// `next` is available already: then a kick may never arrive, and the device must not sleep. The two
    /// differ only if entries from `next` on are known to be available.
    #[inline]
    pub(crate) fn enable_kicks(&self, event: u16, next: u16) -> bool {
        if self.event_idx {
            self.avail_event.store(event, Ordering::Relaxed);
        } else {
            self.used_flags.store(0, Ordering::Relaxed);
        }
        // Orders that store before the load below. Pairs with the driver's fence between its store of
        // avail.idx and its load of our request (2.7.13.4.1). Without it: a lost kick, and the guest's
        // transmit path stalls.
        W::fence(Ordering::SeqCst);
        self.avail_idx.load(Ordering::Acquire) != next
    }

    /// Device: requests no kick. Only a hint: one may still arrive.
    #[inline]
    pub(crate) fn disable_kicks(&self, event: u16) {
        if self.event_idx {
            self.avail_event
                .store(event.wrapping_add(NO_KICK), Ordering::Relaxed);
        } else {
            self.used_flags.store(USED_NO_NOTIFY, Ordering::Relaxed);
        }
    }
}

/// The driver's side, for the driver in this crate and the loom model.
#[cfg(any(test, feature = "driver"))]
impl<W: Cell<u16>> Words<'_, W> {
    /// Driver: publishes available entries `[old, new)`. Returns whether the device wants a kick.
    pub(crate) fn publish_avail(&self, old: u16, new: u16) -> bool {
        // Publishes descriptors and available entries (2.7.13.3.1). Pairs with the device's Acquire load of
        // avail.idx.
        self.avail_idx.store(new, Ordering::Release);
        // Pairs with the fence in `enable_kicks` (2.7.13.4.1).
        W::fence(Ordering::SeqCst);
        if self.event_idx {
            crosses(self.avail_event.load(Ordering::Relaxed), new, old)
        } else {
            self.used_flags.load(Ordering::Relaxed) & USED_NO_NOTIFY == 0
        }
    }

    /// Driver: requests a call when the used entry at `next` is published. Returns whether it already is.
    pub(crate) fn enable_calls(&self, next: u16) -> bool {
        if self.event_idx {
            self.used_event.store(next, Ordering::Relaxed);
        } else {
            self.avail_flags.store(0, Ordering::Relaxed);
        }
        // Pairs with the fence in `publish_used` (2.7.7).
        W::fence(Ordering::SeqCst);
        self.used_idx.load(Ordering::Acquire) != next
    }

    /// Driver: requests no call. Only a hint.
    pub(crate) fn disable_calls(&self, next: u16) {
        if self.event_idx {
            self.used_event.store(next.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.avail_flags.store(AVAIL_NO_INTERRUPT, Ordering::Relaxed);
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::crosses;

    #[test]
    fn event_is_crossed_only_by_its_own_entry() {
        assert!(crosses(5, 6, 5));
        assert!(crosses(5, 9, 2));
        assert!(!crosses(5, 5, 2), "entry 5 is not yet published");
        assert!(!crosses(5, 9, 6), "entry 5 was published before");
        assert!(!crosses(5, 5, 5), "nothing was published");
    }

    #[test]
    fn event_is_crossed_over_the_wrap() {
        assert!(crosses(65535, 0, 65535));
        assert!(crosses(0, 1, 65530));
        assert!(!crosses(1, 1, 65530));
    }
}

#[cfg(all(test, loom))]
#[path = "tests/notify_loom.rs"]
mod loom_model;
