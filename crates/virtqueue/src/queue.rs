//! A virtqueue of either kind, as the device sees it.
//!
//! An enum instead of a trait object: a call is one branch, predictable because it goes the same way for the
//! whole life of a queue, and the ring's code is inlined there.

use std::sync::Arc;

use crate::chain::{Chain, ChainId, Chains};
use crate::indirect::Prefetch;
use crate::log::DirtyLog;
use crate::packed::PackedQueue;
use crate::split::SplitQueue;
use crate::start::{QueueFeatures, QueueStart};
use crate::{GuestFault, MemoryMap, QueueSize, RingError, RingFormat, RingLayout};

/// Device side of one virtqueue.
#[derive(Debug)]
// The discriminant has a byte of its own: hidden in unused values of a field, it takes five instructions per
// chain to find out.
#[repr(u8)]
#[allow(clippy::large_enum_variant)] // one per queue, and no pointer to follow
pub enum Queue {
    /// VirtIO 1.3, 2.7.
    Split(SplitQueue),
    /// VirtIO 1.3, 2.8.
    Packed(PackedQueue),
    /// VirtIO 1.3, 2.6.1.
    Reset(ResetQueue),
}

/// A queue that its driver has reset: it has no ring, and reads and writes nothing.
#[derive(Debug)]
pub struct ResetQueue {
    memory: Arc<MemoryMap>,
    size: QueueSize,
    features: QueueFeatures,
    base: u32,
}

/// Forwards a call to the split or packed ring, or handles a reset queue.
macro_rules! of_either {
    ($queue:expr, $ring:ident => $call:expr, reset => $none:expr) => {
        match $queue {
            Queue::Split($ring) => $call,
            Queue::Packed($ring) => $call,
            Queue::Reset(_) => $none,
        }
    };
}

impl Queue {
    /// Takes over a ring. Kicks are enabled. The first [`publish`](Self::publish) asks for a call in any case: a
    /// predecessor may have published and then died before it called.
    ///
    /// # Errors
    /// `rings` was made for another map and does not fit this one, or for another kind of ring than was
    /// negotiated; or `start.base` is not valid for a packed ring.
    pub fn new(
        memory: &Arc<MemoryMap>,
        rings: RingLayout,
        features: QueueFeatures,
        start: QueueStart,
    ) -> Result<Self, RingError> {
        match rings.format() {
            format if format != RingFormat::of(features.packed) => Err(RingError::Format(format)),
            RingFormat::Split => SplitQueue::new(memory, rings, features, start).map(Self::Split),
            RingFormat::Packed => PackedQueue::new(memory, rings, features, start).map(Self::Packed),
        }
    }

    /// A queue that was reset at `base`: it has no chains, and requests no kicks.
    #[must_use]
    pub fn reset(memory: &Arc<MemoryMap>, size: QueueSize, features: QueueFeatures, base: u32) -> Self {
        Self::Reset(ResetQueue {
            memory: Arc::clone(memory),
            size,
            features,
            base,
        })
    }

    /// Takes up to `max` chains into `chains`, which is emptied first, and returns how many. Fewer than there are, if
    /// their buffers do not fit.
    ///
    /// # Errors
    /// The driver broke a rule. Nothing was taken then: the previous call returned the sound chains before
    /// the bad one. The queue must not be used any more.
    #[inline]
    pub fn pop(&mut self, chains: &mut Chains, max: usize) -> Result<usize, GuestFault> {
        of_either!(self, ring => ring.pop(chains, max), reset => {
            chains.clear();
            Ok(0)
        })
    }

    /// Returns the chains taken last, if no used element was written for them: the next [`pop`](Self::pop)
    /// reads them again. `slots` is the result of [`Chains::slots`] for them. Only the most recently taken
    /// chains can be returned, and no chain taken after them may be used already.
    ///
    /// # Panics
    /// In debug builds, if more are returned than the queue holds: a bug of the caller.
    #[inline]
    pub fn unpop(&mut self, slots: u16) {
        of_either!(self, ring => ring.unpop(slots), reset => ());
    }

    /// Writes a used element: the chain is done, and `len` bytes were written to its buffers. Each chain once, in the
    /// order of [`pop`](Self::pop). The driver does not see it before [`publish`](Self::publish).
    ///
    /// # Panics
    /// If the queue was reset, which has no chains; in debug builds, if more is used of a packed ring than
    /// was taken: bugs of the caller.
    #[inline(always)]
    pub fn push_used(&mut self, id: ChainId, len: u32) {
        // Runs per frame: an arm that diverges costs nothing, while one that does nothing, or a call, does.
        of_either!(self, ring => ring.push_used(id, len), reset => nothing_was_taken());
    }

