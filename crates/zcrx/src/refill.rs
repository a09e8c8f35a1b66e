//! The refill ring: returns buffers to an instance of zcrx.
//!
//! # Theory of operation
//!
//! A ring of `entries` (a power of two) and two free-running 32-bit counters in memory that the kernel maps, too. We
//! write entries and advance the tail (release), the kernel reads them and advances the head; its side is
//! `io_zcrx_ring_refill` and `zcrx_flush_rq`, `io_uring/zcrx.c`. The registration returns where head, tail and
//! entries are.
//!
//! The kernel takes entries when a NIC needs buffers, and when the application requests it (a flush). If it has not
//! taken enough, the ring is full; entries that do not fit are kept in `waiting`, which is normally empty.
//!
//! One ring may serve several receivers of this process, so it is behind a lock; it is held for one batch, and pieces
//! that are dropped do not take it.
//!
//! Invariants: **F1** `head`, `tail` and `entries` point into `memory`, aligned, for `mask + 1` entries: `new`
//! checked it against the kernel's answer; **F2** only the holder of `&mut` writes.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use xsk::UmemMemory;

use crate::abi::{Offsets, RefillEntry};

/// The ring's arithmetic: where the next entry is written, and how much room there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    /// The tail that is ours to advance.
    pub(crate) tail: u32,
    pub(crate) mask: u32,
}

impl Cursor {
    /// How many entries can be written; none if the kernel's head makes no sense.
    pub(crate) fn room(self, head: u32) -> u32 {
        let used = self.tail.wrapping_sub(head);
        (self.mask + 1).saturating_sub(used)
    }

    /// The slot of the next entry.
    pub(crate) fn slot(self) -> usize {
        (self.tail & self.mask) as usize
    }
}

/// The producer of a refill ring.
pub(crate) struct RefillRing {
    head: NonNull<AtomicU32>,
    tail: NonNull<AtomicU32>,
    entries: NonNull<RefillEntry>,
    cursor: Cursor,
    /// The kernel's head when it was last read.
    seen_head: u32,
    /// The area's token: the upper bits of each entry's offset.
    token: u64,
    /// The kernel counts what it copies.
    counters: bool,
    /// Offsets without room in the ring, and how often each is returned.
    waiting: Vec<(u64, u32)>,
    /// Entries since the last flush.
    pub(crate) unflushed: u32,
    memory: Arc<dyn UmemMemory>,
}

// SAFETY: the pointers stand for memory that `memory` (Send + Sync) keeps mapped (F1).
unsafe impl Send for RefillRing {}

impl RefillRing {
    /// `None` if the parts are not inside the memory, or not aligned.
    pub(crate) fn new(
        memory: Arc<dyn UmemMemory>,
        offsets: Offsets,
        entries: u32,
        token: u64,
        counters: bool,
    ) -> Option<Self> {
        if !entries.is_power_of_two() {
            return None;
        }
        let head: NonNull<AtomicU32> = part(&*memory, offsets.head, size_of::<u32>())?.cast();
        let tail: NonNull<AtomicU32> = part(&*memory, offsets.tail, size_of::<u32>())?.cast();
        let bytes = (entries as usize).checked_mul(size_of::<RefillEntry>())?;
        let slots = part(&*memory, offsets.entries, bytes)?.cast::<RefillEntry>();
        if !(head.is_aligned() && tail.is_aligned() && slots.is_aligned()) {
            return None;
        }
        let mut ring = Self {
            head,
            tail,
            entries: slots,
            cursor: Cursor {
                tail: 0,
                mask: entries - 1,
            },
            seen_head: 0,
            token,
            counters,
            waiting: Vec::new(),
            unflushed: 0,
            memory,
        };
        ring.cursor.tail = ring.load(ring.tail);
        ring.seen_head = ring.load(ring.head);
        Some(ring)
    }

    /// Copies of the kernel into the area, their number and bytes: two words at the end of the memory, if it counts.
    pub(crate) fn copies(&self) -> Option<(u64, u64)> {
        let word = |offset: u32| {
            let word = part(&*self.memory, offset, size_of::<u64>())?.cast::<AtomicU64>();
            // SAFETY: inside the memory; `counters_at` is a multiple of 64.
            Some(unsafe { word.as_ref() }.load(Ordering::Relaxed))
        };
        let counters = self.counters.then(|| counters_at(self.memory.len()))?;
        Some((word(counters)?, word(counters + 8)?))
    }

    /// Whether the kernel counts what it copies.
    pub(crate) fn has_counters(&self) -> bool {
        self.counters
    }

    pub(crate) fn memory(&self) -> &Arc<dyn UmemMemory> {
        &self.memory
    }

    pub(crate) fn entries(&self) -> u32 {
        self.cursor.mask + 1
    }

    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    fn load(&self, counter: NonNull<AtomicU32>) -> u32 {
        // SAFETY: F1; atomic, as the kernel writes it.
        unsafe { counter.as_ref() }.load(Ordering::Acquire)
    }

    /// Gives a buffer back, `count` times. What does not fit waits for [`publish`](Self::publish).
    pub(crate) fn push(&mut self, offset: u64, count: u32) {
        let done = match self.waiting.is_empty() {
            true => self.write(offset, count),
            false => 0,
        };
        if done < count {
            self.waiting.push((offset, count - done));
        }
    }

    /// Writes as many entries as there is room for, and returns how many.
    fn write(&mut self, offset: u64, count: u32) -> u32 {
        if self.cursor.room(self.seen_head) < count {
            // Acquire: the kernel has read what it gave up. Pairs with smp_store_release of `ring->head`.
            self.seen_head = self.load(self.head);
        }
        let count = count.min(self.cursor.room(self.seen_head));
        for _ in 0..count {
            let entry = RefillEntry {
                offset: offset | self.token,
                ..RefillEntry::default()
            };
            // SAFETY: a masked slot (F1) that the kernel has given up.
            unsafe { self.entries.add(self.cursor.slot()).write(entry) };
            self.cursor.tail = self.cursor.tail.wrapping_add(1);
        }
        self.unflushed = self.unflushed.saturating_add(count);
        count
    }

    /// Writes waiting entries, if there is room, and publishes all to the kernel. True if none waits any more.
    pub(crate) fn publish(&mut self) -> bool {
        while let Some((offset, count)) = self.waiting.pop() {
            let done = self.write(offset, count);
            if done < count {
                self.waiting.push((offset, count - done));
                break;
            }
        }
        // SAFETY: F1, F2. Release: the entries are there. Pairs with smp_load_acquire in `zcrx_rq_entries`.
        unsafe { self.tail.as_ref() }.store(self.cursor.tail, Ordering::Release);
        self.waiting.is_empty()
    }
}

/// Where the kernel counts what it copies, in memory of so many bytes that is whole pages: at its end.
pub(crate) fn counters_at(len: usize) -> u32 {
    u32::try_from(len.saturating_sub(64)).unwrap_or(0)
}

fn part(memory: &dyn UmemMemory, offset: u32, bytes: usize) -> Option<NonNull<u8>> {
    let end = (offset as usize).checked_add(bytes)?;
    // SAFETY: offset <= end <= len of the memory.
    (end <= memory.len()).then(|| unsafe { memory.base().add(offset as usize) })
}

#[cfg(test)]
#[path = "refill_tests.rs"]
mod tests;
