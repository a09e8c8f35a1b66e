//! The ring behind all four AF_XDP rings: one side produces, the other consumes, and each has a counter.
//!
//! # Theory of operation
//!
//! A ring is `size` slots (a power of two) and two free-running 32-bit counters. Slot `n & (size - 1)` belongs to the
//! consumer while `consumer <= n < producer` (modulo 2^32), else to the producer. Each counter has one writer. This
//! process is the producer of fill and tx ([`Producer`]) and the consumer of rx and completion ([`Consumer`]); the
//! kernel's side is `net/xdp/xsk_queue.h`, whose letters (A to D in the comment at its head) are used below:
//!
//! ```text
//!    producer                               consumer
//!      read consumer counter   (A)            read producer counter   (C)
//!      write slots             (B: release)   read slots              (D: release)
//!      advance producer counter               advance consumer counter
//! ```
//!
//! Each side keeps a copy of the other's counter and reads the shared one only when the copy does not suffice. It
//! advances its own once per batch. So an entry costs one slot access, and a batch one or two cache-line transfers.
//!
//! Invariants:
//!  - **R1** the pointers of [`Shared`] stay valid while `owner` exists: they point into its ring mapping (or
//!    heap ring);
//!  - **R2** `slots` has `mask + 1` entries, and every access is masked;
//!  - **R3** slots `next..limit` of a producer, and of a consumer, belong to us: `limit` is only ever derived from
//!    the peer's counter, read with acquire;
//!  - **R4** there is one `Producer` or `Consumer` per ring, and its methods take `&mut self`: one thread at a time.
//!
//! The peer's counters need no check: a wrong one cannot make an access leave the ring (R2).
//!
//! The loom model of this file is in `tests/ring_loom.rs`.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell as Slot,
    sync::atomic::{AtomicU32, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::codec::AddressCodec;
#[cfg(not(loom))]
use crate::sys::{Mapping, RingOffsets};

/// A value that is passed to the kernel through a ring, with its ownership.
pub trait ToKernel {
    /// Its form in the ring.
    type Entry: Copy + Debug + Default;
    /// Its ring entry.
    fn into_entry(self, codec: AddressCodec) -> Self::Entry;
}

/// A value that the kernel passes back through a ring.
pub trait FromKernel {
    /// Its form in the ring.
    type Entry: Copy + Debug + Default;
    /// The value of a ring entry.
    fn from_entry(entry: Self::Entry, codec: AddressCodec) -> Self;
}

/// The flag in a ring's `flags` word by which the kernel requests to be woken (`XDP_RING_NEED_WAKEUP`).
pub(crate) const NEED_WAKEUP: u32 = 1;

/// One slot of a ring, with the closure interface of loom's cell, so that the same code runs under both.
#[cfg(not(loom))]
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Slot<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> Slot<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// A ring in ordinary memory: replaces a ring that a socket does not have, and the kernel's in tests.
#[derive(Debug)]
pub(crate) struct Heap<T> {
    pub(crate) producer: AtomicU32,
    pub(crate) consumer: AtomicU32,
    pub(crate) flags: AtomicU32,
    pub(crate) slots: Box<[Slot<T>]>,
}

// SAFETY: slots are reached only through the ring protocol (R3), counters and flags are atomic.
unsafe impl<T: Send> Send for Heap<T> {}
// SAFETY: as above; this is what the loom model checks.
unsafe impl<T: Send> Sync for Heap<T> {}

impl<T: Copy + Default> Heap<T> {
    /// A ring of `size` entries, 0 or a power of two. With 0 it is always full and always empty.
    pub(crate) fn new(size: u32) -> Arc<Self> {
        Arc::new(Self {
            producer: AtomicU32::new(0),
            consumer: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            slots: (0..size.max(1)).map(|_| Slot::new(T::default())).collect(),
        })
    }
}

/// Owner of the ring's memory: a mapping, or a ring on the heap.
#[derive(Debug)]
enum Owner<T> {
    #[cfg(not(loom))]
    Mapping(#[expect(dead_code, reason = "held for its Drop, which unmaps")] Mapping),
    Heap(#[expect(dead_code, reason = "held for its Drop, which frees")] Arc<Heap<T>>),
}

/// Pointers to a ring's parts.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    slots: NonNull<Slot<T>>,
    mask: u32,
    size: u32,
    _owner: Owner<T>,
}

// SAFETY: the pointers lead to memory that `_owner`, which moves along, keeps (R1); a mapping can be used and
// unmapped from any thread. Entries are plain values.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T: Copy + Default> Shared<T> {
    #[cfg(not(loom))]
    pub(crate) fn mapped(mapping: Mapping, offsets: &RingOffsets, size: u32) -> Self {
        Self {
            producer: mapping.part(offsets.producer, 1),
            consumer: mapping.part(offsets.consumer, 1),
            flags: mapping.part(offsets.flags, 1),
            slots: mapping.part(offsets.slots, size),
            mask: size - 1,
            size,
            _owner: Owner::Mapping(mapping),
        }
    }

    /// A ring with no entries, for a socket that only sends or only receives.
    #[cfg(not(loom))]
    pub(crate) fn absent() -> Self {
        Self::heap(Heap::new(0), 0)
    }

    pub(crate) fn heap(heap: Arc<Heap<T>>, size: u32) -> Self {
        Self {
            producer: NonNull::from(&heap.producer),
            consumer: NonNull::from(&heap.consumer),
            flags: NonNull::from(&heap.flags),
            slots: NonNull::from(&heap.slots[0]),
            mask: size.saturating_sub(1),
            size,
            _owner: Owner::Heap(heap),
        }
    }
}

impl<T: Copy> Shared<T> {
    #[inline(always)]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: R1; the kernel only ever accesses the word atomically too.
        unsafe { self.producer.as_ref() }
    }

    #[inline(always)]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: R1; as above.
        unsafe { self.consumer.as_ref() }
    }

    #[inline(always)]
    fn flags(&self) -> &AtomicU32 {
        // SAFETY: R1; as above.
        unsafe { self.flags.as_ref() }
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> &Slot<T> {
        // SAFETY: R1 and R2: the masked index is below the number of slots.
        unsafe { self.slots.add((index & self.mask) as usize).as_ref() }
    }

    /// Whether the peer requests to be woken.
    #[inline]
    fn needs_wakeup(&self) -> bool {
        // Orders the store to the producer counter (or, for rx, nothing) before the load of the flag. Pairs with the
        // kernel side that sets the flag and then checks the ring once more (xsk_set_tx_need_wakeup and
        // xsk_set_rx_need_wakeup, net/xdp/xsk.c, called by drivers at the end of their poll). On every architecture,
        // x86 included, a later load may overtake a release store. Without the fence we could read "awake" although
        // the driver is going to sleep, and the driver could read our old counter: both would wait.
        fence(Ordering::SeqCst);
        // Relaxed: the flag guards no data.
        self.flags().load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

/// Our side of a ring that we fill: [`FillRing`](crate::FillRing) and [`TxRing`](crate::TxRing).
#[derive(Debug)]
pub struct Producer<T: ToKernel> {
    shared: Shared<T::Entry>,
    codec: AddressCodec,
    /// The first slot not yet published; equals the shared producer counter between batches.
    next: u32,
    /// The first slot that is not known to be free: the consumer counter as last read, plus the size.
    limit: u32,
}

impl<T: ToKernel> Producer<T> {
    pub(crate) fn new(shared: Shared<T::Entry>, codec: AddressCodec) -> Self {
        // Relaxed: we are the only writer of this counter (R4).
        let next = shared.producer().load(Ordering::Relaxed);
        let mut ring = Self {
            shared,
            codec,
            next,
            limit: 0,
        };
        ring.limit = ring.read_limit();
        ring
    }

    #[inline]
    fn read_limit(&self) -> u32 {
        // (A) Observes that the kernel is done with the slots before the counter; pairs with the
        // smp_store_release(consumer) in __xskq_cons_release. Without it our slot writes could overtake its reads.
        self.shared
            .consumer()
            .load(Ordering::Acquire)
            .wrapping_add(self.shared.size)
    }

    /// The number of free entries now. (Always reads the kernel's counter, unlike
    /// [`reserve`](Self::reserve).)
    #[inline]
    pub fn free(&self) -> u32 {
        self.read_limit().wrapping_sub(self.next)
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    /// Whether the kernel waits for a wake-up after new entries: then call [`Socket::wake_rx`](crate::Socket::wake_rx)
    /// for the fill ring (or poll), [`Socket::kick_tx`](crate::Socket::kick_tx) for the tx ring. Call this after
    /// submitting.
    ///
    /// For the fill ring call it again before going to sleep: not all drivers check it once more after they
    /// have set the flag. For the tx ring the answer is always yes in copy mode.
    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        self.shared.needs_wakeup()
    }

    /// Reserves up to `wanted` entries, fewer if fewer are free.
    #[inline]
    pub fn reserve(&mut self, wanted: u32) -> Reserved<'_, T> {
        if self.limit.wrapping_sub(self.next) < wanted {
            self.limit = self.read_limit();
        }
        let granted = self.limit.wrapping_sub(self.next).min(wanted);
        Reserved {
            codec: self.codec,
            pos: self.next,
            end: self.next.wrapping_add(granted),
            ring: self,
        }
    }
}

/// Reserved entries: fill them with [`push`](Self::push). Pushed entries go to the kernel on
/// [`submit`](Self::submit) or drop, and the rest stays free.
///
/// End a batch of the tx ring with a whole frame: the kernel does not send an unfinished one before its last piece.
#[derive(Debug)]
#[must_use = "a batch that is dropped at once submits nothing"]
pub struct Reserved<'a, T: ToKernel> {
    ring: &'a mut Producer<T>,
    codec: AddressCodec,
    pos: u32,
    end: u32,
}