    /// As [`push_used`](Self::push_used), for several chains in whose buffers nothing was written.
    #[inline(always)]
    pub fn push_all_used(&mut self, chains: &[Chain]) {
        self.push_all(chains, |_| 0);
    }

    /// As [`push_used`](Self::push_used), for several chains; the caller has stored in `writable_bytes` how many
    /// bytes it wrote.
    #[inline(always)]
    pub fn push_all_written(&mut self, chains: &[Chain]) {
        self.push_all(chains, |chain| chain.writable_bytes);
    }

    #[inline(always)]
    fn push_all(&mut self, chains: &[Chain], len: impl Fn(&Chain) -> u32) {
        of_either!(self, ring => chains.iter().for_each(|chain| ring.push_used(chain.id, len(chain))),
            reset => debug_assert!(chains.is_empty()));
    }

    /// Whether chains may be returned in another order than they were taken
    /// ([`push_used_in_any_order`](Self::push_used_in_any_order)). Two conditions: the driver did not negotiate
    /// VIRTIO_F_IN_ORDER (VirtIO 1.3, 2.7.9), and there is an inflight region, which shows a successor of a dead
    /// device which chains are in flight. The ring alone shows only how many.
    #[must_use]
    pub fn takes_any_order(&self) -> bool {
        !self.features().in_order && of_either!(self, ring => ring.notes_each_chain(), reset => false)
    }

    /// As [`push_used`](Self::push_used), for any chain in flight. Between two calls of
    /// [`publish`](Self::publish) all chains must be returned by the same one of the two functions.
    ///
    /// # Panics
    /// As [`push_used`](Self::push_used); and in debug builds, if the queue does not
    /// [take any order](Self::takes_any_order).
    #[inline]
    pub fn push_used_in_any_order(&mut self, id: ChainId, len: u32) {
        debug_assert!(self.takes_any_order(), "nobody could tell which chains are out");
        of_either!(self, ring => ring.push_used_in_any_order(id, len), reset => nothing_was_taken());
    }

    /// Makes all used elements written since the last call visible, with one store. Returns whether the
    /// driver wants a call. If there are none, returns `false` and accesses nothing.
    #[inline]
    pub fn publish(&mut self) -> bool {
        of_either!(self, ring => ring.publish(), reset => false)
    }

    /// Tells the driver that no kicks are needed while the device polls. A hint: one may still arrive.
    #[inline]
    pub fn disable_kicks(&mut self) {
        of_either!(self, ring => ring.disable_kicks(), reset => ());
    }

    /// Requests a kick for the next chain. `true`: there is one already (or an invalid index, which the next
    /// [`pop`](Self::pop) will report), so the device must not sleep.
    #[inline]
    #[must_use = "sleeping on true loses a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        of_either!(self, ring => ring.enable_kicks(), reset => false)
    }

    /// The next chain to take: the reply to VHOST_USER_GET_VRING_BASE, and the value for [`QueueStart::base`].
    #[must_use]
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
            Self::Reset(queue) => queue.base,
        }
    }

    /// How many of the first chains a predecessor had taken and not used, according to the journal.
    #[must_use]
    pub fn taken_before(&self) -> usize {
        of_either!(self, ring => ring.taken_before, reset => 0)
    }

    /// Sets what is prefetched when a chain is taken; initially [`Prefetch::Frame`].
    pub fn set_prefetch(&mut self, what: Prefetch) {
        of_either!(self, ring => ring.prefetch = what, reset => ());
    }

    /// Logs the queue's later writes to the ring in `log`; `None` stops that.
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        of_either!(self, ring => ring.log = log, reset => ());
    }

    /// Entries of the queue.
    #[must_use]
    pub fn size(&self) -> QueueSize {
        match self {
            Self::Split(ring) => ring.size,
            Self::Packed(ring) => ring.size,
            Self::Reset(queue) => queue.size,
        }
    }

    /// The negotiated features.
    #[must_use]
    pub fn features(&self) -> QueueFeatures {
        match self {
            Self::Split(ring) => ring.features,
            Self::Packed(ring) => ring.features,
            Self::Reset(queue) => queue.features,
        }
    }

    /// The memory that the ring and its buffers are in.
    #[must_use]
    pub fn memory(&self) -> &Arc<MemoryMap> {
        match self {
            Self::Split(queue) => &queue.memory,
            Self::Packed(queue) => &queue.ring.memory,
            Self::Reset(queue) => &queue.memory,
        }
    }
}

#[cold]
fn nothing_was_taken() -> ! {
    panic!("a queue that was reset has no chains to give back");
}

#[cfg(all(test, not(loom)))]
#[path = "queue_tests.rs"]
mod tests;
