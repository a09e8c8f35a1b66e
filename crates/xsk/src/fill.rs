//! The fill ring: free frames to the kernel, for it to receive into.

use crate::frame::{Frame, FramePool};
use crate::ring::{Producer, Reserved};

/// The fill ring. We produce, the kernel consumes.
#[derive(Debug)]
pub struct FillRing {
    ring: Producer<u64>,
}

impl FillRing {
    pub(crate) fn new(ring: Producer<u64>) -> Self {
        Self { ring }
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The number of free entries now. (Reads the kernel's counter: [`reserve`](Self::reserve) does so only when it must.)
    #[inline]
    pub fn free(&self) -> u32 {
        self.ring.free()
    }

    /// Reserves up to `wanted` entries, fewer if fewer are free.
    #[inline]
    pub fn reserve(&mut self, wanted: u32) -> FillBatch<'_> {
        FillBatch {
            slots: self.ring.reserve(wanted),
        }
    }

    /// Moves up to `wanted` frames from `pool` to the kernel; says how many it were.
    #[inline]
    pub fn refill(&mut self, pool: &mut FramePool, wanted: u32) -> u32 {
        let have = u32::try_from(pool.len()).unwrap_or(u32::MAX);
        let mut batch = self.reserve(wanted.min(have));
        while batch.room() > 0 {
            let Some(frame) = pool.take() else { break };
            batch.push(frame);
        }
        batch.submit()
    }

    /// Whether the kernel waits to be told of new frames: then call [`Socket::wake_rx`](crate::Socket::wake_rx), or poll.
    ///
    /// Ask after submitting. Drivers differ in whether they look at the ring once more after setting the flag, so ask
    /// again before going to sleep.
    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }
}

/// Reserved entries of the fill ring. What was pushed goes to the kernel on [`submit`](Self::submit) or drop.
#[derive(Debug)]
#[must_use = "a batch that is dropped at once submits nothing"]
pub struct FillBatch<'a> {
    slots: Reserved<'a, u64>,
}

impl FillBatch<'_> {
    /// How many more frames may be pushed.
    #[inline]
    pub fn room(&self) -> u32 {
        self.slots.room()
    }

    /// Gives a frame to the kernel. It will receive into the chunk after headroom and
    /// [`XDP_PACKET_HEADROOM`](crate::XDP_PACKET_HEADROOM).
    ///
    /// # Panics
    /// If there is no [`room`](Self::room): the caller pushes more than was granted.
    #[inline]
    pub fn push(&mut self, frame: Frame) {
        self.slots.push(frame.into_offset().get());
    }

    /// Publishes what was pushed; says how many frames that were.
    #[inline]
    pub fn submit(self) -> u32 {
        self.slots.pushed()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ring::Heap;
    use std::sync::atomic::Ordering;

    #[test]
    fn refill_takes_no_more_than_pool_and_ring_have() {
        let heap = Heap::new(4);
        let mut fill = FillRing::new(Producer::heap(heap.clone(), 4));
        let mut pool: FramePool = (0..6).map(|chunk| Frame::new(chunk * 2048)).collect();
        assert_eq!(fill.refill(&mut pool, 3), 3);
        assert_eq!(fill.refill(&mut pool, 3), 1);
        assert_eq!((pool.len(), fill.free()), (2, 0));
        heap.consumer.store(4, Ordering::Release);
        assert_eq!(fill.refill(&mut pool, 64), 2);
        assert_eq!((pool.len(), fill.free()), (0, 2));
    }
}