impl<T: ToKernel> Reserved<'_, T> {
    /// How many more entries may be pushed.
    #[inline]
    pub fn room(&self) -> u32 {
        self.end.wrapping_sub(self.pos)
    }

    /// Passes a frame, or a piece of one, to the kernel. For a frame of the fill ring, received bytes start
    /// after the headroom and [`XDP_PACKET_HEADROOM`](crate::XDP_PACKET_HEADROOM).
    ///
    /// # Panics
    /// If there is no [`room`](Self::room): the caller pushes more than was granted.
    #[inline]
    pub fn push(&mut self, value: T) {
        assert!(self.pos != self.end, "pushed more entries than were reserved");
        let entry = value.into_entry(self.codec);
        self.ring.shared.slot(self.pos).with_mut(|slot| {
            // SAFETY: pos is in next..limit, so the slot is this side's (R3) and no other thread of this side is here
            // (R4).
            unsafe { slot.write(entry) }
        });
        self.pos = self.pos.wrapping_add(1);
    }

    /// Publishes the pushed entries; returns how many.
    #[inline]
    pub fn submit(self) -> u32 {
        self.pos.wrapping_sub(self.ring.next)
    }
}

impl<T: ToKernel> Drop for Reserved<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.pos == self.ring.next {
            return;
        }
        self.ring.next = self.pos;
        // (B) Publishes the slots written above; pairs with the smp_load_acquire(producer) in __xskq_cons_peek.
        // Without it the kernel could see the counter before the entries and take stale addresses.
        self.ring.shared.producer().store(self.pos, Ordering::Release);
    }
}

