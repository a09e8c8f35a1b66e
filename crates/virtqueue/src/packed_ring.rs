//! Loads and stores of a packed ring: the only file that knows where its bytes are.
//!
//! A descriptor is two words of 64 bits. The second holds length, id and flags, so one access reads or writes
//! all three, and the flags are never separated from the values that they mark valid.
//!
//! Invariants: the three parts lie inside the map, aligned, for as long as `memory` lives (RingLayout,
//! checked again in `new`). Slots are below the size: every [`Position`] of this crate is, from the check in
//! `packed_resume.rs` on, because `forward` and `back` keep it so. No value from the driver becomes a slot.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::cell::Cell;
use crate::crash;
use crate::layout::{self, PackedDescriptor};
use crate::position::Position;
use crate::{DirtyLog, MemoryMap, QueueSize, RingAddresses, RingError, RingLayout, RingShape};

/// The parts of a packed ring in the map.
#[derive(Debug)]
pub(crate) struct PackedRing {
    pub(crate) memory: Arc<MemoryMap>,
    desc: NonNull<AtomicU64>,
    driver_events: NonNull<AtomicU32>,
    device_events: NonNull<AtomicU32>,
    pub(crate) size: QueueSize,
    offsets: RingAddresses,
}

// SAFETY: the pointers are into `memory`, which is Send and Sync and moves along; nothing is tied to a thread.
unsafe impl Send for PackedRing {}

impl PackedRing {
    pub(crate) fn new(memory: &Arc<MemoryMap>, rings: RingLayout) -> Result<Self, RingError> {
        let shape = RingShape::new(rings.format(), rings.size());
        let offsets = RingLayout::from_offsets(memory, shape, rings.offsets())?.offsets();
        // SAFETY: from_offsets has checked that all three parts are inside the map.
        let part = |offset: u64| unsafe { memory.base().add(offset as usize) };
        Ok(Self {
            desc: part(offsets.desc).cast(),
            driver_events: part(offsets.avail).cast(),
            device_events: part(offsets.used).cast(),
            size: rings.size(),
            offsets,
            memory: Arc::clone(memory),
        })
    }

    #[inline(always)]
    fn word(&self, slot: u16, second: bool) -> &AtomicU64 {
        debug_assert!(slot < self.size.get(), "positions are inside the ring");
        // SAFETY: the slot is below the size (head of the file), so the word is inside the ring, which is
        // inside the map and 16-aligned (`new`).
        unsafe {
            self.desc
                .add(2 * usize::from(slot) + usize::from(second))
                .as_ref()
        }
    }

    /// The slots from `at` on, at most `most` and not beyond the end of the ring.
    #[inline(always)]
    pub(crate) fn run(&self, at: Position, most: usize) -> &[[AtomicU64; 2]] {
        let count = most.min(usize::from(self.size.get()).saturating_sub(at.offset.into()));
        // SAFETY: as in `word`; and `offset + count` is at most the size. Two words lie side by side without padding.
        unsafe { slice::from_raw_parts(self.desc.cast().add(at.offset.into()).as_ptr(), count) }
    }

    /// The second word of `slot`: length, id, flags.
    #[inline(always)]
    pub(crate) fn high(&self, slot: u16) -> &AtomicU64 {
        self.word(slot, true)
    }

    /// The first word of `slot` (the address), as it is now.
    #[inline(always)]
    pub(crate) fn load_low(&self, slot: u16) -> u64 {
        Cell::load(self.word(slot, false), Ordering::Relaxed)
    }

    /// Writes the second word of `slot`; a later store publishes it.
    #[inline(always)]
    pub(crate) fn store_high(&self, slot: u16, word: u64) {
        crash::point();
        Cell::store(self.high(slot), word, Ordering::Relaxed);
    }

    /// Writes the first word of `slot`, ordered after all earlier writes.
    #[inline(always)]
    pub(crate) fn store_low_after(&self, slot: u16, word: u64) {
        crash::point();
        Cell::store(self.word(slot, false), word, Ordering::Release);
    }

    /// Flags of `slot`, as they are now.
    pub(crate) fn flags(&self, slot: u16) -> u16 {
        PackedDescriptor::flags_of(Cell::load(self.high(slot), Ordering::Relaxed))
    }

    /// The descriptor at `at` if it is available: each byte read once, and nothing before the flags.
    #[inline(always)]
    pub(crate) fn read_available(&self, at: Position) -> Option<PackedDescriptor> {
        // Observes what the driver wrote before it made the descriptor available. Pairs with its write
        // barrier before the flags of the first descriptor of a batch (2.8.21.1; virtio_wmb in
        // virtqueue_add_packed, drivers/virtio/virtio_ring.c). Without it the address below, and the
        // descriptors that follow, may be those of the previous lap.
        let high = Cell::load(self.high(at.offset), Ordering::Acquire);
        let flags = PackedDescriptor::flags_of(high);
        at.is_available(flags)
            .then(|| PackedDescriptor::from_words(self.load_low(at.offset), high))
    }

    /// The second word of a slot that may be available. Load it before anything else of this or later slots.
    #[inline(always)]
    pub(crate) fn load_high(slot: &[AtomicU64; 2]) -> u64 {
        // As in `read_available`.
        Cell::load(&slot[1], Ordering::Acquire)
    }

    /// The descriptor in a slot, whose second word `high` was loaded already.
    #[inline(always)]
    pub(crate) fn load(slot: &[AtomicU64; 2], high: u64) -> PackedDescriptor {
        PackedDescriptor::from_words(Cell::load(&slot[0], Ordering::Relaxed), high)
    }

    /// The descriptor in `slot`, whatever its flags.
    pub(crate) fn read(&self, slot: u16) -> PackedDescriptor {
        let high = Cell::load(self.high(slot), Ordering::Acquire);
        PackedDescriptor::from_words(self.load_low(slot), high)
    }

    /// The driver's event suppression structure.
    #[inline(always)]
    pub(crate) fn driver_events(&self) -> &AtomicU32 {
        // SAFETY: four bytes inside the map, 4-aligned (`new`).
        unsafe { self.driver_events.as_ref() }
    }

    /// The device's event suppression structure.
    #[inline(always)]
    pub(crate) fn device_events(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.device_events.as_ref() }
    }

    /// Marks `slots` slots from `first` on as written in `log`.
    pub(crate) fn log_slots(&self, log: &DirtyLog, first: Position, slots: u16) {
        // In two parts, if they wrap around the end.
        let before_end = slots.min(self.size.get() - first.offset);
        for (slot, count) in [(first.offset, before_end), (0, slots - before_end)] {
            let at = self.offsets.desc + layout::desc_bytes(slot);
            self.memory.log(log, at, layout::desc_bytes(count));
        }
    }

    /// Marks the device's event suppression structure as written in `log`.
    pub(crate) fn log_events(&self, log: &DirtyLog) {
        self.memory.log(log, self.offsets.used, layout::EVENT_BYTES);
    }
}