/// Our side of a ring that we empty: [`RxRing`](crate::RxRing) and [`CompletionRing`](crate::CompletionRing).
#[derive(Debug)]
pub struct Consumer<T: FromKernel> {
    shared: Shared<T::Entry>,
    codec: AddressCodec,
    /// The first slot not yet released; equals the shared consumer counter between batches.
    next: u32,
    /// The first slot that is not known to be filled: the producer counter as last read.
    limit: u32,
}

impl<T: FromKernel> Consumer<T> {
    pub(crate) fn new(shared: Shared<T::Entry>, codec: AddressCodec) -> Self {
        // Relaxed: we are the only writer of this counter (R4).
        let next = shared.consumer().load(Ordering::Relaxed);
        Self {
            shared,
            codec,
            next,
            limit: next,
        }
    }

    #[inline]
    fn read_limit(&self) -> u32 {
        // (C) Observes the entries before the counter; pairs with the smp_store_release(producer) in
        // __xskq_prod_submit. Without it we could read slots from before the kernel wrote them.
        self.shared.producer().load(Ordering::Acquire)
    }

    /// The number of entries that can be read now.
    #[inline]
    pub fn available(&self) -> u32 {
        self.read_limit().wrapping_sub(self.next)
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    /// Takes up to `wanted` entries, fewer if there are fewer.
    #[inline]
    pub fn peek(&mut self, wanted: u32) -> Taken<'_, T> {
        if self.limit.wrapping_sub(self.next) < wanted {
            self.limit = self.read_limit();
        }
        let granted = self.limit.wrapping_sub(self.next).min(wanted);
        let start = self.next;
        // All are claimed now, and unread ones are returned on drop: a batch that is forgotten (mem::forget) loses
        // entries, but never allows one to be read twice.
        self.next = start.wrapping_add(granted);
        Taken {
            codec: self.codec,
            pos: start,
            end: self.next,
            start,
            ring: self,
        }
    }
}

/// Taken entries, an iterator; dropping releases the slots of those that were read, the others stay in the ring.
#[derive(Debug)]
#[must_use]
pub struct Taken<'a, T: FromKernel> {
    ring: &'a mut Consumer<T>,
    codec: AddressCodec,
    start: u32,
    pos: u32,
    end: u32,
}

impl<T: FromKernel> Iterator for Taken<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        if self.pos == self.end {
            return None;
        }
        let entry = self.ring.shared.slot(self.pos).with(|slot| {
            // SAFETY: pos is in next..limit, so the kernel has filled the slot and left it to us (R3, R4).
            unsafe { slot.read() }
        });
        self.pos = self.pos.wrapping_add(1);
        Some(T::from_entry(entry, self.codec))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end.wrapping_sub(self.pos) as usize;
        (left, Some(left))
    }
}

impl<T: FromKernel> ExactSizeIterator for Taken<'_, T> {}

impl<T: FromKernel> Drop for Taken<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.ring.next = self.pos;
        if self.pos == self.start {
            return;
        }
        // (D) Releases the slots read above; pairs with the load of the consumer counter in xskq_prod_nb_free, whose
        // control dependency orders the kernel's writes after it. Without it the kernel could overwrite a slot before
        // it is read here.
        self.ring.shared.consumer().store(self.pos, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "ring_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "tests/ring_loom.rs"]
mod loom_model;
